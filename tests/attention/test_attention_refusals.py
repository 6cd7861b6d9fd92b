"""Programs that are just not attention, or just are: `fuse` says why not, and they compute the same.

What kernels do is done in JAX (`attention_on_host.py`). All programs are one to XLA.
"""

import functools

import emulated
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_programs import check_together, gradients, normal

from jax_softmax import fuse

pytestmark = pytest.mark.usefixtures("on_the_cpu")

B, QUERIES, KEYS, H, D = 2, 20, 24, 2, 8
OPERANDS = normal(B, QUERIES, H, D), normal(B, KEYS, H, D, seed=1), normal(B, KEYS, H, D, seed=2)
SINK = normal(H, seed=3)
BIAS, OTHER_BIAS = normal(H, QUERIES, KEYS, seed=4), normal(H, QUERIES, KEYS, seed=5)
KEEP, KEEP_BACKWARDS = (np.random.default_rng(seed).random((B, H, QUERIES, KEYS)) < 0.8 for seed in (0, 1))
LONG = normal(1, 20, 1, D, seed=6), normal(1, 80, 1, D, seed=7), normal(1, 80, 1, D, seed=8)
SQUARE = normal(24, 16, seed=6), normal(16, 16, seed=7), normal(16, 16, seed=8)
LATE = np.arange(80) < 10
FEATURES_IN_FRONT = tuple(a.transpose(3, 0, 1, 2) for a in OPERANDS)
SOME_QUERIES = (np.arange(QUERIES) % 5 > 0)[:, None]
COLUMNS = np.arange(KEYS, dtype=np.int16)
PAIRS = normal(B, QUERIES, KEYS, 8, seed=9)


def of_each_query(v):
    return jnp.sin(v.swapaxes(1, 2)[:, :, None] * jnp.arange(QUERIES, dtype=v.dtype)[:, None, None])


def scores(q, k):
    return jnp.einsum("bihd,bjhd->bhij", q, k).astype(jnp.float32) / 2


def output(weights, v, **options):
    return jnp.einsum("bhij,bjhd->bihd", weights.astype(v.dtype), v, **options)


def softmax(s, **options):
    return jax.nn.softmax(s, **options)


def with_column(s, sink):
    return jnp.concatenate([s, jnp.broadcast_to(sink.astype(s.dtype)[None, :, None, None], (*s.shape[:-1], 1))], -1)


@jax.custom_vjp
def dropped_otherwise_backwards(y):
    return jnp.where(KEEP, y / 0.8, 0)


dropped_otherwise_backwards.defvjp(
    lambda y: (dropped_otherwise_backwards(y), None), lambda _, t: (jnp.where(KEEP_BACKWARDS, t / 0.8, 0),)
)


@jax.custom_vjp
def times_rounded_keys(q, k):
    return jnp.einsum("bihd,bjhd->bhij", q, jnp.round(k))


def _of_keys_as_they_are(operands, t):
    return jax.vjp(lambda q, k: jnp.einsum("bihd,bjhd->bhij", q, k), *operands)[1](t)


times_rounded_keys.defvjp(lambda q, k: (times_rounded_keys(q, k), (q, k)), _of_keys_as_they_are)


@jax.custom_vjp
def twice_for_queries(q, k):
    return jnp.einsum("bihd,bjhd->bhij", q, k)


twice_for_queries.defvjp(
    lambda q, k: (twice_for_queries(q, k), (q, k)),
    lambda kept, t: (jnp.einsum("bhij,bjhd->bihd", 2 * t, kept[1]), jnp.einsum("bhij,bihd->bjhd", t, kept[0])),
)


@jax.custom_vjp
def of_turned_keys_backwards(q, k):
    return q @ k.T


of_turned_keys_backwards.defvjp(
    lambda q, k: (of_turned_keys_backwards(q, k), (q, k)),
    lambda kept, t: (jnp.einsum("ij,dj->id", t, kept[1]), t.T @ kept[0]),
)


def two_cotangents(q, k, v):
    o, transposed = jax.vjp(lambda *a: output(softmax(scores(*a[:2])), a[2]), q, k, v)
    return transposed(jnp.cos(o)), transposed(jnp.sin(o))


def differentiated(f, *more):
    return lambda *a: gradients(f, *a), (*OPERANDS, *more)


# The program, its operands, and the reason; None if no softmax is left that could say it.
NOT_ATTENTION = {
    "a constant instead of what is dropped": (
        lambda q, k, v: output(jnp.where(KEEP, softmax(scores(q, k)), 0.5), v),
        OPERANDS,
        "weights or gradients go through what is not linear",
    ),
    "squares of weights": (
        lambda q, k, v: output(softmax(scores(q, k)) ** 2, v),
        OPERANDS,
        "weights or gradients go through what is not linear",
    ),
    "a number is added to weights": (
        lambda q, k, v: output(softmax(scores(q, k)) + 0.1, v),
        OPERANDS,
        "weights or gradients go through what is not linear",
    ),
    "the inverse of weights": (
        lambda q, k, v: output(1 / (1 + softmax(scores(q, k))), v),
        OPERANDS,
        "weights or gradients go through what is not linear",
    ),
    "where= beside a column": (
        lambda q, k, v, sink: output(
            softmax(
                with_column(scores(q, k), sink), where=jnp.pad(KEEP, [(0, 0)] * 3 + [(0, 1)], constant_values=True)
            )[..., :-1],
            v,
        ),
        (*OPERANDS, SINK),
        "where= beside a column of its own",
    ),
    "a column that is read": (
        *differentiated(
            lambda q, k, v, sink: (lambda w: output(w[..., :-1], v) * (1 + w[..., -1].mean().astype(v.dtype)))(
                softmax(with_column(scores(q, k), sink))
            ),
            SINK,
        ),
        None,
    ),
    "two columns": (
        lambda q, k, v, sink: output(softmax(with_column(with_column(scores(q, k), sink), sink))[..., :-2], v),
        (*OPERANDS, SINK),
        None,
    ),
    "all columns but the first": (
        lambda q, k, v, sink: output(softmax(with_column(scores(q, k), sink))[..., 1:], v),
        (*OPERANDS, SINK),
        None,
    ),
    "weights of heads": (
        lambda q, k, v: output(softmax(scores(q, k), axis=1), v),
        OPERANDS,
        "not one operand of the scores' product has the keys",
    ),
    "weights of queries": (lambda q, k, v: output(softmax(scores(q, k), axis=2), v), OPERANDS, None),
    "weights times an array of their shape": (
        lambda q, k, v: jnp.einsum("bhij,bhij->bh", softmax(scores(q, k)), KEEP.astype(np.float32)),
        OPERANDS,
        "products read the weights in other ways",
    ),
    "a sum over heads": (
        *differentiated(lambda q, k, v: jnp.einsum("bhij,bjhd->bid", softmax(scores(q, k)).astype(v.dtype), v)),
        "products read the weights in other ways",
    ),
    "two cotangents": (two_cotangents, OPERANDS, None),
    "a bias alone is learned": (
        lambda q, k, v, bias: gradients(lambda bias: output(softmax(scores(q, k) + bias), v), bias),
        (*OPERANDS, BIAS),
        "no product reads the scores' gradient",
    ),
    "queries' gradient twice": (
        *differentiated(lambda q, k, v: output(softmax(twice_for_queries(q, k)), v)),
        "products read different gradients of the scores",
    ),
    "another dropout backwards": (
        *differentiated(lambda q, k, v: output(dropped_otherwise_backwards(softmax(scores(q, k))), v)),
        "the weights' gradient is not that of the weights",
    ),
    "a query for each head": (
        lambda q, k, v: jnp.einsum(
            "bhj,bjhd->bhd", softmax(jnp.einsum("bhd,bjhd->bhj", q[:, 0], k)).astype(v.dtype), v
        ),
        OPERANDS,
        "keys have all dimensions of the queries, or part of a dimension",
    ),
    "values of each query": (
        lambda q, k, v: jnp.einsum("bhij,bhijd->bihd", softmax(scores(q, k)).astype(v.dtype), of_each_query(v)),
        OPERANDS,
        "keys and values must have the same batch letters, of those of q",
    ),
    "queries and keys of int8": (
        lambda q, k, v: output(softmax(scores(*(jnp.round(4 * a).astype(jnp.int8) for a in (q, k)))), v),
        OPERANDS,
        "queries, keys and values are of bfloat16 and int8",
    ),
    "queries and keys of bool": (
        lambda q, k, v: output(softmax(scores(q > 0, k > 0)), v),
        OPERANDS,
        "queries, keys and values are of bfloat16 and bool",
    ),
    "values of two dimensions": (
        lambda q, k, v: jnp.einsum(
            "bhij,bjhcd->bihcd", softmax(scores(q, k)).astype(v.dtype), v.reshape(B, KEYS, H, 2, 4)
        ),
        OPERANDS,
        "features are not one dimension",
    ),
    "keys of 16 bits beside": (
        lambda q, k, v, columns: output(softmax(scores(q, k) + columns), v),
        (*OPERANDS, COLUMNS),
        "scores read an array of int16",
    ),
    "scores of no product": (
        lambda q, k, v, bias: output(jnp.broadcast_to(softmax(bias), (B, H, QUERIES, KEYS)), v),
        (*OPERANDS, BIAS),
        None,
    ),
    "weights' sums over queries": (
        lambda q, k, v: (lambda w: (output(w, v), w.sum(2)))(softmax(scores(q, k))),
        OPERANDS,
        None,
    ),
}


# What is attention, as far from the above as it gets.
ATTENTION = {
    "values of float16": differentiated(lambda q, k, v: output(softmax(scores(q, k)), v.astype(jnp.float16))),
    "an output of float32": differentiated(
        lambda q, k, v: output(softmax(scores(q, k)), v, preferred_element_type=jnp.float32)
    ),
    "weights of float32 and values of 16 bits": differentiated(
        lambda q, k, v: jnp.einsum("bhij,bjhd->bihd", softmax(scores(q, k).astype(jnp.float32)), v)
    ),
    "scores of float32 and values of 16 bits, in float32": differentiated(
        lambda q, k, v: jnp.einsum(
            "bhij,bjhd->bihd", softmax(scores(q.astype(jnp.float32), k.astype(jnp.float32))), v.astype(jnp.float32)
        )
    ),
    "values that all heads share": differentiated(
        lambda q, k, v: jnp.einsum("bhij,bjd->bihd", softmax(scores(q, k)).astype(v.dtype), v[:, :, 0])
    ),
    "keys that all heads share": differentiated(
        lambda q, k, v: output(softmax(jnp.einsum("bihd,bjd->bhij", q, k[:, :, 0])), v)
    ),
    "queries that the batch shares": differentiated(
        lambda q, k, v: output(softmax(jnp.einsum("ihd,bjhd->bhij", q[0], k)), v)
    ),
    "a mask of each example": (
        lambda *a: jax.vmap(
            lambda mask: gradients(lambda q, k, v: output(softmax(jnp.where(mask, scores(q, k), -1e30)), v), *a)
        )(KEEP),
        OPERANDS,
    ),
    "a mask of queries and keys": (lambda q, k, v: output(softmax(scores(q, k), where=KEEP[0, 0]), v), OPERANDS),
    "a mask of keys": (lambda q, k, v: output(softmax(scores(q, k), where=KEEP[:, :1, :1]), v), OPERANDS),
    "a linear map of weights": (
        lambda q, k, v: output(
            -jnp.where(KEEP, softmax(scores(q, k)), 0) / 2 * SINK.astype(jnp.float32)[:, None, None], v
        ),
        OPERANDS,
    ),
    "a column": (
        lambda q, k, v, sink: output(softmax(with_column(scores(q, k), sink))[..., :-1], v),
        (*OPERANDS, SINK),
    ),
    "features in front": (
        lambda q, k, v: jnp.einsum(
            "bhij,ebjh->bihe", softmax(jnp.einsum("dbih,dbjh->bhij", q, k).astype(jnp.float32)).astype(v.dtype), v
        ),
        FEATURES_IN_FRONT,
    ),
    "a mask of keys, batch and queries": (
        lambda q, k, v, mask: output(softmax(jnp.where(mask.transpose(1, 2, 0)[:, None], scores(q, k), -1e30)), v),
        (*OPERANDS, KEEP[:, 0].transpose(2, 0, 1)),
    ),
    "a column beside scores that see nothing": (
        *differentiated(
            lambda q, k, v, sink: output(
                softmax(with_column(jnp.where(SOME_QUERIES, scores(q, k), -jnp.inf), sink))[..., :-1], v
            ),
            SINK,
        ),
    ),
    "a product for each pair is added": (
        *differentiated(
            lambda q, k, v, pairs, w: output(softmax(scores(q, k) + jnp.einsum("bijc,ch->bhij", pairs, w)), v),
            PAIRS,
            SQUARE[1][:8, :2],
        ),
    ),
    "a product of other keys with fewer features is added": (
        *differentiated(
            lambda q, k, v, r: output(softmax(scores(q, k) + jnp.einsum("bihd,bjd->bhij", q[..., :4], r)), v),
            OPERANDS[1][:, :, 0, :4],
        ),
    ),
    "two products of as many features": differentiated(
        lambda q, k, v: output(softmax(scores(q, k) + jnp.tanh(scores(q, v))), v)
    ),
    "rounded keys whose gradient is that of others": differentiated(
        lambda q, k, v: output(softmax(times_rounded_keys(q, k)), v)
    ),
    "queries' gradient by turned keys": (
        lambda *a: gradients(lambda q, k, v: softmax(of_turned_keys_backwards(q, k)) @ v, *a),
        SQUARE,
    ),
    "scores that are a result": (lambda q, k, v: (lambda s: (output(softmax(s), v), s))(scores(q, k)), OPERANDS),
    "maxima of scores that are watched": differentiated(
        lambda q, k, v: (lambda s: output(softmax(s), v) + 1e-2 * jax.lax.stop_gradient(s.max()).astype(v.dtype))(
            jnp.where(KEEP[0, 0], scores(q, k), -1e30)
        )
    ),
    "small fills": (
        lambda q, k, v: output(softmax(jnp.where(LATE, scores(q, k) - 1e4, -1e4)), v),
        LONG,
    ),
}


@functools.cache
def fused(name):
    return fuse((NOT_ATTENTION | ATTENTION)[name][0])


@pytest.mark.parametrize("name", NOT_ATTENTION)
def test_says_why_not(name):
    _, operands, reason = NOT_ATTENTION[name]
    with emulated.kernels(attention=True):
        report = fused(name).explain(*operands)
    assert "attention" not in {line.op for line in report}
    assert reason is None or f"not attention: {reason}" in str(report)


@pytest.mark.parametrize("programs", [NOT_ATTENTION, ATTENTION], ids=["not attention", "attention"])
def test_numbers(programs):
    called = check_together({name: (f, operands, fused(name)) for name, (f, operands, *_) in programs.items()})
    assert called["forward"] == (len(programs) if programs is ATTENTION else 0)
