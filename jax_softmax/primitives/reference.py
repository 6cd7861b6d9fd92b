"""The operators in jax.numpy: for platforms without kernels, and for calls that no kernel covers.

Each function has the operands and the meaning of the primitive of its name (see `records.py`): `where` is a boolean
mask that broadcasts to x's shape, or None; `dtype` is that of the result of x's shape. Where each device has a shard
of every row, `shards` is a `RowShards`; x is read at most twice then.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from jax_softmax.primitives.as_stored import as_stored
from jax_softmax.primitives.labels import has_label, label_elements, label_mask
from jax_softmax.primitives.operators import Coefficients
from jax_softmax.primitives.types import Axes, Dtype, Mask

# The dtypes of `absmax_scale`'s result; and for those of 8 bits the number that a row's largest magnitude becomes.
SCALED = ("float16", "bfloat16", "float32", "float64", "int8", "float8_e4m3fn", "float8_e5m2")
LARGEST = {"int8": 127, "float8_e4m3fn": 448, "float8_e5m2": 57344}

# The names of operators whose last two results are those of `distance_sum_and_count` end like this.
AND_DISTANCES = "_and_distances"


class Normalizer(NamedTuple):
    """Each row's maximum, and sum of exp(x - largest), or of exp(x) where the maximum is infinite.

    Their log-sum-exp is largest + log(sum_exp). As two numbers they have digits that it would lose.
    """

    largest: Array
    sum_exp: Array

    @property
    def log_sum(self) -> Array:
        is_zero = self.sum_exp == 0  # where the logarithm has no derivative
        zeros = jnp.zeros_like(self.sum_exp)
        return jnp.log(self.sum_exp + is_zero.astype(zeros.dtype)) + select(is_zero, -jnp.inf, zeros)

    @property
    def lse(self) -> Array:
        return self.log_sum + _finite(self.largest)

    def without_infinity(self) -> "Normalizer":
        """The same with a sum of NaN where the maximum is inf: all results of such a row are NaN then."""
        return Normalizer(self.largest, self.sum_exp - jnp.where(self.largest == jnp.inf, jnp.inf, 0))

    def finite(self) -> "Normalizer":
        """The same with a maximum of 0 where it is infinite, which means the same. A derivative saves it, and
        `jax_debug_infs` would take the -inf of a row that is masked altogether for an error."""
        return Normalizer(_finite(self.largest), self.sum_exp)


def _not_given(*_: Any) -> Any:
    raise NotImplementedError


class RowShards(NamedTuple):
    """How a device that has a shard of every row works together with those that have the other shards."""

    all_reduce: Callable[[Array, str], Array]  # (value, "max" or "sum"): that of the value over these devices
    # (x, where, axes): the `Normalizer` of this device's shard
    normalizer: Callable[[Array, Mask, Axes], Normalizer] = _not_given
    # (label): whether each row has one, and the label in this shard, or -1
    local_label: Callable[[Array], tuple[Array, Array]] = _not_given


Shards = RowShards | None


def widened(x: Array) -> Array:
    """x in the dtype that it is computed in."""
    return x.astype(wide_dtype(x.dtype))


def wide_dtype(dtype: Dtype) -> Dtype:
    """The dtype that arrays of this dtype are computed in: float32 for those of 16 bits."""
    return jnp.dtype(jnp.float32) if dtype.name in ("float16", "bfloat16") else dtype


def softmax(x: Array, where: Mask, axes: Axes, shards: Shards = None, *, dtype: DTypeLike) -> Array:
    if shards is None:
        unnormalized = jnp.exp(_shifted(x, where, axes))
        return fill_masked(unnormalized / _row_sum(unnormalized, axes), where).astype(dtype)
    normalizer = logsumexp(x, where, axes, shards).without_infinity()
    return probabilities(x, normalizer, where).astype(dtype)


def log_softmax(x: Array, where: Mask, axes: Axes, shards: Shards = None, *, dtype: DTypeLike) -> Array:
    if shards is None:
        shifted = _shifted(x, where, axes)
        return fill_masked(shifted - jnp.log(_row_sum(jnp.exp(shifted), axes)), where, -jnp.inf).astype(dtype)
    normalizer = logsumexp(x, where, axes, shards).without_infinity()
    return log_probabilities(x, normalizer, where).astype(dtype)


def _shifted(x: Array, where: Mask, axes: Axes) -> Array:
    """x - max(x) of each row; -inf where x is masked."""
    x = fill_masked(x, where, -jnp.inf)
    return widened(x) - jax.lax.stop_gradient(widened(_largest(x, axes)))


def _largest(x: Array, axes: Axes) -> Array:
    """The rows' maxima, in x's dtype: they are exact, and take half the memory where XLA writes maxima of pieces."""
    return jnp.max(x, axes, keepdims=True, initial=-jnp.inf)


def fill_masked(a: Array, where: Mask, value: float = 0) -> Array:
    """The array with this value where the mask is False."""
    return a if where is None else jnp.where(where, a, jnp.array(value, a.dtype))


def select(condition: Array, a: Array | float, b: Array | float) -> Array:
    """`jnp.where` of arrays of the condition's shape, one of which may be a number, in fewer equations."""
    a = a if isinstance(a, Array) else jnp.full_like(b, a)
    return jax.lax.select(condition, a, b if isinstance(b, Array) else jnp.full_like(a, b))


def _row_sum(a: Array, axes: Axes, shards: Shards = None) -> Array:
    sums = jnp.sum(a, axes, keepdims=True)
    return sums if shards is None else shards.all_reduce(sums, "sum")


def softmax_linear(y: Array, t: Array, where: Mask, axes: Axes, shards: Shards = None, *, dtype: DTypeLike) -> Array:
    """J t = y (t - sum(y t)), softmax's Jacobian, which is symmetric."""
    p, t32 = widened(y), fill_masked(widened(t), where)
    return fill_masked(p * (t32 - _row_sum(p * t32, axes, shards)), where).astype(dtype)


def log_softmax_jvp(y: Array, t: Array, where: Mask, axes: Axes, shards: Shards = None, *, dtype: DTypeLike) -> Array:
    """J t = t - sum(exp(y) t), log-softmax's Jacobian."""
    p, t32 = jnp.exp(widened(y)), fill_masked(widened(t), where)
    return fill_masked(t32 - _row_sum(p * t32, axes, shards), where).astype(dtype)


def log_softmax_vjp(y: Array, t: Array, where: Mask, axes: Axes, shards: Shards = None, *, dtype: DTypeLike) -> Array:
    """Jᵀ t = t - exp(y) sum(t), the transpose of log-softmax's Jacobian."""
    p, t32 = jnp.exp(widened(y)), fill_masked(widened(t), where)
    return fill_masked(t32 - p * _row_sum(t32, axes, shards), where).astype(dtype)


def softmax_gradient(x: Array, t: Array, where: Mask, axes: Axes, shards: Shards = None, *, dtype: DTypeLike) -> Array:
    """J t of softmax(x)."""
    p = softmax(x, where, axes, shards, dtype=wide_dtype(x.dtype))
    return softmax_linear(p, t, where, axes, shards, dtype=dtype)


def log_softmax_gradient(
    x: Array, t: Array, where: Mask, axes: Axes, shards: Shards = None, *, dtype: DTypeLike
) -> Array:
    """Jᵀ t of log_softmax(x)."""
    y = log_softmax(x, where, axes, shards, dtype=wide_dtype(x.dtype))
    return log_softmax_vjp(y, t, where, axes, shards, dtype=dtype)


def logsumexp(x: Array, where: Mask, axes: Axes, shards: Shards = None) -> Normalizer:
    """Each row's `Normalizer`."""
    if shards is not None:
        local_largest, sum_exp = shards.normalizer(x, where, axes)
        largest = shards.all_reduce(local_largest, "max")
        pivot = jnp.where(local_largest == jnp.inf, 0, local_largest)
        return Normalizer(largest, shards.all_reduce(sum_exp * jnp.exp(pivot - _finite(largest)), "sum"))
    x = fill_masked(x, where, -jnp.inf)
    largest = widened(_largest(x, axes))
    return Normalizer(largest, _row_sum(jnp.exp(widened(x) - _finite(largest)), axes))


def _finite(largest: Array) -> Array:
    return select(jnp.isfinite(largest), largest, 0)


def distances(x: Array, normalizer: Normalizer) -> Array:
    """x - largest, or x where the row's maximum is infinite."""
    return widened(as_stored(x)) - _finite(normalizer.largest)


def distance_sum_and_count(
    normalizer: Normalizer, x: Array, where: Mask, axes: Axes, shards: Shards = None
) -> tuple[Array, Array]:
    """The sum of x - largest over those elements of each row that are neither masked nor -inf, and their number."""
    counted = fill_masked(x != -jnp.inf, where, False)
    distance = jnp.where(counted, distances(x, normalizer), 0)
    return _row_sum(distance, axes, shards), _row_sum(counted.astype(distance.dtype), axes, shards)


MOST_COUNTED = 1 << 24  # elements of a row: float32 has all integers up to this one


def distance_sum_of_all(distance_sum: Array, count: Array, elements: Array | int) -> Array:
    """The sum of x - largest over all of a row's elements that are not masked, from `distance_sum_and_count`."""
    return jnp.where(count < elements, -jnp.inf, distance_sum)


def softmax_and_normalizer(
    x: Array, where: Mask, axes: Axes, shards: Shards = None, *, dtype: DTypeLike
) -> tuple[Array, Array, Array]:
    """softmax(x), and each row's `Normalizer`."""
    normalizer = logsumexp(x, where, axes, shards)
    return probabilities(x, normalizer.without_infinity(), where).astype(dtype), *normalizer


def entropy(x: Array, where: Mask, axes: Axes, shards: Shards = None) -> tuple[Array, Array, Array]:
    """The entropy of softmax(x) over each row, and its `Normalizer`."""
    normalizer = logsumexp(x, where, axes, shards)
    log_p = log_probabilities(x, normalizer, where)
    return -_expectation(log_p, log_p, axes, shards), *normalizer


def kl_divergence(
    x: Array, y: Array, largest_y: Array, log_sum_y: Array, where: Mask, axes: Axes, shards: Shards = None
) -> tuple[Array, Array, Array]:
    """sum(p (log p - log q)) of p = softmax(x), q = softmax(y), lse(y) = largest_y + log_sum_y; x's `Normalizer`."""
    normalizer = logsumexp(x, where, axes, shards)
    log_p = log_probabilities(x, normalizer, where)
    log_q = fill_masked(widened(as_stored(y)) - _finite(largest_y) - log_sum_y, where, -jnp.inf)
    return _expectation(log_p, log_p - log_q, axes, shards), *normalizer


def _expectation(log_p: Array, values: Array, axes: Axes, shards: Shards) -> Array:
    """sum(p values) of each row; where p is 0 the product is, whatever the value. Derivatives of this may be NaN:
    what is differentiated uses `weight_and_value`."""
    p = jnp.exp(log_p)
    # On a CPU XLA writes what is selected to memory: the products are one array, p and the values would be more.
    return _row_sum(jnp.where(p == 0, 0, p * values), axes, shards)


def log_probabilities(x: Array, normalizer: Normalizer, where: Mask) -> Array:
    """log softmax(x), given the rows' `Normalizer`; -inf where x is masked."""
    return fill_masked(fill_masked(distances(x, normalizer), where) - normalizer.log_sum, where, -jnp.inf)


def probabilities(x: Array, normalizer: Normalizer, where: Mask) -> Array:
    """softmax(x), given the rows' `Normalizer`; where x is masked, this and its derivatives of all orders are 0."""
    is_zero = normalizer.sum_exp == 0
    distance = fill_masked(distances(x, normalizer), where) + jnp.where(
        is_zero, jnp.inf, 0
    )  # NaN where all of a row is -inf
    return fill_masked(
        jnp.exp(fill_masked(distance, where, -jnp.inf)) / jnp.where(is_zero, 1, normalizer.sum_exp), where
    )


def weight_and_value(log_p: Array, value: Array) -> tuple[Array, Array]:
    """p, and a value to be multiplied by p: 0 where p is 0, so that 0 * inf does not make a NaN."""
    p = jnp.exp(log_p)
    return p, jnp.where(p == 0, 0, value)


def cross_entropy(x: Array, label: Array, where: Mask, axes: Axes, shards: Shards = None) -> tuple[Array, Array, Array]:
    """lse - x[label] of each row, 0 where it has no label; and its `Normalizer`."""
    normalizer = logsumexp(x, where, axes, shards)
    return cross_entropy_given_normalizer(normalizer, x, label, axes, shards), *normalizer


def cross_entropy_given_normalizer(
    normalizer: Normalizer, x: Array, label: Array, axes: Axes, shards: Shards = None
) -> Array:
    is_labelled, local = (has_label(label, x.shape, axes), label) if shards is None else shards.local_label(label)
    distance = jnp.where(is_labelled, distances(label_elements(x, axes, local), normalizer), 0)
    if shards is not None:
        distance = shards.all_reduce(jnp.where(has_label(local, x.shape, axes), distance, 0), "sum")
    return jnp.where(is_labelled, normalizer.log_sum - distance, 0)


def cross_entropy_gradient(
    x: Array, *operands: Array, where: Mask, axes: Axes, shards: Shards = None, dtype: DTypeLike
) -> tuple[Array, Array, Array]:
    """softmax(x) (factor + lse_factor lse) + offset, and at_label added at the label; and the rows' `Normalizer`."""
    *given, factor, lse_factor, offset, at_label, label = operands
    normalizer = Normalizer(*given) if given else logsumexp(x, where, axes, shards)
    coefficients = Coefficients(factor, lse_factor, offset, at_label)
    return gradient_given_normalizer(normalizer, x, coefficients, label, where, axes, shards, dtype=dtype), *normalizer


def gradient_given_normalizer(
    normalizer: Normalizer,
    x: Array,
    coefficients: Coefficients,
    label: Array,
    where: Mask,
    axes: Axes,
    shards: Shards = None,
    *,
    dtype: DTypeLike,
) -> Array:
    local = label if shards is None else shards.local_label(label)[1]
    factor, lse_factor, offset, at_label = coefficients
    counts = row_counts(normalizer, *coefficients)
    normalizer = Normalizer(*(jnp.where(counts, value, 0) for value in normalizer))
    lse = jnp.where(normalizer.lse == -jnp.inf, 0, normalizer.lse)  # of rows that are masked altogether
    p = probabilities(x, normalizer, counts if where is None else where & counts)
    gradient = fill_masked(p * (factor + lse_factor * lse) + offset, where)
    return (gradient + jnp.where(label_mask(x, axes, local), at_label, 0)).astype(dtype)


def row_counts(normalizer: Normalizer, *coefficients: Array) -> Array:
    """Which rows count: not one whose coefficients are all 0 and whose logarithm of the sum is infinite or NaN."""
    return functools.reduce(jnp.logical_or, (c != 0 for c in coefficients), jnp.isfinite(normalizer.log_sum))


def absmax_scale(x: Array, where: Mask, axes: Axes, shards: Shards = None, *, dtype: str) -> tuple[Array, Array]:
    """x / scale, and the scales: the rows' largest magnitudes, for 8 bits as multiples of the dtype's largest number.

    Scales that would not be normal numbers are 0.
    """
    largest = absmax(x, where, axes, shards)
    scale = largest * (1 / jnp.array(LARGEST[dtype], largest.dtype)) if dtype in LARGEST else largest
    scale = jnp.where(scale < jnp.finfo(scale.dtype).tiny, 0, scale)
    return scaled(x, largest, scale, where, dtype).astype(dtype), scale


def absmax(x: Array, where: Mask, axes: Axes, shards: Shards = None) -> Array:
    """The largest magnitude of each row: 0 where all is masked, NaN where one is NaN.

    On a CPU XLA's maximum ignores NaNs (JAX 0.12). The sum of squares is NaN in just the rows that have one.
    """
    x = fill_masked(widened(x), where)
    largest = jnp.max(jnp.abs(x), axes, keepdims=True, initial=0)
    largest = largest if shards is None else shards.all_reduce(largest, "max")
    squares = _row_sum(x * x, axes, shards)
    return jnp.where(jnp.isnan(squares), squares, largest)


def scaled(x: Array, largest: Array, scale: Array, where: Mask, dtype: str) -> Array:
    """x / scale, before it is rounded to dtype; for int8 rounded to an integer, and 0 instead of NaN."""
    x_dtype, x = x.dtype.name, fill_masked(widened(x), where)
    divisor = jnp.where(scale == 0, jnp.inf, scale)
    if dtype in LARGEST:
        y = x * jnp.where(scale == 0, 0, LARGEST[dtype] / largest)
        y = y.astype(jnp.float32) if dtype != "int8" else jnp.where(jnp.isnan(y), 0, jnp.round(y))
    elif dtype in ("float16", "bfloat16") and x_dtype in (dtype, "bfloat16"):
        # The product with the reciprocal is faster than a quotient, and rounds to the same 16 bits: a quotient lies
        # halfway between two of these only if the divisor is a power of 2. The factor `power` keeps the reciprocals of
        # the largest numbers from underflowing.
        power = jnp.where(largest > 2.0**100, 1 / 16, 1).astype(x.dtype)
        y = x * power * (1 / (divisor * power))
    else:
        # XLA would turn a division by one number for the whole row into a product with its reciprocal. The `where`
        # hides from it that the divisors of a row are equal. Where it selects x + largest, one of the two is NaN.
        y = x / jnp.where(jnp.abs(x) <= largest, divisor, x + largest)
    return fill_masked(y, where)
