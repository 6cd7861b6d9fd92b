"""Where the elements of a value lie among those of an operator's operand.

The dimensions of that operand are made of factors: a reshape in the program may split or join dimensions, and then a
factor is split. A value's place is, for each of its dimensions, the factors that its index is made of, the last one
varying fastest; none for an extent of 1.
"""

import math


class Factor:
    def __init__(self, extent: int, dim: int):
        self.extent, self.dim = extent, dim
        self.parts: list[Factor] = []  # two, of one that was split

    def __iter__(self):
        """What it was split into, or itself."""
        if not self.parts:
            yield self
        for part in self.parts:
            yield from part


def new_place(shape):
    """The place of the operand itself."""
    return [[Factor(n, d)] if n > 1 else [] for d, n in enumerate(shape)]


def factors_of(place):
    return [factor for dim in place for part in dim for factor in part]


def place_key(place):
    return tuple(tuple(map(id, factors_of([dim]))) for dim in place)


def regrouped(factors, shape):
    """The place of a value of this shape whose elements, in order, have these factors; None if they do not divide."""
    rest, place = list(factors), []
    for n in shape:
        dim = []
        while n > 1:
            if not rest:
                return None
            factor = rest.pop(0)
            if n % factor.extent:
                if factor.extent % n:
                    return None
                factor.parts = [Factor(n, factor.dim), Factor(factor.extent // n, factor.dim)]
                rest.insert(0, factor.parts[1])
                factor = factor.parts[0]
            dim.append(factor)
            n //= factor.extent
        place.append(dim)
    return None if rest else place


def input_places(equation, place):
    """The places of an equation's operands, given its result's; None if they cannot be said."""
    name, shapes = equation.name, [a.aval.shape for a in equation.inputs]
    shape = equation.outputs[0].aval.shape
    if name == "iota":
        return []
    if name == "broadcast_in_dim":
        dims = equation.params["broadcast_dimensions"]
        if len(shapes) > 1:
            return None
        return [[place[d] if n > 1 else [] for d, n in zip(dims, shapes[0], strict=True)]]
    if name == "transpose":
        permutation = equation.params["permutation"]
        return [[place[permutation.index(d)] for d in range(len(shape))]]
    if name in ("reshape", "squeeze", "expand_dims"):
        return _before_reshape(shapes[0], shape, place)
    # Elementwise: each operand has the result's shape, or is a number.
    return [[dim if n > 1 else [] for dim, n in zip(place, s, strict=True)] if s else [] for s in shapes]


def _before_reshape(before, after, place):
    if any(n > 1 and not dim for n, dim in zip(after, place, strict=True)):
        # Along some dimension all elements are one, and others stay: the dimensions must be the same ones.
        if [n for n in before if n > 1] != [n for n in after if n > 1]:
            return None
        dims = iter([dim for n, dim in zip(after, place, strict=True) if n > 1])
        return [[next(dims) if n > 1 else [] for n in before]]
    found = regrouped(factors_of(place), before)
    return None if found is None else [found]


def output_place(equation, place, k):
    """The place of an equation's result, given that of its k-th operand, which has as many elements; or None."""
    name, shape = equation.name, equation.outputs[0].aval.shape
    if math.prod(shape) != math.prod(equation.inputs[k].aval.shape):
        return None
    if name == "broadcast_in_dim":
        result = [[] for _ in shape]
        for d, dim in zip(equation.params["broadcast_dimensions"], place, strict=True):
            result[d] = dim
        return result
    if name == "transpose":
        return [place[d] for d in equation.params["permutation"]]
    if name in ("reshape", "squeeze", "expand_dims"):
        return regrouped(factors_of(place), shape)
    return place if len(place) == len(shape) else None
