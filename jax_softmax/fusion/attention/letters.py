"""A letter for each dimension of attention's operands.

i are the queries, j the keys, d the features of q and k, e those of v, any other letter is one of the batch.
`bihd,bjhd,bjhe` is the usual layout; in `bikgd,bjkd,bjke` the heads g share keys and values. Features are last.
Operands are read where they lie.
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp


class Letters(NamedTuple):
    """A letter for each dimension of q, k and v."""

    q: str
    k: str
    v: str

    @property
    def o(self) -> str:
        return self.q[:-1] + "e"

    @property
    def batch(self) -> str:
        """Batch letters, in the order in which blocks count them: last those along which queries share keys."""
        return "".join(sorted(self.q[:-1].replace("i", ""), key=lambda letter: letter not in self.k))

    @property
    def batch_of_keys(self) -> str:
        return "".join(c for c in self.batch if c in self.k)

    @property
    def rows(self) -> str:
        """The letters of an array with a number of each row of scores."""
        return self.batch + "i"


class LetteredSide(NamedTuple):
    """A side operand of the expressions: an array, or the index along a letter."""

    letters: str
    dtype: str  # or "index"
    is_learned: bool = False  # whether the side's cotangent is its own, as far as letters tell

    @property
    def is_array_of_scores(self) -> bool:
        """Whether it is one of queries x keys."""
        return self.dtype != "index" and {"i", "j"} <= set(self.letters)


def values_of_sides(
    sides: Iterable[LetteredSide], dims: str, extents: Mapping[str, int], arrays: Iterable[jax.Array]
) -> dict[str, jax.Array]:
    """The sides as arrays of these dimensions, but those that have others. `arrays`: the arrays among the sides."""
    rest, found = list(arrays), {}
    for k, side in enumerate(sides):
        shape = [extents[c] if c in side.letters else 1 for c in dims]
        a = None if side.dtype == "index" or not rest else rest.pop(0)
        if not set(side.letters) <= set(dims):
            continue
        if side.dtype == "index":
            found[f"s{k}"] = jnp.arange(extents[side.letters], dtype=jnp.int32).reshape(shape)
        elif a is not None:
            order = [side.letters.index(c) for c in dims if c in side.letters]
            found[f"s{k}"] = jnp.transpose(a, order).reshape(shape)
    return found
