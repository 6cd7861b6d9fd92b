"""The entropy and the divergence of rows: their derivatives, which need the rows' normalizers."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jax_softmax.primitives import reference
from jax_softmax.primitives.operators import bind, split
from jax_softmax.primitives.rows import (
    normalizer,
    normalizer_tangents,
    of_rows_with_elements,
    row_sum,
    sum_of_tangents,
)


def entropy_jvp(primals, tangents, *, axes, axis_name):
    (x,), where = split(primals)
    entropy, *rows = bind("entropy", x, where=where, axes=axes, axis_name=axis_name)
    rows = reference.Normalizer(*rows)
    of_entropy = _entropy_tangent(x, entropy, rows.finite(), tangents[0], where, axes, axis_name)
    of_lse = sum_of_tangents(x, rows, tangents[0], where, axes, axis_name)
    return [entropy, *rows], [of_entropy, *normalizer_tangents(rows, of_lse)]


@functools.partial(jax.checkpoint, prevent_cse=False, static_argnums=(5, 6))
def _entropy_tangent(x, entropy, rows, t, where, axes, axis_name):
    """-(sum of p (log p + entropy) t) over each row."""
    (entropy,) = of_rows_with_elements([entropy], where, axes, axis_name)
    log_p = reference.log_probabilities(x, rows, where)
    p, (log_p,) = reference.weights_and_values(log_p, log_p)
    return -row_sum(p * (log_p + entropy) * reference.widened(t), axes, axis_name)


class Divergence(NamedTuple):
    divergence: jax.Array
    of_x: reference.Normalizer
    of_y: reference.Normalizer


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def divergence(axes, axis_name, x, y, where):
    """The divergence of softmax(y) from softmax(x) over each row, and both normalizers."""
    of_y = normalizer(y, where, axes, axis_name).without_infinity()
    of_rows = of_y.largest, of_y.log_total
    result, *of_x = bind("kl_divergence", x, y, *of_rows, where=where, axes=axes, axis_name=axis_name)
    return Divergence(result, reference.Normalizer(*of_x), of_y)


@functools.partial(divergence.defjvp, symbolic_zeros=True)
def _divergence_jvp(axes, axis_name, primals, tangents):
    x, y, where = primals
    rows = divergence(axes, axis_name, x, y, where)
    x_dot, y_dot = (None if isinstance(t, jax.custom_derivatives.SymbolicZero) else t for t in tangents[:2])
    constant = jnp.zeros_like(rows.divergence)

    def of_normalizer(x, rows, t):
        if t is None:
            return reference.Normalizer(constant, constant)
        return reference.Normalizer(constant, rows.total * sum_of_tangents(x, rows, t, where, axes, axis_name))

    finite = Divergence(rows.divergence, rows.of_x.finite(), rows.of_y.finite())
    tangent = _divergence_tangent(x, y, finite, x_dot, y_dot, where, axes, axis_name)
    return rows, Divergence(tangent, of_normalizer(x, rows.of_x, x_dot), of_normalizer(y, rows.of_y, y_dot))


@functools.partial(jax.checkpoint, prevent_cse=False, static_argnums=(6, 7))
def _divergence_tangent(x, y, rows, x_dot, y_dot, where, axes, axis_name):
    """The sum of p (log p - log q - divergence) x_dot + (q - p) y_dot over each row."""
    (divergence,) = of_rows_with_elements([rows.divergence], where, axes, axis_name)
    log_p = reference.log_probabilities(x, rows.of_x, where)
    log_q = reference.log_probabilities(y, rows.of_y, where)
    q = jnp.exp(log_q)
    p, (log_p, log_q) = reference.weights_and_values(log_p, log_p, log_q)
    tangent = jnp.zeros_like(p)
    if x_dot is not None:
        tangent += p * (log_p - log_q - divergence) * reference.widened(x_dot)
    if y_dot is not None:
        tangent += (q - p) * reference.widened(y_dot)
    return row_sum(tangent, axes, axis_name)
