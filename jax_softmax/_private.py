"""The names of JAX that it does not promise to keep, and what is off with a JAX that moved them.

All else is public: jax.numpy, jax.ffi, and of jax.core, jax.extend.core and jax.interpreters what primitives are made
of. Without that there are no operators.
"""

import pkgutil
import warnings
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
