"""What division among devices takes of JAX's private names: see `_private.py`."""

import math

import jax

from jax_softmax import _private

_division = _private.FOUND["division"]
AVAILABLE = _division.available
HloSharding, REPLICATED = _division.HloSharding, _division.REPLICATED
register_custom_call_partitioner = _division.register_custom_call_partitioner
register_plugin_callbacks = _division.register_plugin_callbacks
ir, stablehlo = _division.ir, _division.stablehlo
module_to_bytecode, dtype_to_ir_type = _division.module_to_bytecode, _division.dtype_to_ir_type


def shardy_is_used() -> bool:
    """And not GSPMD, its predecessor."""
    return getattr(jax.config, "jax_use_shardy_partitioner", True)


def _axis_context(ctx):
    return getattr(ctx.module_context, "axis_context", None)


def devices_of(ctx) -> tuple[int | None, bool]:
    """How many devices XLA divides the program among, and whether it does so inside a partly manual shard_map.

    None: several perhaps, and this JAX does not say.
    """
    context = _axis_context(ctx)
    if context is None:
        return 1 if jax.device_count() == 1 else None, False
    if hasattr(context, "num_devices"):  # ShardingContext, of jit
        return context.num_devices, False
    if hasattr(context, "manual_axes"):  # SPMDAxisContext, of shard_map
        automatic = [n for name, n in context.mesh.shape.items() if name not in context.manual_axes]
        return (context.mesh.size, True) if math.prod(automatic) > 1 else (1, False)
    return 1, False  # ReplicaAxisContext, of pmap
