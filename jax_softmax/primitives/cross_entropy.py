"""The tangent of cross entropies of integer labels: a linear primitive whose transpose is `cross_entropy_gradient`.

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
from jax_softmax.primitives.operators import bind, split
from jax_softmax.primitives.reference import Normalizer
from jax_softmax.primitives.rows import row_sum

tangent_p = Primitive("cross_entropy_tangent")


def tangent(x, rows, coefficients, label, t, where, axes, axis_name, in_place):
    """The tangent of losses, given the rows' `Normalizer`, and of their gradient the `Coefficients` and whether it may
    take x's place: see `records.py`.

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


def lowered(x, largest, total, *operands, axes, in_place):
    """The same but for rounding: on a CPU it takes half the time to look up the label's element of t apart."""
    (*coefficients, label, t), where = split(operands)
    counts = reference.row_counts(Normalizer(largest, total), *coefficients) & exists(label, x.shape, axes)
    of_label = jnp.where(counts, coefficients[-1] * reference.widened(at_labels(t, axes, label)), 0)
    others = *coefficients[:-1], jnp.zeros_like(of_label), jnp.full_like(label, -1), t
    mask = [] if where is None else [where]
    return _sum_of_products(axes, x, largest, total, *others, *mask) + of_label


def abstract_eval(x, largest, *operands, axes, in_place):
    return largest


def batch(axis_data, operands, batch_axes, *, axes, in_place):
    if batching.only_batched(batch_axes, range(1, 8)):
        return jax.vmap(functools.partial(_sum_of_products, axes), batch_axes)(*operands), 0
    batched, to, axes, _ = batching.moved_batch_axes(axis_data, operands, batch_axes, 9, axes=axes, axis_name=())
    return tangent_p.bind(*batched, axes=axes, in_place=in_place), to


def jvp(primals, tangents, *, axes, in_place):
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


def transpose(cotangent, x, largest, total, *operands, axes, in_place):
    (*coefficients, label, t), mask = operands[:6], operands[6:]
    assert ad.is_undefined_primal(t)
    gradient = ad.Zero(t.aval)
    if type(cotangent) is not ad.Zero:
        operands = x, largest, total, *(cotangent * coefficient for coefficient in coefficients), label
        params = {"where": mask[0] if mask else None, "dtype": t.aval.dtype, "in_place": in_place}
        gradient = bind("cross_entropy_gradient", *operands, axes=axes, **params)[0]
    return [*[None] * 8, gradient, *[None] * len(mask)]
