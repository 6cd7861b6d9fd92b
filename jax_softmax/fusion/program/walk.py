"""Walks through a graph, and the cheapest cuts in it."""

from collections.abc import Callable, Generator, Hashable, Iterable, Sequence
from typing import Any, NamedTuple

from jax_softmax.fusion.program import expressions
from jax_softmax.fusion.program.graph import Equation, Graph, is_variable, trampolined
from jax_softmax.fusion.program.places import Parts, Place
from jax_softmax.primitives.types import Atom, Var

Follows = Callable[[Equation], bool]
Inside = dict[Var, Equation]  # equations that are made together, by the variable that each makes


def through(graph: Graph, a: Atom, follows: Follows) -> Atom:
    """The value of which another one is made by equations that are followed, each by its first operand."""
    while (maker := graph.maker_of(a)) is not None and follows(maker):
        a = maker.inputs[0]
    return a


def reached(graph: Graph, variables: Iterable[Var], place: Place, follows: Follows, parts: Parts) -> dict[Var, Place]:
    """What is made of variables at a place, each element of one, by equations that are followed: variables and their
    places, which have common parts."""
    found = dict.fromkeys(variables, place)
    pending = list(found)
    while pending:
        a = pending.pop()
        for reader in graph.readers.get(a, ()):
            if not follows(reader) or reader.outputs[0] in found:
                continue
            out = parts.output_place(reader, found[a], next(k for k, b in enumerate(reader.inputs) if b is a))
            if out is not None:
                found[reader.outputs[0]] = out
                pending.append(reader.outputs[0])
    return found


class Cut(NamedTuple):
    """A way to have a value: it is made by `equations`, by the variable that each makes, of what is read or kept."""

    costs: dict[Any, float]  # bytes, by what costs them: what several values need counts once
    equations: Inside

    @property
    def cost(self) -> float:
        return sum(self.costs.values())


class Cuts:
    """The cheapest cut before each value that is needed. A subclass says what may be made, and for how much.

    `at` is where a value is read: in a kernel its place, as a key, and it may be made anew at each place."""

    def __init__(self, graph: Graph, parts: Parts | None = None, given: dict[Hashable, Cut] | None = None) -> None:
        """`parts`: of a kernel's places; None if there is no kernel. `given`: cuts, by variable, and by place as well
        if there are such."""
        self.graph, self.parts = graph, parts
        self.cut_before = {} if given is None else given

    def before(self, a: Atom, at: Hashable) -> Cut:
        """The cheapest cut before a value: all its equations are after the cut."""
        return trampolined(self._cut(a, at))

    def _cut(self, a: Atom, at: Hashable) -> Generator[Any, Cut, Cut]:
        if not is_variable(a):
            return Cut({}, {})
        key = a if self.parts is None else (a, at)
        if key not in self.cut_before:
            made, operands = None, self.operands(a, at)
            if operands is not None:
                cuts = []
                for operand in operands:
                    cuts.append((yield self._cut(*operand)))
                made = self.made(a, at, cuts)
            self.cut_before[key] = self.cheapest(a, made)
        return self.cut_before[key]

    def may_make(self, a: Var, maker: Equation) -> bool:
        """Whether a variable's maker may be after the cut, if the places of its operands are known."""
        return expressions.is_expressible(maker)

    def operands(self, a: Var, at: Any) -> Sequence[tuple[Atom, Hashable]] | None:
        """The operands of which a variable can be made, and where each is read; None if it can only be read."""
        maker = self.graph.maker.get(a)
        if maker is None or not self.may_make(a, maker):
            return None
        assert self.parts is not None  # a subclass without a kernel has operands of its own
        return self.parts.operands(maker, at)

    def own_cost(self, maker: Equation, at: Any) -> float:
        """The cost of an equation that is after the cut."""
        return 0

    def made(self, a: Var, at: Any, cuts: Sequence[Cut]) -> Cut:
        """The cut before a variable's maker, given those before its operands."""
        maker = self.graph.maker[a]
        cost = self.own_cost(maker, at)
        made = Cut({maker: cost} if cost else {}, {})
        for cut in cuts:
            made.costs.update(cut.costs)
            made.equations.update(cut.equations)
        made.equations[a] = maker
        return made

    def cheapest(self, a: Var, made: Cut | None) -> Cut:
        """The cut by which a variable is made, if there is one, or the one by which it is read."""
        raise NotImplementedError
