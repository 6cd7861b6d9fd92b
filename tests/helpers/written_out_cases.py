"""Softmaxes and losses as people write them out, and programs of the rules of `fuse` that find them."""

import jax
import jax.numpy as jnp
import numpy as np
from fusion_support import BF16
from rule_programs import (
    LABELS,
    MASK,
    OUTSIDE,
    ROWS,
    SOME_WITHOUT,
    N,
    X,
    Y,
    Z,
    array,
    at_labels,
    both,
    gradient,
    log_softmax,
    one_hot,
    softmax,
    value,
    wide,
)

from jax_softmax import fuse


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


def by_rounded_sums(x):
    """Exponentials divided by sums of 16 bits, also with a correction that makes up for the rounding."""
    _, _, e, total = exponentials(x)
    rounded = total.astype(BF16).astype(x.dtype)
    return e / rounded, e / rounded * (1 - (total - rounded) / total), e.astype(BF16) / total.astype(BF16)


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


MADE_ANEW = "softmax_and_normalizer softmax_linear"
WRITTEN_OUT = {
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
        "divided by twice the sums": both(lambda x: exponentials(x)[2] / (2 * exponentials(x)[3]), X),
        "and its exponentials' logarithms": both(lambda x: written_softmax(x) * written_log_softmax(x), X),
        "with the library's": both(lambda x: written_softmax(x) * softmax(x) + log_softmax(x), X),
        "scaled, masked": both(lambda x: written_softmax(jnp.where(MASK, x * 3, -1e30)), X),
        "computed in float32": both(lambda x: written_softmax(wide(x)).astype(BF16), array(N, N, dtype=BF16)),
        "maximum before the cast": both(lambda x: written_softmax(wide(x), shift=x), array(N, N, dtype=BF16)),
        "with -inf": both(written_softmax, SOME_WITHOUT),
        "by rounded sums": value(lambda x: by_rounded_sums(x)[0], X),
        "by rounded sums, corrected": value(lambda x: by_rounded_sums(x)[1], X),
        "of 16 bits by rounded sums": value(lambda x: by_rounded_sums(x)[2], X),
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
        "exponentials times what is divided": value(
            lambda x: (lambda e, total: (e @ Y / total, e @ (Z / total)))(*exponentials(x)[2:]), X
        ),
        "sums divided by a product": value(
            lambda x: (lambda e, total: (e @ Y / total, total / (e @ abs(Z))))(*exponentials(x)[2:]), X
        ),
        "second derivatives": gradient(lambda x: jax.grad(lambda x: jnp.sum(jnp.sin(divided_later(x, Y))))(x), X),
    },
    "written out, and their cotangents transposed": {
        f"{name} along {axis}, {product}": both(
            lambda x, y, f=f, axis=axis, product=product: jnp.einsum(product, f(x, axis), y),
            *(array(3, 4, 5, seed=k) for k in range(2)),
            ops=ops,
        )
        for name, f, ops in (
            ("softmax", written_softmax, "softmax softmax_linear"),
            ("log_softmax", written_log_softmax, "log_softmax log_softmax_vjp"),
        )
        for axis in range(3)
        for product in ("bnh,bnd->dbh", "bnh,bnd->dhb")
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
        "of uniform targets": both(lambda x: -jnp.mean(written_log_softmax(x), -1), X),
        "of a number for each row": both(lambda x: jnp.sum(ROWS * written_log_softmax(x), -1), X),
        "of one-hot labels": both(lambda x: -jnp.sum(one_hot() * written_log_softmax(x), -1), X),
        "less logsumexp": both(
            lambda x: -jnp.sum(one_hot() * (x - jax.nn.logsumexp(x, -1, keepdims=True)), -1),
            X,
            ops="cross_entropy_gradient",
        ),
        "logsumexp less the label's": both(lambda x: written_logsumexp(x) - at_labels(x, LABELS), X),
        "by logarithms of softmax": both(lambda x: -jnp.log(at_labels(written_softmax(x), LABELS)), X),
        "with z": value(z_loss, X, ops="cross_entropy"),
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
            ops="softmax_gradient",
        ),
        "softmax less something": value(lambda x: (written_softmax(x) - Y) * ROWS, X, ops="softmax"),
    },
}
