"""What one kernel does of a program: an operator, and the equations before and after it that are folded into it.

The equations before an operand are cut where fewest bytes have to be read, those after a result are followed as far as
each element is made of the one at its place. A group is then a call of a kernel: what it reads, its expressions, and
what it writes.
"""

import dataclasses
import heapq
from collections.abc import Set
from typing import Any

from jax_softmax import _kernels
from jax_softmax.fusion import expressions, places
from jax_softmax.fusion.expressions import is_variable
from jax_softmax.fusion.graph import Equation, Graph, bytes_of, result_of, size_of, variables_of
from jax_softmax.fusion.places import key_of
from jax_softmax.primitives.operators import OPERATORS, PRIMITIVES

# What an equation costs that is done for each element in the kernel, in bytes an element that memory could move
# meanwhile: little, but not nothing, so that what many rows share is made once if it is small.
_SHORT, _LONG = 0.002, 0.2
_MOST_EQUATIONS = 100


@dataclasses.dataclass
class _Cut:
    """The cheapest way to have a value in a kernel."""

    costs: dict  # bytes, by what costs them: what is read by several counts once
    equations: dict  # in the kernel, by the variable that each makes

    @property
    def cost(self):
        return sum(self.costs.values())


class Group:
    """An operator of a graph and what is folded into it."""

    def __init__(self, graph: Graph, equation: Equation):
        self.graph, self.equation = graph, equation
        self.op = equation.name
        self.facts = OPERATORS[self.op]
        self.axes = tuple(equation.params["axes"])
        self.x = equation.inputs[0]
        self.place = places.whole(self.x.aval.shape)  # of the operator's operands and results
        self.before: list[dict[Any, Equation]] = []  # of each operand, by the variable made
        self.after: dict[Any, Equation] = {}
        self._kept: Set = frozenset()
        self.places_after = {}  # of the operator's result, and of those folded after it
        self.sides_after: dict[Any, Equation] = {}  # of which other operands of these are made

    @property
    def operands(self):
        return self.equation.inputs[: self.facts.inputs]

    @property
    def of_rows(self):
        """Numbers and labels of rows, and the mask, which a kernel reads as they are."""
        return self.equation.inputs[self.facts.inputs :]

    @property
    def result(self):
        return self.equation.outputs[0] if self.facts.element_results else None

    @property
    def row_results(self):
        return self.equation.outputs[int(self.facts.element_results) :]

    @property
    def size(self):
        return size_of(self.x)

    @property
    def inside(self):
        return {self.equation, *self.after.values()}

    # ---- before

    def fold_before(self, stands, kept=frozenset()) -> None:
        """`stands(variable)`: whether it is in memory whatever is folded. `kept`: those that are read there."""
        self.before = []
        self._kept = kept
        for operand in self.operands:
            self.before.append(result_of(self._cut(operand, self.place, stands, {})).equations)

    def _cut(self, a, place, stands, known):
        if not is_variable(a):
            return _Cut({}, {})
        key = a, key_of(place)
        if key in known:
            return known[key]
        read = _Cut({a: bytes_of(a) * (1 if stands(a) else 2)}, {})
        known[key] = read
        maker = self.graph.maker.get(a)
        if maker is None or maker is self.equation or maker in self.inside or not expressions.prints(maker):
            return read
        if a in self._kept or self._is_view_of_another(maker):
            return read
        inputs = places.inputs_of(maker, place)
        if inputs is None:
            return read
        free = expressions.is_view(maker) or maker.name == "iota"
        own = 0 if free else _LONG if expressions.is_long(maker) else _SHORT
        made = _Cut({maker: own * self.size}, {})
        for operand, its_place in zip(maker.inputs, inputs, strict=True):
            cut = yield self._cut(operand, its_place, stands, known)
            made.costs |= cut.costs
            made.equations |= cut.equations
        made.equations[a] = maker
        if not stands(a):  # XLA, too, reads what it is made of
            read.costs |= {b: cost for b, cost in made.costs.items() if not isinstance(b, Equation)}
        if made.cost <= read.cost and len(made.equations) <= _MOST_EQUATIONS:
            known[key] = made
        return known[key]

    def _is_view_of_another(self, equation):
        """Whether another operator's kernel can write its result as this view."""
        if not expressions.is_view(equation) or not is_variable(equation.inputs[0]):
            return False
        source = self.graph.maker.get(equation.inputs[0])
        return source is not None and source.name in PRIMITIVES and source.outputs[0] is equation.inputs[0]

    def cost_of_reading(self, variable, stands) -> float:
        """The bytes of reading what a variable is made of."""
        return result_of(self._cut(variable, self.place, stands, {})).cost

    # ---- after

    def fold_after(self, stands, depends, read_outside) -> None:
        """`depends(variable)`: whether it is made of what the group makes. `read_outside(variable, group)`: the
        equations outside that read it, and None if it is a result of the program."""
        if not self.facts.element_results:
            return
        self.places_after = {self.result: self.place}
        if self.facts.quantizes:
            return  # the dtype that is written says what is computed
        position, readers = self.graph.position, self.graph.readers
        waiting = {position[reader] for reader in readers.get(self.result, ())}
        pending = sorted(waiting)  # a heap of what reads what is folded
        while pending and len(self.after) < _MOST_EQUATIONS:
            equation = self.graph.equations[heapq.heappop(pending)]
            if self._try_after(equation, depends):
                for reader in readers.get(equation.outputs[0], ()):
                    if position[reader] not in waiting:
                        waiting.add(position[reader])
                        heapq.heappush(pending, position[reader])
        self._take_back(read_outside)
        known: dict = {}
        for variable, equation in self.after.items():
            inputs = places.inputs_of(equation, self.places_after[variable])
            for a, place in zip(equation.inputs, inputs, strict=True):
                if is_variable(a) and a not in self.places_after:
                    self.sides_after |= result_of(self._cut(a, place, stands, known)).equations

    def _try_after(self, equation, depends):
        """Folds an equation that reads what is folded, if it can be. Returns whether it is."""
        sources = [k for k, a in enumerate(equation.inputs) if is_variable(a) and a in self.places_after]
        if equation.name in PRIMITIVES or not expressions.prints(equation):
            return False
        (output,) = equation.outputs
        place = places.output_of(equation, self.places_after[equation.inputs[sources[0]]], sources[0])
        if place is None or size_of(output) != self.size:
            return False
        inputs = places.inputs_of(equation, place)
        if inputs is None or any(key_of(inputs[k]) != key_of(self.places_after[equation.inputs[k]]) for k in sources):
            return False
        others = [a for a in variables_of(equation.inputs) if a not in self.places_after]
        if any(map(depends, others)):
            return False
        self.places_after[output] = place
        self.after[output] = equation
        return True

    def _take_back(self, read_outside):
        """Leaves outside what would make the kernel write more."""
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
                    self._leave(variable)
                    changed = True

    def _leave(self, variable):
        """Leaves a variable outside, and all that is made of it."""
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
        by_loops = all(reader is not None and is_loop(reader) for reader in readers)
        # XLA makes it where it reads it, of what is written anyway.
        return not (written_anyway and by_loops)

    def written(self, read_outside):
        """The variables of elements that something outside reads."""
        return [v for v in self.places_after if read_outside(v, self)]


_REDUCTIONS = ("reduce_sum", "reduce_max", "reduce_min", "argmax", "argmin", "reduce_and", "reduce_or")
_MOVES = ("slice", "dynamic_slice", "pad", "concatenate", "rev")


def is_loop(equation):
    """Whether XLA makes it in a loop over elements, which it merges with those of operands."""
    return expressions.prints(equation) or equation.name in _REDUCTIONS or equation.name in _MOVES


def is_reduction(equation):
    return equation.name in _REDUCTIONS


def may_fold(equation):
    """Whether it is an operator, or a loop that may be folded into one."""
    return is_loop(equation) or equation.name in PRIMITIVES


def stands_unfolded(graph, variable) -> bool:
    """Whether a variable is in memory where nothing is folded into operators."""
    return _stands(graph, variable, lambda _, reader: is_loop(reader), graph.standing)


def _stands(graph, variable, may_fold, known):
    if variable not in known:
        maker, readers = graph.maker.get(variable), graph.readers.get(variable, ())
        in_any_case = maker is None or variable in graph.results or not is_loop(maker)
        known[variable] = in_any_case or any(not may_fold(variable, reader) for reader in readers)
    return known[variable]


class Groups:
    """The groups of a graph, and what the rest of the program reads."""

    def __init__(self, graph: Graph, left=(), kept=frozenset()):
        """`left`: operators that are left as they are. `kept`: variables that are in memory, whatever is folded."""
        self.graph = graph
        self._kept = kept
        self.groups: list[Group] = []
        self.owner: dict[Equation, Group] = {}
        for equation in graph.equations:
            if equation.name in PRIMITIVES and equation not in left and foldable(equation):
                group = Group(graph, equation)
                self.groups.append(group)
                self.owner[equation] = group
        self._standing: dict[Any, bool] = {}  # whether a variable stands
        self._reads: dict[Group, list] = {}  # of a group, the variables that it reads
        self._reading: dict[Any, dict] = {}  # of a variable, the groups that read it
        for group in self.groups:
            group.fold_before(self.stands, self._kept)
            self._note_reads(group)
        self._executed = self.executed()
        for group in self.groups:
            group.fold_after(self.stands, _Dependence(self, group), self.read_outside)
            self.owner |= dict.fromkeys(group.after.values(), group)
            self._note_reads(group)
        self._executed = self.executed()

    def stands(self, variable) -> bool:
        """Whether a variable is in memory, whatever is folded."""
        return variable in self._kept or _stands(self.graph, variable, self._may_fold, self._standing)

    def _may_fold(self, variable, reader) -> bool:
        """Whether a variable need not be in memory for an equation that reads it."""
        group = self.owner.get(reader)
        if reader.name == "gather" and reader.inputs[1] is not variable:  # XLA makes what it gathers
            return True
        return is_loop(reader) if group is None or group.equation is not reader else variable in group.operands

    def reads(self, group):
        """The variables that a group reads."""
        return self._reads[group]

    def _note_reads(self, group):
        """Of a group as it is now."""
        for variable in self._reads.get(group, ()):
            del self._reading[variable][group]
        self._reads[group] = self._found_reads(group)
        for variable in self._reads[group]:
            self._reading.setdefault(variable, {})[group] = None

    def _found_reads(self, group):
        read: dict = dict.fromkeys(variables_of(group.of_rows))
        for operand, before in zip(group.operands, group.before, strict=True):
            self._leaves(operand, before, read)
        for equation in group.after.values():
            for a in variables_of(equation.inputs):
                if a not in group.places_after:
                    self._leaves(a, group.sides_after, read)
        return list(read)

    def _leaves(self, a, inside, read):
        pending, seen = [a], set()
        while pending:
            a = pending.pop()
            if not is_variable(a) or a in seen:
                continue
            seen.add(a)
            if a in inside:
                pending += reversed(inside[a].inputs)
            else:
                read[a] = None

    def executed(self):
        """The equations outside of groups that the results need, and the groups."""
        done: dict = {}
        pending = [*self.graph.results]
        pending += [a for e in self.graph.equations if e.eqn.effects for a in variables_of(e.inputs)]
        executed = {e for e in self.graph.equations if e.eqn.effects}
        while pending:
            variable = pending.pop()
            if variable in done:
                continue
            done[variable] = None
            maker = self.graph.maker.get(variable)
            if maker is None:
                continue
            group = self.owner.get(maker)
            node = maker if group is None else group
            if node in executed:
                continue
            executed.add(node)
            pending += variables_of(maker.inputs) if group is None else self.reads(group)
        return executed

    @property
    def executed_outside(self):
        """The equations and groups that the results need, as they were found last."""
        return self._executed

    def readers_in_xla(self, variable):
        """The equations outside of groups that read a variable."""
        readers = self.graph.readers.get(variable, ())
        return [reader for reader in readers if reader in self._executed and self.owner.get(reader) is None]

    def read_outside(self, variable, group):
        """The equations and groups that read a variable, other than this group; None for the program's results."""
        readers: list = [None] if variable in self.graph.results else []
        for reader in self.graph.readers.get(variable, ()):
            if self.owner.get(reader) is None and reader in self._executed and reader not in group.inside:
                readers.append(reader)
        for other in self._reading.get(variable, ()):
            if other is not group and other in self._executed:
                readers.append(other.equation)
        return readers

    def latest_read(self, group) -> int:
        """The last equation that makes something that a group reads, by its position."""
        makers = (self.graph.maker.get(variable) for variable in self.reads(group))
        return max((self.graph.position[maker] for maker in makers if maker is not None), default=-1)


class _Dependence:
    """Whether a variable is made of what a group makes, the groups being one equation each."""

    def __init__(self, groups: Groups, group: Group):
        self._groups, self._group = groups, group
        self._independent: set = set()  # variables, as is known from earlier questions
        position = groups.graph.position
        self._start = position[group.equation]
        # What stands before a group is not made of it, unless a group before it reads something that comes later.
        self._in_order = not any(
            position[other.equation] < self._start <= groups.latest_read(other) for other in groups.groups
        )

    def __call__(self, variable) -> bool:
        graph, groups, group = self._groups.graph, self._groups, self._group
        pending, seen, inside = [variable], set(), group.inside
        while pending:
            a = pending.pop()
            maker = graph.maker.get(a)
            if maker is None or a in seen or a in self._independent:
                continue
            seen.add(a)
            if self._in_order and graph.position[maker] < self._start:
                continue
            if maker in inside or graph.has_effects_after(maker, group.equation):
                return True
            other = groups.owner.get(maker)
            pending += variables_of(maker.inputs)
            pending += () if other is None else groups.reads(other)
        self._independent |= seen
        return False


def foldable(equation) -> bool:
    """Whether an operator's call is one that kernels cover, with whole rows and no literals."""
    return (
        all(map(is_variable, equation.inputs)) and not equation.params["axis_name"] and has_kernels(equation.inputs[0])
    )


def has_kernels(x) -> bool:
    """Whether there are kernels for an array of this dtype and shape, which is known."""
    shape = x.aval.shape
    if len(shape) > _kernels.MAX_DIMS or 0 in shape or not all(isinstance(n, int) for n in shape):
        return False
    return x.aval.dtype.name in expressions.WRITABLE
