"""The shardings in the types of arrays, which these have in JAX's explicit sharding mode."""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec


def shardings_of_results(function, avals):
    """The shardings in the types of a function's results. (`jax.eval_shape` has none if a mesh is partly Auto.)"""
    types = [jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=aval.sharding) for aval in avals]
    return [aval.sharding for aval in jax.make_jaxpr(function)(*types).out_avals]


def types_tell_shardings(avals):
    """Whether the type of any of these says that a dimension is sharded."""
    return any(aval.sharding.spec != PartitionSpec(*[None] * aval.ndim) for aval in avals)


def sharded_as_well(x, *others):
    """x, in explicit mode resharded over the mesh axes of the others as well, which broadcast to its shape.

    A primitive's result is sharded so, and so is its cotangent; this function's transpose reshards that to x's type.

    Raises:
      ShardingTypeError: the arrays' shardings are incompatible.
    """
    avals = [jax.typeof(a) for a in (x, *others)]
    if not types_tell_shardings(avals):
        return x
    masks = [aval.update(dtype=jnp.dtype(bool), weak_type=False) for aval in avals]
    (joined,) = shardings_of_results(lambda *masks: functools.reduce(jnp.logical_or, masks), masks)
    return _sharded_like(x, avals[0].update(sharding=joined))


def rows_sharded_as(x, rows):
    """Values of x's rows, in explicit mode resharded as x is: else x's gradient would be sharded as these are."""
    avals = [jax.typeof(a) for a in (rows, x)]
    return _sharded_like(rows, avals[1]) if types_tell_shardings(avals) else rows


def _sharded_like(a, aval):
    """The array resharded as this type, whose shape it broadcasts to."""
    dims = zip(a.shape, aval.shape, aval.sharding.spec, strict=True)
    spec = PartitionSpec(*(names if n == like else None for n, like, names in dims))
    if spec == jax.typeof(a).sharding.spec:
        return a
    return jax.sharding.reshard(a, NamedSharding(aval.sharding.mesh, spec))
