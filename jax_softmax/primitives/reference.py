"""The operators in jax.numpy: what runs on platforms without kernels, and for what the kernels do not cover.

Each function has the operands and the meaning of the primitive of its name (see `records.py`): `where` is None or a
boolean mask that broadcasts to x's shape, `dtype` that of the result for elements. Where a row is spread over devices,
each holds a part of it, and `across(value, "max" | "sum")` reduces a value over them; `across.normalizer` is
`logsumexp` of this device's part, by a kernel where there is one. These functions then read the operands at most twice.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jax_softmax.primitives.in_memory import in_memory
from jax_softmax.primitives.labels import at_labels, exists, is_label

# What `absmax_scale` makes, and of types of 8 bits the number that a row's maximum becomes.
SCALED = ("float16", "bfloat16", "float32", "float64", "int8", "float8_e4m3fn", "float8_e5m2")
LARGEST = {"int8": 127, "float8_e4m3fn": 448, "float8_e5m2": 57344}

# What ends the names of operators that have `distance_and_count` as results as well.
AND_DISTANCES = "_and_distances"


def widened(x):
    """What has 16 bits as float32, in which it is computed."""
    return x.astype(wide_dtype(x.dtype))


def wide_dtype(dtype):
    """The dtype of the arithmetic."""
    return jnp.dtype(jnp.float32) if dtype.name in ("float16", "bfloat16") else dtype


def softmax(x, where, axes, across=None, *, dtype):
    if across is None:
        unnormalized = jnp.exp(_shifted(x, where, axes))
        return kept(unnormalized / _row_sum(unnormalized, axes, None), where).astype(dtype)
    rows = logsumexp(x, where, axes, across).without_infinity()
    return probabilities(x, rows, where).astype(dtype)


def log_softmax(x, where, axes, across=None, *, dtype):
    if across is None:
        shifted = _shifted(x, where, axes)
        return kept(shifted - jnp.log(_row_sum(jnp.exp(shifted), axes, None)), where, -jnp.inf).astype(dtype)
    rows = logsumexp(x, where, axes, across).without_infinity()
    return log_probabilities(x, rows, where).astype(dtype)


def _shifted(x, where, axes):
    """x less its row's maximum, -inf of what is masked."""
    x = kept(x, where, -jnp.inf)
    return widened(x) - jax.lax.stop_gradient(widened(_largest(x, axes)))


def _largest(x, axes):
    """The rows' maxima, in x's dtype: exact, and of 16 bits in half the memory where XLA makes maxima of parts."""
    return jnp.max(x, axes, keepdims=True, initial=-jnp.inf)


def kept(t, where, masked=0):
    return t if where is None else jnp.where(where, t, jnp.array(masked, t.dtype))


def selected(condition, a, b):
    """`jnp.where` of arrays of the condition's shape, one of which may be a number, in fewer equations."""
    a = a if isinstance(a, jax.Array) else jnp.full_like(b, a)
    return jax.lax.select(condition, a, b if isinstance(b, jax.Array) else jnp.full_like(a, b))


def _row_sum(t, axes, across):
    total = jnp.sum(t, axes, keepdims=True)
    return total if across is None else across(total, "sum")


def softmax_linear(y, t, where, axes, across=None, *, dtype):
    """J t = y (t - sum(y t)), softmax's Jacobian, which is symmetric."""
    p, t32 = widened(y), kept(widened(t), where)
    return kept(p * (t32 - _row_sum(p * t32, axes, across)), where).astype(dtype)


def log_softmax_jvp(y, t, where, axes, across=None, *, dtype):
    """J t = t - sum(exp(y) t), log-softmax's Jacobian."""
    p, t32 = jnp.exp(widened(y)), kept(widened(t), where)
    return kept(t32 - _row_sum(p * t32, axes, across), where).astype(dtype)


def log_softmax_vjp(y, t, where, axes, across=None, *, dtype):
    """Jᵀ t = t - exp(y) sum(t), the transpose of log-softmax's Jacobian."""
    p, t32 = jnp.exp(widened(y)), kept(widened(t), where)
    return kept(t32 - p * _row_sum(t32, axes, across), where).astype(dtype)


class Normalizer(NamedTuple):
    """The two parts of each row's log-sum-exp: its maximum, and the sum of exp(x - largest).

    Apart, they have digits that the log-sum-exp loses. Where the maximum is infinite, the sum is relative to 0.
    """

    largest: jax.Array
    total: jax.Array

    @property
    def log_total(self):
        nothing = self.total == 0  # of which the logarithm has no derivative
        zeros = jnp.zeros_like(self.total)
        return jnp.log(self.total + nothing.astype(zeros.dtype)) + selected(nothing, -jnp.inf, zeros)

    @property
    def lse(self):
        return self.log_total + _finite(self.largest)

    def without_infinity(self):
        """The same, but that the sum is NaN where the maximum is infinity: so all that is made of such a row is."""
        return Normalizer(self.largest, self.total - jnp.where(self.largest == jnp.inf, jnp.inf, 0))

    def finite(self):
        """The same with 0 for a maximum that is infinite, as it counts: what derivatives keep is not -inf then in rows
        that are masked altogether, which `jax_debug_infs` would take for an error."""
        return Normalizer(_finite(self.largest), self.total)


def logsumexp(x, where, axes, across=None):
    """Each row's `Normalizer`."""
    if across is not None:
        of_part, total = across.normalizer(x, where, axes)
        largest = across(of_part, "max")
        pivot = jnp.where(of_part == jnp.inf, 0, of_part)
        return Normalizer(largest, across(total * jnp.exp(pivot - _finite(largest)), "sum"))
    x = kept(x, where, -jnp.inf)
    largest = widened(_largest(x, axes))
    return Normalizer(largest, _row_sum(jnp.exp(widened(x) - _finite(largest)), axes, None))


def _finite(largest):
    return selected(jnp.isfinite(largest), largest, 0)


def distances(x, rows):
    """x less its row's maximum, or less 0 where that is infinite."""
    return widened(in_memory(x)) - _finite(rows.largest)


def distance_and_count(rows, x, where, axes, across=None):
    """Over each row's elements that are not masked, and not -inf: the sum of x - largest, and their number."""
    counted = kept(x != -jnp.inf, where, False)
    distance = jnp.where(counted, distances(x, rows), 0)
    return _row_sum(distance, axes, across), _row_sum(counted.astype(distance.dtype), axes, across)


MOST_COUNTED = 1 << 24  # of a row's elements, in float32


def distance_of_all(distance, count, elements):
    """The sum over all elements of a row that are not masked, given that over those that are not -inf."""
    return jnp.where(count < elements, -jnp.inf, distance)


def softmax_and_normalizer(x, where, axes, across=None, *, dtype):
    """softmax, and each row's `Normalizer`."""
    rows = logsumexp(x, where, axes, across)
    return probabilities(x, rows.without_infinity(), where).astype(dtype), *rows


def entropy(x, where, axes, across=None):
    """The entropy of softmax(x) over each row, and its `Normalizer`."""
    rows = logsumexp(x, where, axes, across)
    log_p = log_probabilities(x, rows, where)
    p, (log_p,) = weights_and_values(log_p, log_p)
    return -_row_sum(p * log_p, axes, across), *rows


def kl_divergence(x, y, largest_y, log_total_y, where, axes, across=None):
    """The divergence of softmax(y) from softmax(x), given the two parts of y's log-sum-exp; and x's `Normalizer`."""
    rows = logsumexp(x, where, axes, across)
    return kl_divergence_given(rows, x, y, largest_y, log_total_y, where, axes, across), *rows


def kl_divergence_given(rows, x, y, largest_y, log_total_y, where, axes, across=None):
    log_p = log_probabilities(x, rows, where)
    log_q = kept(widened(in_memory(y)) - _finite(largest_y) - log_total_y, where, -jnp.inf)
    p, (log_p, log_q) = weights_and_values(log_p, log_p, log_q)
    return _row_sum(p * (log_p - log_q), axes, across)


def log_probabilities(x, rows, where):
    """log softmax(x), given the rows' `Normalizer`, and -inf of what is masked."""
    return kept(kept(distances(x, rows), where) - rows.log_total, where, -jnp.inf)


def probabilities(x, rows, where):
    """softmax(x), given the rows' `Normalizer`, and 0 of what is masked, in derivatives of all orders as well."""
    nothing = rows.total == 0
    distance = kept(distances(x, rows), where) + jnp.where(nothing, jnp.inf, 0)  # NaN in a row of nothing but -inf
    return kept(jnp.exp(kept(distance, where, -jnp.inf)) / jnp.where(nothing, 1, rows.total), where)


def weights_and_values(log_p, *values):
    """p, and values that are to be weighted with it: those of p = 0 are 0, whatever they were."""
    p = jnp.exp(log_p)
    return p, [jnp.where(p == 0, 0, value) for value in values]


def cross_entropy(x, label, where, axes, across=None):
    """lse less the label's element of each row, 0 of one without a label; and its `Normalizer`."""
    rows = logsumexp(x, where, axes, across)
    return cross_entropy_given(rows, x, label, axes, across), *rows


def cross_entropy_given(rows, x, label, axes, across=None):
    found, here = (exists(label, x.shape, axes), label) if across is None else across.label_of_part(label)
    distance = jnp.where(found, distances(at_labels(x, axes, here), rows), 0)
    if across is not None:
        distance = across(jnp.where(exists(here, x.shape, axes), distance, 0), "sum")
    return jnp.where(found, rows.log_total - distance, 0)


def cross_entropy_gradient(x, *of_rows, where, axes, across=None, dtype):
    """softmax(x) (factor + lse_factor lse) + offset, and at_label added at the label; and the rows' `Normalizer`."""
    rows = Normalizer(*of_rows[:-5]) if of_rows[:-5] else logsumexp(x, where, axes, across)
    return gradient_given(rows, x, *of_rows[-5:], where, axes, across, dtype=dtype), *rows


def gradient_given(rows, x, factor, lse_factor, offset, at_label, label, where, axes, across=None, *, dtype):
    here = label if across is None else across.label_of_part(label)[1]
    counts = row_counts(rows, factor, lse_factor, offset, at_label)
    rows = Normalizer(*(jnp.where(counts, row, 0) for row in rows))
    lse = jnp.where(rows.lse == -jnp.inf, 0, rows.lse)  # of rows that are masked altogether
    p = probabilities(x, rows, counts if where is None else where & counts)
    gradient = kept(p * (factor + lse_factor * lse) + offset, where)
    return (gradient + jnp.where(is_label(x, axes, here), at_label, 0)).astype(dtype)


def row_counts(rows, *coefficients):
    """Whether a row counts: one of weight 0 does not where it is NaN."""
    return functools.reduce(jnp.logical_or, (c != 0 for c in coefficients), jnp.isfinite(rows.log_total))


def absmax(x, where, axes, across=None):
    """The maximum of magnitudes of each row, 0 of a row that is masked altogether; NaN if there is one.

    A sum of squares is NaN for no other reason. On a CPU XLA's maximum ignores NaNs (JAX 0.12).
    """
    x = kept(widened(x), where)
    largest = jnp.max(jnp.abs(x), axes, keepdims=True, initial=0)
    largest = largest if across is None else across(largest, "max")
    squares = _row_sum(x * x, axes, across)
    return jnp.where(jnp.isnan(squares), squares, largest)


def absmax_scale(x, where, axes, across=None, *, dtype):
    """x divided by its rows' maxima of magnitudes, or of 8 bits by the scales; and the scales."""
    largest = absmax(x, where, axes, across)
    scale = scale_of(largest, dtype)
    return scaled(x, largest, scale, where, dtype).astype(dtype), scale


def scale_of(largest, dtype):
    """The rows' scales: 0 where they would not be normal numbers."""
    scale = largest * (1 / jnp.array(LARGEST[dtype], largest.dtype)) if dtype in LARGEST else largest
    return jnp.where(scale < jnp.finfo(scale.dtype).tiny, 0, scale)


def scaled(x, largest, scale, where, dtype):
    """What is rounded to dtype in the end; as an integer 0 stands for NaN."""
    given, x = x.dtype.name, kept(widened(x), where)
    divisor = jnp.where(scale == 0, jnp.inf, scale)
    if dtype in LARGEST:
        y = x * jnp.where(scale == 0, 0, LARGEST[dtype] / largest)
        y = y.astype(jnp.float32) if dtype != "int8" else jnp.where(jnp.isnan(y), 0, jnp.round(y))
    elif dtype in ("float16", "bfloat16") and given in (dtype, "bfloat16"):
        # By the reciprocal, which is faster and, rounded to so few bits, the same: a quotient lies halfway between two
        # results only if the divisor is a power of 2. The reciprocals of the largest numbers would underflow.
        power = jnp.where(largest > 2.0**100, 1 / 16, 1).astype(x.dtype)
        y = x * power * (1 / (divisor * power))
    else:
        # Different for each element, as far as XLA knows: it would multiply by the reciprocal. If not, one is NaN.
        y = x / jnp.where(jnp.abs(x) <= largest, divisor, x + largest)
    return kept(y, where)
