"""What the plan chooses for rows that are not runs of memory: slabs, strips and tiles."""

import itertools
import math

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import A100, H200, RTX5090, T4, plan

from jax_softmax import _kernels


@pytest.mark.parametrize(
    "shape,axes,schedule,cluster",
    [
        ((64, 1024, 256), (1,), "tile", 2),
        ((64, 4096, 256), (1,), "tile", 8),
        ((1 << 18, 1024), (0,), "tile_passes", 1),
        ((256, 1024, 256), (0, 2), "tile", 4),
        ((64, 1024, 256), (1, 2), "ring", 1),
        ((16384, 16384), (0,), "tile", 16),
        ((32768, 8192), (0,), "tile_passes", 1),
        ((128, 64, 256, 256), (0, 2), "tile_passes", 1),
        ((64, 1 << 18, 2), (1,), "tile_passes", 1),
        ((64, 1 << 16, 2), (1,), "tile", 8),
        ((1000, 16, 4), (1,), "slab", 1),
        ((1000, 20, 3), (1,), "strips", 1),
        ((1000, 48, 10), (1,), "slab", 1),
        ((1000, 65, 7), (1,), "tile", 1),
        ((1000, 250, 3), (1,), "slab", 1),
        ((1000, 260, 3), (1,), "slab", 1),
        ((1000, 2, 2), (1,), "packs", 1),
        ((1000, 1024, 3), (1,), "tile", 1),
        ((100, 1001, 1001), (1,), "tile", 4),
        ((64, 20, 301), (1,), "strips", 1),
        ((3, 63, 7, 1001), (0, 2), "strips", 1),
        ((21, 4, 777, 3), (1, 3), "strips", 1),
        ((21, 8, 777, 13), (1, 3), "strips", 1),
        ((21, 25, 777, 3), (1, 3), "tile", 1),
        ((21, 4, 800, 3), (1, 3), "strips", 1),
        ((21, 5, 800, 3), (1, 3), "tile", 1),
        ((1001, 2, 9, 5), (1, 3), "strips", 1),
        ((1001, 2, 3, 2, 3), (1, 3), "strips", 1),
        ((1001, 2, 3, 2, 3), (2, 4), "strips", 1),
        ((1, 2, 9, 5), (1, 3), "strips", 1),
        ((1001, 8, 16, 8), (1, 3), "tile", 1),
        ((1001, 10, 20, 3), (1, 3), "tile", 1),
        ((21, 3, 777, 65), (1, 3), "tile", 1),
        ((12, 63, 65, 127), (0, 2), "tile", 3),
        ((300, 63, 650, 127), (0, 2), "tile_passes", 1),
        ((300, 100, 1001), (0, 2), "tile", 15),
        ((400, 100, 1001), (0, 2), "tile_passes", 1),
        ((12, 63, 650, 7), (0, 2), "tile_passes", 1),
        ((300, 63, 41, 7), (0, 2), "tile_passes", 1),
        ((256, 1001, 3, 11), (1, 3), "tile", 3),
        ((7, 63, 997, 3, 5), (0, 2, 4), "tile_passes", 1),
        ((256, 100_001, 9), (1,), "tile_passes", 1),
        ((100, 400, 201, 45), (1, 3), "tile", 7),
        ((20, 100_000, 5, 11), (1, 3), "tile_passes", 1),
        ((4, 100_000, 16, 4), (1, 3), "tile_passes", 1),
        ((64, 1000, 16, 4), (1, 3), "tile", 1),
    ],
)
def test_other_axes(shape, axes, schedule, cluster):
    chosen = plan(shape, axes)
    assert (chosen["schedule"], chosen["cluster"]) == (schedule, cluster)


@pytest.mark.parametrize("device", [H200, T4, A100, RTX5090], ids=["H200", "T4", "A100", "RTX5090"])
@pytest.mark.parametrize("op", ["softmax", "softmax_linear"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_scratch_holds_the_states_of_a_tile_of_pieces(dtype, op, device):
    for shape, axes in [
        ((1 << 18, 1024), (0,)),
        ((3, 70_000, 7), (1,)),
        ((300, 3, 30_001), (0, 2)),
        ((5000, 999), (0,)),
    ]:
        plan_ = plan(shape, axes, op, dtype, device=device)
        assert plan_["schedule"] in ("tile", "tile_passes")
        state = 16 if dtype == "float64" else 8
        if plan_["scratch"]:
            needed = plan_["rows"] * plan_["chunks"] * state
            assert needed <= _kernels.scratch_bytes(list(shape), list(axes), op, dtype) <= 4 * needed + 2**20


@pytest.mark.parametrize(
    "shape,axes,dtype,mask_shape",
    [
        ((4_300_000, 3, 31, 2), (0, 2), "float16", None),
        ((4_300_000, 9, 2), (0, 1), "float16", (4_300_000, 1, 1)),
        ((8_500_000, 3, 5, 3), (0, 2), "float32", None),
        ((63_818, 7, 17, 2), (0, 2), "float32", None),
        ((28_560, 31, 2), (0, 1), "float16", (28_560, 1, 1)),
        ((157, 65, 2, 6034), (0, 2), "bfloat16", (157, 1, 2, 6034)),
        ((300, 2, 41, 7), (0, 2), "bfloat16", None),
    ],
    ids=str,
)
def test_states_of_many_sets_take_less_room_than_the_operand(shape, axes, dtype, mask_shape):
    for op in ("softmax", "softmax_linear"):
        size = _kernels.scratch_bytes(list(shape), list(axes), op, dtype, mask_shape and list(mask_shape))
        assert size <= math.prod(shape) * (2 if dtype.endswith("16") else 4)


def test_plans_that_are_kept_and_made_anew_are_the_same():
    """Of tiles, which more than are kept come between."""
    first = [plan((99, n, 11), (1,), device=device) for n in (300, 301) for device in (H200, T4)]
    assert all(a != b for a, b in itertools.combinations(first, 2))
    for n in range(1000, 2100):
        plan((9, n, 7), (1,))
    for _ in range(2):
        assert [plan((99, n, 11), (1,), device=device) for n in (300, 301) for device in (H200, T4)] == first


@pytest.mark.parametrize("op", ["softmax", "softmax_linear"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
@pytest.mark.parametrize(
    "shape",
    [
        (999, 1024, 2),
        (999, 1024, 3),
        (99, 8192, 7),
        (99, 300, 11),
        (64, 1024, 1024),
        (64, 1023, 1023),
        (64, 4096, 1024),
    ],
    ids=str,
)
def test_three_tiles_at_once(shape, dtype, op):
    """So that while one waits for memory, or for its cluster, others have something to do."""
    chosen = plan(shape, (1,), op, dtype)
    assert chosen["schedule"] == "tile"
    assert H200["shared_memory_per_block"] // (chosen["shared_bytes"] + 1024) >= 3


@pytest.mark.parametrize("device", [H200, T4], ids=["H200", "T4"])
@pytest.mark.parametrize("op", ["softmax", "softmax_linear"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_strips_have_threads_for_their_columns(dtype, op, device):
    for lines in range(2, 33 if dtype == "bfloat16" and op == "softmax" else 25):
        for minor in (1537, 1869, 2039, 2041, 2043, 4097, 10_001, 1_000_001):
            chosen = plan((9, lines, minor), (1,), op, dtype, device=device)
            assert chosen["schedule"] == "strips"
            assert chosen["packs"] >= lines
            assert 32 <= chosen["threads"] <= 256 and chosen["threads"] % 32 == 0
            assert chosen["shared_bytes"] <= 47 << 10  # a chip gives 48 KB without being asked
            at_once = device["shared_memory_per_block"] // (chosen["shared_bytes"] + 1024)
            assert 2 * chosen["threads"] > 256 or chosen["threads"] * at_once >= 384


@pytest.mark.parametrize("device", [H200, T4], ids=["H200", "T4"])
@pytest.mark.parametrize("op", ["softmax", "softmax_linear"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_strips_of_runs_hold_whole_rows(dtype, op, device):
    for lines, run in itertools.product((2, 3, 5, 8, 12), (2, 3, 5, 9, 13, 16)):
        for between in (777, 1001, 100_001):
            chosen = plan((9, lines, between, run), (1, 3), op, dtype, device=device)
            whole_packs = between * run * np.dtype(jnp.dtype(dtype)).itemsize % 16 == 0
            assert (chosen["schedule"] == "strips") != whole_packs
            if whole_packs:
                continue
            assert chosen["lanes"] in (1, 2, 4, 8)
            assert chosen["packs"] * chosen["lanes"] >= lines * run
            assert chosen["packs"] * chosen["lanes"] < 2 * lines * run + 8
            assert 32 <= chosen["threads"] <= 256 and chosen["threads"] % 32 == 0
            assert chosen["shared_bytes"] <= 47 << 10


def test_ragged_lines_have_wider_tiles():
    """Of lines that begin in the middle of a sector, two tiles have a half of the sector between them."""
    aligned, ragged = (plan((64, 1024, n), (1,)) for n in (1024, 1028))
    assert ragged["lanes"] // ragged["cluster"] < aligned["lanes"] // aligned["cluster"]


@pytest.mark.parametrize("op", ["softmax", "softmax_linear"])
@pytest.mark.parametrize("dtype,minor", [("bfloat16", 16), ("bfloat16", 32), ("float32", 8), ("float32", 16)])
def test_narrow_lines_that_are_read_twice_occupy_all_threads(dtype, minor, op):
    chosen = plan((1_000_001, minor), (0,), op, dtype)
    assert chosen["schedule"] == "tile_passes"
    line_packs = minor * (2 if dtype == "bfloat16" else 4) // 16
    assert chosen["lanes"] * line_packs == chosen["threads"] * chosen["blocks"]


def test_positions_in_a_segment_are_counted_in_32_bits():
    """Runs side by side are one segment, unless that is too long: then a tile has runs of their own."""
    assert plan((2, 1 << 20, 16), (0, 2))["edges"] == "none"
    assert plan((2, (1 << 27) + 8, 16), (0, 2))["edges"] == "parts"


def test_interleaved_rows_fit_the_smallest_device():
    for inner in (3, 5, 7, 9, 11, 13, 15):
        for columns in range(2, 513, 17):
            chosen = plan((1000, columns, inner), (1,), "softmax_linear", "bfloat16", device=T4)
            assert chosen["shared_bytes"] <= T4["shared_memory_per_block"]


@given(st.data())
def test_other_axes_fit_the_device(data):
    shape = data.draw(st.lists(st.sampled_from([2, 3, 8, 16, 17, 64, 100, 257, 1024, 5000]), min_size=2, max_size=5))
    axes = data.draw(st.sets(st.integers(0, len(shape) - 1), min_size=1))
    device = data.draw(st.sampled_from([H200, T4, A100, RTX5090]))
    op = data.draw(st.sampled_from(["softmax", "softmax_linear"]))
    dtype = data.draw(st.sampled_from(["bfloat16", "float32", "float64"]))
    mask = data.draw(st.one_of(st.none(), st.tuples(*[st.sampled_from([1, n]) for n in shape])))
    if math.prod(shape) > 1 << 32:
        return
    chosen = plan(shape, sorted(axes), op, dtype, mask_shape=None if mask is None else list(mask), device=device)
    assert chosen["shared_bytes"] <= device["shared_memory_per_block"]
    assert chosen["cluster"] <= device["largest_cluster"]
    assert 0 < chosen["threads"] <= 1024 and chosen["threads"] % 32 == 0
    assert 0 < chosen["blocks"] < 1 << 31 and chosen["blocks"] % chosen["cluster"] == 0


@pytest.mark.parametrize("op", ["softmax", "softmax_linear"])
def test_runs_that_begin_alike_share_a_set(op):
    """However many indices the dimensions have that they belong to, there are no more sets than ways to begin."""
    for outer in (100, 1000, 1001):
        chosen = plan((outer, 401, 11, 63), (0, 2), op, "bfloat16")
        assert (chosen["schedule"], chosen["chunks"]) == ("tile_passes", 8)
