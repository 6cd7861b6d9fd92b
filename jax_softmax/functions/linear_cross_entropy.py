"""A linear layer and its cross entropy in one, from the arguments to a chunk's logits.

The first derivative of a mean or sum makes the gradients of each chunk of tokens right after its logits. That of losses
of tokens is JAX's, whose transpose makes each chunk's logits again.
"""

import functools
import math
from collections.abc import Hashable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from jax_softmax.functions import arguments, integer_losses
from jax_softmax.functions.entropies import entropies_of
from jax_softmax.functions.losses import row_weights
from jax_softmax.functions.options import Options, checked_options
from jax_softmax.primitives import reference
from jax_softmax.primitives.labels import label_of_rows
from jax_softmax.primitives.product import product
from jax_softmax.primitives.rows import is_zero
from jax_softmax.primitives.several_devices import several_devices_p
from jax_softmax.primitives.types import laid_as_well, rows_laid_as, types_tell_shardings

_NAME = "linear_cross_entropy"
_DTYPES = ("bfloat16", "float16", "float32", "float64")
_CHUNK_BYTES = 1 << 29  # that the logits of a chunk may take


class TokenLosses(NamedTuple):
    """Of each token."""

    losses: jax.Array
    entropies: jax.Array | None


class Layer(NamedTuple):
    """What is known of a call when the program is traced."""

    contracted: int  # which dimension of w is the features
    logits_dtype: np.dtype
    accumulate_dtype: np.dtype
    soft_cap: float | None
    temperature: float
    chunk: int | None
    axis_name: tuple[Hashable, ...]
    reduction: str | None
    return_entropy: bool


class Given(NamedTuple):
    """The arrays of a call. What tokens have keeps the dimension of the vocabulary, with extent 1."""

    x: jax.Array
    w: jax.Array
    wide: jax.Array  # w once more, in the dtype that its gradient has: that is by `wide` (see `product`)
    bias: jax.Array | None
    label: jax.Array
    found: jax.Array
    weights: jax.Array
    label_smoothing: jax.Array | None
    z_loss: jax.Array | None


_OF_TOKENS = ("x", "label", "found", "weights")
_NOT_DIFFERENTIATED = ("w", "label", "found")
_OF_PARTS = ("x", "wide", "bias")  # by which devices along axis_name have parts of a gradient, or gradients of parts


def linear_cross_entropy(
    x: ArrayLike,
    w: ArrayLike,
    labels: ArrayLike,
    *,
    bias: ArrayLike | None = None,
    weights: ArrayLike | None = None,
    reduction: str | None = "mean",
    transpose_w: bool = False,
    soft_cap: float | None = None,
    temperature: float = 1.0,
    label_smoothing: ArrayLike = 0.0,
    z_loss: ArrayLike = 0.0,
    return_entropy: bool = False,
    logits_dtype: DTypeLike | None = None,
    accumulate_dtype: DTypeLike | None = None,
    chunk: int | None = None,
    axis_name: arguments.AxisName = None,
) -> jax.Array | TokenLosses:
    """Cross entropy of the logits x·w and integer labels, with little memory for logits.

    The last layer of a language model and its loss: `cross_entropy_loss(logits, labels)` of::

        logits = soft_cap tanh((x·w + bias) / soft_cap) / temperature

    The logits are made for all tokens at once, or for one chunk of tokens after the other, whichever takes less memory;
    on CUDA their gradient takes their place. With a reduction, the forward pass of a differentiated loss makes the
    gradients of x, w and bias, and the backward pass multiplies them by the incoming cotangent, unless that is known to
    be 1. Without one, and of float16 with one, so that loss scaling can keep it from underflow, the backward pass makes
    the logits again. Differentiable in forward and reverse mode to any order.

    Args:
      x: real array of shape (..., features).
      w: real array of shape (features, vocabulary), or (vocabulary, features) with transpose_w. The product is one of
        the dtype that holds both: for a fast product x and w are of 16 bits.
      labels: array of an integer dtype, of x's shape without features. A label that is negative or too large is
        ignored: its loss and gradient are 0.
      bias: real array of shape (vocabulary,), added to the product in float32 (float64 for float64).
      weights: real array that broadcasts to the labels' shape: how much each loss counts. None, the default: 1 each.
      reduction: "mean", the weighted mean of the losses (0 if no label counts), "sum", their weighted sum, or None, the
        loss of each token times its weight: with weight 1, the label's negative log-probability.
      transpose_w: whether w is laid as an embedding table is, a row for each word of the vocabulary.
      soft_cap: a positive number, which bounds the logits' magnitude, or None.
      temperature: a positive number, which divides the logits.
      label_smoothing, z_loss: as for `cross_entropy_loss`.
      return_entropy: whether to return the entropy of each token's distribution as well, in nats, also where its label
        is ignored. Only without a reduction.
      logits_dtype: that of the logits, a floating one; by default the product's. The product is rounded to it once, and
        once more after a bias, a soft cap or a temperature. float32 takes twice the memory of bfloat16, and more time.
      accumulate_dtype: that in which w's gradient is added up over chunks; by default float32 (float64 for float64).
        w's own dtype saves the memory of a sum in another one, which is 4 features vocabulary bytes, and rounds after
        each chunk.
      chunk: how many tokens' logits may be made at once, on all devices together under `jit`, but at least one index
        of the longest of the tokens' dimensions. By default all, unless chunks of at most 512 MiB of logits and the sum
        of w's gradient take less memory. Refused in explicit mode where x's tokens are sharded.
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
    x, w, bias, weights = (
        a if a is None and argument in ("bias", "weights") else arguments.checked_real_array(_NAME, a, argument)
        for argument, a in {"x": x, "w": w, "bias": bias, "weights": weights}.items()
    )
    labels = arguments.checked_integer_array(_NAME, labels, "labels")
    options = checked_options(_NAME, label_smoothing, z_loss)
    product_dtype = _product_dtype(x, w)
    layer = Layer(
        contracted=int(arguments.checked_bool(_NAME, transpose_w, "transpose_w")),
        logits_dtype=_dtype(logits_dtype, "logits_dtype", product_dtype),
        accumulate_dtype=_dtype(accumulate_dtype, "accumulate_dtype", reference.wide_dtype(product_dtype)),
        soft_cap=None if soft_cap is None else _positive(soft_cap, "soft_cap"),
        temperature=_positive(temperature, "temperature"),
        chunk=None if chunk is None else _checked_chunk(chunk, x),
        axis_name=() if axis_name is None else arguments.checked_axis_name(_NAME, axis_name),
        reduction=_checked_reduction(reduction),
        return_entropy=arguments.checked_bool(_NAME, return_entropy, "return_entropy"),
    )
    if layer.return_entropy and reduction is not None:
        raise ValueError(f"{_NAME}: return_entropy must be False unless reduction is None, got {reduction!r}.")
    _check_shapes(x, w, labels, bias, layer.contracted)
    return _linear_cross_entropy(product_dtype, layer, x, w, labels, bias, weights, options)


@functools.partial(jax.jit, static_argnums=(0, 1), inline=True)
def _linear_cross_entropy(product_dtype, layer, x, w, labels, bias, weights, options):
    shape = (*labels.shape, w.shape[1 - layer.contracted])
    axes, dtype = (labels.ndim,), reference.wide_dtype(layer.logits_dtype)
    arguments.check_classes(_NAME, shape, axes, layer.axis_name)
    label, found = label_of_rows(labels, shape, axes, None, layer.axis_name)
    weights = row_weights(_NAME, found, labels.shape, axes, weights, layer.reduction, dtype)
    x, w = laid_as_well(x, label).astype(product_dtype), w.astype(product_dtype)
    bias, weights = None if bias is None else bias.astype(dtype), rows_laid_as(x, weights)
    given = _varying(layer, Given(x, w, w, bias, label, found, weights, *options.as_arrays(dtype)))
    if layer.reduction is not None and "float16" not in (product_dtype.name, layer.logits_dtype.name):
        return _total(layer, given)
    losses = jax.tree.map(lambda rows: jax.lax.squeeze(rows, axes), _token_losses(layer, given))
    if layer.reduction is not None:
        return jnp.sum(losses.losses)
    return losses if layer.return_entropy else losses.losses


def _varying(layer, given):
    """The arrays, in their types varying over the same mesh axes: so what a device has of a gradient is not added to
    others' before the end. What is the same along axis_name stays so: weights and options."""
    names = frozenset().union(*map(arguments.varying_axes, jax.tree.leaves(given))) - set(layer.axis_name)

    def varying(field, a):
        parts = layer.axis_name if field in ("w", "label", *_OF_PARTS) else ()
        return None if a is None else arguments.varying_over(a, [*names, *parts])

    return Given(*map(varying, Given._fields, given))


# ---- All tokens


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _total(layer, given):
    """The sum of the losses times their weights, with a derivative that is made together with it."""

    def of_chunk(part):
        return None, _total_of_chunk(layer, part)

    return _in_chunks(layer, given, (), lambda split, given: _over_chunks(of_chunk, split, given)[1])


@functools.partial(_total.defjvp, symbolic_zeros=True)
def _total_jvp(layer, primals, tangents):
    (given,), dots = primals, _moving(tangents[0])

    def of_chunk(part):
        value, pullback = jax.vjp(lambda changed: _total_of_chunk(layer, part._replace(**changed)), _named(part, dots))
        (gradients,) = pullback(jnp.full_like(value, 1 / _copies(layer, given, value)))
        of_tokens = {name: gradients.pop(name) for name in _OF_TOKENS if name in gradients}
        return of_tokens, (value, gradients)

    def function(split, wide):
        of_tokens, (value, gradients) = _over_chunks(of_chunk, split, wide)
        gradients |= of_tokens
        return value, {name: gradients[name].astype(getattr(given, name).dtype) for name in dots}

    value, gradients = _in_chunks(layer, given, dots, function)
    products = {name: integer_losses.inner_product(gradients[name], dot) for name, dot in dots.items()}
    of_parts = products if _copies(layer, given, value) > 1 else _OF_PARTS
    sums = [jnp.zeros_like(value), jnp.zeros_like(value)]
    for name, number in products.items():
        sums[name in of_parts] += number.astype(value.dtype)
    same, of_parts = sums
    return value, same + (jax.lax.psum(of_parts, layer.axis_name) if layer.axis_name else of_parts)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _token_losses(layer, given):
    """The losses times their weights, and the entropies or None."""
    return _in_chunks(layer, given, (), functools.partial(_losses_of_chunks, layer))


@functools.partial(_token_losses.defjvp, symbolic_zeros=True)
def _token_losses_jvp(layer, primals, tangents):
    (given,), dots = primals, _moving(tangents[0])

    def function(split, wide):
        changed = _named(wide, dots)
        moved = {name: dot.astype(changed[name].dtype) for name, dot in dots.items()}
        return jax.jvp(lambda a: _losses_of_chunks(layer, split, wide._replace(**a)), (changed,), (moved,))[1]

    return _token_losses(layer, given), _in_chunks(layer, given, dots, function)


def _losses_of_chunks(layer, split, given):
    return _over_chunks(lambda part: (_losses_of_chunk(layer, part), None), split, given)[0]


def _moving(dots):
    """The tangents that are not known to be 0, by name."""
    return {name: t for name, t in dots._asdict().items() if name not in _NOT_DIFFERENTIATED and not is_zero(t)}


def _named(given, names):
    return {name: getattr(given, name) for name in names}


def _copies(layer, given, value):
    """Of how many losses that are the same, one of each device along axis_name, JAX takes the gradient.

    Of one, if types say that x differs among these devices and the loss does not: JAX then adds up what they have of a
    gradient by what is the same on all. Else, without check_vma or where labels may differ, that is to be done here.
    """
    names, varying = set(layer.axis_name), arguments.varying_axes
    one = names <= varying(given.x) and not names & varying(value)
    return 1 if one else math.prod(map(jax.lax.axis_size, layer.axis_name))


# ---- A chunk of them, or all


def _total_of_chunk(layer, given):
    axes, axis_name, *arrays = _operands(layer, given)
    if axis_name:
        return integer_losses.weighted_sum(axes, axis_name, *arrays)
    return integer_losses.weighted_sum_with_gradient(axes, True, *arrays)


# With checkpoint x and w are kept for a backward pass, and no logits.
@functools.partial(jax.checkpoint, static_argnums=(0,))
def _losses_of_chunk(layer, given):
    axes, axis_name, labelled, *others = _operands(layer, given)
    alone = not layer.return_entropy
    losses = integer_losses.weighted_losses(axes, axis_name, labelled, *others, temporary=alone)
    return TokenLosses(
        losses, None if alone else jnp.expand_dims(entropies_of(labelled.x, None, axes, axis_name), axes)
    )


def _operands(layer, given):
    """What `integer_losses` asks for."""
    logits = product(given.x, given.w, given.wide, contracted=layer.contracted, dtype=layer.logits_dtype)
    if _changes(layer, given):
        logits = _changed(layer, logits, given.bias)
    labelled = integer_losses.Labelled(logits, given.label, given.found, None)
    return (given.x.ndim - 1,), layer.axis_name, labelled, given.weights, Options(given.label_smoothing, given.z_loss)


def _changes(layer, given):
    return given.bias is not None or layer.soft_cap is not None or layer.temperature != 1


# With checkpoint the product is kept for a backward pass, and nothing in the dtype of the arithmetic.
@functools.partial(jax.checkpoint, prevent_cse=False, static_argnums=(0,))
def _changed(layer, made, bias):
    logits = reference.widened(made)
    if bias is not None:
        logits += jnp.broadcast_to(bias, logits.shape)
    if layer.soft_cap is not None:
        logits = layer.soft_cap * jnp.tanh(logits / layer.soft_cap)
    return (logits / layer.temperature).astype(made.dtype)


# ---- Chunks of tokens


def _in_chunks(layer, given, names, function):
    """A function of the split, (dimension, size of a chunk along it), or of None for all tokens at once, and of arrays.

    `names`: by which of them it adds up gradients. Without the caller's `chunk`, a program that XLA divides among
    several devices makes all at once: there each device has a part of the logits, and XLA may add up a gradient over
    devices after each chunk.
    """
    in_wide = "wide" in names and layer.accumulate_dtype != given.w.dtype
    sum_bytes = given.w.size * layer.accumulate_dtype.itemsize if in_wide else 0
    vocabulary = given.w.shape[1 - layer.contracted]
    logit_bytes = (2 if _changes(layer, given) else 1) * vocabulary * layer.logits_dtype.itemsize
    split = split_of(given.x.shape[:-1], logit_bytes, sum_bytes, layer.chunk)
    if split is None or (layer.chunk is None and types_tell_shardings([jax.typeof(given.x), jax.typeof(given.w)])):
        return function(None, given)  # w's gradient, a single product, is rounded once
    wide = given._replace(wide=given.wide.astype(layer.accumulate_dtype)) if in_wide else given
    if layer.chunk is not None:
        return function(split, wide)
    # Which it is, is known when the program is lowered. XLA drops what does not run.
    return jax.lax.cond(several_devices_p.bind(), lambda: function(None, given), lambda: function(split, wide))


def split_of(shape, logit_bytes, sum_bytes, chunk=None):
    """The split of tokens of this shape: all at once, unless chunks take less memory, or `chunk` asks for them.

    `logit_bytes`: that one token's logits take. `sum_bytes`: what chunks take besides, to add up a gradient in.
    `chunk`: how many tokens a chunk may have, if the caller says so. A chunk has one index of the longest dimension at
    least, and all of the others. Where the number of tokens is symbolic, there are none.
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
    extent = given.x.shape[dim]
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
        of_tokens, more = function(given._replace(**arrays))
        return jax.tree.map(jnp.add, sums, more), of_tokens

    arrays = {name: chunks(a) for name, a in _named(given, _OF_TOKENS).items()}
    of_first, sums = function(given._replace(**{name: a[0] for name, a in arrays.items()}))
    sums, of_others = jax.lax.scan(step, sums, {name: a[1:] for name, a in arrays.items()})
    return jax.tree.map(joined, of_first, of_others), sums


# ---- Arguments


def _check_shapes(x, w, labels, bias, contracted):
    layout = "(vocabulary, features)" if contracted else "(features, vocabulary)"
    if x.ndim == 0:
        raise ValueError(f"{_NAME}: x must be of shape (..., features), got shape ().")
    if w.ndim != 2 or w.shape[contracted] != x.shape[-1]:
        raise ValueError(f"{_NAME}: w must be of shape {layout}, got shape {w.shape} for x of {x.shape[-1]} features.")
    if labels.shape != x.shape[:-1]:
        wanted = f"{x.shape[:-1]} for x of shape {x.shape}"
        raise ValueError(f"{_NAME}: labels must have x's shape without features, {wanted}, got {labels.shape}.")
    vocabulary = w.shape[1 - contracted]
    if bias is not None and bias.shape != (vocabulary,):
        raise ValueError(f"{_NAME}: bias must be of shape (vocabulary,), ({vocabulary},) here, got {bias.shape}.")


def _product_dtype(x, w):
    # 8 bits, of which JAX promotes none, as float32.
    floats = (jnp.float32 if a.dtype.name in reference.NARROW and a.dtype.name[0] == "f" else a.dtype for a in (x, w))
    dtype = jnp.dtype(jnp.result_type(*floats))
    return dtype if dtype.name in _DTYPES else jnp.dtype(jnp.float32)


def _dtype(dtype: Any, argument: str, default: np.dtype) -> np.dtype:
    found = default if dtype is None else arguments.checked_float_dtype(_NAME, dtype, argument)
    if found.name not in _DTYPES:
        raise TypeError(f"{_NAME}: {argument} must be one of {', '.join(_DTYPES)}, or None, got {found}.")
    return found


def _checked(value: Any, types: Any, is_allowed, allowed: str) -> Any:
    if isinstance(value, bool) or not isinstance(value, types):
        raise TypeError(f"{_NAME}: {allowed}, got one of type {type(value).__name__}.")
    if not is_allowed(value):
        raise ValueError(f"{_NAME}: {allowed}, got {value!r}.")
    return value


def _checked_reduction(reduction: Any) -> str | None:
    reductions = "mean", "sum", None
    return _checked(reduction, str | None, reductions.__contains__, 'reduction must be "mean", "sum" or None')


def _positive(value: Any, argument: str) -> float:
    least, most = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)
    allowed = f"{argument} must be a positive number, known when the program is traced, of float32's range"
    types = int | float | np.integer | np.floating
    return float(_checked(value, types, lambda number: least <= float(number) <= most, allowed))


def _checked_chunk(chunk: Any, x: jax.Array) -> int:
    allowed = "chunk must be a positive int, how many tokens, or None"
    chunk = int(_checked(chunk, int | np.integer, lambda tokens: tokens >= 1, allowed))
    aval = jax.typeof(x)
    if types_tell_shardings([aval]) and any(axis is not None for axis in aval.sharding.spec[:-1]):
        # JAX refuses to take chunks of what is sharded.
        raise ValueError(
            f"{_NAME}: chunk must be None where x's type says that tokens are sharded, {aval.sharding.spec} here, got "
            f"{chunk}. Inside jax.shard_map a device may take chunks of its own tokens."
        )
    return chunk
