"""What the source of a planned kernel says of a call: its expressions, and where operands that broadcast lie. Needs no
GPU."""

import ctypes
import itertools
import re

import emulated
import numpy as np
import pytest
from support import WAYS, plan

LINEAR, N_SIDES = "softmax_linear", 12
# Of an operator with two operands and two results: the names of one number stand in those of two.
LOAD = "s11 > 2 ? x1 * s0 : x0\nx1 - s10"
STORE = "y * s11 - s2\n\ny + s1"


def sides_of(shape):
    """Arrays that broadcast, of which one is an index."""
    return [([*shape[:-1], 1], "float32")] * (N_SIDES - 1) + [(list(shape), "index")]


@emulated.compiler_is_needed
@pytest.mark.parametrize("way", [WAYS[0], WAYS[4], WAYS[13]], ids=str)
def test_expressions_read_what_they_name(way, tmp_path):
    """And each result is its own. The host runs them."""
    made = way.plan(
        LINEAR, out_dtype="float32", more_results=["float32"] * 2, sides=sides_of(way.shape), load=LOAD, store=STORE
    )
    (structs,) = {re.search(r"struct Load .*(?=using Mem)", step["code"], re.DOTALL)[0] for step in made["steps"]}
    path = tmp_path / "expressions.cc"
    path.write_text(
        '#include "device/functions.cuh"\nnamespace jax_softmax::device {\n'
        f"{structs}"
        "template <int set>\nstruct Side {\n  const float* values;\n  template <int k>\n  auto value() const {\n"
        "    static_assert(set >> k & 1);\n"
        f"    if constexpr (k == {N_SIDES - 1}) return static_cast<int>(values[k]);\n"
        "    if constexpr (k != 11) return values[k];\n  }\n};\n"
        'extern "C" void run(const float* sides, float* x, float y, float* results, int* read) {\n'
        "  Load::apply(x, Side<Load::kSidesRead>{sides});\n  const Side<Store::kSidesRead> side{sides};\n"
        "  results[0] = Store::result<0>(y, side), results[1] = Store::result<1>(y, side);\n"
        "  results[2] = Store::result<2>(y, side), read[0] = Load::kSidesRead, read[1] = Store::kSidesRead;\n}\n}\n"
    )
    run = ctypes.CDLL(emulated.shared_library(path)).run
    for sides in (np.arange(N_SIDES, dtype=np.float32), np.arange(N_SIDES, dtype=np.float32)[::-1].copy()):
        x, results, read = np.float32([20, 30]), np.zeros(3, np.float32), np.zeros(2, np.int32)
        pointers = [ctypes.c_void_p(a.ctypes.data) for a in (sides, x, results, read)]
        run(*pointers[:2], ctypes.c_float(7), *pointers[2:])
        np.testing.assert_array_equal(x, [30 * sides[0] if sides[11] > 2 else 20, 30 - sides[10]])
        np.testing.assert_array_equal(results, [7 * sides[11] - sides[2], 7, 7 + sides[1]])
        np.testing.assert_array_equal(read, [1 << 11 | 1 << 0 | 1 << 10, 1 << 11 | 1 << 2 | 1 << 1])


@pytest.mark.parametrize("way", [WAYS[3], WAYS[8], WAYS[11], WAYS[15]], ids=str)
def test_what_broadcasts_is_read_where_it_lies(way):
    """Whatever extents of 1 it has."""
    shapes = [
        [n if own else 1 for n, own in zip(way.shape, some, strict=True)]
        for some in itertools.product((False, True), repeat=len(way.shape))
    ]
    for shape in shapes:
        made = way.plan(sides=[(shape, "float32")], load="x0 * s0")
        strides = re.search(r"kStrides\[\] = \{\{\{(.*?)\}, \{(.*?)\}\}\}", made["steps"][0]["code"])
        strides = [int(n) for group in strides.groups() for n in group.split(", ") if n]
        dims = [*made["batch"], *made["reduced"]]
        assert len(strides) == len(dims)
        whole, side = np.zeros((), int), np.zeros((), int)
        for (extent, stride), own in zip(dims, strides, strict=True):
            whole, side = (a[..., None] + np.arange(extent) * of for a, of in ((whole, stride), (side, own)))
        offsets = np.broadcast_to(np.arange(np.prod(shape, dtype=int)).reshape(shape), way.shape)
        np.testing.assert_array_equal(side.ravel(), offsets.ravel()[whole.ravel()])


@pytest.mark.parametrize("columns", [4095, 4097, 65536])
def test_offsets_are_wide_where_32_bits_are_not_enough(columns):
    for rows in (2**31 // columns, 2**31 // columns + 1, 2**33 // columns):
        for step in plan((rows, columns), (1,), "softmax", "bfloat16")["steps"]:
            if wide := re.search(r"kWide = (\d)", step["code"]):
                assert int(wide[1]) or rows * columns < 2**31
