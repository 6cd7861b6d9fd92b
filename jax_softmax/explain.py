"""Which kernel a call runs on a GPU, and what it should cost there: the plan, in words. Needs no GPU."""

import contextlib
import dataclasses
import math
import operator
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_softmax import _kernels, api
from jax_softmax.primitives import JVP, VJP

_FORWARD = tuple(JVP)
_LINEAR = tuple(dict.fromkeys([*JVP.values(), *VJP.values()]))

_SCHEDULES = {
    "packs": "several rows in 16 or 32 bytes, each in one thread",
    "slab": "rows side by side in shared memory, each in the registers of a few lanes",
    "lanes": "a row in the registers of up to 32 lanes of a warp",
    "block": "a row in the registers of a block",
    "chunks": "a row in the shared memory of blocks, chunk by chunk; they exchange only its maximum and sum",
    "ring": "chunks of all rows pass through rings in shared memory; blocks exchange only maxima and sums",
    "passes": "a row too long to hold: read twice, in pieces",
    "stream": "a row too long to hold: read twice by a block, the second time from L2 where it fits",
    "tile": "rows that are not one run of memory: neighbouring ones side by side in the shared memory of blocks",
    "tile_passes": "the same, read twice in pieces: of rows too long to hold, or slower to hold than to read again",
    "strips": "parts of few lines, or small arrays, in the shared memory of blocks, a row in up to 16 lanes of a warp",
    "gather": "rows that are not one run of memory, read twice by a block",
    "columns": "the minor axis is kept: neighbouring rows side by side, read twice by a block",
    "jax.numpy": "no kernel for this dtype or number of dimensions",
    "nothing": "the array is empty",
}
_EDGES = {
    "none": "every thread's packs are full",
    "whole": "packs beyond the row are skipped",
    "parts": "elements beyond the row or under the mask are skipped",
    "parts_of_many": "elements beyond the row or under the mask are skipped, by larger teams",
}


class _Device(NamedTuple):
    compute_capability: int  # 10 * major + minor
    multiprocessors: int
    shared_memory_per_block: int  # bytes, opted in
    largest_cluster: int
    copy_rate: float  # bytes per second, read and written together


# Copy rates: the H200's as measured, the others 90 % of the data sheet's.
_DEVICES = {
    "H200": _Device(90, 132, 227 << 10, 16, 4.3e12),
    "GH200": _Device(90, 132, 227 << 10, 16, 0.9 * 4.0e12),
    "H100": _Device(90, 132, 227 << 10, 16, 0.9 * 3.35e12),
    "H100 NVL": _Device(90, 132, 227 << 10, 16, 0.9 * 3.9e12),
    "H100 PCIe": _Device(90, 114, 227 << 10, 16, 0.9 * 2.0e12),
    "B200": _Device(100, 148, 227 << 10, 16, 0.9 * 7.7e12),
    "A100": _Device(80, 108, 163 << 10, 1, 0.9 * 2.039e12),
    "A100 40GB": _Device(80, 108, 163 << 10, 1, 0.9 * 1.555e12),
    "A10": _Device(86, 72, 99 << 10, 1, 0.9 * 600e9),
    "L4": _Device(89, 58, 99 << 10, 1, 0.9 * 300e9),
    "L40S": _Device(89, 142, 99 << 10, 1, 0.9 * 864e9),
    "V100": _Device(70, 80, 96 << 10, 1, 0.9 * 900e9),
    "T4": _Device(75, 40, 64 << 10, 1, 0.9 * 320e9),
    "RTX 3090": _Device(86, 82, 99 << 10, 1, 0.9 * 936e9),
    "RTX 4090": _Device(89, 128, 99 << 10, 1, 0.9 * 1008e9),
    "RTX 5090": _Device(120, 170, 99 << 10, 8, 0.9 * 1792e9),
}
# Words that make a chip another one, or a part of one, than its name says.
_OTHER_CHIPS = {"LAPTOP", "MIG", "D", "TI"}


def _dims(dims: tuple[tuple[int, int], ...]) -> str:
    return ", ".join(f"{extent:,} (stride {stride:,})" for extent, stride in dims) or "none"


def _count(n: int, noun: str) -> str:
    return f"{n:,} {noun}{'' if n == 1 else 's'}"


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What a call runs on a GPU; `str()` of it is a short text.

    Attributes:
      op, shape, axes, dtype: the operator, and the array that the kernel gets, in the dtype that it gets it in.
      mask_shape: the mask's shape, or None.
      device: the name of the GPU.
      kept, reduced: the canonical view, outermost first: (extent, stride in elements) of every dimension that is left
        after those of extent 1 were dropped and neighbours of one role were merged.
      rows, columns: the products of the kept and of the reduced extents.
      schedule: how a row is held while it is reduced; "jax.numpy" where there is no kernel, "nothing" for empty arrays.
      edges: which checks the loads and stores need: none, whole (packs), parts (of packs), or parts_of_many, the same
        in rows of many chunks.
      lanes: threads that share a row.
      packs: 16-byte packs of each operand that a thread has room for (slab, strips: elements; tile: in shared memory;
        0: none).
      chunks: parts that a row is cut into, which are exchanged or read one by one; 0 where it is not.
      again: chunks of them that are read twice, where the chip does not hold them all.
      cluster: blocks that share a row through one another's shared memory.
      threads, blocks, shared_bytes: threads of a block, blocks of the grid, dynamic shared memory of a block.
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
    edges: str
    lanes: int
    packs: int
    chunks: int
    again: int
    cluster: int
    threads: int
    blocks: int
    shared_bytes: int
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

        if self.threads:
            say("view", f"kept {_dims(self.kept)}; reduced {_dims(self.reduced)}")
        say("rows", f"{_count(self.rows, 'row')} of {_count(self.columns, 'column')}")
        say("schedule", f"{self.schedule}: {self.description}" if self.description else self.schedule)
        if self.threads:
            unit = "elements" if self.schedule in ("slab", "strips") else "16-byte packs"
            held = f" with {self.packs} {unit} of each operand" if self.packs else ""
            again = f" ({self.again:,} read twice)" if self.again else ""
            cut = f", {_count(self.chunks, 'chunk')}{again}" if self.chunks else ""
            say("a row", f"{_count(self.lanes, 'lane')}{held}{cut}, {_count(self.cluster, 'block')} a cluster")
            say("edges", f"{self.edges}: {_EDGES.get(self.edges, '')}".rstrip(": "))
            shared = f"{self.shared_bytes:,} bytes of dynamic shared memory"
            say("grid", f"{_count(self.blocks, 'block')} of {_count(self.threads, 'thread')}, {shared}")
        what = "2 reads, 1 write" if self.op in _LINEAR else "1 read, 1 write"
        say("bytes", f"{self.bytes:,} ({what}{', the mask' if mask else ''})")
        say("floor", f"{self.floor_us:.4g} µs at {self.copy_rate / 1e12:.3g} TB/s")
        return "\n".join(lines)


def explain(
    x_or_shape: Any,
    axis: api.Axis = -1,
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
      where: the mask: a boolean array or a `jax.ShapeDtypeStruct` of one.
      op: "softmax" or "log_softmax", or one of their linear maps, of which `x_or_shape` is an operand:
        "softmax_linear" (softmax's derivative in both modes), "log_softmax_jvp", "log_softmax_vjp".
      device: a GPU by name ("H200", "A100", "T4", "RTX 5090", ...) or a `jax.Device`; by default JAX's default device
        if that is a GPU known here, and an H200 otherwise. Copy rates are 90 % of the data sheet's, but for the H200's,
        which was measured.

    Returns:
      An `Explanation`.

    Raises:
      TypeError: an argument is of the wrong type.
      ValueError: axis is out of range or repeated, where does not broadcast, or op or device is not known.
    """
    if op not in (*_FORWARD, *_LINEAR):
        raise ValueError(f"explain: op must be one of {', '.join((*_FORWARD, *_LINEAR))}, got {op!r}.")
    device_name = _device_name(device)
    model = _DEVICES[device_name]
    x = _described(x_or_shape, dtype)
    shape, axes, mask_shape, kernel_dtype = _checked(x, axis, where)
    complex_valued = jnp.issubdtype(kernel_dtype, jnp.complexfloating)

    plan = {
        "kept": (),
        "reduced": (),
        "rows": math.prod(n for d, n in enumerate(shape) if d not in axes),
        "columns": math.prod(n for d, n in enumerate(shape) if d in axes),
        "edges": "none",
        **dict.fromkeys(("lanes", "packs", "chunks", "again", "cluster", "threads", "blocks", "shared_bytes"), 0),
    }
    if 0 in shape:
        plan["schedule"] = "nothing"
    elif complex_valued or len(shape) > _kernels.MAX_DIMS:
        plan["schedule"] = "jax.numpy"
    else:
        full_mask = None if mask_shape is None else [*[1] * (len(shape) - len(mask_shape)), *mask_shape]
        chosen = _kernels.plan(
            list(shape),
            list(axes),
            op,
            kernel_dtype.name,
            full_mask,
            compute_capability=model.compute_capability,
            multiprocessors=model.multiprocessors,
            shared_memory_per_block=model.shared_memory_per_block,
            largest_cluster=model.largest_cluster,
        )
        plan = {key: chosen[key] for key in (*plan, "schedule")}
    plan["kept"], plan["reduced"] = tuple(plan["kept"]), tuple(plan["reduced"])

    tensors = 3 if op in _LINEAR else 2
    n_bytes = tensors * math.prod(shape) * kernel_dtype.itemsize
    if mask_shape is not None and 0 not in shape:
        n_bytes += math.prod(mask_shape)
    return Explanation(
        op=op,
        shape=shape,
        axes=axes,
        dtype=kernel_dtype.name,
        mask_shape=mask_shape,
        device=device_name,
        bytes=n_bytes,
        copy_rate=model.copy_rate,
        floor_us=n_bytes / model.copy_rate * 1e6,
        **plan,
    )


def _described(x: Any, dtype: Any) -> jax.ShapeDtypeStruct:
    """The shape and dtype that `softmax` would see; arrays are not copied to find out."""
    if isinstance(x, tuple | list):
        try:
            shape = tuple(operator.index(n) for n in x)
        except TypeError as error:
            raise TypeError(f"explain: a shape must be of ints, got {x!r}.") from error
        if any(n < 0 for n in shape):
            raise ValueError(f"explain: a shape must not have negative entries, got {x!r}.")
        found = np.dtype("float32")
    elif hasattr(x, "shape") and hasattr(x, "dtype"):
        shape = tuple(x.shape)
        # NumPy's 64-bit arrays become 32-bit ones unless JAX has been told otherwise.
        found = api._checked_array("explain", np.empty((), x.dtype)).dtype if isinstance(x, np.ndarray) else x.dtype
    else:
        x = api._checked_array("explain", x)
        shape, found = x.shape, x.dtype
    return jax.ShapeDtypeStruct(shape, found if dtype is None else jnp.dtype(dtype))


def _checked(x: jax.ShapeDtypeStruct, axis: Any, where: Any):
    """The result's shape, the axes, the mask's shape, and the dtype that is computed in, with softmax's own checks."""
    seen = []

    def check(x, *mask):
        x = api._checked_array("explain", x)
        axes, mask, shape = api._checked_axes_and_mask("explain", x, axis, mask[0] if mask else where)
        if not jnp.issubdtype(x.dtype, jnp.complexfloating):
            x, _ = api._promoted(x)
        seen.append((shape, axes, None if mask is None else mask.shape, np.dtype(x.dtype)))

    # A 64-bit dtype that was asked for is explained even where JAX has 64-bit dtypes switched off.
    wide = x.dtype in ("float64", "complex128", "int64", "uint64")
    with jax.enable_x64(True) if wide else contextlib.nullcontext():
        jax.eval_shape(check, x, *([where] if isinstance(where, jax.ShapeDtypeStruct) else []))
    return seen[0]


def _device_name(device: Any) -> str:
    """The key in _DEVICES."""
    if device is None:
        default = jax.config.jax_default_device
        default = default if isinstance(default, jax.Device) else jax.devices(default)[0]
        return (_known(default.device_kind) if default.platform == "gpu" else None) or "H200"
    if not isinstance(device, str | jax.Device):
        raise TypeError(
            f"explain: device must be a name, a jax.Device or None, got one of type {type(device).__name__}."
        )
    kind = device if isinstance(device, str) else device.device_kind
    name = _known(kind)
    if name is None:
        raise ValueError(f"explain: device must be one of {', '.join(_DEVICES)}, got {kind!r}.")
    return name


def _known(kind: str) -> str | None:
    """The entry all of whose words are in a device's name, such as NVIDIA A100-SXM4-40GB; the one of most words."""

    def words(text):
        return set(re.split(r"[^A-Z0-9]+", text.upper())) - {""}

    given = words(kind)
    names = [] if given & _OTHER_CHIPS else [name for name in _DEVICES if words(name) <= given]
    return max(names, key=lambda name: len(words(name)), default=None)
