"""What the zoo's programs are held to: under `fuse` they run as under `jax.jit`."""

import emulated
import jax
import jax.numpy as jnp
import numpy as np
from fusion_support import compiled

import jax_softmax
from jax_softmax import fuse

ROUNDINGS = 64  # of float32


class NotUnderJitError(Exception):
    """JAX itself does not run the program."""


def has_the_results_of_jit(f, *args):
    """On a GPU; on a CPU by its own program, and by a GPU's with the kernels done by the host."""
    expected = as_under_jit(lambda: results_and_near(f, *args))
    same(compiled(jax.jit(fuse(f)).lower(*args))(*args), *expected)
    same(run(fuse(f), *args), *expected)


def results_and_near(f, *args):
    """The results of f itself, and those of operands that differ by a few roundings: how much they may differ."""

    def nudged(a):
        if not jnp.issubdtype(a.dtype, jnp.floating):
            return a
        factors = 1 + 2.0**-21 * np.cos(np.arange(a.size)).reshape(a.shape)
        return (a * factors).astype(a.dtype)

    with jax_softmax.use():
        itself = compiled(jax.jit(lambda *args: f(*args)).lower(*args))
    return itself(*args), itself(*jax.tree.map(nudged, args))


def run(f, *args):
    """What a GPU computes; on a CPU its program, with the kernels done by the host."""
    if jax.default_backend() == "gpu":
        return compiled(jax.jit(f).lower(*args))(*args)
    with emulated.kernels():
        return compiled(jax.jit(f).lower(*args))(*args)


def is_lowered_for_cuda(fused, f, *args):
    try:
        _lower_for_cuda(fused, *args)
    except Exception:
        as_under_jit(lambda: _lower_for_cuda(f, *args))
        raise


def _lower_for_cuda(f, *args):
    jax.jit(f).trace(*args).lower(lowering_platforms=("cuda",))


def as_under_jit(run):
    """What `run()` returns, if JAX itself can do that."""
    try:
        return run()
    except Exception as error:
        raise NotUnderJitError from error


def same(found, expected, near):
    """The same tree of arrays, up to roundings."""
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for (path, a), b, c in zip(
        jax.tree.leaves_with_path(found), jax.tree.leaves(expected), jax.tree.leaves(near), strict=True
    ):
        assert (a.shape, a.dtype) == (b.shape, b.dtype), path
        if path and getattr(path[-1], "name", "") == "eigenvectors":
            a, c = (turned_as(of, b) for of in (a, c))
        same_numbers(a, b, c, path)


def turned_as(vectors, like):
    """Eigenvectors, which are so up to a factor of size 1, with the factors of others."""
    vectors, like = np.asarray(vectors), np.asarray(like)
    factors = np.sum(np.conj(vectors) * like, -2, keepdims=True)
    return vectors * (factors / np.abs(factors))


def same_numbers(a, b, near, name, least=0):
    """Up to roundings of numbers as large as the largest, or as `least`, and of the operands."""
    if not jnp.issubdtype(a.dtype, jnp.inexact):
        is_sure = np.asarray(b == near)
        np.testing.assert_array_equal(np.asarray(a)[is_sure], np.asarray(b)[is_sure], err_msg=str(name))
        return
    eps = max(float(jnp.finfo(a.dtype).eps), ROUNDINGS * 2.0**-23)
    wide = np.complex128 if jnp.iscomplexobj(a) else np.float64
    a, b, near = (np.asarray(of).astype(wide) for of in (a, b, near))
    finite = np.isfinite(b) & np.isfinite(near)
    atol = ROUNDINGS * 2.0**-23 * np.abs(b[finite]).max(initial=least)
    atol += 8 * np.abs(b - near)[finite].max(initial=0)
    np.testing.assert_allclose(a, b, rtol=eps, atol=atol, err_msg=str(name))


def without_keys(results):
    """Results as arrays of numbers: with the words of keys of random numbers."""

    def words(a):
        a = jnp.asarray(a)
        return jax.random.key_data(a) if jnp.issubdtype(a.dtype, jax.dtypes.prng_key) else a

    return jax.tree.map(words, results)


def weighted(results):
    """The sum of all numbers that have derivatives, each with a weight of its own."""
    total = jnp.zeros(())
    for a in jax.tree.leaves(results):
        if jnp.issubdtype(a.dtype, jnp.inexact):
            weights = np.cos(np.arange(a.size)).reshape(a.shape).astype(np.float32)
            parts = (a.real, a.imag) if jnp.iscomplexobj(a) else (a,)
            total += sum(jnp.sum(part.astype("float32") * weights) for part in parts)
    return total


def failures(check, members):
    """The errors of `check(members)`, by the members at fault: of a group that fails, its halves are checked."""
    try:
        check(members)
        return {}
    except Exception as error:
        fault = {} if isinstance(error, NotUnderJitError) else {", ".join(m.name for m in members): error}
    if len(members) == 1:
        return fault
    half = len(members) // 2
    return failures(check, members[:half]) | failures(check, members[half:]) or fault


def assert_all(check, members, at_once):
    found = {}
    for k in range(0, len(members), at_once):
        found |= failures(check, members[k : k + at_once])
    if found:
        first = next(iter(found.values()))
        lines = "\n".join(f"{name}: {type(e).__name__}: {str(e).strip()[:300]}" for name, e in found.items())
        raise AssertionError(f"{len(found)} under `fuse` not as under `jit`:\n{lines}") from first
