"""Residuals: what a fused function keeps for its derivative.

JAX keeps each array that the derivative needs: probabilities in float32, casts, masks. Here the derivative makes an
array again if that keeps fewer bytes: the operands of elementwise operations; of softmax and log_softmax, their operand
and their rows' maxima and sums; of attention, queries and keys instead of weights.

XLA may leave out a rounding to 16 bits in one place and not in another. If rows' numbers, `max(s)` for one, are kept of
an `s` that was not rounded, and exp(s - max(s)) is made again of a rounded one, rows do not add up. So where XLA makes
rows' numbers that are kept, nothing is made again of an array of 16 bits that they are made of: what has more bits is
kept. Where a kernel makes them, which reads arrays in memory, such an array stands behind a barrier: all read the same.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from jax_softmax.fusion.attention import matcher
from jax_softmax.fusion.program import expressions, splicing, walk
from jax_softmax.fusion.program.graph import (
    Equation,
    Graph,
    bytes_of,
    edited,
    graph_of,
    topologically_sorted,
    variables_of,
)
from jax_softmax.fusion.program.kinds import may_fold
from jax_softmax.fusion.program.walk import Cut
from jax_softmax.primitives.operators import PRIMITIVES
from jax_softmax.primitives.types import Atom, Var

_MOST_STEPS = 64  # from an array to what it is made of
_BY_XLA, _BY_KERNELS = "by XLA", "by kernels"  # who makes rows' numbers


class Residuals(NamedTuple):
    forward: Any  # a jaxpr: the function's results, and those that are kept of what it makes
    operands: list[int]  # the function's operands that are kept
    again: Any  # a jaxpr: of these operands, and of what is kept, it makes the arrays that the derivative needs
    has_attention: bool  # whose weights are not kept


def chosen(jaxpr: Any, n: int) -> Residuals:
    """The residuals of a function whose jaxpr has n results, and then the arrays that its derivative needs."""
    graph = graph_of(jaxpr, differentiated=False)
    results, needed = graph.outputs[:n], graph.outputs[n:]
    chooser = _Chooser(Graph(graph.equations, results), graph)
    equations = chooser.choose(list(dict.fromkeys(variables_of(needed))))
    operands = [k for k, v in enumerate(jaxpr.invars) if v in chooser.kept]
    made = [v for v in chooser.kept if v not in set(jaxpr.invars)]
    stored = chooser.read_by_kernels.intersection(made)
    with_barriers = [new for e in graph.equations for new in splicing.with_barrier(e, stored)]
    forward = Graph(topologically_sorted([*with_barriers, *chooser.of_rows]), [*results, *made])
    inputs = [*(jaxpr.invars[k] for k in operands), *made]
    return Residuals(
        edited(jaxpr, forward.equations, outvars=forward.outputs),
        operands,
        edited(jaxpr, equations, invars=inputs, outvars=needed, effects=frozenset()),
        bool(chooser.of_attention),
    )


class _Chooser(walk.Cuts):
    """The cheapest ways to have the arrays that a derivative needs. `at` counts the steps from one of these."""

    def __init__(self, of_results: Graph, graph: Graph) -> None:
        super().__init__(graph)
        self.of_results = of_results
        self.kept: dict[Var, None] = {}
        _, found, _ = matcher.with_attention(of_results)
        self.of_attention = {e for one in found for e in (one.softmax, *one.products, *one.log_sums)}
        self._weights = {v for one in found for v in one.softmax.outputs}
        for equation in graph.equations:
            if expressions.is_expressible(equation) and not self._weights.isdisjoint(variables_of(equation.inputs)):
                self._weights.update(equation.outputs)
        # They are made again with their rows' numbers.
        self._scores = expressions.elementwise_ancestors(
            graph, [a for one in found for a in variables_of(one.softmax.inputs)]
        )
        # Arrays of 16 bits of which rows' numbers are made that are kept.
        self.read_by_kernels: set[Var] = set()
        self._read_by_xla: set[Var] = set()
        # By operator: its rows' maxima and sums, and the equations that make its result of these.
        self._rows: dict[Equation, tuple[tuple[Var, Var], list[Equation]]] = {}
        self.of_rows: list[Equation] = []  # which make those maxima and sums that are kept

    def choose(self, needed: list[Var]) -> list[Equation]:
        """Sets `kept`, `of_rows` and `read_by_kernels`. Returns the equations that make the rest of what is needed."""
        while True:
            kept = {v: None for v in needed if not self._can_be_made(v)}
            self.cut_before = {v: Cut({v: 0}, {}) for v in kept}
            self.cut_before |= {v: Cut({v: math.inf}, {}) for v in self._read_by_xla}
            cuts = [self.before(v, 0) for v in needed]
            self.kept = kept | dict.fromkeys(v for cut in cuts for v in cut.costs)
            kept_rows = [(e, rows) for e, (rows, _) in self._rows.items() if not self.kept.keys().isdisjoint(rows)]
            self.of_rows = [new for e, rows in kept_rows for new in splicing.rows_of(e, rows)]
            again = dict.fromkeys(equation for cut in cuts for equation in cut.equations.values())
            by_xla, self.read_by_kernels = self._rounded_before_rows()
            read_again = by_xla.intersection(v for e in again for v in variables_of(e.inputs)) - self._read_by_xla
            if not read_again:
                return topologically_sorted(again)
            self._read_by_xla |= read_again

    def _rounded_before_rows(self) -> tuple[set[Var], set[Var]]:
        """The arrays of 16 bits, after their last rounding, of which rows' numbers are made that are kept: by XLA, and
        by kernels."""
        maker = {**self.graph.maker, **{v: e for e in self.of_rows for v in e.outputs}}
        pending: list[tuple[Var, str | None]] = [(v, None) for v in self.kept]
        seen, found = set(), dict[str, set[Var]]({_BY_XLA: set(), _BY_KERNELS: set()})
        while pending:
            a, made_by = pending.pop()
            if (a, made_by) in seen or a not in maker or a in self._scores:
                continue
            seen.add((a, made_by))
            equation = maker[a]
            reduced_by = _who_reduces(equation)
            is_rounded = not expressions.is_expressible(equation) or _rounds(equation)
            if made_by and is_rounded and a.aval.dtype.name in expressions.ROUNDED:
                found[made_by].add(a)
            elif reduced_by or expressions.is_expressible(equation):
                pending += [(b, reduced_by or made_by) for b in variables_of(equation.inputs)]
        return found[_BY_XLA], found[_BY_KERNELS]

    def _can_be_made(self, a: Var) -> bool:
        maker = self.graph.maker.get(a)
        return maker is not None and (
            self._is_made_whole(maker) or splicing.is_unmasked(maker, "softmax", "log_softmax")
        )

    def _is_made_whole(self, maker: Equation) -> bool:
        """Whether the equation itself is made again, without rows' maxima and sums."""
        return expressions.is_expressible(maker) or maker in self.of_attention

    def operands(self, a: Var, at: int) -> list[tuple[Atom, int]] | None:
        if at >= _MOST_STEPS or not self._can_be_made(a):
            return None
        return [(operand, at + 1) for operand in self.graph.maker[a].inputs]

    def made(self, a: Var, at: int, cuts: Sequence[Cut]) -> Cut:
        maker = self.graph.maker[a]
        if self._is_made_whole(maker):
            return super().made(a, at, cuts)
        (operand,), (cut,) = maker.inputs, cuts
        # Rows' maxima and sums must be those of the very bits of which the result is made again.
        if not all(map(expressions.is_reproducible, cut.equations.values())):
            cut = Cut({operand: bytes_of(operand)}, {})
        if maker not in self._rows:
            rows = splicing.row_variables(maker)
            self._rows[maker] = rows, splicing.made_of_rows(maker, rows)
        rows, own = self._rows[maker]
        costs, equations = {row: bytes_of(row) for row in rows}, {v: e for e in own for v in e.outputs}
        return Cut(cut.costs | costs, cut.equations | equations)

    def cheapest(self, a: Var, made: Cut | None) -> Cut:
        read = Cut({a: bytes_of(a) * (1 if self._is_in_memory(a) else 2)}, {})
        return made if made is not None and made.cost < read.cost else read

    def _is_in_memory(self, a: Var) -> bool:
        """Whether an array is in memory even if the derivative does not need it: it cannot be folded on its way."""
        maker = self.graph.maker.get(a)
        if maker is None or a in self.of_results.outputs:
            return True
        if a in self._weights:
            return False
        return not all(map(may_fold, (maker, *self.of_results.readers.get(a, ()))))


def _who_reduces(equation: Equation) -> str | None:
    """Who makes numbers of rows by an equation, such as sums, maxima, cumulative sums or what is sorted."""
    if equation.name in PRIMITIVES:
        return _BY_KERNELS
    of_rows = equation.name.startswith(("reduce", "cum", "arg", "sort", "top_k", "scatter"))
    return _BY_XLA if of_rows and equation.name != "reduce_precision" else None


def _rounds(equation: Equation) -> bool:
    return any(op.rounds_to for op in expressions.operations_of(equation))
