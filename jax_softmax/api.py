"""The public functions: they check their arguments and bind the primitives."""

import functools
import operator
import warnings
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
from jax.typing import ArrayLike

from jax_softmax import lowering, sharding
from jax_softmax.primitives import VJP, softmax_linear_p, softmax_p

Axis = int | Sequence[int] | None
AxisName = Hashable | Sequence[Hashable] | None

_KERNEL_DTYPES = ("float16", "bfloat16", "float32", "float64")


def softmax(x: ArrayLike, axis: Axis = -1, where: ArrayLike | None = None, *, axis_name: AxisName = None) -> jax.Array:
    """Softmax of x along axis: exp(x) / sum(exp(x)), computed relative to the maximum.

    A drop-in for `jax.nn.softmax`, with kernels of its own on CPU and CUDA. Differentiable in forward and reverse mode
    to any order.

    Args:
      x: array of any shape and of a floating, integer, boolean or complex dtype. Integers and booleans are converted to
        the default float type. float16, bfloat16 and float8 are computed in float32.
      axis: the axis, or axes, that the results sum to 1 along: an int, a sequence of ints, or None for all axes.
      where: boolean mask that broadcasts with x; False leaves an element out, and its result is 0. The shape of the
        result is that of x and where broadcast together.
      axis_name: inside `jax.shard_map`, the mesh axis, or a tuple of mesh axes, that `axis` is sharded over: x is this
        device's part, and the results of all the parts together sum to 1. The maxima and the sums of the rows are
        reduced over the devices; nothing else travels. None, the default, for whole rows. (Under `jax.jit` arrays
        whose `axis` is sharded need no such argument.) The `axis_name` of a `jax.vmap` is one as well.

    Returns:
      An array of x's dtype (of a float dtype for integers). Rows that hold a NaN, or +inf, or nothing but -inf among
      the elements that are not masked, are NaN; rows that are masked altogether are 0.

    Raises:
      TypeError: x, axis or where is of the wrong type.
      ValueError: axis is out of range or repeated, where does not broadcast with x, or axis_name is not one of the
        axes of a surrounding `shard_map`.
    """
    return _apply("softmax", x, axis, where, axis_name)


def log_softmax(
    x: ArrayLike, axis: Axis = -1, where: ArrayLike | None = None, *, axis_name: AxisName = None
) -> jax.Array:
    """Logarithm of softmax along axis: x - log(sum(exp(x))), computed relative to the maximum.

    A drop-in for `jax.nn.log_softmax`; arguments, dtypes and errors are those of `softmax`. Masked elements, and rows
    that are masked altogether, are -inf.
    """
    return _apply("log_softmax", x, axis, where, axis_name)


def _bind(op, axes, axis_name, x, *mask):
    return softmax_p.bind(x, *mask, op=op, axes=axes, axis_name=axis_name)


def _apply(
    op: str, x: Any, axis: Any, where: Any, axis_name: Any, forward: Callable[..., jax.Array] = _bind
) -> jax.Array:
    x = _checked_array(op, x)
    axes, where, shape = _checked_axes_and_mask(op, x, axis, where)
    axis_name = _checked_axis_name(op, axis_name)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        if axis_name:
            raise TypeError(f"{op}: x must be real where axis_name is given, got {x.dtype}.")
        return getattr(jax.nn, op)(x, axes, where)
    x, dtype = _promoted(x)
    x = jnp.broadcast_to(x, shape)
    x = _varying_as_well(x, where, axis_name)
    _warn_without_cuda()
    return forward(op, axes, axis_name, x, *([] if where is None else [where])).astype(dtype)


def _varying_as_well(x: jax.Array, where: jax.Array | None, axis_name: tuple[Hashable, ...]) -> jax.Array:
    """x, inside `shard_map` marked as varying over the mesh axes that the result varies over: the mask's, axis_name."""

    def axes(a):
        aval = jax.typeof(a)
        return aval.vma if hasattr(aval, "vma") else aval.manual_axis_type.varying

    manual = jax.sharding.get_abstract_mesh().manual_axes  # the axis_name of a vmap is none of them
    wanted = axes(x).union([] if where is None else axes(where), (name for name in axis_name if name in manual))
    missing = tuple(wanted - axes(x))
    if not missing:
        return x
    marked = jax.lax.pcast(x, missing, to="varying") if hasattr(jax.lax, "pcast") else jax.lax.pvary(x, missing)
    return marked if axes(marked) == wanted else x  # with check_vma off JAX 0.8 leaves a trace that adds up cotangents


def _promoted(x: jax.Array) -> tuple[jax.Array, Any]:
    """x in a dtype that there are kernels for, and the dtype of the result."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        # Of a 32-bit integer exp takes the default float type, which unsigned and narrow ones get as well.
        x = x.astype(jax.eval_shape(jnp.exp, jax.ShapeDtypeStruct((), x.dtype)).dtype)
    if x.dtype.name in _KERNEL_DTYPES:
        return x, x.dtype
    return x.astype(jnp.float32), x.dtype


def _checked_array(op: str, x: Any) -> jax.Array:
    if isinstance(x, str | bytes | list | tuple | dict | set) or x is None:
        raise TypeError(f"{op}: x must be an array or a number, got {x!r} of type {type(x).__name__}.")
    try:
        x = x if isinstance(x, jax.Array) else jnp.asarray(x)
    except TypeError as error:
        raise TypeError(f"{op}: x must be an array or a number, got one of type {type(x).__name__}.") from error
    if not jnp.issubdtype(x.dtype, jnp.number) and x.dtype != jnp.bool_:
        raise TypeError(f"{op}: x must be of a floating, integer, boolean or complex dtype, got {x.dtype}.")
    return x


def _checked_axes_and_mask(op: str, x: jax.Array, axis: Any, where: Any):
    """The sorted axes, the mask, and the shape of the result."""
    shape = x.shape
    if where is not None:
        if not hasattr(where, "dtype") and not isinstance(where, bool):
            raise TypeError(f"{op}: where must be a boolean array or None, got one of type {type(where).__name__}.")
        where = where if isinstance(where, jax.Array) else jnp.asarray(where)
        if where.dtype != jnp.bool_:
            raise TypeError(f"{op}: where must be a boolean array or None, got one of dtype {where.dtype}.")
        try:
            shape = jnp.broadcast_shapes(x.shape, where.shape)
        except ValueError as error:
            raise ValueError(
                f"{op}: where must broadcast with x, got shape {where.shape} for x of shape {x.shape}."
            ) from error
    return _checked_axes(op, len(shape), axis), where, shape


def _checked_axes(op: str, ndim: int, axis: Any) -> tuple[int, ...]:
    if axis is None:
        return tuple(range(ndim))
    allowed = f"axis must be an int from {-ndim} to {ndim - 1}, a sequence of such, or None"
    if isinstance(axis, str | bytes):
        raise TypeError(f"{op}: {allowed}, got {axis!r}.")
    given = axis if isinstance(axis, tuple | list) else (axis,)
    axes = []
    for a in given:
        try:
            number = operator.index(a)
        except TypeError as error:
            raise TypeError(f"{op}: {allowed}, got {axis!r} with {a!r} of type {type(a).__name__}.") from error
        if not -ndim <= number < ndim:
            raise ValueError(f"{op}: {allowed}, for an array of {ndim} dimensions, got {axis!r}.")
        axes.append(number % ndim)
    if len(set(axes)) != len(axes):
        raise ValueError(f"{op}: axis must not name an axis twice, got {axis!r} for an array of {ndim} dimensions.")
    return tuple(sorted(axes))


def _checked_axis_name(op: str, axis_name: Any) -> tuple[Hashable, ...]:
    names = () if axis_name is None else tuple(axis_name) if isinstance(axis_name, tuple | list) else (axis_name,)
    allowed = "axis_name must be a mesh axis of a surrounding shard_map, a tuple of such, or None"
    for name in names:
        try:
            jax.lax.axis_size(name)
        except (NameError, TypeError, ValueError) as error:
            raise ValueError(f"{op}: {allowed}, got {axis_name!r}.") from error
    if len(set(names)) != len(names):
        raise ValueError(f"{op}: axis_name must not name an axis twice, got {axis_name!r}.")
    return names


@functools.lru_cache(maxsize=1)
def _warn_without_cuda() -> None:
    if not lowering.HAS_CUDA and jax.default_backend() == "gpu":
        warnings.warn(
            "jax_softmax was built without its CUDA kernels, so on this GPU softmax runs as jax.numpy. Install the "
            "CUDA toolkit and reinstall with JAX_SOFTMAX_CUDA=on to get them; `python -m jax_softmax` says what is "
            "built in.",
            stacklevel=4,
        )


def export_checks() -> list[jax.export.DisabledSafetyCheck]:
    """The safety checks that `jax.export` must leave out for programs that call these functions.

    JAX vouches only for custom calls of its own. Pass the list as `disabled_checks`; where the exported program runs,
    jax_softmax must be imported:

        jax.export.export(jax.jit(f), disabled_checks=jax_softmax.export_checks())(x)
    """
    return [jax.export.DisabledSafetyCheck.custom_call(target) for target in (lowering.TARGET, sharding.TARGET)]


# ---- The same forward and backward behind jax.custom_vjp, for code that asks for it: reverse mode only.


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _forward_with_vjp(op, axes, axis_name, x, *mask):
    return _bind(op, axes, axis_name, x, *mask)


def _forward_and_residuals(op, axes, axis_name, x, *mask):
    y = _bind(op, axes, axis_name, x, *mask)
    return y, (y, mask)


def _backward(op, axes, axis_name, residuals, cotangent):
    y, mask = residuals
    x_bar = softmax_linear_p.bind(y, cotangent, *mask, op=VJP[op], axes=axes, axis_name=axis_name)
    return x_bar, *[None] * len(mask)


_forward_with_vjp.defvjp(_forward_and_residuals, _backward)


def softmax_vjp(
    x: ArrayLike, axis: Axis = -1, where: ArrayLike | None = None, *, axis_name: AxisName = None
) -> jax.Array:
    """`softmax` through a `jax.custom_vjp`: the same values and gradients, but reverse mode only.

    Forward mode (`jax.jvp`, `jax.jacfwd`, `jax.hessian`) raises TypeError, as for every function with a custom VJP.
    """
    return _apply("softmax", x, axis, where, axis_name, _forward_with_vjp)


def log_softmax_vjp(
    x: ArrayLike, axis: Axis = -1, where: ArrayLike | None = None, *, axis_name: AxisName = None
) -> jax.Array:
    """`log_softmax` through a `jax.custom_vjp`: the same values and gradients, but reverse mode only."""
    return _apply("log_softmax", x, axis, where, axis_name, _forward_with_vjp)
