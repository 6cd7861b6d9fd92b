"""Arrays that are sharded over devices: each device computes its part, and only row states travel.

XLA would gather the operands of a custom call that it cannot divide. So a call that is lowered for several devices
becomes a custom call of a target of its own, `TARGET`, that no kernel has and that never runs: with a Shardy rule that
says which dimensions of the operands are one, XLA propagates shardings through it, and when it divides the program
among the devices it asks `_divide` for what each of them shall do. That is the primitive on the device's part, lowered
as on a single device whatever its lowering is; or, where a reduced axis is sharded, the operator in jax.numpy with what
is known of the rows' parts, by a kernel that reads them once, reduced over the devices that share a row.

An operand or a result has x's dimensions, but for those along which its extent is 1 and x's is larger.

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

from jax_softmax.devices import layouts
from jax_softmax.primitives import labels, reference
from jax_softmax.primitives.rows import normalizer

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


def partitioned(primitive, platform, local, by_reference):
    """The rule `local`, which lowers a call on one device, made one for programs of several and for an `axis_name`.

    What cannot be divided here is lowered by the rule `by_reference`: its jax.numpy is divided by XLA itself. A
    platform of None is one without kernels, where both are the same.
    """
    _PRIMITIVES[primitive.name] = primitive
    several = primitive.multiple_results
    over_mesh_axes = mlir.lower_fun(functools.partial(_over_mesh_axes, primitive.name), multiple_results=several)

    def rule(ctx, *operands, axis_name, **params):
        if axis_name:
            return over_mesh_axes(ctx, *operands, axis_name=axis_name, **params)
        devices, partly_manual = _devices(ctx)
        if devices == 1 or platform is None:
            return local(ctx, *operands, **params)
        shapes, results = ([aval.shape for aval in avals] for avals in (ctx.avals_in, ctx.avals_out))
        why = _undivided(shapes, partly_manual)
        if why:
            _warn(f"{primitive.name} runs without its kernel: {why}")
            return by_reference(ctx, *operands, **params)
        config = {"primitive": primitive.name, "platform": platform, "devices": devices, "params": params}
        x, *others = ctx.avals_in
        of_rows = x.shape != results[0]  # which may as well lie as the second array of x's shape does
        leads = [True, *(of_rows and (aval.shape, aval.dtype) == (x.shape, x.dtype) for aval in others)]
        operands = [a if first else _following(a) for a, first in zip(operands, leads, strict=True)]
        call = stablehlo.CustomCallOp(
            [ir.RankedTensorType.get(aval.shape, mlir.dtype_to_ir_type(aval.dtype)) for aval in ctx.avals_out],
            operands,
            call_target_name=ir.StringAttr.get(TARGET),
            has_side_effect=ir.BoolAttr.get(False),
            api_version=ir.IntegerAttr.get(ir.IntegerType.get_signless(32), 2),
            called_computations=ir.ArrayAttr.get([]),
            backend_config=ir.StringAttr.get(json.dumps(config)),
        )
        call.attributes["sdy.sharding_rule"] = ir.Attribute.parse(sharding_rule(shapes, results))
        return call.results

    return rule


def _undivided(shapes, partly_manual) -> str | None:
    """Why a call of a program for several devices cannot be divided, and what to do instead; or None."""
    if not AVAILABLE:
        return f"jax_softmax cannot divide its calls with JAX {jax.__version__}. Use jax.shard_map"
    if not all(isinstance(n, int) for shape in shapes for n in shape):
        return "a shape is symbolic in a program for several devices. Export with known shapes, or use jax.shard_map"
    if partly_manual and not getattr(jax.config, "jax_use_shardy_partitioner", True):
        return (
            "GSPMD does not divide calls inside a partly manual shard_map. Leave jax_use_shardy_partitioner on, or "
            "make every mesh axis manual"
        )
    return None


def _following(a):
    """The operand, by operations through which Shardy propagates its layout to the call after that of the others.

    A dimension of the result that two operands cut by different mesh axes Shardy leaves whole, and XLA gathers it. Like
    this the result lies as the operand that comes first, and this one is brought to that layout. Shardy propagates
    forward through a broadcast last; XLA removes it again.
    """
    shape, n = a.type.shape, len(a.type.shape)
    twice = ir.RankedTensorType.get([2, *shape], a.type.element_type)
    both = stablehlo.broadcast_in_dim(twice, a, ir.DenseI64ArrayAttr.get(range(1, n + 1)))
    one = stablehlo.slice(both, *(ir.DenseI64ArrayAttr.get(v) for v in ([0] * (n + 1), [1, *shape], [1] * (n + 1))))
    return stablehlo.reshape(a.type, one)


class _Across:
    """What a device that has parts of rows knows of them, and how it reduces a value over all that share the rows."""

    def __init__(self, all_reduce, label_of_part=None):
        self._all_reduce = all_reduce
        self.label_of_part = label_of_part  # of labels: whether they exist, and what they are in this device's part

    def __call__(self, value, kind):
        return self._all_reduce(value, kind)

    @staticmethod
    def normalizer(x, where, axes):
        if x.dtype.name in reference.NARROW:  # which no kernel with results for rows reads
            return reference.logsumexp(x, where, axes)
        return normalizer(x, where, axes, ())


def _over_mesh_axes(op, *operands, axes, axis_name):
    """The operator inside shard_map, each device along the mesh axes having a part of every row."""

    def all_reduce(value, kind):
        return {"max": jax.lax.pmax, "sum": jax.lax.psum}[kind](value, axis_name)

    return reference.apply(op, axes, *operands, across=_Across(all_reduce))


def _devices(ctx) -> tuple[int, bool]:
    """How many devices XLA divides the program among, and whether it does so inside a partly manual shard_map."""
    context = ctx.module_context.axis_context
    if hasattr(context, "num_devices"):  # ShardingContext, of jit
        return context.num_devices, False
    if hasattr(context, "manual_axes"):  # SPMDAxisContext, of shard_map
        automatic = [n for name, n in context.mesh.shape.items() if name not in context.manual_axes]
        return (context.mesh.size, True) if math.prod(automatic) > 1 else (1, False)
    return 1, False  # ReplicaAxisContext, of pmap


_warned = set()


def _warn(message: str) -> None:
    """Warns, once for all calls of which the same is to be said."""
    if message not in _warned:
        warnings.warn(f"jax_softmax: {message}.", stacklevel=3)
        _warned.add(message)


def _warn_inside_xla(message: str) -> None:
    """The same where nothing may be raised: a filter that makes errors of warnings is not heeded."""
    try:
        _warn(message)
    except UserWarning:
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            _warn(message)


def sharding_rule(shapes, results) -> str:
    """Shardy's rule of a call, given the shapes of operands and results: all broadcast to the first operand's.

    A reduced dimension is an ordinary one here: `_divide` sees to it that it may be sharded.
    """
    sizes = []

    def factor(n):
        k = len(sizes)
        name = chr(ord("i") + k) if k < 18 else f"z_{k - 17}"
        sizes.append(f"{name}={n}")
        return name

    def factors_of(shape):
        dims = zip(layouts.aligned(shape, shapes[0]), shape, strict=True)
        return f"[{', '.join(factor(n) if d is None else of_x[d] for d, n in dims)}]"

    of_x = [factor(n) for n in shapes[0]]
    operands, results = (", ".join(map(factors_of, group)) for group in (shapes, results))
    return f"#sdy.op_sharding_rule<({operands})->({results}) {{{', '.join(sizes)}}}, custom>"


def _divide(arg_shapes, arg_shardings, result_shape, result_sharding, config):
    """What XLA asks of a call that it divides: a device's program, and the shardings of the operands and the result.

    All operands and results have one layout, `_common`. What has another one is brought to it: by XLA, which cuts what
    is whole for nothing, or by the program itself, if a mesh axis goes to another dimension. (XLA can do that as well,
    but JAX 0.12's gathers, its HloShardingV3 being of another kind than the shardings of a callback.)
    """
    config = json.loads(config)
    params = {name: tuple(value) if isinstance(value, list) else value for name, value in config["params"].items()}
    shape = tuple(arg_shapes[0].dimensions())
    parts = result_sharding.tuple_elements() if result_shape.is_tuple() else [result_sharding]
    results = [_Laid(result, part, shape) for result, part in zip(_parts_of_tuple(result_shape), parts, strict=True)]
    operands = [_Laid(arg, sharding, shape) for arg, sharding in zip(arg_shapes, arg_shardings, strict=True)]
    layout = _common(operands, results, shape)
    spread, why = [d for d in params["axes"] if layout.shape[d] > 1], None
    # Else inside a partly manual shard_map, where XLA numbers the devices anew for each group of the manual axes.
    nameable = layout.size == config["devices"]
    if spread and not nameable:
        why = (
            "inside a partly manual shard_map a reduced axis is sharded over a mesh axis that is not manual. Make that "
            "mesh axis manual too and pass it as axis_name"
        )
        layout = layouts.projected(layout, [None if d in spread else d for d in range(len(shape))])
        spread = []

    given, moves = [], []  # of each operand the layout that XLA gives it in, and what brings it to the common one
    for laid in operands:
        wanted = layouts.projected(layout, laid.dims)
        lies = layouts.refined(laid.layout, wanted)  # but for what is cut for nothing
        moves.append(layouts.all_to_all(lies, wanted, laid.shape) if nameable else None)
        given.append(lies if moves[-1] else wanted)
        if not moves[-1] and not layouts.same(lies, wanted):
            why = why or (
                "its layout does not go together with that of the result, or of another operand. Bring it to that one "
                "before, by jax.lax.with_sharding_constraint or jax.sharding.reshard"
            )
    if why:
        _warn_inside_xla(f"an operand that is sharded over devices may be gathered onto each of them: {why}")
    primitive = _PRIMITIVES[config["primitive"]]
    if spread:
        function = _on_parts_of_rows(primitive.name, params["axes"], shape, layout, spread)
    else:
        function = functools.partial(primitive.bind, axis_name=(), **params)
    specs = [
        jax.ShapeDtypeStruct(layouts.part_of(arg.dimensions(), lies), arg.numpy_dtype())
        for arg, lies in zip(arg_shapes, given, strict=True)
    ]

    def after_moves(*parts):
        return function(*(_all_to_all_p.bind(a, **move) if move else a for a, move in zip(parts, moves, strict=True)))

    program = _lowered_apart(after_moves, specs, config["platform"])
    return program, [_sharding(lies) for lies in given], _result_sharding(result_shape, layout, results)


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
    return _HloSharding.tuple_sharding(result_shape, shardings) if result_shape.is_tuple() else shardings[0]


def _layout(sharding, ndim):
    if not sharding.is_tiled():
        return layouts.whole(ndim)
    tiles = sharding.tile_assignment_dimensions()
    return np.reshape(sharding.tile_assignment_devices(), [*tiles[:ndim], -1])


def _sharding(layout):
    if math.prod(layout.shape[:-1]) == 1:
        return _HloSharding.replicate()
    return _HloSharding.subgroup_with_device_ordering(np.ascontiguousarray(layout), [_REPLICATED])


def _on_parts_of_rows(op, axes, shape, layout, spread):
    """The operator of a device that holds a part of each row, the reduced dimensions `spread` being divided."""
    part = layouts.part_of(shape, layout)
    others = [d for d in range(layout.ndim) if d not in spread]
    sharers = layout.transpose(others + spread).reshape(-1, math.prod(layout.shape[d] for d in spread))
    groups = tuple(map(tuple, sharers.tolist()))

    def all_reduce(value, kind):
        return _all_reduce_p.bind(value, kind=kind, groups=groups)

    def function(*operands):
        for d in spread:
            if shape[d] % layout.shape[d]:
                operands = _without_filling(operands, d)
        return reference.apply(op, axes, *operands, across=_Across(all_reduce, label_of_part))

    def label_of_part(label):
        here = labels.label_of_part(label, axes, shape, part, first_index)
        return labels.exists(label, shape, axes), here

    def first_index(d):
        """Where this device's part begins in dimension d."""
        place = np.empty(layout.size, np.int32)
        place[layout] = np.indices(layout.shape)[d]
        return jnp.asarray(place)[_device_number_p.bind()] * part[d]

    def _without_filling(operands, d):
        """The operands with a mask that leaves out what the last parts of dimension d are filled up with."""
        index = jax.lax.broadcasted_iota(jnp.int32, [n if k == d else 1 for k, n in enumerate(part)], d)
        inside = first_index(d) + index < shape[d]
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

_all_to_all_p = Primitive("jax_softmax_all_to_all")


@_all_to_all_p.def_abstract_eval
def _(a, *, groups, cut, joined):
    shape = list(a.shape)
    shape[cut] //= len(groups[0])
    shape[joined] *= len(groups[0])
    return a.update(shape=tuple(shape))


def _all_to_all(ctx, a, *, groups, cut, joined):
    return stablehlo.AllToAllOp(
        [a],
        split_dimension=ir.IntegerAttr.get(ir.IntegerType.get_signless(64), cut),
        concat_dimension=ir.IntegerAttr.get(ir.IntegerType.get_signless(64), joined),
        split_count=ir.IntegerAttr.get(ir.IntegerType.get_signless(64), len(groups[0])),
        replica_groups=ir.DenseIntElementsAttr.get(np.array(groups, np.int64)),
        channel_handle=stablehlo.ChannelHandle.get(1, 1),
    ).results


mlir.register_lowering(_all_to_all_p, _all_to_all)

_device_number_p = Primitive("jax_softmax_device_number")
_device_number_p.def_abstract_eval(lambda: jax.core.ShapedArray((), np.dtype(np.uint32)))
mlir.register_lowering(_device_number_p, lambda ctx: stablehlo.PartitionIdOp().results)


# ---- Registration. The last two callbacks are GSPMD's, which has no sharding rules.


def _sharding_from_user(sharding, shape, config):
    return sharding


def _sharding_from_operands(arg_shapes, arg_shardings, result_shape, config):
    shape = tuple(arg_shapes[0].dimensions())
    known = [(arg, sharding) for arg, sharding in zip(arg_shapes, arg_shardings, strict=True) if sharding is not None]
    if not known:
        return None
    layout = _common([_Laid(arg, sharding, shape) for arg, sharding in known], [], shape)
    results = [_Laid(result, _HloSharding.replicate(), shape) for result in _parts_of_tuple(result_shape)]
    return _result_sharding(result_shape, layout, results)


def register() -> None:
    """Tells XLA who divides the calls, if this JAX lets it be told."""
    if not AVAILABLE:
        return
    tell = functools.partial(
        _register_partitioner,
        TARGET,
        _sharding_from_user,
        _divide,
        _sharding_from_operands,
        can_side_effecting_have_replicated_sharding=True,
    )
    tell()
    register_plugin_callbacks(tell)
