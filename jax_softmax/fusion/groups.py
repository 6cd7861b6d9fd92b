"""What one kernel does of a program: an operator, and the equations before and after it that are folded into it.

Before an operand, the graph is cut where fewest bytes have to be read: the equations after the cut are folded. After a
result, equations are folded as long as each element is made of the one element at its place. `calls.py` makes a call of
a kernel of each group.
"""

import heapq
from collections.abc import Set
from typing import Any, NamedTuple

from jax_softmax import _kernels
from jax_softmax.fusion import expressions, places
from jax_softmax.fusion.graph import (
    Equation,
    Graph,
    bytes_of,
    each_once,
    is_variable,
    size_of,
    trampolined,
    variables_of,
)
from jax_softmax.fusion.places import place_key
from jax_softmax.primitives.operators import OPERATORS, PRIMITIVES

# What an equation costs a kernel for each element, in bytes that memory could move meanwhile. A long one: "tanh cap" in
# fused.md, 0.02 to 0.06 of the time in which softmax moves 4 bytes. A short one: chosen, little but not nothing. So a
# small array that many rows share is made once.
_SHORT, _LONG = 0.002, 0.2
_MOST_EQUATIONS = 100  # chosen: a limit to how long the source of a kernel can become


class Cut(NamedTuple):
    """A way to have a value: what is read or kept for it, and the equations that make it of that."""

    costs: dict  # bytes, by what costs them: what several values need counts once
    equations: dict

    @property
    def cost(self):
        return sum(self.costs.values())


class Group:
    """An operator of a graph and what is folded into it."""

    def __init__(self, graph: Graph, equation: Equation):
        self.graph, self.equation = graph, equation
        self.op = equation.name
        self.facts = facts = OPERATORS[self.op]
        self.axes = tuple(equation.params["axes"])
        self.x, self.size = equation.inputs[0], size_of(equation.inputs[0])
        # Nothing is folded into the operands of rows: numbers and labels of rows, and the mask.
        self.operands, self.row_operands = equation.inputs[: facts.inputs], equation.inputs[facts.inputs :]
        self.result = equation.outputs[0] if facts.element_results else None
        self.row_results = equation.outputs[int(facts.element_results) :]
        self.place = places.new_place(self.x.aval.shape)  # of the operator's operands and results
        # Folded equations, each by the variable that it makes: those before each operand, those that elements of the
        # result go through, and those that make other operands of these.
        self.before: list[dict[Any, Equation]] = []
        self.after: dict[Any, Equation] = {}
        self.sides_after: dict[Any, Equation] = {}
        self.places_after = {}  # of the result, and of the variables that `after` makes
        self._read: Set = frozenset()

    @property
    def inside(self):
        return {self.equation, *self.after.values()}

    # ---- before

    def fold_before(self, is_materialized, read) -> None:
        """`is_materialized(variable)`: whether it is in memory, whatever is folded. `read`: those variables among them
        that are read there, even if it is cheaper to make them."""
        self._read = read
        cuts = [trampolined(self._cut(operand, self.place, is_materialized, {})) for operand in self.operands]
        self.before = [cut.equations for cut in cuts]

    def _cut(self, a, place, is_materialized, known):
        """The cheapest cut before a value."""
        if not is_variable(a):
            return Cut({}, {})
        key = a, place_key(place)
        if key in known:
            return known[key]
        read = Cut({a: bytes_of(a) * (1 if is_materialized(a) else 2)}, {})
        known[key] = read
        maker = self.graph.maker.get(a)
        if maker is None or maker is self.equation or maker in self.inside or not expressions.is_expressible(maker):
            return read
        if a in self._read or self._is_view_of_another(maker):
            return read
        inputs = places.input_places(maker, place)
        if inputs is None:
            return read
        free = expressions.is_view(maker) or maker.name == "iota"
        own = 0 if free else _LONG if expressions.is_long(maker) else _SHORT
        made = Cut({maker: own * self.size}, {})
        for operand, its_place in zip(maker.inputs, inputs, strict=True):
            cut = yield self._cut(operand, its_place, is_materialized, known)
            made.costs.update(cut.costs)
            made.equations.update(cut.equations)
        made.equations[a] = maker
        if not is_materialized(a):  # XLA, too, would read what it is made of
            read.costs.update((b, cost) for b, cost in made.costs.items() if not isinstance(b, Equation))
        if made.cost <= read.cost and len(made.equations) <= _MOST_EQUATIONS:
            known[key] = made
        return known[key]

    def _is_view_of_another(self, equation):
        """Whether another operator's kernel can write its result as this view."""
        source = self.graph.maker_of(equation.inputs[0]) if expressions.is_view(equation) else None
        return source is not None and source.name in PRIMITIVES and source.outputs[0] is equation.inputs[0]

    def cost_of_reading(self, variable, is_materialized) -> float:
        """The bytes that the cheapest cut before a variable reads."""
        return trampolined(self._cut(variable, self.place, is_materialized, {})).cost

    # ---- after

    def fold_after(self, is_materialized, depends, read_outside) -> None:
        """`depends(variable)`: whether it is made of what the group makes. `read_outside(variable, group)`: the
        equations outside of the group that read it, and None if it is a result of the program."""
        if not self.facts.element_results:
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
        known: dict = {}
        for variable, equation in self.after.items():
            inputs = places.input_places(equation, self.places_after[variable])
            for a, place in zip(equation.inputs, inputs, strict=True):
                if is_variable(a) and a not in self.places_after:
                    self.sides_after |= trampolined(self._cut(a, place, is_materialized, known)).equations

    def _is_folded(self, equation, depends):
        """Folds an equation that reads what is folded, and returns True; False if it cannot be."""
        sources = [k for k, a in enumerate(equation.inputs) if is_variable(a) and a in self.places_after]
        if equation.name in PRIMITIVES or not expressions.is_expressible(equation):
            return False
        (output,) = equation.outputs
        place = places.output_place(equation, self.places_after[equation.inputs[sources[0]]], sources[0])
        if place is None or size_of(output) != self.size:
            return False
        inputs = places.input_places(equation, place)
        if inputs is None or any(
            place_key(inputs[k]) != place_key(self.places_after[equation.inputs[k]]) for k in sources
        ):
            return False
        others = [a for a in variables_of(equation.inputs) if a not in self.places_after]
        if any(map(depends, others)):
            return False
        self.places_after[output] = place
        self.after[output] = equation
        return True

    def _unfold_what_costs_more(self, read_outside):
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

    def _unfold(self, variable):
        """Leaves outside the equation that makes a variable, and all that reads it."""
        outside = {variable}
        for other, equation in self.after.items():
            if not outside.isdisjoint(variables_of(equation.inputs)):
                outside.add(other)
        for other in outside:
            del self.after[other], self.places_after[other]

    def _worth_writing(self, variable, equation, readers, read_outside):
        if variable.aval.dtype.name not in expressions.WRITABLE:
            return False
        sources = [a for a in variables_of(equation.inputs) if a in self.places_after]
        written_anyway = any(set(read_outside(a, self)) - {equation} for a in sources)
        read_by_loops = all(reader is not None and is_loop(reader) for reader in readers)
        return not (written_anyway and read_by_loops)  # the loops make it of what is written anyway

    def written(self, read_outside):
        """The variables, the result or made of it, that something outside reads."""
        return [v for v in self.places_after if read_outside(v, self)]


REDUCTIONS = ("reduce_sum", "reduce_max", "reduce_min", "argmax", "argmin", "reduce_and", "reduce_or")
_MOVES = ("slice", "dynamic_slice", "pad", "concatenate", "rev")


def is_loop(equation):
    """Whether XLA makes it in a loop over elements, which it merges with the loops that make its operands."""
    return expressions.is_expressible(equation) or equation.name in REDUCTIONS or equation.name in _MOVES


def may_fold(equation):
    """Whether it is an operator, or a loop."""
    return is_loop(equation) or equation.name in PRIMITIVES


def is_materialized_unfolded(graph, variable) -> bool:
    """Whether a variable is in memory where nothing is folded into operators."""
    return _is_materialized(graph, variable, lambda _, reader: is_loop(reader), graph.materialized)


def _is_materialized(graph, variable, can_make, known):
    """`can_make(variable, reader)`: whether the reader can make the variable itself."""
    if variable not in known:
        maker, readers = graph.maker.get(variable), graph.readers.get(variable, ())
        in_any_case = maker is None or variable in graph.results or not is_loop(maker)
        known[variable] = in_any_case or any(not can_make(variable, reader) for reader in readers)
    return known[variable]


class Groups:
    """The groups of a graph, and what the rest of the program reads."""

    def __init__(self, graph: Graph, left=(), read=frozenset()):
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
        self._materialized: dict[Any, bool] = {}
        self.reads: dict[Group, list] = {}  # the variables that each group reads
        self._reading: dict[Any, dict] = {}  # the groups that read each variable
        for group in self.groups:
            group.fold_before(self.is_materialized, self._read)
            self._note_reads(group)
        self.executed = self._found_executed()
        for group in self.groups:
            group.fold_after(self.is_materialized, _dependence(self, group), self.read_outside)
            self.owner |= dict.fromkeys(group.after.values(), group)
            self._note_reads(group)
        self.executed = self._found_executed()

    def is_materialized(self, variable) -> bool:
        """Whether a variable is in memory, whatever is folded."""
        return variable in self._read or _is_materialized(self.graph, variable, self._can_make, self._materialized)

    def _can_make(self, variable, reader) -> bool:
        group = self.owner.get(reader)
        if reader.name == "gather" and reader.inputs[1] is not variable:  # XLA makes the elements that it gathers
            return True
        return is_loop(reader) if group is None or group.equation is not reader else variable in group.operands

    def _note_reads(self, group):
        """Of a group as it is now."""
        for variable in self.reads.get(group, ()):
            del self._reading[variable][group]
        self.reads[group] = self._found_reads(group)
        for variable in self.reads[group]:
            self._reading.setdefault(variable, {})[group] = None

    def _found_reads(self, group):
        read: dict = dict.fromkeys(variables_of(group.row_operands))
        folded = list(zip(group.operands, group.before, strict=True))
        for equation in group.after.values():
            folded += [(a, group.sides_after) for a in variables_of(equation.inputs) if a not in group.places_after]
        for start, inside in folded:  # the variables that the equations inside make it of

            def following(a, inside=inside):
                return reversed(variables_of(inside[a].inputs)) if a in inside else ()

            read |= dict.fromkeys(a for a in each_once(variables_of([start]), following) if a not in inside)
        return list(read)

    def _found_executed(self):
        """The groups, and the equations outside of them, that the results need."""
        executed: set = {e for e in self.graph.equations if e.eqn.effects}
        pending = [*self.graph.results, *(a for e in executed for a in variables_of(e.inputs))]
        while pending:
            maker = self.graph.maker.get(pending.pop())
            node = self.owner.get(maker, maker)
            if maker is not None and node not in executed:
                executed.add(node)
                pending += variables_of(maker.inputs) if node is maker else self.reads[node]
        return executed

    def readers_in_xla(self, variable):
        """The equations outside of groups that read a variable."""
        readers = self.graph.readers.get(variable, ())
        return [reader for reader in readers if reader in self.executed and self.owner.get(reader) is None]

    def read_outside(self, variable, group):
        """The equations and groups that read a variable, other than this group; None for the program's results."""
        readers: list = [None] if variable in self.graph.results else []
        readers += [reader for reader in self.readers_in_xla(variable) if reader not in group.inside]
        others = (other for other in self._reading.get(variable, ()) if other is not group and other in self.executed)
        return readers + [other.equation for other in others]


def _dependence(groups: Groups, group: Group):
    """`depends(variable)`: whether it is made of what a group makes, the groups being one equation each."""
    graph, position, start = groups.graph, groups.graph.position, groups.graph.position[group.equation]
    independent: set = set()  # variables, as is known from earlier questions
    # What comes before a group is not made of it, unless a group before it reads something that comes later.
    in_order = not any(
        position[other.equation] < start and any(position.get(graph.maker.get(v), -1) >= start for v in reads)
        for other, reads in groups.reads.items()
    )

    def depends(variable) -> bool:
        pending, seen, inside = [variable], set(), group.inside
        while pending:
            a = pending.pop()
            maker = graph.maker.get(a)
            if maker is None or a in seen or a in independent:
                continue
            seen.add(a)
            if in_order and position[maker] < start:
                continue
            if maker in inside or graph.has_effects_after(maker, group.equation):
                return True
            other = groups.owner.get(maker)
            pending += variables_of(maker.inputs)
            pending += () if other is None else groups.reads[other]
        independent.update(seen)
        return False

    return depends


def foldable(equation) -> bool:
    """Whether something may be folded into an operator's call."""
    return not why_not_foldable(equation)


def why_not_foldable(equation) -> str:
    if equation.params["axis_name"]:
        return "devices share its rows"
    if not all(map(is_variable, equation.inputs)):
        return "an operand is a constant"
    return why_no_kernels(equation.inputs[0])


def why_no_kernels(x) -> str:
    """Why there are no kernels for an array of this dtype and shape; "" if there are."""
    shape = x.aval.shape
    if x.aval.dtype.name not in expressions.WRITABLE:
        return f"it is of {x.aval.dtype}, and kernels are of {', '.join(expressions.WRITABLE)}"
    if len(shape) > _kernels.MAX_DIMS:
        return f"it has {len(shape)} dimensions, and kernels at most {_kernels.MAX_DIMS}"
    if 0 in shape:
        return "it has no elements"
    return "" if all(isinstance(n, int) for n in shape) else "an extent is a symbol"
