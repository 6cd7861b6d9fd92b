"""A group as a call of a kernel: what becomes of the program's arrays before and after it."""

from typing import NamedTuple

import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import mlir

from jax_softmax import _kernels
from jax_softmax.fusion import expressions, places
from jax_softmax.fusion.expressions import Expressions, NotFolded
from jax_softmax.fusion.graph import bytes_of, is_variable
from jax_softmax.fusion.groups import Group
from jax_softmax.fusion.kernels import FusedKernel, SideOperand, kernel_p
from jax_softmax.primitives.records import apply


class Arrangement(NamedTuple):
    """How an array becomes an operand of a kernel, or a result an array: by views, in most cases."""

    extents: tuple[int, ...]  # the array's dimensions, split into factors
    order: tuple[int, ...]  # of these factors, as the kernel has them
    shape: tuple[int, ...]  # of the kernel's operand: extents, and 1 where it broadcasts

    @property
    def is_view(self) -> bool:
        """Whether nothing is moved in memory."""
        return self.order == tuple(range(len(self.order)))

    def operand(self, a):
        if not self.is_view:
            a = jnp.transpose(jnp.reshape(a, self.extents), self.order)
        return jnp.reshape(a, self.shape)

    def result(self, a, shape):
        if not self.is_view:
            back = [self.order.index(k) for k in range(len(self.order))]
            a = jnp.transpose(jnp.reshape(a, [self.extents[k] for k in self.order]), back)
        return jnp.reshape(a, shape)


class Result(NamedTuple):
    """A variable that a kernel writes."""

    index: int  # of the kernel's results
    arrangement: Arrangement
    shape: tuple[int, ...]


class KernelCall(NamedTuple):
    kernel: FusedKernel
    operands: tuple[Arrangement, ...]
    results: tuple[Result, ...]  # those for elements, then those for rows

    def transposed(self, reads, made) -> list:
        """Those of the variables that it reads and makes which XLA has to transpose."""
        arrangements = [*self.operands, *(result.arrangement for result in self.results)]
        return [v for v, how in zip([*reads, *made], arrangements, strict=True) if not how.is_view]

    def __call__(self, *arrays):
        found = kernel_p.bind(
            *(how.operand(a) for how, a in zip(self.operands, arrays, strict=True)), kernel=self.kernel
        )
        return [result.arrangement.result(found[result.index], result.shape) for result in self.results]


def kernel_call_of(group: Group, written, read_outside) -> tuple[KernelCall, list, list]:
    """The call that makes these variables of elements; the variables that it reads, and those that it makes.

    Raises:
      NotFolded: it cannot be one.
    """
    own = _own_operands(group)
    names = {(a, places.place_key(place)): f"x{k}" for k, (a, place) in reversed(list(enumerate(own)))}
    read = Expressions(names)
    load = [read.of(a, group.place, before) for a, before in zip(group.operands, group.before, strict=True)]
    stored = _Stored(group, written, read.sides)
    arrays = [(side.variable, side.place) for side in read.sides if side.factor is None]
    factors = _in_memory_order(group, [*own, *arrays, *((v, group.places_after[v]) for v in written)])
    if len(factors) > _kernels.MAX_DIMS:
        raise NotFolded("its operands have too many dimensions")
    shape = tuple(factor.extent for factor in factors)
    for a, _ in arrays:
        if a.aval.dtype.name not in expressions.READABLE:
            raise NotFolded(f"{a.aval.dtype}")
    arrangements = [_arrangement(place, factors) for _, place in (*own, *arrays)]
    mask_shape, of_rows = None, list(group.row_operands)
    for a in of_rows:
        how = _of_rows(a, group, factors)
        arrangements.append(how)
        if a.aval.dtype == bool:
            mask_shape = how.shape
    kernel = FusedKernel(
        op=group.op,
        shape=shape,
        axes=tuple(k for k, factor in enumerate(factors) if factor.dim in group.axes),
        dtype=own[0][0].aval.dtype.name,
        sides=tuple(_read_beside(side, factors) for side in read.sides),
        mask_shape=mask_shape,
        load=tuple(load),
        store=tuple(expression for expression, _ in stored.pairs),
        dtypes=tuple(dtype for _, dtype in stored.pairs),
        loaded_dtypes=tuple(a.aval.dtype.name for a in group.operands),
        result_dtype=None if group.result is None else group.result.aval.dtype.name,
        n_row_results=len(group.row_results),
        in_place=None,
    )
    _check_there_is(kernel)
    results = [
        Result(k, _arrangement(group.places_after[v], factors), v.aval.shape)
        for v, k in zip(written, stored.indices, strict=True)
    ]
    of_rows_place = [[] if d in group.axes else dim for d, dim in enumerate(group.place)]
    for k, v in enumerate(group.row_results, len(kernel.dtypes)):
        results.append(Result(k, _arrangement(of_rows_place, factors), v.aval.shape))
    call = KernelCall(kernel, tuple(arrangements), tuple(results))
    reads = [*(a for a, _ in own), *(a for a, _ in arrays), *of_rows]
    dead = (k for k, (a, _) in enumerate(own) if reads.count(a) == 1 and _ends_here(a, group, read_outside))
    in_place = next((k for k in dead if _fits(call, k)), None)
    return call._replace(kernel=kernel._replace(in_place=in_place)), reads, [*written, *group.row_results]


def _check_there_is(kernel):
    """Also of a device's part, which reads where its indices begin."""
    starts = [SideOperand((1,) * len(kernel.shape), "int32")] * len(kernel.dims_with_indices)
    try:
        kernel._replace(sides=(*kernel.sides, *starts)).scratch_bytes()
    except ValueError as error:
        raise NotFolded(str(error)) from None


class _Stored:
    """What a kernel stores: expressions and dtypes, each once, and which of them is each variable that is written."""

    def __init__(self, group, written, sides):
        self.pairs, self.indices = [], []
        if not group.facts.element_results:
            return
        if not written:
            raise NotFolded("nothing reads its result")
        made = Expressions({(group.result, places.place_key(group.place)): "y"})
        made.sides = sides
        inside = group.after | group.sides_after
        for variable in written:
            pair = made.of(variable, group.places_after[variable], inside), variable.aval.dtype.name
            if pair not in self.pairs:
                self.pairs.append(pair)
            self.indices.append(self.pairs.index(pair))


def _read_beside(side, factors):
    shape = tuple(factor.extent for factor in factors)
    if side.factor is None:
        return SideOperand(_arrangement(side.place, factors).shape, side.variable.aval.dtype.name)
    along = next(k for k, factor in enumerate(factors) if factor is side.factor)
    return SideOperand(tuple(n if k == along else 1 for k, n in enumerate(shape)), "index", along)


def _ends_here(a, group, read_outside):
    """Whether an array is in memory for this group alone: a product that nothing else reads, or an operand of an
    operator that says so."""
    if a is group.x and group.equation.params.get("in_place"):
        return True
    graph, maker = group.graph, group.graph.maker.get(a)
    while maker is not None and maker.name in ("reshape", "squeeze") and graph.readers[maker.inputs[0]] == [maker]:
        maker = graph.maker.get(maker.inputs[0])
    products = "dot_general", "ragged_dot", "linear_product"
    return maker is not None and maker.name in products and not read_outside(a, group)


def _fits(call, k):
    """Whether the first result lies as an operand does, in the same dtype."""
    if not call.kernel.dtypes or call.kernel.dtypes[0] != call.kernel.dtype:
        return False
    return call.operands[k].is_view and all(r.arrangement.is_view for r in call.results if r.index == 0)


def _own_operands(group):
    """Of each operand of the operator the array of its shape that the kernel reads for it, and its place."""
    found = []
    for operand, before in zip(group.operands, group.before, strict=True):
        leaves = _whole_leaves(operand, group.place, before)
        found.append([leaf for leaf in leaves if leaf[0].aval.dtype.name in expressions.WRITABLE])
    in_order = [k for k in found[0] if _is_in_order(k[1], group)] or found[0]
    if not in_order:
        raise NotFolded("no operand of its shape is a float array")
    if len(found) == 1:
        return [in_order[0]]
    for first in in_order:
        for second in found[1]:
            if second[0].aval.dtype == first[0].aval.dtype:
                return [first, second]
    # Operands of one dtype: the other one is read beside, and this one stands for it.
    return [in_order[0], in_order[0]]


def _is_in_order(place, group):
    return places.factors_of(place) == places.factors_of(group.place)


def _whole_leaves(a, place, before):
    """What an operand is made of that has an element for each of the operand's, and where that lies."""
    count, pending, seen, leaves = len(places.factors_of(place)), [(a, place)], set(), []
    while pending:
        a, place = pending.pop()
        if not is_variable(a) or (a, places.place_key(place)) in seen:
            continue
        seen.add((a, places.place_key(place)))
        if a in before:
            inputs = zip(before[a].inputs, expressions.required_input_places(before[a], place), strict=True)
            pending += reversed(list(inputs))
        elif len(places.factors_of(place)) == count:
            leaves.append((a, place))
    return leaves


def _arrangement(place, factors):
    own = places.factors_of(place)
    position = {id(factor): k for k, factor in enumerate(factors)}
    order = tuple(sorted(range(len(own)), key=lambda k: position[id(own[k])]))
    has = {position[id(factor)] for factor in own}
    shape = tuple(factor.extent if k in has else 1 for k, factor in enumerate(factors))
    return Arrangement(tuple(factor.extent for factor in own), order, shape)


def _of_rows(a, group, factors):
    """Of numbers and labels of rows, and masks: of x's dimensions, or its last ones, some with extent 1."""
    shape, x = a.aval.shape, group.x.aval.shape
    along = {d for d, n in enumerate(shape, len(x) - len(shape)) if n > 1}
    return _arrangement([dim if d in along else [] for d, dim in enumerate(group.place)], factors)


def _in_memory_order(group, arrays):
    """The factors of the kernel's dimensions, in the order in which most of the bytes lie in memory."""
    own = places.factors_of(group.place)
    orders = [(a, places.factors_of(place)) for a, place in arrays]
    whole = [(a, order) for a, order in orders if len(order) == len(own)]

    def moved(order):
        return sum(bytes_of(a) for a, other in whole if other != order)

    return min([own, *(order for _, order in whole)], key=moved)


# ---- The primitives that rewritten programs hold.

kernel_call_p = Primitive("softmax_kernel_call")
kernel_call_p.multiple_results = True
by_xla_p = Primitive("softmax_by_xla")  # an operator that XLA's fusions do with fewer bytes
by_xla_p.multiple_results = True


def register() -> None:
    mlir.register_lowering(kernel_call_p, mlir.lower_fun(lambda *a, call: call(*a), multiple_results=True))
    mlir.register_lowering(by_xla_p, mlir.lower_fun(_by_xla, multiple_results=True))


def _by_xla(*operands, op, axes, axis_name, **dtype):
    found = apply(op, *operands, axes=axes, **dtype)
    return list(found) if isinstance(found, tuple | list) else [found]
