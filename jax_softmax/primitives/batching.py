"""The batching rule of the operators: one call on arrays of one more dimension."""

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jax_softmax.primitives.operators import OPERATORS, PRIMITIVES, split
from jax_softmax.primitives.types import Arrays, Axes, BatchAxes, MeshAxes, sharded_as_well


def batching_rule(
    op: str, axis_data: Any, operands: Arrays, batch_axes: BatchAxes, *, axes: Axes, axis_name: MeshAxes, **dtype: str
) -> tuple[Any, Any]:
    operands, batch_axes, operator = list(operands), list(batch_axes), OPERATORS[op]
    named, n_broadcast = axis_data.name in axis_name, len(split(operands)[0])
    if named:  # each element of the batch has a shard of every row
        # Numbers and labels of rows are the same for all elements of the batch: the first one's are taken.
        for i in range(operator.inputs, n_broadcast):
            if (axis := batch_axes[i]) is not None:
                operands[i] = jax.lax.index_in_dim(operands[i], 0, axis, keepdims=False)
                batch_axes[i] = None
        n_broadcast = operator.inputs
    batched, to, axes, axis_name = with_one_batch_axis(
        axis_data, operands, batch_axes, n_broadcast, axes=axes, axis_name=axis_name
    )
    results = PRIMITIVES[op].bind(*batched, axes=axes, axis_name=axis_name, **dtype)
    several, n = PRIMITIVES[op].multiple_results, operator.element_results
    results = list(results) if several else [results]
    if named and to is not None:
        results[n:] = [jax.lax.squeeze(result, [to]) for result in results[n:]]
    batched_results = [to] * n + [None if named else to] * operator.row_results
    return (results, batched_results) if several else (results[0], batched_results[0])


def only_batched(batch_axes: BatchAxes, which: Iterable[int]) -> bool:
    """Whether the batched operands are some of those with these numbers, at least one."""
    batched = {k for k, b in enumerate(batch_axes) if b is not None}
    return bool(batched) and batched <= set(which)


def with_one_batch_axis(
    axis_data: Any, operands: Arrays, batch_axes: BatchAxes, n_broadcast: int, *, axes: Axes, axis_name: MeshAxes
) -> tuple[list[Array], int | None, Axes, MeshAxes]:
    """The operands with their batch axes moved to one place, that place, and `axes` and `axis_name` for them.

    The place is that of the first batched operand. Of the first `n_broadcast` operands those that are not batched are
    broadcast; the others get an extent of 1. If `axis_name` has the name of the batch axis, the axis is reduced too.
    """
    operands, batch_axes = list(operands), list(batch_axes)
    named = axis_data.name in axis_name
    if all(b is None for b in batch_axes):
        if not named:
            return operands, None, axes, axis_name
        operands[0], batch_axes[0] = jnp.broadcast_to(operands[0], (axis_data.size, *operands[0].shape)), 0
    ndim = next(x.ndim - (b is not None) for x, b in zip(operands, batch_axes, strict=True))
    size = next(x.shape[b] for x, b in zip(operands, batch_axes, strict=True) if b is not None)
    # Axes are counted from the end, because a mask may have fewer than x.
    ends = [None if b is None else b - x.ndim for x, b in zip(operands, batch_axes, strict=True)]
    to = max(next(end for end in ends if end is not None), -ndim - 1)
    batched = []
    for i, (x, end) in enumerate(zip(operands, ends, strict=True)):
        if i >= n_broadcast and end is None:
            x = jnp.expand_dims(x, to) if x.ndim >= -to - 1 else x
        elif end is None:
            x = jnp.expand_dims(x, to)
            x = jnp.broadcast_to(x, (*x.shape[:to], size, *x.shape[x.ndim + to + 1 :]))
        else:
            if x.ndim < -to:  # a mask without an axis in that place
                x = jnp.expand_dims(jnp.moveaxis(x, end, 0), tuple(range(1, -to - x.ndim + 1)))
                end = -x.ndim
            x = jnp.moveaxis(x, end, to)
        batched.append(x)
    batched[:n_broadcast] = [sharded_as_well(x, *batched) for x in batched[:n_broadcast]]
    to += ndim + 1
    axes = tuple(a + (a >= to) for a in axes)
    if named:
        axes, axis_name = tuple(sorted([*axes, to])), tuple(name for name in axis_name if name != axis_data.name)
    return batched, to, axes, axis_name
