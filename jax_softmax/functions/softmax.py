"""Softmax and log-softmax: the public functions, which check their arguments and bind the primitives.

An eager call is one call of a jitted function, as in `jax.nn`. Arguments that `jax.jit` would refuse with errors of its
own are checked before it, without looking at shapes; all others inside, while the function is traced.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from jax_softmax.functions import arguments
from jax_softmax.functions.arguments import Axis, AxisName
from jax_softmax.primitives import reference
from jax_softmax.primitives.operators import bind
from jax_softmax.primitives.records import VJP
from jax_softmax.primitives.types import Axes, Mask, MeshAxes


def softmax(
    x: ArrayLike,
    axis: Axis = -1,
    where: ArrayLike | None = None,
    *,
    sink: ArrayLike | None = None,
    axis_name: AxisName = None,
) -> Array:
    """Softmax of x along axis: exp(x) / sum(exp(x)), computed relative to the maximum.

    A drop-in for `jax.nn.softmax` with its own kernels on CPU and CUDA. Differentiable in forward and reverse mode to
    any order.

    Args:
      x: array of any shape and of a floating, integer, boolean or complex dtype. Integers and booleans are converted to
        the default float type. float16, bfloat16 and float8 are computed in float32.
      axis: the axis, or axes, along which the results sum to 1: an int, a sequence or array of ints, or None for all
        axes.
      where: boolean mask that broadcasts with x; False leaves an element out, and its result is 0. The shape of the
        result is that of x and where broadcast together.
      sink: real array that broadcasts to x's shape with extent 1 along `axis`, a single one: a further logit of each
        row, which counts in its sum, and whose own result is dropped. For attention with a sink for each head this is
        sink[:, None, None], for scores of shape (..., heads, queries, keys). A row that is masked altogether is 0.
      axis_name: inside `jax.shard_map`, the mesh axis, or a tuple of mesh axes, that `axis` is sharded over: x is this
        device's shard, and the results of all shards together sum to 1. Devices exchange only the maxima and sums of
        rows. None, the default, is for whole rows. (Under `jax.jit` arrays whose `axis` is sharded need no such
        argument.) The `axis_name` of a `jax.vmap` is allowed as well.

    Returns:
      An array of x's dtype (of a float dtype for integers). A row is NaN if its elements that are not masked include a
      NaN or +inf, or are all -inf. A row that is masked altogether is 0.

    Raises:
      TypeError: x, axis or where is of the wrong type or dtype.
      ValueError: axis is out of range or repeated, where does not broadcast with x, sink has another shape or is given
        with axis_name, or axis_name is not a mesh axis of a surrounding `shard_map`.
    """
    if sink is None:
        return _call(_softmax, x, axis, where, axis_name)
    if axis_name is not None:
        raise ValueError(
            "softmax: sink must be None where axis_name is given. Write softmax(x, axis, where, axis_name=axis_name) * "
            "jax.nn.sigmoid(logsumexp(x, axis, where, keepdims=True, axis_name=axis_name) - sink)."
        )
    x, axis, where, _ = arguments.for_jit("softmax", x, axis, where, None)
    return _softmax_with_sink(x, axis, where, arguments.checked_real_array("softmax", sink, "sink"))


@functools.partial(jax.jit, static_argnums=(1,), inline=True)
def _softmax_with_sink(x: ArrayLike, axis: Axis, where: ArrayLike | None, sink: Array) -> Array:
    """Softmax of x with the sink concatenated to each row: the form in which `fuse` recognises a sink in attention."""
    x = arguments.checked_real_array("softmax", x, "x")
    _, where, shape = arguments.checked_axes_and_mask("softmax", x, axis, where)
    axis = arguments.checked_axis("softmax", len(shape), axis)
    x, dtype = arguments.promoted(x)
    wide = jnp.result_type(x, arguments.promoted(sink)[0])  # a Python number does not widen x
    x = jnp.broadcast_to(reference.fill_masked(x, where, -jnp.inf), shape).astype(wide)
    sink_shape = tuple(1 if d == axis else n for d, n in enumerate(shape))
    arguments.check_broadcasts("softmax", "sink", sink.shape, sink_shape)
    logits = jnp.concatenate([x, jnp.broadcast_to(sink, sink_shape).astype(wide)], axis)
    return jax.lax.slice(softmax(logits, axis), [0] * len(shape), shape).astype(dtype)


def log_softmax(x: ArrayLike, axis: Axis = -1, where: ArrayLike | None = None, *, axis_name: AxisName = None) -> Array:
    """Logarithm of softmax along axis: x - log(sum(exp(x))), computed relative to the maximum.

    A drop-in for `jax.nn.log_softmax`. Arguments, dtypes and errors are those of `softmax`; there is no sink. Masked
    elements, and rows that are masked altogether, are -inf.
    """
    return _call(_log_softmax, x, axis, where, axis_name)


def _call(
    jitted: Callable[..., Array], x: ArrayLike, axis: Axis, where: ArrayLike | None, axis_name: AxisName
) -> Array:
    return jitted(*arguments.for_jit(jitted.__name__, x, axis, where, axis_name, may_be_complex=True))


def _jitted(name: str, op: str, forward: Callable[..., Array]) -> Callable[..., Array]:
    """A public function's part under `jax.jit`, with its name; it is inlined into programs that call it."""

    def call(x: ArrayLike, axis: Axis, where: ArrayLike | None, axis_name: AxisName) -> Array:
        x = arguments.checked_array(name, x)
        axes, where, shape = arguments.checked_axes_and_mask(name, x, axis, where)
        axis_name = arguments.checked_axis_name(name, axis_name)
        if jnp.issubdtype(x.dtype, jnp.complexfloating):
            if axis_name:
                raise TypeError(f"{name}: x must be real where axis_name is given, got {x.dtype}.")
            return getattr(reference, op)(jnp.broadcast_to(x, shape), where, axes, dtype=x.dtype)
        x, dtype = arguments.promoted(x)
        x = jnp.broadcast_to(x, shape)
        x = arguments.varying_as_well(x, where, axis_name)
        return forward(axes, axis_name, x, where).astype(dtype)

    call.__name__ = call.__qualname__ = name
    return jax.jit(call, static_argnums=(1, 3), inline=True)


def _forward(op: str) -> Callable[..., Array]:
    def forward(axes: Axes, axis_name: MeshAxes, x: Array, where: Mask) -> Array:
        return bind(op, x, where=where, axes=axes, axis_name=axis_name)

    forward.__name__ = forward.__qualname__ = op
    return forward


# ---- The same by jax.custom_vjp: reverse mode only.


def _with_vjp(op: str) -> Callable[..., Array]:
    def forward_and_residuals(
        axes: Axes, axis_name: MeshAxes, x: Array, where: Mask
    ) -> tuple[Array, tuple[Array, Mask]]:
        y = bind(op, x, where=where, axes=axes, axis_name=axis_name)
        return y, (y, where)

    def backward(
        axes: Axes, axis_name: MeshAxes, residuals: tuple[Array, Mask], cotangent: Array
    ) -> tuple[Array, None]:
        y, where = residuals
        return bind(VJP[op], y, cotangent, where=where, axes=axes, axis_name=axis_name), None

    with_vjp = jax.custom_vjp(_forward(op), nondiff_argnums=(0, 1))
    with_vjp.defvjp(forward_and_residuals, backward)
    return with_vjp


def softmax_vjp(x: ArrayLike, axis: Axis = -1, where: ArrayLike | None = None, *, axis_name: AxisName = None) -> Array:
    """`softmax` through a `jax.custom_vjp`: the same values and gradients, but reverse mode only.

    Forward mode (`jax.jvp`, `jax.jacfwd`, `jax.hessian`) raises TypeError, as for every function with a custom VJP.
    """
    return _call(_softmax_vjp, x, axis, where, axis_name)


def log_softmax_vjp(
    x: ArrayLike, axis: Axis = -1, where: ArrayLike | None = None, *, axis_name: AxisName = None
) -> Array:
    """`log_softmax` through a `jax.custom_vjp`: the same values and gradients, but reverse mode only."""
    return _call(_log_softmax_vjp, x, axis, where, axis_name)


_softmax = _jitted("softmax", "softmax", _forward("softmax"))
_log_softmax = _jitted("log_softmax", "log_softmax", _forward("log_softmax"))
_softmax_vjp = _jitted("softmax_vjp", "softmax", _with_vjp("softmax"))
_log_softmax_vjp = _jitted("log_softmax_vjp", "log_softmax", _with_vjp("log_softmax"))
