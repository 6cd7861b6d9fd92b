"""The operators on a device that has a shard of every row: maxima and sums are reduced over all devices that share it.

Inside `shard_map` these are the devices along `axis_name`. In a program that XLA divides, the operands' layout says
which they are.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jax_softmax.devices import layouts
from jax_softmax.devices.collectives import all_reduce_p, device_number_p
from jax_softmax.devices.layouts import Layout
from jax_softmax.primitives import labels
from jax_softmax.primitives.records import apply
from jax_softmax.primitives.reference import Normalizer, RowShards
from jax_softmax.primitives.rows import row_normalizer
from jax_softmax.primitives.types import Axes, Mask, MeshAxes, Shape

shard_normalizer = functools.partial(row_normalizer, axis_name=())


def in_shard_map(op: str, *operands: Array, axis_name: MeshAxes, **params: Any) -> Any:
    """The operator on this device's shards, the others being along these mesh axes of a `shard_map`."""

    def all_reduce(value: Array, kind: str) -> Array:
        return jax.lax.pmax(value, axis_name) if kind == "max" else jax.lax.psum(value, axis_name)

    return apply(op, *operands, shards=RowShards(all_reduce, shard_normalizer), **params)


def first_index(layout: Layout, shard_shape: Sequence[int], d: int) -> Array:
    """Where this device's shard begins in dimension d."""
    position = np.empty(layout.size, np.int32)
    position[layout] = np.indices(layout.shape)[d]
    return jnp.asarray(position)[device_number_p.bind()] * shard_shape[d]


def is_inside(layout: Layout, shape: Shape, d: int) -> Array:
    """For indices of this device's shard in dimension d: False for what pads the last shards to the others' size."""
    shard_shape = layouts.shard_shape(shape, layout)
    index = jax.lax.broadcasted_iota(jnp.int32, [n if k == d else 1 for k, n in enumerate(shard_shape)], d)
    return first_index(layout, shard_shape, d) + index < shape[d]


def in_divided_program(
    op: str,
    params: dict[str, Any],
    shape: Shape,
    layout: Layout,
    sharded_dims: list[int],
    normalizer: Callable[[Array, Mask, Axes], Normalizer] = shard_normalizer,
) -> Callable[..., Any]:
    """The operator on this device's shards of operands of this shape, as a function of them.

    `sharded_dims` are the reduced dimensions that the layout divides. `normalizer` computes a shard's `Normalizer`.
    """
    shard_shape = layouts.shard_shape(shape, layout)
    others = [d for d in range(layout.ndim) if d not in sharded_dims]
    sharers = layout.transpose(others + sharded_dims).reshape(-1, math.prod(layout.shape[d] for d in sharded_dims))
    groups = tuple(map(tuple, sharers.tolist()))

    def all_reduce(value: Array, kind: str) -> Array:
        return all_reduce_p.bind(value, kind=kind, groups=groups)

    def local_label(label: Array) -> tuple[Array, Array]:
        first = functools.partial(first_index, layout, shard_shape)
        local = labels.local_label(label, params["axes"], shape, shard_shape, first)
        return labels.has_label(label, shape, params["axes"]), local

    def without_padding(operands: tuple[Array, ...], d: int) -> tuple[Array, ...]:
        """The operands with a mask that leaves out what pads shards along dimension d."""
        inside = is_inside(layout, shape, d)
        *others, last = operands
        return (*others, last & inside) if last.dtype == bool else (*operands, inside)

    def operator(*operands: Array) -> Any:
        for d in sharded_dims:
            if shape[d] % layout.shape[d]:
                operands = without_padding(operands, d)
        return apply(op, *operands, shards=RowShards(all_reduce, normalizer, local_label), **params)

    return operator
