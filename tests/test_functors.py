"""Schedules do not know what memory holds: a load that casts, scales by a negative number and adds an array that
broadcasts, and a store of another dtype, go through each of them as it is."""

import jax.numpy as jnp
import numpy as np
import pytest
import support
from support import WAYS, call_kernel, check, kernel_names, reference, reference_linear

from jax_softmax import _kernels

FUSED = "x * -2.5f + s[0]"
# Of each kernel one view, by what it launches last.
VIEWS = {kernel_names(way.plan())[-1]: way for way in reversed(WAYS)}
# What is read, what is added to it, and what is written.
DTYPES = [("bfloat16", "float32", "float32"), ("float32", "bfloat16", "bfloat16"), ("float16", "float16", "bfloat16")]

every_view = pytest.mark.parametrize("way", VIEWS.values(), ids=VIEWS.keys())


def side_shape(way):
    """Broadcast along the rows: one number for each element of a row."""
    return tuple(n if d in way.axes else 1 for d, n in enumerate(way.shape))


def fused_plan(way, op, dtypes, masked=False):
    read, added, written = dtypes
    mask_shape = list(way.shape) if masked else None
    sides = [(list(side_shape(way)), added)]
    return way.plan(op, read, mask_shape, out_dtype=written, fused=FUSED, sides=sides)


def test_one_view_for_each_schedule():
    assert {way.plan()["schedule"] for way in VIEWS.values()} == {
        *("registers", "staged", "chunks", "ring", "tile", "twice")
    }


@every_view
@pytest.mark.parametrize(
    "dtypes", [DTYPES[0], *(pytest.param(d, marks=pytest.mark.sweep) for d in DTYPES[1:])], ids=str
)
def test_compiles(jit, dtypes, way):
    for op, masked in (("softmax", False), ("softmax_linear", True)):
        for step in fused_plan(way, op, dtypes, masked)["steps"]:
            assert _kernels.jit_binary(step["code"], step["plan"], 90)[:4] == b"\x7fELF"


@pytest.mark.skipif(support.why_no_cuda() is not None, reason=str(support.why_no_cuda()))
@every_view
@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("op", ["softmax", "log_softmax", "softmax_linear"])
def test_values(op, masked, dtypes, way):
    """Of numbers so simple that what is fused is exact in every dtype."""
    read, added, written = dtypes
    rng = np.random.default_rng(0)
    x = rng.integers(-8, 8, way.shape).astype(jnp.dtype(read))
    side = rng.integers(-4, 4, side_shape(way)).astype(jnp.dtype(added))
    value = (-2.5 * x.astype(np.float64) + side.astype(np.float64)).astype(jnp.dtype(written))
    where = support.random_mask(way.shape) if masked else None
    if op == "softmax_linear":  # the last operand is what is fused into
        y = rng.random(way.shape).astype(jnp.dtype(read))
        inputs, expected = (y, x), reference_linear(op, y, value, way.axes, written, where)
    else:
        inputs, expected = (x,), reference(op, value, way.axes, where)
    scratch_bytes = fused_plan(way, op, dtypes, masked)["scratch_bytes"]
    mask = [where] if masked else []
    with support.limited(**way.limits):
        result = call_kernel(
            op, *inputs, side, *mask, axes=way.axes, out_dtype=written, fused=FUSED, scratch_bytes=scratch_bytes
        )
    check(result, expected, f"{op} of {read}, written as {written}")
