"""linear_cross_entropy in programs: what is computed and kept, chunks and memory, products, and transformations."""

import functools
import math
import os
import subprocess
import sys

import emulated
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import support
from by_numpy import by_numpy
from linear_losses import FEATURES, TOKENS, expected_loss, operands

import jax_softmax
from jax_softmax import linear_cross_entropy
from jax_softmax.functions.linear_cross_entropy import split_of

pytestmark = pytest.mark.usefixtures("products_in_float32")


# ---- Programs


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
        with emulated.all_kernels():  # of chunks as small as these kernels save little
            assert for_cuda(f, *LARGE).count("output_operand_alias<") == programs
    assert "output_operand_alias<" not in for_cuda(each, *LARGE)


@emulated.compiler_is_needed
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
