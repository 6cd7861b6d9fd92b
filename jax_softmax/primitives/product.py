"""x·w as a primitive: a product whose derivative by w may be added up in a wider dtype than w has.

    x, w, [wide]        x·w

`wide` is w in that dtype. Where it is given, it stands for w in derivatives, and is not read. `contracted` is the
dimension of w, 0 or 1, that is multiplied with x's last one; the other one takes its place in the result, which has the
given dtype. x and w have one dtype; cotangents are rounded to it, for the products of a backward pass to be as fast.
`precision` is what `jax.default_matmul_precision` was when the product was traced. `out_sharding` is given in explicit
mode for a derivative by x, which is laid out as x: the types of the product's operands do not tell that.
"""

import functools

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad
from jax.sharding import NamedSharding

from jax_softmax.primitives.types import shardings_of_results, types_tell_shardings

product_p = Primitive("linear_product")

# Whether XLA divides the program among several devices: a constant, known when the program is lowered.
several_devices_p = Primitive("several_devices")
several_devices_p.def_abstract_eval(lambda: jax.core.ShapedArray((), jnp.dtype(bool)))
several_devices_p.def_impl(lambda: jnp.array(False))  # with disable_jit


def product(x, w, *wide, contracted, dtype):
    precision = jax.config.jax_default_matmul_precision
    params = {"contracted": contracted, "dtype": jnp.dtype(dtype).name, "precision": precision, "out_sharding": None}
    return product_p.bind(x, w, *wide, **params)


def lowered(x, w, *wide, contracted, dtype, precision, out_sharding):
    dims = ((x.ndim - 1,), (contracted,)), ((), ())
    return jax.lax.dot_general(x, w, dims, precision=precision, preferred_element_type=dtype, out_sharding=out_sharding)


def abstract_eval(x, w, *wide, contracted, dtype, precision, out_sharding):
    sharding = out_sharding or x.sharding
    if out_sharding is None and types_tell_shardings([x, w]):
        params = {"contracted": contracted, "dtype": dtype, "precision": precision, "out_sharding": None}
        (sharding,) = shardings_of_results(functools.partial(lowered, **params), [x, w])
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


def transpose(cotangent, x, w, *wide, contracted, dtype, precision, out_sharding):
    nothing = [None] * (1 + len(wide))
    if type(cotangent) is ad.Zero:
        return [None, *nothing]
    if ad.is_undefined_primal(x):
        params = {"contracted": 1 - contracted, "dtype": x.aval.dtype.name, "precision": precision}
        sharding = _sharding_of_derivative(x.aval, cotangent, w)
        of_x = product_p.bind(cotangent.astype(w.dtype), w, **params, out_sharding=sharding)
        return [of_x, *nothing]
    cotangent, tokens = cotangent.astype(x.dtype), tuple(range(x.ndim - 1))
    operands = (x, cotangent) if contracted == 0 else (cotangent, x)
    aval = (*wide, w)[0].aval
    dims, params = ((tokens, tokens), ((), ())), {"precision": precision, "preferred_element_type": aval.dtype}
    sharding = _sharding_of_derivative(aval, *operands)
    of_w = jax.lax.dot_general(*operands, dims, **params, out_sharding=sharding)
    return [*nothing, of_w]


def _sharding_of_derivative(aval, *operands):
    """In explicit mode, that of the array that the derivative is by. An array on a single device knows no mesh."""
    avals = [aval, *map(jax.typeof, operands)]
    if not types_tell_shardings(avals):
        return None
    mesh = next(aval.sharding.mesh for aval in avals if not aval.sharding.mesh.empty)
    return NamedSharding(mesh, aval.sharding.spec)


def batch(operands, batch_axes, **params):
    """With a w for each element of the batch, the derivative by w is added up in w's dtype.

    JAX's rule adds the dimension of the batch to `out_sharding`.
    """
    (x, w, *wide), (of_x, of_w, *_) = operands, batch_axes
    if of_w is None and params["out_sharding"] is None:
        return product_p.bind(jnp.moveaxis(x, of_x, 0), w, *wide, **params), 0
    return jax.vmap(lambda x, w: lowered(x, w, **params), (of_x, of_w))(x, w), 0
