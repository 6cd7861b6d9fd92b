"""What one kernel does of a program: an operator, and the equations before and after it that are folded into it.

Before an operand, the graph is cut where fewest bytes have to be read: the equations after the cut are folded. After a
result, equations are folded as long as each element is made of the one element at its place. `calls.py` makes a call of
a kernel of each group.
"""

import heapq
from collections.abc import Callable, Collection, Iterable, Iterator, Set
from typing import Any

from jax_softmax.fusion.program import expressions, walk
from jax_softmax.fusion.program.graph import Equation, Graph, bytes_of, each_once, is_variable, size_of, variables_of
from jax_softmax.fusion.program.kinds import foldable, is_loop
from jax_softmax.fusion.program.places import Parts, Place, PlaceKey, new_place, place_key
from jax_softmax.fusion.program.walk import Cut, Inside
from jax_softmax.primitives.operators import OPERATORS, PRIMITIVES
from jax_softmax.primitives.types import Atom, Var
from jax_softmax.runtime import costs

_MOST_EQUATIONS = 100  # chosen: a limit to how long the source of a kernel can become

Test = Callable[[Atom], bool]
ReadOutside = Callable[[Atom, "Group"], list[Equation | None]]  # `Groups.read_outside`


class Group:
    """An operator of a graph and what is folded into it."""

    def __init__(self, graph: Graph, equation: Equation) -> None:
        self.graph, self.equation = graph, equation
        self.op = equation.name
        self.facts = facts = OPERATORS[self.op]
        self.axes = tuple(equation.params["axes"])
        self.x, self.size = equation.inputs[0], size_of(equation.inputs[0])
        # Nothing is folded into the operands of rows: numbers and labels of rows, and the mask.
        self.operands, self.row_operands = equation.inputs[: facts.inputs], equation.inputs[facts.inputs :]
        self.result = equation.outputs[0] if facts.element_results else None
        self.row_results = equation.outputs[int(facts.element_results) :]
        self.place = new_place(self.x.aval.shape)  # of the operator's operands and results
        self.parts = Parts()  # of dimensions, which are the kernel's dimensions
        # Folded equations: those before each operand, those that elements of the result go through, and those that
        # make other operands of these.
        self.before: list[Inside] = []
        self.after: Inside = {}
        self.sides_after: Inside = {}
        self.places_after: dict[Atom, Place] = {}  # of the result, and of the variables that `after` makes
        self._read: Set[Var] = frozenset()

    @property
    def inside(self) -> set[Equation]:
        return {self.equation, *self.after.values()}

    # ---- before

    def fold_before(self, is_materialized: Test, read: Set[Var]) -> None:
        """`is_materialized(variable)`: whether it is in memory, whatever is folded. `read`: those variables among them
        that are read there, even if it is cheaper to make them."""
        self._read = read
        self.before = [self._cut(operand, is_materialized).equations for operand in self.operands]

    def _cut(self, operand: Atom, is_materialized: Test) -> Cut:
        return _Cuts(self, is_materialized, self._read).before(operand, place_key(self.place))

    def cost_of_reading(self, variable: Atom, is_materialized: Test) -> float:
        """The bytes that the cheapest cut before a variable reads."""
        return self._cut(variable, is_materialized).cost

    # ---- after

    def fold_after(self, is_materialized: Test, depends: Test, read_outside: ReadOutside) -> None:
        """`depends(variable)`: whether it is made of what the group makes. `read_outside(variable, group)`: the
        equations outside of the group that read it, and None if it is a result of the program."""
        if self.result is None:
            return
        self.places_after = {self.result: self.place}
        if self.facts.quantizes:
            return  # its result depends on the dtype that is written
        position, readers = self.graph.position, self.graph.readers
        waiting = {position[reader] for reader in readers.get(self.result, ())}
        pending = sorted(waiting)  # a heap of equations that read what is folded
        while pending and len(self.after) < _MOST_EQUATIONS:
            equation = self.graph.equations[heapq.heappop(pending)]
            if self._is_folded(equation, depends):
                for reader in readers.get(equation.outputs[0], ()):
                    if position[reader] not in waiting:
                        waiting.add(position[reader])
                        heapq.heappush(pending, position[reader])
        self._unfold_what_costs_more(read_outside)
        cuts = _Cuts(self, is_materialized, self._read)
        for variable, equation in self.after.items():
            for a, place in expressions.required_operands(equation, self.places_after[variable], self.parts):
                if is_variable(a) and a not in self.places_after:
                    self.sides_after |= cuts.before(a, place).equations

    def _is_folded(self, equation: Equation, depends: Test) -> bool:
        """Folds an equation that reads what is folded, and returns True; False if it cannot be."""
        sources = [k for k, a in enumerate(equation.inputs) if is_variable(a) and a in self.places_after]
        if equation.name in PRIMITIVES or not expressions.is_expressible(equation):
            return False
        (output,) = equation.outputs
        place = self.parts.output_place(equation, self.places_after[equation.inputs[sources[0]]], sources[0])
        if place is None or size_of(output) != self.size:
            return False
        operands = self.parts.operands(equation, place)
        folded = [(a, its) for a, its in operands or () if is_variable(a) and a in self.places_after]
        if operands is None or any(place_key(self.places_after[a]) != its for a, its in folded):
            return False
        others = [a for a in variables_of(equation.inputs) if a not in self.places_after]
        if any(map(depends, others)):
            return False
        self.places_after[output] = place
        self.after[output] = equation
        return True

    def _unfold_what_costs_more(self, read_outside: ReadOutside) -> None:
        """Leaves equations outside that would make the kernel write more."""
        changed = True
        while changed:
            changed = False
            for variable, equation in reversed(list(self.after.items())):
                if variable not in self.after:
                    continue
                can_be_written = variable.aval.dtype.name in expressions.WRITABLE
                if can_be_written and any(variable in other.inputs for other in self.after.values()):
                    continue
                readers = read_outside(variable, self)
                if readers and not self._worth_writing(variable, equation, readers, read_outside):
                    self._unfold(variable)
                    changed = True

    def _unfold(self, variable: Var) -> None:
        """Leaves outside the equation that makes a variable, and all that reads it."""
        outside = {variable}
        for other, equation in self.after.items():
            if not outside.isdisjoint(variables_of(equation.inputs)):
                outside.add(other)
        for other in outside:
            del self.after[other], self.places_after[other]

    def _worth_writing(
        self, variable: Var, equation: Equation, readers: list[Equation | None], read_outside: ReadOutside
    ) -> bool:
        if variable.aval.dtype.name not in expressions.WRITABLE:
            return False
        sources = [a for a in variables_of(equation.inputs) if a in self.places_after]
        written_anyway = any(set(read_outside(a, self)) - {equation} for a in sources)
        read_by_loops = all(reader is not None and is_loop(reader) for reader in readers)
        return not (written_anyway and read_by_loops)  # the loops make it of what is written anyway

    def written(self, read_outside: ReadOutside) -> list[Var]:
        """The variables, the result or made of it, that something outside reads."""
        return [v for v in variables_of(self.places_after) if read_outside(v, self)]


class _Cuts(walk.Cuts):
    """The cheapest cuts before what a group's kernel makes. What is read but not in memory has to be written, too."""

    def __init__(self, group: Group, is_materialized: Test, read: Set[Var]) -> None:
        super().__init__(group.graph, group.parts)
        self.group, self.is_materialized, self._read = group, is_materialized, read

    def may_make(self, a: Var, maker: Equation) -> bool:
        is_outside = a not in self.group.after and a not in self._read and not self._is_view_of_another(maker)
        return is_outside and super().may_make(a, maker)

    def _is_view_of_another(self, equation: Equation) -> bool:
        """Whether another operator's kernel can write its result as this view."""
        source = self.graph.maker_of(equation.inputs[0]) if expressions.is_view(equation) else None
        return source is not None and source.name in PRIMITIVES and source.outputs[0] is equation.inputs[0]

    def own_cost(self, maker: Equation, at: PlaceKey) -> float:
        if expressions.is_view(maker) or maker.name == "iota":
            return 0
        return (costs.FOLDED_FUNCTION if expressions.is_long(maker) else costs.FOLDED_OPERATION) * self.group.size

    def cheapest(self, a: Var, made: Cut | None) -> Cut:
        read = Cut({a: bytes_of(a) * (1 if self.is_materialized(a) else 2)}, {})
        if made is None:
            return read
        if not self.is_materialized(a):  # XLA, too, would read what it is made of
            read.costs.update((b, cost) for b, cost in made.costs.items() if not isinstance(b, Equation))
        return made if made.cost <= read.cost and len(made.equations) <= _MOST_EQUATIONS else read


def is_materialized_unfolded(graph: Graph, variable: Atom) -> bool:
    """Whether a variable is in memory where nothing is folded into operators."""
    return _is_materialized(graph, variable, lambda _, reader: is_loop(reader), graph.materialized)


def _is_materialized(
    graph: Graph, variable: Atom, can_make: Callable[[Atom, Equation], bool], known: dict[Atom, bool]
) -> bool:
    """`can_make(variable, reader)`: whether the reader can make the variable itself."""
    if variable not in known:
        maker, readers = graph.maker_of(variable), graph.readers.get(variable, ())
        in_any_case = maker is None or variable in graph.results or not is_loop(maker)
        known[variable] = in_any_case or any(not can_make(variable, reader) for reader in readers)
    return known[variable]


class Groups:
    """The groups of a graph, and what the rest of the program reads."""

    def __init__(self, graph: Graph, left: Collection[Equation] = (), read: Set[Var] = frozenset()) -> None:
        """`left`: operators that are left as they are. `read`: variables that are in memory, whatever is folded."""
        self.graph = graph
        self._read = read
        self.groups: list[Group] = []
        self.owner: dict[Equation, Group] = {}
        for equation in graph.equations:
            if equation.name in PRIMITIVES and equation not in left and foldable(equation):
                group = Group(graph, equation)
                self.groups.append(group)
                self.owner[equation] = group
        self._materialized: dict[Atom, bool] = {}
        self.reads: dict[Group, list[Var]] = {}  # the variables that each group reads
        self._reading: dict[Atom, dict[Group, None]] = {}  # the groups that read each variable
        self.made_first: dict[Group, list[Var]] = {}  # before a group's kernel, which `in_place.py` says
        for group in self.groups:
            group.fold_before(self.is_materialized, self._read)
            self._note_reads(group)
        self.executed = self._found_executed()
        for group in self.groups:
            group.fold_after(self.is_materialized, self.dependence(group), self.read_outside)
            self.owner |= dict.fromkeys(group.after.values(), group)
            self._note_reads(group)
        self.executed = self._found_executed()

    def is_materialized(self, variable: Atom) -> bool:
        """Whether a variable is in memory, whatever is folded."""
        return variable in self._read or _is_materialized(self.graph, variable, self._can_make, self._materialized)

    def _can_make(self, variable: Atom, reader: Equation) -> bool:
        group = self.owner.get(reader)
        if reader.name == "gather" and reader.inputs[1] is not variable:  # XLA makes the elements that it gathers
            return True
        return is_loop(reader) if group is None or group.equation is not reader else variable in group.operands

    def _note_reads(self, group: Group) -> None:
        """Notes what a group reads as it is now."""
        for variable in self.reads.get(group, ()):
            del self._reading[variable][group]
        self.reads[group] = self._found_reads(group)
        for variable in self.reads[group]:
            self._reading.setdefault(variable, {})[group] = None

    def _found_reads(self, group: Group) -> list[Var]:
        read: dict[Any, Any] = dict.fromkeys(variables_of(group.row_operands))
        folded = list(zip(group.operands, group.before, strict=True))
        for equation in group.after.values():
            folded += [(a, group.sides_after) for a in variables_of(equation.inputs) if a not in group.places_after]
        for start, inside in folded:  # the variables that the equations inside make it of

            def following(a: Var, inside: Inside = inside) -> Iterable[Var]:
                return reversed(variables_of(inside[a].inputs)) if a in inside else ()

            read |= dict.fromkeys(a for a in each_once(variables_of([start]), following) if a not in inside)
        return list(read)

    def _found_executed(self) -> set[Group | Equation]:
        """The groups, and the equations outside of them, that the results need."""

        def makers(variables: Iterable[Var]) -> Iterator[Group | Equation]:
            return (self.owner.get(e, e) for e in map(self.graph.maker.get, variables) if e is not None)

        def following(node: Group | Equation) -> Iterator[Group | Equation]:
            return makers(variables_of(node.inputs) if isinstance(node, Equation) else self.reads[node])

        effects = [e for e in self.graph.equations if e.eqn.effects]
        return set(each_once([*effects, *makers(self.graph.results)], following))

    def readers_in_xla(self, variable: Atom) -> list[Equation]:
        """The equations outside of groups that read a variable."""
        readers = self.graph.readers.get(variable, ())
        return [reader for reader in readers if reader in self.executed and self.owner.get(reader) is None]

    def read_outside(self, variable: Atom, group: Group) -> list[Equation | None]:
        """The equations and groups that read a variable, other than this group; None for the program's results."""
        readers: list[Any] = [None] if variable in self.graph.results else []
        readers += [reader for reader in self.readers_in_xla(variable) if reader not in group.inside]
        others = (other for other in self._reading.get(variable, ()) if other is not group and other in self.executed)
        return readers + [other.equation for other in others]

    def _needed(self, group: Group) -> list[Var]:
        """What has to be made before a group's kernel."""
        return [*self.reads[group], *self.made_first.get(group, ())]

    def dependence(self, group: Group) -> Test:
        """`depends(variable)`: whether it is made of what a group makes, the groups being one equation each."""
        graph, position, start = self.graph, self.graph.position, self.graph.position[group.equation]
        independent: set[Any] = set()  # variables, as is known from earlier questions
        # What comes before a group is not made of it, unless a group before it reads something that comes later.
        in_order = not any(
            position[other.equation] < start
            and any(v in graph.maker and position[graph.maker[v]] >= start for v in self._needed(other))
            for other in self.reads
        )

        def depends(variable: Atom) -> bool:
            pending, seen, inside = [variable], set(), group.inside
            while pending:
                a = pending.pop()
                maker = graph.maker_of(a)
                if maker is None or a in seen or a in independent:
                    continue
                seen.add(a)
                if in_order and position[maker] < start:
                    continue
                if maker in inside or graph.has_effects_after(maker, group.equation):
                    return True
                other = self.owner.get(maker)
                pending += variables_of(maker.inputs)
                pending += () if other is None else self._needed(other)
            independent.update(seen)
            return False

        return depends
