"""linear_cross_entropy: values and derivatives, with chunks and without; their accuracy; and what is refused."""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import support
from by_numpy import by_numpy
from linear_losses import FEATURES, TOKENS, VOCABULARY, expected_loss, expected_losses, operands, probabilities
from support import FIRST, SECOND

from jax_softmax import linear_cross_entropy

pytestmark = pytest.mark.usefixtures("products_in_float32")

ALL_OPTIONS = {"temperature": 0.7, "soft_cap": 3.0, "z_loss": 0.01, "label_smoothing": 0.2}


# ---- Values and derivatives

CASES = [(ALL_OPTIONS, "mean", 4), ({}, "sum", None), (ALL_OPTIONS, None, None), ({}, None, 4), ({}, "mean", 4)]


@support.sampled("options,reduction,chunk", CASES, 5, ids=str)
def test_derivatives(options, reduction, chunk):
    """By all that is real, in both modes and their combinations."""
    with jax.enable_x64(True):
        x, w, labels, bias = operands("float64")
        weights = np.linspace(0.5, 2, TOKENS)

        def total(loss):
            return loss if reduction else jnp.sum(loss**2)

        def ours(x, w, bias, weights):
            given = {"bias": bias, "weights": weights, "reduction": reduction}
            return total(linear_cross_entropy(x, w, labels, **given, chunk=chunk, **options))

        def theirs(x, w, bias, weights):
            return total(expected_loss(x @ w + bias, labels, reduction, weights=weights, **options))

        def products(f):
            """With tangents, of second order."""

            def run(*args):
                dots, g = [jnp.cos(3 * a) for a in args], jax.grad(f, (0, 1, 2, 3))
                again = jax.grad(lambda *args: sum(map(jnp.vdot, g(*args), dots)), (0, 1, 2, 3))
                return g(*args), jax.jvp(f, args, tuple(dots)), jax.jvp(g, args, tuple(dots)), again(*args)

            return run

        orders = (lambda f: f, products)
        support.same_derivatives(ours, theirs, orders, (x, w, bias, weights), rtol=1e-11, atol=1e-12)


@pytest.mark.sweep
@pytest.mark.parametrize("chunk", [4, None])
def test_hessians(chunk):
    with jax.enable_x64(True):
        x, w, labels, _ = operands("float64", features=2, vocabulary=4)

        def ours(w):
            return linear_cross_entropy(jnp.sin(w[:, 0]) * x, w, labels, chunk=chunk)

        def theirs(w):
            return expected_loss((jnp.sin(w[:, 0]) * x) @ w, labels)

        support.same_derivatives(ours, theirs, (*FIRST, *SECOND), [w], rtol=1e-11, atol=1e-12)


def test_derivatives_by_the_options():
    with jax.enable_x64(True):
        x, w, labels, _ = operands("float64")
        orders, at = [lambda f: jax.grad(f, (0, 1))], (0.1, 0.02)
        for chunk in (None, 4):
            support.same_derivatives(
                lambda s, z, n=chunk: linear_cross_entropy(x, w, labels, label_smoothing=s, z_loss=z, chunk=n),
                lambda s, z: expected_loss(x @ w, labels, label_smoothing=s, z_loss=z),
                *(orders, at, 1e-11, 0),
            )


@support.sampled("tokens", [(2, 7, 3), (13,), (12,), (1,), (), (4, 3)], 6, ids=str)
def test_shapes_and_chunks(tokens):
    """Any number of tokens, in any number of dimensions, and chunks of any size."""
    x, w, labels, bias = operands(tokens=tokens)

    def run(loss):
        def of_tokens(*args):
            return jnp.sum(jnp.sin(loss(*args, None)))

        return lambda *args: [jax.value_and_grad(f, (0, 1, 2))(*args) for f in (loss, of_tokens)]

    def ours(x, w, bias, reduction="mean", chunk=None):
        options = {"reduction": reduction, "chunk": chunk, "transpose_w": True}
        return linear_cross_entropy(x, w.T, labels, bias=bias, **options)

    def theirs(x, w, bias, reduction="mean"):
        return expected_loss(x @ w + bias, labels, reduction)

    expected = by_numpy(run(theirs), x, w, bias)
    for chunk in (None, 5) if math.prod(tokens) > 1 else (1,):
        found = support.in_haste(run(functools.partial(ours, chunk=chunk)), x, w, bias)
        support.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_no_tokens():
    x, w, labels, _ = operands(tokens=(0,))
    for chunk in (None, 1):
        value, (of_x, of_w) = jax.value_and_grad(linear_cross_entropy, (0, 1))(x, w, labels, chunk=chunk)
        assert value == 0 and of_x.shape == x.shape and not np.any(of_w)
    assert linear_cross_entropy(x, w, labels, reduction=None).shape == (0,)
    x, w, labels, _ = operands()
    assert linear_cross_entropy(x, w, np.full_like(labels, -1)) == 0
    np.testing.assert_allclose(linear_cross_entropy(x[:, :0], w[:0], labels % 9), np.log(9), rtol=1e-6)


def test_what_does_not_count_may_be_anything():
    x, w, labels, _ = operands()
    labels[:3] = -100, 2, 3
    weights = np.ones(TOKENS, np.float32)
    weights[1] = 0
    x[:2] = np.nan

    def run(x, w, chunk, reduction):
        def loss(x):
            return jnp.sum(linear_cross_entropy(x, w, labels, weights=weights, chunk=chunk, reduction=reduction))

        return jax.value_and_grad(loss)(x)

    options = list(itertools.product((None, 4), ("mean", None)))
    for value, of_x in support.in_haste(lambda x, w: [run(x, w, *o) for o in options], x, w):
        assert np.isfinite(value) and np.all(of_x[:2] == 0) and np.isfinite(of_x).all()


def test_without_jit(monkeypatch):
    monkeypatch.setattr("jax_softmax.functions.linear_cross_entropy._CHUNK_BYTES", 256)
    x, w, labels, _ = operands()
    expected = by_numpy(lambda x, w: expected_loss(x @ w, labels), x, w)
    with jax.disable_jit():
        np.testing.assert_allclose(linear_cross_entropy(x, w, labels), expected, rtol=1e-5)


def test_a_nan_is_seen():
    x, w, labels, _ = operands()
    x[4] = np.nan
    of_x = jax.grad(linear_cross_entropy)(x, w, labels % VOCABULARY, label_smoothing=0.1)
    assert np.isnan(of_x[4]).all() and np.isfinite(np.delete(of_x, 4, 0)).all()


# ---- Numbers


@support.sampled("chunk,magnitude", [(16, 640), (None, 640), (16, 30), (None, 30), (16, 1), (None, 1)], 3, ids=str)
def test_accuracy(magnitude, chunk):
    """That of float64 losses of the same bfloat16 products, but for the roundings of the gradients to bfloat16."""
    x, w, labels, _ = operands("bfloat16", (64,), 32, 300)
    x *= magnitude / np.abs(x @ w).max().astype(np.float32)
    x, labels = x.astype(jnp.bfloat16), np.abs(labels) % 300

    def loss(x, w, reduction="sum"):
        return linear_cross_entropy(x, w, labels, reduction=reduction, chunk=chunk)

    logits = np.asarray(jnp.dot(x, w, preferred_element_type=jnp.bfloat16)).astype(np.float64)
    p = np.exp(logits - logits.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    at_labels = np.take_along_axis(logits, labels[:, None], -1)[:, 0]
    exact = np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1)) + logits.max(-1) - at_labels
    np.testing.assert_allclose(jax.jit(loss, static_argnums=2)(x, w, None), exact, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(jax.jit(loss)(x, w), exact.sum(), rtol=1e-6)
    of_logits = p - (labels[:, None] == np.arange(300))
    wide_x, wide_w = (np.asarray(a).astype(np.float64) for a in (x, w))
    half = float(jnp.finfo(jnp.bfloat16).eps) / 2
    for reduction in ("sum", None):
        found = jax.jit(jax.grad(lambda x, w, r=reduction: jnp.sum(loss(x, w, r)), (0, 1)))(x, w)
        for gradient, a, b in ((found[0], of_logits, wide_w.T), (found[1], wide_x.T, of_logits)):
            bound = 1.1 * half * (np.abs(a @ b) + np.abs(a) @ np.abs(b)) + 1e-6
            assert np.all(np.abs(np.asarray(gradient, np.float64) - a @ b) <= bound)


def test_the_sum_of_chunks_is_as_exact_as_one_product():
    """Of w in float32, whose gradient is not rounded, and with a sum that is rounded after each chunk."""
    x, w, labels, _ = operands("bfloat16", (512,), 8, 40)
    labels = np.abs(labels) % 40

    def gradient(chunk, dtype=None):
        def loss(w):
            options = {"chunk": chunk, "accumulate_dtype": dtype, "reduction": "sum"}
            return linear_cross_entropy(x, w, labels, **options)

        return np.asarray(jax.jit(jax.grad(loss))(w)).astype(np.float64)

    once, in_chunks, rounded = gradient(None), gradient(8), gradient(8, jnp.bfloat16)
    eps = float(jnp.finfo(jnp.bfloat16).eps)
    assert np.abs(in_chunks - once).max() <= eps * np.abs(once).max()
    assert 2 * np.abs(in_chunks - once).max() < np.abs(rounded - once).max()


@support.sampled("dtype", ["bfloat16", "float32", "float16"], 3)
def test_dtypes(dtype):
    x, w, labels, bias = operands(dtype)
    expected = by_numpy(lambda logits: expected_loss(logits, labels), (x @ w + bias).astype(np.float32))
    f = jax.jit(jax.value_and_grad(lambda x, w, b, **o: linear_cross_entropy(x, w, labels, bias=b, **o), (0, 1, 2)))
    value, gradients = f(x, w, bias)
    assert value.dtype == np.float32 and all(g.dtype == np.dtype(dtype) for g in gradients)
    np.testing.assert_allclose(value, expected, rtol=8 * float(jnp.finfo(dtype).eps))
    losses = linear_cross_entropy(x, w, labels, reduction=None, logits_dtype="float32")
    assert losses.dtype == np.float32
    mixed = jax.grad(linear_cross_entropy, (0, 1))(x, w.astype(np.float32), labels)
    assert mixed[0].dtype == np.dtype(dtype) and mixed[1].dtype == np.float32


def test_logits_in_float32():
    """Which are not rounded: as large ones of 16 bits are, by whole numbers."""
    x, w, labels, _ = operands("bfloat16", (16,), 64, 50)
    x, labels = (x * 40).astype(jnp.bfloat16), np.abs(labels) % 50
    exact = by_numpy(lambda x, w: expected_loss(x @ w, labels), *(np.asarray(a, np.float32) for a in (x, w)))
    assert abs(linear_cross_entropy(x, w, labels) - exact) > 3e-5 * abs(exact)
    for chunk in (None, 5):
        f = functools.partial(linear_cross_entropy, logits_dtype=jnp.float32, chunk=chunk)
        found, gradients = support.in_haste(jax.value_and_grad(f, (0, 1)), x, w, labels)
        np.testing.assert_allclose(found, exact, rtol=1e-5)
        assert all(g.dtype == jnp.bfloat16 for g in gradients)


@support.sampled("chunk", [100, None], 2)
def test_float16_under_loss_scaling(chunk):
    """The gradient of logits is scaled before it is rounded."""
    x, w, labels, _ = operands("float16", (2048,), 4, 64)
    labels = np.abs(labels) % 64

    def gradient(scale, *arrays):
        def loss(x):
            return linear_cross_entropy(x, arrays[1], labels, chunk=chunk) * scale

        return jax.grad(loss)(arrays[0])

    exact = support.in_haste(gradient, 1.0, x.astype(np.float32), w.astype(np.float32))
    found = np.asarray(support.in_haste(gradient, 2.0**15, x, w), np.float64) / 2**15
    np.testing.assert_allclose(found, exact, rtol=0, atol=4e-3 * np.abs(exact).max())


# ---- A loss for each token, and entropies


@support.sampled("chunk", [4, None], 2)
def test_entropies(chunk):
    with jax.enable_x64(True):
        x, w, labels, bias = operands("float64")

        def ours(x, w):
            options = {"reduction": None, "return_entropy": True, "temperature": 0.7, "chunk": chunk}
            found = linear_cross_entropy(x, w, labels, bias=bias, **options)
            return found.losses, found.entropies

        def theirs(x, w):
            log_p = jax.nn.log_softmax((x @ w + bias) / 0.7)
            return expected_loss(x @ w + bias, labels, None, temperature=0.7), -jnp.sum(jnp.exp(log_p) * log_p, -1)

        def objective(f):
            """With the derivatives of what PPO makes of them."""

            def loss(x, w):
                losses, entropies = f(x, w)
                return jnp.sum(jnp.exp(-losses)) - 0.1 * entropies.sum()

            return lambda x, w: (f(x, w), jax.grad(loss, (0, 1))(x, w), jax.jvp(loss, (x, w), (w.T[:1] + 0 * x, w)))

        support.same_derivatives(ours, theirs, [objective], (x, w), rtol=1e-11, atol=1e-12)


# ---- Labels that are probabilities


@support.sampled("options,reduction,chunk", CASES, 3, ids=str)
def test_derivatives_with_probabilities(options, reduction, chunk):
    """By them as well, and where weights are 0."""
    with jax.enable_x64(True):
        x, w, _, bias = operands("float64")
        args = x, w, bias, jnp.linspace(0, 2, TOKENS), probabilities("float64")

        def ours(x, w, bias, weights, labels):
            given = {"bias": bias, "weights": weights, "reduction": reduction, "chunk": chunk}
            return jnp.sum(jnp.sin(linear_cross_entropy(x, w, labels, **given, **options)))

        def theirs(x, w, bias, weights, labels):
            return jnp.sum(jnp.sin(expected_loss(x @ w + bias, labels, reduction, weights=weights, **options)))

        def orders(f):
            """The second one as well."""
            g = jax.grad(f, range(5))
            return lambda *args: (f(*args), g(*args), jax.jvp(g, args, tuple(map(jnp.cos, args))))

        support.same_derivatives(ours, theirs, [orders], args, rtol=1e-11, atol=1e-12)


def test_probabilities_lie_as_logits_do():
    """Along the axis of x's features; also mapped, and in float16."""
    x, w, _, _ = operands(tokens=(3, TOKENS))
    labels = probabilities(tokens=(3, TOKENS))
    expected = expected_losses(x @ w, labels)[0]

    def ours(x, labels, dtype=np.float32):
        def each(axis):
            moved = [jnp.moveaxis(a, -1, axis).astype(dtype) for a in (x, labels)]
            return linear_cross_entropy(moved[0], w.astype(dtype), moved[1], axis=axis, reduction=None, chunk=5)

        return [each(axis) for axis in range(-1, x.ndim)]

    whole, mapped, halves = support.in_haste(
        lambda *args: (ours(*args), jax.vmap(ours)(*args), ours(*args, np.float16)), x, labels
    )
    support.assert_close(whole, [expected] * 4, rtol=1e-5, atol=1e-5)
    support.assert_close(mapped, [expected] * 3, rtol=1e-5, atol=1e-5)
    support.assert_close(halves, [expected] * 4, rtol=1e-2, atol=1e-2)


def test_tokens_that_fill_up_a_chunk_count_for_nothing():
    """Also where their logits are not finite, as a bias has it."""
    x, w, _, _ = operands()
    labels, mask = probabilities(), np.arange(VOCABULARY) != 3
    bias, labels[:, 3] = np.where(mask, 0, -np.inf).astype(np.float32), 0

    def total(x, smoothing):
        options = {"bias": bias, "label_smoothing": smoothing, "reduction": "sum", "chunk": 4}
        return linear_cross_entropy(x, w, labels, **options)

    assert total(x, 0.2) == jnp.inf
    value, gradients = jax.value_and_grad(total, (0, 1))(x, jnp.zeros(()))
    expected = by_numpy(jax.value_and_grad(lambda x: expected_loss(x @ w[:, mask], labels[:, mask], "sum")), x)
    support.assert_close((value, gradients[0]), expected, rtol=1e-5, atol=1e-5)


# ---- What is refused


@pytest.mark.parametrize(
    "given,error,message",
    [
        ({"x": "x"}, TypeError, "x must be an array"),
        ({"x": 1j * np.ones((TOKENS, FEATURES))}, TypeError, "x must be real"),
        ({"x": np.float32(1)}, ValueError, r"x must be of shape \(\.\.\., features\), got shape \(\)"),
        ({"w": np.ones(3)}, ValueError, r"w must be of shape \(features, vocabulary\), got shape \(3,\)"),
        ({"w": np.ones((4, 9))}, ValueError, r"w must be of shape .*, got shape \(4, 9\) for x of 5 features"),
        ({"transpose_w": True}, ValueError, r"w must be of shape \(vocabulary, features\), got shape \(5, 9\)"),
        ({"transpose_w": "yes"}, TypeError, "transpose_w must be True or False, got one of type str"),
        ({"labels": np.ones(TOKENS, bool)}, TypeError, "labels must be an array of an integer dtype, or of prob"),
        (
            {"labels": np.ones(TOKENS)},
            ValueError,
            r"labels must have the logits' shape, .*\(11, 9\) .* Classes must be",
        ),
        ({"labels": np.ones((TOKENS, 9), int)}, ValueError, "labels must have x's shape .* Probabilities must be of a"),
        ({"labels": np.ones((TOKENS, 9)), "class_weights": np.ones(9)}, ValueError, "class_weights must be None where"),
        (
            {"labels": np.ones(3, int)},
            ValueError,
            r"labels must have x's shape without features, \(11,\) .* got \(3,\)",
        ),
        ({"bias": np.ones((9, 1))}, ValueError, r"bias must be of shape \(vocabulary,\), \(9,\) here, got \(9, 1\)"),
        ({"weights": np.ones((2, 1))}, ValueError, r"weights must broadcast to shape \(11,\), got shape \(2, 1\)"),
        ({"reduction": "none"}, ValueError, 'reduction must be "mean", "sum" or None, got \'none\''),
        ({"reduction": 0}, TypeError, "reduction must be .*, got one of type int"),
        ({"return_entropy": True}, ValueError, "return_entropy must be False unless reduction is None, got 'mean'"),
        ({"soft_cap": 0}, ValueError, "soft_cap must be a positive number, .*, got 0"),
        ({"soft_cap": "30"}, TypeError, "soft_cap must be a positive number, .*, got one of type str"),
        ({"temperature": 1e-50}, ValueError, "temperature must be a positive number, .* of float32's range, got 1e-50"),
        ({"soft_cap": 1e300}, ValueError, r"soft_cap must be a positive number, .*, got 1e\+300"),
        ({"temperature": math.nan}, ValueError, "temperature must be a positive number, .*, got nan"),
        ({"temperature": jnp.ones(())}, TypeError, "temperature must be a positive number, .*, got one of type"),
        ({"label_smoothing": 2}, ValueError, "label_smoothing must be a number from 0 to 1, got 2"),
        ({"z_loss": np.ones(2)}, ValueError, "z_loss must be a scalar"),
        ({"logits_dtype": "int32"}, TypeError, "logits_dtype must be a floating dtype or None, got 'int32'"),
        ({"logits_dtype": ml_dtypes.float8_e5m2}, TypeError, "logits_dtype must be one of float16, .*, got float8"),
        ({"accumulate_dtype": "no"}, TypeError, "accumulate_dtype must be a floating dtype or None, got 'no'"),
        ({"chunk": 0}, ValueError, "chunk must be a positive int, how many tokens, or None, got 0"),
        ({"chunk": 2.0}, TypeError, "chunk must be a positive int, .*, got one of type float"),
        ({"axis_name": "model"}, ValueError, "axis_name must be a mesh axis"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_what_is_refused(given, error, message):
    x, w, labels, _ = operands()
    given = {"x": x, "w": w, "labels": labels} | given
    for f in (linear_cross_entropy, jax.jit(lambda: linear_cross_entropy(**given))):
        with pytest.raises(error, match=f"linear_cross_entropy: {message}"):
            f(**given) if f is linear_cross_entropy else f()


@pytest.mark.parametrize(
    "labels,message",
    [(np.ones((5, 7), int), r"\(7, 5\) here, got \(5, 7\)"), (np.ones((7, 5)), r"\(7, 9, 5\) here, got \(7, 5\)")],
    ids=["integers", "probabilities"],
)
def test_labels_are_refused_in_the_shapes_that_were_given(labels, message):
    with pytest.raises(ValueError, match=f"labels must have .*, {message}"):
        linear_cross_entropy(np.ones((7, 4, 5)), np.ones((4, 9)), labels, axis=1)


def test_no_vocabulary():
    x, w, labels, _ = operands()
    with pytest.raises(ValueError, match="linear_cross_entropy: there must be at least one class"):
        linear_cross_entropy(x, w[:, :0], labels)


@pytest.mark.parametrize("smoothing", [0.1, 1.0])
def test_probabilities_of_16_bits_are_smoothed_in_float32(smoothing):
    x, w, *_ = operands("float32", features=8, vocabulary=1000)
    labels = jax.nn.softmax(x @ w * 3).astype("bfloat16")

    def loss(x, labels):
        return linear_cross_entropy(x, w, labels, label_smoothing=smoothing)

    found, widened = (jax.value_and_grad(loss)(x, a) for a in (labels, labels.astype("float32")))
    for a, b in zip(found, widened, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-6, atol=1e-7)
