"""Computations over tokens, on all of them at once or on chunks of them, one after the other."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jax_softmax.primitives.several_devices import several_devices_p

_CHUNK_BYTES = 1 << 29  # that the logits of a chunk may take


class Split(NamedTuple):
    """How tokens are split into chunks: along one of their dimensions."""

    dim: int
    size: int  # of a chunk along it; the last one may be smaller


def split_of(shape, logit_bytes, sum_bytes, chunk=None):
    """The `Split` of tokens of this shape, or None for all at once.

    `logit_bytes`: that one token's logits take. `sum_bytes`: what chunks take besides, to add up a gradient in.
    `chunk`: how many tokens a chunk may have, if the caller says so. A chunk has one index of the longest dimension at
    least, and all of the others.

    This is the rule that chooses: all at once, unless chunks take less memory; and where the number of tokens is
    symbolic.
    """
    if not all(isinstance(n, int) for n in shape):
        return None
    tokens = math.prod(shape)
    dim = max(range(len(shape)), key=lambda d: shape[d], default=None)
    if tokens <= 1:
        return None
    others = tokens // shape[dim]
    most = (_CHUNK_BYTES // logit_bytes if chunk is None else chunk) // others
    size = _chunk_size(shape[dim], max(1, most))
    if size >= shape[dim] or (chunk is None and tokens * logit_bytes <= size * others * logit_bytes + sum_bytes):
        return None
    return Split(dim, size)


def _chunk_size(extent, most):
    """At most so many, and a divisor of the extent if there is one that is not much less."""
    fewest = -(-extent // most)
    return next((extent // count for count in range(fewest, 2 * fewest) if extent % count == 0), most)


def all_at_once_if_divided(function, split):
    """function(split), or function(None) in a program that XLA divides among several devices.

    There each device makes a part of the logits alone, and XLA may add up a gradient over devices after each chunk.
    XLA drops what does not run.
    """
    if split is None:
        return function(None)
    return jax.lax.cond(several_devices_p.bind(), lambda: function(None), lambda: function(split))


def over_chunks(function, split, arrays):
    """What a function of tokens makes of these arrays: results for each token, and sums over tokens.

    Chunks do not lie side by side: chunk i has every n-th token, from the i-th on. So of tokens that are spread over
    devices each device has a part of every chunk. The first chunk's sums are not added to zeros.
    """
    if split is None:
        return function(*arrays)
    dim, size = split
    extent = arrays[0].shape[dim]
    count, rest = divmod(extent, size)
    whole = extent - rest

    def parts(a):
        a = jax.lax.slice_in_dim(a, 0, whole, axis=dim)
        return jnp.moveaxis(a.reshape(*a.shape[:dim], size, count, *a.shape[dim + 1 :]), dim + 1, 0)

    def joined(first, others):
        if not rest:
            others = jnp.concatenate([first[None], others])
        others = jnp.moveaxis(others, 0, dim + 1)
        others = others.reshape(*others.shape[:dim], whole, *others.shape[dim + 2 :])
        return jnp.concatenate([others, first], dim) if rest else others

    def step(sums, part):
        of_tokens, more = function(*part)
        return jax.tree.map(jnp.add, sums, more), of_tokens

    others = [parts(a) for a in arrays]
    first = [jax.lax.slice_in_dim(a, whole, extent, axis=dim) for a in arrays]
    if not rest:
        first, others = [a[0] for a in others], [a[1:] for a in others]
    of_first, sums = function(*first)
    sums, of_others = jax.lax.scan(step, sums, others)
    return jax.tree.map(joined, of_first, of_others), sums
