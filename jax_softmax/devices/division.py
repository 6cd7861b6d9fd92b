"""What XLA asks for when it divides a program among devices: the layouts of a call's operands, and a device's program.

Each device runs the primitive on its shards, lowered as for a single device; where a reduced dimension is divided, it
runs the operator of `row_shards.py`. A result that lacks another divided dimension is a part of a sum over it, which
the devices along it add up: each makes a part of the sum.
"""

import functools
import itertools
import json
import math
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive

from jax_softmax import _kernels, _private
from jax_softmax.devices import layouts, row_shards
from jax_softmax.devices.collectives import all_to_all_p
from jax_softmax.devices.layouts import Groups, Layout
from jax_softmax.devices.partitioning import TARGET, warn_anyway
from jax_softmax.primitives.operators import PRIMITIVES
from jax_softmax.primitives.types import Shape


def register() -> None:
    """Registers `_divide` with XLA for calls of `TARGET`, where this JAX has the means to."""
    if not _private.DIVISION.available:
        return
    partitioner = _private.DIVISION.register_custom_call_partitioner
    register_callbacks = functools.partial(partitioner, TARGET, _unused_callback, _divide, _unused_callback)
    register_callbacks()
    _private.DIVISION.register_plugin_callbacks(register_callbacks)


def _unused_callback(*args: Any) -> None:
    """GSPMD's question how to propagate shardings, which Shardy does not ask: it has the call's rule."""
    raise NotImplementedError


class DeviceProgram:
    """What each device does for a call of a primitive with certain parameters."""

    axes: tuple[int, ...]  # the reduced dimensions
    gathered: tuple[int, ...] = ()  # dimensions of which each device needs all, however operands are divided
    undivided: tuple[int, ...] = ()  # the same, of which operands should not be divided
    exchangeable: tuple[int, Sequence[int]] | None = None  # a dimension, and those that are divided rather than it
    dims_with_indices: Iterable[int]  # whose indices are read, so that it matters where a device's shard begins

    def on_whole_rows(self, layout: Layout) -> Callable[..., Any]:
        """The results as a function of a device's shards of the operands, if these have whole rows."""
        raise NotImplementedError

    def on_row_shards(self, layout: Layout, sharded_dims: list[int]) -> Callable[..., Any]:
        """The same if the layout divides rows, along these dimensions."""
        raise NotImplementedError


class _OperatorProgram(DeviceProgram):
    dims_with_indices = ()

    def __init__(self, primitive: Primitive, shape: Shape, params: dict[str, Any]) -> None:
        self.axes, self._primitive, self._shape, self._params = params["axes"], primitive, shape, params

    def on_whole_rows(self, layout: Layout) -> Callable[..., Any]:
        return functools.partial(self._primitive.bind, axis_name=(), **self._params)

    def on_row_shards(self, layout: Layout, sharded_dims: list[int]) -> Callable[..., Any]:
        return row_shards.in_divided_program(self._primitive.name, self._params, self._shape, layout, sharded_dims)


# For primitives that are no operators, by name: from the parameters to the DeviceProgram.
PROGRAMS: dict[str, Callable[..., DeviceProgram]] = {}


def _device_program(name: str, shape: Shape, params: dict[str, Any]) -> DeviceProgram:
    if name in PROGRAMS:
        return PROGRAMS[name](**params)
    params = {key: tuple(value) if isinstance(value, list) else value for key, value in params.items()}
    return _OperatorProgram(PRIMITIVES[name], shape, params)


def _divide(
    arg_shapes: list[Any], arg_shardings: list[Any], result_shape: Any, result_sharding: Any, text: str | bytes
) -> tuple[bytes, list[Any], Any]:
    """XLA's callback for a call that it divides: the device's program, and the shardings of operands and results.

    All operands and results get one layout, `_common_layout`. Operands that come in another one are brought to it: by
    XLA if that only takes slices of what each device has, by the device's program if it takes an all-to-all. (XLA can
    do the latter too, but JAX 0.12's gathers the operand, because a callback's shardings are not HloShardingV3.) So it
    is with results that XLA wants in another one.
    """
    config = json.loads(text)
    if config.get("version") != _kernels.CALL_VERSION:
        raise ValueError("this program was made by another version of jax_softmax: export it again")
    shape = tuple(config["shape"])
    program = _device_program(config["primitive"], shape, config["params"])
    result_shapes = result_shape.tuple_shapes() if result_shape.is_tuple() else [result_shape]
    result_shardings = result_sharding.tuple_elements() if result_shape.is_tuple() else [result_sharding]
    results, operands = (
        [_Array(*array, shape) for array in zip(*arrays, strict=True)]
        for arrays in ((result_shapes, result_shardings), (arg_shapes, arg_shardings))
    )
    layout = _common_layout(operands, results, shape, program.gathered)
    # In a partly manual shard_map XLA numbers devices within each group that the manual axes form: a device's program
    # cannot tell then which number it has.
    knows_devices = layout.size == config["devices"]
    layout, gathered = _divisible(layout, program, results, knows_devices)
    layout, exchanged = _exchanged(layout, program, shape) if knows_devices else (layout, ())
    whole = (*program.gathered, *exchanged)
    operand_layouts, moves, left_to_xla = _moves(operands, layout, whole, knows_devices)
    if left_to_xla and not gathered:
        gathered = (
            "its layout does not go together with that of the result, or of another operand. Bring it to that one "
            "before, by jax.lax.with_sharding_constraint or jax.sharding.reshard"
        )
    if gathered:
        warn_anyway(f"an operand that is sharded over devices may be gathered onto each of them: {gathered}")
    sharded_dims = [d for d in program.axes if layout.shape[d] > 1]
    call = program.on_row_shards(layout, sharded_dims) if sharded_dims else program.on_whole_rows(layout)
    lacking = [[] if sharded_dims else layouts.divided_dims_without(layout, result.dims) for result in results]
    padded = [d for d in {*itertools.chain(*lacking)} if shape[d] % layout.shape[d]]
    result_layouts, last_steps = zip(
        *(_last_step(result, layout, bool(dims), knows_devices) for result, dims in zip(results, lacking, strict=True)),
        strict=True,
    )

    def on_device(*shards: jax.Array) -> list[jax.Array]:
        moved = [all_to_all_p.bind(a, **move) if move else a for a, move in zip(shards, moves, strict=True)]
        for d in padded:  # what pads shards must add nothing
            inside = row_shards.is_inside(layout, shape, d)
            moved = [jnp.where(inside, a, 0) if d in of.dims else a for of, a in zip(operands, moved, strict=True)]
        found = jax.tree.leaves(call(*moved))
        return [step(a) for a, step in zip(found, last_steps, strict=True)]

    specs = [
        jax.ShapeDtypeStruct(layouts.shard_shape(arg.dimensions(), operand_layout), arg.numpy_dtype())
        for arg, operand_layout in zip(arg_shapes, operand_layouts, strict=True)
    ]
    shardings = list(map(_sharding, result_layouts))
    return (
        _bytecode(on_device, specs, config["platform"]),
        [_sharding(operand_layout) for operand_layout in operand_layouts],
        _private.DIVISION.HloSharding.tuple_sharding(result_shape, shardings)
        if result_shape.is_tuple()
        else shardings[0],
    )


def _exchanged(layout: Layout, program: DeviceProgram, shape: Shape) -> tuple[Layout, tuple[int, ...]]:
    """The layout in which another dimension is divided rather than the program's exchangeable one, and that, if parts
    are even."""
    source, targets = program.exchangeable or (0, ())
    n = layout.shape[source]
    even = (d for d in targets if n > 1 and shape[source] % n == 0 and shape[d] % (layout.shape[d] * n) == 0)
    target = next(even, None)
    return (layout, ()) if target is None else (layouts.exchanged(layout, source, target), (source,))


def _last_step(
    result: "_Array", layout: Layout, is_part_of_sum: bool, knows_devices: bool
) -> tuple[Layout, Callable[[jax.Array], jax.Array]]:
    """The layout in which XLA gets a result, and what a device does with what it has made. Of a sum the devices divide
    a dimension that XLA wants to be divided, or else the longest."""
    own = layouts.projected(layout, result.dims)
    if is_part_of_sum:
        whole = [k for k, shards in enumerate(own.shape[:-1]) if shards == 1]
        k = max(whole, key=lambda k: (result.layout.shape[k] > 1, result.shape[k]))
        scattered, groups = layouts.scattered(layout, result.dims, k)
        return scattered, functools.partial(_summed, groups=groups, k=k)
    move = layouts.all_to_all(own, result.layout, result.shape) if knows_devices else None
    return (result.layout, functools.partial(all_to_all_p.bind, **move)) if move else (own, lambda a: a)


def _summed(a: jax.Array, groups: Groups, k: int) -> jax.Array:
    """This device's part, along dimension k, of the sum of the devices' arrays. It is rounded once more."""
    n = len(groups[0])
    a = jnp.pad(a, [(0, -a.shape[d] % n if d == k else 0) for d in range(a.ndim)])
    parts = all_to_all_p.bind(a[None], groups=groups, split=k + 1, concatenated=0)
    return jnp.sum(parts, 0)  # in float32, if they have 16 bits


def _divisible(
    layout: Layout, program: DeviceProgram, results: list["_Array"], knows_devices: bool
) -> tuple[Layout, str | None]:
    """The layout without the divisions that the program does not do, and why it does not; None if it does them all."""
    divided, why = [d for d in program.undivided if layout.shape[d] > 1], None
    if divided:
        why = "attention runs on whole features: divide batch, heads or sequences"
    summed = (layouts.divided_dims_without(layout, result.dims) for result in results)
    numbered = [
        d for d in {*program.axes, *program.dims_with_indices, *itertools.chain(*summed)} if layout.shape[d] > 1
    ]
    if numbered and not knows_devices:
        divided += numbered
        why = why or (
            "inside a partly manual shard_map an axis that is reduced, or whose indices are needed, is sharded over a "
            "mesh axis that is not manual. Make that mesh axis manual too and pass it as axis_name"
        )
    return layouts.projected(layout, [None if d in divided else d for d in range(layout.ndim - 1)]), why


def _moves(
    operands: list["_Array"], layout: Layout, gathered: tuple[int, ...], knows_devices: bool
) -> tuple[list[Layout], list[dict[str, Any] | None], bool]:
    """For each operand the layout in which XLA hands it over, and the all-to-all, or None, from there to the common
    layout; and whether XLA has to do more for one of them than to slice what each device has."""
    operand_layouts, moves, left_to_xla = [], [], False
    for operand in operands:
        target = layouts.projected(layout, operand.dims)
        sliced = layouts.refined(operand.layout, target)
        move = layouts.all_to_all(sliced, target, operand.shape) if knows_devices else None
        sliced = sliced if move else layouts.refined(operand.without(gathered), target)
        moves.append(move)
        operand_layouts.append(sliced if move else target)
        left_to_xla |= not move and not layouts.are_same(sliced, target)
    return operand_layouts, moves, left_to_xla


class _Array:
    """An operand or a result of a call on x: which of x's dimensions it has, and its layout."""

    def __init__(self, array: Any, sharding: Any, shape: Shape) -> None:
        self.shape = tuple(array.dimensions())
        self.dims = layouts.matching_dims(self.shape, shape)
        self.layout = _layout(sharding, len(self.dims))

    def without(self, dims: Sequence[int]) -> Layout:
        """The layout in which these of x's dimensions are not divided."""
        return layouts.projected(self.layout, [None if d in dims else k for k, d in enumerate(self.dims)])


def _common_layout(
    operands: list["_Array"], results: list["_Array"], shape: Shape, gathered: tuple[int, ...]
) -> Layout:
    """The layout of x that divides each dimension into as many shards as any operand or result has; but gathered ones.

    If the same devices divide two dimensions, that one is divided which is so in a result of x's shape, or else in the
    first operand: an operand in which it is whole can be sliced without communication.
    """
    layout = layouts.undivided(len(shape))
    like_x = [r for r in results if r.shape == shape]
    for array in [*like_x, *operands, *(r for r in results if r.shape != shape)]:
        layout = layouts.refined(layout, array.without(gathered), array.dims)
    return layout


def _layout(sharding: Any, ndim: int) -> Layout:
    if not sharding.is_tiled():
        return layouts.undivided(ndim)
    tiles = sharding.tile_assignment_dimensions()
    return np.reshape(sharding.tile_assignment_devices(), [*tiles[:ndim], -1])


def _sharding(layout: Layout) -> Any:
    if math.prod(layout.shape[:-1]) == 1:
        return _private.DIVISION.HloSharding.replicate()
    return _private.DIVISION.HloSharding.subgroup_with_device_ordering(
        np.ascontiguousarray(layout), [_private.DIVISION.REPLICATED]
    )


def _bytecode(function: Callable[..., Any], specs: list[jax.ShapeDtypeStruct], platform: str) -> bytes:
    """The function as StableHLO for one device. It is lowered in a thread of its own, because this thread's settings
    must not matter: a mesh, or disable_jit. 64-bit dtypes are on, because the operands have their dtypes already."""

    def stablehlo() -> Any:
        with jax.enable_x64(True):
            program = jax.jit(function, keep_unused=True).trace(*specs).lower(lowering_platforms=(platform,))
            return program.compiler_ir("stablehlo")

    with ThreadPoolExecutor(max_workers=1) as pool:
        return _private.DIVISION.module_to_bytecode(pool.submit(stablehlo).result())
