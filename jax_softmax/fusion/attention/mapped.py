"""Forward mode along several tangents at once, as `jax.jacfwd` has it.

Their dimension n is one that the scores x and the weights y = softmax(x) lack: the program broadcasts y along n for the
softmax's linear map, and multiplies y with all values' tangents at once. Both become those of softmax(x broadcast along
n), where n is a dimension of the batch: that is an attention in forward mode, and the output is one of its own. The map
of one tangent alone becomes that of y.
"""

from collections.abc import Container, Sequence

import jax
import jax.numpy as jnp

from jax_softmax.fusion.attention.casts import Changes, viewed
from jax_softmax.fusion.attention.walks import Walks
from jax_softmax.fusion.program import splicing
from jax_softmax.fusion.program.graph import Equation, Graph, Replacements, each_once, is_variable, variables_of
from jax_softmax.fusion.program.kinds import foldable
from jax_softmax.fusion.program.places import Factor, count_of, input_places, new_place
from jax_softmax.fusion.program.products import Product
from jax_softmax.primitives.operators import bind
from jax_softmax.primitives.types import Var


def of_broadcast_scores(graph: Graph, stay: Container[Equation]) -> Changes:
    """The graph with softmaxes of broadcast scores instead of broadcast softmaxes, but for those that stay."""
    replacements, made = dict[Equation, list[Equation]](), dict[Equation, Equation]()
    for linear in (e for e in graph.equations if e.name == "softmax_linear" and foldable(e)):
        softmax, views, dims = _broadcast(graph, linear)
        if softmax is None or len(dims) > 1 or softmax in stay or softmax in made.values():
            continue
        new = _of_one(softmax, linear) if not dims else _of_several(graph, softmax, views, linear, *dims)
        replacements |= new
        made |= {e: softmax for of_one in new.values() for e in of_one if e.name.startswith("softmax")}
    return Changes(graph.with_replaced(replacements) if made else graph, made)


def _broadcast(graph: Graph, linear: Equation) -> tuple[Equation | None, list[Equation], list[int]]:
    """The softmax that is broadcast to a linear map's first operand, of one dimension more, if one is; the equations
    that do it; and the dimensions along which they do."""
    views, (a, *_) = list[Equation](), linear.inputs
    whole = place = new_place(a.aval.shape)
    while (maker := graph.maker_of(a)) is not None and maker.name == "broadcast_in_dim":
        views.insert(0, maker)
        (a,), (place,) = maker.inputs, input_places(maker, place) or [place]
    if maker is None or maker.name != "softmax" or not foldable(maker) or len(whole) != len(place) + 1:
        maker = None
    return maker, views, [d for d, dim in enumerate(whole) if dim and dim not in place]


def _of_one(softmax: Equation, linear: Equation) -> Replacements:
    """A linear map of a softmax along dimensions of extent 1 that it lacks, as one of the softmax itself."""
    (out,) = linear.outputs

    def of_weights(y: jax.Array, t: jax.Array, *mask: jax.Array) -> jax.Array:
        params = {"where": next(iter(mask), None), "axes": softmax.params["axes"], "dtype": out.aval.dtype}
        return bind("softmax_linear", y, t.reshape(y.shape), **params).reshape(out.aval.shape)

    inputs = [*softmax.outputs, linear.inputs[1], *softmax.inputs[1:]]
    return {linear: splicing.spliced(of_weights, inputs, [out], linear)}


def _of_several(graph: Graph, softmax: Equation, views: list[Equation], linear: Equation, dim: int) -> Replacements:
    """A linear map of a softmax that is broadcast along a dimension, and the softmax's products with values that have
    as long a one beside their features, as those of a softmax of broadcast scores."""
    (y,), (broadcast,), walks = softmax.outputs, views[-1].outputs, Walks(graph)
    new = type(y)(broadcast.aval)

    def of_scores(x: jax.Array, *mask: jax.Array) -> jax.Array:
        where = viewed(jnp.broadcast_to(mask[0], x.shape), views) if mask else None
        return bind("softmax", viewed(x, views), where=where, axes=linear.params["axes"], dtype=y.aval.dtype)

    made = [*splicing.spliced(of_scores, softmax.inputs, [new], softmax), linear.with_inputs([new, *linear.inputs[1:]])]
    replacements = {linear: made}
    reached = walks.reached([y], new_place(y.aval.shape))
    makers = {a: graph.maker[a] for a in reached if a is not y}
    for product, _ in walks.products_with(reached):
        along = [factors for factors in product.new_dims[:-1] if count_of([factors]) == new.aval.shape[dim]]
        if along and product.other.variable not in reached:
            own = each_once([product.equation], lambda e: [makers[a] for a in variables_of(e.inputs) if a in makers])
            in_order = sorted(own, key=graph.position.__getitem__)
            replacements[product.equation] = _products(product, along[0], in_order, y, (new, dim))
    return replacements


def _products(
    product: Product, along: Sequence[Factor], equations: list[Equation], y: Var, instead: tuple[Var, int]
) -> list[Equation]:
    """A product, of values with what equations make of y, as one for each index along a dimension of the values: of
    what they make of that part of another variable instead of y. `instead`: it, and which dimension this is there."""
    values, (at, in_result) = product.other.variable, (p.index(along) for p in (product.other.place, product.result))
    made = [v for e in equations for v in e.outputs]
    given = [a for a in dict.fromkeys(a for e in equations for a in variables_of(e.inputs)) if a not in made]

    def of_one(*arrays: jax.Array) -> jax.Array:
        known = dict(zip(given, arrays, strict=True))
        known[values] = jnp.expand_dims(known[values], at)
        for e in equations:
            operands = [known[a] if is_variable(a) else a.val for a in e.inputs]
            known[e.outputs[0]] = e.eqn.primitive.bind(*operands, **e.params)
        return jnp.squeeze(known[made[-1]], in_result)

    mapped = jax.vmap(of_one, tuple({y: instead[1], values: at}.get(a) for a in given), in_result)
    return splicing.spliced(mapped, [instead[0] if a is y else a for a in given], made[-1:], product.equation)
