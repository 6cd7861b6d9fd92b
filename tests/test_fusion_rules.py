"""Every rule of `fuse` gives float64's numbers, and so do programs that look as if it held for them.

Programs run as on a GPU, with the custom calls done by the host (see emulated.py). Those of a table are one program to
XLA and to the host's compiler.
"""

from collections.abc import Callable
from typing import NamedTuple

import emulated
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import support
from by_numpy import by_numpy

import jax_softmax
from jax_softmax import fuse
from jax_softmax.fusion import rewriting
from jax_softmax.runtime import judge

pytestmark = pytest.mark.usefixtures("default_flags")

compiler_is_needed = pytest.mark.skipif(emulated.COMPILER is None, reason="no C++ compiler found")
F32, BF16 = jnp.float32, jnp.bfloat16


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


def array(*shape, seed=0, dtype="float32", scale=1.5):
    return support.normal(shape, "float32", seed, scale).astype(jnp.dtype(dtype))


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


# Softmaxes as people write them out.


def exponentials(x, axis=-1, stop=False, shift=None, **maximum):
    """What is relative to rows' maxima, and its exponentials and their sums."""
    largest = jnp.max(x if shift is None else shift, axis, keepdims=True, **maximum)
    largest = jax.lax.stop_gradient(largest) if stop else largest
    shifted = x - largest
    e = jnp.exp(shifted)
    return largest, shifted, e, jnp.sum(e, axis, keepdims=True)


def of_vectors(p, t):
    """softmax's linear map."""
    return p * (t - jnp.sum(p * t, -1, keepdims=True))


def written_softmax(x, axis=-1, **options):
    _, _, e, total = exponentials(x, axis, **options)
    return e / total


def written_log_softmax(x, axis=-1, **options):
    _, shifted, _, total = exponentials(x, axis, **options)
    return shifted - jnp.log(total)


def written_logsumexp(x, axis=-1, **options):
    largest, _, _, total = exponentials(x, axis, **options)
    return jnp.squeeze(jnp.log(total) + largest, axis)


def guarded_maximum(x, axis=-1, keepdims=True):
    m = jnp.max(x, axis, keepdims=keepdims, initial=-jnp.inf)
    return jax.lax.stop_gradient(jnp.where(jnp.isfinite(m), m, 0))


def guarded_logsumexp(x, axis=-1, keepdims=False):
    """As `jax.nn.logsumexp` is written: a module that imported it by name has it under `fuse`, too."""
    m = guarded_maximum(x, axis, keepdims)
    total = jnp.sum(jnp.exp(x - (m if keepdims else jnp.expand_dims(m, axis))), axis, keepdims=keepdims)
    return jnp.log(jnp.abs(total)) + m


def cases_of_its_own(x):
    """A softmax that is 0 in rows of nothing but -inf."""
    m = jnp.max(x, -1, keepdims=True)
    is_finite = jnp.isfinite(m)
    m = jnp.where(is_finite, m, 0)
    lse = jnp.where(is_finite, jnp.log(jnp.sum(jnp.exp(x - m), -1, keepdims=True)) + m, 0)
    return jnp.exp(x - lse)


def by_sum(x, case):
    """With a case of its own for some rows."""
    m = guarded_maximum(x)
    total = jnp.sum(jnp.exp(x - m), -1, keepdims=True)
    return jnp.where(case(total), x - (jnp.log(total) + m), 0)


# Of which rows are NaN, infinite, masked in part and altogether, and large.
SPECIAL = np.where(np.arange(N)[:, None] == 5, 3e4 * X, SOME_WITHOUT).astype(np.float32)
SPECIAL[0, 3], SPECIAL[1, 2], SPECIAL[2] = np.inf, np.nan, -np.inf


def divided_later(x, v, **options):
    _, _, e, total = exponentials(x, **options)
    return e @ v / total


def heads(q, k, v):
    """As MaxText has attention."""
    _, _, e, total = exponentials(jnp.einsum("btnd,bsnd->bnts", q, k))
    return jnp.einsum("bnts,bsnd->btnd", e, v) / jnp.swapaxes(total, 1, 2)


def by_vectors(x):
    e = jnp.exp(x - jnp.max(x, -1)[:, None])
    return e * (1 / jnp.sum(e, -1))[:, None]


@jax.custom_vjp
def loss_with_z(x, targets, z):
    """And its part, as T5X has them."""
    lse = jax.scipy.special.logsumexp(x, -1, keepdims=True)
    part = z * jnp.squeeze(lse, -1) ** 2
    return part - jnp.sum(targets * (x - lse), -1), part


def _loss_with_z_forward(x, targets, z):
    largest, shifted, e, total = exponentials(x)
    lse = jnp.squeeze(jnp.log(total) + largest, -1)
    part = z * jax.lax.square(lse)
    return (part - jnp.sum(targets * (shifted - jnp.log(total)), -1), part), (targets, z, e, total, lse)


def _loss_with_z_backward(kept, cotangents):
    targets, z, e, total, lse = kept
    return cotangents[0][..., None] * ((1 + 2 * z * lse)[..., None] * e / total - targets), None, None


loss_with_z.defvjp(_loss_with_z_forward, _loss_with_z_backward)


def z_loss(x, targets=None, z=0.3):
    return loss_with_z(wide(x), one_hot() if targets is None else targets, z)[0]


ENTROPY_GRADIENT = "log_softmax_vjp softmax_and_normalizer"
MADE_ANEW = "softmax_and_normalizer softmax_linear"
RULES = {
    "cotangents of softmax and log_softmax": {
        "entropy": gradient(entropy, X, ops=ENTROPY_GRADIENT),
        "entropy, with its value": both(entropy, X, ops="log_softmax_vjp logsumexp"),
        "entropy of columns": gradient(lambda x: entropy(x, None, 0, 0, 0), X, ops=ENTROPY_GRADIENT),
        "policy and entropy": gradient(lambda x: at_labels(log_softmax(x), LABELS) + 0.3 * entropy(x), X),
        "log_softmax first": gradient(lambda x: jnp.sum(log_softmax(x) * softmax(x), -1), X),
        "of two arrays": gradient(lambda x, y: entropy(x, y), X, Y, by=(0, 1)),
        "of a shifted array": gradient(lambda x: entropy(x, x + Y), X),
        "along two axes": gradient(lambda x: entropy(x, None, 0, 1), X),
        "along two other axes": gradient(lambda x: entropy(x, None, 1, 0, 0), X),
        "cotangents that are read": gradient(lambda x: jax.grad(lambda x: jnp.sum(jnp.tanh(entropy(x))))(x), X),
        "a sum of results": gradient(lambda x: softmax(x) * Y + log_softmax(x) * Z, X),
        "a difference of results": gradient(lambda x: log_softmax(x) * Z - softmax(x) * Y, X),
        "masked": gradient(lambda x: jnp.where(MASK, softmax(x, where=MASK) * log_softmax(x), 0), X),
    },
    "written out": {
        "softmax": value(written_softmax, X, ops="softmax"),
        "its gradient": both(written_softmax, X, ops="softmax softmax_linear"),
        "its gradient, the maximum is a constant": both(
            lambda x: written_softmax(x, stop=True), X, ops="softmax softmax_linear"
        ),
        "by vectors": both(by_vectors, X, ops="softmax softmax_linear"),
        "of columns": both(lambda x: written_softmax(x, 0), X, ops="softmax softmax_linear"),
        "as jax.nn has it": both(lambda x: written_softmax(x, initial=-jnp.inf), X, ops="softmax softmax_linear"),
        "along two axes": both(lambda x: written_softmax(written_softmax(x, 0) * 5, 1), X),
        "of the same array, along two axes": both(lambda x: written_softmax(x, 0) * written_softmax(x, 1), X),
        "in the middle": both(lambda x: written_softmax(x, 1), array(3, 6, 4), ops="softmax softmax_linear"),
        "twice": both(lambda x: written_softmax(3 * written_softmax(x)), X),
        "squared": both(lambda x: written_softmax(x) ** 2, X, ops=MADE_ANEW),
        "and its exponentials' logarithms": both(lambda x: written_softmax(x) * written_log_softmax(x), X),
        "with the library's": both(lambda x: written_softmax(x) * softmax(x) + log_softmax(x), X),
        "scaled, masked": both(lambda x: written_softmax(jnp.where(MASK, x * 3, -1e30)), X),
        "computed in float32": both(lambda x: written_softmax(wide(x)).astype(BF16), array(N, N, dtype=BF16)),
        "maximum before the cast": both(lambda x: written_softmax(wide(x), shift=x), array(N, N, dtype=BF16)),
        "with -inf": both(written_softmax, SOME_WITHOUT),
        "tangents": value(lambda x, t: jax.jvp(written_softmax, (x,), (t,)), X, Y),
        "second derivatives": gradient(lambda x: jax.grad(lambda x: jnp.sum(jnp.sin(written_softmax(x)) * Y))(x), X),
        "mapped": both(jax.vmap(lambda x: written_softmax(x)), X),
        "a gradient alone": gradient(written_softmax, X),
        "log_softmax": both(written_log_softmax, X, ops="log_softmax log_softmax_vjp"),
        "log_softmax, the maximum is a constant": both(
            lambda x: written_log_softmax(x, stop=True), X, ops="log_softmax log_softmax_vjp"
        ),
        "log_softmax of columns": both(lambda x: written_log_softmax(x, 0), X, ops="log_softmax log_softmax_vjp"),
        "exp of log_softmax": both(lambda x: jnp.exp(written_log_softmax(x)) * Y, X),
        "entropy": both(lambda x: -jnp.sum(jnp.exp(written_log_softmax(x)) * written_log_softmax(x), -1), X),
        "logsumexp": value(written_logsumexp, X, ops="logsumexp"),
        "logsumexp, with -inf": value(written_logsumexp, SOME_WITHOUT, ops="logsumexp"),
        "logsumexp and its gradient": both(written_logsumexp, X, ops="logsumexp"),
        "logsumexp of columns": both(lambda x: written_logsumexp(x, 0, stop=True), X, ops="logsumexp"),
        "less logsumexp": both(
            lambda x: x - jax.nn.logsumexp(x, -1, keepdims=True), X, ops="log_softmax log_softmax_vjp"
        ),
        "less logsumexp written out": both(lambda x: x - written_logsumexp(x, 0), X, ops="log_softmax log_softmax_vjp"),
        "less logsumexp, squared": both(
            lambda x: (x - jax.nn.logsumexp(x, -1, keepdims=True)) * Y + jax.nn.logsumexp(x, 0) ** 2, X
        ),
        "the derivative of what is fused": value(
            lambda x: jax.grad(lambda x: jnp.sum(fuse(written_logsumexp)(x * 2 + Y) * Z[0]))(x), X
        ),
        "the maximum as well": both(lambda x: written_softmax(x) * jnp.max(x, -1, keepdims=True), X),
        "the sum as well": both(lambda x: written_softmax(x) + jnp.log(exponentials(x)[3]), X),
    },
    "logsumexp written out with a maximum that is finite": {
        "and its gradient": both(guarded_logsumexp, X, ops="logsumexp"),
        "of special rows": both(guarded_logsumexp, SPECIAL, ops="logsumexp"),
        "of columns": both(lambda x: guarded_logsumexp(x, 0), SPECIAL, ops="logsumexp"),
        "of bfloat16": both(lambda x: guarded_logsumexp(x * 2), SPECIAL.astype(BF16), ops="logsumexp"),
        "scaled": both(lambda x: guarded_logsumexp(x * 3 + Y), X, ops="logsumexp"),
        "subtracted": both(lambda x: x - guarded_logsumexp(x, keepdims=True), X, ops="log_softmax log_softmax_vjp"),
        "a loss": both(lambda x: guarded_logsumexp(x) - at_labels(x, LABELS), X, ops="cross_entropy_gradient"),
        "second derivatives": gradient(lambda x: jax.grad(lambda x: jnp.sum(guarded_logsumexp(x) ** 2))(x), X),
        "tangents": value(lambda x, t: jax.jvp(guarded_logsumexp, (x,), (t,)), X, Y),
        "and softmax": both(lambda x: guarded_logsumexp(x)[:, None] * softmax(x), X),
        "and the maximum": both(lambda x: guarded_logsumexp(x) * jnp.max(x, -1), X),
        "the maximum of something else": both(
            lambda x: jnp.log(jnp.sum(jnp.exp(x - guarded_maximum(Y)), -1)) + guarded_maximum(x)[:, 0], X
        ),
        "cases of its own": both(cases_of_its_own, SPECIAL, ops=""),
        "another case in the sum": value(
            lambda x: (lambda m, s: jnp.log(s) + m)(
                m := guarded_maximum(x),
                jnp.sum(jnp.where(jnp.isfinite(jnp.max(x, -1, keepdims=True)), jnp.exp(x - m), 0), -1, keepdims=True),
            ),
            SPECIAL,
        ),
        "a case by the sum": both(lambda x: by_sum(x, lambda s: s >= 0), SPECIAL, ops=""),
        "a case of NaN": both(lambda x: by_sum(x, lambda s: s == s), SPECIAL, ops=""),
        **{
            f"a guard of {name}": value(
                lambda x, of=of: (lambda m: jnp.log(jnp.sum(jnp.exp(x - m), -1, keepdims=True)) + m)(
                    (lambda m: jnp.where(jnp.isfinite(m), m, of(x)))(jnp.max(x, -1, keepdims=True))
                ),
                SPECIAL,
                ops="",
            )
            for name, of in {
                "NaN": lambda x: jnp.nan,
                "-inf": lambda x: -jnp.inf,
                "x": lambda x: x[:, :1],
                "x, reshaped": lambda x: x[0].reshape(N, 1),
            }.items()
        },
        "compared with the maximum": value(
            lambda x: (lambda y: jnp.sum(y == guarded_maximum(y), -1) + guarded_logsumexp(y))(jnp.exp(x) * 1.7), X
        ),
        "exponentials as well": both(
            lambda x: jnp.exp(x - guarded_maximum(x)) * guarded_logsumexp(x, keepdims=True), X
        ),
        "the maximum that was guarded": value(
            lambda x: (lambda m: (m, jnp.log(jnp.sum(jnp.exp(x - m), -1))))(guarded_maximum(x)), SPECIAL
        ),
    },
    "divided after a product": {
        "of rows": both(divided_later, X, Y, ops="softmax softmax_linear"),
        "both gradients": gradient(divided_later, X, Y, by=(0, 1), ops="softmax softmax_linear"),
        "times the inverse": gradient(
            lambda x, v: exponentials(x)[2] @ v * (1 / exponentials(x)[3]),
            X,
            Y,
            by=(0, 1),
            ops="softmax softmax_linear",
        ),
        "the maximum is a constant": gradient(
            lambda x, v: divided_later(x, v, stop=True), X, Y, by=(0, 1), ops="softmax softmax_linear"
        ),
        "of two products": both(lambda x: (divided_later(x, Y), divided_later(x, Z)), X),
        "of a product twice": both(lambda x: divided_later(divided_later(x, Y), Z), X),
        "and softmax": both(lambda x: divided_later(x, Y) + written_softmax(x), X),
        "squared": both(lambda x, v: divided_later(x, v) ** 2, X, Y, ops="softmax softmax_linear"),
        "of heads": gradient(heads, *(array(2, 5, 3, 4, seed=k) for k in range(3)), by=(0, 1, 2)),
        "of heads, as many features": gradient(heads, *(array(2, 5, 3, 5, seed=k) for k in range(3)), by=(0, 1, 2)),
        "tangents": value(lambda x, t: jax.jvp(lambda x: divided_later(x, Y), (x,), (t,)), X, Z),
        "second derivatives": gradient(lambda x: jax.grad(lambda x: jnp.sum(jnp.sin(divided_later(x, Y))))(x), X),
    },
    "written out, beside what is transposed": {
        "labels": value(lambda x: written_softmax(x) - one_hot().T, X),
        "loss of labels": both(lambda x: -jnp.sum(one_hot() * written_log_softmax(x).T, -1), X),
        "labels of three dimensions": value(
            lambda x: jnp.transpose(written_softmax(x, 2), (1, 0, 2)) - jax.nn.one_hot(LABELS[:4].reshape(2, 2), 5),
            array(2, 2, 5),
        ),
        "a map's other sum": value(lambda x: (lambda g: g + g.sum(0)[:, None])(of_vectors(written_softmax(x), Y)), X),
        "a map's sum, transposed": value(
            lambda x: (lambda g: g + g.T.sum(-1, keepdims=True))(of_vectors(written_softmax(x), Y)), X
        ),
        "probabilities": value(lambda x: of_vectors(written_softmax(x).T, Y), X),
        "probabilities, once": value(
            lambda x: (lambda p: p * Y - p.T * jnp.sum(p * Y, -1, keepdims=True))(written_softmax(x)), X
        ),
        "probabilities of labels": value(lambda x: written_softmax(x).T - one_hot(), X),
        "a sum by rows": gradient(lambda x: x + written_softmax(x), X),
        "a row of zeros": both(lambda x: jnp.where(jnp.arange(N)[:, None] == 2, 0, written_softmax(x)), X),
        "numbers of rows": both(lambda x: written_softmax(x) * jnp.arange(float(N))[:, None], X),
        "rounded to 8 bits": value(
            lambda x: x - jax.nn.logsumexp(x, -1, keepdims=True).astype(jnp.float8_e4m3fn).astype(jnp.float32), X
        ),
        "rounded to 16 bits": value(
            lambda x: x - jax.nn.logsumexp(x, -1, keepdims=True).astype(jnp.bfloat16).astype(jnp.float32), X
        ),
    },
    "losses written out": {
        "at labels": both(lambda x: at_labels(written_log_softmax(x), LABELS), X, ops="cross_entropy_gradient"),
        "of one-hot labels": both(lambda x: -jnp.sum(one_hot() * written_log_softmax(x), -1), X),
        "less logsumexp": both(
            lambda x: -jnp.sum(one_hot() * (x - jax.nn.logsumexp(x, -1, keepdims=True)), -1),
            X,
            ops="cross_entropy_gradient",
        ),
        "logsumexp less the label's": both(lambda x: written_logsumexp(x) - at_labels(x, LABELS), X),
        "by logarithms of softmax": both(lambda x: -jnp.log(at_labels(written_softmax(x), LABELS)), X),
        "with z": value(z_loss, X, ops="logsumexp"),
        "with z, and its gradient": both(z_loss, X, ops="cross_entropy_gradient"),
        "with z of 0": both(lambda x: z_loss(x, z=0.0), X, ops="cross_entropy_gradient"),
        "with z of bfloat16": both(z_loss, array(N, N, dtype=BF16), ops="cross_entropy_gradient"),
        "with z, weighted": both(lambda x: z_loss(x * 2) * ROWS[:, 0], X, ops="cross_entropy_gradient"),
        "with z, smoothed": both(
            lambda x: z_loss(x, 0.9 * one_hot() + 0.1 / N), X, ops="cross_entropy_gradient_and_distances"
        ),
        "with z, labels outside": both(lambda x: z_loss(x, one_hot(OUTSIDE)), X, ops="cross_entropy_gradient"),
        "with z, of probabilities": both(lambda x: z_loss(x, softmax(Y)), X),
        "with z by logarithms": both(
            lambda x: 0.1 * written_logsumexp(x) ** 2 - at_labels(written_log_softmax(x), LABELS), X
        ),
        "with z by logsumexp": both(
            lambda x: (lambda lse: 0.1 * lse[:, 0] ** 2 - at_labels(x - lse, LABELS))(
                jax.nn.logsumexp(x, -1, keepdims=True)
            ),
            X,
        ),
        "with z, of three dimensions": both(
            lambda x: z_loss(x, jax.nn.one_hot(LABELS.reshape(2, 3), 8)), array(2, 3, 8), ops="cross_entropy_gradient"
        ),
        "of probabilities": both(lambda x: -jnp.sum(softmax(Y) * written_log_softmax(x), -1), X),
        "their gradients": value(lambda x: (written_softmax(x) - one_hot()) * ROWS, X, ops="cross_entropy_gradient"),
        "softmax's linear map": value(
            lambda x: (lambda p: p * (Y - jnp.sum(p * Y, -1, keepdims=True)))(written_softmax(x)),
            X,
            ops="logsumexp softmax_linear",
        ),
        "softmax less something": value(lambda x: (written_softmax(x) - Y) * ROWS, X, ops="softmax"),
    },
    "divergences": {
        "of softmax": value(lambda x, y: divergence(softmax(x), log_softmax(x), log_softmax(y)), X, Y),
        "its gradient": gradient(lambda x, y: divergence(softmax(x), log_softmax(x), log_softmax(y)), X, Y, by=(0, 1)),
        "of exp": value(lambda x, y: divergence(jnp.exp(log_softmax(x)), log_softmax(x), log_softmax(y)), X, Y),
        "product turned": value(lambda x, y: jnp.sum((log_softmax(x) - log_softmax(y)) * softmax(x), -1), X, Y),
        "difference turned": value(lambda x, y: divergence(softmax(x), log_softmax(y), log_softmax(x)), X, Y),
        "of columns": value(lambda x, y: divergence(softmax(x, 0), log_softmax(x, 0), log_softmax(y, 0), 0), X, Y),
        "by another softmax": value(lambda x, y, z: divergence(softmax(z), log_softmax(x), log_softmax(y)), X, Y, Z),
        "by another exp": value(
            lambda x, y, z: divergence(jnp.exp(log_softmax(z)), log_softmax(x), log_softmax(y)), X, Y, Z
        ),
        "by q": value(lambda x, y: divergence(softmax(y), log_softmax(x), log_softmax(y)), X, Y),
        "by exp of q": value(lambda x, y: divergence(jnp.exp(log_softmax(y)), log_softmax(x), log_softmax(y)), X, Y),
        "by p along another axis": value(lambda x, y: divergence(softmax(x, 0), log_softmax(x), log_softmax(y)), X, Y),
        "with q along another axis": value(
            lambda x, y: divergence(softmax(x), log_softmax(x), log_softmax(y, 0)), X, Y
        ),
        "summed over another axis": value(lambda x, y: divergence(softmax(x), log_softmax(x), log_softmax(y), 0), X, Y),
        "a sum of logarithms": value(lambda x, y: jnp.sum(softmax(x) * (log_softmax(x) + log_softmax(y)), -1), X, Y),
        "of a masked q": value(
            lambda x, y: divergence(softmax(x), log_softmax(x), log_softmax(y, where=MASK2 | (y > 0))), X, np.abs(Y)
        ),
    },
    "made anew, two results": {
        "logarithms in two sums": value(lambda x: (jnp.sum(log_softmax(x) * Y, -1), jnp.sum(log_softmax(x) ** 2)), X),
        "probabilities in two sums": value(lambda x: (jnp.sum(softmax(x) * Y, -1), jnp.sum(softmax(x) ** 2)), X),
        "probabilities of bfloat16": both(
            lambda x, y: jnp.sum(softmax(wide(x)) * Y, -1) + jnp.sum(softmax(wide(x)) * y), array(N, N, dtype=BF16), X
        ),
        "with -inf": both(
            lambda x: jnp.sum(jnp.where(x == -jnp.inf, 0, log_softmax(x)) * Y, -1) + (softmax(x) * Z).max(-1),
            SOME_WITHOUT,
        ),
        "kept for the derivative": gradient(
            lambda x, w: softmax(wide(x) * 3 - 1) @ w, array(N, N, dtype=BF16), Y, by=(0, 1)
        ),
        "columns, kept for the derivative": gradient(
            lambda x, w: softmax(wide(x) * 3 - 1, 0) @ w, array(N, N, dtype=BF16), Y, by=(0, 1)
        ),
        "kept for a product, the cotangent of another one": value(
            lambda x, y, w: (lambda p: (p @ w, jax.grad(lambda y: jnp.sum(softmax(y) * p))(y)))(softmax(wide(x) * 2)),
            array(N, N, dtype=BF16),
            Y,
            Z,
        ),
        "both": value(lambda x: (softmax(x * 2), log_softmax(x * 2)), X, ops="log_softmax"),
        "both along two axes": value(lambda x: (softmax(x, 0), log_softmax(x, 1)), X, ops="log_softmax softmax"),
        "both, twice": value(lambda x: (softmax(x, 0), log_softmax(x, 1), softmax(x, 1), log_softmax(x, 0)), X),
        "both of two arrays": value(lambda x: (softmax(x), log_softmax(2 * x)), X),
        "both with a mask": value(lambda x: (softmax(x, where=MASK), log_softmax(x), softmax(x)), X),
        "both with another mask": value(lambda x: (softmax(x), log_softmax(x, where=MASK)), X),
        "second derivatives": gradient(lambda x: jax.grad(lambda x: jnp.sum(jnp.sin(softmax(x)) * Y))(x), X),
        "second derivatives of logarithms": gradient(
            lambda x: jax.grad(lambda x: jnp.sum(jnp.sin(log_softmax(x)) * Y))(x), X
        ),
        "tangents": value(lambda x, t: jax.jvp(lambda x: (softmax(x) * Y, log_softmax(x) * Z), (x,), (t,)), X, Y),
    },
    "one-hot targets": {
        "loss": both(lambda x: loss(x, one_hot()), X, ops="cross_entropy_gradient"),
        "loss alone": value(lambda x: loss(x, one_hot()), X, ops="logsumexp"),
        "of columns": both(lambda x: -jnp.sum(one_hot(axis=0) * log_softmax(x, 0), 0), X, ops="cross_entropy_gradient"),
        "probabilities": both(lambda x: jnp.sum(one_hot() * softmax(x), -1), X),
        "along two axes": both(lambda x: jnp.sum(one_hot(axis=0) * log_softmax(x, (0, 1)), 0), X),
        "along two axes, of rows": both(lambda x: jnp.sum(one_hot() * log_softmax(x, (0, 1)), 1), X),
        "negated": both(lambda x: jnp.sum(-one_hot() * log_softmax(x), -1), X, ops="cross_entropy_gradient"),
        "negated, scaled": gradient(lambda x: -jnp.sum((-one_hot() * -3) * log_softmax(x), -1), X),
        "scaled, shifted, scaled": both(lambda x: loss(x, (one_hot() * 3 + 0.5) * ROWS), X),
        "shifted twice": both(lambda x: loss(x, one_hot() * ROWS + 0.25 + ROWS), X),
        "shifted negated": both(lambda x: loss(x, 0.3 - one_hot()), X),
        "smoothed": both(lambda x: loss(x, 0.9 * one_hot() + 0.1 / N), X, ops="cross_entropy_gradient_and_distances"),
        "smoothed, of columns": both(lambda x: -jnp.sum((0.9 * one_hot(axis=0) + 0.02) * log_softmax(x, 0), 0), X),
        "smoothed, summed over another axis": both(
            lambda x: jnp.sum((0.9 * one_hot(axis=0) + 0.02) * log_softmax(x), 0), X
        ),
        "smoothed probabilities": both(lambda x: jnp.sum((0.9 * one_hot() + 0.1) * softmax(x), -1), X),
        "chosen": both(lambda x: loss(x, chosen(1.0, 0.0)), X, ops="cross_entropy_gradient"),
        "chosen, smoothed": both(lambda x: loss(x, chosen(0.9, 0.02)), X, ops="cross_entropy_gradient_and_distances"),
        "chosen, of columns": both(
            lambda x: -jnp.sum(chosen(0.9, 0.0, 0) * log_softmax(x, 0), 0), X, ops="cross_entropy_gradient"
        ),
        "chosen of another dimension": both(lambda x: loss(x, chosen(0.9, 0.02, 0)), X),
        "chosen of numbers of rows": both(
            lambda x: loss(x, chosen(ROWS, 0.1 * X[:, :1])), Y, ops="cross_entropy_gradient_and_distances"
        ),
        "chosen of numbers of columns": both(lambda x: loss(x, chosen(ROWS, 0.1 * X[:1])), Y),
        "chosen of two arrays": both(lambda x: loss(x, chosen(X, Z)), Y),
        "chosen the other way round": both(lambda x: loss(x, chosen(0.0, 1.0)), X),
        "after a bias": gradient(
            lambda w, b, x: loss(x @ w + b, chosen(0.9, 0.02)),
            X,
            Y[0],
            Z,
            by=(0, 1),
            ops="cross_entropy_gradient",
        ),
        "smoothed, a result": value(
            lambda x: (lambda y: (y, jnp.sum((0.9 * one_hot() + 0.1) * y, -1)))(log_softmax(x)), X
        ),
        "smoothed and not at all": value(lambda x: loss(x, (1 - 0.0) * one_hot() + 0.0), X),
        "labels outside": both(lambda x: loss(x, one_hot(OUTSIDE)), X),
        "labels outside, smoothed": both(lambda x: loss(x, 0.9 * one_hot(OUTSIDE) + 0.1), X),
        "-inf at the label": value(lambda x: loss(x, one_hot() * 2), np.where(WITHOUT > -9, WITHOUT, -1e30)),
        "infinite at the label": value(lambda x: at_labels(log_softmax(x), LABELS), WITHOUT),
        "uniform targets, -inf at the label": value(lambda x: loss(x, one_hot() * 0.0 + 0.5), WITHOUT),
        "summed over another axis": both(lambda x: jnp.sum(one_hot() * log_softmax(x), 0), X),
        "summed over all": both(lambda x: jnp.sum(one_hot() * log_softmax(x)), X),
        "kept dimensions": both(lambda x: jnp.sum(one_hot() * log_softmax(x), -1, keepdims=True) * x, X),
        "squared": both(lambda x: jnp.sum(one_hot() * log_softmax(x) ** 2, -1), X),
        "with a mask": both(lambda x: jnp.sum(one_hot() * jnp.where(MASK, log_softmax(x, where=MASK), 0), -1), X),
    },
    "comparisons with an index": {
        "of the row": both(lambda x: jnp.sum((index(1) == LABELS[:, None]) * log_softmax(x), -1), X),
        "turned": both(lambda x: jnp.sum((LABELS[:, None] == index(1)) * log_softmax(x), -1), X),
        "of columns": both(lambda x: jnp.sum((index(0) == LABELS[:, None]) * log_softmax(x), -1), X),
        "of another dimension": both(lambda x: jnp.sum((index(0) == LABELS) * log_softmax(x), -1), X),
        "labels of columns": both(lambda x: jnp.sum((index(1) == LABELS) * log_softmax(x), -1), X),
        "of both": both(lambda x: jnp.sum((index(1) == index(0)) * log_softmax(x), -1), X),
        "not equal": both(lambda x: jnp.sum((index(1) != LABELS[:, None]) * log_softmax(x), -1), X),
        "at most": both(lambda x: jnp.sum((index(1) <= LABELS[:, None]) * log_softmax(x), -1), X),
        "reshaped": both(
            lambda x: jnp.sum((jnp.arange(N).reshape(1, 2, 3).reshape(1, N) == LABELS[:, None]) * x, -1), X
        ),
        "by halves": both(
            lambda x: jnp.sum(
                (jnp.arange(2).reshape(1, 2, 1) == LABELS[:, None, None]) * log_softmax(x).reshape(N, 2, 3)
            ),
            X,
        ),
        "turned about": both(lambda x: jnp.sum((index(1).T == LABELS[:, None]) * log_softmax(x), -1), X),
        "reversed": both(lambda x: jnp.sum((N - 1 - index(1) == LABELS[:, None]) * log_softmax(x), -1), X),
        "of one number": both(lambda x: jnp.sum((index(1) == 2) * log_softmax(x), -1), X),
        "of float": both(lambda x: jnp.sum((index(1, F32) == 2.0) * log_softmax(x), -1), X),
        "broadcast of a vector": both(lambda x: jnp.sum((jnp.arange(N)[None] == LABELS[:, None]) * softmax(x), -1), X),
        "broadcast along rows": both(lambda x: jnp.sum((jnp.arange(N)[:, None] == LABELS) * softmax(x), -1), X),
        "times numbers of columns": both(lambda x: jnp.sum(one_hot() * X[0] * log_softmax(x), -1), Y),
        "plus numbers of columns": both(lambda x: jnp.sum((one_hot() + X[0]) * log_softmax(x), -1), Y),
        "times numbers of rows": both(lambda x: jnp.sum(one_hot() * X[0][:, None] * log_softmax(x), -1), Y),
        "times an array": both(lambda x: jnp.sum(one_hot() * Z * log_softmax(x), -1), Y),
        "two of them": both(lambda x: jnp.sum((one_hot() + one_hot(OUTSIDE)) * log_softmax(x), -1), X),
    },
    "labels that are gathered and scattered": {
        "gathered": both(lambda x: at_labels(log_softmax(x), LABELS), X, ops="cross_entropy_gradient"),
        "columns": both(lambda x: at_labels(log_softmax(x, 0), LABELS, 0), X),
        "along another axis": both(lambda x: at_labels(log_softmax(x, 0), LABELS, 1), X),
        "outside": gradient(lambda x: jnp.nan_to_num(at_labels(log_softmax(x), OUTSIDE)), X),
        "outside, clipped": both(lambda x: at_labels(log_softmax(x), OUTSIDE, mode="clip"), X),
        "probabilities outside, clipped": both(lambda x: at_labels(softmax(x), OUTSIDE, mode="clip"), X),
        "probabilities": both(lambda x: at_labels(softmax(x), LABELS), X),
        "scaled": both(lambda x: at_labels(log_softmax(x * 2) * 3 + 1, LABELS) * ROWS[:, 0], X),
        "and smoothed": both(lambda x: 0.9 * at_labels(log_softmax(x), LABELS) + 0.1 * jnp.mean(log_softmax(x), -1), X),
        "and all added up": both(lambda x: at_labels(log_softmax(x), LABELS) * jnp.sum(log_softmax(x), -1), X),
        "two labels": both(lambda x: at_labels(log_softmax(x), LABELS) - at_labels(log_softmax(x), LABELS[::-1]), X),
        "columns of one row": both(lambda x: log_softmax(x)[2], X),
        "added to zeros": value(lambda x, v: softmax(added(0)(x, v)), X, ROWS[:, 0]),
        "added to zeros, outside": value(lambda x, v: softmax(added(0, OUTSIDE)(x, v)), X, ROWS[:, 0]),
        "added to zeros, clipped": value(lambda x, v: softmax(added(0, OUTSIDE, mode="clip")(x, v)), X, ROWS[:, 0]),
        "added to ones": value(lambda x, v: softmax(added(1)(x, v)), X, ROWS[:, 0]),
        "added to an array": value(lambda x, v: softmax(added(Y)(x, v)), X, ROWS[:, 0]),
        "multiplied": value(
            lambda x: softmax(jax.vmap(lambda row, k: row.at[k].multiply(3.0))(jnp.zeros_like(x) + 1, LABELS) * x), X
        ),
    },
    "numbers of rows that are shared": {
        "softmax, logsumexp": value(lambda x: (softmax(x), logsumexp(x, -1)), X, ops="softmax_and_normalizer"),
        "of two results": value(lambda x: (softmax(x), softmax(x).astype(BF16), logsumexp(x, -1)), X),
        "of two masks": value(
            lambda x: (softmax(x, where=MASK), jax_softmax.logsumexp(x, where=MASK2), logsumexp(x, -1)), X
        ),
        "of one mask": value(lambda x: (softmax(x, where=MASK), jax_softmax.logsumexp(x, where=MASK)), X),
        "along two axes": value(lambda x: (softmax(x, 0), logsumexp(x, 1)), X, ops="logsumexp softmax"),
        "of two arrays": value(lambda x: (softmax(x), logsumexp(x * 2, 1)), X),
        "along all axes": value(lambda x: (softmax(x, (0, 1)), logsumexp(x, -1)), X),
        "loss and logsumexp": both(lambda x: -at_labels(log_softmax(x), LABELS) + 0.1 * logsumexp(x, -1) ** 2, X),
        "a loss's gradient, another loss": value(
            lambda x: (jax.grad(lambda x: loss(x, one_hot()).mean())(x), loss(x, one_hot(LABELS[::-1]))), X
        ),
        "a loss that its gradient needs": value(
            lambda x: (lambda w: (w, jax.grad(lambda x: jnp.sum(loss(x, one_hot()) * w))(x)))(loss(x, one_hot())), X
        ),
        "a divergence, logsumexp": value(
            lambda x, y: (divergence(softmax(x), log_softmax(x), log_softmax(y)), logsumexp(x, -1), logsumexp(y, -1)),
            X,
            Y,
        ),
        "losses of the package": both(
            lambda x: jax_softmax.softmax_cross_entropy_with_integer_labels(x, jnp.asarray(LABELS)) * logsumexp(x, -1),
            X,
        ),
        "two losses of the package": value(
            lambda x: [
                jax_softmax.softmax_cross_entropy_with_integer_labels(x, jnp.asarray(k), where=m)
                for k in (LABELS, LABELS[::-1])
                for m in (None, MASK | (np.arange(N) == LABELS[:, None]) | (np.arange(N) == LABELS[::-1, None]))
            ],
            X,
        ),
        "a loss's derivative alone": gradient(fuse(lambda x: loss(x, one_hot()) * 2), X),
        "a smoothed loss's derivative alone": gradient(fuse(lambda x: loss(x, one_hot() * 0.8 + 0.2 * ROWS)), X),
    },
    "kept for a derivative": {
        "elementwise functions": gradient(fuse(lambda x: jnp.sin(jnp.tanh(x * Y) * 2) * jnp.exp(-x)), X),
        "attention": gradient(
            fuse(lambda x, w: jnp.tanh(softmax(jnp.tanh(wide(x)) * 2) @ w)), array(N, N, dtype=BF16), Y, by=(0, 1)
        ),
        "a result that is read": gradient(fuse(lambda x: (lambda p: (p, p * p * Y))(softmax(wide(x) * 2))), X),
        "logarithms": gradient(fuse(lambda x: jnp.sin(log_softmax(x * 3)) * Y), X),
        "columns": gradient(fuse(lambda x, w: (softmax(x * 2, 0) * w) @ Y), X, Z, by=(0, 1)),
        "masks": gradient(fuse(lambda x: softmax(jnp.where(MASK, x, -1e30) * 2, where=MASK2 | MASK) ** 2), X),
        "one after another": gradient(fuse(lambda x: softmax(log_softmax(x * 2) * softmax(x, 0)) * Y), X),
        "with -inf": gradient(fuse(lambda x: softmax(jnp.where(MASK, x, -jnp.inf)) @ Y), np.where(MASK, X, 0)),
        "entropy": gradient(fuse(entropy), X),
        "second derivatives": gradient(lambda x: jax.grad(lambda x: jnp.sum(fuse(entropy)(x) ** 2))(x), X),
        "of integers": gradient(fuse(lambda x, k: at_labels(log_softmax(x * 2), k)), X, LABELS),
    },
    "made twice": {
        "a maximum's gradient": gradient(lambda x: (softmax(x) * Z).max(-1), X),
        "the largest of a capped array": value(
            lambda x: (lambda y: softmax(jnp.where(y >= jax.lax.top_k(y, 3)[0][:, 2:], y, -1e9)))(jnp.tanh(x) * 5), X
        ),
        "all but the largest": value(
            lambda x: (lambda y: softmax(jnp.where(y.max(-1, keepdims=True) == y, -1e9, y)))(jnp.sin(x) * 5), X
        ),
        "rows add up to 1": value(lambda x: jnp.sum(jnp.exp(log_softmax(jnp.tanh(x / 3) * 30)), -1), X),
        "sums of what is written": value(lambda x: (lambda y: (y, softmax(y), y.sum(-1)))(jnp.tanh(x) * Y), X),
        "a view of what is made twice": value(lambda x: (lambda y: (softmax(y.T), logsumexp(y, 0)))(jnp.exp(x)), X),
    },
    "places": {
        "a split index of kept dimensions": value(
            lambda x: softmax((x + 0.3 * jax.lax.broadcasted_iota(x.dtype, (4, 24), 0)).reshape(2, 2, 24)), WIDE
        ),
        "a split index of a row": value(
            lambda x: softmax((x * jax.lax.broadcasted_iota(jnp.int32, (4, 24), 1)).reshape(4, 3, 8), 1), WIDE
        ),
        "an index split into three": value(
            lambda x: softmax((x * jax.lax.broadcasted_iota(jnp.int32, (4, 24), 1)).reshape(4, 3, 2, 4), (1, 3)), WIDE
        ),
        "a joined index": value(lambda x: softmax((x.reshape(4, 4, 6) + jnp.arange(6.0)).reshape(4, 24)), WIDE),
        "a split vector": value(lambda x: softmax((x + WIDE[0]).reshape(4, 6, 4), 1) * 2, WIDE),
        "dimensions exchanged": value(lambda x: softmax(x.T + Y) + x, X),
        "dimensions exchanged afterwards": value(lambda x: (softmax(x * 2).T * Y, softmax(x * 2) * 3), X),
        "with itself, exchanged, afterwards": value(lambda x: (lambda y: (y + 2 * y.T, y @ Y))(softmax(x * 3)), X),
        "with itself, exchanged": value(lambda x: softmax(x - 2 * x.T), X),
        "a reshape that divides at one of two places": value(
            lambda x, w: softmax(x + (lambda z: z + 2 * z.T)(jnp.tanh(w).reshape(12, 12)).reshape(4, 3, 3, 4)),
            array(4, 3, 3, 4),
            array(4, 36, seed=1),
        ),
        "rotated": value(
            lambda x: jnp.transpose(softmax(jnp.transpose(x + 1, (2, 0, 1)) * 2, 1), (2, 1, 0)) * array(2, 3, 4),
            array(3, 2, 4),
        ),
        "rotated, of one extent": value(
            lambda x: jnp.transpose(softmax(jnp.transpose(x, (1, 2, 0)) + array(3, 3, 3), 0), (1, 2, 0)) * x,
            array(3, 3, 3, seed=2),
        ),
        "sides of other dimensions": value(
            lambda x, w: softmax(x * 2).reshape(4, 4, 6) * jnp.tanh(w * 2), WIDE, array(4, 4, 6, seed=3)
        ),
        "halves turned": value(lambda x: softmax(jnp.swapaxes(x.reshape(4, 2, 12), 1, 2).reshape(4, 24) * 2, -1), WIDE),
        "halves turned afterwards": value(
            lambda x: jnp.swapaxes(softmax(x * 2).reshape(4, 2, 12), 1, 2).reshape(4, 24) + WIDE, WIDE
        ),
        "broadcast rows": value(lambda x, b: softmax(jnp.broadcast_to(b, x.shape) * x), X, ROWS),
        "broadcast columns": value(lambda x, b: softmax(x, 0) * b[:, 0], X, ROWS),
        "new dimensions": value(lambda x: (softmax(x[:, None] * 2, -1)[:, 0, :, None] + 1)[..., 0] * Y, X),
        "causal": both(lambda x: softmax(jnp.where(index(0) >= index(1), x, -1e9)), X),
        "causal, turned": both(lambda x: softmax(jnp.where(index(0) >= index(1), x, -1e9), 0), X),
        "a window": value(lambda x: softmax(jnp.where(abs(index(0) - index(1)) < 2, x, -1e9)) * index(0), X),
        "times its own sums": value(lambda x: (lambda p: p * jnp.sum(p * Y, 0))(softmax(x * 2)), X),
        "a rotated result": value(lambda x: jnp.transpose(softmax(x * 2, 1), (1, 2, 0)) * 3, array(3, 4, 5)),
        "a mask of fewer dimensions": value(lambda x: softmax(x.reshape(2, 3, N) * 2, where=MASK[:3]) + 1, X),
        "rows gathered again": value(lambda x: softmax(jnp.repeat(x[:2], 3, 0) * Y), X),
    },
    "operations": {
        "clamp between turned bounds": value(lambda x: softmax(jax.lax.clamp(1.5, x, -0.5) + x), X),
        "clamp": value(lambda x: softmax(jax.lax.clamp(-0.5, x, 1.5) + x), X),
        "clamp by arrays": value(lambda x, low, high: softmax(jax.lax.clamp(low, x, high) * x), X, Y, Z),
        "powers": value(lambda x: softmax(x**3 - x**5 + (x + 7) ** -2), X),
        "powers of integers": value(lambda x: softmax(x + 0.01 * index(1) ** 3 - 0.02 * index(0) ** 2), X),
        "select of three": value(lambda x: softmax(jnp.select([x > 1, x > 0], [x * 3, x * 2], -x)), X),
        "constants": value(lambda x: softmax(x / 3 - 2 / (x + 9) + (1 - x) * 0.1), X),
        "integers": value(
            lambda x: softmax(x + ((index(0) * 3 - index(1) * 5) & 7) - (index(0) ^ index(1)) + (index(1) | 2)), X
        ),
        "negative integers": value(lambda x: softmax(x - jnp.sign(index(0) - index(1)) * jnp.abs(index(1) - 4)), X),
        "turned bits": value(lambda x: softmax(x + 0.1 * ~index(1)), X),
        "exact constants": value(lambda x: softmax(x + (index(1) * 123456.75 - index(1) * 123456.0)), X),
        "finite numbers": value(lambda x: softmax(jnp.where(jnp.isfinite(x), x, 1.0)), SOME_WITHOUT),
        "masks": value(lambda x: softmax(jnp.where((x > 0) & ~((x > 1) | (Y < 0)) ^ MASK, x, -2.0)), X),
        "comparisons": value(
            lambda x: softmax(x + (x < Y) * 2.0 + (x >= Z) * 0.5 - (x != Y) * 3 + (index(0) > index(1)) * x), X
        ),
        "ties": value(lambda x: softmax(x * (index(0) <= index(1)) - 2.0 * (index(0) < index(1))), X),
        "bounds": value(lambda x: softmax(jnp.maximum(x, Y) - jnp.minimum(x, Z) * 2), X),
        "functions": value(
            lambda x: softmax(jnp.log1p(jnp.abs(x)) - jnp.expm1(-x) + jnp.exp2(x) * 0.3 + jax.lax.rsqrt(x * x + 1)), X
        ),
        "more functions": value(
            lambda x: softmax(
                jax.nn.sigmoid(x) * 3 + jax.lax.erf(x) - jnp.cos(x) + jnp.sqrt(jnp.abs(x)) + jnp.log(x + 9)
            ),
            X,
        ),
        "rounding": value(lambda x: softmax(jnp.floor(x) * 0.3 - jnp.ceil(x * 2) + jnp.sign(x)), X),
        "numbers of 8 bits": value(
            lambda x, a, b: softmax(x * a + b),
            X,
            np.arange(-3, 3).astype(np.int8),
            (np.arange(6) + 200).astype(np.uint8),
        ),
        "numbers of 8 bits that wrap": value(
            lambda x, a: softmax(x + (a * np.int8(77)) * 0.02), X, np.arange(-3, 3).astype(np.int8)
        ),
        "truth": value(
            lambda x: softmax(jnp.where((index(0) - 2).astype(bool) ^ jnp.floor(x).astype(bool), x * 2, 1.0)), X
        ),
        "afterwards": both(lambda x: (log_softmax(x) - Y) * jnp.where(x > 0, 2.0, -3.0), X),
        "of both operands": gradient(lambda x, y: jnp.tanh(softmax(x * 2) * y) * Z, X, Y, by=(0, 1)),
    },
}


def in_float64(programs):
    def widened(a):
        return a if np.issubdtype(a.dtype, np.integer) or a.dtype == bool else a.astype(np.float64)

    with jax.enable_x64(True):
        return [by_numpy(p.function, *jax.tree.map(widened, p.args)) for p in programs]


HASTE = {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else {}


def all_of(programs, transform=lambda f: f):
    functions = [transform(p.function) for p in programs]
    return lambda *args: [f(*given) for f, given in zip(functions, args, strict=True)]


def results(programs):
    kernels = emulated.kernels if jax.default_backend() == "cpu" else emulated.all_kernels
    args = [p.args for p in programs]
    with kernels(), jax.default_matmul_precision("highest"):
        lowered = jax.jit(all_of(programs, fuse)).lower(*args)
    return lowered.compile(compiler_options=HASTE)(*args), in_float64(programs)


@compiler_is_needed
@support.sampled("sixth", range(6), 6)
@pytest.mark.parametrize("rule", RULES)
def test_numbers(rule, sixth):
    """Of every sixth program of a rule; those that are wrong are named."""
    wrong, programs = {}, dict(list(RULES[rule].items())[sixth::6])
    assert programs
    for name, found, expected in zip(programs, *results(list(programs.values())), strict=True):
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            try:
                eps = max(2e-5, 2 * float(jnp.finfo(a.dtype).eps))
                a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
                largest = np.abs(b[np.isfinite(b)]).max(initial=0)
                np.testing.assert_allclose(a, b, rtol=eps, atol=1e-5 * largest)
            except AssertionError as error:
                wrong[name] = str(error)
    assert not wrong, "\n".join(f"{name}: {error}" for name, error in wrong.items())


def shifted_exponentials(x, shift):
    return (lambda e: e / jnp.sum(e, -1, keepdims=True))(jnp.exp(x - shift(x)))


def normalized(x, total):
    return (lambda e: e / total(e))(jnp.exp(x - jnp.max(x, -1, keepdims=True)))


OTHERS = {
    "no shift": lambda x: shifted_exponentials(x, lambda x: 0.0),
    "a shift by more": lambda x: shifted_exponentials(x, lambda x: jnp.max(x, -1, keepdims=True) + 1),
    "maxima of columns": lambda x: shifted_exponentials(x, lambda x: jnp.max(x, 0, keepdims=True)),
    "maxima of columns, turned": lambda x: shifted_exponentials(x, lambda x: jnp.max(x, 0)[:, None]),
    "maxima of rows, turned": lambda x: shifted_exponentials(x, lambda x: jnp.max(x, 1)[None]),
    "a maximum of all": lambda x: shifted_exponentials(x, jnp.max),
    "maxima of some": lambda x: shifted_exponentials(x, lambda x: jnp.max(x[:, :3], -1, keepdims=True)),
    "maxima of another array": lambda x: shifted_exponentials(x, lambda x: jnp.max(x * Y, -1, keepdims=True)),
    "rounded maxima": lambda x: shifted_exponentials(x, lambda x: jnp.max(x.astype(BF16), -1, keepdims=True)),
    "minima": lambda x: shifted_exponentials(x, lambda x: jnp.min(x, -1, keepdims=True)),
    "powers of 2": lambda x: (lambda e: e / jnp.sum(e, -1, keepdims=True))(jnp.exp2(x - jnp.max(x, -1, keepdims=True))),
    "sums of columns": lambda x: normalized(x, lambda e: jnp.sum(e, 0, keepdims=True)),
    "sums of columns, turned": lambda x: normalized(x, lambda e: jnp.sum(e, 0)[:, None]),
    "sums of rows, turned": lambda x: normalized(x, lambda e: jnp.sum(e, 1)[None]),
    "a sum of all": lambda x: normalized(x, jnp.sum),
    "sums of some": lambda x: normalized(x, lambda e: jnp.sum(e[:, 1:], -1, keepdims=True)),
    "sums of what is masked": lambda x: normalized(x, lambda e: jnp.sum(jnp.where(MASK, e, 0), -1, keepdims=True)),
    "sums of squares": lambda x: normalized(x, lambda e: jnp.sum(e * e, -1, keepdims=True)),
    "sums and a little": lambda x: normalized(x, lambda e: jnp.sum(e, -1, keepdims=True) + 1e-3),
    "roots of sums": lambda x: normalized(x, lambda e: jnp.sqrt(jnp.sum(e, -1, keepdims=True))),
    "maxima": lambda x: normalized(x, lambda e: jnp.max(e, -1, keepdims=True)),
    "what is masked": lambda x: (lambda e: e / jnp.sum(e, -1, keepdims=True))(
        jnp.where(MASK, jnp.exp(x - jnp.max(x, -1, keepdims=True)), 0)
    ),
    "maxima that are returned": lambda x: (written_softmax(x), jnp.max(x, -1)),
    "maxima that are compared": lambda x: written_softmax(x) * (x == jnp.max(x, -1, keepdims=True)),
    "differences from maxima that are compared": lambda x: (
        written_softmax(x) * (x - jnp.max(x, -1, keepdims=True) == 0)
    ),
    "signs of differences from maxima": lambda x: (
        written_softmax(x) * (1 + jnp.sign(x - jnp.max(x, -1, keepdims=True)))
    ),
    "exponentials that are returned": lambda x: exponentials(x)[2:],
    "exponentials that are multiplied": lambda x: exponentials(x)[2] @ Y,
    "a product divided by sums of columns": lambda x: exponentials(x)[2] @ Y / exponentials(x)[3].T,
    "a turned product divided": lambda x: Y @ exponentials(x)[2] / exponentials(x)[3],
    "a product divided and not": lambda x: (lambda o: (o, o / exponentials(x)[3]))(exponentials(x)[2] @ Y),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_no_softmax_stays(name):
    """Of its value, and of its gradient."""
    for f in (OTHERS[name], gradient(OTHERS[name], X).function):
        jaxpr = jax.make_jaxpr(f)(X).jaxpr
        with emulated.kernels():  # whoever would be faster
            assert rewriting.rewritten(jaxpr) is jaxpr


def test_callbacks_read_what_is_replaced():
    """Equations without results."""

    def f(x, v):
        _, _, e, total = exponentials(x)
        jax.debug.callback(lambda total: None, total)
        return e @ v / total

    assert [line.op for line in fuse(f).explain(X, X.T)] == ["softmax_and_normalizer"]


@compiler_is_needed
@pytest.mark.parametrize("f", [written_softmax, written_log_softmax, written_logsumexp])
def test_rows_that_are_not_finite(f):
    """They are NaN in what is written out, where the library has infinities."""
    x = np.array(X)
    x[1, 2], x[2, 3], x[3], x[4, 1:] = np.inf, np.nan, -np.inf, -np.inf
    kernels = emulated.kernels if jax.default_backend() == "cpu" else emulated.all_kernels
    with kernels():
        found = jax.jit(fuse(both(f, x).function))(x)
    expected = jax.jit(both(f, x).function)(x)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_array_equal(np.isnan(a), np.isnan(b))
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


NAMED = [(rule, name) for rule, programs in RULES.items() for name, program in programs.items() if program.ops]


@pytest.mark.parametrize("rule,name", NAMED)
def test_operators(rule, name):
    """The rule holds."""
    program = RULES[rule][name]
    with emulated.kernels():  # whoever would be faster
        report = fuse(program.function).explain(*program.args)
    assert " ".join(sorted(line.op for line in report if line.why_xla != judge.MADE_OF_ROWS)) == program.ops


@pytest.mark.parametrize(
    "f,shape,before,after",
    [
        (lambda x: softmax(x * 2, 0) * 3, (5, 7), ["mul"], ["mul"]),
        (lambda x: softmax(x * 2).astype(BF16), (5, 7), ["mul"], ["convert_element_type"]),
        (
            lambda x: jnp.transpose(softmax(jnp.transpose(x * 2, (1, 2, 0))) + 1, (1, 2, 0)) * 3,
            (3, 4, 5),
            ["mul"],
            None,
        ),
        (
            lambda x: jnp.exp(softmax(jnp.tanh(x.reshape(6, 4)))).reshape(2, 3, 4) * x,
            (2, 3, 4),
            ["tanh"],
            ["exp", "mul"],
        ),
        (lambda x: jnp.exp(softmax(x - 1).reshape(4, 3, 8)), (4, 24), ["sub"], ["exp"]),
        (lambda x: jnp.exp(jnp.squeeze(softmax(x[:, None] - 1), 1)), (5, 7), ["sub"], ["exp"]),
    ],
)
def test_what_is_folded(f, shape, before, after):
    """Around transposes and reshapes as well; of what is written nothing else is."""
    (line,) = fuse(f).explain(jax.ShapeDtypeStruct(shape, F32))
    assert line.folded_before == tuple(before) and line.folded_after == tuple(after or ["add", "mul"])
    assert line.outside == () and line.why_not == ""


def test_functions_of_16_bits_are_made_once():
    """Where rows' maxima and sums are a kernel's, and the elements XLA's."""

    def f(x):
        return jnp.sum(jnp.exp(log_softmax(wide(jnp.tanh(x * 0.5)) * 2)), -1)

    line, _ = fuse(f).explain(jax.ShapeDtypeStruct((64, 128), BF16))
    assert line.folded_before == ("convert_element_type", "mul")
    line, _ = fuse(f).explain(jax.ShapeDtypeStruct((64, 128), F32))
    assert line.folded_before == ("mul", "tanh", "mul")
