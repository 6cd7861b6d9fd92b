"""Operands and gradients of programs of attention, and how exact their results must be."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import support
from by_numpy import by_numpy

B, S, H, D = 2, 64, 4, 16
WHOLE, AGAIN = "forward queries keys", "forward forward queries keys"


def normal(*shape, seed=0):
    return jnp.asarray(support.normal(shape, "float32", seed, 1.0), jnp.bfloat16)


def gradients(attend, *operands):
    """The output, and the gradients by all operands of a sum of it."""
    o, transposed = jax.vjp(attend, *operands)
    weights = jnp.cos(jnp.arange(o.size, dtype=jnp.float32)).reshape(o.shape)
    return o, *transposed(weights.astype(o.dtype))


def assert_as_exact(found, program, operands):
    """As the unfused program, measured by the same in float32, and by bfloat16's steps; it runs where these
    are not enough."""
    wide = [a.astype(jnp.float32) if a.dtype == jnp.bfloat16 else a for a in operands]
    exact, types = by_numpy(program, *wide), jax.eval_shape(program, *operands)
    unfused = functools.cache(lambda: jax.tree.leaves(jax.jit(program)(*operands)))
    for n, (own, right, type_) in enumerate(zip(*map(jax.tree.leaves, (found, exact, types)), strict=True)):
        assert (own.shape, own.dtype) == (type_.shape, type_.dtype)
        try:
            assert_no_further(own, right, right)
        except AssertionError:
            assert_no_further(own, unfused()[n], right)


def assert_no_further(own, other, right):
    own, other, right = (np.asarray(a, np.float64) for a in (own, other, right))
    np.testing.assert_array_equal(np.isnan(own), np.isnan(other))
    is_number = ~np.isnan(other)
    own, other, right = (a[is_number] for a in (own, other, right))
    bound = 3 * np.abs(other - right).max(initial=0) + 0.02 * np.abs(right).max(initial=0)
    bound += 0.01  # what p (do v - rowsum(o do)) is off by, o being rounded, where a query sees one key and it is 0
    np.testing.assert_allclose(own, right, rtol=0, atol=bound)
