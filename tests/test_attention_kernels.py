"""Attention's kernels: that they compile, that tiles fit and cover everything, and what there are none for."""

import itertools
import re

import jax.numpy as jnp
import numpy as np
import pytest
import support
from attention_cases import SCALE, SCORES, Case, alibi_in_a_window, attention_in, biased_causal, scaled, wide

from jax_softmax import _kernels
from jax_softmax.fusion.attention.source import KERNELS, Letters

MOST_SPILLED = 128  # bytes, as of the other kernels
MOST_SHARED = 99 << 10  # bytes, of the smallest chips


# ---- Compiling


def plan_of(kernel, case):
    attention, extents = attention_in(case)[kernel]
    return attention.plan(kernel, case.dtype, extents)


def mask_cap_and_bias(x, i, j, bias):
    return jnp.where(i >= j, 20 * jnp.tanh(wide(x) * (SCALE / 20)) + wide(bias), -1e30)


SCORES[mask_cap_and_bias] = (("i", "index"), ("j", "index"), ("hij", "bfloat16"))
# A case for each row of the table, of lengths that are a multiple of every tile or of none.
COMPILED = [
    Case(mask_cap_and_bias, (n, n), (features, features), dtype=dtype)
    for features, n, dtype in ((64, 2048, "bfloat16"), (128, 2048, "float16"), (256, 197, "bfloat16"))
]


@support.sampled("compute_capability,case", itertools.product([90, 80, 100, 120], COMPILED), 4, ids=str)
def test_compiles(jit, case, compute_capability):
    jit.needs(compute_capability)
    for kernel in KERNELS:
        plan = plan_of(kernel, case)
        _, text = _kernels.jit_binary(plan.code, plan.plan, compute_capability)
        spilled = [int(n) for n in re.findall(r"(\d+) bytes spill stores", text)]
        assert spilled and max(spilled) <= MOST_SPILLED, f"{plan.plan}: {text}"


# ---- Geometry


@pytest.mark.parametrize("kernel", KERNELS)
def test_tiles_fit_and_cover_everything(kernel):
    attention, _ = attention_in(Case(scaled))[kernel]
    for d, e in itertools.product(range(8, 257, 8), (8, 64, 128, 136, 256)):
        tiling = _kernels.attention_tiling(kernel, d, e)
        assert tiling["rows"] % 16 == 0 and tiling["step"] % 16 == 0
        for n in (1, 15, 16, 197, 2048):
            extents = {"b": 2, "h": 2, "i": n, "j": n, "d": d, "e": e}
            plan = attention.plan(kernel, "bfloat16", extents)
            assert plan.shared_bytes <= MOST_SHARED
            assert plan.blocks == 4 * -(-n // tiling["rows"]) * tiling["parts"]
            assert plan.threads >= tiling["step"] or kernel != "keys"  # which copy the rows' numbers


def late_and_causal(x, i, j):
    return jnp.where((i >= j) & (i > 100), x, -jnp.inf)


SCORES[late_and_causal] = (("i", "index"), ("j", "index"))


@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize("kernel", KERNELS)
def test_bounds_visit_what_is_seen(kernel, zero):
    attention, extents = attention_in(Case(late_and_causal, (300, 300)))[kernel]
    attention = attention._replace(empty_rows_are_zero=zero)
    tiling = _kernels.attention_tiling(kernel, 64, 64)
    i, j = np.arange(300)[:, None], np.arange(300)
    shown = (i >= j) & (i > 100)
    seen = shown | ((not zero) & (i <= 100))
    if kernel == "keys":
        shown, seen = shown.T, seen.T
    ends = attention.bounds(kernel, extents, [])
    assert len(ends) == -(-300 // tiling["rows"])
    rows, step = tiling["rows"], tiling["step"]
    n_whole = 0
    for block, (first, end, first_whole, end_whole) in enumerate(np.asarray(ends)):
        steps = np.flatnonzero(seen[block * rows :][:rows].any(0)) // step
        assert (first, end) == (steps.min(), steps.max() + 1) if steps.size else first >= end
        tiles = [shown[block * rows :, k * step :][:rows, :step] for k in range(-(-300 // step))]
        whole = [k for k, tile in enumerate(tiles) if tile.shape == (rows, step) and tile.all()]
        assert list(range(first_whole, end_whole)) == whole
        n_whole += len(whole)
    assert n_whole


def test_bounds_read_what_may_hold_fills():
    def letters_of_bounds(score):
        return attention_in(Case(score, (300, 300)))["forward"][0].letters_of_bounds

    assert letters_of_bounds(alibi_in_a_window) == ""
    assert letters_of_bounds(biased_causal) == ""  # whose bias has a gradient
    attention, _ = attention_in(Case(biased_causal, (300, 300)))["forward"]
    assert attention._replace(written=None).letters_of_bounds == "h"


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
    with pytest.raises(ValueError, match=message):
        Letters(*letters.split(",")).check([], "")


@pytest.mark.parametrize(
    "case",
    [
        Case(features=(36, 64)),
        Case(features=(64, 264)),
        Case(dtype="float32"),
        Case(lengths=(1, 17)),
        Case(lengths=(17, 1)),
    ],
    ids=str,
)
def test_what_kernels_cannot_do_stays(case):
    assert not attention_in(case)
