"""Products that are written otherwise than kernels have them.

Products of 16-bit arrays that a program widens to float32: einsum(q.astype(float32) / 8, k.astype(float32)).
A product of widened numbers, added up in float32, is the product of the numbers. A scalar c that multiplies an operand
multiplies the product as well. So with q, k of 16 bits and an array s of float32, as weights or scores' cotangents are,

    (c wide(q)) wide(k)^T  is  c (q k^T),        c (s wide(k))  and  s (c wide(k))  are  (c s) k,

which is how attention's kernels have their products.

Products that contract nothing, as einsum("bhij,h->bhij", scores, temperature), are multiplications, and their
gradients, einsum("bhij,bhij->h", g, scores), are sums of multiplications.
"""

import math
from collections.abc import Container, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array
from jax.lax import Precision

from jax_softmax.fusion.program import expressions, splicing
from jax_softmax.fusion.program.graph import Equation, Graph, Replacements, is_variable
from jax_softmax.fusion.program.kinds import is_strided_view, kind_of
from jax_softmax.primitives.types import Atom, Literal, Var


class Changes(NamedTuple):
    """A graph in which equations are replaced by others, and those of these that kernels have to make, with the old
    ones."""

    graph: Graph
    made: dict[Equation, Equation]


def without_widened(graph: Graph, stay: Container[Equation]) -> Changes:
    """The graph with its products of widened arrays, but for those that stay, as products of 16-bit arrays."""
    replacements: dict[Equation, list[Equation]] = {}
    products: dict[Equation, Equation] = {}
    for equation in graph.equations:
        if equation.name == "dot_general" and equation not in stay:
            replacement = _multiplication(graph, equation) or _product_of_16_bits(graph, equation)
            for old, new in replacement.items():
                replacements[old] = new
                products |= {one: equation for one in new if one.name in ("dot_general", "mul")}
    return Changes(graph.with_replaced(replacements) if products else graph, products)


def with_common_factors(graph: Graph, stay: Container[Equation]) -> Changes:
    """The graph with c (a + b) instead of c a + c b, but for those that stay, where a and b are products and c scalars:
    so the sum is made of products alone, as that of q' kᵀ and q k'ᵀ in forward mode."""
    replacements: dict[Equation, list[Equation]] = {}
    sums: dict[Equation, Equation] = {}
    for equation in graph.equations:
        if equation.name not in ("add", "add_any") or equation in stay:
            continue
        (a, makers, views), (b, others, own) = (_without_factors(graph, x) for x in equation.inputs)
        factors = [(e.name, _scalar_of(e)) for e in makers]
        if not factors or list(map(_factor, makers)) != list(map(_factor, others)):
            continue

        def summed(a: Array, b: Array, *scalars: Array, factors: Any = factors, views: Any = (views, own)) -> Array:
            total = viewed(a, views[0]) + viewed(b, views[1])
            for (name, _), c in zip(reversed(factors), reversed(scalars), strict=True):
                total = total * c if name == "mul" else total / c
            return total

        scalars = [c for _, c in factors if c is not None]
        replacements[equation] = splicing.spliced(summed, [a, b, *scalars], equation.outputs, equation)
        sums |= {one: equation for one in replacements[equation] if one.name == "add"}
    return Changes(graph.with_replaced(replacements) if sums else graph, sums)


def _factor(equation: Equation) -> tuple[str, Any, Any]:
    """What an equation does with a scalar, and which one it is: equal for equal factors."""
    scalar = _scalar_of(equation)
    value = scalar.val if isinstance(scalar, Literal) else scalar
    return equation.name, value, equation.outputs[0].aval.dtype


def _without_factors(graph: Graph, a: Atom) -> tuple[Atom, list[Equation], list[Equation]]:
    """The product of which scalars make a value, which nothing else reads, and the equations that do, the last one
    first; or no equations. And the views among those between, the first one first."""
    found, views, b = list[Equation](), list[Equation](), a
    while (maker := graph.maker_of(b)) is not None and len(graph.readers.get(b, ())) == 1 and b not in graph.results:
        if maker.name == "dot_general":
            return b, found, views
        if is_strided_view(maker):
            views.insert(0, maker)
            (b,) = maker.inputs
            continue
        if (scalar := _scalar_of(maker)) is None:
            break
        found.append(maker)
        (b,) = (other for other in maker.inputs if other is not scalar)
    return a, [], []


def _multiplication(graph: Graph, product: Equation) -> Replacements:
    """The multiplication, and the sum of it if there is one, that a product is in which no operand, or but one, has
    dimensions that the other one lacks."""
    contracted, batch = product.params["dimension_numbers"]
    shapes, dtype = [a.aval.shape for a in product.inputs], product.outputs[0].aval.dtype
    free = [[d for d in range(len(shapes[k])) if d not in (*contracted[k], *batch[k])] for k in (0, 1)]
    n, *sizes = (math.prod(shapes[k][d] for d in dims) for k, dims in ((0, contracted[0]), (0, free[0]), (1, free[1])))
    are_floats = all(a.aval.dtype.name in expressions.WRITABLE for a in (*product.inputs, *product.outputs))
    if not are_floats or min(sizes) > 1 or (n > 1 and max(sizes) > 1):
        return {}

    def multiplied(*operands: Array) -> Array:
        """Of dimensions of the batch, free ones of each operand, and contracted ones."""
        begin = len(batch[0])
        ends = begin + len(free[0]), begin + len(free[0]) + len(free[1])
        own = []
        for k, a in enumerate(operands):
            a = jnp.transpose(a.astype(dtype), [*batch[k], *free[k], *contracted[k]])
            own.append(jnp.expand_dims(a, range(ends[0], ends[1]) if k == 0 else range(begin, ends[0])))
        both = own[0] * own[1]
        return both.sum(range(ends[1], both.ndim)) if contracted[0] else both

    return {product: splicing.spliced(multiplied, product.inputs, product.outputs, product)}


class _Operand(NamedTuple):
    """An operand of a product: the array of which it is made, by views, roundings and scalars that multiply it."""

    array: Atom
    views: list[Equation]
    multiplications: list[Equation]  # by scalars, and divisions

    @property
    def is_narrow(self) -> bool:
        return self.array.aval.dtype.name in expressions.ROUNDED


def viewed(a: Array, views: list[Equation]) -> Array:
    for view in views:
        a = view.eqn.primitive.bind(a, **view.params)
    return a


def _operand(graph: Graph, a: Atom) -> _Operand:
    """That of a product, down to the 16-bit array that is widened; or itself, if none is."""
    views: list[Equation] = []
    multiplications: list[Equation] = []
    b = a
    while (maker := graph.maker_of(b)) is not None and b.aval.dtype == jnp.float32:
        if kind_of(maker) == "view":
            views.insert(0, maker)
            (b,) = maker.inputs
        elif (scalar := _scalar_of(maker)) is not None:
            multiplications.append(maker)
            (b,) = (other for other in maker.inputs if other is not scalar)
        elif kind_of(maker) == "cast" and maker.inputs[0].aval.dtype.name in expressions.ROUNDED:
            return _Operand(maker.inputs[0], views, multiplications)
        else:
            break
    return _Operand(a, [], [])


def _scalar_of(equation: Equation) -> Atom | None:
    """The scalar by which an equation multiplies or divides an array; None if it does not."""
    if equation.name in ("mul", "div"):
        first, second = equation.inputs
        if first.aval.shape and not second.aval.shape:
            return second
        if equation.name == "mul" and second.aval.shape and not first.aval.shape:
            return first
    return None


def _product_of_16_bits(graph: Graph, product: Equation) -> Replacements:
    """What stands for a product of widened arrays, and for what is done to its result until it is rounded."""
    operands = [_operand(graph, a) for a in product.inputs]
    narrow = [of.is_narrow for of in operands]
    if product.outputs[0].aval.dtype != jnp.float32 or not any(narrow):
        return {}
    if not all(narrow) and not _may_round_other(product, operands):
        return {}
    after = [] if all(narrow) else _until_scaled(graph, product)
    if not after and all(of.array is a for of, a in zip(operands, product.inputs, strict=True)):
        return {}
    multiplications = [e for of in operands for e in of.multiplications] + [e for e in after if not is_strided_view(e)]
    # In one order, so that the gradients of queries and of keys are made of the same array.
    order = {a: k for k, a in enumerate(graph.readers)}
    factors = [(e.name, scalar) for e in multiplications if (scalar := _scalar_of(e)) is not None]
    factors.sort(key=lambda factor: (factor[0], order[factor[1]] if is_variable(factor[1]) else -1, str(factor[1])))

    def of_16_bits(first: Array, second: Array, *variables: Array) -> Array:
        given = iter(variables)

        def multiplied(a: Array) -> Array:
            for name, scalar in factors:
                by = scalar.val if isinstance(scalar, Literal) else next(given)
                a = a * by if name == "mul" else a / by
            return a

        own = [viewed(a, of.views) for a, of in zip((first, second), operands, strict=True)]
        if all(narrow):
            return multiplied(_product(product, *own))
        own = [a if is_narrow else multiplied(a) for a, is_narrow in zip(own, narrow, strict=True)]
        return viewed(_product(product, *own), list(filter(is_strided_view, after)))

    read = [of.array for of in operands] + [scalar for _, scalar in factors if is_variable(scalar)]
    last = after[-1] if after else product
    return {e: [] for e in (product, *after)} | {last: splicing.spliced(of_16_bits, read, last.outputs, product)}


def _may_round_other(product: Equation, operands: Sequence[_Operand]) -> bool:
    """Whether the operand of float32 may be rounded to the dtype of the other one, as kernels do: if that has float32's
    range, and the product is not asked to be more precise than TF32."""
    has_range = all(of.array.aval.dtype.name != "float16" for of in operands)
    return has_range and is_of_default_precision(product)


def is_rounded(graph: Graph, a: Var, dtype: str) -> bool:
    """Whether all that reads a product's result rounds it to a dtype, or it is of that."""
    if a.aval.dtype.name == dtype:
        return True
    readers = graph.readers.get(a, ())
    if a in graph.results or not readers:
        return False
    return all(
        is_rounded(graph, r.outputs[0], dtype)
        if is_strided_view(r)
        else r.name == "convert_element_type" and r.outputs[0].aval.dtype.name == dtype
        for r in readers
    )


def is_of_default_precision(product: Equation) -> bool:
    """Whether a product of float32 need not be more precise than TF32."""
    return product.params["precision"] in (None, (Precision.DEFAULT, Precision.DEFAULT))


def _product(equation: Equation, *operands: Array) -> Array:
    result: Array = equation.eqn.primitive.bind(*operands, **equation.params)
    return result


def _until_scaled(graph: Graph, product: Equation) -> list[Equation]:
    """The equations between a product and the last scalar that multiplies its result, and that equation."""
    found: list[Equation] = []
    a: Var = product.outputs[0]
    while len(readers := graph.readers.get(a, [])) == 1 and a not in graph.results:
        (reader,) = readers
        if not is_strided_view(reader) and (_scalar_of(reader) is None or a is _scalar_of(reader)):
            break
        found.append(reader)
        (a,) = reader.outputs
    while found and is_strided_view(found[-1]):
        found.pop()
    return found
