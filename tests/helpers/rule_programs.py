"""What programs of `fuse`'s rules are made of: operators, losses, labels, and arrays that are mostly square."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import support
from fusion_support import F32, x_of


class Program(NamedTuple):
    function: Callable
    args: tuple
    ops: str | None  # the operators that are called, as `explain` has them, if it says


def value(f, *args, ops=None):
    return Program(f, args, ops)


def gradient(f, *args, ops=None, by=0):
    """Of a weighted sum of f's results."""

    def weighted(*args):
        return sum(jnp.sum(y * weights(y.shape)) for y in jax.tree.leaves(f(*args)))

    return Program(jax.grad(weighted, by), args, ops)


def both(f, *args, ops=None):
    """The value, and the gradient, by one program."""
    of = gradient(f, *args).function
    return Program(lambda *args: (f(*args), of(*args)), args, ops)


def softmax(x, axis=-1, **options):
    return jax.nn.softmax(x, axis, **options)


def log_softmax(x, axis=-1, **options):
    return jax.nn.log_softmax(x, axis, **options)


def logsumexp(x, axis):
    return jax.nn.logsumexp(x, axis)


def weights(shape):
    return support.normal(shape, seed=9, scale=1)


def wide(x):
    return x.astype(jnp.promote_types(x.dtype, F32))


def array(*shape, **options):
    return x_of(shape=shape, **options)


N = 6
X, Y, Z = (array(N, N, seed=k) for k in range(3))  # square, so that an axis may be taken for another one
ROWS = array(N, 1, seed=4)
WIDE = array(4, 24, seed=5)
LABELS = np.array([3, 0, 5, 1, 1, 2], np.int32)
OUTSIDE = np.array([3, -1, 5, 7, -9, 2], np.int32)  # some are no index, or count from the end
MASK, MASK2 = support.random_mask((N, N), 3, 0.7), support.random_mask((N, N), 5, 0.7)
WITHOUT = np.where(np.arange(N) == LABELS[:, None], -np.inf, X).astype(np.float32)  # -inf at the label
SOME_WITHOUT = np.where((np.arange(N) == 4) & (np.arange(N)[:, None] > 2), -np.inf, X).astype(np.float32)


def one_hot(labels=LABELS, axis=-1):
    return jax.nn.one_hot(labels, N, axis=axis)


def chosen(on, off, axis=-1):
    """Of one-hot labels, as Flax makes them."""
    labels, shape = jnp.expand_dims(jnp.asarray(LABELS), axis), (N, 1) if axis == 0 else (1, N)
    at = labels == jnp.arange(N).reshape(shape)
    return jax.lax.select(at, jnp.broadcast_to(on, at.shape), jnp.broadcast_to(off, at.shape))


def loss(x, targets):
    return -jnp.sum(targets * log_softmax(x), -1)


def entropy(x, y=None, axis=-1, other=-1, over=-1):
    return -jnp.sum(softmax(x, axis) * log_softmax(x if y is None else y, other), over)


def divergence(p, log_p, log_q, over=-1):
    return jnp.sum(p * (log_p - log_q), over)


def at_labels(x, labels, axis=-1, **options):
    labels = jnp.expand_dims(jnp.asarray(labels), axis)
    return jnp.squeeze(jnp.take_along_axis(x, labels, axis, **options), axis)


def index(dim, dtype=jnp.int32):
    return jax.lax.broadcasted_iota(dtype, (N, N), dim)


def added(base, labels=LABELS, **options):
    """Numbers of rows, added to the base at labels."""

    def f(x, v):
        rows = jnp.broadcast_to(jnp.asarray(base, x.dtype), x.shape)
        return x * 2 + jax.vmap(lambda row, k, v: row.at[k].add(v, **options))(rows, labels, v)

    return f


def added_one_by_one(x, labels, v):
    """Numbers added to the base at pairs of indices: first at (0, 0), (1, 1), (2, 2), then at pairs of labels."""
    pairs = jax.lax.concatenate([jax.lax.broadcasted_iota(jnp.int32, (N // 2, 2), 0), labels.reshape(N // 2, 2)], 0)
    dims = jax.lax.ScatterDimensionNumbers((), (0, 1), (0, 1))
    return x * 2 + jax.lax.scatter_add(jnp.zeros_like(x), pairs, v, dims)
