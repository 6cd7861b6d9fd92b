"""linear_cross_entropy: a linear layer's logits and their loss, made for all tokens at once or in chunks of them."""

import functools
import itertools
import math
import os
import re
import subprocess
import sys

import emulated
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import support
from by_numpy import by_numpy
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from support import FIRST, SECOND, normal

import jax_softmax
from jax_softmax import linear_cross_entropy
from jax_softmax.functions.linear_cross_entropy import split_of

TOKENS, FEATURES, VOCABULARY = 11, 5, 9


@pytest.fixture(autouse=True)
def products_in_float32():
    """Also on a GPU, which by default rounds float32 operands of products."""
    with jax.default_matmul_precision("highest"):
        yield


def operands(dtype="float32", tokens=(TOKENS,), features=FEATURES, vocabulary=VOCABULARY):
    """x, w, labels of which some are ignored, and a bias."""
    labels = np.random.default_rng(2).integers(-1, vocabulary + 1, tokens)
    x, w = normal((*tokens, features), dtype, scale=1.0), normal((features, vocabulary), dtype, seed=1, scale=1.0)
    return jnp.asarray(x), jnp.asarray(w), labels, jnp.asarray(normal((vocabulary,), dtype, seed=3))


def expected_losses(logits, labels, weights=1.0, label_smoothing=0.0, z_loss=0.0, soft_cap=None, temperature=1.0):
    """In jax.numpy, of x·w + bias, and labels that are classes or probabilities."""
    if soft_cap is not None:
        logits = soft_cap * jnp.tanh(logits / soft_cap)
    logits = logits / temperature
    lse, n, found = jax.nn.logsumexp(logits, -1), logits.shape[-1], jnp.full(logits.shape[:-1], True)
    if jnp.issubdtype(labels.dtype, jnp.integer):
        found = (labels >= 0) & (labels < n)
        labels = jax.nn.one_hot(labels, n, dtype=logits.dtype)
    labels = (1 - label_smoothing) * labels + label_smoothing / n
    losses = jnp.sum(labels * (lse[..., None] - logits), -1) + z_loss * lse**2
    weights = jnp.where(found, weights, 0)
    return jnp.where(found, losses, 0) * weights, weights


def expected_loss(logits, labels, reduction="mean", **options):
    losses, weights = expected_losses(logits, labels, **options)
    if reduction is None:
        return losses
    return losses.sum() / (jnp.where(weights.sum() == 0, 1, weights.sum()) if reduction == "mean" else 1)


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
    x = x.at[:2].set(np.nan)

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
    of_x = jax.grad(linear_cross_entropy)(x.at[4].set(np.nan), w, labels % VOCABULARY, label_smoothing=0.1)
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


def probabilities(dtype="float32", tokens=(TOKENS,), vocabulary=VOCABULARY):
    """Of classes along the last axis; some are 0, and so are all of the first token."""
    p = jax.nn.softmax(normal((*tokens, vocabulary), "float64", seed=5, scale=2.0).astype(dtype))
    return jnp.where(p < 0.05, 0, p).at[(0,) * len(tokens)].set(0)


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
    bias, labels = jnp.zeros(VOCABULARY).at[3].set(-jnp.inf), probabilities().at[:, 3].set(0)
    mask = np.arange(VOCABULARY) != 3

    def total(x, smoothing):
        options = {"bias": bias, "label_smoothing": smoothing, "reduction": "sum", "chunk": 4}
        return linear_cross_entropy(x, w, labels, **options)

    assert total(x, 0.2) == jnp.inf
    value, gradients = jax.value_and_grad(total, (0, 1))(x, jnp.zeros(()))
    expected = by_numpy(jax.value_and_grad(lambda x: expected_loss(x @ w[:, mask], labels[:, mask], "sum")), x)
    support.assert_close((value, gradients[0]), expected, rtol=1e-5, atol=1e-5)


# ---- Programs


def count(name, f, *args):
    return len(re.findall(rf"\b{name}\[", str(jax.make_jaxpr(f)(*args))))


def test_only_what_is_asked_for_is_computed():
    x, w, labels, _ = operands()
    made = {}
    for name, f in {
        "value": linear_cross_entropy,
        "by x": jax.value_and_grad(linear_cross_entropy),
        "by both": jax.value_and_grad(linear_cross_entropy, (0, 1)),
    }.items():
        text = jax.jit(f).lower(x, w, labels).compiler_ir("stablehlo").__str__()
        made[name] = text.count("stablehlo.dot_general")
    assert made == {"value": 1, "by x": 2, "by both": 3}
    assert "cross_entropy_gradient" not in str(jax.make_jaxpr(linear_cross_entropy)(x, w, labels))


def for_cuda(f, *args):
    return jax.jit(f).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


LARGE = [
    jax.ShapeDtypeStruct((1024, 64), jnp.bfloat16),
    jax.ShapeDtypeStruct((64, 4096), jnp.bfloat16),
    jax.ShapeDtypeStruct((1024,), np.int32),
]


@support.sampled("chunk,programs", [(None, 1), (256, 2), (300, 2)], 2)
def test_the_gradient_takes_the_place_of_the_logits(chunk, programs):
    """One kernel, which the logits' other reader comes before; chunks are one program, and the first one another."""
    step = jax.value_and_grad(functools.partial(linear_cross_entropy, chunk=chunk), (0, 1))
    calls = [line for line in for_cuda(step, *LARGE).splitlines() if "@jax_softmax(" in line]
    assert len(calls) == programs and all("output_operand_alias<output_tuple_indices = [0]" in c for c in calls)
    assert all('op = "cross_entropy_gradient"' in call for call in calls)

    def each(x, w, labels):
        return linear_cross_entropy(x, w, labels, chunk=chunk, reduction=None).sum()

    for f in (jax.grad(each, (0, 1)), jax_softmax.fuse(step), jax_softmax.fuse(jax.grad(each, (0, 1)))):
        assert for_cuda(f, *LARGE).count("output_operand_alias<") == programs
    assert "output_operand_alias<" not in for_cuda(each, *LARGE)


@pytest.mark.skipif(emulated.COMPILER is None, reason="needs a C++ compiler")
@support.sampled("options", [{"chunk": 6, "reduction": None}, {"soft_cap": 2.0}], 2, ids=str)
def test_fused(options):
    """`fuse` folds what is around the kernels into them."""
    x, w, labels, bias = operands()

    def step(x, w):
        return jax.value_and_grad(
            lambda x, w: jnp.sum(linear_cross_entropy(x, w, labels, bias=bias, **options)), (0, 1)
        )(x, w)

    with emulated.kernels() as made:
        fused = jax.jit(jax_softmax.fuse(step)).lower(x, w).compile()
    assert made
    support.assert_close(fused(x, w), step(x, w), rtol=1e-5, atol=1e-5)


IN_A_PROCESS = """
import jax, jax_softmax
operands = [jax.ShapeDtypeStruct(*a) for a in (((12, 8), "float32"), ((8, 16), "float32"), ((12,), "int32"))]
step = jax.value_and_grad(lambda *operands: jax_softmax.linear_cross_entropy(*operands, chunk=4), (0, 1))
for f in (step, jax_softmax.fuse(step)):
    print(jax.jit(f).trace(*operands).lower(lowering_platforms=("cuda",)).as_text())
"""


def test_the_program_is_the_same_in_every_process():
    """Or else JAX's cache of compiled programs would not have it. Python's sets have another order in each."""
    texts = set()
    for seed in "12":
        environment = os.environ | {"PYTHONHASHSEED": seed, "JAX_PLATFORMS": "cpu"}
        done = subprocess.run(
            [sys.executable, "-P", "-c", IN_A_PROCESS], env=environment, capture_output=True, check=True
        )
        texts.add(done.stdout)
    assert len(texts) == 1


def test_memory():
    """Of a CPU's program, which keeps logits in float32 besides: chunks take a part of what all of them take."""
    if jax.default_backend() != "cpu":
        pytest.skip("of CPUs")

    labels = LARGE[2]

    def temporary(f):
        return jax.jit(f).lower(*LARGE[:2], labels).compile().memory_analysis().temp_size_in_bytes

    def loss(chunk, reduction):
        return lambda *args: jnp.sum(linear_cross_entropy(*args, chunk=chunk, reduction=reduction))

    assert 2 * temporary(loss(128, "mean")) < temporary(loss(None, "mean"))
    for reduction in ("mean", None):
        chunked, whole = (temporary(jax.value_and_grad(loss(chunk, reduction), (0, 1))) for chunk in (128, None))
        assert 2 * chunked < whole
    labels = jax.ShapeDtypeStruct((1024, 4096), jnp.float32)  # a loop over seven of eight chunks has no copy of them
    for reduction in ("mean", None):
        assert temporary(jax.value_and_grad(loss(128, reduction), (0, 1))) < 7 / 8 * labels.size * 4


def test_what_is_kept_for_the_backward_pass():
    """The gradients, or x and w: no logits."""
    x, w, labels = (jnp.zeros(a.shape, a.dtype) for a in LARGE)
    for reduction in ("mean", None):
        for chunk in (None, 256):
            f = functools.partial(linear_cross_entropy, labels=labels, reduction=reduction, chunk=chunk)
            assert support.kept_bytes(f, x, w) <= x.nbytes + w.nbytes + 16 * 1024 * 4


@pytest.mark.parametrize(
    "shape,sums,expected",
    [
        ((8192, 4096, 128256), 4, None),
        ((8192, 4096, 128256), 0, (0, 2048)),
        ((8192, 2048, 50304), 4, None),
        ((4096, 4096, 262144), 4, None),
        ((32768, 2560, 128256), 4, (0, 2048)),
        ((100, 10, 1000), 4, None),
        ((3, 10, 1 << 30), 0, (0, 1)),
    ],
)
def test_the_rule(shape, sums, expected):
    """All logits at once unless chunks, and the sum of w's gradient in `sums` bytes each, take less memory."""
    tokens, features, vocabulary = shape
    assert split_of((tokens,), 2 * vocabulary, sums * features * vocabulary) == expected


def test_chunks_that_the_caller_gives():
    assert split_of((2, 1000), 1, 0, 500) == (1, 250)
    assert split_of((11,), 1, 0, 4) == (0, 4)  # of twelve tokens, one of weight 0
    assert split_of((10,), 1, 0, 10) is None and split_of((), 1, 0, 1) is None


@pytest.mark.parametrize(
    "shape,chunk", [((3, 7), 5), ((8, 1024), 100), ((32, 32), 64), ((64, 64, 64), 4096), ((64,), 24)]
)
def test_no_chunk_has_more_tokens_than_the_caller_says(shape, chunk):
    dim, size = split_of(shape, 1, 0, chunk)
    others = math.prod(shape) // shape[dim]
    assert chunk / 2 <= size * others <= chunk or shape[dim] // 2 < size


def test_a_chunk_has_an_index_of_the_longest_dimension():
    assert split_of((4, 8), 1, 0, 1) == (1, 1)


@pytest.fixture
def small_chunks(monkeypatch):
    """So that the rule chooses chunks."""
    monkeypatch.setattr("jax_softmax.functions.linear_cross_entropy._CHUNK_BYTES", 256)
    jax.clear_caches()
    yield
    jax.clear_caches()


def test_the_rule_is_heeded(small_chunks):
    x, w, labels, _ = operands(tokens=(40,))
    step = jax.jit(jax.value_and_grad(functools.partial(linear_cross_entropy, accumulate_dtype="float32"), (0, 1)))
    text = step.lower(x, w, labels).compile().as_text()
    assert "while(" in text and "conditional(" not in text
    expected = by_numpy(jax.value_and_grad(lambda x, w: expected_loss(x @ w, labels), (0, 1)), x, w)
    support.assert_close(step(x, w, labels), expected, 1e-5, 1e-6)


# ---- Products


def test_precision_of_products():
    """It is what holds where the function is traced, of all three products."""

    def loss(x, w):
        with jax.default_matmul_precision("highest"):
            return linear_cross_entropy(x, w, labels)

    x, w, labels, _ = operands()
    with jax.default_matmul_precision("default"):
        text = jax.jit(jax.grad(loss, (0, 1))).lower(x, w).as_text()
    products = [line for line in text.split("\n") if "stablehlo.dot_general" in line]
    assert len(products) == 3 and all(line.count("HIGHEST") == 2 for line in products)


def test_products_of_8_bits():
    """Are those of float32, whatever the other operand is."""
    x, w, labels, _ = operands("bfloat16")
    narrow = x.astype(jnp.float8_e4m3fn)
    found = linear_cross_entropy(narrow, w, labels)
    np.testing.assert_allclose(found, linear_cross_entropy(narrow.astype(jnp.float32), w, labels), rtol=1e-6)


# ---- Transformations


@support.sampled("reduction,chunk", [("mean", 4), ("mean", None), (None, 4)], 3, ids=str)
def test_vmap(chunk, reduction):
    """Over x and labels, over w, and over all; inside of a gradient and around it."""
    with jax.enable_x64(True):
        x, w, labels, _ = operands("float64", (2, TOKENS), features=3, vocabulary=4)
        ws = jnp.stack([w, 2 * w])
        cases = ((0, None, 0), (x, w, labels)), ((None, 0, None), (x[0], ws, labels[0])), ((0, 0, 0), (x, ws, labels))

        def gradients(f):
            def of_case(axes, args):
                def of_one(x, w, labels):
                    return jax.grad(lambda x, w: jnp.sum(f(x, w, labels)), (0, 1))(x, w)

                def total(x, w):
                    return jnp.sum(jax.vmap(f, axes)(x, w, args[2]))

                return jax.vmap(of_one, axes)(*args), jax.grad(total, (0, 1))(*args[:2])

            return [of_case(*case) for case in cases]

        def ours(x, w, labels):
            return linear_cross_entropy(x, w, labels, chunk=chunk, reduction=reduction)

        def theirs(x, w, labels):
            return expected_loss(x @ w, labels, reduction)

        found, expected = (
            run(functools.partial(gradients, f)) for run, f in ((support.in_haste, ours), (by_numpy, theirs))
        )
        support.assert_close(found, expected, rtol=1e-11, atol=1e-12)


def test_scan_and_checkpoint():
    x, w, labels, _ = operands(tokens=(3, TOKENS))

    def over_batches(f):
        def loss(w):
            return jax.lax.scan(lambda total, batch: (total + f(batch[0], w, batch[1]), None), 0.0, (x, labels))[0]

        return jax.value_and_grad(loss)

    ours = functools.partial(linear_cross_entropy, chunk=4)
    functions = lambda x, w, labels: expected_loss(x @ w, labels), ours, jax.checkpoint(ours)
    expected, *results = support.in_haste(lambda w: [over_batches(f)(w) for f in functions], w)
    for found in results:
        support.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_export():
    pytest.importorskip("flatbuffers", reason="jax.export serializes by it")
    x, w, labels, _ = operands()
    labels = labels.astype(np.int32)
    f = jax.value_and_grad(functools.partial(linear_cross_entropy, chunk=4, label_smoothing=0.1), (0, 1))
    (tokens,) = jax.export.symbolic_shape("tokens")
    symbolic = jax.ShapeDtypeStruct((tokens, FEATURES), np.float32), w, jax.ShapeDtypeStruct((tokens,), labels.dtype)
    (vocabulary,) = jax.export.symbolic_shape("vocabulary")
    of_words = x, jax.ShapeDtypeStruct((FEATURES, vocabulary), np.float32), labels
    for specs in ((x, w, labels), symbolic, of_words):
        exported = jax.export.export(jax.jit(f), disabled_checks=jax_softmax.export_checks())(*specs)
        found = jax.export.deserialize(exported.serialize()).call(x, w, labels)
        support.assert_close(found, f(x, w, labels), rtol=1e-5, atol=1e-6)


# ---- Several devices: eight simulated ones, in a mesh of 4 by 2


@pytest.fixture
def on_the_cpu():
    with support.on_a_cpu():
        yield


@functools.cache
def spread_operands():
    x, w, labels, _ = operands(tokens=(64,), features=64, vocabulary=48)
    expected = by_numpy(jax.value_and_grad(lambda x, w: expected_loss(x @ w, labels, "sum"), (0, 1)), x, w)
    return (x, w, labels.astype(np.int32)), expected


def collectives(f, args, expected):
    program = support.compiled_in_haste(f, *args)
    support.assert_close(program(*args), expected, rtol=1e-5, atol=1e-4)
    return [(kind, size - size % 64) for kind, size in support.collectives(program) if size > 600]


TOKENS_SPREAD, VOCABULARY_SPREAD = (P("data"), P(), P("data")), (P(), P(None, "model"), P())
BOTH = P("data"), P(None, "model"), P("data")
X_SIZE, W_SIZE = 64 * 64, 64 * 48  # what else travels is smaller, but for a few numbers that travel with these


SPREAD = {
    "both": (BOTH, [X_SIZE // 4, W_SIZE // 2]),
    "tokens": (TOKENS_SPREAD, [W_SIZE]),
    "vocabulary": (VOCABULARY_SPREAD, [X_SIZE]),
}


@support.sampled("reduction,check_vma,spread", itertools.product(["sum", None], [True, False], SPREAD), 5)
def test_shard_map(on_the_cpu, spread, reduction, check_vma):
    """One reduction of w's gradient, one of x's; per chunk numbers of tokens alone travel."""
    specs, sizes = SPREAD[spread]
    args, expected = spread_operands()
    of_tokens, of_vocabulary = specs[0] == P("data"), specs[1] != P()

    def loss(x, w, labels):
        axis_name = "model" if of_vocabulary else None
        total = jnp.sum(linear_cross_entropy(x, w, labels, reduction=reduction, chunk=4, axis_name=axis_name))
        return jax.lax.psum(total, "data") if of_tokens else total

    f = jax.shard_map(loss, mesh=support.mesh_of_cpus((4, 2)), in_specs=specs, out_specs=P(), check_vma=check_vma)
    found = collectives(jax.value_and_grad(f, (0, 1)), args, expected)
    assert all(kind == "all-reduce" for kind, _ in found)
    if check_vma:
        assert sorted(size for _, size in found) == sorted(sizes)


FSDP = P("data"), P("data"), P("data")
UNDER_JIT = [
    (AxisType.Auto, BOTH, [("all-reduce", X_SIZE // 4), ("all-reduce", W_SIZE // 2)]),
    (AxisType.Explicit, TOKENS_SPREAD, [("all-reduce", W_SIZE)]),
    (AxisType.Explicit, BOTH, [("all-reduce", X_SIZE // 4), ("all-reduce", W_SIZE // 2)]),
    (AxisType.Explicit, VOCABULARY_SPREAD, [("all-reduce", X_SIZE)]),
    (AxisType.Explicit, FSDP, [("all-gather", W_SIZE), ("all-reduce", W_SIZE)]),
    (AxisType.Explicit, (P(), P("data"), P()), [("all-gather", W_SIZE)]),
    (AxisType.Auto, FSDP, [("all-gather", W_SIZE), ("all-reduce", W_SIZE)]),
    (AxisType.Auto, TOKENS_SPREAD, [("all-reduce", W_SIZE)]),
    (AxisType.Auto, VOCABULARY_SPREAD, [("all-reduce", X_SIZE)]),
]


@support.sampled("kind,specs,sizes", UNDER_JIT, 4, ids=str)
def test_jit(on_the_cpu, small_chunks, kind, specs, sizes):
    """The same: chunks are not the rule's choice here. A weight that is cut along its features is gathered once."""
    mesh = support.mesh_of_cpus((4, 2), kind)
    args, expected = spread_operands()
    args = [jax.device_put(a, NamedSharding(mesh, spec)) for a, spec in zip(args, specs, strict=True)]
    f = jax.value_and_grad(functools.partial(linear_cross_entropy, reduction="sum"), (0, 1))

    def step(*args):
        value, gradients = f(*args)
        if kind == AxisType.Auto:
            laid = [NamedSharding(mesh, spec) for spec in specs[:2]]
            gradients = tuple(map(jax.lax.with_sharding_constraint, gradients, laid))
        return value, gradients

    with jax.set_mesh(mesh):
        found = collectives(step, args, expected)
    assert sorted(found) == sorted(sizes)


@support.sampled("chunk", [7, 16, 24], 3)
def test_chunks_under_jit(on_the_cpu, chunk):
    """Where the caller asks for them each device has a part of every chunk: x does not travel."""
    args, expected = spread_operands()
    mesh = support.mesh_of_cpus((4, 2))
    args = [jax.device_put(a, NamedSharding(mesh, spec)) for a, spec in zip(args, TOKENS_SPREAD, strict=True)]
    f = jax.value_and_grad(functools.partial(linear_cross_entropy, reduction="sum", chunk=chunk), (0, 1))
    found = collectives(f, args, expected)
    assert set(found) == {("all-reduce", W_SIZE)}


def test_the_rules_chunks_under_jit(on_the_cpu, small_chunks):
    """There are none, nor in the backward pass of losses for each token: x would travel."""
    args, expected = spread_operands()
    mesh = support.mesh_of_cpus((4, 2))
    x, w, labels = (
        jax.device_put(a.reshape(16, 4, *a.shape[1:]) if k != 1 else a, NamedSharding(mesh, spec))
        for k, (a, spec) in enumerate(zip(args, TOKENS_SPREAD, strict=True))
    )
    expected = expected[0], (expected[1][0].reshape(16, 4, -1), expected[1][1])

    def f(x, w, labels):
        return jax.value_and_grad(lambda *xw: jnp.sum(linear_cross_entropy(*xw, labels, reduction=None)), (0, 1))(x, w)

    assert set(collectives(f, (x, w, labels), expected)) == {("all-reduce", W_SIZE)}


IN_EXPLICIT_MODE = {
    "tokens": (P("data"), P()),
    "vocabulary": (P(), P(None, "model")),
    "both": (P("data"), P(None, "model")),
    "features of w": (P(), P("data")),
    "tokens and features of w": (P("data"), P("data", "model")),
    "features of x": (P(None, "model"), P()),
    "all of x": (P("data", "model"), P()),
}


def laid_explicitly(mesh, layout, x, w, bias):
    of_x, of_w = IN_EXPLICIT_MODE[layout]
    specs = of_x, of_w, P(*of_w[1:])
    return [jax.device_put(a, NamedSharding(mesh, spec)) for a, spec in zip((x, w, bias), specs, strict=True)]


OPTIONS = [("mean", None), (None, None), (None, 2.0)]


@support.sampled("options,layout", itertools.product(OPTIONS, IN_EXPLICIT_MODE), 5, ids=str)
def test_explicit_mode(on_the_cpu, layout, options):
    """Each gradient lies as its operand does."""
    x, w, labels, bias = operands(tokens=(16,), features=8, vocabulary=24)
    reduction, soft_cap = options
    options = {"reduction": reduction, "soft_cap": soft_cap}

    def step(losses_of, *args):
        def total(*args):
            losses = losses_of(*args)
            return jnp.sum(losses**2), losses

        return jax.value_and_grad(total, (0, 1, 2), has_aux=True)(*args)

    def ours(transpose_w, x, w, bias):
        w = w.T if transpose_w else w
        return linear_cross_entropy(x, w, labels, bias=bias, transpose_w=transpose_w, **options)

    theirs = functools.partial(step, lambda x, w, bias: expected_loss(x @ w + bias, labels, **options))
    expected = by_numpy(theirs, x, w, bias)
    mesh = support.mesh_of_cpus((4, 2), AxisType.Explicit)
    args = laid_explicitly(mesh, layout, x, w, bias)

    def both_ways(*args):
        return [step(functools.partial(ours, transpose_w), *args) for transpose_w in (False, True)]

    with jax.set_mesh(mesh):
        results = support.in_haste(both_ways, *args)
    for found in results:
        support.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        for gradient, a in zip(found[1], args, strict=True):
            assert gradient.sharding.is_equivalent_to(a.sharding, a.ndim)


@support.sampled("layout", IN_EXPLICIT_MODE, 8)
def test_derivatives_of_gradients_in_explicit_mode(on_the_cpu, layout):
    """Also mapped."""
    x, w, labels, bias = operands(tokens=(16,), features=8, vocabulary=24)

    def f(loss_of, *args):
        def along(scale):
            return jax.jvp(jax.grad(loss_of, (0, 1, 2)), args, tuple(scale * a for a in args))

        return jax.vmap(along)(jnp.arange(3.0))

    theirs = functools.partial(f, lambda x, w, bias: expected_loss(x @ w + bias, labels))
    expected = by_numpy(theirs, x, w, bias)
    mesh = support.mesh_of_cpus((4, 2), AxisType.Explicit)
    with jax.set_mesh(mesh):
        args = laid_explicitly(mesh, layout, x, w, bias)
        ours = functools.partial(f, lambda x, w, bias: linear_cross_entropy(x, w, labels, bias=bias))
        support.assert_close(support.in_haste(ours, *args), expected, rtol=1e-5, atol=1e-5)


def test_explicit_mode_and_an_array_on_a_single_device(on_the_cpu):
    """Its type knows no mesh."""
    (x, w, labels), expected = spread_operands()
    laid = jax.device_put(w, NamedSharding(support.mesh_of_cpus((4, 2), AxisType.Explicit), P(None, "model")))
    f = jax.value_and_grad(functools.partial(linear_cross_entropy, reduction="sum"), (0, 1))
    support.assert_close(support.in_haste(f, x, laid, labels), expected, rtol=1e-5, atol=1e-4)


@support.sampled("specs", [BOTH, FSDP, TOKENS_SPREAD], 3, ids=str)
def test_explicit_mode_of_one_mesh_axis(on_the_cpu, specs):
    """The other one is automatic."""
    args, expected = spread_operands()
    kinds = AxisType.Explicit, AxisType.Auto
    mesh = Mesh(support.mesh_of_cpus((4, 2)).devices, ("data", "model"), axis_types=kinds)
    args = [jax.device_put(a, NamedSharding(mesh, spec)) for a, spec in zip(args, specs, strict=True)]
    f = jax.value_and_grad(functools.partial(linear_cross_entropy, reduction="sum"), (0, 1))
    with jax.set_mesh(mesh):
        support.assert_close(support.in_haste(f, *args), expected, rtol=1e-5, atol=1e-4)


def test_chunks_in_explicit_mode(on_the_cpu):
    (x, w, labels), _ = spread_operands()
    mesh = support.mesh_of_cpus((4, 2), AxisType.Explicit)
    with jax.set_mesh(mesh):
        x = jax.device_put(x, NamedSharding(mesh, P("data")))
        with pytest.raises(ValueError, match=r"linear_cross_entropy: chunk must be None where x's type .* got 16"):
            linear_cross_entropy(x, w, labels, chunk=16)


def test_labels_that_are_cut_more_finely(on_the_cpu):
    """x follows them, and its gradient has its own type."""
    (x, w, labels), expected = spread_operands()
    mesh = support.mesh_of_cpus((4, 2), AxisType.Explicit)
    with jax.set_mesh(mesh):
        labels = jax.device_put(labels, NamedSharding(mesh, P("data")))
        x, w = (jax.device_put(a, NamedSharding(mesh, P())) for a in (x, w))

        def f(x, w):
            return jnp.sum(linear_cross_entropy(x, w, labels, reduction=None))

        support.assert_close(support.in_haste(jax.value_and_grad(f, (0, 1)), x, w), expected, rtol=1e-5, atol=1e-4)


@support.sampled("check_vma", [True, False], 2)
def test_all_gradients_of_a_vocabulary_that_is_spread(on_the_cpu, check_vma):
    """By x, w, weights and options, from outside of shard_map."""
    (x, w, labels), _ = spread_operands()
    given = x, w, jnp.linspace(0.5, 2, 64), jnp.asarray(0.01), jnp.asarray(0.1)

    def theirs(x, w, weights, z_loss, smoothing):
        options = {"weights": weights, "z_loss": z_loss, "label_smoothing": smoothing}
        return expected_loss(x @ w, labels, "sum", **options)

    def ours(x, w, weights, z_loss, smoothing):
        options = {"weights": weights, "z_loss": z_loss, "label_smoothing": smoothing}
        return linear_cross_entropy(x, w, labels, reduction="sum", chunk=24, axis_name="model", **options)

    specs = P(), P(None, "model"), P(), P(), P()
    f = jax.shard_map(ours, mesh=support.mesh_of_cpus((4, 2)), in_specs=specs, out_specs=P(), check_vma=check_vma)
    which = tuple(range(len(given)))
    found = support.in_haste(jax.value_and_grad(f, which), *given)
    support.assert_close(found, by_numpy(jax.value_and_grad(theirs, which), *given), rtol=1e-5, atol=2e-4)


@support.sampled("chunk,check_vma", itertools.product([None, 4], [True, False]), 2)
def test_probabilities_that_are_spread(on_the_cpu, chunk, check_vma):
    """As the logits are: inside of shard_map, and by their types."""
    (x, w, _), _ = spread_operands()
    args, specs = (x, w, probabilities(tokens=(64,), vocabulary=48)), (P("data"), P(None, "model"), P("data", "model"))

    def theirs(x, w, labels):
        return expected_loss(x @ w, labels, "sum", label_smoothing=0.1, z_loss=0.01)

    def ours(x, w, labels, **options):
        options |= {"reduction": "sum", "label_smoothing": 0.1, "z_loss": 0.01}
        return linear_cross_entropy(x, w, labels, **options)

    def shards(*args):
        return jax.lax.psum(ours(*args, axis_name="model", chunk=chunk), "data")

    f = jax.shard_map(shards, mesh=support.mesh_of_cpus((4, 2)), in_specs=specs, out_specs=P(), check_vma=check_vma)
    expected = by_numpy(jax.value_and_grad(theirs, (0, 1, 2)), *args)
    support.assert_close(support.in_haste(jax.value_and_grad(f, (0, 1, 2)), *args), expected, rtol=1e-5, atol=2e-4)
    mesh = support.mesh_of_cpus((4, 2), AxisType.Explicit)
    with jax.set_mesh(mesh):
        for of_labels in (specs[2], P("data"), P()):
            laid = zip(args, (*specs[:2], of_labels), strict=True)
            laid = [jax.device_put(a, NamedSharding(mesh, spec)) for a, spec in laid]
            found = support.in_haste(jax.value_and_grad(ours, (0, 1, 2)), *laid)
            support.assert_close(found, expected, rtol=1e-5, atol=2e-4)
            assert all(g.sharding.is_equivalent_to(a.sharding, 2) for g, a in zip(found[1], laid, strict=True))


def test_labels_that_were_gathered(on_the_cpu):
    """They are the same on all devices, but their type says that they may differ."""
    (x, w, labels), expected = spread_operands()

    def ours(x, w, part):
        labels = jax.lax.all_gather(part, "model", tiled=True)
        return jax.lax.pmean(linear_cross_entropy(x, w, labels, reduction="sum", axis_name="model"), "model")

    specs = P(), P(None, "model"), P("model")
    f = jax.shard_map(ours, mesh=support.mesh_of_cpus((4, 2)), in_specs=specs, out_specs=P())
    found = support.in_haste(jax.value_and_grad(f, (0, 1)), x, w, labels)
    support.assert_close(found, expected, rtol=1e-5, atol=1e-4)


@support.sampled("reduction", ["mean", None], 2)
def test_gradients_inside_shard_map(on_the_cpu, reduction):
    """Of this device's own loss, by value_and_grad inside; by all that is real."""
    (x, w, labels), _ = spread_operands()
    operands = x, w, jnp.asarray(normal((48,), seed=4)), jnp.linspace(0.5, 2, 64)

    def theirs(x, w, bias, weights):
        return jnp.sum(expected_loss(x @ w + bias, labels, reduction, weights=weights, z_loss=0.01))

    def step(x, w, bias, weights):
        def ours(x, w, bias, weights):
            options = {"reduction": reduction, "chunk": 24, "axis_name": "model", "z_loss": 0.01}
            return jnp.sum(linear_cross_entropy(x, w, labels, bias=bias, weights=weights, **options))

        return jax.value_and_grad(ours, (0, 1, 2, 3))(x, w, bias, weights)

    specs = P(), P(None, "model"), P("model"), P()
    f = jax.shard_map(step, mesh=support.mesh_of_cpus((4, 2)), in_specs=specs, out_specs=(P(), specs))
    expected = by_numpy(jax.value_and_grad(theirs, (0, 1, 2, 3)), *operands)
    support.assert_close(support.in_haste(f, *operands), expected, rtol=1e-5, atol=1e-4)


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
