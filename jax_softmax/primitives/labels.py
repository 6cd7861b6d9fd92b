"""Labels of rows: the elements that they are, and where these lie.

`label` is an int32 array of x's shape with extent 1 along `axes`, which are sorted. It is the number of one of a row's
elements in row-major order. A row whose label is negative or too large has no label.
"""

import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import Array

from jax_softmax.primitives.types import Axes, Mask, MeshAxes, Shape

LARGEST_LABEL = 2**31 - 1


def widened_labels(labels: Array) -> Array:
    """The labels as integers of at least 32 bits, so that their dtype has the number of classes."""
    return labels.astype(jnp.int32) if labels.dtype.itemsize < 4 else labels


def label_of_rows(labels: Array, shape: Shape, axes: Axes, where: Mask, axis_name: MeshAxes) -> tuple[Array, Array]:
    """`label` for an array of this shape from a user's labels, and whether each row has one.

    The user's labels count along the axes in the order in which these are given here, the last varying fastest. Rows
    that are masked altogether have no label. If the array is a shard along the mesh axes `axis_name`, the user's labels
    count the elements of all shards, one shard after the other, and `label` is -1 where the label is in another one.
    """
    labels = jnp.expand_dims(widened_labels(labels), axes)
    elements = math.prod(shape[d] for d in axes)
    # A negative label is a large unsigned number.
    found = labels.astype(f"uint{8 * labels.dtype.itemsize}") < elements * math.prod(map(jax.lax.axis_size, axis_name))
    if where is not None:
        any_left = jnp.any(jnp.broadcast_to(where, shape), axes, keepdims=True)
        found &= jax.lax.pmax(any_left.astype(jnp.float32), axis_name) > 0 if axis_name else any_left
    found_here = found
    if axis_name:
        labels = labels - (elements * jax.lax.axis_index(axis_name)).astype(labels.dtype)
        found_here = found & (labels >= 0) & (labels < elements)
    if axis_name or where is not None or labels.dtype != jnp.int32:
        labels = jnp.where(found_here, labels, -1).astype(jnp.int32)
    if list(axes) != sorted(axes):
        labels = _label_along_sorted_axes(labels, shape, axes)
    return labels, found


def _label_along_sorted_axes(label: Array, shape: Shape, axes: Axes) -> Array:
    """The label that counts along the sorted axes, from one that counts along them in the order given."""
    index = dict(zip(axes, _label_indices(shape, axes, label), strict=True))
    sorted_label: Array | int = 0
    for d in sorted(axes):
        sorted_label = sorted_label * shape[d] + index[d]
    return jnp.where(has_label(label, shape, axes), sorted_label, -1)


def has_label(label: Array, shape: Shape, axes: Axes) -> Array:
    """Whether each row, of an array of this shape, has a label."""
    return (label >= 0) & (label < math.prod(shape[d] for d in axes))


def label_elements(x: Array, axes: Axes, label: Array) -> Array:
    """x[label] of each row, of x's shape with extent 1 along axes. Rows without a label give any of their elements."""
    if _has_sharded_rows(x, axes):
        return jnp.sum(jnp.where(label_mask(x, axes, label), x, 0), axes, keepdims=True, dtype=x.dtype)
    if 0 in x.shape:  # older JAX has no gather for that
        return jnp.zeros_like(label, x.dtype)
    others = tuple(d for d in range(x.ndim) if d not in axes)
    dimensions = jax.lax.GatherDimensionNumbers(
        offset_dims=axes,
        collapsed_slice_dims=(),
        start_index_map=axes,
        operand_batching_dims=others,
        start_indices_batching_dims=tuple(range(len(others))),
    )
    return jax.lax.gather(x, _gather_indices(x, axes, label), dimensions, (1,) * x.ndim, mode="clip")


def label_mask(x: Array, axes: Axes, label: Array) -> Array | bool:
    """A mask of x's shape, or one that broadcasts to it: True at each row's label."""
    found: Array | bool = True
    for d, index in zip(axes, _label_indices(x.shape, axes, label), strict=True):
        found &= index == jax.lax.broadcasted_iota(jnp.int32, [n if k == d else 1 for k, n in enumerate(x.shape)], d)
    return found


def local_label(
    label: Array, axes: Axes, shape: Shape, shard_shape: Sequence[int], first_index: Callable[[int], Array]
) -> Array:
    """The label in a shard, -1 if it is in another one, given the label in the whole array, which has this shape.

    The shard has shard_shape[d] indices along dimension d, from first_index(d) on.
    """
    found = has_label(label, shape, axes)
    local: Array | int = 0
    for d, index in zip(axes, _label_indices(shape, axes, label), strict=True):
        index = index - first_index(d)
        found &= (index >= 0) & (index < shard_shape[d])
        local = local * shard_shape[d] + index
    return jnp.where(found, local, -1)


def _has_sharded_rows(x: Array, axes: Axes) -> bool:
    """Whether x's type says that rows are sharded: JAX refuses to index them then."""
    return any(jax.typeof(x).sharding.spec[d] is not None for d in axes)


def _label_indices(shape: Shape, axes: Axes, label: Array) -> Sequence[Array]:
    """The label's index along each of the axes. It is no index of an element if the row has no label."""
    if len(axes) == 1:
        return [label]
    found = has_label(label, shape, axes)
    indices = jnp.unravel_index(jnp.where(found, label, 0), [shape[d] for d in axes])
    return [jnp.where(found, index, -1) for index in indices]


def _gather_indices(x: Array, axes: Axes, label: Array) -> Array:
    if len(axes) == 1:
        return jnp.moveaxis(label, axes[0], -1)
    return jnp.stack([jax.lax.squeeze(index, axes) for index in _label_indices(x.shape, axes, label)], -1)
