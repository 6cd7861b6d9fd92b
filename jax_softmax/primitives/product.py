"""x·w as a primitive: a product whose derivative by w may be added up in a wider dtype than w has.

    x, w, [wide]        x·w

`wide` is w in that dtype. Where it is given, it stands for w in derivatives, and is not read. `contracted` is the
dimension of w, 0 or 1, that is multiplied with x's last one; the other one takes its place in the result, which has the
given dtype. x and w have one dtype; cotangents are rounded to it, for the products of a backward pass to be as fast.
`precision` is what `jax.default_matmul_precision` was when the product was traced.
"""

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad

from jax_softmax.primitives.types import types_tell_shardings

product_p = Primitive("linear_product")


def product(x, w, *wide, contracted, dtype):
    precision = jax.config.jax_default_matmul_precision
    return product_p.bind(x, w, *wide, contracted=contracted, dtype=jnp.dtype(dtype).name, precision=precision)


def lowered(x, w, *wide, contracted, dtype, precision):
    dims = ((x.ndim - 1,), (contracted,)), ((), ())
    return jax.lax.dot_general(x, w, dims, precision=precision, preferred_element_type=dtype)


def abstract_eval(x, w, *wide, contracted, dtype, precision):
    sharding = x.sharding
    if types_tell_shardings([x, w]):
        types = [jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=aval.sharding) for aval in (x, w)]
        sharding = jax.eval_shape(
            lambda x, w: lowered(x, w, contracted=contracted, dtype=dtype, precision=precision), *types
        ).sharding
    shape = (*x.shape[:-1], w.shape[1 - contracted])
    return x.update(shape=shape, dtype=jnp.dtype(dtype), weak_type=False, sharding=sharding)


def jvp(primals, tangents, **params):
    x, w, *wide = primals
    x_dot, w_dot = tangents[0], tangents[-1]
    result = product_p.bind(x, w, **params)  # without `wide`, which a backward pass would keep to make this again
    tangent = ad.Zero(jax.typeof(result).to_tangent_aval())
    if type(x_dot) is not ad.Zero:
        tangent = product_p.bind(x_dot, w, **params)
    if type(w_dot) is not ad.Zero:
        given = (w_dot.astype(w.dtype), w_dot) if wide else (w_dot,)
        tangent = ad.add_tangents(tangent, product_p.bind(x, *given, **params))
    return result, tangent


def transpose(cotangent, x, w, *wide, contracted, dtype, precision):
    nothing = [None] * (1 + len(wide))
    if type(cotangent) is ad.Zero:
        return [None, *nothing]
    if ad.is_undefined_primal(x):
        params = {"contracted": 1 - contracted, "dtype": x.aval.dtype.name, "precision": precision}
        of_x = product_p.bind(cotangent.astype(w.dtype), w, **params)
        return [of_x, *nothing]
    cotangent, tokens = cotangent.astype(x.dtype), tuple(range(x.ndim - 1))
    operands = (x, cotangent) if contracted == 0 else (cotangent, x)
    aval = (*wide, w)[0].aval
    laid = {"out_sharding": aval.sharding} if types_tell_shardings(map(jax.typeof, operands)) else {}
    dims = (tokens, tokens), ((), ())
    of_w = jax.lax.dot_general(*operands, dims, precision=precision, preferred_element_type=aval.dtype, **laid)
    return [*nothing, of_w]


def batch(operands, batch_axes, **params):
    """With a w for each element of the batch, the derivative by w is added up in w's dtype."""
    (x, w, *wide), (of_x, of_w, *_) = operands, batch_axes
    if of_w is None:
        return product_p.bind(jnp.moveaxis(x, of_x, 0), w, *wide, **params), 0
    return jax.vmap(lambda x, w: lowered(x, w, **params), (of_x, of_w))(x, w), 0
