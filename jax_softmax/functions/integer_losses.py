"""Losses of integer labels, each made of four numbers that its row has, and their derivatives.

Rows keep the reduced axes, with extent 1.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jax_softmax.primitives import reference
from jax_softmax.primitives.labels import at_labels, exists
from jax_softmax.primitives.operators import Coefficients, bind
from jax_softmax.primitives.reference import Normalizer
from jax_softmax.primitives.rows import is_zero, normalizer, row_sum
from jax_softmax.primitives.tangent_sums import tangent_sums, tangent_sums_of_parts


class Labelled(NamedTuple):
    """Logits with the labels of their rows."""

    x: jax.Array
    label: jax.Array  # -1 also where another device has the label's element
    found: jax.Array  # of which rows any device has it
    where: jax.Array | None


class _RowValues(NamedTuple):
    """What losses are made of, 0 of rows that do not count. A row's maximum, `largest`, counts as a constant."""

    loss: jax.Array  # lse less the label's logit
    lse: jax.Array
    log_total: jax.Array  # lse - largest
    distances: jax.Array  # the sum of logit - largest over the logits that are not left out


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1, 2))
def _row_values(axes, axis_name, temporary, labelled, weights):
    loss, rows = _loss_and_normalizer(axes, axis_name, labelled)
    return _values_with(loss, rows, _counts(loss, labelled.found, weights), axes, axis_name, labelled)


def _counts(loss, found, weights):
    """Which rows count: those with a label, but for those of weight 0 whose loss is not finite."""
    return found if weights is None else found & ((weights != 0) | jnp.isfinite(loss))


def _loss_and_normalizer(axes, axis_name, labelled):
    x, label, found, where = labelled
    if not axis_name:
        loss, *rows = bind("cross_entropy", x, label, where=where, axes=axes)
        return loss, Normalizer(*rows)
    rows = normalizer(x, where, axes, axis_name)
    distance = jnp.where(exists(label, x.shape, axes), reference.distances(at_labels(x, axes, label), rows), 0)
    return jnp.where(found, rows.log_total - jax.lax.psum(distance, axis_name), 0), rows


def _values_with(loss, rows, counts, axes, axis_name, labelled, distances=None):
    """`distances`: what a kernel made of them, if it did."""
    if distances is None:
        distances = row_sum(reference.kept(reference.distances(labelled.x, rows), labelled.where), axes, axis_name)
    values = loss, rows.lse, rows.log_total, distances
    return _RowValues(*(jnp.where(counts, value, 0) for value in values))


@functools.partial(_row_values.defjvp, symbolic_zeros=True)
def _row_values_jvp(axes, axis_name, temporary, primals, tangents):
    labelled, weights = primals
    loss, rows = _loss_and_normalizer(axes, axis_name, labelled)
    counts = _counts(loss, labelled.found, weights)
    values = _values_with(loss, rows, counts, axes, axis_name, labelled)
    t = tangents[0].x
    if is_zero(t):
        return values, jax.tree.map(jnp.zeros_like, values)
    x, label, _, where = labelled
    if axis_name:
        t, where = jnp.where(counts, t, 0), counts if where is None else where & counts
        sums = tangent_sums_of_parts(x, rows, t, label, where, axes, axis_name)
    else:
        sums = tangent_sums(x, rows, t, label, where, axes, temporary)
    of_lse, of_total, of_logit = (jnp.where(counts, of_row, 0) for of_row in sums)
    return values, _RowValues(of_lse - of_logit, of_lse, of_lse, of_total)


def _classes(axes, axis_name, labelled):
    """How many classes each row has, or a number for all."""
    count = _unmasked(axes, labelled)
    if labelled.where is None:
        return count * math.prod(map(jax.lax.axis_size, axis_name))
    return jnp.maximum(jax.lax.psum(count, axis_name) if axis_name else count, 1)


def _unmasked(axes, labelled):
    """How many logits of each row, or of this device's part of it, are not masked; or a number for all rows."""
    x, where = labelled.x, labelled.where
    if where is None:
        return _elements(axes, x)
    return jnp.sum(jnp.broadcast_to(where, x.shape), axes, keepdims=True).astype(reference.wide_dtype(x.dtype))


def _elements(axes, x):
    return math.prod(x.shape[d] for d in axes)


def row_losses(axes, axis_name, labelled, options):
    """The loss of each row."""
    values = _row_values(axes, axis_name, False, labelled, None)
    return _losses(values, _classes(axes, axis_name, labelled), options.as_arrays(values.loss.dtype))


def _losses(values, classes, options):
    """The losses of rows of these values."""
    losses = values.loss
    if options.label_smoothing is not None:
        losses += options.label_smoothing * _above_mean(values, classes)
    if options.z_loss is not None:
        losses += options.z_loss * values.lse**2
    return losses


def _above_mean(values, classes):
    """By how much the label's logit is above the mean of its row."""
    return (values.log_total - values.loss) - values.distances / classes


def weighted_losses(axes, axis_name, labelled, weights, options, temporary=False):
    """The losses times their weights.

    `temporary` says that nothing else reads the logits: on CUDA the gradient may then take their place.
    """
    values = _row_values(axes, axis_name, temporary, labelled, weights)
    return _counted(_losses(values, _classes(axes, axis_name, labelled), options), weights) * weights


def weighted_sum(axes, axis_name, labelled, weights, options):
    return jnp.sum(weighted_losses(axes, axis_name, labelled, weights, options))


def _dot(losses, weights):
    return jnp.sum(_counted(losses, weights) * weights)


def _counted(losses, weights):
    """The losses without those that do not count though they are not finite."""
    return jnp.where((weights == 0) & ~jnp.isfinite(losses), 0, losses)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def weighted_sum_with_gradient(axes, temporary, labelled, weights, options):
    """The same of rows that no axis_name spreads, with a derivative that is made together with it."""
    return weighted_sum(axes, (), labelled, weights, options)


@functools.partial(weighted_sum_with_gradient.defjvp, symbolic_zeros=True)
def _weighted_sum_jvp(axes, temporary, primals, tangents):
    labelled, weights, options = primals
    labelled_dot, weights_dot, options_dot = tangents
    classes = _classes(axes, (), labelled)
    tangent = jnp.zeros((), weights.dtype)
    if is_zero(labelled_dot.x):
        values = _row_values(axes, (), False, labelled, weights)
    else:
        made = _gradient_in_place if temporary else _gradient
        values, gradient = made(axes, labelled, weights, classes, options)
        tangent += inner_product(gradient, labelled_dot.x)
    losses = _losses(values, classes, options)
    if not is_zero(weights_dot):
        tangent += jnp.sum(_counted(losses, weights) * weights_dot)
    if not is_zero(options_dot.label_smoothing):
        tangent += _dot(_above_mean(values, classes), weights) * options_dot.label_smoothing
    if not is_zero(options_dot.z_loss):
        tangent += _dot(values.lse**2, weights) * options_dot.z_loss
    return _dot(losses, weights), tangent


# With checkpoint the gradient is kept for a backward pass as it is, and not in the dtype of the arithmetic.
@functools.partial(jax.checkpoint, prevent_cse=False)
def inner_product(a, b):
    return jnp.sum(reference.widened(a) * reference.widened(b))


class _ValuesAndGradient(NamedTuple):
    values: _RowValues
    gradient: jax.Array  # of the weighted sum of losses, by the logits


def _gradient(axes, labelled, weights, classes, options):
    coefficients = _coefficients(weights, classes, options)
    operands = labelled.x, *coefficients, labelled.label
    summed = options.label_smoothing is not None and _elements(axes, labelled.x) <= reference.MOST_COUNTED
    op = "cross_entropy_gradient_and_distances" if summed else "cross_entropy_gradient"
    gradient, largest, total, *sums = bind(op, *operands, where=labelled.where, axes=axes)
    rows = Normalizer(largest, total)
    loss = reference.cross_entropy_given(rows, labelled.x, labelled.label, axes)
    distances = reference.distance_of_all(*sums, _unmasked(axes, labelled)) if summed else None
    values = _values_with(loss, rows, _counts(loss, labelled.found, weights), axes, (), labelled, distances)
    return _ValuesAndGradient(values, gradient)


def _gradient_in_place(axes, labelled, weights, classes, options):
    """The same where the gradient takes the logits' place: what else reads them is made before."""
    x, label, found, where = labelled
    # Without a barrier XLA would read it once more where it is needed after the kernel, and copy the logits for that.
    logit = jax.lax.optimization_barrier(reference.widened(at_labels(x, axes, label)))
    from_logit, read = None, logit
    if options.label_smoothing is not None:
        from_logit = row_sum(reference.kept(reference.widened(x) - logit, where), axes, ())
        from_logit = jax.lax.optimization_barrier(from_logit)
        read += from_logit
    coefficients = _coefficients(weights, classes, options)
    # The kernel is given something of what was read, so it comes after that. Where this is NaN the gradient is as well.
    at_label = jnp.where(jnp.isnan(read) & (weights != 0), jnp.nan, coefficients.at_label)
    operands = x, *coefficients._replace(at_label=at_label), label
    gradient, *rows = bind("cross_entropy_gradient_in_place", *operands, where=where, axes=axes)
    rows = Normalizer(*rows)
    distance = reference.distances(logit, rows)
    loss = jnp.where(exists(label, x.shape, axes), rows.log_total - distance, 0)
    distances = jnp.zeros_like(loss) if from_logit is None else from_logit + classes * distance
    values = loss, rows.lse, rows.log_total, distances
    counts = _counts(loss, found, weights)
    return _ValuesAndGradient(_RowValues(*(jnp.where(counts, value, 0) for value in values)), gradient)


def _coefficients(weights, classes, options):
    """Of the gradient of the weighted sum of losses."""
    smoothing, z_loss = (0 if option is None else option for option in options)
    coefficients = Coefficients(
        factor=weights,
        lse_factor=2 * z_loss * weights,
        offset=-smoothing / classes * weights,
        at_label=(smoothing - 1) * weights,
    )
    return Coefficients(*(jnp.broadcast_to(of_row, weights.shape) for of_row in coefficients))
