"""Operands and gradients of programs of attention, and how exact their results must be."""

import collections
import functools

import attention_on_host
import emulated
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


def check(program, operands, kernels, in_jax=True):
    """The results of a program that calls these kernels. What they do is done in JAX, or on the host."""
    with emulated.kernels(attention=True), attention_on_host.kernels(in_jax=in_jax) as made:
        found = jax.jit(program)(*operands)
    assert collections.Counter(params["kernel"] for params, _ in made) == collections.Counter(kernels.split())
    return found


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
    is_finite = np.isfinite(other)
    np.testing.assert_array_equal(own[~is_finite], other[~is_finite])
    own, other, right = (a[is_finite] for a in (own, other, right))
    bound = 3 * np.abs(other - right).max(initial=0) + 0.02 * np.abs(right).max(initial=0)
    bound += 1e-4  # terms of float32 that cancel where a query sees one key, and that are 0 in the program
    np.testing.assert_allclose(own, right, rtol=0, atol=bound)


def check_together(programs):
    """Programs by name, with their operands and what they are when they are fused, are as exact as they have to be.

    They are one program to XLA, and what kernels do is done in JAX. Returns how often each kernel is called; equal
    calls count once."""
    operands = [operands for _, operands, _ in programs.values()]

    def all_of(*operands):
        return [fused(*own) for (_, _, fused), own in zip(programs.values(), operands, strict=True)]

    with emulated.kernels(attention=True), attention_on_host.kernels(in_jax=True) as made:
        results = jax.jit(all_of)(*operands)
    wrong = {}
    for (name, (program, own, _)), found in zip(programs.items(), results, strict=True):
        try:
            assert_as_exact(found, program, own)
        except AssertionError as error:
            wrong[name] = str(error)
    assert not wrong, "\n".join(f"{name}: {error}" for name, error in wrong.items())
    return collections.Counter(params["kernel"] for params, _ in made)
