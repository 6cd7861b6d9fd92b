"""What the tests share: a float64 reference with its error bounds, the functions under test, and makers of inputs.

A bound is derived, not measured: it follows the roundings of an implementation that computes in float32 (float64 for
float64), keeps y in the dtype of the result, and sums a row in pieces. It scales with the dtype of the result, with an
element's distance from its row's maximum (exp turns an absolute error into a relative one) and, slowly, with the
length of the row: pieces of up to 64 terms may be added one after the other, which costs half the square root of their
number in units of the last place, and the pieces themselves are added in a tree.
"""

import contextlib
import functools
import math
import re
from typing import NamedTuple

import jax
import ml_dtypes
import numpy as np
import pytest

import jax_softmax
from jax_softmax import _kernels
from jax_softmax.runtime import cuda
from jax_softmax.runtime.lowering import attributes, described

OPERATORS = {"softmax": jax_softmax.softmax, "log_softmax": jax_softmax.log_softmax}
CUSTOM_VJPS = {"softmax": jax_softmax.softmax_vjp, "log_softmax": jax_softmax.log_softmax_vjp}
JAX_NN = {"softmax": jax.nn.softmax, "log_softmax": jax.nn.log_softmax}
NAMES = tuple(OPERATORS)
every_name = pytest.mark.parametrize("name", NAMES)
DTYPES = ("float16", "bfloat16", "float32", "float64")
ON_CUDA = DTYPES[:3]  # float64 is left to XLA there
NARROW = ("float8_e4m3fn", "float8_e5m2", "int8", "uint8")  # that are computed as float32


def device(compute_capability, multiprocessors, shared_kilobytes, largest_cluster):
    return {
        "compute_capability": compute_capability,
        "multiprocessors": multiprocessors,
        "shared_memory_per_block": shared_kilobytes << 10,
        "largest_cluster": largest_cluster,
    }


# What plans are made for.
H200 = device(90, 132, 227, 16)
DEVICES = {
    "T4": device(75, 40, 64, 1),
    "A100": device(80, 108, 163, 1),
    "RTX 3090": device(86, 82, 99, 1),
    "H200": H200,
    "B200": device(100, 148, 227, 16),
    "RTX 5090": device(120, 170, 99, 8),
}
# The kernels: those that have results for rows, the others, and those that read two arrays of one shape.
KERNELS = _kernels.OPERATORS
ROW_OPS = tuple(op for op, facts in KERNELS.items() if facts["row_results"])
OPS = tuple(op for op in KERNELS if op not in ROW_OPS)
TWO_OPERANDS = tuple(op for op, facts in KERNELS.items() if facts["inputs"] == 2)
LARGEST = {"int8": 127, "float8_e4m3fn": 448, "float8_e5m2": 57344}  # what absmax_scale makes of a row's maximum


# Arrays and axes for functions that have results for rows.
VIEWS_OF_ROWS = [
    ((7, 32), -1),
    ((5, 1000), 1),
    ((3, 50257), -1),
    ((300, 7), -1),
    ((6, 130), 0),
    ((3, 33, 24), 1),
    ((4, 5, 6), (0, 2)),
    ((4, 5), None),
    ((9, 1), 1),
    ((11,), 0),
    ((2, 3), ()),
]


class Way(NamedTuple):
    """A view that leads to a schedule: on a GPU as it is, or a smaller one."""

    shape: tuple[int, ...]
    axes: tuple[int, ...]
    small: bool = False

    @property
    def limits(self):
        return {"shared_memory_per_block": 64 << 10, "largest_cluster": 1} if self.small else {}

    def plan(self, op="softmax", dtype="bfloat16", mask_shape=None, on=H200, **fused):
        on = {**on, **{key: min(on[key], value) for key, value in self.limits.items()}}
        return plan(self.shape, self.axes, op, dtype, mask_shape, on, **fused)


# Together they reach every kernel: test_schedules.py holds them to it.
WAYS = [
    Way((37, 32), (1,)),
    Way((5, 1999), (1,)),
    Way((5, 8192), (1,)),
    Way((5, 16, 12, 16), (1, 3)),
    Way((300, 7), (1,)),
    Way((40, 65), (1,)),
    Way((67, 8191), (1,)),
    Way((5, 50257), (1,)),
    Way((63, 3, 1023), (0, 2)),
    Way((2, 300_000), (1,)),
    Way((33, 300_001), (1,)),
    Way((3, 300, 7), (1,)),
    Way((5, 130), (0,)),
    Way((9, 64, 256), (1,)),
    Way((2, 3000, 96), (1,)),
    Way((12, 5, 13, 33), (0, 2)),
    Way((2, 300_001), (1,), small=True),
    Way((2, 300_000), (1,), small=True),
    Way((2, 30_000, 33), (1,), small=True),
    Way((2, 30_000, 64), (1,), small=True),
    Way((1, 301, 2, 33, 33), (1, 3), small=True),
]


def kernel_names(plan):
    """The functions of csrc/device that the plan's kernels call."""
    return [re.search(r"using namespace jax_softmax::device;\s*(\w+)", step["code"])[1] for step in plan["steps"]]


@contextlib.contextmanager
def limited(**limits):
    """Plans are made as if every GPU had no more than this."""
    _kernels.limit_devices(**limits)
    jax.clear_caches()
    try:
        yield
    finally:
        _kernels.limit_devices()
        jax.clear_caches()


def why_no_cuda():
    """Why the CUDA kernels cannot run here, or None if they can."""
    if jax.default_backend() != "gpu":
        return "needs a GPU"
    return cuda.availability()


def on_a_cpu():
    """The context in which arrays that are not on several devices are on the first CPU, also where there is a GPU."""
    return jax.default_device(jax.devices("cpu")[0])


def mesh_of_cpus(shape, kind=jax.sharding.AxisType.Auto):
    """Of the simulated devices that conftest.py asks for."""
    cpus = jax.devices("cpu")
    if len(cpus) < math.prod(shape):
        pytest.skip(f"needs {math.prod(shape)} devices")
    devices = cpus[: math.prod(shape)]
    return jax.make_mesh(shape, ("data", "model"), axis_types=(kind, kind), devices=devices)


def in_haste(f, *operands):
    """Of the operands, in one program that XLA compiles in haste: what it computes matters, and not its code."""
    return compiled_in_haste(f, *operands)(*operands)


def compiled_in_haste(f, *operands):
    haste = {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else None
    return jax.jit(f).lower(*operands).compile(compiler_options=haste)


def assert_close(actual, expected, rtol, atol=0.0):
    """Arrays, or trees of them."""
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=atol)


def same_derivatives(ours, theirs, orders, operands, rtol, atol):
    """Of two functions, each by one program of derivatives of all these orders."""
    found, expected = (in_haste(lambda *args, f=f: [d(f)(*args) for d in orders], *operands) for f in (ours, theirs))
    assert_close(found, expected, rtol, atol)


# First and second derivatives, in both modes and in every order of them; and a third.
FIRST = (jax.jacfwd, jax.jacrev)
SECOND = (jax.hessian, lambda f: jax.jacrev(jax.jacrev(f)))
THIRD = (lambda f: jax.jacfwd(jax.hessian(f)),)


def kept_bytes(pullback):
    """Of what a backward pass keeps of the forward one."""
    return sum(a.nbytes for a in jax.tree.leaves(pullback) if hasattr(a, "nbytes"))


# Roundings of exp, of a reciprocal or division, and of a product or two.
ROUNDINGS = 4


def name_of(value):
    return getattr(value, "__name__", str(value))


def sampled(names, cases, every, ids=name_of, **options):
    """As pytest.mark.parametrize, but plain `pytest` has every so many-th case alone; `--sweeps` has all."""
    params = []
    for i, case in enumerate(cases):
        values = case if "," in names else (case,)
        params.append(pytest.param(*values, marks=[pytest.mark.sweep] if i % every else []))
    return pytest.mark.parametrize(names, params, ids=ids, **options)


_COLLECTIVE = re.compile(
    r"= (\S+|\(.*?\)) (all-gather|all-reduce|all-to-all|collective-[a-z]+|reduce-scatter)(?:-start)?\("
)


def collectives(program):
    """Those of a compiled program, each with the number of elements that a device sends or receives."""
    found = []
    for types, kind in _COLLECTIVE.findall(program.as_text()):
        sizes = [math.prod(map(int, filter(None, dims.split(",")))) for dims in re.findall(r"\[([\d,]*)\]", types)]
        found.append((kind, sum(sizes)))
    return found


def plan(shape, axes, op="softmax", dtype="float32", mask_shape=None, on=H200, sides=(), **fused):
    """`sides`: shapes and dtypes of the arrays that expressions read; or "index", of an index."""
    roles = [f"index:{np.argmax(shape)}" if dtype == "index" else "array" for shape, dtype in sides]
    beside = [side for side in sides if side[1] != "index"]
    call = described(op, shape, axes, dtype, mask_shape, arrays=" ".join(roles), beside=beside, **fused)
    return _kernels.plan(**call, **on)


def call_kernel(
    op, *operands, axes, out_dtype=None, more_results=(), arrays="", load="", store="", scratch_bytes=0, in_place=None
):
    """The custom call itself, on a GPU, wherever the lowering would rather have XLA's own operations.

    `arrays`: the roles of what the expressions `load` and `store` read, whose operands come after the operator's own.
    `in_place`: the operand whose place the first result takes. Its result, or all of them if there are several."""
    x = operands[0]
    of_elements, of_rows = KERNELS[op]["element_results"], KERNELS[op]["row_results"]
    rows = [1 if d in axes else n for d, n in enumerate(x.shape)]
    results = of_elements * [jax.ShapeDtypeStruct(x.shape, out_dtype or x.dtype)]
    results += [jax.ShapeDtypeStruct(x.shape, dtype) for dtype in more_results]
    results += of_rows * [jax.ShapeDtypeStruct(rows, np.float64 if x.dtype == np.float64 else np.float32)]
    n = len(results)
    if scratch_bytes:
        results.append(jax.ShapeDtypeStruct((scratch_bytes,), np.uint8))
    aliases = None if in_place is None else {in_place: 0}
    call = jax.ffi.ffi_call("jax_softmax", results, input_output_aliases=aliases)
    given = attributes(op, axes, operands[-1].dtype == bool, arrays, load, store)
    found = jax.jit(lambda *operands: call(*operands, **given)[:n])(*operands)
    return found if n > 1 or op in ROW_OPS else found[0]


def row_numbers(op, shape, axes, dtype, seed=3):
    """What rows have of their own, as an operator of ROW_OPS takes it."""
    rows = [1 if d in axes else n for d, n in enumerate(shape)]
    wide = np.float64 if np.dtype(dtype) == np.float64 else np.float32
    operands = [normal(rows, wide, seed=seed + i, scale=0.5) for i in range(KERNELS[op]["row_numbers"])]
    if KERNELS[op]["labelled"]:
        # The first two rows have no label, the next their first element and their last.
        columns = int(np.prod([shape[d] for d in axes]))
        label = np.random.default_rng(seed).integers(0, columns, rows, np.int32)
        some = min(label.size, 4)
        label.reshape(-1)[:some] = [-1, columns, 0, columns - 1][:some]
        operands.append(label)
    return operands


def precision(dtype):
    """The context in which arrays of `dtype` exist."""
    return jax.enable_x64(True) if np.dtype(dtype).itemsize == 8 else contextlib.nullcontext()


class Bounded(NamedTuple):
    """A float64 (or wider) array, how far from it a result may be, and the dtype of that result."""

    value: np.ndarray
    bound: np.ndarray
    dtype: np.dtype


class _Rounding(NamedTuple):
    dtype: np.dtype  # of the result
    store: float  # relative error of storing a result
    compute: float  # relative error of an operation
    tiny: float  # absolute error of storing a result that may underflow

    @classmethod
    def of(cls, dtype):
        dtype = np.dtype(dtype)
        info = ml_dtypes.finfo(dtype)
        wide = np.float64 if dtype == np.float64 else np.float32
        # float16's subnormals are exact multiples of the smallest one; those of wider exponents may be flushed to zero.
        tiny = info.smallest_subnormal if dtype == np.float16 else max(info.tiny, np.finfo(wide).tiny)
        store = 0.0 if dtype == wide else 0.51 * float(info.eps)
        return cls(dtype, store, float(np.finfo(wide).eps), float(tiny))


class _Rows(NamedTuple):
    """A row's elements and what they amount to, with the bound of every element of the result."""

    rounding: _Rounding
    keep: np.ndarray
    axes: tuple[int, ...]
    sum_error: float  # relative error of summing a row of terms of one sign
    y: np.ndarray
    y_bound: np.ndarray

    def sum(self, terms):
        return np.sum(np.where(self.keep, terms, 0.0), axis=self.axes, keepdims=True)

    def masked(self, array, fill):
        return np.where(self.keep, array, fill)


def _sum_error(rounding, length):
    """The relative error of summing so many terms of one sign."""
    return rounding.compute * (ROUNDINGS + np.sqrt(min(length, 64)) / 2 + np.sqrt(length) / 128)


def _axes_of(axis, ndim):
    if axis is None:
        return tuple(range(ndim))
    return tuple(int(a) % ndim for a in (axis if isinstance(axis, tuple) else (axis,)))


def _widened(array):
    array = np.asarray(array)
    return array.astype(np.longdouble if array.dtype == np.float64 else np.float64)


def _rows(name, x, axis, where):
    x = np.asarray(x)
    rounding = _Rounding.of(x.dtype)
    where = np.asarray(True if where is None else where)
    shape = np.broadcast_shapes(x.shape, where.shape)
    keep = np.broadcast_to(where, shape)
    axes = _axes_of(axis, len(shape))
    length = int(np.prod([shape[a] for a in axes]))
    sum_error = _sum_error(rounding, length)

    # The reference's own roundings must not count: more than float64 has, where that is what is checked.
    wide = np.where(keep, np.broadcast_to(_widened(x), shape), -np.inf)
    depth = wide - np.max(wide, axis=axes, keepdims=True, initial=-np.inf)
    total = np.sum(np.exp(depth), axis=axes, keepdims=True)
    if name == "softmax":
        fill = 0.0
        y = np.exp(depth) / total
        relative = rounding.store + rounding.compute * np.abs(depth) + sum_error
        bound = np.where(y > 0, relative * y + rounding.tiny, 0.0)
        # Too small for float64, so the bound is all there is to it, unless it is the exact zero of a -inf.
        bound = np.where((y == 0) & np.isfinite(depth), rounding.tiny, bound)
    else:
        fill = -np.inf
        y = depth - np.log(total)
        bound = rounding.compute * (np.abs(depth) + np.abs(np.log(total))) + sum_error
        bound = np.where(np.isfinite(y), bound + rounding.store * np.abs(y) + rounding.tiny, 0.0)
    return _Rows(rounding, keep, axes, sum_error, np.where(keep, y, fill), np.where(keep, bound, 0.0))


@np.errstate(invalid="ignore", divide="ignore", over="ignore", under="ignore")
def reference(name, x, axis=-1, where=None):
    rows = _rows(name, x, axis, where)
    return Bounded(rows.y, rows.y_bound, rows.rounding.dtype)


@np.errstate(invalid="ignore", divide="ignore", over="ignore", under="ignore")
def reference_logsumexp(x, axis=-1, where=None, keepdims=False):
    """The logarithm of the sum of exponentials in the dtype of the arithmetic, and the maximum."""
    rounding, wide, keep, axes = _masked_rows(x, axis, where)
    largest = np.max(wide, axis=axes, keepdims=True, initial=-np.inf)
    shift = np.where(np.isfinite(largest), largest, 0)
    log_total = np.log(np.sum(np.exp(wide - shift), axis=axes, keepdims=True))
    lse = shift + log_total
    length = int(np.prod([keep.shape[a] for a in axes]))
    bound = rounding.compute * (2 * np.abs(shift) + np.abs(log_total) + np.abs(lse)) + _sum_error(rounding, length)
    dtype = np.dtype(np.float64 if rounding.dtype == np.float64 else np.float32)
    results = [
        Bounded(lse, np.where(np.isfinite(lse), bound, 0), dtype),
        Bounded(np.where(np.isnan(lse), np.nan, largest), np.zeros_like(lse), dtype),
    ]
    if not keepdims:
        results = [Bounded(np.squeeze(v, axes), np.squeeze(b, axes), dtype) for v, b, _ in results]
    return results


@np.errstate(invalid="ignore", divide="ignore", over="ignore", under="ignore")
def reference_normalizer(x, axes, where=None):
    """The maximum, and the sum of exp(x - maximum), relative to 0 where it is infinite. Only sums show NaNs."""
    rounding, wide, keep, axes = _masked_rows(x, axes, where)
    largest = np.fmax.reduce(wide, axis=axes, keepdims=True, initial=-np.inf)
    total = np.sum(np.exp(wide - np.where(np.isfinite(largest), largest, 0)), axis=axes, keepdims=True)
    length = int(np.prod([keep.shape[a] for a in axes]))
    bound = np.where(np.isfinite(total), total * _sum_error(rounding, length), 0)
    dtype = np.dtype(np.float64 if rounding.dtype == np.float64 else np.float32)
    return Bounded(largest, np.zeros_like(largest), dtype), Bounded(total, bound, dtype)


@np.errstate(invalid="ignore")
def reference_distances(x, axes, where=None):
    """Of elements that are neither masked nor -inf: the sum of x - maximum, 0 where it is infinite; and the number."""
    rounding, wide, keep, axes = _masked_rows(x, axes, where)
    largest, _ = reference_normalizer(x, axes, where)
    counted = keep & (wide != -np.inf)
    distance = np.where(counted, wide - np.where(np.isfinite(largest.value), largest.value, 0), 0)
    error = rounding.compute * 3 + _sum_error(rounding, math.prod(keep.shape[a] for a in axes))
    total, bound = (np.sum(a, axes, keepdims=True) for a in (distance, error * np.abs(distance)))
    count = np.sum(counted, axes, keepdims=True).astype(np.float64)
    exact = np.zeros_like(count)
    return Bounded(total, np.where(np.isfinite(total), bound, 0), largest.dtype), Bounded(count, exact, largest.dtype)


def _is_label(label, axes, shape):
    """Which elements of an array of this shape are their row's label, counted in row-major order."""
    axes = _axes_of(axes, len(shape))
    columns = np.arange(math.prod(shape[d] for d in axes)).reshape([n if d in axes else 1 for d, n in enumerate(shape)])
    return columns == label


@np.errstate(invalid="ignore", divide="ignore", over="ignore", under="ignore")
def reference_cross_entropy(x, label, axes, where=None):
    """lse - x[label], or 0 of a label that is no element of its row; and what reference_normalizer gives."""
    rounding, _, keep, axes = _masked_rows(x, axes, where)
    largest, total = reference_normalizer(x, axes, where)
    found = _is_label(label, axes, keep.shape)
    logit = np.sum(np.where(found, _widened(x), 0), axes, keepdims=True)
    # From the maximum, in which no digits are lost.
    depth = logit - np.where(np.isfinite(largest.value), largest.value, 0)
    loss = np.where(found.any(axes, keepdims=True), np.log(total.value) - depth, 0)
    bound = total.bound / total.value + rounding.compute * (np.abs(np.log(total.value)) + np.abs(depth) + np.abs(loss))
    counts = np.isfinite(loss) & found.any(axes, keepdims=True)
    return Bounded(loss, np.where(counts, bound, 0), largest.dtype), largest, total


@np.errstate(invalid="ignore", divide="ignore", over="ignore", under="ignore")
def reference_cross_entropy_gradient(x, factor, lse_factor, offset, at_label, label, axes, where=None):
    """The gradient, as `records.py` defines it; then what reference_normalizer gives."""
    rounding, wide, keep, axes = _masked_rows(x, axes, where)
    lse = reference_logsumexp(x, axes, where, keepdims=True)[0]
    largest, total = reference_normalizer(x, axes, where)
    factor, lse_factor, offset, at_label = map(_widened, (factor, lse_factor, offset, at_label))
    y = np.exp(wide - lse.value)
    depth = np.where(np.isfinite(wide), wide - largest.value, 0)
    weight = factor + lse_factor * lse.value
    relative = rounding.compute * (8 + np.abs(depth)) + _sum_error(rounding, math.prod(keep.shape[k] for k in axes))
    bound = y * (np.abs(weight) * relative + 4 * rounding.compute * (np.abs(factor) + np.abs(lse_factor * lse.value)))
    bound = np.where(keep, bound + y * np.abs(lse_factor) * lse.bound + 2 * rounding.compute * np.abs(offset), 0)
    added = np.where(_is_label(label, axes, keep.shape), at_label, 0)
    g = np.where(keep, y * weight + offset, 0) + added
    stored = 2 * rounding.compute * np.abs(added) + rounding.store * np.abs(g) + rounding.tiny
    return Bounded(g, np.where(keep | (added != 0), bound + stored, 0), rounding.dtype), largest, total


@np.errstate(invalid="ignore", divide="ignore", over="ignore", under="ignore")
def reference_absmax_scale(x, axis=-1, where=None, dtype=None):
    """y and the scales, to the bit: no rounding is left open but that of float64 to 8 or 16 bits.

    Where division is to the nearest, and the quotient not below 2^-100.
    """
    x = np.asarray(x)
    shape = np.broadcast_shapes(x.shape, np.shape(True if where is None else where))
    keep = np.broadcast_to(np.asarray(True if where is None else where), shape)
    wide = np.float64 if x.dtype == np.float64 else np.float32
    kept = np.where(keep, x.astype(wide), wide(0))
    largest = np.max(np.abs(kept), axis=_axes_of(axis, len(shape)), keepdims=True, initial=0)
    dtype = np.dtype(dtype or x.dtype)
    tiny = np.finfo(wide).tiny
    if dtype.name in LARGEST:
        scale = largest * (1 / wide(LARGEST[dtype.name]))
        y = kept * np.where(scale < tiny, 0, wide(LARGEST[dtype.name]) / largest)
        y = np.nan_to_num(np.rint(y)) if dtype == np.int8 else y.astype(np.float32)
    else:
        scale = largest
        y = kept / np.where(scale < tiny, np.inf, scale)
    y = np.where(keep, y, 0).astype(dtype)
    scale = np.where(scale < tiny, 0, scale).astype(wide)
    return [Bounded(v.astype(wide), np.zeros(v.shape), v.dtype) for v in (y, scale)]


@np.errstate(invalid="ignore", divide="ignore", over="ignore", under="ignore")
def reference_entropy(x, axis=-1, where=None, y=None, largest_y=0.0, log_sum=0.0):
    """The entropy of p = softmax(x), or the mean of log p - (y - largest_y - log_sum); the maximum, and the sum."""
    rounding, wide, keep, axes = _masked_rows(x, axis, where)
    largest = np.max(wide, axis=axes, keepdims=True, initial=-np.inf)
    depth = wide - np.where(largest == -np.inf, 0, largest)
    total = np.sum(np.exp(depth), axis=axes, keepdims=True)
    p, log_total = np.exp(depth) / total, np.log(total)

    def mean(values):
        return np.sum(np.where(p == 0, 0, p * values), axis=axes, keepdims=True)

    other = (
        np.zeros_like(depth) if y is None else np.where(keep, _widened(y) - _widened(largest_y) - _widened(log_sum), 0)
    )
    moment = mean(depth - other)
    # Of an exponential, relative to itself; of the sums, relative to the sum of exponentials.
    of_term = rounding.compute * (ROUNDINGS + np.abs(depth))
    sum_error = _sum_error(rounding, int(np.prod([keep.shape[d] for d in axes])))
    of_total = mean(of_term) + sum_error
    values = np.abs(depth) + np.abs(other) + np.abs(_widened(log_sum))
    of_moment = mean((of_term + 3 * rounding.compute) * values) + sum_error * mean(values)
    of_log_total = of_total + rounding.compute * 2 * np.abs(log_total)
    bound = of_moment + np.abs(moment) * (of_total + 2 * rounding.compute) + of_log_total + rounding.tiny
    result = (log_total - moment) if y is None else (moment - log_total)
    exists = keep.any(axes, keepdims=True)
    result = np.where(exists, result, 0)
    bound = bound + rounding.compute * np.abs(result)
    dtype = np.dtype(np.float64 if rounding.dtype == np.float64 else np.float32)
    return [
        Bounded(result, np.where(np.isfinite(result) & exists, bound, 0), dtype),
        Bounded(largest, np.zeros_like(log_total), dtype),
        Bounded(total, np.where(np.isfinite(total) & (total > 0), total * of_total, 0), dtype),
    ]


def row_case(op, shape, axes, dtype, where=None):
    """Operands for an operator of ROW_OPS, but for the mask, and its results in float64."""
    x, of_rows = normal(shape, dtype), row_numbers(op, shape, axes, dtype)
    if op == "logsumexp":
        return [x], reference_normalizer(x, axes, where)
    if op == "logsumexp_and_distances":
        return [x], [*reference_normalizer(x, axes, where), *reference_distances(x, axes, where)]
    if op == "cross_entropy_gradient_and_distances":
        results = reference_cross_entropy_gradient(x, *of_rows, axes, where)
        return [x, *of_rows], [*results, *reference_distances(x, axes, where)]
    if op == "softmax_and_normalizer":
        return [x], [reference("softmax", x, axes, where), *reference_normalizer(x, axes, where)]
    if op == "absmax_scale":
        return [x], reference_absmax_scale(x, axes, where)
    if op == "cross_entropy":
        return [x, *of_rows], reference_cross_entropy(x, *of_rows, axes, where)
    if op == "cross_entropy_gradient":
        return [x, *of_rows], reference_cross_entropy_gradient(x, *of_rows, axes, where)
    if op == "kl_divergence":
        y = normal(shape, dtype, seed=1)
        return [x, y, *of_rows], reference_entropy(x, axes, where, y, *of_rows)
    return [x], reference_entropy(x, axes, where)


def _masked_rows(x, axis, where):
    x = np.asarray(x)
    shape = np.broadcast_shapes(x.shape, np.shape(True if where is None else where))
    keep = np.broadcast_to(np.asarray(True if where is None else where), shape)
    wide = np.where(keep, np.broadcast_to(_widened(x), shape), -np.inf)
    return _Rounding.of(x.dtype), wide, keep, _axes_of(axis, len(shape))


@np.errstate(invalid="ignore", divide="ignore", over="ignore", under="ignore")
def reference_vjp(name, x, g, axis=-1, where=None):
    """The cotangent of x, given that of the result; a mask that enlarges the result sums over what it repeats."""
    rows = _rows(name, x, axis, where)
    rounding, y, y_bound = rows.rounding, rows.y, rows.y_bound
    g = rows.masked(_widened(g), 0.0)
    if name == "softmax":
        mean = rows.sum(y * g)
        mean_bound = rows.sum(y_bound * np.abs(g)) + rows.sum_error * rows.sum(np.abs(y * g))
        dx = y * (g - mean)
        bound = y_bound * np.abs(g - mean) + (y + y_bound) * mean_bound
        bound = bound + 2 * rounding.compute * y * (np.abs(g) + np.abs(mean))
        untouched = y_bound == 0
    else:
        p = np.exp(y)
        p_bound = p * np.expm1(y_bound + rounding.compute * (2 + np.where(p > 0, np.abs(y), 0.0)))
        total = rows.sum(g)
        dx = g - p * total
        bound = p_bound * np.abs(total) + (p + p_bound) * rows.sum_error * rows.sum(np.abs(g))
        bound = bound + 2 * rounding.compute * (np.abs(g) + p * np.abs(total))
        untouched = ~rows.keep
    bound = np.where(untouched, 0.0, bound + rounding.store * np.abs(dx) + rounding.tiny)
    dx = rows.masked(dx, 0.0)

    shape = np.shape(x)
    added = tuple(range(dx.ndim - len(shape)))
    repeated = added + tuple(i for i in range(len(added), dx.ndim) if shape[i - len(added)] == 1 and dx.shape[i] != 1)
    if repeated:
        copies = int(np.prod([dx.shape[i] for i in repeated]))
        eps = max(2 * rounding.store, rounding.compute)
        bound = np.sum(bound, axis=repeated) + copies * eps * np.sum(np.abs(dx), axis=repeated)
        dx, bound = np.sum(dx, axis=repeated).reshape(shape), bound.reshape(shape)
    return Bounded(dx, bound, rounding.dtype)


@np.errstate(invalid="ignore", divide="ignore", over="ignore", under="ignore")
def reference_linear(op, y, t, axes, dtype, where=None):
    """What the linear maps make of a softmax or log-softmax y and of t, which are taken to be exact."""
    rounding = _Rounding.of(dtype)
    keep = np.broadcast_to(np.asarray(True if where is None else where), np.shape(y))
    y, t = _widened(y), np.where(keep, _widened(t), 0.0)
    length = int(np.prod([y.shape[a] for a in axes]))
    sum_error = _sum_error(rounding, length)

    def total(terms):
        return np.sum(np.where(keep, terms, 0.0), axis=axes, keepdims=True)

    if op == "softmax_linear":
        mean, mean_bound = total(y * t), sum_error * total(np.abs(y * t))
        result = y * (t - mean)
        bound = np.abs(y) * mean_bound + 2 * rounding.compute * np.abs(y) * (np.abs(t) + np.abs(mean))
    else:
        p = np.where(keep, np.exp(y), 0.0)
        p_error = rounding.compute * (2 + np.where(p > 0, np.abs(y), 0.0))  # relative
        weight, terms = (1.0, p * t) if op == "log_softmax_jvp" else (p, t)
        scaled = weight * total(terms)
        result = t - scaled
        bound = weight * sum_error * total(np.abs(terms)) + 2 * rounding.compute * (np.abs(t) + np.abs(scaled))
        bound = bound + (total(np.abs(terms) * p_error) if op == "log_softmax_jvp" else np.abs(scaled) * p_error)
    bound = bound + rounding.store * np.abs(result) + rounding.tiny
    return Bounded(np.where(keep, result, 0.0), np.where(keep, bound, 0.0), rounding.dtype)


def check(actual, expected, label=""):
    """`actual` has the expected shape, dtype, infinities and NaNs, and is otherwise within the bound."""
    actual = np.asarray(actual)
    assert actual.shape == expected.value.shape, f"{label}: shape {actual.shape}, expected {expected.value.shape}"
    assert actual.dtype == expected.dtype, f"{label}: dtype {actual.dtype}, expected {expected.dtype}"
    wide = _widened(actual)
    with np.errstate(invalid="ignore"):
        finite = np.isfinite(expected.value)
        off = np.where(finite, ~(np.abs(wide - expected.value) <= expected.bound), wide != expected.value)
        off &= ~(np.isnan(wide) & np.isnan(expected.value))
    if not np.any(off):
        return
    first = tuple(int(i) for i in np.argwhere(off)[0])
    with np.errstate(all="ignore"):
        excess = np.nanmax(np.where(off & finite, np.abs(wide - expected.value) / expected.bound, 0.0))
    raise AssertionError(
        f"{label}: {np.sum(off)} of {off.size} elements are off, the first at {first}: got {wide[first]!r}, expected "
        f"{expected.value[first]!r} within {expected.bound[first]:.3g}; the worst is {excess:.3g} times the bound"
    )


def check_float8(actual, expected, dtype):
    """Rounded from a float32 that is within a few units of the float64: the neighbour only next to a tie."""
    actual = np.asarray(actual)
    assert actual.dtype == dtype and actual.shape == expected.shape
    rounded = expected.astype(dtype)
    np.testing.assert_array_equal(np.isnan(actual), np.isnan(rounded))
    actual, rounded = np.nan_to_num(actual.astype(float)), np.nan_to_num(rounded.astype(float))
    assert np.mean(actual != rounded) <= 0.01
    info = ml_dtypes.finfo(dtype)
    np.testing.assert_allclose(actual, rounded, rtol=float(info.eps), atol=float(info.smallest_subnormal))


@functools.partial(jax.jit, static_argnames=("axis", "names"))
def run_all(x, g, axis=-1, where=None, names=NAMES):
    """Result and cotangent of every operator, in one program."""
    out = {}
    for name in names:
        y, pullback = jax.vjp(lambda x, name=name: OPERATORS[name](x, axis, where), x)
        out[name] = y, pullback(g)[0]
    return out


def check_all(x, axis=-1, where=None, names=NAMES):
    """Result and cotangent of every operator against the float64 reference."""
    shape = np.broadcast_shapes(np.shape(x), np.shape(where if where is not None else True))
    g = normal(shape, x.dtype, seed=1, scale=1.0)
    with precision(x.dtype):
        actual = jax.device_get(run_all(x, g, axis, where, names))
    for name in names:
        label = f"{name} of {x.dtype}{list(x.shape)}, axis {axis}"
        y, dx = actual[name]
        check(y, reference(name, x, axis, where), label)
        check(dx, reference_vjp(name, x, g, axis, where), f"vjp of {label}")


def normal(shape, dtype="float32", seed=0, scale=3.0):
    return (np.random.default_rng(seed).standard_normal(shape) * scale).astype(dtype)


def outliers(shape, dtype="float32", seed=0):
    """Normal numbers, some of which are replaced by 1e4 or -1e4."""
    x = normal(shape, "float32", seed)
    rng = np.random.default_rng(seed + 1)
    return np.where(rng.random(shape) < 0.05, rng.choice([-1e4, 1e4], size=shape), x).astype(dtype)


def nonfinite_rows(columns, dtype="float32", seed=0):
    """Rows of `columns` elements with infinities and NaNs wherever an implementation may overlook them."""
    fills = []
    for value in (np.nan, np.inf, -np.inf):
        fills += [(value, slice(i, i + 1)) for i in sorted({0, columns // 3, columns // 2, columns - 1})]
    half = max(columns // 2, 1)
    fills += [(-np.inf, slice(0, half)), (-np.inf, slice(half, None)), (-np.inf, slice(None))]
    fills += [(-np.inf, slice(0, columns - 1)), (-np.inf, slice(1, None)), (-np.inf, slice(None, None, 2))]
    # An ordinary row between any two, which must not be touched by its neighbours.
    x = normal((2 * len(fills) + 1, columns), "float32", seed)
    for i, (value, where) in enumerate(fills):
        x[2 * i + 1, where] = value
    return x.astype(dtype)


def random_mask(shape, seed=0, density=0.6):
    return np.random.default_rng(seed).random(shape) < density


def mask_forms(shape):
    """Masks that broadcast with `shape` in every way; the last of them leaves the first half of the rows empty."""
    rank = len(shape)
    forms = {"none": None, "full": random_mask(shape)}
    forms["scalar"] = np.array(False)
    forms["trailing"] = random_mask(shape[-1:], 1)
    forms["leading"] = random_mask(shape[:1] + (1,) * (rank - 1), 2)
    forms["inner"] = random_mask((1, *shape[1:-1], 1), 3)
    empty = random_mask(shape, 4)
    empty[: (shape[0] + 1) // 2] = False
    forms["empty"] = empty
    return forms


def assert_same_bits(actual, expected, label=""):
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert actual.dtype == expected.dtype and actual.shape == expected.shape, label
    assert actual.tobytes() == expected.tobytes(), f"{label}: {np.sum(actual != expected)} of {actual.size} differ"


def device_bytes():
    """What the first device lets a process have of its memory; 0 for a CPU."""
    try:
        return jax.devices()[0].memory_stats()["bytes_limit"]
    except (TypeError, KeyError):
        return 0
