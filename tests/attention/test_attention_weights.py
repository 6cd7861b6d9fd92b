"""Weights that are made of several softmaxes, or of logarithms: what `fuse` finds, and its numbers.

What kernels do is done in JAX (`attention_on_host.py`).
"""

import emulated
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_programs import AGAIN, assert_as_exact, check, check_together, gradients, normal

from jax_softmax import fuse
from jax_softmax.fusion.rewriting import rewritten

pytestmark = pytest.mark.usefixtures("on_the_cpu")

B, S, H, D = 2, 24, 3, 8
Q, K, V, Q2, K2 = (normal(B, S, H, D, seed=seed) for seed in range(5))
DIFFERENCE = Q, K, Q2, K2, V
OF_HEADS = jnp.arange(1, H + 1, dtype=jnp.float32)[:, None, None] / 4
OF_ROWS = jnp.arange(S, dtype=jnp.float32)[:, None] / S
KEEP = np.random.default_rng(0).random((B, H, S, S)) < 0.8
NEAR = abs(np.arange(S)[:, None] - np.arange(S)) < 5


def scores(q, k):
    return jnp.einsum("bihd,bjhd->bhij", q, k).astype(jnp.float32) / 3


def softmax(q, k):
    return jax.nn.softmax(scores(q, k))


def output(weights, v, **options):
    return jnp.einsum("bhij,bjhd->bihd", weights.astype(v.dtype), v, **options)


def differentiated(f, *constants):
    """`constants`: operands behind those of which there are gradients."""
    return lambda *a: gradients(lambda *b: f(*b, *a[len(a) - len(constants) :]), *a[: len(a) - len(constants)])


def difference(of, *constants):
    def f(q, k, q2, k2, v, *constants):
        return output(of(softmax(q, k), softmax(q2, k2), *constants), v)

    return differentiated(f, *constants), (*DIFFERENCE, *constants)


def weights_of(f, *constants):
    return differentiated(lambda q, k, v, *constants: output(f(scores(q, k), *constants), v), *constants), (
        *(Q, K, V),
        *constants,
    )


def of_one_product(q, k, v):
    s = scores(q, k)
    return output(0.3 * jax.nn.softmax(s) + 0.7 * jax.nn.softmax(jnp.where(NEAR, s, -1e30)), v)


def of_rounded_weights(q, k, q2, k2, v):
    a, b = (w.astype(v.dtype) for w in (softmax(q, k), softmax(q2, k2)))
    return output(a - jnp.asarray(0.3, v.dtype) * b, v)


def of_widened_values(q, k, q2, k2, v):
    wide = jnp.einsum("bhij,bjhd->bihd", softmax(q, k) - 0.3 * softmax(q2, k2), v.astype(jnp.float32))
    return wide.astype(v.dtype)


def given_factor(q, k, q2, k2, v, factor):
    return output(softmax(q, k) - factor * softmax(q2, k2), v)


def written_out(s):
    m = s.max(-1, keepdims=True)
    return jnp.exp(s - m - jnp.log(jnp.exp(s - m).sum(-1, keepdims=True)))


def log_sum(s, **options):
    return jax.scipy.special.logsumexp(s, -1, **options)


def less_log_sum(s):
    return jnp.exp(s - log_sum(s)[..., None])


# The program, its operands, and how many softmaxes are attention.
FOUND = {
    "a difference": (*difference(lambda p, r: p - 0.3 * r), 2),
    "factors of heads and rows": (*difference(lambda p, r: p * OF_ROWS - OF_HEADS * r), 2),
    "a difference that is multiplied": (
        *difference(lambda p, r, keep: jnp.where(keep, (p - r) * 0.5 / 0.8, 0), KEEP),
        2,
    ),
    "a mixture": (*difference(lambda p, r: 0.2 * (p + r * OF_HEADS)), 2),
    "of one product": (differentiated(of_one_product), (Q, K, V), 2),
    "of rounded weights": (differentiated(of_rounded_weights), DIFFERENCE, 2),
    "of widened values": (differentiated(of_widened_values), DIFFERENCE, 2),
    "a given factor": (differentiated(given_factor, None), (*DIFFERENCE, jnp.float32(0.4)), 2),
    "a learned factor": (differentiated(given_factor), (*DIFFERENCE, jnp.float32(0.4)), 2),
    "learned factors of heads": (differentiated(given_factor), (*DIFFERENCE, OF_HEADS), 2),
    "of three": (
        differentiated(lambda q, k, q2, k2, v: output(softmax(q, k) - (softmax(q2, k2) - softmax(q2, k)) / 2, v)),
        DIFFERENCE,
        3,
    ),
    "exp(log_softmax)": (*weights_of(lambda s: jnp.exp(jax.nn.log_softmax(s))), 1),
    "exp(x - logsumexp)": (*weights_of(lambda s: jnp.exp(s - log_sum(s, keepdims=True))), 1),
    "exp(x - logsumexp[..., None]) of heads' scores": (
        *weights_of(lambda s: less_log_sum(s * OF_HEADS)),
        1,
    ),
    "exponentials of logarithms, written out": (*weights_of(lambda s: written_out(jnp.where(NEAR, s, -1e30))), 1),
    "exponentials of logarithms, in 16 bits": (
        differentiated(lambda q, k, v: output(jnp.exp(jax.nn.log_softmax(scores(q, k).astype(q.dtype))), v)),
        (Q, K, V),
        1,
    ),
    "exponentials of rounded logarithms": (*weights_of(lambda s: jnp.exp(jax.nn.log_softmax(s).astype(Q.dtype))), 1),
    "dropout of exp(log_softmax)": (
        *weights_of(lambda s, keep: jnp.where(keep, jnp.exp(jax.nn.log_softmax(s)) / 0.8, 0), KEEP),
        1,
    ),
    "a difference of exponentials": (
        differentiated(
            lambda q, k, q2, k2, v: output(jnp.exp(jax.nn.log_softmax(scores(q, k))) - 0.3 * softmax(q2, k2), v)
        ),
        DIFFERENCE,
        2,
    ),
}


def weights_are_read(q, k, q2, k2, v):
    p, r = softmax(q, k), softmax(q2, k2)
    return output(p - 0.3 * r, v) * r.max().astype(v.dtype)


def weights_of_a_bias(q, k, v, bias):
    return output(softmax(q, k) - 0.3 * jax.nn.softmax(bias), v)


def weights_that_the_batch_shares(q, k, q2, k2, v):
    return output(softmax(q, k) - softmax(q2[:1], k2[:1]), v)


def logarithms_are_read(q, k, v):
    log_p = jax.nn.log_softmax(scores(q, k))
    return output(jnp.exp(log_p), v) * log_p.mean().astype(v.dtype)


def entropy(q, k, v):
    log_p = jax.nn.log_softmax(scores(q, k))
    return output(jnp.exp(log_p), v), (log_p * jnp.exp(log_p)).sum()


STAY = {
    "weights are read": (differentiated(weights_are_read), DIFFERENCE),
    "weights of a bias": (differentiated(weights_of_a_bias), (Q, K, V, jnp.cos(OF_ROWS + OF_ROWS.T))),
    "weights that the batch shares": (differentiated(weights_that_the_batch_shares), DIFFERENCE),
    "a product of both": difference(lambda p, r: p * r),
    "a number is added": difference(lambda p, r: p - r + 0.1),
    "a number where weights are dropped": difference(lambda p, r: jnp.where(KEEP, p - r, 0.5)),
    "one of both by a mask": difference(lambda p, r: jnp.where(KEEP, p, r)),
    "an output of float32": (
        lambda q, k, q2, k2, v: output(softmax(q, k) - softmax(q2, k2), v, preferred_element_type=jnp.float32),
        DIFFERENCE,
    ),
    "logarithms are read": (differentiated(logarithms_are_read), (Q, K, V)),
    "entropy": (entropy, (Q, K, V)),
    "squares of exponentials": weights_of(lambda s: jnp.exp(2 * jax.nn.log_softmax(s))),
}


def test_numbers():
    check_together({name: (f, operands, fuse(f)) for name, (f, operands, _) in FOUND.items()})


@pytest.mark.parametrize("name", FOUND)
def test_is_found(name):
    f, operands, n = FOUND[name]
    with emulated.kernels(attention=True):
        assert [line.op for line in fuse(f).explain(*operands)] == ["attention"] * n


def test_the_derivative_of_what_is_fused():
    """Weights are made again, not kept."""

    def f(q, k, q2, k2, v):
        return output(softmax(q, k) - 0.3 * jnp.exp(jax.nn.log_softmax(scores(q2, k2))), v)

    found = check(lambda *a: gradients(fuse(f), *a), DIFFERENCE, f"{AGAIN} {AGAIN}")
    assert_as_exact(found, lambda *a: gradients(f, *a), DIFFERENCE)


def test_what_stays_as_it_is():
    assert not check_together({name: (f, operands, fuse(f)) for name, (f, operands) in STAY.items()})


def test_products_that_stay_are_whole():
    """They are not split where a kernel makes but one of them."""
    f, operands = STAY["weights of a bias"]
    with emulated.kernels(attention=True):
        eqns = rewritten(jax.make_jaxpr(f)(*operands).jaxpr).eqns
    assert str(eqns).count(" dot_general[") == str(jax.make_jaxpr(f)(*operands)).count(" dot_general[")
