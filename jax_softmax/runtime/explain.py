"""Which kernel a call runs on a GPU, and what it should cost there: the plan, in words. Needs no GPU."""

import contextlib
import dataclasses
import math
import operator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_softmax import _kernels
from jax_softmax.functions import arguments
from jax_softmax.primitives import reference
from jax_softmax.primitives.operators import KERNELS, OPERATORS
from jax_softmax.primitives.softmax import JVP
from jax_softmax.runtime import gpus

# What `absmax_scale` runs has the name of its result's dtype here, on which the plan depends.
_SCALED = {f"absmax_scale_{dtype}": dtype for dtype in reference.SCALED}
_KERNELS = {op: KERNELS.get(op, op) for op in OPERATORS if not OPERATORS[op].quantizes}
_KERNELS |= dict.fromkeys(_SCALED, "absmax_scale")
_OF_LABELS = tuple(op for op in OPERATORS if OPERATORS[op].labelled)
_OF_CLASSES = (*_OF_LABELS, "entropy", "kl_divergence")  # whose masks may not enlarge the result
_ALLOWED = "explain: x_or_shape must be an array, a jax.ShapeDtypeStruct, or a shape (a tuple of ints)"
_MOST_ELEMENTS = 2**63 - 1  # that 64 bits count

_SCHEDULES = {
    "registers": "a row in the registers of the lanes that share it",
    "staged": "short rows side by side in shared memory, each in the registers of a few lanes",
    "chunks": "a row in the shared memory of blocks, chunk by chunk; they exchange only its maximum and sum",
    "ring": "chunks of all rows pass through rings in shared memory; blocks exchange only maxima and sums",
    "tile": "rows that are not one run of memory: neighbouring ones side by side in the shared memory of blocks",
    "twice": "a row too long to hold: read in pieces, twice if there are results for its elements",
    "jax.numpy": "XLA's own operations: no kernel covers this, or none is faster",
    "nothing": "the array is empty",
}


class Launch(NamedTuple):
    """How a kernel is launched."""

    blocks: int
    threads: int  # of a block
    cluster: int  # blocks that share a row through one another's shared memory
    shared_bytes: int  # dynamic shared memory of a block


def _dims(dims: tuple[tuple[int, int], ...]) -> str:
    return ", ".join(f"{extent:,} (stride {stride:,})" for extent, stride in dims) or "none"


def _count(n: int, noun: str) -> str:
    return f"{n:,} {noun}{'' if n == 1 else 's'}"


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What a call runs on a GPU; `str()` of it is a short text.

    Attributes:
      op: the operator.
      shape: that of the array that the kernel gets.
      axes: the reduced ones.
      dtype: that in which the kernel gets the array.
      mask_shape: the mask's shape, or None.
      device: the name of the GPU.
      kept: (extent, stride in elements) of each kept dimension, outermost first. Dimensions of extent 1 are dropped,
        and neighbours that are both kept, or both reduced, are merged.
      reduced: the same of the reduced dimensions.
      rows: the product of the kept extents.
      columns: the product of the reduced extents.
      schedule: how a row is held while it is reduced; "jax.numpy" where XLA's own operations run, "nothing" for empty
        arrays.
      plan: the numbers that the schedule's kernels are made for; csrc/plan/plan.h says what each means. Empty where
        none runs.
      launches: `Launch(blocks, threads, cluster, shared_bytes)` of each kernel that the call runs, in order.
      bytes: what must be read and written, once each.
      copy_rate: bytes per second that the device copies at.
      floor_us: microseconds that moving `bytes` takes at that rate; a launch is not counted.
    """

    op: str
    shape: tuple[int, ...]
    axes: tuple[int, ...]
    dtype: str
    mask_shape: tuple[int, ...] | None
    device: str
    kept: tuple[tuple[int, int], ...]
    reduced: tuple[tuple[int, int], ...]
    rows: int
    columns: int
    schedule: str
    plan: dict[str, int] = dataclasses.field(hash=False)
    launches: tuple[Launch, ...]
    bytes: int
    copy_rate: float
    floor_us: float

    @property
    def description(self) -> str:
        """The schedule in a few words."""
        return _SCHEDULES.get(self.schedule, "")

    def __str__(self) -> str:
        mask = "" if self.mask_shape is None else f", mask {self.mask_shape}"
        lines = [f"{self.op} of {self.dtype} {self.shape} along {self.axes}{mask}, {self.device}"]

        def say(label, text):
            lines.append(f"  {label:<9} {text}")

        if self.reduced:
            say("view", f"kept {_dims(self.kept)}; reduced {_dims(self.reduced)}")
        say("rows", f"{_count(self.rows, 'row')} of {_count(self.columns, 'column')}")
        say("schedule", f"{self.schedule}: {self.description}" if self.description else self.schedule)
        if self.plan:
            say("plan", ", ".join(f"{name} {value:,}" for name, value in self.plan.items()))
        for launch in self.launches:
            clusters = f" in clusters of {launch.cluster}" if launch.cluster > 1 else ""
            shared = f"{launch.shared_bytes:,} bytes of dynamic shared memory"
            say("kernel", f"{_count(launch.blocks, 'block')} of {launch.threads:,} threads{clusters}, {shared}")
        what = ", ".join(_count(n, noun) for n, noun in zip(_traffic(self.op), ("read", "write"), strict=True) if n)
        say("bytes", f"{self.bytes:,} ({what}{', the mask' if mask else ''})")
        say("floor", f"{self.floor_us:.4g} µs at {self.copy_rate / 1e12:.3g} TB/s")
        return "\n".join(lines)


def explain(
    x_or_shape: Any,
    axis: arguments.Axis = -1,
    dtype: Any = None,
    where: Any = None,
    op: str = "softmax",
    device: str | jax.Device | None = None,
) -> Explanation:
    """Explains which CUDA kernel a call runs, and the least time that its memory traffic takes.

    Nothing is computed and no GPU is needed: `print(jax_softmax.explain((8192, 50257), dtype="bfloat16"))`.

    Args:
      x_or_shape: an array, a `jax.ShapeDtypeStruct`, or a shape (a tuple of ints).
      axis: as for `softmax`.
      dtype: the dtype to explain for; by default that of the array, and float32 for a shape.
      where: the mask: a boolean array or a `jax.ShapeDtypeStruct` of one, as the function that runs `op` takes it.
      op: "softmax" or "log_softmax", or one of their linear maps, of which `x_or_shape` is an operand:
        "softmax_linear" (softmax's derivative in both modes), "log_softmax_jvp", "log_softmax_vjp"; or "logsumexp",
        "cross_entropy", what losses of integer labels run, "cross_entropy_gradient", what a differentiated
        `cross_entropy_loss` runs, "entropy", or "kl_divergence", what the function of that name runs after "logsumexp"
        of its second operand; or "absmax_scale_int8" and the like, `absmax_scale` to that dtype.
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
    if op not in _KERNELS:
        raise ValueError(f"explain: op must be one of {', '.join(_KERNELS)}, got {op!r}.")
    device_name = gpus.name_of(device)
    x = _described(x_or_shape, dtype)
    shape, axes, mask_shape, kernel_dtype = _checked(op, x, axis, where)
    if 0 not in shape and math.prod(shape) > _MOST_ELEMENTS:
        raise ValueError(f"explain: arrays of 2^63 elements or more are not supported, got shape {shape}.")
    found = _planned(op, shape, axes, mask_shape, kernel_dtype, gpus.GPUS[device_name])
    if found is None and 0 not in shape and op == "cross_entropy":  # which is then made of another one's result
        return explain(x_or_shape, axis, dtype, where, "logsumexp", device)
    n_bytes, copy_rate = _bytes(op, shape, mask_shape, kernel_dtype), gpus.GPUS[device_name].copy_rate
    return Explanation(
        op=op,
        shape=shape,
        axes=axes,
        dtype=kernel_dtype.name,
        mask_shape=mask_shape,
        device=device_name,
        kept=tuple(found["kept"]) if found else (),
        reduced=tuple(found["reduced"]) if found else (),
        rows=math.prod(n for d, n in enumerate(shape) if d not in axes),
        columns=math.prod(n for d, n in enumerate(shape) if d in axes),
        schedule=found["schedule"] if found else "nothing" if 0 in shape else "jax.numpy",
        plan=found["fields"] if found else {},
        launches=tuple(Launch(*(step[name] for name in Launch._fields)) for step in found["steps"]) if found else (),
        bytes=n_bytes,
        copy_rate=copy_rate,
        floor_us=n_bytes / copy_rate * 1e6,
    )


def _planned(op, shape, axes, mask_shape, dtype, gpu):
    """The plan and its kernels, or None where none runs."""
    if 0 in shape or jnp.issubdtype(dtype, jnp.complexfloating) or len(shape) > _kernels.MAX_DIMS:
        return None
    found = _kernels.plan(
        list(shape),
        list(axes),
        _KERNELS[op],
        dtype.name,
        None if mask_shape is None else [*[1] * (len(shape) - len(mask_shape)), *mask_shape],
        compute_capability=gpu.compute_capability,
        multiprocessors=gpu.multiprocessors,
        shared_memory_per_block=gpu.shared_memory_per_block,
        largest_cluster=gpu.largest_cluster,
        out_dtype=_SCALED.get(op),
    )
    return found if found and found["faster_than_xla"] else None


def _traffic(op):
    """How many arrays of x's shape are read and written; what rows have is left out of account."""
    operator = OPERATORS[_KERNELS[op]]
    return operator.inputs, operator.element_results


def _bytes(op, shape, mask_shape, dtype):
    reads, writes = _traffic(op)
    result = np.dtype(_SCALED.get(op, reference.result_dtype(dtype)))
    n_bytes = math.prod(shape) * (reads * dtype.itemsize + writes * result.itemsize)
    return n_bytes if mask_shape is None or 0 in shape else n_bytes + math.prod(mask_shape)


def _described(x: Any, dtype: Any) -> jax.ShapeDtypeStruct:
    """The shape and dtype that `softmax` would see; arrays are not copied to find out."""
    if isinstance(x, tuple | list):
        try:
            shape = tuple(operator.index(n) for n in x)
        except TypeError as error:
            raise TypeError(f"explain: a shape must be of ints, got {x!r}.") from error
        if any(n < 0 for n in shape):
            raise ValueError(f"explain: a shape must not have negative entries, got {x!r}.")
        if any(n > _MOST_ELEMENTS for n in shape):
            raise ValueError(f"explain: a shape's entries must be less than 2^63, got {x!r}.")
        found = np.dtype("float32")
    elif hasattr(x, "shape") and hasattr(x, "dtype"):
        shape = tuple(x.shape)
        # NumPy's 64-bit arrays become 32-bit ones unless JAX has been told otherwise.
        found = x.dtype
        if isinstance(x, np.ndarray):
            found = arguments.checked_array("explain", np.empty((), found), "x_or_shape").dtype
    elif isinstance(x, int):
        raise TypeError(f"{_ALLOWED}, got the int {x}.")
    else:
        x = arguments.as_array(_ALLOWED, x)
        shape, found = x.shape, x.dtype
    return jax.ShapeDtypeStruct(shape, found if dtype is None else _dtype(dtype))


def _dtype(dtype: Any) -> np.dtype:
    try:
        found = jnp.dtype(dtype)
    except TypeError:
        found = None
    if found is None or not arguments.is_dtype_of_jax(found):
        raise TypeError(
            f"explain: dtype must be a floating, integer, boolean or complex one that JAX has, or None, got {dtype!r}."
        )
    return found


def _checked(op: str, x: jax.ShapeDtypeStruct, axis: Any, where: Any):
    """The result's shape, the axes, the mask's shape, and the dtype that the kernel gets, with softmax's own checks."""
    seen = []

    def check(x, *mask):
        x, mask = arguments.checked_array("explain", x, "x_or_shape"), mask[0] if mask else where
        if OPERATORS[_KERNELS[op]].row_results:
            arguments.checked_real_array("explain", x, "x_or_shape")
        if op in _OF_CLASSES and mask is not None:
            mask = arguments.of_rows_or_elements("explain", mask, x, axis, "x_or_shape")
        axes, mask, shape = arguments.checked_axes_and_mask("explain", x, axis, mask, "x_or_shape")
        if op in _OF_LABELS:
            arguments.check_classes("explain", shape, axes)
        if not jnp.issubdtype(x.dtype, jnp.complexfloating):
            x, _ = arguments.promoted(x)
            x = reference.without_narrow(x) if op not in JVP else x
        seen.append((shape, axes, None if mask is None else mask.shape, np.dtype(x.dtype)))

    # A 64-bit dtype that was asked for is explained even where JAX has 64-bit dtypes switched off.
    wide = x.dtype in ("float64", "complex128", "int64", "uint64")
    with jax.enable_x64(True) if wide else contextlib.nullcontext():
        jax.eval_shape(check, x, *([where] if isinstance(where, jax.ShapeDtypeStruct) else []))
    return seen[0]
