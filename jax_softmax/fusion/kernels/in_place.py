"""Which operand's memory a kernel's result may have: that of a product that nothing reads after the kernel.

A training step reads its logits for the gradient, and also for the loss at the labels or for the accuracy. Those are
few numbers, and are made first. Barriers in the program say so (`rewriting.py`), as XLA would otherwise merge these
loops with later ones, and keep the logits for them.
"""

from collections.abc import Sequence

from jax_softmax.fusion.kernels.calls import KernelCall
from jax_softmax.fusion.kernels.candidates import Group, Groups
from jax_softmax.fusion.program.graph import Equation, Graph, bytes_of, each_once, variables_of
from jax_softmax.fusion.program.kinds import is_loop, kind_of
from jax_softmax.fusion.program.walk import through
from jax_softmax.primitives.types import Atom, Var

_MOST_BYTES = 1 / 8  # of the array's, of what is made of it before; chosen: numbers of rows are fewer, rows are not


def with_overwritten(call: KernelCall, reads: Sequence[Atom], group: Group, groups: Groups) -> KernelCall:
    """The call with the first of the operator's own operands in whose memory its first result can be, if one can.
    `groups.before` has what the program then makes before the call."""
    kernel = call.kernel
    if not kernel.dtypes or kernel.dtypes[0] != kernel.dtype:
        return call
    if not all(result.arrangement.is_view for result in call.results if result.index == 0):
        return call
    for k, a in enumerate(reads[: group.facts.inputs]):
        if not call.operands[k].is_view or reads.count(a) > 1:
            continue
        before: list[Var] | None = [] if a is group.x and group.equation.params.get("in_place") else None
        if before is None and _is_of_product(groups.graph, a):
            before = _made_before(a, group, groups)
        if before is not None:
            groups.before[group] = before
            return call._replace(kernel=kernel._replace(in_place=k))
    return call


def _is_of_product(graph: Graph, a: Atom) -> bool:
    """Whether an array is the result of a product, which nothing reads in another shape."""

    def is_only_reader(e: Equation) -> bool:
        return e.name in ("reshape", "squeeze") and graph.readers[e.inputs[0]] == [e]

    maker = graph.maker_of(through(graph, a, is_only_reader))
    return maker is not None and kind_of(maker) == "product"


def _made_before(a: Atom, group: Group, groups: Groups) -> list[Var] | None:
    """What loops outside of the group make of an array, if it is small and made of nothing that the group makes; else
    None."""
    depends, array = groups.dependence(group), a

    def is_end(reader: Equation | None) -> bool:
        """Whether no other equation reads elements of the array in the place of what this one makes of it."""
        return reader is None or reader.name == "gather" or kind_of(reader) == "reduction" or not is_loop(reader)

    def following(reader: Equation | None) -> list[Equation | None]:
        return [] if reader is None or is_end(reader) else groups.read_outside(reader.outputs[0], group)

    found: list[Var] = []
    for reader in each_once(groups.read_outside(array, group), following):
        if reader is None or groups.owner.get(reader) is not None or any(map(depends, variables_of(reader.inputs))):
            return None
        if is_end(reader):
            if is_loop(reader) or reader.name == "gather":
                found += reader.outputs
            else:
                return None
    return found if sum(map(bytes_of, found)) <= _MOST_BYTES * bytes_of(array) else None
