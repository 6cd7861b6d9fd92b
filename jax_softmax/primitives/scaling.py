"""Scaling of rows by their absolute maxima: its derivative."""

import functools

import jax
import jax.numpy as jnp
from jax.interpreters import ad

from jax_softmax.primitives import reference
from jax_softmax.primitives.in_memory import in_memory
from jax_softmax.primitives.operators import bind, split
from jax_softmax.primitives.rows import row_sum


def absmax_scale_jvp(primals, tangents, *, axes, axis_name, dtype):
    (x,), where = split(primals)
    y, scale = bind("absmax_scale", x, where=where, axes=axes, axis_name=axis_name, dtype=dtype)
    t = ad.instantiate_zeros(tangents[0])
    y_dot, scale_dot = _scaled_tangents(x, scale, t, where, dtype, axes, axis_name)
    if jnp.issubdtype(y.dtype, jnp.integer):
        return [y, scale], [ad.Zero(jax.typeof(y).to_tangent_aval()), scale_dot]
    return [y, scale], [y_dot.astype(y.dtype), scale_dot]


# With checkpoint x and the scales are kept for a backward pass.
@functools.partial(jax.checkpoint, prevent_cse=False, static_argnums=(4, 5, 6))
def _scaled_tangents(x, scale, t, where, dtype, axes, axis_name):
    """The tangents of x / scale, unrounded, and of the scales: of a maximum the mean of those that are it."""
    if where is not None:
        x, t = jnp.where(where, x, 0), jnp.where(where, t, 0)
    x, t = reference.widened(in_memory(x)), reference.widened(t)
    largest = scale
    if dtype in reference.LARGEST:
        largest = jnp.max(jnp.abs(jax.lax.stop_gradient(x)), axes, keepdims=True, initial=0)
        largest = jax.lax.pmax(largest, axis_name) if axis_name else largest
        largest = jnp.where(jnp.isnan(scale), scale, largest)  # which a maximum may leave out
    # In operations that XLA for CPUs does within a sum (JAX 0.12): what it does not is first written to memory.
    count = row_sum(jnp.where(jnp.abs(x) == largest, 1, jnp.zeros_like(x)), axes, axis_name)
    share = jnp.where(jnp.isnan(scale), scale, jnp.where(scale == 0, 0, 1 / jnp.maximum(count, 1)))
    of_largest = jnp.where(x == largest, t, jnp.where(x == -largest, -t, 0))
    scale_dot = row_sum(of_largest, axes, axis_name) * share / reference.LARGEST.get(dtype, 1)
    inverse = 1 / jnp.where(scale == 0, jnp.inf, scale)
    y_dot = t * inverse + x * -inverse * (scale_dot * inverse)
    return y_dot if where is None else jnp.where(where, y_dot, 0), scale_dot
