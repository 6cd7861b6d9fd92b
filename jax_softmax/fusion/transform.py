"""`fuse`: how a function is traced when it is called. `primitive.py` has the call that the program then consists of."""

import contextlib
import dataclasses
import enum
import functools
import inspect
import sys
import types
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Concatenate, Generic, NamedTuple, ParamSpec, TypeVar, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr
from jax.tree_util import PyTreeDef

from jax_softmax.functions import patching
from jax_softmax.fusion import modules, primitive
from jax_softmax.fusion.net import fused_or_as_it_is
from jax_softmax.fusion.program.graph import has_refs
from jax_softmax.fusion.report import FusionReport, Line
from jax_softmax.fusion.rewriting import has_operators, lines_of, unfused_lines

_P = ParamSpec("_P")
_Q = ParamSpec("_Q")
_R = TypeVar("_R")


def fuse(f: Callable[_P, _R]) -> "Fused[_P, _R]":
    """f with what stands before and after its softmaxes as a part of their kernels.

    A transformation as `jax.jit` is one, for functions of arrays, and trees of them, that use `jax.nn.softmax` and the
    like or this package's functions::

        step = jax.jit(jax_softmax.fuse(train_step))

    f is traced twice, with `jax_softmax.use()` and as it is, so it has to be pure. On a GPU casts, scales, biases,
    masks and other elementwise operations around an operator are then done by its kernel; on other platforms kernels
    do the operators alone. A call for which XLA's own fusions move fewer bytes is left to them, and where all are, the
    program is f as it is. Results are f's up to roundings. Should this package fail on a program, that runs as it is,
    with a warning.

    Fuse what is differentiated and its derivative at once, `fuse(train_step)` rather than `grad(fuse(loss))`, which
    works as well.

    Arrays, and numbers outside of `jit`, are traced as `jax.jit` does it. True and False, and within `jit` all of
    Python's numbers, are constants, as are objects of other types: `jax.jit(fuse(f), static_argnames="train")` works.
    So are the numbers to which a `functools.partial`, a method or an object binds f. Results are trees of arrays,
    modules of Equinox, and leaves of the arguments.

    Returns:
      A `Fused`: a function with f's signature, and with methods that say what became of it. Errors name f, its file,
      line and arguments, as those of `jax.jit` do.

    Raises:
      TypeError: f is no function, or one whose calls return no results: a generator or coroutine function.
    """
    if not callable(f) or isinstance(f, staticmethod):
        kind = type(f).__name__
        hint = f" Write {kind}(fuse(f))." if isinstance(f, staticmethod | classmethod) else ""
        raise TypeError(f"fuse: f must be a function, got {kind}.{hint}")
    for kind, is_one in _OTHER_FUNCTIONS.items():
        if is_one(f) or is_one(type(f).__call__):
            raise TypeError(f"fuse: f must be a function that returns its results, got {kind} function: {f!r}.")
    return Fused(f)


# Functions that run only after their call has returned an object.
_OTHER_FUNCTIONS: dict[str, Callable[[Any], bool]] = {
    "a generator": inspect.isgeneratorfunction,
    "a coroutine": inspect.iscoroutinefunction,
    "an asynchronous generator": inspect.isasyncgenfunction,
}


class Fused(Generic[_P, _R]):
    """What `fuse` returns: a function of the same arguments and results.

    `__wrapped__` is the function that was fused. As a method of a class it is bound as functions are.
    """

    __wrapped__: Callable[_P, _R]

    def __init__(self, f: Callable[_P, _R]) -> None:
        # An object's attributes stay its own: it may change them.
        functools.update_wrapper(self, f, updated=["__dict__"] if isinstance(f, types.FunctionType) else [])

    def __repr__(self) -> str:
        return f"fuse({self.__wrapped__!r})"

    def __reduce__(self) -> str | tuple[Any, ...]:
        """A function of a module that is decorated is pickled by its name, as functions are."""
        module, name = sys.modules.get(getattr(self, "__module__", "")), getattr(self, "__qualname__", "")
        found: Any = functools.reduce(lambda at, part: getattr(at, part, None), name.split("."), module)
        return name if found is self else (fuse, (self.__wrapped__,))

    def __call__(self, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        if jax.config.jax_disable_jit:
            return self.__wrapped__(*args, **kwargs)
        f, positional, named = _unbound(self.__wrapped__, args, kwargs)
        call = functools.partial(self._call, f)
        try:
            if modules.has_modules((positional, named)):
                return modules.call_with_modules(call, f, positional, named)
            return call(f, *positional, **named)
        except TypeError as error:
            _note_arguments_without_arrays(error, f, positional, named)
            raise

    def _call(self, f: Callable[..., Any], g: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """What g returns, which is f or, of modules, a pure function that calls it."""
        (args, kwargs), others, tree = _arrays_and_others((args, kwargs))
        if all(isinstance(leaf, _CONSTANTS) for leaf in others) and _is_hashable((g, tree)):
            return _restored(self._programs_of(f).jitted(g, others, tree)(*args, **kwargs))
        return _restored(_Call(g, others, tree, args, kwargs).results())

    def _programs_of(self, f: Callable[..., Any]) -> "_Programs":
        """The programs of all `fuse(f)`: a second one of the same f compiles nothing."""
        holder = f if isinstance(f, types.FunctionType) else self
        programs = vars(holder).get("_fused")
        if programs is None or programs.holder() is not holder:  # functools.wraps gives a function another's attributes
            programs = vars(holder)["_fused"] = _Programs(holder)
        return programs

    @overload
    def __get__(self, instance: None, owner: Any = None) -> "Fused[_P, _R]": ...
    @overload
    def __get__(self: "Fused[Concatenate[Any, _Q], _R]", instance: object, owner: Any = None) -> "Fused[_Q, _R]": ...
    def __get__(self, instance: Any, owner: Any = None) -> Any:
        if instance is None:
            return self
        return Fused(types.MethodType(self.__wrapped__, instance))

    def trace(self, /, *args: _P.args, **kwargs: _P.kwargs) -> jax.stages.Traced:
        """`jax.jit(self).trace`: the program as it is before it is lowered."""
        return jax.jit(self).trace(*args, **kwargs)

    def lower(self, /, *args: _P.args, **kwargs: _P.kwargs) -> jax.stages.Lowered:
        """`jax.jit(self).lower`: the program for this platform, to be looked at or compiled ahead of time."""
        return jax.jit(self).lower(*args, **kwargs)

    def explain(self, /, *args: Any, **kwargs: Any) -> FusionReport:
        """What is folded into each call of an operator where f has these arguments, which may be shapes and dtypes."""
        report: list[Line] = []

        def look(f: Callable[..., Any], /, *args: Any, **kwargs: Any) -> None:
            (args, kwargs), others, tree = _arrays_and_others((args, kwargs), in_program=True)
            call = _Call(f, others, tree, args, kwargs)
            closed, _ = call.traced()
            jaxpr = primitive.as_lowered(closed)
            if has_refs(jaxpr):
                report.extend(unfused_lines(jaxpr, "the function has references"))
            else:
                unfused = call.unfused(closed.jaxpr)
                report.extend(lines_of(jaxpr, unfused and primitive.as_lowered(unfused)))

        f, positional, named = _unbound(self.__wrapped__, args, kwargs)
        try:
            if modules.has_modules((positional, named)):
                with modules.context():
                    g, args, kwargs = modules.pure(f, positional, named)
                    look(g, *args, **kwargs)
            else:
                look(f, *positional, **named)
        except TypeError as error:
            _note_arguments_without_arrays(error, f, positional, named)
            raise
        return FusionReport(report)


def _note_arguments_without_arrays(
    error: TypeError, f: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Adds to the error of a call which arguments f was given as they are, though it may have meant arrays."""
    try:
        arguments = inspect.signature(f).bind(*args, **kwargs).arguments
    except (TypeError, ValueError):  # which the error is about, or f has no signature
        return

    def has_arrays(value: Any) -> bool:
        leaves = jax.tree.leaves(value, is_leaf=modules.is_of_nnx)
        return any(isinstance(leaf, _ARRAYS) or modules.is_of_nnx(leaf) for leaf in leaves)

    others = {name: a for name, a in arguments.items() if not (isinstance(a, _NUMBERS | _Number) or has_arrays(a))}
    if others:
        given = ", ".join(f"{name} of type {type(value).__name__}" for name, value in others.items())
        error.add_note(
            f"fuse: f was given {given}, as it is. Where f wants an array, an argument must be one of JAX or NumPy, a "
            'number, or a shape and dtype as in jax.ShapeDtypeStruct((4, 8), "float32").'
        )


def _unbound(
    f: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """A function and its arguments. Among these are those of a `functools.partial`, and an object that is called, or
    whose method is: it may change."""
    while isinstance(f, functools.partial | types.MethodType):
        if isinstance(f, types.MethodType):
            args, f = (_with_constant_numbers(f.__self__), *args), f.__func__
        else:
            bound, named = _with_constant_numbers((f.args, f.keywords))
            args, kwargs, f = (*bound, *args), {**named, **kwargs}, f.func
    if isinstance(f, _CONSTANTS):
        return f, args, kwargs
    call = inspect.getattr_static(type(f), "__call__")
    args = (_with_constant_numbers(f), *args)
    return call if isinstance(call, types.FunctionType) else _call_object, args, kwargs


def _call_object(f: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    return f(*args, **kwargs)


_MOST_PROGRAMS = 256  # that are kept of a function: one for each of its constants and modules' definitions


class _Programs:
    """The programs that are kept of a function. It is an attribute of the function, with which it goes. Copies, as
    pickle makes them, are empty."""

    def __init__(self, holder: Any = None) -> None:
        self.holder = (lambda: None) if holder is None else weakref.ref(holder)
        self.jitted = functools.lru_cache(_MOST_PROGRAMS)(_jitted)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Programs, ()


def _jitted(f: Callable[..., Any], others: tuple[Any, ...], tree: PyTreeDef) -> Callable[..., Any]:
    """f of arrays alone, under `jax.jit`. It holds the constants: JAX would keep static arguments when f is gone."""

    @_named_as(f)
    def jitted(*args: Any, **kwargs: Any) -> Any:
        return _Call(f, others, tree, args, kwargs).results()

    return jax.jit(jitted, inline=True)


def _named_as(f: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator for functions with f's arguments: JAX's errors name f, and these."""
    return functools.partial(functools.update_wrapper, wrapped=f, updated=())


class _Call(NamedTuple):
    """A call of f in a program. `others` and `tree` are those of `_arrays_and_others`, and args and kwargs have arrays
    alone."""

    f: Callable[..., Any]
    others: tuple[Any, ...]
    tree: PyTreeDef
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def results(self) -> Any:
        """f's results, as `_traced_in` has them, made by a call of the primitive."""
        arrays = jax.tree.leaves((self.args, self.kwargs))
        closed, out_tree = self.traced()
        if has_refs(closed.jaxpr):  # no primitive of our own may hold references
            results = jax.core.eval_jaxpr(closed.jaxpr, closed.consts, *arrays)
        else:
            unfused = self.unfused(closed.jaxpr)
            results = primitive.bind_programs([closed] if unfused is None else [closed, unfused], arrays)
        return jax.tree.unflatten(out_tree, results)

    def unfused(self, jaxpr: Jaxpr) -> ClosedJaxpr | None:
        """The program without this package's operators; None if f calls some or f's program, given, has none, or if
        its results have other types."""
        if not has_operators(jaxpr):
            return None
        try:
            closed, _ = self._traced_in(contextlib.nullcontext())
        except Exception:  # jax.nn and optax refuse what this package's functions take
            return None
        programs: tuple[Any, Any] = jaxpr, closed.jaxpr
        types = [[(v.aval.shape, v.aval.dtype) for v in program.outvars] for program in programs]
        same = types[0] == types[1] and jaxpr.effects == closed.jaxpr.effects and not has_refs(closed.jaxpr)
        return closed if same and not has_operators(closed.jaxpr) else None

    def traced(self) -> tuple[ClosedJaxpr, PyTreeDef]:
        """f's program, and the tree of its results."""
        return fused_or_as_it_is(
            lambda: self._traced_in(patching.while_fusing()), lambda _: self._traced_in(contextlib.nullcontext())
        )

    def _traced_in(self, context: contextlib.AbstractContextManager[None]) -> tuple[ClosedJaxpr, PyTreeDef]:
        @_named_as(self.f)
        def traced(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = _arguments(jax.tree.leaves((args, kwargs)), self.others, self.tree)
            with context:
                return self._with_others_apart(self.f(*args, **kwargs))

        closed, shapes = jax.make_jaxpr(traced, return_shape=True)(*self.args, **self.kwargs)
        return closed, jax.tree.structure(shapes)

    def _with_others_apart(self, results: Any) -> Any:
        """The results as JAX takes them, whose leaves are arrays: `_Results`, if f returns others that may be."""
        leaves, tree = jax.tree.flatten(results)
        is_outside = modules.outside_of_equinox(results)
        is_other = [self._is_other(leaf, outside) for leaf, outside in zip(leaves, is_outside, strict=True)]
        if not any(is_other):
            return results
        others = tuple(leaf if is_one else _Array for leaf, is_one in zip(leaves, is_other, strict=True))
        arrays = [leaf for leaf, is_one in zip(leaves, is_other, strict=True) if not is_one]
        return _Results(arrays, functools.partial(_arguments, others=others, tree=tree))

    def _is_other(self, leaf: Any, is_outside: bool) -> bool:
        """Whether f may return a leaf that is no array: in a module of Equinox, or an argument's leaf. Numbers outside
        of modules become arrays, as under `jax.jit`."""
        if isinstance(leaf, _ARRAYS) or (is_outside and isinstance(leaf, _NUMBERS)):
            return False
        return not is_outside or any(leaf is other for other in self.others)


@functools.partial(jax.tree_util.register_dataclass, data_fields=["arrays"], meta_fields=["restored"])
@dataclasses.dataclass
class _Results:
    """A function's results of which some are no arrays: these are a part of the tree that JAX keeps."""

    arrays: list[Any]
    restored: Callable[[list[Any]], Any]


def _restored(results: Any) -> Any:
    return results.restored(results.arrays) if isinstance(results, _Results) else results


class _Array:
    """A mark where a leaf of the arguments is an array."""


class _Number:
    """A number that is a constant, among leaves. As a key it is another one than numbers of other types or signs."""

    def __init__(self, value: Any) -> None:
        self.value = value
        self._key = type(value), repr(value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Number) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)


# Leaves that are no arrays and never change: programs are kept by them.
_CONSTANTS = (
    *(bool, str, bytes, type, np.dtype, enum.Enum, _Number),
    *(types.FunctionType, types.BuiltinFunctionType, type(jax.jit(len)), jax.custom_jvp, jax.custom_vjp),
)
_NUMBERS = int | float | complex
_ARRAYS = np.ndarray | np.generic | jax.ShapeDtypeStruct | jax.Array | jax.Ref


def _is_number(leaf: Any) -> bool:
    return isinstance(leaf, _NUMBERS) and not isinstance(leaf, bool)


def _with_constant_numbers(bound: Any) -> Any:
    """What a function is bound to: numbers in it are constants, as those in its closure are."""

    def constant(leaf: Any) -> Any:
        return _Number(leaf) if _is_number(leaf) or isinstance(leaf, np.generic) else leaf

    return jax.tree.map(constant, bound, is_leaf=modules.is_of_nnx)


def _arrays_and_others(arguments: Any, in_program: bool = False) -> tuple[Any, tuple[Any, ...], PyTreeDef]:
    """The arguments with None for each leaf that is no array; the leaves with `_Array` for each that is, and `_Number`
    for each number that is a constant; and the tree.

    `in_program`: they are those of a call in a program, where numbers of Python are constants, and no arrays.
    """
    leaves, tree = jax.tree.flatten(arguments)
    is_array = [isinstance(leaf, _ARRAYS) for leaf in leaves]
    is_number = [not a and _is_number(leaf) for leaf, a in zip(leaves, is_array, strict=True)]
    if any(is_number) and not in_program and not _is_in_program():
        may_change = modules.outside_of_equinox(arguments)
        is_array = [a or (b and c) for a, b, c in zip(is_array, is_number, may_change, strict=True)]
    leaves = [_Number(leaf) if b and not a else leaf for leaf, a, b in zip(leaves, is_array, is_number, strict=True)]
    arrays = [leaf if is_one else None for leaf, is_one in zip(leaves, is_array, strict=True)]
    others = tuple(_Array if is_one else leaf for leaf, is_one in zip(leaves, is_array, strict=True))
    return jax.tree.unflatten(tree, arrays), others, tree


def _is_in_program() -> bool:
    """Whether this code runs while a program is traced."""
    with jax.transfer_guard("allow"):  # of a number
        return isinstance(jnp.zeros(()), jax.core.Tracer)


def _is_hashable(key: Any) -> bool:
    """Whether a function's modules, and a tree's structure with what its nodes hold beside leaves, can be a key."""
    try:
        hash(key)
    except TypeError:
        return False
    return True


def _arguments(arrays: Iterable[Any], others: tuple[Any, ...], tree: PyTreeDef) -> Any:
    """The arguments, of what `_arrays_and_others` returns."""
    rest = iter(arrays)
    leaves = (leaf.value if isinstance(leaf, _Number) else leaf for leaf in others)
    return jax.tree.unflatten(tree, [next(rest) if leaf is _Array else leaf for leaf in leaves])
