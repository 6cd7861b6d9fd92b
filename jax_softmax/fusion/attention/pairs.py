"""Queries and keys: one pair, or several side by side, each with features of its own.

q kᵀ + r sᵀ is [q, r] [k, s]ᵀ, as in multi-head latent attention, where features with positions have keys that heads
share. So kernels have all queries one behind the other along features, and so the keys. A product that batches, heads
or queries share stays an array that scores read, and so does one for each pair of tokens.
"""

from collections.abc import Iterable
from typing import NamedTuple

from jax_softmax.fusion.attention.values import is_same
from jax_softmax.fusion.attention.walks import NoAttention, Walks
from jax_softmax.fusion.program.graph import Equation
from jax_softmax.fusion.program.places import Factor, Place, factors_of
from jax_softmax.fusion.program.products import Operand, Product
from jax_softmax.primitives.types import Atom, Var


class Pair(NamedTuple):
    q: Operand
    k: Operand
    features: Factor


class Gradient(NamedTuple):
    """A product of the scores' cotangent with keys, dq, or with queries, dk."""

    product: Product
    cotangent: Var
    name: str
    part: tuple[int, int]  # which features of the kernels' gradient it is


class Pairs:
    """The product of queries and keys, or the sum of several, of which scores are made: x at a place."""

    def __init__(self, walks: Walks, keys: Factor, x: Atom, place: Place, products: list[Product]) -> None:
        self.walks, self.keys, self.x, self.place, self.products = walks, keys, x, place, products
        self.each: list[Pair] = []
        for product in products:
            at_k = self.operand_with_keys(product, "the scores' product")
            q, k = (walks.stored(product, n) for n in (1 - at_k, at_k))
            self.each.append(Pair(q, k, product.features))

    @property
    def equations(self) -> list[Equation]:
        return [product.equation for product in self.products]

    @property
    def operands(self) -> list[Operand]:
        return [operand for pair in self.each for operand in (pair.q, pair.k)]

    @property
    def factors_of_keys(self) -> list[Factor]:
        """Those of all keys' dimensions."""
        return [f for pair in self.each for f in self.walks.parts.factors_of(pair.k.place)]

    def operand_with_keys(self, product: Product, name: str) -> int:
        """The number of a product's operand. Raises NoAttention if there is none, or two."""
        has_keys = [self.keys in self.walks.parts.factors_of(product.operand(k).place) for k in (0, 1)]
        if sum(has_keys) != 1:
            raise NoAttention(f"not one operand of {name} has the keys")
        return has_keys.index(True)

    def gradients(self, products: Iterable[tuple[Product, Var]]) -> list[Gradient]:
        """Of products that read the scores' cotangents, one of each pair's keys and one of its queries, of the same
        cotangent if there are such. All others read the cotangents as an array."""
        dqs: list[list[tuple[Product, Var]]] = [[] for _ in self.each]
        dks: list[list[tuple[Product, Var]]] = [[] for _ in self.each]
        for product, cotangent in products:
            is_dq = self.keys in product.contracted
            others = (pair.k if is_dq else pair.q for pair in self.each)
            found = [n for n, other in enumerate(others) if self._is_with(product, other, self.each[n].features)]
            made = dqs if is_dq else dks
            for n in sorted(found, key=lambda n: len(made[n]))[:1]:  # of the same queries or keys, one each
                made[n].append((product, cotangent))
        gradients, first = list[Gradient](), 0
        for pair, of_q, of_k in zip(self.each, dqs, dks, strict=True):
            part = first, first + pair.features.extent
            common = next((cotangent for _, cotangent in of_q if any(cotangent is other for _, other in of_k)), None)
            for name, of in (("dq", of_q), ("dk", of_k)):
                chosen = [one for one in of if one[1] is common] or of
                gradients += [Gradient(*one, name, part) for one in chosen[:1]]
            first = part[1]
        return gradients

    def _is_with(self, product: Product, operand: Operand, features: Factor) -> bool:
        """Whether a product's other operand is this one."""
        if len(factors_of(product.new_dims)) != 1:
            return False
        return is_same(self.walks.stored_other(product), product.features, operand, features)
