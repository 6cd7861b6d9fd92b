"""Who computes a call that a kernel can compute: the kernel, or XLA.

- `on_cpu` and `on_cuda`: for a call that is lowered. `reason_on_gpu` has the views on which XLA is as fast.
- `reason_against_attention`: for attention under `fuse`. For other calls there, bytes decide first:
  `fusion/kernels/traffic.py`.

A reason is why XLA computes a call, in words; it is "" where the kernel does. Prices are those of `costs.py`.

Elsewhere stands what is about more than one call: `fusion/rewriting.py` leaves all that is written out of an array,
`fusion/primitive.py` a whole program, and `devices/partitioning.py` what it cannot divide.

If this machine has GPUs, the decision is for them; otherwise the program is for another machine, and the decision is
for all kinds of GPUs.
"""

import enum
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_softmax import _kernels
from jax_softmax.devices import partitioning
from jax_softmax.primitives.operators import OPERATORS
from jax_softmax.primitives.records import LINEAR_MAPS, RECORDS
from jax_softmax.runtime import costs, cuda, kernel_spec
from jax_softmax.runtime.kernel_spec import KernelSpec

Avals = Sequence[jax.core.ShapedArray]
Plan = dict[str, Any]  # of `_kernels.plan`
Makes = Callable[..., bool]  # whether a kernel takes the first dtype and gives the second

# KERNEL: the operator's kernel. WIDER_KERNEL: its kernel in a dtype that holds all inputs. COMPOSED: another operator's
# kernel and XLA, by `composed` of the record. XLA: XLA alone.
Maker = enum.Enum("Maker", "KERNEL WIDER_KERNEL COMPOSED XLA")


# ---- Calls on a CPU. Where there is a kernel, it runs, also in those cases of cpu.md in which XLA is faster.


def on_cpu(op: str, avals_in: Avals, avals_out: Avals) -> Maker:
    shape = avals_in[0].shape
    if not OPERATORS[op].on_cpu:
        return Maker.COMPOSED if RECORDS[op].composed else Maker.XLA
    if len(shape) > _kernels.MAX_DIMS or 0 in shape:
        return Maker.XLA
    if _makes(op, cpu_makes, avals_in, avals_out):
        return Maker.KERNEL
    return Maker.XLA if OPERATORS[op].quantizes else Maker.WIDER_KERNEL


def cpu_makes(input_dtype: np.dtype, result_dtype: np.dtype) -> bool:
    return result_dtype == input_dtype or (result_dtype == jnp.int8 and input_dtype != jnp.float64)


def cuda_makes(input_dtype: np.dtype, result_dtype: np.dtype) -> bool:
    """For operators that do not quantize; those that do have kernels for all dtypes."""
    is_narrow = result_dtype.name in ("float16", "bfloat16", "float32")
    return result_dtype == input_dtype or (is_narrow and input_dtype != jnp.float64)


def _makes(op: str, makes: Makes, avals_in: Avals, avals_out: Avals) -> bool:
    """Whether a kernel of the platform, whose `makes` is given, has these inputs and this result."""
    inputs = {aval.dtype for aval in avals_in[: OPERATORS[op].inputs]}
    return len(inputs) == 1 and (not OPERATORS[op].element_results or makes(*inputs, avals_out[0].dtype))


# ---- Calls on CUDA.

# Compute capability, shared memory of a block, largest cluster, and numbers of multiprocessors: chips whose plans
# differ in when blocks exchange states.
_CHIPS = ((75, 64 << 10, 1), (86, 99 << 10, 1), (80, 163 << 10, 1), (90, 227 << 10, 16), (120, 99 << 10, 8))
_ALL_KINDS = tuple((capability, n, *rest) for n in (16, 132, 1024) for capability, *rest in _CHIPS)


def has_cuda_kernels(shape: Sequence[int]) -> bool:
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


def without_cuda_kernel(op: str) -> Maker:
    """Who computes a call if its own kernel does not. For a loss of labels the kernel of logsumexp takes longest, and
    XLA only gathers elements at labels."""
    return Maker.COMPOSED if _is_loss_of_labels(op) else Maker.XLA


def _is_loss_of_labels(op: str) -> bool:
    return OPERATORS[op].labelled and not OPERATORS[op].element_results


def on_cuda(op: str, avals_in: Avals, avals_out: Avals, axes: Sequence[int]) -> tuple[Maker, int, str]:
    """Who computes a call, how many bytes of scratch memory the kernel may need, and the reason for XLA."""
    if not has_cuda_kernels(avals_in[0].shape):
        return without_cuda_kernel(op), 0, NO_KERNEL if has_cuda_kernels(()) else NOT_COMPILED
    if not OPERATORS[op].quantizes and not _makes(op, cuda_makes, avals_in, avals_out):
        return Maker.WIDER_KERNEL, 0, ""
    shape, scratch, reason = avals_in[0].shape, 0, SYMBOLIC
    for known in known_shapes(shape, axes):
        spec = kernel_spec.of_operator(op, axes, avals_in, avals_out, known)
        reason = reason_on_all_gpus(spec)
        scratch = 0 if reason else scratch_bytes(spec)
        if scratch and known is not shape:  # its size may depend on the number of rows, which is not known
            reason = SYMBOLIC
        if reason:
            break
    return (without_cuda_kernel(op), 0, reason) if reason else (Maker.KERNEL, scratch, "")


def known_shapes(shape: Sequence[Any], axes: Sequence[int]) -> list[Sequence[int]]:
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


def reason_on_all_gpus(spec: KernelSpec) -> str:
    """Why XLA computes a call on all of the GPUs that it is for.

    Raises:
      ValueError: there is no such call.
    """
    if None in plans_of(spec, _devices()):
        return NO_KERNEL
    reasons = [reason_on_gpu(spec, plan) for plan in plans_of(spec, _devices_here() or _ALL_KINDS)]
    return reasons[0] if reasons and all(reasons) else ""


def scratch_bytes(spec: KernelSpec) -> int:
    """The bytes of scratch memory, for blocks to exchange states, that suffice on all devices for a call that its
    kernel makes."""
    return max((plan["scratch_bytes"] for plan in plans_of(spec, _devices())), default=0)


def start_compiling(spec: KernelSpec) -> None:
    """Starts to compile, for this machine's devices, the kernels of a call that they make."""
    for device in _devices_here() if plans_of(spec, _devices()) else ():
        plan: Any = spec.plan(*device)
        for step in plan["steps"]:
            _kernels.jit_prepare(step["code"], step["plan"], device[0])


def _devices_here() -> tuple[tuple[int, ...], ...]:
    return tuple(_kernels.devices_here())


def _devices() -> tuple[tuple[int, ...], ...]:
    """All kinds of GPUs, and this machine's."""
    return _ALL_KINDS + _devices_here()


@functools.lru_cache(256)
def plans_of(spec: KernelSpec, devices: tuple[tuple[int, ...], ...]) -> list[Any]:
    """The plans of a call, without sources, for these devices, or None; none for an array without elements."""
    plans = [spec.plan(*device, sources=False) for device in devices]
    return [] if 0 in spec.operands[0][0] and not OPERATORS[spec.op].row_results else plans


# What `explain` says, besides the reasons of `reason_on_gpu`. docs/fusion.md says what they mean.
NOT_COMPILED = "no kernel can be compiled for this GPU"
NO_KERNEL = "no kernel covers it"
SYMBOLIC = "its plan depends on an extent that is a symbol"
MADE_OF_ROWS = "it is made where it is read, of another operator's results"
WITH_ANOTHER = "the program writes it out, and another operator of the same array is left to XLA"
MORE_MEMORY = "with kernels the program would need"
IN_A_CHAIN = "with other operators it is one kernel of XLA"
_PACK, _SECTOR = 16, 32  # bytes
# Thresholds between views on which a kernel was faster and those on which XLA was: results.md, "Other axes" and "Rows,
# by length". never_slower.md has views that they leave to XLA, by kernels: its rows with shapes.
_SHORT_RUN = 8  # packs
_SHORT_RUN_IN_RING = 2048  # bytes
_IDLING = 3  # packs of a row that leave lanes idle


def reason_on_gpu(spec: KernelSpec, plan: Plan | None) -> str:
    """Why XLA is about as fast as a GPU's plan of a call, or faster.

    Where they are equal XLA is better: it fuses its own operations with those around them, but no custom call.
    """
    if plan is None:
        return NO_KERNEL
    facts, fields, schedule = OPERATORS[spec.op], plan["fields"], plan["schedule"]
    run, line = plan["reduced"][-1]  # how many elements of a row lie at one distance, and this distance, in elements
    run_bytes, runs = run * jnp.dtype(spec.operands[0][1]).itemsize, len(plan["reduced"])
    two = spec.op in LINEAR_MAPS
    tiles = "fold" in fields
    if line == 1 and runs > 1 and not plan["aligned"] and run_bytes < _SHORT_RUN * _PACK:
        return "rows of short runs that do not begin with whole packs cost more at their edges"
    if _is_loss_of_labels(spec.op) and line > 1:
        return "labels' elements are in lines far apart, and XLA has more of them under way at once"
    logarithm = facts.logarithms and facts.element_results and not facts.row_results
    idling = line == runs == 1 and plan["aligned"] and run_bytes == _IDLING * _PACK
    if logarithm and idling and not spec.load:
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


# ---- Attention under `fuse`.


class Attention(NamedTuple):
    """What attention's kernels would do, and what they would save."""

    batch: int
    batch_of_keys: int  # of which the rest of the batch is a multiple, that shares keys
    extents: dict[str, int]  # of queries i, keys j, features d, and features of values e
    visible_part: float  # of all scores, those that kernels visit
    kernels: Mapping[str, bool]  # those that would run, and whether each reads arrays of queries x keys
    score_bytes: float  # which the program moves for a score
    n_products: float  # which the program makes of or with arrays of queries x keys
    bytes_of_number: int = 2  # of q, k and v as kernels read them
    bytes_of_query: int = 2  # in the program


def reason_against_attention(work: Attention) -> str:
    """Why attention's kernels do not make it: that they, with their calls, take longer than the program that has its
    weights in memory."""
    extents, features = work.extents, (work.extents["d"] + work.extents["e"]) / 2
    multiple = max(costs.ATTENTION_LEAST, features / costs.ATTENTION_FEATURES)
    capabilities = {device[0] for device in _devices_here()}
    capability = capabilities.pop() if len(capabilities) == 1 else 0  # of several kinds, and of none, not Hopper's
    ours = 0.0
    for kernel, reads_arrays in work.kernels.items():
        stay, pass_by = (extents[c] for c in ("ji" if kernel == "keys" else "ij"))
        tile = kernel, stay, extents["d"], extents["e"], work.bytes_of_number, reads_arrays, capability
        rows, step, is_hoppers = _kernels.attention_tile(*tile)
        rows_of_blocks, steps = -(-stay // rows), -(-pass_by // step)
        scores = work.batch * rows_of_blocks * rows * steps * step
        blocks = rows_of_blocks * (work.batch_of_keys if kernel == "keys" else work.batch)
        price = _price_on_hopper(kernel) if is_hoppers else _price(kernel, features, work.bytes_of_number, reads_arrays)
        ours += price * multiple * scores * max(1, costs.MULTIPROCESSORS / blocks)
    theirs: float = work.batch * extents["i"] * extents["j"]
    theirs *= work.score_bytes + work.n_products * features * costs.PRODUCT_OF_FEATURE * work.bytes_of_query / 2
    theirs *= 2 if extents["j"] % 8 else 1  # rows that no product reads by whole packs
    ours = ours * work.visible_part + len(work.kernels) * costs.CALL
    if ours <= theirs * costs.WORTH_NO_WEIGHTS:
        return ""
    times = [f"{n / costs.BYTES_OF_PICOSECOND / 1e6:,.2f} µs" for n in (ours, theirs)]
    return f"its kernels would take longer: {times[0]}, XLA {times[1]}"


def _price_on_hopper(kernel: str) -> float:
    is_forward = kernel == "forward"
    return costs.ATTENTION_FORWARD_ON_HOPPER if is_forward else costs.ATTENTION_BACKWARD_ON_HOPPER / 2


def _price(kernel: str, features: float, bytes_of_number: int, reads_arrays: bool) -> float:
    """What a kernel that is not Hopper's takes for a score, if times are proportional to features."""
    forward = kernel in ("forward", "scores", "tangents")
    price = costs.ATTENTION_FORWARD if forward else costs.ATTENTION_BACKWARD / 2
    if kernel == "tangents":
        price *= costs.ATTENTION_TANGENTS
    if features > costs.ATTENTION_FEW_FEATURES and kernel not in ("forward", "scores"):
        price *= costs.ATTENTION_MANY
    if bytes_of_number == 4:
        price *= costs.ATTENTION_OF_FLOAT32 * (costs.ATTENTION_WITH_ARRAYS if reads_arrays else 1)
    return price
