"""A group as a call of a kernel: its operands, its expressions, its results; and how it is lowered."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import mlir

from jax_softmax import _kernels
from jax_softmax.fusion import expressions, places
from jax_softmax.fusion.expressions import Expressions
from jax_softmax.fusion.groups import Group
from jax_softmax.primitives import reference
from jax_softmax.runtime.lowering import TARGET, attributes


class Arrangement(NamedTuple):
    """How an array becomes an operand of a kernel, or a result an array: by views, in most cases."""

    extents: tuple[int, ...]  # the array's dimensions, split into factors
    order: tuple[int, ...]  # of these factors, as the kernel has them
    shape: tuple[int, ...]  # of the kernel's operand: extents, and 1 where it broadcasts

    def operand(self, a):
        if self.order != tuple(range(len(self.order))):
            a = jnp.transpose(jnp.reshape(a, self.extents), self.order)
        return jnp.reshape(a, self.shape)

    def result(self, a, shape):
        if self.order != tuple(range(len(self.order))):
            back = [self.order.index(k) for k in range(len(self.order))]
            a = jnp.transpose(jnp.reshape(a, [self.extents[k] for k in self.order]), back)
        return jnp.reshape(a, shape)


class Result(NamedTuple):
    """A variable that a kernel writes."""

    index: int  # of the kernel's results
    arrangement: Arrangement
    shape: tuple[int, ...]


class KernelCall(NamedTuple):
    op: str
    shape: tuple[int, ...]
    axes: tuple[int, ...]
    dtype: str  # of the operator's own operands
    operands: tuple[Arrangement, ...]  # of these, the arrays, and what rows have
    sides: tuple[tuple[tuple[int, ...], str], ...]  # of the arrays and indices: shapes, and dtypes or "index"
    roles: str
    mask_shape: tuple[int, ...] | None
    load: str
    store: str
    dtypes: tuple[str, ...]  # of the results for elements
    results: tuple[Result, ...]
    row_shapes: tuple[tuple[int, ...], ...]  # of the program's variables
    in_place: int | None  # which operand the first result takes the place of

    def _described(self):
        return {
            "shape": list(self.shape),
            "axes": list(self.axes),
            "op": self.op,
            "dtype": self.dtype,
            "mask_shape": None if self.mask_shape is None else list(self.mask_shape),
            "out_dtype": self.dtypes[0] if self.dtypes else None,
            "more_results": list(self.dtypes[1:]),
            "load": self.load,
            "store": self.store,
            "sides": [(list(shape), dtype) for shape, dtype in self.sides],
        }

    def scratch_bytes(self) -> int | None:
        """Memory for blocks to exchange states through; None if XLA itself is as fast."""
        return _kernels.lower_for_cuda(**self._described())

    def plan(self, **device):
        """What `_kernels.plan` says of it."""
        return _kernels.plan(**self._described(), **device)

    def __call__(self, *arrays):
        """The call of the kernel."""
        operands = [how.operand(a) for how, a in zip(self.operands, arrays, strict=True)]
        rows = tuple(1 if d in self.axes else n for d, n in enumerate(self.shape))
        types = [jax.ShapeDtypeStruct(self.shape, dtype) for dtype in self.dtypes]
        types += [jax.ShapeDtypeStruct(rows, jnp.float32) for _ in self.row_shapes]
        n, scratch = len(types), self.scratch_bytes()
        if scratch:
            types.append(jax.ShapeDtypeStruct((scratch,), jnp.uint8))
        given = attributes(self.op, self.axes, self.mask_shape is not None, self.roles, self.load, self.store)
        aliases = {} if self.in_place is None else {self.in_place: 0}
        found = jax.ffi.ffi_call(TARGET, types, input_output_aliases=aliases)(*operands, **given)[:n]
        elements = [result.arrangement.result(found[result.index], result.shape) for result in self.results]
        of_rows = zip(found[len(self.dtypes) :], self.row_shapes, strict=True)
        return [*elements, *(jnp.reshape(row, shape) for row, shape in of_rows)]


class NotFolded(Exception):
    """Why a group cannot be a call of a kernel."""


def call_of(group: Group, written, read_outside) -> tuple[KernelCall, list, list]:
    """The call that makes these variables of elements; the variables that it reads, and those that it makes.

    Raises:
      NotFolded: it cannot be one.
    """
    own = _own_operands(group)
    names = {(a, places.key_of(place)): f"x{k}" for k, (a, place) in reversed(list(enumerate(own)))}
    load = Expressions(names)
    lines = []
    for k, (operand, before) in enumerate(zip(group.operands, group.before, strict=True)):
        line = load.line(operand, group.place, before)
        lines.append("" if line == f"x{k}" else line)
    made, store_lines, dtypes, result_of = Expressions({}), [], [], []
    made.sides = load.sides
    inside = dict(group.after) | group.sides_after
    if group.facts.element_results:
        if not written:
            raise NotFolded("nothing reads its result")
        y = "y"
        result_dtype = group.result.aval.dtype.name
        made.own = {(group.result, places.key_of(group.place)): y}
        for variable in written:
            dtype = variable.aval.dtype.name
            line = made.line(variable, group.places_after[variable], inside, stored_as=dtype)
            if result_dtype in expressions.ROUNDED and line != y:
                line = _with_rounded_result(line, result_dtype)
            pair = (line, dtype)
            pairs = list(zip(store_lines, dtypes, strict=True))
            if pair not in pairs:
                store_lines.append(line)
                dtypes.append(dtype)
                pairs.append(pair)
            result_of.append(pairs.index(pair))
    sides = load.sides
    factors = places.factors_of(group.place)
    if len(factors) > _kernels.MAX_DIMS:
        raise NotFolded("its operands have too many dimensions")
    axes = tuple(k for k, factor in enumerate(factors) if factor.dim in group.axes)
    shape = tuple(factor.extent for factor in factors)
    arrays = [(side.variable, side.place) for side in sides if side.factor is None]
    if any(a.aval.dtype.name not in expressions.READABLE for a, _ in arrays):
        raise NotFolded(f"{next(a for a, _ in arrays if a.aval.dtype.name not in expressions.READABLE).aval.dtype}")
    arrangements = [_arrangement(a, place, factors) for a, place in (*own, *arrays)]
    side_types, roles = [], []
    for side in sides:
        if side.factor is None:
            side_types.append((_arrangement(side.variable, side.place, factors).shape, side.variable.aval.dtype.name))
            roles.append("array")
        else:
            along = next(k for k, factor in enumerate(factors) if factor is side.factor)
            side_types.append((tuple(n if k == along else 1 for k, n in enumerate(shape)), "index"))
            roles.append(f"index:{along}")
    mask_shape, of_rows = None, list(group.of_rows)
    for a in of_rows:
        how = _of_rows(a, group, factors)
        arrangements.append(how)
        if a.aval.dtype == bool:
            mask_shape = how.shape
    places_written = [_arrangement(v, group.places_after[v], factors) for v in written]
    call = KernelCall(
        op=group.op,
        shape=shape,
        axes=axes,
        dtype=own[0][0].aval.dtype.name,
        operands=tuple(arrangements),
        sides=tuple(side_types),
        roles=" ".join(roles),
        mask_shape=mask_shape,
        load="\n".join(lines) if any(lines) else "",
        store="" if store_lines in ([], ["y"]) else "\n".join("" if line == "y" else line for line in store_lines),
        dtypes=tuple(dtypes),
        results=tuple(
            Result(k, how, v.aval.shape) for k, how, v in zip(result_of, places_written, written, strict=True)
        ),
        row_shapes=tuple(v.aval.shape for v in group.row_results),
        in_place=None,
    )
    reads = [*(a for a, _ in own), *(a for a, _ in arrays), *of_rows]
    dead = (k for k, (a, _) in enumerate(own) if reads.count(a) == 1 and _ends_here(a, group, read_outside))
    call = call._replace(in_place=next((k for k in dead if _fits(call, k)), None))
    return call, reads, [*written, *group.row_results]


def _ends_here(a, group, read_outside):
    """Whether an array is in memory for this group alone: a product that nothing else reads."""
    graph, maker = group.graph, group.graph.maker.get(a)
    while maker is not None and maker.name in ("reshape", "squeeze") and graph.readers[maker.inputs[0]] == [maker]:
        maker = graph.maker.get(maker.inputs[0])
    return maker is not None and maker.name in ("dot_general", "ragged_dot") and not read_outside(a, group)


def _fits(call, k):
    """Whether the first result lies as an operand does, in the same dtype."""
    if not call.results or call.dtypes[0] != call.dtype:
        return False
    orders = [call.operands[k].order, *(result.arrangement.order for result in call.results if result.index == 0)]
    return all(order == tuple(range(len(order))) for order in orders)


def _with_rounded_result(line, dtype):
    """A line that reads the operator's result as its own dtype has it."""
    name = expressions.ROUNDED[dtype]
    return f"[&] {{ const float y16 = rounded<{name}>(y); return {expressions.renamed(line, 'y', 'y16')}; }}()"


def _own_operands(group):
    """Of each operand of the operator the array of its shape that the kernel reads for it, and its place."""
    found = []
    for operand, before in zip(group.operands, group.before, strict=True):
        leaves: dict = {}
        _whole_leaves(operand, group.place, before, len(places.factors_of(group.place)), set(), leaves)
        found.append([leaf for leaf in leaves.values() if leaf[0].aval.dtype.name in expressions.WRITABLE])
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


def _whole_leaves(a, place, before, count, seen, leaves):
    key = a, places.key_of(place)
    if not expressions.is_variable(a) or key in seen:
        return
    seen.add(key)
    equation = before.get(a)
    if equation is None:
        if len(places.factors_of(place)) == count:
            leaves[key] = (a, place)
        return
    for operand, its_place in zip(equation.inputs, places.inputs_of(equation, place), strict=True):
        _whole_leaves(operand, its_place, before, count, seen, leaves)


def _arrangement(a, place, factors):
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
    kept = tuple(factor.extent if factor.dim in along else 1 for factor in factors)
    return Arrangement(kept, tuple(range(len(kept))), kept)


# ---- The primitives that rewritten programs hold.

kernel_p = Primitive("softmax_kernel")
kernel_p.multiple_results = True
by_xla_p = Primitive("softmax_by_xla")  # an operator that XLA's fusions do with fewer bytes
by_xla_p.multiple_results = True


def register() -> None:
    mlir.register_lowering(kernel_p, mlir.lower_fun(lambda *a, call: call(*a), multiple_results=True))
    mlir.register_lowering(by_xla_p, mlir.lower_fun(_by_xla, multiple_results=True))


def _by_xla(*operands, op, axes, axis_name, **dtype):
    found = reference.apply(op, *operands, axes=axes, **dtype)
    return list(found) if isinstance(found, tuple | list) else [found]
