"""Losses of distributions, and their derivative. Rows keep the reduced axes, with extent 1."""

import functools

import jax
import jax.numpy as jnp

from jax_softmax.primitives import reference
from jax_softmax.primitives.rows import is_zero, normalizer, row_sum


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def soft_losses(axes, axis_name, x, labels, where):
    """The losses of distributions, of which classes that are left out have none."""
    return _sum_of_terms(x, normalizer(x, where, axes, axis_name), labels, labels, where, axes, axis_name)


def _sum_of_terms(x, rows, labels, weights, where, axes, axis_name):
    """The sum of weights (lse - x) over each row, without what has probability 0 and is -inf."""
    adds = (labels != 0) | (x != -jnp.inf)  # 0 log 0 does not
    if where is not None:
        adds &= where
    terms = weights * jnp.where(adds, rows.log_total - reference.kept(reference.distances(x, rows), where), 0)
    # Selected once more, so that XLA for CPUs writes the terms to memory, and not each of their factors in float32.
    return row_sum(jnp.where(adds, terms, 0), axes, axis_name)


@functools.partial(soft_losses.defjvp, symbolic_zeros=True)
def _soft_losses_jvp(axes, axis_name, primals, tangents):
    x, labels, where = primals
    rows = normalizer(x, where, axes, axis_name)
    losses = _sum_of_terms(x, rows, labels, labels, where, axes, axis_name)
    tangent = jnp.zeros_like(losses)
    if not is_zero(tangents[0]):
        # Of the sum and what is made with it XLA for CPUs would make one computation, through copies of all in float32.
        total = jax.lax.optimization_barrier(row_sum(labels, axes, axis_name))
        tangent += _soft_tangent(x, rows.finite(), labels, total, tangents[0], where, axes, axis_name)
    if not is_zero(tangents[1]):
        tangent += _sum_of_terms(x, rows, labels, tangents[1], where, axes, axis_name)
    return losses, tangent


# With checkpoint the logits and labels are kept for a backward pass, and nothing that is made of them.
@functools.partial(jax.checkpoint, prevent_cse=False, static_argnums=(6, 7))
def _soft_tangent(x, rows, labels, total, t, where, axes, axis_name):
    y = reference.probabilities(x, rows, where)
    return row_sum((y * total - labels) * reference.widened(t), axes, axis_name)
