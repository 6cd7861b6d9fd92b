"""Attention with a sink, as programs write softmax1: what `fuse` finds, and its numbers."""

import emulated
import jax
import jax.numpy as jnp
import pytest
import support
from attention_programs import WHOLE, B, D, H, S, assert_as_exact, check, gradients, normal
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_softmax import fuse

pytestmark = pytest.mark.usefixtures("on_the_cpu")
QKV = normal(B, S, H, D), normal(B, S, H, D, seed=1), normal(B, S, H, D, seed=2)
SINK = normal(H, seed=5)


def scores_of(q, k, row=5):
    """Causal ones; `row` sees nothing, so that all its weight is the sink's."""
    s = jnp.einsum("bihd,bjhd->bhij", q, k).astype(jnp.float32) / 4
    return jnp.where(jnp.tri(S, dtype=bool) & (jnp.arange(S) != row)[:, None], s, -jnp.inf)


def times(weights, v):
    return jnp.einsum("bhij,bjhd->bihd", weights.astype(v.dtype), v)


# ---- A column of its own


def columns(first, last):
    return [(0, 0)] * 3 + [(first, last)]


def padded(q, k, v):
    return times(jax.nn.softmax(jnp.pad(scores_of(q, k), columns(0, 1)))[..., :-1], v)


def padded_in_front(q, k, v):
    scores = jnp.pad(scores_of(q, k), columns(1, 0), constant_values=0.7)
    return times(jax.nn.softmax(scores)[..., 1:], v)


def in_front(q, k, v, sink):
    scores = scores_of(q, k)
    column = jnp.broadcast_to(sink[:, None, None].astype(jnp.float32), (*scores.shape[:-1], 1))
    return times(jax.nn.softmax(jnp.concatenate([column, scores], -1))[..., 1:], v)


# ---- Written out


def by_the_larger(q, k, v, sink):
    """The maximum is that of the sink as well."""
    scores, sink = scores_of(q, k), sink[:, None, None].astype(jnp.float32)
    m = jnp.maximum(scores.max(-1, keepdims=True), sink)
    e = jnp.exp(scores - m)
    return times(e / (e.sum(-1, keepdims=True) + jnp.exp(sink - m)), v)


def by_a_constant_maximum(q, k, v, sink):
    scores, sink = scores_of(q, k), jnp.broadcast_to(sink[None, :, None, None].astype(jnp.float32), (B, H, S, 1))
    m = jax.lax.stop_gradient(jnp.maximum(jnp.max(scores, -1, keepdims=True), sink))
    e = jnp.exp(scores - m)
    return times(e * jnp.reciprocal(jnp.sum(e, -1, keepdims=True) + jnp.exp(sink - m)), v)


def by_the_scores_maximum(q, k, v, sink):
    scores = scores_of(q, k, row=S)
    m = jnp.max(scores, -1, keepdims=True)
    e = jnp.exp(scores - m)
    return times(e / (jnp.exp(sink[:, None, None] - m) + e.sum(-1, keepdims=True)), v)


def softmax1(q, k, v):
    scores = scores_of(q, k)
    m = jnp.maximum(scores.max(-1, keepdims=True), 0)
    e = jnp.exp(scores - m)
    return times(e / (e.sum(-1, keepdims=True) + jnp.exp(-m)), v)


def divided_later(q, k, v, sink):
    scores = scores_of(q, k)
    m = jnp.maximum(scores.max(-1), sink[:, None])
    e = jnp.exp(scores - m[..., None])
    total = e.sum(-1) + jnp.exp(sink[:, None] - m)
    return (times(e, v).astype(jnp.float32) / total.swapaxes(1, 2)[..., None]).astype(v.dtype)


# What is not a sink.


def two_columns(q, k, v):
    return times(jax.nn.softmax(jnp.pad(scores_of(q, k), columns(0, 2)))[..., :-2], v)


def columns_at_both_ends(q, k, v):
    return times(jax.nn.softmax(jnp.pad(scores_of(q, k), columns(1, 1)))[..., 1:-1], v)


def the_other_end_is_cut_off(q, k, v):
    return times(jax.nn.softmax(jnp.pad(scores_of(q, k), columns(0, 1)))[..., 1:], v)


def cut_off_shorter(q, k, v):
    return times(jax.nn.softmax(jnp.pad(scores_of(q, k), columns(0, 1)))[..., :-2], v[:, :-1])


def a_row_more(q, k, v):
    scores = jnp.pad(scores_of(q, k), [(0, 0), (0, 0), (0, 1), (0, 1)])
    return times(jax.nn.softmax(scores)[..., :-1], v)


def and_its_weights(q, k, v):
    weights = jax.nn.softmax(jnp.pad(scores_of(q, k), columns(1, 0)))
    return times(weights[..., 1:], v) * weights[..., :1].swapaxes(1, 2).astype(v.dtype)


# What is written out and is not a sink.


def softmax_one(q, k, v):
    """As it is often copied: the sink is each row's maximum."""
    scores = scores_of(q, k, row=S)
    e = jnp.exp(scores - scores.max(-1, keepdims=True))
    return times(e / (1 + e.sum(-1, keepdims=True)), v)


def two_sinks(q, k, v):
    scores = scores_of(q, k, row=S)
    m = scores.max(-1, keepdims=True)
    e = jnp.exp(scores - m)
    return times(e / (e.sum(-1, keepdims=True) + 2 * jnp.exp(0.5 - m) - jnp.exp(-m)), v)


def twice_a_sink(q, k, v):
    scores = scores_of(q, k, row=S)
    m = scores.max(-1, keepdims=True)
    e = jnp.exp(scores - m)
    return times(e / (e.sum(-1, keepdims=True) + 2 * jnp.exp(-m)), v)


def by_two_maxima(q, k, v):
    scores = scores_of(q, k)
    m = scores.max(-1, keepdims=True)
    larger = jnp.maximum(m, 1.5)
    e = jnp.exp(scores - larger)
    return times(e / (e.sum(-1, keepdims=True) + jnp.exp(1.5 - m)), v)


def and_its_sums(q, k, v):
    scores = scores_of(q, k)
    m = jnp.maximum(scores.max(-1, keepdims=True), 0)
    e = jnp.exp(scores - m)
    total = e.sum(-1, keepdims=True) + jnp.exp(-m)
    return times(e / total, v), m + jnp.log(total)


def of_the_next_row(q, k, v):
    scores = scores_of(q, k)
    m = jnp.maximum(scores.max(-1, keepdims=True), 0)
    e = jnp.exp(scores - m)
    return times(e / (e.sum(-1, keepdims=True) + jnp.exp(-jnp.roll(m, 1, 2))), v)


@jax.default_matmul_precision("highest")
def in_float32(q, k, v):
    return softmax1(*(a.astype(jnp.float32) for a in (q, k, v)))


def differentiated(f):
    return lambda *operands: gradients(f, *operands)


FOUND = {
    "padded": (padded, QKV),
    "padded in front": (padded_in_front, QKV),
    "in front": (in_front, (*QKV, SINK)),
    "written out by the larger": (by_the_larger, (*QKV, SINK)),
    "written out by a constant maximum": (by_a_constant_maximum, (*QKV, SINK)),
    "written out by the scores' maximum": (by_the_scores_maximum, (*QKV, SINK)),
    "written out, softmax1": (softmax1, QKV),
    "written out, divided later": (divided_later, (*QKV, SINK)),
}
REFUSED = [
    *(
        two_columns,
        columns_at_both_ends,
        the_other_end_is_cut_off,
        cut_off_shorter,
        a_row_more,
        and_its_weights,
        softmax_one,
    ),
    *(two_sinks, twice_a_sink, by_two_maxima, and_its_sums, of_the_next_row, in_float32),
]
IN_PLAIN_RUNS = "padded", "in front", "written out by the larger", "written out, divided later"


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.sweep] * (name not in IN_PLAIN_RUNS)) for name in FOUND]
)
def test_is_found(name):
    program, operands = FOUND[name]
    program = differentiated(program)
    assert_as_exact(check(fuse(program), operands, WHOLE), program, operands)


@pytest.mark.parametrize("program", REFUSED)
def test_what_stays_as_it_is(program):
    assert_as_exact(check(fuse(program), QKV, ""), program, QKV)


def test_what_is_no_attention_has_no_column():
    """A softmax of scores and a column would be written for nothing."""

    def program(q, k, v):
        return in_float32(q, k, v), jax.nn.softmax(q)

    with emulated.all_kernels(attention=True):
        assert [line.shape for line in fuse(program).explain(*QKV)] == [(B, S, H, D)]


@pytest.mark.sweep
@pytest.mark.parametrize("program", [by_the_larger, padded])
def test_in_explicit_mode(program):
    """The sink's column is sharded as the scores are."""
    mesh, operands = (
        support.mesh_of_cpus((2, 2), AxisType.Explicit),
        (*QKV, SINK)[: 4 if program is by_the_larger else 3],
    )
    placed = [
        jax.device_put(a, NamedSharding(mesh, P("data", None, "model") if a.ndim == 4 else P())) for a in operands
    ]

    def gradients_of_sum(*a):
        return jax.grad(lambda *a: jnp.sum(jnp.sin(program(*a).astype(jnp.float32))), range(len(a)))(*a)

    with jax.set_mesh(mesh):
        found = check(fuse(gradients_of_sum), placed, WHOLE)
    assert_as_exact(found, gradients_of_sum, operands)
