"""The bytes that a group's kernel moves, and those that XLA's fusions move instead of it.

The kernel reads each of its arrays once and writes its results. Added to that are: arrays that only the kernel reads,
which XLA has to write for it; results that only XLA's loops read; sums over rows of results, which XLA would otherwise
compute on the way, as in layer norm; and arrays in another order than the kernel's dimensions, which are read and
written once more. XLA would not write such arrays, but would read its inputs several times (`_reads_of_xla`). A kernel
that takes longer to compute than to move its bytes counts as moving as many bytes as it could in that time.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jax_softmax.fusion.kernels.candidates import Group, Groups
from jax_softmax.fusion.program import expressions
from jax_softmax.fusion.program.graph import Equation, bytes_of, size_of, variables_of
from jax_softmax.fusion.program.kinds import REDUCTIONS, is_loop
from jax_softmax.primitives.records import LINEAR_MAPS
from jax_softmax.primitives.types import Var
from jax_softmax.runtime import costs, judge


class Traffic(NamedTuple):
    """Bytes that are moved."""

    unfolded: int  # by the kernel if nothing were folded into it
    ours: int  # by the kernel with what is folded into it
    xla: int  # by XLA alone

    @property
    def kernel_wins(self) -> bool:
        """Whether the kernel moves so many fewer bytes that it saves more time than a call costs."""
        return self.moves_fewer and self.ours + costs.CALL < self.xla

    @property
    def moves_fewer(self) -> bool:
        """Whether the kernel moves so many fewer bytes that it is faster, its call aside."""
        return self.ours < costs.KERNEL_WINS * self.xla


def group_traffic(
    group: Group, reads: Sequence[Var], written: Sequence[Var], groups: Groups, moved: Sequence[Var] = ()
) -> Traffic:
    """The traffic of a group that reads `reads`, and writes `written` and its row results.

    `moved`: those among them that have another order of elements in the kernel, so that XLA transposes them.
    """
    own = [*group.equation.inputs, *group.equation.outputs]
    around = [a for a in own if not groups.is_materialized(a) and a not in group.row_results]
    unfolded, read, of_rows = (sum(map(bytes_of, a)) for a in (own + 2 * around, reads, group.row_results))
    written_by_xla = sum(bytes_of(v) for v in written if not _is_made_by_readers(v, group, groups))
    before = sum(map(expressions.instructions, {e for folded in group.before for e in folded.values()}))
    after = sum(map(expressions.instructions, {*group.after.values(), *group.sides_after.values()}))
    after += costs.INSTRUCTIONS_OF_OPERATOR
    instruction_bytes, reads_of_xla = costs.INSTRUCTION * group.size, _reads_of_xla(group)
    ours = max(_bytes_of_kernel(group, reads, written, groups, moved), int(instruction_bytes * (before + after)))
    xla = max(reads_of_xla * read + written_by_xla, instruction_bytes * (reads_of_xla * before + after))
    xla += of_rows
    if _xla_makes_whole_rows(group):
        xla /= _speed_of_whole_rows(group.equation)
    return Traffic(unfolded, ours + of_rows, int(max(xla, _bytes_of_odd_rows(group.equation))))


def _bytes_of_kernel(
    group: Group, reads: Sequence[Var], written: Sequence[Var], groups: Groups, moved: Sequence[Var]
) -> int:
    """The bytes that are moved for the group's kernel, without results of rows."""
    found = sum(bytes_of(a) * (1 if groups.is_materialized(a) else 2) for a in reads) + 2 * sum(map(bytes_of, moved))
    for variable in written:
        readers = groups.read_outside(variable, group)
        only_loops = all(reader is not None and is_loop(reader) for reader in readers)
        found += bytes_of(variable) * (2 if only_loops else 1)
    if _xla_makes_whole_rows(group):
        found += sum(bytes_of(reduction.inputs[0]) for reduction in _reductions_for(group, reads, groups))
    return found


def _is_made_by_readers(variable: Var, group: Group, groups: Groups) -> bool:
    """Whether XLA makes a result of the group only where it is read."""
    readers = groups.read_outside(variable, group)
    return all(reader is not None and (is_loop(reader) or reader.name == "gather") for reader in readers)


def _reads_of_xla(group: Group) -> int:
    """How often XLA reads an operator's inputs."""
    if _xla_makes_whole_rows(group):
        return 1
    if group.facts.inputs == 2:
        return 2  # for the sum, and for the result
    return 3 if group.facts.element_results else 2  # for the maximum, for the sum, and for the result


def traffic_of_whole_rows(operator: Equation, n_bytes: int) -> int:
    """What a kernel of XLA's that moves so many bytes counts as, if a block of it has a whole row of the operator."""
    return int(max(n_bytes / _speed_of_whole_rows(operator), _bytes_of_odd_rows(operator)))


def _speed_of_whole_rows(operator: Equation) -> float:
    """The part of the memory's speed that XLA reaches by a kernel of which a block has a whole row."""
    return _by_length(costs.XLA_SPEED_OF_ROWS, operator)


def _bytes_of_odd_rows(operator: Equation) -> float:
    """The least that XLA's kernels count as if they read an operator's rows element by element."""
    x = operator.inputs[0].aval
    is_odd = _is_one_run(operator) and _row_length(operator) * x.dtype.itemsize % 16
    return _by_length(costs.ELEMENT_OF_ODD_ROWS, operator) * x.size if is_odd else 0


def _by_length(prices: Mapping[Any, float], operator: Equation) -> float:
    """That of the prices for rows of at most so many elements which is the operator's."""
    length = _row_length(operator)
    return next(price for most, price in prices.items() if length <= most)


def _row_length(operator: Equation) -> int:
    return math.prod(operator.inputs[0].aval.shape[d] for d in operator.params["axes"])


def _is_one_run(operator: Equation) -> bool:
    """Whether a row's elements are neighbours in memory."""
    shape, axes = operator.inputs[0].aval.shape, operator.params["axes"]
    last = max((d for d, n in enumerate(shape) if n > 1), default=len(shape) - 1)
    inner = sorted(d for d in axes if shape[d] > 1)
    return inner == list(range(last + 1 - len(inner), last + 1))


def _xla_makes_whole_rows(group: Group) -> bool:
    """Whether XLA computes the operator by one kernel, of which a block has a whole row."""
    has_maxima = group.op not in LINEAR_MAPS and bool(group.facts.element_results) and not group.facts.labelled
    return has_maxima and has_short_rows(group.equation)


def has_short_rows(operator: Equation) -> bool:
    """Whether a block of XLA's kernels can have a whole row of an operator."""
    return _is_one_run(operator) and _row_length(operator) <= costs.LONGEST_ROW_OF_XLA


def _reductions_for(group: Group, reads: Sequence[Var], groups: Groups) -> list[Equation]:
    """The reductions of arrays that a group reads, over its rows, that are made for the group alone: XLA's fusion would
    reduce the rows where it has them."""
    graph, elements = groups.graph, {a for a in reads if bytes_of(a) and size_of(a) == group.size}
    found: dict[Any, Any] = {}
    pending, seen = [a for a in reads if size_of(a) < group.size], set()
    while pending:
        maker = graph.maker.get(pending.pop())
        if maker is None or maker in seen or not is_loop(maker) or groups.owner.get(maker) is not None:
            continue
        seen.add(maker)
        is_reduction = maker.name in REDUCTIONS
        if is_reduction and size_of(maker.inputs[0]) == group.size:
            if not elements.isdisjoint(expressions.elementwise_ancestors(graph, variables_of(maker.inputs[:1]))):
                found[maker] = None
        pending += [b for b in variables_of(maker.inputs) if size_of(b) < group.size or not is_reduction]
        if is_reduction:
            pending += expressions.elementwise_ancestors(graph, variables_of(maker.inputs[:1]))
    return list(found)


def reason_by_traffic(traffic: Traffic, kernel_wins: bool, reason_of_view: str) -> str:
    """Why XLA computes a call; "" if its kernel does.

    `reason_of_view`: why XLA computes it even if the kernel moves fewer bytes; "" if there is no such reason.
    """
    if not judge.has_cuda_kernels(()):
        return judge.NOT_COMPILED
    moves = f"moves {byte_text(traffic.xla)}, the kernel {byte_text(traffic.ours)}"
    if not kernel_wins:
        not_fewer = NOT_FEWER if traffic.ours <= traffic.xla else ""
        return f"{moves}{LESS_THAN_CALL if traffic.moves_fewer else not_fewer}"
    return reason_of_view and f"{reason_of_view}, though it {moves}"


NOT_FEWER = f", not {100 * (1 - costs.KERNEL_WINS):.0f} % fewer"
LESS_THAN_CALL = ", which saves less time than a call costs"


def byte_text(n: float) -> str:
    """A number of bytes with a unit."""
    for unit in ("B", "KiB", "MiB"):
        if n < 1024:
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1024
    return f"{n:.2f} GiB"
