"""Weights that are made as exp(log_softmax(x)), or as exp(x - logsumexp(x)), which is that by now: they are softmax(x).

Their derivative is log_softmax's linear map of w t, where w are the weights and t their cotangent: w t - w sum(w t),
which is softmax's linear map of t. Where no kernel of attention makes this, it stays what it was.
"""

from collections.abc import Container
from typing import NamedTuple

import jax

from jax_softmax.fusion.attention.casts import Changes
from jax_softmax.fusion.program import splicing
from jax_softmax.fusion.program.graph import Equation, Graph, Replacements, each_once, variables_of
from jax_softmax.fusion.program.kinds import kind_of
from jax_softmax.primitives.operators import bind
from jax_softmax.primitives.types import Atom, Var


def as_softmax(graph: Graph, stay: Container[Equation]) -> Changes:
    """The graph with softmax instead of all exponentials of log_softmax but those that stay."""
    replacements, made = dict[Equation, list[Equation]](), dict[Equation, Equation]()
    for equation in graph.equations:
        if equation not in stay and splicing.is_unmasked(equation, "log_softmax"):
            new = _softmax_instead_of(graph, equation)
            replacements |= new
            made |= {e: equation for of_one in new.values() for e in of_one if e.name == "softmax"}
    return Changes(graph.with_replaced(replacements) if made else graph, made)


def _softmax_instead_of(graph: Graph, log_softmax: Equation) -> Replacements:
    """What stands for the one exponential of log_softmax, and for its linear maps; nothing if these are not its own."""
    (x,), (y,), axes = log_softmax.inputs, log_softmax.outputs, log_softmax.params["axes"]
    casts = each_once([log_softmax], lambda e: [r for r in graph.readers_of(e) if kind_of(r) == "cast"])
    exponentials = [r for e in casts for r in graph.readers_of(e) if r.name == "exp"]
    if len(exponentials) != 1:
        return {}
    (w,) = exponentials[0].outputs

    def softmax(x: jax.Array) -> jax.Array:
        return bind("softmax", x, where=None, axes=axes, dtype=w.aval.dtype)

    replacements = {exponentials[0]: splicing.spliced(softmax, [x], [w], exponentials[0])}
    for reader in (r for r in graph.readers[y] if r.name == "log_softmax_vjp"):
        factors = _factors(graph, reader.inputs[1], w, axes[0])
        if factors is None:
            return {}

        def linear(
            w: jax.Array, t: jax.Array, *others: jax.Array, reader: Equation = reader, factors: _Factors = factors
        ) -> jax.Array:
            g = bind("softmax_linear", w, t, where=None, axes=axes, dtype="float32")
            for maker, other in zip(factors.makers, others, strict=True):
                g = g / other if maker.name == "div" else g * other
            return g.astype(reader.outputs[0].aval.dtype)

        replacements[reader] = splicing.spliced(linear, [w, factors.t, *factors.others], reader.outputs, reader)
    return replacements


class _Factors(NamedTuple):
    """An array as w t times, or divided by, others, by these equations. All elements of a row share the others."""

    t: Atom
    makers: list[Equation]
    others: list[Atom]


def _factors(graph: Graph, a: Atom, w: Var, axis: int) -> _Factors | None:
    makers, others = list[Equation](), list[Atom]()
    while (maker := graph.maker_of(a)) is not None:
        if maker.name == "mul" and w in variables_of(maker.inputs):
            first, second = maker.inputs
            return _Factors(second if first is w else first, makers, others)
        if maker.name in ("mul", "div"):
            of_rows = [_is_of_rows(graph, b, axis) for b in maker.inputs]
            if sum(of_rows) != 1 or (maker.name == "div" and of_rows[0]):
                return None
            makers.append(maker)
            others.append(maker.inputs[of_rows.index(True)])
            a = maker.inputs[of_rows.index(False)]
        elif maker.name == "convert_element_type":
            (a,) = maker.inputs
        else:
            return None
    return None


def _is_of_rows(graph: Graph, a: Atom, axis: int) -> bool:
    """Whether all elements along an axis are one number."""
    maker = graph.maker_of(a)
    if maker is not None and maker.name == "broadcast_in_dim":
        dims = maker.params["broadcast_dimensions"]
        return axis not in dims or maker.inputs[0].aval.shape[dims.index(axis)] == 1
    return not a.aval.shape
