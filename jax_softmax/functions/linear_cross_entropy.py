"""A linear layer and its cross entropy in one, for one chunk of tokens after the other."""

import functools
import math
from collections.abc import Callable, Collection
from typing import Any, Literal, NamedTuple, TypedDict, Unpack, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike, DTypeLike

from jax_softmax.functions import arguments
from jax_softmax.functions.arguments import AxisName, Reduction
from jax_softmax.functions.entropies import row_entropies
from jax_softmax.functions.integer_losses import (
    Labelled,
    Mode,
    Number,
    Regularization,
    as_arrays,
    checked_regularization,
    inner_product,
    weighted_losses,
)
from jax_softmax.functions.losses import as_soft_labels, row_weights, soft_losses
from jax_softmax.primitives import reference
from jax_softmax.primitives.labels import label_of_rows
from jax_softmax.primitives.product import product, several_devices_p
from jax_softmax.primitives.rows import is_zero, row_normalizer
from jax_softmax.primitives.types import MeshAxes, Shape, rows_sharded_as, sharded_as_well, types_tell_shardings

_NAME = "linear_cross_entropy"
_CHUNK_BYTES = 1 << 29  # at most, of the logits of a chunk


class TokenLosses(NamedTuple):
    """The losses of tokens, and the entropies of their distributions."""

    losses: Array
    entropies: Array | None


class Layer(NamedTuple):
    """What is known of a call when the program is traced."""

    contracted: int  # which dimension of w is the features
    product_dtype: np.dtype  # of x and w
    logits_dtype: np.dtype
    accumulate_dtype: np.dtype  # of the sum of w's gradients over chunks
    soft_cap: float | None
    temperature: float
    changes_logits: bool  # whether logits are more than the product x·w
    chunk: int | None
    axis_name: MeshAxes
    reduction: Reduction
    summed: bool  # whether a chunk's losses are added up, and gradients computed, right after its logits
    return_entropy: bool


Named = dict[str, Any]
OfChunk = Callable[[Named], tuple[Any, Named]]  # values of tokens, and sums over tokens
# The arrays of a call, by name: those with values of tokens have the vocabulary's dimension with extent 1, but for a
# `label` of a floating dtype, which has a probability for each word. `wide` is w in the dtype in which its gradient is
# added up: derivatives are by `wide` (see `product`).
_OF_TOKENS = ("x", "label", "found", "weights")
# Gradients are sharded along axis_name, or have a term from each device. Labels of integers have none.
_SHARDED_GRADIENTS = ("x", "wide", "bias", "label")
_REAL = (*_SHARDED_GRADIENTS, "weights", "label_smoothing", "z_loss")


class _Options(TypedDict, total=False):
    axis: int
    bias: ArrayLike | None
    weights: ArrayLike | None
    class_weights: ArrayLike | None
    transpose_w: bool
    soft_cap: float | None
    temperature: float
    label_smoothing: ArrayLike
    z_loss: ArrayLike
    logits_dtype: DTypeLike | None
    accumulate_dtype: DTypeLike | None
    chunk: int | None
    axis_name: AxisName


@overload
def linear_cross_entropy(
    x: ArrayLike,
    w: ArrayLike,
    labels: ArrayLike,
    *,
    reduction: Reduction = ...,
    return_entropy: Literal[False] = ...,
    **options: Unpack[_Options],
) -> Array: ...
@overload
def linear_cross_entropy(
    x: ArrayLike,
    w: ArrayLike,
    labels: ArrayLike,
    *,
    reduction: None,
    return_entropy: Literal[True],
    **options: Unpack[_Options],
) -> TokenLosses: ...
@overload
def linear_cross_entropy(
    x: ArrayLike, w: ArrayLike, labels: ArrayLike, *, reduction: None, return_entropy: bool, **options: Unpack[_Options]
) -> Array | TokenLosses: ...
def linear_cross_entropy(
    x: ArrayLike,
    w: ArrayLike,
    labels: ArrayLike,
    *,
    axis: int = -1,
    bias: ArrayLike | None = None,
    weights: ArrayLike | None = None,
    class_weights: ArrayLike | None = None,
    reduction: Reduction = "mean",
    transpose_w: bool = False,
    soft_cap: float | None = None,
    temperature: float = 1.0,
    label_smoothing: ArrayLike = 0.0,
    z_loss: ArrayLike = 0.0,
    return_entropy: bool = False,
    logits_dtype: DTypeLike | None = None,
    accumulate_dtype: DTypeLike | None = None,
    chunk: int | None = None,
    axis_name: AxisName = None,
) -> Array | TokenLosses:
    """Cross entropy of the logits x·w and labels, with little memory for logits.

    The last layer of a language model and its loss: `cross_entropy_loss(logits, labels)` of::

        logits = soft_cap tanh((x·w + bias) / soft_cap) / temperature

    The logits are computed for all tokens at once, or for one chunk of tokens after the other, with at most 512 MiB of
    logits: whichever takes less memory. On CUDA, where labels are integers, their gradient overwrites them. With a
    reduction, the forward pass of a differentiated loss computes the gradients. Without one, and in float16, the
    backward pass does, and computes the logits again. Differentiable in forward and reverse mode to any order.

    Args:
      x: real array of shape (..., features), or with the features along another axis.
      w: real array of shape (features, vocabulary), or (vocabulary, features) with transpose_w. The product is one of
        the dtype that holds both: it is fast if x and w are of 16 bits.
      labels: array of an integer dtype, of x's shape without features: a label that is no class is ignored. Or of a
        floating dtype, of x's shape with the vocabulary in place of the features: probabilities of the classes, as
        `softmax_cross_entropy` takes them.
      axis: the axis of x's features.
      bias: real array of shape (vocabulary,), added to the product in float32 (float64 for float64).
      weights, class_weights, label_smoothing, z_loss: as for `cross_entropy_loss`. With probabilities, smoothing a
        makes (1 - a) labels + a / vocabulary of them; logits of tokens of weight 0 must be finite; and class_weights
        are refused: multiply the labels by them.
      reduction: "mean", the weighted mean of the losses (0 if no label counts), "sum", their weighted sum, or None, the
        loss of each token times its weight: with weight 1, an integer label's negative log-probability.
      transpose_w: whether w is laid out as an embedding table is, with a row for each word of the vocabulary.
      soft_cap, temperature: positive numbers: the logits' bound, or None for no bound, and their divisor.
      return_entropy: whether to return the entropy of each token's distribution as well, in nats, also where its label
        is ignored. Only without a reduction.
      logits_dtype: the logits' dtype, by default the product's. The product is rounded to it, and again after a bias, a
        soft cap or a temperature. float32 takes twice the memory of bfloat16, and more time.
      accumulate_dtype: the dtype in which w's gradient is added up over chunks, by default float32 (float64 for
        float64). w's own dtype takes no memory besides the gradient's, but rounds after each chunk.
      chunk: for how many tokens logits may be computed at once, on all devices together under `jit`, but at least one
        index of the longest of the tokens' dimensions. Refused in explicit mode where x's tokens are sharded.
      axis_name: a mesh axis of a surrounding `shard_map`, or several, along which the vocabulary is sharded: w, bias
        and probabilities are this device's shards. x, integer labels and weights are the same on all devices along
        these axes, and so is the loss. The losses of tokens that are sharded over other axes are not added up.

    Returns:
      A scalar in float32 (float64 for float64). Without a reduction, losses of x's shape without features, or with
      return_entropy a named tuple of losses and entropies.

    Raises:
      TypeError: an argument is of the wrong type or dtype.
      ValueError: shapes do not fit, or an argument is not one of the allowed values.
    """
    x, w = (arguments.checked_real_array(_NAME, a, argument) for a, argument in ((x, "x"), (w, "w")))
    bias = arguments.checked_optional_array(_NAME, bias, "bias")
    weights = arguments.checked_optional_array(_NAME, weights, "weights")
    class_weights = arguments.checked_optional_array(_NAME, class_weights, "class_weights")
    labels = arguments.checked_labels(_NAME, labels, or_probabilities=True)
    regularization = checked_regularization(_NAME, label_smoothing, z_loss)
    transpose_w = arguments.checked_bool(_NAME, transpose_w, "transpose_w")
    return_entropy = arguments.checked_bool(_NAME, return_entropy, "return_entropy")
    arguments.check_reduction(_NAME, reduction)
    if return_entropy and reduction is not None:
        raise ValueError(f"{_NAME}: return_entropy must be False unless reduction is None, got {reduction!r}.")
    if x.ndim == 0:
        raise ValueError(f"{_NAME}: x must be of shape (..., features), got shape ().")
    axis = arguments.checked_axis(_NAME, x.ndim, axis)
    arguments.check_linear_layer(_NAME, x, axis, w, labels, bias, class_weights, transpose_w, chunk)
    if axis != x.ndim - 1:
        labels = jnp.moveaxis(labels, axis, -1) if _are_probabilities(labels) else labels
        x = jnp.moveaxis(x, axis, -1)
    dtype = arguments.common_float_dtype(x, w)
    logits_dtype = arguments.checked_float_dtype(_NAME, logits_dtype, "logits_dtype", dtype)
    layer = Layer(
        contracted=int(transpose_w),
        product_dtype=dtype,
        logits_dtype=logits_dtype,
        accumulate_dtype=arguments.checked_float_dtype(
            _NAME, accumulate_dtype, "accumulate_dtype", reference.wide_dtype(dtype)
        ),
        soft_cap=None if soft_cap is None else arguments.checked_positive(_NAME, soft_cap, "soft_cap"),
        temperature=arguments.checked_positive(_NAME, temperature, "temperature"),
        changes_logits=bias is not None or soft_cap is not None or temperature != 1,
        chunk=None if chunk is None else int(chunk),
        axis_name=() if axis_name is None else arguments.checked_axis_name(_NAME, axis_name),
        reduction=reduction,
        summed=reduction is not None and "float16" not in (dtype.name, logits_dtype.name),
        return_entropy=return_entropy,
    )
    return _linear_cross_entropy(layer, x, w, labels, bias, weights, class_weights, regularization)


@functools.partial(jax.jit, static_argnums=(0,), inline=True)
def _linear_cross_entropy(
    layer: Layer,
    x: Array,
    w: Array,
    labels: Array,
    bias: Array | None,
    weights: Array | None,
    class_weights: Array | None,
    regularization: tuple[Number, Number],
) -> Array | TokenLosses:
    axes, dtype = (x.ndim - 1,), reference.wide_dtype(layer.logits_dtype)
    shape = (*x.shape[:-1], w.shape[1 - layer.contracted])
    classes = arguments.checked_classes(_NAME, shape, axes, layer.axis_name)
    if _are_probabilities(labels):
        label, found = labels, rows_sharded_as(labels, jnp.ones((*x.shape[:-1], 1), bool))
    else:
        label, found = label_of_rows(labels, shape, axes, None, layer.axis_name)
    x, w = sharded_as_well(x, found).astype(layer.product_dtype), w.astype(layer.product_dtype)
    bias = None if bias is None else bias.astype(dtype)
    weights = row_weights(_NAME, labels, found, classes, axes, weights, class_weights, layer.reduction, dtype)
    arrays = {"x": x, "w": w, "wide": w, "bias": bias, "weights": rows_sharded_as(x, weights)}
    arrays |= {"label": label, "found": found, **as_arrays(regularization, dtype)._asdict()}
    token_losses, sums = _layer_losses(layer, _varying(layer, arrays))
    if layer.summed:
        return sums["loss"]
    losses = token_losses.losses
    losses = jax.lax.squeeze(losses, axes) if layer.reduction is None else jnp.sum(losses)
    return TokenLosses(losses, token_losses.entropies) if layer.return_entropy else losses


def _are_probabilities(labels: Array) -> bool:
    return jnp.issubdtype(labels.dtype, jnp.floating)


def _varying(layer: Layer, arrays: Named) -> Named:
    """The arrays, in their types varying over the same mesh axes, so that a device's terms of a gradient are added to
    those of others at the end. Only what belongs to a shard of the vocabulary varies along axis_name."""
    names = frozenset().union(*map(arguments.varying_axes, jax.tree.leaves(arrays))) - set(layer.axis_name)
    along = dict.fromkeys(("w", *_SHARDED_GRADIENTS), layer.axis_name)
    all_names = {name: [*names, *along.get(name, ())] for name in arrays}
    return {name: None if a is None else arguments.varying_over(a, all_names[name]) for name, a in arrays.items()}


# ---- All tokens. Results are values of tokens, and a dict of sums over tokens.


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _layer_losses(layer: Layer, arrays: Named) -> tuple[Any, Named]:
    return _over_chunks(layer, (), functools.partial(_chunk_losses, layer), arrays)


@functools.partial(_layer_losses.defjvp, symbolic_zeros=True)
def _layer_losses_jvp(layer: Layer, primals: Any, tangents: Any) -> tuple[Any, Any]:
    (arrays,), (dots,) = primals, tangents
    dots = {name: dots[name] for name in _REAL if not is_zero(dots[name])}
    if not layer.summed:  # the transpose of this computes each chunk's logits again
        over_chunks = functools.partial(_over_chunks, layer, dots, functools.partial(_chunk_losses, layer))
        changed = {name: arrays[name] for name in dots}
        return _layer_losses(layer, arrays), jax.jvp(lambda c: over_chunks(arrays | c), (changed,), (dots,))[1]
    of_chunk = functools.partial(_chunk_loss_and_gradients, layer, dots)
    token_gradients, sums = _over_chunks(layer, dots, of_chunk, arrays)
    gradients, loss = token_gradients | sums, sums["loss"]
    # If types say that x differs along axis_name and the loss does not, JAX adds up the devices' terms of a gradient by
    # an array that is the same on all of them. Else each device has a loss of its own.
    names, varying = set(layer.axis_name), arguments.varying_axes
    is_shared = names <= varying(arrays["x"]) and not names & varying(loss)
    losses = 1 if is_shared else math.prod(map(jax.lax.axis_size, names))

    def along(name: str) -> Array:
        dot = inner_product(gradients[name], dots[name]).astype(loss.dtype)
        has_terms = names and (not is_shared or name in _SHARDED_GRADIENTS)
        return jax.lax.psum(dot, layer.axis_name) / losses if has_terms else dot

    return (({}, {"loss": loss}), ({}, {"loss": sum(map(along, dots), jnp.zeros_like(loss))}))


# ---- A chunk of tokens


def _chunk_losses(layer: Layer, arrays: Named) -> tuple[Any, Named]:
    if not layer.summed:
        return _token_losses(layer, arrays), {}
    return {}, {"loss": _losses(layer, arrays, _logits(layer, arrays), summed=True, in_place=True)}


def _chunk_loss_and_gradients(layer: Layer, names: Collection[str], arrays: Named) -> tuple[Named, Named]:
    """The loss, and its gradients by the arrays of these names."""
    changed = {name: arrays[name] for name in names}
    loss, pullback = jax.vjp(lambda changed: _chunk_losses(layer, arrays | changed)[1]["loss"], changed)
    (gradients,) = pullback(jnp.ones_like(loss))
    return {name: gradients.pop(name) for name in _OF_TOKENS if name in gradients}, {"loss": loss, **gradients}


# With checkpoint a backward pass gets x and w, and no logits.
@functools.partial(jax.checkpoint, static_argnums=(0,))
def _token_losses(layer: Layer, arrays: Named) -> TokenLosses:
    logits = _logits(layer, arrays)
    losses = _losses(layer, arrays, logits, in_place=not layer.return_entropy)
    axes = (logits.ndim - 1,)
    return TokenLosses(losses, row_entropies(logits, None, axes, layer.axis_name) if layer.return_entropy else None)


def _losses(layer: Layer, arrays: Named, logits: Array, **options: bool) -> Array:
    """The tokens' losses times their weights, or the sum of these. The options are those of `Mode`."""
    mode = Mode((logits.ndim - 1,), layer.axis_name, **options)
    label, weights = arrays["label"], arrays["weights"]
    regularization = Regularization(arrays["label_smoothing"], arrays["z_loss"])
    if not _are_probabilities(label):
        return weighted_losses(mode, Labelled(logits, label, arrays["found"], None), weights, regularization)
    labels = as_soft_labels(rows_sharded_as(logits, label), logits)
    if regularization.label_smoothing is not None:
        classes = logits.shape[-1] * math.prod(map(jax.lax.axis_size, layer.axis_name))
        labels = reference.widened(labels)
        smoothed = regularization.label_smoothing * (1 / classes - labels)
        labels = labels + jnp.where(arrays["found"], smoothed, 0)  # of tokens that fill up a chunk they stay 0
    losses = soft_losses(mode.axes, layer.axis_name, logits, labels, None)
    if regularization.z_loss is not None:
        losses += regularization.z_loss * row_normalizer(logits, None, mode.axes, layer.axis_name).lse ** 2
    return jnp.sum(losses * weights) if mode.summed else losses * weights


def _logits(layer: Layer, arrays: Named) -> Array:
    logits = product(arrays["x"], arrays["w"], arrays["wide"], contracted=layer.contracted, dtype=layer.logits_dtype)
    return _changed(layer, logits, arrays["bias"]) if layer.changes_logits else logits


# With checkpoint a backward pass gets the product, and nothing in the dtype of the arithmetic.
@functools.partial(jax.checkpoint, prevent_cse=False, static_argnums=(0,))
def _changed(layer: Layer, product: Array, bias: Array | None) -> Array:
    """soft_cap tanh((product + bias) / soft_cap) / temperature"""
    logits = reference.widened(product)
    logits = logits if bias is None else logits + jnp.broadcast_to(bias, logits.shape)
    logits = logits if layer.soft_cap is None else layer.soft_cap * jnp.tanh(logits / layer.soft_cap)
    return (logits / layer.temperature).astype(product.dtype)


# ---- Chunks


def _over_chunks(layer: Layer, names: Collection[str], of_chunk: OfChunk, arrays: Named) -> tuple[Any, Named]:
    """`of_chunk(arrays)` for all tokens: for one chunk after the other, or for all at once.

    `names` are the arrays whose gradients are computed. Unless the caller asks for chunks, a program that XLA divides
    among devices has none: each device has a part of the logits, and with chunks XLA might add up a gradient over
    devices once for each chunk.
    """
    x, w = arrays["x"], arrays["w"]
    widens = "wide" in names and layer.accumulate_dtype != w.dtype
    sum_bytes = w.size * layer.accumulate_dtype.itemsize if widens else 0
    arrays_of_logits = 2 if layer.changes_logits or _are_probabilities(arrays["label"]) else 1
    logit_bytes = arrays_of_logits * w.shape[1 - layer.contracted] * layer.logits_dtype.itemsize
    split = split_of(x.shape[:-1], logit_bytes, sum_bytes, layer.chunk)
    if split is None or (layer.chunk is None and types_tell_shardings([jax.typeof(x), jax.typeof(w)])):
        return of_chunk(arrays)  # w's gradient, a single product, is rounded once
    wide = {"wide": arrays["wide"].astype(layer.accumulate_dtype)} if widens else {}
    one_by_one = functools.partial(_one_by_one, of_chunk, *split, names, arrays | wide)
    if layer.chunk is not None:
        return one_by_one()
    # The condition is known when the program is lowered, and XLA drops the other branch.
    return jax.lax.cond(several_devices_p.bind(), lambda: of_chunk(arrays), one_by_one)


def split_of(shape: Shape, logit_bytes: int, sum_bytes: int, chunk: int | None = None) -> tuple[int, int] | None:
    """The dimension of tokens of this shape that is split, and a chunk's extent along it; None if there are no chunks.

    Chunks are taken if they save memory, or if the caller asks for them. `logit_bytes` are those of one token's logits,
    `sum_bytes` those that chunks take besides, to add up a gradient. Symbolic shapes are not split.
    """
    if not all(isinstance(n, int) for n in (*shape, logit_bytes)) or math.prod(shape) <= 1:
        return None
    dim = max(range(len(shape)), key=lambda d: shape[d])
    extent, others = shape[dim], math.prod(shape) // shape[dim]
    fewest = -(-extent // max(1, (_CHUNK_BYTES // logit_bytes if chunk is None else chunk) // others))
    count = next((count for count in range(fewest, 2 * fewest) if extent % count == 0), fewest)
    size = -(-extent // count)
    saves = size * others * logit_bytes + sum_bytes < math.prod(shape) * logit_bytes
    return (dim, size) if size < extent and (saves or chunk is not None) else None


def _one_by_one(of_chunk: OfChunk, dim: int, size: int, names: Collection[str], arrays: Named) -> tuple[Any, Named]:
    """`of_chunk` of one chunk after the other, `size` tokens each along dimension `dim`.

    Chunk i of n has the tokens i, i + n, i + 2 n, ...: if tokens are sharded, each device has a part of every chunk.
    The last chunk is padded with tokens of 0 and weight 0. The first chunk is not part of the loop, so that its sums
    need not be added to zeros. Arrays by which there are no gradients (`names` has the others) are not copied.
    """
    extent, w = arrays["x"].shape[dim], arrays["w"]
    count = -(-extent // size)

    def divided(a: Array) -> Array:
        missing = [(0, count * size - extent if d == dim else 0) for d in range(a.ndim)]
        a = jnp.pad(a, missing) if extent % size else a
        return a.reshape(*a.shape[:dim], size, count, *a.shape[dim + 1 :])

    def joined(first: Array, others: Array) -> Array:
        a = jnp.moveaxis(jnp.concatenate([first[None], others]), 0, dim + 1)
        a = a.reshape(*a.shape[:dim], size * count, *a.shape[dim + 2 :])
        return jax.lax.slice_in_dim(a, 0, extent, axis=dim)

    @jax.checkpoint  # or else a backward pass would be given copies of all chunks
    def of_kth(k: Any, chunks: Named) -> tuple[Any, Named]:
        here = {name: jax.lax.dynamic_index_in_dim(all_chunks[name], k, dim + 1, False) for name in not_copied}
        return of_chunk(arrays | here | chunks)

    def step(sums: Named, kth: tuple[Array, Named]) -> tuple[Named, Any]:
        of_tokens, terms = of_kth(*kth)
        return jax.tree.map(jnp.add, sums, terms), of_tokens

    all_chunks = {name: divided(arrays[name]) for name in _OF_TOKENS}
    not_copied = [name for name in _OF_TOKENS if name not in names]
    moved = {name: jnp.moveaxis(all_chunks[name], dim + 1, 0) for name in _OF_TOKENS if name in names}
    first, sums = of_kth(0, {name: a[0] for name, a in moved.items()})
    rest = jnp.arange(1, count), {name: a[1:] for name, a in moved.items()}
    sums, others = jax.lax.scan(step, sums, rest)
    if "wide" in sums:
        sums["wide"] = sums["wide"].astype(w.dtype)
    return jax.tree.map(joined, first, others), sums
