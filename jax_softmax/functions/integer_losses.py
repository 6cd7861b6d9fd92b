"""Losses of integer labels, and their derivatives.

Rows keep the reduced axes, with extent 1.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_softmax.functions import arguments
from jax_softmax.primitives import reference
from jax_softmax.primitives.cross_entropy import tangent
from jax_softmax.primitives.labels import has_label, label_elements
from jax_softmax.primitives.operators import Coefficients, bind
from jax_softmax.primitives.reference import Normalizer
from jax_softmax.primitives.rows import is_zero, row_normalizer, row_sum
from jax_softmax.primitives.types import rows_laid_as

# ---- The options of losses, label_smoothing and z_loss: None, a number of the program, or an array.

_LARGEST_NUMBER = np.finfo(np.float64).max  # that an option may be


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Constant:
    """A number that is part of a program, and no operand of it: there is nothing to transfer to a device."""

    value: float


class Options(NamedTuple):
    """None stands for the number 0, which leaves out what it would take to compute them."""

    label_smoothing: _Constant | jax.Array | None
    z_loss: _Constant | jax.Array | None

    def as_arrays(self, dtype):
        def converted(value):
            return jnp.asarray(value.value if isinstance(value, _Constant) else value, dtype)

        return Options(*(None if value is None else converted(value) for value in self))


def checked_options(name: str, label_smoothing: Any, z_loss: Any) -> Options:
    return Options(
        _checked_option(name, "label_smoothing", label_smoothing, 0, 1),
        _checked_option(name, "z_loss", z_loss, -_LARGEST_NUMBER, _LARGEST_NUMBER),
    )


def _checked_option(name: str, argument: str, value: Any, least: float, most: float) -> _Constant | jax.Array | None:
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
    """Logits with the labels of their rows."""

    x: jax.Array
    label: jax.Array  # -1 also where another device has the label's element
    found: jax.Array  # of which rows any device has it
    where: jax.Array | None


class How(NamedTuple):
    """How losses and their gradient by the logits are made."""

    axes: tuple
    axis_name: tuple
    # Whether the losses are added up, and the gradient is made with them wherever they are differentiated, not by the
    # backward pass. With axis_name it is always the latter.
    at_once: bool = False
    in_place: bool = False  # whether nothing else reads the logits: on CUDA the gradient may then take their place


class _Values(NamedTuple):
    """What the losses are made of, 0 of rows that do not count."""

    loss: jax.Array  # lse less the label's logit
    lse: jax.Array | None  # with z-loss alone
    above_mean: jax.Array | None  # the label's logit less the mean of its row: with label smoothing alone


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def weighted_losses(how, labelled, weights, options):
    """The losses times their weights, which are 0 of rows without a label; or the sum of all, with `at_once`."""
    values = _values(how, labelled, weights, options, *_loss_and_rows(how, labelled))
    return _summed(how, _losses(values, options) * weights)


def _summed(how, losses):
    return jnp.sum(losses) if how.at_once else losses


@functools.partial(weighted_losses.defjvp, symbolic_zeros=True)
def _weighted_losses_jvp(how, primals, tangents):
    labelled, weights, options = primals
    (t, *_), weights_dot, options_dot = tangents
    gradient = None
    if how.at_once and not how.axis_name and not is_zero(t):
        gradient, *made = _with_gradient(how, labelled, weights, options)
    else:
        made = _loss_and_rows(how, labelled)
    values = _values(how, labelled, weights, options, *made)
    losses, dots = _losses(values, options), []
    if gradient is not None:
        dots.append(inner_product(gradient, t))
    elif not is_zero(t):
        x, label, _, where = labelled
        coefficients = _coefficients(how, labelled, weights, options)
        of_rows = tangent(x, made[1], coefficients, label, t, where, how.axes, how.axis_name, how.in_place)
        dots.append(_summed(how, of_rows))
    if not is_zero(weights_dot):
        dots.append(_summed(how, losses * weights_dot))
    if not is_zero(options_dot.label_smoothing):
        dots.append(_summed(how, weights * values.above_mean * options_dot.label_smoothing))
    if not is_zero(options_dot.z_loss):
        dots.append(_summed(how, weights * values.lse**2 * options_dot.z_loss))
    result = _summed(how, losses * weights)
    dot = functools.reduce(jnp.add, dots) if dots else jnp.zeros_like(result)
    return result, arguments.varying_over(dot, arguments.varying_axes(result))


def _loss_and_rows(how, labelled):
    """Of each row lse less the label's logit, and the normalizer."""
    x, label, _, where = labelled
    if not how.axis_name:
        loss, *rows = bind("cross_entropy", x, label, where=where, axes=how.axes)
        return loss, Normalizer(*rows)
    rows = row_normalizer(x, where, how.axes, how.axis_name)
    distance = reference.distances(label_elements(x, how.axes, label), rows)
    distance = jnp.where(has_label(label, x.shape, how.axes), distance, 0)
    return rows.log_sum - jax.lax.psum(distance, how.axis_name), rows


def _with_gradient(how, labelled, weights, options):
    """The gradient of the sum of weighted losses; and of rows lse less the label's logit, the normalizer, and with
    label smoothing the sum of logit - largest if the gradient's kernel can count so many."""
    x, label, _, where = labelled
    coefficients = _coefficients(how, labelled, weights, options)
    logit = reference.widened(label_elements(x, how.axes, label))
    if how.in_place:
        # Without a barrier XLA would read it once more where it is needed after the kernel, and copy the logits for
        # that. The kernel is given something of it, so it comes after that. Where it is NaN the gradient is as well.
        logit = jax.lax.optimization_barrier(logit)
        at_label = jnp.where(jnp.isnan(logit) & (weights != 0), jnp.nan, coefficients.at_label)
        coefficients = coefficients._replace(at_label=at_label)
    counted = options.label_smoothing is not None and _elements(how, x) <= reference.MOST_COUNTED
    op = "cross_entropy_gradient" + reference.AND_DISTANCES * counted
    operands = x, *coefficients, label
    gradient, *rows = bind(op, *operands, where=where, axes=how.axes, in_place=how.in_place)
    rows, sums = Normalizer(*rows[:2]), rows[2:]
    distances = reference.distance_sum_of_all(*sums, _classes(how, labelled)) if sums else None
    distance = reference.select(rows_laid_as(x, labelled.found), reference.distances(logit, rows), 0)
    return gradient, rows.log_sum - distance, rows, distances


def _values(how, labelled, weights, options, loss, rows, distances=None):
    """The values of rows that count: those with a label, but for those of weight 0 whose loss is not finite."""
    above_mean = None
    if options.label_smoothing is not None:
        if distances is None:
            distances = reference.fill_masked(reference.distances(labelled.x, rows), labelled.where)
            distances = row_sum(distances, how.axes, how.axis_name)
        above_mean = (rows.log_sum - loss) - distances / _classes(how, labelled)
    values = _Values(loss, rows.lse if options.z_loss is not None else None, above_mean)
    finite = functools.reduce(jnp.logical_and, map(jnp.isfinite, jax.tree.leaves(values)))
    counts = labelled.found & ((weights != 0) | finite)
    return jax.tree.map(lambda value: reference.select(counts, value, 0), values)


def _losses(values, options):
    losses = values.loss
    if options.label_smoothing is not None:
        losses += options.label_smoothing * values.above_mean
    if options.z_loss is not None:
        losses += options.z_loss * values.lse**2
    return losses


def _coefficients(how, labelled, weights, options):
    """Of the gradient of the sum of weighted losses."""
    smoothing, z_loss = options
    zeros = jnp.zeros_like(weights)
    coefficients = Coefficients(
        factor=weights,
        lse_factor=zeros if z_loss is None else 2 * z_loss * weights,
        offset=zeros if smoothing is None else -smoothing / _classes(how, labelled) * weights,
        at_label=-weights if smoothing is None else (smoothing - 1) * weights,
    )
    return Coefficients(*(jnp.broadcast_to(of_row, weights.shape) for of_row in coefficients))


def _classes(how, labelled):
    """How many classes each row has, or a number for all."""
    x, where = labelled.x, labelled.where
    if where is None:
        return _elements(how, x) * math.prod(map(jax.lax.axis_size, how.axis_name))
    count = jnp.sum(jnp.broadcast_to(where, x.shape), how.axes, keepdims=True).astype(reference.wide_dtype(x.dtype))
    return jnp.maximum(jax.lax.psum(count, how.axis_name) if how.axis_name else count, 1)


def _elements(how, x):
    return math.prod(x.shape[d] for d in how.axes)


def inner_product(a, b):
    """The sum of a b."""

    def function(a, b):
        return jnp.sum(reference.widened(a) * reference.widened(b))

    # With checkpoint both are kept for a backward pass as they are, and not in the dtype of the arithmetic.
    return jax.checkpoint(function, prevent_cse=False)(a, b)
