"""Products of a program (`dot_general`), and the dimensions of their operands and results as factors (`places.py`)."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_softmax.fusion.program.expressions import NotFolded
from jax_softmax.fusion.program.graph import Equation
from jax_softmax.fusion.program.places import Factor, Place, factor_set, factors_of, new_place


class Operand(NamedTuple):
    """A variable at a place. Its dimensions have letters as names."""

    variable: Any
    place: Place

    @property
    def factors(self) -> list[Factor]:
        return factors_of(self.place)

    def _in_parts(self, names: Mapping[Factor, str]) -> list[Factor]:
        """Its factors, split into those that have names."""
        found = []
        for factor in self.factors:
            found += sorted(filter(factor.overlaps, names), key=lambda part: -part.inner)
        if factors_of([found]) != self.factors:
            raise NotFolded("a product has a dimension that no operand has")
        return found

    def letters(self, names: Mapping[Factor, str]) -> str:
        """The names of its factors. Raises NotFolded if one has none, or is a part of one that has."""
        return "".join(names[factor] for factor in self._in_parts(names))

    def to_letters(self, a: jax.Array, names: Mapping[Factor, str], letters: str) -> jax.Array:
        """The variable's array, with a dimension for each of these letters, in their order. It is broadcast along those
        that are not its own."""
        own, extents = self.letters(names), {letter: f.extent for f, letter in names.items()}
        a = a.reshape([f.extent for f in self._in_parts(names)])
        a = jnp.transpose(a, [own.index(c) for c in letters if c in own])
        a = jnp.expand_dims(a, [k for k, c in enumerate(letters) if c not in own])
        return jnp.broadcast_to(a, [n if c in own else extents[c] for c, n in zip(letters, a.shape, strict=True)])

    def from_letters(self, a: jax.Array, names: Mapping[Factor, str], letters: str, like: Any) -> jax.Array:
        """An array of the type `like` from one with these letters: the transpose of `to_letters`. It is summed along
        those that are not its own."""
        own = self.letters(names)
        if others := [k for k, c in enumerate(letters) if c not in own]:
            a, letters = a.astype(jnp.float32).sum(others), "".join(c for c in letters if c in own)
        return jnp.transpose(a, [letters.index(c) for c in own]).astype(like.dtype).reshape(like.shape)


class Product:
    """A product of which one operand's place is known, or the result's."""

    def __init__(self, equation: Equation, place: Place, k: int | None = None) -> None:
        """`place`: that of the k-th operand, or of the result."""
        contracted, batch = equation.params["dimension_numbers"]
        self.equation, self.k = equation, k
        shapes = [a.aval.shape for a in equation.inputs]
        free = [[d for d in range(len(shapes[n])) if d not in (*contracted[n], *batch[n])] for n in range(2)]
        dims: list[dict[Any, Any]] = [{}, {}]  # of each operand: by dimension, its factors
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
        self.contracted = factor_set([dims[0][d] for d in contracted[0]])
        self.result = [dims[0][d] for d in batch[0]] + [dims[n][d] for n in range(2) for d in free[n]]

    @property
    def features(self) -> Factor:
        """The one factor that the known place does not have. Raises NotFolded if there are several, or none."""
        found = factors_of(self.new_dims)
        if len(found) != 1:
            raise NotFolded("features are not one dimension")
        return found[0]

    def operand(self, k: int) -> Operand:
        return Operand(self.equation.inputs[k], self.places[k])

    @property
    def other(self) -> Operand:
        """The operand that is not the k-th one, whose place is known."""
        assert self.k is not None
        return self.operand(1 - self.k)
