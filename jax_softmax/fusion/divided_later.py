"""Products of exponentials that are divided by their sums, as (E v) / S: products of softmax(x) = E / S.

With c = t / S, the cotangent of a product, and w = t vᵀ: Eᵀ c is softmax(x)ᵀ t, c vᵀ is w / S, and the sum over
features of t (E v) is that over the row of E w. From the latter two `written_out.py` has the cotangent of x.
"""

from typing import NamedTuple

from jax_softmax.fusion import expressions, places, splicing
from jax_softmax.fusion.attention.products import Product
from jax_softmax.fusion.expressions import is_variable
from jax_softmax.fusion.graph import Equation
from jax_softmax.fusion.places import factors_of, key_of


class Quotients(NamedTuple):
    replacements: dict  # by equation, those in its place
    products: dict  # by variable that is w / S: w, and its place
    sums: (
        dict  # by variable that is a sum over features: its place, the numbers of rows that it is multiplied by, and w
    )


def found(graph, e, softmax, place, along, of_form, is_total) -> Quotients:
    """Of exponentials at a place, of which `along` are a row's own factors; `softmax` is a new variable.

    `of_form(a, place)`: the form of a value. `is_total(a, place)`: 1 if it is S, -1 if it is 1 / S.
    """
    walk = _Walk(graph, e, softmax, place, along, of_form, is_total)
    for a, its_place in walk.weights.items():
        for equation, k in _products_of(graph, a):
            product = Product(equation, its_place, k)
            if product.contracted == {id(f) for f in factors_of([along])}:
                walk.forward(equation, k, product)
    return walk.quotients


def _products_of(graph, a):
    return [(r, r.inputs.index(a)) for r in graph.readers.get(a, ()) if r.name == "dot_general"]


def _is_same(equation):
    """Whether its result's elements are its operand's, up to a rounding."""
    return expressions.is_view(equation) or equation.name in (*expressions.SAME, "convert_element_type")


class _Walk:
    def __init__(self, graph, e, softmax, place, along, of_form, is_total):
        self.graph, self.place, self.along = graph, place, along
        self.of_form, self.is_total = of_form, is_total
        self.weights = self._reached(e, place)
        self.of_weights = {e: softmax}
        self.new: list[Equation] = []
        self.quotients = Quotients({}, {}, {})

    def _reached(self, a, place, names=()):
        """The variables that are made of one, element by element, and their places."""
        reached, pending = {a: place}, [a]
        while pending:
            a = pending.pop()
            for reader in self.graph.readers.get(a, ()):
                if not _is_same(reader) and reader.name not in names:
                    continue
                (v,), out = reader.outputs, places.output_of(reader, reached[a], reader.inputs.index(a))
                if out is not None and v not in reached:
                    reached[v] = out
                    pending.append(v)
        return reached

    def _copied(self, a, known):
        """What a value is, made of others than it was: what these are is known."""
        if a not in known:
            maker = self.graph.maker[a]
            source = self._copied(maker.inputs[0], known)
            known[a] = type(a)(a.aval)
            self.new.append(Equation(maker.eqn, [source], [known[a]], maker.params))
        return known[a]

    def _product(self, equation, operands):
        (v,) = equation.outputs
        made = type(v)(v.aval)
        self.new.append(Equation(equation.eqn, operands, [made], equation.params))
        return made

    def _replace(self, equation, made):
        same = splicing.spliced(lambda a: a, [made], equation.outputs, equation)
        self.quotients.replacements[equation] = [*self.new, *same]
        self.new = []

    def forward(self, equation, k, product):
        (v,) = equation.outputs
        reached, known = self._reached(v, product.result), {}
        for d, place in reached.items():
            for reader in self.graph.readers.get(d, ()):
                total = self._total(reader, reader.inputs.index(d), place)
                if total is None:
                    continue
                if not known:
                    operands = list(equation.inputs)
                    operands[k] = self._copied(operands[k], self.of_weights)
                    known[v] = self._product(equation, operands)
                self._replace(reader, self._copied(d, known))
                for other in self.graph.readers[total]:
                    alike = other.name == reader.name and other.outputs[0].aval == reader.outputs[0].aval
                    if alike and other is not reader and self._total(other, 1 - other.inputs.index(total), place):
                        t = other.inputs[1 - other.inputs.index(total)]
                        self._backward(other.outputs[0], t, place, product, v)

    def _total(self, equation, k, place):
        """The sums, or their inverse, if a value is divided by them."""
        if equation.name not in ("mul", "div") or equation.outputs[0].aval.shape != equation.inputs[k].aval.shape:
            return None
        if (equation.name == "div" and k == 1) or not is_variable(equation.inputs[1 - k]):
            return None
        its_place = places.inputs_of(equation, place)[1 - k]
        power = 1 if equation.name == "div" else -1
        return equation.inputs[1 - k] if self.is_total(equation.inputs[1 - k], its_place) == power else None

    def _backward(self, c, t, place, product, v):
        known, (features,) = {c: t}, [frozenset(id(f) for f in factors_of(product.own))]
        made = None
        for a, its_place in self._reached(c, place).items():
            for equation, k in _products_of(self.graph, a):
                other, operands = equation.inputs[1 - k], list(equation.inputs)
                if other in self.weights and self._shares_rows(equation, k, its_place):
                    operands[k], operands[1 - k] = self._copied(a, known), self._copied(other, self.of_weights)
                    self._replace(equation, self._product(equation, operands))
                elif other is product.other.variable and made is None:
                    before = Product(equation, its_place, k)
                    at = self._place_of_elements(before, product)
                    if before.contracted == features and at is not None:
                        operands[k] = self._copied(a, known)
                        made = self._product(equation, operands), at
                        self.quotients.products[equation.outputs[0]] = made
        self._sums(v, t, product, features, made)

    def _shares_rows(self, equation, k, place):
        """Whether an operand lies among the other one's rows, to each of which a sum belongs."""
        weights = self.weights[equation.inputs[1 - k]]
        expected = Product(equation, weights, 1 - k).other.place
        rows = {id(f) for f in factors_of(self.place)} - {id(f) for f in factors_of([self.along])}
        both = ([[id(f) for f in factors_of([dim]) if id(f) in rows] for dim in p] for p in (expected, place))
        return next(both) == next(both) and rows <= {id(f) for f in factors_of(place)}

    def _place_of_elements(self, before, product):
        """Of a product with the values, if it has a dimension of theirs where the rows have their own."""
        fresh = {id(f) for f in factors_of(before.own)}
        for mine, theirs in zip(before.other.place, product.other.place, strict=True):
            is_along = key_of([theirs]) == key_of([self.along])
            if key_of([mine]) != key_of([theirs]) and not (is_along and {id(f) for f in factors_of([mine])} <= fresh):
                return None
        return [self.along if dim and {id(f) for f in factors_of([dim])} <= fresh else dim for dim in before.result]

    def _sums(self, v, t, product, features, made):
        """The sums over features of the product times its cotangent."""
        for a, place in self._reached(v, product.result, ("mul", "div", "neg")).items():
            for equation in self.graph.readers.get(a, ()) if made else ():
                if equation.name != "reduce_sum":
                    continue
                over = {id(f) for d in equation.params["axes"] for f in factors_of([place[d]])}
                form = self.of_form(a, place)
                if over != features or len(form) != 1:
                    continue
                ((factors, c),) = form.items()
                of = {getattr(factor, "variable", None): (factor, power) for factor, power in factors}
                if of.get(v, (None, 0))[1] == of.get(t, (None, 0))[1] == 1:
                    rest = [dim for d, dim in enumerate(place) if d not in equation.params["axes"]]
                    self.quotients.sums[equation.outputs[0]] = rest, {factors - {of[v], of[t]}: c}, made
