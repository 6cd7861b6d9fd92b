"""A small GPT in jax.numpy: its sizes, its parameters, and its logits with an attention that the caller chooses."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp


class Size(NamedTuple):
    layers: int
    width: int
    heads: int
    batch: int
    length: int
    vocabulary: int


FULL = Size(6, 768, 12, 8, 1024, 50304)
LONG = FULL._replace(batch=2, length=4096)


@functools.partial(jax.jit, static_argnames="size")
def initial_parameters(key: jax.Array, size: Size) -> dict:
    keys = iter(jax.random.split(key, 2 + 4 * size.layers))

    def matrix(*shape):
        return 0.02 * jax.random.normal(next(keys), shape, jnp.bfloat16)

    d = size.width
    blocks = [
        {
            "norm1": jnp.ones(d, jnp.bfloat16),
            "qkv": matrix(d, 3, size.heads, d // size.heads),
            "out": matrix(size.heads, d // size.heads, d),
            "norm2": jnp.ones(d, jnp.bfloat16),
            "up": matrix(d, 4 * d),
            "down": matrix(4 * d, d),
        }
        for _ in range(size.layers)
    ]
    return {
        "tokens": matrix(size.vocabulary, d),
        "positions": matrix(size.length, d),
        "blocks": blocks,
        "norm": jnp.ones(d, jnp.bfloat16),
    }


def initial_arguments(key: jax.Array, size: Size) -> tuple[dict, jax.Array, jax.Array]:
    """Parameters, tokens, and as labels the token that follows each."""
    text_key, parameters_key = jax.random.split(key)
    text = jax.random.randint(text_key, (size.batch, size.length + 1), 0, size.vocabulary)
    return initial_parameters(parameters_key, size), text[:, :-1], text[:, 1:]


def softmax_with_fill(scores, causal):
    return jax.nn.softmax(jnp.where(causal, scores, jnp.finfo(scores.dtype).min))


def normalized(x, scale):
    wide = x.astype(jnp.float32)
    centered = wide - wide.mean(-1, keepdims=True)
    deviation = jnp.sqrt(jnp.square(centered).mean(-1, keepdims=True) + 1e-5)
    return (centered / deviation).astype(x.dtype) * scale


def attention(q, k, v, softmax=softmax_with_fill):
    """Causal attention of (batch, heads, length, features)."""
    scores = jnp.einsum("bhqe,bhke->bhqk", q * q.shape[-1] ** -0.5, k)
    causal = jnp.tri(q.shape[2], dtype=bool)
    return jnp.einsum("bhqk,bhke->bhqe", softmax(scores, causal), v)


def logits_of(parameters, tokens, attention=attention):
    x = parameters["tokens"][tokens] + parameters["positions"]
    for block in parameters["blocks"]:
        q, k, v = jnp.einsum("bld,dihe->ibhle", normalized(x, block["norm1"]), block["qkv"])
        x += jnp.einsum("bhqe,hed->bqd", attention(q, k, v), block["out"])
        x += jax.nn.gelu(normalized(x, block["norm2"]) @ block["up"]) @ block["down"]
    return normalized(x, parameters["norm"]) @ parameters["tokens"].T
