"""Cross entropies of integer labels and their gradients: how they differentiate, and batch where x does not."""

import functools

import jax
import jax.numpy as jnp
from jax.interpreters import ad

from jax_softmax.primitives import batching, labels, reference
from jax_softmax.primitives.operators import PRIMITIVES, WITH_DISTANCES, bind, split
from jax_softmax.primitives.rows import normalizer, normalizer_tangents
from jax_softmax.primitives.tangent_sums import tangent_sums


def cross_entropy_jvp(primals, tangents, *, axes, axis_name):
    (x, label), where = split("cross_entropy", primals)
    loss, *rows = bind("cross_entropy", x, label, where=where, axes=axes, axis_name=axis_name)
    rows = reference.Normalizer(*rows)
    of_lse, _, of_logit = tangent_sums(x, rows, tangents[0], label, where, axes)
    of_loss = jnp.where(labels.exists(label, x.shape, axes), of_lse - of_logit, 0)
    return [loss, *rows], [of_loss, *normalizer_tangents(rows, of_lse)]


def cross_entropy_gradient_jvp(op, primals, tangents, *, axes, axis_name, dtype):
    """That of the same function of logsumexp."""
    results = PRIMITIVES[op].bind(*primals, axes=axes, axis_name=axis_name, dtype=dtype)
    (*floats, label), where = split(op, primals)

    def function(x, *coefficients):
        rows = normalizer(x, where, axes, axis_name)
        gradient = reference.gradient_given(rows, x, *coefficients, label, where, axes, dtype=dtype)
        return gradient, *rows, *_sums(op, rows, x, where, axes)

    return results, list(jax.jvp(function, tuple(floats), _instantiated(tangents, floats))[1])


def _sums(op, rows, x, where, axes):
    return reference.distance_and_count(rows, x, where, axes) if op in WITH_DISTANCES else ()


def tangent_sums_transpose_jvp(primals, tangents, *, axes, axis_name, dtype):
    """That of the same function in jax.numpy, element by element."""
    (*floats, label), where = split("tangent_sums_transpose", primals)

    def function(*floats):
        return reference.tangent_sums_transpose(*floats, label, where, axes, dtype=dtype)

    result = PRIMITIVES["tangent_sums_transpose"].bind(*primals, axes=axes, axis_name=axis_name, dtype=dtype)
    return result, jax.jvp(function, tuple(floats), _instantiated(tangents, floats))[1]


def _instantiated(tangents, floats):
    return tuple(map(ad.instantiate_zeros, tangents[: len(floats)]))


# ---- Where all elements of a batch have the same x, XLA reads it as it is; a kernel would need a copy of it for each.


def cross_entropy_batch(axis_data, operands, batch_axes, *, axes, axis_name):
    if not batching.only_batched(batch_axes, (1,)):
        return batching.batch("cross_entropy", axis_data, operands, batch_axes, axes=axes, axis_name=axis_name)
    (x, label), where = split("cross_entropy", operands)
    rows = normalizer(x, where, axes, axis_name)
    loss = jax.vmap(lambda label: reference.cross_entropy_given(rows, x, label, axes), batch_axes[1])(label)
    return (loss, *rows), (0, None, None)


def gradient_batch(op, axis_data, operands, batch_axes, *, axes, axis_name, dtype):
    """Of all `cross_entropy_gradient`s and `tangent_sums_transpose`, whose other operands all belong to rows."""
    (x, *of_rows), where = split(op, operands)
    which = range(1, 1 + len(of_rows))
    if not batching.only_batched(batch_axes, which):
        params = {"axes": axes, "axis_name": axis_name, "dtype": dtype}
        return batching.batch(op, axis_data, operands, batch_axes, **params)
    rows, function = (), functools.partial(reference.tangent_sums_transpose, x)
    if op != "tangent_sums_transpose":
        normalizer_of_rows = normalizer(x, where, axes, axis_name)
        function = functools.partial(reference.gradient_given, normalizer_of_rows, x)
        rows = *normalizer_of_rows, *_sums(op, normalizer_of_rows, x, where, axes)
    function = functools.partial(function, where=where, axes=axes, dtype=dtype)
    gradient = jax.vmap(function, [batch_axes[i] for i in which])(*of_rows)
    return ((gradient, *rows), (0, *[None] * len(rows))) if rows else (gradient, 0)
