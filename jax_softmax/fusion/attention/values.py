"""The arrays that weights are multiplied with: one, or several side by side, each with features of its own.

(P v, P w) is P [v, w], and the cotangent of P, do v^T + dp w^T, is [do, dp] [v, w]^T. So kernels have all values one
behind the other along features, and so the outputs' cotangents.
"""

from typing import NamedTuple

from jax_softmax.fusion.attention.walks import NoAttention, Walks
from jax_softmax.fusion.program.places import Factor
from jax_softmax.fusion.program.products import Operand, Product


class Value(NamedTuple):
    v: Operand
    features: Factor
    o_cotangent: Operand | None = None


class Values:
    """The values of one softmax, in their order."""

    def __init__(self, walks: Walks) -> None:
        self.walks = walks
        self.each: list[Value] = []

    def add_of_output(self, product: Product) -> None:
        """Adds the one with which weights are multiplied for an output."""
        if self._number(product, "v") is None:
            self.each.append(Value(self.walks.stored_other(product), product.features))

    def add_of_cotangent(self, product: Product, at_v: int) -> None:
        """Adds the one whose product with an output's cotangent this is. `at_v`: the number of the value's operand."""
        v, o_cotangent = (self.walks.stored(product, k) for k in (at_v, 1 - at_v))
        self.each.append(Value(v, product.features, o_cotangent))

    @property
    def o_cotangents(self) -> list[Operand]:
        return [value.o_cotangent for value in self.each if value.o_cotangent is not None]

    def part_of(self, product: Product, of: str) -> tuple[int, int]:
        """The features, first and last, of the value that a product of weights reads (`of` is v), or whose output's
        cotangent it reads (o_cotangent). Raises NoAttention if there is none."""
        number = self._number(product, of)
        if number is None:
            raise NoAttention("its products are of different arrays")
        extents = [value.features.extent for value in self.each]
        return sum(extents[:number]), sum(extents[: number + 1])

    def _number(self, product: Product, of: str) -> int | None:
        other = self.walks.stored_other(product)
        same = (
            k for k, one in enumerate(self.each) if is_same(other, product.features, getattr(one, of), one.features)
        )
        return next(same, None)


def is_same(one: Operand, its_features: Factor, other: Operand, features_of_other: Factor) -> bool:
    """Whether two operands are the same array, each with features of its own."""

    def order(of: Operand, features: Factor) -> list[Factor | None]:
        return [None if f == features else f for f in of.factors]

    return one.variable is other.variable and order(one, its_features) == order(other, features_of_other)
