"""Walks through a program: from a product or to one, by equations that work element by element."""

import math
from collections.abc import Generator, Iterable, Mapping
from typing import Any

from jax_softmax.fusion.forms.one_hot import is_zero
from jax_softmax.fusion.program import expressions, splicing, walk
from jax_softmax.fusion.program.expressions import Names
from jax_softmax.fusion.program.graph import Equation, Graph, bytes_of, each_once, is_variable, trampolined
from jax_softmax.fusion.program.kinds import is_strided_view
from jax_softmax.fusion.program.places import Factor, Parts, Place, Placed, PlaceKey, count_of, input_places, place_key
from jax_softmax.fusion.program.products import Operand, Product
from jax_softmax.fusion.program.walk import Cut, Inside
from jax_softmax.primitives.types import Atom, Var

_SUMS, _MOST_TERMS = ("add", "add_any"), 32  # of more, the features are more than kernels have
_PRODUCT = "a product"  # among the costs of a cut: a value that is made of one


class NoAttention(Exception):
    """Why a softmax is not attention."""


class Walks:
    """The walks of one attention, whose places have common `parts`."""

    def __init__(self, graph: Graph) -> None:
        self.graph, self.parts = graph, Parts()

    def products_of(self, a: Atom, place: Place, keys: Factor) -> list[tuple[Atom, Place, list[Product]]]:
        """The products of which a value is made, element by element, with their places, which have the keys: first sums
        of several, whose other operands have all the sum's dimensions but the keys, and then each; first that of most
        features."""

        def is_of_pairs(place: Place, products: list[Product]) -> bool:
            others = set(self.parts.factors_of(place)) - {keys}
            operands = (self.parts.factors_of(product.operand(k).place) for product in products for k in (0, 1))
            are_whole = all(keys in factors or others.issubset(factors) for factors in operands)
            return are_whole and len({product.equation for product in products}) == len(products) > 1

        sums = [one for one in self._made_of(a, place, keys, True) if is_of_pairs(*one[1:])]
        found = self._made_of(a, place, keys, False)
        found.sort(key=lambda one: -math.prod(f.extent for f in one[2][0].contracted))
        return sums + found

    def sum_of_products(
        self, a: Atom, place: Place, keys: Factor, known: Atom | None = None
    ) -> tuple[tuple[Atom, Place], list[Product]]:
        """The product, or the sum of products, of which a value is made, element by element, with its place; and all
        that are in it. What is known does not count; of that, and of no product, a value may be made, too."""
        found = self._made_of(a, place, keys, True, known)
        if not found and known is not None:
            return (known, []), []
        if len(found) != 1:
            raise NoAttention(f"the weights' gradient is made of {len(found) or 'no'} product{'s' * (len(found) != 1)}")
        ((variable, place, products),) = found
        return (variable, place), products

    def _made_of(
        self, a: Atom, place: Place, keys: Factor, are_sums_one: bool, known: Atom | None = None
    ) -> list[tuple[Atom, Place, list[Product]]]:
        """The products of which a value is made, each with its place; or so sums of products. Of those that have the
        keys, only the largest count: where examples share a product, it is broadcast to the scores."""
        found: list[tuple[Atom, Place, list[Product]]] = []

        def following(node: Placed) -> Iterable[Placed]:
            a, place = node
            maker = self.graph.maker_of(a)
            if maker is None or a is known or keys not in self.parts.factors_of(place):
                return ()
            if maker.name == "dot_general" or (are_sums_one and maker.name in _SUMS):
                terms = trampolined(self._terms(a, place, keys))
                if terms is not None:
                    found.append((a, place, terms))
                    return ()
            operands = self.parts.operands(maker, place) if expressions.is_expressible(maker) else None
            return [operand for operand in operands or () if is_variable(operand[0])]

        start: list[Placed] = [(a, place_key(place))]
        for _ in each_once(start, following):
            pass
        counts = [count_of(place) for _, place, _ in found]
        return [one for one, count in zip(found, counts, strict=True) if count == max(counts)]

    def _terms(self, a: Atom, place: Place, keys: Factor) -> Generator[Any, Any, list[Product] | None]:
        """The products whose sum a value is; None if it is not, or if one does not have the keys."""
        maker = self.graph.maker_of(a)
        if maker is None or keys not in self.parts.factors_of(place):
            return None
        if maker.name == "dot_general":
            return [Product(maker, place)]
        is_sum = maker.name in _SUMS or splicing.is_alike(maker)
        is_sum &= a.aval.dtype.name in expressions.WRITABLE
        found: list[Product] = []
        for operand in (self.parts.operands(maker, place) if is_sum else None) or ():
            if is_zero(self.graph, operand[0]):  # with which `sum` of Python begins
                continue
            terms = yield self._terms(*operand, keys)
            if terms is None or len(found) + len(terms) > _MOST_TERMS:
                return None
            found += terms
        return found or None

    def equations_before(self, a: Atom, place: Place, products: Names, of_scores: frozenset[Factor]) -> Inside:
        """The equations by which a kernel makes a value of these products, by the variable that each makes.

        They leave fewest bytes to read. A function such as exp is left out where many scores share its result: unless
        the result has both factors `of_scores`, of queries and keys. What is made of a product is never read.
        """
        return _Cuts(self, products, of_scores).before(a, place_key(place)).equations

    def reached(self, variables: Iterable[Var], place: Place) -> dict[Var, Place]:
        return walk.reached(self.graph, variables, place, expressions.is_expressible, self.parts)

    def products_with(self, reached: Mapping[Var, Place]) -> list[tuple[Product, Var]]:
        """The products that read what was reached: each with the variable."""
        found = []
        for a, place in reached.items():
            for reader in self.graph.readers.get(a, ()):
                if reader.name == "dot_general":
                    found += [(Product(reader, place, k), a) for k in (0, 1) if reader.inputs[k] is a]
        return found

    def stored_other(self, product: Product) -> Operand:
        """As `stored`, of the operand whose place was not known."""
        assert product.k is not None
        return self.stored(product, 1 - product.k)

    def stored(self, product: Product, k: int) -> Operand:
        """A product's k-th operand, or the first array of which it is a view, of those whose last dimension is the
        features; if there are none, just the first. A view that makes one dimension of several, as of a map of
        features, is an array itself, unless it is a dimension of both operands."""
        operand, found = product.operand(k), None
        of_both = [f for f in product.operand(1 - k).factors if f not in product.contracted]
        whole = self.parts.factors_of([[f for f in operand.factors if not any(map(f.overlaps, of_both))]])
        while True:
            if operand.factors and operand.factors[-1] == product.features:
                found = operand
            maker = self.graph.maker_of(operand.variable)
            viewed = None
            if maker is not None and is_strided_view(maker) and not _splits(maker, operand.place, whole):
                viewed = self.parts.operands(maker, operand.place)
            if viewed is None:
                return operand if found is None else found
            operand = Operand(*viewed[0])


def _splits(view: Equation, place: Place, whole: Iterable[Factor]) -> bool:
    """Whether a view is of an array that has one of these factors as several dimensions."""
    before = [f for found in input_places(view, place) or () for dim in found for f in dim]
    return any(f.overlaps(one) and f.extent < one.extent for f in before for one in whole)


class _Cuts(walk.Cuts):
    """The cheapest cuts before what a kernel of attention makes of products."""

    def __init__(self, walks: Walks, products: Names, of_scores: frozenset[Factor]) -> None:
        super().__init__(walks.graph, walks.parts, {node: Cut({_PRODUCT: 0}, {}) for node in products})
        self.of_scores = of_scores

    def own_cost(self, maker: Equation, at: PlaceKey) -> float:
        assert self.parts is not None
        is_of_each = self.of_scores.issubset(self.parts.factors_of(at))
        return math.inf if expressions.is_long(maker) and not is_of_each else 0

    def cheapest(self, a: Var, made: Cut | None) -> Cut:
        if made is not None and (_PRODUCT in made.costs or made.cost <= bytes_of(a)):
            return made
        return Cut({a: bytes_of(a)}, {})
