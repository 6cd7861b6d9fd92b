"""Products of a program, and the dimensions of their operands as factors (`fusion/places.py`)."""

import dataclasses
from typing import Any

import jax.numpy as jnp

from jax_softmax.fusion.places import Factor, factors_of


class NoAttention(Exception):
    """Why a softmax is none."""


@dataclasses.dataclass
class Operand:
    """An array whose dimensions are factors, one each."""

    variable: Any
    place: list

    @property
    def factors(self):
        return factors_of(self.place)

    def letters(self, names) -> str:
        try:
            return "".join(names[id(factor)] for factor in self.factors)
        except KeyError:  # it has a dimension that no operand has, or a part of one
            raise NoAttention("a product has a dimension that no operand has") from None

    def array(self, a, names, letters):
        """An array of the variable, with its dimensions in the order of these letters."""
        own = self.letters(names)
        return jnp.transpose(a.reshape([f.extent for f in self.factors]), [own.index(c) for c in letters])

    def result(self, a, names, letters, like):
        """The other way round."""
        return jnp.transpose(a, [letters.index(c) for c in self.letters(names)]).astype(like.dtype).reshape(like.shape)


class Product:
    """A product, seen from an operand or from its result of which the place is known."""

    def __init__(self, equation, place, k=None):
        """`place`: that of the k-th operand, or of the result."""
        (contracted, batch) = equation.params["dimension_numbers"]
        self.equation, self.k = equation, k
        shapes = [a.aval.shape for a in equation.inputs]
        free = [
            [d for d in range(len(shape)) if d not in contracted[n] and d not in batch[n]]
            for n, shape in enumerate(shapes)
        ]
        of: list[list] = [[None] * len(shape) for shape in shapes]
        if k is None:
            out = list(place)
            for n in range(2):
                for d, at in zip(batch[n], range(len(batch[n])), strict=True):
                    of[n][d] = out[at]
            rest = out[len(batch[0]) :]
            for n in range(2):
                for d in free[n]:
                    of[n][d] = rest.pop(0)
            self.own = _new_place(shapes[0], contracted[0])
            for n in range(2):
                for d, dim in zip(contracted[n], self.own, strict=True):
                    of[n][d] = dim
        else:
            of[k] = list(place)
            for mine, other in zip(contracted[k], contracted[1 - k], strict=True):
                of[1 - k][other] = place[mine]
            for mine, other in zip(batch[k], batch[1 - k], strict=True):
                of[1 - k][other] = place[mine]
            self.own = _new_place(shapes[1 - k], free[1 - k])
            for d, dim in zip(free[1 - k], self.own, strict=True):
                of[1 - k][d] = dim
        self.places = of
        self.contracted = {id(f) for d in contracted[0] for f in factors_of([of[0][d]])}
        self.result = [of[0][d] for d in batch[0]] + [of[n][d] for n in range(2) for d in free[n]]

    @property
    def features(self) -> Factor:
        """The one dimension that the known place does not have."""
        found = factors_of(self.own)
        if len(found) != 1:
            raise NoAttention("features are not one dimension")
        return found[0]

    def operand(self, k) -> Operand:
        return Operand(self.equation.inputs[k], self.places[k])

    @property
    def other(self) -> Operand:
        return self.operand(1 - self.k)


def _new_place(shape, dims):
    return [[Factor(shape[d], d)] if shape[d] > 1 else [] for d in dims]
