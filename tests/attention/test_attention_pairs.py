"""Attention whose scores are a sum of products of queries and keys: kernels have their features side by side."""

import attention_on_host
import emulated
import jax
import jax.numpy as jnp
import pytest
from attention_programs import B, D, H, S, assert_as_exact, gradients, normal

from jax_softmax import fuse

pytestmark = pytest.mark.usefixtures("on_the_cpu")
F32, R = jnp.float32, 8  # features of positions
Q, K, V, Q2, K2 = (normal(B, S, H, D, seed=k) for k in range(5))
OF_POSITIONS, KEYS_OF_POSITIONS = normal(B, S, H, R, seed=5), normal(B, S, R, seed=6)
LATENT, OF_EACH, OF_HEADS = normal(B, S, D, seed=7), normal(S, H, D, seed=8), normal(H, D, seed=9)
TEMPERATURES, BIAS = normal(H, 1, 1, seed=10).astype(F32), normal(B, H, S, S, seed=11)
CAUSAL = jnp.tri(S, dtype=bool)


def product(q, k, **how):
    return jnp.einsum("bihd,bjhd->bhij", q, k, **how)


def of_shared_keys(q, k, **how):
    return jnp.einsum("bihd,bjd->bhij", q, k, **how)


def attend(scores, v):
    weights = jax.nn.softmax(jnp.where(CAUSAL, scores.astype(F32) * 0.2, -1e30)).astype(v.dtype)
    return jnp.einsum("bhij,bjhd->bihd", weights, v)


def latent(q, k, v, r, s):
    return attend(product(q, k) + of_shared_keys(r, s), v)


def in_float32(q, k, v, r, s):
    wide = {"preferred_element_type": F32}
    return attend(product(q, k, **wide) + of_shared_keys(r, s, **wide), v)


def absorbed(q, v, r, s):
    """Keys are the values, and heads share them."""
    scores = (of_shared_keys(q, v) + of_shared_keys(r, s)).astype(F32) * 0.2
    return jnp.einsum("bhij,bjd->bihd", jax.nn.softmax(scores).astype(v.dtype), v)


def three(q, k, v, q2, k2, r, s):
    return attend(product(q, k) + product(q2, k2) + of_shared_keys(r, s), v)


def of_the_same_queries(q, k, v, k2):
    return attend(product(q, k) + product(q, k2), v)


def of_contents_and_positions(q, k, v, positions, u):
    of_heads = jnp.einsum("hd,bjhd->bhj", u, k)[:, :, None]
    return attend(product(q, k) + of_heads + jnp.einsum("bihd,jhd->bhij", q, positions), v)


def by_temperatures(q, k, v, r, s, temperatures):
    return attend((product(q, k) + of_shared_keys(r, s)) * temperatures, v)


def with_a_bias(q, k, v, r, s, bias):
    return attend((product(q, k) + of_shared_keys(r, s)) * 0.5 + bias, v)


LATENTS = Q, K, V, OF_POSITIONS, KEYS_OF_POSITIONS
# Programs, operands, and how many features kernels have.
PROGRAMS = {
    "latent": (latent, LATENTS, D + R),
    "in float32": (in_float32, LATENTS, D + R),
    "absorbed": (absorbed, (Q, LATENT, OF_POSITIONS, KEYS_OF_POSITIONS), D + R),
    "three": (three, (Q, K, V, Q2, K2, OF_POSITIONS, KEYS_OF_POSITIONS), 2 * D + R),
    "of the same queries": (of_the_same_queries, (Q, K, V, K2), 2 * D),
    "of contents and positions": (of_contents_and_positions, (Q, K, V, OF_EACH, OF_HEADS), 3 * D),
    "by temperatures": (by_temperatures, (*LATENTS, TEMPERATURES), D + R),
    "with a bias": (with_a_bias, (*LATENTS, BIAS), D + R),
}
DIFFERENTIATED = {
    "output": (lambda f: f, ["forward"]),
    "gradients": (lambda f: lambda *a: gradients(f, *a), ["forward", "queries", "keys"]),
    "tangents": (lambda f: lambda *a: jax.jvp(f, a, tuple(jnp.roll(b, 1, -1) for b in a)), ["tangents"]),
}


CASES = {(name, how) for name in PROGRAMS for how in DIFFERENTIATED} - {("with a bias", "tangents")}  # of an array


@pytest.mark.parametrize("name, how", sorted(CASES))
def test_features_are_side_by_side(name, how):
    attend, operands, features = PROGRAMS[name]
    differentiated, kernels = DIFFERENTIATED[how]
    program = differentiated(attend)
    with emulated.kernels(attention=True), attention_on_host.kernels(in_jax=True) as made:
        found = jax.jit(fuse(program))(*operands)
    assert sorted(params["kernel"] for params, _ in made) == sorted(kernels)
    assert {given[0].shape[-1] for _, given in made} == {features}
    assert_as_exact(found, program, operands)
