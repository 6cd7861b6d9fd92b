"""What attention's output loses by rounding to 16 bits. It is kept for the backward pass, in 8 bits."""

import jax
import jax.numpy as jnp

from jax_softmax.fusion.program.expressions import rounded
from jax_softmax.primitives.types import Dtype


def lost_shift(dtype: str | Dtype) -> int:
    """How many of float32's bits are left out of what o lost by rounding to a dtype, which is kept in 8 bits."""
    return jnp.finfo(jnp.float32).nmant - jnp.finfo(dtype).nmant - 8


def rounded_and_lost(o: jax.Array, dtype: str | Dtype) -> tuple[jax.Array, ...]:
    """An array of float32, rounded to a dtype, and, unless that is float32, what it lost: the difference of both
    numbers' bits as float32, the upper 8 of those that rounding may change."""
    if dtype == jnp.float32:
        return (o,)
    wide, shift = rounded(o, jnp.dtype(dtype).name), lost_shift(dtype)
    bits = _bits_of(o) - _bits_of(wide) + (1 << shift >> 1)
    return wide.astype(dtype), jnp.clip(bits >> shift, -128, 127).astype(jnp.int8)


def unrounded(o: jax.Array, lost: jax.Array | None = None) -> jax.Array:
    """The array before `rounded_and_lost`, in float32; without `lost` the rounded one."""
    if lost is None:
        return o.astype(jnp.float32)
    bits = _bits_of(o.astype(jnp.float32)) + (lost.astype(jnp.int32) << lost_shift(o.dtype))
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def _bits_of(x: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(x, jnp.int32)
