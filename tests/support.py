"""What the tests share: a float64 reference with its error bounds, the functions under test, and makers of inputs.

A bound is derived, not measured: it follows the roundings of an implementation that computes in float32 (float64 for
float64), keeps y in the dtype of the result, and sums a row in pieces. It scales with the dtype of the result, with an
element's distance from its row's maximum (exp turns an absolute error into a relative one) and, slowly, with the
length of the row: pieces of up to 64 terms may be added one after the other, which costs half the square root of their
number in units of the last place, and the pieces themselves are added in a tree.
"""

import contextlib
import functools
from typing import NamedTuple

import jax
import ml_dtypes
import numpy as np
import pytest

import jax_softmax
from jax_softmax import _kernels

OPERATORS = {"softmax": jax_softmax.softmax, "log_softmax": jax_softmax.log_softmax}
CUSTOM_VJPS = {"softmax": jax_softmax.softmax_vjp, "log_softmax": jax_softmax.log_softmax_vjp}
JAX_NN = {"softmax": jax.nn.softmax, "log_softmax": jax.nn.log_softmax}
NAMES = tuple(OPERATORS)
DTYPES = ("float16", "bfloat16", "float32", "float64")

# What plans are made for.
H200 = {"compute_capability": 90, "multiprocessors": 132, "shared_memory_per_block": 227 * 1024, "largest_cluster": 16}
T4 = {"compute_capability": 75, "multiprocessors": 40, "shared_memory_per_block": 64 * 1024, "largest_cluster": 1}
A100 = {"compute_capability": 80, "multiprocessors": 108, "shared_memory_per_block": 163 * 1024, "largest_cluster": 1}
RTX5090 = {
    "compute_capability": 120,
    "multiprocessors": 170,
    "shared_memory_per_block": 99 * 1024,
    "largest_cluster": 8,
}

# Roundings of exp, of a reciprocal or division, and of a product or two.
ROUNDINGS = 4


def sampled(names, cases, every, **options):
    """As pytest.mark.parametrize, but plain `pytest` has every so many-th case alone; `--sweeps` has all."""
    params = []
    for i, case in enumerate(cases):
        values = case if "," in names else (case,)
        params.append(pytest.param(*values, marks=[pytest.mark.sweep] if i % every else []))
    return pytest.mark.parametrize(names, params, **options)


def plan(shape, axes, op="softmax", dtype="float32", mask_shape=None, device=H200):
    return _kernels.plan(list(shape), list(axes), op, dtype, mask_shape, **device)


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
    sum_error = rounding.compute * (ROUNDINGS + np.sqrt(min(length, 64)) / 2 + np.sqrt(length) / 128)

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
