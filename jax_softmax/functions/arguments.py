"""Checks of the public functions' arguments, and the errors that they raise."""

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
from jax_softmax.primitives.types import Axes, Dtype, Mask, MeshAxes, Shape, sharded_as_well, types_tell_shardings

Axis = int | Sequence[int] | np.ndarray | jax.Array | None
AxisName = Hashable | Sequence[Hashable] | None
Reduction = Literal["mean", "sum"] | None

_KERNEL_DTYPES = ("float16", "bfloat16", "float32", "float64")
_NUMBERS = frozenset({bool, int, float, complex})
_ALLOWED_NAMES = "axis_name must be a mesh axis of a surrounding shard_map, a tuple of such, or None"


def for_jit(
    op: str, x: Any, axis: Any, where: Any, axis_name: Any, argument: str = "x", may_be_complex: bool = False
) -> tuple[Any, Any, Any, Any]:
    """The arguments in a form that `jax.jit` accepts; axis and axis_name are static ones. Shapes are not looked at."""
    if axis is not None and type(axis) is not int:
        axis = _as_ints(op, axis)
    if not _is_jit_argument(x):
        x = (checked_array if may_be_complex else checked_real_array)(op, x, argument)
    if where is not None and not _is_jit_argument(where):
        where = _checked_mask(op, where)
    if axis_name is not None:
        axis_name = _names(op, axis_name)
    return x, axis, where, axis_name


def _is_jit_argument(a: Any) -> bool:
    """Whether `jax.jit` accepts it as an array."""
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
    """x with the result's type. Inside `shard_map` that varies over the mesh axes of the mask and axis_name as well; in
    explicit mode it is sharded over the mask's mesh axes as well."""
    x = x if where is None else sharded_as_well(x, where)
    return varying_over(x, [*([] if where is None else varying_axes(where)), *axis_name])


def varying_axes(a: jax.Array) -> frozenset[Hashable]:
    """The mesh axes of a surrounding `shard_map` that the array varies over, by its type; none with check_vma off."""
    return _private.varying_axes(jax.typeof(a))


def varying_over(x: jax.Array, names: Iterable[Hashable]) -> jax.Array:
    """x with a type that varies over those of these names that are mesh axes of a surrounding `shard_map`."""
    manual = jax.sharding.get_abstract_mesh().manual_axes  # a vmap's axis_name is not among these
    wanted = varying_axes(x).union(name for name in names if name in manual)
    missing = tuple(wanted - varying_axes(x))
    if not missing:
        return x
    if hasattr(jax.lax, "pcast"):
        marked = jax.lax.pcast(x, missing, to="varying")
    else:
        marked = jax.lax.pvary(x, missing)  # type: ignore[attr-defined]  # JAX 0.8 has this instead
    # With check_vma off JAX 0.8 would still add up cotangents for it.
    return marked if varying_axes(marked) == wanted else x


def promoted(x: jax.Array) -> tuple[jax.Array, Any]:
    """x in a dtype that has kernels, and the dtype of the result."""
    dtype = x.dtype
    if not jnp.issubdtype(dtype, jnp.floating):
        # exp of integers and booleans has the default float dtype.
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


def check_value(op: str, value: Any, types: Any, is_allowed: Callable[[Any], bool], allowed: str) -> None:
    if isinstance(value, bool) or not isinstance(value, types):
        raise TypeError(f"{op}: {allowed}, got one of type {type(value).__name__}.")
    if not is_allowed(value):
        raise ValueError(f"{op}: {allowed}, got {value!r}.")


def checked_positive(op: str, value: Any, argument: str) -> float:
    allowed = f"{argument} must be a positive number, known when the program is traced, of float32's range"
    least, most = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)
    check_value(op, value, int | float | np.integer | np.floating, lambda value: least <= float(value) <= most, allowed)
    return float(value)


def checked_bool(op: str, a: Any, argument: str) -> bool:
    if not isinstance(a, bool | np.bool_):
        hint = " It must be known when the program is traced." if isinstance(a, jax.core.Tracer) else ""
        raise TypeError(f"{op}: {argument} must be True or False, got one of type {type(a).__name__}.{hint}")
    return bool(a)


def checked_axes_and_mask(
    op: str, x: jax.Array, axis: Any, where: Any, argument: str = "x"
) -> tuple[Axes, Mask, Shape]:
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


def prepared(
    name: str, x: Any, axis: Any, where: Any, axis_name: Any, argument: str = "x", may_enlarge: bool = True
) -> tuple[jax.Array, Mask, Axes, MeshAxes, Dtype]:
    """For operators with results of rows: x in a dtype that has kernels, the mask, the sorted axes and the names of
    mesh axes, all as primitives take them; and the dtype that a result of x's shape would have.

    With may_enlarge, x is broadcast to the mask's shape. Without, the mask broadcasts to x's shape, or has the results'
    shape and leaves out whole rows.
    """
    x = checked_real_array(name, x, argument)
    if where is not None and not may_enlarge:
        where = _element_mask(name, where, x, axis, argument)
    axes, where, shape = checked_axes_and_mask(name, x, axis, where, argument)
    axis_name = checked_axis_name(name, axis_name)
    x, dtype = promoted(x)
    x = jnp.broadcast_to(x, shape)
    return varying_as_well(x, where, axis_name), where, axes, axis_name, dtype


def _element_mask(op: str, where: Any, x: jax.Array, axis: Any, argument: str = "x") -> jax.Array:
    """A mask that broadcasts to x's shape, given that or a mask of rows, which has the shape of x without the axes."""
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
    row_mask = jnp.expand_dims(where, axes)
    if row_mask.shape != (1,) * len(axes) + where.shape and broadcasts(where.shape, x.shape):
        as_elements = ", ".join(["None"] * len(axes) + [":"] * len(rows))
        as_rows = ", ".join("None" if d in axes else ":" for d in range(x.ndim))
        raise ValueError(
            f"{op}: where of shape {rows} may mean rows or elements of {argument} of shape {x.shape}: "
            f"where[{as_rows}] leaves out rows, where[{as_elements}] elements of each row."
        )
    return row_mask


def _as_ints(op: str, axis: Any) -> int | tuple[int, ...] | None:
    """The axis or axes as Python's own ints."""
    if axis is None:
        return None
    try:
        # While a program is traced, an element of a JAX array would be a traced operation.
        axis_or_axes = np.asarray(axis) if isinstance(axis, jax.Array) else axis
        if isinstance(axis_or_axes, tuple | list | range) or np.ndim(axis_or_axes):
            return tuple(operator.index(a) for a in axis_or_axes)
        return operator.index(axis_or_axes)
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
    """The axes, counted from 0, in the user's order."""
    axes = _as_ints(op, axis)
    if axes is None:
        return tuple(range(ndim))
    axes = (axes,) if isinstance(axes, int) else axes
    if ndim == 0 and axes:
        raise ValueError(f"{op}: axis must be None or () for an array of 0 dimensions, got {axis!r}.")
    if not all(-ndim <= a < ndim for a in axes):
        raise ValueError(
            f"{op}: axis must be an int from {-ndim} to {ndim - 1}, a sequence of such, or None, for an array of "
            f"{ndim} dimensions, got {axis!r}."
        )
    axes = tuple(a % ndim for a in axes)
    if len(set(axes)) != len(axes):
        raise ValueError(f"{op}: axis must not name an axis twice, got {axis!r} for an array of {ndim} dimensions.")
    return axes


def checked_axis(op: str, ndim: int, axis: Any) -> int:
    """A single axis, counted from 0."""
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


_TO_SOFT_LABELS = " One-hot labels and other distributions go to jax_softmax.softmax_cross_entropy(logits, labels)."


def checked_labels(op: str, labels: Any, or_probabilities: bool = False) -> jax.Array:
    allowed = f"{op}: labels must be an array of an integer dtype"
    allowed += ", or of probabilities in a floating dtype" if or_probabilities else ""
    labels = as_array(allowed, labels)
    floating = jnp.issubdtype(labels.dtype, jnp.floating)
    if not jnp.issubdtype(labels.dtype, jnp.integer) and not (floating and or_probabilities):
        raise TypeError(f"{allowed}, got one of dtype {labels.dtype}.{_TO_SOFT_LABELS if floating else ''}")
    return labels


def check_shape_of_labels(
    op: str, labels: jax.Array, shape: tuple[int, ...], what: str, other: tuple[int, ...], hint: str = _TO_SOFT_LABELS
) -> None:
    """Labels must have this shape, which is `what`. The hint is for those who give them in the other one."""
    if labels.shape != shape:
        hint = hint if labels.shape == other else ""
        raise ValueError(f"{op}: labels must have {what}, {shape} here, got {labels.shape}.{hint}")


def check_reduction(op: str, reduction: Any) -> None:
    allowed = f'{op}: reduction must be "mean", "sum" or None'
    if not isinstance(reduction, str | None):
        raise TypeError(f"{allowed}, got one of type {type(reduction).__name__}.")
    if reduction not in ("mean", "sum", None):
        hint = " Write reduction=None for each row's loss." if reduction == "none" else ""
        raise ValueError(f"{allowed}, got {reduction!r}.{hint}")


def checked_float_dtype(op: str, dtype: Any, argument: str, default: np.dtype | None = None) -> np.dtype:
    """A floating dtype. If there is a default, it stands for None, and only dtypes with kernels are allowed."""
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
    """The dtype that holds all of them, or float32 if it has no kernels."""
    # float8 counts as float32, because JAX does not promote it.
    floats = (jnp.float32 if a.dtype.name.startswith("float8") else a for a in arrays)
    dtype = jnp.dtype(jnp.result_type(*floats))
    return dtype if dtype.name in _KERNEL_DTYPES else jnp.dtype(jnp.float32)


def checked_real_array(op: str, a: Any, argument: str) -> jax.Array:
    a = checked_array(op, a, argument, "floating, integer or boolean")
    if jnp.issubdtype(a.dtype, jnp.complexfloating):
        raise TypeError(f"{op}: {argument} must be real, got {a.dtype}.")
    return a


def checked_optional_array(op: str, a: Any, argument: str) -> jax.Array | None:
    return None if a is None else checked_real_array(op, a, argument)


def checked_classes(op: str, shape: tuple[int, ...], axes: tuple[int, ...], axis_name: tuple[Hashable, ...]) -> int:
    """The number of classes along these axes, of all shards along axis_name."""
    classes = math.prod(shape[d] for d in axes)
    if not axes or classes == 0:
        raise ValueError(f"{op}: there must be at least one class, got logits of shape {shape} and axes {axes}.")
    classes *= math.prod(map(jax.lax.axis_size, axis_name))
    if isinstance(classes, int) and classes > LARGEST_LABEL:
        raise ValueError(f"{op}: there may be at most {LARGEST_LABEL} classes, got {classes}.")
    return classes


def check_linear_layer(
    op: str,
    x: jax.Array,
    axis: int,
    w: jax.Array,
    labels: jax.Array,
    bias: jax.Array | None,
    class_weights: jax.Array | None,
    transpose_w: bool,
    chunk: Any,
) -> None:
    """The shapes of a linear layer's arrays and its tokens' labels, and the number of tokens in a chunk. The features
    lie along x's axis, counted from 0."""
    shape, features = "(vocabulary, features)" if transpose_w else "(features, vocabulary)", x.shape[axis]
    if w.ndim != 2 or w.shape[transpose_w] != features:
        raise ValueError(f"{op}: w must be of shape {shape}, got shape {w.shape} for x of {features} features.")
    vocabulary = w.shape[1 - transpose_w]
    tokens = x.shape[:axis] + x.shape[axis + 1 :]
    logits = *x.shape[:axis], vocabulary, *x.shape[axis + 1 :]
    if jnp.issubdtype(labels.dtype, jnp.floating):
        what, hint = "the logits' shape, as they are floating", " Classes must be of an integer dtype."
        check_shape_of_labels(op, labels, logits, what, tokens, hint)
        if class_weights is not None:
            raise ValueError(
                f"{op}: class_weights must be None where labels are probabilities: multiply these by them."
            )
    else:
        what, hint = "x's shape without features", " Probabilities must be of a floating dtype."
        check_shape_of_labels(op, labels, tokens, what, logits, hint)
    if bias is not None and bias.shape != (vocabulary,):
        raise ValueError(f"{op}: bias must be of shape (vocabulary,), ({vocabulary},) here, got {bias.shape}.")
    if chunk is None:
        return
    check_value(op, chunk, int | np.integer, lambda n: n > 0, "chunk must be a positive int, how many tokens, or None")
    aval = jax.typeof(x)
    if types_tell_shardings([aval]) and any(name for d, name in enumerate(aval.sharding.spec) if d != axis):
        raise ValueError(  # JAX refuses to slice sharded dimensions
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
