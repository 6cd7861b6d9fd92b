"""Cross entropies of integer labels: their gradient, their tangent, and how both differentiate and batch.

The gradient is a kernel's, `cross_entropy_gradient`. The tangent is a linear primitive that `cross_entropy_gradient` is
the transpose of:

    x, largest, total, *Coefficients, label, t, [where]    cross_entropy_tangent    sum(gradient t) over each row

It is linear in t, a tangent of x, and what it gives is jax.numpy on all platforms. logsumexp has no such primitive: its
gradient is mostly added to others of the same x, and what is jax.numpy XLA fuses with them.
"""

import functools

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad

from jax_softmax.primitives import batching, reference
from jax_softmax.primitives.labels import at_labels, exists, is_label
from jax_softmax.primitives.operators import PRIMITIVES, bind, split
from jax_softmax.primitives.reference import Normalizer
from jax_softmax.primitives.rows import normalizer, normalizer_tangents, row_sum, sum_of_tangents

tangent_p = Primitive("cross_entropy_tangent")


def tangent(x, rows, coefficients, label, t, where, axes, axis_name, in_place):
    """The tangent of losses, given the rows' `Normalizer`, and of their gradient the `Coefficients` and whether it may
    take x's place: see `operators.py`.

    Where each device has a part of every row, JAX's transpose adds up in the arithmetic's precision, and is one loop
    for XLA.
    """
    mask = [] if where is None else [where]
    operands = x, *rows.finite(), *coefficients, label, t, *mask
    if axis_name:
        return jax.lax.psum(_sum_of_products(axes, *operands), axis_name)
    return tangent_p.bind(*operands, axes=axes, in_place=in_place)


# With checkpoint the operands are kept for a backward pass, and nothing that is made of them.
@functools.partial(jax.checkpoint, prevent_cse=False, static_argnums=(0,))
def _sum_of_products(axes, x, largest, total, *operands):
    (*coefficients, label, t), where = split(operands)
    rows, params = Normalizer(largest, total), {"axes": axes, "dtype": reference.wide_dtype(x.dtype)}
    gradient = reference.gradient_given(rows, x, *coefficients, label, where, **params)
    counts = reference.row_counts(rows, *coefficients)
    counts &= True if where is None else where | is_label(x, axes, label)
    return row_sum(reference.kept(gradient * reference.widened(t), counts), axes, ())


def tangent_lowered(x, largest, total, *operands, axes, in_place):
    """The same but for rounding: on a CPU it takes half the time to look up the label's element of t apart."""
    (*coefficients, label, t), where = split(operands)
    counts = reference.row_counts(Normalizer(largest, total), *coefficients) & exists(label, x.shape, axes)
    of_label = jnp.where(counts, coefficients[-1] * reference.widened(at_labels(t, axes, label)), 0)
    others = *coefficients[:-1], jnp.zeros_like(of_label), jnp.full_like(label, -1), t
    mask = [] if where is None else [where]
    return _sum_of_products(axes, x, largest, total, *others, *mask) + of_label


def tangent_abstract_eval(x, largest, *operands, axes, in_place):
    return largest


def tangent_batch(axis_data, operands, batch_axes, *, axes, in_place):
    if batching.only_batched(batch_axes, range(1, 8)):
        return jax.vmap(functools.partial(_sum_of_products, axes), batch_axes)(*operands), 0
    batched, to, axes, _ = batching.moved_batch_axes(axis_data, operands, batch_axes, 9, axes=axes, axis_name=())
    return tangent_p.bind(*batched, axes=axes, in_place=in_place), to


def tangent_jvp(primals, tangents, *, axes, in_place):
    *floats, label, t = primals[:9]
    *float_dots, _, t_dot = tangents[:9]
    mask, result = primals[9:], tangent_p.bind(*primals, axes=axes, in_place=False)
    along_t = along_floats = ad.Zero(jax.typeof(result).to_tangent_aval())
    if type(t_dot) is not ad.Zero:
        along_t = tangent_p.bind(*floats, label, t_dot, *mask, axes=axes, in_place=False)
    if any(type(dot) is not ad.Zero for dot in float_dots):
        dots = tuple(map(ad.instantiate_zeros, float_dots))
        _, along_floats = jax.jvp(lambda *floats: _sum_of_products(axes, *floats, label, t, *mask), tuple(floats), dots)
    return result, ad.add_tangents(along_t, along_floats)


def tangent_transpose(cotangent, x, largest, total, *operands, axes, in_place):
    (*coefficients, label, t), mask = operands[:6], operands[6:]
    assert ad.is_undefined_primal(t)
    gradient = ad.Zero(t.aval)
    if type(cotangent) is not ad.Zero:
        operands = x, largest, total, *(cotangent * coefficient for coefficient in coefficients), label
        params = {"where": mask[0] if mask else None, "dtype": t.aval.dtype, "in_place": in_place}
        gradient = bind("cross_entropy_gradient", *operands, axes=axes, **params)[0]
    return [*[None] * 8, gradient, *[None] * len(mask)]


def cross_entropy_jvp(primals, tangents, *, axes, axis_name):
    (x, label), where = split(primals)
    loss, *rows = bind("cross_entropy", x, label, where=where, axes=axes, axis_name=axis_name)
    rows, t = Normalizer(*rows), tangents[0]
    of_lse = sum_of_tangents(x, rows, t, where, axes, axis_name)
    of_logit = reference.widened(at_labels(t, axes, label))
    of_loss = jnp.where(exists(label, x.shape, axes), of_lse - of_logit, 0)
    return [loss, *rows], [of_loss, *normalizer_tangents(rows, of_lse)]


def gradient_jvp(op, primals, tangents, *, in_place=False, **params):
    results = PRIMITIVES[op].bind(*primals, **params)
    (*floats, label), where = split(primals)
    dots = tuple(map(ad.instantiate_zeros, tangents[: len(floats)]))
    function = functools.partial(_gradient, op, where, params)
    return results, list(jax.jvp(lambda *floats: function(*floats, label), tuple(floats), dots)[1])


def _gradient(op, where, params, x, *of_rows):
    """What a gradient's primitive gives, in jax.numpy but for the normalizer."""
    axes, rows, of_rows = params["axes"], of_rows[:-5], of_rows[-5:]
    mask, rows = [] if where is None else [where], rows or normalizer(x, where, axes, params["axis_name"])
    return reference.apply(op, x, *rows, *of_rows, *mask, axes=axes, dtype=params["dtype"])


# ---- Where all elements of a batch have the same x, XLA reads it as it is; a kernel would need a copy of it for each.


def cross_entropy_batch(axis_data, operands, batch_axes, *, axes, axis_name):
    if not batching.only_batched(batch_axes, (1,)):
        return batching.batch("cross_entropy", axis_data, operands, batch_axes, axes=axes, axis_name=axis_name)
    (x, label), where = split(operands)
    rows = normalizer(x, where, axes, axis_name)
    loss = jax.vmap(lambda label: reference.cross_entropy_given(rows, x, label, axes), batch_axes[1])(label)
    return (loss, *rows), (0, None, None)


def gradient_batch(op, axis_data, operands, batch_axes, **params):
    (x, *of_rows), where = split(operands)
    if not batching.only_batched(batch_axes, range(1, 1 + len(of_rows))):
        return batching.batch(op, axis_data, operands, batch_axes, **params)
    function = functools.partial(_gradient, op, where, params, x)
    results = jax.vmap(function, batch_axes[1 : 1 + len(of_rows)])(*of_rows)
    return results, [0] * len(results)
