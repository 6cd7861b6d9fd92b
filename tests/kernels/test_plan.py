"""What a plan promises, whatever it chooses, and the canonical view it works on. Needs no GPU."""

import itertools
import math
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import DEVICES, KERNELS, NAMES, OPS, ROW_OPS, WAYS, plan, sampled

from jax_softmax import _kernels
from jax_softmax.primitives.operators import bind
from jax_softmax.runtime import judge
from jax_softmax.runtime.kernel_spec import described

MOST = 2**63 - 1  # elements
# Far beyond any GPU's memory.
BEYOND_MEMORY = 2**42

every_device = pytest.mark.parametrize("name", DEVICES)
some_devices = sampled("name", DEVICES, 2)


# ---- The view


def visited(view):
    """The offsets of the elements in the order of the view: batch dimensions outside, reduced ones inside."""
    dims = [*view["batch"], *view["reduced"]]
    ranges = [[i * stride for i in range(extent)] for extent, stride in dims]
    return [sum(index) for index in itertools.product(*ranges)]


def test_view_visits_the_documented_order():
    order = visited(plan((2, 3, 4), (0, 2)))
    assert order == [0, 1, 2, 3, 12, 13, 14, 15, 4, 5, 6, 7, 16, 17, 18, 19, 8, 9, 10, 11, 20, 21, 22, 23]


@given(st.data())
def test_view_is_the_reference_permutation(data):
    shape = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=8))
    axes = data.draw(st.sets(st.integers(0, len(shape) - 1)))
    batch = [d for d in range(len(shape)) if d not in axes]
    expected = np.arange(np.prod(shape)).reshape(shape).transpose(*batch, *sorted(axes)).ravel()
    view = plan(shape, sorted(axes))
    assert visited(view) == expected.tolist()
    # Neighbours of one role are merged, so that the roles alternate.
    assert abs(len(view["batch"]) - len([d for d in view["reduced"] if d[0] > 1])) <= 1


def test_view_keeps_dimensions_apart_that_the_mask_tells_apart():
    assert plan((4, 5, 6, 7), (2, 3))["batch"] == [(20, 42)]
    assert plan((4, 5, 6, 7), (2, 3), mask_shape=[1, 5, 1, 7])["batch"] == [(4, 210), (5, 42)]
    assert plan((4, 5, 6, 7), (2, 3), mask_shape=[4, 5, 6, 7])["batch"] == [(20, 42)]


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


class Call:
    """What any plan of a call has to cover and to hold, worked out from the view."""

    def __init__(self, chosen, op, dtype):
        facts = KERNELS[op]
        self.inputs = facts["inputs"]
        self.of_rows = facts["row_results"] + facts["row_numbers"]  # what a row has of its own
        self.bytes = jnp.dtype(dtype).itemsize
        sums = 3 if op.endswith("_and_distances") else 2 if op in ("entropy", "kl_divergence") else 1
        self.state_bytes = ceil_div((1 + sums) * 4, 8) * 8  # a pivot and sums, in float32
        self.width = 16 // self.bytes  # elements of a pack
        self.reduced, self.batch = chosen["reduced"], chosen["batch"]
        self.columns, self.rows = (math.prod(extent for extent, _ in dims) for dims in (self.reduced, self.batch))
        self.extent, self.inner = self.reduced[-1]  # of the innermost reduced dimension, and of a line

    def packs_of_row(self, boundary):
        """Of runs that begin with a whole pack, or up to one element before the next boundary."""
        if not boundary:
            strides = [stride for _, stride in (*self.batch, *self.reduced[:-1])]
            assert all(stride % self.width == 0 for stride in strides)
        before = boundary // self.bytes - 1 if boundary else 0
        return self.columns // self.extent * ceil_div(self.extent + before, self.width)


def ceil_div(a, b):
    return -(-a // b)


def check_staged(fields, steps, scratch, call):
    assert fields["lanes"] * fields["lane_elements"] >= call.columns
    assert steps[0]["blocks"] * fields["rows"] >= call.rows
    element = call.bytes * call.inputs
    assert steps[0]["shared_bytes"] >= fields["rows"] * call.columns * element


def check_registers(fields, steps, scratch, call):
    (step,) = steps
    assert fields["lanes"] * fields["packs"] >= call.packs_of_row(fields["boundary"])
    assert step["blocks"] * (step["threads"] // fields["lanes"]) >= call.rows


def check_chunks(fields, steps, scratch, call):
    step = steps[-1]
    assert fields["chunks"] * fields["share"] >= call.packs_of_row(fields["boundary"])
    assert step["blocks"] * fields["teams"] >= call.rows * fields["chunks"]
    assert fields["teams"] * fields["cluster"] >= fields["chunks"]
    assert step["threads"] >= fields["teams"] * fields["team_threads"]
    assert step["shared_bytes"] >= fields["teams"] * fields["share"] * 16 * call.inputs


def check_ring(fields, steps, scratch, call):
    step = steps[-1]
    assert fields["chunks"] * fields["share"] >= call.packs_of_row(fields["boundary"])
    # The blocks wait for one another, and all rings together hold a row.
    assert step["cooperative"] and step["blocks"] * fields["stages"] >= fields["chunks"]
    assert call.rows * fields["chunks"] < 2**31  # tickets have 32 bits
    assert step["shared_bytes"] >= fields["stages"] * fields["share"] * 16 * call.inputs
    # States of all chunks and a counter behind them, which are cleared before.
    states = call.rows * fields["chunks"] * call.state_bytes
    assert scratch >= states + 8 and steps[0]["blocks"] * steps[0]["threads"] * 8 >= states + 8


def check_twice(fields, steps, scratch, call):
    packs = call.packs_of_row(fields["boundary"])
    assert packs < 2**31  # they are counted in 32 bits
    assert fields["pieces"] * fields["share"] >= packs
    assert steps[0]["blocks"] >= call.rows * fields["pieces"]
    assert steps[1]["blocks"] * steps[1]["threads"] // 32 >= call.rows  # a warp each
    for step in steps[2:]:
        assert step["blocks"] * step["threads"] * fields["finished"] >= call.rows * packs
    assert scratch >= call.rows * fields["pieces"] * call.state_bytes


def check_tile(fields, steps, scratch, call):
    step, fold, packs, lines_at_once = steps[0], fields["fold"], fields["packs"], fields["lines_at_once"]
    twice = "finished" in fields
    reached = call.width - 1 if not fields["aligned"] else 0  # elements
    rows = fields["matrices"] * fields["elements"] + (reached if fold == 1 else 0)
    tiles = ceil_div(call.rows // call.inner, fields["matrices"]) * ceil_div(call.inner, fields["elements"])
    assert step["threads"] >= fields["matrices"] * lines_at_once * packs
    assert packs * call.width >= fold * fields["elements"] + (reached if fold == 1 else 0)
    if fields["aligned"]:
        outer = [stride for _, stride in (*call.batch, *call.reduced) if stride > call.inner]
        assert call.extent * call.inner % call.width == 0 and all(stride % call.width == 0 for stride in outer)
        assert fold > 1 or call.inner % call.width == 0
    # Lines of the tile: each of a block's threads has some.
    one_block = fields.get("one_block", False)
    parts = step["cluster"] if not twice else 1 if one_block else step["blocks"] // tiles
    if not one_block:  # or else one block goes over all
        spans = call.columns // call.extent
        if fold > 1:
            elements = lines_at_once * fields["lines_of_thread"] * (parts // spans) * packs * call.width
            assert elements >= call.extent * call.inner + reached
        else:
            assert lines_at_once * fields["lines_of_thread"] * parts >= call.columns
    assert step["blocks"] >= tiles * parts
    # Packs, then the states that threads in different warps leave, or those of a cluster's blocks, then
    # those of whole rows.
    held = fields["lines_of_thread"] * step["threads"] * 16 * call.inputs if fields["in_shared"] else 0
    entries = ceil_div(lines_at_once, max(1, 32 // packs))
    in_pack = fold > 1 and packs == 1 and fields["aligned"]
    states = entries * fields["matrices"] * fields["elements"] * (1 if in_pack else fold)
    if fields["in_shared"] and parts > 1:
        states = max(states, parts * rows)
    if entries > 1 or parts > 1 or not fields["in_shared"] or call.of_rows:
        assert step["shared_bytes"] >= held + (states + rows) * call.state_bytes
    assert step["shared_bytes"] >= held
    if twice and not one_block:
        assert scratch >= step["blocks"] * rows * call.state_bytes


CHECKS = {
    "registers": check_registers,
    "staged": check_staged,
    "chunks": check_chunks,
    "ring": check_ring,
    "tile": check_tile,
    "twice": check_twice,
}


def check_plan(shape, axes, op, dtype, on, mask_shape=None):
    """As check_one; a failure names the call."""
    try:
        check_one(shape, axes, op, dtype, on, mask_shape)
    except AssertionError as error:
        error.add_note(f"the plan of {op} of {dtype} {shape} along {axes}, mask {mask_shape}, on {on}")
        raise


def check_one(shape, axes, op, dtype, on, mask_shape):
    """Planning ends soon, and what it chose fits the device, with little memory beside the operands."""
    start = time.perf_counter()
    chosen = plan(shape, axes, op, dtype, mask_shape, on)
    assert time.perf_counter() - start < 0.5
    if chosen is None:  # beyond all schedules
        assert math.prod(shape) >= 2**30
        return
    operand = math.prod(shape) * jnp.dtype(dtype).itemsize
    assert 0 <= chosen["scratch_bytes"] <= max(operand // 20, 64 << 10)
    assert chosen["steps"]
    for step in chosen["steps"]:
        assert 0 < step["threads"] <= 1024 and step["threads"] % 32 == 0
        assert 0 <= step["shared_bytes"] <= on["shared_memory_per_block"]
        assert 1 <= step["cluster"] <= on["largest_cluster"]
        assert step["blocks"] > 0 and step["blocks"] % step["cluster"] == 0
        assert step["blocks"] < 2**31 or operand > BEYOND_MEMORY
        assert not step["overlap"] or on["compute_capability"] >= 90  # older kernels cannot wait for the one before
    # And it covers all rows, with room for their elements and states.
    check_room = CHECKS["tile" if "fold" in chosen["fields"] else chosen["schedule"]]
    check_room(chosen["fields"], chosen["steps"], chosen["scratch_bytes"], Call(chosen, op, dtype))


OPERANDS = list(itertools.product(["bfloat16", "float32"], (*OPS, *ROW_OPS)))
LENGTHS = {2**k + d for k in range(25) for d in (-1, 0, 1)} - {0} | {3 * 2**k for k in range(24)}
# Some packs more than warps of threads have.
LENGTHS = sorted(LENGTHS | {width * (256 * k + 4) for width in (2, 4, 8) for k in range(1, 9)})


@some_devices
def test_rows_of_all_lengths(name):
    for (dtype, op), columns, rows in itertools.product(OPERANDS, LENGTHS, (1, 7, 10**5)):
        check_plan((rows, columns), (1,), op, dtype, DEVICES[name])


@some_devices
def test_other_axes_of_all_lengths(name):
    extents = (1, 2, 3, 7, 16, 33, 64, 129, 1000, 4097, 65_536, 1_000_003)
    for (dtype, op), rows, extent, minor in itertools.product(OPERANDS, (1, 19), extents, extents):
        check_plan((rows, extent, minor), (1,), op, dtype, DEVICES[name])
        check_plan((rows, extent, minor), (0, 2), op, dtype, DEVICES[name])


@some_devices
@sampled("shape", [(2, 400, 4001), (3, 6, 1000, 35), (8, 64, 20, 30)], 2, ids=str)
def test_dimensions_that_masks_tell_apart(name, shape):
    dims = range(len(shape))
    some = itertools.chain.from_iterable(itertools.combinations(dims, n) for n in range(1, len(shape)))
    masks = itertools.product((False, True), repeat=len(shape))
    for (dtype, op), axes, masked in itertools.product(OPERANDS, some, masks):
        mask_shape = [n if own else 1 for n, own in zip(shape, masked, strict=True)]
        check_plan(shape, axes, op, dtype, DEVICES[name], mask_shape)


@given(st.data())
def test_shapes_huge_and_odd(data):
    extent = st.one_of(st.integers(1, 40), st.integers(1, 2**20), st.integers(1, MOST))
    shape = data.draw(st.lists(extent, max_size=12).filter(lambda shape: math.prod(shape) <= MOST))
    axes = sorted(data.draw(st.sets(st.sampled_from(range(len(shape)))))) if shape else []
    masked = data.draw(st.none() | st.lists(st.booleans(), min_size=len(shape), max_size=len(shape)))
    mask_shape = None if masked is None else [n if own else 1 for n, own in zip(shape, masked, strict=True)]
    dtype, op = data.draw(st.sampled_from([*OPERANDS, *itertools.product(["float16"], NAMES)]))
    check_plan(shape, axes, op, dtype, DEVICES[data.draw(st.sampled_from(list(DEVICES)))], mask_shape)


HUGE = [
    ((2**33, 5, 401), (1,)),
    ((2**32, 5, 401), (1,)),
    ((MOST,), (0,)),
    ((MOST,), ()),
    ((1, MOST), (0,)),
    ((3, MOST // 3), (0,)),
    ((3, MOST // 3), (1,)),
    ((2**31 - 1, 2**31 + 1), (0,)),
    ((3, 2**35), (1,)),
    ((3, 2**33 + 1), (1,)),
    ((2**26, 300_001), (1,)),
    ((2, 2**20, 2**20, 2**20), (1, 3)),
    ((2**5,) * 12, (0, 2, 4, 6, 8, 10)),
    ((2**5,) * 12, (1, 3, 5, 7, 9, 11)),
    ((7, 5, 3, 7, 5, 3, 7, 5, 3, 7, 5, 3), (0, 3, 6, 9)),
]


@every_device
def test_planning_ends_for(name):
    for (shape, axes), (dtype, op) in itertools.product(HUGE, OPERANDS):
        check_plan(shape, axes, op, dtype, DEVICES[name])


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("op", ["softmax", "softmax_linear"])
def test_a_program_has_scratch_memory_for_every_device(op, way):
    """It is lowered before it is known which of them will run it."""
    call = described(op, way.shape, way.axes, "bfloat16")
    plans = [way.plan(op, on=on) for on in DEVICES.values()]
    if judge.reason_on_all_gpus(call):
        assert all(plan["why_xla"] for plan in plans)
        return
    lowered = judge.scratch_bytes(call)
    assert all(plan["scratch_bytes"] <= lowered for plan in plans)
    assert lowered <= max(math.prod(way.shape) * 2 // 20, 64 << 10)


def test_a_program_is_judged_for_the_gpus_that_are_here(monkeypatch):
    """Where there are none, for all kinds. The kernels that it calls begin to be made."""
    call = described("softmax_linear", (2, 300_000), (1,), "bfloat16")
    for names, wins in ([], True), (["H200"], True), (["T4"], False), (["T4", "H200"], True):
        begun = set()
        here = [tuple(DEVICES[name].values()) for name in names]
        monkeypatch.setattr(_kernels, "devices_here", lambda here=here: here)
        monkeypatch.setattr(_kernels, "jit_prepare", lambda code, plan, capability, begun=begun: begun.add(capability))
        assert (not judge.reason_on_all_gpus(call)) == wins and not begun
        f = jax.jit(lambda *a: bind("softmax_linear", *a, where=None, axes=(1,)))
        f.trace(*[jax.ShapeDtypeStruct((2, 300_000), jnp.bfloat16)] * 2).lower(lowering_platforms=("cuda",))
        assert begun == {device[0] for device in here if wins}


# ---- What is added up does not depend on the number of rows: which threads have which elements of a row


def cut(chosen):
    """How a row is cut up, whatever number of chunks a block or a ring has."""
    fields = chosen["fields"]
    if chosen["schedule"] in ("chunks", "ring"):
        return "chunks", *(fields[name] for name in ("chunks", "share", "team_threads", "boundary"))
    return chosen["schedule"], fields


def check_cut_alike(shape, axes, op, dtype, name):
    """However many rows there are, of a shape that begins with their number."""
    plans = (plan((rows, *shape[1:]), axes, op, dtype, on=DEVICES[name]) for rows in (1, 2, 8, 50, 1000, 10**6))
    first, *others = map(cut, plans)
    assert others == [first] * len(others), (shape, axes, op, dtype, name)


@every_device
def test_rows_are_cut_alike_however_many_there_are(name):
    lengths = [3, 64, 1999, 8192, 30_000, 41_325, 50_257, 60_001, 151_936, 1 << 20, 5_000_001, 1 << 24, 1 << 26]
    for (dtype, op), columns in itertools.product(OPERANDS, lengths):
        check_cut_alike((1, columns), (1,), op, dtype, name)


@every_device
def test_other_views_are_cut_alike_however_many_there_are(name):
    views = [(w.shape, w.axes) for w in WAYS if w.axes == (1,) and len(w.shape) == 3]
    views += [((1, 70_000, 33), (1,)), ((1, 1_000_003, 2), (1,)), ((1, 16, 9, 1024), (1, 3))]
    views += [((1, 301, 2, 33, 33), (1, 3))]
    ops = ["softmax", "softmax_linear", "log_softmax_vjp", *ROW_OPS]
    for op, dtype, (shape, axes) in itertools.product(ops, ["bfloat16", "float32"], views):
        check_cut_alike(shape, axes, op, dtype, name)
