"""`explain`: which kernels a call runs on a GPU, in words, and the least time that its bytes take. Needs no GPU."""

import contextlib
import dataclasses
import math
import operator
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_softmax import _kernels
from jax_softmax.functions import arguments
from jax_softmax.primitives import reference
from jax_softmax.primitives.operators import OPERATORS
from jax_softmax.runtime import costs, judge
from jax_softmax.runtime.kernel_spec import described

Shape = tuple[int, ...]


class Gpu(NamedTuple):
    """The properties of a GPU that plans and least times depend on."""

    compute_capability: int  # 10 * major + minor
    multiprocessors: int
    shared_memory_per_block: int  # bytes, at most
    largest_cluster: int
    copy_rate: float  # bytes per second, read and written together


# Copy rates: the H200's as measured, the others 90 % of the data sheet's.
GPUS = {
    "H200": Gpu(90, costs.MULTIPROCESSORS, 227 << 10, 16, costs.COPY_RATE),
    "GH200": Gpu(90, 132, 227 << 10, 16, 0.9 * 4.0e12),
    "H100": Gpu(90, 132, 227 << 10, 16, 0.9 * 3.35e12),
    "H100 NVL": Gpu(90, 132, 227 << 10, 16, 0.9 * 3.9e12),
    "H100 PCIe": Gpu(90, 114, 227 << 10, 16, 0.9 * 2.0e12),
    "B200": Gpu(100, 148, 227 << 10, 16, 0.9 * 7.7e12),
    "A100": Gpu(80, 108, 163 << 10, 1, 0.9 * 2.039e12),
    "A100 40GB": Gpu(80, 108, 163 << 10, 1, 0.9 * 1.555e12),
    "A10": Gpu(86, 72, 99 << 10, 1, 0.9 * 600e9),
    "L4": Gpu(89, 58, 99 << 10, 1, 0.9 * 300e9),
    "L40S": Gpu(89, 142, 99 << 10, 1, 0.9 * 864e9),
    "T4": Gpu(75, 40, 64 << 10, 1, 0.9 * 320e9),
    "RTX 3090": Gpu(86, 82, 99 << 10, 1, 0.9 * 936e9),
    "RTX 4090": Gpu(89, 128, 99 << 10, 1, 0.9 * 1008e9),
    "RTX 5090": Gpu(120, 170, 99 << 10, 8, 0.9 * 1792e9),
}
# Words in a device's name that make it another chip than the rest of the name says, or a part of that.
_OTHER_CHIPS = {"LAPTOP", "MIG", "D", "TI"}

# The plan of `absmax_scale` depends on the result's dtype, which is part of these names.
_SCALED = {f"absmax_scale_{dtype}": dtype for dtype in reference.SCALED}
_KERNELS = {op: op for op in OPERATORS if not OPERATORS[op].quantizes}
_KERNELS |= dict.fromkeys(_SCALED, "absmax_scale")
# The kernels that other public functions run on their logits.
_FUNCTIONS = {
    "softmax_vjp": "softmax",
    "softmax_cross_entropy": "logsumexp",
    "softmax_cross_entropy_with_integer_labels": "cross_entropy",
    "cross_entropy_loss": "cross_entropy_gradient",
    "linear_cross_entropy": "cross_entropy_gradient",
}
_ALLOWED = "explain: x_or_shape must be an array, a jax.ShapeDtypeStruct, or a shape (a tuple of ints)"
_MOST_ELEMENTS = 2**63 - 1

_SCHEDULES = {
    "registers": "a row in the registers of the lanes that share it",
    "staged": "short rows side by side in shared memory, each in the registers of a few lanes",
    "chunks": "a row in the shared memory of blocks, chunk by chunk; they exchange only its maximum and sum",
    "ring": "chunks of all rows pass through rings in shared memory; blocks exchange only maxima and sums",
    "tile": "rows that are not one run of memory: neighbouring ones side by side in the shared memory of blocks",
    "twice": "a row too long to hold: read in pieces, twice if there are results for its elements",
    "jax.numpy": "XLA's own operations",
    "nothing": "the array is empty",
}


class Launch(NamedTuple):
    """How a kernel is launched."""

    blocks: int
    threads: int  # of a block
    cluster: int  # blocks that share a row through one another's shared memory
    shared_bytes: int  # dynamic shared memory of a block


@dataclasses.dataclass(frozen=True)
class Explanation:
    """The kernels that a call runs on a GPU; `str()` of it is a short text.

    Attributes:
      op: the operator.
      shape: the shape of the kernel's array.
      axes: the reduced axes.
      dtype: the dtype of the kernel's array.
      mask_shape: the mask's shape, or None.
      device: the name of the GPU.
      schedule: how a row is held while it is reduced; "jax.numpy" where XLA's own operations run, "nothing" for empty
        arrays.
      launches: `Launch(blocks, threads, cluster, shared_bytes)` of each kernel that the call runs, in order.
      bytes: how many bytes must be read and written, each once.
      why_xla: why XLA's own operations run; "" if kernels do.
      floor_us: the microseconds in which the GPU copies so many bytes, without the time of a launch.
    """

    op: str
    shape: tuple[int, ...]
    axes: tuple[int, ...]
    dtype: str
    mask_shape: tuple[int, ...] | None
    device: str
    schedule: str
    launches: tuple[Launch, ...]
    bytes: int
    why_xla: str
    floor_us: float

    def __str__(self) -> str:
        mask = "" if self.mask_shape is None else f", mask {self.mask_shape}"
        columns = math.prod(self.shape[d] for d in self.axes)
        rows = math.prod(n for d, n in enumerate(self.shape) if d not in self.axes)
        lines = [
            f"{self.op} of {self.dtype} {self.shape} along {self.axes}{mask}, {self.device}",
            f"rows      {rows:,} of {columns:,} columns",
            f"schedule  {self.schedule}: {_SCHEDULES[self.schedule]}{self.why_xla and f': {self.why_xla}'}",
        ]
        for blocks, threads, cluster, shared in self.launches:
            clusters = f" in clusters of {cluster}" if cluster > 1 else ""
            lines += [
                f"kernel    {blocks:,} x {threads:,} threads{clusters}, {shared:,} bytes of dynamic shared memory"
            ]
        reads, writes = _traffic(self.op)
        lines += [f"bytes     {self.bytes:,} ({reads} read, {writes} written{', the mask' if mask else ''})"]
        lines += [f"floor     {self.floor_us:.4g} µs at {GPUS[self.device].copy_rate / 1e12:.3g} TB/s"]
        return "\n  ".join(lines)


def explain(
    x_or_shape: Any,
    axis: arguments.Axis = -1,
    dtype: Any = None,
    where: Any = None,
    op: str = "softmax",
    device: Any = None,
) -> Explanation:
    """Explains which CUDA kernel a call runs on one GPU, and the least time that its memory traffic takes.

    Nothing is computed and no GPU is needed: `print(jax_softmax.explain((8192, 50257), dtype="bfloat16"))`. It is
    judged for this GPU alone. A program is judged for all GPUs of its machine, and left to XLA if that is as fast on
    each of them.

    Args:
      x_or_shape: an array, a `jax.ShapeDtypeStruct`, or a shape (a tuple of ints).
      axis: as for `softmax`.
      dtype: the dtype to explain for; by default that of the array, and float32 for a shape.
      where: a mask of elements: a boolean array or a `jax.ShapeDtypeStruct` of one.
      op: the name of a public function or of a kernel. For a loss, `x_or_shape` is its logits. For `cross_entropy_loss`
        and `linear_cross_entropy` the kernel is that of the differentiated function. For `kl_divergence` it is the
        second one, which runs after "logsumexp" of logits_q. `absmax_scale` is to x's own dtype. The names of kernels
        are: "softmax_linear" (softmax's derivative in both modes, of which `x_or_shape` is an operand),
        "log_softmax_jvp" and "log_softmax_vjp" (log_softmax's; the function `log_softmax_vjp` runs "log_softmax"),
        "softmax_gradient" and "log_softmax_gradient" (a gradient alone under `fuse`, of `x_or_shape`),
        "cross_entropy", "cross_entropy_gradient", and "absmax_scale_int8" and the like, for `absmax_scale` to that
        dtype.
      device: a GPU by name ("H200", "A100", "T4", "RTX 5090", ...) or a `jax.Device`; by default JAX's default device
        if that is a GPU known here, and an H200 otherwise. Copy rates are 90 % of the data sheet's, but for the H200's,
        which was measured.

    Returns:
      An `Explanation`.

    Raises:
      TypeError: an argument is of the wrong type or dtype.
      ValueError: axis is out of range or repeated, where does not broadcast, op or device is not known, or the array
        has 2^63 elements or more.
    """
    x = _shape_and_dtype(x_or_shape, dtype)
    if op == "absmax_scale":
        *_, dtype = _kernel_arguments("absmax_scale_float32", x, axis, where)
        op = f"absmax_scale_{dtype.name}"
    op = _FUNCTIONS.get(op, op)
    if op not in _KERNELS:
        allowed = ", ".join([*_KERNELS, "absmax_scale", *_FUNCTIONS])
        raise ValueError(f"explain: op must be one of {allowed}, got {op!r}.")
    device_name = _gpu_name(device)
    shape, axes, mask_shape, dtype = _kernel_arguments(op, x, axis, where)
    if 0 not in shape and math.prod(shape) > _MOST_ELEMENTS:
        raise ValueError(f"explain: arrays of 2^63 elements or more are not supported, got shape {shape}.")
    plan, why_xla = _plan(op, shape, axes, mask_shape, dtype, GPUS[device_name])
    if plan is None and 0 not in shape and judge.without_cuda_kernel(_KERNELS[op]) is judge.Maker.COMPOSED:
        return explain(x, axis, where=where, op="logsumexp", device=device)
    reads, writes = _traffic(op)
    result_dtype = np.dtype(_SCALED.get(op, dtype))
    mask_bytes = 0 if mask_shape is None or 0 in shape else math.prod(mask_shape)
    n_bytes = math.prod(shape) * (reads * dtype.itemsize + writes * result_dtype.itemsize) + mask_bytes
    return Explanation(
        op=op,
        shape=shape,
        axes=axes,
        dtype=dtype.name,
        mask_shape=mask_shape,
        device=device_name,
        schedule=plan["schedule"] if plan else "nothing" if 0 in shape else "jax.numpy",
        launches=tuple(Launch(*(step[name] for name in Launch._fields)) for step in plan["steps"]) if plan else (),
        bytes=n_bytes,
        why_xla=why_xla,
        floor_us=n_bytes / GPUS[device_name].copy_rate * 1e6,
    )


def _traffic(op: str) -> tuple[int, int]:
    """How many arrays of x's shape are read and written. Values of rows are not counted."""
    return OPERATORS[_KERNELS[op]].inputs, OPERATORS[_KERNELS[op]].element_results


def _plan(
    op: str, shape: Shape, axes: tuple[int, ...], mask_shape: Shape | None, dtype: np.dtype, gpu: Gpu
) -> tuple[judge.Plan | None, str]:
    """The kernels' plan, or None where no kernel runs; and why XLA's own operations do."""
    if 0 in shape or jnp.issubdtype(dtype, jnp.complexfloating) or len(shape) > _kernels.MAX_DIMS:
        return None, "" if 0 in shape else judge.NO_KERNEL
    mask_shape = None if mask_shape is None else (*[1] * (len(shape) - len(mask_shape)), *mask_shape)
    spec = described(_KERNELS[op], shape, axes, dtype.name, mask_shape, _SCALED.get(op))
    plan = spec.plan(*gpu[:-1])  # without its copy rate
    reason = judge.reason_on_gpu(spec, plan)
    return None if reason else plan, reason


def _gpu_name(device: Any) -> str:
    """The key in GPUS for `explain`'s argument `device`."""
    if device is None:
        default = jax.config.jax_default_device
        default = default if isinstance(default, jax.Device) else jax.devices(default)[0]
        return _matching_gpu(default.device_kind) or "H200"
    if not isinstance(device, str | jax.Device):
        raise TypeError(f"explain: device must be a name, a jax.Device or None, got {device!r}.")
    name = _matching_gpu(device if isinstance(device, str) else device.device_kind)
    if name is None:
        raise ValueError(f"explain: device must be one of {', '.join(GPUS)}, got {device!r}.")
    return name


def _matching_gpu(kind: str) -> str | None:
    """The longest key in GPUS all of whose words are in a device's name, such as NVIDIA A100-SXM4-40GB."""
    words = set(re.split(r"[^A-Z0-9]+", kind.upper()))
    names = [] if words & _OTHER_CHIPS else [name for name in GPUS if words >= set(name.upper().split())]
    return max(names, key=len, default=None)


def _shape_and_dtype(x: Any, dtype: Any) -> jax.ShapeDtypeStruct:
    """The shape and dtype of `explain`'s argument. Arrays are not copied to a device for that."""
    if isinstance(x, int):
        raise TypeError(f"{_ALLOWED}, got the int {x}.")
    if isinstance(x, tuple | list):
        try:
            shape = tuple(map(operator.index, x))
        except TypeError as error:
            raise TypeError(f"explain: a shape must be of ints, got {x!r}.") from error
        if not all(0 <= n <= _MOST_ELEMENTS for n in shape):
            raise ValueError(f"explain: a shape must be of ints from 0 to 2^63 - 1, got {x!r}.")
        x = jax.ShapeDtypeStruct(shape, np.float32)
    elif not isinstance(x, jax.ShapeDtypeStruct | jax.Array):
        like = np.empty((), x.dtype) if isinstance(x, np.ndarray) else x
        x = jax.ShapeDtypeStruct(np.shape(x), arguments.as_array(_ALLOWED, like).dtype)
    try:
        found = x.dtype if dtype is None else jnp.dtype(dtype)
    except TypeError:
        found = None
    if found is None or not arguments.is_dtype_of_jax(found):
        raise TypeError(f"explain: dtype must be one that JAX has, or None, got {dtype!r}.")
    return jax.ShapeDtypeStruct(x.shape, found)


def _kernel_arguments(
    op: str, x: jax.ShapeDtypeStruct, axis: Any, where: Any
) -> tuple[Shape, tuple[int, ...], Shape | None, np.dtype]:
    """The result's shape, the axes, the mask's shape, and the dtype of the kernel's array, checked as for softmax."""
    found = []

    def check_arguments(x: jax.Array, *given: jax.Array) -> None:
        checked = arguments.checked_real_array if OPERATORS[_KERNELS[op]].row_results else arguments.checked_array
        x, mask = checked("explain", x, "x_or_shape"), given[0] if given else where
        axes, mask, shape = arguments.checked_axes_and_mask("explain", x, axis, mask, "x_or_shape")
        if not jnp.issubdtype(x.dtype, jnp.complexfloating):
            x, _ = arguments.promoted(x)
        found.append((shape, axes, None if mask is None else mask.shape, np.dtype(x.dtype)))

    # 64-bit dtypes are explained even where JAX has them switched off.
    wide = x.dtype in ("float64", "complex128", "int64", "uint64")
    with jax.enable_x64(True) if wide else contextlib.nullcontext():
        jax.eval_shape(check_arguments, x, *([where] if isinstance(where, jax.ShapeDtypeStruct) else []))
    return found[0]
