"""The bytes that a group moves, and XLA's fusions instead of it: `runtime/judge.py` says which of them is faster."""

from jax_softmax.fusion import expressions
from jax_softmax.fusion.graph import bytes_of, size_of, variables_of
from jax_softmax.fusion.groups import REDUCTIONS, is_loop
from jax_softmax.runtime import judge


def group_traffic(group, reads, written, groups, moved=()) -> judge.Traffic:
    """Of a group that reads `reads`, and writes `written` and its row results. `moved`: those among them that have
    another order of elements in the kernel, so that XLA transposes them."""
    x = group.x.aval
    ours = sum(bytes_of(a) * (1 if groups.is_materialized(a) else 2) for a in reads)
    ours += 2 * sum(map(bytes_of, moved))
    writes_of_xla = 0
    for variable in written:
        readers = groups.read_outside(variable, group)
        only_loops = all(reader is not None and is_loop(reader) for reader in readers)
        ours += bytes_of(variable) * (2 if only_loops else 1)
        merged = all(reader is not None and (is_loop(reader) or reader.name == "gather") for reader in readers)
        writes_of_xla += 0 if merged else bytes_of(variable)
    if judge.xla_makes_whole_rows(group.op, x.shape, group.axes):
        ours += sum(bytes_of(reduction.inputs[0]) for reduction in _reductions_for(group, reads, groups))
    own = [*group.equation.inputs, *group.equation.outputs]
    around = [a for a in own if not groups.is_materialized(a) and a not in group.row_results]
    unfolded, read, rows = (sum(map(bytes_of, a)) for a in (own + 2 * around, reads, group.row_results))
    before = {e for folded in group.before for e in folded.values()}
    after = {*group.after.values(), *group.sides_after.values()}
    instructions = [sum(map(expressions.instructions, equations)) for equations in (before, after)]
    return judge.traffic_of(group.op, x.shape, group.axes, unfolded, ours, read, writes_of_xla, rows, instructions)


def _reductions_for(group, reads, groups):
    """The reductions of arrays that a group reads, over its rows, that are made for the group alone: XLA's fusion would
    reduce the rows where it has them."""
    graph, elements = groups.graph, {a for a in reads if bytes_of(a) and size_of(a) == group.size}
    found: dict = {}
    pending, seen = [a for a in reads if size_of(a) < group.size], set()
    while pending:
        maker = graph.maker.get(pending.pop())
        if maker is None or maker in seen or not is_loop(maker) or groups.owner.get(maker) is not None:
            continue
        seen.add(maker)
        is_reduction = maker.name in REDUCTIONS
        if is_reduction and size_of(maker.inputs[0]) == group.size:
            if not elements.isdisjoint(expressions.elementwise_ancestors(graph, maker.inputs[:1])):
                found[maker] = None
        pending += [b for b in variables_of(maker.inputs) if size_of(b) < group.size or not is_reduction]
        if is_reduction:
            pending += expressions.elementwise_ancestors(graph, maker.inputs[:1])
    return list(found)
