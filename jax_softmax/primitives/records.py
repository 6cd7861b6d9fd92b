"""The operators: what each takes and gives, its derivatives, and what it is without its kernel. One record for each.

Operands: x is of float16, bfloat16, float32 or float64. The second array of an operator has x's shape; y of
kl_divergence has x's dtype too, t any of these. `label` is as in `labels.py`. After the operands that a record names
there may be a last one, `where`: a boolean mask that broadcasts to x's shape. Masked elements do not count, and their
result is the operator's neutral one, 0 in the linear maps.

Parameters: `axes` are the reduced axes, sorted. `axis_name` is a tuple of mesh axes, inside `shard_map`, along which
each device has a shard of every row, and otherwise empty; operators with a label only take an empty one. `dtype` names
the dtype of the result of x's shape, where there is one: float64 is for an x of float64 alone, 8 bits are for
absmax_scale alone.

Values of rows, as operands or results, have x's shape with extent 1 along `axes`, in float32 (float64 for float64).
`largest` and `sum_exp` are the fields of `reference.Normalizer`, of the elements that are not masked; lse is their
log-sum-exp. `largest` counts as a constant in derivatives: any other pivot, with its own `sum_exp`, gives the same lse.

Rules for batching, several devices, types and Taylor series follow from a record and the C++ table; so does the check
of `python -m jax_softmax`, which compares each operator's kernel with `reference.py`.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.interpreters import ad

from jax_softmax.primitives import batching, reference
from jax_softmax.primitives.as_stored import as_stored
from jax_softmax.primitives.labels import has_label, label_elements
from jax_softmax.primitives.operators import PRIMITIVES, bind, split
from jax_softmax.primitives.reference import Normalizer, RowShards, Shards
from jax_softmax.primitives.rows import (
    fill_empty_rows,
    lse_tangent,
    normalizer_tangents,
    row_normalizer,
    row_sum,
)
from jax_softmax.primitives.types import Arrays, Axes, BatchAxes, Mask, MeshAxes, Tangent, Tangents

# Of rules: tangents of which only the first operand has one that is not 0; results and their tangents.
OnlyFirst = tuple[Array, *tuple[Tangent, ...]]
Results = tuple[Sequence[Array], Sequence[Tangent]]


class Record(NamedTuple):
    """What is to be known of an operator, besides what the C++ table says."""

    takes: str  # operands before the mask; those in brackets may be left out
    gives: str
    reference: Callable[..., Any]  # in jax.numpy: see `reference.py`
    # JAX's rules, with the operator's name as a further first argument.
    jvp: Callable[..., Any] | None = None
    transpose: Callable[..., Any] | None = None
    batch: Callable[..., Any] = batching.batching_rule
    # By another operator's kernel and XLA, with the operands of `reference`. On a CPU, if the operator has no kernel
    # there; on CUDA, if it is a loss of labels that is left to XLA.
    composed: Callable[..., Any] | None = None
    # Of operators of the same x that give `largest` and what follows it, `fuse` has the one of the highest rank make
    # these for the others. 0: it takes no part. `extended` is the operator that gives the same, and more of a row.
    row_rank: int = 0
    extended: str = ""


# ---- Softmax and log-softmax, and the linear maps by their Jacobians.
#
# With a JVP rule for each, and a transpose rule for the linear maps, JAX has forward mode, reverse mode and all higher
# orders.

JVP = {"softmax": "softmax_linear", "log_softmax": "log_softmax_jvp"}
_TRANSPOSED = {
    "softmax_linear": "softmax_linear",
    "log_softmax_jvp": "log_softmax_vjp",
    "log_softmax_vjp": "log_softmax_jvp",
}
VJP = {op: _TRANSPOSED[linear] for op, linear in JVP.items()}
LINEAR_MAPS = tuple(_TRANSPOSED)


def _softmax_jvp(op: str, primals: Arrays, tangents: Tangents, **params: Any) -> tuple[Array, Tangent]:
    """The Jacobian is a function of the result y alone."""
    y = PRIMITIVES[op].bind(*primals, **params)
    if type(tangents[0]) is ad.Zero:
        return y, ad.Zero(jax.typeof(y))
    return y, PRIMITIVES[JVP[op]].bind(y, tangents[0], *primals[1:], **params)


def _linear_jvp(
    op: str, primals: Arrays, tangents: Tangents, *, axis_name: MeshAxes, **params: Any
) -> tuple[Array, Tangent]:
    y, t, *mask = primals
    y_dot, t_dot = tangents[:2]
    out = PRIMITIVES[op].bind(*primals, axis_name=axis_name, **params)
    tangent = ad.Zero(jax.typeof(out))
    if type(t_dot) is not ad.Zero:
        tangent = PRIMITIVES[op].bind(y, t_dot, *mask, axis_name=axis_name, **params)
    if not isinstance(y_dot, ad.Zero):
        shards = RowShards(lambda value, kind: jax.lax.psum(value, axis_name)) if axis_name else None
        y_dot = reference.fill_masked(y_dot, mask[0]) if mask else y_dot
        _, along_y = jax.jvp(lambda y: apply(op, y, t, *mask, shards=shards, **params), (y,), (y_dot,))
        tangent = ad.add_tangents(tangent, along_y)
    return out, tangent


def _linear_transpose(
    op: str, cotangent: Tangent, y: Array, t: Any, *mask: Array, dtype: str, **axes: Any
) -> list[Tangent | None]:
    """The transposed map of the cotangent, in t's dtype."""
    assert ad.is_undefined_primal(t) and not ad.is_undefined_primal(y)
    nothing = [None] * len(mask)
    if type(cotangent) is ad.Zero:
        return [None, ad.Zero(t.aval), *nothing]
    return [None, PRIMITIVES[_TRANSPOSED[op]].bind(y, cotangent, *mask, dtype=t.aval.dtype.name, **axes), *nothing]


# ---- Log-sum-exp, entropy, divergence: values of rows.


def _logsumexp_jvp(op: str, primals: Arrays, tangents: OnlyFirst, *, axes: Axes, axis_name: MeshAxes) -> Results:
    (x,), where = split(primals)
    normalizer = row_normalizer(x, where, axes, axis_name)
    lse_dot = lse_tangent(x, normalizer, tangents[0], where, axes, axis_name)
    return list(normalizer), normalizer_tangents(normalizer, lse_dot)


def _entropy_jvp(op: str, primals: Arrays, tangents: OnlyFirst, *, axes: Axes, axis_name: MeshAxes) -> Results:
    (x,), where = split(primals)
    entropy, *rows = bind(op, x, where=where, axes=axes, axis_name=axis_name)
    normalizer, t = Normalizer(*rows), tangents[0]
    entropy_dot = _entropy_tangent(x, entropy, normalizer.finite(), t, where, axes, axis_name)
    lse_dot = lse_tangent(x, normalizer, t, where, axes, axis_name)
    return [entropy, *normalizer], [entropy_dot, *normalizer_tangents(normalizer, lse_dot)]


@functools.partial(jax.checkpoint, prevent_cse=False, static_argnums=(5, 6))
def _entropy_tangent(
    x: Array, entropy: Array, normalizer: Normalizer, t: Array, where: Mask, axes: Axes, axis_name: MeshAxes
) -> Array:
    """-(sum of p (log p + entropy) t) over each row."""
    (entropy,) = fill_empty_rows([entropy], where, axes, axis_name)
    log_p = reference.log_probabilities(x, normalizer, where)
    p, log_p = reference.weight_and_value(log_p, log_p)
    return -row_sum(p * (log_p + entropy) * reference.widened(t), axes, axis_name)


def _and_distances(operator: Callable[..., Any]) -> Callable[..., Any]:
    """The operator with `reference.distance_sum_and_count` as further results."""

    def with_distances(
        x: Array, *others: Array, where: Mask, axes: Axes, shards: Shards = None, **dtype: str
    ) -> tuple[Array, ...]:
        results = operator(x, *others, where=where, axes=axes, shards=shards, **dtype)
        return *results, *reference.distance_sum_and_count(Normalizer(*results[-2:]), x, where, axes, shards)

    return with_distances


# ---- Cross entropies of integer labels, and their gradient by the logits.


def _cross_entropy_jvp(op: str, primals: Arrays, tangents: OnlyFirst, *, axes: Axes, axis_name: MeshAxes) -> Results:
    (x, label), where = split(primals)
    loss, *rows = bind(op, x, label, where=where, axes=axes, axis_name=axis_name)
    normalizer, t = Normalizer(*rows), tangents[0]
    lse_dot = lse_tangent(x, normalizer, t, where, axes, axis_name)
    logit_dot = reference.widened(label_elements(t, axes, label))
    loss_dot = jnp.where(has_label(label, x.shape, axes), lse_dot - logit_dot, 0)
    return [loss, *normalizer], [loss_dot, *normalizer_tangents(normalizer, lse_dot)]


def _cross_entropy_composed(x: Array, label: Array, where: Mask, axes: Axes) -> tuple[Array, Array, Array]:
    normalizer = row_normalizer(x, where, axes, ())
    return reference.cross_entropy_given_normalizer(normalizer, x, label, axes), *normalizer


def _gradient_jvp(op: str, primals: Arrays, tangents: Tangents, *, in_place: bool = False, **params: Any) -> Results:
    results = PRIMITIVES[op].bind(*primals, **params)
    (*floats, label), where = split(primals)
    dots = tuple(map(ad.instantiate_zeros, tangents[: len(floats)]))
    gradient = functools.partial(_gradient_in_jnp, op, where, params)
    return results, list(jax.jvp(lambda *floats: gradient(*floats, label), tuple(floats), dots)[1])


def _gradient_in_jnp(op: str, where: Mask, params: dict[str, Any], x: Array, *operands: Array) -> Any:
    """The results of a gradient's primitive, in jax.numpy but for the normalizer."""
    axes = params["axes"]
    if len(operands) == 5:  # the coefficients and the label
        operands = *row_normalizer(x, where, axes, params["axis_name"]), *operands
    return RECORDS[op].reference(x, *operands, where=where, axes=axes, dtype=params["dtype"])


def _gradient_composed(*operands: Array, where: Mask, axes: Axes, shards: Shards = None, dtype: str) -> Any:
    return bind("cross_entropy_gradient", *operands, where=where, axes=axes, dtype=dtype)


# Where x is the same for all elements of a batch, XLA reads it once. A kernel would need a copy of it for each.


def _cross_entropy_batch(
    op: str, axis_data: Any, operands: Arrays, batch_axes: BatchAxes, *, axes: Axes, axis_name: MeshAxes
) -> tuple[Any, Any]:
    if not batching.only_batched(batch_axes, (1,)):
        return batching.batching_rule(op, axis_data, operands, batch_axes, axes=axes, axis_name=axis_name)
    (x, label), where = split(operands)
    normalizer = row_normalizer(x, where, axes, axis_name)

    def losses(label: Array) -> Array:
        return reference.cross_entropy_given_normalizer(normalizer, x, label, axes)

    return (jax.vmap(losses, batch_axes[1])(label), *normalizer), (0, None, None)


def _gradient_batch(op: str, axis_data: Any, operands: Arrays, batch_axes: BatchAxes, **params: Any) -> tuple[Any, Any]:
    (x, *others), where = split(operands)
    if not batching.only_batched(batch_axes, range(1, 1 + len(others))):
        return batching.batching_rule(op, axis_data, operands, batch_axes, **params)
    gradient = functools.partial(_gradient_in_jnp, op, where, params, x)
    results = jax.vmap(gradient, batch_axes[1 : 1 + len(others)])(*others)
    return results, [0] * len(results)


# ---- Scaling of rows by their absolute maxima.


def _absmax_scale_jvp(
    op: str, primals: Arrays, tangents: Tangents, *, axes: Axes, axis_name: MeshAxes, dtype: str
) -> Results:
    (x,), where = split(primals)
    y, scale = bind(op, x, where=where, axes=axes, axis_name=axis_name, dtype=dtype)
    t = ad.instantiate_zeros(tangents[0])
    y_dot, scale_dot = _absmax_scale_tangents(x, scale, t, where, dtype, axes, axis_name)
    if jnp.issubdtype(y.dtype, jnp.integer):
        return [y, scale], [ad.Zero(jax.typeof(y).to_tangent_aval()), scale_dot]
    return [y, scale], [y_dot.astype(y.dtype), scale_dot]


# With checkpoint a backward pass gets x and the scales.
@functools.partial(jax.checkpoint, prevent_cse=False, static_argnums=(4, 5, 6))
def _absmax_scale_tangents(
    x: Array, scale: Array, t: Array, where: Mask, dtype: str, axes: Axes, axis_name: MeshAxes
) -> tuple[Array, Array]:
    """The tangents of x / scale before it is rounded, and of the scales. Elements that tie for the largest magnitude
    share its tangent equally."""
    if where is not None:
        x, t = jnp.where(where, x, 0), jnp.where(where, t, 0)
    x, t = reference.widened(as_stored(x)), reference.widened(t)
    largest = scale
    if dtype in reference.LARGEST:
        largest = jnp.max(jnp.abs(jax.lax.stop_gradient(x)), axes, keepdims=True, initial=0)
        largest = jax.lax.pmax(largest, axis_name) if axis_name else largest
        largest = jnp.where(jnp.isnan(scale), scale, largest)  # XLA's maximum may leave a NaN out
    # The terms of this sum are made of operations that XLA for CPUs fuses into it (JAX 0.12). Others are written to
    # memory first.
    count = row_sum(jnp.where(jnp.abs(x) == largest, 1, jnp.zeros_like(x)), axes, axis_name)
    share = jnp.where(jnp.isnan(scale), scale, jnp.where(scale == 0, 0, 1 / jnp.maximum(count, 1)))
    largest_dot = jnp.where(x == largest, t, jnp.where(x == -largest, -t, 0))
    scale_dot = row_sum(largest_dot, axes, axis_name) * share / reference.LARGEST.get(dtype, 1)
    inverse = 1 / jnp.where(scale == 0, jnp.inf, scale)
    y_dot = t * inverse + x * -inverse * (scale_dot * inverse)
    return y_dot if where is None else jnp.where(where, y_dot, 0), scale_dot


# ---- The records, by the names of the operators in csrc/core/op.h.

_LINEAR: dict[str, Any] = {"takes": "y t", "gives": "Jt", "jvp": _linear_jvp, "transpose": _linear_transpose}
# softmax(x) (factor + lse_factor lse) + offset, and at_label added at the label. In a row where these four are 0 the
# gradient is 0, even if x is NaN. `largest` and `sum_exp` are x's, for callers that know them. The parameter `in_place`
# says that nothing else reads x: on CUDA the gradient is written over x if it has x's dtype.
_GRADIENT: dict[str, Any] = {
    "takes": "x [largest sum_exp] factor lse_factor offset at_label label",
    "jvp": _gradient_jvp,
    "batch": _gradient_batch,
}

RECORDS = {
    "softmax": Record("x", "y", reference.softmax, _softmax_jvp, extended="softmax_and_normalizer"),
    "log_softmax": Record("x", "y", reference.log_softmax, _softmax_jvp),
    "softmax_linear": Record(**_LINEAR, reference=reference.softmax_linear),
    "log_softmax_jvp": Record(**_LINEAR, reference=reference.log_softmax_jvp),
    "log_softmax_vjp": Record(**_LINEAR, reference=reference.log_softmax_vjp),
    "logsumexp": Record("x", "largest sum_exp", reference.logsumexp, _logsumexp_jvp, row_rank=1),
    # The entropy of softmax(x). For a row that is masked altogether it is any number but NaN; so is a divergence.
    "entropy": Record("x", "entropy largest sum_exp", reference.entropy, _entropy_jvp),
    # Of softmax(x) from softmax(y), where lse(y) = largest_y + log_sum_y. The primitive has no derivative, but
    # `divergence` in functions/entropies.py, which binds it, has.
    "kl_divergence": Record(
        "x y largest_y log_sum_y",
        "divergence largest sum_exp",
        reference.kl_divergence,
        row_rank=2,
    ),
    # lse - x[label], 0 for a row without a label.
    "cross_entropy": Record(
        "x label",
        "loss largest sum_exp",
        reference.cross_entropy,
        _cross_entropy_jvp,
        batch=_cross_entropy_batch,
        composed=_cross_entropy_composed,
        row_rank=3,
    ),
    "cross_entropy_gradient": Record(
        **_GRADIENT,
        gives="gradient largest sum_exp",
        reference=reference.cross_entropy_gradient,
        row_rank=5,
        extended="cross_entropy_gradient_and_distances",
    ),
    # `distance_sum` is the sum of x - largest (of x where that is infinite) over the elements that are neither masked
    # nor -inf; `count` is their number, right up to `reference.MOST_COUNTED`.
    "cross_entropy_gradient_and_distances": Record(
        **_GRADIENT,
        gives="gradient largest sum_exp distance_sum count",
        reference=_and_distances(reference.cross_entropy_gradient),
        composed=_and_distances(_gradient_composed),
        row_rank=5,
    ),
    # x divided by its row's scale, in a dtype of `reference.SCALED`.
    "absmax_scale": Record("x", "scaled scale", reference.absmax_scale, _absmax_scale_jvp),
    # These are only bound by `fuse`, in programs that have been differentiated, so that they need no derivatives.
    "softmax_and_normalizer": Record("x", "y largest sum_exp", reference.softmax_and_normalizer, row_rank=5),
    "logsumexp_and_distances": Record(
        "x", "largest sum_exp distance_sum count", _and_distances(reference.logsumexp), row_rank=4
    ),
    "softmax_gradient": Record("x t", "Jt", reference.softmax_gradient),
    "log_softmax_gradient": Record("x t", "Jt", reference.log_softmax_gradient),
}
# The linear maps that take the value, and the operators that make it again of x, in one pass.
GRADIENTS = {"softmax_linear": "softmax_gradient", "log_softmax_vjp": "log_softmax_gradient"}


def apply(op: str, *operands: Array, **params: Any) -> Any:
    """The operator in jax.numpy, on its primitive's operands and parameters, and `shards` as in `reference.py`."""
    return call_on_operands(RECORDS[op].reference, *operands, **params)


def call_on_operands(function: Callable[..., Any], *operands: Array, in_place: bool = False, **params: Any) -> Any:
    """A record's `reference` or `composed` on a primitive's operands and parameters."""
    unmasked, where = split(operands)
    return function(*unmasked, where=where, **params)
