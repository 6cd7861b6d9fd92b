"""Walks through a program: from a product or to one, by equations that work element by element."""

from typing import NamedTuple

from jax_softmax.fusion import expressions, places
from jax_softmax.fusion.attention.products import NoAttention, Operand, Product
from jax_softmax.fusion.graph import bytes_of, is_variable, trampolined
from jax_softmax.fusion.places import factors_of, place_key

STRIDED_VIEWS = ("transpose", "reshape", "squeeze", "expand_dims")  # which a kernel can read by strides


class _Cut(NamedTuple):
    """A way to have a value: the arrays that are read, and the equations that make it of them and of known products."""

    arrays: frozenset
    equations: dict
    has_product: bool  # whether it is made of one of these


class Walks:
    def __init__(self, graph):
        self.graph = graph

    def product_of(self, a, place):
        """The one product of which a value is made, element by element, and its place."""
        count = len(factors_of(place))
        pending, seen, found = [(a, place)], set(), []
        while pending:
            a, place = pending.pop()
            maker = self.graph.maker_of(a)
            if maker is None or (a, place_key(place)) in seen or len(factors_of(place)) < count:
                continue
            seen.add((a, place_key(place)))
            if maker.name == "dot_general":
                found.append((maker, place))
            elif expressions.is_expressible(maker) and (inputs := places.input_places(maker, place)) is not None:
                pending += zip(maker.inputs, inputs, strict=True)
        if len(found) != 1:
            raise NoAttention(f"the scores are made of {len(found) or 'no'} product{'s' * (len(found) != 1)}")
        return found[0]

    def equations_before(self, a, place, products, of_scores) -> dict:
        """The equations by which a kernel makes a value of these products, by the variable that each makes.

        They leave fewest bytes to read. A function such as exp is left out where many scores share its result: unless
        the result has both factors `of_scores`, of queries and keys. What is made of a product is never read.
        """
        known = {key: _Cut(frozenset(), {}, True) for key in products}
        return trampolined(self._cut(a, place, known, of_scores)).equations

    def _cut(self, a, place, known, of_scores):
        if not is_variable(a):
            return _Cut(frozenset(), {}, False)
        key = a, place_key(place)
        if key in known:
            return known[key]
        known[key] = read = _Cut(frozenset([a]), {}, False)
        maker = self.graph.maker.get(a)
        inputs = None if maker is None or not expressions.is_expressible(maker) else places.input_places(maker, place)
        if inputs is None:
            return read
        arrays: frozenset = frozenset()
        equations: dict = {}
        has_product = False
        for operand, its_place in zip(maker.inputs, inputs, strict=True):
            more = yield self._cut(operand, its_place, known, of_scores)
            arrays, equations = arrays | more.arrays, equations | more.equations
            has_product |= more.has_product
        equations[a] = maker
        of_each = of_scores <= {id(f) for f in factors_of(place)}
        is_short = of_each or not any(map(expressions.is_long, equations.values()))
        if has_product or (sum(map(bytes_of, arrays)) <= bytes_of(a) and is_short):
            known[key] = _Cut(arrays, equations, has_product)
        return known[key]

    def reached(self, variables, place):
        return places.reached(self.graph, variables, place, expressions.is_expressible)

    def products_with(self, reached):
        """The products that read what was reached: each with the variable."""
        found = []
        for a, place in reached.items():
            for reader in self.graph.readers.get(a, ()):
                if reader.name == "dot_general":
                    found += [(Product(reader, place, k), a) for k in (0, 1) if reader.inputs[k] is a]
        return found

    def stored(self, operand, features) -> Operand:
        """The operand, or the first array of which it is a view, of those whose last dimension is the features."""
        found = operand
        while True:
            maker = self.graph.maker.get(operand.variable)
            if maker is None or maker.name not in STRIDED_VIEWS:
                break
            place = places.input_places(maker, operand.place)
            if place is None:
                break
            operand = Operand(maker.inputs[0], place[0])
            if operand.factors and operand.factors[-1] is features:
                found = operand
        return found
