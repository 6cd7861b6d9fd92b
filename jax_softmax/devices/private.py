"""The names of JAX that are private, but for checkify's, which `primitives/interpreters.py` needs."""

import math

import jax

try:
    from jax._src import xla_bridge
    from jax._src.lib import xla_client

    HloSharding = xla_client.HloSharding
    REPLICATED = xla_client.OpSharding.Type.REPLICATED
    register_custom_call_partitioner = xla_client.register_custom_call_partitioner
    register_plugin_callbacks = xla_bridge.register_plugin_callbacks
    AVAILABLE = True
except (ImportError, AttributeError):  # a JAX that moved them
    AVAILABLE = False


def shardy_is_used() -> bool:
    """And not GSPMD, its predecessor."""
    return getattr(jax.config, "jax_use_shardy_partitioner", True)


def devices_of(ctx) -> tuple[int, bool]:
    """How many devices XLA divides the program among, and whether it does so inside a partly manual shard_map."""
    context = ctx.module_context.axis_context
    if hasattr(context, "num_devices"):  # ShardingContext, of jit
        return context.num_devices, False
    if hasattr(context, "manual_axes"):  # SPMDAxisContext, of shard_map
        automatic = [n for name, n in context.mesh.shape.items() if name not in context.manual_axes]
        return (context.mesh.size, True) if math.prod(automatic) > 1 else (1, False)
    return 1, False  # ReplicaAxisContext, of pmap
