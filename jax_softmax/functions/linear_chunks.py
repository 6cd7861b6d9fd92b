"""The losses of a linear layer, of all tokens at once or chunk by chunk, and their derivatives."""

import functools

import jax
import jax.numpy as jnp

from jax_softmax.functions.chunks import all_at_once_if_divided, over_chunks, split_of
from jax_softmax.functions.integer_losses import inner_product
from jax_softmax.functions.linear_layer import (
    is_known_to_be_one,
    loss,
    loss_and_gradients,
    losses_of_chunk,
    named_arrays,
    with_changed,
)
from jax_softmax.primitives.rows import is_zero
from jax_softmax.primitives.types import types_tell_shardings

_OF_TOKENS = ("x", "label", "found", "weights")
_SPREAD = ("x", "w", "bias")  # of which devices along axis_name have parts, or of whose gradients


# ---- All tokens: a mean or sum


def total_loss(layer, given):
    """The sum of the losses times their weights."""
    if layer.product_dtype == "float16" or layer.logits_dtype == "float16":
        return jnp.sum(token_losses(layer, False, given).losses)
    return _total(layer, given)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _total(layer, given):
    """With a derivative that is made together with it."""

    def function(*of_tokens):
        return {}, loss(layer, _part(given, of_tokens), given.w)

    return _in_chunks(layer, given, False, lambda split: over_chunks(function, split, _of_tokens(given))[1])


@functools.partial(_total.defjvp, symbolic_zeros=True)
def _total_jvp(layer, primals, tangents):
    (given,), (dots,) = primals, tangents
    moving = _moving(dots)
    if not moving:
        value = _total(layer, given)
        return value, jnp.zeros_like(value)

    value, gradients = _in_chunks(
        layer, given, "w" in moving, functools.partial(_total_and_gradients, layer, given, tuple(moving))
    )
    products = {name: inner_product(gradients[name], dot) for name, dot in moving.items()}
    tangent = jnp.zeros_like(value)
    spread = _SPREAD if is_known_to_be_one(layer, given, value) else tuple(products)
    of_parts = [products.pop(name) for name in spread if name in products]
    if of_parts:
        of_parts = functools.reduce(jnp.add, of_parts).astype(tangent.dtype)
        tangent += jax.lax.psum(of_parts, layer.axis_name) if layer.axis_name else of_parts
    return value, functools.reduce(jnp.add, products.values(), tangent).astype(value.dtype)


def _total_and_gradients(layer, given, names, split):
    """The same, and its gradients by the arrays of these names, in their dtypes."""
    wide_dtype = _wide_dtype(layer, given, split)

    def function(*of_tokens):
        value, gradients = loss_and_gradients(layer, _part(given, of_tokens), names, wide_dtype)
        for_tokens = {name: gradients.pop(name) for name in _OF_TOKENS if name in gradients}
        return for_tokens, (value, gradients)

    gradients, (value, sums) = over_chunks(function, split, _of_tokens(given))
    gradients |= sums
    return value, {name: gradients[name].astype(getattr(given, name).dtype) for name in names}


# ---- A loss for each token


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def token_losses(layer, return_entropy, given):
    """The losses times their weights, and the entropies or None."""
    return _in_chunks(
        layer, given, False, lambda split: _losses_of_chunks(layer, return_entropy, split, given, given.w)
    )


@functools.partial(token_losses.defjvp, symbolic_zeros=True)
def _token_losses_jvp(layer, return_entropy, primals, tangents):
    """The tangents' transpose makes each chunk's logits again."""
    (given,), (dots,) = primals, tangents
    losses, moving = token_losses(layer, return_entropy, given), _moving(dots)
    if not moving:
        return losses, jax.tree.map(jnp.zeros_like, losses)

    def tangents(split):
        changed = named_arrays(given, moving, _wide_dtype(layer, given, split))

        def function(changed):
            return _losses_of_chunks(layer, return_entropy, split, *with_changed(given, changed))

        dots = {name: dot.astype(changed[name].dtype) for name, dot in moving.items()}
        return jax.jvp(function, (changed,), (dots,))[1]

    return losses, _in_chunks(layer, given, "w" in moving, tangents)


def _losses_of_chunks(layer, return_entropy, split, given, wide):
    others = given._replace(**dict.fromkeys(_OF_TOKENS))

    def function(*of_tokens):
        return losses_of_chunk(layer, return_entropy, _part(others, of_tokens), wide), {}

    return over_chunks(function, split, _of_tokens(given))[0]


def _of_tokens(given):
    return [getattr(given, name) for name in _OF_TOKENS]


def _part(given, of_tokens):
    return given._replace(**dict(zip(_OF_TOKENS, of_tokens, strict=True)))


def _moving(dots):
    """The tangents that are not known to be 0, by name: of floats alone."""
    named = {name: dot for name, dot in dots._asdict().items() if dot is not None and not is_zero(dot)}
    return {name: dot for name, dot in named.items() if name not in ("label", "found")}


def _in_chunks(layer, given, sums, function):
    """A function of the `Split`."""
    split = _split(layer, given, sums)
    return function(split) if layer.chunk else all_at_once_if_divided(function, split)


def _wide_dtype(layer, given, split):
    """That of w's gradient before it is rounded to w's: of a single product, which is rounded once, there is none."""
    return given.w.dtype if split is None else layer.accumulate_dtype


def _split(layer, given, sums):
    """`sums`: whether the gradient of w is added up over chunks."""
    if layer.chunk is None and types_tell_shardings([jax.typeof(given.x), jax.typeof(given.w)]):
        return None  # as where XLA divides the program
    vocabulary = given.w.shape[1 - layer.contracted]
    arrays = 2 if given.bias is not None or layer.changes_logits else 1
    logit_bytes = arrays * vocabulary * jnp.dtype(layer.logits_dtype).itemsize
    accumulate = jnp.dtype(layer.accumulate_dtype)
    sum_bytes = given.w.size * accumulate.itemsize if sums and accumulate != given.w.dtype else 0
    return split_of(given.x.shape[:-1], logit_bytes, sum_bytes, layer.chunk)
