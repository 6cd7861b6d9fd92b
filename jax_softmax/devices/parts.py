"""The operators where a device has a part of each row: what is known of the parts is reduced over all that share it.

Inside `shard_map` these are the devices along `axis_name`. In a program that XLA divides, the operands' layout says
which they are.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from jax_softmax.devices import layouts
from jax_softmax.devices.collectives import all_reduce_p, device_number_p
from jax_softmax.primitives import labels
from jax_softmax.primitives.records import apply
from jax_softmax.primitives.rows import normalizer


class Across:
    """What a device that has parts of rows knows of them, and how it reduces a value over all that share the rows."""

    def __init__(self, all_reduce, label_of_part=None, normalizer=None):
        self._all_reduce = all_reduce
        self.label_of_part = label_of_part  # of labels: whether they exist, and what they are in this device's part
        self.normalizer = normalizer or normalizer_of_parts

    def __call__(self, value, kind):
        return self._all_reduce(value, kind)


def normalizer_of_parts(x, where, axes):
    return normalizer(x, where, axes, ())


def over_mesh_axes(op, *operands, axis_name, **params):
    """The operator inside shard_map, each device along the mesh axes having a part of every row."""

    def all_reduce(value, kind):
        return {"max": jax.lax.pmax, "sum": jax.lax.psum}[kind](value, axis_name)

    return apply(op, *operands, across=Across(all_reduce), **params)


def first_index(layout, part, d):
    """Where this device's part begins in dimension d."""
    place = np.empty(layout.size, np.int32)
    place[layout] = np.indices(layout.shape)[d]
    return jnp.asarray(place)[device_number_p.bind()] * part[d]


def over_groups(op, params, shape, layout, spread, normalizer=None):
    """The operator of a device that holds a part of each row, the reduced dimensions `spread` being divided.

    `normalizer` makes the parts' maxima and sums in another way than the operator's kernel does.
    """
    part = layouts.part_of(shape, layout)
    others = [d for d in range(layout.ndim) if d not in spread]
    sharers = layout.transpose(others + spread).reshape(-1, math.prod(layout.shape[d] for d in spread))
    groups = tuple(map(tuple, sharers.tolist()))

    def all_reduce(value, kind):
        return all_reduce_p.bind(value, kind=kind, groups=groups)

    def function(*operands):
        for d in spread:
            if shape[d] % layout.shape[d]:
                operands = _without_filling(operands, d)
        return apply(op, *operands, across=Across(all_reduce, label_of_part, normalizer), **params)

    def label_of_part(label):
        begins = functools.partial(first_index, layout, part)
        here = labels.label_of_part(label, params["axes"], shape, part, begins)
        return labels.exists(label, shape, params["axes"]), here

    def _without_filling(operands, d):
        """The operands with a mask that leaves out what the last parts of dimension d are filled up with."""
        index = jax.lax.broadcasted_iota(jnp.int32, [n if k == d else 1 for k, n in enumerate(part)], d)
        inside = first_index(layout, part, d) + index < shape[d]
        *floats, last = operands
        return (*floats, last & inside) if last.dtype == bool else (*operands, inside)

    return function
