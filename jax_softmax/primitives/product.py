"""x·w as a primitive: a product whose derivative by w may be added up in a wider dtype than w has.

    x, w, [wide]        x·w

`wide` is w in that dtype. Where it is given, derivatives are by `wide` instead of w; it is never read. Dimension
`contracted` of w, 0 or 1, is multiplied with x's last one, and w's other one takes its place in the result, which has
the given dtype. x and w have one dtype, to which cotangents are rounded, so that the backward pass's products are fast.
`precision` is what `jax.default_matmul_precision` was when the product was traced. `out_sharding` is only given, in
explicit mode, for the derivative by x: it is x's sharding, which the operands' types do not tell.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.extend.core import Primitive
from jax.interpreters import ad
from jax.sharding import NamedSharding
from jax.typing import DTypeLike

from jax_softmax.primitives.types import (
    Arrays,
    Aval,
    BatchAxes,
    Tangent,
    Tangents,
    shardings_of_results,
    types_tell_shardings,
)

product_p = Primitive("linear_product")

# Whether XLA divides the program among several devices. It is a constant once the program is lowered.
several_devices_p = Primitive("several_devices")
several_devices_p.def_abstract_eval(lambda: jax.core.ShapedArray((), jnp.dtype(bool)))
several_devices_p.def_impl(lambda: jnp.array(False))  # with disable_jit


def product(x: Array, w: Array, *wide: Array, contracted: int, dtype: DTypeLike) -> Array:
    precision = jax.config.jax_default_matmul_precision
    params = {"contracted": contracted, "dtype": jnp.dtype(dtype).name, "precision": precision, "out_sharding": None}
    return product_p.bind(x, w, *wide, **params)


def compute(
    x: Array, w: Array, *wide: Array, contracted: int, dtype: str, precision: Any, out_sharding: NamedSharding | None
) -> Array:
    dims = ((x.ndim - 1,), (contracted,)), ((), ())
    return jax.lax.dot_general(x, w, dims, precision=precision, preferred_element_type=dtype, out_sharding=out_sharding)


def abstract_eval(
    x: Aval, w: Aval, *wide: Aval, contracted: int, dtype: str, precision: Any, out_sharding: NamedSharding | None
) -> Aval:
    sharding = out_sharding or x.sharding
    if out_sharding is None and types_tell_shardings([x, w]):
        params = {"contracted": contracted, "dtype": dtype, "precision": precision, "out_sharding": None}
        (sharding,) = shardings_of_results(functools.partial(compute, **params), [x, w])
    shape = (*x.shape[:-1], w.shape[1 - contracted])
    return x.update(shape=shape, dtype=jnp.dtype(dtype), weak_type=False, sharding=sharding)


def jvp(primals: Arrays, tangents: Tangents, **params: Any) -> tuple[Array, Tangent]:
    x, w, *wide = primals
    x_dot, w_dot = tangents[0], tangents[-1]
    result = product_p.bind(x, w, **params)  # without `wide`, which a backward pass would save to compute this again
    tangent = ad.Zero(jax.typeof(result).to_tangent_aval())
    if not isinstance(x_dot, ad.Zero):
        tangent = product_p.bind(x_dot, w, **params)
    if not isinstance(w_dot, ad.Zero):
        w_dots = (w_dot.astype(w.dtype), w_dot) if wide else (w_dot,)
        tangent = ad.add_tangents(tangent, product_p.bind(x, *w_dots, **params))
    return result, tangent


def transpose(
    cotangent: Tangent, x: Any, w: Any, *wide: Any, contracted: int, precision: Any, **_: Any
) -> list[Array | None]:
    nothing: list[Array | None] = [None] * (1 + len(wide))
    if isinstance(cotangent, ad.Zero):
        return [None, *nothing]
    if ad.is_undefined_primal(x):
        params = {"contracted": 1 - contracted, "dtype": x.aval.dtype.name, "precision": precision}
        sharding = _sharding_of_derivative(x.aval, cotangent, w)
        return [product_p.bind(cotangent.astype(w.dtype), w, **params, out_sharding=sharding), *nothing]
    cotangent, tokens = cotangent.astype(x.dtype), tuple(range(x.ndim - 1))
    a, b = (x, cotangent) if contracted == 0 else (cotangent, x)
    aval = (*wide, w)[0].aval
    product = jax.lax.dot_general(
        a,
        b,
        ((tokens, tokens), ((), ())),
        precision=precision,
        preferred_element_type=aval.dtype,
        out_sharding=_sharding_of_derivative(aval, a, b),
    )
    return [*nothing, product]


def _sharding_of_derivative(aval: Aval, *operands: Array) -> NamedSharding | None:
    """In explicit mode, the sharding of the array that the derivative is by, whose type is `aval`; else None."""
    avals = [aval, *map(jax.typeof, operands)]
    if not types_tell_shardings(avals):
        return None
    mesh = next(a.sharding.mesh for a in avals if not a.sharding.mesh.empty)  # an array on one device has none
    return NamedSharding(mesh, aval.sharding.spec)


def batching_rule(operands: Arrays, batch_axes: BatchAxes, **params: Any) -> tuple[Array, int]:
    """If w is batched, the derivative by it is added up in w's dtype. For `out_sharding` JAX's own rule is used."""
    (x, w, *wide), (x_axis, w_axis, *_) = operands, batch_axes
    if w_axis is None and x_axis is not None and params["out_sharding"] is None:
        return product_p.bind(jnp.moveaxis(x, x_axis, 0), w, *wide, **params), 0
    return jax.vmap(lambda x, w: compute(x, w, **params), (x_axis, w_axis))(x, w), 0
