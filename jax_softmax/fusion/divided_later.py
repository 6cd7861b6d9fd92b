"""Products of exponentials that are divided by their sums, (E v) / S: they become products of softmax(x) = E / S.

With c = t / S, the cotangent of a product, and w = t vᵀ: Eᵀ c is softmax(x)ᵀ t, c vᵀ is w / S, and the sum over
features of t (E v) is the sum over the row of E w. Of the latter two `written_out.py` makes the cotangent of x.
"""

from typing import NamedTuple

from jax_softmax.fusion import places, splicing
from jax_softmax.fusion.attention.products import Product
from jax_softmax.fusion.graph import Equation
from jax_softmax.fusion.places import factors_of, place_key


class Quotients(NamedTuple):
    replacements: dict  # by equation: the list of equations instead of it
    new: list[Equation]  # which these need
    products: dict  # by variable that is w / S: w, and its place
    sums: dict  # by variable that is a sum over features: its place, the form of what it is multiplied by, and w


def quotients_of(forms, e, softmax) -> Quotients:
    """Of the variable e that is E, in the graph and the words of `forms`; `softmax` is a new variable, for E / S."""
    walk = _Walk(forms, e, softmax)
    for a, place in walk.weights.items():
        for equation, k in _products_of(forms.graph, a):
            product = Product(equation, place, k)
            if product.contracted == {id(f) for f in factors_of([forms.along])}:
                walk.replace_products(equation, k, product)
    return walk.quotients


_BY_ELEMENTS = ("mul", "div", "neg")


def _products_of(graph, a):
    return [(r, r.inputs.index(a)) for r in graph.readers.get(a, ()) if r.name == "dot_general"]


class _Walk:
    def __init__(self, forms, e, softmax):
        self.forms, self.graph = forms, forms.graph
        self.weights = self._reached(e, forms.place)
        self.of_weights = {e: softmax}
        self.quotients = Quotients({}, [], {}, {})

    def _reached(self, a, place, names=()):
        """Copies of a variable, and what equations of these names make of it or them; with their places."""
        return places.reached(self.graph, [a], place, lambda e: splicing.is_alike(e) or e.name in names)

    def _copied(self, a, known):
        """A new variable for a copy of a variable that `known` replaces: the same copy of the replacement."""
        if a not in known:
            maker = self.graph.maker[a]
            source = self._copied(maker.inputs[0], known)
            known[a] = type(a)(a.aval)
            self.quotients.new.append(Equation(maker.eqn, [source], [known[a]], maker.params))
        return known[a]

    def _product(self, equation, operands):
        """A new variable for the same product of other operands."""
        (v,) = equation.outputs
        made = type(v)(v.aval)
        self.quotients.new.append(Equation(equation.eqn, operands, [made], equation.params))
        return made

    def _note_replacement(self, equation, made):
        """An equation's result becomes a copy of a new variable."""
        self.quotients.replacements[equation] = splicing.spliced(lambda a: a, [made], equation.outputs, equation)

    def replace_products(self, equation, k, product):
        """(E v) / S by softmax(x) v, and then its gradients."""
        (v,) = equation.outputs
        known: dict = {}
        for d, place in self._reached(v, product.result).items():
            for reader in self.graph.readers.get(d, ()):
                if not self._is_quotient(reader, reader.inputs.index(d), place):
                    continue
                if not known:
                    operands = list(equation.inputs)
                    operands[k] = self._copied(operands[k], self.of_weights)
                    known[v] = self._product(equation, operands)
                self._note_replacement(reader, self._copied(d, known))
        for d, place in self._reached(v, product.result).items():
            for equation, k in self._divisions_like(d):
                if equation not in self.quotients.replacements and self._is_quotient(equation, k, place):
                    self._replace_gradients(equation.outputs[0], equation.inputs[k], place, product, v)

    def _divisions_like(self, d):
        """The equations that may divide an array of this shape by the sums S: by which operand that is."""
        readers = (r for a in self.weights for r in self.graph.readers.get(a, ()))
        sums, found = [v for r in readers if r.name == "reduce_sum" for v in r.outputs], {}
        for v in sums:
            for reader in self.graph.readers.get(v, ()):
                if reader.name in ("mul", "div") and reader.outputs[0].aval.shape == d.aval.shape:
                    found |= {reader: 1 - reader.inputs.index(v)}
                elif splicing.is_alike(reader) or reader.name == "div":
                    sums += [w for w in reader.outputs if w not in sums]
        return found.items()

    def _is_quotient(self, equation, k, place):
        """Whether the k-th operand, at a place, is divided by the sums S."""
        if equation.name not in ("mul", "div") or equation.outputs[0].aval.shape != equation.inputs[k].aval.shape:
            return False
        if equation.name == "div" and k == 1:
            return False
        place = places.input_places(equation, place)[1 - k]
        return self.forms.power_of_sums(equation.inputs[1 - k], place) == (1 if equation.name == "div" else -1)

    def _replace_gradients(self, c, t, place, product, v):
        """Those of a product E v, whose cotangent c = t / S was found; t and c have a place."""
        known, (features,) = {c: t}, [frozenset(id(f) for f in factors_of(product.new_dims))]
        made = None
        for a, its_place in self._reached(c, place).items():
            for equation, k in _products_of(self.graph, a):
                other, operands = equation.inputs[1 - k], list(equation.inputs)
                if other in self.weights and self._shares_rows(equation, k, its_place):
                    operands[k], operands[1 - k] = self._copied(a, known), self._copied(other, self.of_weights)
                    self._note_replacement(equation, self._product(equation, operands))
                elif other is product.other.variable and made is None:
                    before = Product(equation, its_place, k)
                    at = self._place_of_elements(before, product)
                    if before.contracted == features and at is not None:
                        operands[k] = self._copied(a, known)
                        made = self._product(equation, operands), at
                        self.quotients.products[equation.outputs[0]] = made
        self._sums(v, (t, place), product, features, made)

    def _shares_rows(self, equation, k, place):
        """Whether an operand has the same rows as the other one, at the same dimensions: each row has its own S."""
        weights = self.weights[equation.inputs[1 - k]]
        expected = Product(equation, weights, 1 - k).other.place
        rows = {id(f) for f in factors_of(self.forms.place)} - {id(f) for f in factors_of([self.forms.along])}
        both = ([[id(f) for f in factors_of([dim]) if id(f) in rows] for dim in p] for p in (expected, place))
        return next(both) == next(both) and rows <= {id(f) for f in factors_of(place)}

    def _place_of_elements(self, before, product):
        """The place of c vᵀ: the elements of x; None if its dimensions are others."""
        fresh = {id(f) for f in factors_of(before.new_dims)}
        for mine, theirs in zip(before.other.place, product.other.place, strict=True):
            is_along = place_key([theirs]) == place_key([self.forms.along])
            has_new_keys = is_along and {id(f) for f in factors_of([mine])} <= fresh
            if place_key([mine]) != place_key([theirs]) and not has_new_keys:
                return None
        return [
            self.forms.along if dim and {id(f) for f in factors_of([dim])} <= fresh else dim for dim in before.result
        ]

    def _sums(self, v, t, product, features, made):
        """Notes the sums over features of the product E v times its cotangent."""
        for a, place in self._reached(v, product.result, _BY_ELEMENTS).items():
            for equation in self.graph.readers.get(a, ()) if made else ():
                if equation.name != "reduce_sum":
                    continue
                over = {id(f) for d in equation.params["axes"] for f in factors_of([place[d]])}
                rest = self.forms.ratio((a, place), ((v, product.result), t))
                if over == features and rest is not None:
                    its_place = [dim for d, dim in enumerate(place) if d not in equation.params["axes"]]
                    self.quotients.sums[equation.outputs[0]] = its_place, rest, made
