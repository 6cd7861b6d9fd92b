"""Who makes a call of an operator: its kernel, or XLA. Nothing else decides that.

- `on_cpu` and `on_cuda`: of a call that is lowered. `why_xla` has the views on which XLA is as fast.
- `traffic_of`: of a call under `fuse`, by what the kernel and XLA's fusions around it move. `told` says it in words.
- `attention_wins`: of attention under `fuse`.

Where there are GPUs, a program is judged for them; elsewhere it is for another machine, and judged for all kinds of
GPUs. Constants were measured: beside them stand the GPU and the file of benchmarks/results/.
"""

import enum
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jax_softmax import _kernels
from jax_softmax.devices import partitioning
from jax_softmax.primitives.operators import OPERATORS
from jax_softmax.runtime import cuda

# By a kernel; by a kernel of a dtype that holds all inputs; by XLA and another operator's kernel, where its record has
# `composed`; by XLA.
Maker = enum.Enum("Maker", "KERNEL WIDER_KERNEL COMPOSED XLA")


# ---- Calls on a CPU, where the kernels are faster on all that they make (cpu.md).


def on_cpu(op, avals_in, avals_out) -> Maker:
    shape = avals_in[0].shape
    if not OPERATORS[op].on_cpu:
        return Maker.COMPOSED
    if len(shape) > _kernels.MAX_DIMS or 0 in shape:
        return Maker.XLA
    if _makes(op, cpu_makes, avals_in, avals_out):
        return Maker.KERNEL
    return Maker.XLA if OPERATORS[op].quantizes else Maker.WIDER_KERNEL


def cpu_makes(given, result):
    return result == given or (result == jnp.int8 and given != jnp.float64)


def cuda_makes(given, result):
    """What quantizes makes all."""
    return result == given or (result.name in ("float16", "bfloat16", "float32") and given != jnp.float64)


def _makes(op, makes, avals_in, avals_out):
    """Whether the kernel of a platform takes these operands and gives these results."""
    inputs = {aval.dtype for aval in avals_in[: OPERATORS[op].inputs]}
    return len(inputs) == 1 and (not OPERATORS[op].element_results or makes(*inputs, avals_out[0].dtype))


# ---- Calls on CUDA.

# Compute capability, multiprocessors, shared memory of a block, largest cluster: chips that differ in what their plans
# exchange states for, those without clusters and those with; few multiprocessors and many.
_CHIPS = ((75, 64 << 10, 1), (86, 99 << 10, 1), (80, 163 << 10, 1), (90, 227 << 10, 16), (120, 99 << 10, 8))
_ALL_KINDS = [(capability, n, *rest) for n in (16, 132, 1024) for capability, *rest in _CHIPS]


def has_cuda_kernels(shape) -> bool:
    """Whether there may be kernels for a shape, and they can be made here; a program that is to run here warns once.

    A program that is lowered on a machine without a GPU is for another one, where they can.
    """
    if len(shape) > _kernels.MAX_DIMS:
        return False
    reason = cuda.availability()
    if reason is None or "gpu" not in {device.platform for device in jax.local_devices()}:
        return True
    partitioning.warn(f"runs as jax.numpy on this GPU: {reason}")
    return False


def left_on_cuda(op) -> Maker:
    """What becomes of a call that its kernel does not make. XLA reads elements of labels, and the rest is logsumexp."""
    return Maker.COMPOSED if op == "cross_entropy" else Maker.XLA


def on_cuda(op, avals_in, avals_out, axes, attributes) -> tuple[Maker, int]:
    """And the bytes that the kernel may need to work with."""
    if not OPERATORS[op].quantizes and not _makes(op, cuda_makes, avals_in, avals_out):
        return Maker.WIDER_KERNEL, 0
    shape, n = avals_in[0].shape, None
    for known in known_shapes(shape, axes):
        operands, results = ([_typed(a, known) for a in avals] for avals in (avals_in, avals_out))
        n = scratch_bytes({"operands": operands, "results": results, "attributes": attributes})
        if n != 0 and known is not shape:  # memory that differs with the number of rows has no known size
            n = None
            break
    return (left_on_cuda(op), 0) if n is None else (Maker.KERNEL, n)


def known_shapes(shape, axes):
    """The shape, or known shapes that stand for all that it may be with symbolic dimensions; none if no few shapes do.

    A symbolic dimension outside of the reduced ones only says how many rows there are. Plans differ by that: up to so
    many rows for each multiprocessor they spread rows over the chip. Powers of 2 meet every such range. One that is
    reduced, or lies inside of a reduced one, changes the rows themselves.
    """
    symbolic = [d for d, n in enumerate(shape) if not isinstance(n, int)]
    if not symbolic:
        return [shape]
    if symbolic[-1] >= min(axes, default=len(shape)):
        return []
    known = [n if isinstance(n, int) else 1 for n in shape]
    return [[rows if d == symbolic[0] else n for d, n in enumerate(known)] for rows in (1 << k for k in range(21))]


def _typed(aval, shape):
    """Shape and dtype. Symbolic dimensions have x's extent, `shape`, there."""
    known = zip(aval.shape, shape[len(shape) - aval.ndim :], strict=True)
    return [n if isinstance(n, int) else m for n, m in known], aval.dtype.name


def plan_of(call, device, sources=True):
    """`_kernels.plan` of a call that `lowering.described` gives, for a device: four numbers, as of `_CHIPS`."""
    return _kernels.plan(call["operands"], call["results"], call["attributes"], *device, sources)


def scratch_bytes(call) -> int | None:
    """The bytes that blocks may need to exchange states through, on whatever device, or None for a call that is XLA's.

    Begins to make the kernels for the devices that are here. Raises a ValueError if there is no such call.
    """
    here = _kernels.devices_here()
    plans = [plan_of(call, device, sources=False) for device in (*_ALL_KINDS, *here)]
    if 0 in call["operands"][0][0] and not OPERATORS[call["attributes"]["op"]].row_results:
        return 0
    if None in plans or all(why_xla(call, plan) for plan in plans[len(_ALL_KINDS) :] or plans):
        return None
    for device in here:
        for step in plan_of(call, device)["steps"]:
            _kernels.jit_prepare(step["code"], step["plan"], device[0])
    return max(plan["scratch_bytes"] for plan in plans)


NO_KERNEL = "no kernel covers it"
_PACK, _SECTOR = 16, 32  # bytes
# On an H200, 2026-11-23: results.md, "Other axes" and "Rows, by length"; again on an H100, views in never_slower.md.
_SHORT_RUN = 8  # packs
_SHORT_RUN_IN_RING = 2048  # bytes
_IDLING = 3  # packs of a row


def why_xla(call, plan) -> str:
    """Why XLA is as fast as a plan, or faster, within 5 %; "" where it is not.

    A custom call has to be worth it: XLA does not fuse it with what is around it.
    """
    if plan is None:
        return NO_KERNEL
    facts, fields, schedule = OPERATORS[call["attributes"]["op"]], plan["fields"], plan["schedule"]
    run, line = plan["reduced"][-1]  # elements: of neighbours in a row, and from one of them to the next
    run_bytes, runs = run * jnp.dtype(call["operands"][0][1]).itemsize, len(plan["reduced"])
    two = facts.inputs == 2 and facts.element_results
    tiles = "fold" in fields
    if line == 1 and runs > 1 and not plan["aligned"] and run_bytes < _SHORT_RUN * _PACK:
        return "rows of short runs that do not begin with whole packs cost more at their edges"
    if facts.labelled and not facts.element_results and line > 1:
        return "labels' elements are in lines far apart, and XLA has more of them under way at once"
    logarithm = facts.logarithms and facts.element_results and not facts.row_results
    idling = line == runs == 1 and plan["aligned"] and run_bytes == _IDLING * _PACK
    if logarithm and idling and not call["attributes"]["load"]:
        return "rows of 3 packs leave one in four lanes idle, with a logarithm for each"
    if two and schedule == "ring" and runs > 1 and run_bytes < _SHORT_RUN_IN_RING:
        return "short runs of two operands pass through rings more slowly than XLA reads them twice"
    narrow = schedule == "tile" and fields["fold"] == 1 and fields["packs"] * _PACK <= _SECTOR
    if two and narrow and fields["elements"] < line:
        return "a block has a sector of each line of two operands, and others read the rest of the cache lines"
    if two and schedule == "twice" and (fields["aligned"] if tiles else fields["boundary"] == 0):
        return "two operands are read twice, from whole packs, which XLA does as fast"
    if schedule == "twice" and tiles and fields["one_block"]:
        return "each block would read a whole tile twice, one piece after the other"
    return ""


# ---- Calls under `fuse`.
#
# A kernel reads each of its arrays once and writes its results. What nobody else needs of its arrays is written by XLA
# before; what only XLA's loops need of its results, and sums of its rows that XLA would make on the way, as layer norm
# does, are read by XLA. What has another order than the kernel's dimensions is read and written once more. XLA makes no
# such array, but reads its inputs several times: those of linear maps and of sums of rows twice, those of the other
# operators three times, but of softmax and log_softmax once where a row is contiguous and fits in a block. Its kernels
# for such rows are a little below the memory's speed. What takes longer to compute than to move counts as the bytes
# that could be moved meanwhile.

_MOST_COLUMNS = 8192  # of a row that a block of XLA has in registers
# Of XLA's kernels for rows up to a length, of the memory's. On an H200, 2026-11-23: results.md, "Rows, by length".
_SPEED = {256: 1.0, 2048: 0.91, _MOST_COLUMNS: 0.81}
_TIE = 0.95
# Bytes that an H200 moves while it does an instruction, and instructions of an operator for an element: fused.md.
_BYTES_OF_INSTRUCTION, _OPERATOR = 0.15, 8


class Traffic(NamedTuple):
    """Bytes."""

    before: int  # by the kernel without what is folded
    ours: int
    xla: int

    @property
    def kernel_wins(self) -> bool:
        return self.ours < _TIE * self.xla


def traffic_of(op, shape, axes, unfolded, ours, reads, writes_of_xla, of_rows, instructions) -> Traffic:
    """Of bytes that the kernel moves without what is folded, and with it; of the arrays that both read, of those that
    XLA writes, and of results of rows; and of instructions for an element before the operator and after it."""
    facts, whole_rows = OPERATORS[op], xla_makes_whole_rows(op, shape, axes)
    reads_of_xla = 2 if facts.inputs == 2 or not facts.element_results else 1 if whole_rows else 3
    before, after = instructions
    of_instruction = _BYTES_OF_INSTRUCTION * math.prod(shape)
    ours = max(ours, int(of_instruction * (before + after + _OPERATOR)))
    xla = max(reads_of_xla * reads + writes_of_xla, of_instruction * (reads_of_xla * before + after + _OPERATOR))
    columns = math.prod(shape[d] for d in axes)
    speed = next(speed for most, speed in _SPEED.items() if columns <= most) if whole_rows else 1.0
    return Traffic(unfolded, ours + of_rows, int((xla + of_rows) / speed))


def xla_makes_whole_rows(op, shape, axes) -> bool:
    """Whether a kernel of XLA does all of the operator, a block having a whole row."""
    facts = OPERATORS[op]
    last = max((d for d, n in enumerate(shape) if n > 1), default=len(shape) - 1)
    inner = sorted(d for d in axes if shape[d] > 1)
    one_run = inner == list(range(last + 1 - len(inner), last + 1))
    of_x_alone = facts.inputs == 1 and facts.element_results and not facts.labelled
    return of_x_alone and one_run and math.prod(shape[d] for d in axes) <= _MOST_COLUMNS


def told(traffic: Traffic, xla_is_as_fast: bool) -> str:
    """Who makes a call and why. `xla_is_as_fast`: on rows that lie as these do."""
    _, ours, xla = map(words, traffic)
    if not traffic.kernel_wins:
        return f"XLA: moves {xla}, the kernel {ours}{', not 5 % fewer' if traffic.ours <= traffic.xla else ''}"
    if xla_is_as_fast:
        return f"XLA: as fast on rows that lie as these do, though it moves {xla}, the kernel {ours}"
    return f"the kernel: moves {ours}, XLA {xla}"


def words(n: float) -> str:
    """Bytes for people."""
    for unit in ("B", "KiB", "MiB"):
        if n < 1024:
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1024
    return f"{n:.2f} GiB"


# Picoseconds for a score: of attention's forward kernel, and of both backward ones, with 64 features; on an H200,
# 2026-11-26: attention.md. Bytes that memory moves in a picosecond, between an H100's and an H200's. How many blocks
# run at once.
_FORWARD, _BACKWARD, _FEATURES, _BYTES_OF_PICOSECOND, _BLOCKS = 0.95, 2.7, 64, 3.6, 264


def attention_wins(attention, extents: dict[str, int], has_gradients: bool, moved: int) -> bool:
    """Whether attention's kernels take less time than the program that has its weights in memory, which moves so many
    bytes for each score."""
    batch = math.prod(extents[c] for c in attention.letters.batch)
    features = max(0.7, (extents["d"] + extents["e"]) / (2 * _FEATURES))
    times = {"forward": _FORWARD} | (dict.fromkeys(("keys", "queries"), _BACKWARD / 2) if has_gradients else {})
    ours = 0.0
    for kernel, time in times.items():
        tiling = _kernels.attention_tiling(kernel, extents["d"], extents["e"])
        stay, pass_by = (extents[c] for c in ("ji" if kernel == "keys" else "ij"))
        blocks, steps = -(-stay // tiling["rows"]), -(-pass_by // tiling["step"])
        scores = batch * blocks * tiling["rows"] * steps * tiling["step"]
        ours += time * features * scores * max(1, _BLOCKS / (batch * blocks))
    theirs = batch * extents["i"] * extents["j"] * moved / _BYTES_OF_PICOSECOND
    theirs *= 2 if extents["j"] % 8 else 1  # rows that no product reads by whole packs
    return ours * attention.visible_part(**extents) <= theirs
