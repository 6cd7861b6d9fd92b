"""Every kernel compiles for every architecture, side by side, without a GPU; none that is launched often spills much.

Plain pytest compiles a part of them; `--sweeps` all of them, in a few minutes on two cores.
"""

import concurrent.futures
import itertools
import pathlib
import re

import pytest
from oracles import LARGEST
from support import DEVICES, KERNELS, OPS, ROW_OPS, WAYS, kernel_names, sampled

from jax_softmax import _kernels

MOST_SPILLED = 128  # bytes

WITH_RESULTS = [op for op, facts in KERNELS.items() if facts["element_results"]]  # for elements
# Of each architecture one.
CHIPS = ("T4", "A100", "H200", "B200", "RTX 5090")
sweep = pytest.mark.sweep


def steps_of(plans):
    """The plans' kernels, each once."""
    return list({step["code"]: step for plan in plans for step in plan["steps"]}.values())


def compiled(steps, compute_capability):
    """Each step with its binary and what the assembler said of it."""

    def compile(step):
        return step, *_kernels.jit_binary(step["code"], step["plan"], compute_capability)

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        return list(pool.map(compile, steps))


def check_spills(steps):
    for step, _, text in compiled(steps, 90):
        spilled = [int(n) for n in re.findall(r"(\d+) bytes spill stores", text)]
        assert spilled and max(spilled) <= MOST_SPILLED, f"{step['plan']}: {text}"


def check_compiles(steps, compute_capability):
    for step, binary, _ in compiled(steps, compute_capability):
        assert binary[:4] == b"\x7fELF", step["plan"]


def test_every_kernel_function_is_planned():
    """A kernel that no view of WAYS leads to is compiled by no test, or by nothing at all."""
    folder = pathlib.Path(__file__).parents[2] / "csrc" / "device"
    if not folder.is_dir():
        pytest.skip("needs the sources")
    text = "".join(path.read_text(encoding="utf-8") for path in folder.glob("*.cuh"))
    functions = re.findall(r"void (\w+)\(const typename Mem::Operands& operands\)", text)
    planned = {
        name for op in ("softmax", "softmax_linear", "entropy") for way in WAYS for name in kernel_names(way.plan(op))
    }
    assert {*functions, "clear_words"} == planned


@pytest.mark.parametrize(
    "op", ["softmax", *(pytest.param(op, marks=sweep) for op in (*OPS, *ROW_OPS) if op != "softmax")]
)
def test_every_kernel_on_sm_90(jit, op):
    plans = [way.plan(op) for way in WAYS]
    check_compiles(steps_of(plans), 90)
    # Views on which XLA is as fast are left to it.
    check_spills(steps_of(plan for plan in plans if not plan["why_xla"]))


@sweep
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_every_dtype(jit, dtype):
    check_spills(steps_of(way.plan(op, dtype) for way in WAYS for op in ("softmax", "log_softmax_vjp")))


@sweep
@pytest.mark.parametrize("dtype,result", list(itertools.product(["bfloat16", "float32"], LARGEST)))
def test_results_of_8_bits(jit, dtype, result):
    plans = [way.plan("absmax_scale", dtype, out_dtype=result) for way in WAYS]
    check_spills(steps_of(plan for plan in plans if not plan["why_xla"]))


@sweep
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_every_mask(jit, dtype):
    """One for each element, and one for all rows."""
    masks = [lambda shape, axes: shape, lambda shape, axes: [n if d in axes else 1 for d, n in enumerate(shape)]]
    plans = (way.plan("softmax", dtype, list(mask(way.shape, way.axes))) for way in WAYS for mask in masks)
    steps = steps_of(plans)
    check_compiles(steps, 90)


@pytest.mark.parametrize("name", [name for name in CHIPS if name != "H200"])
def test_one_kernel_on_other_architectures(jit, name):
    on = DEVICES[name]
    jit.needs(on["compute_capability"])
    plans = [WAYS[0].plan(on=on)]
    plans += [WAYS[0].plan("absmax_scale", on=on, out_dtype=result) for result in LARGEST]
    check_compiles(steps_of(plans), on["compute_capability"])


def resident_blocks(step, text, on):
    """How many blocks of a kernel a multiprocessor has room for, by what the assembler says of it."""
    registers = int(re.search(r"Used (\d+) registers", text)[1])
    static = re.search(r"(\d+) bytes smem", text)
    shared = step["shared_bytes"] + (int(static[1]) if static else 0)
    of_warp = -(-registers * 32 // 256) * 256  # they are given out by 256
    warps = 65536 // of_warp // 4 * 4  # of four schedulers, each of which has as many
    reserved = 1024  # bytes of shared memory for each block, which a multiprocessor has beside what a block may have
    return min(warps // (step["threads"] // 32), (on["shared_memory_per_block"] + reserved) // (shared + reserved))


@sampled("fused", [{"load": "tanh(x0 * C(0.5))", "store": "tanh(y)"}, {}], 2, ids=["fused", "plain"])
@pytest.mark.parametrize("name", CHIPS)
@pytest.mark.parametrize("op", ["softmax", *(pytest.param(op, marks=sweep) for op in WITH_RESULTS if op != "softmax")])
def test_blocks_that_wait_for_one_another_all_fit(jit, op, name, fused):
    """Those of a cooperative launch, which the driver would refuse. Clusters wait for their own blocks alone."""
    on = DEVICES[name]
    jit.needs(on["compute_capability"])
    plans = [way.plan(op, dtype, on=on, **fused) for way in WAYS for dtype in ("bfloat16", "float32")]
    steps = [step for plan in plans for step in plan["steps"] if step["cooperative"]]
    assert steps or name != "H200"
    # Each kernel once, with the most blocks that it is launched with.
    steps = list({step["code"]: step for step in sorted(steps, key=lambda step: step["blocks"])}.values())
    for step, _, text in compiled(steps, on["compute_capability"]):
        room = resident_blocks(step, text, on) * on["multiprocessors"]
        assert step["blocks"] <= room, f"{step['plan']}: {text}"


@sweep
@pytest.mark.parametrize("name", [name for name in CHIPS if name != "H200"])
def test_every_kernel_on_other_architectures(jit, name):
    on = DEVICES[name]
    jit.needs(on["compute_capability"])
    check_compiles(steps_of(way.plan(op, on=on) for way in WAYS for op in (*OPS, *ROW_OPS)), on["compute_capability"])
    to_8_bits = steps_of(way.plan("absmax_scale", on=on, out_dtype=result) for way in WAYS for result in LARGEST)
    check_compiles(to_8_bits, on["compute_capability"])
