"""What the public functions ask of their arguments, and how they say so."""

import functools
import math
import operator
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jax_softmax import _private
from jax_softmax.primitives.labels import LARGEST_LABEL
from jax_softmax.primitives.types import laid_as_well, types_tell_shardings

Axis = int | Sequence[int] | np.ndarray | jax.Array | None
AxisName = Hashable | Sequence[Hashable] | None
Reduction = Literal["mean", "sum"] | None

_KERNEL_DTYPES = ("float16", "bfloat16", "float32", "float64")
_NUMBERS = frozenset({bool, int, float, complex})
_ALLOWED_NAMES = "axis_name must be a mesh axis of a surrounding shard_map, a tuple of such, or None"


def for_jit(op: str, x: Any, axis: Any, where: Any, axis_name: Any, argument: str = "x") -> tuple[Any, Any, Any, Any]:
    """The arguments as `jax.jit` takes them, axis and axis_name being static: looks at no shape."""
    if axis is not None and type(axis) is not int:
        axis = _ints(op, axis)
    if not _is_argument(x):
        x = checked_array(op, x, argument)
    if where is not None and not _is_argument(where):
        where = _checked_mask(op, where)
    if axis_name is not None:
        axis_name = _names(op, axis_name)
    return x, axis, where, axis_name


def _is_argument(a: Any) -> bool:
    """Whether `jax.jit` takes it as one array."""
    if type(a) in _NUMBERS:
        return type(a) is not int or abs(a) < 2**31
    if isinstance(a, jax.Array):
        return True
    return (type(a) is np.ndarray or isinstance(a, np.generic)) and is_dtype_of_jax(a.dtype)


@functools.lru_cache
def is_dtype_of_jax(dtype: np.dtype) -> bool:
    try:
        jax.eval_shape(lambda a: a, np.zeros(1, dtype))
    except TypeError:
        return False
    return True


def varying_as_well(x: jax.Array, where: jax.Array | None, axis_name: tuple[Hashable, ...]) -> jax.Array:
    """x, in its type what the result is: inside `shard_map` varying over the mesh axes of the mask and axis_name, in
    explicit mode cut along those that cut the mask."""
    x = x if where is None else laid_as_well(x, where)
    return varying_over(x, [*([] if where is None else varying_axes(where)), *axis_name])


def varying_axes(a: jax.Array) -> frozenset[Hashable]:
    """The mesh axes of a surrounding `shard_map` that the array's type says it varies over: none with check_vma off."""
    return _private.varying_axes(jax.typeof(a))


def varying_over(x: jax.Array, names: Iterable[Hashable]) -> jax.Array:
    """x, in its type varying over these as well, if they are mesh axes of a surrounding `shard_map`."""
    manual = jax.sharding.get_abstract_mesh().manual_axes  # the axis_name of a vmap is none of them
    wanted = varying_axes(x).union(name for name in names if name in manual)
    missing = tuple(wanted - varying_axes(x))
    if not missing:
        return x
    marked = jax.lax.pcast(x, missing, to="varying") if hasattr(jax.lax, "pcast") else jax.lax.pvary(x, missing)
    # With check_vma off JAX 0.8 leaves a trace that adds up cotangents.
    return marked if varying_axes(marked) == wanted else x


def promoted(x: jax.Array) -> tuple[jax.Array, Any]:
    """x in a dtype that there are kernels for, and the dtype of the result."""
    dtype = x.dtype
    if not jnp.issubdtype(dtype, jnp.floating):
        # Of a 32-bit integer exp takes the default float type, which unsigned and narrow ones get as well.
        dtype = jax.eval_shape(jnp.exp, jax.ShapeDtypeStruct((), dtype)).dtype
        x = x.astype(dtype)
    return x if x.dtype.name in _KERNEL_DTYPES else x.astype(jnp.float32), dtype


def checked_array(
    op: str, x: Any, argument: str = "x", kinds: str = "floating, integer, boolean or complex"
) -> jax.Array:
    allowed = f"{op}: {argument} must be an array or a number, of a {kinds} dtype that JAX has"
    x = as_array(allowed, x)
    if not jnp.issubdtype(x.dtype, jnp.number) and x.dtype != jnp.bool_:
        raise TypeError(f"{allowed}, got one of dtype {x.dtype}.")
    return x


def _checked_mask(op: str, where: Any) -> jax.Array:
    allowed = f"{op}: where must be a boolean array or None"
    where = as_array(allowed, where)
    if where.dtype != jnp.bool_:
        raise TypeError(f"{allowed}, got one of dtype {where.dtype}.")
    return where


def as_array(allowed: str, a: Any) -> jax.Array:
    if isinstance(a, np.ndarray | np.generic) and not is_dtype_of_jax(a.dtype):
        raise TypeError(f"{allowed}, got one of dtype {a.dtype}.")
    if isinstance(a, int | float | complex) or hasattr(a, "__jax_array__") or hasattr(a, "__array__"):
        try:
            return a if isinstance(a, jax.Array) else jnp.asarray(a)
        except OverflowError as error:
            raise ValueError(f"{allowed}, got {a}, which JAX's integers do not hold.") from error
    raise TypeError(f"{allowed}, got one of type {type(a).__name__}.")


def check(op: str, value: Any, types: Any, is_allowed: Callable[[Any], bool], allowed: str) -> None:
    if isinstance(value, bool) or not isinstance(value, types):
        raise TypeError(f"{op}: {allowed}, got one of type {type(value).__name__}.")
    if not is_allowed(value):
        raise ValueError(f"{op}: {allowed}, got {value!r}.")


def checked_positive(op: str, value: Any, argument: str) -> float:
    allowed = f"{argument} must be a positive number, known when the program is traced, of float32's range"
    least, most = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)
    check(op, value, int | float | np.integer | np.floating, lambda value: least <= float(value) <= most, allowed)
    return float(value)


def checked_bool(op: str, a: Any, argument: str) -> bool:
    if not isinstance(a, bool | np.bool_):
        hint = " It must be known when the program is traced." if isinstance(a, jax.core.Tracer) else ""
        raise TypeError(f"{op}: {argument} must be True or False, got one of type {type(a).__name__}.{hint}")
    return bool(a)


def checked_axes_and_mask(op: str, x: jax.Array, axis: Any, where: Any, argument: str = "x"):
    """The sorted axes, the mask, and the shape of the result."""
    shape = x.shape
    if where is not None:
        where = _checked_mask(op, where)
        try:
            shape = jnp.broadcast_shapes(x.shape, where.shape)
        except ValueError as error:
            raise ValueError(
                f"{op}: where must broadcast with {argument}, got shape {where.shape} for {argument} of shape "
                f"{x.shape}."
            ) from error
    return tuple(sorted(checked_axes(op, len(shape), axis))), where, shape


def prepared(name, x, axis, where, axis_name, argument="x", may_enlarge=True):
    """What primitives with results for rows are given: x in a dtype that is computed in, the mask, the sorted axes and
    the names of mesh axes; and the dtype of a result like x.

    A mask that may not enlarge x may have the results' shape as well: it then leaves out whole rows.
    """
    x = checked_real_array(name, x, argument)
    if where is not None and not may_enlarge:
        where = of_rows_or_elements(name, where, x, axis, argument)
    axes, where, shape = checked_axes_and_mask(name, x, axis, where, argument)
    axis_name = checked_axis_name(name, axis_name)
    x, dtype = promoted(x)
    x = jnp.broadcast_to(x, shape)
    return varying_as_well(x, where, axis_name), where, axes, axis_name, dtype


def of_rows_or_elements(op: str, where: Any, x: jax.Array, axis: Any, argument: str = "x") -> jax.Array:
    """A mask that broadcasts to x's shape, from such a one, of elements, or one of the results' shape, of rows."""
    where = _checked_mask(op, where)
    axes = checked_axes(op, x.ndim, axis)
    rows = tuple(n for d, n in enumerate(x.shape) if d not in axes)
    if not broadcasts(where.shape, x.shape) and where.shape != rows:
        raise ValueError(
            f"{op}: where must broadcast to shape {x.shape} of {argument}, or have shape {rows} to leave out whole "
            f"rows, got shape {where.shape}."
        )
    if where.shape != rows:
        return where
    of_rows = jnp.expand_dims(where, axes)
    of_elements = (1,) * len(axes) + where.shape
    if of_rows.shape != of_elements and broadcasts(where.shape, x.shape):
        new = ["None"] * len(axes)
        as_elements = ", ".join(new + [":"] * len(rows))
        as_rows = ", ".join("None" if d in axes else ":" for d in range(x.ndim))
        raise ValueError(
            f"{op}: where of shape {rows} may mean rows or elements of {argument} of shape {x.shape}: "
            f"where[{as_rows}] leaves out rows, where[{as_elements}] elements of each row."
        )
    return of_rows


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


def checked_axes(op: str, ndim: int, axis: Any) -> tuple[int, ...]:
    """The axes from 0 on, in the order in which they are given."""
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
    axes = tuple(a % ndim for a in given)
    if len(set(axes)) != len(axes):
        raise ValueError(f"{op}: axis must not name an axis twice, got {axis!r} for an array of {ndim} dimensions.")
    return axes


def checked_axis(op: str, ndim: int, axis: Any) -> int:
    """A single axis, from 0 on."""
    axes = checked_axes(op, ndim, axis)
    if len(axes) != 1:
        raise ValueError(f"{op}: axis must be a single one, got {axis!r} for an array of {ndim} dimensions.")
    return axes[0]


def _names(op: str, axis_name: Any) -> tuple[Hashable, ...]:
    names = () if axis_name is None else tuple(axis_name) if isinstance(axis_name, tuple | list) else (axis_name,)
    if not all(isinstance(name, Hashable) for name in names):
        raise ValueError(f"{op}: {_ALLOWED_NAMES}, got {axis_name!r}.")
    return names


def checked_axis_name(op: str, axis_name: Any) -> tuple[Hashable, ...]:
    names = _names(op, axis_name)
    for name in names:
        try:
            jax.lax.axis_size(name)
        except (NameError, TypeError, ValueError) as error:
            raise ValueError(f"{op}: {_ALLOWED_NAMES}, got {axis_name!r}.") from error
    if len(set(names)) != len(names):
        raise ValueError(f"{op}: axis_name must not name an axis twice, got {axis_name!r}.")
    return names


_OF_DISTRIBUTIONS = " One-hot labels and other distributions go to jax_softmax.softmax_cross_entropy(logits, labels)."


def checked_labels(op: str, labels: Any) -> jax.Array:
    allowed = f"{op}: labels must be an array of an integer dtype"
    labels = as_array(allowed, labels)
    if not jnp.issubdtype(labels.dtype, jnp.integer):
        hint = _OF_DISTRIBUTIONS if jnp.issubdtype(labels.dtype, jnp.floating) else ""
        raise TypeError(f"{allowed}, got one of dtype {labels.dtype}.{hint}")
    return labels


def check_shape_of_labels(op: str, labels: jax.Array, rows: tuple[int, ...], shape: tuple[int, ...], what: str) -> None:
    """`rows`: that of the labels, of logits of this shape."""
    if labels.shape != rows:
        hint = _OF_DISTRIBUTIONS if labels.shape == shape else ""
        raise ValueError(f"{op}: labels must have {what}, {rows} here, got {labels.shape}.{hint}")


def check_reduction(op: str, reduction: Any) -> None:
    allowed = f'{op}: reduction must be "mean", "sum" or None'
    if not isinstance(reduction, str | None):
        raise TypeError(f"{allowed}, got one of type {type(reduction).__name__}.")
    if reduction not in ("mean", "sum", None):
        hint = " Write reduction=None for each row's loss." if reduction == "none" else ""
        raise ValueError(f"{allowed}, got {reduction!r}.{hint}")


def checked_float_dtype(op: str, dtype: Any, argument: str, default: np.dtype | None = None) -> np.dtype:
    """With a default, which None stands for, one that there are kernels for."""
    if dtype is None and default is not None:
        return default
    try:
        found = jnp.dtype(dtype)
    except TypeError:
        found = None
    if found is None or not jnp.issubdtype(found, jnp.floating):
        raise TypeError(f"{op}: {argument} must be a floating dtype or None, got {dtype!r}.")
    if default is not None and found.name not in _KERNEL_DTYPES:
        raise TypeError(f"{op}: {argument} must be one of {', '.join(_KERNEL_DTYPES)}, or None, got {found}.")
    return jax.dtypes.canonicalize_dtype(found)


def common_float_dtype(*arrays: jax.Array) -> np.dtype:
    """The dtype that holds all of them, or float32 if there are no kernels for it."""
    # float8, which JAX does not promote, as float32.
    floats = (jnp.float32 if a.dtype.name.startswith("float8") else a.dtype for a in arrays)
    dtype = jnp.dtype(jnp.result_type(*floats))
    return dtype if dtype.name in _KERNEL_DTYPES else jnp.dtype(jnp.float32)


def checked_real_array(op: str, a: Any, argument: str) -> jax.Array:
    a = checked_array(op, a, argument, "floating, integer or boolean")
    if jnp.issubdtype(a.dtype, jnp.complexfloating):
        raise TypeError(f"{op}: {argument} must be real, got {a.dtype}.")
    return a


def check_classes(op: str, shape: tuple[int, ...], axes: tuple[int, ...], axis_name: tuple[Hashable, ...] = ()) -> None:
    """Whether labels can count the classes along these axes, of all parts along axis_name."""
    of_part = math.prod(shape[d] for d in axes)
    if not axes or of_part == 0:
        raise ValueError(f"{op}: there must be at least one class, got logits of shape {shape} and axes {axes}.")
    classes = of_part * math.prod(map(jax.lax.axis_size, axis_name))
    if isinstance(classes, int) and classes > LARGEST_LABEL:
        raise ValueError(f"{op}: there may be at most {LARGEST_LABEL} classes, got {classes}.")


def check_linear_layer(
    op: str, x: jax.Array, w: jax.Array, labels: jax.Array, bias: jax.Array | None, transpose_w: bool, chunk: Any
) -> None:
    """Whether a linear layer's arrays go together with its tokens' labels, and with so many tokens at once."""
    layout = "(vocabulary, features)" if transpose_w else "(features, vocabulary)"
    if x.ndim == 0:
        raise ValueError(f"{op}: x must be of shape (..., features), got shape ().")
    if w.ndim != 2 or w.shape[transpose_w] != x.shape[-1]:
        raise ValueError(f"{op}: w must be of shape {layout}, got shape {w.shape} for x of {x.shape[-1]} features.")
    vocabulary = w.shape[1 - transpose_w]
    logits = *x.shape[:-1], vocabulary
    check_shape_of_labels(op, labels, x.shape[:-1], logits, "x's shape without features")
    if bias is not None and bias.shape != (vocabulary,):
        raise ValueError(f"{op}: bias must be of shape (vocabulary,), ({vocabulary},) here, got {bias.shape}.")
    if chunk is None:
        return
    check(op, chunk, int | np.integer, lambda n: n > 0, "chunk must be a positive int, how many tokens, or None")
    aval = jax.typeof(x)
    if types_tell_shardings([aval]) and any(aval.sharding.spec[:-1]):
        raise ValueError(  # JAX refuses to take chunks of what is sharded
            f"{op}: chunk must be None where x's type says that tokens are sharded, {aval.sharding.spec} here, got "
            f"{chunk}. Inside jax.shard_map a device may take chunks of its own tokens."
        )


def check_broadcasts(op: str, argument: str, shape: tuple[int, ...], to: tuple[int, ...]) -> None:
    if not broadcasts(shape, to):
        raise ValueError(f"{op}: {argument} must broadcast to shape {to}, got shape {shape}.")


def broadcasts(shape: tuple[int, ...], to: tuple[int, ...]) -> bool:
    try:
        return jnp.broadcast_shapes(shape, to) == to
    except ValueError:
        return False
