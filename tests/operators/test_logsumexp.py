"""logsumexp: values, derivatives, masks, and what is not finite; and an offset that all logits of a row share."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import support
from by_numpy import by_numpy
from oracles import check, reference_logsumexp
from support import DTYPES, FIRST, SECOND, VIEWS_OF_ROWS, normal, outliers, random_mask

from jax_softmax import cross_entropy_loss, logsumexp, softmax_cross_entropy
from jax_softmax import softmax_cross_entropy_with_integer_labels as integer_labels


@support.sampled("masked,dtype,view", itertools.product([False, True], DTYPES, VIEWS_OF_ROWS), 9)
def test_logsumexp(masked, dtype, view):
    shape, axis = view
    x = outliers(shape, dtype)
    where = random_mask(shape) if masked else None
    wide = "float64" if dtype == "float64" else "float32"
    with support.precision(dtype):
        results = logsumexp(x, axis, where, dtype=wide, return_max=True)
        kept = logsumexp(x, axis, where, keepdims=True)
    for result, expected in zip(results, reference_logsumexp(x, axis, where), strict=True):
        check(result, expected, f"of {dtype}{shape} along {axis}")
    assert kept.dtype == np.dtype(dtype)
    assert kept.shape == reference_logsumexp(x, axis, where, keepdims=True)[0].value.shape


@support.sampled("dtype,columns", itertools.product(["bfloat16", "float32"], [5, 33, 1000, 20_001, 70_000]), 3)
def test_logsumexp_of_what_is_not_finite(dtype, columns):
    """A row with +inf is +inf, unless it has a NaN; one of nothing but -inf is -inf."""
    x = support.nonfinite_rows(columns, dtype)
    both = x[:2].copy()
    both[:, 0], both[:, -1] = np.inf, np.nan
    for array in (x, both):
        check(logsumexp(array, dtype="float32"), reference_logsumexp(array)[0])
    assert np.array_equal(logsumexp(x[:3], where=False), np.full(3, -np.inf, dtype))


@support.sampled("masked", [True, False], 2)
def test_logsumexp_of_weighted_exponentials(masked):
    """As jax.scipy's, with derivatives; where all factors are 0 the derivative is 0, and not NaN."""
    x, b = normal((3, 7)) + 200, normal((3, 7), seed=1)
    b[0, :3] = 0
    where = random_mask((3, 7)) if masked else None

    def both(f, x, b):
        def of(x, b):
            return f(x, -1, b=b, return_sign=True, where=where, keepdims=True)

        return of(x, b), jax.grad(lambda *a: jnp.sum(jnp.sin(of(*a)[0])), (0, 1))(x, b)

    functions = logsumexp, jax.scipy.special.logsumexp
    found, expected = support.in_haste(lambda x, b: [both(f, x, b) for f in functions], x, b)
    support.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    signs = logsumexp(x, b=b, return_sign=True)[1]
    assert np.array_equal(np.isnan(logsumexp(x, b=b)), signs < 0)
    assert np.array_equal(jax.grad(lambda x: logsumexp(x, None, b=0.0))(x), np.zeros_like(x))


def test_logsumexp_with_its_sign():
    x = np.array([[1, 2], [-np.inf, -np.inf], [np.inf, 0], [np.nan, 0]], "bfloat16")
    for b in (None, 1, np.ones((4, 2), "bfloat16")):
        value, sign = logsumexp(x, b=b, return_sign=True)
        assert np.array_equal(value, logsumexp(x), equal_nan=True) and value.dtype == x.dtype
        assert np.array_equal(np.asarray(sign, np.float32), [1, 0, 1, np.nan], equal_nan=True) and sign.dtype == x.dtype
    assert logsumexp(x, b=np.float32(2)).dtype == np.float32


def test_logsumexp_of_other_dtypes():
    assert logsumexp(np.arange(3)).dtype == np.float32
    np.testing.assert_allclose(logsumexp(np.arange(3, dtype=np.uint8)), np.log(np.exp(np.arange(3.0)).sum()), rtol=1e-6)
    assert logsumexp(jnp.ones(4, jnp.float8_e4m3fn)).dtype == jnp.float8_e4m3fn
    assert logsumexp(jnp.ones(4, jnp.bfloat16), dtype=jnp.float32).dtype == np.float32


def test_logsumexp_of_empty_rows():
    assert np.array_equal(logsumexp(np.zeros((3, 0), np.float32)), np.full(3, -np.inf))
    assert logsumexp(np.zeros((0, 3), np.float32)).shape == (0,)


@support.sampled("masked,return_max", itertools.product((True, False), (True, False)), 4)
def test_derivatives_of_logsumexp(masked, return_max):
    """Of first and second order, in both modes, against jax.numpy in float64."""
    with jax.enable_x64(True):
        x = jnp.asarray(normal((4, 6), "float64"))
        where = jnp.asarray(random_mask((4, 6))) if masked else None

        def ours(x):
            results = logsumexp(x, 1, where, return_max=True)
            return results[0] + 0.5 * results[1] if return_max else results[0]

        def theirs(x):
            kept = x if where is None else jnp.where(where, x, -jnp.inf)
            total = jax.nn.logsumexp(x, 1, where=where)
            return total + 0.5 * jnp.max(kept, 1) if return_max else total

        support.same_derivatives(ours, theirs, (*FIRST, *SECOND), [x], rtol=1e-12, atol=1e-13)


@support.sampled("under", [np.nan, np.inf, 200.0], 3)
def test_derivatives_of_what_is_masked(under):
    """What stands under the mask has no effect, nor has a row that is masked altogether."""
    with jax.enable_x64(True):
        x, where = normal((3, 4), "float64"), random_mask((3, 4), 1)
        where[0] = False
        plain = np.where(where, x, 0)
        x = np.where(where, x, under)

        def f(x):
            return logsumexp(x, where=where)[1:]

        found, expected = (support.in_haste(lambda x: [d(f)(x) for d in (*FIRST, *SECOND)], x) for x in (x, plain))
        support.assert_close(found, expected, rtol=1e-12)
        tangents = jax.jvp(lambda x: logsumexp(x, where=where, return_max=True), (x,), (np.ones_like(x),))[1]
        assert np.all(tangents[0][0] == 0) and np.all(tangents[1][0] == 0)


def test_the_maximum_at_ties():
    x = jnp.array([[1.0, 1.0, 0.0], [2.0, 1.0, 0.0]])
    largest = jax.grad(lambda x: logsumexp(x, return_max=True)[1].sum())(x)
    assert np.array_equal(largest, jax.grad(lambda x: jnp.max(x, -1).sum())(x))


def test_the_maximum_at_ties_with_what_is_masked():
    """What is masked has no part in it."""
    x = jnp.array([[1.0, 1.0, 0.0, 1.0], [2.0, 2.0, 0.0, 1.0]])
    where = np.array([[True, True, True, False], [True, False, True, True]])

    def largest(x):
        return logsumexp(x, where=where, return_max=True)[1]

    expected = [[0.5, 0.5, 0, 0], [1, 0, 0, 0]]
    assert np.array_equal(jax.grad(lambda x: largest(x).sum())(x), expected)
    assert np.array_equal(jax.jacfwd(largest)(x).sum(0), expected)


def test_what_is_kept_for_the_backward_pass():
    """x and a few numbers a row, but no exponentials."""
    x = jnp.ones((64, 4096), jnp.bfloat16)
    assert support.kept_bytes(lambda x: logsumexp(x, dtype="float32"), x) <= x.nbytes + 8 * 64 * 4


def test_modes_agree_on_rows_of_nothing_but_minus_infinity():
    x = np.array([[-np.inf, -np.inf], [1, 2]], np.float32)
    tangent = jax.jvp(lambda x: logsumexp(x), (x,), (np.ones_like(x),))[1]
    np.testing.assert_array_equal(np.isnan(tangent), [True, False])
    gradient = jax.grad(lambda x: logsumexp(x).sum())(x)
    np.testing.assert_array_equal(np.isnan(gradient), [[True, True], [False, False]])


def test_bools_of_numpy():
    x = normal((2, 3))
    lse, largest = logsumexp(x, keepdims=np.True_, return_max=np.True_)
    assert lse.shape == largest.shape == (2, 1)
    assert logsumexp(x, keepdims=np.False_, return_max=np.False_).shape == (2,)


# ---- a common offset of the logits, for logsumexp and the losses


def _one_hot(labels):
    return np.eye(1000, dtype=np.float32)[labels]


def _by_log_softmax(probabilities):
    return lambda x, labels: -jnp.sum(probabilities(labels) * jax.nn.log_softmax(x))


# Ours, and as optax computes them, of logits and labels, summed.
SUMMED = {
    "logsumexp": (lambda x, _: logsumexp(x).sum(), lambda x, _: jax.nn.logsumexp(x, -1).sum()),
    "rows' losses": (lambda x, labels: integer_labels(x, labels).sum(), _by_log_softmax(_one_hot)),
    "sum of losses": (functools.partial(cross_entropy_loss, reduction="sum"), _by_log_softmax(_one_hot)),
    "smoothed labels": (
        functools.partial(cross_entropy_loss, reduction="sum", label_smoothing=0.1),
        _by_log_softmax(lambda labels: 0.9 * _one_hot(labels) + np.float32(0.1 / 1000)),
    ),
    "soft labels": (lambda x, labels: softmax_cross_entropy(x, _one_hot(labels)).sum(), _by_log_softmax(_one_hot)),
}


@support.sampled("name,offset", itertools.product(SUMMED, [0, 30000, 30, 300, 3000, -30000]), 7)
def test_a_common_offset_costs_nothing(offset, name):
    """Derivatives of both orders are off by twice what optax's are, or what float32 has, at most."""
    x, t = normal((16, 1000)) + np.float32(offset), normal((16, 1000), seed=1, scale=1.0)
    labels = np.random.default_rng(0).integers(0, 1000, 16)

    def derivatives(f, x, t):
        return jax.jvp(jax.grad(lambda x: f(x, labels)), (x,), (t,))

    ours, theirs = support.in_haste(lambda x, t: [derivatives(f, x, t) for f in SUMMED[name]], x, t)
    with jax.enable_x64(True):
        wide = x.astype(np.float64), t.astype(np.float64)
        expected = by_numpy(functools.partial(derivatives, SUMMED[name][1]), *wide)
    for mine, other, right in zip(ours, theirs, expected, strict=True):
        mine, other = np.asarray(mine, np.float64), np.asarray(other, np.float64)
        of_mine, of_other = (np.max(np.abs(a - right)) / np.max(np.abs(right)) for a in (mine, other))
        assert of_mine <= 2 * max(of_other, np.finfo(np.float32).eps)


@pytest.mark.parametrize("offset", [0, 300, 30000])
def test_losses_of_large_logits(offset):
    x = normal((16, 1000)) + np.float32(offset)
    labels = np.random.default_rng(0).integers(0, 1000, 16)
    rows = x.astype(np.float64) - offset
    expected = np.log(np.exp(rows).sum(-1)) - rows[np.arange(16), labels]
    found = integer_labels(x, labels), softmax_cross_entropy(x, _one_hot(labels))
    for losses_of_rows in found:
        np.testing.assert_allclose(losses_of_rows, expected, rtol=4 * np.finfo(np.float32).eps)
