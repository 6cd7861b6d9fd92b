"""Layouts: which device has which part of an array.

A layout is an array of device numbers. It has a dimension for each of the array's, as long as that is cut into parts,
and a last one for devices that have the same part. Parts are of equal size, but for the last ones. This is arithmetic
alone; `sharding.py` says what it is for.
"""

import math

import numpy as np


def aligned(shape, like):
    """For each dimension of a shape that broadcasts to `like`: the dimension of `like` that it is, or None."""
    missing = len(like) - len(shape)
    return [d + missing if n == like[d + missing] else None for d, n in enumerate(shape)]


def part_of(shape, layout):
    """The shape of what each device has of an array."""
    return [-(-n // tiles) for n, tiles in zip(shape, layout.shape[:-1], strict=True)]


def whole(ndim):
    """The layout of an array that is not cut, whichever devices there are."""
    return np.zeros([1] * (ndim + 1), np.int64)


def projected(layout, dims):
    """The layout of an array whose dimensions are those of another one, None being one that is not cut."""
    named = [d for d in dims if d is not None]
    rest = [d for d in range(layout.ndim) if d not in named]
    return layout.transpose(named + rest).reshape([1 if d is None else layout.shape[d] for d in dims] + [-1])


def same(a, b):
    """Whether each device has the same part in both layouts."""
    return a.shape == b.shape and np.array_equal(_places(a), _places(b))


def refined(layout, other, dims=None):
    """The layout with dimensions dims[k] cut as dimension k of another one, where that has more parts.

    Not those by which devices would have unequal numbers of parts: what cuts them cuts another dimension already.
    """
    if other.size == 1:  # which is not cut
        return layout
    if layout.size == 1:
        layout = np.arange(other.size).reshape([1] * (layout.ndim - 1) + [-1])
    tiles, places, places_in_other = list(layout.shape[:-1]), _places(layout), _places(other)
    for k, d in enumerate(range(len(tiles)) if dims is None else dims):
        if d is None or other.shape[k] <= tiles[d]:
            continue
        finer, moved = [*tiles[:d], other.shape[k], *tiles[d + 1 :]], places.copy()
        moved[d] = places_in_other[k]
        counts = np.bincount(np.ravel_multi_index(moved, finer), minlength=math.prod(finer))
        if (counts == counts[0]).all():
            tiles, places = finer, moved
    order = np.argsort(np.ravel_multi_index(places, tiles), kind="stable") if tiles else np.arange(layout.size)
    return order.reshape([*tiles, -1])


def all_to_all(source, wanted, shape):
    """What brings an array of this shape from one layout to another, by one all-to-all; or None if that takes more.

    The groups of devices that exchange parts, the dimension that each device cuts its part along, and the one along
    which it puts together what it gets: a mesh axis then divides the former instead of the latter.
    """
    changed = [d for d in range(len(shape)) if source.shape[d] != wanted.shape[d]]
    if len(changed) != 2:
        return None
    joined, cut = sorted(changed, key=lambda d: wanted.shape[d] - source.shape[d])
    n, rest = divmod(source.shape[joined], wanted.shape[joined])
    if rest or source.shape[cut] * n != wanted.shape[cut]:
        return None
    if shape[joined] % source.shape[joined] or shape[cut] % wanted.shape[cut]:
        return None
    places = _places(source)
    places[cut] = places[cut] * n + places[joined] % n
    places[joined] //= n
    if not np.array_equal(places, _places(wanted)):
        return None
    parts = source.reshape(*source.shape[:joined], wanted.shape[joined], n, *source.shape[joined + 1 :])
    groups = np.moveaxis(parts, joined + 1, -1).reshape(-1, n)
    return {"groups": tuple(map(tuple, groups.tolist())), "cut": cut, "joined": joined}


def _places(layout):
    """For each dimension of the array: which part along it each device has."""
    places = np.empty((layout.ndim - 1, layout.size), np.int64)
    places[:, layout.ravel()] = np.indices(layout.shape)[:-1].reshape(places.shape)
    return places
