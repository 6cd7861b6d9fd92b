"""Cross entropies: the public functions, and what they ask of their arguments."""

import functools
import math

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jax_softmax.functions import arguments
from jax_softmax.functions.arguments import Axis, AxisName, Reduction
from jax_softmax.functions.integer_losses import How, Labelled, checked_options, weighted_losses
from jax_softmax.primitives import reference
from jax_softmax.primitives.labels import label_of_rows, widened_labels
from jax_softmax.primitives.rows import is_zero, row_normalizer, row_sum
from jax_softmax.primitives.types import rows_laid_as, types_tell_shardings


def softmax_cross_entropy_with_integer_labels(
    logits: ArrayLike,
    labels: ArrayLike,
    axis: Axis = -1,
    where: ArrayLike | None = None,
    *,
    label_smoothing: ArrayLike = 0.0,
    z_loss: ArrayLike = 0.0,
    axis_name: AxisName = None,
) -> jax.Array:
    """Cross entropy of softmax(logits) and integer labels, a loss for each row: lse - logits[label].

    A drop-in for optax's function of that name. The logits are read once; the backward pass reads them again and writes
    their gradient.

    Args:
      logits: array of unnormalised log probabilities, computed in float32 (float64 for float64).
      labels: array of an integer dtype and of the shape of logits without `axis`; along several axes, a label counts in
        the order in which they are given, the last varying fastest. A label that is negative or too large is ignored:
        its loss and gradient are 0, whatever the logits are.
      axis: the axis of the classes, or axes; at least one.
      where: boolean mask that broadcasts to the logits' shape; False leaves a class out of lse. Or one of the labels'
        shape, which leaves out whole rows; if that broadcasts to the logits' shape as well, with another meaning, it is
        refused, and where[..., None] says rows (of the last axis). A row of which all is left out is ignored.
      label_smoothing: a number or scalar array a, from 0 to 1: the label's probability is 1 - a + a / n, the others'
        a / n, where n is the number of classes, or of those that are not left out. With it, logits are read once more.
        A number is a constant of the compiled program, an array is not.
      z_loss: a number or scalar array: the weight of lse² (the square of the log-sum-exp), which is added.
      axis_name: as for `softmax`: logits, and a mask of classes, are this device's part of the classes. Labels are the
        same on all devices along these mesh axes, and so are the losses. They count the classes of all parts, one part
        after the other, of several mesh axes the last varying fastest: so if there are several axes, the one that is
        sharded is to be given first.

    Returns:
      Losses, of the labels' shape, in float32 (float64 for float64), also of logits of 16 bits.

    Raises:
      TypeError: an argument is of the wrong type or dtype.
      ValueError: labels are not of the logits' shape without axis, there are no classes or more than 2^31 - 1, axis is
        out of range or repeated, where does not fit or could mean rows as well as classes, label_smoothing or z_loss is
        not a scalar or, as a number, not in its range, or axis_name is not one of the axes of a surrounding
        `shard_map`.
    """
    name = "softmax_cross_entropy_with_integer_labels"
    logits, axis, where, axis_name = arguments.for_jit(name, logits, axis, where, axis_name, argument="logits")
    labels = arguments.checked_labels(name, labels)
    options = checked_options(name, label_smoothing, z_loss)
    return _integer_losses(name, logits, labels, axis, where, None, None, None, options, axis_name)


def softmax_cross_entropy(
    logits: ArrayLike,
    labels: ArrayLike,
    axis: Axis = -1,
    where: ArrayLike | None = None,
    *,
    axis_name: AxisName = None,
) -> jax.Array:
    """Cross entropy of softmax(logits) and the distributions `labels`, a loss for each row: sum(labels (lse - logits)).

    A drop-in for optax's function of that name.

    Args:
      logits: array of unnormalised log probabilities, computed in float32 (float64 for float64).
      labels: real array that broadcasts to the logits' shape: probabilities.
      axis: the axis of the classes, or axes.
      where: boolean mask that broadcasts to the logits' shape; False leaves a class out. Or one of the result's shape,
        which leaves out whole rows; if that broadcasts to the logits' shape as well, with another meaning, it is
        refused, and where[..., None] says rows (of the last axis).
      axis_name: as for `softmax`: logits, labels and where are this device's part of the classes. The losses are the
        same on all devices along these mesh axes.

    Returns:
      Losses, of the logits' shape without axis, in float32 (float64 for float64). A class of probability 0 adds 0,
      also where its logit is -inf.

    Raises:
      TypeError: an argument is of the wrong type or dtype.
      ValueError: labels does not broadcast to the logits' shape, where does not fit or could mean rows as well as
        classes, axis is out of range or repeated, or axis_name is not one of the axes of a surrounding `shard_map`.
    """
    name = "softmax_cross_entropy"
    logits, axis, where, axis_name = arguments.for_jit(name, logits, axis, where, axis_name, argument="logits")
    labels = arguments.checked_real_array(name, labels, "labels")
    return _soft_labels(logits, labels, axis, where, axis_name)


@functools.partial(jax.jit, static_argnums=(2, 4), inline=True)
def _soft_labels(logits, labels, axis, where, axis_name):
    name = "softmax_cross_entropy"
    x, where, axes, axis_name, _ = arguments.prepared(
        name, logits, axis, where, axis_name, argument="logits", may_enlarge=False
    )
    arguments.check_broadcasts(name, "labels", labels.shape, x.shape)
    labels = labels.astype(reference.wide_dtype(x.dtype))
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
) -> jax.Array:
    """The mean or sum of `softmax_cross_entropy_with_integer_labels`: the loss of a training step.

    Where it is differentiated, the forward pass makes the gradient with the loss, in the logits' dtype: on CUDA by one
    read and one write, unless the classes are spread over devices. The backward pass multiplies it by the incoming
    cotangent, unless that is known to be 1. Of float16 the backward pass makes the gradient, so that loss scaling can
    keep it from underflow; and so it does with axis_name. Differentiable in forward and reverse mode to any order.

    Args:
      logits, labels, axis, where, label_smoothing, z_loss, axis_name: as for
        `softmax_cross_entropy_with_integer_labels`.
      weights: real array that broadcasts to the labels' shape: how much each loss counts. None, the default: 1 each.
        Ignored labels count 0. Where the weight is 0, logits that are not finite do not count either.
      class_weights: real array of shape (classes,), the same on all devices, for all classes: each loss counts as much
        as its label's class, times its weight. Without label smoothing this is `weight` of PyTorch's
        cross_entropy, whose mean is divided by the sum of the weights as well. Smoothing shares a label's probability
        among all classes: PyTorch weighs each share by its own class, this function the whole loss by the label's.
      reduction: "mean", the weighted mean of the losses, sum(w loss) / sum(w) (0 if no label counts), "sum", their
        weighted sum, or None, each row's loss times its weight, which elsewhere is called "none". Inside `shard_map` a
        mean or sum is one of the rows that this device has, or has parts of: rows that are spread over other mesh axes
        are the caller's to add up.

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
    weights = None if weights is None else arguments.checked_real_array(name, weights, "weights")
    class_weights = (
        None if class_weights is None else arguments.checked_real_array(name, class_weights, "class_weights")
    )
    labels = arguments.checked_labels(name, labels)
    options = checked_options(name, label_smoothing, z_loss)
    return _integer_losses(name, logits, labels, axis, where, weights, class_weights, reduction, options, axis_name)


@functools.partial(jax.jit, static_argnums=(0, 3, 7, 9), inline=True)
def _integer_losses(name, logits, labels, axis, where, weights, class_weights, reduction, options, axis_name):
    """The losses of rows, or their mean or sum: of that the gradient may be made with it."""
    x, where, axes, axis_name, _ = arguments.prepared(
        name, logits, axis, where, axis_name, argument="logits", may_enlarge=False
    )
    labelled = _labelled(name, x, labels, axis, where, axes, axis_name)
    wide = reference.wide_dtype(x.dtype)
    if class_weights is not None:
        classes = math.prod(x.shape[d] for d in axes) * math.prod(map(jax.lax.axis_size, axis_name))
        weights = weights_of_classes(name, class_weights, labels, classes, weights, wide)
    weights = row_weights(name, labelled.found, labels.shape, axes, weights, reduction, wide)
    weights = rows_laid_as(_varying_as_well(labelled).x, weights)
    labelled = _varying_as_well(labelled, weights, *options)
    how = How(axes, axis_name, at_once=reduction is not None and x.dtype != jnp.float16)
    losses = weighted_losses(how, labelled, weights, options.as_arrays(wide))
    if reduction is None:
        return jax.lax.squeeze(losses, axes)
    return losses if how.at_once else jnp.sum(losses)


def weights_of_classes(name, class_weights, labels, classes, weights, dtype):
    """How much a loss counts by its label's class and its own weight; of a label that is no class anything."""
    if class_weights.shape != (classes,):
        raise ValueError(f"{name}: class_weights must be of shape ({classes},), got shape {class_weights.shape}.")
    sharding = jax.typeof(labels).sharding if types_tell_shardings([jax.typeof(labels)]) else None
    of_labels = class_weights.astype(dtype).at[widened_labels(labels)].get(mode="clip", out_sharding=sharding)
    if weights is None:
        return of_labels
    arguments.check_broadcasts(name, "weights", weights.shape, labels.shape)
    return of_labels * weights.astype(dtype)


def row_weights(name, found, shape, axes, weights, reduction, dtype):
    """How much each row's loss counts, given which rows have a label, and the labels' shape."""
    counted = found.astype(dtype)
    if weights is not None:
        arguments.check_broadcasts(name, "weights", weights.shape, shape)
        weights = jnp.expand_dims(jnp.broadcast_to(weights, shape), axes)
        counted = jnp.where(found, weights.astype(dtype), 0)
    if reduction != "mean":
        return counted
    total = jnp.sum(counted)
    return counted / (jnp.maximum(total, 1) if weights is None else reference.select(total == 0, 1, total))


# ---- Arguments


def _labelled(name, x, labels, axis, where, axes, axis_name):
    """The logits with their labels, which count along `axis` as it is given."""
    arguments.check_classes(name, x.shape, axes, axis_name)
    rows = tuple(n for d, n in enumerate(x.shape) if d not in axes)
    arguments.check_shape_of_labels(name, labels, rows, x.shape, "the shape of logits without axis")
    in_order = arguments.checked_axes(name, x.ndim, axis)
    return Labelled(x, *label_of_rows(labels, x.shape, in_order, where, axis_name), where)


def _varying_as_well(labelled, *others):
    """The logits in their type what they are computed with."""
    x = labelled.x
    for other in jax.tree.leaves([labelled.label, *others]):
        x = arguments.varying_as_well(x, other, ())
    return labelled._replace(x=x)


# ---- Losses of distributions, and their derivative. Rows keep the reduced axes, with extent 1.


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def soft_losses(axes, axis_name, x, labels, where):
    """The losses of distributions, of which classes that are left out have none."""
    return _sum_of_terms(x, row_normalizer(x, where, axes, axis_name), labels, labels, where, axes, axis_name)


def _sum_of_terms(x, rows, labels, weights, where, axes, axis_name):
    """The sum of weights (lse - x) over each row, without what has probability 0 and is -inf."""
    adds = (labels != 0) | (x != -jnp.inf)  # 0 log 0 does not
    if where is not None:
        adds &= where
    terms = weights * jnp.where(adds, rows.log_sum - reference.fill_masked(reference.distances(x, rows), where), 0)
    # Selected once more, so that XLA for CPUs writes the terms to memory, and not each of their factors in float32.
    return row_sum(jnp.where(adds, terms, 0), axes, axis_name)


@functools.partial(soft_losses.defjvp, symbolic_zeros=True)
def _soft_losses_jvp(axes, axis_name, primals, tangents):
    x, labels, where = primals
    rows = row_normalizer(x, where, axes, axis_name)
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
