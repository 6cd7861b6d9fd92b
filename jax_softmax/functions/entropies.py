"""Entropy and Kullback-Leibler divergence of distributions given by their logits: the public functions."""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from jax_softmax.functions import arguments
from jax_softmax.functions.arguments import Axis, AxisName
from jax_softmax.primitives import reference
from jax_softmax.primitives.operators import bind
from jax_softmax.primitives.reference import Normalizer
from jax_softmax.primitives.rows import fill_empty_rows, is_zero, lse_tangent, row_normalizer, row_sum
from jax_softmax.primitives.types import Axes, Mask, MeshAxes


def entropy(logits: ArrayLike, axis: Axis = -1, where: ArrayLike | None = None, *, axis_name: AxisName = None) -> Array:
    """Entropy of softmax(logits) along axis, in nats: -sum(p log p).

    On CUDA the logits are read once, and nothing of their size is written. The backward pass reads the logits again and
    a few numbers of each row. Differentiable in forward and reverse mode to any order.

    Args:
      logits: array of unnormalised log probabilities, of a floating, integer or boolean dtype, computed in float32
        (float64 for float64).
      axis: the axis of the classes, or axes; None for all.
      where: boolean mask. One that broadcasts to the logits' shape leaves out classes: where it is False, the class's
        probability is 0. One of the result's shape leaves out whole rows. A mask whose shape could mean both is
        refused: write where[..., None] for rows along the last axis.
      axis_name: as for `softmax`.

    Returns:
      Entropies, of the logits' shape without axis, in float32 (float64 for float64), for logits of 16 bits as well. A
      class of probability 0 adds 0. Rows that are left out, or have no classes, are 0, with a gradient of 0. Rows with
      a NaN or +inf, or nothing but -inf, are NaN.

    Raises:
      TypeError: an argument is of the wrong type or dtype.
      ValueError: axis is out of range or repeated, where has another shape or could mean rows as well as classes, or
        axis_name is not a mesh axis of a surrounding `shard_map`.
    """
    logits, axis, where, axis_name = arguments.for_jit("entropy", logits, axis, where, axis_name, argument="logits")
    return _entropy(logits, axis, where, axis_name)


@functools.partial(jax.jit, static_argnums=(1, 3), inline=True)
def _entropy(logits: ArrayLike, axis: Axis, where: ArrayLike | None, axis_name: AxisName) -> Array:
    x, where, axes, axis_name, _ = arguments.prepared(
        "entropy", logits, axis, where, axis_name, argument="logits", may_enlarge=False
    )
    return row_entropies(x, where, axes, axis_name)


def row_entropies(x: Array, where: Mask, axes: Axes, axis_name: MeshAxes) -> Array:
    """The entropies of logits of a dtype that has kernels."""
    entropies, *rows = bind("entropy", x, where=where, axes=axes, axis_name=axis_name)
    return _finish_rows(entropies, Normalizer(*rows), x, where, axes, axis_name)


def kl_divergence(
    logits_p: ArrayLike,
    logits_q: ArrayLike,
    axis: Axis = -1,
    where: ArrayLike | None = None,
    *,
    axis_name: AxisName = None,
) -> Array:
    """Kullback-Leibler divergence along axis, in nats, of p = softmax(logits_p) from q = softmax(logits_q):
    sum(p (log p - log q)).

    On CUDA logits_p is read once and logits_q twice, and nothing of their size is written. The backward pass reads both
    again and a few numbers of each row. Differentiable by both in forward and reverse mode to any order.

    Args:
      logits_p, logits_q: arrays of unnormalised log probabilities that broadcast together, of a floating, integer or
        boolean dtype, computed in float32 (float64 if one of them is float64).
      axis: the axis of the classes, or axes, of both broadcast together; None for all.
      where, axis_name: as for `entropy`.

    Returns:
      Divergences, of the logits' shape without axis, in float32 (float64 for float64). A class whose probability in p
      is 0 adds 0, whatever it is in q; one whose probability is 0 in q alone (a logit of -inf) makes the row +inf. Rows
      that are left out, or have no classes, are 0, with a gradient of 0. Rows of which either operand has a NaN or
      +inf, or nothing but -inf, are NaN. Of equal distributions rounding may leave a small negative number.

    Raises:
      TypeError: an argument is of the wrong type or dtype.
      ValueError: logits_p and logits_q do not broadcast together; or as for `entropy`.
    """
    name = "kl_divergence"
    logits_p, axis, where, axis_name = arguments.for_jit(name, logits_p, axis, where, axis_name, argument="logits_p")
    logits_q, *_ = arguments.for_jit(name, logits_q, None, None, None, argument="logits_q")
    return _kl_divergence(logits_p, logits_q, axis, where, axis_name)


@functools.partial(jax.jit, static_argnums=(2, 4), inline=True)
def _kl_divergence(
    logits_p: ArrayLike, logits_q: ArrayLike, axis: Axis, where: ArrayLike | None, axis_name: AxisName
) -> Array:
    name = "kl_divergence"
    both = [
        (argument, arguments.checked_real_array(name, logits, argument))
        for argument, logits in (("logits_p", logits_p), ("logits_q", logits_q))
    ]
    shapes = [logits.shape for _, logits in both]
    try:
        shape = jnp.broadcast_shapes(*shapes)
    except ValueError as error:
        raise ValueError(
            f"{name}: logits_p and logits_q must broadcast together, got shapes {shapes[0]} and {shapes[1]}."
        ) from error
    dtype = jnp.result_type(*(arguments.promoted(logits)[0].dtype for _, logits in both))
    operands = []
    for argument, logits in both:
        logits = jnp.broadcast_to(logits, shape).astype(dtype)
        x, mask, axes, names, _ = arguments.prepared(name, logits, axis, where, axis_name, argument, may_enlarge=False)
        operands.append(x)
    p, q = operands
    p, q = arguments.varying_as_well(p, q, ()), arguments.varying_as_well(q, p, ())
    result, normalizer, _ = divergence(axes, names, p, q, mask)
    return _finish_rows(result, normalizer, p, mask, axes, names)


def _finish_rows(
    result: Array, normalizer: Normalizer, x: Array, where: Mask, axes: Axes, axis_name: MeshAxes
) -> Array:
    """The result without the reduced axes: 0 in rows without classes, NaN in rows of nothing but -inf."""
    if math.prod(x.shape[d] for d in axes) == 0 and not axis_name:
        return jax.lax.squeeze(jnp.zeros_like(result), axes)
    result, largest = fill_empty_rows([result, normalizer.largest], where, axes, axis_name)
    return jax.lax.squeeze(result + 0 * jnp.where(largest == -jnp.inf, largest, 0), axes)


# ---- The divergence's derivative.


class Divergence(NamedTuple):
    divergence: Array
    normalizer_x: Normalizer
    normalizer_y: Normalizer


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def divergence(axes: Axes, axis_name: MeshAxes, x: Array, y: Array, where: Mask) -> Divergence:
    """sum(p (log p - log q)) over each row, of p = softmax(x) and q = softmax(y), and both normalizers."""
    normalizer_y = row_normalizer(y, where, axes, axis_name).without_infinity()
    operands = x, y, normalizer_y.largest, normalizer_y.log_sum
    result, *normalizer_x = bind("kl_divergence", *operands, where=where, axes=axes, axis_name=axis_name)
    return Divergence(result, Normalizer(*normalizer_x), normalizer_y)


@functools.partial(divergence.defjvp, symbolic_zeros=True)
def _divergence_jvp(axes: Axes, axis_name: MeshAxes, primals: Any, tangents: Any) -> tuple[Divergence, Divergence]:
    x, y, where = primals
    result = divergence(axes, axis_name, x, y, where)
    x_dot, y_dot = (None if is_zero(t) else t for t in tangents[:2])
    zeros = jnp.zeros_like(result.divergence)

    def normalizer_dot(x: Array, normalizer: Normalizer, t: Array | None) -> Normalizer:
        if t is None:
            return Normalizer(zeros, zeros)
        return Normalizer(zeros, normalizer.sum_exp * lse_tangent(x, normalizer, t, where, axes, axis_name))

    finite = Divergence(result.divergence, result.normalizer_x.finite(), result.normalizer_y.finite())
    tangent = _divergence_tangent(x, y, finite, x_dot, y_dot, where, axes, axis_name)
    normalizer_dots = normalizer_dot(x, result.normalizer_x, x_dot), normalizer_dot(y, result.normalizer_y, y_dot)
    return result, Divergence(tangent, *normalizer_dots)


@functools.partial(jax.checkpoint, prevent_cse=False, static_argnums=(6, 7))
def _divergence_tangent(
    x: Array,
    y: Array,
    result: Divergence,
    x_dot: Array | None,
    y_dot: Array | None,
    where: Mask,
    axes: Axes,
    axis_name: MeshAxes,
) -> Array:
    """sum(p (log p - log q - divergence) x_dot + (q - p) y_dot) over each row."""
    (divergence,) = fill_empty_rows([result.divergence], where, axes, axis_name)
    log_p = reference.log_probabilities(x, result.normalizer_x, where)
    log_q = reference.log_probabilities(y, result.normalizer_y, where)
    q = jnp.exp(log_q)
    _, log_q = reference.weight_and_value(log_p, log_q)  # first, or inf - inf of a class in neither would be a NaN
    p, log_ratio = reference.weight_and_value(log_p, log_p - log_q)
    tangent = jnp.zeros_like(p)
    if x_dot is not None:
        tangent += p * (log_ratio - divergence) * reference.widened(x_dot)
    if y_dot is not None:
        tangent += (q - p) * reference.widened(y_dot)
    return row_sum(tangent, axes, axis_name)
