"""The operators in jax.numpy: what runs on platforms without kernels, and for what the kernels do not cover.

Each function has the operands and the meaning of the primitive of its name (see `primitives.py`): `where` is None or a
boolean mask that broadcasts to x's shape. Where a row is spread over devices, each holds a part of it, and
`across(value, "max" | "sum")` reduces a value over them; `across.row_states` is `row_states` of this device's part, by
a kernel where there is one. These functions then read the operands at most twice.
"""

import functools

import jax
import jax.numpy as jnp

from jax_softmax.labels import at_labels, exists, is_label

# What the operators take as it is: 8 bits that are widened where they are read. Their linear maps do not.
NARROW = ("float8_e4m3fn", "float8_e5m2", "int8", "uint8")
_COMPUTED_IN_FLOAT32 = ("float16", "bfloat16", *NARROW)
# What `absmax_scale` makes, and of types of 8 bits the number that a row's maximum becomes.
SCALED = ("float16", "bfloat16", "float32", "float64", "int8", "float8_e4m3fn", "float8_e5m2")
LARGEST = {"int8": 127, "float8_e4m3fn": 448, "float8_e5m2": 57344}

# As they are now: `jax.nn.softmax` may come to be this package's (see `patching.py`).
ORIGINALS = {"softmax": jax.nn.softmax, "log_softmax": jax.nn.log_softmax}


def widened(x):
    """What has 16 bits or 8 as float32, in which it is computed."""
    return x.astype(wide_dtype(x.dtype))


def wide_dtype(dtype):
    """The dtype of the arithmetic."""
    return jnp.dtype(jnp.float32) if dtype.name in _COMPUTED_IN_FLOAT32 else dtype


def without_narrow(x):
    """What has 8 bits as float32."""
    return x.astype(jnp.float32) if x.dtype.name in NARROW else x


def result_dtype(dtype):
    """The dtype of an operator's result: its operand's, or float32 for integers."""
    return dtype if jnp.issubdtype(dtype, jnp.inexact) else jnp.dtype(jnp.float32)


def softmax(x, where, axes, across=None):
    if across is None:
        return ORIGINALS["softmax"](widened(x), axes, where).astype(result_dtype(x.dtype))
    largest, total = _states_of_rows(x, where, axes, across)
    return _kept(jnp.exp(widened(x) - largest) / total, where).astype(result_dtype(x.dtype))


def log_softmax(x, where, axes, across=None):
    if across is None:
        return ORIGINALS["log_softmax"](widened(x), axes, where).astype(result_dtype(x.dtype))
    largest, total = _states_of_rows(x, where, axes, across)
    return _kept(widened(x) - largest - jnp.log(total), where, -jnp.inf).astype(result_dtype(x.dtype))


def _states_of_rows(x, where, axes, across):
    """The maximum of each row, and the sum of exp(x - maximum): NaN where the maximum is infinite."""
    largest, total = across.row_states(x, where, axes)
    largest_of_all = across(largest, "max")
    return largest_of_all, across(total * jnp.exp(largest - largest_of_all), "sum")


def row_states(x, where, axes, across=None):
    """The maximum of each row and the sum of exp(x - maximum), relative to 0 where it is infinite, by reading x once.

    An element is a state of its own, (x, 1), one of infinity the same as in the kernels, but with a finite maximum, so
    that no difference of two is NaN.
    """

    def combined(a, b):
        (max_a, sum_a), (max_b, sum_b) = a, b
        difference = max_a - max_b
        factor = jnp.exp(-jnp.abs(difference))  # of the sum that goes with the smaller maximum
        total = jnp.where(difference >= 0, sum_a + sum_b * factor, sum_a * factor + sum_b)
        return jnp.maximum(max_a, max_b), total

    x = _kept(widened(x), where, -jnp.inf)
    lowest, highest = (jnp.array(bound, x.dtype) for bound in (jnp.finfo(x.dtype).min, jnp.finfo(x.dtype).max))
    sums = jnp.where(jnp.isinf(x), jnp.maximum(x, 0), 1).astype(x.dtype)
    elements = jnp.clip(x, lowest, highest), sums
    largest, total = jax.lax.reduce(elements, (lowest, jnp.zeros_like(lowest)), combined, axes)
    largest = jnp.where(total == 0, -jnp.inf, jnp.where(total == jnp.inf, jnp.inf, largest))
    return jnp.expand_dims(largest, axes), jnp.expand_dims(total, axes)


def _kept(t, where, masked=0):
    return t if where is None else jnp.where(where, t, jnp.array(masked, t.dtype))


def _row_sum(t, axes, across):
    total = jnp.sum(t, axes, keepdims=True)
    return total if across is None else across(total, "sum")


def softmax_linear(y, t, where, axes, across=None):
    """J t = y (t - sum(y t)), softmax's Jacobian, which is symmetric."""
    p, t32 = widened(y), _kept(widened(t), where)
    return _kept(p * (t32 - _row_sum(p * t32, axes, across)), where).astype(t.dtype)


def log_softmax_jvp(y, t, where, axes, across=None):
    """J t = t - sum(exp(y) t), log-softmax's Jacobian."""
    p, t32 = jnp.exp(widened(y)), _kept(widened(t), where)
    return _kept(t32 - _row_sum(p * t32, axes, across), where).astype(t.dtype)


def log_softmax_vjp(y, t, where, axes, across=None):
    """Jᵀ t = t - exp(y) sum(t), the transpose of log-softmax's Jacobian."""
    p, t32 = jnp.exp(widened(y)), _kept(widened(t), where)
    return _kept(t32 - p * _row_sum(t32, axes, across), where).astype(t.dtype)


def logsumexp(x, where, axes, across=None):
    """The logarithm of the sum of exp(x) over each row, and its maximum."""
    if across is not None:
        of_part, total = across.row_states(x, where, axes)
        largest = across(of_part, "max")
        pivot = jnp.where(of_part == jnp.inf, 0, of_part)
        return logsumexp_of_states(largest, across(total * jnp.exp(pivot - _finite(largest)), "sum"))
    x = _kept(widened(x), where, -jnp.inf)
    largest = jnp.max(x, axes, keepdims=True, initial=-jnp.inf)
    return logsumexp_of_states(largest, _row_sum(jnp.exp(x - _finite(largest)), axes, None))


def logsumexp_of_states(largest, total):
    """The same from what `row_states` gives."""
    return jnp.log(total) + _finite(largest), largest


def _finite(largest):
    return jnp.where(jnp.isfinite(largest), largest, 0)


def log_sum(x, where, axes, across=None):
    """The logarithm of the sum of exp(x - largest) over each row, and largest, its maximum."""
    if across is not None:
        return log_sum_of_states(*_states_of_rows(x, where, axes, across))
    x = _kept(widened(x), where, -jnp.inf)
    largest = jnp.max(x, axes, keepdims=True, initial=-jnp.inf)
    return jnp.log(_row_sum(jnp.exp(x - _shift(largest)), axes, None)), largest


def log_sum_of_states(largest, total):
    """The same from what `row_states` gives."""
    return jnp.where(largest == jnp.inf, jnp.nan, jnp.log(total)), largest


def entropy(x, where, axes, across=None):
    """The entropy of softmax(x) over each row, and what `log_sum` gives."""
    rows = log_sum(x, where, axes, across)
    return entropy_given(rows, x, where, axes, across), *rows


def entropy_given(rows, x, where, axes, across=None):
    log_p = log_probabilities(x, *rows, where)
    return -_mean(log_p, log_p, axes, across)


def kl_divergence(x, y, log_sum_y, largest_y, where, axes, across=None):
    """The divergence of softmax(y) from softmax(x), given what `log_sum` gives of y, and what it gives of x."""
    rows = log_sum(x, where, axes, across)
    return kl_divergence_given(rows, x, y, log_sum_y, largest_y, where, axes, across), *rows


def kl_divergence_given(rows, x, y, log_sum_y, largest_y, where, axes, across=None):
    log_p, log_q = log_probabilities(x, *rows, where), log_probabilities(y, log_sum_y, largest_y, where)
    return _mean(log_p, log_p - log_q, axes, across)


def log_probabilities(x, log_sum, largest, where):
    """log softmax(x), given what `log_sum` gives, and -inf of what is masked."""
    return _kept(widened(x) - _shift(largest) - log_sum, where, -jnp.inf)


def _shift(largest):
    return jnp.where(largest == -jnp.inf, 0, largest)


def _mean(log_p, values, axes, across):
    """The mean of values over each row, weighted with p; those of p = 0 do not count, whatever they are."""
    p = jnp.exp(log_p)
    return _row_sum(jnp.where(p == 0, 0, p * values), axes, across)


def cross_entropy(x, label, where, axes, across=None):
    """lse less the label's element of each row, 0 of one without a label; and lse."""
    lse, _ = logsumexp(x, where, axes, across)
    return cross_entropy_given(lse, x, label, axes, across), lse


def cross_entropy_given(lse, x, label, axes, across=None):
    if across is None:
        found, logit = exists(label, x.shape, axes), widened(at_labels(x, axes, label))
    else:
        found, here = across.label_of_part(label)
        logit = jnp.where(exists(here, x.shape, axes), widened(at_labels(x, axes, here)), 0)
        logit = across(logit, "sum")
    return jnp.where(found, lse - logit, 0)


def cross_entropy_gradient(x, a, b, c, where, axes, across=None):
    """softmax(x) (a + b lse) - c, and what `logsumexp` gives."""
    lse, largest = logsumexp(x, where, axes, across)
    return cross_entropy_elements(x, a, b, c, lse, where), lse, largest


def cross_entropy_elements(x, a, b, c, lse, where):
    return _wide_elements(x, a, b, c, lse, where).astype(x.dtype)


def _wide_elements(x, a, b, c, lse, where):
    finite = lse if where is None else jnp.where(lse == -jnp.inf, 0, lse)  # of rows that are masked altogether
    return _kept(exp_of_difference(x, lse, where) * (a + b * finite) - c, where)


def gradient_given_lse(x, lse, label, a, c, d, where, axes, across=None):
    """softmax(x) a - c, and d added at the label, also where it is masked."""
    here = label if across is None else across.label_of_part(label)[1]
    gradient = _wide_elements(x, a, 0, c, lse, where) + jnp.where(is_label(x, axes, here), d, 0)
    return (gradient.astype(x.dtype),)


def exp_of_difference(x, lse, where):
    """exp(x - lse), and 0 of what is masked, whatever it is, in derivatives of all orders as well."""
    return jnp.exp(_kept(widened(x) - lse, where, -jnp.inf))


def absmax(x, where, axes, across=None):
    """The maximum of magnitudes of each row, 0 of a row that is masked altogether; NaN if there is one.

    A sum of squares is NaN for no other reason. On a CPU XLA's maximum ignores NaNs (JAX 0.12).
    """
    x = _kept(widened(x), where)
    largest = jnp.max(jnp.abs(x), axes, keepdims=True, initial=0)
    largest = largest if across is None else across(largest, "max")
    return jnp.where(jnp.isnan(_row_sum(x * x, axes, across)), jnp.nan, largest)


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
    given, x = x.dtype.name, _kept(widened(x), where)
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
        # Different for each element, as far as XLA knows: it would multiply by the reciprocal.
        y = x / jnp.where(jnp.abs(x) <= largest, divisor, jnp.nan)
    return _kept(y, where)


_OPERATORS = {
    f.__name__: f
    for f in (
        *(softmax, log_softmax, softmax_linear, log_softmax_jvp, log_softmax_vjp),
        *(logsumexp, log_sum, row_states, cross_entropy, cross_entropy_gradient, gradient_given_lse),
        *(entropy, kl_divergence),
    )
}
_OPERATORS |= {f"absmax_scale_{dtype}": functools.partial(absmax_scale, dtype=dtype) for dtype in SCALED}


def apply(op, axes, *operands, across=None):
    """The operator of a name on a primitive's operands, of which a boolean one is the mask."""
    floats = [a for a in operands if a.dtype != bool]
    where = operands[len(floats)] if len(operands) > len(floats) else None
    return _OPERATORS[op](*floats, where, axes, across)
