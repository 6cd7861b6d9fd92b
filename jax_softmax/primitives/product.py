"""x·w as a primitive: the product whose derivative by w may be added up in a wider dtype than w has.

    x, w, wide        x·w

`wide` is w in that dtype. It is never read, so XLA does not make it: it stands for w in derivatives alone, and its
cotangent is a product that is not rounded to w's dtype. `contracted` is the dimension of w, 0 or 1, that is
multiplied with x's last one; the other one takes its place in the result, which has the given dtype.
"""

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad

from jax_softmax.primitives.types import types_tell_shardings

product_p = Primitive("linear_product")


def product(x, w, wide, contracted, dtype):
    return product_p.bind(x, w, wide, contracted=contracted, dtype=jnp.dtype(dtype).name)


def lowered(x, w, wide, *, contracted, dtype):
    return _multiplied(x, w, contracted, dtype)


def _multiplied(x, w, contracted, dtype):
    return jax.lax.dot_general(x, w, (((x.ndim - 1,), (contracted,)), ((), ())), preferred_element_type=dtype)


def abstract_eval(x, w, wide, *, contracted, dtype):
    sharding = x.sharding
    if types_tell_shardings([x, w]):
        types = [jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=aval.sharding) for aval in (x, w)]
        sharding = jax.eval_shape(lambda x, w: _multiplied(x, w, contracted, dtype), *types).sharding
    shape = (*x.shape[:-1], w.shape[1 - contracted])
    return x.update(shape=shape, dtype=jnp.dtype(dtype), weak_type=False, sharding=sharding)


def jvp(primals, tangents, **params):
    x, w, wide = primals
    x_dot, _, wide_dot = tangents
    result = product_p.bind(x, w, wide, **params)
    tangent = ad.Zero(jax.typeof(result).to_tangent_aval())
    if type(x_dot) is not ad.Zero:
        tangent = product_p.bind(x_dot, w, wide, **params)
    if type(wide_dot) is not ad.Zero:
        tangent = ad.add_tangents(tangent, product_p.bind(x, wide_dot.astype(w.dtype), wide_dot, **params))
    return result, tangent


def transpose(cotangent, x, w, wide, *, contracted, dtype):
    """The cotangents, made of one that has x's dtype, as both operands of a product should."""
    if type(cotangent) is ad.Zero:
        return [None, None, None]
    if ad.is_undefined_primal(x):
        return [product(cotangent.astype(w.dtype), w, wide, 1 - contracted, x.aval.dtype), None, None]
    tokens = tuple(range(x.ndim - 1))
    operands = (x, cotangent.astype(x.dtype)) if contracted == 0 else (cotangent.astype(x.dtype), x)
    of_wide = jax.lax.dot_general(*operands, ((tokens, tokens), ((), ())), preferred_element_type=wide.aval.dtype)
    return [None, None, of_wide]


def batch(operands, batch_axes, *, contracted, dtype):
    """With a w for each element of the batch the derivative by w is that of JAX's own product."""
    x, w, wide = operands
    of_x, of_w, _ = batch_axes
    if of_w is None:
        return product_p.bind(jnp.moveaxis(x, of_x, 0), w, wide, contracted=contracted, dtype=dtype), 0
    return jax.vmap(lambda x, w: _multiplied(x, w, contracted, dtype), (of_x, of_w))(x, w), 0
