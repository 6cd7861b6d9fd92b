"""The operators: what each takes and gives, its derivatives, and its ways without a kernel. One record for each.

x is an array of float16, bfloat16, float32 or float64. The second array of an operator has x's shape; y of
kl_divergence has its dtype, t may have another than y. After what a record names comes `where`, or nothing: a boolean
mask that broadcasts to x's shape. Masked elements count for nothing and give the operator's neutral result, in the
linear maps 0. `label` is as in `labels.py`. `axes` are the reduced axes, sorted. `axis_name` is a tuple of mesh axes,
inside `shard_map`, along which each device has a part of every row; else it is empty, as it is wherever there is a
label: losses have their own way with parts of rows. `dtype` names the dtype of the result for elements, where there is
one: float64 of float64 alone, and 8 bits of absmax_scale alone.

What rows have, as operands or as results, is of x's shape with extent 1 along `axes`, in float32 (float64 for float64).
`largest` is a row's maximum, and `total` the sum of exp(x - largest), relative to 0 where that is infinite, both of
elements that are not masked: two parts of the log-sum-exp lse (`reference.Normalizer`). No derivative depends on
`largest`, which counts as a constant: with another one `total` is another.

Batching, several devices, types and Taylor series follow from a record and the C++ table. So does the check of
`python -m jax_softmax`: each operator's kernel beside the same in jax.numpy.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.interpreters import ad

from jax_softmax.primitives import batching, reference
from jax_softmax.primitives.in_memory import in_memory
from jax_softmax.primitives.labels import at_labels, exists
from jax_softmax.primitives.operators import PRIMITIVES, bind, split
from jax_softmax.primitives.reference import Normalizer
from jax_softmax.primitives.rows import (
    normalizer,
    normalizer_tangents,
    of_rows_with_elements,
    row_sum,
    sum_of_tangents,
)


class Record(NamedTuple):
    """What JAX and a reader have to know of an operator, besides what the C++ table says."""

    takes: str  # operands before the mask; what stands in brackets may be left out
    gives: str
    reference: Callable[..., Any]  # the same in jax.numpy: see `reference.py`
    # JAX's rules, with the operator's name before what JAX gives them.
    jvp: Callable[..., Any] | None = None
    transpose: Callable[..., Any] | None = None
    batch: Callable[..., Any] = batching.batch
    # The same by another operator's kernel and XLA, with the operands of `reference`: see `runtime/judge.py`.
    from_parts: Callable[..., Any] | None = None


# ---- Softmax and log-softmax: the operators, and their Jacobians applied to a tangent or, transposed, to a cotangent.
# These are linear in that operand, so that with a JVP rule on all and a transpose rule on the linear ones forward mode,
# reverse mode and every higher order follow.

JVP = {"softmax": "softmax_linear", "log_softmax": "log_softmax_jvp"}
_TRANSPOSED = {
    "softmax_linear": "softmax_linear",
    "log_softmax_jvp": "log_softmax_vjp",
    "log_softmax_vjp": "log_softmax_jvp",
}
VJP = {op: _TRANSPOSED[linear] for op, linear in JVP.items()}


def _softmax_jvp(op, primals, tangents, **params):
    """The result y is what the derivative is made of."""
    y = PRIMITIVES[op].bind(*primals, **params)
    if type(tangents[0]) is ad.Zero:
        return y, ad.Zero(jax.typeof(y))
    return y, PRIMITIVES[JVP[op]].bind(y, tangents[0], *primals[1:], **params)


def _linear_jvp(op, primals, tangents, *, axis_name, **params):
    y, t, *mask = primals
    y_dot, t_dot = tangents[:2]
    out = PRIMITIVES[op].bind(*primals, axis_name=axis_name, **params)
    tangent = ad.Zero(jax.typeof(out))
    if type(t_dot) is not ad.Zero:
        tangent = PRIMITIVES[op].bind(y, t_dot, *mask, axis_name=axis_name, **params)
    if type(y_dot) is not ad.Zero:
        across = (lambda total, kind: jax.lax.psum(total, axis_name)) if axis_name else None
        y_dot = reference.kept(y_dot, mask[0]) if mask else y_dot
        _, of_y = jax.jvp(lambda y: apply(op, y, t, *mask, across=across, **params), (y,), (y_dot,))
        tangent = ad.add_tangents(tangent, of_y)
    return out, tangent


def _linear_transpose(op, cotangent, y, t, *mask, dtype, **axes):
    """The transposed map, whose result has t's dtype."""
    assert ad.is_undefined_primal(t) and not ad.is_undefined_primal(y)
    nothing = [None] * len(mask)
    if type(cotangent) is ad.Zero:
        return [None, ad.Zero(t.aval), *nothing]
    return [None, PRIMITIVES[_TRANSPOSED[op]].bind(y, cotangent, *mask, dtype=t.aval.dtype.name, **axes), *nothing]


# ---- Numbers of rows: log-sum-exp, entropy, divergence.


def _logsumexp_jvp(op, primals, tangents, *, axes, axis_name):
    (x,), where = split(primals)
    rows = normalizer(x, where, axes, axis_name)
    of_lse = sum_of_tangents(x, rows, tangents[0], where, axes, axis_name)
    return list(rows), normalizer_tangents(rows, of_lse)


def _entropy_jvp(op, primals, tangents, *, axes, axis_name):
    (x,), where = split(primals)
    entropy, *rows = bind(op, x, where=where, axes=axes, axis_name=axis_name)
    rows = Normalizer(*rows)
    of_entropy = _entropy_tangent(x, entropy, rows.finite(), tangents[0], where, axes, axis_name)
    of_lse = sum_of_tangents(x, rows, tangents[0], where, axes, axis_name)
    return [entropy, *rows], [of_entropy, *normalizer_tangents(rows, of_lse)]


@functools.partial(jax.checkpoint, prevent_cse=False, static_argnums=(5, 6))
def _entropy_tangent(x, entropy, rows, t, where, axes, axis_name):
    """-(sum of p (log p + entropy) t) over each row."""
    (entropy,) = of_rows_with_elements([entropy], where, axes, axis_name)
    log_p = reference.log_probabilities(x, rows, where)
    p, (log_p,) = reference.weights_and_values(log_p, log_p)
    return -row_sum(p * (log_p + entropy) * reference.widened(t), axes, axis_name)


def _kl_divergence_from_parts(x, *of_y, where, axes):
    rows = normalizer(x, where, axes, ())
    return reference.kl_divergence_given(rows, x, *of_y, where, axes), *rows


def _and_distances(function):
    """The function of an operator, and as further results `reference.distance_and_count`."""

    def with_distances(x, *of_rows, where, axes, across=None, **dtype):
        results = function(x, *of_rows, where=where, axes=axes, across=across, **dtype)
        return *results, *reference.distance_and_count(Normalizer(*results[-2:]), x, where, axes, across)

    return with_distances


# ---- Cross entropies of integer labels, and their gradient by the logits.


def _cross_entropy_jvp(op, primals, tangents, *, axes, axis_name):
    (x, label), where = split(primals)
    loss, *rows = bind(op, x, label, where=where, axes=axes, axis_name=axis_name)
    rows, t = Normalizer(*rows), tangents[0]
    of_lse = sum_of_tangents(x, rows, t, where, axes, axis_name)
    of_logit = reference.widened(at_labels(t, axes, label))
    of_loss = jnp.where(exists(label, x.shape, axes), of_lse - of_logit, 0)
    return [loss, *rows], [of_loss, *normalizer_tangents(rows, of_lse)]


def _cross_entropy_from_parts(x, label, where, axes):
    rows = normalizer(x, where, axes, ())
    return reference.cross_entropy_given(rows, x, label, axes), *rows


def _gradient_jvp(op, primals, tangents, *, in_place=False, **params):
    results = PRIMITIVES[op].bind(*primals, **params)
    (*floats, label), where = split(primals)
    dots = tuple(map(ad.instantiate_zeros, tangents[: len(floats)]))
    function = functools.partial(_gradient, op, where, params)
    return results, list(jax.jvp(lambda *floats: function(*floats, label), tuple(floats), dots)[1])


def _gradient(op, where, params, x, *of_rows):
    """What a gradient's primitive gives, in jax.numpy but for the normalizer."""
    axes, rows, of_rows = params["axes"], of_rows[:-5], of_rows[-5:]
    rows = rows or normalizer(x, where, axes, params["axis_name"])
    return RECORDS[op].reference(x, *rows, *of_rows, where=where, axes=axes, dtype=params["dtype"])


def _gradient_from_parts(*operands, where, axes, across=None, dtype):
    return bind("cross_entropy_gradient", *operands, where=where, axes=axes, dtype=dtype)


# Where all elements of a batch have the same x, XLA reads it as it is; a kernel would need a copy of it for each.


def _cross_entropy_batch(op, axis_data, operands, batch_axes, *, axes, axis_name):
    if not batching.only_batched(batch_axes, (1,)):
        return batching.batch(op, axis_data, operands, batch_axes, axes=axes, axis_name=axis_name)
    (x, label), where = split(operands)
    rows = normalizer(x, where, axes, axis_name)
    loss = jax.vmap(lambda label: reference.cross_entropy_given(rows, x, label, axes), batch_axes[1])(label)
    return (loss, *rows), (0, None, None)


def _gradient_batch(op, axis_data, operands, batch_axes, **params):
    (x, *of_rows), where = split(operands)
    if not batching.only_batched(batch_axes, range(1, 1 + len(of_rows))):
        return batching.batch(op, axis_data, operands, batch_axes, **params)
    function = functools.partial(_gradient, op, where, params, x)
    results = jax.vmap(function, batch_axes[1 : 1 + len(of_rows)])(*of_rows)
    return results, [0] * len(results)


# ---- Scaling of rows by their absolute maxima.


def _absmax_scale_jvp(op, primals, tangents, *, axes, axis_name, dtype):
    (x,), where = split(primals)
    y, scale = bind(op, x, where=where, axes=axes, axis_name=axis_name, dtype=dtype)
    t = ad.instantiate_zeros(tangents[0])
    y_dot, scale_dot = _scaled_tangents(x, scale, t, where, dtype, axes, axis_name)
    if jnp.issubdtype(y.dtype, jnp.integer):
        return [y, scale], [ad.Zero(jax.typeof(y).to_tangent_aval()), scale_dot]
    return [y, scale], [y_dot.astype(y.dtype), scale_dot]


# With checkpoint x and the scales are kept for a backward pass.
@functools.partial(jax.checkpoint, prevent_cse=False, static_argnums=(4, 5, 6))
def _scaled_tangents(x, scale, t, where, dtype, axes, axis_name):
    """The tangents of x / scale, unrounded, and of the scales: of a maximum the mean of those that are it."""
    if where is not None:
        x, t = jnp.where(where, x, 0), jnp.where(where, t, 0)
    x, t = reference.widened(in_memory(x)), reference.widened(t)
    largest = scale
    if dtype in reference.LARGEST:
        largest = jnp.max(jnp.abs(jax.lax.stop_gradient(x)), axes, keepdims=True, initial=0)
        largest = jax.lax.pmax(largest, axis_name) if axis_name else largest
        largest = jnp.where(jnp.isnan(scale), scale, largest)  # which a maximum may leave out
    # In operations that XLA for CPUs does within a sum (JAX 0.12): what it does not is first written to memory.
    count = row_sum(jnp.where(jnp.abs(x) == largest, 1, jnp.zeros_like(x)), axes, axis_name)
    share = jnp.where(jnp.isnan(scale), scale, jnp.where(scale == 0, 0, 1 / jnp.maximum(count, 1)))
    of_largest = jnp.where(x == largest, t, jnp.where(x == -largest, -t, 0))
    scale_dot = row_sum(of_largest, axes, axis_name) * share / reference.LARGEST.get(dtype, 1)
    inverse = 1 / jnp.where(scale == 0, jnp.inf, scale)
    y_dot = t * inverse + x * -inverse * (scale_dot * inverse)
    return y_dot if where is None else jnp.where(where, y_dot, 0), scale_dot


# ---- The records, by the names of the operators in csrc/core/op.h.

_LINEAR = {"takes": "y t", "gives": "Jt", "jvp": _linear_jvp, "transpose": _linear_transpose}
# softmax(x) (factor + lse_factor lse) + offset, and at_label added at the label; where all four are 0, so is the
# gradient, even if x is NaN. `largest` and `total` may be given where they are known. The parameter `in_place` says
# that nothing else reads x: on CUDA the gradient takes x's place if it has x's dtype.
_GRADIENT = {
    "takes": "x [largest total] factor lse_factor offset at_label label",
    "jvp": _gradient_jvp,
    "batch": _gradient_batch,
}

RECORDS = {
    "softmax": Record("x", "y", reference.softmax, _softmax_jvp),
    "log_softmax": Record("x", "y", reference.log_softmax, _softmax_jvp),
    "softmax_linear": Record(**_LINEAR, reference=reference.softmax_linear),
    "log_softmax_jvp": Record(**_LINEAR, reference=reference.log_softmax_jvp),
    "log_softmax_vjp": Record(**_LINEAR, reference=reference.log_softmax_vjp),
    "logsumexp": Record("x", "largest total", reference.logsumexp, _logsumexp_jvp),
    # Of softmax(x). Of rows that are masked altogether, here and in a divergence, any number but NaN.
    "entropy": Record("x", "entropy largest total", reference.entropy, _entropy_jvp),
    # Of softmax(x) from softmax(y), of which log_total_y is the logarithm of the sum. Without derivative: `divergence`
    # in functions/entropies.py differentiates what binds it.
    "kl_divergence": Record(
        "x y largest_y log_total_y",
        "divergence largest total",
        reference.kl_divergence,
        from_parts=_kl_divergence_from_parts,
    ),
    # lse less the label's element of x, 0 of a row without a label.
    "cross_entropy": Record(
        "x label",
        "loss largest total",
        reference.cross_entropy,
        _cross_entropy_jvp,
        batch=_cross_entropy_batch,
        from_parts=_cross_entropy_from_parts,
    ),
    "cross_entropy_gradient": Record(
        **_GRADIENT, gives="gradient largest total", reference=reference.cross_entropy_gradient
    ),
    # `distance` is the sum of x - largest, relative to 0 where that is infinite, over the elements that are not masked
    # and whose distance is not -inf, and `count` is their number, up to `reference.MOST_COUNTED`.
    "cross_entropy_gradient_and_distances": Record(
        **_GRADIENT,
        gives="gradient largest total distance count",
        reference=_and_distances(reference.cross_entropy_gradient),
        from_parts=_and_distances(_gradient_from_parts),
    ),
    # x divided by its row's scale, in a dtype of `reference.SCALED`.
    "absmax_scale": Record("x", "scaled scale", reference.absmax_scale, _absmax_scale_jvp),
    # `fuse` alone makes these two, of programs that have been differentiated.
    "softmax_and_normalizer": Record("x", "y largest total", reference.softmax_and_normalizer),
    "logsumexp_and_distances": Record("x", "largest total distance count", _and_distances(reference.logsumexp)),
}


def apply(op, *operands, **params):
    """The operator in jax.numpy, on a primitive's operands; `across`, if given, as in `reference.py`."""
    return applied(RECORDS[op].reference, *operands, **params)


def applied(function, *operands, in_place=False, **params):
    """A record's function, on a primitive's operands and parameters."""
    operands, where = split(operands)
    return function(*operands, where=where, **params)
