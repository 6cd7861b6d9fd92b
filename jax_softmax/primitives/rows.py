"""The primitives that have results for whole rows, and how they differentiate and batch.

    x, [where]                                  logsumexp               largest, total
    x, label, [where]                           cross_entropy           loss, largest, total
    x, a, b, c, d, label, [where]               cross_entropy_gradient  g, largest, total
    x, [where]                                  entropy                 entropy, largest, total
    x, y, largest_y, log_total_y, [where]       kl_divergence           divergence, largest, total
    x, [where]                                  absmax_scale_int8 | ..  y, scale
    x, largest, total, t, label, [where]        tangent_sums            sum(softmax(x) t), sum(t), t at the label
    x, largest, total, a, c, d, label, [where]  tangent_sums_transpose  h

x is a float array, y one of its shape and dtype, `where` a boolean mask that broadcasts to that shape, `label` as in
`labels.py`. What rows have, as operands (a, b, c, d) or as results, is of x's shape with extent 1 along `axes`, in
float32 (float64 for float64). `largest` is a row's maximum, and `total` the sum of exp(x - largest), relative to 0
where that is infinite, both of elements that are not masked: two parts of the log-sum-exp lse (`reference.Normalizer`).
No derivative depends on `largest`, which counts as a constant: with another one `total` is another. loss is lse less
the label's element of x, 0 of a row without a label. g = softmax(x) (a + b lse) + c, and d added at the label, in x's
dtype: a cross entropy's gradient; where a, b, c and d are all 0, so is g, even if x is NaN. h is the same without b.
`entropy` is that of softmax(x), and `divergence` that of softmax(x) from softmax(y), of which log_total_y is the
logarithm of the sum; of rows that are masked altogether both may be any number but NaN. The y of absmax_scale is x
divided by its row's `scale`, in the dtype that the primitive is named after, one of `reference.SCALED`. `axes` and
`axis_name` are as in `primitives.py`. Where there is a label, `axis_name` is empty: `losses.py` has its own way with
parts of rows.

`tangent_sums` is linear in t, a tangent of x: it gives the tangents of lse, of the sum of the logits and of the label's
logit. A loss of integer labels depends on x by these alone, so that with the three in one the transpose writes the
gradient once. logsumexp does not use it: its gradient is mostly added to others of the same x, and what is jax.numpy
XLA fuses with them.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir, xla

from jax_softmax.primitives import labels, reference
from jax_softmax.primitives.softmax import moved_batch_axes, types_tell_shardings

# The dtypes of the results of `absmax_scale`'s primitives, each of which is the same kernel.
ABSMAX_SCALE = {f"absmax_scale_{dtype}": dtype for dtype in reference.SCALED}
# Results of elements, and of rows.
RESULTS = {
    "logsumexp": (0, 2),
    "cross_entropy": (0, 3),
    "cross_entropy_gradient": (1, 2),
    "tangent_sums_transpose": (1, 0),
    "entropy": (0, 3),
    "kl_divergence": (0, 3),
    **dict.fromkeys(ABSMAX_SCALE, (1, 1)),
}
# The kernels of primitives that have another one than that of their name.
KERNELS = {
    "tangent_sums_transpose": "cross_entropy_gradient",
    **dict.fromkeys(ABSMAX_SCALE, "absmax_scale"),
}

ROW_PRIMITIVES = {op: Primitive(op) for op in RESULTS}
logsumexp_p = ROW_PRIMITIVES["logsumexp"]
cross_entropy_p = ROW_PRIMITIVES["cross_entropy"]
cross_entropy_gradient_p = ROW_PRIMITIVES["cross_entropy_gradient"]
tangent_sums_transpose_p = ROW_PRIMITIVES["tangent_sums_transpose"]
entropy_p = ROW_PRIMITIVES["entropy"]
kl_divergence_p = ROW_PRIMITIVES["kl_divergence"]
tangent_sums_p = Primitive("tangent_sums")


def _abstract_eval(op, *avals, axes, axis_name):
    x = avals[0]
    rows = tuple(1 if d in axes else n for d, n in enumerate(x.shape))
    of_elements, of_rows = RESULTS[op]
    types = of_elements * [(x.shape, jnp.dtype(ABSMAX_SCALE.get(op, x.dtype)))]
    types += of_rows * [(rows, reference.wide_dtype(x.dtype))]
    shardings = [x.sharding] * len(types)
    if types_tell_shardings(avals):
        given = [jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=aval.sharding) for aval in avals]
        results = jax.eval_shape(functools.partial(reference.apply, op, axes), *given)
        shardings = [result.sharding for result in results]
    results = [
        x.update(shape=shape, dtype=dtype, weak_type=False, sharding=sharding)
        for (shape, dtype), sharding in zip(types, shardings, strict=True)
    ]
    return [*results[:of_elements], *(_the_same_along(result, axis_name) for result in results[of_elements:])]


def _the_same_along(aval, axis_name):
    """The type of what the devices along these mesh axes all have."""
    if hasattr(aval, "vma"):
        return aval.update(vma=aval.vma - set(axis_name))
    manual = aval.manual_axis_type
    return aval.update(manual_axis_type=manual.update(varying=manual.varying - set(axis_name)))


def _only(batch_axes, which):
    """Whether of all operands only some of these are batched."""
    batched = {k for k, b in enumerate(batch_axes) if b is not None}
    return bool(batched) and batched <= set(which)


def _batch(op, axis_data, operands, batch_axes, *, axes, axis_name):
    operands, masked = list(operands), operands[-1].dtype == bool
    results = ROW_PRIMITIVES[op].bind
    if op == "cross_entropy_gradient" and _only(batch_axes, range(1, 6)):
        # Where all have the same x, its normalizer is made once, and XLA reads x as it is; the kernel would need a
        # copy of it for each.
        x, *given = operands[:6]
        where = operands[6] if masked else None
        rows = normalizer(x, where, axes, axis_name)
        elements = jax.vmap(
            lambda *given: reference.cross_entropy_gradient_given(rows, x, *given, where, axes), batch_axes[1:6]
        )
        return (elements(*given), *rows), (0, None, None)
    if op == "cross_entropy" and _only(batch_axes, (1,)):
        # x is read once for all labels.
        x, label, *mask = operands
        rows = normalizer(x, mask[0] if mask else None, axes, axis_name)
        loss = jax.vmap(lambda label: reference.cross_entropy_given(rows, x, label, axes), batch_axes[1])(label)
        return (loss, *rows), (0, None, None)
    if op == "tangent_sums_transpose" and _only(batch_axes, range(1, 7)):
        # XLA reads x as it is; the kernel would need a copy for each.
        x, *given = operands[:7]
        where = operands[7] if masked else None
        elements = jax.vmap(lambda *given: reference.tangent_sums_transpose(x, *given, where, axes), batch_axes[1:7])
        return elements(*given), [0]
    n_floats, named = len(operands) - masked, axis_data.name in axis_name
    if named:
        # What rows have is the same for all elements of the batch, which are parts of the same rows.
        n_whole = 2 if op == "kl_divergence" else 1
        for i in range(n_whole, n_floats):
            if batch_axes[i] is not None:
                operands[i] = jax.lax.index_in_dim(operands[i], 0, batch_axes[i], keepdims=False)
        batch_axes = [None if n_whole <= i < n_floats else b for i, b in enumerate(batch_axes)]
        n_floats = n_whole
    batched, to, axes, axis_name = moved_batch_axes(
        axis_data, operands, batch_axes, n_floats, axes=axes, axis_name=axis_name
    )
    results = results(*batched, axes=axes, axis_name=axis_name)
    of_elements, of_rows = RESULTS[op]
    if named:
        results[of_elements:] = [jax.lax.squeeze(result, [to]) for result in results[of_elements:]]
    return results, [to] * of_elements + [None if named else to] * of_rows


def normalizer(x, where, axes, axis_name):
    """The rows' `reference.Normalizer`, by the primitive."""
    return reference.Normalizer(*logsumexp_p.bind(*of_mask(x, where), axes=axes, axis_name=axis_name))


def of_mask(*operands):
    """The operands, without a last one that is None."""
    return operands if operands[-1] is not None else operands[:-1]


# With checkpoint x and what rows have are kept for a backward pass, and no exponentials.
@functools.partial(jax.checkpoint, prevent_cse=False, static_argnums=(4, 5))
def _sum_of_tangents(x, rows, t, where, axes, axis_name):
    """The tangent of lse: the sum over each row of softmax(x) t."""
    return row_sum(reference.probabilities(x, rows, where) * reference.widened(t), axes, axis_name)


@functools.partial(jax.custom_jvp, nondiff_argnums=(3, 4))
def maximum(x, largest, where, axes, axis_name):
    """`largest`, the rows' maximum, with a derivative by x: the mean of those of the elements that are it, as JAX has
    it at ties."""
    return largest


@maximum.defjvp
def _maximum_jvp(axes, axis_name, primals, tangents):
    x, largest, where = primals
    return largest, _mean_of_largest(x, largest, tangents[0], where, axes, axis_name)


@functools.partial(jax.checkpoint, prevent_cse=False, static_argnums=(4, 5))
def _mean_of_largest(x, largest, t, where, axes, axis_name):
    is_largest = reference.widened(x) == largest
    if where is not None:
        is_largest &= where
    count = row_sum(is_largest.astype(largest.dtype), axes, axis_name)
    mean = row_sum(jnp.where(is_largest, reference.widened(t), 0), axes, axis_name) / jnp.maximum(count, 1)
    return jnp.where(jnp.isnan(largest), largest, mean)


def row_sum(a, axes, axis_name):
    total = jnp.sum(a, axes, keepdims=True)
    return jax.lax.psum(total, axis_name) if axis_name else total


def _cross_entropy_jvp(primals, tangents, *, axes, axis_name):
    x, label, *mask = primals
    loss, *rows = cross_entropy_p.bind(*primals, axes=axes, axis_name=axis_name)
    of_lse, _, of_logit = tangent_sums_p.bind(x, *rows, tangents[0], label, *mask, axes=axes)
    of_loss = jnp.where(labels.exists(label, x.shape, axes), of_lse - of_logit, 0)
    return [loss, *rows], [of_loss, *_normalizer_tangents(rows, of_lse)]


def _normalizer_tangents(rows, of_lse):
    """The tangents of the two parts of lse, the first of which counts as a constant."""
    largest, total = rows
    return [ad.Zero(jax.typeof(largest).to_tangent_aval()), total * of_lse]


def _cross_entropy_gradient_jvp(primals, tangents, *, axes, axis_name):
    """That of the same function of logsumexp."""
    results = cross_entropy_gradient_p.bind(*primals, axes=axes, axis_name=axis_name)
    *floats, label = primals[:6]
    where = primals[6] if len(primals) > 6 else None

    def function(x, *given):
        rows = normalizer(x, where, axes, axis_name)
        return reference.cross_entropy_gradient_given(rows, x, *given, label, where, axes), *rows

    return results, list(jax.jvp(function, tuple(floats), tuple(map(ad.instantiate_zeros, tangents[:5])))[1])


def _tangent_sums_transpose_jvp(primals, tangents, *, axes, axis_name):
    """That of the same function in jax.numpy, element by element."""
    *floats, label = primals[:7]
    where = primals[7] if len(primals) > 7 else None

    def function(*floats):
        return reference.tangent_sums_transpose(*floats, label, where, axes)

    result = tangent_sums_transpose_p.bind(*primals, axes=axes, axis_name=axis_name)
    return result, jax.jvp(function, tuple(floats), tuple(map(ad.instantiate_zeros, tangents[:6])))[1]


def _absmax_scale_jvp(op, primals, tangents, *, axes, axis_name):
    y, scale = ROW_PRIMITIVES[op].bind(*primals, axes=axes, axis_name=axis_name)
    x, *mask = primals
    where = mask[0] if mask else None
    t = ad.instantiate_zeros(tangents[0])
    y_dot, scale_dot = _scaled_tangents(x, scale, t, where, ABSMAX_SCALE[op], axes, axis_name)
    if jnp.issubdtype(y.dtype, jnp.integer):
        return [y, scale], [ad.Zero(jax.typeof(y).to_tangent_aval()), scale_dot]
    return [y, scale], [y_dot.astype(y.dtype), scale_dot]


# With checkpoint x and the scales are kept for a backward pass.
@functools.partial(jax.checkpoint, prevent_cse=False, static_argnums=(4, 5, 6))
def _scaled_tangents(x, scale, t, where, dtype, axes, axis_name):
    """The tangents of x / scale, unrounded, and of the scales: of a maximum the mean of those that are it."""
    if where is not None:
        x, t = jnp.where(where, x, 0), jnp.where(where, t, 0)
    x, t = reference.widened(x), reference.widened(t)
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


# ---- tangent_sums


def _tangent_sums(x, largest, total, t, label, *mask, axes):
    where = mask[0] if mask else None
    counted = t if where is None else jnp.where(where, t, 0)
    return [
        _sum_of_tangents(x, reference.Normalizer(largest, total), t, where, axes, ()),
        row_sum(reference.widened(counted), axes, ()),
        reference.widened(labels.at_labels(t, axes, label)),
    ]


# With checkpoint x and what rows have are kept for a backward pass.
@functools.partial(jax.checkpoint, prevent_cse=False, static_argnums=(5, 6))
def tangent_sums_of_parts(x, rows, t, label, where, axes, axis_name):
    """The same where each device has a part of every row, and the label if it lies in its own.

    JAX's transpose of it adds up in the arithmetic's precision, and is one loop for XLA.
    """
    t = reference.widened(t)
    terms = (
        reference.probabilities(x, rows, where) * t,
        t if where is None else jnp.where(where, t, 0),
        jnp.where(labels.is_label(x, axes, label), t, 0),
    )
    return [row_sum(term, axes, axis_name) for term in terms]


def _tangent_sums_batch(axis_data, operands, batch_axes, *, axes):
    if _only(batch_axes, (4,)):
        # Of one x and t for all labels the other sums are made once, as those of rows without labels.
        *given, t, label = operands[:5]
        *sums, _ = tangent_sums_p.bind(*given, t, jnp.full_like(given[-1], -1, jnp.int32), *operands[5:], axes=axes)
        of_labels = jax.vmap(lambda label: reference.widened(labels.at_labels(t, axes, label)), batch_axes[4])(label)
        return [*sums, of_labels], [None, None, 0]
    batched, to, axes, _ = moved_batch_axes(axis_data, operands, batch_axes, 5, axes=axes, axis_name=())
    return tangent_sums_p.bind(*batched, axes=axes), [to] * 3


def _tangent_sums_jvp(primals, tangents, *, axes):
    x, largest, total, t, label, *mask = primals
    results = tangent_sums_p.bind(*primals, axes=axes)
    of_t = [ad.Zero(jax.typeof(result)) for result in results]
    of_x = list(of_t)
    if type(tangents[3]) is not ad.Zero:
        of_t = tangent_sums_p.bind(x, largest, total, tangents[3], label, *mask, axes=axes)
    of_rows = (tangents[0], tangents[2])
    if any(type(tangent) is not ad.Zero for tangent in of_rows):
        where = mask[0] if mask else None

        def of_lse(x, total):
            return _sum_of_tangents(x, reference.Normalizer(largest, total), t, where, axes, ())

        of_x[0] = jax.jvp(of_lse, (x, total), tuple(map(ad.instantiate_zeros, of_rows)))[1]
    return results, [ad.add_tangents(a, b) for a, b in zip(of_t, of_x, strict=True)]


def _tangent_sums_transpose(cotangents, x, largest, total, t, label, *mask, axes):
    assert ad.is_undefined_primal(t)
    gradient = ad.Zero(t.aval)
    if any(type(cotangent) is not ad.Zero for cotangent in cotangents):
        given = map(ad.instantiate_zeros, cotangents)
        (gradient,) = tangent_sums_transpose_p.bind(x, largest, total, *given, label, *mask, axes=axes, axis_name=())
    return [None, None, None, gradient, None, *[None] * len(mask)]


# ---- Entropies, and the log-sum-exp that they are made of.


def _logsumexp_jvp(primals, tangents, *, axes, axis_name):
    x, *mask = primals
    rows = logsumexp_p.bind(*primals, axes=axes, axis_name=axis_name)
    of_lse = _sum_of_tangents(x, reference.Normalizer(*rows), tangents[0], mask[0] if mask else None, axes, axis_name)
    return rows, _normalizer_tangents(rows, of_lse)


def _entropy_jvp(primals, tangents, *, axes, axis_name):
    x, *mask = primals
    where = mask[0] if mask else None
    entropy, *rows = entropy_p.bind(*primals, axes=axes, axis_name=axis_name)
    given = reference.Normalizer(*rows), tangents[0], where, axes, axis_name
    of_entropy, of_lse = _entropy_tangent(x, entropy, *given), _sum_of_tangents(x, *given)
    return [entropy, *rows], [of_entropy, *_normalizer_tangents(rows, of_lse)]


@functools.partial(jax.checkpoint, prevent_cse=False, static_argnums=(5, 6))
def _entropy_tangent(x, entropy, rows, t, where, axes, axis_name):
    """-(sum of p (log p + entropy) t) over each row."""
    (entropy,) = of_rows_with_elements([entropy], where, axes, axis_name)
    log_p = reference.log_probabilities(x, rows, where)
    p, (log_p,) = reference.weights_and_values(log_p, log_p)
    return -row_sum(p * (log_p + entropy) * reference.widened(t), axes, axis_name)


def of_rows_with_elements(rows, where, axes, axis_name):
    """What rows have, and 0 for rows that are masked altogether."""
    if where is None:
        return rows
    ndim = rows[0].ndim
    exists = jnp.any(jnp.expand_dims(where, tuple(range(ndim - where.ndim))), axes, keepdims=True)
    if axis_name:
        exists = jax.lax.pmax(exists.astype(jnp.int32), axis_name) > 0
    return [jnp.where(exists, row, 0) for row in rows]


class _Divergence(NamedTuple):
    divergence: jax.Array
    of_x: reference.Normalizer
    of_y: reference.Normalizer


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def divergence(axes, axis_name, x, y, where):
    """The divergence of softmax(y) from softmax(x) over each row, and both normalizers."""
    of_y = normalizer(y, where, axes, axis_name).without_infinity()
    operands = of_mask(x, y, of_y.largest, of_y.log_total, where)
    result, *of_x = kl_divergence_p.bind(*operands, axes=axes, axis_name=axis_name)
    return _Divergence(result, reference.Normalizer(*of_x), of_y)


@functools.partial(divergence.defjvp, symbolic_zeros=True)
def _divergence_jvp(axes, axis_name, primals, tangents):
    x, y, where = primals
    rows = divergence(axes, axis_name, x, y, where)
    x_dot, y_dot = (None if isinstance(t, jax.custom_derivatives.SymbolicZero) else t for t in tangents[:2])
    constant = jnp.zeros_like(rows.divergence)

    def of_normalizer(x, rows, t):
        if t is None:
            return reference.Normalizer(constant, constant)
        return reference.Normalizer(constant, rows.total * _sum_of_tangents(x, rows, t, where, axes, axis_name))

    tangent = _divergence_tangent(x, y, rows, x_dot, y_dot, where, axes, axis_name)
    return rows, _Divergence(tangent, of_normalizer(x, rows.of_x, x_dot), of_normalizer(y, rows.of_y, y_dot))


@functools.partial(jax.checkpoint, prevent_cse=False, static_argnums=(6, 7))
def _divergence_tangent(x, y, rows, x_dot, y_dot, where, axes, axis_name):
    """The sum of p (log p - log q - divergence) x_dot + (q - p) y_dot over each row."""
    (divergence,) = of_rows_with_elements([rows.divergence], where, axes, axis_name)
    log_p = reference.log_probabilities(x, rows.of_x, where)
    log_q = reference.log_probabilities(y, rows.of_y, where)
    q = jnp.exp(log_q)
    p, (log_p, log_q) = reference.weights_and_values(log_p, log_p, log_q)
    tangent = jnp.zeros_like(p)
    if x_dot is not None:
        tangent += p * (log_p - log_q - divergence) * reference.widened(x_dot)
    if y_dot is not None:
        tangent += (q - p) * reference.widened(y_dot)
    return row_sum(tangent, axes, axis_name)


for _op, _primitive in ROW_PRIMITIVES.items():
    _primitive.multiple_results = True
    _primitive.def_impl(functools.partial(xla.apply_primitive, _primitive))
    _primitive.def_abstract_eval(functools.partial(_abstract_eval, _op))
    batching.fancy_primitive_batchers[_primitive] = functools.partial(_batch, _op)
ad.primitive_jvps[logsumexp_p] = _logsumexp_jvp
ad.primitive_jvps[cross_entropy_p] = _cross_entropy_jvp
ad.primitive_jvps[cross_entropy_gradient_p] = _cross_entropy_gradient_jvp
ad.primitive_jvps[tangent_sums_transpose_p] = _tangent_sums_transpose_jvp
ad.primitive_jvps[entropy_p] = _entropy_jvp
for _op in ABSMAX_SCALE:
    ad.primitive_jvps[ROW_PRIMITIVES[_op]] = functools.partial(_absmax_scale_jvp, _op)

tangent_sums_p.multiple_results = True
tangent_sums_p.def_impl(functools.partial(xla.apply_primitive, tangent_sums_p))
tangent_sums_p.def_abstract_eval(lambda x, largest, total, t, label, *mask, axes: [largest] * 3)
batching.fancy_primitive_batchers[tangent_sums_p] = _tangent_sums_batch
ad.primitive_jvps[tangent_sums_p] = _tangent_sums_jvp
ad.primitive_transposes[tangent_sums_p] = _tangent_sums_transpose
mlir.register_lowering(tangent_sums_p, mlir.lower_fun(_tangent_sums, multiple_results=True))
