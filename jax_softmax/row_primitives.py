"""The primitives that have results for whole rows, and how they differentiate and batch.

    x, [where]                       logsumexp               lse, largest
    x, [where]                       log_sum                 log_sum, largest
    x, [where]                       row_states              largest, total
    x, label, [where]                cross_entropy           loss, lse
    x, a, b, c, [where]              cross_entropy_gradient  g, lse, largest
    x, lse, label, a, c, d, [where]  gradient_given_lse      h
    x, [where]                       entropy                 entropy, log_sum, largest
    x, y, m, n, [where]              kl_divergence           divergence, log_sum, largest
    x, [where]                       absmax_scale_int8 | ..  y, scale
    x, lse, t, label, [where]        tangent_sums            sum(softmax(x) t), sum(t), t at the label

x is a float array, y one of its shape and dtype, `where` a boolean mask that broadcasts to that shape, `label` as in
`labels.py`. What rows have, as operands (a, b, c, d, m, n) or as results, is of x's shape with extent 1 along `axes`,
in float32 (float64 for float64): loss is lse less the label's element of x, 0 of a row without a label; lse is the
logarithm of the sum of exp(x) over a row and `largest` its maximum, both of elements that are not masked. log_sum = lse
- largest, without what is lost if lse is large; `total` is the sum of exp(x - largest), relative to 0 where `largest`
is infinite, and no derivative is made of it. g = softmax(x) (a + b lse) - c, in x's dtype; of a row with a label, all
but the label's own element of a cross entropy's gradient. h = softmax(x) a - c, and d added at the label, in x's dtype:
no device needs another one's part of a row for it. `entropy` is that of softmax(x), and `divergence` that of softmax(x)
from softmax(y), m and n being y's log_sum and largest; both may be anything for rows that are masked altogether. The y
of absmax_scale is x divided by its row's `scale`, in the dtype that the primitive is named after, one of
`reference.SCALED`. `axes` and `axis_name` are as in `primitives.py`. Where there is a label, `axis_name` is empty:
`losses.py` has its own way with parts of rows.

`tangent_sums` is linear in t, a tangent of x: it gives the tangents of lse, of the sum of the logits and of the label's
logit. A loss of integer labels depends on x by these alone, so that with the three in one the transpose writes the
gradient once, by gradient_given_lse. logsumexp does not use it: its gradient is mostly added to others of the same x,
and what is jax.numpy XLA fuses with them.
"""

import functools

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir, xla

from jax_softmax import labels, reference
from jax_softmax.primitives import moved_batch_axes, types_tell_shardings

# The dtypes of the results of `absmax_scale`'s primitives, each of which is the same kernel.
ABSMAX_SCALE = {f"absmax_scale_{dtype}": dtype for dtype in reference.SCALED}
# Results of elements, and of rows.
RESULTS = {
    "logsumexp": (0, 2),
    "log_sum": (0, 2),
    "row_states": (0, 2),
    "cross_entropy": (0, 2),
    "cross_entropy_gradient": (1, 2),
    "gradient_given_lse": (1, 0),
    "entropy": (0, 3),
    "kl_divergence": (0, 3),
    **dict.fromkeys(ABSMAX_SCALE, (1, 1)),
}
# The kernels of primitives that have another one than that of their name.
KERNELS = {
    "logsumexp": "row_states",
    "log_sum": "row_states",
    "gradient_given_lse": "cross_entropy_gradient",
    **dict.fromkeys(ABSMAX_SCALE, "absmax_scale"),
}

ROW_PRIMITIVES = {op: Primitive(op) for op in RESULTS}
logsumexp_p = ROW_PRIMITIVES["logsumexp"]
cross_entropy_p = ROW_PRIMITIVES["cross_entropy"]
cross_entropy_gradient_p = ROW_PRIMITIVES["cross_entropy_gradient"]
gradient_given_lse_p = ROW_PRIMITIVES["gradient_given_lse"]
log_sum_p = ROW_PRIMITIVES["log_sum"]
row_states_p = ROW_PRIMITIVES["row_states"]
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
    if op == "cross_entropy_gradient" and _only(batch_axes, (1, 2, 3)):
        # Of one x for all lse is made once, and XLA reads x as it is; the kernel would need a copy for each.
        x, *rows = operands[:4]
        where = operands[4] if masked else None
        lse, largest = logsumexp_p.bind(x, *operands[4:], axes=axes, axis_name=axis_name)
        elements = jax.vmap(lambda a, b, c: reference.cross_entropy_elements(x, a, b, c, lse, where), batch_axes[1:4])
        return (elements(*rows), lse, largest), (0, None, None)
    if op == "cross_entropy" and _only(batch_axes, (1,)):
        # x is read once for all labels.
        x, label, *mask = operands
        lse, _ = logsumexp_p.bind(x, *mask, axes=axes, axis_name=axis_name)
        loss = jax.vmap(lambda label: reference.cross_entropy_given(lse, x, label, axes), batch_axes[1])(label)
        return (loss, lse), (0, None)
    if op == "gradient_given_lse" and _only(batch_axes, range(1, 6)):
        # XLA reads x as it is; the kernel would need a copy for each.
        x, *rows = operands[:6]
        where = operands[6] if masked else None
        elements = jax.vmap(lambda *rows: reference.gradient_given_lse(x, *rows, where, axes), batch_axes[1:6])
        return elements(*rows), [0]
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


# With checkpoint x and lse are kept for a backward pass, and no exponentials.
@functools.partial(jax.checkpoint, prevent_cse=False, static_argnums=(4, 5))
def _sum_of_tangents(x, lse, t, where, axes, axis_name):
    """The tangent of lse: the sum over each row of softmax(x) t."""
    y = reference.exp_of_difference(x, lse, where)
    return row_sum(y * reference.widened(t), axes, axis_name)


@functools.partial(jax.checkpoint, prevent_cse=False, static_argnums=(4, 5))
def _mean_of_largest(x, largest, t, where, axes, axis_name):
    """The tangent of the maximum: the mean tangent of the elements that are it, as JAX has it at ties."""
    is_largest = reference.widened(x) == largest
    if where is not None:
        is_largest &= where
    count = row_sum(is_largest.astype(largest.dtype), axes, axis_name)
    mean = row_sum(jnp.where(is_largest, reference.widened(t), 0), axes, axis_name) / jnp.maximum(count, 1)
    return jnp.where(jnp.isnan(largest), jnp.nan, mean)


def row_sum(a, axes, axis_name):
    total = jnp.sum(a, axes, keepdims=True)
    return jax.lax.psum(total, axis_name) if axis_name else total


def _logsumexp_jvp(primals, tangents, *, axes, axis_name):
    x, *mask = primals
    lse, largest = logsumexp_p.bind(*primals, axes=axes, axis_name=axis_name)
    where = mask[0] if mask else None
    return [lse, largest], [
        tangent(x, row, tangents[0], where, axes, axis_name)
        for tangent, row in ((_sum_of_tangents, lse), (_mean_of_largest, largest))
    ]


def _cross_entropy_jvp(primals, tangents, *, axes, axis_name):
    x, label, *mask = primals
    loss, lse = cross_entropy_p.bind(*primals, axes=axes, axis_name=axis_name)
    of_lse, _, of_logit = tangent_sums_p.bind(x, lse, tangents[0], label, *mask, axes=axes)
    return [loss, lse], [jnp.where(labels.exists(label, x.shape, axes), of_lse - of_logit, 0), of_lse]


def _cross_entropy_gradient_jvp(primals, tangents, *, axes, axis_name):
    """That of the same function of logsumexp."""
    results = cross_entropy_gradient_p.bind(*primals, axes=axes, axis_name=axis_name)
    floats = tuple(primals[:4])
    where = primals[4] if len(primals) > 4 else None

    def function(x, a, b, c):
        operands = [x] if where is None else [x, where]
        lse, largest = logsumexp_p.bind(*operands, axes=axes, axis_name=axis_name)
        return reference.cross_entropy_elements(x, a, b, c, lse, where), lse, largest

    tangents = tuple(ad.instantiate_zeros(t) for t in tangents[:4])
    return results, list(jax.jvp(function, floats, tangents)[1])


def _gradient_given_lse_jvp(primals, tangents, *, axes, axis_name):
    """That of the same function in jax.numpy, element by element."""
    x, lse, label, *rows = primals[:6]
    where = primals[6] if len(primals) > 6 else None

    def function(x, lse, a, c, d):
        return reference.gradient_given_lse(x, lse, label, a, c, d, where, axes)

    result = gradient_given_lse_p.bind(*primals, axes=axes, axis_name=axis_name)
    of_x, of_lse, _, *of_rows = tangents[:6]
    tangents = tuple(map(ad.instantiate_zeros, (of_x, of_lse, *of_rows)))
    return result, jax.jvp(function, (x, lse, *rows), tangents)[1]


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
        largest = jnp.where(jnp.isnan(scale), jnp.nan, largest)  # which a maximum may leave out
    # In operations that XLA for CPUs does within a sum (JAX 0.12): what it does not is first written to memory.
    count = row_sum(jnp.where(jnp.abs(x) == largest, 1, jnp.zeros_like(x)), axes, axis_name)
    share = jnp.where(jnp.isnan(scale), jnp.nan, jnp.where(scale == 0, 0, 1 / jnp.maximum(count, 1)))
    of_largest = jnp.where(x == largest, t, jnp.where(x == -largest, -t, 0))
    scale_dot = row_sum(of_largest, axes, axis_name) * share / reference.LARGEST.get(dtype, 1)
    inverse = 1 / jnp.where(scale == 0, jnp.inf, scale)
    y_dot = t * inverse + x * -inverse * (scale_dot * inverse)
    return y_dot if where is None else jnp.where(where, y_dot, 0), scale_dot


# ---- tangent_sums


def _tangent_sums(x, lse, t, label, *mask, axes):
    where = mask[0] if mask else None
    counted = t if where is None else jnp.where(where, t, 0)
    return [
        _sum_of_tangents(x, lse, t, where, axes, ()),
        row_sum(reference.widened(counted), axes, ()),
        reference.widened(labels.at_labels(t, axes, label)),
    ]


# With checkpoint x and lse are kept for a backward pass.
@functools.partial(jax.checkpoint, prevent_cse=False, static_argnums=(5, 6))
def tangent_sums_of_parts(x, lse, t, label, where, axes, axis_name):
    """The same where each device has a part of every row, and the label if it lies in its own.

    JAX's transpose of it adds up in the arithmetic's precision, and is one loop for XLA.
    """
    t = reference.widened(t)
    terms = (
        reference.exp_of_difference(x, lse, where) * t,
        t if where is None else jnp.where(where, t, 0),
        jnp.where(labels.is_label(x, axes, label), t, 0),
    )
    return [row_sum(term, axes, axis_name) for term in terms]


def _tangent_sums_batch(axis_data, operands, batch_axes, *, axes):
    if _only(batch_axes, (3,)):
        # Of one x and t for all labels the other sums are made once, as those of rows without labels.
        x, lse, t, label, *mask = operands
        *sums, _ = tangent_sums_p.bind(x, lse, t, jnp.full_like(lse, -1, jnp.int32), *mask, axes=axes)
        of_labels = jax.vmap(lambda label: reference.widened(labels.at_labels(t, axes, label)), batch_axes[3])(label)
        return [*sums, of_labels], [None, None, 0]
    batched, to, axes, _ = moved_batch_axes(axis_data, operands, batch_axes, 4, axes=axes, axis_name=())
    return tangent_sums_p.bind(*batched, axes=axes), [to] * 3


def _tangent_sums_jvp(primals, tangents, *, axes):
    x, lse, t, label, *mask = primals
    results = tangent_sums_p.bind(*primals, axes=axes)
    of_t = [ad.Zero(jax.typeof(result)) for result in results]
    of_x = list(of_t)
    if type(tangents[2]) is not ad.Zero:
        of_t = tangent_sums_p.bind(x, lse, tangents[2], label, *mask, axes=axes)
    if any(type(tangent) is not ad.Zero for tangent in tangents[:2]):
        where = mask[0] if mask else None
        given = tuple(ad.instantiate_zeros(tangent) for tangent in tangents[:2])
        of_x[0] = jax.jvp(lambda x, lse: _sum_of_tangents(x, lse, t, where, axes, ()), (x, lse), given)[1]
    return results, [ad.add_tangents(a, b) for a, b in zip(of_t, of_x, strict=True)]


def _tangent_sums_transpose(cotangents, x, lse, t, label, *mask, axes):
    assert ad.is_undefined_primal(t)
    nothing = [None] * len(mask)
    if all(type(cotangent) is ad.Zero for cotangent in cotangents):
        return [None, None, ad.Zero(t.aval), None, *nothing]
    a, c, of_label = map(ad.instantiate_zeros, cotangents)
    (gradient,) = gradient_given_lse_p.bind(x, lse, label, a, -c, of_label, *mask, axes=axes, axis_name=())
    return [None, None, gradient, None, *nothing]


def with_labels(gradient, x, lse, a, c, of_label, label, where, axes):
    """A gradient softmax(x) a - c with `of_label` added at the labels, in the arithmetic's precision."""
    counts = labels.exists(label, x.shape, axes)
    if where is not None:
        counts &= labels.at_labels(jnp.broadcast_to(where, x.shape), axes, label)
    y = reference.exp_of_difference(labels.at_labels(x, axes, label), lse, counts)
    element = jnp.where(counts, y * a - c, 0)
    return labels.set_at_labels(gradient, axes, label, (element + of_label).astype(gradient.dtype))


# ---- Entropies. What a row's elements are taken relative to, `largest`, counts as a constant: with another one log_sum
# is another, so that no derivative depends on it.


def _jvp_of_rows(op, tangents_of, primals, tangents, *, axes, axis_name):
    x, *mask = primals
    where = mask[0] if mask else None
    rows = ROW_PRIMITIVES[op].bind(*primals, axes=axes, axis_name=axis_name)
    constant = ad.Zero(jax.typeof(rows[-1]).to_tangent_aval())
    return rows, [*(f(x, rows, tangents[0], where, axes, axis_name) for f in tangents_of), constant]


@functools.partial(jax.checkpoint, prevent_cse=False, static_argnums=(4, 5))
def _entropy_tangent(x, rows, t, where, axes, axis_name):
    """-(sum of p (log p + entropy) t) over each row."""
    entropy, *of_x = of_rows_with_elements(rows, where, axes, axis_name)
    log_p = reference.log_probabilities(x, *of_x, where)
    return -row_sum(_weighted(log_p, log_p, entropy) * reference.widened(t), axes, axis_name)


@functools.partial(jax.checkpoint, prevent_cse=False, static_argnums=(4, 5))
def _log_sum_tangent(x, rows, t, where, axes, axis_name):
    """The sum of p t over each row."""
    of_x = of_rows_with_elements(rows[-2:], where, axes, axis_name)
    p = jnp.exp(reference.log_probabilities(x, *of_x, where))
    return row_sum(p * reference.widened(t), axes, axis_name)


def _weighted(log_p, values, added):
    """p (values + added), where values of p = 0 count as 0, whatever they are, in derivatives as well."""
    p = jnp.exp(log_p)
    return p * (jnp.where(p == 0, 0, values) + added)


def of_rows_with_elements(rows, where, axes, axis_name):
    """What rows have, and 0 for rows that are masked altogether."""
    if where is None:
        return rows
    ndim = rows[0].ndim
    exists = jnp.any(jnp.expand_dims(where, tuple(range(ndim - where.ndim))), axes, keepdims=True)
    if axis_name:
        exists = jax.lax.pmax(exists.astype(jnp.int32), axis_name) > 0
    return [jnp.where(exists, row, 0) for row in rows]


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def divergence(axes, axis_name, x, y, where):
    """The divergence of softmax(y) from softmax(x) over each row; then what log_sum gives of x, and of y."""
    mask = [] if where is None else [where]
    of_y = log_sum_p.bind(y, *mask, axes=axes, axis_name=axis_name)
    result, *of_x = kl_divergence_p.bind(x, y, *of_y, *mask, axes=axes, axis_name=axis_name)
    return result, *of_x, *of_y


@functools.partial(divergence.defjvp, symbolic_zeros=True)
def _divergence_jvp(axes, axis_name, primals, tangents):
    x, y, where = primals
    rows = divergence(axes, axis_name, x, y, where)
    x_dot, y_dot = (None if isinstance(t, jax.custom_derivatives.SymbolicZero) else t for t in tangents[:2])
    log_sums = [
        jnp.zeros_like(rows[0]) if t is None else _log_sum_tangent(a, of_a, t, where, axes, axis_name)
        for a, of_a, t in ((x, rows[1:3], x_dot), (y, rows[3:5], y_dot))
    ]
    constant = jnp.zeros_like(rows[0])
    tangent = _divergence_tangent(x, y, rows, x_dot, y_dot, where, axes, axis_name)
    return rows, (tangent, log_sums[0], constant, log_sums[1], constant)


@functools.partial(jax.checkpoint, prevent_cse=False, static_argnums=(6, 7))
def _divergence_tangent(x, y, rows, x_dot, y_dot, where, axes, axis_name):
    """The sum of p (log p - log q - divergence) x_dot + (q - p) y_dot over each row."""
    divergence, *rows = of_rows_with_elements(rows, where, axes, axis_name)
    log_p = reference.log_probabilities(x, *rows[:2], where)
    log_q = reference.log_probabilities(y, *rows[2:], where)
    tangent = jnp.zeros_like(log_p)
    if x_dot is not None:
        tangent += _weighted(log_p, log_p - log_q, -divergence) * reference.widened(x_dot)
    if y_dot is not None:
        tangent += (jnp.exp(log_q) - jnp.exp(log_p)) * reference.widened(y_dot)
    return row_sum(tangent, axes, axis_name)


for _op, _primitive in ROW_PRIMITIVES.items():
    _primitive.multiple_results = True
    _primitive.def_impl(functools.partial(xla.apply_primitive, _primitive))
    _primitive.def_abstract_eval(functools.partial(_abstract_eval, _op))
    batching.fancy_primitive_batchers[_primitive] = functools.partial(_batch, _op)
ad.primitive_jvps[logsumexp_p] = _logsumexp_jvp
ad.primitive_jvps[cross_entropy_p] = _cross_entropy_jvp
ad.primitive_jvps[cross_entropy_gradient_p] = _cross_entropy_gradient_jvp
ad.primitive_jvps[gradient_given_lse_p] = _gradient_given_lse_jvp
ad.primitive_jvps[log_sum_p] = functools.partial(_jvp_of_rows, "log_sum", [_log_sum_tangent])
ad.primitive_jvps[entropy_p] = functools.partial(_jvp_of_rows, "entropy", [_entropy_tangent, _log_sum_tangent])
for _op in ABSMAX_SCALE:
    ad.primitive_jvps[ROW_PRIMITIVES[_op]] = functools.partial(_absmax_scale_jvp, _op)

tangent_sums_p.multiple_results = True
tangent_sums_p.def_impl(functools.partial(xla.apply_primitive, tangent_sums_p))
tangent_sums_p.def_abstract_eval(lambda x, lse, t, label, *mask, axes: [lse] * 3)
batching.fancy_primitive_batchers[tangent_sums_p] = _tangent_sums_batch
ad.primitive_jvps[tangent_sums_p] = _tangent_sums_jvp
ad.primitive_transposes[tangent_sums_p] = _tangent_sums_transpose
mlir.register_lowering(tangent_sums_p, mlir.lower_fun(_tangent_sums, multiple_results=True))
