"""Every kernel of every schedule, on a GPU, is within a derived bound of float64; and every length at which another
schedule takes over, what is not finite, and what is very large, on whatever runs here."""

import itertools

import emulated
import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
import support
from oracles import (
    check,
    reference,
    reference_absmax_scale,
    reference_cross_entropy,
    reference_cross_entropy_gradient,
    reference_distances,
    reference_entropy,
    reference_linear,
    reference_normalizer,
    reference_vjp,
)
from support import KERNEL_NAMES, NAMES, OPERATORS, OPS, SCHEDULES, WAYS, call_kernel, check_all, normal

import jax_softmax
from jax_softmax.primitives.records import GRADIENTS

on_gpu = pytest.mark.skipif(support.why_no_cuda() is not None, reason=str(support.why_no_cuda()))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", support.ON_CUDA)
def test_the_list_reaches_every_kernel(dtype, op):
    plans = [way.plan(op, dtype) for way in WAYS]
    assert {plan["schedule"] for plan in plans} == SCHEDULES
    assert {name for plan in plans for name in support.kernel_names(plan)} == KERNEL_NAMES
    for schedule in ("chunks", "tile"):
        clusters = {step["cluster"] for plan in plans if plan["schedule"] == schedule for step in plan["steps"]}
        assert len(clusters) > 1 and 1 in clusters


def case(op, shape, axes, dtype, where=None):
    """What an operator takes, but for the mask, and its results in float64."""
    x, of_rows = normal(shape, dtype), support.row_numbers(op, shape, axes, dtype)
    if op in NAMES:
        return [x], [reference(op, x, axes, where)]
    if op in GRADIENTS.values():
        t = normal(shape, dtype, seed=1, scale=1.0)
        return [x, t], [reference_vjp(op.removesuffix("_gradient"), x, t, axes, where)]
    if op in OPS:
        of, t = "softmax" if op == "softmax_linear" else "log_softmax", normal(shape, dtype, seed=1, scale=1.0)
        y = reference(of, x, axes, where).value.astype(dtype)
        return [y, t], [reference_linear(op, y, t, axes, dtype, where)]
    if op == "logsumexp":
        return [x], reference_normalizer(x, axes, where)
    if op == "logsumexp_and_distances":
        return [x], [*reference_normalizer(x, axes, where), *reference_distances(x, axes, where)]
    if op == "cross_entropy_gradient_and_distances":
        results = reference_cross_entropy_gradient(x, *of_rows, axes, where)
        return [x, *of_rows], [*results, *reference_distances(x, axes, where)]
    if op == "softmax_and_normalizer":
        return [x], [reference("softmax", x, axes, where), *reference_normalizer(x, axes, where)]
    if op == "absmax_scale":
        return [x], reference_absmax_scale(x, axes, where)
    if op == "cross_entropy":
        return [x, *of_rows], reference_cross_entropy(x, *of_rows, axes, where)
    if op == "cross_entropy_gradient":
        return [x, *of_rows], reference_cross_entropy_gradient(x, *of_rows, axes, where)
    if op == "kl_divergence":
        y = normal(shape, dtype, seed=1)
        return [x, y, *of_rows], reference_entropy(x, axes, where, y, *of_rows)
    assert op == "entropy", f"{op} has no operands here"
    return [x], reference_entropy(x, axes, where)


@on_gpu
@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("op", support.KERNELS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("masked", [False, True])
def test_values(masked, dtype, op, way):
    where = support.random_mask(way.shape) if masked else None
    mask = [] if where is None else [where]
    inputs, expected = case(op, way.shape, way.axes, dtype, where)
    plan = way.plan(op, dtype, list(way.shape) if masked else None)
    with support.limited(**way.limits):
        results = call_kernel(op, *inputs, *mask, axes=way.axes, scratch_bytes=plan["scratch_bytes"])
    for i, (result, bounded) in enumerate(zip(jax.tree.leaves(results), expected, strict=True)):
        check(result, bounded, f"result {i} of {op} by {plan['schedule']}")


@on_gpu
@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("dtypes", [(x, y) for x in ("bfloat16", "float32") for y in oracles.LARGEST], ids=str)
@pytest.mark.parametrize("masked", [False, True])
def test_results_of_8_bits(masked, dtypes, way):
    """With NaNs and infinities in some rows, in others only zeros."""
    (dtype, result), where = dtypes, support.random_mask(way.shape) if masked else None
    mask = [] if where is None else [where]
    x = normal(way.shape, dtype)
    flat = x.reshape(-1)
    flat[:: flat.size // 3 + 1] = [np.nan, np.inf, 0][: len(flat[:: flat.size // 3 + 1])]
    x[-1] = 0
    plan = way.plan("absmax_scale", dtype, list(way.shape) if masked else None, out_dtype=result)
    with support.limited(**way.limits):
        found = call_kernel(
            "absmax_scale", x, *mask, axes=way.axes, out_dtype=result, scratch_bytes=plan["scratch_bytes"]
        )
    expected = reference_absmax_scale(x, way.axes, where, result)
    for i, (array, bounded) in enumerate(zip(found, expected, strict=True)):
        check(array, bounded, f"result {i} by {plan['schedule']}")


# The boundaries are those of the CUDA plan.
LONGEST = 300_000


def chosen(columns, dtype):
    plan = support.plan((3, columns), (1,), dtype=dtype)
    fields = plan["fields"]
    return plan["schedule"], fields.get("lanes"), fields.get("packs"), fields.get("chunks"), fields.get("cluster")


def boundaries(dtype, longest):
    """The last length before another kernel takes over, among lengths of whole packs and among others."""
    per_pack = 16 // np.dtype(jnp.dtype(dtype)).itemsize
    found = set()
    for step, offset in ((per_pack, 0), (per_pack, 1)):
        grid = sorted({int(1.09**i) // step * step + offset for i in range(200)} - {0})
        grid = [n for n in grid if 0 < n <= longest]
        for low, high in itertools.pairwise(grid):
            if chosen(low, dtype) == chosen(high, dtype):
                continue
            while high - low > step:
                middle = low + (high - low) // (2 * step) * step
                if chosen(middle, dtype) == chosen(low, dtype):
                    low = middle
                else:
                    high = middle
            found.add(low)
    return sorted(found)


@on_gpu
@pytest.mark.parametrize(
    "dtype,columns",
    [(d, n) for d in ("bfloat16", "float32") for n in boundaries(d, LONGEST)]
    + [("float16", n) for n in boundaries("float16", min(LONGEST, 50_000))],
)
def test_boundaries(dtype, columns):
    for n in (columns - 1, columns, columns + 1):
        if n > 0:
            check_all(normal((3, n), dtype, seed=n))


@pytest.mark.sweep
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    "shape", [(130, 70_003), (70, 131_072), (70, 300_001), (5, 1_200_001), (1, 12_500_000)], ids=str
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_long_rows(dtype, shape, masked):
    x = normal(shape, dtype)
    where = support.random_mask((1, shape[1])) if masked else None
    check_all(x, where=where, names=NAMES[:1] if masked else NAMES)


ROWS_OF_LABELS = [((60, 9_000), (1,)), ((60, 50_257), (1,)), ((60, 128_256), (1,)), ((30, 130, 2, 801), (1, 3))]


@support.sampled(
    "shape,axes,dtype", [(*rows, dtype) for rows in ROWS_OF_LABELS for dtype in ("bfloat16", "float32")], 3, ids=str
)
def test_labels_anywhere_in_rows(shape, axes, dtype):
    """A gradient differs from the probabilities by 1 there, and nowhere else; near the ends of rows and between them,
    with masks, with what `fuse` folds, and where a label is none."""
    n = int(np.prod([shape[d] for d in axes]))
    between = np.linspace(n // 21, n - n // 21, 21).astype(int) // 8 * 8 + np.arange(21) % 3 - 1
    labels = np.r_[-1:18, between, n - 18 : n + 2].reshape([m for d, m in enumerate(shape) if d not in axes])
    x = normal(shape, dtype)
    rows = np.moveaxis(np.asarray(x, np.float64), axes, range(-len(axes), 0)).reshape(labels.size, n)
    where = support.random_mask(rows.shape)
    has_label = (labels.ravel() >= 0) & (labels.ravel() < n)
    where[has_label.nonzero()[0], labels.ravel()[has_label]] = True
    mask = np.moveaxis(where.reshape(labels.shape + tuple(shape[d] for d in axes)), range(-len(axes), 0), axes)

    def gradient(x, where=None, scale=1.0):
        def total(x):
            return jax_softmax.cross_entropy_loss(x * scale, labels, axis=axes, where=where, reduction="sum")

        g = jax.grad(total)(x)
        return g, 2 * g.astype(np.float32)

    with emulated.all_kernels():
        found = jax.jit(lambda x: (gradient(x), gradient(x, mask), jax_softmax.fuse(gradient)(x, scale=0.5)))(x)
    for (g, twice), left, scale in zip(found, (True, where, True), (1, 1, 0.5), strict=True):
        expected = np.where(left, np.exp(scale * (rows - rows.max(-1, keepdims=True))), 0)
        expected /= expected.sum(-1, keepdims=True)
        expected[has_label.nonzero()[0], labels.ravel()[has_label]] -= 1
        expected = np.where(has_label[:, None], scale * expected, 0)
        for a, times in ((g, 1), (twice, 2)):
            a = np.moveaxis(np.asarray(a, np.float64), axes, range(-len(axes), 0)).reshape(expected.shape)
            eps = 2.0**-7 if dtype == "bfloat16" else 2e-5
            np.testing.assert_allclose(a, times * expected, rtol=eps, atol=1e-6)


@pytest.mark.parametrize(
    "shape",
    [(9, 35_001), *(pytest.param(n, marks=pytest.mark.sweep) for n in [(170, 70_000), (6, 7_000_000)])],
    ids=str,
)
def test_nonfinite_long_rows(shape):
    """What is exchanged is right for rows of NaN and infinities, among others that are not."""
    x = np.zeros(shape, np.float32)
    x[0, 5] = np.nan
    x[1, -1] = np.inf
    x[2] = -np.inf
    x[3, shape[1] // 2 :] = -np.inf
    x[4, 17] = -np.inf
    for name in NAMES:
        check(jax.jit(OPERATORS[name])(x), reference(name, x))


@pytest.mark.parametrize("columns", [35, 41, 50, 63, 65, 66, 67, 100, 127, 129, 130, 131, 255, 257, 258, 300, 401, 511])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_short_rows_of_16_bits(dtype, columns):
    """Rows that begin at either half of a word; several to a block, and a last slab that is not full."""
    check_all(normal((197, columns), dtype))


@support.sampled(
    "columns,largest",
    itertools.product([5, 33, 1000, 4097, 20_001, 300_001], [2.0**20, 2.0**21, 2.0**24, 1e30, -(2.0**20), -1e30]),
    5,
)
def test_large_numbers(largest, columns):
    """Neighbouring numbers, of which some may be beyond a power of 2 and others not, among some that are far away."""
    x = np.full(columns, largest, np.float32)
    for i in range(1, columns):
        step = -np.inf if i % 7 == 3 else np.inf
        x[i] = x[i - 1] if i % 5 else np.nextafter(x[(i * 7919) % i], np.float32(step))
    x[1::11] = -3e38
    x = np.stack([x, np.roll(x, columns // 2), x[::-1]])
    check_all(x, names=NAMES[:1])


@on_gpu
@pytest.mark.parametrize("center", [0, 2**20, -(2**20), 3 * 2**20, 2**24])
@pytest.mark.parametrize("columns", [5, 33, 1000, 4097, 20_001, 131_072, 300_001, 1_100_000])
def test_float32_is_as_exact_far_below_the_maximum(columns, center):
    """Where exp(x - max) is off by the rounding of x - max: 30 units in the last place and more.

    The sorted rows have parts whose maximum is on the other side of the center.
    """
    x = normal((9, columns), scale=30.0) + np.float32(center)
    x[3:6].sort()
    x[3:6] = x[3:6, ::-1]
    x[6:].sort()
    expected = reference("softmax", x).value
    error = np.abs(np.asarray(jax_softmax.softmax(x), np.float64) - expected)
    eps, tiny = np.finfo(np.float32).eps, np.finfo(np.float32).tiny
    assert np.max(error / np.maximum(expected, tiny / eps)) < 4 * eps


@pytest.mark.parametrize("columns", [5, 33, 1000, 4097, 20_001, 300_001])
def test_all_of_a_row_is_one(columns):
    x = np.zeros((4, columns), np.float32)
    for row, largest in enumerate([1000.1, 333.3, 150.7, 2e6]):
        x[row, (row * 12_345) % columns] = largest
    assert np.array_equal(np.asarray(jax_softmax.softmax(x)), (x > 0).astype(np.float32))


@on_gpu
@pytest.mark.parametrize("columns", [1000, 8191, 16384, 32768, 50257, 131072, 151937, 1_100_000])
@pytest.mark.parametrize("shared", [64, 99, 163])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_as_on_a_chip_without_clusters(dtype, shared, columns):
    with support.limited(shared_memory_per_block=shared << 10, largest_cluster=1):
        check_all(normal((5, columns), dtype))


@on_gpu
@pytest.mark.parametrize("columns", [50257, 131072, 400_000, 3_000_000])
def test_exported_for_any_number_of_rows(columns):
    """Without memory to exchange states through: by a kernel where no number of rows needs any, or else by XLA."""
    x, g = normal((3, columns), "bfloat16"), normal((3, columns), "bfloat16", seed=1)

    @jax.jit
    def value_and_vjp(x, g):
        y, vjp = jax.vjp(OPERATORS["softmax"], x)
        return y, *vjp(g)

    shape = jax.ShapeDtypeStruct(jax.export.symbolic_shape(f"rows, {columns}"), x.dtype)
    allowed = [jax.export.DisabledSafetyCheck.custom_call("jax_softmax")]
    exported = jax.export.export(value_and_vjp, disabled_checks=allowed)(shape, shape)
    y, dx = jax.jit(exported.call)(x, g)
    check(y, reference("softmax", x))
    check(dx, reference_vjp("softmax", x, g))


@pytest.mark.skipif(support.device_bytes() < 40 << 30, reason="needs a device with 40 GB")
@pytest.mark.parametrize(
    "shape",
    [(2**30 + 9, 4), (2**25 + 1, 129), (2**21 + 3, 2048), (2**15 + 1, 131072), (3, 2**31 + 8), (1, 2**32 + 8)],
    ids=str,
)
def test_more_elements_than_32_bits_count(shape):
    """The first, some, and the last rows' results; for one row its parts."""
    rows, columns = shape
    dtype = jnp.bfloat16
    x = jax.jit(
        lambda: (jax.lax.iota(jnp.uint32, columns)[None] * 7 + jnp.arange(rows, dtype=jnp.uint32)[:, None]) % 251
    )
    x = jax.jit(lambda: (x() / 64).astype(dtype))()
    y = OPERATORS["softmax"](x)
    n = min(columns, 1 << 20)
    for row in sorted({0, rows // 2, rows - 1}):
        total = float(jax.jit(lambda x, row=row: jnp.sum(jnp.exp(x[row].astype(jnp.float32))))(x))
        for begin in sorted({0, columns - n}):
            part = jax.jit(lambda a, low=(row, begin), high=(row + 1, begin + n): jax.lax.slice(a, low, high)[0])
            expected = np.exp(np.asarray(part(x), np.float64)) / total
            actual = np.asarray(part(y), np.float64)
            np.testing.assert_allclose(actual, expected, rtol=0.02)
