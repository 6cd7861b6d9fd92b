"""What the derivatives of several operators share: sums over rows, which `axis_name` may spread over devices."""

import functools

import jax
import jax.numpy as jnp
from jax.interpreters import ad

from jax_softmax.primitives import reference
from jax_softmax.primitives.in_memory import in_memory
from jax_softmax.primitives.operators import bind


def row_sum(a, axes, axis_name):
    total = jnp.sum(a, axes, keepdims=True)
    return jax.lax.psum(total, axis_name) if axis_name else total


def normalizer(x, where, axes, axis_name):
    """The rows' `reference.Normalizer`, by the primitive."""
    return reference.Normalizer(*bind("logsumexp", x, where=where, axes=axes, axis_name=axis_name))


def sum_of_tangents(x, rows, t, where, axes, axis_name):
    """The tangent of lse: the sum over each row of softmax(x) t."""
    return _sum_of_tangents(x, rows.finite(), t, where, axes, axis_name)


# With checkpoint x and what rows have are kept for a backward pass, and no exponentials.
@functools.partial(jax.checkpoint, prevent_cse=False, static_argnums=(4, 5))
def _sum_of_tangents(x, rows, t, where, axes, axis_name):
    # Selected, so that what is masked has a derivative of 0 also by a cotangent of infinity, as that of lse² is.
    terms = reference.kept(reference.probabilities(x, rows, where) * reference.widened(t), where)
    return row_sum(terms, axes, axis_name)


def normalizer_tangents(rows, of_lse):
    """The tangents of the two parts of lse, the first of which counts as a constant.

    Of a row with +inf, whose sum is +inf, the logarithm's derivative is 0. Times that sum it would be NaN, and then the
    gradient by all elements of the row, not just by the infinite one.
    """
    total = jnp.where(jnp.isinf(rows.total), 1, rows.total)
    return [ad.Zero(jax.typeof(rows.largest).to_tangent_aval()), total * of_lse]


@functools.partial(jax.custom_jvp, nondiff_argnums=(3, 4))
def maximum(x, largest, where, axes, axis_name):
    """`largest`, the rows' maximum, with a derivative by x: the mean of those of the elements that are it, as JAX has
    it at ties."""
    return largest


@maximum.defjvp
def _maximum_jvp(axes, axis_name, primals, tangents):
    x, largest, where = primals
    return largest, _mean_of_largest(x, largest, tangents[0], where, axes, axis_name)


@functools.partial(jax.checkpoint, prevent_cse=False, static_argnums=(4, 5))
def _mean_of_largest(x, largest, t, where, axes, axis_name):
    is_largest = reference.widened(in_memory(x)) == largest
    if where is not None:
        is_largest &= where
    count = row_sum(is_largest.astype(largest.dtype), axes, axis_name)
    mean = row_sum(jnp.where(is_largest, reference.widened(t), 0), axes, axis_name) / jnp.maximum(count, 1)
    return jnp.where(jnp.isnan(largest), largest, mean)


def of_rows_with_elements(rows, where, axes, axis_name):
    """What rows have, and 0 for rows that are masked altogether."""
    if where is None:
        return rows
    ndim = rows[0].ndim
    exists = jnp.any(jnp.expand_dims(where, tuple(range(ndim - where.ndim))), axes, keepdims=True)
    if axis_name:
        exists = jax.lax.pmax(exists.astype(jnp.int32), axis_name) > 0
    return [jnp.where(exists, row, 0) for row in rows]


def is_zero(tangent):
    """Whether a tangent that a rule with symbolic_zeros is given is one, or that of what has none."""
    return tangent is None or isinstance(tangent, jax.custom_derivatives.SymbolicZero)
