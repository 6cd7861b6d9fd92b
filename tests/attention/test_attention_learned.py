"""Attention whose scores read what is learned: which gradients the kernels sum, and their numbers."""

import emulated
import jax
import jax.numpy as jnp
import pytest
from attention_programs import WHOLE, B, D, H, S, assert_as_exact, check, gradients, normal
from by_numpy import by_numpy

from jax_softmax import fuse
from jax_softmax.fusion.attention.kernels import attention_p
from jax_softmax.fusion.rewriting import rewritten

pytestmark = pytest.mark.usefixtures("on_the_cpu")
F32 = jnp.float32
Q, K, V = normal(B, S, H, D), normal(B, S, H, D, seed=1), normal(B, S, H, D, seed=2)
OF_HEADS, OF_KEYS, OF_ROWS = (normal(*shape, seed=3).astype(F32) for shape in ((H, 1, 1), (B, 1, 1, S), (H, S, 1)))
BIAS, BIAS_OF_EACH = normal(1, H, S, S, seed=4), normal(B, H, S, S, seed=5).astype(F32)
TABLE = normal(H, 2 * S - 1, seed=6).astype(F32)
WINDOWS, W = 16, 4  # windows, and how many masks they have by turns
Q_W, K_W, V_W = (normal(WINDOWS, 9, H, 16, seed=k) for k in range(3))
MASKS = jnp.where(normal(W, 9, 9, seed=7) > 0.5, -100.0, 0)
BIAS_W = normal(H, 9, 9, seed=8).astype(F32)
GROUPED = normal(B, S, H, 3, D, seed=9)
DISTANCES = jnp.arange(S)[:, None] - jnp.arange(S)
CAUSAL = DISTANCES >= 0


def scores_of(q, k):
    return jnp.einsum("bihd,bjhd->bhij", q, k, preferred_element_type=F32) / 4


def times(weights, v):
    return jnp.einsum("bhij,bjhd->bihd", weights.astype(v.dtype), v)


def of(score):
    return lambda q, k, v, *learned: times(jax.nn.softmax(score(scores_of(q, k), *learned)), v)


def swin(q, k, v, temperature, bias):
    """Swin v2's: windows that have masks by turns, of queries and keys of one length."""
    q, k = (a / jnp.linalg.norm(a.astype(F32), axis=-1, keepdims=True).astype(a.dtype) for a in (q, k))
    s = scores_of(q, k) * jnp.exp(jnp.minimum(temperature, 4.6)) + bias
    s = s.reshape(WINDOWS // W, W, *s.shape[1:]) + MASKS[None, :, None]
    return times(jax.nn.softmax(s).reshape(WINDOWS, *s.shape[2:]), v)


def grouped(q, k, v, of_keys, of_groups):
    s = jnp.einsum("bihgd,bjhd->bhgij", q, k, preferred_element_type=F32) + of_keys[:, :, None] + of_groups
    return jnp.einsum("bhgij,bjhd->bihgd", jax.nn.softmax(s).astype(v.dtype), v)


def behind(q, k, v, of_heads, of_keys):
    """What weights are multiplied with."""
    return times(jax.nn.softmax(scores_of(q, k)) * of_heads * of_keys, v)


def of_table(s, table):
    return s + table[:, DISTANCES + S - 1]


ROWS, KEYS, OF_BATCH, EACH = "bhi", "bhj", "phij", "bhij"
# The program, what it reads besides q, k and v, and the letters of each cotangent that a kernel makes.
PROGRAMS = {
    "temperatures": (of(lambda s, t: s * jnp.exp(t)), (OF_HEADS,), [ROWS]),
    "one temperature": (of(lambda s, t: s * t), (F32(1.5),), [ROWS]),
    "temperatures by a product": (of(lambda s, t: jnp.einsum("bhij,h->bhij", s, t[:, 0, 0])), (OF_HEADS,), [ROWS]),
    "slopes": (of(lambda s, t: jnp.where(CAUSAL, s - jnp.exp(t) * DISTANCES, -1e30)), (OF_HEADS,), [ROWS]),
    "rows": (of(lambda s, t: s * t), (OF_ROWS,), [ROWS]),
    "keys": (of(lambda s, t: s + t), (OF_KEYS,), [KEYS]),
    "a bias": (of(lambda s, t: jnp.where(CAUSAL, s + t, -1e30)), (BIAS,), [OF_BATCH]),
    "a bias of all heads": (of(lambda s, t: s + t), (BIAS[0, 0],), ["pij"]),
    "a table of distances": (of(of_table), (TABLE,), [OF_BATCH]),
    "a bias of each": (of(lambda s, t: s + t), (BIAS_OF_EACH,), [EACH]),
    "biases of each, one transposed": (
        of(lambda s, t, u: (s + t + u.swapaxes(-1, -2)) / 2),
        (BIAS_OF_EACH, 2 * BIAS_OF_EACH),
        [EACH],
    ),
    "temperatures and a bias": (of(lambda s, t, u: s * t + u), (OF_HEADS, BIAS), [ROWS, OF_BATCH]),
    "keys of rows": (of(lambda s, t, u, w: s * t * u + w), (OF_ROWS, OF_KEYS, BIAS_OF_EACH), [EACH, ROWS, KEYS]),
    "groups": (lambda q, *a: grouped(GROUPED * q[:, :, :, None], *a), (OF_KEYS, OF_ROWS[:3]), [KEYS, "bhgi"]),
    "behind": (behind, (OF_HEADS, OF_KEYS), [ROWS, KEYS]),
}


def rewritten_program(program, *operands):
    (eqn,) = jax.make_jaxpr(fuse(program))(*operands).eqns
    with emulated.kernels(attention=True):
        return rewritten(eqn.params["jaxpr"]).eqns


@pytest.mark.parametrize("name", PROGRAMS)
def test_gradients_are_summed(name):
    attend, learned, expected = PROGRAMS[name]
    operands = (Q, K, V, *learned)

    def program(*operands):
        return gradients(attend, *operands)

    eqns = rewritten_program(program, *operands)
    attention = next(e.params["attention"] for e in eqns if e.primitive is attention_p)
    assert sorted(one.letters for one in attention.side_cotangents) == sorted(expected)
    if all("ij" not in letters for letters in expected):
        assert max(v.aval.size for e in eqns for v in e.outvars if e.primitive is not attention_p) < B * H * S * S
    kernels = WHOLE + " scores" * sum(of[0] == "p" for of in expected)
    assert_as_exact(check(fuse(program), operands, kernels), program, operands)


def test_gradients_of_keys_sum_to_0():
    """A number that is added to the scores of all keys changes nothing. Gates of keys are added up along the sequence,
    as forgetting attention has them, and so are their gradients: what the sum is off by would grow with the length."""

    def program(*operands):
        return gradients(of(lambda s, t: s + t), *operands)

    *_, found = check(fuse(program), (Q, K, V, OF_KEYS), WHOLE)
    assert abs(found.sum(-1)).max() < 1e-5 * abs(found).sum(-1).max()


def test_gradients_of_sinks_are_sums_of_exact_weights():
    """Not of the output, for which weights were rounded: along a sequence they may cancel."""

    def attend(q, k, v, sink):
        s = jnp.where(CAUSAL, scores_of(q, k), -jnp.inf)
        column = jnp.broadcast_to(sink, (*s.shape[:-1], 1))
        return times(jax.nn.softmax(jnp.concatenate([s, column], -1))[..., :-1], v)

    def program(o_cotangent, *operands):
        return jax.vjp(attend, *operands)[1](o_cotangent)

    operands = normal(B, S, H, D, seed=9), Q, K, V, OF_ROWS
    *_, found = check(fuse(program), operands, WHOLE)
    *_, exact = by_numpy(program, *(a.astype(F32) for a in operands))
    assert abs(found - exact).max() < 1e-5 * abs(exact).max()


def test_rows_that_see_nothing_have_no_gradient():
    """Their weights are NaN, and the program sets these to 0."""
    sees = CAUSAL & (jnp.arange(S) != 5)[:, None]

    def attend(q, k, v, t):
        weights = jax.nn.softmax(jnp.where(sees, scores_of(q, k) * t, -jnp.inf))
        return times(jnp.where(sees, weights, 0), v)

    def program(*operands):
        return gradients(attend, *operands)

    for learned in (OF_HEADS, OF_ROWS, OF_KEYS):
        operands = (Q, K, V, learned)
        found = check(fuse(program), operands, WHOLE)
        assert all(jnp.isfinite(a).all() for a in found)
        assert_as_exact(found, program, operands)


def test_windows():
    """Few tiles: the sum over the batch is made in parts."""
    operands = (Q_W, K_W, V_W, OF_HEADS, BIAS_W)

    def program(*operands):
        return gradients(swin, *operands)

    eqns = rewritten_program(program, *operands)
    attention = next(e.params["attention"] for e in eqns if e.primitive is attention_p)
    (of_bias,) = attention.side_cotangents_of("scores")
    assert of_bias.parts == WINDOWS
    assert_as_exact(check(fuse(program), operands, WHOLE + " scores"), program, operands)


@emulated.compiler_is_needed
@pytest.mark.parametrize("name", ["temperatures and a bias", "groups", "behind", "keys of rows"])
def test_on_the_host(name):
    attend, learned, expected = PROGRAMS[name]

    def program(*operands):
        return gradients(attend, *operands)

    kernels = WHOLE + " scores" * sum(of[0] == "p" for of in expected)
    found = check(fuse(program), (Q, K, V, *learned), kernels, in_jax=False)
    assert_as_exact(found, program, (Q, K, V, *learned))


@pytest.mark.parametrize(
    "score,learned,expected",
    [
        (lambda s: s / jnp.sqrt(D), (), f"x0 * ({(1 / D**0.5).hex()}f)"),
        (lambda s: s * jnp.sqrt(1 / 64.0), (), f"x0 * ({(0.125).hex()}f)"),
        (lambda s, t: s / t, (F32(2),), "x0 * (1.0f / s0)"),
        (lambda s, t: s / t, (OF_HEADS,), "x0 * (1.0f / s0)"),
        (lambda s, t: s / t, (OF_KEYS,), "x0 / s0"),
    ],
)
def test_scores_are_not_divided_one_by_one(score, learned, expected):
    """By numbers, however the program makes them, and by what a tile shares."""

    def program(q, k, v, *learned):
        scores = jnp.einsum("bihd,bjhd->bhij", q, k, preferred_element_type=F32)
        return times(jax.nn.softmax(score(scores, *learned)), v)

    eqns = rewritten_program(program, Q, K, V, *learned)
    attention = next(e.params["attention"] for e in eqns if e.primitive is attention_p)
    assert attention.attributes("forward")["expressions"].split("\n")[0] == expected


def test_two_arrays_of_each_score_stay():
    def program(*operands):
        return gradients(of(lambda s, t, u: s * t + u), *operands)

    operands = (Q, K, V, BIAS_OF_EACH, BIAS_OF_EACH)
    with emulated.kernels(attention=True):
        report = fuse(program).explain(*operands)
    assert "several arrays of queries x keys are made of the scores' gradient" in str(report)
