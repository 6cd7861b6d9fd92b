"""Places: where the elements of a value lie among those of an array, an operator's operand for one.

Each dimension of that array is a factor, and a reshape in the program may split it into two. The place of a value is
a list of factors for each of its dimensions, of whose indices the dimension's index is made; the last one varies
fastest. A dimension of extent 1, or along which all elements are one, has none. So an array [6, 5] is at [[a], [b]];
reshaped to [2, 3, 5] it is at [[a / 3], [a % 3], [b]], and transposed after that at [[b], [a % 3], [a / 3]].
"""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from jax_softmax.fusion.program.graph import Equation
from jax_softmax.primitives.types import Atom


@dataclasses.dataclass(frozen=True, eq=False)
class Dimension:
    """A dimension of one array. Two of them are equal only if they are the same object."""

    number: int
    extent: int


class Factor(NamedTuple):
    """A dimension, or a part of it: where its index is k, the factor's is k // inner % extent."""

    of: Dimension
    extent: int
    inner: int = 1

    def split(self, n: int) -> tuple["Factor", "Factor"]:
        """The factor as two, the first one of extent n."""
        rest = self.extent // n
        return Factor(self.of, n, self.inner * rest), Factor(self.of, rest, self.inner)

    def overlaps(self, other: "Factor") -> bool:
        """Whether a part of the dimension belongs to both."""
        ends = self.inner * self.extent, other.inner * other.extent
        return self.of is other.of and max(self.inner, other.inner) < min(ends)


Place = Sequence[Sequence[Factor]]
PlaceKey = tuple[tuple[Factor, ...], ...]
Placed = tuple[Atom, PlaceKey]  # a value, and the place where it is read


def new_place(shape: Sequence[int], dims: Iterable[int] | None = None) -> Place:
    """The place of an array of this shape, or of these dimensions of it, in new factors."""
    dims = range(len(shape)) if dims is None else dims
    return [[Factor(Dimension(d, shape[d]), shape[d])] if shape[d] > 1 else [] for d in dims]


def factors_of(place: Place) -> list[Factor]:
    """The factors of all dimensions, in order. Neighbours that are one dimension, or one part of it, are one factor."""
    found: list[Factor] = []
    for factor in itertools.chain(*place):
        if found and found[-1].of is factor.of and found[-1].inner == factor.inner * factor.extent:
            factor = factor._replace(extent=found.pop().extent * factor.extent)
        found.append(factor)
    return found


def factor_set(place: Place) -> frozenset[Factor]:
    """The factors of all dimensions, whatever their order is."""
    return frozenset(factors_of([sorted(itertools.chain(*place), key=lambda f: (id(f.of), -f.inner))]))


def place_key(place: Place) -> PlaceKey:
    """A place as a key of a dictionary."""
    return tuple(map(tuple, place))


def count_of(place: Place) -> int:
    """How many elements a place tells apart."""
    return math.prod(factor.extent for dim in place for factor in dim)


def overlap(one: Place, other: Place) -> bool:
    """Whether a part of a dimension belongs to both places."""
    return any(a.overlaps(b) for a, b in itertools.product(factors_of(one), factors_of(other)))


def _regrouped(place: Place, shape: Sequence[int]) -> Place | None:
    """The place of a value of this shape that has a place's factors in their order; None if extents do not divide."""
    rest, found = factors_of(place), []
    for n in shape:
        dim: list[Factor] = []
        while n > 1:
            if not rest:
                return None
            factor = rest.pop(0)
            if n % factor.extent:
                if factor.extent % n:
                    return None
                factor, inner = factor.split(n)
                rest.insert(0, inner)
            dim.append(factor)
            n //= factor.extent
        found.append(dim)
    return None if rest else found


def input_places(equation: Equation, place: Place) -> list[Place] | None:
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
        found = _before_reshape(shapes[0], shape, place)
        return None if found is None else [found]
    # Elementwise: each operand has the result's shape, or is a number.
    return [[dim if n > 1 else [] for dim, n in zip(place, s, strict=True)] if s else [] for s in shapes]


def _before_reshape(before: Sequence[int], after: Sequence[int], place: Place) -> Place | None:
    if all(n <= 1 or dim for n, dim in zip(after, place, strict=True)):
        return _regrouped(place, before)
    # All elements along a dimension are one: the reshape must leave dimensions as they are, but for those of 1.
    if [n for n in before if n > 1] != [n for n in after if n > 1]:
        return None
    dims = iter([dim for n, dim in zip(after, place, strict=True) if n > 1])
    return [next(dims) if n > 1 else [] for n in before]


def output_place(equation: Equation, place: Place, k: int) -> Place | None:
    """The place of an equation's result, given that of its k-th operand, which has as many elements; or None."""
    name, shape = equation.name, equation.outputs[0].aval.shape
    if math.prod(shape) != math.prod(equation.inputs[k].aval.shape):
        return None
    if name == "broadcast_in_dim":
        dims = dict(zip(equation.params["broadcast_dimensions"], place, strict=True))
        return [dims.get(d, []) for d in range(len(shape))]
    if name == "transpose":
        return [place[d] for d in equation.params["permutation"]]
    if name in ("reshape", "squeeze", "expand_dims"):
        return _regrouped(place, shape)
    return place if len(place) == len(shape) else None


class Parts:
    """The parts into which the places of one kernel split dimensions. Each is made of whole ones of these."""

    def __init__(self) -> None:
        self._begins: dict[Dimension, list[int]] = {}  # ascending: `inner` of all parts but the first
        self.whole: list[Factor] = []  # those that are split no more

    def add(self, place: Place) -> bool:
        """Whether a place's factors and the parts so far have common parts, which are noted then."""
        new = dict(self._begins)
        for factor in itertools.chain(*place):
            begins = {factor.inner, factor.inner * factor.extent} - {1, factor.of.extent}
            if not begins.issubset(new.get(factor.of, ())):
                ends = ((one.inner, one.inner * one.extent) for one in self.whole if one.of is factor.of)
                if any(first < n < end for first, end in ends for n in begins):
                    return False
                new[factor.of] = sorted(begins.union(new.get(factor.of, ())))
                if any(b % a for a, b in itertools.pairwise(new[factor.of])):
                    return False
        self._begins = new
        return True

    def factors_of(self, place: Place) -> list[Factor]:
        """The parts of a place, in order."""
        found = []
        for of, extent, inner in factors_of(place):
            within = (n for n in self._begins.get(of, ()) if inner < n < inner * extent)
            ends = itertools.pairwise([inner, *within, inner * extent])
            found += [Factor(of, end // begin, begin) for begin, end in ends][::-1]
        return found

    def operands(self, equation: Equation, place: Place) -> list[Placed] | None:
        """An equation's operands with their places, given its result's; None if they have no common parts."""
        found = input_places(equation, place)
        if found is None or not all(map(self.add, found)):
            return None
        return list(zip(equation.inputs, map(place_key, found), strict=True))

    def output_place(self, equation: Equation, place: Place, k: int) -> Place | None:
        """As the function `output_place`; None, too, if the place has no common parts with others."""
        found = output_place(equation, place, k)
        return found if found is not None and self.add(found) else None
