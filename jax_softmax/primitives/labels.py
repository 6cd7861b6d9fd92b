"""Where the labels of an array's rows lie, and its elements there.

`label` is an int32 array of x's shape with extent 1 along `axes`, which are sorted. It counts a row's elements in
row-major order; a row whose label is none of its elements, negative or too large, has no label.
"""

import math

import jax
import jax.numpy as jnp

LARGEST_LABEL = 2**31 - 1


def that_count_classes(labels):
    """The labels in a dtype that has the number of classes."""
    return labels.astype(jnp.int32) if labels.dtype.itemsize < 4 else labels


def label_of_rows(labels, shape, axes, where, axis_name):
    """`label` of an array of this shape from labels as users give them, and whether a row has one.

    Labels of users count along the axes in the order in which these are given here, the last varying fastest. Rows that
    are left out altogether have none. Where the array is a part along the mesh axes `axis_name`, labels of
    users count the elements of all parts, one part after the other, and `label` is -1 if it lies in another part.
    """
    labels = jnp.expand_dims(that_count_classes(labels), axes)
    columns = math.prod(shape[d] for d in axes)
    # A negative one is a large unsigned number.
    found = labels.astype(f"uint{8 * labels.dtype.itemsize}") < columns * math.prod(map(jax.lax.axis_size, axis_name))
    if where is not None:
        kept = jnp.any(jnp.broadcast_to(where, shape), axes, keepdims=True)
        found &= jax.lax.pmax(kept.astype(jnp.float32), axis_name) > 0 if axis_name else kept
    here = found
    if axis_name:
        labels = labels - (columns * jax.lax.axis_index(axis_name)).astype(labels.dtype)
        here = found & (labels >= 0) & (labels < columns)
    if axis_name or where is not None or labels.dtype != jnp.int32:
        labels = jnp.where(here, labels, -1).astype(jnp.int32)
    if list(axes) != sorted(axes):
        labels = _of_sorted_axes(labels, shape, axes)
    return labels, found


def _of_sorted_axes(label, shape, axes):
    """A label that counts along sorted axes, from one along the same in another order."""
    index = dict(zip(axes, _along(shape, axes, label), strict=True))
    sorted_label = 0
    for d in sorted(axes):
        sorted_label = sorted_label * shape[d] + index[d]
    return jnp.where(exists(label, shape, axes), sorted_label, -1)


def exists(label, shape, axes):
    """Whether a label is one of the elements of a row of an array of this shape."""
    return (label >= 0) & (label < math.prod(shape[d] for d in axes))


def at_labels(x, axes, label):
    """The label's element of each row, of x's shape with extent 1 along axes; of rows without a label any other."""
    if _are_spread(x, axes):
        return jnp.sum(jnp.where(is_label(x, axes, label), x, 0), axes, keepdims=True, dtype=x.dtype)
    if 0 in x.shape:  # of which older JAX gathers nothing
        return jnp.zeros_like(label, x.dtype)
    kept = _kept_dims(x, axes)
    dimensions = jax.lax.GatherDimensionNumbers(
        offset_dims=axes,
        collapsed_slice_dims=(),
        start_index_map=axes,
        operand_batching_dims=kept,
        start_indices_batching_dims=tuple(range(len(kept))),
    )
    return jax.lax.gather(x, _index(x, axes, label), dimensions, (1,) * x.ndim, mode="clip")


def is_label(x, axes, label):
    """Which elements are the labels'."""
    found = True
    for d, index in zip(axes, _along(x.shape, axes, label), strict=True):
        found &= index == jax.lax.broadcasted_iota(jnp.int32, [n if k == d else 1 for k, n in enumerate(x.shape)], d)
    return found


def label_of_part(label, axes, shape, part, first_index):
    """The label in a part of an array of this shape: of dimension d, part[d] indices from first_index(d). Or -1."""
    found, here = exists(label, shape, axes), 0
    for d, index in zip(axes, _along(shape, axes, label), strict=True):
        index = index - first_index(d)
        found &= (index >= 0) & (index < part[d])
        here = here * part[d] + index
    return jnp.where(found, here, -1)


def _kept_dims(x, axes):
    return tuple(d for d in range(x.ndim) if d not in axes)


def _are_spread(x, axes):
    """Whether x's type says that rows are spread over devices. Then they must not be indexed."""
    return any(jax.typeof(x).sharding.spec[d] is not None for d in axes)


def _along(shape, axes, label):
    """The label's index along each of the axes; of none an index that is no element's."""
    if len(axes) == 1:
        return [label]
    found = exists(label, shape, axes)
    indices = jnp.unravel_index(jnp.where(found, label, 0), [shape[d] for d in axes])
    return [jnp.where(found, index, -1) for index in indices]


def _index(x, axes, label):
    if len(axes) == 1:
        return jnp.moveaxis(label, axes[0], -1)
    return jnp.stack([jax.lax.squeeze(index, axes) for index in _along(x.shape, axes, label)], -1)
