"""What the derivatives of operators share. Along the mesh axes `axis_name` each device has a shard of every row."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.interpreters import ad

from jax_softmax.primitives import reference
from jax_softmax.primitives.as_stored import as_stored
from jax_softmax.primitives.operators import bind
from jax_softmax.primitives.types import Axes, Mask, MeshAxes, Tangent


def row_sum(a: Array, axes: Axes, axis_name: MeshAxes) -> Array:
    sums = jnp.sum(a, axes, keepdims=True)
    return jax.lax.psum(sums, axis_name) if axis_name else sums


def row_normalizer(x: Array, where: Mask, axes: Axes, axis_name: MeshAxes) -> reference.Normalizer:
    """The rows' `reference.Normalizer`, by the primitive."""
    return reference.Normalizer(*bind("logsumexp", x, where=where, axes=axes, axis_name=axis_name))


def lse_tangent(
    x: Array, normalizer: reference.Normalizer, t: Array, where: Mask, axes: Axes, axis_name: MeshAxes
) -> Array:
    """The tangent of lse: the sum over each row of softmax(x) t."""
    return _lse_tangent(x, normalizer.finite(), t, where, axes, axis_name)


# With checkpoint a backward pass gets x and the normalizer, and no exponentials.
@functools.partial(jax.checkpoint, prevent_cse=False, static_argnums=(4, 5))
def _lse_tangent(
    x: Array, normalizer: reference.Normalizer, t: Array, where: Mask, axes: Axes, axis_name: MeshAxes
) -> Array:
    # Filled, so that masked elements have a derivative of 0 even where the cotangent is infinite, as that of lse² is.
    terms = reference.fill_masked(reference.probabilities(x, normalizer, where) * reference.widened(t), where)
    return row_sum(terms, axes, axis_name)


def normalizer_tangents(normalizer: reference.Normalizer, lse_dot: Array) -> list[Tangent]:
    """The tangents of largest, which counts as a constant, and of sum_exp, given that of lse: sum_exp lse_dot.

    In a row with +inf, whose sum is +inf, that is multiplied by the logarithm's derivative of 0: it must be finite, or
    else the gradient by all elements of the row would be NaN, and not just that by the infinite one.
    """
    sum_exp = jnp.where(jnp.isinf(normalizer.sum_exp), 1, normalizer.sum_exp)
    return [ad.Zero(jax.typeof(normalizer.largest).to_tangent_aval()), sum_exp * lse_dot]


@functools.partial(jax.custom_jvp, nondiff_argnums=(3, 4))
def maximum(x: Array, largest: Array, where: Mask, axes: Axes, axis_name: MeshAxes) -> Array:
    """`largest`, the rows' maximum, differentiable by x: elements that tie for it share the derivative equally."""
    return largest


@maximum.defjvp
def _maximum_jvp(
    axes: Axes, axis_name: MeshAxes, primals: tuple[Array, Array, Mask], tangents: Sequence[Array]
) -> tuple[Array, Array]:
    x, largest, where = primals
    return largest, mean_where_equal(x, largest, tangents[0], where, axes, axis_name)


@functools.partial(jax.checkpoint, prevent_cse=False, static_argnums=(4, 5))
def mean_where_equal(x: Array, value: Array, t: Array, where: Mask, axes: Axes, axis_name: MeshAxes) -> Array:
    """The mean of t over those elements of each row that equal the row's `value`, one of them: the value's tangent,
    which ties share. NaN where the value is."""
    is_equal = reference.widened(as_stored(x)) == value
    if where is not None:
        is_equal &= where
    count = row_sum(is_equal.astype(value.dtype), axes, axis_name)
    mean = row_sum(jnp.where(is_equal, reference.widened(t), 0), axes, axis_name) / jnp.maximum(count, 1)
    return jnp.where(jnp.isnan(value), value, mean)


def fill_empty_rows(arrays: list[Array], where: Mask, axes: Axes, axis_name: MeshAxes) -> list[Array]:
    """Arrays of values of rows, with 0 in rows that are masked altogether."""
    if where is None:
        return arrays
    any_left = jnp.any(jnp.expand_dims(where, tuple(range(arrays[0].ndim - where.ndim))), axes, keepdims=True)
    if axis_name:
        any_left = jax.lax.pmax(any_left.astype(jnp.int32), axis_name) > 0
    return [jnp.where(any_left, a, 0) for a in arrays]


def is_zero(tangent: Any) -> bool:
    """Whether a tangent, of a rule with symbolic_zeros, is zero, or None for an operand that is None."""
    return tangent is None or isinstance(tangent, jax.custom_derivatives.SymbolicZero)
