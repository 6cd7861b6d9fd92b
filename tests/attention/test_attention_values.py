"""Attention whose weights are multiplied with several values: what `fuse` finds, and its numbers."""

import emulated
import jax
import jax.numpy as jnp
import pytest
from attention_programs import AGAIN, WHOLE, B, D, H, S, assert_as_exact, check, gradients, normal

import jax_softmax
from jax_softmax import fuse

pytestmark = pytest.mark.usefixtures("on_the_cpu")
Q, K, V = normal(B, S, H, D), normal(B, S, H, D, seed=1), normal(B, S, H, D, seed=2)
W, TURNED = normal(B, S, H, 24, seed=3), normal(H, 8, B, S, seed=4)
BIAS, KEEP = normal(H, S, S, seed=5), normal(B, H, S, S, seed=6) < 1


def weights_of(q, k, bias=0.0):
    s = jnp.einsum("bihd,bjhd->bhij", q, k).astype(jnp.float32) / 4
    return jax.nn.softmax(jnp.where(jnp.tri(S, dtype=bool), s + bias, -1e30))


def times(weights, v):
    return jnp.einsum("bhij,bjhe->bihe", weights.astype(v.dtype), v)


def both(q, k, v, w):
    weights = weights_of(q, k).astype(v.dtype)
    return times(weights, v), times(weights, w)


def cast_apart(q, k, v, w):
    """The weights' cotangents are added in float32."""
    weights = weights_of(q, k)
    return times(weights, v), jax.lax.optimization_barrier(times(jnp.copy(weights), w))


def turned(q, k, v, w, bias):
    weights = weights_of(q, k, bias.astype(jnp.float32)).astype(v.dtype)
    return times(weights, v), jnp.einsum("bhij,hebj->iebh", weights, w)


def three(q, k, v, w):
    weights = jnp.where(KEEP, weights_of(q, k) / 0.8, 0).astype(v.dtype)
    return times(weights, v), times(weights, w), times(weights, 2 * v)


def beside_a_sink(q, k, v, w, sink):
    s = jnp.einsum("bihd,bjhd->bhij", q, k)
    weights = jax_softmax.softmax(s, sink=sink[:, None, None])
    return times(weights, v), times(weights, w)


def and_log_sums(q, k, v, w):
    s = jnp.einsum("bihd,bjhd->bhij", q, k) / 4
    weights = jax.nn.softmax(s)
    return times(weights, v), times(weights, w), jax.nn.logsumexp(s.astype(jnp.float32), -1)


def and_transposed(q, k, v, w):
    """The cotangents of what the transposed weights make are values as well, and w is an output's cotangent."""
    weights = weights_of(q, k)
    return times(weights, v), times(weights.swapaxes(2, 3), w)


def in_circles(q, k, v, w):
    """These cotangents are made of the transposed weights' product itself."""
    o, transposed = and_transposed(q, k, v, w)
    return o, jnp.sin(transposed)


def in_circles_and_another(q, k, v, w):
    """A layer that is found before one that is not."""
    return in_circles(both(q, k, v, w)[0], k, v, w)


def summed(program):
    def all_in_one(*operands):
        return jnp.concatenate([a.ravel().astype(jnp.float32) for a in program(*operands)])

    return lambda *operands: gradients(all_in_one, *operands)


# What is not attention with values side by side.


def of_other_weights(q, k, v, w):
    weights = weights_of(q, k)
    return times(weights, v), times(jnp.where(KEEP, weights, 0), w)


def one_is_not_differentiated(q, k, v, w):
    weights = weights_of(q, k)
    return times(weights, v), jax.lax.stop_gradient(times(weights, w))


def with_a_penalty(q, k, v, w):
    """The gradients of what adds to the weights' cotangents what is no product."""

    def loss(q, k):
        weights = weights_of(q, k)
        return jnp.sum(times(weights, v).astype(jnp.float32)) + jnp.sum(KEEP * weights)

    return jax.grad(loss, (0, 1))(q, k)


def crossed(q, k, v, w):
    """Two layers: the cotangents of what each one's transposed weights make is what the other's make."""
    transposed = [and_transposed(*a, v, w)[1].astype(jnp.float32) for a in ((q, k), (k, q))]
    return [jnp.sum(transposed[0] * transposed[1])]


def in_float32(q, k, v, w):
    weights = weights_of(q, k)
    return times(weights, v), times(weights, w.astype(jnp.float32))


SINK = normal(H, seed=7)
# The program, its operands, which kernels it calls.
PROGRAMS = {
    "both": (both, (Q, K, V, W), "forward"),
    "gradients": (summed(both), (Q, K, V, W), WHOLE),
    "cast apart": (summed(cast_apart), (Q, K, V, W), WHOLE),
    "turned": (summed(turned), (Q, K, V, TURNED, BIAS), WHOLE + " scores"),
    "three": (summed(three), (Q, K, V, W), WHOLE),
    "sink": (summed(beside_a_sink), (Q, K, V, W, SINK), WHOLE),
    "log-sum-exps": (summed(and_log_sums), (Q, K, V, W), WHOLE),
    "checkpoint": (summed(jax.checkpoint(both)), (Q, K, V, W), AGAIN),
    "transposed weights": (summed(and_transposed), (Q, K, V, W), WHOLE),
    "one is a constant": (lambda w, *a: summed(lambda q, k, v: both(q, k, v, w))(*a), (W, Q, K, V), WHOLE),
    # What stays as it was.
    "other weights": (summed(of_other_weights), (Q, K, V, W), ""),
    "other weights, output alone": (of_other_weights, (Q, K, V, W), ""),
    "one is not differentiated": (summed(one_is_not_differentiated), (Q, K, V, W), ""),
    "penalty": (with_a_penalty, (Q, K, V, W), ""),
    "crossed": (summed(crossed), (Q, K, V, W), ""),
    "float32": (summed(in_float32), (Q, K, V, W), ""),
    "in circles": (summed(in_circles), (Q, K, V, W), ""),
    "in circles, and another": (summed(in_circles_and_another), (Q, K, V, W), WHOLE),
    "features": (summed(both), (Q, K, V, W[..., :3]), WHOLE),
    "more features": (summed(both), (Q, K, V, normal(B, S, H, 248, seed=3)), ""),
}
IN_PLAIN_RUNS = (
    "turned",
    "other weights, output alone",
    "one is not differentiated",
    "penalty",
    "crossed",
    "float32",
    "in circles, and another",
    "features",
    "more features",
)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.sweep] * (name not in IN_PLAIN_RUNS)) for name in PROGRAMS]
)
def test_is_found(name):
    program, operands, kernels = PROGRAMS[name]
    assert_as_exact(check(fuse(program), operands, kernels), program, operands)


@emulated.compiler_is_needed
def test_on_the_host():
    program, operands = summed(and_log_sums), (Q, K, V, W)
    assert_as_exact(check(fuse(program), operands, WHOLE, in_jax=False), program, operands)


@pytest.mark.sweep
def test_the_derivative_of_what_is_fused():
    found = check(summed(fuse(both)), (Q, K, V, W), AGAIN)
    assert_as_exact(found, summed(both), (Q, K, V, W))
