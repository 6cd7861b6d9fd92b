"""Attention in layers that are scanned: what else is made of the scans' arrays stays what it is.

What kernels do is done in JAX (`attention_on_host.py`).
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_programs import AGAIN, assert_as_exact, check, check_together, normal

from jax_softmax import fuse

pytestmark = pytest.mark.usefixtures("on_the_cpu")

B, S, H, D, LAYERS = 2, 16, 2, 8, 3
X, W = normal(B, S, H * D), normal(LAYERS, 3, H * D, H, D, seed=1) / 4
SEGMENTS = np.sort(np.random.default_rng(0).integers(0, 3, (B, S)), -1).astype(np.int32)


def layer(x, w, mask=None):
    q, k, v = (jnp.einsum("bsf,fhd->bshd", x, w[n]) for n in range(3))
    scores = jnp.einsum("bihd,bjhd->bhij", q, k)
    weights = jax.nn.softmax(scores if mask is None else jnp.where(mask, scores, -1e30))
    return x + jnp.einsum("bhij,bjhd->bihd", weights, v).reshape(x.shape), q


def total(x):
    return jnp.sum(x.astype(jnp.float32) * jnp.cos(jnp.arange(x.size, dtype=jnp.float32)).reshape(x.shape))


def queries_are_a_result(x, w):
    def loss(w):
        y, q = jax.lax.scan(layer, x, w)
        return total(y), q

    return jax.grad(loss, has_aux=True)(w)


def queries_are_read_outside(x, w):
    def loss(w):
        y, q = jax.lax.scan(layer, x, w)
        return total(y) + total(jnp.sin(q))

    return jax.grad(loss)(w)


def queries_are_read_layer_by_layer_and_whole(x, w):
    y, q = jax.lax.scan(layer, x, w)
    return jax.lax.scan(lambda y, of_layer: (y + (of_layer * q.mean(0)).reshape(y.shape), None), y, q)[0]


def from_the_last_layer_on(x, w):
    return jax.grad(lambda w: total(jax.lax.scan(layer, x, w, reverse=True)[0]))(w)


def mask_of_all_layers(x, w, segments):
    mask = (segments[:, None, :, None] == segments[:, None, None, :]) & jnp.tri(S, dtype=bool)
    return jax.grad(lambda w: total(jax.lax.scan(lambda x, w: (layer(x, w, mask)[0], None), x, w)[0]))(w)


PROGRAMS = {
    queries_are_a_result: (X, W),
    queries_are_read_layer_by_layer_and_whole: (X, W),
    mask_of_all_layers: (X, W, SEGMENTS),
}
OTHERS = {queries_are_read_outside: (X, W), from_the_last_layer_on: (X, W)}


@pytest.mark.parametrize("programs", [PROGRAMS, pytest.param(OTHERS, marks=pytest.mark.sweep)], ids=["some", "others"])
def test_numbers(programs):
    called = check_together({f.__name__: (f, operands, fuse(f)) for f, operands in programs.items()})
    assert called["forward"] and called["keys"] == called["queries"] > 0


def test_what_layers_read_is_read_again():
    """Keys and values of each layer, and the pairs of which it makes a bias."""
    n = 64
    operands = (
        *(normal(1, n, H, D), normal(LAYERS, 1, n, H, D, seed=1), normal(LAYERS, 1, n, H, D, seed=2)),
        *(normal(LAYERS, 1, n, n, 4, seed=3), normal(LAYERS, 4, H, seed=4)),
    )

    def of_layer(x, read):
        k, v, pairs, w = read
        scores = jnp.einsum("bihd,bjhd->bhij", x, k) / 2 + jnp.einsum("bijc,ch->bhij", pairs, w)
        return x + jnp.einsum("bhij,bjhd->bihd", jax.nn.softmax(scores), v), None

    def program(*operands):
        return jax.grad(lambda x, *read: total(jax.lax.scan(of_layer, x, read)[0]), tuple(range(5)))(*operands)

    assert_as_exact(check(fuse(program), operands, AGAIN), program, operands)
