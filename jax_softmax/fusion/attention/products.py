"""Products of a program (`dot_general`), and the dimensions of their operands and results as factors (`places.py`)."""

import dataclasses
from typing import Any

import jax.numpy as jnp

from jax_softmax.fusion.places import Factor, factors_of, new_place


class NoAttention(Exception):
    """Why a softmax is not attention."""


@dataclasses.dataclass
class Operand:
    """A variable at a place."""

    variable: Any
    place: list

    @property
    def factors(self):
        return factors_of(self.place)

    def letters(self, names) -> str:
        """The names of its factors: a letter each."""
        try:
            return "".join(names[id(factor)] for factor in self.factors)
        except KeyError:  # or it has a part of a dimension
            raise NoAttention("a product has a dimension that no operand has") from None

    def to_letters(self, a, names, letters):
        """The variable's array, with a dimension for each of these letters, in their order."""
        own = self.letters(names)
        return jnp.transpose(a.reshape([f.extent for f in self.factors]), [own.index(c) for c in letters])

    def from_letters(self, a, names, letters, like):
        """The inverse: an array of the type `like`."""
        return jnp.transpose(a, [letters.index(c) for c in self.letters(names)]).astype(like.dtype).reshape(like.shape)


class Product:
    """A product of which one operand's place is known, or the result's."""

    def __init__(self, equation, place, k=None):
        """`place`: that of the k-th operand, or of the result."""
        contracted, batch = equation.params["dimension_numbers"]
        self.equation, self.k = equation, k
        shapes = [a.aval.shape for a in equation.inputs]
        free = [[d for d in range(len(shapes[n])) if d not in (*contracted[n], *batch[n])] for n in range(2)]
        dims: list[dict] = [{}, {}]  # of each operand: by dimension, its factors
        if k is None:
            rest, self.new_dims = iter(place[len(batch[0]) :]), new_place(shapes[0], contracted[0])
            for n in range(2):
                dims[n] |= zip((*batch[n], *contracted[n]), (*place[: len(batch[n])], *self.new_dims), strict=True)
                dims[n] |= {d: next(rest) for d in free[n]}
        else:
            self.new_dims = new_place(shapes[1 - k], free[1 - k])
            dims[k] |= enumerate(place)
            dims[1 - k] |= zip(free[1 - k], self.new_dims, strict=True)
            shared = zip((*contracted[k], *batch[k]), (*contracted[1 - k], *batch[1 - k]), strict=True)
            dims[1 - k] |= {other: place[mine] for mine, other in shared}
        self.places = [[dims[n][d] for d in range(len(shapes[n]))] for n in range(2)]
        self.contracted = {id(f) for d in contracted[0] for f in factors_of([dims[0][d]])}
        self.result = [dims[0][d] for d in batch[0]] + [dims[n][d] for n in range(2) for d in free[n]]

    @property
    def features(self) -> Factor:
        """The one factor that the known place does not have."""
        found = factors_of(self.new_dims)
        if len(found) != 1:
            raise NoAttention("features are not one dimension")
        return found[0]

    def operand(self, k) -> Operand:
        return Operand(self.equation.inputs[k], self.places[k])

    @property
    def other(self) -> Operand:
        """The operand that is not the k-th one."""
        return self.operand(1 - self.k)
