"""Calls of this package's operators as equations of a graph: tests of them, and new ones."""

import jax
import jax.numpy as jnp
from jax.extend.core import Literal

from jax_softmax import _private
from jax_softmax.fusion import expressions
from jax_softmax.fusion.graph import Equation, graph_of, is_variable, opened
from jax_softmax.fusion.groups import foldable
from jax_softmax.primitives import reference
from jax_softmax.primitives.interpreters import abstract_eval
from jax_softmax.primitives.operators import bind


def is_unmasked(equation, *names) -> bool:
    """Whether it is one of these operators, of whole rows, without a mask, along one axis."""
    if equation is None or equation.name not in names or len(equation.params["axes"]) != 1:
        return False
    return foldable(equation) and all(a.aval.dtype != bool for a in equation.inputs)


def is_alike(equation) -> bool:
    """Whether its result's elements are its operand's, up to a rounding."""
    return expressions.is_view(equation) or equation.name in (*expressions.SAME, "convert_element_type")


def spliced(f, inputs, outputs, like) -> list[Equation]:
    """The equations of a function of these inputs, whose results are these outputs, at the line of `like`."""
    avals = [a.aval.update(weak_type=False) for a in inputs]

    def of_their_own(*a):
        """The results, with copies of those that are operands, or each other."""
        results = jax.tree.leaves(f(*a))
        before = [*a, *results]
        return [jnp.copy(r) if any(r is b for b in before[: len(a) + k]) else r for k, r in enumerate(results)]

    with _private.context_of(like.eqn):
        jaxpr, constants = opened(jax.make_jaxpr(of_their_own)(*avals))
    inner = graph_of(jaxpr)
    renamed = dict(zip(jaxpr.invars, inputs, strict=True))
    renamed |= {v: Literal(c, v.aval) for v, c in zip(jaxpr.constvars, constants, strict=True)}
    renamed |= zip(inner.outputs, outputs, strict=True)

    def new(a):
        return a if not is_variable(a) else renamed.setdefault(a, type(a)(a.aval))

    found = []
    for e in inner.equations:
        eqn = _private.at_the_line_of(e.eqn, like.eqn)
        found.append(Equation(eqn, [new(a) for a in e.inputs], [new(v) for v in e.outputs], e.params))
    return found


def mask_of(equation):
    last = equation.inputs[-1]
    return last if last.aval.dtype == bool else None


def row_variables(equation):
    """New variables for the maxima and sums of the rows of softmax, log_softmax or reduce_max."""
    (x,), (y,) = equation.inputs, equation.outputs
    with _private.context_of(equation.eqn):
        avals = abstract_eval("logsumexp", x.aval, axes=equation.params["axes"], axis_name=())
    return tuple(map(type(y), avals))


def rows_of(equation, rows) -> list[Equation]:
    """The equation that makes these variables."""
    axes = equation.params["axes"]
    return spliced(lambda x: bind("logsumexp", x, where=None, axes=axes), equation.inputs, rows, equation)


def made_of_rows(equation, rows, y=None) -> list[Equation]:
    """The equations that make the result of softmax or log_softmax, or y instead of it, of its operand and rows."""
    y = equation.outputs[0] if y is None else y
    f = _log_probabilities if equation.name == "log_softmax" else _probabilities
    return spliced(lambda *a: f(*a, y.aval.dtype), [*equation.inputs, *rows], [y], equation)


def _probabilities(x, largest, total, dtype):
    rows = reference.Normalizer(largest, total).without_infinity()
    return (jnp.exp(reference.widened(x) - largest) * (1 / rows.sum_exp)).astype(dtype)


def _log_probabilities(x, largest, total, dtype):
    rows = reference.Normalizer(largest, total).without_infinity()
    return (reference.distances(x, rows) - jnp.log(rows.sum_exp)).astype(dtype)
