"""Forward mode: the softmax's linear map of the scores' tangents, whose result is multiplied with values.

With scores s(x) of x = q kᵀ, the tangent of x is the sum of q' kᵀ and q k'ᵀ, if both move; s' is made of it and of x.
The weights' tangents are the linear map of s', and the output's is their product with v, plus that of the weights with
v'.
"""

from typing import TYPE_CHECKING

from jax_softmax.fusion.attention.values import is_same
from jax_softmax.fusion.attention.walks import NoAttention
from jax_softmax.fusion.program.expressions import NotFolded
from jax_softmax.fusion.program.graph import Equation
from jax_softmax.fusion.program.kinds import is_strided_view
from jax_softmax.fusion.program.places import Factor, Place, factors_of, output_place
from jax_softmax.fusion.program.products import Operand, Product
from jax_softmax.primitives.types import Atom

if TYPE_CHECKING:
    from jax_softmax.fusion.attention.matcher import Match


# The product's tangent and its place; the products of which it is the sum; and the tangents of queries and keys among
# their operands, each with its name, the number of its pair, and its features.
_Found = tuple[tuple[Atom, Place], list[Product], dict[tuple[str, int], tuple[Operand, Factor]]]


def found(match: "Match") -> "Tangents | None":
    """The tangents of a match, if there are any."""
    made_of = {equation: made for equation in match.maps if (made := _made_of(match, equation)) is not None}
    if len(made_of) > 1:
        raise NoAttention("it has several tangents")
    if made_of and match.rows.sink is not None:
        raise NoAttention("the tangent of a softmax with a column of its own")
    return next((Tangents(match, *of) for of in made_of.items()), None)


class Tangents:
    """Those of a match: of its scores, its weights and its output."""

    def __init__(self, match: "Match", linear: Equation, made_of: _Found) -> None:
        """Takes the product of weights with values' tangents out of the match's outputs."""
        self.match, self.walks = match, match.walks
        self.linear = linear  # the softmax's map, from the scores' tangents to the weights'
        # The tangent of the product of queries and keys, and its place, and the products of which it is the sum.
        self.product, self.terms, operands = made_of
        self.operands: dict[str, list[Operand]] = {}  # the tangents, by the names q, k and v: of all pairs
        for (name, _), (operand, _) in sorted(operands.items(), key=lambda one: one[0]):
            self.operands.setdefault(name, []).append(operand)
        self.names = {features: "d" for _, features in operands.values()}  # letters of their features
        self.reached = self.walks.reached(linear.outputs, match.rows.place)  # of the weights' tangents
        ((self.output, self.weights),) = self.walks.products_with(self.reached)  # the product of these with values
        self.result = self._of_output()  # the output's tangent
        values, features = self.walks.stored_other(self.output), self.output.features
        if not all(is_same(values, features, self.walks.stored_other(p), p.features) for p, _ in match.outputs):
            raise NoAttention("the tangent of one of several values")

    def _of_output(self) -> Operand:
        """The output's tangent: the product of the weights' tangents with values, or its sum with that of weights with
        values' tangents, which is no output then."""
        whole = self._sum(self.output)
        for product, _ in self.match.outputs if whole else ():
            other = self._sum(product)
            if whole and other and is_same(whole, self.output.features, other, product.features):
                self.operands["v"] = [self.walks.stored_other(product)]
                self.names[product.features] = "e"
                self.match.outputs = [one for one in self.match.outputs if one[0] is not product]
                return whole
        return Operand(self.output.equation.outputs[0], self.output.result)

    def _sum(self, product: Product) -> Operand | None:
        """The sum of which a product's result, or a view of that, is a term, where nothing else reads it."""
        of, graph = Operand(product.equation.outputs[0], product.result), self.match.graph
        while len(readers := graph.readers.get(of.variable, [])) == 1 and of.variable not in graph.results:
            is_sum, place = readers[0].name in ("add", "add_any"), output_place(readers[0], of.place, 0)
            if place is None or not (is_sum or is_strided_view(readers[0])):
                break
            of = Operand(readers[0].outputs[0], place)
            if is_sum:  # of whole dimensions
                return of if set(of.factors) == set(factors_of(product.result)) else None
        return None


def _made_of(match: "Match", equation: Equation) -> _Found | None:
    """What a linear map's operand is made of; None if that is not the scores' tangents."""
    walks, place, pairs = match.walks, match.rows.place, match.pairs.each
    after = walks.products_with(walks.reached(equation.outputs, place))
    if len(after) != 1 or after[0][0].contracted != {match.j}:
        return None
    product, _ = after[0]
    values = walks.stored_other(product)
    outputs = ((walks.stored_other(p), p.features) for p, _ in match.outputs)
    is_of_output = any(is_same(values, product.features, *of) for of in outputs)
    if not is_of_output and any(is_same(values, product.features, pair.k, pair.features) for pair in pairs):
        return None  # the gradient of queries, where keys are values as well
    operands: dict[tuple[str, int], tuple[Operand, Factor]] = {}
    try:
        made_of, terms = walks.sum_of_products(equation.inputs[1], place, match.j, match.pairs.x)
        for product in terms:
            at_k, d = match.pairs.operand_with_keys(product, "the scores' tangent"), product.features
            q, k = (walks.stored(product, n) for n in (1 - at_k, at_k))
            of_pairs = [("q", n) for n, pair in enumerate(pairs) if is_same(k, d, pair.k, pair.features)]
            of_pairs += [("k", n) for n, pair in enumerate(pairs) if is_same(q, d, pair.q, pair.features)]
            free = [one for one in of_pairs if one not in operands]  # pairs may have the same queries
            operands |= {one: (q if one[0] == "q" else k, d) for one in free[:1]}
    except (NoAttention, NotFolded):
        return None
    numbers = [{n for of, n in operands if of == name} for name in "qk"]  # of no pair, or of all
    are_all = len(operands) == len(terms) and all(len(of) in (0, len(pairs)) for of in numbers)
    return (made_of, terms, operands) if are_all else None
