"""What XLA asks when it divides a program among devices: how a call's operands lie, and what each device does.

That is the primitive on the device's part, lowered as on a single device whatever its lowering is; or, where a reduced
axis is sharded, the operator of `parts.py`.
"""

import functools
import json
import math
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np

from jax_softmax import _kernels, _private
from jax_softmax.devices import layouts, parts
from jax_softmax.devices.collectives import all_to_all_p
from jax_softmax.devices.partitioning import TARGET, warn_anyway
from jax_softmax.primitives.operators import PRIMITIVES


def register() -> None:
    """Tells XLA who divides the calls, if this JAX lets it be told."""
    if not _private.DIVISION.available:
        return
    partitioner = _private.DIVISION.register_custom_call_partitioner
    tell = functools.partial(partitioner, TARGET, _not_asked, _divide, _not_asked)
    tell()
    _private.DIVISION.register_plugin_callbacks(tell)


def _not_asked(*args):
    """What GSPMD wants to know before a call is divided. Shardy knows it by the call's rule."""
    raise NotImplementedError


class DeviceProgram:
    """What each device does of a primitive with these parameters."""

    axes: tuple[int, ...]  # that are reduced
    whole: tuple[int, ...] = ()  # that no device can have a part of
    dims_with_indices: Iterable[int]  # along which it matters where a device's part begins

    def of_whole_rows(self, layout: np.ndarray) -> Callable:
        """The function of a device that has whole rows: of its parts of the operands."""
        raise NotImplementedError

    def of_parts_of_rows(self, layout: np.ndarray, spread: list[int]) -> Callable:
        """The same of one that has parts of rows, whose dimensions `spread` are divided."""
        raise NotImplementedError


class _OperatorProgram(DeviceProgram):
    dims_with_indices = ()

    def __init__(self, primitive, shape, params):
        self.axes = params["axes"]
        self._known = primitive, shape, params

    def of_whole_rows(self, layout):
        primitive, _, params = self._known
        return functools.partial(primitive.bind, axis_name=(), **params)

    def of_parts_of_rows(self, layout, spread):
        primitive, shape, params = self._known
        return parts.over_groups(primitive.name, params, shape, layout, spread)


# Of primitives that are no operators, by their names: what makes a DeviceProgram of the parameters.
PROGRAMS: dict[str, Callable[..., DeviceProgram]] = {}


def _device_program(name, shape, params):
    if name in PROGRAMS:
        return PROGRAMS[name](**params)
    params = {key: tuple(value) if isinstance(value, list) else value for key, value in params.items()}
    return _OperatorProgram(PRIMITIVES[name], shape, params)


def _divide(arg_shapes, arg_shardings, result_shape, result_sharding, config):
    """What XLA asks of a call that it divides: a device's program, and the shardings of the operands and the result.

    All operands and results have one layout, `_common`. What has another one is brought to it: by XLA, which cuts what
    is whole for nothing, or by the program itself, if a mesh axis goes to another dimension. (XLA can do that as well,
    but JAX 0.12's gathers, its HloShardingV3 being of another kind than the shardings of a callback.)
    """
    config = json.loads(config)
    if config.get("version") != _kernels.CALL_VERSION:
        raise ValueError("this program was made by another version of jax_softmax: export it again")
    shape = tuple(config["shape"])
    of_device = _device_program(config["primitive"], shape, config["params"])
    of_results = result_sharding.tuple_elements() if result_shape.is_tuple() else [result_sharding]
    results = [_Laid(*laid, shape) for laid in zip(_parts_of_tuple(result_shape), of_results, strict=True)]
    operands = [_Laid(*laid, shape) for laid in zip(arg_shapes, arg_shardings, strict=True)]
    layout = _common(operands, results, shape)
    gathered = None
    # Else inside a partly manual shard_map, where XLA numbers the devices anew for each group of the manual axes.
    nameable = layout.size == config["devices"]
    numbered = [d for d in {*of_device.axes, *of_device.dims_with_indices} if layout.shape[d] > 1]
    if numbered and not nameable:
        gathered = (
            "inside a partly manual shard_map an axis that is reduced, or whose indices are needed, is sharded over a "
            "mesh axis that is not manual. Make that mesh axis manual too and pass it as axis_name"
        )
        layout = layouts.projected(layout, [None if d in numbered else d for d in range(len(shape))])
    if cut := [d for d in of_device.whole if layout.shape[d] > 1]:
        gathered = "attention runs on whole sequences: divide batch and heads, or run ring attention in jax.shard_map"
        layout = layouts.projected(layout, [None if d in cut else d for d in range(len(shape))])
    given, moves, left_to_xla = _moves(operands, layout, nameable)
    if left_to_xla and not gathered:
        gathered = (
            "its layout does not go together with that of the result, or of another operand. Bring it to that one "
            "before, by jax.lax.with_sharding_constraint or jax.sharding.reshard"
        )
    if gathered:
        warn_anyway(f"an operand that is sharded over devices may be gathered onto each of them: {gathered}")
    spread = [d for d in of_device.axes if layout.shape[d] > 1]
    function = of_device.of_parts_of_rows(layout, spread) if spread else of_device.of_whole_rows(layout)

    def after_moves(*held):
        return function(*(all_to_all_p.bind(a, **move) if move else a for a, move in zip(held, moves, strict=True)))

    specs = [
        jax.ShapeDtypeStruct(layouts.part_of(arg.dimensions(), lies), arg.numpy_dtype())
        for arg, lies in zip(arg_shapes, given, strict=True)
    ]
    program = _lowered_apart(after_moves, specs, config["platform"])
    return program, [_sharding(lies) for lies in given], _result_sharding(result_shape, layout, results)


def _moves(operands, layout, nameable):
    """Of each operand the layout that XLA gives it in, and the all-to-all or None that brings it to the common one; and
    whether XLA has to move more than what it cuts for nothing."""
    given, moves, left_to_xla = [], [], False
    for laid in operands:
        wanted = layouts.projected(layout, laid.dims)
        lies = layouts.refined(laid.layout, wanted)  # but for what is cut for nothing
        move = layouts.all_to_all(lies, wanted, laid.shape) if nameable else None
        moves.append(move)
        given.append(lies if move else wanted)
        left_to_xla |= not move and not layouts.same(lies, wanted)
    return given, moves, left_to_xla


class _Laid:
    """An operand or a result of a call on x: which of x's dimensions it has, and its layout."""

    def __init__(self, array, sharding, shape):
        self.shape = tuple(array.dimensions())
        self.dims = layouts.aligned(self.shape, shape)
        self.is_whole = self.shape == shape
        self.layout = _layout(sharding, len(self.dims))


def _common(operands, results, shape):
    """The layout of x: each dimension is cut as where it has most parts.

    Of dimensions that cannot both be, because the same devices divide them, that comes first which is cut in a result
    of x's shape, then in the first operand that has it so: what is whole can be cut for nothing.
    """
    layout = layouts.whole(len(shape))
    for laid in [*(r for r in results if r.is_whole), *operands, *(r for r in results if not r.is_whole)]:
        layout = layouts.refined(layout, laid.layout, laid.dims)
    return layout


def _parts_of_tuple(shape):
    return shape.tuple_shapes() if shape.is_tuple() else [shape]


def _result_sharding(result_shape, layout, results):
    """Of one result or a tuple of several, where x has this layout."""
    shardings = [_sharding(layouts.projected(layout, laid.dims)) for laid in results]
    return (
        _private.DIVISION.HloSharding.tuple_sharding(result_shape, shardings)
        if result_shape.is_tuple()
        else shardings[0]
    )


def _layout(sharding, ndim):
    if not sharding.is_tiled():
        return layouts.whole(ndim)
    tiles = sharding.tile_assignment_dimensions()
    return np.reshape(sharding.tile_assignment_devices(), [*tiles[:ndim], -1])


def _sharding(layout):
    if math.prod(layout.shape[:-1]) == 1:
        return _private.DIVISION.HloSharding.replicate()
    return _private.DIVISION.HloSharding.subgroup_with_device_ordering(
        np.ascontiguousarray(layout), [_private.DIVISION.REPLICATED]
    )


def _lowered_apart(function, specs, platform):
    """The function as StableHLO for one device, in a thread of its own: what is set in this one must not matter.

    (That is a mesh, or disable_jit. 64-bit dtypes are on because the operands' dtypes are settled.)
    """

    def lowered():
        with jax.enable_x64(True):
            program = jax.jit(function, keep_unused=True).trace(*specs).lower(lowering_platforms=(platform,))
            return program.compiler_ir("stablehlo")

    with ThreadPoolExecutor(max_workers=1) as pool:
        return _private.DIVISION.module_to_bytecode(pool.submit(lowered).result())
