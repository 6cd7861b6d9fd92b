"""What a kernel folds and XLA makes as well, because equations outside read it: both must have the same bits.

A kernel may make the maximum and the sum of a row of x, and XLA exp(x - maximum) / sum. If their x differ by a rounding
of 16 bits, the row does not add up to 1. XLA's x does differ: it leaves out roundings to 16 bits, and has functions of
its own. So:

- an operation that is rounded is written in XLA's program with its rounding (`expressions.done`);
- a function, such as tanh, whose result is rounded to 16 bits is not made twice: XLA makes it, in memory, and the
  kernel reads it there (`to_keep`), unless XLA reads few elements of it, at labels;
- an array in memory that a kernel reads is what XLA reads as well, instead of making it again (`in_memory`).

In float32 the two may differ in the last places of a function's result.
"""

from jax_softmax.fusion import expressions
from jax_softmax.fusion.graph import variables_of
from jax_softmax.fusion.splicing import spliced


def equations(groups, calls) -> dict:
    """The equations that kernels fold and XLA makes, each with the groups that fold it."""
    found: dict = {}
    for group in calls:
        for folded in group.before:
            for equation in folded.values():
                if equation in groups.executed_outside and not expressions.is_view(equation):
                    found.setdefault(equation, set()).add(group)
    return found


def to_keep(groups, calls) -> set:
    """The variables that have to be in memory, so that they are made once."""
    twice = equations(groups, calls)
    by_functions: set = set()
    kept = set()
    for equation in sorted(twice, key=lambda e: min(group.graph.position[e] for group in twice[e])):
        if not any(group.row_results for group in twice[equation]) or not _is_made_in_full(groups, equation):
            continue
        operations = expressions.operations_of(equation)
        if any(op.is_function for op in operations) or not by_functions.isdisjoint(variables_of(equation.inputs)):
            by_functions.update(equation.outputs)
            if any(op.rounds_to for op in operations):
                kept.update(equation.outputs)
    return kept


def _is_made_in_full(groups, equation):
    """Whether XLA makes all elements of an equation's result, and not only those that are gathered."""
    pending, seen = [equation], set()
    while pending:
        maker = pending.pop()
        if maker in seen:
            continue
        seen.add(maker)
        if not expressions.prints(maker):
            return True
        for variable in maker.outputs:
            if variable in groups.graph.outputs:
                return True
            pending += [r for r in groups.readers_in_xla(variable) if r.name != "gather"]
    return False


def in_memory(groups, calls) -> set:
    """The arrays that kernels read which make numbers of rows, and that XLA makes and reads."""
    found = set()
    for group, (_, reads, _) in calls.items():
        if group.row_results:
            found |= {v for v in variables_of(reads) if v in groups.graph.maker and groups.readers_in_xla(v)}
    return found


def with_roundings(equation) -> list:
    """The equations that make the same with each rounding written out."""
    if expressions.is_free(equation):
        return [equation]
    expression, variables = expressions.of_equation(equation)

    def function(*arrays):
        return expression.value({f"x{k}": a for k, a in enumerate(arrays)})

    return spliced(function, variables, equation.outputs, equation)
