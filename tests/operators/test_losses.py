"""The cross entropies: values, labels, masks and weights; rows that do not count; and what is refused."""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import support
from oracles import lse
from support import DTYPES, SECOND, normal, random_mask

from jax_softmax import cross_entropy_loss, linear_cross_entropy, logsumexp, softmax_cross_entropy
from jax_softmax import softmax_cross_entropy_with_integer_labels as integer_labels
from jax_softmax.runtime.kernel_spec import attributes


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


# ---- labels that are classes


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


# ---- masks


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


# ---- labels that are probabilities


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


# ---- options


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


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_dtypes_where_64_bits_are_on(dtype):
    x, labels = normal((3, 5), dtype), np.array([0, 1, 2])
    with jax.enable_x64(True):
        for f in (cross_entropy_loss, integer_labels):
            assert f(x, labels, z_loss=1e-4, label_smoothing=0.1).dtype == np.float32
        g = jax.grad(lambda x: cross_entropy_loss(x, labels, z_loss=1e-4, label_smoothing=0.1))(x)
        assert g.dtype == np.dtype(dtype)


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


@pytest.mark.parametrize("f", [integer_labels, cross_entropy_loss])
def test_numbers_are_not_transferred(f):
    x, labels = jnp.asarray(normal((2, 3))), jnp.array([0, 1])
    expected = f(x, labels, label_smoothing=jnp.float32(0.1), z_loss=jnp.float32(0.01))
    with jax.transfer_guard("disallow"):
        found = f(x, labels, label_smoothing=0.1, z_loss=0.01)
    np.testing.assert_allclose(found, expected, rtol=1e-6)


# ---- rows that do not count


def test_what_has_no_weight_may_be_anything():
    x, labels, weights = normal((3, 5)), np.array([0, 1, 2]), np.array([True, False, True])
    x[1, 0], x[1, 1] = np.nan, -np.inf
    found = cross_entropy_loss(x, labels, weights=weights)
    np.testing.assert_allclose(found, losses(x[::2], labels[::2]).mean(), rtol=1e-6)


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


@pytest.mark.parametrize("label", [np.zeros((2, 1), "float32"), np.zeros((2, 3), "int32"), np.zeros((2, 1), "int8")])
def test_the_kernel_refuses_other_labels(label):
    results = 3 * [jax.ShapeDtypeStruct((2, 1), np.float32)]
    call = jax.ffi.ffi_call("jax_softmax", results)
    with support.on_a_cpu(), pytest.raises(Exception, match=r"label|rows"):
        jax.block_until_ready(call(normal((2, 3)), label, **attributes("cross_entropy", (1,), masked=False)))
