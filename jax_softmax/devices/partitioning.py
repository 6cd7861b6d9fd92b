"""How a call is lowered in a program for several devices: as a custom call that XLA divides among them.

XLA would gather the operands of a custom call that it cannot divide. So here a call becomes a custom call of another
target, `TARGET`, for which there is no kernel and which never runs. It has a Shardy rule that says which dimensions of
operands and results are the same, by which XLA propagates shardings through it. When XLA divides the program, it asks
`division.py` for the program of each device.

Operands and results have x's dimensions, some of them with extent 1. The call holds the primitive's name and parameters
as text, and no pointer: so exported programs and JAX's persistent cache keep working.
"""

import functools
import json
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import mlir

from jax_softmax import _kernels, _private
from jax_softmax.devices import layouts, row_shards
from jax_softmax.primitives.types import MeshAxes, Shape

ir, stablehlo = _private.DIVISION.ir, _private.DIVISION.stablehlo

TARGET = "jax_softmax_sharded"
Rule = Callable[..., Any]  # of lowering, as `mlir.lower_fun` makes it


def partitioned(primitive: Primitive, platform: str | None, lower_local: Rule, lower_reference: Rule) -> Rule:
    """A lowering rule for any number of devices and any axis_name, from two rules for one device without axis_name.

    `lower_local` is used for one device and by `division.py`. `lower_reference` lowers to jax.numpy, which XLA divides
    by itself, and is used where the call cannot be divided here. A platform of None is any without kernels.
    """
    lower_in_shard_map = mlir.lower_fun(
        functools.partial(row_shards.in_shard_map, primitive.name), multiple_results=primitive.multiple_results
    )

    def rule(ctx: mlir.LoweringRuleContext, *operands: Any, axis_name: MeshAxes, **params: Any) -> Any:
        if axis_name:
            return lower_in_shard_map(ctx, *operands, axis_name=axis_name, **params)
        if platform is None:
            return lower_local(ctx, *operands, **params)
        return divided(
            ctx,
            operands,
            {"primitive": primitive.name, "platform": platform, "params": params},
            local=lambda: lower_local(ctx, *operands, **params),
            by_reference=lambda: lower_reference(ctx, *operands, **params),
        )

    return rule


def divided(
    ctx: mlir.LoweringRuleContext,
    operands: Sequence[Any],
    config: dict[str, Any],
    local: Callable[[], Any],
    by_reference: Callable[[], Any],
    shape: Shape | None = None,
) -> Any:
    """The results of a call: in a program for several devices, of a custom call that XLA divides.

    `config` has the name of the primitive, the platform that a device's program is for, and the primitive's parameters:
    lists, numbers and text. `local()` and `by_reference()` lower the call for one device, and to jax.numpy. `shape` is
    the shape that all operands and results broadcast to, by default the first operand's.
    """
    devices = _private.devices_of(ctx)
    if devices == 1:
        return local()
    avals_in: Sequence[Any] = ctx.avals_in
    shapes, results = ([aval.shape for aval in avals] for avals in (avals_in, ctx.avals_out))
    if not _private.DIVISION.available:  # there was a warning when the package was imported
        return by_reference()
    if why := _why_undivided(shapes, devices):
        warn(f"{config['primitive']} runs without its kernel: {why}")
        return by_reference()
    x, *others = avals_in
    shape = x.shape if shape is None else shape
    config = {**config, "shape": shape, "devices": devices, "version": _kernels.CALL_VERSION}
    # The results are laid out as x, and no other operand may change that; but where the results are of rows alone, an
    # array of x's shape and dtype may, as the second one of kl_divergence.
    of_rows = x.shape != results[0]
    may_lay_out = [True, *(of_rows and (a.shape, a.dtype) == (x.shape, x.dtype) for a in others)]
    operands = [a if may else _with_weaker_sharding(a) for a, may in zip(operands, may_lay_out, strict=True)]
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


def _why_undivided(shapes: list[Shape], devices: int | None) -> str | None:
    """Why a call cannot be divided, and what to do instead; or None if it can."""
    if devices is None:
        return f"JAX {jax.__version__} does not say for how many devices a program is. Upgrade jax_softmax"
    if not all(isinstance(n, int) for shape in shapes for n in shape):
        return "a shape is symbolic in a program for several devices. Export with known shapes, or use jax.shard_map"
    if not getattr(jax.config, "jax_use_shardy_partitioner", True):
        return "GSPMD, which takes no rules of sharding, is on. Leave jax_use_shardy_partitioner on"
    return None


def _with_weaker_sharding(a: Any) -> Any:
    """The operand behind operations through which Shardy propagates its sharding after those of other operands.

    Where two operands divide the same dimension of the result by different mesh axes, Shardy leaves it whole, and XLA
    gathers both. This way the result is laid out as the first operand, and this operand is brought to that layout.
    Shardy propagates forward through broadcasts last; XLA removes the broadcast again.
    """
    shape, n = a.type.shape, len(a.type.shape)
    twice = ir.RankedTensorType.get([2, *shape], a.type.element_type)
    both = stablehlo.broadcast_in_dim(twice, a, ir.DenseI64ArrayAttr.get(range(1, n + 1)))
    one = stablehlo.slice(both, *(ir.DenseI64ArrayAttr.get(v) for v in ([0] * (n + 1), [1, *shape], [1] * (n + 1))))
    return stablehlo.reshape(a.type, one)


def sharding_rule(shape: Shape, shapes: list[Shape], results: list[Shape]) -> str:
    """Shardy's rule for operands and results of these shapes, which all broadcast to `shape`.

    The rule treats reduced dimensions as any others: `division.py` sees to it that they may be sharded.
    """
    sizes: list[str] = []

    def factor(n: int) -> str:
        k = len(sizes)
        name = chr(ord("i") + k) if k < 18 else f"z_{k - 17}"
        sizes.append(f"{name}={n}")
        return name

    def factors_of(own: Shape) -> str:
        dims = zip(layouts.matching_dims(own, shape), own, strict=True)
        return f"[{', '.join(factor(n) if d is None else factors[d] for d, n in dims)}]"

    factors = [factor(n) for n in shape]
    operands, made = (", ".join(map(factors_of, group)) for group in (shapes, results))
    return f"#sdy.op_sharding_rule<({operands})->({made}) {{{', '.join(sizes)}}}, custom>"


# ---- Warnings.

_warned: set[str] = set()


def warn(message: str) -> None:
    """Warns, once in this process for each message."""
    if message not in _warned:
        warnings.warn(f"jax_softmax: {message}.", stacklevel=3)
        _warned.add(message)


def warn_anyway(message: str) -> None:
    """The same where nothing may be raised: a filter that turns warnings into errors does not count."""
    try:
        warn(message)
    except UserWarning:
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warn(message)
