"""A computation that is measured: what it is given, and how far its results may be from those of XLA."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import jax_softmax


class Computation(NamedTuple):
    name: str
    function: Callable
    arguments: Callable  # makes the function's arguments of a key and sizes
    sizes: tuple
    small_sizes: tuple
    precision: str = "bfloat16"  # of the arithmetic: results of other dtypes are no more precise
    package: str | None = None  # that must be installed
    inner: Callable | None = None  # the same, of which a part alone is fused

    @property
    def fused(self) -> Callable:
        return self.inner or jax_softmax.fuse(self.function)

    def make_args(self, key: jax.Array) -> tuple:
        return self.arguments(key, *self.sizes)

    def make_small_args(self, key: jax.Array) -> tuple:
        return self.arguments(key, *self.small_sizes)


# How far results may be apart, relative to the largest of an array: a few roundings, in a float32 loss of many. GPUs
# round operands of float32 products to tf32.
TOLERANCES = {"bfloat16": 0.05, "tf32": 1e-3, "float32": 1e-4}
# How many of the results that are integers, counts or indices, may differ: by a rounding another element is the one.
MOST_OTHER_INTEGERS = 0.01


def largest_difference(computation: Computation, actual: Any, expected: Any) -> float:
    """Of a computation's results, in units of what is allowed: more than 1 is an error."""
    differences = jax.tree.map(
        functools.partial(_difference, precision=computation.precision), actual, expected
    )  # raises where the results' structures differ
    return max(map(float, jax.tree.leaves(differences)))


@functools.partial(jax.jit, static_argnames="precision")
def _difference(actual, expected, precision):
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return jnp.inf
    if not jnp.issubdtype(expected.dtype, jnp.floating):
        return jnp.mean(actual != expected) / MOST_OTHER_INTEGERS
    tolerance = max(TOLERANCES[precision], TOLERANCES[expected.dtype.name])
    actual, expected = actual.astype(jnp.float32), expected.astype(jnp.float32)
    same = (actual == expected) | (jnp.isnan(actual) & jnp.isnan(expected))
    apart = jnp.where(same, 0, jnp.abs(actual - expected)) / (tolerance * jnp.max(jnp.abs(expected)))
    return jnp.max(jnp.where(same, 0, jnp.nan_to_num(apart, nan=jnp.inf, posinf=jnp.inf)))


def normal(key, *shapes, scale=1.0):
    """An array of bfloat16 of each shape."""
    return _normal(key, shapes, scale)


@functools.partial(jax.jit, static_argnames="shapes")
def _normal(key, shapes, scale):
    scale = jnp.bfloat16(scale)
    keys = jax.random.split(key, len(shapes))
    return [scale * jax.random.normal(k, shape, jnp.bfloat16) for k, shape in zip(keys, shapes, strict=True)]


def forward_and_backward(layer):
    """The layer's result, and the cotangents of its first argument, which may be several arrays."""

    def function(inputs, cotangent, *others):
        result, pullback = jax.vjp(lambda inputs: layer(inputs, *others), inputs)
        return result, pullback(cotangent)[0]

    return function
