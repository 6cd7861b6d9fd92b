"""A linear layer's logits and their losses: the arrays of a call, and what is made of a chunk of its tokens."""

import functools
import math
from collections.abc import Hashable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jax_softmax.functions import arguments
from jax_softmax.functions.entropies import entropies_of
from jax_softmax.functions.integer_losses import (
    Labelled,
    weighted_losses,
    weighted_sum,
    weighted_sum_with_gradient,
)
from jax_softmax.functions.options import Options
from jax_softmax.primitives import reference
from jax_softmax.primitives.product import product


class Layer(NamedTuple):
    """What is known of a call when the program is traced."""

    contracted: int  # which dimension of w is the features
    product_dtype: str  # of x and w
    logits_dtype: str
    accumulate_dtype: str
    soft_cap: float | None
    temperature: float
    chunk: int | None
    axis_name: tuple[Hashable, ...]

    @property
    def changes_logits(self):
        return self.soft_cap is not None or self.temperature != 1


class Given(NamedTuple):
    """The arrays of a call. What tokens have keeps the dimension of the vocabulary, with extent 1."""

    x: jax.Array
    w: jax.Array
    bias: jax.Array | None
    label: jax.Array
    found: jax.Array
    weights: jax.Array
    label_smoothing: jax.Array | None
    z_loss: jax.Array | None


class TokenLosses(NamedTuple):
    """Of each token."""

    losses: jax.Array
    entropies: jax.Array | None


# ---- `wide` is w in the dtype that its gradient is added up in (see `primitives/product.py`).


def _logits(layer, given, wide):
    made = product(given.x, given.w, wide, contracted=layer.contracted, dtype=layer.logits_dtype)
    if given.bias is None and not layer.changes_logits:
        return made
    return _changed(layer, made, given.bias)


# With checkpoint the product is kept for a backward pass, and nothing in the dtype of the arithmetic.
@functools.partial(jax.checkpoint, prevent_cse=False, static_argnums=(0,))
def _changed(layer, made, bias):
    logits = reference.widened(made)
    if bias is not None:
        logits += jnp.broadcast_to(bias, logits.shape)
    if layer.soft_cap is not None:
        logits = layer.soft_cap * jnp.tanh(logits / layer.soft_cap)
    return (logits / layer.temperature).astype(made.dtype)


def _labelled(layer, given, wide):
    return Labelled(_logits(layer, given, wide), given.label, given.found, None)


def loss(layer, given, wide):
    """The weighted sum of losses."""
    axes, labelled = (given.x.ndim - 1,), _labelled(layer, given, wide)
    options = Options(given.label_smoothing, given.z_loss)
    if layer.axis_name:
        return weighted_sum(axes, layer.axis_name, labelled, given.weights, options)
    return weighted_sum_with_gradient(axes, True, labelled, given.weights, options)


def loss_and_gradients(layer, given, names, wide_dtype):
    """The same, and its gradients by the arrays of these names."""

    def function(changed):
        return loss(layer, *with_changed(given, changed))

    value, pullback = jax.vjp(function, named_arrays(given, names, wide_dtype))
    return value, pullback(_seed(layer, given, value))[0]


def named_arrays(given, names, wide_dtype):
    """The arrays of these names, w in the dtype that its gradient is to have."""
    arrays = {name: getattr(given, name) for name in names}
    return arrays | ({"w": given.w.astype(wide_dtype)} if "w" in names else {})


def with_changed(given, changed):
    """The arrays with changed ones, and what stands for w in derivatives."""
    return given._replace(**{name: a for name, a in changed.items() if name != "w"}), changed.get("w", given.w)


def is_known_to_be_one(layer, given, value):
    """Whether JAX knows that a loss is the same on all devices along axis_name, each of which has parts of the logits:
    that is what types say with check_vma, unless something that it is made of, such as gathered labels, may differ.

    JAX then adds up what devices have of a gradient by what is the same on all of them. Otherwise that is to be done
    here, and each device's loss is 1 / n of the n that there are.
    """
    varying = arguments.varying_axes
    return varying(given.x).issuperset(layer.axis_name) and varying(value).isdisjoint(layer.axis_name)


def _seed(layer, given, value):
    """The cotangent of the loss."""
    n = 1 if is_known_to_be_one(layer, given, value) else math.prod(map(jax.lax.axis_size, layer.axis_name))
    return jnp.full_like(value, 1 / n)


@functools.partial(jax.checkpoint, static_argnums=(0, 1))
def losses_of_chunk(layer, return_entropy, given, wide):
    axes, labelled = (given.x.ndim - 1,), _labelled(layer, given, wide)
    options = Options(given.label_smoothing, given.z_loss)
    losses = weighted_losses(axes, layer.axis_name, labelled, given.weights, options, temporary=not return_entropy)
    entropies = None
    if return_entropy:
        entropies = jnp.expand_dims(entropies_of(labelled.x, None, axes, layer.axis_name), axes)
    return TokenLosses(losses, entropies)
