"""Cross entropies of integer labels, and their derivatives. Values of rows keep the reduced axes, with extent 1."""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jax_softmax.functions import arguments
from jax_softmax.primitives import reference
from jax_softmax.primitives.cross_entropy import tangent
from jax_softmax.primitives.labels import has_label, label_elements
from jax_softmax.primitives.operators import Coefficients, bind
from jax_softmax.primitives.reference import Normalizer
from jax_softmax.primitives.rows import is_zero, row_normalizer, row_sum
from jax_softmax.primitives.types import Axes, Dtype, MeshAxes, rows_sharded_as

# ---- The arguments label_smoothing and z_loss.

_LARGEST_NUMBER = np.finfo(np.float64).max


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Constant:
    """A number that is compiled into a program, so that it need not be transferred to the device."""

    value: float


Number = _Constant | Array | None


class Regularization(NamedTuple):
    """None stands for the number 0: nothing is computed for it."""

    label_smoothing: Array | None
    z_loss: Array | None


def as_arrays(numbers: tuple[Number, Number], dtype: Dtype) -> Regularization:
    def converted(number: _Constant | Array) -> Array:
        return jnp.asarray(number.value if isinstance(number, _Constant) else number, dtype)

    return Regularization(*(None if number is None else converted(number) for number in numbers))


def checked_regularization(name: str, label_smoothing: Any, z_loss: Any) -> tuple[Number, Number]:
    return (
        _checked_number(name, "label_smoothing", label_smoothing, 0, 1),
        _checked_number(name, "z_loss", z_loss, -_LARGEST_NUMBER, _LARGEST_NUMBER),
    )


def _checked_number(name: str, argument: str, value: Any, least: float, most: float) -> Number:
    if isinstance(value, int | float | np.integer | np.floating):
        if not least <= value <= most:
            raise ValueError(f"{name}: {argument} must be a number from {least} to {most}, got {value}.")
        return _Constant(float(value)) if value else None
    value = arguments.checked_real_array(name, value, argument)
    if value.shape:
        raise ValueError(f"{name}: {argument} must be a scalar, got shape {value.shape}.")
    return value


# ---- The losses


class Labelled(NamedTuple):
    """Logits and the labels of their rows."""

    x: Array
    label: Array  # as in `labels.py`
    found: Array  # whether a row has a label, on this device or another one
    where: Array | None


class Mode(NamedTuple):
    """How losses and their gradient are computed."""

    axes: Axes
    axis_name: MeshAxes
    # Whether the result is the sum of the losses. If so, and without an axis_name, differentiation computes the
    # gradient by the logits together with the losses. In all other cases the backward pass computes it.
    summed: bool = False
    in_place: bool = False  # whether nothing else reads the logits: on CUDA the gradient may be written over them


class _Values(NamedTuple):
    """The values of rows that losses are computed from, 0 in rows that do not count."""

    loss: Array  # lse - logit, where logit is the label's
    lse: Any  # None without z_loss
    above_mean: Any  # logit - mean of the row's logits; None without label_smoothing


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def weighted_losses(mode: Mode, labelled: Labelled, weights: Array, regularization: Regularization) -> Array:
    """The losses times their weights, which are 0 in rows without a label; with `mode.summed` the sum of these."""
    values = _values(mode, labelled, weights, regularization, *_loss_and_normalizer(mode, labelled))
    return _summed(mode, _regularized(values, regularization) * weights)


def _summed(mode: Mode, losses: Array) -> Array:
    return jnp.sum(losses) if mode.summed else losses


@functools.partial(weighted_losses.defjvp, symbolic_zeros=True)
def _weighted_losses_jvp(mode: Mode, primals: Any, tangents: Any) -> tuple[Array, Array]:
    labelled, weights, regularization = primals
    (t, *_), weights_dot, regularization_dot = tangents
    gradient = distance_sum = None
    if mode.summed and not mode.axis_name and not is_zero(t):
        gradient, loss, normalizer, distance_sum = _gradient_and_loss(mode, labelled, weights, regularization)
    else:
        loss, normalizer = _loss_and_normalizer(mode, labelled)
    values = _values(mode, labelled, weights, regularization, loss, normalizer, distance_sum)
    losses, dots = _regularized(values, regularization), []
    if gradient is not None:
        dots.append(inner_product(gradient, t))
    elif not is_zero(t):
        x, label, _, where = labelled
        coefficients = _coefficients(mode, labelled, weights, regularization)
        row_dots = tangent(x, normalizer, coefficients, label, t, where, mode.axes, mode.axis_name, mode.in_place)
        dots.append(_summed(mode, row_dots))
    if not is_zero(weights_dot):
        dots.append(_summed(mode, losses * weights_dot))
    if not is_zero(regularization_dot.label_smoothing):
        dots.append(_summed(mode, weights * values.above_mean * regularization_dot.label_smoothing))
    if not is_zero(regularization_dot.z_loss):
        dots.append(_summed(mode, weights * values.lse**2 * regularization_dot.z_loss))
    result = _summed(mode, losses * weights)
    dot = functools.reduce(jnp.add, dots) if dots else jnp.zeros_like(result)
    return result, arguments.varying_over(dot, arguments.varying_axes(result))


def _loss_and_normalizer(mode: Mode, labelled: Labelled) -> tuple[Array, Normalizer]:
    """lse - logit of each row, without regularization, and the rows' normalizer."""
    x, label, _, where = labelled
    if not mode.axis_name:
        loss, *rows = bind("cross_entropy", x, label, where=where, axes=mode.axes)
        return loss, Normalizer(*rows)
    normalizer = row_normalizer(x, where, mode.axes, mode.axis_name)
    distance = reference.distances(label_elements(x, mode.axes, label), normalizer)
    distance = jnp.where(has_label(label, x.shape, mode.axes), distance, 0)
    return normalizer.log_sum - jax.lax.psum(distance, mode.axis_name), normalizer


def _gradient_and_loss(
    mode: Mode, labelled: Labelled, weights: Array, regularization: Regularization
) -> tuple[Array, Array, Normalizer, Array | None]:
    """The gradient of the sum of weighted losses, `_loss_and_normalizer`, and the sum of x - largest over each row, or
    None: it is for label smoothing, and there is a kernel for it if float32 can count a row's elements."""
    x, label, _, where = labelled
    coefficients = _coefficients(mode, labelled, weights, regularization)
    logit = reference.widened(label_elements(x, mode.axes, label))
    if mode.in_place:
        # The logit must be read before the kernel overwrites it, or else XLA would copy all logits. So the kernel gets
        # an operand that depends on it, in a way that changes nothing: where the logit is NaN, so is the gradient. The
        # barrier keeps XLA from reading it a second time.
        logit = jax.lax.optimization_barrier(logit)
        at_label = jnp.where(jnp.isnan(logit) & (weights != 0), jnp.nan, coefficients.at_label)
        coefficients = coefficients._replace(at_label=at_label)
    n = _elements(mode, x)  # a symbol, maybe
    is_countable = isinstance(n, int) and n <= reference.MOST_COUNTED
    with_distances = regularization.label_smoothing is not None and is_countable
    op = "cross_entropy_gradient" + reference.AND_DISTANCES * with_distances
    operands = x, *coefficients, label
    gradient, *rows = bind(op, *operands, where=where, axes=mode.axes, in_place=mode.in_place)
    normalizer, distance_sum = Normalizer(*rows[:2]), None
    if with_distances:
        distance_sum = reference.distance_sum_of_all(rows[2], rows[3], _classes(mode, labelled))
    distance = reference.select(rows_sharded_as(x, labelled.found), reference.distances(logit, normalizer), 0)
    return gradient, normalizer.log_sum - distance, normalizer, distance_sum


def _values(
    mode: Mode,
    labelled: Labelled,
    weights: Array,
    regularization: Regularization,
    loss: Array,
    normalizer: Normalizer,
    distance_sum: Array | None = None,
) -> _Values:
    """The values of rows. A row counts if it has a label, and a weight other than 0 or only finite values."""
    above_mean = None
    if regularization.label_smoothing is not None:
        if distance_sum is None:
            distances = reference.distances(labelled.x, normalizer)
            distance_sum = row_sum(reference.fill_masked(distances, labelled.where), mode.axes, mode.axis_name)
        above_mean = (normalizer.log_sum - loss) - distance_sum / _classes(mode, labelled)
    values = _Values(loss, normalizer.lse if regularization.z_loss is not None else None, above_mean)
    finite = functools.reduce(jnp.logical_and, map(jnp.isfinite, jax.tree.leaves(values)))
    counts = labelled.found & ((weights != 0) | finite)
    return jax.tree.map(lambda value: reference.select(counts, value, 0), values)


def _regularized(values: _Values, regularization: Regularization) -> Array:
    """Each row's loss, without its weight."""
    losses = values.loss
    if regularization.label_smoothing is not None:
        losses += regularization.label_smoothing * values.above_mean
    if regularization.z_loss is not None:
        losses += regularization.z_loss * values.lse**2
    return losses


def _coefficients(mode: Mode, labelled: Labelled, weights: Array, regularization: Regularization) -> Coefficients:
    """The coefficients of the gradient of the sum of weighted losses."""
    smoothing, z_loss = regularization
    zeros = jnp.zeros_like(weights)
    coefficients = Coefficients(
        factor=weights,
        lse_factor=zeros if z_loss is None else 2 * z_loss * weights,
        offset=zeros if smoothing is None else -smoothing / _classes(mode, labelled) * weights,
        at_label=-weights if smoothing is None else (smoothing - 1) * weights,
    )
    return Coefficients(*(jnp.broadcast_to(c, weights.shape) for c in coefficients))


def _classes(mode: Mode, labelled: Labelled) -> Array | int:
    """The number of classes of each row that are not masked, at least 1; without a mask one number for all."""
    x, where = labelled.x, labelled.where
    if where is None:
        return _elements(mode, x) * math.prod(map(jax.lax.axis_size, mode.axis_name))
    count = jnp.sum(jnp.broadcast_to(where, x.shape), mode.axes, keepdims=True).astype(reference.wide_dtype(x.dtype))
    return jnp.maximum(jax.lax.psum(count, mode.axis_name) if mode.axis_name else count, 1)


def _elements(mode: Mode, x: Array) -> int:
    return math.prod(x.shape[d] for d in mode.axes)


# With checkpoint a backward pass gets both arrays as they are, and not in the dtype of the arithmetic.
@functools.partial(jax.checkpoint, prevent_cse=False)
def inner_product(a: Array, b: Array) -> Array:
    """The sum of a b."""
    return jnp.sum(reference.widened(a) * reference.widened(b))
