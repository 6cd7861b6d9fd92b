"""What this package uses of JAX that JAX does not promise to keep, and what is off with a JAX that moved it.

All else is public: jax.numpy, jax.ffi, and of jax.core, jax.extend.core and jax.interpreters what primitives are made
of. Without that there are no operators. Names are in PARTS; attributes of JAX's objects are in the functions below.
"""

import contextlib
import math
import pkgutil
import warnings
from collections.abc import Hashable, Iterable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import jax


class Part(NamedTuple):
    """What needs some of the names."""

    off: str  # what does not work without them
    instead: str  # what to do then
    names: dict[str, str]  # what they are called here, and where JAX has them


PARTS = {
    "division": Part(
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
    "checkify": Part(
        "checkify does not look for NaNs in results of jax_softmax",
        "use jax_debug_nans",
        {
            "error_checks": "jax._src.checkify:error_checks",
            "nan_error_check": "jax._src.checkify:nan_error_check",
        },
    ),
    "jet": Part(
        "jax.experimental.jet does not know the operators",
        "nest jax.jvp",
        {"jet": "jax.experimental.jet:jet", "jet_rules": "jax.experimental.jet:jet_rules"},
    ),
    "eager": Part(
        "calls outside of jax.jit are compiled each time",
        "call the functions under jax.jit",
        {"apply_primitive": "jax.interpreters.xla:apply_primitive"},
    ),
    "function": Part(
        "fused code is no function of its own in the compiled program",
        "look for its operations there",
        {"core_call_lowering": "jax.interpreters.mlir:core_call_lowering"},
    ),
    "lines": Part(
        "profiles and errors name lines of jax_softmax and not those that call it",
        "look at the calling lines of a traceback",
        {"register_exclusion": "jax.extend.source_info_util:register_exclusion"},
    ),
}


class Found:
    """A part's names as attributes, if this JAX has all of them, and otherwise None for each."""

    def __init__(self, part: str):
        self.missing: list[str] = []
        found: dict[str, Any] = dict.fromkeys(PARTS[part].names)
        for name, place in PARTS[part].names.items():
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # it is still there
                try:
                    found[name] = pkgutil.resolve_name(place)
                except (ImportError, AttributeError):
                    self.missing.append(place)
        self.available = not self.missing
        self._found = found if self.available else dict.fromkeys(found)

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["_found"][name]
        except KeyError:
            raise AttributeError(name) from None


FOUND = {part: Found(part) for part in PARTS}
DIVISION = FOUND["division"]


def what_is_off() -> str | None:
    """A sentence for all parts whose names are missing."""
    lost = {part: found.missing for part, found in FOUND.items() if found.missing}
    if not lost:
        return None
    names = ", ".join(name.replace(":", ".") for names in lost.values() for name in names)
    parts = "; ".join(f"{PARTS[part].off} ({PARTS[part].instead})" for part in lost)
    return (
        f"JAX {jax.__version__} does not have {names}, so {parts}. A newer jax_softmax may know where they are: "
        "pip install -U jax_softmax"
    )


# ---- Attributes of equations and jaxprs.


def context_of(eqn: Any) -> AbstractContextManager[Any]:
    """In which an equation was traced: the mesh that it stands in, for one."""
    return getattr(getattr(eqn, "ctx", None), "manager", contextlib.nullcontext())


def at_the_line_of(eqn: Any, like: Any) -> Any:
    """An equation that profiles and errors show where another one stands."""
    return eqn.replace(source_info=like.source_info)


def in_the_scope_of(eqn: Any, caller: Any) -> Any:
    """An equation with the name of its caller's scope, if there is a caller, before its own, as profiles show it."""
    if caller is None:
        return eqn
    stack = caller.source_info.name_stack + eqn.source_info.name_stack
    return eqn.replace(source_info=eqn.source_info.replace(name_stack=stack))


def without_names(jaxpr: Any) -> Any:
    """A jaxpr that no longer knows its operands' and results' names, so that these may be replaced."""
    info = jaxpr.debug_info
    return jaxpr.replace(debug_info=info.with_unknown_names()) if hasattr(info, "with_unknown_names") else jaxpr


def has_effects_on_references(jaxpr: Any) -> bool:
    return any("MutableArray" in type(effect).__name__ for effect in jaxpr.effects)


def is_unspecified(sharding: Any) -> bool:
    """Whether a parameter of `jit` leaves it to JAX how an array lies."""
    return type(sharding).__name__ == "UnspecifiedValue"


# ---- Of scans.


class PartsOfScan(NamedTuple):
    consts: list
    init: list
    xs: list
    ys: list


def parts_of_scan(params: dict[str, Any], inputs: list, outputs: list) -> PartsOfScan:
    """What an equation's inputs and outputs are for."""
    if "num_carry" in params:
        first, n = params["num_consts"], params["num_carry"]
        return PartsOfScan(inputs[:first], inputs[first : first + n], inputs[first + n :], outputs[n:])
    of_inputs, (_, ys) = params["ft_in"].update(inputs).unpack(), params["ft_out"].update(outputs).unpack()
    return PartsOfScan(*map(list, of_inputs), list(ys))


# ---- Of types: the mesh axes of a surrounding `shard_map` that an array varies over; none with check_vma off.


def varying_axes(aval: Any) -> frozenset[Hashable]:
    return aval.vma if hasattr(aval, "vma") else aval.manual_axis_type.varying


def not_varying_over(aval: Any, names: Iterable[Hashable]) -> Any:
    if hasattr(aval, "vma"):
        return aval.update(vma=aval.vma - set(names))
    manual = aval.manual_axis_type
    return aval.update(manual_axis_type=manual.update(varying=manual.varying - set(names)))


# ---- Of what a program is lowered with.


def _axis_context(ctx: Any) -> Any:
    return getattr(ctx.module_context, "axis_context", None)


def devices_of(ctx: Any) -> int | None:
    """How many devices XLA divides the program among. None: several perhaps, and this JAX does not say."""
    context = _axis_context(ctx)
    if context is None:
        return 1 if jax.device_count() == 1 else None
    if hasattr(context, "num_devices"):  # ShardingContext, of jit
        return context.num_devices
    if hasattr(context, "manual_axes"):  # SPMDAxisContext, of shard_map
        automatic = [n for name, n in context.mesh.shape.items() if name not in context.manual_axes]
        return context.mesh.size if math.prod(automatic) > 1 else 1
    return 1  # ReplicaAxisContext, of pmap


# ---- Of contexts, as `jax.make_user_context` makes them.


def for_all_threads(context: Any, value: Any) -> AbstractContextManager[None] | None:
    """In which the context has a value for the threads that have not set it themselves; None if JAX has no way to."""
    known = (context, getattr(context, "_obj", None))  # the latter is older
    setting = next((c for c in known if hasattr(c, "set_global")), None)

    @contextlib.contextmanager
    def switched():
        before = setting.get_global()
        setting.set_global(value)
        yield
        setting.set_global(before)

    return switched() if setting else None
