"""Attention's kernels: that they compile, that tiles fit and cover everything, and what there are none for."""

import itertools
import math
import re

import emulated
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
import support
from attention_cases import (
    FIRST,
    KERNELS,
    OTHERS,
    SCALE,
    SCORES,
    Case,
    alibi_in_a_window,
    attention_in,
    biased_causal,
    capped,
    described_call,
    fused,
    masked,
    of_learned_slopes,
    scaled,
    wide,
)
from attention_promises import PROMISES, mask_segments_and_bias

import jax_softmax
from jax_softmax import _kernels
from jax_softmax.fusion.attention.kernels import with_sink
from jax_softmax.fusion.attention.linear import without_scale
from jax_softmax.fusion.attention.lost import lost_shift, rounded_and_lost, unrounded
from jax_softmax.fusion.program.expressions import Expression, Number, Operation
from jax_softmax.runtime import judge

MOST_SPILLED = 128  # bytes, as of the other kernels
MOST_SHARED = 99 << 10  # bytes, of the smallest chips


# ---- Compiling


def plan_of(kernel, case, compute_capability=80):
    attention, extents = attention_in(case)[kernel]
    call = described_call(attention, kernel, case.dtype, extents)
    return _kernels.plan_attention(**call, compute_capability=compute_capability)


def mask_cap_and_bias(x, i, j, bias):
    return jnp.where(i >= j, 20 * jnp.tanh(wide(x) * (SCALE / 20)) + wide(bias), -1e30)


SCORES[mask_cap_and_bias] = (("i", "index"), ("j", "index"), ("hij", "bfloat16"))
# A case for each row of the table, of lengths that are a multiple of every tile or of none.
COMPILED = [
    Case(mask_cap_and_bias, (n, n), (features, features), dtype=dtype)
    for features, n, dtype in ((64, 2048, "bfloat16"), (128, 2048, "float16"), (256, 197, "bfloat16"))
] + [Case(of_learned_slopes, (2048, 2048))]


@support.sampled("compute_capability,case", itertools.product([90, 80, 100, 120], COMPILED), 4, ids=str)
def test_compiles(jit, case, compute_capability):
    jit.needs(compute_capability)
    for kernel in case.kernels:
        plan = plan_of(kernel, case, compute_capability)
        _, text = _kernels.jit_binary(plan["code"], plan["plan"], compute_capability)
        spilled = [int(n) for n in re.findall(r"(\d+) bytes spill stores", text)]
        assert spilled and max(spilled) <= MOST_SPILLED, f"{plan['plan']}: {text}"
        # Products that wait for one another. NVRTC before 12.4 has them where two warpgroups have the same rows.
        *_, same_rows = re.search(r"kTiling\W+([\d, ]+)", plan["code"])[1].split(", ")
        assert "C751" not in text or (same_rows == "2" and jit.version < (12, 4)), f"{plan['plan']}: {text}"


ON_HOPPER = [
    Case(score, (300, 300), features, dtype=dtype)
    for score in (scaled, capped, masked, biased_causal, alibi_in_a_window)
    for features, dtype in (
        ((64, 64), "bfloat16"),
        ((128, 96), "bfloat16"),
        ((128, 128), "float16"),
        ((192, 128), "bfloat16"),
        ((160, 160), "float16"),
        ((256, 256), "bfloat16"),
    )
]


@support.sampled("case", ON_HOPPER, 4, ids=str)
def test_hopper_compiles(jit, case):
    test_compiles(jit, case, 90)


# ---- Geometry


@pytest.mark.parametrize("score", [scaled, mask_segments_and_bias])
@pytest.mark.parametrize("kernel", [*KERNELS, "tangents"])
def test_tiles_fit_and_cover_everything(kernel, score):
    """Arrays pass with the rows as long as there is room."""
    attention, _ = attention_in(Case(score))["forward"]
    attention = attention._replace(score_tangent=Expression((), "x1"), side_cotangents=())
    of_16_bits = itertools.product(range(8, 257, 8), (8, 64, 128, 136, 256), ["bfloat16"])
    of_32_bits = itertools.product(range(8, 129, 8), (8, 64, 72, 128), ["float32"])
    for d, e, dtype in (*of_16_bits, *of_32_bits):
        of_kernel = d, e, jnp.dtype(dtype).itemsize, attention.reads_arrays(kernel)
        parts = 2 if kernel == "keys" and max(d, e) > 128 else 1
        for n in (1, 15, 16, 64, 197, 2048):
            rows, step, _ = _kernels.attention_tile(kernel, n, *of_kernel, compute_capability=80)
            assert rows % 16 == 0 and step % 16 == 0
            extents = {"b": 2, "h": 2, "i": n, "j": n, "d": d, "e": e}
            plan = _kernels.plan_attention(**described_call(attention, kernel, dtype, extents), compute_capability=80)
            assert plan["shared_bytes"] <= MOST_SHARED
            assert plan["blocks"] == 4 * -(-n // rows) * parts
            assert plan["threads"] >= step or kernel != "keys"  # which copy the rows' numbers


@pytest.mark.parametrize("kernel", [*KERNELS, "tangents"])
def test_tiles_of_float32_fit_on_hopper(kernel):
    """They are larger than other chips' there, if scores read no arrays."""
    attention, extents = attention_in(Case(scaled, (300, 300), dtype="float32"))["forward"]
    attention = attention._replace(score_tangent=Expression((), "x1"), side_cotangents=())
    for d, e in itertools.product((8, 64, 72, 128), repeat=2):
        call = described_call(attention, kernel, "float32", extents | {"d": d, "e": e})
        bytes_by_chip = [_kernels.plan_attention(**call, compute_capability=c)["shared_bytes"] for c in (80, 90)]
        assert bytes_by_chip[0] <= bytes_by_chip[1] <= 227 << 10
        assert (bytes_by_chip[0] < bytes_by_chip[1]) == (max(d, e) > 64 and kernel != "tangents")


@pytest.mark.parametrize("score", [scaled, mask_segments_and_bias])
@pytest.mark.parametrize("kernel", KERNELS)
def test_tiles_fit_on_hopper(kernel, score):
    attention, extents = attention_in(Case(score, (300, 300)))[kernel]
    for d, e in itertools.product((8, 64, 72, 96, 104, 128, 136, 192, 200, 256), repeat=2):
        call = described_call(attention, kernel, "bfloat16", extents | {"d": d, "e": e})
        few_beside_arrays = max(d, e) <= 32 and attention.reads_arrays(kernel)
        assert bool(_kernels.plan_attention(**call)["maps"]) != few_beside_arrays


# The tiles of csrc/attention/geometry.h by the bytes of a number and the larger number of features: warps, fragments,
# step, parts, resident. Of float32 there are others where scores read arrays of queries x keys.
TILINGS = {
    (2, 64): [(4, 2, 64, 1, 2), (4, 2, 32, 1, 2), (4, 2, 32, 1, 2), (4, 2, 64, 1, 2), (4, 2, 32, 1, 2)],
    (2, 128): [(4, 2, 64, 1, 2), (4, 1, 64, 1, 2), (4, 2, 32, 1, 2), (4, 1, 64, 1, 2), (4, 1, 32, 1, 2)],
    (2, 256): [(4, 1, 32, 1, 1), (4, 1, 16, 2, 1), (4, 1, 16, 1, 1), (2, 1, 32, 1, 2), (2, 1, 16, 1, 1)],
    (4, 64): [(4, 2, 64, 1, 2), (4, 2, 32, 1, 2), (4, 2, 32, 1, 2), (4, 1, 64, 1, 2), (4, 1, 32, 1, 2)],
    (4, 128): [(4, 2, 16, 1, 2), (4, 1, 16, 1, 2), (4, 1, 16, 1, 2), (2, 1, 32, 1, 2), (2, 1, 16, 1, 2)],
}
WITH_ARRAYS = {
    (4, 64): [(4, 1, 32, 1, 2), (4, 1, 32, 1, 2), (4, 1, 32, 1, 2), (4, 1, 64, 1, 2), (4, 1, 32, 1, 2)],
    (4, 128): [(4, 1, 16, 1, 2), (2, 1, 16, 1, 2), (2, 1, 16, 1, 2), (2, 1, 32, 1, 2), (2, 1, 16, 1, 2)],
}
OF_KERNEL = {kernel: k for k, kernel in enumerate(("forward", "keys", "queries", "scores", "tangents"))}


def launch_by_formula(kernel, attention, extents, dtype):
    """Blocks, threads, bytes of shared memory, launch bounds, and the sides that pass through shared memory."""
    d, e, n_bytes = extents["d"], extents["e"], jnp.dtype(dtype).itemsize
    tilings = TILINGS | (WITH_ARRAYS if attention.reads_arrays(kernel) else {})
    of_dtype = {most: t for (of, most), t in tilings.items() if of == n_bytes}
    tilings = next(t for most, t in of_dtype.items() if max(d, e) <= most)
    warps, fragments, step, parts, resident = tilings[OF_KERNEL[kernel]]
    # Half as many warps, more often, if those of half the rows are enough, and copy a step's numbers.
    n_stay = extents["j" if kernel == "keys" else "i"]
    while warps > 1 and n_stay <= 8 * warps * fragments and step <= 16 * warps:
        warps, resident = warps // 2, 2 * resident
    rows, stay, letters = 16 * warps * fragments, "j" if kernel == "keys" else "i", attention.letters
    batch = [c for c in letters.q if c not in "id" and (c in letters.k or kernel != "keys")]
    unit, stages = 16 * parts, 1 if kernel == "scores" else 2
    if kernel == "scores":
        batch = [c for c in batch if c in sum_in(attention).letters]
        parts = -(-extents["j"] // step) * sum_in(attention).parts
    blocks = -(-extents[stay] // rows) * int(np.prod([extents[c] for c in batch])) * parts

    def row(n):
        packs = -(-n // unit) * unit * n_bytes // 16
        return 16 * (packs if packs % 8 == 0 else packs | 1)

    staying = row(d) if kernel == "forward" else row(d) + row(e)
    shared = rows * staying + stages * step * (row(d) + row(e) + 12 * (kernel == "keys"))
    queries, keys, staged = (step, rows, []) if kernel == "keys" else (rows, step, [])
    for of, dtype, _ in attention.sides_of(kernel):
        size = 0 if dtype == "index" or "i" not in of or of[-1] != "j" else jnp.dtype(dtype).itemsize
        needed = stages * queries * (keys * size + 16)
        fits = size and extents["j"] * size % 16 == 0 and shared + needed <= MOST_SHARED
        shared += needed if fits else 0
        staged.append(size if fits else 0)
    return blocks, 32 * warps, shared, f"__launch_bounds__({32 * warps}, {resident})", staged or [0]


def sum_in(attention):
    """The sum over the batch, which the kernel of scores makes."""
    (found,) = attention.side_cotangents_of("scores")
    return found


LAUNCHED = [*FIRST, *PROMISES.values(), *OTHERS]
# Plain `pytest` has one for each of these: other dtypes, dropout and peaks are in the first ones.
IN_PLAIN_RUNS = {(c.score, c.lengths, c.features, c.letters): c for c in reversed(LAUNCHED)}.values()


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=[pytest.mark.sweep] * (c not in IN_PLAIN_RUNS)) for c in LAUNCHED], ids=str
)
def test_launches_and_sources(case):
    """Launches are those of the formula; a source has the strides of NumPy's arrays, and addresses of the operands."""
    for kernel, (attention, extents) in attention_in(case).items():
        call = described_call(attention, kernel, case.dtype, extents)
        plan = _kernels.plan_attention(**call, compute_capability=80)
        blocks, threads, shared, bounds, staged = launch_by_formula(kernel, attention, extents, case.dtype)
        assert (plan["blocks"], plan["threads"], plan["shared_bytes"]) == (blocks, threads, shared)
        assert (plan["cluster"], plan["cooperative"], plan["overlap"]) == (1, False, False)
        found = dict(re.findall(r"(k[A-Za-z]+)(?:\[\])? = (.*);", plan["code"]))
        n = (3 if kernel == "forward" else 6) + (attention.visible.letters_of_bounds is not None)
        arrays = [side.dtype != "index" for side in attention.sides_of(kernel)]
        own = dict(zip(("kQ", "kK", "kV", "kO"), (*attention.letters, attention.letters.o), strict=True))
        expected = {name: strides_by_numpy(attention, extents, of, kernel) for name, of in own.items()}
        expected["kSideAddresses"] = braced([n + sum(arrays[:k]) for k in range(len(arrays))] or [0])
        expected |= {"kStagedBytes": braced(staged), "kFirstResult": str(len(call["operands"]))}
        expected["kBounded"] = str(n % 3)
        sides = [strides_by_numpy(attention, extents, side.letters, kernel) for side in attention.sides_of(kernel)]
        expected["kSideStrides"] = braced(sides or ["{}"])
        if n % 3:
            of_bounds, cells = attention.visible.letters_of_bounds, -(-extents["j" if kernel == "keys" else "i"] // 64)
            letters = of_bounds + "xy"
            expected["kBounds"] = strides_by_numpy(attention, extents | {"x": cells, "y": 4}, letters, kernel)
            assert call["operands"][n - 1] == ([*(extents[c] for c in of_bounds), cells, 4], "int32")
            assert found["kBoundsAddress"] == str(n - 1)
        shift = lost_shift(case.dtype) if kernel == "forward" and len(call["results"]) == 3 else 0
        expected["kLostShift"] = str(shift)
        assert {name: found[name] for name in expected} == expected
        assert bounds in plan["code"] and f"Addresses<{len(call['operands']) + len(call['results'])}>" in plan["code"]


# The kernels that Hopper's schedules do, by what is changed.
@pytest.mark.parametrize(
    "changed,on_hopper",
    [
        ({}, KERNELS),
        ({"lengths": (128, 300)}, ["keys"]),
        ({"lengths": (300, 128)}, ["forward", "queries"]),
        ({"dtype": "float32"}, []),
        ({"features": (192, 256)}, KERNELS),
        ({"letters": "bihgd,bjhd,bjhe"}, KERNELS),
    ],
)
@pytest.mark.parametrize("kernel", KERNELS)
def test_what_hopper_does(kernel, changed, on_hopper):
    """Tensor maps are of whole arrays; a copy takes 64 features of the rows of a block or a step."""
    case = Case(**{"score": capped, "lengths": (300, 320), "features": (40, 64)} | changed)
    attention, extents = attention_in(case)[kernel]
    call = described_call(attention, kernel, case.dtype, extents)
    plan = _kernels.plan_attention(**call)
    file = "forward" if kernel == "forward" else "backward"
    assert (f"attention/hopper/{file}.cuh" in plan["code"]) == bool(plan["maps"]) == (kernel in on_hopper)
    for other in ({"compute_capability": 100}, {"compute_capability": 80}, {"shared_memory_per_block": 48 << 10}):
        assert not _kernels.plan_attention(**call, **other)["maps"]
    if kernel not in on_hopper or changed:
        return
    warps, step, stages = {"forward": (8, 64, 2), "keys": (8, 128, 2), "queries": (12, 64, 3)}[kernel]
    rows, bytes_of_row = 16 * warps, 2 * 64  # of a panel
    assert plan["blocks"] == math.prod(extents[c] for c in attention.letters.batch) * (2 if rows == 192 else 3)
    staying = rows * bytes_of_row * (1 if kernel == "forward" else 2)
    passing = step * (2 * bytes_of_row + 12 * (kernel == "keys"))
    assert (plan["threads"], plan["shared_bytes"]) == (32 * (warps + 4), staying + stages * (passing + 32))
    letters = [*attention.letters, *[attention.letters.o] * (kernel != "forward")]
    box_of = {"i": step, "j": rows} if kernel == "keys" else {"i": rows, "j": step}
    for (extents_of_map, box), of in zip(plan["maps"], letters, strict=True):
        innermost_first = of[::-1] + "-" * (5 - len(of))
        assert extents_of_map == [extents.get(c, 1) for c in innermost_first]
        assert box == [64, *(box_of.get(c, 1) for c in innermost_first[1:])]


def braced(items):
    return f"{{{', '.join(map(str, items))}}}"


def strides_by_numpy(attention, extents, letters, kernel):
    """Of an array with these letters, along the batch, queries and keys, in elements. The kernel of scores has the
    batch letters last over which it sums."""
    batch = sorted(attention.letters.batch, key=lambda c: kernel == "scores" and c not in sum_in(attention).letters)
    along = dict(zip(letters, np.empty([extents[c] for c in letters], np.int8).strides, strict=True))
    return braced([braced(along.get(c, 0) for c in batch), along.get("i", 0), along.get("j", 0)])


def test_calls_that_are_refused():
    attention, extents = attention_in(Case(of_learned_slopes, (64, 64)))["queries"]
    call = described_call(attention, "queries", "bfloat16", extents)
    (q, dtype), *rest = call["operands"]
    bfloat16 = [(shape, "bfloat16") for shape, _ in call["results"]]
    attributes = call["attributes"]
    for changed, message in (
        ({"compute_capability": 75}, "before those of 8.0"),
        ({"operands": [(q[1:], dtype), *rest]}, "differ from their letters in rank"),
        ({"operands": [(q, "float32"), *rest]}, "not as it must be"),
        ({"operands": [(q, "int32"), *rest]}, "no kernels of int32 with 64 and 64 features"),
        ({"operands": [*call["operands"], (q, dtype)]}, "not as it must be"),
        ({"operands": [*call["operands"][:-1]]}, "an operand is missing"),
        ({"results": [*bfloat16, *bfloat16]}, "not as it must be"),
        ({"results": call["results"][:1]}, "not as it must be"),
        ({"attributes": attributes | {"expressions": "x0\ny"}}, "wrong number of expressions"),
        ({"attributes": attributes | {"kernel": "values"}}, "no such kernel: values"),
        ({"attributes": attributes | {"sides": "bounds:x"}}, "letters of q and k"),
        ({"attributes": attributes | {"letters": "bihd,bjdh,bjhe"}}, "bjdh must have j and, last, d"),
        ({"attributes": attributes | {"side_cotangents": "bhi bhj"}}, "other letters than its kernel can make"),
        ({"attributes": attributes | {"side_cotangents": "bhi bhij"}}, "other letters than its kernel can make"),
        ({"attributes": attributes | {"kernel": "forward", "side_cotangents": "bhi"}}, "other letters"),
        ({"attributes": attributes | {"kernel": "scores", "side_cotangents": "bhi"}}, "one result, in parts"),
        ({"attributes": attributes | {"kernel": "scores", "side_cotangents": "pihj"}}, "one result, in parts"),
    ):
        with pytest.raises(ValueError, match=message):
            _kernels.plan_attention(**call | changed)


def test_exported_programs_hold_no_kernel_text():
    case = Case(mask_segments_and_bias, (40, 40))
    with emulated.all_kernels(attention=True):
        export = jax.export.export(
            jax.jit(fused(case)), platforms=["cuda"], disabled_checks=jax_softmax.export_checks()
        )
        text = export(*(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in case.operands())).mlir_module()
    calls = [line for line in text.splitlines() if "@jax_softmax_attention(" in line]
    assert [re.findall(r'kernel = "(\w+)"', line) for line in calls] == [["forward"], ["queries"], ["keys"], ["scores"]]
    assert all('sides = "bounds:bh array:bij array:hij array:hij"' in line for line in calls), calls
    assert "__global__" not in text and "kTiling" not in text


def late_and_causal(x, i, j):
    return jnp.where((i >= j) & (i > 100), x, -jnp.inf)


SCORES[late_and_causal] = (("i", "index"), ("j", "index"))


@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize("kernel", KERNELS)
def test_bounds_visit_what_is_seen(kernel, zero):
    attention, extents = attention_in(Case(late_and_causal, (300, 300)))[kernel]
    attention = attention._replace(empty_rows_are_zero=zero)
    cell = _kernels.ATTENTION_CELL
    i, j = np.arange(300)[:, None], np.arange(300)
    shown = (i >= j) & (i > 100)
    seen = shown | ((not zero) & (i <= 100))
    if kernel == "keys":
        shown, seen = shown.T, seen.T
    ends = attention.visible.bounds(kernel, extents, [])
    assert ends.shape == (-(-300 // cell), 4)
    n_whole = 0
    for own, (first, end, first_whole, end_whole) in enumerate(np.asarray(ends)):
        others = np.flatnonzero(seen[own * cell :][:cell].any(0)) // cell
        assert (first, end) == (others.min(), others.max() + 1) if others.size else first >= end
        cells = [shown[own * cell :, k * cell :][:cell, :cell] for k in range(-(-300 // cell))]
        whole = [k for k, of in enumerate(cells) if of.shape == (cell, cell) and of.all()]
        assert list(range(first_whole, end_whole)) == whole
        n_whole += len(whole)
    assert n_whole


def test_bounds_read_what_may_hold_fills():
    def letters_of_bounds(score):
        return attention_in(Case(score, (300, 300)))["forward"][0].visible.letters_of_bounds

    assert letters_of_bounds(alibi_in_a_window) == ""
    assert letters_of_bounds(biased_causal) == ""  # whose bias has a gradient
    attention, _ = attention_in(Case(biased_causal, (300, 300)))["forward"]
    sides = tuple(side._replace(is_learned=False) for side in attention.sides)
    assert attention._replace(sides=sides).visible.letters_of_bounds == "h"


def biased_and_masked(x, i, j, bias, mask):
    return jnp.where(i >= j, wide(x) * SCALE + bias + jax.lax.stop_gradient(mask), -1e30)


def of_temperature_and_masked(x, i, j, temperature, mask):
    return jnp.where(i >= j, wide(x) * temperature + jax.lax.stop_gradient(mask), -1e30)


SCORES[biased_and_masked] = (("i", "index"), ("j", "index"), ("hij", "float32"), ("ij", "float32"))
SCORES[of_temperature_and_masked] = (("i", "index"), ("j", "index"), ("h", "float32"), ("ij", "float32"))


@pytest.mark.parametrize("score", [biased_and_masked, of_temperature_and_masked])
@pytest.mark.parametrize("kernel", KERNELS)
def test_masks_beside_what_is_learned_hide_tiles(kernel, score):
    case, cell = Case(score, (300, 300)), _kernels.ATTENTION_CELL
    attention, extents = attention_in(case)[kernel]
    assert len(attention.side_cotangents) == 1
    *_, learned, _ = case.operands()
    i, j = np.arange(300)[:, None], np.arange(300)
    in_window = i - j < 50
    ends = attention.visible.bounds(kernel, extents, [learned, jnp.where(in_window, 0.0, -jnp.inf)])
    seen = (i >= j) & in_window
    for own, bounds in enumerate(np.asarray(ends).swapaxes(0, 1)):
        others = np.flatnonzero((seen.T if kernel == "keys" else seen)[own * cell :][:cell].any(0)) // cell
        assert (bounds[:, :2] == (others.min(), others.max() + 1)).all()


# ---- Weights


def operation(name, *operands, dtype="float32", first=None):
    return Operation(name, operands, (first or dtype, *[dtype] * (len(operands) - 1)), dtype)


KEPT, KEPT_16 = (operation("convert_element_type", "s0", dtype=d, first="bool") for d in ("float32", "bfloat16"))
CHOSEN = operation("select_n", "s0", Number(0.0, "float32"), "v0", first="bool")
HALF = operation("mul", "y", Number(0.5, "float32"))
HALF_OF_SOME = operation("select_n", "s0", "y", "v0", first="bool")


@pytest.mark.parametrize(
    "scale,operations",
    [
        (1, ()),
        (0.5, (HALF, CHOSEN)),
        (2, (operation("div", "y", Number(0.5, "float32")), CHOSEN, operation("neg", "v1"))),
        (2, (KEPT, operation("div", "v0", Number(0.5, "float32")), operation("mul", "y", "v1"))),
        (
            3,
            (
                operation("select_n", "s0", Number(0.0, "float32"), Number(3.0, "float32"), first="bool"),
                operation("mul", "y", "v0"),
            ),
        ),
        (3, (HALF, operation("add", "v0", "y"), operation("mul", Number(3.0, "float32"), "v1"))),
        (1, (HALF, HALF_OF_SOME)),  # of some weights alone
        (1, (operation("mul", "y", Number(0.0, "float32")),)),
        (
            1,
            (
                KEPT,
                operation("mul", "v0", Number(3.0, "float32")),
                operation("mul", "y", "v1"),
                operation("mul", "v2", "v1"),
            ),
        ),
        # Its rounding is in the gradients as well.
        (1, (KEPT_16, operation("div", "v0", Number(0.9, "bfloat16"), dtype="bfloat16"), operation("mul", "y", "v1"))),
    ],
)
def test_numbers_that_multiply_all_weights(scale, operations):
    expression = Expression(operations, f"v{len(operations) - 1}" if operations else "y")
    rest, found = without_scale(expression, "y")
    assert found == scale
    given = {"y": jnp.float32([0.3, 0.7, 1.1, 0.9]), "s0": jnp.array([True, False, True, True])}
    np.testing.assert_allclose(scale * rest.in_jax(given), expression.in_jax(given), rtol=1e-6)


# ---- What the output loses by rounding


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_what_rounding_took_is_kept(dtype):
    x = np.float32(support.normal((4, 64), "float32"))
    o, lost = rounded_and_lost(x, dtype)
    assert (o.dtype, lost.dtype) == (dtype, "int8")
    np.testing.assert_array_equal(o, x.astype(o.dtype))
    np.testing.assert_allclose(unrounded(o, lost), x, rtol=float(jnp.finfo(dtype).eps) / 2**8)
    special = jnp.float32([0, -0.0, np.inf, -np.inf, np.nan])
    np.testing.assert_array_equal(unrounded(*rounded_and_lost(special, dtype)), special)


def test_a_sink_rescales_it_as_well():
    attention, _ = attention_in(Case(scaled))["forward"]
    shapes = [(2, 5, 3, 8), (2, 3, 5, 2), (2, 3, 5)]  # of bihe, bhin and bhi
    x, rows, sink = (np.float32(support.normal(shape, "float32", k)) for k, shape in enumerate(shapes))
    o, lost = rounded_and_lost(x, "bfloat16")
    (o, _, lost), of_sink = with_sink(attention, sink, o, rows, lost)
    expected = x * (1 - of_sink.swapaxes(1, 2)[..., None])
    np.testing.assert_allclose(unrounded(o, lost), expected, rtol=2**-14, atol=2**-20)


# ---- What there are none for


@pytest.mark.parametrize(
    "letters,message",
    [
        ("bihd,bjhd,bjd", "bjd must have j and, last, e"),
        ("dbih,bjhd,bjhe", "dbih must have i and, last, d"),
        ("bihd,bjhd,jhe", "the same batch letters"),
        ("bid,bjhd,bjhe", "of those of q"),
        ("bihd,bjhd,bjhhe", "twice"),
    ],
)
def test_other_letters_are_refused(letters, message):
    assert message in _kernels.why_no_attention(letters, dict.fromkeys("bhijde", 8), "bfloat16")


@pytest.mark.parametrize(
    "case",
    [
        Case(features=(64, 257)),
        Case(dtype="float32", features=(136, 64)),
        Case(lengths=(1, 17)),
        Case(lengths=(17, 1)),
    ],
    ids=str,
)
def test_what_kernels_cannot_do_stays(case):
    assert not attention_in(case)


def test_prices_are_those_of_the_chip(monkeypatch):
    """With 256 features and gradients kernels win on Hopper alone."""
    extents = {"i": 2048, "j": 2048, "d": 256, "e": 256}
    work = judge.Attention(64, 64, extents, 1.0, dict.fromkeys(KERNELS, False), score_bytes=20, n_products=6)
    for capability, wins in ((80, False), (90, True)):
        monkeypatch.setattr(_kernels, "devices_here", lambda capability=capability: [(capability, 132, 227 << 10, 16)])
        assert (judge.reason_against_attention(work) == "") == wins
