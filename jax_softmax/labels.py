"""Where the labels of an array's rows lie: its elements there, and putting others in their place.

`label` is an int32 array of x's shape with extent 1 along `axes`. It counts a row's elements in row-major order; -1
means that the row has no label.
"""

import math

import jax
import jax.numpy as jnp


def label_of_rows(labels, shape, axes, where):
    """`label` of an array of this shape from labels as users give them; -1 of what is no class or is left out."""
    labels = labels.astype(jnp.int32) if labels.dtype.itemsize < 4 else labels  # which can count the classes
    valid = (labels >= 0) & (labels < math.prod(shape[d] for d in axes))
    if where is not None:
        valid &= jnp.any(jnp.broadcast_to(where, shape), axes)
    return jnp.expand_dims(jnp.where(valid, labels, -1).astype(jnp.int32), axes)


def at_labels(x, axes, label):
    """The label's element of each row, of x's shape with extent 1 along axes; of rows without a label any other."""
    if _are_spread(x, axes):
        return jnp.sum(jnp.where(_is_label(x, axes, label), x, 0), axes, keepdims=True, dtype=x.dtype)
    kept = _kept_dims(x, axes)
    dimensions = jax.lax.GatherDimensionNumbers(
        offset_dims=(),
        collapsed_slice_dims=axes,
        start_index_map=axes,
        operand_batching_dims=kept,
        start_indices_batching_dims=tuple(range(len(kept))),
    )
    found = jax.lax.gather(x, _index(x, axes, label), dimensions, (1,) * x.ndim, mode="clip")
    return jnp.expand_dims(found, axes)


def set_at_labels(x, axes, label, values):
    """x with the label's element of each row replaced."""
    if _are_spread(x, axes):
        return jnp.where(_is_label(x, axes, label), values, x)
    kept = _kept_dims(x, axes)
    dimensions = jax.lax.ScatterDimensionNumbers(
        update_window_dims=(),
        inserted_window_dims=axes,
        scatter_dims_to_operand_dims=axes,
        operand_batching_dims=kept,
        scatter_indices_batching_dims=tuple(range(len(kept))),
    )
    values = jax.lax.squeeze(values, axes)
    return jax.lax.scatter(x, _index(x, axes, label), values, dimensions, unique_indices=True, mode="drop")


def label_of_part(label, axes, shape, part, first_index):
    """The label in a part of an array of this shape: of dimension d, part[d] indices from first_index(d). Or -1."""
    found, here = label >= 0, 0
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
    """The label's index along each of the axes, -1 of none."""
    indices = jnp.unravel_index(jnp.maximum(label, 0), [shape[d] for d in axes]) if len(axes) > 1 else [label]
    return [jnp.where(label < 0, -1, index) for index in indices]


def _index(x, axes, label):
    return jnp.stack([jax.lax.squeeze(index, axes) for index in _along(x.shape, axes, label)], -1)


def _is_label(x, axes, label):
    """Which elements are the labels'."""
    found = True
    for d, index in zip(axes, _along(x.shape, axes, label), strict=True):
        found &= index == jax.lax.broadcasted_iota(jnp.int32, [n if k == d else 1 for k, n in enumerate(x.shape)], d)
    return found
