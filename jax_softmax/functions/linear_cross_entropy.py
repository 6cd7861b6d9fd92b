"""A linear layer and its cross entropy in one, from the arguments to a chunk's logits and chunks of tokens."""

import functools
import math
from typing import Literal, NamedTuple, TypedDict, Unpack, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from jax_softmax.functions import arguments, integer_losses
from jax_softmax.functions.arguments import AxisName, Reduction
from jax_softmax.functions.entropies import entropies_of
from jax_softmax.functions.integer_losses import Options, checked_options
from jax_softmax.functions.losses import row_weights, weights_of_classes
from jax_softmax.primitives import reference
from jax_softmax.primitives.labels import label_of_rows
from jax_softmax.primitives.product import product, several_devices_p
from jax_softmax.primitives.rows import is_zero
from jax_softmax.primitives.types import laid_as_well, rows_laid_as, types_tell_shardings

_NAME = "linear_cross_entropy"
_CHUNK_BYTES = 1 << 29  # that the logits of a chunk may take


class TokenLosses(NamedTuple):
    """Of each token."""

    losses: jax.Array
    entropies: jax.Array | None


class Layer(NamedTuple):
    """What is known of a call when the program is traced."""

    contracted: int  # which dimension of w is the features
    product_dtype: np.dtype  # of x and w
    logits_dtype: np.dtype
    accumulate_dtype: np.dtype  # of the sum of w's gradients over chunks
    soft_cap: float | None
    temperature: float
    changes_logits: bool  # whether they are more than the product
    chunk: int | None
    axis_name: tuple
    reduction: str | None
    has_total: bool  # whether a chunk's losses are added up, and gradients made, right after its logits
    return_entropy: bool


# The names of a call's arrays; what tokens have keeps the dimension of the vocabulary, with extent 1. `wide` is w once
# more, in the dtype in which its gradient is added up: derivatives are by `wide` (see `product`).
_OF_TOKENS = ("x", "label", "found", "weights")
_OF_PARTS = ("x", "wide", "bias")  # by which devices along axis_name have parts of a gradient, or gradients of parts
_REAL = (*_OF_PARTS, "weights", "label_smoothing", "z_loss")


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
) -> jax.Array: ...
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
) -> jax.Array | TokenLosses: ...
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
) -> jax.Array | TokenLosses:
    """Cross entropy of the logits x·w and integer labels, with little memory for logits.

    The last layer of a language model and its loss: `cross_entropy_loss(logits, labels)` of::

        logits = soft_cap tanh((x·w + bias) / soft_cap) / temperature

    The logits are made for all tokens at once, or for one chunk after the other of at most 512 MiB of logits, whichever
    takes less memory; on CUDA their gradient takes their place. With a reduction, the forward pass of a differentiated
    loss makes the gradients. Without one, and of float16, the backward pass does, from logits that it makes again.
    Differentiable in forward and reverse mode to any order.

    Args:
      x: real array of shape (..., features), or with the features along another axis.
      w: real array of shape (features, vocabulary), or (vocabulary, features) with transpose_w. The product is one of
        the dtype that holds both: for a fast product x and w are of 16 bits.
      labels: array of an integer dtype, of x's shape without features. One that is no class is ignored. Distributions
        are as large as the logits that this function does not keep: they go to `softmax_cross_entropy(x @ w, labels)`.
      axis: the axis of x's features.
      bias: real array of shape (vocabulary,), added to the product in float32 (float64 for float64).
      weights: real array that broadcasts to the labels' shape: how much each loss counts. None, the default: 1 each.
      class_weights: real array of shape (vocabulary,), as for `cross_entropy_loss`.
      reduction: "mean", the weighted mean of the losses (0 if no label counts), "sum", their weighted sum, or None, the
        loss of each token times its weight: with weight 1, the label's negative log-probability.
      transpose_w: whether w is laid as an embedding table is, a row for each word of the vocabulary.
      soft_cap, temperature: positive numbers, the logits' bound and their divisor. A soft_cap of None: no bound.
      label_smoothing, z_loss: as for `cross_entropy_loss`.
      return_entropy: whether to return the entropy of each token's distribution as well, in nats, also where its label
        is ignored. Only without a reduction.
      logits_dtype: that of the logits, by default the product's. The product is rounded to it once, and once more after
        a bias, a soft cap or a temperature. float32 takes twice the memory of bfloat16, and more time.
      accumulate_dtype: that in which w's gradient is added up over chunks; by default float32 (float64 for float64).
        w's own dtype saves the memory of that sum, and rounds after each chunk.
      chunk: how many tokens' logits may be made at once, on all devices together under `jit`, but at least one index
        of the longest of the tokens' dimensions. None leaves it to the rule. Refused in explicit mode where x's tokens
        are sharded.
      axis_name: a mesh axis of a surrounding `shard_map` along which the vocabulary is spread, or several: w and bias
        are this device's part, as for `softmax`. x, labels and weights are the same on all devices along these axes,
        and so is the loss. Tokens that are spread over other axes are the caller's to add up.

    Returns:
      A scalar in float32 (float64 for float64). Without a reduction, losses of the labels' shape, or with
      return_entropy a named tuple of losses and entropies.

    Raises:
      TypeError: an argument is of the wrong type or dtype.
      ValueError: shapes do not fit, or an argument is not one of the allowed values.
    """
    x, w = (arguments.checked_real_array(_NAME, a, argument) for a, argument in ((x, "x"), (w, "w")))
    bias = None if bias is None else arguments.checked_real_array(_NAME, bias, "bias")
    weights = None if weights is None else arguments.checked_real_array(_NAME, weights, "weights")
    if class_weights is not None:
        class_weights = arguments.checked_real_array(_NAME, class_weights, "class_weights")
    labels = arguments.checked_labels(_NAME, labels)
    options = checked_options(_NAME, label_smoothing, z_loss)
    transpose_w = arguments.checked_bool(_NAME, transpose_w, "transpose_w")
    return_entropy = arguments.checked_bool(_NAME, return_entropy, "return_entropy")
    arguments.check_reduction(_NAME, reduction)
    if return_entropy and reduction is not None:
        raise ValueError(f"{_NAME}: return_entropy must be False unless reduction is None, got {reduction!r}.")
    if axis != -1:
        x = jnp.moveaxis(x, arguments.checked_axis(_NAME, x.ndim, axis), -1)
    arguments.check_linear_layer(_NAME, x, w, labels, bias, transpose_w, chunk)
    made = arguments.common_float_dtype(x, w)
    wide = reference.wide_dtype(made)
    logits_dtype = arguments.checked_float_dtype(_NAME, logits_dtype, "logits_dtype", made)
    layer = Layer(
        contracted=int(transpose_w),
        product_dtype=made,
        logits_dtype=logits_dtype,
        accumulate_dtype=arguments.checked_float_dtype(_NAME, accumulate_dtype, "accumulate_dtype", wide),
        soft_cap=None if soft_cap is None else arguments.checked_positive(_NAME, soft_cap, "soft_cap"),
        temperature=arguments.checked_positive(_NAME, temperature, "temperature"),
        changes_logits=bias is not None or soft_cap is not None or temperature != 1,
        chunk=None if chunk is None else int(chunk),
        axis_name=() if axis_name is None else arguments.checked_axis_name(_NAME, axis_name),
        reduction=reduction,
        has_total=reduction is not None and "float16" not in (made.name, logits_dtype.name),
        return_entropy=return_entropy,
    )
    return _linear_cross_entropy(layer, x, w, labels, bias, weights, class_weights, options)


@functools.partial(jax.jit, static_argnums=(0,), inline=True)
def _linear_cross_entropy(layer, x, w, labels, bias, weights, class_weights, options):
    axes, dtype = (labels.ndim,), reference.wide_dtype(layer.logits_dtype)
    shape = (*labels.shape, w.shape[1 - layer.contracted])
    arguments.check_classes(_NAME, shape, axes, layer.axis_name)
    label, found = label_of_rows(labels, shape, axes, None, layer.axis_name)
    x, w = laid_as_well(x, label).astype(layer.product_dtype), w.astype(layer.product_dtype)
    bias = None if bias is None else bias.astype(dtype)
    if class_weights is not None:
        classes = shape[-1] * math.prod(map(jax.lax.axis_size, layer.axis_name))
        weights = weights_of_classes(_NAME, class_weights, labels, classes, weights, dtype)
    weights = row_weights(_NAME, found, labels.shape, axes, weights, layer.reduction, dtype)
    given = {"x": x, "w": w, "wide": w, "bias": bias, "weights": rows_laid_as(x, weights)}
    given |= {"label": label, "found": found, **options.as_arrays(dtype)._asdict()}
    of_tokens, total = _losses(layer, _varying(layer, given))
    if layer.reduction is not None:
        return total if layer.has_total else jnp.sum(of_tokens.losses)
    of_tokens = jax.tree.map(lambda rows: jax.lax.squeeze(rows, axes), of_tokens)
    return of_tokens if layer.return_entropy else of_tokens.losses


def _varying(layer, given):
    """The arrays, in their types varying over the same mesh axes: so what a device has of a gradient is not added to
    others' before the end. What is the same along axis_name stays so: weights and options."""
    names = frozenset().union(*map(arguments.varying_axes, jax.tree.leaves(given))) - set(layer.axis_name)
    spread = {name: layer.axis_name for name in ("w", "label", *_OF_PARTS)}

    def varying(name, a):
        return None if a is None else arguments.varying_over(a, [*names, *spread.get(name, ())])

    return {name: varying(name, a) for name, a in given.items()}


# ---- All tokens: (their losses, None), or (None, the total). `names`: by which arrays it is differentiated


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _losses(layer, given):
    return _of_all(layer, (), given)


def _of_all(layer, names, given):
    return _in_chunks(layer, names, given, functools.partial(_over_chunks, functools.partial(_of_chunk, layer)))


@functools.partial(_losses.defjvp, symbolic_zeros=True)
def _losses_jvp(layer, primals, tangents):
    (given,), (dots,) = primals, tangents
    dots = {name: dots[name] for name in _REAL if not is_zero(dots[name])}
    if not layer.has_total:  # the tangents' transpose makes each chunk's logits again
        function = functools.partial(_of_all, layer, dots)
        changed = {name: given[name] for name in dots}
        return _losses(layer, given), jax.jvp(lambda changed: function(given | changed), (changed,), (dots,))[1]
    total, gradients = _in_chunks(layer, dots, given, functools.partial(_total_and_gradients, layer, dots))
    # If types say that x differs along axis_name and the total does not, JAX adds up what devices have of a gradient by
    # what is the same on all. Else each of them has a total of its own.
    names, varying = set(layer.axis_name), arguments.varying_axes
    alike = names <= varying(given["x"]) and not names & varying(total)
    totals = 1 if alike else math.prod(map(jax.lax.axis_size, names))

    def along(name):
        dot = integer_losses.inner_product(gradients[name], dots[name]).astype(total.dtype)
        of_parts = names and (not alike or name in _OF_PARTS)
        return jax.lax.psum(dot, layer.axis_name) / totals if of_parts else dot

    return (None, total), (None, sum(map(along, dots), jnp.zeros_like(total)))


def _total_and_gradients(layer, names, split, given):
    """The total, and its gradients by the arrays of these names."""

    def of_chunk(part):
        changed = {name: part[name] for name in names}
        total, pullback = jax.vjp(lambda changed: _of_chunk(layer, part | changed)[1], changed)
        (gradients,) = pullback(jnp.ones_like(total))
        of_tokens = {name: gradients.pop(name) for name in _OF_TOKENS if name in gradients}
        return of_tokens, (total, gradients)

    of_tokens, (total, gradients) = _over_chunks(of_chunk, split, given)
    like = given | {"wide": given["w"]}
    return total, {name: a.astype(like[name].dtype) for name, a in {**of_tokens, **gradients}.items()}


# ---- A chunk of tokens, or all of them: the same


def _of_chunk(layer, given):
    if not layer.has_total:
        return _losses_of_chunk(layer, given), None
    return None, integer_losses.weighted_losses(*_operands(layer, given, at_once=True, in_place=True))


# With checkpoint x and w are kept for a backward pass, and no logits.
@functools.partial(jax.checkpoint, static_argnums=(0,))
def _losses_of_chunk(layer, given):
    how, labelled, *others = _operands(layer, given, in_place=not layer.return_entropy)
    losses = integer_losses.weighted_losses(how, labelled, *others)
    entropies = entropies_of(labelled.x, None, how.axes, layer.axis_name) if layer.return_entropy else None
    return TokenLosses(losses, jax.tree.map(lambda a: jnp.expand_dims(a, how.axes), entropies))


def _operands(layer, given, **how):
    """What `integer_losses.weighted_losses` asks for."""
    x, bias = given["x"], given["bias"]
    logits = product(x, given["w"], given["wide"], contracted=layer.contracted, dtype=layer.logits_dtype)
    logits = _changed(layer, logits, bias) if layer.changes_logits else logits
    labelled = integer_losses.Labelled(logits, given["label"], given["found"], None)
    how = integer_losses.How((x.ndim - 1,), layer.axis_name, **how)
    return how, labelled, given["weights"], Options(given["label_smoothing"], given["z_loss"])


# With checkpoint the product is kept for a backward pass, and nothing in the dtype of the arithmetic.
@functools.partial(jax.checkpoint, prevent_cse=False, static_argnums=(0,))
def _changed(layer, made, bias):
    logits = reference.widened(made)
    logits = logits if bias is None else logits + jnp.broadcast_to(bias, logits.shape)
    logits = logits if layer.soft_cap is None else layer.soft_cap * jnp.tanh(logits / layer.soft_cap)
    return (logits / layer.temperature).astype(made.dtype)


# ---- Chunks


def _in_chunks(layer, names, given, function):
    """What a function makes of a split, (dimension, size of a chunk along it), or None for all tokens, and of arrays.

    `names`: by which of these it makes gradients. Unless the caller asks for chunks, a program that XLA divides among
    devices has none: each device has a part of the logits, and XLA may add up a gradient over devices for each chunk.
    """
    in_wide = "wide" in names and layer.accumulate_dtype != given["w"].dtype
    sum_bytes = given["w"].size * layer.accumulate_dtype.itemsize if in_wide else 0
    vocabulary = given["w"].shape[1 - layer.contracted]
    logit_bytes = (2 if layer.changes_logits else 1) * vocabulary * layer.logits_dtype.itemsize
    split = split_of(given["x"].shape[:-1], logit_bytes, sum_bytes, layer.chunk)
    if split is None or (
        layer.chunk is None and types_tell_shardings([jax.typeof(given["x"]), jax.typeof(given["w"])])
    ):
        return function(None, given)  # w's gradient, a single product, is rounded once
    wide = given | {"wide": given["wide"].astype(layer.accumulate_dtype)} if in_wide else given
    if layer.chunk is not None:
        return function(split, wide)
    # Which it is, is known when the program is lowered. XLA drops what does not run.
    return jax.lax.cond(several_devices_p.bind(), lambda: function(None, given), lambda: function(split, wide))


def split_of(shape, logit_bytes, sum_bytes, chunk=None):
    """The split of tokens of this shape: into chunks if they take less memory, or the caller asks for some.

    `logit_bytes`: that one token's logits take. `sum_bytes`: what chunks take besides, to add up a gradient in.
    A chunk has one index of the longest dimension at least, and all of the others. Symbolic shapes have no chunks.
    """
    if not all(isinstance(n, int) for n in shape) or math.prod(shape) <= 1:
        return None
    dim = max(range(len(shape)), key=lambda d: shape[d])
    extent, others = shape[dim], math.prod(shape) // shape[dim]
    fewest = -(-extent // max(1, (_CHUNK_BYTES // logit_bytes if chunk is None else chunk) // others))
    count = next((count for count in range(fewest, 2 * fewest) if extent % count == 0), fewest)
    size = -(-extent // count)
    saves = size * others * logit_bytes + sum_bytes < math.prod(shape) * logit_bytes
    return (dim, size) if size < extent and (saves or chunk is not None) else None


def _over_chunks(function, split, given):
    """What a function of tokens makes of all: results of each token, and sums over tokens.

    Chunks do not lie side by side: chunk i has every n-th token, from the i-th on. So of tokens that are spread over
    devices each device has a part of every chunk. Tokens of 0 and weight 0 make the last chunk as large as others. The
    first chunk's sums are not added to zeros.
    """
    if split is None:
        return function(given)
    dim, size = split
    extent = given["x"].shape[dim]
    count = -(-extent // size)

    def chunks(a):
        missing = [(0, count * size - extent if d == dim else 0) for d in range(a.ndim)]
        a = jnp.pad(a, missing) if extent % size else a
        return jnp.moveaxis(a.reshape(*a.shape[:dim], size, count, *a.shape[dim + 1 :]), dim + 1, 0)

    def joined(first, others):
        a = jnp.moveaxis(jnp.concatenate([first[None], others]), 0, dim + 1)
        a = a.reshape(*a.shape[:dim], size * count, *a.shape[dim + 2 :])
        return jax.lax.slice_in_dim(a, 0, extent, axis=dim)

    def step(sums, arrays):
        of_tokens, more = function(given | arrays)
        return jax.tree.map(jnp.add, sums, more), of_tokens

    arrays = {name: chunks(given[name]) for name in _OF_TOKENS}
    of_first, sums = function(given | {name: a[0] for name, a in arrays.items()})
    sums, of_others = jax.lax.scan(step, sums, {name: a[1:] for name, a in arrays.items()})
    return jax.tree.map(joined, of_first, of_others), sums
