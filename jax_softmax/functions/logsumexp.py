"""Log-sum-exp: the public function."""

import functools
from typing import Literal, TypedDict, Unpack, overload

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike, DTypeLike

from jax_softmax.functions import arguments
from jax_softmax.functions.arguments import Axis, AxisName
from jax_softmax.primitives import reference
from jax_softmax.primitives.reference import Normalizer
from jax_softmax.primitives.rows import maximum, row_normalizer, row_sum
from jax_softmax.primitives.types import Axes, Dtype, Mask, MeshAxes


class _LogsumexpOptions(TypedDict, total=False):
    b: ArrayLike | None
    dtype: DTypeLike | None
    axis_name: AxisName


@overload
def logsumexp(
    x: ArrayLike,
    axis: Axis = ...,
    where: ArrayLike | None = ...,
    keepdims: bool = ...,
    *,
    return_max: Literal[False] = ...,
    return_sign: Literal[False] = ...,
    **options: Unpack[_LogsumexpOptions],
) -> Array: ...
@overload
def logsumexp(
    x: ArrayLike,
    axis: Axis = ...,
    where: ArrayLike | None = ...,
    keepdims: bool = ...,
    *,
    return_max: Literal[True],
    return_sign: Literal[False] = ...,
    **options: Unpack[_LogsumexpOptions],
) -> tuple[Array, Array]: ...
@overload
def logsumexp(
    x: ArrayLike,
    axis: Axis = ...,
    where: ArrayLike | None = ...,
    keepdims: bool = ...,
    *,
    return_max: Literal[False] = ...,
    return_sign: Literal[True],
    **options: Unpack[_LogsumexpOptions],
) -> tuple[Array, Array]: ...
@overload
def logsumexp(
    x: ArrayLike,
    axis: Axis = ...,
    where: ArrayLike | None = ...,
    keepdims: bool = ...,
    *,
    return_max: bool = ...,
    return_sign: bool = ...,
    **options: Unpack[_LogsumexpOptions],
) -> Array | tuple[Array, Array]: ...
def logsumexp(
    x: ArrayLike,
    axis: Axis = -1,
    where: ArrayLike | None = None,
    keepdims: bool = False,
    *,
    b: ArrayLike | None = None,
    dtype: DTypeLike | None = None,
    return_max: bool = False,
    return_sign: bool = False,
    axis_name: AxisName = None,
) -> Array | tuple[Array, Array]:
    """Logarithm of the sum of exp(x), or of b exp(x), along axis, computed relative to the maximum.

    The same as `jax.nn.logsumexp` and `jax.scipy.special.logsumexp`, but with another default axis and another order of
    arguments. x is read once, and nothing of its size is written. The backward pass reads x again. Differentiable in
    forward and reverse mode to any order.

    Args:
      x: array of a floating, integer or boolean dtype, computed in float32 (float64 for float64).
      axis, where, axis_name: as for `softmax`; where leaves elements out of the sum.
      keepdims: whether reduced axes stay, with extent 1.
      b: real array that broadcasts to the shape of x and where: factors of the exponentials, of any sign. With it no
        kernel runs, but XLA's own operations, which read x twice. The result is NaN where the sum is negative, unless
        return_sign is True.
      dtype: the result's dtype, a floating one. By default it is x's, or for integers that of their exponentials. With
        float32 the result for an x of 16 bits has all digits of the sum.
      return_max: whether to return the maximum as well. Not with b or return_sign.
      return_sign: whether to return the sum's sign as well, -1, 0 or 1. The result is then the logarithm of the sum's
        magnitude.

    Returns:
      An array of x's shape without the reduced axes. With return_max or return_sign a pair of such arrays, the
      log-sum-exp and the maximum or the sign. Rows that are masked altogether have a log-sum-exp and a maximum of
      -inf. A row with +inf gives +inf, one with a NaN gives NaN. Gradients of such rows are as JAX's: 0 where all is
      masked, NaN at each +inf, and NaN everywhere in a row with a NaN or of nothing but -inf.

    Raises:
      TypeError: an argument is of the wrong type or dtype.
      ValueError: axis is out of range or repeated, where or b does not broadcast with x, return_max is given with b or
        return_sign, or axis_name is not a mesh axis of a surrounding `shard_map`.
    """
    if dtype is not None:
        dtype = arguments.checked_float_dtype("logsumexp", dtype, "dtype")
    keepdims = arguments.checked_bool("logsumexp", keepdims, "keepdims")
    return_max = arguments.checked_bool("logsumexp", return_max, "return_max")
    return_sign = arguments.checked_bool("logsumexp", return_sign, "return_sign")
    if return_max and (return_sign or b is not None):
        raise ValueError("logsumexp: return_max must be False where b is given or return_sign is True.")
    x, axis, where, axis_name = arguments.for_jit("logsumexp", x, axis, where, axis_name)
    b = arguments.checked_optional_array("logsumexp", b, "b")
    return _logsumexp(x, axis, where, b, keepdims, dtype, return_max, return_sign, axis_name)


@functools.partial(jax.jit, static_argnums=(1, 4, 5, 6, 7, 8), inline=True)
def _logsumexp(
    x: ArrayLike,
    axis: Axis,
    where: ArrayLike | None,
    b: Array | None,
    keepdims: bool,
    dtype: Dtype | None,
    return_max: bool,
    return_sign: bool,
    axis_name: AxisName,
) -> Array | tuple[Array, ...]:
    x, where, axes, axis_name, default_dtype = arguments.prepared("logsumexp", x, axis, where, axis_name)
    if b is None:
        normalizer = row_normalizer(x, where, axes, axis_name)
        lse, sign = normalizer.lse, jnp.sign(normalizer.sum_exp)
    else:
        arguments.check_broadcasts("logsumexp", "b", b.shape, x.shape)
        default_dtype = arguments.common_float_dtype(jnp.zeros((), default_dtype), b)
        b = b.astype(reference.wide_dtype(default_dtype))
        lse, sign = _log_of_weighted_sum(arguments.varying_as_well(x, b, ()), b, where, axes, axis_name)
        lse = lse if return_sign else jnp.where(sign < 0, jnp.nan, lse)
    results = [lse]
    if return_sign:
        results.append(sign)
    if return_max:
        largest = jnp.where(jnp.isnan(lse), lse, normalizer.largest)  # a kernel's maximum ignores NaNs
        results.append(maximum(x, largest, where, axes, axis_name))
    results = [r.astype(default_dtype if dtype is None else dtype) for r in results]
    if not keepdims:
        results = [jax.lax.squeeze(r, axes) for r in results]
    return tuple(results) if len(results) > 1 else results[0]


def _log_of_weighted_sum(x: Array, b: Array, where: Mask, axes: Axes, axis_name: MeshAxes) -> tuple[Array, Array]:
    """log(abs(sum(b exp(x)))) over each row, and the sum's sign."""
    counted = b != 0 if where is None else where & (b != 0)
    x = reference.widened(x)
    largest = jnp.max(jax.lax.stop_gradient(x), axes, keepdims=True, initial=-jnp.inf, where=counted)
    normalizer = Normalizer(jax.lax.pmax(largest, axis_name) if axis_name else largest, jnp.ones_like(largest))
    distances = reference.distances(reference.fill_masked(x, counted), normalizer)
    terms = b * jnp.exp(reference.fill_masked(distances, counted))
    sum_exp = row_sum(reference.fill_masked(terms, counted), axes, axis_name)
    return normalizer._replace(sum_exp=jnp.abs(sum_exp)).lse, jnp.sign(sum_exp)
