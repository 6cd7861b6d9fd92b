"""What scores read, or weights are multiplied with, and has a gradient: temperatures, slopes, gains, biases.

The program makes of the scores' cotangents, or of weights and their cotangents, a number for each score, and sums these
over keys, queries, heads or the batch; perhaps it makes something of the sums and sums that again. A sum of what is
linear in sums is one sum over scores: so kernels add up what each score adds.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from jax_softmax.fusion.attention.walks import NoAttention
from jax_softmax.fusion.program import expressions
from jax_softmax.fusion.program.graph import Equation
from jax_softmax.fusion.program.kinds import is_strided_view
from jax_softmax.fusion.program.places import Place
from jax_softmax.primitives.types import Var

if TYPE_CHECKING:
    from jax_softmax.fusion.attention.matcher import Match


class Step(NamedTuple):
    """What is made of some variables, which have a name, element by element: what was reached from them, with the
    places, and the one variable among these."""

    name: str
    sources: list[Var]
    reached: dict[Var, Place]
    variable: Var


class OfSide(NamedTuple):
    """A side's cotangent, at its place: what the first step makes of the scores' cotangents g or of the weights y, or
    the sum of it; or what further steps make of each term of that sum, r, and then sum."""

    steps: list[Step]
    variable: Var
    place: Place

    @property
    def is_sum(self) -> bool:
        return self.variable is not self.steps[-1].variable


def found(match: "Match") -> list[OfSide]:
    """The arrays made of the scores' cotangents that the program reads other than by products: their sums, where
    it only reads these. And sums of what is made of the weights and of their cotangents."""
    sums: list[OfSide] = []
    arrays: dict[Var, OfSide] = {}
    for a in match.reached_after:
        step, outside = Step("g", match.of_scores, match.reached_after, a), _outside(match, a, match.reached_after)
        if a in match.graph.results or any(r.name != "reduce_sum" for r in outside):
            b = _viewed(match, a)
            step = Step("g", match.of_scores, match.reached_after, b)
            arrays[b] = OfSide([step], b, match.reached_after[b])
        else:
            sums += [one for r in outside for one in _sums(match, r, [step])]
    sums += arrays.values()
    for a in match.reached:
        step = Step("y", match.rows.weights, match.reached, a)
        readers = [r for r in match.graph.readers.get(a, ()) if r.name == "reduce_sum"]
        sums += [one for r in readers for one in _sums(match, r, [step])]
    if any(one.variable.aval.dtype.name not in expressions.WRITABLE for one in sums):
        raise NoAttention("a result of another dtype is made of the scores' gradient")
    return sums


def _viewed(match: "Match", a: Var) -> Var:
    """The variable made of the scores' cotangents of which another one is a view: XLA makes all views of one array."""
    while (maker := match.graph.maker_of(a)) is not None and is_strided_view(maker):
        (b,) = maker.inputs
        if b not in match.reached_after:
            break
        a = b
    return a


def _outside(match: "Match", a: Var, reached: Mapping[Var, Place]) -> list[Equation]:
    """What reads a variable, but for what was reached, and products with queries and keys."""
    products = [gradient.product.equation for gradient in match.gradients]
    readers = match.graph.readers.get(a, ())
    return [r for r in readers if r not in products and reached.keys().isdisjoint(r.outputs)]


def _sums(match: "Match", equation: Equation, steps: list[Step]) -> list[OfSide]:
    """The sum of what steps make; or, where it is of queries and keys, the sums of which all is that it is for."""
    (v,), summed = equation.outputs, equation.params["axes"]
    place = [dim for d, dim in enumerate(steps[-1].reached[steps[-1].variable]) if d not in summed]
    whole = [OfSide(steps, v, place)]
    factors = match.walks.parts.factors_of(place)
    if match.j not in factors or set(factors) <= set(match.pairs.factors_of_keys):
        return whole
    reached, found = match.walks.reached([v], place), []
    for a in reached:
        outside = _outside(match, a, reached)
        if a in match.graph.results or any(r.name != "reduce_sum" for r in outside):
            return whole
        found += [one for r in outside for one in _sums(match, r, [*steps, Step("r", [v], reached, a)])]
    return found or whole
