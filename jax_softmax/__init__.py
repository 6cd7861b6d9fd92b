"""Softmax for JAX with its own CPU and CUDA kernels, called through XLA's typed FFI."""

from jax_softmax import _compatibility as _compatibility  # first: says so if jaxlib does not fit
from jax_softmax import interpreters as interpreters
from jax_softmax._info import build_info
from jax_softmax.api import export_checks, log_softmax, log_softmax_vjp, softmax, softmax_vjp
from jax_softmax.entropies import entropy, kl_divergence
from jax_softmax.explain import Explanation, explain
from jax_softmax.losses import (
    cross_entropy_loss,
    logsumexp,
    softmax_cross_entropy,
    softmax_cross_entropy_with_integer_labels,
)
from jax_softmax.patching import use
from jax_softmax.scaling import absmax_scale

__all__ = [
    "Explanation",
    "absmax_scale",
    "build_info",
    "cross_entropy_loss",
    "entropy",
    "explain",
    "export_checks",
    "kl_divergence",
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
