"""Places: where the elements of a value lie among those of an array, an operator's operand for one.

Each dimension of that array is a factor. A reshape in the program may split a dimension: then its factor is split. The
place of a value is a list of factors for each of its dimensions, of whose indices the dimension's index is made; the
last one varies fastest. A dimension of extent 1, or along which all elements are one, has none.
"""

import math


class Factor:
    """A dimension of an array, or a factor of its extent."""

    def __init__(self, extent: int, dim: int):
        self.extent, self.dim = extent, dim
        self.halves: list[Factor] = []  # two, of one that was split

    def __iter__(self):
        """What it was split into, or itself."""
        if not self.halves:
            yield self
        for half in self.halves:
            yield from half


def new_place(shape, dims=None):
    """The place of an array of this shape, or of these dimensions of it, in new factors."""
    dims = range(len(shape)) if dims is None else dims
    return [[Factor(shape[d], d)] if shape[d] > 1 else [] for d in dims]


def factors_of(place):
    """Those of all dimensions, in order."""
    return [unsplit for dim in place for factor in dim for unsplit in factor]


def place_key(place):
    """A place as a key of a dictionary."""
    return tuple(tuple(map(id, factors_of([dim]))) for dim in place)


def regrouped(factors, shape):
    """The place of a value of this shape that has these factors in this order; None if extents do not divide."""
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
                factor.halves = [Factor(n, factor.dim), Factor(factor.extent // n, factor.dim)]
                rest.insert(0, factor.halves[1])
                factor = factor.halves[0]
            dim.append(factor)
            n //= factor.extent
        place.append(dim)
    return None if rest else place


def input_places(equation, place):
    """The places of an equation's operands, given its result's; None if they are not known."""
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
        # All elements along a dimension are one: the reshape must leave dimensions as they are, but for those of 1.
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


def reached(graph, variables, place, follows):
    """What is made of variables at a place, each element of one, by equations of which `follows(equation)` is true:
    variables and their places."""
    found, pending = dict.fromkeys(variables, place), list(variables)
    while pending:
        a = pending.pop()
        for reader in graph.readers.get(a, ()):
            if not follows(reader) or reader.outputs[0] in found:
                continue
            out = output_place(reader, found[a], next(k for k, b in enumerate(reader.inputs) if b is a))
            if out is not None:
                found[reader.outputs[0]] = out
                pending.append(reader.outputs[0])
    return found
