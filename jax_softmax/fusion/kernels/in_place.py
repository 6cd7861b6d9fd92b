"""Which operand's memory a kernel's result has: that of a product that nothing reads after the kernel, or of an operand
that the operator says may be overwritten.

A training step reads its logits for the gradient, and also for the loss at the labels or for the accuracy. What is
small of that is made first. Barriers in the program say so (`rewriting.py`), as XLA would otherwise merge these loops
with later ones, and keep the logits for them.
"""

from collections.abc import Sequence

from jax_softmax.fusion.kernels.calls import KernelCall
from jax_softmax.fusion.kernels.candidates import Group, Groups
from jax_softmax.fusion.program.graph import Equation, Graph, bytes_of, each_once, variables_of
from jax_softmax.fusion.program.kinds import is_loop, kind_of
from jax_softmax.fusion.program.walk import through
from jax_softmax.primitives.types import Atom, Var

_SMALL = 1 / 8  # of an array's bytes, all together; chosen: a few numbers of each row are small


def in_place_if_possible(call: KernelCall, reads: Sequence[Atom], group: Group, groups: Groups) -> KernelCall:
    """The call, whose first result has the memory of the first of the operator's own operands that can be overwritten.

    Notes in `groups.made_first` what the program has to make before it.
    """
    kernel = call.kernel
    if not kernel.dtypes or kernel.dtypes[0] != kernel.dtype:
        return call
    if not all(result.arrangement.is_view for result in call.results if result.index == 0):
        return call
    for k, a in enumerate(reads[: group.facts.inputs]):
        if not call.operands[k].is_view or reads.count(a) > 1:
            continue
        may_be = a is group.x and group.equation.params.get("in_place")
        made_first = [] if may_be else _made_first(a, group, groups) if _is_of_product(groups.graph, a) else None
        if made_first is not None:
            groups.made_first[group] = made_first
            return call._replace(kernel=kernel._replace(in_place=k))
    return call


def _is_of_product(graph: Graph, a: Atom) -> bool:
    """Whether an array is the result of a product, or a reshape of it that alone reads it."""

    def is_only_reader(e: Equation) -> bool:
        return e.name in ("reshape", "squeeze") and graph.readers[e.inputs[0]] == [e]

    maker = graph.maker_of(through(graph, a, is_only_reader))
    return maker is not None and kind_of(maker) == "product"


def _made_first(a: Atom, group: Group, groups: Groups) -> list[Var] | None:
    """What the program makes of an array outside of the group, if that is small, and made of nothing that the group
    makes; else None."""
    readers, most = groups.read_outside(a, group), _SMALL * bytes_of(a)
    if not readers:
        return []
    if any(e.eqn.effects for e in groups.graph.equations):  # their order would be another constraint
        return None
    depends, found = groups.dependence(group), list[Var]()

    def following(reader: Equation | None) -> list[Equation | None]:
        is_followed = reader is not None and is_loop(reader) and not is_small(reader)
        return groups.read_outside(reader.outputs[0], group) if reader is not None and is_followed else []

    def is_small(reader: Equation) -> bool:
        return sum(map(bytes_of, reader.outputs)) <= most

    for reader in each_once(readers, following):
        if reader is None or groups.owner.get(reader) is not None or any(map(depends, variables_of(reader.inputs))):
            return None
        if is_small(reader):
            found += reader.outputs
        elif not is_loop(reader):
            return None
    return found if sum(map(bytes_of, found)) <= most else None
