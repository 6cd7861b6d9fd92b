"""Who computes a call that a kernel can compute: the kernel, or XLA.

- `on_cpu` and `on_cuda`: for a call that is lowered. `why_xla` has the views on which XLA is as fast.
- `traffic_of`: for a call under `fuse`, by the bytes that the kernel and XLA's fusions would move. `why_xla_under_fuse`
  says it in words.
- `attention_wins`: for attention under `fuse`.

Elsewhere stands what is about more than one call: `fusion/rewriting.py` leaves all that is written out of an array,
`fusion/primitive.py` a whole program, and `devices/partitioning.py` what it cannot divide.

If this machine has GPUs, the decision is for them; otherwise the program is for another machine, and the decision is
for all kinds of GPUs. Constants were measured; the GPU and the file of benchmarks/results/ stand beside them.
"""

import enum
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jax_softmax import _kernels
from jax_softmax.devices import partitioning
from jax_softmax.primitives.operators import OPERATORS
from jax_softmax.primitives.records import RECORDS
from jax_softmax.runtime import cuda

# KERNEL: the operator's kernel. WIDER_KERNEL: its kernel in a dtype that holds all inputs. COMPOSED: another operator's
# kernel and XLA, by `composed` of the record. XLA: XLA alone.
Maker = enum.Enum("Maker", "KERNEL WIDER_KERNEL COMPOSED XLA")


# ---- Calls on a CPU. Where there is a kernel, it runs, also in those cases of cpu.md in which XLA is faster.


def on_cpu(op, avals_in, avals_out) -> Maker:
    shape = avals_in[0].shape
    if not OPERATORS[op].on_cpu:
        return Maker.COMPOSED if RECORDS[op].composed else Maker.XLA
    if len(shape) > _kernels.MAX_DIMS or 0 in shape:
        return Maker.XLA
    if _makes(op, cpu_makes, avals_in, avals_out):
        return Maker.KERNEL
    return Maker.XLA if OPERATORS[op].quantizes else Maker.WIDER_KERNEL


def cpu_makes(input_dtype, result_dtype):
    return result_dtype == input_dtype or (result_dtype == jnp.int8 and input_dtype != jnp.float64)


def cuda_makes(input_dtype, result_dtype):
    """For operators that do not quantize; those that do have kernels for all dtypes."""
    is_narrow = result_dtype.name in ("float16", "bfloat16", "float32")
    return result_dtype == input_dtype or (is_narrow and input_dtype != jnp.float64)


def _makes(op, makes, avals_in, avals_out):
    """Whether a kernel of the platform, whose `makes` is given, has these inputs and this result."""
    inputs = {aval.dtype for aval in avals_in[: OPERATORS[op].inputs]}
    return len(inputs) == 1 and (not OPERATORS[op].element_results or makes(*inputs, avals_out[0].dtype))


# ---- Calls on CUDA.

# Compute capability, shared memory of a block, largest cluster, and numbers of multiprocessors: chips whose plans
# differ in when blocks exchange states.
_CHIPS = ((75, 64 << 10, 1), (86, 99 << 10, 1), (80, 163 << 10, 1), (90, 227 << 10, 16), (120, 99 << 10, 8))
_ALL_KINDS = [(capability, n, *rest) for n in (16, 132, 1024) for capability, *rest in _CHIPS]


def has_cuda_kernels(shape) -> bool:
    """Whether there are kernels for arrays of this rank, which can be compiled where the program will run.

    If this machine has no GPU, the program is for another one, where they can. If it has one, but they cannot be
    compiled for it, there is a warning, once.
    """
    if len(shape) > _kernels.MAX_DIMS:
        return False
    reason = cuda.availability()
    if reason is None or "gpu" not in {device.platform for device in jax.local_devices()}:
        return True
    partitioning.warn(f"runs as jax.numpy on this GPU: {reason}")
    return False


def without_cuda_kernel(op) -> Maker:
    """Who computes a call if its own kernel does not. For a loss of labels the kernel of logsumexp takes longest, and
    XLA only gathers elements at labels."""
    return Maker.COMPOSED if _is_loss_of_labels(op) else Maker.XLA


def _is_loss_of_labels(op):
    return OPERATORS[op].labelled and not OPERATORS[op].element_results


def on_cuda(op, avals_in, avals_out, axes, attributes) -> tuple[Maker, int, str]:
    """Who computes a call, how many bytes of scratch memory the kernel may need, and why XLA computes it."""
    if not has_cuda_kernels(avals_in[0].shape):
        return without_cuda_kernel(op), 0, NO_KERNEL if has_cuda_kernels(()) else NOT_COMPILED
    if not OPERATORS[op].quantizes and not _makes(op, cuda_makes, avals_in, avals_out):
        return Maker.WIDER_KERNEL, 0, ""
    shape, scratch, why = avals_in[0].shape, 0, SYMBOLIC
    for known in known_shapes(shape, axes):
        call = call_of(avals_in, avals_out, attributes, known)
        why = why_xla_makes(call)
        scratch = 0 if why else scratch_bytes(call)
        if scratch and known is not shape:  # its size may depend on the number of rows, which is not known
            why = SYMBOLIC
        if why:
            break
    return (without_cuda_kernel(op), 0, why) if why else (Maker.KERNEL, scratch, "")


def call_of(avals_in, avals_out, attributes, shape):
    """A call as `lowering.described` returns it. `shape`: x's, with an extent for each symbolic dimension."""
    operands, results = ([_typed(a, shape) for a in avals] for avals in (avals_in, avals_out))
    return {"operands": operands, "results": results, "attributes": attributes}


def known_shapes(shape, axes):
    """The shape; or, if it has symbolic dimensions, known shapes that stand for all it may be. No shape can if rows
    differ.

    A symbolic dimension outside of all reduced ones only changes the number of rows. Plans depend on that in ranges:
    with few rows for each multiprocessor, they spread a row over several. Powers of 2 lie in all these ranges. A
    symbolic dimension that is reduced, or inside of a reduced one, changes the rows themselves.
    """
    symbolic = [d for d, n in enumerate(shape) if not isinstance(n, int)]
    if not symbolic:
        return [shape]
    if symbolic[-1] >= min(axes, default=len(shape)):
        return []
    known = [n if isinstance(n, int) else 1 for n in shape]
    return [[rows if d == symbolic[0] else n for d, n in enumerate(known)] for rows in (1 << k for k in range(21))]


def _typed(aval, shape):
    """Shape and dtype, with the extents of `shape`, x's, for symbolic dimensions."""
    known = zip(aval.shape, shape[len(shape) - aval.ndim :], strict=True)
    return [n if isinstance(n, int) else m for n, m in known], aval.dtype.name


def plan_of(call, device, sources=True):
    """`_kernels.plan` of a call as `lowering.described` returns it. `device`: all of a `Gpu` but its copy rate."""
    return _kernels.plan(call["operands"], call["results"], call["attributes"], *device, sources)


def why_xla_makes(call) -> str:
    """Why XLA is to compute a call on the GPUs that it is for; "" if the kernel is.

    Raises a ValueError if there is no such call.
    """
    plans = _plans(call)
    if None in plans:
        return NO_KERNEL
    reasons = [why_xla(call, plan) for plan in plans[len(_ALL_KINDS) :] or plans]
    return reasons[0] if reasons and all(reasons) else ""


def scratch_bytes(call) -> int:
    """The bytes of scratch memory, for blocks to exchange states, that suffice on all devices for a call that its
    kernel makes."""
    return max((plan["scratch_bytes"] for plan in _plans(call)), default=0)


def start_compiling(call) -> None:
    """Starts to compile, for this machine's devices, the kernels of a call that they make."""
    for device in _kernels.devices_here() if _plans(call) else ():
        for step in plan_of(call, device)["steps"]:
            _kernels.jit_prepare(step["code"], step["plan"], device[0])


def _plans(call):
    """The plans for all kinds of GPUs and then for this machine's; none for an array without elements."""
    plans = [plan_of(call, device, sources=False) for device in (*_ALL_KINDS, *_kernels.devices_here())]
    return [] if 0 in call["operands"][0][0] and not OPERATORS[call["attributes"]["op"]].row_results else plans


# What `explain` says, besides the reasons of `why_xla`. docs/fusion.md says what they mean.
NOT_COMPILED = "no kernel can be compiled for this GPU"
NO_KERNEL = "no kernel covers it"
SYMBOLIC = "its plan depends on an extent that is a symbol"
_TIE = 0.95  # of XLA's bytes: where the kernel moves more, XLA counts as equally fast. Chosen
NOT_FEWER = f", not {100 * (1 - _TIE):.0f} % fewer"
MADE_OF_ROWS = "it is made where it is read, of another operator's results"
WITH_ANOTHER = "the program writes it out, and another operator of the same array is left to XLA"
_PACK, _SECTOR = 16, 32  # bytes
# Thresholds between views on which a kernel was faster and those on which XLA was: results.md, "Other axes" and "Rows,
# by length". never_slower.md has views that they leave to XLA, by kernels: its rows with shapes.
_SHORT_RUN = 8  # packs
_SHORT_RUN_IN_RING = 2048  # bytes
_IDLING = 3  # packs of a row that leave lanes idle


def why_xla(call, plan) -> str:
    """Why XLA is about as fast as a plan, or faster; "" where it is not.

    Where they are equal XLA is better: it fuses its own operations with those around them, but no custom call.
    """
    if plan is None:
        return NO_KERNEL
    facts, fields, schedule = OPERATORS[call["attributes"]["op"]], plan["fields"], plan["schedule"]
    run, line = plan["reduced"][-1]  # how many elements of a row lie at one distance, and this distance, in elements
    run_bytes, runs = run * jnp.dtype(call["operands"][0][1]).itemsize, len(plan["reduced"])
    two = facts.inputs == 2 and facts.element_results
    tiles = "fold" in fields
    if line == 1 and runs > 1 and not plan["aligned"] and run_bytes < _SHORT_RUN * _PACK:
        return "rows of short runs that do not begin with whole packs cost more at their edges"
    if _is_loss_of_labels(call["attributes"]["op"]) and line > 1:
        return "labels' elements are in lines far apart, and XLA has more of them under way at once"
    logarithm = facts.logarithms and facts.element_results and not facts.row_results
    idling = line == runs == 1 and plan["aligned"] and run_bytes == _IDLING * _PACK
    if logarithm and idling and not call["attributes"]["load"]:
        return "one in four lanes is idle, and each row takes a logarithm"
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
# Bytes are counted. The kernel reads each of its arrays once and writes its results. Added to that are: arrays that
# only the kernel reads, which XLA has to write for it; results that only XLA's loops read; sums over rows of results,
# which XLA would otherwise compute on the way, as in layer norm; and arrays in another order than the kernel's
# dimensions, which are read and written once more. XLA would not write such arrays, but would read its inputs several
# times (`_reads_of_xla`). A kernel that takes longer to compute than to move its bytes counts as moving as many bytes
# as it could in that time.

# The speed of XLA's kernels in which a block holds a row in registers, as a fraction of the memory's, by the most
# elements of a row. results.md, "softmax, bfloat16", column "forward: XLA": 0.91 at 1024 columns, 0.79 to 0.82 from
# 1999 to 8192. Longer float32 rows, and log_softmax, reach 0.89 to 0.95: kernels are then chosen a little too often.
_SPEED = {256: 1.0, 2048: 0.91, 8192: 0.81}
# Instructions of an operator for an element, one number for all operators: chosen. Bytes that an H200 moves in the time
# of one: 4.3 TB/s over 132 multiprocessors of 128 lanes at 1.7 GHz.
_INSTRUCTIONS_OF_OPERATOR, _BYTES_OF_INSTRUCTION = 8, 0.15


class Traffic(NamedTuple):
    """Bytes that are moved."""

    unfolded: int  # by the kernel if nothing were folded into it
    ours: int  # by the kernel with what is folded into it
    xla: int  # by XLA alone

    @property
    def kernel_wins(self) -> bool:
        return self.ours < _TIE * self.xla


def traffic_of(op, shape, axes, unfolded, ours, reads, writes_of_xla, row_bytes, instructions) -> Traffic:
    """The traffic of a kernel that moves `ours` bytes, and would move `unfolded` if nothing were folded into it.

    Both read `reads` bytes and write `row_bytes` of results of rows; XLA writes `writes_of_xla` besides.
    `instructions`: how many an element takes before the operator and after it.
    """
    before, after = instructions
    after += _INSTRUCTIONS_OF_OPERATOR
    instruction_bytes, reads_of_xla = _BYTES_OF_INSTRUCTION * math.prod(shape), _reads_of_xla(op, shape, axes)
    ours = max(ours, int(instruction_bytes * (before + after)))
    xla = max(reads_of_xla * reads + writes_of_xla, instruction_bytes * (reads_of_xla * before + after))
    length, speed = math.prod(shape[d] for d in axes), 1.0
    if xla_makes_whole_rows(op, shape, axes):
        speed = next(_SPEED[most] for most in sorted(_SPEED) if length <= most)
    return Traffic(unfolded, ours + row_bytes, int((xla + row_bytes) / speed))


def _reads_of_xla(op, shape, axes):
    """How often XLA reads an operator's inputs."""
    if xla_makes_whole_rows(op, shape, axes):
        return 1
    if OPERATORS[op].inputs == 2:
        return 2  # for the sum, and for the result
    return 3 if OPERATORS[op].element_results else 2  # for the maximum, for the sum, and for the result


def xla_makes_whole_rows(op, shape, axes) -> bool:
    """Whether XLA computes the operator by one kernel, of which a block has a whole row."""
    facts = OPERATORS[op]
    last = max((d for d, n in enumerate(shape) if n > 1), default=len(shape) - 1)
    inner = sorted(d for d in axes if shape[d] > 1)
    one_run = inner == list(range(last + 1 - len(inner), last + 1))
    is_unary = facts.inputs == 1 and facts.element_results and not facts.labelled
    return is_unary and one_run and math.prod(shape[d] for d in axes) <= max(_SPEED)


def why_xla_under_fuse(traffic: Traffic, why: str) -> str:
    """Why XLA computes a call; "" if its kernel does. `why`: whatever the traffic is."""
    if not has_cuda_kernels(()):
        return NOT_COMPILED
    moves = f"moves {byte_text(traffic.xla)}, the kernel {byte_text(traffic.ours)}"
    if not traffic.kernel_wins:
        return f"{moves}{NOT_FEWER if traffic.ours <= traffic.xla else ''}"
    return why and f"{why}, though it {moves}"


def byte_text(n: float) -> str:
    """A number of bytes with a unit."""
    for unit in ("B", "KiB", "MiB"):
        if n < 1024:
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1024
    return f"{n:.2f} GiB"


# Attention's kernels on an H200, by attention.md, "plain B8 S2048 H16 D64": picoseconds for a score, of B H S² ones, of
# the forward kernel (501 µs) and of both backward ones (1972 - 501 µs).
_FORWARD, _BACKWARD = 0.95, 2.7
_FEATURES = 64  # of a query and of a value in that row; times are proportional to them
_LEAST_OF_FEATURES = 0.7  # part of these times that a kernel takes with few features: chosen
_BYTES_OF_PICOSECOND = 3.6  # that memory moves: chosen between an H100's 3.0 and an H200's 4.3
_BLOCKS = 264  # that run at once: two on each of 132 multiprocessors


def attention_wins(attention, extents: dict[str, int], has_gradients: bool, score_bytes: int) -> bool:
    """Whether attention's kernels take less time than the program that has its weights in memory, which moves
    `score_bytes` for each score."""
    batch = math.prod(extents[c] for c in attention.letters.batch)
    features = max(_LEAST_OF_FEATURES, (extents["d"] + extents["e"]) / (2 * _FEATURES))
    times = {"forward": _FORWARD} | (dict.fromkeys(("keys", "queries"), _BACKWARD / 2) if has_gradients else {})
    ours = 0.0
    for kernel, time in times.items():
        tiling = _kernels.attention_tiling(kernel, extents["d"], extents["e"])
        stay, pass_by = (extents[c] for c in ("ji" if kernel == "keys" else "ij"))
        blocks, steps = -(-stay // tiling["rows"]), -(-pass_by // tiling["step"])
        scores = batch * blocks * tiling["rows"] * steps * tiling["step"]
        ours += time * features * scores * max(1, _BLOCKS / (batch * blocks))
    theirs = batch * extents["i"] * extents["j"] * score_bytes / _BYTES_OF_PICOSECOND
    theirs *= 2 if extents["j"] % 8 else 1  # rows that no product reads by whole packs
    return ours * attention.visible_part(**extents) <= theirs
