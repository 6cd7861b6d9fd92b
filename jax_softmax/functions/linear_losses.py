"""A linear layer and its cross entropy in one: the public function, and what it asks of its arguments."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from jax_softmax.functions import arguments
from jax_softmax.functions.arguments import AxisName
from jax_softmax.functions.linear_chunks import token_losses, total_loss
from jax_softmax.functions.linear_layer import Given, Layer, TokenLosses
from jax_softmax.functions.losses import row_weights
from jax_softmax.functions.options import checked_options
from jax_softmax.primitives import reference
from jax_softmax.primitives.labels import label_of_rows
from jax_softmax.primitives.types import laid_as_well, rows_laid_as, types_tell_shardings

_NAME = "linear_cross_entropy"
_DTYPES = ("bfloat16", "float16", "float32", "float64")


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
    axis_name: AxisName = None,
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
    x, w = (arguments.checked_real_array(_NAME, a, name) for a, name in ((x, "x"), (w, "w")))
    transpose_w = arguments.checked_bool(_NAME, transpose_w, "transpose_w")
    return_entropy = arguments.checked_bool(_NAME, return_entropy, "return_entropy")
    _check_reduction(reduction, return_entropy)
    product = _product_dtype(x, w)
    layer = Layer(
        contracted=int(transpose_w),
        product_dtype=product.name,
        logits_dtype=_dtype(logits_dtype, "logits_dtype", product).name,
        accumulate_dtype=_dtype(accumulate_dtype, "accumulate_dtype", reference.wide_dtype(product)).name,
        soft_cap=None if soft_cap is None else _positive(soft_cap, "soft_cap"),
        temperature=_positive(temperature, "temperature"),
        chunk=_checked_chunk(chunk),
        axis_name=() if axis_name is None else arguments.checked_axis_name(_NAME, axis_name),
    )
    bias, weights = (
        a if a is None else arguments.checked_real_array(_NAME, a, name)
        for a, name in ((bias, "bias"), (weights, "weights"))
    )
    labels = arguments.checked_integer_array(_NAME, labels, "labels")
    options = checked_options(_NAME, label_smoothing, z_loss)
    _check_shapes(x, w, labels, bias, layer.contracted)
    _check_chunk(x, layer.chunk)
    return _linear(x, w, labels, bias, weights, options, layer, reduction, return_entropy)


@functools.partial(jax.jit, static_argnums=(6, 7, 8), inline=True)
def _linear(x, w, labels, bias, weights, options, layer, reduction, return_entropy):
    shape = (*x.shape[:-1], w.shape[1 - layer.contracted])
    axes, wide = (len(shape) - 1,), reference.wide_dtype(jnp.dtype(layer.logits_dtype))
    arguments.check_classes(_NAME, shape, axes, layer.axis_name)
    label, found = label_of_rows(labels, shape, axes, None, layer.axis_name)
    weights = row_weights(_NAME, found, labels.shape, axes, weights, reduction, wide)
    x, product = laid_as_well(x, label), jnp.dtype(layer.product_dtype)
    weights = rows_laid_as(x, weights)
    bias = None if bias is None else bias.astype(wide)
    given = Given(x.astype(product), w.astype(product), bias, label, found, weights, *options.as_arrays(wide))
    given = _varying(given, layer.axis_name)
    if reduction is not None:
        return total_loss(layer, given)
    of_tokens = token_losses(layer, return_entropy, given)
    of_tokens = jax.tree.map(lambda rows: jax.lax.squeeze(rows, axes), of_tokens)
    return of_tokens if return_entropy else of_tokens.losses


def _varying(given, axis_name):
    """The arrays, in their types varying over the same mesh axes: so what a device has of a gradient is not added to
    others' before the end. What is the same along axis_name stays so: weights and options."""
    names = frozenset().union(*map(arguments.varying_axes, jax.tree.leaves(given))) - set(axis_name)
    spread = {"x", "w", "bias", "label"}
    return Given(
        *(
            None if a is None else arguments.varying_over(a, [*names, *(axis_name if field in spread else ())])
            for field, a in given._asdict().items()
        )
    )


# ---- Arguments


def _check_reduction(reduction, return_entropy):
    allowed = f'{_NAME}: reduction must be "mean", "sum" or None'
    if reduction is not None and not isinstance(reduction, str):
        raise TypeError(f"{allowed}, got one of type {type(reduction).__name__}.")
    if reduction not in ("mean", "sum", None):
        raise ValueError(f"{allowed}, got {reduction!r}.")
    if return_entropy and reduction is not None:
        raise ValueError(f"{_NAME}: return_entropy must be False unless reduction is None, got {reduction!r}.")


def _check_shapes(x, w, labels, bias, contracted):
    layout = ("(vocabulary, features)" if contracted else "(features, vocabulary)") + f", got shape {w.shape}"
    if x.ndim == 0:
        raise ValueError(f"{_NAME}: x must be of shape (..., features), got shape ().")
    if w.ndim != 2:
        raise ValueError(f"{_NAME}: w must be of shape {layout}.")
    if w.shape[contracted] != x.shape[-1]:
        raise ValueError(f"{_NAME}: w must be of shape {layout} for x of {x.shape[-1]} features.")
    if labels.shape != x.shape[:-1]:
        raise ValueError(
            f"{_NAME}: labels must have x's shape without features, {x.shape[:-1]} for x of shape {x.shape}, got "
            f"{labels.shape}."
        )
    vocabulary = w.shape[1 - contracted]
    if bias is not None and bias.shape != (vocabulary,):
        raise ValueError(f"{_NAME}: bias must be of shape (vocabulary,), ({vocabulary},) here, got {bias.shape}.")


def _check_chunk(x, chunk):
    """In explicit mode JAX refuses to take chunks of what is sharded."""
    aval = jax.typeof(x)
    if chunk is not None and types_tell_shardings([aval]) and any(axis is not None for axis in aval.sharding.spec[:-1]):
        raise ValueError(
            f"{_NAME}: chunk must be None where x's type says that tokens are sharded, {aval.sharding.spec} here, got "
            f"{chunk}. Inside jax.shard_map a device may take chunks of its own tokens."
        )


def _product_dtype(x, w):
    # 8 bits, of which JAX promotes none, as float32.
    floats = (jnp.float32 if a.dtype.name in reference.NARROW and a.dtype.name[0] == "f" else a.dtype for a in (x, w))
    dtype = jnp.dtype(jnp.result_type(*floats))
    return dtype if dtype.name in _DTYPES else jnp.dtype(jnp.float32)


def _dtype(dtype: Any, argument: str, default: np.dtype) -> np.dtype:
    if dtype is None:
        return default
    found = arguments.checked_float_dtype(_NAME, dtype, argument)
    if found.name not in _DTYPES:
        raise TypeError(f"{_NAME}: {argument} must be one of {', '.join(_DTYPES)}, or None, got {found}.")
    return found


def _positive(value: Any, argument: str) -> float:
    allowed = f"{_NAME}: {argument} must be a positive number, known when the program is traced, of float32's range"
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
        raise TypeError(f"{allowed}, got one of type {type(value).__name__}.")
    if not float(np.finfo(np.float32).tiny) <= float(value) <= float(np.finfo(np.float32).max):
        raise ValueError(f"{allowed}, got {value}.")
    return float(value)


def _checked_chunk(chunk: Any) -> int | None:
    allowed = f"{_NAME}: chunk must be a positive int, how many tokens, or None"
    if chunk is None:
        return None
    if isinstance(chunk, bool) or not isinstance(chunk, int | np.integer):
        raise TypeError(f"{allowed}, got one of type {type(chunk).__name__}.")
    if chunk < 1:
        raise ValueError(f"{allowed}, got {chunk}.")
    return int(chunk)
