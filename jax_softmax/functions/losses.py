"""Log-sum-exp and cross entropies: the public functions."""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from jax_softmax.functions import arguments
from jax_softmax.functions.arguments import Axis, AxisName
from jax_softmax.primitives import reference
from jax_softmax.primitives.labels import at_labels, exists, label_of_rows
from jax_softmax.primitives.reference import Normalizer
from jax_softmax.primitives.rows import (
    cross_entropy_gradient_p,
    cross_entropy_p,
    maximum,
    normalizer,
    of_mask,
    row_sum,
    tangent_sums_of_parts,
    tangent_sums_p,
)
from jax_softmax.primitives.softmax import rows_laid_as

_LARGEST_NUMBER = np.finfo(np.float64).max  # that an option may be


def logsumexp(
    x: ArrayLike,
    axis: Axis = -1,
    where: ArrayLike | None = None,
    keepdims: bool = False,
    *,
    dtype: DTypeLike | None = None,
    return_max: bool = False,
    axis_name: AxisName = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Logarithm of the sum of exp(x) along axis, computed relative to the maximum.

    As `jax.nn.logsumexp`, but for the default axis. x is read once, and nothing of its size is written. The backward
    pass needs x and the result. Differentiable in forward and reverse mode to any order.

    Args:
      x: array of a floating, integer or boolean dtype, computed in float32 (float64 for float64).
      axis, where, axis_name: as for `softmax`; where leaves elements out of the sum.
      keepdims: whether reduced axes stay, with extent 1.
      dtype: that of the result, a floating one; by default x's, or for integers that of their exponentials. float32 for
        an x of 16 bits keeps the precision that the sum has.
      return_max: whether to return the maximum as well.

    Returns:
      An array of x's shape without the reduced axes, or a pair of such, the log-sum-exp and the maximum: of rows that
      are masked altogether, -inf. A row with +inf gives +inf, one with a NaN gives NaN.

    Raises:
      TypeError: an argument is of the wrong type or dtype.
      ValueError: axis is out of range or repeated, where does not broadcast with x, or axis_name is not one of the
        axes of a surrounding `shard_map`.
    """
    if dtype is not None:
        dtype = _float_dtype("logsumexp", dtype)
    keepdims = arguments.checked_bool("logsumexp", keepdims, "keepdims")
    return_max = arguments.checked_bool("logsumexp", return_max, "return_max")
    x, axis, where, axis_name = arguments.for_jit("logsumexp", x, axis, where, axis_name)
    return _logsumexp(x, axis, where, keepdims, dtype, return_max, axis_name)


@functools.partial(jax.jit, static_argnums=(1, 3, 4, 5, 6), inline=True)
def _logsumexp(x, axis, where, keepdims, dtype, return_max, axis_name):
    x, where, axes, axis_name, of_x = arguments.prepared("logsumexp", x, axis, where, axis_name)
    rows = normalizer(x, where, axes, axis_name)
    results = [rows.lse]
    if return_max:
        largest = jnp.where(jnp.isnan(rows.lse), rows.lse, rows.largest)  # the kernels' maximum leaves NaNs out
        results.append(maximum(x, largest, where, axes, axis_name))
    results = [r.astype(of_x if dtype is None else dtype) for r in results]
    if not keepdims:
        results = [jax.lax.squeeze(r, axes) for r in results]
    return tuple(results) if return_max else results[0]


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
    options = _options(name, label_smoothing, z_loss)
    return _integer_labels(name, logits, _integer_array(name, labels), axis, where, options, axis_name)


@functools.partial(jax.jit, static_argnums=(0, 3, 6), inline=True)
def _integer_labels(name, logits, labels, axis, where, options, axis_name):
    x, where, axes, axis_name, _ = arguments.prepared(
        name, logits, axis, where, axis_name, argument="logits", may_enlarge=False
    )
    labels, in_order = _checked_labels(name, x, labels, axes, axis_name), arguments.checked_axes(name, x.ndim, axis)
    label, found = label_of_rows(labels, x.shape, in_order, where, axis_name)
    x = _varying_as_well(x, label, *options.values())
    values = _row_values(axes, axis_name, x, label, found, where, None)
    losses = _losses(values, _classes(x, where, axes, axis_name), _in_dtype_of(values[0], options))
    return jax.lax.squeeze(losses, axes)


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
    return jax.lax.squeeze(_soft_losses(axes, axis_name, _varying_as_well(x, labels), labels, where), axes)


def cross_entropy_loss(
    logits: ArrayLike,
    labels: ArrayLike,
    *,
    axis: Axis = -1,
    where: ArrayLike | None = None,
    weights: ArrayLike | None = None,
    reduction: str = "mean",
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
      logits, labels, axis, where, label_smoothing, z_loss, axis_name: as there. The mean or sum is one of the rows that
        this device has, or has parts of: rows that are spread over other mesh axes are the caller's to add up.
      weights: real array that broadcasts to the labels' shape: how much each loss counts. None, the default: 1 each.
        Ignored labels count 0. Where the weight is 0, logits that are not finite do not count either.
      reduction: "mean", the weighted mean of the losses (0 if no label counts), or "sum", their weighted sum.

    Returns:
      A scalar in float32 (float64 for float64).

    Raises:
      TypeError: an argument is of the wrong type or dtype.
      ValueError: as there, or weights does not broadcast to the labels' shape, or reduction is neither.
    """
    name = "cross_entropy_loss"
    if not isinstance(reduction, str):
        raise TypeError(f'{name}: reduction must be "mean" or "sum", got one of type {type(reduction).__name__}.')
    if reduction not in ("mean", "sum"):
        raise ValueError(f'{name}: reduction must be "mean" or "sum", got {reduction!r}.')
    logits, axis, where, axis_name = arguments.for_jit(name, logits, axis, where, axis_name, argument="logits")
    if weights is not None:
        weights = arguments.checked_real_array(name, weights, "weights")
    options = _options(name, label_smoothing, z_loss)
    return _loss(logits, _integer_array(name, labels), axis, where, weights, reduction, options, axis_name)


@functools.partial(jax.jit, static_argnums=(2, 5, 7), inline=True)
def _loss(logits, labels, axis, where, weights, reduction, options, axis_name):
    name = "cross_entropy_loss"
    x, where, axes, axis_name, _ = arguments.prepared(
        name, logits, axis, where, axis_name, argument="logits", may_enlarge=False
    )
    labels, in_order = _checked_labels(name, x, labels, axes, axis_name), arguments.checked_axes(name, x.ndim, axis)
    label, found = label_of_rows(labels, x.shape, in_order, where, axis_name)
    wide = reference.wide_dtype(x.dtype)
    counted = found.astype(wide)
    if weights is not None:
        arguments.check_broadcasts(name, "weights", weights.shape, labels.shape)
        weights = jnp.expand_dims(jnp.broadcast_to(weights, labels.shape), axes)
        counted = jnp.where(counted > 0, weights.astype(wide), 0)
    if reduction == "mean":
        total = jnp.sum(counted)
        counted = counted / jnp.where(total == 0, 1, total)
    counted = rows_laid_as(_varying_as_well(x, label), counted)
    x = _varying_as_well(x, label, counted, *options.values())
    options = _in_dtype_of(counted, options)
    if axis_name or x.dtype == jnp.float16:
        return _weighted_sum(axes, axis_name, x, label, found, where, counted, options)
    return _weighted_sum_with_gradient(axes, axis_name, x, label, found, where, counted, options)


# ---- What they are made of. Rows keep the reduced axes, with extent 1. `label` is -1 where another device has the
# label's element; `found` says of which rows any has.


class _RowValues(NamedTuple):
    """What losses are made of, 0 of rows that do not count. A row's maximum, `largest`, counts as a constant."""

    loss: jax.Array  # lse less the label's logit
    lse: jax.Array
    log_total: jax.Array  # lse - largest
    distances: jax.Array  # the sum of logit - largest over the logits that are not left out


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _row_values(axes, axis_name, x, label, found, where, weights):
    loss, rows = _loss_and_normalizer(axes, axis_name, x, label, found, where)
    return _values_with(loss, rows, _counts(loss, found, weights), axes, axis_name, x, where)


def _counts(loss, found, weights):
    """Which rows count: those with a label, but for those of weight 0 whose loss is not finite."""
    return found if weights is None else found & ((weights != 0) | jnp.isfinite(loss))


def _loss_and_normalizer(axes, axis_name, x, label, found, where):
    if not axis_name:
        loss, *rows = cross_entropy_p.bind(*of_mask(x, label, where), axes=axes, axis_name=())
        return loss, Normalizer(*rows)
    rows = normalizer(x, where, axes, axis_name)
    distance = jnp.where(exists(label, x.shape, axes), reference.distances(at_labels(x, axes, label), rows), 0)
    return jnp.where(found, rows.log_total - jax.lax.psum(distance, axis_name), 0), rows


def _values_with(loss, rows, counts, axes, axis_name, x, where):
    total = row_sum(reference.kept(reference.distances(x, rows), where), axes, axis_name)
    return _RowValues(*(jnp.where(counts, of_row, 0) for of_row in (loss, rows.lse, rows.log_total, total)))


@functools.partial(_row_values.defjvp, symbolic_zeros=True)
def _row_values_jvp(axes, axis_name, primals, tangents):
    x, label, found, where, weights = primals
    loss, rows = _loss_and_normalizer(axes, axis_name, x, label, found, where)
    counts = _counts(loss, found, weights)
    values = _values_with(loss, rows, counts, axes, axis_name, x, where)
    if _is_zero(tangents[0]):
        return values, jax.tree.map(jnp.zeros_like, values)
    if axis_name:
        t = jnp.where(counts, tangents[0], 0)
        sums = tangent_sums_of_parts(x, rows, t, label, counts if where is None else where & counts, axes, axis_name)
    else:
        sums = tangent_sums_p.bind(*of_mask(x, *rows, tangents[0], label, where), axes=axes)
    of_lse, of_total, of_logit = (jnp.where(counts, t, 0) for t in sums)
    return values, _RowValues(of_lse - of_logit, of_lse, of_lse, of_total)


def _classes(x, where, axes, axis_name):
    """How many classes each row has, or a number for all."""
    if where is None:
        return math.prod(x.shape[d] for d in axes) * math.prod(map(jax.lax.axis_size, axis_name))
    count = jnp.sum(jnp.broadcast_to(where, x.shape), axes, keepdims=True).astype(reference.wide_dtype(x.dtype))
    return jnp.maximum(jax.lax.psum(count, axis_name) if axis_name else count, 1)


def _losses(values, classes, options):
    """The losses of rows of these values."""
    losses = values.loss
    if options["label_smoothing"] is not None:
        losses += options["label_smoothing"] * _above_mean(values, classes)
    if options["z_loss"] is not None:
        losses += options["z_loss"] * values.lse**2
    return losses


def _above_mean(values, classes):
    """By how much the label's logit is above the mean of its row."""
    return (values.log_total - values.loss) - values.distances / classes


def _weighted_sum(axes, axis_name, x, label, found, where, weights, options):
    """The sum of the losses times their weights."""
    values = _row_values(axes, axis_name, x, label, found, where, weights)
    return _dot(_losses(values, _classes(x, where, axes, axis_name), options), weights)


def _dot(losses, weights):
    return jnp.sum(_counted(losses, weights) * weights)


def _counted(losses, weights):
    """The losses without those that do not count though they are not finite."""
    return jnp.where((weights == 0) & ~jnp.isfinite(losses), 0, losses)


# The same of rows that no axis_name spreads, with a derivative that is made together with it.
_weighted_sum_with_gradient = jax.custom_jvp(_weighted_sum, nondiff_argnums=(0, 1))


@functools.partial(_weighted_sum_with_gradient.defjvp, symbolic_zeros=True)
def _weighted_sum_jvp(axes, axis_name, primals, tangents):
    x, label, found, where, weights, options = primals
    x_dot, *_, weights_dot, options_dot = tangents
    classes = _classes(x, where, axes, axis_name)
    tangent = jnp.zeros((), weights.dtype)
    if _is_zero(x_dot):
        values = _row_values(axes, axis_name, x, label, found, where, weights)
    else:
        gradient, rows = _gradient(axes, x, label, where, weights, classes, options)
        loss = reference.cross_entropy_given(rows, x, label, axes)
        values = _values_with(loss, rows, _counts(loss, found, weights), axes, axis_name, x, where)
        tangent += _inner_product(gradient, x_dot)
    losses = _losses(values, classes, options)
    if not _is_zero(weights_dot):
        tangent += jnp.sum(_counted(losses, weights) * weights_dot)
    if not _is_zero(options_dot["label_smoothing"]):
        tangent += _dot(_above_mean(values, classes), weights) * options_dot["label_smoothing"]
    if not _is_zero(options_dot["z_loss"]):
        tangent += _dot(values.lse**2, weights) * options_dot["z_loss"]
    return _dot(losses, weights), tangent


# With checkpoint the gradient is kept for a backward pass as it is, and not in the dtype of the arithmetic.
@functools.partial(jax.checkpoint, prevent_cse=False)
def _inner_product(a, b):
    return jnp.sum(reference.widened(a) * reference.widened(b))


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _soft_losses(axes, axis_name, x, labels, where):
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


@functools.partial(_soft_losses.defjvp, symbolic_zeros=True)
def _soft_losses_jvp(axes, axis_name, primals, tangents):
    x, labels, where = primals
    rows = normalizer(x, where, axes, axis_name)
    losses = _sum_of_terms(x, rows, labels, labels, where, axes, axis_name)
    tangent = jnp.zeros_like(losses)
    if not _is_zero(tangents[0]):
        # Of the sum and what is made with it XLA for CPUs would make one computation, through copies of all in float32.
        total = jax.lax.optimization_barrier(row_sum(labels, axes, axis_name))
        tangent += _soft_tangent(x, rows, labels, total, tangents[0], where, axes, axis_name)
    if not _is_zero(tangents[1]):
        tangent += _sum_of_terms(x, rows, labels, tangents[1], where, axes, axis_name)
    return losses, tangent


# With checkpoint the logits and labels are kept for a backward pass, and nothing that is made of them.
@functools.partial(jax.checkpoint, prevent_cse=False, static_argnums=(6, 7))
def _soft_tangent(x, rows, labels, total, t, where, axes, axis_name):
    y = reference.probabilities(x, rows, where)
    return row_sum((y * total - labels) * reference.widened(t), axes, axis_name)


def _is_zero(tangent):
    return tangent is None or isinstance(tangent, jax.custom_derivatives.SymbolicZero)


def _gradient(axes, x, label, where, weights, classes, options):
    """The gradient of the weighted sum of losses, and the rows' normalizer."""
    smoothing, z_loss = (0 if options[name] is None else options[name] for name in ("label_smoothing", "z_loss"))
    of_rows = (2 * z_loss * weights, -smoothing / classes * weights, (smoothing - 1) * weights)
    of_rows = (jnp.broadcast_to(value, weights.shape) for value in of_rows)
    operands = of_mask(x, weights, *of_rows, label, where)
    gradient, *rows = cross_entropy_gradient_p.bind(*operands, axes=axes, axis_name=())
    return gradient, Normalizer(*rows)


# ---- Arguments


def _varying_as_well(x, *others):
    return functools.reduce(lambda x, other: arguments.varying_as_well(x, other, ()), jax.tree.leaves(others), x)


def _checked_labels(name, x, labels, axes, axis_name):
    arguments.check_classes(name, x.shape, axes, axis_name)
    expected = tuple(n for d, n in enumerate(x.shape) if d not in axes)
    if labels.shape != expected:
        raise ValueError(
            f"{name}: labels must have the shape of logits without axis, {expected} for logits of shape {x.shape}, got "
            f"{labels.shape}."
        )
    return labels


def _integer_array(name: str, labels: Any) -> jax.Array:
    labels = arguments.as_array(f"{name}: labels must be an array of an integer dtype", labels)
    if not jnp.issubdtype(labels.dtype, jnp.integer):
        raise TypeError(f"{name}: labels must be an array of an integer dtype, got one of dtype {labels.dtype}.")
    return labels


def _float_dtype(name: str, dtype: Any) -> np.dtype:
    try:
        found = jnp.dtype(dtype)
    except TypeError:
        found = None
    if found is None or not jnp.issubdtype(found, jnp.floating):
        raise TypeError(f"{name}: dtype must be a floating dtype or None, got {dtype!r}.")
    return jax.dtypes.canonicalize_dtype(found)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Constant:
    """A number that is part of a program, and no operand of it: there is nothing to transfer to a device."""

    value: float


def _in_dtype_of(array, options):
    def converted(value):
        return jnp.asarray(value.value if isinstance(value, _Constant) else value, array.dtype)

    return {name: None if value is None else converted(value) for name, value in options.items()}


def _options(name: str, label_smoothing: Any, z_loss: Any) -> dict[str, _Constant | jax.Array | None]:
    """The options that are not the number 0, which leaves out what it would take to compute them."""
    options: dict[str, _Constant | jax.Array | None] = {}
    for argument, value, least, most in (
        ("label_smoothing", label_smoothing, 0, 1),
        ("z_loss", z_loss, -_LARGEST_NUMBER, _LARGEST_NUMBER),
    ):
        if isinstance(value, int | float | np.integer | np.floating):
            if not least <= value <= most:
                raise ValueError(f"{name}: {argument} must be a number from {least} to {most}, got {value}.")
            options[argument] = _Constant(float(value)) if value else None
            continue
        value = arguments.checked_real_array(name, value, argument)
        if value.shape:
            raise ValueError(f"{name}: {argument} must be a scalar, got shape {value.shape}.")
        options[argument] = value
    return options
