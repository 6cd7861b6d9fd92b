"""Layouts: which device has which shard of an array. Arithmetic alone, for `division.py`.

A layout is an array of device numbers. It has a dimension for each of the array's, whose extent is the number of shards
along it, and a last one for devices that have the same shard. Shards have one size; the last ones may be padded.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from jax_softmax.primitives.types import Shape

Layout = npt.NDArray[np.int64]
Groups = tuple[tuple[int, ...], ...]  # the devices that work together
Dims = Sequence[int | None]  # for each dimension, the one of another array that it is


def matching_dims(shape: Shape, like: Shape) -> list[int | None]:
    """For each dimension of a shape that broadcasts to `like`: the dimension of `like` that it is, or None."""
    missing = len(like) - len(shape)
    return [d + missing if n == like[d + missing] else None for d, n in enumerate(shape)]


def shard_shape(shape: Shape, layout: Layout) -> list[int]:
    return [-(-n // shards) for n, shards in zip(shape, layout.shape[:-1], strict=True)]


def undivided(ndim: int) -> Layout:
    """The layout of an array that is whole, whichever devices have it."""
    return np.zeros([1] * (ndim + 1), np.int64)


def projected(layout: Layout, dims: Dims) -> Layout:
    """The layout of an array whose dimensions are these of another one's; None is a dimension that is not divided."""
    named = [d for d in dims if d is not None]
    rest = [d for d in range(layout.ndim) if d not in named]
    return layout.transpose(named + rest).reshape([1 if d is None else layout.shape[d] for d in dims] + [-1])


def divided_dims_without(layout: Layout, dims: Dims) -> list[int]:
    return [d for d, shards in enumerate(layout.shape[:-1]) if shards > 1 and d not in dims]


def scattered(layout: Layout, dims: Dims, k: int) -> tuple[Layout, Groups]:
    """The layout of such an array whose dimension k is divided among the devices that divide what it lacks; and the
    groups of these devices."""
    lacking = divided_dims_without(layout, dims)
    rest = [d for d in range(layout.ndim) if d not in dims and d not in lacking]
    shards = [1 if d is None else layout.shape[d] for d in dims]
    in_order = layout.transpose([*(d for d in dims if d is not None), *lacking, *rest])
    n = math.prod(layout.shape[d] for d in lacking)
    apart = in_order.reshape([*shards, n, -1])
    groups = tuple(map(tuple, apart.swapaxes(-1, -2).reshape(-1, n).tolist()))
    return np.moveaxis(apart, -2, k).reshape([*shards[:k], n, *shards[k + 1 :], -1]), groups


def exchanged(layout: Layout, source: int, target: int) -> Layout:
    """The layout in which the devices that divide dimension `source` divide `target` instead."""
    shards = list(layout.shape)
    shards[target], shards[source] = shards[target] * shards[source], 1
    return np.moveaxis(layout, source, target + (target < source)).reshape(shards)


def are_same(a: Layout, b: Layout) -> bool:
    """Whether each device has the same shard in both layouts."""
    return a.shape == b.shape and np.array_equal(_shard_indices(a), _shard_indices(b))


def refined(layout: Layout, other: Layout, dims: Dims | None = None) -> Layout:
    """The layout with dimension dims[k] (or k) divided as dimension k of another layout, where that has more shards.

    A dimension stays as it is if shards would then be on unequal numbers of devices: the devices that would divide it
    divide another dimension already.
    """
    if other.size == 1:  # undivided
        return layout
    if layout.size == 1:
        layout = np.arange(other.size).reshape([1] * (layout.ndim - 1) + [-1])
    shards, indices, other_indices = list(layout.shape[:-1]), _shard_indices(layout), _shard_indices(other)
    for k, d in enumerate(range(len(shards)) if dims is None else dims):
        if d is None or other.shape[k] <= shards[d]:
            continue
        finer_shards, finer_indices = [*shards[:d], other.shape[k], *shards[d + 1 :]], indices.copy()
        finer_indices[d] = other_indices[k]
        devices = np.bincount(np.ravel_multi_index(finer_indices, finer_shards), minlength=math.prod(finer_shards))
        if (devices == devices[0]).all():
            shards, indices = finer_shards, finer_indices
    order = np.argsort(np.ravel_multi_index(indices, shards), kind="stable") if shards else np.arange(layout.size)
    return order.reshape([*shards, -1])


def all_to_all(source: Layout, target: Layout, shape: Shape) -> dict[str, Any] | None:
    """The parameters of the all-to-all that brings an array of this shape from layout `source` to `target`, or None.

    `groups` are the devices that exchange pieces with each other. Each divides its shard along dimension `split`, and
    concatenates what it gets along dimension `concatenated`, which then has fewer shards.
    """
    changed = [d for d in range(len(shape)) if source.shape[d] != target.shape[d]]
    if len(changed) != 2:
        return None
    concatenated, split = sorted(changed, key=lambda d: target.shape[d] - source.shape[d])
    n, rest = divmod(source.shape[concatenated], target.shape[concatenated])
    if rest or source.shape[split] * n != target.shape[split]:
        return None
    if shape[concatenated] % source.shape[concatenated] or shape[split] % target.shape[split]:
        return None
    indices = _shard_indices(source)
    indices[split] = indices[split] * n + indices[concatenated] % n
    indices[concatenated] //= n
    if not np.array_equal(indices, _shard_indices(target)):
        return None
    outer, inner = source.shape[:concatenated], source.shape[concatenated + 1 :]
    groups = np.moveaxis(source.reshape(*outer, -1, n, *inner), concatenated + 1, -1).reshape(-1, n)
    return {"groups": tuple(map(tuple, groups.tolist())), "split": split, "concatenated": concatenated}


def _shard_indices(layout: Layout) -> Layout:
    """For each dimension of the array: the number of each device's shard along it."""
    indices = np.empty((layout.ndim - 1, layout.size), np.int64)
    indices[:, layout.ravel()] = np.indices(layout.shape)[:-1].reshape(indices.shape)
    return indices
