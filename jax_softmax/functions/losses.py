"""Cross entropies: the public functions, and the loss of soft labels with its derivative."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from jax_softmax.functions import arguments
from jax_softmax.functions.arguments import Axis, AxisName, Reduction
from jax_softmax.functions.integer_losses import (
    Labelled,
    Mode,
    Number,
    as_arrays,
    checked_regularization,
    weighted_losses,
)
from jax_softmax.primitives import reference
from jax_softmax.primitives.labels import label_of_rows, widened_labels
from jax_softmax.primitives.reference import Normalizer
from jax_softmax.primitives.rows import is_zero, row_normalizer, row_sum
from jax_softmax.primitives.types import Axes, Dtype, Mask, MeshAxes, rows_sharded_as, types_tell_shardings


def softmax_cross_entropy_with_integer_labels(
    logits: ArrayLike,
    labels: ArrayLike,
    axis: Axis = -1,
    where: ArrayLike | None = None,
    *,
    label_smoothing: ArrayLike = 0.0,
    z_loss: ArrayLike = 0.0,
    axis_name: AxisName = None,
) -> Array:
    """Cross entropy of softmax(logits) and integer labels, a loss for each row: lse - logits[label].

    A drop-in for optax's function of that name. The logits are read once; the backward pass reads them again and writes
    their gradient.

    Args:
      logits: array of unnormalised log probabilities, computed in float32 (float64 for float64).
      labels: array of an integer dtype and of the shape of logits without `axis`; along several axes, a label counts in
        the order in which they are given, the last varying fastest. A label that is negative or too large is ignored:
        its loss and gradient are 0, whatever the logits are.
      axis: the axis of the classes, or axes; at least one.
      where: boolean mask. One that broadcasts to the logits' shape leaves out classes where it is False: they do not
        count in lse. One of the labels' shape leaves out whole rows. A mask whose shape could mean both is refused:
        write where[..., None] for rows along the last axis. A row without any class is ignored.
      label_smoothing: a number or scalar array a, from 0 to 1: the label's probability is 1 - a + a / n, the others'
        a / n, where n is the number of classes that are not left out. With it, logits are read once more. A number is
        compiled into the program, an array is not.
      z_loss: a number or scalar array, which is multiplied with the square of lse (log-sum-exp) and added to the loss.
      axis_name: as for `softmax`: logits, and a mask of classes, are this device's shard of the classes. Labels are the
        same on all devices along these mesh axes, and so are the losses. Labels count the classes of all shards, one
        shard after the other; along several mesh axes the last one varies fastest. If the classes have several axes,
        the one that is sharded must be given first.

    Returns:
      Losses, of the labels' shape, in float32 (float64 for float64), for logits of 16 bits as well.

    Raises:
      TypeError: an argument is of the wrong type or dtype.
      ValueError: labels are not of the logits' shape without axis, there are no classes or more than 2^31 - 1, axis is
        out of range or repeated, where has another shape or could mean rows as well as classes, label_smoothing or
        z_loss is not a scalar or, as a number, not in its range, or axis_name is not a mesh axis of a surrounding
        `shard_map`.
    """
    name = "softmax_cross_entropy_with_integer_labels"
    logits, axis, where, axis_name = arguments.for_jit(name, logits, axis, where, axis_name, argument="logits")
    labels = arguments.checked_labels(name, labels)
    regularization = checked_regularization(name, label_smoothing, z_loss)
    return _integer_losses(name, logits, labels, axis, where, None, None, None, regularization, axis_name)


def softmax_cross_entropy(
    logits: ArrayLike, labels: ArrayLike, axis: Axis = -1, where: ArrayLike | None = None, *, axis_name: AxisName = None
) -> Array:
    """Cross entropy of softmax(logits) and the distributions `labels`, a loss for each row: sum(labels (lse - logits)).

    A drop-in for optax's function of that name.

    Args:
      logits: array of unnormalised log probabilities, computed in float32 (float64 for float64).
      labels: real array that broadcasts to the logits' shape: probabilities.
      axis: the axis of the classes, or axes.
      where: boolean mask. One that broadcasts to the logits' shape leaves out classes where it is False. One of the
        result's shape leaves out whole rows. A mask whose shape could mean both is refused: write where[..., None] for
        rows along the last axis.
      axis_name: as for `softmax`: logits, labels and where are this device's shard of the classes. The losses are the
        same on all devices along these mesh axes.

    Returns:
      Losses, of the logits' shape without axis, in float32 (float64 for float64). A class of probability 0 adds 0,
      also where its logit is -inf.

    Raises:
      TypeError: an argument is of the wrong type or dtype.
      ValueError: labels does not broadcast to the logits' shape, where has another shape or could mean rows as well as
        classes, axis is out of range or repeated, or axis_name is not a mesh axis of a surrounding `shard_map`.
    """
    name = "softmax_cross_entropy"
    logits, axis, where, axis_name = arguments.for_jit(name, logits, axis, where, axis_name, argument="logits")
    labels = arguments.checked_real_array(name, labels, "labels")
    return _soft_labels(logits, labels, axis, where, axis_name)


@functools.partial(jax.jit, static_argnums=(2, 4), inline=True)
def _soft_labels(logits: ArrayLike, labels: Array, axis: Axis, where: ArrayLike | None, axis_name: AxisName) -> Array:
    name = "softmax_cross_entropy"
    x, where, axes, axis_name, _ = arguments.prepared(
        name, logits, axis, where, axis_name, argument="logits", may_enlarge=False
    )
    arguments.check_broadcasts(name, "labels", labels.shape, x.shape)
    labels = as_soft_labels(labels, x)
    if where is not None:
        labels = jnp.where(where, labels, 0)
    labels = jnp.broadcast_to(labels, x.shape)
    return jax.lax.squeeze(soft_losses(axes, axis_name, arguments.varying_as_well(x, labels, ()), labels, where), axes)


def cross_entropy_loss(
    logits: ArrayLike,
    labels: ArrayLike,
    axis: Axis = -1,
    where: ArrayLike | None = None,
    *,
    weights: ArrayLike | None = None,
    class_weights: ArrayLike | None = None,
    reduction: Reduction = "mean",
    label_smoothing: ArrayLike = 0.0,
    z_loss: ArrayLike = 0.0,
    axis_name: AxisName = None,
) -> Array:
    """The mean or sum of `softmax_cross_entropy_with_integer_labels`: the loss of a training step.

    Where it is differentiated, the forward pass computes the gradient with the loss, in the logits' dtype: on CUDA by
    one read and one write, unless the classes are spread over devices. The backward pass multiplies it by the incoming
    cotangent, unless that is known to be 1. For float16, and with axis_name, the backward pass computes the gradient:
    in float16 it would underflow without the cotangent, the scale of the loss. Differentiable in forward and reverse
    mode to any order.

    Args:
      logits, labels, axis, where, label_smoothing, z_loss, axis_name: as for
        `softmax_cross_entropy_with_integer_labels`.
      weights: real array that broadcasts to the labels' shape: each loss is multiplied by its weight. None, the
        default, stands for 1. An ignored label has weight 0. Rows of weight 0 may have logits that are not finite.
      class_weights: real array of shape (classes,), for all classes, the same on all devices: each loss is multiplied
        by the weight of its label's class as well. Without label smoothing this is `weight` of PyTorch's cross_entropy,
        whose mean is divided by the sum of the weights as well. With smoothing, PyTorch multiplies each class's share
        of the probability by that class's weight; here the whole loss has the weight of the label's class.
      reduction: "mean", the weighted mean of the losses, sum(w loss) / sum(w) (0 if no label counts); "sum", their
        weighted sum; or None, each row's loss times its weight, which elsewhere is called "none". Inside `shard_map`
        rows that are sharded over mesh axes other than axis_name are not added up: this device's rows are.

    Returns:
      A scalar, or without a reduction an array of the labels' shape, in float32 (float64 for float64).

    Raises:
      TypeError: an argument is of the wrong type or dtype.
      ValueError: as for `softmax_cross_entropy_with_integer_labels`, or weights does not broadcast to the labels'
        shape, class_weights has not one weight for each class, or reduction is not one of these.
    """
    name = "cross_entropy_loss"
    arguments.check_reduction(name, reduction)
    logits, axis, where, axis_name = arguments.for_jit(name, logits, axis, where, axis_name, argument="logits")
    weights = arguments.checked_optional_array(name, weights, "weights")
    class_weights = arguments.checked_optional_array(name, class_weights, "class_weights")
    labels = arguments.checked_labels(name, labels)
    regularization = checked_regularization(name, label_smoothing, z_loss)
    return _integer_losses(
        name, logits, labels, axis, where, weights, class_weights, reduction, regularization, axis_name
    )


@functools.partial(jax.jit, static_argnums=(0, 3, 7, 9), inline=True)
def _integer_losses(
    name: str,
    logits: ArrayLike,
    labels: Array,
    axis: Axis,
    where: ArrayLike | None,
    weights: Array | None,
    class_weights: Array | None,
    reduction: Reduction,
    regularization: tuple[Number, Number],
    axis_name: AxisName,
) -> Array:
    """The losses of rows, or their mean or sum."""
    x, where, axes, axis_name, _ = arguments.prepared(
        name, logits, axis, where, axis_name, argument="logits", may_enlarge=False
    )
    classes = arguments.checked_classes(name, x.shape, axes, axis_name)
    rows = tuple(n for d, n in enumerate(x.shape) if d not in axes)
    arguments.check_shape_of_labels(name, labels, rows, "the shape of logits without axis", x.shape)
    label_axes = arguments.checked_axes(name, x.ndim, axis)  # in the user's order
    labelled = Labelled(x, *label_of_rows(labels, x.shape, label_axes, where, axis_name), where)
    wide = reference.wide_dtype(x.dtype)
    weights = row_weights(name, labels, labelled.found, classes, axes, weights, class_weights, reduction, wide)
    weights = rows_sharded_as(_varying_as_well(labelled).x, weights)
    labelled = _varying_as_well(labelled, weights, *regularization)
    mode = Mode(axes, axis_name, summed=reduction is not None and x.dtype != jnp.float16)
    losses = weighted_losses(mode, labelled, weights, as_arrays(regularization, wide))
    if reduction is None:
        return jax.lax.squeeze(losses, axes)
    return losses if mode.summed else jnp.sum(losses)


def row_weights(
    name: str,
    labels: Array,
    found: Array,
    classes: int,
    axes: Axes,
    weights: Array | None,
    class_weights: Array | None,
    reduction: Reduction,
    dtype: Dtype,
) -> Array:
    """The factors of the rows' losses in the result. `found` says which rows have a label."""
    if class_weights is not None and class_weights.shape != (classes,):
        raise ValueError(f"{name}: class_weights must be of shape ({classes},), got shape {class_weights.shape}.")
    rows = tuple(n for d, n in enumerate(found.shape) if d not in axes)
    if weights is not None:
        arguments.check_broadcasts(name, "weights", weights.shape, rows)
        weights = weights.astype(dtype)
    if class_weights is not None:
        sharding = jax.typeof(labels).sharding if types_tell_shardings([jax.typeof(labels)]) else None
        at_labels = class_weights.astype(dtype).at[widened_labels(labels)].get(mode="clip", out_sharding=sharding)
        weights = at_labels if weights is None else at_labels * weights
    factors = found.astype(dtype)
    if weights is not None:
        factors = jnp.where(found, jnp.expand_dims(jnp.broadcast_to(weights, rows), axes), 0)
    if reduction != "mean":
        return factors
    sum_of_weights = jnp.sum(factors)
    if weights is None:
        return factors / jnp.maximum(sum_of_weights, 1)
    return factors / reference.select(sum_of_weights == 0, 1, sum_of_weights)


def _varying_as_well(labelled: Labelled, *others: Any) -> Labelled:
    """The logits varying over all mesh axes that their labels and these arrays vary over."""
    x = labelled.x
    for other in jax.tree.leaves([labelled.label, *others]):
        x = arguments.varying_as_well(x, other, ())
    return labelled._replace(x=x)


# ---- The losses of soft labels, and their derivative. Values of rows keep the reduced axes, with extent 1.


def as_soft_labels(labels: Array, x: Array) -> Array:
    """Labels of 16 bits stay as they are, unless x is float64: others are in the dtype that x is computed in."""
    wide = reference.wide_dtype(x.dtype)
    return labels if reference.wide_dtype(labels.dtype) == wide else labels.astype(wide)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def soft_losses(axes: Axes, axis_name: MeshAxes, x: Array, labels: Array, where: Mask) -> Array:
    """sum(labels (lse - x)) over each row; labels are `as_soft_labels`, and 0 of masked classes."""
    return _sum_of_terms(x, row_normalizer(x, where, axes, axis_name), labels, labels, where, axes, axis_name)


def _sum_of_terms(
    x: Array, normalizer: Normalizer, labels: Array, weights: Array, where: Mask, axes: Axes, axis_name: MeshAxes
) -> Array:
    """sum(weights (lse - x)) over each row, without the classes whose label is 0 and whose x is -inf: 0 log 0 is 0."""
    adds = (labels != 0) | (x != -jnp.inf)
    if where is not None:
        adds &= where
    losses = normalizer.log_sum - reference.fill_masked(reference.distances(x, normalizer), where)
    terms = reference.widened(weights) * jnp.where(adds, losses, 0)
    # This second selection has XLA for CPUs write the terms to memory, and not each of their factors in float32.
    return row_sum(jnp.where(adds, terms, 0), axes, axis_name)


@functools.partial(soft_losses.defjvp, symbolic_zeros=True)
def _soft_losses_jvp(axes: Axes, axis_name: MeshAxes, primals: Any, tangents: Any) -> tuple[Array, Array]:
    x, labels, where = primals
    normalizer = row_normalizer(x, where, axes, axis_name)
    losses = _sum_of_terms(x, normalizer, labels, labels, where, axes, axis_name)
    tangent = jnp.zeros_like(losses)
    if not is_zero(tangents[0]):
        # Without barriers XLA for CPUs fuses this sum with its uses, or widens labels once for both: either way it
        # writes copies of operands in float32.
        summed = reference.widened(jax.lax.optimization_barrier(labels))
        label_sum = jax.lax.optimization_barrier(row_sum(summed, axes, axis_name))
        tangent += _soft_tangent(x, normalizer.finite(), labels, label_sum, tangents[0], where, axes, axis_name)
    if not is_zero(tangents[1]):
        tangent += _sum_of_terms(x, normalizer, labels, tangents[1], where, axes, axis_name)
    return losses, tangent


# With checkpoint a backward pass gets the logits and labels, and nothing that was computed from them.
@functools.partial(jax.checkpoint, prevent_cse=False, static_argnums=(6, 7))
def _soft_tangent(
    x: Array,
    normalizer: Normalizer,
    labels: Array,
    label_sum: Array,
    t: Array,
    where: Mask,
    axes: Axes,
    axis_name: MeshAxes,
) -> Array:
    y = reference.probabilities(x, normalizer, where)
    return row_sum((y * label_sum - reference.widened(labels)) * reference.widened(t), axes, axis_name)
