"""Chains of operators that XLA makes by one kernel.

XLA's kernel of a softmax of short rows has a whole row at hand, so it takes in what makes its operand and what is made
of its result along the same rows, other softmaxes and sums included, as long as one array comes out (seen with JAX 0.12
for rows of 200 to 16384, counted to `costs.LONGEST_ROW_OF_XLA`). It reads each operand once and writes that array.
Kernels of a chain's operators, one by one, write and read what is between them.
"""

import heapq
from collections.abc import Container, Mapping, Set
from typing import NamedTuple

from jax_softmax.fusion.kernels.candidates import Group, is_materialized_unfolded
from jax_softmax.fusion.kernels.traffic import Traffic, traffic_of_whole_rows
from jax_softmax.fusion.program import expressions
from jax_softmax.fusion.program.graph import Equation, Graph, bytes_of, each_once, variables_of
from jax_softmax.fusion.program.kinds import is_loop, kind_of
from jax_softmax.primitives.operators import PRIMITIVES
from jax_softmax.primitives.records import LINEAR_MAPS
from jax_softmax.primitives.types import Var


class Chain(NamedTuple):
    operators: list[Equation]
    traffic: Traffic  # of these operators as they are made now, and of XLA's kernel


def chain_of(group: Group, result: Var, moved: Mapping[Equation, int]) -> Chain | None:
    """The chain that ends in a result of a group; None if XLA would not make it by one kernel of several operators.

    `moved`: the bytes that are moved for each operator that may be a part of one.
    """
    graph, end = group.graph, group.equation
    last = graph.maker[result]
    inside: set[Equation] = set()
    pending = [-graph.position[last]]  # a heap: what reads an equation comes out before it
    while pending:
        equation = graph.equations[-heapq.heappop(pending)]
        is_kept = not graph.results.isdisjoint(equation.outputs) or not inside.issuperset(graph.readers_of(equation))
        if equation in inside or (equation is not last and (is_kept or not _is_of_rows(equation, end, moved))):
            continue
        inside.add(equation)
        for maker in {graph.maker[v] for v in variables_of(equation.inputs) if v in graph.maker}:
            heapq.heappush(pending, -graph.position[maker])
    operators = [e for e in inside if e.name in PRIMITIVES]
    if end not in inside or len(operators) < 2 or all(e.name in LINEAR_MAPS for e in operators):
        return None
    ours, read = sum(moved[e] for e in operators), sum(map(bytes_of, _read(graph, inside)))
    return Chain(operators, Traffic(ours, ours, traffic_of_whole_rows(end, read + bytes_of(result))))


def _is_of_rows(equation: Equation, end: Equation, operators: Container[Equation]) -> bool:
    """Whether each of an equation's results is made of what lies in the same row of `end`."""
    if equation.name not in PRIMITIVES and kind_of(equation) != "reduction":
        return expressions.is_expressible(equation) and equation.name != "transpose"
    is_alike = equation.inputs[0].aval.shape == end.inputs[0].aval.shape
    is_alike &= tuple(equation.params["axes"]) == tuple(end.params["axes"])
    return is_alike and (equation.name not in PRIMITIVES or equation in operators)


def _read(graph: Graph, inside: Set[Equation]) -> list[Var]:
    """The arrays in memory of which equations are made."""

    def is_made(v: Var) -> bool:
        maker = graph.maker.get(v)
        return maker is not None and (maker in inside or (is_loop(maker) and not is_materialized_unfolded(graph, v)))

    def following(v: Var) -> list[Var]:
        return variables_of(graph.maker[v].inputs) if is_made(v) else []

    start = [v for e in inside for v in variables_of(e.inputs)]
    return [v for v in each_once(start, following) if not is_made(v)]
