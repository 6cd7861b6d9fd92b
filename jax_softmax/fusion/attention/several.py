"""Products of the weights of several softmaxes, (a P - b R) v as differential attention has it.

With weights a P and -b R, that is the sum of (a P) v and (-b R) v, and its transpose the sum of two, too: then each
softmax is an attention of its own. So are the gradients of scores that are made of the same q kᵀ. Where weights are not
linear in P and R, or something else reads them, no kernel makes one of these products, and the program stays as it was.
"""

from collections.abc import Container, Generator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jax_softmax.fusion.attention.casts import Changes, is_rounded
from jax_softmax.fusion.program import expressions, splicing
from jax_softmax.fusion.program.graph import Equation, Graph, is_variable, trampolined, variables_of
from jax_softmax.primitives.types import Var

_SUMS, _MOST_TERMS = ("add", "add_any", "sub"), 16  # of more, the program stays as it is


def of_one_softmax(graph: Graph, stay: Container[Equation]) -> Changes:
    """The graph with its products of several softmaxes' weights, but for those that stay, as sums of products."""
    made_of: dict[Var, frozenset[Var]] = {}  # the softmaxes, or their linear maps, of which a variable is made
    for equation in graph.equations:
        of = frozenset(equation.outputs if equation.name in ("softmax", "softmax_linear") else ())
        if expressions.is_expressible(equation):
            of = of.union(*(made_of.get(a, of) for a in variables_of(equation.inputs)))
        made_of |= dict.fromkeys(equation.outputs, of) if 0 < len(of) <= _MOST_TERMS else {}
    terms, replacements, products = _Terms(graph, made_of), dict[Equation, list[Equation]](), dict[Equation, Equation]()
    for equation in graph.equations:
        if equation.name == "dot_general" and equation not in stay:
            new = terms.products_instead_of(equation)
            replacements |= {equation: new} if new else {}
            products |= {one: equation for one in new if one.name == "dot_general"}
    return Changes(graph.with_replaced(replacements) if products else graph, products)


class _Terms:
    """The terms of sums of weights: for each softmax what is made of it alone."""

    def __init__(self, graph: Graph, made_of: Mapping[Var, frozenset[Var]]) -> None:
        self.graph, self.made_of = graph, made_of
        self.found: dict[tuple[Var, Var], Var | None] = {}  # by a sum's variable and the softmax
        self.new: list[Equation] = []  # which make terms

    def products_instead_of(self, product: Equation) -> list[Equation]:
        """The equations that make a product's result as a sum; none if it is no product of several softmaxes."""
        operands, (result,) = variables_of(product.inputs), product.outputs
        of_weights = [a for a in operands if a in self.made_of]
        if len(of_weights) != 1 or len(operands) != 2:
            return []
        (weights,), dtype = of_weights, operands[operands[0] is of_weights[0]].aval.dtype
        softmaxes = sorted(self.made_of[weights], key=lambda y: self.graph.position[self.graph.maker[y]])
        is_of_one_kind = len({self.graph.maker[y].name for y in softmaxes}) == 1
        if len(softmaxes) == 1 or not is_of_one_kind or not is_rounded(self.graph, result, dtype.name):
            return []
        products = []
        for y in softmaxes:
            if (term := trampolined(self._term(weights, y))) is None:
                return []
            inputs = [term if a is weights else a for a in operands]
            products.append(Equation(product.eqn, inputs, [type(result)(result.aval)], product.params))

        def summed(*parts: jax.Array) -> jax.Array:
            total = jnp.float32(0)
            for part in parts:
                total += part.astype(dtype).astype(jnp.float32)
            return total.astype(result.aval.dtype)

        own, self.new = self.new, []
        return [*own, *products, *splicing.spliced(summed, [p.outputs[0] for p in products], [result], product)]

    def _term(self, a: Var, y: Var) -> Generator[Any, Any, Var | None]:
        """A value with 0 instead of all softmaxes but y, which is among those that it is made of, if it is linear in
        them; None if it is not."""
        if self.made_of[a] == {y}:
            return a
        if (a, y) not in self.found:
            maker = self.graph.maker[a]
            of_softmaxes = [b for b in variables_of(maker.inputs) if b in self.made_of]
            terms: dict[Var, Var] = {}
            for b in of_softmaxes:
                if y in self.made_of[b]:
                    terms[b] = yield self._term(b, y)
            self.found[a, y] = None
            if None not in terms.values() and len(of_softmaxes) == (2 if maker.name in _SUMS else 1):
                self.found[a, y] = self._made(maker, terms)
        return self.found[a, y]

    def _made(self, maker: Equation, terms: Mapping[Var, Var]) -> Var:
        """What an equation makes of terms, and of 0 instead of the other summand of a sum."""
        (result,) = maker.outputs
        new = type(result)(result.aval)
        if maker.name not in _SUMS or set(terms).issuperset(maker.inputs):
            inputs = [terms.get(a, a) if is_variable(a) else a for a in maker.inputs]
            self.new.append(Equation(maker.eqn, inputs, [new], maker.params))
            return new

        def alone(summand: jax.Array) -> jax.Array:
            is_taken_away = maker.name == "sub" and maker.inputs[1] in terms
            return jnp.broadcast_to(-summand if is_taken_away else summand, result.aval.shape)

        self.new += splicing.spliced(alone, list(terms.values()), [new], maker)
        return new
