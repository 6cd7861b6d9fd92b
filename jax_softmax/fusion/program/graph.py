"""A jaxpr as a graph: its equations with calls inlined, which equation makes each variable, and which ones read it.

Functions under `jit`, and functions with derivatives of their own, are inlined: programs are rewritten after JAX has
differentiated them. Loops, branches, `checkpoint` and `shard_map` stay equations, each with its jaxpr, which is
rewritten by itself. Jaxprs are edited. To trace them again would lose the names of mesh axes.
"""

import dataclasses
import math
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive

from jax_softmax import _private
from jax_softmax.primitives.types import Atom, Literal, Var

if TYPE_CHECKING:
    from typing_extensions import TypeIs  # Python 3.13 has it in typing

T = TypeVar("T")

_CALLS = ("jit", "pjit", "closed_call", "core_call", "fused")
_CHECKPOINTS = ("remat2", "checkpoint")
_ALL_CALLS = (*_CALLS, *_CHECKPOINTS, "custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr")


@dataclasses.dataclass(eq=False)
class Equation:
    """An equation of a graph. Two of them are equal only if they are the same object."""

    eqn: Any  # JAX's
    inputs: Sequence[Atom]
    outputs: Sequence[Var]
    params: dict[str, Any]

    @property
    def name(self) -> str:
        return self.eqn.primitive.name

    def with_inputs(self, inputs: Sequence[Atom]) -> "Equation":
        return Equation(self.eqn, inputs, self.outputs, self.params)

    def as_jax(self) -> Any:
        return self.eqn.replace(invars=self.inputs, outvars=self.outputs, params=self.params)


class Graph:
    """The equations that a jaxpr's results need, each after those that make what it reads."""

    def __init__(self, equations: list[Equation], outputs: list[Atom]) -> None:
        self.outputs = outputs
        self.results = set(variables_of(outputs))
        self.equations = _needed(equations, outputs)
        self.maker = {v: equation for equation in self.equations for v in equation.outputs}
        self.readers: dict[Atom, list[Equation]] = {}
        for equation in self.equations:
            for v in dict.fromkeys(variables_of(equation.inputs)):
                self.readers.setdefault(v, []).append(equation)
        self.materialized: dict[Atom, bool] = {}  # a cache of `candidates.is_materialized_unfolded`
        self.position = {equation: k for k, equation in enumerate(self.equations)}

    def maker_of(self, atom: Atom) -> Equation | None:
        """The equation that makes a variable; None for an operand of the program, and for a literal."""
        return self.maker.get(atom) if is_variable(atom) else None

    def readers_of(self, maker: Equation) -> list[Equation]:
        """The equations that read what one makes, each once."""
        return list(dict.fromkeys(r for v in maker.outputs for r in self.readers.get(v, ())))

    def descendants(self, variables: Iterable[Var]) -> set[Var]:
        """These variables, and all that is made of them."""
        found = set(variables)
        for equation in self.equations:
            if not found.isdisjoint(variables_of(equation.inputs)):
                found.update(equation.outputs)
        return found

    def has_effects_after(self, maker: Equation, equation: Equation) -> bool:
        """Whether a maker has effects and comes after an equation: the equation may not be moved behind it."""
        return bool(maker.eqn.effects) and self.position[maker] > self.position[equation]

    def with_replaced(self, replacements: "Replacements", renamed: Mapping[Var, Atom] | None = None) -> "Graph":
        """The graph with lists of equations instead of some equations, and variables instead of others."""
        names = dict(renamed or {})

        def new(atoms: Sequence[Atom]) -> list[Atom]:
            return [a if isinstance(a, Literal) else names.get(a, a) for a in atoms]

        equations = [e for old in self.equations for e in replacements.get(old, [old])]
        if names:
            equations = [
                e.with_inputs(new(e.inputs)) if names.keys() & set(variables_of(e.inputs)) else e for e in equations
            ]
        return Graph(topologically_sorted(equations), new(self.outputs))


Replacements = Mapping[Equation, list[Equation]]  # of equations


def graph_of(jaxpr: Any, differentiated: bool = True, platform: str | None = None) -> Graph:
    """The graph of a jaxpr. `differentiated`: whether JAX has differentiated it already; if not, `checkpoint` and
    functions with their own derivatives stay calls. `platform`: whose branch of `platform_dependent` is inlined."""
    equations: list[Equation] = []
    variables = {v: v for v in (*jaxpr.constvars, *jaxpr.invars)}
    calls = _ALL_CALLS if differentiated else _CALLS
    outputs = _inline(jaxpr, variables, None, lambda eqn: _callee(eqn, calls, platform), equations)
    graph = Graph(equations, outputs)
    return _without_neutral_maxima(graph) if differentiated else graph


def _without_neutral_maxima(graph: Graph) -> Graph:
    """The graph without max(-inf, x), which `jnp.max(x, initial=-jnp.inf)` makes. It is x, but not for a derivative: at
    -inf that is one half."""
    renamed: dict[Var, Atom] = {}
    for equation in graph.equations:
        if equation.name == "max" and jnp.issubdtype(equation.outputs[0].aval.dtype, jnp.floating):
            numbers = [a.val for a in equation.inputs if isinstance(a, Literal)]
            variables = variables_of(equation.inputs)
            if numbers == [-math.inf] and len(variables) == 1 and variables[0].aval == equation.outputs[0].aval:
                renamed[equation.outputs[0]] = renamed.get(variables[0], variables[0])
    neutral = [e for e in graph.equations if not renamed.keys().isdisjoint(e.outputs)]
    return graph.with_replaced({e: [] for e in neutral}, renamed) if neutral else graph


def edited(jaxpr: Any, equations: Iterable[Equation] | None = None, **changes: Any) -> Any:
    """The jaxpr with other equations, operands or results."""
    eqns = jaxpr.eqns if equations is None else [e.as_jax() for e in equations]
    return _private.without_names(jaxpr).replace(eqns=eqns, **changes)


class CycleError(ValueError):
    """Equations need each other's results."""


def topologically_sorted(equations: Iterable[Equation]) -> list[Equation]:
    """Each equation after those that make what it reads; otherwise in the order given.

    Raises:
      CycleError: there is no such order.
    """
    maker = {v: e for e in equations for v in e.outputs}
    done: dict[Equation, None] = {}
    begun = set()
    for equation in equations:
        pending = [(equation, False)]
        while pending:
            e, ready = pending.pop()
            if e in done:
                continue
            if ready:
                done[e] = None
                continue
            if e in begun:
                raise CycleError
            begun.add(e)
            pending.append((e, True))
            makers = (maker.get(v) for v in variables_of(e.inputs))
            pending += [(m, False) for m in makers if m is not None and m not in done]
    return list(done)


def trampolined(walk: Generator[Any, Any, T]) -> T:
    """The result of a recursive walk over a program, whose depth Python's stack would bound.

    A walk is a generator: instead of a recursive call it yields the inner walk, and is sent that one's result.
    """
    pending: list[Generator[Any, Any, Any]] = [walk]
    result: Any = None
    while pending:
        try:
            pending.append(pending[-1].send(result))
            result = None
        except StopIteration as end:
            pending.pop()
            result = end.value
    return result


def each_once(start: Iterable[T], following: Callable[[T], Iterable[T]]) -> Iterator[T]:
    """These nodes of a graph, and all that follow them by `following(node)`, each once."""
    pending, seen = list(start), set()
    while pending:
        node = pending.pop()
        if node not in seen:
            seen.add(node)
            yield node
            pending += following(node)


def is_variable(atom: Atom) -> "TypeIs[Var]":
    return not isinstance(atom, Literal)


def variables_of(atoms: Iterable[Atom]) -> list[Var]:
    return list(filter(is_variable, atoms))


def has_refs(jaxpr: Any) -> bool:
    """Whether it reads or writes references, as `jax.new_ref` makes them."""
    operands = (*jaxpr.constvars, *jaxpr.invars)
    is_given_some = any(not isinstance(v.aval, jax.core.ShapedArray) for v in operands)
    return is_given_some or _private.has_effects_on_references(jaxpr)


def size_of(atom: Atom) -> int:
    """How many elements it has; in a program that is exported with symbolic dimensions, an expression of these."""
    return math.prod(atom.aval.shape)


_EXTENT_OF_SYMBOL = 1024  # for prices, which have to be compared: chosen


def about_size_of(atom: Atom) -> int:
    """How many elements it has, about where dimensions are symbolic."""
    return about(atom.aval.shape)


def about(extents: Iterable[Any]) -> int:
    """The product of extents, of which some may be symbolic."""
    return math.prod(n if isinstance(n, int) else _EXTENT_OF_SYMBOL for n in extents)


def bytes_of(atom: Atom) -> int:
    """The bytes that it has in memory, about where dimensions are symbolic."""
    return 0 if isinstance(atom, Literal) else about_size_of(atom) * getattr(atom.aval.dtype, "itemsize", 4)


def opened(jaxpr: Any) -> tuple[Any, Sequence[Any]]:
    """A jaxpr, closed or not, without its constants; and the values of these."""
    return (jaxpr.jaxpr, jaxpr.consts) if hasattr(jaxpr, "jaxpr") else (jaxpr, getattr(jaxpr, "consts", ()))


def is_jaxpr(value: Any) -> bool:
    return hasattr(value, "eqns")


def jaxprs_of(params: Mapping[str, Any]) -> list[Any]:
    """Every jaxpr among an equation's parameters, without its constants."""
    leaves = jax.tree.leaves(params, is_leaf=is_jaxpr)
    return [opened(leaf)[0] for leaf in leaves if is_jaxpr(leaf)]


def eqns_within(jaxprs: Iterable[Any]) -> Iterator[Any]:
    """JAX's equations of these jaxprs, and of all jaxprs in their parameters."""
    pending = list(jaxprs)
    while pending:
        for eqn in opened(pending.pop())[0].eqns:
            yield eqn
            pending += jaxprs_of(eqn.params)


def with_jaxprs(params: Mapping[str, Any], rewrite: Callable[[Any], Any]) -> dict[str, Any]:
    """The parameters of a loop, a branch or a call, with `rewrite(jaxpr)` instead of every jaxpr among them."""

    def replaced(value: Any) -> Any:
        if type(value) is tuple:  # of branches
            return tuple(map(replaced, value))
        if not is_jaxpr(value):
            return value
        inner = opened(value)[0]
        new = rewrite(inner)
        return value if new is inner else value.replace(jaxpr=new) if hasattr(value, "jaxpr") else new

    return {name: replaced(value) for name, value in params.items()}


def _inline(
    jaxpr: Any, variables: dict[Var, Atom], caller: Any, callee_of: Callable[[Any], Any], equations: list[Equation]
) -> list[Atom]:
    """Appends the equations of a jaxpr, in terms of these variables, and returns its results.

    `callee_of(eqn)`: the jaxpr that stands in an equation's place, or None.
    """

    def read(atom: Atom) -> Atom:
        if not isinstance(atom, Literal):
            return variables[atom]
        return _behind_barrier(atom, equations) if atom.aval.shape else atom

    for eqn in map(_without_trivial_sum, jaxpr.eqns):
        inputs = [read(a) for a in eqn.invars]
        if (same := _simplified(eqn, inputs)) is not None:
            variables[eqn.outvars[0]] = same
            continue
        callee = callee_of(eqn)
        if callee is not None:
            inner, values = opened(callee)
            own: dict[Var, Atom] = {v: Literal(value, v.aval) for v, value in zip(inner.constvars, values, strict=True)}
            # The first operand of `cond` is the number of the branch, which a branch is not given.
            own |= zip(inner.invars, inputs[len(inputs) - len(inner.invars) :], strict=True)
            outputs = _inline(inner, own, _private.in_the_scope_of(eqn, caller), callee_of, equations)
            variables.update(zip(eqn.outvars, outputs, strict=True))
            continue
        made = list(eqn.outvars) if caller is None else [type(v)(v.aval) for v in eqn.outvars]
        variables.update(zip(eqn.outvars, made, strict=True))
        equations.append(Equation(_private.in_the_scope_of(eqn, caller), inputs, made, dict(eqn.params)))
    return [read(a) for a in jaxpr.outvars]


def _without_trivial_sum(eqn: Any) -> Any:
    """A squeeze in the place of a sum over dimensions of extent 1, which the derivatives of `broadcast_in_dim` have."""
    if eqn.primitive.name != "reduce_sum" or eqn.params.get("out_sharding") is not None:
        return eqn
    if any(eqn.invars[0].aval.shape[axis] != 1 for axis in eqn.params["axes"]):
        return eqn
    return eqn.replace(primitive=jax.lax.squeeze_p, params={"dimensions": eqn.params["axes"]})


# Operations of float32 numbers that everyone rounds alike.
_OF_NUMBERS = {
    **{"add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide, "sqrt": np.sqrt, "neg": np.negative},
    **{"reshape": np.positive, "squeeze": np.positive, "copy": np.positive},
}


def _simplified(eqn: Any, inputs: list[Atom]) -> Atom | None:
    """The result of an operation of literal numbers, as a literal, as x / sqrt(64) has; the operand of a slice that is
    all of it; else None."""
    numbers = [np.float32(a.val) for a in inputs if isinstance(a, Literal) and a.aval.dtype == np.float32]
    if eqn.primitive.name in _OF_NUMBERS and len(numbers) == len(inputs):
        aval = eqn.outvars[0].aval
        if aval.shape or eqn.effects:
            return None
        with np.errstate(all="ignore"):
            return Literal(_OF_NUMBERS[eqn.primitive.name](*numbers), aval)
    if eqn.primitive.name == "slice" and not isinstance(inputs[0], Literal) and inputs[0].aval == eqn.outvars[0].aval:
        return inputs[0]
    if eqn.primitive.name != "convert_element_type" or not isinstance(inputs[0], Literal) or eqn.effects:
        return None
    aval = eqn.outvars[0].aval
    if aval.shape or not isinstance(aval.dtype, np.dtype):  # keys of random numbers have other dtypes
        return None
    with np.errstate(all="ignore"):
        return Literal(np.asarray(inputs[0].val).astype(aval.dtype)[()], aval)


def _behind_barrier(literal: Literal, equations: list[Equation]) -> Var:
    """A variable for a literal that is an array: with `jax_use_simplified_jaxpr_constants`, constants are literals."""
    variable = Var(literal.aval)
    eqn = barrier([literal], [variable])
    equations.append(Equation(eqn, [literal], [variable], dict(eqn.params)))
    return variable


def barrier(inputs: Sequence[Atom], outputs: Sequence[Var]) -> Any:
    """An `optimization_barrier`: its results are arrays in memory."""
    eqn: Any
    (eqn,) = jax.make_jaxpr(lambda *a: jax.lax.optimization_barrier(a))(*(a.aval for a in inputs)).eqns
    return eqn.replace(invars=inputs, outvars=outputs)


def _callee(eqn: Any, calls: tuple[str, ...], platform: str | None) -> Any:
    """The jaxpr of a call, or the branch of `jax.lax.platform_dependent` for the platform, if it can be inlined. A call
    that says more, a sharding or constants that are arrays, cannot be."""
    if platform is not None and eqn.primitive.name == "cond" and eqn.params.get("branches_platforms"):
        of_branches = eqn.params["branches_platforms"]
        branch = next((k for k, names in enumerate(of_branches) if names is None or platform in names), None)
        if branch is None or any(map(np.ndim, opened(eqn.params["branches"][branch])[1])):
            return None
        return eqn.params["branches"][branch]
    if eqn.primitive.name not in calls or eqn.effects:
        return None
    if (
        eqn.primitive.name in _CHECKPOINTS and eqn.params["prevent_cse"] is not False
    ):  # it must not be merged with the first
        return None
    placed = [*eqn.params.get("in_shardings", ()), *eqn.params.get("out_shardings", ())]
    if not all(map(_private.is_unspecified, placed)):
        return None
    callee = next((eqn.params[k] for k in ("jaxpr", "call_jaxpr", "fun_jaxpr") if k in eqn.params), None)
    if callee is None or any(map(np.ndim, opened(callee)[1])):
        return None
    return callee if len(opened(callee)[0].invars) == len(eqn.invars) else None


def _needed(equations: list[Equation], outputs: list[Atom]) -> list[Equation]:
    needed, found = set(variables_of(outputs)), []
    for equation in reversed(equations):
        if equation.eqn.effects or not needed.isdisjoint(equation.outputs):
            found.append(equation)
            needed.update(variables_of(equation.inputs))
    return found[::-1]


def new_eqn(
    inputs: Sequence[Atom], outputs: Sequence[Var], primitive: Primitive, params: dict[str, Any], like: Any
) -> Any:
    """An equation of JAX with one of this package's primitives, at the line of the program's equation `like`."""
    return like.replace(invars=inputs, outvars=outputs, primitive=primitive, params=params, effects=frozenset())
