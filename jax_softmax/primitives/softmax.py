"""Softmax and log-softmax, and their derivatives.

`softmax` and `log_softmax` are the operators, the others their Jacobians applied to a tangent or, transposed, to a
cotangent. These are linear in that operand, so that with a JVP rule on all and a transpose rule on the linear ones
forward mode, reverse mode and every higher order follow.
"""

import functools

import jax
import jax.numpy as jnp
from jax.interpreters import ad

from jax_softmax.primitives import reference
from jax_softmax.primitives.operators import PRIMITIVES
from jax_softmax.primitives.rows import row_sum

JVP = {"softmax": "softmax_linear", "log_softmax": "log_softmax_jvp"}
VJP = {"softmax": "softmax_linear", "log_softmax": "log_softmax_vjp"}
TRANSPOSED = {
    "softmax_linear": "softmax_linear",
    "log_softmax_jvp": "log_softmax_vjp",
    "log_softmax_vjp": "log_softmax_jvp",
}


def jvp(op, primals, tangents, **params):
    """The result y is what the derivative is made of."""
    y = PRIMITIVES[op].bind(*primals, **params)
    if type(tangents[0]) is ad.Zero:
        return y, ad.Zero(jax.typeof(y))
    return y, PRIMITIVES[JVP[op]].bind(y, tangents[0], *primals[1:], **params)


def _linear_in_y(op, y, y_dot, t, where, axes, axis_name, dtype):
    """The derivative along y_dot of the linear map (y, t), in the dtype that the kernels compute in."""
    total = functools.partial(row_sum, axes=axes, axis_name=axis_name)
    y, y_dot, t = (reference.widened(a) for a in (y, y_dot, t))
    if where is not None:
        y_dot, t = jnp.where(where, y_dot, 0), jnp.where(where, t, 0)
    if op == "softmax_linear":
        derivative = y_dot * (t - total(y * t)) - y * total(y_dot * t)
    elif op == "log_softmax_jvp":
        derivative = jnp.broadcast_to(-total(jnp.exp(y) * y_dot * t), t.shape)
    else:
        derivative = -jnp.exp(y) * y_dot * total(t)
    if where is not None:
        derivative = jnp.where(where, derivative, 0)
    return derivative.astype(dtype)


def linear_jvp(op, primals, tangents, **params):
    y, t, *mask = primals
    y_dot, t_dot = tangents[:2]
    out = PRIMITIVES[op].bind(*primals, **params)
    terms = []
    if type(t_dot) is not ad.Zero:
        terms.append(PRIMITIVES[op].bind(y, t_dot, *mask, **params))
    if type(y_dot) is not ad.Zero:
        terms.append(_linear_in_y(op, y, y_dot, t, mask[0] if mask else None, **params))
    return out, functools.reduce(jnp.add, terms) if terms else ad.Zero(jax.typeof(out))


def linear_transpose(op, cotangent, y, t, *mask, dtype, **axes):
    """The transposed map, whose result has t's dtype."""
    assert ad.is_undefined_primal(t) and not ad.is_undefined_primal(y)
    nothing = [None] * len(mask)
    if type(cotangent) is ad.Zero:
        return [None, ad.Zero(t.aval), *nothing]
    return [None, PRIMITIVES[TRANSPOSED[op]].bind(y, cotangent, *mask, dtype=t.aval.dtype.name, **axes), *nothing]
