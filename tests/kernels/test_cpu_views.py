"""The CPU's ways through a view: rows along the lanes, columns side by side, and what is moved to lie like columns."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
import support
from oracles import check, expected_entropy
from support import DTYPES, NAMES, OPERATORS, check_all, normal, sampled

import jax_softmax
from jax_softmax import _kernels
from jax_softmax.primitives.operators import bind
from jax_softmax.runtime import judge
from jax_softmax.runtime.kernel_spec import attributes, described

ON_CPU = jax.default_backend() == "cpu"
FASTEST = _kernels.build_info()["cpu_variant"]
INSTRUCTION_SETS = _kernels.build_info()["cpu_variants"] if ON_CPU else [FASTEST]

# Lengths around what a vector, a block and a held tile have; columns that are fewer than a vector's lanes, that fill
# vectors exactly, and that leave a part of the last one.
COLUMNS = [((5, n, k), 1) for n in (3, 8, 65, 513, 1100) for k in (2, 3, 7, 8, 13, 40)]
LONG = [((2100, 3), 0), ((5000, 70), 0), ((40, 2500, 7), 1), ((20_000, 2), 0), ((140_000, 9), 0), ((3, 150_001), 1)]
GROUPS = [
    ((1000, 3, 2), 1),
    ((70, 6, 5, 3), (1, 3)),
    ((9, 20, 17), (0, 2)),
    ((9, 20, 3), (0, 2)),
    ((6, 30, 7, 5), (0, 2)),
    ((3, 7, 70), 1),
    ((5, 2, 255), 1),
]
SHORT_ROWS = [((1000, n), -1) for n in (1, 2, 3, 5, 8, 17, 31, 32, 64, 65)]
VIEWS = [*COLUMNS, *LONG, *GROUPS, *SHORT_ROWS]
# Around the fewest and the most vectors of rows of which as many as a vector has lanes are done together.
TOGETHER = sorted({n + d for n in (8, 12, 16, 24, 32, 40, 64, 128, 256, 512) for d in (-1, 0, 1)})


@pytest.fixture
def instruction_set(request):
    """The one that the CPU kernels are of, instead of the fastest."""
    try:
        _kernels.use_cpu_variant(request.param)
    except ValueError as error:
        pytest.skip(str(error))
    assert _kernels.build_info()["cpu_variant"] == request.param
    yield
    _kernels.use_cpu_variant(FASTEST)


every_set = {"indirect": ["instruction_set"]}


def reduced(view):
    """The axes, counted from the first one."""
    shape, axis = view
    return sorted(d % len(shape) for d in np.atleast_1d(axis))


@sampled("instruction_set,dtype,view", itertools.product(INSTRUCTION_SETS, DTYPES, VIEWS), 31, **every_set)
def test_views(instruction_set, dtype, view):
    shape, axis = view
    check_all(normal(shape, dtype), axis)


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS, indirect=True)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_16_bits_are_rounded_to_nearest(instruction_set, dtype):
    """Ties to even: of a row with a single probability, log-softmax's derivative is a difference of two numbers."""
    t = np.arange(1 << 16, dtype=np.uint16).view(dtype)
    info = jnp.finfo(dtype)
    t = t[np.abs(np.nan_to_num(t.astype(np.float32), posinf=0, neginf=0)) >= float(info.tiny)]
    for first in (0, 1, -1 - float(info.eps), 3 * float(info.eps), 100, 16 * float(info.tiny)):
        t[0] = first
        x = np.full(t.shape, -np.inf, dtype)
        x[0] = 0
        found = jax.jvp(jax_softmax.log_softmax, (x,), (t,))[1]
        with np.errstate(over="ignore"):
            expected = (t.astype(np.float32) - np.float32(t[0])).astype(dtype)
        normal = np.abs(expected.astype(np.float32)) >= float(info.tiny)  # XLA's processor may take others for 0
        np.testing.assert_array_equal(np.asarray(found)[normal], expected[normal])


@sampled("instruction_set,dtype,view", itertools.product(INSTRUCTION_SETS, DTYPES, VIEWS), 53, **every_set)
def test_results_of_rows(instruction_set, dtype, view):
    shape, axis = view
    x, wide = normal(shape, dtype), "float64" if dtype == "float64" else "float32"
    for where in (None, support.random_mask(shape)):
        with support.precision(dtype):
            results = jax_softmax.logsumexp(x, axis, where, dtype=wide, return_max=True)
        for result, expected in zip(results, oracles.reference_logsumexp(x, axis, where), strict=True):
            check(result, expected, f"of {dtype}{shape} along {axis}")


@sampled("instruction_set,dtype,view", itertools.product(INSTRUCTION_SETS, DTYPES, VIEWS), 53, **every_set)
def test_entropies(instruction_set, dtype, view):
    shape, axis = view
    x = normal(shape, dtype)
    for where in (None, support.random_mask(shape)):
        with support.precision(dtype):
            found = jax_softmax.entropy(x, axis, where)
        check(found, expected_entropy(x, axis, where), f"of {dtype}{shape} along {axis}")


@sampled("instruction_set,dtype,view", itertools.product(INSTRUCTION_SETS, DTYPES, VIEWS), 53, **every_set)
def test_scaled_rows(instruction_set, dtype, view):
    """To the bit, whatever the instruction set: also of rows of halves up to 127, every other of which is a tie."""
    shape, axis = view
    if not ON_CPU and judge.reason_on_all_gpus(described("absmax_scale", shape, reduced(view), dtype)):
        pytest.skip("XLA's, whose division on a GPU is not to the nearest")
    halves = (np.arange(np.prod(shape)).reshape(shape) % 509 - 254) / 2
    halves[tuple(0 if d in reduced(view) else slice(None) for d in range(len(shape)))] = 127
    for x, result in itertools.product((support.outliers(shape, dtype), halves.astype(dtype)), (dtype, "int8")):
        for where in (None, support.random_mask(shape)):
            with support.precision(dtype):
                found = jax_softmax.absmax_scale(x, axis, where, dtype=result)
            for array, expected in zip(found, oracles.reference_absmax_scale(x, axis, where, result), strict=True):
                check(array, expected, f"of {dtype}{shape} along {axis} to {result}")


@pytest.mark.parametrize("result", [None, "int8"])
@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS, **every_set)
def test_scaled_rows_that_are_not_finite(instruction_set, result):
    for columns, axis in itertools.product((5, 40, 5000), (0, 1)):
        x = support.nonfinite_rows(columns)
        x = x if axis else np.ascontiguousarray(x.T)
        for where in (None, support.random_mask(x.shape)):
            found = jax_softmax.absmax_scale(x, axis, where, dtype=result)
            for array, expected in zip(found, oracles.reference_absmax_scale(x, axis, where, result), strict=True):
                check(array, expected, f"{columns} along {axis}")


@functools.partial(jax.jit, static_argnums=0)
def gradients(axes, x, factor, lse_factor, offset, at_label, label, where=None):
    """The gradient of a loss, and what rows have; and the gradient given what rows have."""
    params = {"where": where, "axes": axes}
    of_rows = factor, lse_factor, offset, at_label, label
    gradient, *rows = bind("cross_entropy_gradient", x, *of_rows, **params)
    again, *_ = bind("cross_entropy_gradient", x, *rows, *of_rows, **params)
    return gradient, *rows, again


def expected_gradients(x, *of_rows, axes, where):
    expected = oracles.reference_cross_entropy_gradient(x, *of_rows, axes, where)
    return *expected, expected[0]


@sampled("instruction_set,dtype,view", itertools.product(INSTRUCTION_SETS, DTYPES, VIEWS), 31, **every_set)
def test_gradients_of_losses(instruction_set, dtype, view):
    shape, axes = view[0], tuple(reduced(view))
    for where in (None, support.random_mask(shape)):
        operands = normal(shape, dtype), *support.row_numbers("cross_entropy_gradient", shape, axes, dtype)
        expected = expected_gradients(*operands, axes=axes, where=where)
        with support.precision(dtype):
            found = gradients(axes, *operands, where=where)
        for array, value in zip(found, expected, strict=True):
            check(array, value, f"of {dtype}{shape} along {axes}")


@sampled("instruction_set,columns", itertools.product(INSTRUCTION_SETS, [5, 40, 5000, 70_000]), 5, **every_set)
def test_gradients_of_losses_that_are_not_finite(instruction_set, columns):
    """Every other three rows do not count: their own numbers are all 0."""
    for axis in (0, 1):
        x = support.nonfinite_rows(columns)
        x = x if axis else np.ascontiguousarray(x.T)
        *numbers, label = support.row_numbers("cross_entropy_gradient", x.shape, (axis,), x.dtype)
        counts = np.arange(label.size).reshape(label.shape) % 6 < 3
        numbers = [np.where(counts, number, 0).astype(np.float32) for number in numbers]
        for where in (None, support.random_mask(x.shape)):
            expected = expected_gradients(x, *numbers, label, axes=(axis,), where=where)
            ignored = ~np.broadcast_to(counts, x.shape)
            for gradient in (expected[0], expected[-1]):
                gradient.value[ignored] = gradient.bound[ignored] = 0
            found = gradients((axis,), x, *numbers, label, where=where)
            for array, value in zip(found, expected, strict=True):
                check(array, value, f"{columns} along {axis}")


MASKED = tuple(itertools.product(["bfloat16", "float32", "float64"], VIEWS[::3]))


@sampled("instruction_set,case", itertools.product(INSTRUCTION_SETS, MASKED), 23, **every_set)
def test_masked_views(instruction_set, case):
    dtype, (shape, axis) = case
    for mask_shape in (shape, shape[-1:], (*shape[:-1], 1)):
        check_all(normal(shape, dtype), axis, support.random_mask(mask_shape))


@sampled("instruction_set,dtype,columns", itertools.product(INSTRUCTION_SETS, DTYPES, TOGETHER), 47, **every_set)
def test_rows_together(instruction_set, dtype, columns):
    for rows in (1, 19):
        x = normal((rows, columns), dtype)
        for mask_shape in (None, (rows, columns), (columns,), (rows, 1)):
            check_all(x, 1, None if mask_shape is None else support.random_mask(mask_shape))


@pytest.mark.parametrize("columns", [24, 33, 47, 100, 300])
def test_nonfinite_rows(columns):
    x = support.nonfinite_rows(columns)
    for where in (None, support.random_mask(x.shape)):
        check_all(x, 1, where)


# On a GPU rows whose bytes are no multiple of 16 may depend on where they begin.
ALONE = (24, 40, 104, 304, *([33, 47, 101, 255] if ON_CPU else []))


@sampled("dtype,length", itertools.product(["bfloat16", "float32", "float64"], ALONE), 5)
def test_a_row_does_not_depend_on_the_others(dtype, length):
    x = normal((21, length), dtype)
    g = normal(x.shape, dtype, seed=1)

    @jax.jit
    def run(x, g):
        return [(y, vjp(g)[0]) for y, vjp in (jax.vjp(lambda x, n=n: OPERATORS[n](x, 1), x) for n in NAMES)]

    with support.precision(dtype):
        whole = jax.tree.leaves(run(x, g))
        for part in (np.s_[:1], np.s_[3:4], np.s_[5:14], np.s_[20:]):
            for actual, wanted in zip(jax.tree.leaves(run(x[part], g[part])), whole, strict=True):
                support.assert_same_bits(actual, wanted[part], part)


@pytest.mark.parametrize("columns", [3, 40])
@pytest.mark.parametrize("rows", [20, 600, 3000])
def test_nonfinite_columns(rows, columns):
    x = support.nonfinite_rows(rows)
    for where in (None, support.random_mask(x.shape[::-1])):
        check_all(np.ascontiguousarray(x.T), 0, where)
    stacked = np.stack([np.roll(x, i, 0)[: columns * (len(x) // columns)] for i in range(2)])
    check_all(np.ascontiguousarray(stacked.reshape(-1, columns, rows).swapaxes(1, 2)), 1)


@sampled("dtype,length", itertools.product(["bfloat16", "float32"], [7, 100, 1500, 5000, 9000]), 3)
def test_a_column_does_not_depend_on_the_others(dtype, length):
    # On a GPU it may depend on those inside of the reduced dimension, and on where 16 bytes of those begin.
    x = normal((6, length, 50 if ON_CPU else 48), dtype)
    inner = (np.s_[:, :, :2], np.s_[2:, :, 5:8], np.s_[:, :, 40:], np.s_[3:4, :, 1:25]) if ON_CPU else ()
    g = normal(x.shape, dtype, seed=1)

    @jax.jit
    def run(x, g):
        return [(y, vjp(g)[0]) for y, vjp in (jax.vjp(lambda x, n=n: OPERATORS[n](x, 1), x) for n in NAMES)]

    whole = jax.tree.leaves(run(x, g))
    for part in (np.s_[:1], np.s_[3:4], np.s_[2:], *inner):
        for actual, wanted in zip(jax.tree.leaves(run(x[part], g[part])), whole, strict=True):
            support.assert_same_bits(actual, wanted[part], part)


@pytest.mark.skipif(not ON_CPU, reason="on a GPU a row may depend on what lies inside of the reduced dimensions")
@sampled("dtype,rows", itertools.product(["bfloat16", "float32"], [(40, 33), (900, 33), (30, 130), (12, 9000)]), 3)
def test_a_row_of_alternating_runs_does_not_depend_on_the_others(dtype, rows):
    """However many of them are read together, and in however many parts."""
    extent, length = rows
    x = normal((2, extent, 17, length), dtype)
    g = normal(x.shape, dtype, seed=1)

    @jax.jit
    def run(x, g):
        return [(y, vjp(g)[0]) for y, vjp in (jax.vjp(lambda x, n=n: OPERATORS[n](x, (1, 3)), x) for n in NAMES)]

    whole = jax.tree.leaves(run(x, g))
    for part in (np.s_[:1], np.s_[:, :, :2], np.s_[1:, :, 3:12], np.s_[:, :, 15:]):
        for actual, wanted in zip(jax.tree.leaves(run(x[part], g[part])), whole, strict=True):
            support.assert_same_bits(actual, wanted[part], part)


@pytest.mark.skipif(not ON_CPU, reason="on a GPU a row may depend on where in 128 bytes it begins")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_a_masked_row_of_alternating_runs_does_not_depend_on_the_others(dtype):
    """One that threads share is finished in parts, some of them shorter than a vector."""
    shape, axes = (40, 150, 6, 29), (1, 3)
    with support.precision(dtype):
        x, g = normal(shape, dtype), normal(shape, dtype, seed=1)
        where = support.random_mask(shape)

        @jax.jit
        def run(x, g, where):
            return [vjp(g)[0] for n in NAMES for _, vjp in [jax.vjp(lambda x, n=n: OPERATORS[n](x, axes, where), x)]]

        whole = run(x, g, where)
        for actual, wanted in zip(run(x[:1], g[:1], where[:1]), whole, strict=True):
            support.assert_same_bits(actual, wanted[:1])


def test_side_operands_are_known_by_their_roles():
    """Whatever their order is."""
    x, *numbers = [normal((3, n), seed=k) for k, n in enumerate((5, 1, 1, 1, 1))]
    label, mask = np.array([[0], [1], [4]], np.int32), x > -1
    results = [jax.ShapeDtypeStruct((3, n), np.float32) for n in (5, 1, 1)]
    given = attributes("cross_entropy_gradient", (1,), masked=True)
    call = jax.ffi.ffi_call("jax_softmax", results)
    with support.on_a_cpu():
        expected = call(x, *numbers, label, mask, **given)
        in_another_order = given | {"sides": "mask number label number number number"}
        made = call(x, mask, numbers[0], label, *numbers[1:], **in_another_order)
    for a, b in zip(made, expected, strict=True):
        np.testing.assert_array_equal(a, b)
