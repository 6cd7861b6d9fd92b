"""Attention in forward mode: its output's tangent in the pass in which the output is made."""

import emulated
import jax
import jax.numpy as jnp
import pytest
from attention_programs import B, D, H, S, assert_as_exact, check, normal

from jax_softmax import fuse
from jax_softmax.fusion import backend
from jax_softmax.fusion.attention.kernels import attention_p
from jax_softmax.fusion.rewriting import rewritten

pytestmark = pytest.mark.usefixtures("on_the_cpu")
F32 = jnp.float32
SHAPES = [(B, S, H, D)] * 6
OPERANDS = [normal(*shape, seed=n) for n, shape in enumerate(SHAPES)]  # q, k, v and their tangents
WIDE = [a.astype(F32) for a in OPERANDS]
BIAS, BIAS_TANGENT = (normal(H, S, S, seed=n) for n in (7, 8))
KEEP = normal(B, H, S, S, seed=9) < 1
CAUSAL = jnp.tri(S, dtype=bool)
SEVERAL = [normal(3, *shape, seed=n) for n, shape in enumerate(SHAPES[3:], 12)]  # tangents of q, k and v
TARGET, NET = normal(B, S, H, D, seed=10), normal(3, D, D, seed=11) / 8


def scores_of(q, k):
    return jnp.einsum("bihd,bjhd->bhij", q, k) / 4


def of(score, drop=lambda weights: weights):
    def attend(q, k, v, *beside):
        weights = drop(jax.nn.softmax(score(scores_of(q, k).astype(F32), *beside)))
        return jnp.einsum("bhij,bjhd->bihd", weights.astype(v.dtype), v)

    return attend


def moving(attend, n=3):
    """The output and its tangent, of operands and then their tangents."""
    return lambda *a: jax.jvp(attend, a[:n], a[n : 2 * n])


def masked(s):
    return jnp.where(CAUSAL, s, -1e30)


def some_move(q, k, v, q_tangent, *_):
    return jax.jvp(lambda q: of(masked)(q, k, v), (q,), (q_tangent,))


def values_alone(q, k, v, v_tangent, *_):
    return jax.jvp(lambda v: of(masked)(q, k, v), (v,), (v_tangent,))


def linearized(*a):
    o, tangent_of = jax.linearize(of(masked), *a[:3])
    return o, tangent_of(*a[3:])


def tangent_alone(attend):
    """The output's tangent, beside no output."""
    return lambda *a: jax.jvp(attend, a[:3], a[3:])[1]


def some_move_and_tangent_alone(q, k, v, q_tangent):
    return jax.jvp(lambda q: of(masked, lambda w: jnp.where(KEEP, w / 0.8, 0))(q, k, v), (q,), (q_tangent,))[1]


def tangent_and_gradient_of_other_values(q, k, v, q_tangent, w, o_cotangent):
    """Of one softmax: the tangent of its product with v, and the gradient of that with w."""
    _, tangent_of = jax.linearize(lambda q: jax.nn.softmax(masked(scores_of(q, k).astype(F32))).astype(q.dtype), q)
    (dq,) = jax.linear_transpose(tangent_of, q)(jnp.einsum("bihd,bjhd->bhij", o_cotangent, w))
    return jnp.einsum("bhij,bjhd->bihd", tangent_of(q_tangent), v), dq


def gradient_where_keys_are_values(q, k, o_cotangent):
    """It looks like the output's tangent: of products with keys before the softmax's map and after it."""
    return jax.vjp(lambda q, v: of(masked)(q, k, v), q, k)[1](o_cotangent)


def mapped(attend, out_axes=0):
    """The output and its tangents, of operands and then of several tangents of each."""
    return lambda *a: jax.vmap(lambda *t: jax.jvp(attend, a[:3], t), out_axes=out_axes)(*a[3:])


def tangents_of_one(name):
    """Several tangents of the output, where but one operand moves."""

    def program(q, k, v, several):
        given = {"q": q, "k": k, "v": v}

        def attend(moved):
            return of(masked)(*(given | {name: moved}).values())

        return jax.vmap(jax.linearize(attend, given[name])[1])(several)

    return program


def by_temperature(q, k, v, temperature):
    return jax.jacfwd(lambda t: of(lambda s, t: masked(s * t))(q, k, v, t))(temperature)


def by_parameters(x, net, parameters):
    """The output, and its derivatives by numbers of which queries, keys and values are made."""

    def attend(parameters):
        return of(masked)(*(x @ (w * p) for w, p in zip(net, parameters, strict=True)))

    return attend(parameters), jax.jacfwd(attend)(parameters)


def by_coordinates(points, first, net):
    """A network of points that attend to each other, and its derivatives by their coordinates, as in physics-informed
    training."""

    def network(shift):
        h = jnp.tanh((points + shift) @ first)
        return jax.nn.dot_product_attention(*((h @ w).reshape(1, S, 1, D) for w in net))

    return jax.jacfwd(network)(jnp.zeros(2, points.dtype))


def of_examples(*a):
    """Of each example its own derivatives."""

    def derivatives(q, k, v):
        return jax.jacfwd(lambda p: of(masked)(*(a[None] * (1 + n) for a, n in zip((q, k, v), p, strict=True))))(
            jnp.zeros(3, q.dtype)
        )

    return jax.vmap(derivatives)(*a)


def with_weights(q, k, v):
    weights = jax.nn.softmax(masked(scores_of(q, k).astype(F32)))
    return jnp.einsum("bhij,bjhd->bihd", weights.astype(v.dtype), v), weights


def several_cotangents(q, k, v, *cotangents):
    return jax.vmap(jax.vjp(of(masked), q, k, v)[1])(cotangents[0])


def twice(*a):
    def tangent(*operands):
        return jax.jvp(of(masked), operands, a[3:])[1]

    return jax.jvp(tangent, a[:3], a[3:])


def grouped(q, k, v, *tangents):
    def attend(q, k, v):
        s = jnp.einsum("bihgd,bjhd->bhgij", q.reshape(B, S, 2, H // 2, D), k[:, :, :2]) / 4
        weights = jax.nn.softmax(s.astype(F32)).astype(v.dtype)
        return jnp.einsum("bhgij,bjhd->bihgd", weights, v[:, :, :2])

    return jax.jvp(attend, (q, k, v), tangents)


def mean_flow(x, x_tangent, net, target):
    """MeanFlow's loss: the tangent is a part of the target, through which there is no gradient."""

    def loss(net):
        def attend(x):
            return of(masked)(*(x @ w for w in net))

        o, o_tangent = jax.jvp(attend, (x,), (x_tangent,))
        return jnp.mean((o.astype(F32) - jax.lax.stop_gradient(target - 0.3 * o_tangent).astype(F32)) ** 2)

    return jax.value_and_grad(loss)(net)


TANGENTS, BESIDE, WHOLE = "tangents", "forward tangents", "tangents queries keys"
# The program, its operands, and which kernels it calls.
PROGRAMS = {
    "plain": (moving(of(lambda s: s)), OPERANDS, TANGENTS),
    "causal": (moving(of(masked)), OPERANDS, TANGENTS),
    "capped": (moving(of(lambda s: masked(5 * jnp.tanh(s / 5)))), OPERANDS, TANGENTS),
    "dropout": (moving(of(masked, lambda w: jnp.where(KEEP, w / 0.8, 0))), OPERANDS, TANGENTS),
    "a bias": (moving(of(lambda s, b: masked(s + b)), 4), (*OPERANDS[:3], BIAS, *OPERANDS[3:], BIAS_TANGENT), TANGENTS),
    "float32": (moving(of(masked)), WIDE, TANGENTS),
    "features that kernels do not have": (moving(of(masked)), [a[..., :13] for a in OPERANDS], TANGENTS),
    "queries alone": (some_move, OPERANDS[:4], TANGENTS),
    "values alone": (values_alone, OPERANDS[:4], "forward"),
    "linearized": (linearized, OPERANDS, TANGENTS),
    "alone": (tangent_alone(of(masked)), OPERANDS, TANGENTS),
    "queries alone, tangent alone": (some_move_and_tangent_alone, OPERANDS[:4], TANGENTS),
    "groups": (grouped, OPERANDS, TANGENTS),
    "jax.nn": (moving(lambda *a: jax.nn.dot_product_attention(*a, is_causal=True)), OPERANDS, TANGENTS),
    "mean flow": (mean_flow, (OPERANDS[0], OPERANDS[1], NET, TARGET), WHOLE),
    "a temperature alone": (
        lambda *a: jax.jvp(lambda t: of(lambda s, t: masked(s * t))(*a[:3], t), a[3:], a[3:]),
        (*OPERANDS[:3], F32(0.5)),
        TANGENTS,
    ),
    # Several tangents at once. The output has a kernel of its own.
    "several": (mapped(of(masked)), (*OPERANDS[:3], *SEVERAL), BESIDE),
    "several, float32": (mapped(of(masked)), (*WIDE[:3], *(a.astype(F32) for a in SEVERAL)), BESIDE),
    "several, capped": (mapped(of(lambda s: masked(5 * jnp.tanh(s / 5)))), (*OPERANDS[:3], *SEVERAL), BESIDE),
    "several, dropout": (
        mapped(of(masked, lambda w: jnp.where(KEEP, w / 0.8, 0)), (None, 1)),
        (*OPERANDS[:3], *SEVERAL),
        BESIDE,
    ),
    "several, widened": (
        mapped(lambda q, k, v: of(masked)(q.astype(F32) / 8, k.astype(F32) * 2, v)),
        (*OPERANDS[:3], *SEVERAL),
        BESIDE,
    ),
    "several, jax.nn": (mapped(jax.nn.dot_product_attention), (*OPERANDS[:3], *SEVERAL), BESIDE),
    "several, where": (
        mapped(lambda q, k, v: jnp.einsum("bhij,bjhd->bihd", jax.nn.softmax(scores_of(q, k), where=KEEP), v)),
        (*OPERANDS[:3], *SEVERAL),
        BESIDE,
    ),
    "one of several": (mapped(of(masked)), (*OPERANDS[:3], *(a[:1] for a in SEVERAL)), TANGENTS),
    "several of queries": (tangents_of_one("q"), (*OPERANDS[:3], SEVERAL[0]), TANGENTS),
    "several of keys": (tangents_of_one("k"), (*OPERANDS[:3], SEVERAL[1]), TANGENTS),
    "jacfwd by a number": (by_temperature, (*OPERANDS[:3], F32(0.5)), TANGENTS),
    "jacfwd by temperatures": (by_temperature, (*OPERANDS[:3], jnp.ones((B, 1, 1, 1), F32)), TANGENTS),
    "jacfwd by parameters": (by_parameters, (OPERANDS[0], NET, normal(3, seed=15)), BESIDE),
    "jacfwd by coordinates": (
        by_coordinates,
        (normal(S, 2, seed=16), normal(2, D, seed=17), normal(3, D, D, seed=18)),
        TANGENTS,
    ),
    "jacfwd of examples": (of_examples, OPERANDS[:3], TANGENTS),
    # What stays as it was.
    "several of values": (tangents_of_one("v"), (*OPERANDS[:3], SEVERAL[2]), ""),
    "several cotangents": (several_cotangents, (*OPERANDS[:3], *SEVERAL), ""),
    "several, weights are a result": (mapped(with_weights), (*OPERANDS[:3], *SEVERAL), ""),
    "keys are values": (gradient_where_keys_are_values, OPERANDS[:3], "forward queries keys"),
    "other values": (tangent_and_gradient_of_other_values, OPERANDS, ""),
    "a second derivative": (twice, OPERANDS, ""),
}


MAPPED_ON_THE_HOST = "several, dropout", "several of keys", "jacfwd by temperatures", "jacfwd by parameters"


@pytest.mark.parametrize("name", PROGRAMS)
def test_tangents(name):
    program, operands, kernels = PROGRAMS[name]
    assert_as_exact(check(fuse(program), operands, kernels), program, operands)


@pytest.mark.parametrize("name", ["causal", "mean flow", "float32", *(name for name in PROGRAMS if "jacfwd" in name)])
def test_no_array_of_queries_and_keys(name):
    program, operands, _ = PROGRAMS[name]
    (eqn,) = jax.make_jaxpr(fuse(program))(*operands).eqns
    with emulated.kernels(attention=True):
        eqns = rewritten(eqn.params["jaxpr"]).eqns
    assert max(v.aval.size for e in eqns for v in e.outvars if e.primitive is not attention_p) < B * H * S * S


@emulated.compiler_is_needed
@pytest.mark.parametrize("name", ["capped", "dropout", "a bias", "float32", "groups", "mean flow", *MAPPED_ON_THE_HOST])
def test_on_the_host(name):
    program, operands, kernels = PROGRAMS[name]
    assert_as_exact(check(fuse(program), operands, kernels, in_jax=False), program, operands)


def test_product_that_tangents_share_counts_once(monkeypatch):
    """Beside three products of each tangent: of its queries, of its keys, and of its weights with values; and one of
    weights with its values."""
    counted = {}

    def no_reason(_, found):
        counted[found.attention.output] = found.n_products
        return ""

    monkeypatch.setattr(backend.Backend, "reason_against_attention", no_reason)
    program, operands, _ = PROGRAMS["several"]
    fuse(program).explain(*operands)
    assert counted == {"forward": 2, "tangents": pytest.approx(4 + 1 / 3)}


@emulated.compiler_is_needed
@pytest.mark.parametrize("features", [(24, 40), (136, 64)], ids=str)
def test_odd_lengths(features):
    """Of queries, keys and features."""
    d, e = features
    shapes = [(2, 37, 2, d), (2, 71, 2, d), (2, 71, 2, e)]
    operands = [normal(*shape, seed=n) for n, shape in enumerate(shapes * 2)]
    program = moving(of(lambda s: jnp.where(jnp.arange(37)[:, None] >= jnp.arange(71), s, -jnp.inf)))
    assert_as_exact(check(fuse(program), operands, TANGENTS, in_jax=False), program, operands)
