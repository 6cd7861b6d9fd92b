"""What a plan promises, whatever it chooses, and the canonical view it works on. Needs no GPU."""

import itertools
import math
import time

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import DEVICES, NAMES, NARROW, OPS, ROW_OPS, TWO_OPERANDS, WAYS, kernel_names, plan

from jax_softmax import _kernels

MOST = 2**63 - 1  # elements
# Far beyond any GPU's memory.
BEYOND_MEMORY = 2**42

every_device = pytest.mark.parametrize("name", DEVICES)


# ---- The view


def visited(view):
    """The offsets of the elements in the order of the view: kept dimensions outside, reduced ones inside."""
    dims = [*view["kept"], *view["reduced"]]
    ranges = [[i * stride for i in range(extent)] for extent, stride in dims]
    return [sum(index) for index in itertools.product(*ranges)]


def test_view_visits_the_documented_order():
    order = visited(plan((2, 3, 4), (0, 2)))
    assert order == [0, 1, 2, 3, 12, 13, 14, 15, 4, 5, 6, 7, 16, 17, 18, 19, 8, 9, 10, 11, 20, 21, 22, 23]


@given(st.data())
def test_view_is_the_reference_permutation(data):
    shape = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=8))
    axes = data.draw(st.sets(st.integers(0, len(shape) - 1)))
    kept = [d for d in range(len(shape)) if d not in axes]
    expected = np.arange(np.prod(shape)).reshape(shape).transpose(*kept, *sorted(axes)).ravel()
    view = plan(shape, sorted(axes))
    assert visited(view) == expected.tolist()
    # Neighbours of one role are merged, so that the roles alternate.
    assert abs(len(view["kept"]) - len([d for d in view["reduced"] if d[0] > 1])) <= 1


def test_view_keeps_dimensions_apart_that_the_mask_tells_apart():
    assert plan((4, 5, 6, 7), (2, 3))["kept"] == [(20, 42)]
    assert plan((4, 5, 6, 7), (2, 3), mask_shape=[1, 5, 1, 7])["kept"] == [(4, 210), (5, 42)]
    assert plan((4, 5, 6, 7), (2, 3), mask_shape=[4, 5, 6, 7])["kept"] == [(20, 42)]


@pytest.mark.parametrize(
    "arguments,match",
    [
        (((2, 3), (2,)), "axes must be distinct"),
        (((2, 3), (1, 1)), "axes must be distinct"),
        (((2,) * 13, (0,)), "12 dimensions"),
        (((2**62, 4), (0,)), "2\\^63 elements or more"),
        (((2**40, 2**40), (1,)), "2\\^63 elements or more"),
        (((2, -3), (1,)), "must not be negative"),
    ],
)
def test_bad_views_are_refused(arguments, match):
    with pytest.raises(ValueError, match=match):
        plan(*arguments)


def test_bad_masks_are_refused():
    with pytest.raises(ValueError, match="must be 1 or 3"):
        plan((2, 3), (1,), mask_shape=[1, 2])


def test_empty_arrays_have_no_plan():
    assert plan((0, 5), (1,)) is None and plan((2**62, 0, 2**62), (0,)) is None


# ---- The plan


def check_plan(shape, axes, op, dtype, on, mask_shape=None, scratch=True):
    """Planning ends soon, and what it chose fits the device, with little memory beside the operands."""
    start = time.perf_counter()
    chosen = plan(shape, axes, op, dtype, mask_shape, on, scratch)
    assert time.perf_counter() - start < 0.5
    if chosen is None:  # beyond all schedules
        assert math.prod(shape) >= 2**30
        return
    operand = math.prod(shape) * jnp.dtype(dtype).itemsize
    assert 0 <= chosen["scratch_bytes"] <= (max(operand // 20, 64 << 10) if scratch else 0)
    assert chosen["steps"]
    for step in chosen["steps"]:
        assert 0 < step["threads"] <= 1024 and step["threads"] % 32 == 0
        assert 0 <= step["shared_bytes"] <= on["shared_memory_per_block"]
        assert 1 <= step["cluster"] <= on["largest_cluster"]
        assert step["blocks"] > 0 and step["blocks"] % step["cluster"] == 0
        assert step["blocks"] < 2**31 or operand > BEYOND_MEMORY
    check_room(chosen, op, dtype)


def check_room(chosen, op, dtype):
    """Its threads have all elements of all rows, wherever those begin, and its memory what they hold of them."""
    f, (*_, last), first = chosen["fields"], chosen["steps"], chosen["steps"][0]
    in_bytes, inputs = jnp.dtype(dtype).itemsize, 2 if op in TWO_OPERANDS else 1
    out_bytes = 4 if dtype == "int8" else in_bytes
    numbers = 3 if op in ("entropy", "kl_divergence") else 2  # of a state, in words of 8 bytes
    state = -(-numbers * max(in_bytes, out_bytes, 4) // 8) * 8
    width = 16 // in_bytes
    pack = 16 * inputs
    kept, reduced = chosen["kept"], chosen["reduced"]
    rows, columns = (math.prod(extent for extent, _ in dims) for dims in (kept, reduced))
    scratch, shared = chosen["scratch_bytes"], last["shared_bytes"]
    if "elements" in f:
        return check_room_of_tile(chosen, rows, columns, width, pack, state)
    if chosen["schedule"] == "staged":
        assert last["blocks"] * f["rows"] >= rows
        assert f["lanes"] * f["held"] + f["pairs"] >= columns and f["threads"] % f["lanes"] == 0
        results = 0 if in_bytes == out_bytes else out_bytes
        assert shared >= f["rows"] * columns * (in_bytes * inputs + results)
        return
    if kernel_names(chosen) == ["rows_in_packs"]:
        assert last["blocks"] * f["threads"] * (width // columns) >= rows
        return
    run = reduced[-1][0]
    strides = [stride for _, stride in (*kept, *reduced[:-1])] + [run] * (len(reduced) == 1)
    if f["boundary"] == 0:
        assert all(n % width == 0 for n in strides)
    packs = -(-(run + max(f["boundary"] // in_bytes - 1, 0)) // width) * (columns // run)
    if chosen["schedule"] == "registers":
        assert f["lanes"] * f["packs"] >= packs and last["blocks"] * (f["threads"] // f["lanes"]) >= rows
    elif chosen["schedule"] == "twice":
        assert f["pieces"] * f["share"] >= packs and packs < 2**31
        if f["one_block"]:
            assert last["blocks"] == rows
        else:
            assert first["blocks"] == rows * f["pieces"] and scratch >= rows * f["pieces"] * state
            if kernel_names(chosen)[-1] == "finish_pieces":
                assert last["blocks"] * f["finished"] * f["threads"] >= rows * packs
    else:
        assert f["chunks"] * f["share"] >= packs
        stages = f["stages"] if chosen["schedule"] == "ring" else f["teams"]
        assert shared >= stages * f["share"] * pack
        if chosen["schedule"] == "chunks":
            assert last["blocks"] * f["teams"] >= rows * f["chunks"]
            assert f["cluster"] * f["teams"] >= f["chunks"] or f["through_memory"]
        if chosen["schedule"] == "ring" or f["through_memory"]:
            words = rows * f["chunks"] * state // 8 + 1  # and a counter
            assert scratch >= 8 * words and first["blocks"] * first["threads"] >= words


def check_room_of_tile(chosen, rows, columns, width, pack, state):
    f, (*_, last), first = chosen["fields"], chosen["steps"], chosen["steps"][0]
    inner = chosen["reduced"][-1][1]
    reached = 0 if f["aligned"] or f["fold"] > 1 else width - 1
    if f["fold"] > 1:
        assert f["elements"] == inner and f["packs"] * width == inner * f["fold"]
    else:
        assert f["packs"] * width >= f["elements"] + reached
    assert f["threads"] >= f["arrays"] * f["groups"] * f["packs"]
    tiles = -(-rows // inner // f["arrays"]) * -(-inner // f["elements"])
    tile_rows = f["arrays"] * f["elements"] + reached
    parts = first["blocks"] // tiles
    lines = parts * f["groups"] * f["turns"]  # if folded, of so many packs that have no gaps between them
    if first is not last or f["held"]:
        assert lines * f["packs"] * width >= columns * inner if f["fold"] > 1 else lines >= columns
    if f["held"]:
        states = (parts + 1) * tile_rows if parts > 1 else 0
        assert last["shared_bytes"] >= f["turns"] * f["threads"] * pack + states * state
    elif not f["one_block"]:
        assert chosen["scratch_bytes"] >= tiles * tile_rows * parts * state


OPERANDS = [
    *itertools.product(["bfloat16", "float32", "float64"], OPS),
    *[("int8", "softmax"), ("float8_e5m2", "log_softmax")],
    *[("bfloat16", "entropy"), ("float32", "kl_divergence"), ("float64", "kl_divergence")],
]
LENGTHS = sorted({2**k + d for k in range(25) for d in (-1, 0, 1)} - {0} | {3 * 2**k for k in range(24)})


@every_device
@pytest.mark.parametrize("dtype,op", OPERANDS)
@pytest.mark.parametrize("scratch", [True, False])
def test_rows_of_all_lengths(name, op, dtype, scratch):
    for columns in LENGTHS:
        for rows in (1, 7, 10**5):
            check_plan((rows, columns), (1,), op, dtype, DEVICES[name], scratch=scratch)


@pytest.mark.parametrize("dtype,op", OPERANDS)
def test_rows_of_neighbouring_lengths(op, dtype):
    """Which begin anywhere in a pack, and end anywhere."""
    for columns in itertools.chain(range(1, 2100), range(8100, 8220), range(50_240, 50_260)):
        check_plan((7, columns), (1,), op, dtype, DEVICES["H200"])
    for run in range(1, 100):
        check_plan((5, 3, 7, run), (1, 3), op, dtype, DEVICES["H200"])


def test_elements_are_counted_in_as_many_bits_as_it_takes():
    for rows, wide in ((2**21 - 1, 0), (2**21, 1), (2**21 + 1, 1)):
        assert f"kWide = {wide};" in plan((rows, 1024), (1,))["steps"][0]["code"]


@every_device
@pytest.mark.parametrize("dtype,op", OPERANDS)
def test_other_axes_of_all_lengths(name, op, dtype):
    extents = (1, 2, 3, 7, 16, 33, 64, 129, 1000, 4097, 65_536, 1_000_003)
    for rows, extent, minor in itertools.product((1, 19), extents, extents):
        check_plan((rows, extent, minor), (1,), op, dtype, DEVICES[name])
        check_plan((rows, extent, minor), (0, 2), op, dtype, DEVICES[name])


@given(st.data())
def test_shapes_huge_and_odd(data):
    extent = st.one_of(st.integers(1, 40), st.integers(1, 2**20), st.integers(1, MOST))
    shape = data.draw(st.lists(extent, max_size=12).filter(lambda shape: math.prod(shape) <= MOST))
    axes = sorted(data.draw(st.sets(st.sampled_from(range(len(shape)))))) if shape else []
    masked = data.draw(st.none() | st.lists(st.booleans(), min_size=len(shape), max_size=len(shape)))
    mask_shape = None if masked is None else [n if own else 1 for n, own in zip(shape, masked, strict=True)]
    dtype, op = data.draw(st.sampled_from([*OPERANDS, *itertools.product(("float16", *NARROW), NAMES)]))
    name, scratch = data.draw(st.sampled_from(list(DEVICES))), data.draw(st.booleans())
    check_plan(shape, axes, op, dtype, DEVICES[name], mask_shape, scratch)


@every_device
@pytest.mark.parametrize(
    "shape,axes",
    [
        ((2**33, 5, 401), (1,)),
        ((2**32, 5, 401), (1,)),
        ((MOST,), (0,)),
        ((MOST,), ()),
        ((1, MOST), (0,)),
        ((3, MOST // 3), (0,)),
        ((3, MOST // 3), (1,)),
        ((2**31 - 1, 2**31 + 1), (0,)),
        ((2, 2**20, 2**20, 2**20), (1, 3)),
        ((2**5,) * 12, (0, 2, 4, 6, 8, 10)),
        ((2**5,) * 12, (1, 3, 5, 7, 9, 11)),
        ((7, 5, 3, 7, 5, 3, 7, 5, 3, 7, 5, 3), (0, 3, 6, 9)),
    ],
    ids=str,
)
def test_planning_ends_for(shape, axes, name):
    for dtype, op in OPERANDS:
        check_plan(shape, axes, op, dtype, DEVICES[name])


@pytest.mark.parametrize("way", [way for way in WAYS if way.scratch], ids=str)
@pytest.mark.parametrize("op", ["softmax", "softmax_linear"])
def test_a_program_has_scratch_memory_for_every_device(op, way):
    """It is lowered before it is known which of them will run it."""
    lowered = _kernels.lower_for_cuda(list(way.shape), list(way.axes), op, "bfloat16")
    plans = [way.plan(op, on=on) for on in DEVICES.values()]
    if lowered is None:  # it is XLA's
        assert not any(plan["faster_than_xla"] for plan in plans)
        return
    assert all(plan["scratch_bytes"] <= lowered for plan in plans)
    assert lowered <= max(math.prod(way.shape) * 2 // 20, 64 << 10)


# ---- What is added up does not depend on the number of rows: which threads have which elements of a row


def cut(chosen):
    """How a row is cut up; blocks of chunks may exchange what they have by other ways."""
    fields = chosen["fields"]
    if chosen["schedule"] in ("chunks", "ring"):
        return "chunks", *(fields[name] for name in ("chunks", "share", "team_threads", "boundary"))
    return chosen["schedule"], fields


ROWS = (1, 2, 8, 50, 1000, 10**6)


@every_device
@pytest.mark.parametrize("op", (*OPS, *ROW_OPS))
@pytest.mark.parametrize("dtype", ["int8", "bfloat16", "float32", "float64"])
def test_rows_are_cut_alike_however_many_there_are(name, op, dtype):
    lengths = [3, 64, 1999, 8192, 30_000, 41_325, 50_257, 60_001, 151_936, 1 << 20, 5_000_001, 1 << 24, 1 << 26]
    for columns in lengths:
        # A single row begins with a whole pack, whatever its length.
        many = ROWS if columns % 8 == 0 else ROWS[1:]
        first, *others = (cut(plan((rows, columns), (1,), op, dtype, on=DEVICES[name])) for rows in many)
        assert others == [first] * len(others), columns


@every_device
@pytest.mark.parametrize("op", ["softmax", "softmax_linear", "log_softmax_vjp", *ROW_OPS])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    "shape,axes",
    [(w.shape, w.axes) for w in WAYS if w.axes == (1,) and len(w.shape) == 3]
    + [((1, 70_000, 33), (1,)), ((1, 1_000_003, 2), (1,)), ((1, 16, 9, 1024), (1, 3)), ((1, 301, 2, 33, 33), (1, 3))],
    ids=str,
)
def test_other_views_are_cut_alike_however_many_there_are(name, op, dtype, shape, axes):
    first, *others = (cut(plan((n, *shape[1:]), axes, op, dtype, on=DEVICES[name])) for n in ROWS)
    assert others == [first] * len(others)
