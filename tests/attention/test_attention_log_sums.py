"""Attention beside the log-sum-exps of its scores, as results and in losses: what `fuse` finds, and its numbers."""

import emulated
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import support
from attention_programs import AGAIN, WHOLE, B, D, H, S, assert_as_exact, check, normal
from jax.scipy.special import logsumexp as own_logsumexp  # by name: JAX's, also under fuse
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jax_softmax
from jax_softmax import fuse

pytestmark = pytest.mark.usefixtures("on_the_cpu")
QKV = normal(B, S, H, D), normal(B, S, H, D, seed=1), normal(B, S, H, D, seed=2)


def scores_of(q, k):
    return jnp.einsum("bihd,bjhd->bhij", q, k) / 4


def causal(q, k):
    return jnp.where(jnp.tri(S, dtype=bool), 20 * jnp.tanh(scores_of(q, k).astype(jnp.float32) / 20), -jnp.inf)


def attend(s, v):
    return jnp.einsum("bhij,bjhd->bihd", jax.nn.softmax(s).astype(v.dtype), v)


def by_operator(q, k, v):
    s = causal(q, k)
    return attend(s, v), jax.nn.logsumexp(s, -1)


def written_out(q, k, v):
    s = scores_of(q, k).astype(jnp.float32)
    m = s.max(-1, keepdims=True)
    e = jnp.exp(s - m)
    total = e.sum(-1, keepdims=True)
    return jnp.einsum("bhij,bjhd->bihd", (e / total).astype(v.dtype), v), m, total


def by_hand(q, k, v):
    o, m, total = written_out(q, k, v)
    return o, (m + jnp.log(total))[..., 0]


def by_jax(q, k, v):
    s = scores_of(q, k)
    return attend(s, v), own_logsumexp(s.astype(jnp.float32), -1, keepdims=True)


def divided_later(q, k, v):
    s = scores_of(q, k).astype(jnp.float32)
    m = jax.lax.stop_gradient(s.max(-1, keepdims=True))
    e = jnp.exp(s - m)
    total = e.sum(-1, keepdims=True)
    o = jnp.einsum("bhij,bjhd->bhid", e.astype(v.dtype), v) / total.astype(v.dtype)
    return o, jnp.log(total) + m


def with_mask(q, k, v):
    s, seen = scores_of(q, k), (jnp.arange(S) % 7 > 0)[:, None] & jnp.tri(S, dtype=bool)
    weights = jax.nn.softmax(s, where=seen)
    return jnp.einsum("bhij,bjhd->bihd", weights, v), jax.nn.logsumexp(s.astype(jnp.float32), -1, where=seen)


def in_losses(program):
    """The gradients of a loss of o and the log-sum-exp's square, and both."""

    def with_loss(q, k, v):
        def loss(q, k, v):
            o, lse = program(q, k, v)
            by = jnp.cos(jnp.arange(o.size, dtype=jnp.float32)).reshape(o.shape)
            return jnp.sum(o.astype(jnp.float32) * by) + 0.1 * jnp.sum(lse**2), (o, lse)

        return jax.grad(loss, (0, 1, 2), has_aux=True)(q, k, v)

    return with_loss


def in_layers(x, w):
    """A z-loss of scanned layers."""

    def layer(carry, w):
        x, z = carry
        o, lse = by_operator(*(jnp.einsum("bsf,fhd->bshd", x, w[n]) for n in range(3)))
        return (x + o.reshape(x.shape), z + jnp.mean(lse**2)), None

    (x, z), _ = jax.lax.scan(layer, (x, 0.0), w)
    return x, z


def summed(f):
    return lambda *a: jax.grad(lambda *a: sum(jnp.sum(jnp.sin(r.astype(jnp.float32))) for r in f(*a)), (0, 1))(*a)


# What reads the rows' numbers as something else than their log-sum-exp, or numbers of other rows.


def and_maxima(q, k, v):
    s = causal(q, k)
    return attend(s, v), *jax_softmax.logsumexp(s, return_max=True)


def and_a_mean_of_maxima(q, k, v):
    s = causal(q, k)
    lse, m = jax_softmax.logsumexp(s, return_max=True)
    return attend(s, v), lse + jnp.mean(m)


def and_sums(q, k, v):
    o, _, total = written_out(q, k, v)
    return o, total


def and_maxima_twice(q, k, v):
    o, m, total = written_out(q, k, v)
    return o, 2 * m + jnp.log(total)


def of_other_scores(q, k, v):
    s = scores_of(q, k)
    return attend(s, v), jax.nn.logsumexp(2 * s, -1)


def of_fewer_scores(q, k, v):
    s = scores_of(q, k)
    return attend(s, v), jax.nn.logsumexp(s, -1, where=jnp.tri(S, dtype=bool))


def of_rounded_scores(q, k, v):
    s = scores_of(q, k).astype(jnp.float32) / 3
    return attend(s, v), jax.nn.logsumexp(s.astype(jnp.bfloat16), -1)


def along_queries(q, k, v):
    s = scores_of(q, k)
    return attend(s, v), jax.nn.logsumexp(s, -2)


def beside_a_sink(q, k, v):
    s = scores_of(q, k)
    weights = jax_softmax.softmax(s, sink=0.5)
    return jnp.einsum("bhij,bjhd->bihd", weights, v), jax.nn.logsumexp(s, -1)


def of_the_sink_as_well(q, k, v):
    s = jnp.pad(scores_of(q, k).astype(jnp.float32), [(0, 0)] * 3 + [(0, 1)])
    return jnp.einsum("bhij,bjhd->bihd", jax.nn.softmax(s)[..., :-1].astype(v.dtype), v), jax.nn.logsumexp(s, -1)


FOUND = {
    "operator": (by_operator, "forward"),
    "operator, gradients": (in_losses(by_operator), WHOLE),
    "JAX's own": (by_jax, "forward"),
    "JAX's own, gradients": (in_losses(by_jax), WHOLE),
    "written out": (by_hand, "forward"),
    "written out, gradients": (in_losses(by_hand), WHOLE),
    "divided later": (divided_later, "forward"),
    "divided later, gradients": (in_losses(divided_later), WHOLE),
    "mask": (with_mask, "forward"),
    "checkpoint": (in_losses(jax.checkpoint(by_operator)), AGAIN),
    "gradients alone": (lambda *a: in_losses(by_operator)(*a)[0], WHOLE),
}
REFUSED = [and_maxima, and_a_mean_of_maxima, and_sums, and_maxima_twice, in_losses(of_the_sink_as_well)]
# Log-sum-exps that the kernels do not make: the scores' product is in memory for them.
APART = [of_other_scores, of_fewer_scores, of_rounded_scores, along_queries, beside_a_sink, of_the_sink_as_well]
IN_PLAIN_RUNS = "JAX's own, gradients", "written out, gradients", "mask"


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.sweep] * (name not in IN_PLAIN_RUNS)) for name in FOUND]
)
def test_is_found(name):
    program, kernels = FOUND[name]
    assert_as_exact(check(fuse(program), QKV, kernels), program, QKV)


@pytest.mark.sweep  # test_attention_values.py has log-sum-exps on the host as well
@emulated.compiler_is_needed
def test_on_the_host():
    program = in_losses(by_operator)
    assert_as_exact(check(fuse(program), QKV, WHOLE, in_jax=False), program, QKV)


def test_the_derivative_of_what_is_fused():
    """Rows' numbers are not kept: they would be the kernel's own."""
    found = check(in_losses(fuse(by_operator)), QKV, AGAIN)
    assert_as_exact(found, in_losses(by_operator), QKV)


@pytest.mark.sweep
def test_scanned_layers():
    operands = normal(B, S, H * D), normal(3, 3, H * D, H, D, seed=4) / 8
    assert_as_exact(check(fuse(summed(in_layers)), operands, AGAIN), summed(in_layers), operands)


@pytest.mark.sweep
def test_in_shard_map():
    """Numbers there are variables: each device has its own."""

    program = summed(by_operator)
    mesh = support.mesh_of_cpus((2, 1), AxisType.Auto)
    mapped = jax.shard_map(program, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    assert_as_exact(check(fuse(mapped), QKV, WHOLE), program, QKV)


@pytest.mark.parametrize("program", [*REFUSED, *APART])
def test_what_stays_as_it_is(program):
    assert_as_exact(check(fuse(program), QKV, "forward" if program in APART else ""), program, QKV)


def test_gradients_with_a_mask_stay_as_they_are():
    def program(q, k, v):
        o, lse = with_mask(q, k, v)
        return o, jnp.where(jnp.isfinite(lse), lse, 0)

    program = in_losses(program)
    assert_as_exact(check(fuse(program), QKV, ""), program, QKV)


@emulated.compiler_is_needed
@pytest.mark.parametrize("number", [-np.inf, np.inf, np.nan])
@pytest.mark.parametrize("everywhere", [True, False])
def test_rows_of_special_numbers(number, everywhere):
    """As JAX has them: -inf of rows of -inf, inf of those with inf, NaN of those with NaN."""
    of_row = jnp.where((jnp.arange(S) > 3) | everywhere, number, 0).astype(jnp.float32)
    bias = jnp.zeros((S, S), jnp.float32).at[5].set(of_row)

    def program(q, k, v, bias):
        s = scores_of(q, k).astype(jnp.float32) + bias
        return attend(s, v), jax.nn.logsumexp(s, -1)

    found = check(fuse(program), (*QKV, bias), "forward", in_jax=False)
    assert_as_exact(found, program, (*QKV, bias))
