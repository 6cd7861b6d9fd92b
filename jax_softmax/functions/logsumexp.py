"""Log-sum-exp: the public function."""

import functools

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from jax_softmax.functions import arguments
from jax_softmax.functions.arguments import Axis, AxisName
from jax_softmax.primitives.rows import maximum, normalizer


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
      An array of x's shape without the reduced axes. With return_max a pair of such arrays, the log-sum-exp and the
      maximum. Both are -inf for rows that are masked altogether. A row with +inf gives +inf, one with a NaN gives NaN.
      Gradients of such rows are JAX's: 0 where all is masked, and NaN by each +inf and by all of a row with a NaN or
      nothing but -inf.

    Raises:
      TypeError: an argument is of the wrong type or dtype.
      ValueError: axis is out of range or repeated, where does not broadcast with x, or axis_name is not one of the
        axes of a surrounding `shard_map`.
    """
    if dtype is not None:
        dtype = arguments.checked_float_dtype("logsumexp", dtype, "dtype")
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
