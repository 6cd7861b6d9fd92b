"""Schedules do not know what memory holds: what is done to an element before the operator, and to its result after it,
goes through each of them as it is, for every operator."""

import itertools

import jax.numpy as jnp
import numpy as np
import oracles
import pytest
import support
from support import KERNELS, OPS, ROW_OPS, TWO_OPERANDS, WAYS, call_kernel, kernel_names, row_numbers

# Of each kernel one view, by what it launches last.
VIEWS = {kernel_names(way.plan())[-1]: way for way in reversed(WAYS)}
EVERY_OP = (*OPS, *ROW_OPS)

# An array that broadcasts, and an index along the last of the reduced axes.
LOAD = "s1 % 3 != 1 ? x{0} * -2.5f + s0 : C(-30)"
STORE = "y * 2.0f + s0\ny"
# Indices along a batch dimension and along the last of the reduced ones.
CAUSAL = "s0 <= s1 ? x0 : C(-1e30)"

# The shapes of an array that broadcasts.
SHAPES = {
    "columns": lambda way: tuple(n if d in way.axes else 1 for d, n in enumerate(way.shape)),
    "rows": lambda way: tuple(1 if d in way.axes else n for d, n in enumerate(way.shape)),
    "elements": lambda way: way.shape,
    "one": lambda way: (1,) * len(way.shape),
}
# What is read, what is added to it, and what is written.
DTYPES = [("bfloat16", "float32", "float32"), ("float32", "bfloat16", "bfloat16"), ("float16", "float16", "bfloat16")]

every_view = pytest.mark.parametrize("way", VIEWS.values(), ids=VIEWS.keys())
# The same views with each of their batch dimensions.
CAUSAL_VIEWS = {
    f"{name}-{d}": (d, way)
    for name, way in VIEWS.items()
    for d, n in enumerate(way.shape)
    if d not in way.axes and n > 1
}
on_gpu = pytest.mark.skipif(support.why_no_cuda() is not None, reason=str(support.why_no_cuda()))


def load_of(op):
    """Of an operator with two operands, into the last one."""
    return "\n" + LOAD.format(1) if op in TWO_OPERANDS else LOAD.format(0)


def plan_of(way, op, dtypes=("bfloat16",) * 3, shape="columns", masked=False, load="", store="", **others):
    read, added, written = dtypes
    index = [n if d == way.axes[-1] else 1 for d, n in enumerate(way.shape)]
    sides = [(list(SHAPES[shape](way)), added), (index, "index")]
    mask_shape = list(way.shape) if masked else None
    return way.plan(op, read, mask_shape, out_dtype=written, sides=sides, load=load, store=store, **others)


def indices(way, kept):
    """Along a batch dimension and along the last of the reduced ones."""
    return [([n if d == along else 1 for d, n in enumerate(way.shape)], "index") for along in (kept, way.axes[-1])]


def call(way, op, *operands, arrays="", load="", store="", written=None, more_results=(), scratch_bytes, in_place=None):
    with support.limited(**way.limits):
        return call_kernel(
            *(op, *operands),
            axes=way.axes,
            out_dtype=written,
            more_results=more_results,
            arrays=arrays or f"array index:{way.axes[-1]}" if load or store else "",
            load=load,
            store=store,
            scratch_bytes=scratch_bytes,
            in_place=in_place,
        )


def loaded(way, x, array):
    """What LOAD makes of the elements."""
    index = np.arange(way.shape[way.axes[-1]]).reshape([-1 if d == way.axes[-1] else 1 for d in range(x.ndim)])
    return np.where(index % 3 != 1, -2.5 * x.astype(np.float64) + array.astype(np.float64), -30)


def integers(shape, dtype, largest=8, seed=0):
    """Numbers so simple that what is done to them is exact in every dtype."""
    return np.random.default_rng(seed).integers(-largest, largest, shape).astype(jnp.dtype(dtype))


def assert_close(found, expected, dtype, largest=0):
    """Both by kernels, whose sums may be of another order: off by a part of the largest terms, which may cancel."""
    found, expected = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    largest = np.abs(expected[np.isfinite(expected)]).max(initial=largest)
    eps, eps_of_sums = float(jnp.finfo(dtype).eps), 2.0**-23
    np.testing.assert_allclose(found, expected, rtol=4 * eps, atol=4 * eps_of_sums * largest)


def test_one_view_for_each_schedule():
    assert {way.plan()["schedule"] for way in VIEWS.values()} == {
        *("registers", "staged", "chunks", "ring", "tile", "twice")
    }


@support.sampled("view,op,dtypes", itertools.product(VIEWS, ["softmax", "softmax_linear"], DTYPES), 5, ids=str)
def test_compiles(jit, view, op, dtypes):
    masked, way = op == "softmax_linear", VIEWS[view]
    for step in plan_of(way, op, dtypes, "columns", masked, load_of(op), STORE, more_results=["float32"])["steps"]:
        assert jit.binary(step["code"])[:4] == b"\x7fELF"


@on_gpu
@every_view
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
def test_load_of_each_dtype_and_shape(dtypes, shape, way):
    read, added, written = dtypes
    x, array = integers(way.shape, read), integers(SHAPES[shape](way), added, 4)
    expected = oracles.reference("softmax", loaded(way, x, array).astype(jnp.dtype(written)), way.axes)
    scratch_bytes = plan_of(way, "softmax", dtypes, shape, load=load_of("softmax"))["scratch_bytes"]
    result = call(way, "softmax", x, array, load=load_of("softmax"), written=written, scratch_bytes=scratch_bytes)
    oracles.check(result, expected, f"of {read}, written as {written}")


@support.sampled("kept,way", CAUSAL_VIEWS.values(), 3, ids=list(CAUSAL_VIEWS))
def test_causal_mask_compiles(jit, kept, way):
    for step in way.plan("softmax", sides=indices(way, kept), load=CAUSAL)["steps"]:
        assert jit.binary(step["code"])[:4] == b"\x7fELF"


@on_gpu
@pytest.mark.parametrize("kept,way", CAUSAL_VIEWS.values(), ids=CAUSAL_VIEWS)
def test_causal_mask(kept, way):
    """An index along a batch dimension, which all elements of a row share, beside one along a reduced dimension."""
    x = integers(way.shape, "bfloat16")
    i, j = (np.arange(max(shape)).reshape(shape) for shape, _ in indices(way, kept))
    expected = oracles.reference("softmax", np.where(i <= j, x, -1e30).astype(x.dtype), way.axes)
    scratch_bytes = way.plan("softmax", sides=indices(way, kept), load=CAUSAL)["scratch_bytes"]
    arrays = f"index:{kept} index:{way.axes[-1]}"
    result = call(way, "softmax", x, arrays=arrays, load=CAUSAL, scratch_bytes=scratch_bytes)
    oracles.check(result, expected, f"along {kept}")


@on_gpu
@every_view
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("op", EVERY_OP)
def test_load_of_each_operator(op, masked, way):
    """As of an array that holds the values."""
    x, array = integers(way.shape, "bfloat16"), integers(SHAPES["columns"](way), "bfloat16", 4)
    first = [integers(way.shape, "bfloat16", 2, seed=1)] if op in TWO_OPERANDS else []
    last = row_numbers(op, way.shape, way.axes, "bfloat16") + ([support.random_mask(way.shape)] if masked else [])
    written = "bfloat16" if KERNELS[op]["element_results"] else None
    fused = plan_of(way, op, masked=masked, load=load_of(op))["scratch_bytes"]
    plain = way.plan(op, "bfloat16", list(way.shape) if masked else None)["scratch_bytes"]
    found = call(way, op, *first, x, array, *last, load=load_of(op), written=written, scratch_bytes=fused)
    value = loaded(way, x, array).astype(x.dtype)
    expected = call(way, op, *first, value, *last, written=written, scratch_bytes=plain)
    if op not in ROW_OPS:
        found, expected = [found], [expected]
    # The terms of entropies and divergences are differences of the elements, which LOAD makes up to 30.
    largest = 30 if op in ("entropy", "kl_divergence") else 0
    for a, b in zip(found, expected, strict=True):
        assert_close(a, b, a.dtype, largest)


@on_gpu
@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("op,operand", [("softmax", 0), ("softmax_linear", 0), ("softmax_linear", 1)])
def test_results_in_the_place_of_an_operand(op, operand, way):
    """As fuse has them, where nothing else reads it."""
    x, array = integers(way.shape, "bfloat16"), integers(SHAPES["columns"](way), "bfloat16", 4)
    first = [integers(way.shape, "bfloat16", 2, seed=1)] if op in TWO_OPERANDS else []
    scratch_bytes = plan_of(way, op, load=load_of(op))["scratch_bytes"]
    given = {"load": load_of(op), "written": "bfloat16", "scratch_bytes": scratch_bytes}
    found = call(way, op, *first, x, array, in_place=operand, **given)
    np.testing.assert_array_equal(found, call(way, op, *first, x, array, **given))


@on_gpu
@every_view
@pytest.mark.parametrize("op", [op for op in TWO_OPERANDS if op != "kl_divergence"])
def test_load_of_both_operands(op, way):
    """An expression may read the other operand, even one that the operator's sums need not."""
    first, second = integers(way.shape, "bfloat16", 2, seed=1), integers(way.shape, "bfloat16")
    array, load = integers(SHAPES["columns"](way), "bfloat16", 4), "\nx1 * x0"
    fused = plan_of(way, op, load=load)["scratch_bytes"]
    found = call(way, op, first, second, array, load=load, written="bfloat16", scratch_bytes=fused)
    plain = way.plan(op, "bfloat16")["scratch_bytes"]
    expected = call(way, op, first, first * second, written="bfloat16", scratch_bytes=plain)
    assert_close(found, expected, "bfloat16")


@on_gpu
@every_view
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("op", [op for op in EVERY_OP if KERNELS[op]["element_results"]])
def test_store_of_each_operator(op, masked, way):
    """A scaled result with an array added, and the result itself in another dtype."""
    x, array = integers(way.shape, "bfloat16"), integers(SHAPES["columns"](way), "bfloat16", 4)
    first = [integers(way.shape, "bfloat16", 2, seed=1)] if op in TWO_OPERANDS else []
    last = row_numbers(op, way.shape, way.axes, "bfloat16") + ([support.random_mask(way.shape)] if masked else [])
    dtypes = ("bfloat16", "bfloat16", "bfloat16")
    fused = plan_of(way, op, dtypes, masked=masked, store=STORE, more_results=["float32"])["scratch_bytes"]
    plain = way.plan(op, "bfloat16", list(way.shape) if masked else None, out_dtype="float32")["scratch_bytes"]
    scaled, as_it_is, *of_rows = call(
        *(way, op, *first, x, array, *last),
        store=STORE,
        written="bfloat16",
        more_results=["float32"],
        scratch_bytes=fused,
    )
    expected = call(way, op, *first, x, *last, written="float32", scratch_bytes=plain)
    expected, *rows_expected = expected if op in ROW_OPS else [expected]
    assert_close(as_it_is, expected, "float32")
    assert_close(scaled, np.float64(2) * expected + array.astype(np.float64), "bfloat16")
    for a, b in zip(of_rows, rows_expected, strict=True):
        assert_close(a, b, a.dtype)


@pytest.mark.parametrize("store", ["y * C(2)", "\ny * C(2)"])
def test_results_of_8_bits_compile(jit, store):
    """Also where an expression may leave the range of int8; an empty line stands for the result."""
    more = ["int8"] * store.count("\n")
    for step in WAYS[0].plan("absmax_scale", out_dtype="int8", store=store, more_results=more)["steps"]:
        assert jit.binary(step["code"])[:4] == b"\x7fELF"


@pytest.mark.parametrize(
    "options,message",
    [
        ({"load": "x0\nx1"}, "`load` has more lines"),
        ({"store": "y\ny"}, "wrong number of operands or results"),
        ({"more_results": 2 * ["float32"]}, "wrong number of operands or results"),
        ({"out_dtype": "int8"}, "unsupported dtype of a result, int8"),
        ({"sides": 32 * [([1, 32], "float32")]}, "at most 31 arrays"),
        ({"sides": [([1, 7], "float32")]}, "dimension 1 of an operand that broadcasts must be 1 or 32, got 7"),
    ],
)
def test_expressions_that_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        WAYS[0].plan("softmax", **options)


@on_gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_tanh(dtype):
    """Within 5 units in the last place of float32, as XLA's is."""
    x = np.concatenate([np.linspace(-12, 12, 100_001), [np.inf, -np.inf, np.nan, 0.0, -0.0, 1e-30]])
    x = np.resize(x, (64, 2048)).astype(jnp.dtype(dtype))
    store, scale = "tanh(s0)", np.zeros_like(x)
    found = call_kernel(
        *("softmax_linear", scale, scale, x), axes=(1,), out_dtype="float32", arrays="array", store=store
    )
    expected = np.tanh(x.astype(np.float64))
    np.testing.assert_allclose(np.asarray(found, np.float64), expected, rtol=5 * 2.0**-23, atol=1e-37)
