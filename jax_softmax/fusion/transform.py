"""`fuse`, and the primitive that it leaves in a program: a call that is rewritten when the program is lowered.

Until then the call holds the function's jaxpr as it is, so that derivatives and batches of a fused function are those
of the function. They are calls of the same primitive: what is lowered has been differentiated.
"""

import contextlib
import enum
import functools
import inspect
import sys
import types
from collections.abc import Callable
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive, Var
from jax.interpreters import ad, batching, mlir

from jax_softmax import _private
from jax_softmax.functions import patching
from jax_softmax.fusion import calls, kernels, modules, residuals
from jax_softmax.fusion.attention import kernels as attention
from jax_softmax.fusion.expressions import is_variable
from jax_softmax.fusion.graph import edited, graph_of, has_refs, jaxprs_of, opened
from jax_softmax.fusion.report import FusionReport, Line
from jax_softmax.fusion.rewriting import has_operators, rewritten
from jax_softmax.primitives import interpreters

_P = ParamSpec("_P")
_Q = ParamSpec("_Q")
_R = TypeVar("_R")


def fuse(f: Callable[_P, _R]) -> "Fused[_P, _R]":
    """f with what stands before and after its softmaxes as a part of their kernels.

    A transformation as `jax.jit` is one, for functions of arrays, and trees of them, that use `jax.nn.softmax` and the
    like or this package's functions::

        step = jax.jit(jax_softmax.fuse(train_step))

    f is traced twice, with `jax_softmax.use()` and as it is. On a GPU casts, scales, biases, masks and other
    elementwise operations around an operator are then done by its kernel; on other platforms kernels do the operators
    alone. A call for which XLA's own fusions move fewer bytes is left to them, and where all are, the program is f as
    it is. Results are f's up to roundings.

    Fuse what is differentiated and its derivative at once, `fuse(train_step)` rather than `grad(fuse(loss))`, which
    works as well.

    Arrays, and numbers outside of `jit`, are traced as `jax.jit` does it. True and False, and within `jit` all of
    Python's numbers, are constants, as are objects of other types: `jax.jit(fuse(f), static_argnames="train")` works.

    Returns:
      A `Fused`: a function with f's signature, and with methods that say what became of it. Errors name f, its file,
      line and arguments, as those of `jax.jit` do.

    Raises:
      TypeError: f is not callable.
    """
    if not callable(f):
        raise TypeError(f"fuse: f must be a function, got {type(f).__name__}.")
    return Fused(f)


class Fused(Generic[_P, _R]):
    """What `fuse` returns: a function of the same arguments and results.

    `__wrapped__` is the function that was fused. As a method of a class it is bound as functions are.
    """

    __wrapped__: Callable[_P, _R]

    def __init__(self, f: Callable[_P, _R]) -> None:
        # An object's attributes stay its own: it may change them.
        functools.update_wrapper(self, f, updated=["__dict__"] if isinstance(f, types.FunctionType) else [])
        self._jitted = functools.lru_cache(_MOST_PROGRAMS)(_jitted)

    def __repr__(self) -> str:
        return f"fuse({self.__wrapped__!r})"

    def __reduce__(self):
        """A function of a module that is decorated is pickled by its name, as functions are."""
        module, name = sys.modules.get(getattr(self, "__module__", None)), getattr(self, "__qualname__", "")
        found = functools.reduce(lambda at, part: getattr(at, part, None), name.split("."), module)
        return name if found is self else (fuse, (self.__wrapped__,))

    def __call__(self, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        f, args, kwargs = _opened(self.__wrapped__, args, kwargs)
        if modules.has_modules((args, kwargs)):
            return modules.call(self._call, f, args, kwargs)
        return self._call(f, *args, **kwargs)

    def _call(self, g, /, *args, **kwargs):
        (args, kwargs), others, tree = _split((args, kwargs))
        if all(isinstance(leaf, _CONSTANTS) for leaf in others) and _is_hashable(tree):
            return self._jitted(g, others, tree)(*args, **kwargs)
        return _called(g, others, tree, args, kwargs)

    @overload
    def __get__(self, instance: None, owner: Any = None) -> "Fused[_P, _R]": ...
    @overload
    def __get__(self: "Fused[Concatenate[Any, _Q], _R]", instance: object, owner: Any = None) -> "Fused[_Q, _R]": ...
    def __get__(self, instance: Any, owner: Any = None) -> Any:
        if instance is None:
            return self
        bound = Fused(types.MethodType(self.__wrapped__, instance))
        bound._jitted = self._jitted
        return bound

    def trace(self, /, *args: _P.args, **kwargs: _P.kwargs) -> jax.stages.Traced:
        """`jax.jit(self).trace`: the program as it is before it is lowered."""
        return jax.jit(self).trace(*args, **kwargs)

    def lower(self, /, *args: _P.args, **kwargs: _P.kwargs) -> jax.stages.Lowered:
        """`jax.jit(self).lower`: the program for this platform, to be looked at or compiled ahead of time."""
        return jax.jit(self).lower(*args, **kwargs)

    def explain(self, /, *args: Any, **kwargs: Any) -> FusionReport:
        """What is folded into each call of an operator where f has these arguments, which may be shapes and dtypes."""
        report: list[Line] = []

        def look(f, /, *args, **kwargs):
            (args, kwargs), others, tree = _split((args, kwargs), in_program=True)
            jaxpr = _traced(f, others, tree, args, kwargs)[0].jaxpr
            rewritten(jaxpr, report)
            if has_refs(jaxpr):
                report[:] = (line._replace(why_not="the function has references") for line in report)

        f, args, kwargs = _opened(self.__wrapped__, args, kwargs)
        if modules.has_modules((args, kwargs)):
            with modules.context():
                f, args, kwargs = modules.pure(f, args, kwargs)
                look(f, *args, **kwargs)
        else:
            look(f, *args, **kwargs)
        return FusionReport(report)


def _opened(f, args, kwargs):
    """A function, and its arguments: what an object that is called holds is one of them, because it may change."""
    while isinstance(f, functools.partial | types.MethodType):
        if isinstance(f, types.MethodType):
            f, args = f.__func__, (f.__self__, *args)
        else:
            f, args, kwargs = f.func, (*f.args, *args), {**f.keywords, **kwargs}
    if isinstance(f, _CONSTANTS):
        return f, args, kwargs
    call = inspect.getattr_static(type(f), "__call__")
    return call if isinstance(call, types.FunctionType) else _call_object, (f, *args), kwargs


def _call_object(f, /, *args, **kwargs):
    return f(*args, **kwargs)


_MOST_PROGRAMS = 256  # that are kept of a function, for its constants and for modules' definitions


def _jitted(f, others, tree):
    """Has all these within, and not as arguments: JAX would keep them when f is gone."""

    @_named_as(f)
    def jitted(*args, **kwargs):
        return _called(f, others, tree, args, kwargs)

    return jax.jit(jitted, inline=True)


def _named_as(f):
    """Of a function of f's arguments: what JAX says of it, and of them, in errors."""
    return functools.partial(functools.update_wrapper, wrapped=f, updated=())


def _called(f, others, tree, args, kwargs):
    arrays = jax.tree.leaves((args, kwargs))
    closed, out_tree = _traced(f, others, tree, args, kwargs)
    if has_refs(closed.jaxpr):  # no primitive of our own may hold them
        results = jax.core.eval_jaxpr(closed.jaxpr, closed.consts, *arrays)
        return jax.tree.unflatten(out_tree, results)
    plain = _plain(f, others, tree, args, kwargs, closed.jaxpr) if has_operators(closed.jaxpr) else None
    return jax.tree.unflatten(out_tree, _called_both([closed] if plain is None else [closed, plain], arrays))


def _plain(f, others, tree, args, kwargs, jaxpr):
    """The program without this package's operators, or None if that has not the same types."""
    try:
        closed, _ = _traced(f, others, tree, args, kwargs, contextlib.nullcontext())
    except Exception:  # jax.nn and optax refuse what this package's functions take
        return None
    types = [[(v.aval.shape, v.aval.dtype) for v in program.outvars] for program in (jaxpr, closed.jaxpr)]
    same = types[0] == types[1] and jaxpr.effects == closed.jaxpr.effects and not has_refs(closed.jaxpr)
    return closed if same else None


def _traced(f, others, tree, args, kwargs, context=None):
    @_named_as(f)
    def traced(*args, **kwargs):
        args, kwargs = _joined(jax.tree.leaves((args, kwargs)), others, tree)
        with patching.while_fusing() if context is None else context:
            return f(*args, **kwargs)

    closed, shapes = jax.make_jaxpr(traced, return_shape=True)(*args, **kwargs)
    return closed, jax.tree.structure(shapes)


class _Array:
    """Stands for an array among the leaves of arguments."""


# Leaves that are no arrays and never change: the same ones make the same program, which is kept.
_CONSTANTS = (
    *(bool, str, bytes, type, np.dtype, enum.Enum),
    *(types.FunctionType, types.BuiltinFunctionType, type(jax.jit(len)), jax.custom_jvp, jax.custom_vjp),
)


_ARRAYS = np.ndarray | np.generic | jax.ShapeDtypeStruct | jax.Array | jax.Ref


def _split(arguments, in_program=False):
    """The arguments with None for what is no array, which JAX takes; those others; and the tree of both.

    `in_program`: they are those of a call in a program, in every run of which a number of Python's is the same."""
    leaves, tree = jax.tree.flatten(arguments)
    is_array = [isinstance(leaf, _ARRAYS) for leaf in leaves]
    is_number = [isinstance(leaf, int | float | complex) and not isinstance(leaf, bool) for leaf in leaves]
    if any(is_number) and not in_program and not _is_traced():
        may_change = modules.outside_of_equinox(arguments)
        is_array = [a or (b and c) for a, b, c in zip(is_array, is_number, may_change, strict=True)]
    given = [leaf if is_one else None for leaf, is_one in zip(leaves, is_array, strict=True)]
    others = tuple(_Array if is_one else leaf for leaf, is_one in zip(leaves, is_array, strict=True))
    return jax.tree.unflatten(tree, given), others, tree


def _is_traced() -> bool:
    """Whether this code runs while a program is traced."""
    return isinstance(jnp.zeros(()), jax.core.Tracer)


def _is_hashable(tree) -> bool:
    """Whether all that objects in a tree know beside its leaves can be a part of a key."""
    try:
        hash(tree)
    except TypeError:
        return False
    return True


def _joined(arrays, others, tree):
    arrays = iter(arrays)
    return jax.tree.unflatten(tree, [next(arrays) if leaf is _Array else leaf for leaf in others])


def _without_constants(closed):
    """A jaxpr whose constants are its first operands, and their values."""
    jaxpr, constants = opened(closed)
    if not jaxpr.constvars:
        return jaxpr, []
    return edited(jaxpr, constvars=[], invars=[*jaxpr.constvars, *jaxpr.invars]), list(constants)


# ---- The primitive. Its operands are those of the jaxpr, which has no constants. `plain` is None or the jaxpr of the
# same operands and results without this package's operators: it is the program where no kernel would be faster.

fused_p = Primitive("fused")
fused_p.multiple_results = True


def _function(jaxpr):
    return lambda *args: jax.core.eval_jaxpr(jaxpr, [], *args)


def _bound(function, *args):
    """The results of a function, made by a call of the primitive."""
    closed, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
    return jax.tree.unflatten(jax.tree.structure(shapes), _called_both([closed], jax.tree.leaves(args)))


def _called_both(programs, operands):
    """The results of a program's jaxpr, and of the plain one if there is one, which have these operands."""
    programs = [_without_constants(closed) for closed in programs]
    constants = [c for _, own in programs for c in own]
    avals = [v.aval for jaxpr, own in programs for v in jaxpr.invars[: len(own)]]
    at, jaxprs = 0, []
    for jaxpr, own in programs:
        n, variables = len(own), [Var(aval) for aval in avals]
        variables[at : at + n] = jaxpr.invars[:n]
        jaxprs.append(edited(jaxpr, invars=[*variables, *jaxpr.invars[n:]]) if constants else jaxpr)
        at += n
    return fused_p.bind(*constants, *operands, jaxpr=jaxprs[0], plain=jaxprs[1] if len(jaxprs) > 1 else None)


def _jvp(primals, tangents, *, jaxpr, plain):
    """Two calls: one of the results and of what is kept for the derivative, and one that is linear in the tangents.

    If neither has a kernel that is faster, that of the plain program, as JAX has it.
    """
    moving = [k for k, tangent in enumerate(tangents) if type(tangent) is not ad.Zero]
    moved = [tangents[k] for k in moving]
    follow = _that_follow(jaxpr, primals, moving, moved)

    def results_and_linear(*primals):
        def function(*moved):
            results = _function(jaxpr)(*_with(primals, moving, moved))
            return [results[k] for k in follow], results

        _, linear, results = jax.linearize(function, *(primals[k] for k in moving), has_aux=True)
        return results, linear

    closed, (shapes, linear) = jax.make_jaxpr(results_and_linear, return_shape=True)(*primals)
    with_needed, constants = _without_constants(closed)
    n, operands = len(shapes), [*constants, *primals]
    chosen = residuals.chosen(with_needed, n)

    def tangents_of(kept, moved):
        needed = _function(chosen.again)(*kept)
        return jax.tree.unflatten(jax.tree.structure(linear), needed)(*moved)

    if plain is not None and not has_operators(rewritten(chosen.forward)):
        kept = [v.aval for v in (*(chosen.forward.invars[k] for k in chosen.operands), *chosen.forward.outvars[n:])]
        of_tangents = jax.make_jaxpr(tangents_of)(kept, [jax.typeof(t) for t in moved]).jaxpr
        if not has_operators(rewritten(of_tangents)):
            return _jvp_of_plain(plain, primals, moving, moved)
    results = fused_p.bind(*operands, jaxpr=chosen.forward, plain=None)
    kept = [*(operands[k] for k in chosen.operands), *results[n:]]
    found, results = _bound(tangents_of, kept, moved), results[:n]
    of_results = [ad.Zero(jax.typeof(result).to_tangent_aval()) for result in results]
    return results, _with(of_results, follow, found)


def _jvp_of_plain(plain, primals, moving, moved):
    function = jax.jit(_function(plain))
    results, tangents = jax.jvp(lambda *a: function(*_with(primals, moving, a)), [primals[k] for k in moving], moved)
    zeros = [ad.Zero(jax.typeof(result).to_tangent_aval()) for result in results]
    is_zero = [tangent.dtype == jax.dtypes.float0 for tangent in tangents]
    return results, [zero if a else t for zero, a, t in zip(zeros, is_zero, tangents, strict=True)]


def _that_follow(jaxpr, primals, moving, moved):
    """Which results have tangents other than 0."""

    def tangents_of(moved):
        function = _function(jaxpr)
        return jax.jvp(lambda *a: function(*_with(primals, moving, a)), [primals[k] for k in moving], moved)[1]

    jaxpr = jax.make_jaxpr(tangents_of)(moved).jaxpr
    return _made_of(graph_of(jaxpr), jaxpr.invars)


def _made_of(graph, variables):
    """Which results are made of these variables."""
    made = graph.made_of(variables)
    return [k for k, result in enumerate(graph.outputs) if is_variable(result) and result in made]


def _with(values, where, new):
    """The values with others in some places."""
    values = list(values)
    for k, value in zip(where, new, strict=True):
        values[k] = value
    return values


def _transpose(cotangents, *operands, jaxpr, plain):  # what is linear has no plain program
    linear = [k for k, a in enumerate(operands) if ad.is_undefined_primal(a)]
    known = [k for k in range(len(operands)) if k not in linear]
    given = [k for k, cotangent in enumerate(cotangents) if type(cotangent) is not ad.Zero]
    if not given:
        return [ad.Zero(a.aval) if ad.is_undefined_primal(a) else None for a in operands]

    def transposed(known_now, given_now):
        def function(*moved):
            results = _function(jaxpr)(*_with(_with(operands, known, known_now), linear, moved))
            return [results[k] for k in given]

        zeros = [ad.instantiate_zeros(ad.Zero(operands[k].aval)) for k in linear]
        return jax.linear_transpose(function, *zeros)(given_now)

    found = _bound(transposed, [operands[k] for k in known], [cotangents[k] for k in given])
    return _with([None] * len(operands), linear, found)


def _batch(axis_data, operands, batch_axes, *, jaxpr, plain):
    if all(axis is None for axis in batch_axes):
        results = fused_p.bind(*operands, jaxpr=jaxpr, plain=plain)
        return results, [None] * len(results)
    programs = [jaxpr] if plain is None else [jaxpr, plain]
    varying = {k for program in programs for k in _that_vary(program, batch_axes)}
    axes = [0 if k in varying else None for k in range(len(jaxpr.outvars))]

    def mapped(program):
        return jax.vmap(
            lambda *operands: tuple(_function(program)(*operands)),
            in_axes=tuple(batch_axes),
            out_axes=tuple(axes),
            axis_name=axis_data.name,
            axis_size=axis_data.size,
            spmd_axis_name=axis_data.spmd_name,
        )

    return _called_both([jax.make_jaxpr(mapped(program))(*operands) for program in programs], operands), axes


def _that_vary(jaxpr, batch_axes):
    """Which results differ along a mapped axis."""
    graph = graph_of(jaxpr)
    given = [v for v, axis in zip(jaxpr.invars, batch_axes, strict=True) if axis is not None]
    given += [v for e in graph.equations if _knows_axes(e) for v in e.outputs]
    return _made_of(graph, given)


def _knows_axes(equation):
    """Whether its results may differ along a mapped axis though its operands do not."""
    within = (e for inner in jaxprs_of(equation.params) for e in graph_of(inner).equations)
    return equation.name == "axis_index" or bool(equation.eqn.effects) or any(map(_knows_axes, within))


def _lower(ctx, *operands, jaxpr, plain):
    lowering = _private.FOUND["function"].core_call_lowering
    if lowering:
        return lowering(ctx, *operands, name="fused", call_jaxpr=jaxpr)
    return mlir.lower_fun(_function(jaxpr), multiple_results=True)(ctx, *operands)


def _lower_for_cuda(ctx, *operands, jaxpr, plain):
    new = rewritten(jaxpr)
    return _lower(ctx, *operands, jaxpr=new if plain is None or has_operators(new) else plain, plain=None)


def register() -> None:
    fused_p.def_impl(interpreters.implementation(fused_p))
    fused_p.def_effectful_abstract_eval(lambda *_, jaxpr, plain: ([v.aval for v in jaxpr.outvars], jaxpr.effects))
    ad.primitive_jvps[fused_p] = _jvp
    ad.primitive_transposes[fused_p] = _transpose
    batching.fancy_primitive_batchers[fused_p] = _batch
    mlir.register_lowering(fused_p, _lower)
    mlir.register_lowering(fused_p, _lower_for_cuda, platform="cuda")
    calls.register()
    kernels.register()
    attention.register()
    if interpreters.CHECKIFY.available:
        interpreters.CHECKIFY.error_checks[fused_p] = _checked
    if interpreters.JET.available:
        interpreters.JET.jet_rules[fused_p] = _jet


def _jet(primals, series, *, jaxpr, plain):
    """That of the function. Between rules the terms have no factorials, by which they are scaled outside."""
    return interpreters.JET.jet(_function(jaxpr), primals, series, factorial_scaled=False)


def _checked(*given, jaxpr, plain):
    """As a call of a function under `jit` is."""
    operands = given[len(given) - len(jaxpr.invars) :]
    (call,) = jax.make_jaxpr(jax.jit(_function(jaxpr)))(*operands).eqns
    return interpreters.CHECKIFY.error_checks[call.primitive](*given, **call.params)
