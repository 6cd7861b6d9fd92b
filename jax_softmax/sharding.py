"""Arrays that are sharded over devices: each device computes its part, and only row states travel.

XLA would gather the operands of a custom call that it cannot divide. So a call that is lowered for several devices
becomes a custom call of a target of its own, `TARGET`, that no kernel has and that never runs: with a Shardy rule that
says which dimensions of the operands are one, XLA propagates shardings through it, and when it divides the program
among the devices it asks `_divide` for what each of them shall do. That is the primitive on the device's part, lowered
as on a single device whatever its lowering is; or, where a reduced axis is sharded, the operator in jax.numpy with the
rows' maxima and sums reduced over the devices that share a row.

The call carries the primitive's name and parameters as text and no pointer, so that exported programs and JAX's
persistent cache keep working.

Every private name of JAX that the package needs stands in this module, but for checkify's in `interpreters.py`.
"""

import functools
import json
import math
import warnings
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo
from jax.interpreters import mlir

from jax_softmax import reference

try:
    from jax._src.lib import xla_client
    from jax._src.xla_bridge import register_plugin_callbacks

    _HloSharding = xla_client.HloSharding
    _REPLICATED = xla_client.OpSharding.Type.REPLICATED
    _register_partitioner = xla_client.register_custom_call_partitioner
    AVAILABLE = True
except (ImportError, AttributeError):  # a JAX that moved them
    AVAILABLE = False

TARGET = "jax_softmax_sharded"

_PRIMITIVES = {}


def partitioned(primitive, platform, local):
    """The rule `local`, which lowers a call on one device, made one for programs of several and for an `axis_name`.

    A platform of None is one without kernels: its jax.numpy is divided by XLA itself.
    """
    _PRIMITIVES[primitive.name] = primitive
    over_mesh_axes = mlir.lower_fun(functools.partial(_over_mesh_axes, primitive.name), multiple_results=False)

    def rule(ctx, *operands, axis_name, **params):
        if axis_name:
            return over_mesh_axes(ctx, *operands, axis_name=axis_name, **params)
        devices, partly_manual = _devices(ctx)
        if devices == 1 or platform is None:
            return local(ctx, *operands, **params)
        shapes = [aval.shape for aval in ctx.avals_in]
        if not AVAILABLE:
            _warn_of_a_gather(f"jax_softmax cannot divide its calls with JAX {jax.__version__}", "Use jax.shard_map")
            return local(ctx, *operands, **params)
        if not all(isinstance(n, int) for shape in shapes for n in shape):
            _warn_of_a_gather("a shape is symbolic", "Export with known shapes, or use jax.shard_map")
            return local(ctx, *operands, **params)
        if partly_manual and not getattr(jax.config, "jax_use_shardy_partitioner", True):
            _warn_of_a_gather(
                "GSPMD does not divide calls inside a partly manual shard_map",
                "Leave jax_use_shardy_partitioner on, or make every mesh axis manual",
            )
        (result,) = ctx.avals_out
        config = {"primitive": primitive.name, "platform": platform, "devices": devices, "params": params}
        call = stablehlo.CustomCallOp(
            [ir.RankedTensorType.get(result.shape, mlir.dtype_to_ir_type(result.dtype))],
            operands,
            call_target_name=ir.StringAttr.get(TARGET),
            has_side_effect=ir.BoolAttr.get(False),
            api_version=ir.IntegerAttr.get(ir.IntegerType.get_signless(32), 2),
            called_computations=ir.ArrayAttr.get([]),
            backend_config=ir.StringAttr.get(json.dumps(config)),
        )
        call.attributes["sdy.sharding_rule"] = ir.Attribute.parse(sharding_rule(shapes))
        return call.results

    return rule


def divided_by_xla(primitive, local, by_reference):
    """The rule `local`, and for programs of several devices one of jax.numpy, which XLA divides by itself."""
    over_mesh_axes = mlir.lower_fun(functools.partial(_over_mesh_axes, primitive.name), multiple_results=True)

    def rule(ctx, *operands, axis_name, **params):
        if axis_name:
            return over_mesh_axes(ctx, *operands, axis_name=axis_name, **params)
        return (local if _devices(ctx)[0] == 1 else by_reference)(ctx, *operands, **params)

    return rule


def _over_mesh_axes(op, *operands, axes, axis_name):
    """The operator inside shard_map, each device along the mesh axes having a part of every row."""

    def across(value, kind):
        return {"max": jax.lax.pmax, "sum": jax.lax.psum}[kind](value, axis_name)

    return reference.apply(op, axes, *operands, across=across)


def _devices(ctx) -> tuple[int, bool]:
    """How many devices XLA divides the program among, and whether it does so inside a partly manual shard_map."""
    context = ctx.module_context.axis_context
    if hasattr(context, "num_devices"):  # ShardingContext, of jit
        return context.num_devices, False
    if hasattr(context, "manual_axes"):  # SPMDAxisContext, of shard_map
        automatic = [n for name, n in context.mesh.shape.items() if name not in context.manual_axes]
        return (context.mesh.size, True) if math.prod(automatic) > 1 else (1, False)
    return 1, False  # ReplicaAxisContext, of pmap


def _warn_of_a_gather(why: str, instead: str) -> None:
    warnings.warn(
        f"jax_softmax: an operand that is sharded over devices may be gathered onto each of them: {why}. {instead}.",
        stacklevel=2,
    )


def _aligned(shape, like):
    """For each dimension of a shape that broadcasts to `like`: the dimension of `like` that it is, or None."""
    missing = len(like) - len(shape)
    return [d + missing if n == like[d + missing] else None for d, n in enumerate(shape)]


def sharding_rule(shapes) -> str:
    """Shardy's rule of a call: operands that broadcast to the first one's shape, which is also the result's.

    A reduced dimension is an ordinary one here: `_divide` sees to it that it may be sharded.
    """
    factors, sizes = [], []

    def factor(n):
        k = len(sizes)
        sizes.append(f"{name(k)}={n}")
        return name(k)

    def name(k):
        return chr(ord("i") + k) if k < 18 else f"z_{k - 17}"

    of_x = [factor(n) for n in shapes[0]]
    for shape in shapes:
        dims = zip(_aligned(shape, shapes[0]), shape, strict=True)
        factors.append(", ".join(factor(n) if d is None else of_x[d] for d, n in dims))
    operands = ", ".join(f"[{f}]" for f in factors)
    return f"#sdy.op_sharding_rule<({operands})->([{', '.join(of_x)}]) {{{', '.join(sizes)}}}, custom>"


def _divide(arg_shapes, arg_shardings, result_shape, result_sharding, config):
    """What XLA asks of a call that it divides: a device's program, and the shardings of the operands and the result.

    The result's sharding decides; operands that have another one are brought to it.
    """
    config = json.loads(config)
    params = {name: tuple(value) if isinstance(value, list) else value for name, value in config["params"].items()}
    shape = tuple(result_shape.dimensions())
    devices = _device_array(result_sharding, len(shape))
    spread = [d for d in params["axes"] if devices.shape[d] > 1]
    if spread and devices.size < config["devices"]:
        # XLA numbers the devices anew for each group of the manual axes: those that share a row cannot be named.
        _warn_of_a_gather(
            "inside a partly manual shard_map a reduced axis is sharded over a mesh axis that is not manual",
            "Make that mesh axis manual too and pass it as axis_name",
        )
        devices = _projected(devices, [None if d in spread else d for d in range(len(shape))])
        spread = []

    part = [-(-n // tiles) for n, tiles in zip(shape, devices.shape, strict=False)]
    specs, shardings = [], []
    for arg in arg_shapes:
        dims = _aligned(arg.dimensions(), shape)
        specs.append(jax.ShapeDtypeStruct([1 if d is None else part[d] for d in dims], arg.numpy_dtype()))
        shardings.append(_sharding(_projected(devices, dims)))
    primitive = _PRIMITIVES[config["primitive"]]
    if spread:
        function = _on_parts_of_rows(primitive.name, params["axes"], shape, part, devices, spread)
    else:
        function = functools.partial(primitive.bind, axis_name=(), **params)
    return _lowered_apart(function, specs, config["platform"]), shardings, _sharding(devices)


def _device_array(sharding, ndim):
    """The devices, by the part of each dimension that they hold, and in a last dimension those that hold the same."""
    if not sharding.is_tiled():
        return np.zeros([1] * (ndim + 1), np.int64)
    tiles = sharding.tile_assignment_dimensions()
    return np.reshape(sharding.tile_assignment_devices(), [*tiles[:ndim], -1])


def _projected(devices, dims):
    """The device array of an array whose dimensions are those of another one, None being one that is not sharded."""
    named = [d for d in dims if d is not None]
    rest = [d for d in range(devices.ndim) if d not in named]
    return devices.transpose(named + rest).reshape([1 if d is None else devices.shape[d] for d in dims] + [-1])


def _sharding(devices):
    if math.prod(devices.shape[:-1]) == 1:
        return _HloSharding.replicate()
    return _HloSharding.subgroup_with_device_ordering(np.ascontiguousarray(devices), [_REPLICATED])


def _on_parts_of_rows(op, axes, shape, part, devices, spread):
    """The operator of a device that holds a part of each row, the reduced dimensions `spread` being divided."""
    others = [d for d in range(devices.ndim) if d not in spread]
    sharers = devices.transpose(others + spread).reshape(-1, math.prod(devices.shape[d] for d in spread))
    groups = tuple(map(tuple, sharers.tolist()))

    def across(value, kind):
        return _all_reduce_p.bind(value, kind=kind, groups=groups)

    def function(*operands):
        for d in spread:
            if shape[d] % devices.shape[d]:
                operands = _without_filling(operands, d)
        return reference.apply(op, axes, *operands, across=across)

    def _without_filling(operands, d):
        """The operands with a mask that leaves out what the last parts of dimension d are filled up with."""
        place = np.empty(devices.size, np.int32)
        place[devices] = np.indices(devices.shape)[d]
        first = jnp.asarray(place)[_device_number_p.bind()] * part[d]
        index = jax.lax.broadcasted_iota(jnp.int32, [n if k == d else 1 for k, n in enumerate(part)], d)
        inside = first + index < shape[d]
        *floats, last = operands
        return (*floats, last & inside) if last.dtype == bool else (*operands, inside)

    return function


def _lowered_apart(function, specs, platform):
    """The function as StableHLO for one device, in a thread of its own: what is set in this one must not matter.

    (That is a mesh, or disable_jit. 64-bit dtypes are on because the operands' dtypes are settled.)
    """

    def lowered():
        with jax.enable_x64(True):
            program = jax.jit(function, keep_unused=True).trace(*specs).lower(lowering_platforms=(platform,))
            return program.compiler_ir("stablehlo")

    with ThreadPoolExecutor(max_workers=1) as pool:
        return mlir.module_to_bytecode(pool.submit(lowered).result())


# ---- Collectives of the device's program, which has no mesh: devices are numbered as XLA numbers them.

_all_reduce_p = Primitive("jax_softmax_all_reduce")
_all_reduce_p.def_abstract_eval(lambda value, *, kind, groups: value)


def _all_reduce(ctx, value, *, kind, groups):
    reduce = stablehlo.AllReduceOp(
        [value.type],
        [value],
        replica_groups=ir.DenseIntElementsAttr.get(np.array(groups, np.int64)),
        channel_handle=stablehlo.ChannelHandle.get(1, 1),
        use_global_device_ids=ir.BoolAttr.get(True),
    )
    scalar = ir.RankedTensorType.get([], value.type.element_type)
    block = reduce.regions[0].blocks.append(scalar, scalar)
    with ir.InsertionPoint(block):
        operation = {"max": stablehlo.MaxOp, "sum": stablehlo.AddOp}[kind]
        stablehlo.return_([operation(*block.arguments).result])
    return reduce.results


mlir.register_lowering(_all_reduce_p, _all_reduce)

_device_number_p = Primitive("jax_softmax_device_number")
_device_number_p.def_abstract_eval(lambda: jax.core.ShapedArray((), np.dtype(np.uint32)))
mlir.register_lowering(_device_number_p, lambda ctx: stablehlo.PartitionIdOp().results)


# ---- Registration. The last two callbacks are GSPMD's, which has no sharding rules.


def _sharding_from_user(sharding, shape, config):
    return sharding


def _sharding_from_operands(arg_shapes, arg_shardings, result_shape, config):
    ndim = len(result_shape.dimensions())
    whole = [s for s, arg in zip(arg_shardings, arg_shapes, strict=True) if len(arg.dimensions()) == ndim]
    return next((s for s in whole if s.is_tiled()), arg_shardings[0])


def _register():
    register = functools.partial(
        _register_partitioner,
        TARGET,
        _sharding_from_user,
        _divide,
        _sharding_from_operands,
        can_side_effecting_have_replicated_sharding=True,
    )
    register()
    register_plugin_callbacks(register)


if AVAILABLE:
    _register()
