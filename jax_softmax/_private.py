"""What this package uses of JAX that JAX does not promise to keep, and what does not work with a JAX that lacks it.

All else that is used is public: jax.numpy, jax.ffi, and in jax.core, jax.extend.core and jax.interpreters what
primitives are made of. Private names are in FEATURES, attributes of JAX's objects in the functions below.
"""

import contextlib
import math
import pkgutil
import warnings
from collections.abc import Hashable, Iterable
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax


class Feature(NamedTuple):
    """A feature of this package that needs private names of JAX."""

    off: str  # what does not work without them
    instead: str  # what to do then
    names: dict[str, str]  # from names used here to places in JAX; of "a or b" the first that there is


FEATURES = {
    "division": Feature(
        "programs for several devices run without kernels",
        "use jax.shard_map with axis_name there",
        {
            "HloSharding": "jax._src.lib:xla_client.HloSharding",
            "REPLICATED": "jax._src.lib:xla_client.OpSharding.Type.REPLICATED",
            "register_custom_call_partitioner": "jax._src.lib:xla_client.register_custom_call_partitioner",
            "register_plugin_callbacks": "jax._src.xla_bridge:register_plugin_callbacks",
            "ir": "jax.extend.mlir.ir",
            "stablehlo": "jax.extend.mlir.dialects.stablehlo",
            "module_to_bytecode": "jax.interpreters.mlir:module_to_bytecode",
            "dtype_to_ir_type": "jax.interpreters.mlir:dtype_to_ir_type",
        },
    ),
    "checkify": Feature(
        "checkify does not look for NaNs in results of jax_softmax",
        "use jax_debug_nans",
        {
            "error_checks": "jax._src.checkify:error_checks",
            "nan_error_check": "jax._src.checkify:nan_error_check",
        },
    ),
    "jet": Feature(
        "jax.experimental.jet does not know the operators",
        "nest jax.jvp",
        {"jet": "jax.experimental.jet:jet", "jet_rules": "jax.experimental.jet:jet_rules"},
    ),
    "eager": Feature(
        "calls outside of jax.jit are compiled each time",
        "call the functions under jax.jit",
        {"apply_primitive": "jax.interpreters.xla:apply_primitive"},
    ),
    "function": Feature(
        "fused code is no function of its own in the compiled program",
        "look for its operations there",
        {"core_call_lowering": "jax.interpreters.mlir:core_call_lowering"},
    ),
    "high": Feature(
        "fused functions that hold what JAX calls high-level operations run as under jax.jit",
        "leave these operations outside",
        {
            "lower_jaxpr": "jax._src.interpreters.partial_eval:lower_jaxpr2 or "
            "jax._src.interpreters.partial_eval:lower_jaxpr"
        },
    ),
    "policies": Feature(
        "jax.checkpoint makes all of a fused function again, whatever its policy says",
        "put fuse around the checkpointed function",
        {
            "rules": "jax._src.interpreters.partial_eval:partial_eval_jaxpr_custom_rules",
            "rule_of_calls": "jax._src.interpreters.partial_eval:call_partial_eval_custom_rule",
        },
    ),
    "dead_code": Feature(
        "operations of a fused function whose results nobody reads are kept until it is lowered",
        "put fuse around the differentiated function",
        {
            "rules": "jax._src.interpreters.partial_eval:dce_rules",
            "without_unread": "jax._src.interpreters.partial_eval:dce_jaxpr",
        },
    ),
    "lines": Feature(
        "profiles and errors name lines of jax_softmax and not those that call it",
        "look at the calling lines of a traceback",
        {"register_exclusion": "jax.extend.source_info_util:register_exclusion"},
    ),
}


def _found(feature: str) -> SimpleNamespace:
    """A feature's names as attributes, all None if this JAX lacks one; and `missing`, the places that it lacks."""
    found: dict[str, Any] = dict.fromkeys(FEATURES[feature].names)
    missing: list[str] = []
    for name, place in FEATURES[feature].names.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            for candidate in place.split(" or "):
                with contextlib.suppress(ImportError, AttributeError):
                    found[name] = found[name] or pkgutil.resolve_name(candidate)
            if found[name] is None:
                missing.append(place)
    return SimpleNamespace(**(dict.fromkeys(found) if missing else found), available=not missing, missing=missing)


FOUND = {feature: _found(feature) for feature in FEATURES}
DIVISION = FOUND["division"]


def what_is_off() -> str | None:
    """What does not work with this JAX, for want of which names, and what to do; None if all works."""
    lost = {feature: found.missing for feature, found in FOUND.items() if found.missing}
    if not lost:
        return None
    names = ", ".join(name.replace(":", ".") for names in lost.values() for name in names)
    features = "; ".join(f"{FEATURES[feature].off} ({FEATURES[feature].instead})" for feature in lost)
    return f"JAX {jax.__version__} does not have {names}, so {features}. A newer jax_softmax may know where they are"


# ---- Attributes of equations and jaxprs.


def context_of(eqn: Any) -> AbstractContextManager[Any]:
    """The context in which an equation was traced: the mesh, for example."""
    return getattr(getattr(eqn, "ctx", None), "manager", contextlib.nullcontext())


def at_the_line_of(eqn: Any, like: Any) -> Any:
    """The equation with the source line of another one, for profiles and errors."""
    return eqn.replace(source_info=like.source_info)


def in_the_scope_of(eqn: Any, caller: Any) -> Any:
    """The equation with the scope name of its caller, if there is one, before its own, as in profiles."""
    if caller is None:
        return eqn
    stack = caller.source_info.name_stack + eqn.source_info.name_stack
    return eqn.replace(source_info=eqn.source_info.replace(name_stack=stack))


def without_names(jaxpr: Any) -> Any:
    """The jaxpr without the names of its operands and results, so that their number may change."""
    info = jaxpr.debug_info
    return jaxpr.replace(debug_info=info.with_unknown_names()) if hasattr(info, "with_unknown_names") else jaxpr


def is_high(jaxpr: Any) -> bool:
    """Whether it holds what JAX calls high-level operations, which it replaces by others after differentiation."""
    return getattr(jaxpr, "is_high", False)


def without_unfinished_functions(ctx: Any, before: set[Any]) -> None:
    """Takes functions that are not in `before` and have no end out of the module that is being lowered."""
    for function in functions_of_module(ctx):
        blocks = list(function.regions[0])
        if function not in before and not (blocks and list(blocks[-1]) and list(blocks[-1])[-1].name == "func.return"):
            ctx.module_context.symbol_table.erase(function)


def functions_of_module(ctx: Any) -> list[Any]:
    return [op.operation for op in ctx.module_context.module.body if op.operation.name == "func.func"]


def has_effects_on_references(jaxpr: Any) -> bool:
    return any("MutableArray" in type(effect).__name__ for effect in jaxpr.effects)


def is_unspecified(sharding: Any) -> bool:
    """Whether a sharding among the parameters of `jit` is left to JAX."""
    return type(sharding).__name__ == "UnspecifiedValue"


# ---- Parameters of scans.


class ScanOperands(NamedTuple):
    consts: list[Any]
    init: list[Any]
    xs: list[Any]
    ys: list[Any]


def scan_operands(params: dict[str, Any], inputs: list[Any], outputs: list[Any]) -> ScanOperands:
    """The inputs and outputs of a scan's equation, by what they are for."""
    if "num_carry" in params:
        first, n = params["num_consts"], params["num_carry"]
        return ScanOperands(inputs[:first], inputs[first : first + n], inputs[first + n :], outputs[n:])
    consts_init_xs, (_, ys) = params["ft_in"].update(inputs).unpack(), params["ft_out"].update(outputs).unpack()
    consts, init, xs = map(list, consts_init_xs)
    return ScanOperands(consts, init, xs, list(ys))


# ---- Types: the mesh axes of a surrounding `shard_map` that an array varies over; none with check_vma off.


def varying_axes(aval: Any) -> frozenset[Hashable]:
    return aval.vma if hasattr(aval, "vma") else aval.manual_axis_type.varying


def not_varying_over(aval: Any, names: Iterable[Hashable]) -> Any:
    if hasattr(aval, "vma"):
        return aval.update(vma=aval.vma - set(names))
    manual = aval.manual_axis_type
    return aval.update(manual_axis_type=manual.update(varying=manual.varying - set(names)))


# ---- Lowering contexts.


def _axis_context(ctx: Any) -> Any:
    return getattr(ctx.module_context, "axis_context", None)


def devices_of(ctx: Any) -> int | None:
    """How many devices XLA divides the program among. None: this JAX does not say, and there may be several."""
    context = _axis_context(ctx)
    if context is None:
        return 1 if jax.device_count() == 1 else None
    if hasattr(context, "num_devices"):  # ShardingContext, of jit
        return context.num_devices
    if hasattr(context, "manual_axes"):  # SPMDAxisContext, of shard_map
        automatic = [n for name, n in context.mesh.shape.items() if name not in context.manual_axes]
        return context.mesh.size if math.prod(automatic) > 1 else 1
    return 1  # ReplicaAxisContext, of pmap
