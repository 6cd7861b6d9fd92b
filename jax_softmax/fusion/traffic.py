"""What a group, and XLA's fusions in its place, read and write: `runtime/judge.py` says who is faster."""

from jax_softmax.fusion import expressions
from jax_softmax.fusion.graph import bytes_of, size_of, variables_of
from jax_softmax.fusion.groups import is_loop, is_reduction
from jax_softmax.runtime import judge


def traffic_of(group, reads, written, groups, moved=(), alone=False) -> judge.Traffic:
    """Of a group that reads and writes these variables of elements.

    `moved`: variables that XLA puts into another order. `alone`: nothing can be folded into the kernel.
    """
    x = group.x.aval
    ours = sum(bytes_of(a) * (1 if groups.stands(a) else 2) for a in reads) + 2 * sum(map(bytes_of, moved))
    writes_of_xla = 0
    for variable in written:
        readers = groups.read_outside(variable, group)
        only_loops = all(reader is not None and is_loop(reader) for reader in readers)
        ours += bytes_of(variable) * (2 if only_loops else 1)
        merged = all(reader is not None and (is_loop(reader) or reader.name == "gather") for reader in readers)
        writes_of_xla += 0 if merged else bytes_of(variable)
    if judge.xla_makes_whole_rows(group.op, x.shape, group.axes):
        ours += sum(bytes_of(sum_.inputs[0]) for sum_ in _sums_of_the_same(group, reads, groups))
    own = [*group.equation.inputs, *group.equation.outputs]
    around = [a for a in own if not groups.stands(a) and a not in group.row_results]
    unfolded, read, rows = (sum(map(bytes_of, a)) for a in (own + 2 * around, reads, group.row_results))
    first = {e for folded in group.before for e in folded.values()}
    after = {*group.after.values(), *group.sides_after.values()}
    instructions = [sum(map(expressions.instructions, equations)) for equations in (first, after)]
    traffic = judge.traffic_of(group.op, x.shape, group.axes, unfolded, ours, read, writes_of_xla, rows, instructions)
    return traffic._replace(ours=unfolded) if alone else traffic


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
            if not whole.isdisjoint(expressions.made_of(graph, maker.inputs[:1])):
                found[maker] = None
        pending += [b for b in variables_of(maker.inputs) if size_of(b) < group.size or not is_reduction(maker)]
        if is_reduction(maker):
            pending += expressions.made_of(graph, maker.inputs[:1])
    return list(found)
