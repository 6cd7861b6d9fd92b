"""The tangents of what a loss of integer labels depends on, three sums over each row, as one linear primitive.

    x, largest, total, t, label, [where]        sum(softmax(x) t), sum(t), t at the label

It is linear in t, a tangent of x. With the three in one the transpose, `tangent_sums_transpose`, writes the gradient
once. logsumexp does not use it: its gradient is mostly added to others of the same x, and what is jax.numpy XLA fuses
with them.

`temporary` says that nothing else reads x: the gradient may then take its place.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad

from jax_softmax.primitives import labels, reference
from jax_softmax.primitives.batching import moved_batch_axes, only_batched
from jax_softmax.primitives.operators import PRIMITIVES, Coefficients, bind
from jax_softmax.primitives.rows import row_sum, sum_of_tangents

tangent_sums_p = Primitive("tangent_sums")
tangent_sums_p.multiple_results = True


class TangentSums(NamedTuple):
    """Of each row, in float32 (float64 for float64)."""

    of_lse: jax.Array
    of_total: jax.Array  # the sum of the logits
    of_logit: jax.Array  # the label's


def tangent_sums(x, rows, t, label, where, axes, temporary=False):
    """The rows' `TangentSums`, given their `reference.Normalizer`."""
    mask = [] if where is None else [where]
    return TangentSums(*tangent_sums_p.bind(x, *rows.finite(), t, label, *mask, axes=axes, temporary=temporary))


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
    return TangentSums(*(row_sum(term, axes, axis_name) for term in terms))


def lowered(x, largest, total, t, label, *mask, axes, temporary):
    """What the primitive is in jax.numpy, on all platforms."""
    where = mask[0] if mask else None
    counted = t if where is None else jnp.where(where, t, 0)
    return [
        sum_of_tangents(x, reference.Normalizer(largest, total), t, where, axes, ()),
        row_sum(reference.widened(counted), axes, ()),
        reference.widened(labels.at_labels(t, axes, label)),
    ]


def abstract_eval(x, largest, total, t, label, *mask, axes, temporary):
    return [largest] * 3


def batch(axis_data, operands, batch_axes, *, axes, temporary):
    if only_batched(batch_axes, (4,)):
        # Of one x and t for all labels the other sums are made once, as those of rows without labels.
        *given, t, label = operands[:5]
        none = jnp.full_like(given[-1], -1, jnp.int32)
        *sums, _ = tangent_sums_p.bind(*given, t, none, *operands[5:], axes=axes, temporary=temporary)
        of_labels = jax.vmap(lambda label: reference.widened(labels.at_labels(t, axes, label)), batch_axes[4])(label)
        return [*sums, of_labels], [None, None, 0]
    batched, to, axes, _ = moved_batch_axes(axis_data, operands, batch_axes, 5, axes=axes, axis_name=())
    return tangent_sums_p.bind(*batched, axes=axes, temporary=temporary), [to] * 3


def jvp(primals, tangents, *, axes, temporary):
    x, largest, total, t, label, *mask = primals
    results = tangent_sums_p.bind(*primals, axes=axes, temporary=False)
    along_t = [ad.Zero(jax.typeof(result)) for result in results]
    along_x = list(along_t)
    if type(tangents[3]) is not ad.Zero:
        along_t = tangent_sums_p.bind(x, largest, total, tangents[3], label, *mask, axes=axes, temporary=False)
    given = (tangents[0], tangents[2])
    if any(type(tangent) is not ad.Zero for tangent in given):
        where = mask[0] if mask else None

        def of_lse(x, total):
            return sum_of_tangents(x, reference.Normalizer(largest, total), t, where, axes, ())

        along_x[0] = jax.jvp(of_lse, (x, total), tuple(map(ad.instantiate_zeros, given)))[1]
    return results, [ad.add_tangents(*tangents) for tangents in zip(along_t, along_x, strict=True)]


def transpose(cotangents, x, largest, total, t, label, *mask, axes, temporary):
    """softmax(x) times the first cotangent, plus the second, plus the third at the label: in t's dtype."""
    assert ad.is_undefined_primal(t)
    gradient = ad.Zero(t.aval)
    if any(type(cotangent) is not ad.Zero for cotangent in cotangents):
        factor, offset, at_label = map(ad.instantiate_zeros, cotangents)
        dtype = t.aval.dtype.name
        if temporary:
            coefficients = Coefficients.without_lse(factor, offset, at_label)
            where = mask[0] if mask else None
            operands = x, *coefficients, label
            gradient = bind("cross_entropy_gradient_in_place", *operands, where=where, axes=axes, dtype=dtype)[0]
        else:
            operands = x, largest, total, factor, offset, at_label, label, *mask
            params = {"axes": axes, "axis_name": (), "dtype": dtype}
            gradient = PRIMITIVES["tangent_sums_transpose"].bind(*operands, **params)
    return [None, None, None, gradient, None, *[None] * len(mask)]
