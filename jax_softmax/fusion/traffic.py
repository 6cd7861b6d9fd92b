"""Who moves fewer bytes: a kernel with what is folded into it, or XLA's fusions around the same in jax.numpy.

The model. A kernel reads each of its arrays once and writes its results. What it needs and nobody else does is written
by XLA before, and what only loops of XLA read after it is read by them; so are numbers of rows that XLA would sum up
from the same arrays in the same kernel, as layer norm does. What is in another order than the kernel's dimensions is
read and written once more. XLA makes no such array, but reads its inputs several times:

- those of a linear map twice, for the sums of the rows and for the results;
- those of sums of rows twice;
- those of the other operators three times, but of softmax and log_softmax once where a row is contiguous and fits in a
  block.

Its kernels for whole rows are a little below the memory's speed (measured on an H200, benchmarks/results/). What takes
longer to compute than to move counts as the bytes that could be moved meanwhile.
"""

import math
from typing import NamedTuple

from jax_softmax import _kernels
from jax_softmax.fusion import expressions
from jax_softmax.fusion.graph import bytes_of, size_of, variables_of
from jax_softmax.fusion.groups import is_loop, is_reduction

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


def traffic_of(group, reads, written, groups, moved=(), alone=False) -> Traffic:
    """Of a group that reads and writes these variables of elements.

    `moved`: variables that XLA puts into another order. `alone`: nothing can be folded into the kernel.
    """
    ours = sum(bytes_of(a) * (1 if groups.stands(a) else 2) for a in reads) + 2 * sum(map(bytes_of, moved))
    xla = _reads_of_xla(group) * sum(map(bytes_of, reads))
    xla_writes = 0
    for variable in written:
        readers = groups.read_outside(variable, group)
        only_loops = all(reader is not None and is_loop(reader) for reader in readers)
        ours += bytes_of(variable) * (2 if only_loops else 1)
        merged = all(reader is not None and (is_loop(reader) or reader.name == "gather") for reader in readers)
        xla_writes += 0 if merged else bytes_of(variable)
    if _one_kernel_of_xla(group):
        ours += sum(bytes_of(sum_.inputs[0]) for sum_ in _sums_of_the_same(group, reads, groups))
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
    return Traffic(before, before if alone else ours + rows, int((xla + rows) / _speed_of_xla(group)))


def _sums_of_the_same(group, reads, groups):
    """The reductions over a group's rows, of arrays that it reads, whose results nothing but the group reads."""
    graph, whole = groups.graph, {a for a in reads if bytes_of(a) and size_of(a) == group.size}
    found: dict = {}
    pending, seen = [a for a in reads if size_of(a) < group.size], set()
    while pending:
        a = pending.pop()
        maker = graph.maker.get(a)
        if maker is None or maker in seen or not is_loop(maker) or groups.owner.get(maker) is not None:
            continue
        seen.add(maker)
        if is_reduction(maker) and size_of(maker.inputs[0]) == group.size:
            if not whole.isdisjoint(_loops_read(graph, maker.inputs[0])):
                found[maker] = None
        pending += [b for b in variables_of(maker.inputs) if size_of(b) < group.size or not is_reduction(maker)]
        if is_reduction(maker):
            pending += _loops_read(graph, maker.inputs[0])
    return list(found)


def _loops_read(graph, a):
    """All that a variable is made of by loops of its size."""
    pending, seen = [a], {a}
    while pending:
        maker = graph.maker.get(pending.pop())
        if maker is None or not expressions.prints(maker):
            continue
        new = [b for b in variables_of(maker.inputs) if b not in seen]
        seen.update(new)
        pending += new
    return seen


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
    return 1 if _one_kernel_of_xla(group) else 3


def _one_kernel_of_xla(group):
    facts = group.facts
    return facts.inputs == 1 and facts.element_results and not facts.labelled and _one_block_has_a_row(group)


def _speed_of_xla(group):
    if not _one_kernel_of_xla(group):
        return 1.0
    return next(speed for columns, speed in _SPEED.items() if _columns(group) <= columns)


# Picoseconds for a score: of attention's forward kernel, and of both backward ones, with 64 features (measured on an
# H100, benchmarks/results/attention.md). Bytes that memory moves in a picosecond (between an H100's and an H200's). How
# many blocks run at once.
_FORWARD, _BACKWARD, _FEATURES, _BYTES_OF_PICOSECOND, _BLOCKS = 1.2, 3.4, 64, 3.6, 264


def attention_wins(attention, extents: dict[str, int], has_gradients: bool, moved: int) -> bool:
    """Whether attention's kernels take less time than the program that has its weights in memory, which moves so many
    bytes for each score."""
    batch = math.prod(extents[c] for c in attention.letters.batch)
    features = max(0.7, (extents["d"] + extents["e"]) / (2 * _FEATURES))
    times = {"forward": _FORWARD} | (dict.fromkeys(("keys", "queries"), _BACKWARD / 2) if has_gradients else {})
    ours = 0.0
    for kernel, time in times.items():
        tiling = _kernels.attention_tiling(kernel, extents["d"], extents["e"])
        stay, pass_by = (extents[c] for c in ("ji" if kernel == "keys" else "ij"))
        blocks, steps = -(-stay // tiling["rows"]), -(-pass_by // tiling["step"])
        scores = batch * blocks * tiling["rows"] * steps * tiling["step"]
        ours += time * features * scores * max(1, _BLOCKS / (batch * blocks))
    theirs = batch * extents["i"] * extents["j"] * moved / _BYTES_OF_PICOSECOND
    theirs *= 2 if extents["j"] % 8 else 1  # rows that no product reads by whole packs
    return ours * attention.visible_part(**extents) <= theirs


def words(n: float) -> str:
    """Bytes for people."""
    for unit in ("B", "KiB", "MiB"):
        if n < 1024:
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1024
    return f"{n:.2f} GiB"
