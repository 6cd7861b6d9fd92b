"""The public functions: they check their arguments and bind the primitives.

An eager call is one call of a jitted function, as it is in `jax.nn`. What that function would not refuse in words of
our own is checked before, without looking at shapes; the rest inside, while it is traced.
"""

import functools
import operator
import os
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from jax.extend import source_info_util
from jax.typing import ArrayLike

from jax_softmax import lowering, reference, sharding
from jax_softmax.primitives import PRIMITIVES, VJP

Axis = int | Sequence[int] | np.ndarray | jax.Array | None
AxisName = Hashable | Sequence[Hashable] | None

# What JAX says of where an operation comes from (in profiles, errors, saved residuals) is then the caller's line.
source_info_util.register_exclusion(os.path.dirname(__file__) + os.sep)

_KERNEL_DTYPES = ("float16", "bfloat16", "float32", "float64")


def softmax(x: ArrayLike, axis: Axis = -1, where: ArrayLike | None = None, *, axis_name: AxisName = None) -> jax.Array:
    """Softmax of x along axis: exp(x) / sum(exp(x)), computed relative to the maximum.

    A drop-in for `jax.nn.softmax`, with kernels of its own on CPU and CUDA. Differentiable in forward and reverse mode
    to any order.

    Args:
      x: array of any shape and of a floating, integer, boolean or complex dtype. Integers and booleans are converted to
        the default float type. float16, bfloat16 and float8 are computed in float32.
      axis: the axis, or axes, that the results sum to 1 along: an int, a sequence or array of ints, or None for all
        axes.
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
      TypeError: x, axis or where is of the wrong type or dtype.
      ValueError: axis is out of range or repeated, where does not broadcast with x, or axis_name is not one of the
        axes of a surrounding `shard_map`.
    """
    return _call(_softmax, x, axis, where, axis_name)


def log_softmax(
    x: ArrayLike, axis: Axis = -1, where: ArrayLike | None = None, *, axis_name: AxisName = None
) -> jax.Array:
    """Logarithm of softmax along axis: x - log(sum(exp(x))), computed relative to the maximum.

    A drop-in for `jax.nn.log_softmax`; arguments, dtypes and errors are those of `softmax`. Masked elements, and rows
    that are masked altogether, are -inf.
    """
    return _call(_log_softmax, x, axis, where, axis_name)


_NUMBERS = frozenset({bool, int, float, complex})
_ALLOWED_NAMES = "axis_name must be a mesh axis of a surrounding shard_map, a tuple of such, or None"


def _call(jitted: Callable[..., jax.Array], x: Any, axis: Any, where: Any, axis_name: Any) -> jax.Array:
    if axis is not None and type(axis) is not int:
        axis = _ints(jitted.__name__, axis)
    if not _is_argument(x):
        x = _checked_array(jitted.__name__, x)
    if where is not None and not _is_argument(where):
        where = _checked_mask(jitted.__name__, where)
    if axis_name is not None:
        axis_name = _names(jitted.__name__, axis_name)
    return jitted(x, axis, where, axis_name)


def _is_argument(a: Any) -> bool:
    """Whether `jax.jit` takes it as one array."""
    if type(a) in _NUMBERS or isinstance(a, jax.Array):
        return True
    return (type(a) is np.ndarray or isinstance(a, np.generic)) and _is_dtype_of_jax(a.dtype)


@functools.lru_cache
def _is_dtype_of_jax(dtype: np.dtype) -> bool:
    try:
        jax.eval_shape(lambda a: a, np.zeros(1, dtype))
    except TypeError:
        return False
    return True


def _jitted(name: str, op: str, forward: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """The operator under `jax.jit` and by its name, inlined into the programs that call it."""

    def call(x, axis, where, axis_name):
        x = _checked_array(name, x)
        axes, where, shape = _checked_axes_and_mask(name, x, axis, where)
        axis_name = _checked_axis_name(name, axis_name)
        if jnp.issubdtype(x.dtype, jnp.complexfloating):
            if axis_name:
                raise TypeError(f"{name}: x must be real where axis_name is given, got {x.dtype}.")
            return getattr(reference, op)(jnp.broadcast_to(x, shape), where, axes)
        x, dtype = _promoted(x)
        x = jnp.broadcast_to(x, shape)
        x = _varying_as_well(x, where, axis_name)
        return forward(axes, axis_name, x, *([] if where is None else [where])).astype(dtype)

    call.__name__ = call.__qualname__ = name
    return jax.jit(call, static_argnums=(1, 3), inline=True)


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
    dtype = x.dtype
    if not jnp.issubdtype(dtype, jnp.floating):
        # Of a 32-bit integer exp takes the default float type, which unsigned and narrow ones get as well.
        dtype = jax.eval_shape(jnp.exp, jax.ShapeDtypeStruct((), dtype)).dtype
        x = x.astype(jnp.uint8) if x.dtype == jnp.bool_ else x
        if x.dtype.name not in reference.NARROW or dtype != reference.result_dtype(x.dtype):
            x = x.astype(dtype)
    if x.dtype.name in (*_KERNEL_DTYPES, *reference.NARROW):
        return x, dtype
    return x.astype(jnp.float32), dtype


def _checked_array(op: str, x: Any) -> jax.Array:
    allowed = f"{op}: x must be an array or a number, of a floating, integer, boolean or complex dtype that JAX has"
    x = _as_array(allowed, x)
    if not jnp.issubdtype(x.dtype, jnp.number) and x.dtype != jnp.bool_:
        raise TypeError(f"{allowed}, got one of dtype {x.dtype}.")
    return x


def _checked_mask(op: str, where: Any) -> jax.Array:
    allowed = f"{op}: where must be a boolean array or None"
    where = _as_array(allowed, where)
    if where.dtype != jnp.bool_:
        raise TypeError(f"{allowed}, got one of dtype {where.dtype}.")
    return where


def _as_array(allowed: str, a: Any) -> jax.Array:
    if isinstance(a, np.ndarray | np.generic) and not _is_dtype_of_jax(a.dtype):
        raise TypeError(f"{allowed}, got one of dtype {a.dtype}.")
    if isinstance(a, int | float | complex) or hasattr(a, "__jax_array__") or hasattr(a, "__array__"):
        return a if isinstance(a, jax.Array) else jnp.asarray(a)
    raise TypeError(f"{allowed}, got one of type {type(a).__name__}.")


def _checked_axes_and_mask(op: str, x: jax.Array, axis: Any, where: Any):
    """The sorted axes, the mask, and the shape of the result."""
    shape = x.shape
    if where is not None:
        where = _checked_mask(op, where)
        try:
            shape = jnp.broadcast_shapes(x.shape, where.shape)
        except ValueError as error:
            raise ValueError(
                f"{op}: where must broadcast with x, got shape {where.shape} for x of shape {x.shape}."
            ) from error
    return _checked_axes(op, len(shape), axis), where, shape


def _ints(op: str, axis: Any) -> int | tuple[int, ...] | None:
    """The axis or axes as Python's own ints."""
    if axis is None:
        return None
    try:
        # Of an array of JAX only the whole is there while a program is traced; its elements would be operations.
        given = np.asarray(axis) if isinstance(axis, jax.Array) else axis
        if isinstance(given, tuple | list | range) or np.ndim(given):
            return tuple(operator.index(a) for a in given)
        return operator.index(given)
    except TypeError as error:
        hint = ""
        if isinstance(axis, str):
            hint = " The name of a mapped axis goes into axis_name."
        elif isinstance(axis, jax.core.Tracer):
            hint = " It must be known when the program is traced."
        raise TypeError(
            f"{op}: axis must be an int, a sequence of ints, or None, got {axis!r} of type {type(axis).__name__}.{hint}"
        ) from error


def _checked_axes(op: str, ndim: int, axis: Any) -> tuple[int, ...]:
    given = _ints(op, axis)
    if given is None:
        return tuple(range(ndim))
    given = (given,) if isinstance(given, int) else given
    if ndim == 0 and given:
        raise ValueError(f"{op}: axis must be None or () for an array of 0 dimensions, got {axis!r}.")
    if not all(-ndim <= a < ndim for a in given):
        raise ValueError(
            f"{op}: axis must be an int from {-ndim} to {ndim - 1}, a sequence of such, or None, for an array of "
            f"{ndim} dimensions, got {axis!r}."
        )
    axes = {a % ndim for a in given}
    if len(axes) != len(given):
        raise ValueError(f"{op}: axis must not name an axis twice, got {axis!r} for an array of {ndim} dimensions.")
    return tuple(sorted(axes))


def _names(op: str, axis_name: Any) -> tuple[Hashable, ...]:
    names = () if axis_name is None else tuple(axis_name) if isinstance(axis_name, tuple | list) else (axis_name,)
    if not all(isinstance(name, Hashable) for name in names):
        raise ValueError(f"{op}: {_ALLOWED_NAMES}, got {axis_name!r}.")
    return names


def _checked_axis_name(op: str, axis_name: Any) -> tuple[Hashable, ...]:
    names = _names(op, axis_name)
    for name in names:
        try:
            jax.lax.axis_size(name)
        except (NameError, TypeError, ValueError) as error:
            raise ValueError(f"{op}: {_ALLOWED_NAMES}, got {axis_name!r}.") from error
    if len(set(names)) != len(names):
        raise ValueError(f"{op}: axis_name must not name an axis twice, got {axis_name!r}.")
    return names


def export_checks() -> list[jax.export.DisabledSafetyCheck]:
    """The safety checks that `jax.export` must leave out for programs that call these functions.

    JAX vouches only for custom calls of its own. Pass the list as `disabled_checks`; where the exported program runs,
    jax_softmax must be imported:

        jax.export.export(jax.jit(f), disabled_checks=jax_softmax.export_checks())(x)
    """
    return [jax.export.DisabledSafetyCheck.custom_call(target) for target in (lowering.TARGET, sharding.TARGET)]


# ---- The same forward and backward behind jax.custom_vjp, for code that asks for it: reverse mode only.


def _with_vjp(op: str) -> Callable[..., jax.Array]:
    def function(axes, axis_name, x, *mask):
        return PRIMITIVES[op].bind(x, *mask, axes=axes, axis_name=axis_name)

    def forward_and_residuals(axes, axis_name, x, *mask):
        y = function(axes, axis_name, reference.without_narrow(x), *mask)
        return y.astype(x.dtype), (y, mask)

    def backward(axes, axis_name, residuals, cotangent):
        y, mask = residuals
        x_bar = PRIMITIVES[VJP[op]].bind(y, cotangent.astype(y.dtype), *mask, axes=axes, axis_name=axis_name)
        return x_bar.astype(cotangent.dtype), *[None] * len(mask)

    function.__name__ = function.__qualname__ = op
    with_vjp = jax.custom_vjp(function, nondiff_argnums=(0, 1))
    with_vjp.defvjp(forward_and_residuals, backward)
    return with_vjp


def softmax_vjp(
    x: ArrayLike, axis: Axis = -1, where: ArrayLike | None = None, *, axis_name: AxisName = None
) -> jax.Array:
    """`softmax` through a `jax.custom_vjp`: the same values and gradients, but reverse mode only.

    Forward mode (`jax.jvp`, `jax.jacfwd`, `jax.hessian`) raises TypeError, as for every function with a custom VJP.
    """
    return _call(_softmax_vjp, x, axis, where, axis_name)


def log_softmax_vjp(
    x: ArrayLike, axis: Axis = -1, where: ArrayLike | None = None, *, axis_name: AxisName = None
) -> jax.Array:
    """`log_softmax` through a `jax.custom_vjp`: the same values and gradients, but reverse mode only."""
    return _call(_log_softmax_vjp, x, axis, where, axis_name)


def _bound(op: str) -> Callable[..., jax.Array]:
    return lambda axes, axis_name, x, *mask: PRIMITIVES[op].bind(x, *mask, axes=axes, axis_name=axis_name)


_softmax = _jitted("softmax", "softmax", _bound("softmax"))
_log_softmax = _jitted("log_softmax", "log_softmax", _bound("log_softmax"))
_softmax_vjp = _jitted("softmax_vjp", "softmax", _with_vjp("softmax"))
_log_softmax_vjp = _jitted("log_softmax_vjp", "log_softmax", _with_vjp("log_softmax"))
