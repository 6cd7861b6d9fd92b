"""What the tests of `fuse` share: a `Case`, which is run fused and not, and functions and arrays for it.

The CPU runs a fused function as it is. For values it runs what a GPU would, with the custom calls done by the host (see
emulated.py).
"""

import functools

import emulated
import jax
import jax.numpy as jnp
import numpy as np
import support

import jax_softmax
from jax_softmax import fuse

SHAPE = (4, 6, 16)
F32, BF16 = jnp.float32, jnp.bfloat16


def x_of(dtype="float32", shape=SHAPE, seed=0, scale=1.5):
    return support.normal(shape, "float32", seed, scale).astype(jnp.dtype(dtype))


def assert_same(found, expected, roundings):
    """Up to so many of float32, relative to the largest number, or one of 16 bits."""
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        if jnp.issubdtype(a.dtype, jnp.integer) or a.dtype == bool:
            np.testing.assert_array_equal(a, b)
            continue
        eps = max(float(jnp.finfo(a.dtype).eps), roundings * 2.0**-23)
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        largest = np.abs(b[np.isfinite(b)]).max(initial=0)
        np.testing.assert_allclose(a, b, rtol=eps, atol=roundings * 2.0**-23 * largest)


def compiled(lowered):
    """In haste, with each operation rounded to its dtype."""
    return lowered.compile(compiler_options={"xla_backend_optimization_level": 0, "xla_allow_excess_precision": False})


def unfused(f, *args):
    with jax_softmax.use():
        return compiled(jax.jit(lambda *args: f(*args)).lower(*args))(*args)


class Case:
    """A function whose fused results are its own."""

    def __init__(self, f, *args, calls=1, folded=True, roundings=16):
        """`folded`: nothing that could be in a kernel is outside."""
        self.f, self.args, self.calls, self.folded, self.roundings = f, args, calls, folded, roundings

    @functools.cached_property
    def lowered(self):
        """The fused program, and the custom calls in it."""
        with emulated.kernels() as made:
            return jax.jit(fuse(self.f)).lower(*self.args), made

    def check(self):
        lowered, made = self.lowered
        assert_same(compiled(lowered)(*self.args), unfused(self.f, *self.args), self.roundings)
        assert len(made) == self.calls, made
        if self.folded:
            for line in fuse(self.f).explain(*self.args):
                assert line.why_not == "" and line.outside == (), str(line)


def gradients_of(f, by=0):
    """The gradients of a weighted sum of f's results."""

    def weighted(*args):
        return sum(jnp.sum(y.astype(F32) * weights(y.shape)) for y in jax.tree.leaves(f(*args)))

    return jax.grad(weighted, by)


def weights(shape):
    return support.normal(shape, seed=9, scale=1)


MASK = support.random_mask(SHAPE, 3)
PAIR = x_of(seed=7)
X = x_of(shape=(4, 8))


def causal_attention(x, w):
    """Through float32."""
    s = (x @ w).astype(F32) * 0.125
    p = jax.nn.softmax(jnp.where(jnp.tril(jnp.ones(s.shape[-2:], bool)), s, -1e9))
    return p.astype(BF16) @ w


def loss_at_labels(x):
    log_p = jax.nn.log_softmax(x.astype(F32))
    return -jnp.take_along_axis(log_p, jnp.arange(x.shape[-2])[:, None] + jnp.zeros((*x.shape[:-1], 1), int), -1).mean()


def pairs(x):
    return jax.nn.softmax(x[..., 1:] * x[..., :-1] + 1) * jnp.tanh(x[..., 1:])
