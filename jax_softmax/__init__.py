"""Softmax for JAX with its own CPU and CUDA kernels, called through XLA's typed FFI."""

import inspect
import os
from types import FunctionType

from jax_softmax import _private
from jax_softmax._build import build_info  # first: its errors say what is wrong with the installation
from jax_softmax.devices import partitioning
from jax_softmax.functions.entropies import entropy, kl_divergence
from jax_softmax.functions.linear_cross_entropy import TokenLosses, linear_cross_entropy
from jax_softmax.functions.logsumexp import logsumexp
from jax_softmax.functions.losses import (
    cross_entropy_loss,
    softmax_cross_entropy,
    softmax_cross_entropy_with_integer_labels,
)
from jax_softmax.functions.patching import use
from jax_softmax.functions.scaling import absmax_scale
from jax_softmax.functions.softmax import log_softmax, log_softmax_vjp, softmax, softmax_vjp
from jax_softmax.fusion import primitive
from jax_softmax.fusion.report import FusionReport
from jax_softmax.fusion.transform import Fused, fuse
from jax_softmax.primitives import interpreters
from jax_softmax.runtime import lowering
from jax_softmax.runtime.explain import Explanation, explain
from jax_softmax.runtime.lowering import export_checks

__all__ = [
    "Explanation",
    "Fused",
    "FusionReport",
    "TokenLosses",
    "absmax_scale",
    "build_info",
    "cross_entropy_loss",
    "entropy",
    "explain",
    "export_checks",
    "fuse",
    "kl_divergence",
    "linear_cross_entropy",
    "log_softmax",
    "log_softmax_vjp",
    "logsumexp",
    "softmax",
    "softmax_cross_entropy",
    "softmax_cross_entropy_with_integer_labels",
    "softmax_vjp",
    "use",
]
__version__ = build_info()["version"]


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


# Signatures without types, for `help`: the docstrings have the types in words.
for _f in filter(lambda f: isinstance(f, FunctionType), map(globals().__getitem__, __all__)):
    _signature = inspect.signature(_f)
    _f.__signature__ = _signature.replace(
        parameters=[p.replace(annotation=p.empty) for p in _signature.parameters.values()],
        return_annotation=inspect.Signature.empty,
    )

# The source line of an operation, in JAX's profiles, errors and lists of residuals, is then the caller's.
if _private.FOUND["lines"].available:
    _private.FOUND["lines"].register_exclusion(os.path.dirname(__file__) + os.sep)
interpreters.register()
lowering.register()
primitive.register()
if _off := _private.what_is_off():
    partitioning.warn_anyway(_off)
