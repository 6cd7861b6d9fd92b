"""A group as a call of a kernel, whose operands and results are arrays of the program in another arrangement."""

from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import mlir

from jax_softmax import _kernels
from jax_softmax.fusion.kernels.candidates import Group
from jax_softmax.fusion.kernels.fused_kernel import FusedKernel, SideOperand, kernel_p
from jax_softmax.fusion.program import expressions
from jax_softmax.fusion.program.expressions import Expression, Expressions, NotFolded, SideVariable
from jax_softmax.fusion.program.graph import bytes_of, each_once, is_variable, variables_of
from jax_softmax.fusion.program.places import Factor, Place, Placed, count_of, factors_of, place_key
from jax_softmax.fusion.program.walk import Inside
from jax_softmax.primitives.records import apply
from jax_softmax.primitives.types import Atom, Var


class Arrangement(NamedTuple):
    """How an array of the program becomes an operand of a kernel, or a kernel's result an array of the program."""

    extents: tuple[int, ...]  # the array's dimensions, split into factors
    order: tuple[int, ...]  # in which the kernel has these factors
    shape: tuple[int, ...]  # of the kernel's operand: extents in that order, and 1 where it broadcasts

    @property
    def is_view(self) -> bool:
        """Whether all elements stay where they are in memory."""
        return self.order == tuple(range(len(self.order)))

    def operand(self, a: jax.Array) -> jax.Array:
        if not self.is_view:
            a = jnp.transpose(jnp.reshape(a, self.extents), self.order)
        return jnp.reshape(a, self.shape)

    def result(self, a: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        if not self.is_view:
            back = [self.order.index(k) for k in range(len(self.order))]
            a = jnp.transpose(jnp.reshape(a, [self.extents[k] for k in self.order]), back)
        return jnp.reshape(a, shape)


class KernelResult(NamedTuple):
    """A variable of the program that a kernel writes."""

    index: int  # type: ignore[assignment]  # it hides tuple.index; among the kernel's results
    arrangement: Arrangement
    shape: tuple[int, ...]


class KernelCall(NamedTuple):
    kernel: FusedKernel
    operands: tuple[Arrangement, ...]
    results: tuple[KernelResult, ...]  # of elements, then of rows

    def moved(self, reads: list[Var], made: list[Var]) -> list[Var]:
        """The variables, of those that it reads and makes, whose elements XLA has to move by a transpose."""
        arrangements = [*self.operands, *(result.arrangement for result in self.results)]
        return [v for v, how in zip([*reads, *made], arrangements, strict=True) if not how.is_view]

    def __call__(self, *arrays: jax.Array) -> list[jax.Array]:
        operands = (how.operand(a) for how, a in zip(self.operands, arrays, strict=True))
        found = kernel_p.bind(*operands, kernel=self.kernel)
        return [result.arrangement.result(found[result.index], result.shape) for result in self.results]


def kernel_call_of(group: Group, written: list[Var]) -> tuple[KernelCall, list[Any], list[Var]]:
    """The call by which a group writes these variables and its row results; what it reads; and what it writes.

    Raises:
      NotFolded: it cannot be one.
    """
    own = _own_operands(group)
    names: dict[Placed, str] = {(a, place_key(place)): f"x{k}" for k, (a, place) in reversed([*enumerate(own)])}
    read = Expressions(names, parts=group.parts)
    load = [read.make(a, group.place, before) for a, before in zip(group.operands, group.before, strict=True)]
    stored = _stored(group, written, read.sides)
    pairs = list(dict.fromkeys(stored))  # what several variables are is written once
    arrays = [(side.variable, side.place) for side in read.sides if side.factor is None]
    factors = _factors_in_memory_order(group, [*own, *arrays, *((v, group.places_after[v]) for v in written)])
    if len(factors) > (most := _kernels.MAX_DIMS):
        raise NotFolded(f"together its operands have {len(factors)} dimensions, and kernels at most {most}")
    for a, _ in arrays:
        if a.aval.dtype.name not in expressions.READABLE:
            raise NotFolded(f"it reads {a.aval.dtype}, and kernels read {', '.join(expressions.READABLE)}")
    arrangements = [_arrangement(place, group, factors) for _, place in (*own, *arrays)]
    arrangements += [_row_arrangement(a, group, factors) for a in group.row_operands]
    has_mask = any(a.aval.dtype == bool for a in group.row_operands)
    kernel = FusedKernel(
        op=group.op,
        shape=tuple(factor.extent for factor in factors),
        axes=tuple(k for k, factor in enumerate(factors) if factor.of.number in group.axes),
        dtype=own[0][0].aval.dtype.name,
        sides=tuple(_side_operand(side, group, factors) for side in read.sides),
        mask_shape=arrangements[-1].shape if has_mask else None,
        load=tuple(load),
        store=tuple(expression for expression, _ in pairs),
        dtypes=tuple(dtype for _, dtype in pairs),
        loaded_dtypes=tuple(a.aval.dtype.name for a in group.operands),
        result_dtype=None if group.result is None else group.result.aval.dtype.name,
        n_row_results=len(group.row_results),
        in_place=None,
    )
    _check_there_is(kernel)
    numbered = [(pairs.index(pair), v, group.places_after[v]) for pair, v in zip(stored, written, strict=True)]
    place_of_rows = [[] if d in group.axes else dim for d, dim in enumerate(group.place)]
    numbered += [(k, v, place_of_rows) for k, v in enumerate(group.row_results, len(pairs))]
    results = (KernelResult(k, _arrangement(place, group, factors), v.aval.shape) for k, v, place in numbered)
    call = KernelCall(kernel, tuple(arrangements), tuple(results))
    reads = [*(a for a, _ in (*own, *arrays)), *group.row_operands]
    return call, reads, [*written, *group.row_results]


def _check_there_is(kernel: FusedKernel) -> None:
    """Raises NotFolded if there is no such kernel, or none for a device's part: that reads where its indices begin."""
    starts = [SideOperand((1,) * len(kernel.shape), "int32")] * len(kernel.dims_with_indices)
    try:
        kernel._replace(sides=(*kernel.sides, *starts)).spec.plan(sources=False)
    except ValueError as error:
        raise NotFolded(str(error)) from None


def _stored(group: Group, written: list[Var], sides: list[SideVariable]) -> list[tuple[Expression, str]]:
    """The expression and the dtype of each variable that a kernel is to write."""
    if group.result is None:
        return []
    if not written:
        raise NotFolded("nothing reads its result")
    made = Expressions({(group.result, place_key(group.place)): "y"}, sides, group.parts)
    inside = group.after | group.sides_after
    return [(made.make(v, group.places_after[v], inside), v.aval.dtype.name) for v in written]


def _side_operand(side: SideVariable, group: Group, factors: list[Factor]) -> SideOperand:
    if side.factor is None:
        return SideOperand(_arrangement(side.place, group, factors).shape, side.variable.aval.dtype.name)
    along = next(k for k, factor in enumerate(factors) if factor == side.factor)
    return SideOperand(tuple(f.extent if k == along else 1 for k, f in enumerate(factors)), "index", along)


def _own_operands(group: Group) -> list[tuple[Atom, Place]]:
    """For each operand of the operator an array with as many elements that it is made of, and its place: the kernel's
    operand."""
    found = []
    for operand, before in zip(group.operands, group.before, strict=True):
        leaves = _leaves_of_elements(operand, group, before)
        found.append([leaf for leaf in leaves if leaf[0].aval.dtype.name in expressions.WRITABLE])
    in_order = [k for k in found[0] if factors_of(k[1]) == factors_of(group.place)] or found[0]
    if not in_order:
        raise NotFolded(f"it is made of no array of its shape in {', '.join(expressions.WRITABLE)}")
    if len(found) == 1:
        return [in_order[0]]
    for first in in_order:
        for second in found[1]:
            if second[0].aval.dtype == first[0].aval.dtype:
                return [first, second]
    # A kernel's operands have one dtype. So the other operand is read beside, and this one is there twice.
    return [in_order[0], in_order[0]]


def _leaves_of_elements(a: Atom, group: Group, before: Inside) -> list[tuple[Atom, Place]]:
    """The variables with as many elements that folded equations make an operand of, and their places."""

    def following(node: Placed) -> Iterable[Placed]:
        b, place = node
        if b not in before:
            return ()
        operands = expressions.required_operands(before[b], place, group.parts)
        return reversed([operand for operand in operands if is_variable(operand[0])])

    start: list[Placed] = [(v, place_key(group.place)) for v in variables_of([a])]
    visited = each_once(start, following)
    return [(b, place) for b, place in visited if b not in before and count_of(place) == group.size]


def _arrangement(place: Place, group: Group, factors: list[Factor]) -> Arrangement:
    """The arrangement of an array at a place, for a group's kernel, whose dimensions are these factors."""
    own = group.parts.factors_of(place)
    position = {factor: k for k, factor in enumerate(factors)}
    order = tuple(sorted(range(len(own)), key=lambda k: position[own[k]]))
    shape = tuple(factor.extent if factor in own else 1 for factor in factors)
    return Arrangement(tuple(factor.extent for factor in own), order, shape)


def _row_arrangement(a: Atom, group: Group, factors: list[Factor]) -> Arrangement:
    """The arrangement of numbers or labels of rows, or of a mask. Dimensions are x's, or x's last, or of extent 1."""
    shape, x = a.aval.shape, group.x.aval.shape
    along = {d for d, n in enumerate(shape, len(x) - len(shape)) if n > 1}
    return _arrangement([dim if d in along else [] for d, dim in enumerate(group.place)], group, factors)


def _factors_in_memory_order(group: Group, arrays: Iterable[tuple[Atom, Place]]) -> list[Factor]:
    """The kernel's dimensions, as factors, in the order in which most of the arrays' bytes lie in memory."""
    own = group.parts.factors_of(group.place)
    orders = [(a, group.parts.factors_of(place)) for a, place in arrays]
    whole = [(a, order) for a, order in orders if len(order) == len(own)]

    def moved_bytes(order: list[Factor]) -> int:
        return sum(bytes_of(a) for a, other in whole if other != order)

    return min([own, *(order for _, order in whole)], key=moved_bytes)


# ---- The primitives that rewritten programs hold.

kernel_call_p = Primitive("fused_kernel_call")
kernel_call_p.multiple_results = True
by_xla_p = Primitive("operator_by_xla")  # an operator in jax.numpy, where XLA's fusions move fewer bytes
by_xla_p.multiple_results = True


def register() -> None:
    mlir.register_lowering(kernel_call_p, mlir.lower_fun(lambda *a, call: call(*a), multiple_results=True))
    mlir.register_lowering(by_xla_p, mlir.lower_fun(_by_xla, multiple_results=True))


def _by_xla(
    *operands: jax.Array, op: str, axes: tuple[int, ...], axis_name: tuple[str, ...], **dtype: str
) -> list[jax.Array]:
    found = apply(op, *operands, axes=axes, **dtype)
    return list(found) if isinstance(found, tuple | list) else [found]
