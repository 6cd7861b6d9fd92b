"""Equations that a kernel folds and XLA makes as well, because others read their results: both must make the same bits.

A kernel may make the maximum and the sum of a row of x, and XLA exp(x - maximum) / sum. If their x differ by a rounding
of 16 bits, the row does not add up to 1. XLA's x does differ: it leaves out roundings to 16 bits, and has functions of
its own. So:

- an operation that is rounded is written in XLA's program with its rounding (`Expression.in_jax`);
- a function, such as tanh, whose result is rounded to 16 bits is not made twice: XLA makes it, in memory, and the
  kernel reads it there (`to_keep`), unless XLA needs only elements at labels of it;
- nor are comparisons of a function's result with what XLA makes of it, a row's maximum for one: XLA compares;
- an array that both read, XLA reads from memory, too, instead of making it again (`read_twice`).

In float32 the two may differ in the last places of a function's result.
"""

from collections.abc import Container, Iterable, Mapping, Sequence, Set
from typing import Any

import jax

from jax_softmax.fusion.kernels.candidates import Group, Groups
from jax_softmax.fusion.program import expressions
from jax_softmax.fusion.program.graph import Equation, Graph, each_once, is_variable, variables_of
from jax_softmax.fusion.program.splicing import spliced
from jax_softmax.fusion.program.walk import Inside
from jax_softmax.primitives.types import Atom, Var


def equations(groups: Groups, calls: Iterable[Group]) -> dict[Equation, set[Group]]:
    """The equations that kernels fold and XLA makes, each with the groups that fold it."""
    found: dict[Equation, set[Group]] = {}
    for group in calls:
        for folded in group.before:
            for equation in folded.values():
                if equation in groups.executed and not expressions.is_view(equation):
                    found.setdefault(equation, set()).add(group)
    return found


def to_keep(groups: Groups, calls: Iterable[Group]) -> set[Var]:
    """The variables that have to be in memory, so that they are made once."""
    twice = equations(groups, calls)
    by_functions: set[Var] = set()
    found = _compared(groups, calls, twice)
    for equation in sorted(twice, key=lambda e: min(group.graph.position[e] for group in twice[e])):
        if not any(group.row_results for group in twice[equation]) or not _is_made_in_full(groups, equation):
            continue
        operations = expressions.operations_of(equation)
        if any(op.is_function for op in operations) or not by_functions.isdisjoint(variables_of(equation.inputs)):
            by_functions.update(equation.outputs)
            if any(op.rounds_to for op in operations):
                found.update(equation.outputs)
    return found


def _compared(groups: Groups, calls: Iterable[Group], twice: Container[Equation]) -> set[Var]:
    """The results of comparisons in kernels that depend on equal bits: of functions with what XLA makes of them."""
    found = set()
    for group in calls:
        for folded in (*group.before, group.sides_after):
            functions = {e for e in folded.values() if e in twice and expressions.is_long(e)}
            by_functions: set[Var] = set()
            for variable, equation in folded.items() if functions else ():
                if equation in functions or not by_functions.isdisjoint(variables_of(equation.inputs)):
                    by_functions.add(variable)
                if equation.name not in expressions.COMPARISONS:
                    continue
                for one, other in (equation.inputs, equation.inputs[::-1]):
                    is_function = is_variable(one) and one in by_functions
                    if is_function and _xla_makes_of(groups.graph, other, functions, folded):
                        found.add(variable)
    return found


def _xla_makes_of(graph: Graph, a: Atom, functions: Set[Equation], folded: Inside) -> bool:
    """Whether a value in a kernel is made of one that XLA makes of what these functions are."""
    first = min(graph.position[equation] for equation in functions)

    def following(node: tuple[Var, bool]) -> list[tuple[Var, bool]]:
        a, by_xla = node
        maker = graph.maker.get(a)
        if maker is None or graph.position[maker] < first:
            return []
        return [(b, by_xla or a not in folded) for b in variables_of(maker.inputs)]

    made_of = each_once([(v, False) for v in variables_of([a])], following)
    return any(graph.maker.get(b) in functions and (by_xla or b not in folded) for b, by_xla in made_of)


def _is_made_in_full(groups: Groups, equation: Equation) -> bool:
    """Whether XLA makes all elements of an equation's result, not just those that are gathered."""

    def following(maker: Equation) -> list[Equation]:
        return [r for v in maker.outputs for r in groups.readers_in_xla(v) if r.name != "gather"]

    return any(
        not expressions.is_expressible(maker) or not groups.graph.results.isdisjoint(maker.outputs)
        for maker in each_once([equation], following)
    )


def read_twice(groups: Groups, calls: Mapping[Group, tuple[Any, Sequence[Atom], Sequence[Var], Any]]) -> set[Var]:
    """The arrays that XLA makes, and both XLA and kernels with row results read."""
    found = set()
    for group, (_, reads, *_) in calls.items():
        if group.row_results:
            found |= {v for v in variables_of(reads) if v in groups.graph.maker and groups.readers_in_xla(v)}
    return found


def with_roundings(equation: Equation) -> list[Equation]:
    """An equation as JAX's operations, with each rounding written out."""
    if expressions.is_reproducible(equation):
        return [equation]
    expression, variables = expressions.expression_of(equation)

    def in_jax(*arrays: jax.Array) -> jax.Array:
        return expression.in_jax({f"x{k}": a for k, a in enumerate(arrays)})

    return spliced(in_jax, variables, equation.outputs, equation)
