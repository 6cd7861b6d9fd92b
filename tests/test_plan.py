"""What the plan chooses, and the canonical view it works on: plain C++, so asserted without a GPU."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import A100, H200, RTX5090, T4, plan

from jax_softmax import _kernels


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
    assert view["rows"] * view["columns"] == expected.size
    # Neighbours of one role are merged, so that the roles alternate.
    assert abs(len(view["kept"]) - len([d for d in view["reduced"] if d[0] > 1])) <= 1


def test_view_keeps_dimensions_apart_that_the_mask_tells_apart():
    assert plan((4, 5, 6, 7), (2, 3))["kept"] == [(20, 42)]
    assert plan((4, 5, 6, 7), (2, 3), mask_shape=[1, 5, 1, 7])["kept"] == [(4, 210), (5, 42)]
    assert plan((4, 5, 6, 7), (2, 3), mask_shape=[4, 5, 6, 7])["kept"] == [(20, 42)]


@pytest.mark.parametrize(
    "columns,dtype,schedule,edges,chunks",
    [
        (1, "float32", "packs", "parts", 0),
        (4, "bfloat16", "packs", "parts", 0),
        (3, "float32", "slab", "parts", 0),
        (31, "bfloat16", "slab", "parts", 0),
        (32, "bfloat16", "lanes", "none", 0),
        (33, "bfloat16", "slab", "parts", 0),
        (24, "bfloat16", "lanes", "whole", 0),
        (511, "float32", "slab", "parts", 0),
        (513, "float32", "lanes", "parts", 0),
        (2048, "bfloat16", "lanes", "none", 0),
        (2049, "bfloat16", "block", "parts", 0),
        (8192, "bfloat16", "block", "none", 0),
        (8191, "bfloat16", "chunks", "parts", 1),
        (16384, "bfloat16", "block", "none", 0),
        (16385, "bfloat16", "chunks", "parts", 2),
        (16384, "float32", "chunks", "whole", 4),
        (8192, "float64", "block", "none", 0),
        (8194, "float64", "chunks", "parts", 4),
        (10_000, "float64", "chunks", "whole", 5),
        (40_000, "float64", "ring", "whole", 20),
        (32768, "bfloat16", "chunks", "whole", 4),
        (32776, "bfloat16", "chunks", "parts", 4),
        (40_000, "bfloat16", "chunks", "whole", 5),
        (65_544, "bfloat16", "chunks", "parts", 8),
        (1 << 17, "bfloat16", "chunks", "whole", 16),
        (1 << 18, "bfloat16", "ring", "parts", 29),
        (1 << 20, "bfloat16", "ring", "whole", 128),
        (1 << 24, "bfloat16", "ring", "whole", 2048),
        (12008, "bfloat16", "chunks", "whole", 2),
        (8192, "float32", "block", "none", 0),
        (7000, "float32", "block", "whole", 0),
        (1 << 24, "float32", "passes", "parts", 512),
        (1 << 27, "bfloat16", "passes", "parts", 512),
    ],
)
def test_row_schedules(columns, dtype, schedule, edges, chunks):
    chosen = plan((1000, columns), (1,), dtype=dtype)
    assert (chosen["schedule"], chosen["edges"], chosen["chunks"]) == (schedule, edges, chunks)


@pytest.mark.parametrize(
    "rows,columns,schedule,cluster",
    [(1000, 65536, "chunks", 4), (1000, 151936, "chunks", 10), (1000, 262144, "chunks", 16), (1000, 262152, "ring", 1)],
)
def test_row_schedules_of_two_operands(rows, columns, schedule, cluster):
    chosen = plan((rows, columns), (1,), "softmax_linear", "bfloat16")
    assert (chosen["schedule"], chosen["cluster"]) == (schedule, cluster)


def test_rings_read_fewer_chunks_twice_where_a_sum_reads_one_operand():
    for op, longest in (("softmax_linear", 1 / 2), ("log_softmax_vjp", 1 / 8)):
        seen = set()
        for columns in range(1 << 22, 1 << 24, 1 << 18):
            chosen = plan((16, columns), (1,), op, "bfloat16")
            seen.add(chosen["schedule"])
            if chosen["schedule"] == "ring":
                assert chosen["again"] <= longest * chosen["chunks"]
        assert seen == {"ring", "passes"}


@pytest.mark.parametrize("rows", [1, 64])
@pytest.mark.parametrize("op", ["softmax_linear", "log_softmax_vjp"])
def test_long_odd_rows_of_two_operands(op, rows):
    """Rings read them once, however many there are, unless two passes take less time."""
    for columns in (1_048_577, 1_500_001, 2_097_153, 2_400_001):
        once = op == "softmax_linear" or columns < 2_200_000
        assert (plan((rows, columns), (1,), op)["schedule"] != "passes") == once


@pytest.mark.parametrize(
    "op,dtype,columns,blocks",
    [
        ("softmax", "float32", 8192, 2),
        ("softmax", "bfloat16", 10240, 4),
        ("softmax_linear", "bfloat16", 8192, 2),
        ("softmax", "bfloat16", 8192, 4),
        ("log_softmax", "float32", 4096, 4),
        ("log_softmax", "bfloat16", 16384, None),
        ("softmax", "float64", 8192, None),
        ("softmax_linear", "bfloat16", 16384, None),
        ("log_softmax_vjp", "bfloat16", 4096, None),
    ],
)
def test_few_blocks_of_many_packs_at_once(op, dtype, columns, blocks):
    """By the shared memory that they ask for, of 228 KB a multiprocessor less 1 KB a block."""
    chosen = plan((1000, columns), (1,), op, dtype)
    assert chosen["schedule"] == "block"
    if blocks is None:
        assert chosen["shared_bytes"] == 0
    else:
        assert 228 * 1024 // (chosen["shared_bytes"] + 1024) == blocks


@pytest.mark.parametrize("columns,threads", [(3000, 96), (3072, 128), (4096, 160), (6144, 224), (8192, 256)])
def test_a_warp_more_where_all_have_as_much_to_do(columns, threads):
    chosen = plan((1000, columns), (1,), "softmax", "bfloat16")
    assert (chosen["schedule"], chosen["threads"]) == ("block", threads)


@pytest.mark.parametrize("op", ["softmax", "log_softmax", "softmax_linear"])
@pytest.mark.parametrize("dtype,least", [("float32", 0.6), ("float64", 0.7)])
def test_slabs_have_little_room_to_spare(op, dtype, least):
    """And two turns of the block at the least, where several lanes have a row."""
    for columns in range(5, 513, 2):
        chosen = plan((100_000, columns), (1,), op, dtype)
        assert chosen["schedule"] == "slab"
        assert least <= columns / (chosen["lanes"] * chosen["packs"]) <= 1
        assert chosen["lanes"] <= 2 or chosen["slab_rows"] * chosen["lanes"] >= 2 * chosen["threads"]


@pytest.mark.parametrize(
    "shape,op,dtype,packs,threads",
    [
        ((10**6, 1), "softmax", "float32", 1, 128),
        ((10**6, 4), "softmax", "bfloat16", 1, 128),
        ((10**6, 2), "softmax_linear", "float32", 1, 128),
        ((10**6, 1), "log_softmax", "float32", 1, 128),
        ((10**6, 2), "log_softmax", "float32", 2, 128),
        ((10**6, 4, 2), "softmax", "bfloat16", 1, 128),
        ((10**6, 4, 2), "softmax", "float32", 2, 256),
    ],
)
def test_threads_have_few_packs_of_whole_rows(shape, op, dtype, packs, threads):
    chosen = plan(shape, (1,), op, dtype)
    assert (chosen["schedule"], chosen["packs"], chosen["threads"]) == ("packs", packs, threads)


def test_no_length_between_is_read_twice():
    """On a chip with clusters and little shared memory."""
    for columns in range(8, 600_000, 1000):
        for rows in (1, 100_000):
            assert plan((rows, columns), (1,), "softmax", "bfloat16", device=RTX5090)["schedule"] != "passes"


def test_chunks_are_whole_lines():
    for op in ("softmax", "softmax_linear"):
        for columns in range(16_400, 1 << 20, 12_344):
            chosen = plan((1000, columns), (1,), op, "bfloat16")
            assert chosen["schedule"] in ("block", "chunks", "ring")
            assert chosen["share"] * 16 % 128 == 0


@pytest.mark.parametrize("device", [H200, T4, A100, RTX5090])
@pytest.mark.parametrize("op", ["softmax", "log_softmax", "softmax_linear"])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("scratch", [True, False])
def test_row_schedules_fit_the_device(device, op, dtype, scratch):
    """Every length is covered by threads that hold it, within the device's shared memory and cluster size."""
    size = np.dtype(dtype).itemsize
    per_pack = 16 // size
    operands = 2 if op == "softmax_linear" else 1
    for power in range(25):
        for columns in {2**power - 1, 2**power, 2**power + 1, 3 * 2**power} - {0}:
            for rows in (1, 7, 10**5):
                chosen = _kernels.plan([rows, columns], [1], op, dtype, **device, scratch=scratch)
                whole = columns % per_pack == 0
                assert chosen["boundary"] in ((16,) if whole else (16, 128)) or chosen["schedule"] in ("packs", "slab")
                packs = -(-(columns if whole else columns + chosen["boundary"] // size - 1) // per_pack)
                assert chosen["shared_bytes"] <= device["shared_memory_per_block"] - 1024
                assert 1 <= chosen["cluster"] <= device["largest_cluster"]
                assert chosen["threads"] % 32 == 0 and chosen["threads"] <= 1024
                schedule = chosen["schedule"]
                if schedule in ("lanes", "block"):
                    assert chosen["lanes"] * chosen["packs"] >= packs
                elif schedule == "slab":
                    pairs = dtype == "float16" and columns > 34  # an odd element has room of its own
                    assert chosen["lanes"] * chosen["packs"] >= (columns // 2 * 2 if pairs else columns)
                    assert chosen["slab_rows"] * columns % (2 * per_pack) == 0  # whole sectors
                elif schedule in ("chunks", "ring"):
                    assert chosen["chunks"] * chosen["share"] >= packs
                    assert chosen["boundary"] == (16 if whole else 128)
                    held = 16 * (chosen["share"] + chosen["spare"]) * operands
                    assert held <= 20 << 10 and chosen["shared_bytes"] % held == 0
                    within_lines = schedule == "ring" and whole and columns * size % 128 != 0
                    assert chosen["spare"] == (8 if within_lines else 0)
                    if schedule == "chunks":  # as many threads as the kernel's teams have
                        team = 64 if operands == 2 and chosen["edges"] == "parts" else 128
                        assert chosen["threads"] == team * (chosen["shared_bytes"] // held)
                    if schedule == "ring":  # all stages together hold what stays of the row with some to spare
                        assert chosen["stages"] * chosen["blocks"] >= 4 * (chosen["chunks"] - chosen["again"]) / 3
                        assert 0 <= chosen["again"] < chosen["chunks"]
                        assert chosen["blocks"] == device["multiprocessors"]
                    elif chosen["scratch"]:  # blocks that wait for one another all run at once
                        assert chosen["blocks"] == rows * chosen["chunks"] <= 8 * device["multiprocessors"]
                    else:
                        assert chosen["shared_bytes"] // held * chosen["cluster"] >= chosen["chunks"]
                elif schedule == "passes":
                    assert chosen["chunks"] * chosen["share"] >= packs
                assert chosen["scratch"] <= scratch


@pytest.mark.parametrize("device", [H200, T4, A100, RTX5090])
@pytest.mark.parametrize("op", ["softmax", "softmax_linear"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_scratch_is_enough_on_every_device(device, op, dtype):
    # Of those in the second line a pack more would make fewer chunks of two operands, which are whole lines.
    lengths = [100, 8191, 8192, 50257, 131072, 1 << 20, 5_000_001, 1 << 24, 1 << 26]
    lengths += [62_464, 66_368, 124_928, 132_736, 249_856, 265_472]
    for columns in lengths:
        for rows in (1, 300, 5000):
            chosen = plan((rows, columns), (1,), op, dtype, device=device)
            size = _kernels.scratch_bytes([rows, columns], [1], op, dtype)
            if chosen["scratch"]:
                assert size >= rows * chosen["chunks"] * (16 if dtype == "float64" else 8) + 8
            assert size <= 0.005 * rows * columns * np.dtype(jnp.dtype(dtype)).itemsize + 8


def test_no_scratch_for_short_rows_and_columns():
    assert _kernels.scratch_bytes([1000, 8192], [1], "softmax", "bfloat16") == 0
    assert _kernels.scratch_bytes([250, 50256], [0], "softmax", "bfloat16") == 0
    assert _kernels.scratch_bytes([64, 256, 1024], [1], "softmax", "bfloat16") == 0


@pytest.mark.parametrize("op", ["softmax", "softmax_linear", "log_softmax_vjp"])
@pytest.mark.parametrize("columns", [3, 64, 1999, 8192, 30000, 41325, 50257, 60001, 151936, 1 << 20, 1 << 24])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("device", [H200, T4, A100, RTX5090], ids=["H200", "T4", "A100", "RTX5090"])
def test_what_is_added_up_does_not_depend_on_the_number_of_rows(device, columns, op, dtype):
    """Which threads have which elements of a row; blocks may exchange what they have by other ways."""
    plans = [plan((rows, columns), (1,), op, dtype, device=device) for rows in (1, 2, 8, 50, 1000, 10**6)]
    cut = ("chunks", "ring")
    for other in plans[1:]:
        keys = ["edges", "packs", "chunks", "share"]
        if other["schedule"] in cut:
            assert plans[0]["schedule"] in cut
        else:
            keys += ["schedule", "lanes", "threads", "slab_rows"]
        for key in keys:
            assert other[key] == plans[0][key]


def test_no_axes():
    assert plan((64, 1024, 256), ())["columns"] == 1


@pytest.mark.parametrize(
    "arguments,match",
    [
        (((2, 3), (2,)), "axes must be distinct"),
        (((2, 3), (1, 1)), "axes must be distinct"),
        (((2,) * 13, (0,)), "12 dimensions"),
    ],
)
def test_bad_views_are_refused(arguments, match):
    with pytest.raises(ValueError, match=match):
        plan(*arguments)


def test_bad_masks_are_refused():
    with pytest.raises(ValueError, match="must be 1 or 3"):
        plan((2, 3), (1,), mask_shape=[1, 2])
