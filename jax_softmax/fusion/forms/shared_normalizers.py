"""Rules for results for each row, as maxima and sums are: of several operators of an array only one makes them.

An operator takes its row results from another one that reads the same array and ranks higher in `records.py`, if that
one needs nothing that depends on them. The other one makes them already, or is replaced by one that makes them as well.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax

from jax_softmax.fusion.program import expressions
from jax_softmax.fusion.program.graph import CycleError, Equation, Graph, each_once
from jax_softmax.fusion.program.kinds import foldable
from jax_softmax.fusion.program.splicing import mask_of, spliced
from jax_softmax.primitives import reference
from jax_softmax.primitives.operators import OPERATORS, bind, split
from jax_softmax.primitives.records import RECORDS
from jax_softmax.primitives.types import Atom, Var

Replacements = dict[Equation, list[Equation]]
Shared = tuple[Replacements, dict[Var, Var]]  # what is replaced, and the variables that are renamed

_OF_ROWS = ("largest", "sum_exp", "distance_sum", "count")  # results that operators share, as records name them

# By operator: its own result, given x's Normalizer, its operands and the axes. Other operators that take all their row
# results from another one have no result of their own.
_GIVEN_NORMALIZER: dict[str, Callable[..., jax.Array]] = {"cross_entropy": reference.cross_entropy_given_normalizer}


def gradients_of_own_rows(graph: Graph, equation: Equation) -> Replacements | None:
    """A loss's gradient is not given its rows' maxima and sums: a kernel that makes these, too, is faster than XLA."""
    if equation.name != "cross_entropy_gradient" or not foldable(equation):
        return None
    inputs = OPERATORS[equation.name].without_given(equation.inputs, mask_of(equation) is not None)
    if len(inputs) == len(equation.inputs):
        return None

    def gradient(*operands: jax.Array) -> list[jax.Array]:
        return equation.eqn.primitive.bind(*operands, **equation.params)

    return {equation: spliced(gradient, inputs, equation.outputs, equation)}


def with_shared_normalizers(graph: Graph) -> Graph:
    """The graph in which all row results are shared that can be."""
    while (shared := _with_some_shared(graph)) is not None:
        graph = shared
    return graph


def _with_some_shared(graph: Graph) -> Graph | None:
    """The graph with as many row results shared as can be at once; None if there are none to share."""
    pairs: list[Shared] = []
    concerned: set[Equation] = set()
    for equation in graph.equations:
        replacements, renamed = _shared(graph, equation) or ({}, {})
        equations = {*replacements, *(graph.maker[v] for v in renamed.values())}
        if replacements and concerned.isdisjoint(equations):
            pairs.append((replacements, renamed))
            concerned |= equations
    if not pairs:
        return None
    try:
        return graph.with_replaced(
            *({k: v for one in dictionaries for k, v in one.items()} for dictionaries in zip(*pairs, strict=True))
        )
    except CycleError:  # each may be shared, but not all of them
        return graph.with_replaced(*pairs[0])


def _rows_of(op: str, outputs: Sequence[Var]) -> dict[str, Any]:
    """An operator's row results, of all its results, by their names in its record."""
    return {name: v for name, v in zip(RECORDS[op].gives.split(), outputs, strict=False) if name in _OF_ROWS}


def _shared(graph: Graph, equation: Equation) -> Shared | None:
    """Replacements for an operator whose row results another one can make, and what is renamed; None if none can."""
    if equation.name not in RECORDS or not RECORDS[equation.name].row_rank or not foldable(equation):
        return None
    needed = _rows_of(equation.name, equation.outputs)
    has_own = len(needed) < len(equation.outputs)
    if has_own and equation.name not in _GIVEN_NORMALIZER:
        return None
    others = [e for e in graph.readers[equation.inputs[0]] if e.name in RECORDS]
    for other in others:
        rows = _rows_of(other.name, other.outputs)
        if needed.keys() <= rows.keys() and _ranks_higher(graph, other, equation) and _can_give(graph, other, equation):
            own = _own_result(equation, list(rows.values())) if has_own else []
            return {equation: own}, {v: rows[name] for name, v in needed.items()}
    for other in others if not has_own else ():
        if RECORDS[other.name].extended and _can_give(graph, other, equation):
            shared = _by_extended(other, equation, needed)
            if shared is not None:
                return shared
    return None


def _own_result(equation: Equation, rows: list[Var]) -> list[Equation]:
    """The equations that make an operator's first result of its operands and x's maxima and sums."""
    given_normalizer, axes = _GIVEN_NORMALIZER[equation.name], equation.params["axes"]

    def own(largest: jax.Array, total: jax.Array, *operands: jax.Array) -> jax.Array:
        return given_normalizer(reference.Normalizer(largest, total), *operands, axes)

    return spliced(own, [*rows[:2], *equation.inputs[:2]], equation.outputs[:1], equation)


def _ranks_higher(graph: Graph, other: Equation, equation: Equation) -> bool:
    """Whether another operator has the higher rank of two, or the same and is earlier in the program."""
    ranks = [(-RECORDS[e.name].row_rank, graph.position[e]) for e in (other, equation)]
    return ranks[0] < ranks[1]


def _by_extended(other: Equation, equation: Equation, needed: dict[str, Var]) -> Shared | None:
    """Another operator replaced by the one that gives what is needed as well; None if that one does not."""
    extended, rows = RECORDS[other.name].extended, _rows_of(other.name, other.outputs)
    names = RECORDS[extended].gives.split()[1:]
    element = other.outputs[0]
    if set(names) != rows.keys() | needed.keys() or element.aval.dtype.name not in expressions.WRITABLE:
        return None

    def extended_results(*given: jax.Array) -> list[jax.Array]:
        operands, where = split(given)
        return bind(extended, *operands, where=where, **other.params)

    outputs = [element, *((needed | rows)[name] for name in names)]
    renamed = {v: rows[name] for name, v in needed.items() if name in rows}
    return {equation: [], other: spliced(extended_results, other.inputs, outputs, other)}, renamed


def _can_give(graph: Graph, other: Equation, equation: Equation) -> bool:
    """Whether another operator reads the same rows, and nothing that depends on the equation's results."""
    if not foldable(other) or other.inputs[0] is not equation.inputs[0] or mask_of(other) is not mask_of(equation):
        return False
    if any(other.params[name] != equation.params[name] for name in ("axes", "axis_name")):
        return False

    def makers(atoms: Iterable[Atom]) -> list[Equation]:
        return [e for e in map(graph.maker_of, atoms) if e is not None]

    ancestors = each_once(makers(other.inputs), lambda e: makers(e.inputs))
    return not any(e is equation or graph.has_effects_after(e, equation) for e in ancestors)
