"""Float64 references with their error bounds, and `check`, which holds a result to one.

A bound is derived, not measured: it follows the roundings of an implementation that computes in float32 (float64 for
float64), keeps y in the dtype of the result, and sums a row in pieces. It scales with the dtype of the result, with an
element's distance from its row's maximum (exp turns an absolute error into a relative one) and, slowly, with the
length of the row: pieces of up to 64 terms may be added one after the other, which costs half the square root of their
number in units of the last place, and the pieces themselves are added in a tree.
"""

import math
from typing import NamedTuple

import ml_dtypes
import numpy as np

LARGEST = {"int8": 127, "float8_e4m3fn": 448, "float8_e5m2": 57344}  # what absmax_scale makes of a row's maximum


# Roundings of exp, of a reciprocal or division, and of a product or two.
ROUNDINGS = 4


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


def lse(x, axis=-1, where=None):
    """The logarithm of the sum of exponentials, in float64."""
    return np.asarray(reference_logsumexp(np.asarray(x, np.float64), axis, where)[0].value, np.float64)


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


def expected_entropy(x, axis=-1, where=None):
    """In float64, with its bound."""
    return squeezed(reference_entropy(x, axis, where)[0], np.shape(x), axis, where)


def squeezed(bounded, shape, axis, where):
    """Without the axes, and 0 of rows that are left out."""
    axes = _axes_of(axis, len(shape))
    keep = np.broadcast_to(True if where is None else where, shape).any(axes, keepdims=True)
    value, bound = (np.squeeze(np.where(keep, a, 0), axes) for a in bounded[:2])
    return Bounded(value, bound, bounded.dtype)


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
