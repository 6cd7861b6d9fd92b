"""Who moves fewer bytes: a kernel with what is folded into it, or XLA's fusions around the same in jax.numpy.

The model. A kernel reads each of its arrays once and writes its results. What it needs and nobody else does is written
by XLA before, and what only loops of XLA read after it is read by them. XLA makes no such array, but reads its inputs
several times:

- those of a linear map twice, for the sums of the rows and for the results;
- those of sums of rows twice;
- those of the other operators three times, but once where a row is contiguous and fits in a block, and twice there if
  elements are summed beside the softmax.

Its kernels for whole rows are a little below the memory's speed (measured on an H200, benchmarks/results/). What takes
longer to compute than to move counts as the bytes that could be moved meanwhile.
"""

import math
from typing import NamedTuple

from jax_softmax.fusion import expressions
from jax_softmax.fusion.graph import bytes_of
from jax_softmax.fusion.groups import is_loop
from jax_softmax.primitives.operators import WITH_DISTANCES

_MOST_COLUMNS = 8192  # of a row that a block of XLA has in registers
_SPEED = {256: 1.0, 2048: 0.91, _MOST_COLUMNS: 0.81}  # of XLA's kernels for rows up to a length, of the memory's
_TIE = 0.95
# Bytes that an H200 moves while it does an instruction, and instructions of an operator for an element.
_BYTES_OF_INSTRUCTION, _OPERATOR = 0.15, 8


class Traffic(NamedTuple):
    """Bytes."""

    before: int  # by the kernel without what is folded
    ours: int
    xla: int

    @property
    def kernel_wins(self) -> bool:
        return self.ours < _TIE * self.xla


def traffic_of(group, reads, written, groups) -> Traffic:
    """Of a group that reads and writes these variables of elements."""
    ours = sum(bytes_of(a) * (1 if groups.stands(a) else 2) for a in reads)
    xla = _reads_of_xla(group) * sum(map(bytes_of, reads))
    xla_writes = 0
    for variable in written:
        readers = groups.read_outside(variable, group)
        only_loops = all(reader is not None and is_loop(reader) for reader in readers)
        ours += bytes_of(variable) * (2 if only_loops else 1)
        xla_writes += 0 if only_loops else bytes_of(variable)
    rows = sum(map(bytes_of, group.row_results))
    own = [*group.equation.inputs, *group.equation.outputs]
    around = sum(2 * bytes_of(a) for a in own if not groups.stands(a) and a not in group.row_results)
    before = sum(map(bytes_of, own)) + around
    first = {e for folded in group.before for e in folded.values()}
    after = {*group.after.values(), *group.sides_after.values()}
    first, after = (sum(map(expressions.instructions, equations)) for equations in (first, after))
    of_instructions = _BYTES_OF_INSTRUCTION * group.size
    ours = max(ours, int(of_instructions * (first + after + _OPERATOR)))
    xla = max(xla + xla_writes, of_instructions * (_reads_of_xla(group) * first + after + _OPERATOR))
    return Traffic(before, ours + rows, int((xla + rows) / _speed_of_xla(group)))


def _columns(group):
    return math.prod(group.x.aval.shape[d] for d in group.axes)


def _one_block_has_a_row(group):
    shape = group.x.aval.shape
    last = max((d for d, n in enumerate(shape) if n > 1), default=len(shape) - 1)
    inner = sorted(d for d in group.axes if shape[d] > 1)
    return inner == list(range(last + 1 - len(inner), last + 1)) and _columns(group) <= _MOST_COLUMNS


def _reads_of_xla(group):
    if group.facts.inputs == 2 or not group.facts.element_results:
        return 2
    if not _one_block_has_a_row(group):
        return 3
    return 2 if group.equation.name in WITH_DISTANCES else 1


def _speed_of_xla(group):
    if group.facts.inputs == 2 or not group.facts.element_results or not _one_block_has_a_row(group):
        return 1.0
    return next(speed for columns, speed in _SPEED.items() if _columns(group) <= columns)


def words(n: float) -> str:
    """Bytes for people."""
    for unit in ("B", "KiB", "MiB"):
        if n < 1024:
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1024
    return f"{n:.2f} GiB"
