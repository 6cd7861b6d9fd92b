"""How arrays lie on devices, as their types tell it in explicit mode."""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec


def shardings_of_results(function, avals):
    """The shardings in the types of a function's results. `jax.eval_shape` tells none on a mesh that is part Auto."""
    types = [jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=aval.sharding) for aval in avals]
    return [aval.sharding for aval in jax.make_jaxpr(function)(*types).out_avals]


def types_tell_shardings(avals):
    """Whether one is sharded over mesh axes of explicit mode."""
    return any(aval.sharding.spec != PartitionSpec(*[None] * aval.ndim) for aval in avals)


def laid_as_well(x, *others):
    """x, in explicit mode cut along the mesh axes that cut the others, which broadcast to its shape.

    A primitive's result is cut like this, and so are cotangents; this one's transpose brings them back to x's own type.

    Raises:
      ShardingTypeError: the arrays are of shardings that do not go together.
    """
    avals = [jax.typeof(a) for a in (x, *others)]
    if not types_tell_shardings(avals):
        return x
    masks = [aval.update(dtype=jnp.dtype(bool), weak_type=False) for aval in avals]
    (joined,) = shardings_of_results(lambda *masks: functools.reduce(jnp.logical_or, masks), masks)
    return _laid_like(x, avals[0].update(sharding=joined))


def rows_laid_as(x, rows):
    """Numbers of x's rows, of its rank, in explicit mode cut as x is: else x's gradient would be cut as they are."""
    avals = [jax.typeof(a) for a in (rows, x)]
    return _laid_like(rows, avals[1]) if types_tell_shardings(avals) else rows


def _laid_like(a, aval):
    """An array cut as one that it broadcasts to."""
    dims = zip(a.shape, aval.shape, aval.sharding.spec, strict=True)
    spec = PartitionSpec(*(names if n == whole else None for n, whole, names in dims))
    same = spec == jax.typeof(a).sharding.spec
    return a if same else jax.sharding.reshard(a, NamedSharding(aval.sharding.mesh, spec))
