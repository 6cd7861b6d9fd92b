"""Residuals: what a fused function keeps for its derivative.

JAX keeps each array that the derivative needs: probabilities in float32, casts, masks. Here the derivative makes an
array again if that keeps fewer bytes: the operands of elementwise operations; of softmax and log_softmax, their operand
and their rows' maxima and sums; of attention, queries and keys instead of weights.
"""

from typing import NamedTuple

from jax_softmax.fusion import expressions, splicing
from jax_softmax.fusion.attention import matcher
from jax_softmax.fusion.graph import (
    Equation,
    Graph,
    bytes_of,
    edited,
    graph_of,
    is_variable,
    topologically_sorted,
    trampolined,
    variables_of,
)
from jax_softmax.fusion.groups import Cut, may_fold

_MOST_STEPS = 64  # from an array to what it is made of


class Residuals(NamedTuple):
    forward: object  # a jaxpr: the function's results, and those that are kept of what it makes
    operands: list[int]  # the function's operands that are kept
    again: object  # a jaxpr: of these operands, and of what is kept, it makes the arrays that the derivative needs
    has_attention: bool  # whose weights are not kept


def chosen(jaxpr, n: int) -> Residuals:
    """The residuals of a function whose jaxpr has n results, and then the arrays that its derivative needs."""
    graph = graph_of(jaxpr, differentiated=False)
    results, needed = graph.outputs[:n], graph.outputs[n:]
    chooser = _Chooser(Graph(graph.equations, results), graph)
    equations = chooser.choose(list(dict.fromkeys(variables_of(needed))))
    operands = [k for k, v in enumerate(jaxpr.invars) if v in chooser.kept]
    made = [v for v in chooser.kept if v not in set(jaxpr.invars)]
    forward = Graph(topologically_sorted([*graph.equations, *chooser.of_rows]), [*results, *made])
    inputs = [*(jaxpr.invars[k] for k in operands), *made]
    return Residuals(
        edited(jaxpr, forward.equations, outvars=forward.outputs),
        operands,
        edited(jaxpr, equations, invars=inputs, outvars=needed, effects=frozenset()),
        bool(chooser.of_attention),
    )


class _Chooser:
    def __init__(self, of_results: Graph, graph: Graph):
        self.graph = graph
        self.of_results = of_results
        self.kept: dict = {}
        _, found, _ = matcher.with_attention(of_results)
        self.of_attention = {equation for one in found for equation in (one.softmax, one.product)}
        self._weights = {v for one in found for v in one.softmax.outputs}
        for equation in graph.equations:
            if expressions.is_expressible(equation) and not self._weights.isdisjoint(variables_of(equation.inputs)):
                self._weights.update(equation.outputs)
        self._cuts: dict = {}
        self._rows: dict = {}  # by operator: its rows' maxima and sums, and the equations that make its result of these
        self.of_rows: list[Equation] = []  # which make those maxima and sums that are kept

    def choose(self, needed) -> list[Equation]:
        """Sets `kept`, and returns the equations that make the rest of what is needed."""
        self.kept = {v: None for v in needed if not self._can_be_made(v)}
        cuts = [trampolined(self._cut(v, 0)) for v in needed]
        self.kept |= dict.fromkeys(v for cut in cuts for v in cut.costs)
        for equation, (rows, _) in self._rows.items():
            if not self.kept.keys().isdisjoint(rows):
                self.of_rows += splicing.rows_of(equation, rows)
        return topologically_sorted(dict.fromkeys(equation for cut in cuts for equation in cut.equations))

    def _can_be_made(self, a):
        maker = self.graph.maker.get(a)
        return maker is not None and (
            self._is_made_whole(maker) or splicing.is_unmasked(maker, "softmax", "log_softmax")
        )

    def _is_made_whole(self, maker):
        """Whether the equation itself is made again, without rows' maxima and sums."""
        return expressions.is_expressible(maker) or maker in self.of_attention

    def _cut(self, a, depth) -> Cut:
        """The cheapest way to have an array in the derivative."""
        if not is_variable(a):
            return Cut({}, {})
        if a in self.kept:
            return Cut({a: 0}, {})
        if a not in self._cuts:
            cut = Cut({a: bytes_of(a) * (1 if self._is_in_memory(a) else 2)}, {})
            if depth < _MOST_STEPS and self._can_be_made(a):
                cut = min(cut, (yield self._cut_through(a, depth + 1)), key=lambda cut: cut.cost)
            self._cuts[a] = cut
        return self._cuts[a]

    def _cut_through(self, a, depth):
        """That makes it of its maker's operands."""
        maker, costs, equations = self.graph.maker[a], {}, {}
        for operand in maker.inputs:
            cut = yield self._cut(operand, depth)
            # Rows' maxima and sums must be those of the very bits of which the result is made again.
            if not self._is_made_whole(maker) and not all(map(expressions.is_reproducible, cut.equations)):
                cut = Cut({operand: bytes_of(operand)}, {})
            costs |= cut.costs
            equations |= cut.equations
        if self._is_made_whole(maker):
            return Cut(costs, {**equations, maker: None})
        if maker not in self._rows:
            rows = splicing.row_variables(maker)
            self._rows[maker] = rows, splicing.made_of_rows(maker, rows)
        rows, own = self._rows[maker]
        return Cut(costs | {row: bytes_of(row) for row in rows}, equations | dict.fromkeys(own))

    def _is_in_memory(self, a):
        """Whether an array is in memory even if the derivative does not need it: it cannot be folded on its way."""
        maker = self.graph.maker.get(a)
        if maker is None or a in self.of_results.outputs:
            return True
        if a in self._weights:
            return False
        return not all(map(may_fold, (maker, *self.of_results.readers.get(a, ()))))
