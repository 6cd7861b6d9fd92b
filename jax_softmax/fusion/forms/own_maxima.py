"""Maxima of rows that a program subtracts before softmax or log_softmax, which subtract them themselves.

softmax(x - max(x)) is softmax(x). JAX adds to its gradient what goes through the maxima: at each row's largest element
the sum of the row's gradient, which is 0. Without both nothing but softmax reads x.
"""

import jax

from jax_softmax.fusion.forms.shared_normalizers import Replacements
from jax_softmax.fusion.program.graph import Equation, Graph, each_once, variables_of
from jax_softmax.fusion.program.kinds import kind_of
from jax_softmax.fusion.program.places import input_places, new_place, place_key
from jax_softmax.fusion.program.splicing import is_alike, is_unmasked, spliced
from jax_softmax.primitives.operators import bind
from jax_softmax.primitives.records import GRADIENTS
from jax_softmax.primitives.types import Var


def not_subtracted(graph: Graph, equation: Equation) -> Replacements | None:
    """softmax or log_softmax of x instead of x - max(x)."""
    if not is_unmasked(equation, "softmax", "log_softmax"):
        return None
    (shifted,), (y,), axes = equation.inputs, equation.outputs, equation.params["axes"]
    difference = graph.maker_of(shifted)
    if difference is None or difference.name != "sub" or not _are_maxima(graph, difference, axes):
        return None

    def of_all(x: jax.Array) -> jax.Array:
        return bind(equation.name, x, where=None, axes=axes, dtype=y.aval.dtype.name)

    return {equation: spliced(of_all, difference.inputs[:1], [y], equation)}


def _are_maxima(graph: Graph, difference: Equation, axes: tuple[int, ...]) -> bool:
    """Whether what is subtracted of x is for each element the maximum of its row of x."""
    x, a = difference.inputs
    place = new_place(x.aval.shape)
    found = input_places(difference, place)
    while found is not None and (maker := graph.maker_of(a)) is not None:
        at = found[-1]
        if maker.name == "reduce_max":
            rows = [dim for d, dim in enumerate(place) if d not in axes]
            return maker.inputs[0] is x and maker.params["axes"] == axes and place_key(at) == place_key(rows)
        if not is_alike(maker):
            return False
        (a,), found = maker.inputs, input_places(maker, at)
    return False


def without_sums_of_gradients(graph: Graph) -> Graph:
    """The graph in which nothing is added to gradients that is made of their own sums over rows: these are 0."""
    renamed: dict[Var, Var] = {}
    for equation in graph.equations:
        if equation.name in GRADIENTS and is_unmasked(equation, equation.name):
            renamed |= _without_own_sums(graph, equation)
    sums: Replacements = {e: [] for e in graph.equations if not renamed.keys().isdisjoint(e.outputs)}
    return graph.with_replaced(sums, renamed) if sums else graph


def _without_own_sums(graph: Graph, equation: Equation) -> dict[Var, Var]:
    """A gradient by what adds its sums to it."""
    copies = list(each_once([equation], lambda e: [r for r in graph.readers_of(e) if _is_copy(r)]))
    sums = [r for e in copies for r in graph.readers_of(e) if r.name == "reduce_sum"]
    sums = [e for e in sums if set(equation.params["axes"]) <= set(e.params["axes"])]
    zeros = list(each_once(sums, lambda e: [r for r in graph.readers_of(e) if _is_multiple(r, e)]))
    made_of_sums, gradients = ({v for e in of for v in e.outputs} for of in (zeros, copies))
    found: dict[Var, Var] = {}
    for reader in (r for e in copies for r in graph.readers_of(e) if r.name in ("add", "add_any")):
        own = [a for a in variables_of(reader.inputs) if a in gradients]
        if len(own) == 1 and len(made_of_sums.intersection(variables_of(reader.inputs))) == 1:
            found[reader.outputs[0]] = own[0]
    return found


def _is_copy(equation: Equation) -> bool:
    return kind_of(equation) in ("copy", "cast") or equation.name == "neg"


def _is_multiple(equation: Equation, of: Equation) -> bool:
    """Whether a result is 0 where that of another equation, which it reads, is 0."""
    is_quotient = equation.name == "div" and equation.inputs[1] is not of.outputs[0]
    return is_quotient or is_alike(equation) or equation.name in ("neg", "mul", "reduce_sum")
