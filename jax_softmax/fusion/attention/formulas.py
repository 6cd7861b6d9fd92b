"""The program's scores, weights and their derivatives as expressions, of which kernels are printed."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax.numpy as jnp

from jax_softmax import _kernels
from jax_softmax.fusion.attention.call import Attention, SideCotangent
from jax_softmax.fusion.attention.letters import LetteredSide
from jax_softmax.fusion.attention.linear import is_linear, multipliers, without_roundings
from jax_softmax.fusion.attention.walks import NoAttention
from jax_softmax.fusion.program import expressions
from jax_softmax.fusion.program.expressions import Expression, Expressions, Names, Number, Operation, SideVariable
from jax_softmax.fusion.program.graph import is_variable
from jax_softmax.fusion.program.places import Place, place_key
from jax_softmax.fusion.program.products import Operand
from jax_softmax.fusion.program.walk import Inside
from jax_softmax.primitives.types import Atom, Var

if TYPE_CHECKING:
    from jax_softmax.fusion.attention.learned import OfSide
    from jax_softmax.fusion.attention.matcher import Match


class Formulas:
    """The attention of a match (`matcher.py`), and the side operands of its expressions."""

    def __init__(self, match: "Match") -> None:
        """Raises NoAttention, with the reason, or NotFolded."""
        self.match, self.graph, self.walks, self.rows = match, match.graph, match.walks, match.rows
        self.own: Names = {(match.pairs.x, place_key(match.pairs.place)): "x0"}
        shared = self._shared = Expressions(self.own, parts=self.walks.parts)
        rows = self.rows
        score = shared.make(rows.scores, rows.place, self._equations_before(rows.scores, rows.place, self.own))
        for mask in match.masks:
            score = self._masked(score, mask)
        weights = {self._weight_of(a) for _, a in match.with_weights}
        if len(weights) > 1:
            raise NoAttention("products read different weights")
        weight = next(iter(weights), self._weight_of_tangents() or Expression((), "y"))
        score_tangent = self._score_tangent(weight)
        n_forward = len(shared.sides)
        transposed: tuple[Expression | None, Expression | None] = None, None
        if match.linear is not None:
            transposed = self._transposed(weight)
        side_cotangents = tuple(map(self._side_cotangent, match.of_sides))
        if sum({"i", "j"} <= set(one.letters) and one.kernel == "queries" for one in side_cotangents) > 1:
            raise NoAttention("several arrays of queries x keys are made of the scores' gradient")
        learned = [set(Operand(None, one.place).letters(match.names)) for one in match.of_sides]
        self.attention = Attention(
            match.letters,
            tuple(self._side(side, learned) for side in shared.sides),
            n_forward,
            score,
            weight,
            *transposed,
            score_tangent,
            side_cotangents=side_cotangents,
            sink_is_learned=match.linear is not None and bool(rows.sinks_of(match.linear.outputs[0])),
            empty_rows_are_zero=bool(match.masks) or rows.sink is not None,
        )

    @property
    def arrays(self) -> list[Operand]:
        """The arrays among the side operands."""
        return [Operand(side.variable, side.place) for side in self._shared.sides if side.factor is None]

    def _equations_before(self, a: Atom, place: Place, products: Names) -> Inside:
        return self.walks.equations_before(a, place, products, frozenset({self.match.i, self.match.j}))

    def _inside(self, a: Var, reached: dict[Var, Place], known: Names) -> Inside:
        """The equations that make a value which was reached, and those that make other operands of these, of variables
        at places that are known."""
        inside, pending = Inside(), [a]
        while pending:
            b = pending.pop()
            if b in inside or b not in reached or b not in self.graph.maker:
                continue
            maker = self.graph.maker[b]
            if not expressions.is_expressible(maker):
                continue
            inside[b] = maker
            for operand, its_place in expressions.required_operands(maker, reached[b], self.walks.parts):
                if is_variable(operand) and operand not in reached:
                    inside |= self._equations_before(operand, its_place, known)
                elif is_variable(operand):
                    pending.append(operand)
        return inside

    def _weight_of(self, a: Var) -> Expression:
        return self._linear_expression("y", self.rows.weights, a, self.match.reached)

    def _linear_expression(self, name: str, sources: Sequence[Var], a: Var, reached: dict[Var, Place]) -> Expression:
        """What was reached from the sources, as an expression of these, which have a name."""
        names = {**self.own} | {(source, place_key(reached[source])): name for source in sources}
        if self.match.linear is not None:
            t, place = self.match.sum_of_products
            names[t, place_key(place)] = "t"
        inside = self._inside(a, {b: p for b, p in reached.items() if b not in sources}, names)
        found = Expressions(names, self._shared.sides, self.walks.parts).make(a, reached[a], inside)
        if not is_linear(found, name):  # skipped tiles would leave out what is added to weights of 0
            raise NoAttention("weights or gradients go through what is not linear")
        return found

    def _transposed(self, weight: Expression) -> tuple[Expression, Expression]:
        """Two transposed maps: of the scores' cotangent g to the product's, and of the product t of values with the
        output's cotangent to the weights' cotangent."""
        cotangents = {gradient.cotangent for gradient in self.match.gradients}
        found = {self._linear_expression("g", self.match.of_scores, a, self.match.reached_after) for a in cotangents}
        if len(found) != 1:
            raise NoAttention("products read different gradients of the scores")
        (of_score,) = found
        t, place = self.match.sum_of_products
        own = {(t, place_key(place)): "t"}
        before = self._equations_before(self.match.cotangent, self.rows.place, own)
        of_t = Expressions(own, self._shared.sides, self.walks.parts)
        of_weight = of_t.make(self.match.cotangent, self.rows.place, before)
        if not is_linear(of_weight, "t") or multipliers(weight, "y") != multipliers(of_weight, "t"):
            raise NoAttention("the weights' gradient is not that of the weights")
        return of_score, without_roundings(of_weight, "t")

    def _weight_of_tangents(self) -> Expression | None:
        """What the weights' tangents are multiplied with, if there are any."""
        if (tangents := self.match.tangents) is None:
            return None
        return self._linear_expression("y", tangents.linear.outputs, tangents.weights, tangents.reached)

    def _score_tangent(self, weight: Expression) -> Expression | None:
        """The scores' tangent, of the product's tangent x1. Weights' tangents are multiplied as weights are."""
        tangents, of_weights = self.match.tangents, self._weight_of_tangents()
        if tangents is None or of_weights is None:
            return None
        if multipliers(of_weights, "y") != multipliers(weight, "y"):
            raise NoAttention("the weights' tangent is not that of the weights")
        (x1, place), scores = tangents.product, tangents.linear.inputs[1]
        own: Names = {**self.own, (x1, place_key(place)): "x1"}
        before = self._equations_before(scores, self.rows.place, own)
        return Expressions(own, self._shared.sides, self.walks.parts).make(scores, self.rows.place, before)

    def _masked(self, score: Expression, mask: Atom) -> Expression:
        """The score where a mask is true, and -inf elsewhere."""
        shape, x = mask.aval.shape, self.rows.scores.aval.shape
        place = [self.rows.place[d] if n > 1 else [] for d, n in enumerate(shape, len(x) - len(shape))]
        of_mask = self._shared.make(mask, place, self._equations_before(mask, place, {})).after(score)
        dtype = self.rows.scores.aval.dtype.name
        choice = of_mask.result, Number(-float("inf"), dtype), score.result
        select = Operation("select_n", choice, ("bool", dtype, dtype), dtype)
        return Expression((*of_mask.operations, select), f"v{len(of_mask.operations)}")

    def _side_cotangent(self, of_side: "OfSide") -> SideCotangent:
        """The kernel that sums as much of a side's cotangent as one can."""
        match, letters, dtype = self.match, self.match.letters, of_side.variable.aval.dtype.name
        expression = None
        for name, sources, reached, a in of_side.steps:
            step = self._linear_expression(name, sources, a, reached)
            expression = step if expression is None else without_roundings(step, name).after(expression, name)
        assert expression is not None
        left = set(Operand(None, of_side.place).letters(match.names))
        if "j" not in left:
            return SideCotangent(expression, "queries", letters.rows, "float32")
        if left <= set(letters.k):
            return SideCotangent(expression, "keys", letters.batch_of_keys + "j", "float32")
        kept = "".join(c for c in letters.batch if c in left)
        if kept == letters.batch:
            return SideCotangent(expression, "queries", letters.rows + "j", dtype)
        parts = self._parts(kept)
        return SideCotangent(expression, "scores", f"p{kept}ij", dtype if parts == 1 else "float32", parts)

    def _parts(self, kept: str) -> int:
        """The parts in which the sum over the batch of a bias's gradient is made, so that there are enough blocks."""
        extents, letters = self.match.extents, self.match.letters
        features, size = (extents["d"], extents["e"]), jnp.dtype(self.match.dtype).itemsize
        rows, step, _ = _kernels.attention_tile("scores", extents["i"], *features, size, True, compute_capability=0)
        blocks = math.prod(extents[c] for c in kept) * -(-extents["i"] // rows) * -(-extents["j"] // step)
        summed = math.prod(extents[c] for c in letters.batch if c not in kept)
        return min(summed, -(-_kernels.ATTENTION_BLOCKS // blocks))

    def _side(self, side: SideVariable, learned: list[set[str]]) -> LetteredSide:
        try:
            if side.factor is not None:
                return LetteredSide(self.match.names[side.factor], "index")
            dtype = side.variable.aval.dtype.name
            if dtype not in expressions.READABLE:
                raise NoAttention(f"scores read an array of {dtype}")
            letters = Operand(side.variable, side.place).letters(self.match.names)
            if {"i", "j"} <= set(letters):  # kernels copy rows of keys, so these are transposed until keys are last
                letters = letters.replace("j", "") + "j"
            return LetteredSide(letters, dtype, set(letters) in learned)
        except KeyError:
            raise NoAttention("scores read an array with a dimension of its own") from None
