"""Products of exponentials that are divided by their sums, (E v) / S: they become products of softmax(x) = E / S.

With c = t / S, the cotangent of a product, and w = t vᵀ: Eᵀ c is softmax(x)ᵀ t, c vᵀ is w / S, and the sum over
features of t (E v) is the sum over the row of E w. Of the latter two `gradients.py` makes the cotangent of x.
"""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from jax_softmax.fusion.forms.polynomials import Form, Forms
from jax_softmax.fusion.program import places, splicing
from jax_softmax.fusion.program.graph import Equation, Graph
from jax_softmax.fusion.program.places import Place, factor_set, place_key
from jax_softmax.fusion.program.products import Product
from jax_softmax.fusion.program.walk import reached
from jax_softmax.primitives.types import Atom, Var


class Quotients(NamedTuple):
    """What replaces products that are divided by S, and what the forms of their gradients are made of."""

    replacements: dict[Equation, list[Equation]]
    new: list[Equation]  # which these need
    products: dict[Var, tuple[Var, Place]]  # by variable that is w / S: w, and its place
    # By variable that is a sum over features: its place, the form of what it is multiplied by, and w with its place.
    sums: dict[Var, tuple[Place, Form, tuple[Var, Place]]]


def quotients_of(forms: Forms, e: Var, softmax: Var) -> Quotients:
    """The quotients of products of E, a variable e; `softmax` is a new variable, for E / S."""
    walk = _Walk(forms, e, softmax)
    for a, place in walk.exponentials.items():
        for equation, k in _products_of(forms.graph, a):
            product = Product(equation, place, k)
            if product.contracted == factor_set([forms.along]):
                walk.replace_products(equation, k, product)
    return walk.quotients


_BY_ELEMENTS = ("mul", "div", "neg")


def _products_of(graph: Graph, a: Var) -> list[tuple[Equation, int]]:
    """The products that read a variable, and as which operand."""
    return [(r, r.inputs.index(a)) for r in graph.readers.get(a, ()) if r.name == "dot_general"]


class _Walk:
    """A walk from E to the products that are divided, and to their gradients."""

    def __init__(self, forms: Forms, e: Var, softmax: Var) -> None:
        self.forms, self.graph = forms, forms.graph
        self.exponentials: Mapping[Any, Place] = self._reached(e, forms.place)
        self.weights_of: dict[Atom, Var] = {e: softmax}  # new variables for E / S, by those that are E
        self.quotients = Quotients({}, [], {}, {})

    def _reached(self, a: Var, place: Place, names: tuple[str, ...] = ()) -> dict[Var, Place]:
        """Copies of a variable, and what equations of these names make of it or them; with their places."""
        return reached(self.graph, [a], place, lambda e: splicing.is_alike(e) or e.name in names, places.Parts())

    def _copied(self, a: Atom, instead: dict[Atom, Var]) -> Var:
        """A new variable for a copy of a variable that `instead` replaces: the same copy of the replacement."""
        if a not in instead:
            maker = self.graph.maker_of(a)
            assert maker is not None
            source = self._copied(maker.inputs[0], instead)
            instead[a] = Var(a.aval)
            self.quotients.new.append(Equation(maker.eqn, [source], [instead[a]], maker.params))
        return instead[a]

    def _product(self, equation: Equation, operands: list[Any]) -> Var:
        """A new variable for the same product of other operands."""
        (v,) = equation.outputs
        new = type(v)(v.aval)
        self.quotients.new.append(Equation(equation.eqn, operands, [new], equation.params))
        return new

    def _note_replacement(self, equation: Equation, new: Var) -> None:
        """An equation's result becomes a copy of a new variable."""
        self.quotients.replacements[equation] = splicing.spliced(lambda a: a, [new], equation.outputs, equation)

    def replace_products(self, equation: Equation, k: int, product: Product) -> None:
        """(E v) / S by softmax(x) v, and then its gradients."""
        (v,) = equation.outputs
        instead: dict[Atom, Var] = {}
        for d, place in self._reached(v, product.result).items():
            for reader in self.graph.readers.get(d, ()):
                if not self._is_quotient(reader, reader.inputs.index(d), place):
                    continue
                if not instead:
                    operands = list(equation.inputs)
                    operands[k] = self._copied(operands[k], self.weights_of)
                    instead[v] = self._product(equation, operands)
                self._note_replacement(reader, self._copied(d, instead))
        for d, place in self._reached(v, product.result).items():
            for equation, k in self._divisions_like(d):
                if equation not in self.quotients.replacements and self._is_quotient(equation, k, place):
                    self._replace_gradients(equation.outputs[0], equation.inputs[k], place, product, v)

    def _divisions_like(self, d: Var) -> Iterable[tuple[Equation, int]]:
        """The equations that may divide an array of this shape by the sums S: by which operand that is."""
        readers = (r for a in self.exponentials for r in self.graph.readers.get(a, ()))
        sums = [v for r in readers if r.name == "reduce_sum" for v in r.outputs]
        divisions: dict[Equation, int] = {}
        for v in sums:
            for reader in self.graph.readers.get(v, ()):
                if reader.name in ("mul", "div") and reader.outputs[0].aval.shape == d.aval.shape:
                    divisions |= {reader: 1 - reader.inputs.index(v)}
                elif splicing.is_alike(reader) or reader.name in ("div", "add"):  # the latter of a sink's term
                    sums += [w for w in reader.outputs if w not in sums]
        return divisions.items()

    def _is_quotient(self, equation: Equation, k: int, place: Place) -> bool:
        """Whether the k-th operand, at a place, is divided by the sums S."""
        if equation.name not in ("mul", "div") or equation.outputs[0].aval.shape != equation.inputs[k].aval.shape:
            return False
        if equation.name == "div" and k == 1:
            return False
        before = places.input_places(equation, place)
        assert before is not None
        return self.forms.power_of_sums(equation.inputs[1 - k], before[1 - k]) == (1 if equation.name == "div" else -1)

    def _replace_gradients(self, c: Var, t: Any, place: Place, product: Product, v: Var) -> None:
        """Replaces the gradients of a product E v, whose cotangent c = t / S was found; t and c have a place."""
        instead: dict[Atom, Var] = {c: t}
        features = factor_set(product.new_dims)
        of_elements = None  # w and its place
        for a, its_place in self._reached(c, place).items():
            for equation, k in _products_of(self.graph, a):
                other, operands = equation.inputs[1 - k], list(equation.inputs)
                if other in self.exponentials and self._shares_rows(equation, k, its_place):
                    operands[k], operands[1 - k] = self._copied(a, instead), self._copied(other, self.weights_of)
                    self._note_replacement(equation, self._product(equation, operands))
                elif other is product.other.variable and of_elements is None:
                    before = Product(equation, its_place, k)
                    at = self._place_of_elements(before, product)
                    if before.contracted == features and at is not None:
                        operands[k] = self._copied(a, instead)
                        of_elements = self._product(equation, operands), at
                        self.quotients.products[equation.outputs[0]] = of_elements
        if of_elements is not None:
            self._note_sums(v, (t, place), product, of_elements)

    def _shares_rows(self, equation: Equation, k: int, place: Place) -> bool:
        """Whether an operand has the same rows as the other one, at the same dimensions: each row has its own S."""
        weights = self.exponentials[equation.inputs[1 - k]]
        expected = Product(equation, weights, 1 - k).other.place
        rows = factor_set(self.forms.place) - factor_set([self.forms.along])
        both = ([[f for f in dim if f in rows] for dim in p] for p in (expected, place))
        return next(both) == next(both) and rows <= factor_set(place)

    def _place_of_elements(self, before: Product, product: Product) -> Place | None:
        """The place of c vᵀ: the elements of x; None if its dimensions are others."""
        fresh = factor_set(before.new_dims)
        for mine, theirs in zip(before.other.place, product.other.place, strict=True):
            is_along = place_key([theirs]) == place_key([self.forms.along])
            has_new_keys = is_along and factor_set([mine]) <= fresh
            if place_key([mine]) != place_key([theirs]) and not has_new_keys:
                return None
        return [self.forms.along if dim and factor_set([dim]) <= fresh else dim for dim in before.result]

    def _note_sums(self, v: Var, t: tuple[Var, Place], product: Product, of_elements: tuple[Var, Place]) -> None:
        """Notes the sums over features of the product E v times its cotangent."""
        features = factor_set(product.new_dims)
        for a, place in self._reached(v, product.result, _BY_ELEMENTS).items():
            for equation in self.graph.readers.get(a, ()):
                if equation.name != "reduce_sum":
                    continue
                over = factor_set([place[d] for d in equation.params["axes"]])
                rest = self.forms.ratio((a, place), ((v, product.result), t))
                if over == features and rest is not None:
                    its_place = [dim for d, dim in enumerate(place) if d not in equation.params["axes"]]
                    self.quotients.sums[equation.outputs[0]] = its_place, rest, of_elements
