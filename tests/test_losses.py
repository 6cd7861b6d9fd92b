"""logsumexp and the cross entropies: values, gradients of every order, masks, labels, options, and what is refused."""

import functools
import itertools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import support
from by_numpy import by_numpy
from oracles import check, reference_logsumexp
from support import FIRST, SECOND, THIRD, normal, outliers, random_mask

import jax_softmax
from jax_softmax import cross_entropy_loss, linear_cross_entropy, logsumexp, softmax_cross_entropy
from jax_softmax import softmax_cross_entropy_with_integer_labels as integer_labels
from jax_softmax.fusion.graph import jaxprs_of
from jax_softmax.primitives import reference
from jax_softmax.runtime.lowering import attributes

DTYPES = support.DTYPES
SHAPES = support.VIEWS_OF_ROWS


def lse(x, axis=-1, where=None):
    """In float64."""
    return np.asarray(reference_logsumexp(np.asarray(x, np.float64), axis, where)[0].value, np.float64)


def losses(x, labels, axis=-1, where=None, smoothing=0.0, z=0.0):
    """The losses of integer labels in float64, of a mask of the logits' shape."""
    x = np.moveaxis(np.asarray(x, np.float64), axis, -1)
    keep = np.ones(x.shape, bool) if where is None else np.moveaxis(where, axis, -1)
    n = x.shape[-1]
    valid = (labels >= 0) & (labels < n)
    logit = np.take_along_axis(x, np.where(valid, labels, 0)[..., None], -1)[..., 0]
    valid &= keep.any(-1)
    of_rows = np.where(valid, lse(x, -1, keep), 0)
    mean = np.sum(np.where(keep, x, 0), -1) / np.maximum(keep.sum(-1), 1)
    return np.where(valid, of_rows - logit + smoothing * (logit - mean) + z * of_rows**2, 0)


# ---- log-sum-exp


@support.sampled("masked,dtype,view", itertools.product([False, True], DTYPES, SHAPES), 9)
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


# ---- a common offset of the logits


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


# ---- losses


LOSSES_OF = [((7, 32), -1), ((5, 1000), 1), ((6, 13, 8), 1), ((40, 7), 0), ((3, 50257), -1)]


@support.sampled("options,dtype,view", itertools.product([(0.0, 0.0), (0.1, 0.01)], DTYPES, LOSSES_OF), 7)
def test_integer_labels(options, dtype, view):
    (smoothing, z), (shape, axis) = options, view
    x = normal(shape, dtype)
    rows = np.delete(shape, axis)
    labels = np.random.default_rng(0).integers(-1, shape[axis] + 1, rows)
    expected = losses(x, labels, axis, None, smoothing, z)
    wide = np.float64 if dtype == "float64" else np.float32
    with support.precision(dtype):
        found = integer_labels(x, labels, axis, label_smoothing=smoothing, z_loss=z)
    assert found.dtype == wide
    np.testing.assert_allclose(found, expected, rtol=32 * np.finfo(wide).eps, atol=32 * np.finfo(wide).eps)
    assert np.all(np.asarray(found)[(labels < 0) | (labels >= shape[axis])] == 0)


@support.sampled("dtype", ["int8", "uint8", "uint16", "int32", "uint32"], 3)
def test_dtypes_of_labels(dtype):
    """The largest label of the dtype is no class, and no class's gradient is touched for it."""
    x, labels = normal((3, 300)), np.array([1, 100, np.iinfo(dtype).max], dtype)
    valid = labels < 300
    np.testing.assert_allclose(integer_labels(x, labels), losses(x, labels.astype(int)), rtol=1e-6)
    g = jax.grad(lambda x: cross_entropy_loss(x, labels, reduction="sum"))(x)
    expected = np.asarray(jax.nn.softmax(x)) * valid[:, None]
    expected[np.arange(3)[valid], labels[valid]] -= 1
    np.testing.assert_allclose(g, expected, atol=1e-6)


def test_labels_of_several_axes():
    x, labels = normal((2, 3, 4)), np.array([5, 11])
    np.testing.assert_allclose(integer_labels(x, labels, (1, 2)), losses(x.reshape(2, 12), labels), rtol=1e-6)
    g = jax.grad(lambda x: integer_labels(x, labels, (1, 2)).sum())(x)
    flat = jax.grad(lambda x: integer_labels(x, labels).sum())(x.reshape(2, 12))
    np.testing.assert_allclose(g.reshape(2, 12), flat, rtol=1e-6)


@support.sampled("smoothing,z", [(0.2, 0.1), (0.0, 0.0)], 2)
def test_masked_classes(smoothing, z):
    """As optax has it: a label that is left out keeps its logit, and a row of which all is left out is ignored."""
    with jax.enable_x64(True):
        x, labels, where = normal((4, 9), "float64"), np.array([0, 1, 2, 3]), random_mask((4, 9), 3)
        where[np.arange(4), labels] = [True, False, True, True]
        where[3] = False
        options = {"where": where, "label_smoothing": smoothing, "z_loss": z}
        found = integer_labels(x, labels, **options)
        np.testing.assert_allclose(found, losses(x, labels, -1, where, smoothing, z), rtol=1e-12)
        assert found[3] == 0

        def of_losses(x):
            return integer_labels(x, labels, **options).sum()

        def of_sum(x):
            return cross_entropy_loss(x, labels, reduction="sum", **options)

        x[3, 0], x[~where] = np.nan, np.where(labels[:, None] == np.arange(9), x, 1e300)[~where]
        x[1, 1] = 0.5  # the label that is left out
        orders = (jax.grad, jax.jacfwd, *SECOND)
        found = support.in_haste(lambda x: [[order(f)(x) for f in (of_losses, of_sum)] for order in orders], x)
        for a, b in found:
            assert np.isfinite(a).all()
            np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-12)
        g = found[0][1]
        assert np.isfinite(g).all() and np.all(g[3] == 0) and g[1, 1] == smoothing - 1


def test_a_mask_of_rows():
    x, labels = normal((3, 4)), np.array([0, 1, 2])
    where = np.array([True, False, True])
    found = integer_labels(x, labels, where=where)
    np.testing.assert_allclose(found, losses(x, labels) * where, rtol=1e-5)
    np.testing.assert_allclose(softmax_cross_entropy(x, np.eye(4)[labels], where=where), found, rtol=1e-5)
    np.testing.assert_allclose(cross_entropy_loss(x, labels, where=where), found.sum() / 2, rtol=1e-6)


def test_a_mask_of_classes_for_all_rows():
    """As for softmax, by NumPy's rules; where it could be a mask of rows as well, it must have the logits' rank."""
    x, labels, where = normal((3, 4)), np.array([0, 1, 2]), np.array([True, True, True, False])
    expected = losses(x, labels, where=np.broadcast_to(where, x.shape))
    soft = functools.partial(softmax_cross_entropy, x, np.eye(4)[labels])
    single = functools.partial(cross_entropy_loss, x[:1], labels[:1])
    np.testing.assert_allclose(integer_labels(x, labels, where=where), expected, rtol=1e-5)
    np.testing.assert_allclose(soft(where=where), expected, rtol=1e-5)
    np.testing.assert_allclose(cross_entropy_loss(x, labels, where=where), expected.mean(), rtol=1e-6)
    np.testing.assert_allclose(single(where=where), expected[0], rtol=1e-5)
    for f in (integer_labels, cross_entropy_loss):
        with pytest.raises(ValueError, match=r"where\[:, None\] leaves out rows, where\[None, :\] elements"):
            f(x[:, :3], labels, where=where[1:])


@support.sampled("axis", [(-1, 0, 2), (2, 1), (3, 1, 0)], 3)
def test_labels_count_along_axes_in_their_order(axis):
    """As optax's do, in values and gradients, with labels that are ignored and a mask."""
    shape = (2, 3, 4, 5)
    axes = [a % 4 for a in axis]
    order = [*(d for d in range(4) if d not in axes), *axes]
    moved = [shape[d] for d in order]
    rows, classes = moved[: -len(axes)], math.prod(moved[-len(axes) :])

    def back(a):
        return np.transpose(np.reshape(a, moved), np.argsort(order))

    with jax.enable_x64(True):
        x, labels = normal((*rows, classes), "float64"), np.random.default_rng(0).integers(-2, classes + 2, rows)
        labels.flat[:2] = -1, classes
        where = random_mask(x.shape) | (labels[..., None] == np.arange(classes))
        of_dtypes = [labels.astype(dtype) for dtype in ("int8", "int32", "int64")]

        def run(moved, x, *of_dtypes):
            values = [integer_labels(moved, n, axis) for n in of_dtypes]
            masked = [integer_labels(moved, n, axis, back(where), label_smoothing=0.1) for n in of_dtypes]
            gradient = jax.grad(lambda x: cross_entropy_loss(x, labels, axis=axis))(moved)
            of_sum = jax.grad(lambda x: jnp.sum(integer_labels(x, labels, axis)))(moved)
            return values, masked, gradient, of_sum, jax.grad(lambda x: cross_entropy_loss(x, labels))(x)

        values, masked, gradient, of_sum, expected = support.in_haste(run, back(x), x, *of_dtypes)
        support.assert_close(values, [losses(x, labels)] * 3, rtol=1e-12)
        support.assert_close(masked, [losses(x, labels, -1, where, 0.1)] * 3, rtol=1e-12)
        counted = np.sum((labels >= 0) & (labels < classes))
        support.assert_close((gradient, of_sum), (back(expected), back(expected) * counted), rtol=1e-7, atol=1e-12)


def test_soft_labels():
    x, t = normal((5, 40)), np.array(jax.nn.softmax(normal((5, 40), seed=1)))
    expected = np.sum(t * (lse(x)[:, None] - x), -1)
    np.testing.assert_allclose(softmax_cross_entropy(x, t), expected, rtol=1e-5)
    x[:, 3], t[:, 3] = -np.inf, 0  # which is 0 log 0
    assert np.isfinite(softmax_cross_entropy(x, t)).all()
    of_x, of_t = jax.grad(lambda x, t: softmax_cross_entropy(x, t).sum(), (0, 1))(x, t)
    np.testing.assert_allclose(of_x, np.asarray(jax.nn.softmax(x)) * t.sum(-1, keepdims=True) - t, atol=1e-6)
    distance = lse(x)[:, None] - x
    np.testing.assert_allclose(of_t, np.where(np.isinf(distance), 0, distance), rtol=1e-5)
    one_hot = np.eye(40, dtype="float32")[[0, 1, 2, 4, 5]]
    of_t = jax.grad(lambda t: softmax_cross_entropy(x, t).sum())(one_hot)
    np.testing.assert_allclose(of_t, np.where(np.isinf(distance), 0, distance), rtol=1e-5)


def test_soft_labels_of_what_is_impossible():
    """The loss is infinite if a class has a probability, and a logit of -inf."""
    x, t = np.array([[0, -np.inf], [0, -np.inf], [1, 2]], "float32"), np.array([[0.5, 0.5], [1, 0], [0, 1]], "float32")
    expected = [np.inf, 0, np.log1p(np.exp(-1))]
    np.testing.assert_allclose(softmax_cross_entropy(x, t), expected, rtol=1e-6)
    masked = np.array([[True, False], [True, True], [True, True]])
    np.testing.assert_allclose(softmax_cross_entropy(x, t, where=masked), [0, *expected[1:]], rtol=1e-6)


@support.sampled("masked", [True, False], 2)
def test_derivatives_of_soft_labels(masked):
    with jax.enable_x64(True):
        x, t = jnp.asarray(normal((3, 5), "float64")), jax.nn.softmax(normal((3, 5), "float64", seed=1))
        where = random_mask((3, 5)) if masked else None

        def ours(operands):
            return jnp.sum(softmax_cross_entropy(*operands, where=where) ** 2)

        def theirs(operands):
            x, t = operands
            kept = jnp.ones((3, 5), bool) if where is None else where
            distance = jax.nn.logsumexp(x, -1, where=kept, keepdims=True) - x
            return jnp.sum(jnp.sum(jnp.where(kept, t * distance, 0), -1) ** 2)

        support.same_derivatives(ours, theirs, (*FIRST, *SECOND), [(x, t)], rtol=1e-12, atol=1e-13)


def mean_loss(x, labels, weights, smoothing, z, reduction="mean"):
    """In jax.numpy."""
    n = x.shape[-1]
    valid = (labels >= 0) & (labels < n)
    of_rows = jax.nn.logsumexp(x, -1)
    logit = jnp.take_along_axis(x, jnp.where(valid, labels, 0)[:, None], -1)[:, 0]
    found = of_rows - logit + smoothing * (logit - jnp.mean(x, -1)) + z * of_rows**2
    weights = jnp.where(valid, weights, 0)
    total = jnp.sum(jnp.where(valid, found, 0) * weights)
    return total / jnp.where(jnp.sum(weights) == 0, 1, jnp.sum(weights)) if reduction == "mean" else total


@support.sampled(
    "reduction,weighted,smoothing,z",
    [(r, w, *o) for r, w, o in itertools.product(("mean", "sum"), (False, True), ((0.1, 0.01), (0.0, 0.0)))],
    8,
)
def test_loss_and_its_derivatives(reduction, weighted, smoothing, z):
    with jax.enable_x64(True):
        x, labels = jnp.asarray(normal((5, 7), "float64")), np.array([0, 6, -1, 7, 3])
        weights = np.linspace(0.5, 2, 5) if weighted else None

        def ours(x):
            options = {"label_smoothing": smoothing, "z_loss": z}
            return cross_entropy_loss(x, labels, weights=weights, reduction=reduction, **options)

        def theirs(x):
            return mean_loss(x, labels, np.ones(5) if weights is None else weights, smoothing, z, reduction)

        np.testing.assert_allclose(ours(x), theirs(x), rtol=1e-13)
        support.same_derivatives(ours, theirs, (*FIRST, *SECOND, *THIRD), [x], rtol=1e-12, atol=1e-13)
        assert np.all(np.asarray(jax.grad(ours)(x))[2:4] == 0)


CLASS_WEIGHTS = np.array([0.5, 2, 1, 0, 3], np.float32)


@pytest.mark.parametrize("linear", [False, True])
def test_class_weights(linear):
    """As weights of rows that are looked up, with gradients; the mean is divided by their sum."""
    x, labels, weights = normal((4, 5)), np.array([1, 4, -100, 3]), np.array([1, 2, 3, 4], np.float32)
    f = (lambda x, *a, **k: linear_cross_entropy(x.T, np.eye(5), *a, axis=0, **k)) if linear else cross_entropy_loss
    of_labels = CLASS_WEIGHTS[np.clip(labels, 0, 4)]
    for reduction in ("mean", "sum", None):
        options = {"reduction": reduction, "label_smoothing": 0.1}
        found = f(x, labels, class_weights=CLASS_WEIGHTS, weights=weights, **options)
        np.testing.assert_allclose(found, f(x, labels, weights=of_labels * weights, **options), rtol=1e-6)
    losses = f(x, labels, reduction=None)
    np.testing.assert_allclose(
        f(x, labels, class_weights=CLASS_WEIGHTS), np.sum(losses * of_labels) / (2 + 3 + 0), rtol=1e-5
    )
    gradient = jax.grad(lambda c: f(x, labels, class_weights=c, reduction="sum"))(CLASS_WEIGHTS)
    np.testing.assert_allclose(gradient, [0, losses[0], 0, losses[3], losses[1]], rtol=1e-6)


def test_class_weights_by_labels_of_8_bits():
    """Which cannot count the classes."""
    x, labels, class_weights = normal((3, 300)), np.array([1, 127, -1], np.int8), np.arange(300.0)
    expected = cross_entropy_loss(x, labels.astype(np.int32), class_weights=class_weights)
    assert cross_entropy_loss(x, labels, class_weights=class_weights) == expected


def test_without_a_reduction_it_is_the_losses_of_rows():
    x, labels, keep = normal((3, 5, 2)), np.zeros((3, 2), int), random_mask((3, 5, 2))
    found = cross_entropy_loss(x, labels, 1, keep, reduction=None)
    assert np.array_equal(found, integer_labels(x, labels, 1, keep))


def sum_of_losses(x, labels, weights, smoothing, z):
    return jnp.sum(integer_labels(x, labels, label_smoothing=smoothing, z_loss=z) * weights)


@support.sampled("smoothing,z", [(0.1, 0.01), (0.0, 0.0)], 2)
def test_derivatives_of_losses(smoothing, z):
    with jax.enable_x64(True):
        x, labels = jnp.asarray(normal((5, 7), "float64")), np.array([0, 6, -1, 7, 3])
        weights = np.linspace(0.5, 2, 5)

        def ours(x):
            return sum_of_losses(x, labels, weights, smoothing, z)

        def theirs(x):
            return mean_loss(x, labels, weights, smoothing, z, "sum")

        transposed = (lambda f: lambda x: jax.linear_transpose(lambda t: jax.jvp(f, (x,), (t,))[1], x)(1.0)[0],)
        orders = (*FIRST, *SECOND, *THIRD, *transposed)
        support.same_derivatives(ours, theirs, orders, [x], rtol=1e-12, atol=1e-13)
        assert np.all(np.asarray(jax.grad(ours)(x))[2:4] == 0)


SUMS = support.sampled(
    "f",
    [
        functools.partial(cross_entropy_loss, reduction="sum"),
        lambda *arguments, **options: integer_labels(*arguments, **options).sum(),
    ],
    2,
    ids=["cross_entropy_loss", "integer_labels"],
)


@support.sampled("smoothing,z", [(0.1, 0.01), (0.0, 0.0)], 2)
@SUMS
def test_derivatives_of_value_and_gradient(f, smoothing, z):
    """The value's is the gradient's product with the tangent, also where labels are ignored."""
    with jax.enable_x64(True):
        x, t = (jnp.asarray(normal((5, 7), "float64", seed=seed)) for seed in range(2))
        labels = np.array([0, 6, -1, 7, 3])

        def loss(x):
            return f(x, labels, label_smoothing=smoothing, z_loss=z)

        def run(x, t):
            by_reverse = jax.grad(lambda x: jax.value_and_grad(loss)(x)[0])(x)
            return by_reverse, jax.jvp(jax.value_and_grad(loss), (x,), (t,))

        by_reverse, ((_, g), (value_dot, g_dot)) = support.in_haste(run, x, t)
        np.testing.assert_allclose(value_dot, jnp.vdot(g, t), rtol=1e-12)
        assert np.all(g_dot[2:4] == 0)
        np.testing.assert_allclose(by_reverse, g, rtol=1e-12, atol=1e-15)


@SUMS
def test_second_derivatives_where_a_row_is_left_out(f):
    """By the logits and by what weighs a term of the loss, in either order."""
    x, labels, where = normal((3, 5)), np.array([0, 1, 2]), random_mask((3, 5), 1)
    where[[0, 2], [0, 2]], where[1] = True, False

    def loss(x, z, smoothing):
        return f(x, labels, where=where, z_loss=z, label_smoothing=smoothing)

    for k in (1, 2):
        orders = jax.jacfwd(jax.grad(loss), k), jax.jacrev(jax.grad(loss), k), jax.jacrev(jax.grad(loss, k))
        found, *others = support.in_haste(lambda *operands, orders=orders: [f(*operands) for f in orders], x, 0.1, 0.2)
        assert np.isfinite(found).all() and np.all(found[1] == 0)
        support.assert_close(others, [found] * 2, rtol=1e-5, atol=1e-6)


def weighted_mean(x, labels, weights, smoothing, z):
    return cross_entropy_loss(x, labels, weights=weights, label_smoothing=smoothing, z_loss=z)


@pytest.mark.parametrize("ours,reduction", [(weighted_mean, "mean"), (sum_of_losses, "sum")])
def test_derivatives_of_weights_and_options(ours, reduction):
    with jax.enable_x64(True):
        x, labels = jnp.asarray(normal((5, 7), "float64")), np.array([0, 6, -1, 7, 3])

        def of_options(f):
            return lambda *arguments: f(x, labels, *arguments)

        theirs = functools.partial(mean_loss, reduction=reduction)
        orders, at = [lambda f: jax.grad(f, (0, 1, 2))], (np.linspace(0.5, 2, 5), 0.1, 0.02)
        support.same_derivatives(of_options(ours), of_options(theirs), orders, at, rtol=1e-12, atol=0)


def mean_of_losses(*arguments, **options):
    return integer_labels(*arguments, **options).mean()


BOTH = pytest.mark.parametrize("f", [cross_entropy_loss, mean_of_losses])


GRADIENTS_OF = [((7, 32), -1), ((4, 50257), 1), ((33, 6, 8), 1), ((130, 5), 0), ((9, 8192), -1)]


@support.sampled(
    "f,dtype,view", itertools.product([cross_entropy_loss, mean_of_losses], ["bfloat16", "float32"], GRADIENTS_OF), 7
)
def test_gradient(f, dtype, view):
    """Of 16 bits rounded once, at the label too, where it may cancel."""
    shape, axis = view
    x = normal(shape, dtype, scale=5.0)
    labels = np.argmax(np.asarray(x, np.float32), axis)
    g = jax.jit(jax.grad(lambda x: f(x, labels, axis=axis)))(x)
    wide = np.asarray(x, np.float64)
    y = np.exp(wide - np.expand_dims(lse(wide, axis), axis))
    index = np.expand_dims(labels, axis)
    exact = y.copy()
    np.put_along_axis(exact, index, np.take_along_axis(y, index, axis) - 1, axis)
    exact /= labels.size
    eps = float(jnp.finfo(dtype).eps)
    bound = 0.51 * eps * np.abs(exact) + 64 * np.finfo(np.float32).eps * y / labels.size + 1e-37
    assert g.dtype == np.dtype(dtype)
    assert np.all(np.abs(np.asarray(g, np.float64) - exact) <= bound)


@BOTH
def test_float16_under_loss_scaling(f):
    """The gradient is scaled before it is rounded, once."""
    x, labels = normal((4096, 64), "float16"), np.arange(4096) % 64
    g = jax.grad(lambda x: f(x, labels) * 2.0**15)(x)
    wide = np.asarray(x, np.float64)
    exact = np.exp(wide - lse(wide)[:, None]) - (labels[:, None] == np.arange(64))
    np.testing.assert_allclose(g, exact * 2.0**15 / 4096, rtol=np.finfo("float16").eps, atol=1e-5)


@BOTH
@pytest.mark.parametrize("z_loss", [0.0, 1e-4])
def test_what_a_gradient_takes(f, z_loss):
    """On CUDA the kernels alone read the logits, and nothing of their size is made but the gradient."""
    x, labels = jax.ShapeDtypeStruct((64, 5000), jnp.bfloat16), jax.ShapeDtypeStruct((64,), jnp.int32)
    step = jax.jit(jax.value_and_grad(lambda x, labels: f(x, labels, z_loss=z_loss)))
    text = step.trace(x, labels).lower(lowering_platforms=("cuda",)).as_text()
    assert len(re.findall("custom_call @jax_softmax.*64x5000xbf16.*64x1xf32.*64x5000xbf16", text)) == 1
    if f is mean_of_losses:  # the other's product with a cotangent that is the number 1 XLA leaves out
        assert "64x5000xf32" not in text
    if jax.default_backend() == "cpu":
        x = x.update(dtype="float32")  # older XLA for CPUs scatters 16 bits in float32
        assert step.lower(x, labels).compile().memory_analysis().temp_size_in_bytes < 64 * 5000


@BOTH
def test_what_is_kept_of_losses(f):
    """The logits or their gradient, and a few numbers of each row."""
    x, labels = jnp.ones((64, 4096), jnp.bfloat16), jnp.zeros(64, jnp.int32)
    assert support.kept_bytes(lambda x: f(x, labels), x) <= x.nbytes + 8 * 64 * 4


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_dtypes_where_64_bits_are_on(dtype):
    x, labels = normal((3, 5), dtype), np.array([0, 1, 2])
    with jax.enable_x64(True):
        for f in (cross_entropy_loss, integer_labels):
            assert f(x, labels, z_loss=1e-4, label_smoothing=0.1).dtype == np.float32
        g = jax.grad(lambda x: cross_entropy_loss(x, labels, z_loss=1e-4, label_smoothing=0.1))(x)
        assert g.dtype == np.dtype(dtype)


def test_what_has_no_weight_may_be_anything():
    x, labels, weights = normal((3, 5)), np.array([0, 1, 2]), np.array([True, False, True])
    x[1, 0], x[1, 1] = np.nan, -np.inf
    found = cross_entropy_loss(x, labels, weights=weights)
    np.testing.assert_allclose(found, losses(x[::2], labels[::2]).mean(), rtol=1e-6)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_derivative_of_a_weight_of_0(dtype):
    """It is the loss, as of any other weight; but 0 where that is not finite."""
    x, labels = normal((4, 5), dtype), np.array([0, 1, 2, 7])
    x[0, 0] = -np.inf
    weights = np.array([0.0, 0.0, 2.0, 1.0], "float32")
    found = jax.grad(lambda w: cross_entropy_loss(x, labels, weights=w, reduction="sum"))(weights)
    np.testing.assert_allclose(found, [0, *integer_labels(x, labels)[1:]], rtol=1e-6)


def test_forward_mode_of_an_infinite_loss():
    x, labels = normal((3, 5)), np.array([0, 1, 2])
    x[0, 0] = -np.inf
    tangent = jax.jvp(lambda x: cross_entropy_loss(x, labels, reduction="sum"), (x,), (np.ones_like(x),))[1]
    np.testing.assert_allclose(tangent, 0, atol=1e-6)


def test_only_what_is_asked_for_is_computed():
    """Without a derivative by the logits no gradient of theirs is made."""
    x, labels = normal((3, 5)), np.array([0, 1, 2])
    f = jax.grad(lambda w: cross_entropy_loss(x, labels, weights=w))
    assert "cross_entropy_gradient" not in str(jax.make_jaxpr(f)(np.ones(3, "float32")))


def test_no_label_counts():
    x = normal((3, 5))
    value, g = jax.value_and_grad(cross_entropy_loss)(x, np.full(3, -100))
    assert value == 0 and np.all(np.asarray(g) == 0)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_no_weight_counts(reduction):
    x, labels = normal((3, 5)), np.array([0, 1, 2])

    def f(x, weights):
        return cross_entropy_loss(x, labels, weights=weights, reduction=reduction)

    value, g = jax.value_and_grad(f)(x, np.zeros(3, "float32"))
    assert value == 0 and np.all(np.asarray(g) == 0)
    assert jax.jvp(lambda x: f(x, np.zeros(3, "float32")), (x,), (np.ones_like(x),))[1] == 0


def test_vmap_of_soft_labels():
    x, t = normal((3, 4, 6)), np.asarray(jax.nn.softmax(normal((3, 4, 6), seed=1)))

    def gradients(x, t):
        return jax.grad(lambda x, t: softmax_cross_entropy(x, t).sum(), (0, 1))(x, t)

    gradients = jax.jit(gradients)
    for axes in ((0, 0), (0, None), (None, 0)):
        found = jax.vmap(gradients, axes)(x if axes[0] == 0 else x[0], t if axes[1] == 0 else t[0])
        each = [gradients(x[i * (axes[0] == 0)], t[i * (axes[1] == 0)]) for i in range(3)]
        for a, b in zip(found, zip(*each, strict=True), strict=True):
            np.testing.assert_allclose(a, np.stack(b), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("f", [cross_entropy_loss, lambda x, labels: integer_labels(x, labels).sum()])
def test_vmap_and_scan(f):
    x, labels = normal((3, 4, 6)), np.arange(12).reshape(3, 4) % 6
    one = jax.jit(jax.value_and_grad(f))
    each, gradients = (np.stack(a) for a in zip(*(one(x[i], labels[i]) for i in range(3)), strict=True))

    def together(x, labels):
        mapped = jax.vmap(f)(x, labels), jax.lax.map(lambda a: f(*a), (x, labels)), jax.vmap(f, (None, 0))(x[0], labels)
        of_first = jax.grad(jax.checkpoint(lambda x: f(x, labels[0])))(x[0])
        return mapped, (jax.vmap(jax.grad(f))(x, labels), of_first)

    values, found = support.in_haste(together, x, labels)
    support.assert_close(values, (each, each, np.stack([one(x[0], row)[0] for row in labels])), rtol=1e-6)
    support.assert_close(found, (gradients, gradients[0]), rtol=1e-5, atol=1e-7)


@BOTH
def test_vmap_over_labels_alone(f):
    """The kernels see the logits as they are, without a copy for each."""
    x, labels = normal((5, 40)), np.random.default_rng(0).integers(0, 40, (3, 5))
    where = random_mask((5, 40))

    def values(x):
        return jax.vmap(lambda labels: f(x, labels, where=where))(labels)

    def gradients(x):
        return jax.vmap(lambda labels: jax.grad(f)(x, labels, where=where))(labels)

    one = jax.jit(lambda x, row: (f(x, row, where=where), jax.grad(f)(x, row, where=where)))
    losses_of_rows, each = (np.stack(a) for a in zip(*(one(x, row) for row in labels), strict=True))
    run = lambda x: (values(x), gradients(x), jax.grad(lambda x: values(x).sum())(x))  # noqa: E731
    value, *found = support.in_haste(run, x)
    np.testing.assert_allclose(value, losses_of_rows, rtol=1e-6)
    support.assert_close(found, (each, each.sum(0)), rtol=1e-7, atol=1e-6)
    for function in (values, gradients, jax.grad(lambda x: values(x).sum())):
        text = jax.jit(function).trace(x).lower(lowering_platforms=("cuda",)).as_text()
        calls = re.findall("custom_call @jax_softmax.*", text)
        assert calls and not any("3x5x40" in call for call in calls)


def test_vmap_over_weights_alone():
    x, labels, weights = normal((5, 40)), np.arange(5), np.linspace(0.5, 2, 15).reshape(3, 5)

    def gradient(weights):
        return jax.grad(lambda x: cross_entropy_loss(x, labels, weights=weights))(x)

    np.testing.assert_allclose(jax.vmap(gradient)(weights), [gradient(row) for row in weights], atol=1e-6)
    text = jax.jit(jax.vmap(gradient)).trace(weights).lower(lowering_platforms=("cuda",)).as_text()
    assert not any("3x5x40" in call for call in re.findall("custom_call @jax_softmax.*", text))


P = jax.sharding.PartitionSpec


@support.sampled("f,varies", itertools.product([cross_entropy_loss, mean_of_losses], ["labels", "z_loss"]), 3)
def test_logits_that_all_devices_have(f, varies):
    """Inside shard_map, labels or an option of each device's own."""
    x, labels, z = normal((4, 12)), np.arange(8).reshape(2, 4), np.array([0.1, 0.2], "float32")

    def loss(x, labels, z):
        of_device = f(x, labels[0] if varies == "labels" else labels, z_loss=z[0] if varies == "z_loss" else z)
        return jax.lax.psum(of_device, "data")

    labels, z = (labels, 0.1) if varies == "labels" else (labels[0], z)
    specs = P(), P("data") if varies == "labels" else P(), P("data") if varies == "z_loss" else P()
    spread = jax.shard_map(jax.value_and_grad(loss), mesh=support.mesh_of_cpus((2, 4)), in_specs=specs, out_specs=P())
    with support.on_a_cpu():
        value, g = jax.jit(spread)(x, labels, z)
        each = [(labels[i], z) if varies == "labels" else (labels, z[i]) for i in range(2)]
        expected, of_x = jax.value_and_grad(lambda x: sum(f(x, n, z_loss=z) for n, z in each))(x)
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    np.testing.assert_allclose(g, of_x, rtol=1e-5, atol=1e-7)


def equations_of(jaxpr):
    """How many, also within equations."""
    inner = [inner for e in jaxpr.eqns for inner in jaxprs_of(e.params)]
    return len(jaxpr.eqns) + sum(map(equations_of, inner))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_programs_are_short(reduction):
    """What users read when they print one, and JAX and XLA go through."""
    x, labels = np.ones((4, 8), np.float32), np.arange(4, dtype=np.int32)
    gradient = jax.grad(lambda x: cross_entropy_loss(x, labels, reduction=reduction))
    assert equations_of(jax.make_jaxpr(gradient)(x).jaxpr) <= 40


# ---- what is refused


@pytest.mark.parametrize(
    "call,error,message",
    [
        (lambda x, n: logsumexp("x"), TypeError, "logsumexp: x must be an array"),
        (lambda x, n: logsumexp(x, 2), ValueError, "logsumexp: axis must be an int from -2 to 1"),
        (lambda x, n: logsumexp(x, dtype="int32"), TypeError, "logsumexp: dtype must be a floating dtype"),
        (lambda x, n: logsumexp(x + 0j), TypeError, "logsumexp: x must be real"),
        (lambda x, n: logsumexp(x, where=x), TypeError, "logsumexp: where must be a boolean array"),
        (lambda x, n: integer_labels(x, n * 1.0), TypeError, "labels must be an array of an integer dtype"),
        (
            lambda x, n: integer_labels(x, n[:1]),
            ValueError,
            r"labels must have the shape of logits without axis, \(2,\)",
        ),
        (lambda x, n: integer_labels(x, n, z_loss=x), ValueError, "z_loss must be a scalar, got shape"),
        (lambda x, n: integer_labels("x", n), TypeError, "logits must be an array"),
        (lambda x, n: integer_labels(x, n, where=x[None] > 0), ValueError, "where must broadcast to shape"),
        (lambda x, n: softmax_cross_entropy(x, x[:, :2]), ValueError, "labels must broadcast to shape"),
        (lambda x, n: integer_labels(x, n, axis=()), ValueError, "there must be at least one class"),
        (lambda x, n: cross_entropy_loss(x[:, :0], n), ValueError, "there must be at least one class"),
        (lambda x, n: cross_entropy_loss(x, n, reduction="none"), ValueError, "got 'none'. Write reduction=None for"),
        (lambda x, n: cross_entropy_loss(x, n, reduction="avg"), ValueError, 'must be "mean", "sum" or None, got'),
        (lambda x, n: cross_entropy_loss(x, n, reduction=x), TypeError, 'reduction must be "mean", "sum" or None, got'),
        (lambda x, n: cross_entropy_loss(x, n, class_weights=n), ValueError, r"class_weights must be of shape \(3,\)"),
        *(
            (functools.partial(f, labels), error, "go to jax_softmax.softmax_cross_entropy")
            for f in (
                lambda labels, x, n: cross_entropy_loss(x, labels),
                lambda labels, x, n: integer_labels(x, labels),
            )
            for labels, error in ((np.ones((2, 3), np.float32), TypeError), (np.ones((2, 3), int), ValueError))
        ),
        (lambda x, n: cross_entropy_loss(x, 2**40), ValueError, "labels must be an array .*, got 1099511627776"),
        (
            lambda x, n: cross_entropy_loss(x, n, weights=2**40),
            ValueError,
            "weights must be an array .*, got 109951162",
        ),
        (lambda x, n: logsumexp(2**40, None), ValueError, "x must be an array .*, got 1099511627776"),
        (lambda x, n: logsumexp(x, keepdims="no"), TypeError, "keepdims must be True or False, got one of type str"),
        (
            lambda x, n: logsumexp(x, return_max="no"),
            TypeError,
            "return_max must be True or False, got one of type str",
        ),
        (lambda x, n: logsumexp(x, b=n), ValueError, r"b must broadcast to shape \(2, 3\), got shape \(2,\)"),
        (lambda x, n: logsumexp(x, b=1j), TypeError, "b must be real"),
        (lambda x, n: logsumexp(x, b=1, return_max=True), ValueError, "return_max must be False where b is given"),
        (lambda x, n: logsumexp(x, return_sign=1), TypeError, "return_sign must be True or False"),
        (lambda x, n: logsumexp(x, keepdims=n), TypeError, "keepdims must be True or False, got one of type ndarray"),
        (
            lambda x, n: jax.jit(lambda k: logsumexp(x, keepdims=k))(True),
            TypeError,
            "keepdims must be True or False, got .*Tracer. It must be known when the program is traced",
        ),
        *(
            (functools.partial(f, **{name: value}), ValueError, rf"{name} must be a number from .*, got {value}")
            for f in (lambda x, n, **options: integer_labels(x, n, **options), cross_entropy_loss)
            for name, value in [
                *(("label_smoothing", value) for value in (-0.1, 1.5, 2, np.float32(2), math.nan)),
                ("z_loss", math.nan),
            ]
        ),
        (lambda x, n: cross_entropy_loss(x, n, weights=x), ValueError, "weights must broadcast to shape"),
        (lambda x, n: cross_entropy_loss(x, n, weights=n + 0j), TypeError, "weights must be real"),
    ],
)
def test_what_is_refused(call, error, message):
    with pytest.raises(error, match=message):
        call(normal((2, 3)), np.array([0, 1]))


@pytest.mark.parametrize("f", [integer_labels, cross_entropy_loss])
def test_more_classes_than_int32_counts_are_refused(f):
    def of_shape(columns):
        x = jax.ShapeDtypeStruct((2, columns), jnp.bfloat16)
        return jax.eval_shape(f, x, jax.ShapeDtypeStruct((2,), np.int32))

    assert of_shape(2**31 - 1).dtype == np.float32
    with pytest.raises(ValueError, match="at most 2147483647 classes, got 2147483648"):
        of_shape(2**31)


@pytest.mark.parametrize("f", [integer_labels, cross_entropy_loss])
def test_numbers_are_not_transferred(f):
    x, labels = jnp.asarray(normal((2, 3))), jnp.array([0, 1])
    expected = f(x, labels, label_smoothing=jnp.float32(0.1), z_loss=jnp.float32(0.01))
    with jax.transfer_guard("disallow"):
        found = f(x, labels, label_smoothing=0.1, z_loss=0.01)
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_bools_of_numpy():
    x = normal((2, 3))
    lse, largest = logsumexp(x, keepdims=np.True_, return_max=np.True_)
    assert lse.shape == largest.shape == (2, 1)
    assert logsumexp(x, keepdims=np.False_, return_max=np.False_).shape == (2,)


@support.sampled("masked", [True, False], 2)
def test_smoothed_labels_with_infinite_logits(masked):
    """The loss is infinite where a class that is not masked has a logit of -inf, with its gradient and without."""
    x, labels = normal((4, 10)), np.array([1, 2, 3, 4])
    x[1, 5] = x[2, 0] = -np.inf
    where = np.ones(x.shape, bool)
    where[1, 5], where[3] = False, False
    where = where if masked else None

    for row in range(4):
        one = functools.partial(cross_entropy_loss, labels=labels[row : row + 1], label_smoothing=0.2, reduction="sum")
        mask = None if where is None else where[row : row + 1]
        value, gradient = jax.value_and_grad(lambda x, mask=mask, one=one: one(x, where=mask))(x[row : row + 1])
        np.testing.assert_allclose(value, one(x[row : row + 1], where=mask), rtol=1e-6)
        assert np.isinf(value) == (row == 2 or (row == 1 and not masked)), row
        assert not np.isnan(gradient).any()


def test_smoothed_labels_take_no_other_reading():
    def f(x):
        return cross_entropy_loss(x, np.arange(64), label_smoothing=0.1)

    x = jax.ShapeDtypeStruct((64, 5000), jnp.float32)
    text = jax.jit(jax.value_and_grad(f)).trace(x).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count('op = "cross_entropy_gradient_and_distances"') == 1
    assert not re.search(r"stablehlo\.reduce\(.*64x5000xf32", text)


def test_smoothed_labels_of_rows_too_long_to_count(monkeypatch):
    """In float32, up to which the kernel's count is exact."""
    x, labels = normal((3, 40)), np.array([0, 5, 39])

    def traced():
        jax.clear_caches()
        return jax.make_jaxpr(jax.value_and_grad(lambda x: cross_entropy_loss(x, labels, label_smoothing=0.1)))(x)

    counted = traced()
    monkeypatch.setattr(reference, "MOST_COUNTED", 39)
    found = traced()
    monkeypatch.undo()
    jax.clear_caches()
    assert "_and_distances" in str(counted) and "_and_distances" not in str(found)
    results = (jax.core.eval_jaxpr(program.jaxpr, program.consts, x) for program in (found, counted))
    for a, b in zip(*results, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)


def test_names_in_programs():
    """Profiles and dumps show what it is."""
    text = str(jax.make_jaxpr(jax.grad(lambda x: cross_entropy_loss(x, np.array([0, 1]))))(normal((2, 3))))
    assert "cross_entropy_gradient" in text
    assert "logsumexp" in str(jax.make_jaxpr(jax_softmax.logsumexp)(normal((2, 3))))


def test_explained():
    """Along an axis that is not the last XLA reads the labels' logits, and a kernel the rest."""
    text = str(jax_softmax.explain((65536, 1000), dtype="bfloat16", op="cross_entropy", device="H200"))
    assert "cross_entropy of bfloat16 (65536, 1000)" in text and "schedule  registers" in text and "1 read" in text
    text = str(jax_softmax.explain((64, 1000, 1024), 1, dtype="bfloat16", op="cross_entropy", device="H200"))
    assert "logsumexp of bfloat16 (64, 1000, 1024)" in text and "schedule  tile" in text


@pytest.mark.parametrize("label", [np.zeros((2, 1), "float32"), np.zeros((2, 3), "int32"), np.zeros((2, 1), "int8")])
def test_the_kernel_refuses_other_labels(label):
    results = 3 * [jax.ShapeDtypeStruct((2, 1), np.float32)]
    call = jax.ffi.ffi_call("jax_softmax", results)
    with support.on_a_cpu(), pytest.raises(Exception, match=r"label|rows"):
        jax.block_until_ready(call(normal((2, 3)), label, **attributes("cross_entropy", (1,), masked=False)))


# ---- rows that do not count


WEIGHTLESS = {
    "weights": ([0, 1, 2], {"weights": np.array([0.0, 0.0, 1.0], np.float32)}),
    "labels": ([-1, 3, 2], {}),
}


OPTIONS = [{}, {"z_loss": 0.1}, {"label_smoothing": 0.1}, {"z_loss": jnp.float32(0.1)}]


@support.sampled("options,case,dtype", itertools.product(OPTIONS, WEIGHTLESS, DTYPES), 7)
def test_logits_of_rows_that_do_not_count(dtype, options, case):
    """They may be anything, for the value and the gradients."""
    labels, weights = WEIGHTLESS[case]
    x = np.array([[np.nan, 1, 2], [np.inf, 1, -np.inf], [1, 2, 4]]).astype(jnp.dtype(dtype))
    plain = np.where(np.isfinite(x.astype("float64")), x, 0).astype(x.dtype)

    @jax.jit
    def everything(x):
        def loss(x, given):
            return cross_entropy_loss(x, np.array(labels), **{**options, **given}, **weights)

        given = {name: value for name, value in options.items() if not isinstance(value, float)}
        return jax.value_and_grad(loss, (0, 1))(x, given), jax.jvp(lambda x: loss(x, given), (x,), (jnp.ones_like(x),))

    with support.precision(dtype):
        for found, expected in zip(jax.tree.leaves(everything(x)), jax.tree.leaves(everything(plain)), strict=True):
            expected = np.asarray(expected, np.float64)
            assert np.all(np.isfinite(np.asarray(found, np.float64)))
            if expected.shape == x.shape:
                assert np.all(np.asarray(found, np.float64)[:2] == 0)
                found, expected = np.asarray(found, np.float64)[2], expected[2]
            np.testing.assert_allclose(np.asarray(found, np.float64), expected, rtol=2e-3, atol=1e-6)


def test_modes_agree_on_rows_of_nothing_but_minus_infinity():
    x = np.array([[-np.inf, -np.inf], [1, 2]], np.float32)
    tangent = jax.jvp(lambda x: logsumexp(x), (x,), (np.ones_like(x),))[1]
    np.testing.assert_array_equal(np.isnan(tangent), [True, False])
    gradient = jax.grad(lambda x: logsumexp(x).sum())(x)
    np.testing.assert_array_equal(np.isnan(gradient), [[True, True], [False, False]])
