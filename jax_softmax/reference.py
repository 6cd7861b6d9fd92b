"""The operators in jax.numpy: what runs on platforms without kernels, and for what the kernels do not cover.

Each function has the operands and the meaning of the primitive of its name (see `primitives.py`): `where` is None or a
boolean mask that broadcasts to x's shape.
"""

import jax
import jax.numpy as jnp

_HALF = (jnp.float16, jnp.bfloat16)

# As they are now: `jax.nn.softmax` may come to be this package's (see `patching.py`).
ORIGINALS = {"softmax": jax.nn.softmax, "log_softmax": jax.nn.log_softmax}


def widened(x):
    """16-bit floats as float32, in which they are computed."""
    return x.astype(jnp.float32) if x.dtype in _HALF else x


def softmax(x, where, axes):
    return ORIGINALS["softmax"](widened(x), axes, where).astype(x.dtype)


def log_softmax(x, where, axes):
    return ORIGINALS["log_softmax"](widened(x), axes, where).astype(x.dtype)


def _kept(t, where):
    return t if where is None else jnp.where(where, t, 0)


def softmax_linear(y, t, where, axes):
    """J t = y (t - sum(y t)), softmax's Jacobian, which is symmetric."""
    p, t32 = widened(y), _kept(widened(t), where)
    return _kept(p * (t32 - jnp.sum(p * t32, axes, keepdims=True)), where).astype(t.dtype)


def log_softmax_jvp(y, t, where, axes):
    """J t = t - sum(exp(y) t), log-softmax's Jacobian."""
    p, t32 = jnp.exp(widened(y)), _kept(widened(t), where)
    return _kept(t32 - jnp.sum(p * t32, axes, keepdims=True), where).astype(t.dtype)


def log_softmax_vjp(y, t, where, axes):
    """Jᵀ t = t - exp(y) sum(t), the transpose of log-softmax's Jacobian."""
    p, t32 = jnp.exp(widened(y)), _kept(widened(t), where)
    return _kept(t32 - p * jnp.sum(t32, axes, keepdims=True), where).astype(t.dtype)
