"""Attention whose scores are a sum of products of queries and keys: kernels have their features side by side."""

import attention_on_host
import emulated
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_programs import B, D, H, S, assert_as_exact, gradients, normal
from jax.sharding import PartitionSpec as P

from jax_softmax import fuse

pytestmark = pytest.mark.usefixtures("on_the_cpu")
F32, R = jnp.float32, 8  # features of positions
Q, K, V, Q2, K2 = (normal(B, S, H, D, seed=k) for k in range(5))
OF_POSITIONS, KEYS_OF_POSITIONS = normal(B, S, H, R, seed=5), normal(B, S, R, seed=6)
LATENT, OF_EACH, OF_HEADS = normal(B, S, D, seed=7), normal(S, H, D, seed=8), normal(H, D, seed=9)
OF_PAIRS, W = normal(B, S, S, 4, seed=12), normal(4, H, seed=13)
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


def attend_to_shared_values(scores, v):
    return jnp.einsum("bhij,bjd->bihd", jax.nn.softmax(scores.astype(F32) * 0.2).astype(v.dtype), v)


def absorbed(q, v, r, s):
    """Keys are the values, and heads share them."""
    return attend_to_shared_values(of_shared_keys(q, v) + of_shared_keys(r, s), v)


def three(q, k, v, q2, k2, r, s):
    return attend(product(q, k) + product(q2, k2) + of_shared_keys(r, s), v)


def of_the_same_queries(q, k, v, k2):
    return attend(product(q, k) + product(q, k2), v)


def of_the_same_keys(q, k, v, q2):
    return attend(product(q, k) + product(q2, k), v)


def in_a_list(q, k, v, r, s):
    return attend(sum([product(q, k), of_shared_keys(r, s)]), v)


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
    "of the same keys": (of_the_same_keys, (Q, K, V, Q2), 2 * D),
    "in a list": (in_a_list, LATENTS, D + R),
    "by temperatures": (by_temperatures, (*LATENTS, TEMPERATURES), D + R),
    "with a bias": (with_a_bias, (*LATENTS, BIAS), D + R),
}
DIFFERENTIATED = {
    "output": (lambda f: f, ["forward"]),
    "gradients": (lambda f: lambda *a: gradients(f, *a), ["forward", "queries", "keys"]),
    "tangents": (lambda f: lambda *a: jax.jvp(f, a, tuple(jnp.roll(b, 1, -1) for b in a)), ["tangents"]),
    "operands as tangents": (lambda f: lambda *a: jax.jvp(f, a, a), ["tangents"]),
    "several tangents": (
        lambda f: (
            lambda *a: jax.vmap(lambda n: jax.jvp(f, a, tuple(b * n for b in a)))(jnp.arange(1, 3, dtype=a[0].dtype))
        ),
        ["forward", "tangents"],
    ),
}


FORWARD = set(DIFFERENTIATED) - {"output", "gradients"}
CASES = {(name, how) for name in PROGRAMS for how in DIFFERENTIATED}
CASES -= {("with a bias", how) for how in FORWARD}  # of an array
CASES -= {("of the same keys", "operands as tangents")}  # q k twice, of which one is for other queries
CASES -= {("absorbed", "several tangents")}  # of values that heads share, too


@pytest.mark.parametrize("name, how", sorted(CASES))
def test_features_are_side_by_side(name, how):
    attend, operands, features = PROGRAMS[name]
    differentiated, kernels = DIFFERENTIATED[how]
    program = differentiated(attend)
    with emulated.kernels(attention=True), attention_on_host.kernels(in_jax=True) as made:
        found = jax.jit(fuse(program))(*operands)
    assert sorted(params["kernel"] for params, _ in made) == sorted(kernels)
    assert {given[0].shape[-1] for _, given in made} == {features}
    of_pairs = [
        one for params, _ in made for one in params["attention"].side_cotangents if {"i", "j"} <= {*one.letters}
    ]
    assert not of_pairs or name == "with a bias"
    assert_as_exact(found, program, operands)


# Sums of which one product has queries and keys, and the other one is read: programs, and operands.
OTHERS = {
    "of pairs of tokens": (
        lambda q, v, z, w: attend_to_shared_values(of_shared_keys(q, v) + jnp.einsum("bijc,ch->bhij", z, w), v),
        (Q, LATENT, OF_PAIRS, W),
    ),
    "of positions that the batch shares": (
        lambda q, k, v, r, s: attend(product(q, k) + jnp.einsum("ihd,jhd->hij", r, s), v),
        (Q, K, V, OF_EACH, OF_EACH[::-1]),
    ),
    "of keys and heads": (
        lambda q, k, v, u: attend(product(q, k) + jnp.einsum("hd,bjhd->bhj", u, k)[:, :, None], v),
        (Q, K, V, OF_HEADS),
    ),
    "the same one": (lambda q, k, v: attend((x := product(q, k)) + x, v), (Q, K, V)),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_products_are_read(name):
    """Queries and keys are as they would be without that product."""
    attend, operands = OTHERS[name]

    def program(*operands):
        return gradients(attend, *operands)

    with emulated.kernels(attention=True), attention_on_host.kernels(in_jax=True) as made:
        found = jax.jit(fuse(program))(*operands)
    assert {"forward", "queries", "keys"} <= {params["kernel"] for params, _ in made}
    assert all([a.shape for a in given[:2]] == [a.shape for a in operands[:2]] for _, given in made)
    assert_as_exact(found, program, operands)


def test_one_of_two_products_is_watched():
    """It alone is in memory."""

    def watched(q, k, v, r, s):
        x = product(q, k)
        return attend(x + of_shared_keys(r, s), v), x.max()

    with emulated.kernels(attention=True):
        assert str(fuse(watched).explain(*LATENTS)).count("in memory: the scores' product") == 1


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="eight devices are simulated")
@pytest.mark.parametrize("axis", [0, 2], ids=["batch", "heads"])
def test_keys_that_devices_share_in_explicit_mode(axis):
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,))
    spec, operands = P(*["x" if d == axis else None for d in range(4)]), (Q, K, V, OF_POSITIONS, KEYS_OF_POSITIONS[0])

    def with_positions(q, k, v, r, s):
        return attend(product(q, k) + jnp.einsum("bihr,jr->bhij", r, s), v)

    def program(q, *others):
        o, transposed = jax.vjp(with_positions, q, *others)
        return o, *transposed(q)

    with jax.set_mesh(mesh):
        placed = [jax.device_put(a, spec if a.ndim == 4 else P()) for a in operands]
        with emulated.kernels(attention=True), attention_on_host.kernels(in_jax=True) as made:
            found = jax.jit(fuse(program))(*placed)
    assert {"forward", "queries", "keys"} <= {params["kernel"] for params, _ in made}
    assert_as_exact([np.asarray(a) for a in found], program, operands)
