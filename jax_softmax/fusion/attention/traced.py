"""Attention of a score that is given as a function, with its derivative: for tests and benchmarks, until `fuse` finds
attention in programs."""

import jax
import jax.numpy as jnp

from jax_softmax.fusion import graph, places
from jax_softmax.fusion.attention.call import Attention, Side, bounds_of
from jax_softmax.fusion.attention.source import Letters
from jax_softmax.fusion.expressions import Expression, Expressions


def traced(function, names, dtypes) -> Expression:
    """The expression of a function of scalars that have these names and dtypes."""
    jaxpr = jax.make_jaxpr(function)(*(jax.ShapeDtypeStruct((), dtype) for dtype in dtypes))
    found = graph.graph_of(jaxpr)
    own = {(variable, places.key_of([])): name for variable, name in zip(jaxpr.jaxpr.invars, names, strict=True)}
    return Expressions(own).of(found.outputs[0], [], found.maker)


def attention_of(score, letters, sides, side_dtypes, product_dtype, empty_rows_are_zero=False) -> Attention:
    """Of score(x, *sides), where x is the product as the program rounds it; an index is of dtype "index"."""
    dtypes = ["int32" if dtype == "index" else dtype for dtype in side_dtypes]
    names = [f"s{k}" for k in range(len(sides))]

    def of_product(x0, *s):
        return score(x0.astype(product_dtype), *s)

    def cotangent(g, x0, *s):
        x = x0.astype(product_dtype)
        y, transposed = jax.vjp(lambda x: score(x, *s), x)
        return transposed(g.astype(y.dtype))[0].astype(jnp.float32)

    return Attention(
        Letters(*letters.split(",")),
        tuple(Side(of, dtype == "index") for of, dtype in zip(sides, side_dtypes, strict=True)),
        traced(of_product, ["x0", *names], ["float32", *dtypes]),
        traced(cotangent, ["g", "x0", *names], ["float32", "float32", *dtypes]),
        empty_rows_are_zero,
    )


def attend(attention: Attention, visible=None, letters=""):
    """A differentiable function of q, k, v and the arrays among the sides, whose own derivative is taken to be 0."""

    def bounds(q, k, v):
        return None if visible is None else bounds_of(visible, letters, attention, attention.extents(q, k, v))

    def forward(q, k, v, *sides):
        o, rows = attention.forward(q, k, v, *sides, bounds=bounds(q, k, v))
        return o, (q, k, v, o, rows, sides)

    def backward(kept, o_cotangent):
        q, k, v, o, rows, sides = kept
        gradients = attention.backward(q, k, v, o, rows, o_cotangent, *sides, bounds=bounds(q, k, v))
        zeros = [
            jnp.zeros_like(a) if jnp.issubdtype(a.dtype, jnp.floating) else jnp.zeros(a.shape, jax.dtypes.float0)
            for a in sides
        ]
        return (*gradients, *zeros)

    function = jax.custom_vjp(lambda *operands: forward(*operands)[0])
    function.defvjp(forward, backward)
    return function
