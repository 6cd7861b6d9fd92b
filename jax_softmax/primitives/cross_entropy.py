"""The tangent of cross entropies of integer labels: a linear primitive whose transpose is `cross_entropy_gradient`.

    x, largest, sum_exp, *Coefficients, label, t, [where]    cross_entropy_tangent    sum(gradient t) over each row

It is linear in t, a tangent of x, and is computed in jax.numpy on all platforms. logsumexp has no such primitive: its
gradient is mostly added to others of the same x, and XLA fuses them if they all are jax.numpy.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.extend.core import Primitive
from jax.interpreters import ad

from jax_softmax.primitives import batching, reference
from jax_softmax.primitives.labels import has_label, label_elements, label_mask
from jax_softmax.primitives.operators import Coefficients, bind, split
from jax_softmax.primitives.reference import Normalizer
from jax_softmax.primitives.rows import row_sum
from jax_softmax.primitives.types import Arrays, Aval, Axes, BatchAxes, Mask, MeshAxes, Tangent, Tangents

tangent_p = Primitive("cross_entropy_tangent")


def tangent(
    x: Array,
    normalizer: Normalizer,
    coefficients: Coefficients,
    label: Array,
    t: Array,
    where: Mask,
    axes: Axes,
    axis_name: MeshAxes,
    in_place: bool,
) -> Array:
    """The tangent of losses whose gradient has these `Coefficients`. `in_place`: the gradient may be written over x.

    With an axis_name JAX transposes the sum itself: it adds up in the dtype of the arithmetic, and is one loop for XLA.
    """
    mask = [] if where is None else [where]
    operands = x, *normalizer.finite(), *coefficients, label, t, *mask
    if axis_name:
        return jax.lax.psum(_sum_of_products(axes, *operands), axis_name)
    return tangent_p.bind(*operands, axes=axes, in_place=in_place)


# With checkpoint a backward pass gets the operands, and nothing that was computed from them.
@functools.partial(jax.checkpoint, prevent_cse=False, static_argnums=(0,))
def _sum_of_products(axes: Axes, x: Array, largest: Array, sum_exp: Array, *operands: Array) -> Array:
    (*coefficients, label, t), where = split(operands)
    normalizer, dtype = Normalizer(largest, sum_exp), reference.wide_dtype(x.dtype)
    gradient = reference.gradient_given_normalizer(
        normalizer, x, Coefficients(*coefficients), label, where, axes, dtype=dtype
    )
    counts = reference.row_counts(normalizer, *coefficients)
    counts &= True if where is None else where | label_mask(x, axes, label)
    return row_sum(reference.fill_masked(gradient * reference.widened(t), counts), axes, ())


def compute(x: Array, largest: Array, sum_exp: Array, *operands: Array, axes: Axes, in_place: bool) -> Array:
    """`_sum_of_products` with other roundings: the label's element of t is gathered, in half the time on a CPU."""
    (*coefficients, label, t), where = split(operands)
    counts = reference.row_counts(Normalizer(largest, sum_exp), *coefficients) & has_label(label, x.shape, axes)
    of_label = jnp.where(counts, coefficients[-1] * reference.widened(label_elements(t, axes, label)), 0)
    others = *coefficients[:-1], jnp.zeros_like(of_label), jnp.full_like(label, -1), t
    mask = [] if where is None else [where]
    return _sum_of_products(axes, x, largest, sum_exp, *others, *mask) + of_label


def abstract_eval(x: Aval, largest: Aval, *operands: Aval, axes: Axes, in_place: bool) -> Aval:
    return largest


def batching_rule(
    axis_data: Any, operands: Arrays, batch_axes: BatchAxes, *, axes: Axes, in_place: bool
) -> tuple[Array, int | None]:
    if batching.only_batched(batch_axes, range(1, 8)):
        return jax.vmap(functools.partial(_sum_of_products, axes), batch_axes)(*operands), 0
    batched, to, axes, _ = batching.with_one_batch_axis(axis_data, operands, batch_axes, 9, axes=axes, axis_name=())
    return tangent_p.bind(*batched, axes=axes, in_place=in_place), to


def jvp(primals: Arrays, tangents: Tangents, *, axes: Axes, in_place: bool) -> tuple[Array, Tangent]:
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


def transpose(
    cotangent: Tangent, x: Array, largest: Array, sum_exp: Array, *operands: Any, axes: Axes, in_place: bool
) -> list[Tangent | None]:
    (*coefficients, label, t), mask = operands[:6], operands[6:]
    assert ad.is_undefined_primal(t)
    gradient = ad.Zero(t.aval)
    if type(cotangent) is not ad.Zero:
        operands = x, largest, sum_exp, *(cotangent * coefficient for coefficient in coefficients), label
        params = {"where": mask[0] if mask else None, "dtype": t.aval.dtype, "in_place": in_place}
        gradient = bind("cross_entropy_gradient", *operands, axes=axes, **params)[0]
    return [*[None] * 8, gradient, *[None] * len(mask)]
