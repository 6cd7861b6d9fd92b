"""Attention of maps, windows and frames, whose dimensions become one of queries and one of keys after projections."""

import attention_on_host
import emulated
import jax
import jax.numpy as jnp
import pytest
from attention_programs import assert_as_exact, gradients, normal

from jax_softmax import fuse

pytestmark = pytest.mark.usefixtures("on_the_cpu")
B, X, Y, H, D = 2, 8, 8, 4, 16  # a map's rows and columns
MAPS = [normal(B, X, Y, H, D, seed=k) for k in range(3)]
CHANNELS_FIRST = [normal(B, H * D, X, Y, seed=k) for k in range(3)]
WORDS = [normal(B, 32, H, D, seed=k) for k in range(3)]
VALID = normal(B, X, Y, seed=4) + 1
FRAMES = [normal(B, 3, X, Y, H, D, seed=k) for k in range(3)]


def flat(a):
    return a.reshape(a.shape[0], -1, H, D)


def attend(q, k, v, mask=None):
    scores = jnp.einsum("bihd,bjhd->bhij", q, k) * 0.25
    scores = scores if mask is None else jnp.where(mask, scores, -1e9)
    return jnp.einsum("bhij,bjhd->bihd", jax.nn.softmax(scores), v)


def of_a_map(q, k, v):
    return attend(*map(flat, (q, k, v))).reshape(q.shape)


def to_words(q, k, v):
    return attend(flat(q), k, v).reshape(q.shape)


def of_words(q, k, v):
    return attend(q, flat(k), flat(v))


def channels_first(q, k, v):
    def heads(a):
        return a.reshape(B, H, D, X * Y).swapaxes(2, 3)

    return jax.nn.softmax(heads(q) @ heads(k).mT) @ heads(v)


def in_windows(q, k, v):
    def windows(a):
        return a.reshape(B, X // 4, 4, Y // 4, 4, H, D).transpose(0, 1, 3, 2, 4, 5, 6).reshape(-1, 16, H, D)

    return attend(*map(windows, (q, k, v)))


def in_frames(q, k, v):
    def frames(a):
        return a.reshape(B * 3, X * Y, H, D)

    return attend(*map(frames, (q, k, v))).reshape(q.shape)


def after_frames(q, k, v):
    frame = jnp.arange(3 * X * Y) // (X * Y)
    return attend(*map(flat, (q, k, v)), frame[:, None] >= frame).reshape(q.shape)


def of_pixels_that_are_valid(q, k, v, valid):
    """As DETR's."""
    return attend(q, flat(k), flat(v), valid.reshape(B, 1, 1, X * Y) > 0)


def biased_in_rows(q, k, v, bias):
    """For each two rows of the map."""
    bias = jnp.broadcast_to(bias[:, None, :, None], (X, Y, X, Y)).reshape(X * Y, X * Y)
    scores = jnp.einsum("bihd,bjhd->bhij", flat(q), flat(k)) + bias
    return jnp.einsum("bhij,bjhd->bihd", jax.nn.softmax(scores), flat(v))


def of_temperatures_of_rows(q, k, v, temperatures):
    temperatures = jnp.broadcast_to(temperatures[:, None], (X, Y)).reshape(X * Y, 1)
    scores = jnp.einsum("bihd,bjhd->bhij", flat(q), k) * temperatures
    return jnp.einsum("bhij,bjhd->bihd", jax.nn.softmax(scores), v)


def groups_are_queries(q, k, v, temperatures):
    """Heads that share keys, with a temperature for each."""
    q = q.reshape(B, 32, 2, 2, D).transpose(0, 2, 3, 1, 4).reshape(B, 2, 64, D)
    k, v = (a[:, :, :2].swapaxes(1, 2) for a in (k, v))
    scores = q @ k.mT * jnp.repeat(temperatures.reshape(2, 2), 32, 1)[..., None]
    return jax.nn.softmax(scores) @ v


# Programs, operands, and how many queries and keys kernels have; None where groups may be queries or beside them.
PROGRAMS = {
    "of a map": (of_a_map, MAPS, (X * Y, X * Y)),
    "to words": (to_words, [MAPS[0], *WORDS[1:]], (X * Y, 32)),
    "of words": (of_words, [WORDS[0], *MAPS[1:]], (32, X * Y)),
    "channels first": (channels_first, CHANNELS_FIRST, (X * Y, X * Y)),
    "in windows": (in_windows, MAPS, (16, 16)),
    "in frames": (in_frames, FRAMES, (X * Y, X * Y)),
    "after frames": (after_frames, FRAMES, (3 * X * Y, 3 * X * Y)),
    "of pixels that are valid": (of_pixels_that_are_valid, [WORDS[0], *MAPS[1:], VALID], (32, X * Y)),
    "biased in rows": (biased_in_rows, [*MAPS, normal(X, X, seed=5)], (X * Y, X * Y)),
    "of temperatures of rows": (of_temperatures_of_rows, [MAPS[0], *WORDS[1:], normal(X, seed=6)], (X * Y, 32)),
    "groups are queries": (groups_are_queries, [*WORDS, normal(H, seed=7)], None),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_is_found(name):
    attend, operands, extents = PROGRAMS[name]

    def program(*operands):
        tangents = tuple(jnp.roll(a, 1, -1) for a in operands)
        return gradients(attend, *operands), jax.jvp(attend, tuple(operands), tangents)[1]

    with emulated.kernels(attention=True), attention_on_host.kernels(in_jax=True) as made:
        found = jax.jit(fuse(program))(*operands)
    assert {params["kernel"] for params, _ in made} >= {"forward", "queries", "keys", "tangents"}
    for params, given in made:
        letters = params["attention"].letters
        q, k = (dict(zip(of, a.shape, strict=True)) for of, a in zip(letters[:2], given[:2], strict=True))
        assert extents in (None, (q["i"], k["j"]))
    assert_as_exact(found, program, operands)
