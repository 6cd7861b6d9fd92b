"""Rows that are not runs of memory: every schedule of theirs, and every extent at which another takes over, is within a
derived bound of float64, whichever dimensions are kept."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import support
from oracles import check, reference, reference_vjp
from support import NAMES, OPERATORS, assert_same_bits, check_all, normal, sampled

ON_GPU = jax.default_backend() == "gpu"

# Shapes, reduced axes. Extents that are, and are not, a multiple of 16 bytes; rows that a thread, a block, a cluster
# hold, and longer ones.
VIEWS = [
    ((5, 7, 64), (1,)),
    ((3, 100, 1024), (1,)),
    ((2, 1024, 256), (1,)),
    ((3, 1000, 40), (1,)),
    ((2, 3000, 96), (1,)),
    ((9000, 64), (0,)),
    ((20000, 48), (0,)),
    ((33_000, 64), (0,)),
    ((4, 100_000), (0,)),
    ((16, 5000), (0,)),
    ((17, 5000), (0,)),
    # Kept neighbours of no whole packs.
    ((3, 33, 65), (1,)),
    ((2, 1023, 1023), (1,)),
    ((5, 8, 1001), (1,)),
    ((4, 100_001), (0,)),
    ((2, 5000, 129), (1,)),
    ((2, 515, 33), (1,)),
    # Narrow ones.
    ((50, 16, 4), (1,)),
    ((70, 4, 2), (1,)),
    ((33, 2, 2), (1,)),
    ((51, 2, 4), (1,)),
    ((51, 4, 4), (1,)),
    ((51, 8, 2), (1,)),
    ((51, 2, 8), (1,)),
    ((33, 15, 3), (1,)),
    ((9, 100, 5), (1,)),
    ((5, 511, 3), (1,)),
    ((7, 512, 4), (1,)),
    ((5, 1024, 3), (1,)),
    ((3, 8192, 7), (1,)),
    ((3, 4099, 12), (1,)),
    ((2, 30_000, 6), (1,)),
    ((1, 200_000, 3), (1,)),
    ((2, 140_000, 2), (1,)),
    # Runs.
    ((16, 24, 32), (0, 2)),
    ((16, 9, 1024), (0, 2)),
    ((5, 16, 12, 16), (1, 3)),
    ((5, 16, 12, 4), (1, 3)),
    ((5, 16, 13, 15), (1, 3)),
    ((5, 6, 13, 3), (1, 3)),
    ((5, 200, 79, 9), (1, 3)),
    ((3, 100, 41, 33), (1, 3)),
    ((2, 400, 41, 45), (1, 3)),
    ((3, 12, 81, 65), (1, 3)),
    ((4, 300, 3, 24), (1, 3)),
    ((33, 5, 700), (0, 2)),
    ((63, 3, 1023), (0, 2)),
    ((130, 2, 4096), (0, 2)),
    ((130, 2, 30_001), (0, 2)),
    ((3, 4, 5, 6, 7, 8), (0, 2, 4)),
    ((3, 4, 5, 6, 7, 8), (1, 3, 5)),
    # Whole lines in runs, some elements of each row side by side in them.
    ((9, 50, 3, 11), (1, 3)),
    ((2, 40_000, 3, 11), (1, 3)),
    ((2, 5001, 4, 27), (1, 3)),
    ((7, 3, 997, 3, 5), (0, 2, 4)),
    # Several dimensions, neighbours kept.
    ((12, 5, 13, 64), (0, 2)),
    ((12, 5, 13, 6), (0, 2)),
    ((12, 5, 13, 33), (0, 2)),
    ((64, 3, 64, 72), (0, 2)),
    ((128, 2, 128, 64), (0, 2)),
    ((300, 2, 200, 32), (0, 2)),
    ((5, 3, 7, 301), (0, 2)),
    # Lines that take turns, since they begin anywhere in a pack, and rows of them that are too long for tiles.
    ((65, 2, 130, 65), (0, 2)),
    ((12, 3, 30, 1023), (0, 2)),
    ((12, 5, 131, 7), (0, 2)),
    ((7, 2, 9, 3, 5, 21), (0, 2, 4)),
    ((300, 2, 301, 33), (0, 2)),
    ((300, 21, 301, 3), (0, 2)),
    ((300, 2, 41, 7), (0, 2)),
    ((300, 5, 11, 63), (0, 2)),
    ((21, 3, 11, 63), (0, 2)),
    ((121, 2, 103, 129), (0, 2)),
    ((13, 2, 25, 3, 41, 7), (0, 2, 4)),
    ((5, 3, 4, 301, 2, 15), (0, 2, 3)),
    # Few lines that begin anywhere.
    ((2, 3, 4001), (1,)),
    ((2, 7, 4001), (1,)),
    ((2, 12, 5011), (1,)),
    ((2, 20, 5001), (1,)),
    ((3, 2, 7, 401), (0, 2)),
    ((2, 3, 3, 2, 4, 133), (0, 2, 4)),
    ((2, 5, 9, 2, 1001), (1, 3)),
    ((1, 7, 3, 9, 1001), (1, 3)),
    ((2, 40, 2001), (1,)),
    # Few runs in them.
    ((2, 4, 777, 3), (1, 3)),
    ((2, 20_011, 7), (0, 2)),
    ((2, 8, 377, 13), (1, 3)),
    ((2, 12, 501, 5), (1, 3)),
    ((2, 2, 301, 63), (1, 3)),
    ((2, 3, 2, 101, 3, 9), (1, 3, 5)),
    ((9, 4, 200, 7), (1, 3)),
    # Small arrays.
    ((1001, 2, 9, 5), (1, 3)),
    ((777, 2, 3, 2, 3), (1, 3)),
    ((101, 4, 4, 4, 4), (1, 3)),
    ((31, 16, 13, 15), (1, 3)),
    ((101, 4, 5, 6, 7), (2, 4)),
    ((40, 2, 3, 4, 5, 6), (1, 3, 5)),
    ((77, 6, 5, 4, 33), (1, 3)),
    ((1, 5, 12, 5), (1, 3)),
    ((301, 5, 5), (1,)),
    ((201, 20, 3), (1,)),
    ((51, 33, 31), (1,)),
    ((51, 66, 5), (1,)),
]


@sampled("dtype,view", itertools.product(support.DTYPES, VIEWS), 57)
def test_views(dtype, view):
    shape, axes = view
    check_all(normal(shape, dtype), axes)


@sampled("dtype,view", itertools.product(["bfloat16", "float32"], VIEWS), 29)
def test_masked_views(dtype, view):
    shape, axes = view
    check_all(normal(shape, dtype), axes, support.random_mask(shape))
    partial = tuple(1 if i % 2 else n for i, n in enumerate(shape))
    check_all(normal(shape, dtype), axes, support.random_mask(partial, 1), names=NAMES[:1])


# Kept elements inside of the reduced ones.
ANYWHERE = (51, 59, 61, 63, 101, 115, 123, 129, 141, 169, 211, 243, 251, 377, 1002)


@sampled("dtype,extent,minor", itertools.product(["bfloat16", "float32", "float64"], [9, 300, 1100], ANYWHERE), 31)
def test_parts_of_lines_that_begin_anywhere(dtype, extent, minor):
    """Tiles that read some neighbours of their own, so that they store whole packs: the edges of all of them."""
    check_all(normal((3, extent, minor), dtype), 1)


@sampled(
    "dtype,between,minor",
    itertools.product(["bfloat16", "float32"], [1, 2, 3, 4, 7], [3, 5, 7, 9, 10, 12, 28, 63, 105]),
    13,
)
def test_lines_of_two_dimensions_that_begin_anywhere(dtype, between, minor):
    """However the outer one shifts their beginnings."""
    check_all(normal((19, between + 1, 2 * between + 9, minor), dtype), (0, 2), names=NAMES[:1])


LINES = (2, 4, 5, 8, 9, 10, 12, 14, 16, 17, 24, 25, 32, 33)


@sampled("dtype,lines,minor", itertools.product(["bfloat16", "float32"], LINES, [1539, 2001, 2042]), 13)
def test_few_lines(dtype, lines, minor):
    check_all(normal((3, lines, minor), dtype), 1)


@sampled("dtype,lines,run", itertools.product(["bfloat16", "float32"], [2, 5, 8, 12, 13, 24], [2, 3, 7, 13, 40]), 11)
def test_few_runs(dtype, lines, run):
    check_all(normal((3, lines, 501, run), dtype), (1, 3))


INNER = (2, 3, 5, 6, 7, 9, 12, 20, 31, 90)


@sampled("dtype,extent,inner", itertools.product(["bfloat16", "float32"], [300, 1001, 4100], INNER), 11)
def test_interleaved_rows_in_tiles(dtype, extent, inner):
    """Several of them to a block, one, or a part of one; the last block is not full."""
    check_all(normal((11, extent, inner), dtype), 1)


@pytest.mark.parametrize(
    "dtype,shape",
    [("float32", (4112, 121)), ("float32", (9184, 81)), ("bfloat16", (10832, 124))],
)
def test_tiles_that_fill_the_shared_memory(dtype, shape):
    check_all(normal(shape, dtype), 0)


@pytest.mark.parametrize("shape,axis", [((2, 4096), 1), ((2, 70_000), 1), ((3000, 96), 0), ((3, 8192, 7), 1)], ids=str)
@pytest.mark.parametrize("sign", [1, -1])
def test_bfloat16_numbers_so_large_that_their_scale_changes(sign, shape, axis):
    """Those of one part of a row are below 2^24, where a product with log2(e) is still taken, and others are not."""
    index = np.arange(shape[axis]).reshape([-1 if d == axis else 1 for d in range(len(shape))])
    below, above = 2**24 - 2**16, 2**24
    x = np.broadcast_to(np.where(2 * index < shape[axis], below, above) * sign, shape).astype(jnp.bfloat16)
    for name in NAMES:
        check(jax.jit(OPERATORS[name], static_argnums=1)(x, axis), reference(name, x, axis))


@sampled("dtype", support.DTYPES, 4)
def test_columns_whose_maximum_moves(dtype):
    """Two passes take terms relative to what may lag behind the maximum so far."""
    n = 60_000
    ramp = np.linspace(0, 1, n)[:, None]
    noise = np.asarray(normal((n, 16)), np.float64)
    kinds = [
        30 * ramp,
        -30 * ramp,
        20 * (ramp > 0.5),
        np.where(ramp < 0.7, -np.inf, 0),
        7.9 * (ramp > 0.3) + 7.9 * (ramp > 0.6),
        3000 * ramp,
        60_000 - 8 * ramp,
        0 * ramp,
    ]
    x = np.concatenate([noise + kind for kind in kinds], axis=1).astype(jnp.dtype(dtype))
    with support.precision(dtype):
        for name in NAMES:
            check(jax.jit(OPERATORS[name], static_argnums=1)(x, 0), reference(name, x, 0))


@sampled("view", VIEWS, 18)
def test_nonfinite_views(view):
    """What a row shares a pack, a tile or a cluster with does not touch it."""
    shape, axes = view
    x = normal(shape)
    rows = np.moveaxis(x, axes, range(-len(axes), 0))  # a view of x
    kept = rows.shape[: -len(axes)]
    fills = [np.nan, np.inf, -np.inf]
    for i, index in enumerate(itertools.islice(np.ndindex(kept), 0, None, 2)):
        row = rows[index]
        row[np.unravel_index(i * 7919 % row.size, row.shape)] = fills[i % 3]
        if i % 4 == 3:
            row[...] = -np.inf
    for name in NAMES:
        check(jax.jit(OPERATORS[name], static_argnums=1)(x, axes), reference(name, x, axes))


@pytest.mark.parametrize(
    "view",
    [
        ((6, 300, 128), (1,)),
        ((6, 3000, 64), (1,)),
        ((6, 1024, 3), (1,)),
        ((6, 16, 4), (1,)),
        ((6, 16, 301), (1,)),
        ((6, 16, 8, 16), (1, 3)),
        ((6, 4, 9, 6), (1, 3)),
        ((6, 2, 4, 3), (1, 3)),
        ((6, 4, 777, 6), (1, 3)),
    ],
    ids=str,
)
def test_bits_do_not_depend_on_the_number_of_kept_elements(view):
    shape, axes = view
    x = normal(shape, "bfloat16")
    for name in NAMES:
        f = jax.jit(lambda x, name=name: OPERATORS[name](x, axes))
        y = np.asarray(f(x))
        for i in range(shape[0]):
            assert_same_bits(f(x[i : i + 1]), y[i : i + 1], name)
        assert_same_bits(f(x), y, name)
        assert_same_bits(jax.jit(jax.vmap(lambda x, name=name: OPERATORS[name](x, tuple(a - 1 for a in axes))))(x), y)


@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
@sampled("view,shared", itertools.product(VIEWS, [64, 99, 163]), 17)
def test_views_as_on_a_chip_without_clusters(view, shared):
    shape, axes = view
    with support.limited(shared_memory_per_block=shared << 10, largest_cluster=1):
        check_all(normal(shape, "bfloat16"), axes)


def chosen(extent, minor, dtype):
    plan = support.plan((3, extent, minor), (1,), dtype=dtype)
    return plan["schedule"], plan["steps"][0]["cluster"]


def boundaries(minor, dtype, longest):
    """The last reduced extents before another schedule, or another number of blocks to a row, takes over."""
    found = set()
    grid = sorted({int(1.3**i) for i in range(60)} | {longest})
    for low, high in itertools.pairwise([n for n in grid if 0 < n <= longest]):
        if chosen(low, minor, dtype) == chosen(high, minor, dtype):
            continue
        while high - low > 1:
            middle = (low + high) // 2
            if chosen(middle, minor, dtype) == chosen(low, minor, dtype):
                low = middle
            else:
                high = middle
        found.add(low)
    return sorted(found)


@sampled(
    "dtype,minor,extent",
    [
        (dtype, minor, extent)
        for dtype in ("bfloat16", "float32")
        for minor in (2, 3, 7, 24, 64, 65)
        for extent in boundaries(minor, dtype, 30_000 if ON_GPU else 1000)
    ],
    7,
)
def test_boundaries(dtype, minor, extent):
    for n in (extent - 1, extent, extent + 1):
        if n > 0:
            check_all(normal((3, n, minor), dtype, seed=n), 1)


@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
@pytest.mark.parametrize(
    "shape,axes",
    [
        (("n", 70_000, 33), (1,)),
        (("n", 130_000, 64), (1,)),
        ((300, "n", 1301, 3), (0, 2)),
        ((12, "n", 131, 9), (0, 2)),
        ((130, "n", 30_001), (0, 2)),
        (("n", 300, 33), (1,)),
    ],
    ids=str,
)
def test_views_exported_for_any_number_of_rows(shape, axes):
    """Without memory to exchange states through: by a kernel where no number of rows needs any, or else by XLA."""
    known = tuple(5 if n == "n" else n for n in shape)
    x, g = normal(known, "bfloat16"), normal(known, "bfloat16", seed=1)

    @jax.jit
    def value_and_vjp(x, g):
        y, vjp = jax.vjp(lambda x: OPERATORS["softmax"](x, axes), x)
        return y, *vjp(g)

    symbolic = jax.ShapeDtypeStruct(jax.export.symbolic_shape(", ".join(map(str, shape))), x.dtype)
    allowed = [jax.export.DisabledSafetyCheck.custom_call("jax_softmax")]
    exported = jax.export.export(value_and_vjp, disabled_checks=allowed)(symbolic, symbolic)
    y, dx = jax.jit(exported.call)(x, g)
    check(y, reference("softmax", x, axes))
    check(dx, reference_vjp("softmax", x, g, axes))


@pytest.mark.skipif(support.device_bytes() < 40 << 30, reason="needs a device with 40 GB")
@pytest.mark.parametrize(
    "shape,axis",
    [
        ((2**20 + 1, 64, 65), 1),
        ((2**29 + 9, 2, 4), 1),
        ((16, 2**28 + 8), 0),
        ((2**18, 2**14 + 16), 0),
        ((5, 2**30 + 3), 0),
        ((2**26 + 3, 3, 7, 5), (1, 3)),
    ],
    ids=str,
)
def test_more_elements_than_32_bits_count(shape, axis):
    """A part of the first, a middle and the last kept elements against the same part alone."""
    make = jax.jit(
        lambda: (
            sum(
                jax.lax.broadcasted_iota(jnp.uint32, shape, d) * np.uint32(m)
                for d, m in zip(range(len(shape)), (7, 13, 29), strict=False)
            )
            % 251
            / 64
        ).astype(jnp.bfloat16)
    )
    x = make()
    y = OPERATORS["softmax"](x, axis)
    kept = 0 if axis else 1
    size = 64
    for begin in sorted({0, shape[kept] // 2 // size * size, shape[kept] - size}):
        part = jax.jit(lambda a, begin=begin: jax.lax.slice_in_dim(a, begin, begin + size, axis=kept))
        expected = reference("softmax", np.asarray(part(x)), axis)
        check(part(y), expected)


@pytest.mark.skipif(support.device_bytes() < 60 << 30, reason="needs a device with 60 GB")
def test_a_segment_of_more_than_31_bits():
    """Rows that depend on their index modulo 8 alone, so that a short view has them all."""
    shape = (2, 2**27 + 8, 16)
    short = normal((2, 8, 16), "bfloat16")
    y = jax.jit(lambda a: OPERATORS["softmax"](jnp.tile(a, (1, shape[1] // 8, 1)), (0, 2)))(short)
    expected = OPERATORS["softmax"](short, (0, 2))
    check(expected, reference("softmax", short, (0, 2)))
    near = jax.jit(lambda y, e: (abs(y.reshape(2, -1, 8, 16) - e[:, None]) <= 2**-7 * e[:, None]).all())
    assert near(y, expected)  # another schedule, which may round the other way
