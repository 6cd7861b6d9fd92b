"""How a call is lowered in a program for several devices: as a custom call that XLA divides among them.

XLA would gather the operands of a custom call that it cannot divide. So a call that is lowered for several devices
becomes a custom call of a target of its own, `TARGET`, that no kernel has and that never runs: with a Shardy rule that
says which dimensions of the operands are one, XLA propagates shardings through it, and when it divides the program
among the devices it asks `division.py` what each of them shall do.

An operand or a result has x's dimensions, but for those along which its extent is 1 and x's is larger.

The call carries the primitive's name and parameters as text and no pointer, so that exported programs and JAX's
persistent cache keep working.
"""

import functools
import json
import warnings

import jax
from jax.interpreters import mlir

from jax_softmax import _kernels, _private
from jax_softmax.devices import layouts, parts

ir, stablehlo = _private.DIVISION.ir, _private.DIVISION.stablehlo

TARGET = "jax_softmax_sharded"


def partitioned(primitive, platform, local, by_reference):
    """The rule `local`, which lowers a call on one device, made one for programs of several and for an `axis_name`.

    What cannot be divided here is lowered by the rule `by_reference`: its jax.numpy is divided by XLA itself. A
    platform of None is one without kernels, where both are the same.
    """
    several = primitive.multiple_results
    over_mesh_axes = mlir.lower_fun(functools.partial(parts.over_mesh_axes, primitive.name), multiple_results=several)

    def rule(ctx, *operands, axis_name, **params):
        if axis_name:
            return over_mesh_axes(ctx, *operands, axis_name=axis_name, **params)
        if platform is None:
            return local(ctx, *operands, **params)
        return divided(
            ctx,
            operands,
            {"primitive": primitive.name, "platform": platform, "params": params},
            local=lambda: local(ctx, *operands, **params),
            by_reference=lambda: by_reference(ctx, *operands, **params),
        )

    return rule


def divided(ctx, operands, config, local, by_reference, shape=None):
    """The results of a call, where the program is for several devices, by a custom call that XLA divides.

    `config` names the primitive, the platform that a device's program is for, and the primitive's parameters: lists,
    numbers and text. `local` and `by_reference` are functions that lower the call for one device, and in jax.numpy.
    `shape`: that which all operands and results broadcast to, if it is not the first one's.
    """
    devices = _private.devices_of(ctx)
    if devices == 1:
        return local()
    shapes, results = ([aval.shape for aval in avals] for avals in (ctx.avals_in, ctx.avals_out))
    if not _private.DIVISION.available:  # which was said when the package was imported
        return by_reference()
    why = _undivided(shapes, devices)
    if why:
        warn(f"{config['primitive']} runs without its kernel: {why}")
        return by_reference()
    x, *others = ctx.avals_in
    shape = x.shape if shape is None else shape
    # Exported programs hold the version.
    config = {**config, "shape": shape, "devices": devices, "version": _kernels.CALL_VERSION}
    of_rows = x.shape != results[0]  # which may as well lie as the second array of x's shape does
    leads = [True, *(of_rows and (aval.shape, aval.dtype) == (x.shape, x.dtype) for aval in others)]
    operands = [a if first else _following(a) for a, first in zip(operands, leads, strict=True)]
    call = stablehlo.CustomCallOp(
        [ir.RankedTensorType.get(aval.shape, _private.DIVISION.dtype_to_ir_type(aval.dtype)) for aval in ctx.avals_out],
        operands,
        call_target_name=ir.StringAttr.get(TARGET),
        has_side_effect=ir.BoolAttr.get(False),
        api_version=ir.IntegerAttr.get(ir.IntegerType.get_signless(32), 2),
        called_computations=ir.ArrayAttr.get([]),
        backend_config=ir.StringAttr.get(json.dumps(config)),
    )
    call.attributes["sdy.sharding_rule"] = ir.Attribute.parse(sharding_rule(shape, shapes, results))
    return call.results


def _undivided(shapes, devices) -> str | None:
    """Why a call of a program for several devices cannot be divided, and what to do instead; or None."""
    if devices is None:
        return f"JAX {jax.__version__} does not say for how many devices a program is. Upgrade jax_softmax"
    if not all(isinstance(n, int) for shape in shapes for n in shape):
        return "a shape is symbolic in a program for several devices. Export with known shapes, or use jax.shard_map"
    if not getattr(jax.config, "jax_use_shardy_partitioner", True):
        return "GSPMD, which takes no rules of sharding, is on. Leave jax_use_shardy_partitioner on"
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


def sharding_rule(shape, shapes, results) -> str:
    """Shardy's rule of a call, given the shapes of operands and results, which broadcast to the first one.

    A reduced dimension is an ordinary one here: `division.py` sees to it that it may be sharded.
    """
    sizes = []

    def factor(n):
        k = len(sizes)
        name = chr(ord("i") + k) if k < 18 else f"z_{k - 17}"
        sizes.append(f"{name}={n}")
        return name

    def factors_of(own):
        dims = zip(layouts.aligned(own, shape), own, strict=True)
        return f"[{', '.join(factor(n) if d is None else of_x[d] for d, n in dims)}]"

    of_x = [factor(n) for n in shape]
    operands, results = (", ".join(map(factors_of, group)) for group in (shapes, results))
    return f"#sdy.op_sharding_rule<({operands})->({results}) {{{', '.join(sizes)}}}, custom>"


# ---- What is said where a call cannot be divided.

_warned = set()


def warn(message: str) -> None:
    """Warns, once for all calls of which the same is to be said."""
    if message not in _warned:
        warnings.warn(f"jax_softmax: {message}.", stacklevel=3)
        _warned.add(message)


def warn_anyway(message: str) -> None:
    """The same where nothing may be raised: a filter that makes errors of warnings is not heeded."""
    try:
        warn(message)
    except UserWarning:
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warn(message)
