"""Functions for `fuse`: `CASES` and those `WITH_CONSTANTS`, which `Case.check` runs, and what is `TRANSFORMED`."""

import jax
import jax.numpy as jnp
import numpy as np
from fusion_chains import CHAINS
from fusion_support import (
    BF16,
    F32,
    MASK,
    PAIR,
    SHAPE,
    Case,
    causal_attention,
    gradients_of,
    loss_at_labels,
    pairs,
    x_of,
)

import jax_softmax
from jax_softmax import fuse

at_labels = jax.vmap(jax.vmap(lambda row, k, value: row.at[k].add(value), (0, 0, None)), (0, 0, None))
TARGETS = np.array([[3, 1, 0, 15, -1, 2]] * 4)


def smoothed_losses(x, smoothing=0.1):
    targets = (1 - smoothing) * jax.nn.one_hot(TARGETS, x.shape[-1]) + smoothing / x.shape[-1]
    return -jnp.sum(targets * jax.nn.log_softmax(x.astype(F32)), -1)


def smoothed_loss(x, smoothing=0.1):
    return smoothed_losses(x, smoothing).mean()


def distillation(student, teacher):
    student, teacher = (logits.astype(F32) / 2 for logits in (student, teacher))
    difference = jax.nn.log_softmax(teacher) - jax.nn.log_softmax(student)
    return jnp.sum(jax.nn.softmax(teacher) * difference, -1)


def padded(x):
    """With a last class of -inf, which is no label."""
    return jnp.where(jnp.arange(x.shape[-1]) == x.shape[-1] - 1, -jnp.inf, x)


def loss_of(dtype, **options):
    return lambda x: jax_softmax.cross_entropy_loss(x.astype(dtype), jnp.asarray(TARGETS), **options)


CASES = CHAINS | {
    "logsumexp": Case(lambda x: jax_softmax.logsumexp(x.astype(F32) * 2, -1), x_of("bfloat16")),
    "entropy": Case(lambda x: jax_softmax.entropy(x.astype(F32) * 2), x_of("bfloat16"), roundings=64),
    "distillation": Case(lambda x: distillation(x, jnp.flip(x)), x_of("bfloat16"), calls=2, folded=False, roundings=64),
    "distillation's gradient": Case(
        jax.value_and_grad(lambda x, t: jnp.mean(distillation(x, t))),
        x_of("bfloat16"),
        x_of("bfloat16", seed=1),
        calls=3,
        folded=False,
        roundings=64,
    ),
    "a divergence of log-probabilities": Case(
        lambda x, t: jnp.sum((jax.nn.log_softmax(t) - jax.nn.log_softmax(x)) * jnp.exp(jax.nn.log_softmax(t)), -1),
        x_of(),
        PAIR,
        calls=2,
        folded=False,
        roundings=64,
    ),
    "a divergence by nothing but -inf": Case(
        lambda x, t: distillation(jnp.where(x > 0, x, -jnp.inf), jnp.where(jnp.arange(6)[:, None] > 2, t, -jnp.inf)),
        x_of(scale=1000),
        PAIR,
        calls=2,
        folded=False,
        roundings=64,
    ),
    "divergence": Case(
        lambda x: jax_softmax.kl_divergence(x.astype(F32) * 2, jnp.flip(x).astype(F32) * 0.5),
        x_of("bfloat16"),
        calls=2,
        roundings=64,
        folded=False,
    ),
    "loss": Case(loss_of(F32), x_of("bfloat16")),
    "loss's gradient": Case(jax.grad(loss_of(F32)), x_of("bfloat16"), roundings=64),
    "loss and gradient": Case(
        jax.value_and_grad(loss_of(F32, label_smoothing=0.1, z_loss=1e-3)), x_of("bfloat16"), roundings=64
    ),
    "smoothed labels": Case(smoothed_loss, x_of("bfloat16"), roundings=64),
    "smoothed labels' gradient": Case(jax.value_and_grad(smoothed_loss), x_of("bfloat16"), roundings=64),
    "smoothed labels of rows with -inf": Case(
        lambda x: smoothed_losses(jnp.where(jnp.arange(16) == jnp.arange(6)[:, None], -jnp.inf, x)), x_of("bfloat16")
    ),
    "labels that are not smoothed, with -inf": Case(
        lambda x: jnp.sum(jnp.where(TARGETS == 15, 0, smoothed_losses(padded(x), 0.0))), x_of("bfloat16"), roundings=64
    ),
    "two smoothings": Case(lambda x: smoothed_losses(x) + smoothed_losses(x, 0.2), x_of("bfloat16"), roundings=64),
    "a gradient, and another smoothing": Case(
        lambda x: (jax.grad(smoothed_loss)(x), smoothed_loss(x, 0.2)), x_of("bfloat16"), roundings=64
    ),
    "gradients of two smoothings": Case(
        lambda x: tuple(jax.value_and_grad(smoothed_loss)(x, smoothing) for smoothing in (0.1, 0.2)),
        x_of("bfloat16"),
        calls=2,
        roundings=64,
    ),
    "smoothed labels and others": Case(
        lambda x: (
            smoothed_losses(x),
            jax_softmax.softmax_cross_entropy_with_integer_labels(x.astype(F32), jnp.asarray(TARGETS)),
        ),
        x_of("bfloat16"),
        roundings=64,
    ),
    "a gradient weighted with its loss": Case(
        lambda x: (lambda loss: jax.grad(lambda x: smoothed_loss(x) * loss)(x))(smoothed_loss(x)),
        x_of("bfloat16"),
        calls=2,
        roundings=64,
    ),
    "smoothed labels, and what they are multiplied with": Case(
        lambda x: (lambda y: (y, -jnp.sum((0.9 * jax.nn.one_hot(TARGETS, 16) + 0.1 / 16) * y, -1)))(
            jax.nn.log_softmax(x * 2)
        ),
        x_of(),
        folded=False,
        roundings=64,
    ),
    "smoothed labels of columns": Case(
        jax.value_and_grad(lambda x: smoothed_loss(jnp.swapaxes(x, -1, -2))), x_of("bfloat16", (4, 16, 6)), roundings=64
    ),
    "second derivatives of a loss": Case(
        gradients_of(jax.grad(lambda x: loss_of(F32)(x * 2))), x_of(), folded=False, roundings=256
    ),
    "losses of rows": Case(
        gradients_of(
            lambda x: jax_softmax.softmax_cross_entropy_with_integer_labels(x.astype(F32), jnp.asarray(TARGETS))
        ),
        x_of("bfloat16"),
        folded=False,
        roundings=64,
    ),
    "scaling": Case(lambda x: jax_softmax.absmax_scale(x.astype(F32) * 2), x_of("bfloat16")),
    "scaling to int8": Case(lambda x: jax_softmax.absmax_scale(x.astype(F32) * 2, dtype=jnp.int8), x_of("bfloat16")),
    "scaled back": Case(
        lambda x: (lambda q, s: q.astype(F32) * s)(*jax_softmax.absmax_scale(x.astype(F32) * 2, dtype=jnp.int8)),
        x_of("bfloat16"),
        folded=False,
    ),
    "a loop": Case(lambda x: jax.lax.fori_loop(0, 3, lambda k, x: jax.nn.softmax(x * 2) + 0.1, x), x_of()),
    "a scan": Case(
        lambda x: jax.lax.scan(lambda c, row: (c + 1, jax.nn.softmax(row.astype(F32) * c)), 1.0, x), x_of("bfloat16")
    ),
    "scan's gradient": Case(
        gradients_of(lambda x: jax.lax.scan(lambda c, row: (jax.nn.softmax(row * c), None), x[0], x)[0]),
        x_of(),
        calls=2,
        roundings=256,
        folded=False,
    ),
    "branches": Case(
        lambda x: jax.lax.cond(x[0, 0, 0] > 0, lambda x: jax.nn.softmax(x * 2), lambda x: jax.nn.log_softmax(x - 1), x),
        x_of(),
        calls=2,
    ),
    "checkpoint": Case(
        gradients_of(jax.checkpoint(lambda x: jax.nn.softmax(x.astype(F32) * 2).astype(BF16))),
        x_of("bfloat16"),
        folded=False,
        roundings=64,
    ),
    "fused within": Case(lambda x: fuse(lambda y: jax.nn.softmax(y * 2))(x + 1) * 3, x_of()),
    "derivative of fused": Case(
        gradients_of(fuse(lambda x: jax.nn.softmax(jnp.tanh(x) * 2))), x_of(), roundings=256, folded=False
    ),
    "derivative of fused attention": Case(
        gradients_of(fuse(lambda x, w: causal_attention(x, w))),
        x_of("bfloat16"),
        x_of("bfloat16", (16, 16), seed=1),
        calls=2,
        folded=False,
        roundings=2**14,
    ),
    "derivative of a fused loss": Case(
        jax.value_and_grad(fuse(lambda x: loss_at_labels(x * 2))), x_of("bfloat16"), calls=2, folded=False, roundings=64
    ),
    "second derivative of a fused loss": Case(
        gradients_of(jax.grad(fuse(lambda x: loss_at_labels(jnp.tanh(x))))),
        x_of(),
        calls=2,
        folded=False,
        roundings=256,
    ),
    "vmap of fused": Case(
        jax.vmap(fuse(lambda x, b: jax.nn.softmax(x * 2 + b)), (1, None)), x_of(), x_of(shape=(16,), seed=1)
    ),
    "layers": Case(
        lambda x, w: jax.nn.softmax(jnp.dot(jax.nn.softmax(x * 2 + 1) * 3, w, precision="highest")) - 0.5,
        x_of(),
        x_of(shape=(16, 16)),
        calls=2,
    ),
    "one after another": Case(
        lambda x: jax.nn.log_softmax(jax.nn.softmax(x * 2) * 3) - 0.5, x_of(), calls=2, roundings=64, folded=False
    ),
    "a result that an operand needs": Case(
        lambda x: jax.nn.softmax(x * 2) + jax.nn.softmax(x * 3, axis=0), x_of(), calls=2, folded=False
    ),
    "a loss that others read": Case(
        lambda x: (
            lambda loss: jnp.where(jnp.isnan(loss), 0, loss) + jnp.sum(loss) * jax.nn.logsumexp(x.astype(F32) * 2)
        )(jax_softmax.softmax_cross_entropy_with_integer_labels(x.astype(F32) * 2, jnp.asarray(TARGETS))),
        x_of("bfloat16"),
        calls=2,
        folded=False,
        roundings=64,
    ),
    "scattered integers": Case(
        lambda x, k: jax.nn.softmax(x * 2) * (at_labels(jnp.zeros(SHAPE, jnp.int32), k, 2**24 + 1) & 3),
        x_of(),
        np.abs(TARGETS),
        folded=False,
    ),
    "one-hot integers": Case(
        lambda x: jnp.sum(
            jax.nn.log_softmax(x) * (jax.nn.one_hot(TARGETS, 16, dtype=jnp.int8) * np.int8(100) * np.int8(3)), -1
        ),
        x_of(),
        folded=False,
    ),
    "a number among arrays of one element": Case(
        lambda x, a: jax.lax.select(jnp.squeeze(jax.nn.softmax(x * 2)) > 0.5, a, -a),
        x_of(shape=(1,)),
        x_of(shape=(1, 1)),
        folded=False,
    ),
    "results of each other": Case(
        lambda x: (lambda p, q: (p * jnp.sum(q), q * jnp.sum(p)))(jax.nn.softmax(x * 2), jax.nn.softmax(x * 3)),
        x_of(),
        calls=2,
        folded=False,
    ),
    # Numbers that stand in the program itself: only softmax, of two operators, has a kernel.
    "a mask that is a number": Case(
        lambda x: (jax_softmax.logsumexp(x, where=False), jax.nn.softmax(x)), x_of(), folded=False
    ),
    "an operand that is a number": Case(
        lambda x: jax.nn.softmax(x) + jax_softmax.logsumexp(2.0, axis=None), x_of(), folded=False
    ),
    "two losses": Case(
        lambda x: (
            jax_softmax.softmax_cross_entropy_with_integer_labels(x, jnp.zeros(x.shape[:-1], int)),
            jax_softmax.softmax_cross_entropy_with_integer_labels(x, jnp.ones(x.shape[:-1], int)),
        ),
        x_of(),
    ),
}

WITH_CONSTANTS = {
    "mask": Case(
        lambda x: (jax.nn.softmax(x * 2, where=MASK), jax_softmax.logsumexp(x)), x_of(), calls=2, folded=False
    ),
    "logits": Case(
        lambda labels: jax_softmax.softmax_cross_entropy_with_integer_labels(PAIR, labels),
        jnp.ones(SHAPE[:-1], int),
        folded=False,
    ),
    "under jit": Case(lambda x: jax.jit(lambda x: jax.nn.softmax(x + PAIR) * PAIR)(x), x_of(), folded=False),
    "in a loop": Case(
        lambda x: jax.lax.scan(lambda x, _: (jax.nn.softmax(x + PAIR), None), x, length=2)[0], x_of(), folded=False
    ),
    "gradient": Case(
        gradients_of(lambda x: jax.nn.log_softmax(x + PAIR, where=MASK)), x_of(), calls=2, folded=False, roundings=64
    ),
}


# Transformations, and functions that run as they are.

SUM = lambda x: jnp.sum(pairs(x) ** 2)  # noqa: E731


@jax.custom_vjp
def clipped(x):
    return jax.nn.softmax(x * 2)


clipped.defvjp(lambda x: (clipped(x), None), lambda _, g: (jnp.full_like(g, 7),))


@jax.custom_jvp
def odd(x):
    return jax.nn.softmax(x * 2)


odd.defjvp(lambda x, t: (odd(*x), 5 * t[0]))


TRANSFORMED = {
    "call": (lambda f: f, pairs),
    "jit": (jax.jit, pairs),
    "grad": (jax.grad, SUM),
    "value_and_grad": (jax.value_and_grad, SUM),
    "hessian": (lambda f: lambda x: jax.hessian(f)(x[:2]), SUM),
    "third derivatives": (lambda f: lambda x: jax.jacfwd(jax.hessian(f))(x[:1, :3]), SUM),
    "jvp": (lambda f: lambda x: jax.jvp(f, (x,), (x * 0.1,)), pairs),
    "jacrev": (jax.jacrev, pairs),
    "linearize": (lambda f: lambda x: jax.linearize(f, x)[1](x), pairs),
    "vmap": (jax.vmap, pairs),
    "vmap of a later axis": (lambda f: jax.vmap(f, 1, 1), pairs),
    "vmap of grad": (lambda f: jax.vmap(jax.grad(f)), SUM),
    "grad of vmap": (lambda f: jax.grad(lambda x: jnp.sum(jax.vmap(f)(x))), pairs),
    "scan": (lambda f: lambda x: jax.lax.scan(lambda c, row: (c + 1, f(row * c)), 1.0, x), pairs),
    "while": (lambda f: lambda x: jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, f(c[1])), (0, x)), odd),
    "cond": (lambda f: lambda x: jax.lax.cond(x[0, 0] > 0, f, lambda x: x[..., 1:], x), pairs),
    "checkpoint": (lambda f: jax.grad(jax.checkpoint(f)), SUM),
    "of checkpoint": (jax.grad, jax.checkpoint(SUM)),
    "custom_vjp": (lambda f: jax.grad(lambda x: jnp.sum(f(x))), clipped),
    "custom_jvp": (lambda f: jax.grad(lambda x: jnp.sum(f(x))), odd),
    "custom_jvp, forwards": (lambda f: lambda x: jax.jvp(f, (x,), (x,)), odd),
    "custom_vjp within": (lambda f: jax.grad(lambda x: jnp.sum(f(x) * 2)), lambda x: clipped(x * 3)),
    "fused within": (jax.grad, fuse(SUM)),
    **{
        f"{name} of a loss": (transform, loss_at_labels)
        for name, transform in {
            "grad": jax.grad,
            "hessian": lambda f: lambda x: jax.hessian(f)(x[:2]),
            "third derivatives": lambda f: lambda x: jax.jacfwd(jax.hessian(f))(x[:1, :3]),
            "vmap of grad": lambda f: lambda x: jax.vmap(jax.grad(f), 1)(x.reshape(2, 2, 8)),
            "grad of grad": lambda f: jax.grad(lambda x: jnp.sum(jax.grad(f)(x) ** 2)),
            "jvp of grad": lambda f: lambda x: jax.jvp(jax.grad(f), (x,), (x,)),
            "checkpoint": lambda f: jax.grad(jax.checkpoint(f)),
            "scan": lambda f: jax.grad(
                lambda x: jax.lax.scan(lambda c, _: (c - jax.grad(f)(c), f(c)), x, None, 3)[1].sum()
            ),
        }.items()
    },
    "vmap of custom_vjp": (lambda f: jax.vmap(jax.grad(lambda x: jnp.sum(f(x)))), clipped),
}
