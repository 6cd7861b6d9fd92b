"""Scaling of rows by their largest magnitudes, and quantisation: the public function."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike, DTypeLike

from jax_softmax.functions import arguments
from jax_softmax.functions.arguments import Axis, AxisName
from jax_softmax.primitives import reference
from jax_softmax.primitives.operators import bind


def absmax_scale(
    x: ArrayLike,
    axis: Axis = -1,
    where: ArrayLike | None = None,
    *,
    dtype: DTypeLike | None = None,
    axis_name: AxisName = None,
) -> tuple[Array, Array]:
    """x divided by its largest magnitude along axis, and the scale, so that y * scale is x.

    In a dtype of 8 bits y is x quantised symmetrically, row by row: with L, the dtype's largest number (int8: 127,
    float8_e4m3fn: 448, float8_e5m2: 57344), y is x * (L / max(abs(x))) rounded to nearest, ties to even, and the scale
    is max(abs(x)) * (1 / L). The largest element of a row becomes L or -L, and y * scale is x but for the rounding. In
    other dtypes y is x / max(abs(x)), whose largest element is 1 or -1, and the scale is max(abs(x)).

    Differentiable in forward and reverse mode to any order. Elements that tie for the maximum share its cotangent
    equally, as for `jnp.max`. The derivative of y in float8 is that of the formula before the rounding, as for
    `astype`; y in int8 has no derivative, but its scale has one.

    Args:
      x: array of a floating, integer or boolean dtype, computed in float32 (float64 for float64).
      axis: the axis, or axes, of a row: an int, a sequence or array of ints, or None for all axes.
      where: boolean mask that broadcasts with x; False leaves an element out, and its y is 0. The shape of y is that of
        x and where broadcast together.
      dtype: y's dtype: int8, float8_e4m3fn, float8_e5m2, float16, bfloat16, float32 or float64. None, the default, is
        x's dtype, or for integers and float8 the one that they are computed in.
      axis_name: as for `softmax`: y is this device's part, and the scales are the same on all devices along these mesh
        axes.

    Returns:
      A pair (y, scale). scale is in float32 (float64 for float64), of y's shape with extent 1 along the reduced axes.
      Where the scale would be less than the smallest normal number, both are 0, as for a row of zeros and for one that
      is masked altogether. A row with a NaN has a scale of NaN, and y is NaN. A row with an infinity has a scale of
      inf, and y is NaN at the infinity and 0 elsewhere. In int8, 0 stands for NaN.

    Raises:
      TypeError: x, axis, where or dtype is of the wrong type or dtype.
      ValueError: axis is out of range or repeated, where does not broadcast with x, or axis_name is not a mesh axis
        of a surrounding `shard_map`.
    """
    if dtype is not None:
        dtype = _checked_dtype(dtype)
    x, axis, where, axis_name = arguments.for_jit("absmax_scale", x, axis, where, axis_name)
    return _absmax_scale(x, axis, where, dtype, axis_name)


@functools.partial(jax.jit, static_argnums=(1, 3, 4), inline=True)
def _absmax_scale(
    x: ArrayLike, axis: Axis, where: ArrayLike | None, dtype: str | None, axis_name: AxisName
) -> tuple[Array, Array]:
    x, where, axes, axis_name, _ = arguments.prepared("absmax_scale", x, axis, where, axis_name)
    dtype = x.dtype.name if dtype is None else dtype
    wide = reference.wide_dtype(x.dtype).name
    kernel_dtype = wide if dtype == "float64" else dtype  # no wider than the arithmetic
    y, scale = bind("absmax_scale", x, where=where, axes=axes, axis_name=axis_name, dtype=kernel_dtype)
    return y.astype(dtype), scale


def _checked_dtype(dtype: Any) -> str:
    try:
        found = jax.dtypes.canonicalize_dtype(jnp.dtype(dtype)).name
    except TypeError:
        found = None
    if found not in reference.SCALED:
        raise TypeError(f"absmax_scale: dtype must be one of {', '.join(reference.SCALED)}, or None, got {dtype!r}.")
    return found
