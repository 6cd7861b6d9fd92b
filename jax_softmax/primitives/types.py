"""Names for types; and the shardings in the types of arrays, which these have in JAX's explicit sharding mode."""

import functools
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import ad
from jax.sharding import NamedSharding, PartitionSpec

if TYPE_CHECKING:
    from jax.extend import core

    class Var(core.Var):
        """JAX's variable of a jaxpr, of an array: JAX says of its type only that it is an abstract value."""

        aval: jax.core.ShapedArray

    class Literal:  # JAX's class is final
        """JAX's constant in a jaxpr, a number or an array."""

        val: Any
        aval: jax.core.ShapedArray

        def __init__(self, val: Any, aval: jax.core.ShapedArray) -> None: ...

else:
    from jax.extend.core import Literal, Var

Shape = tuple[int, ...]  # in a program that is exported, an extent may be a symbol
Axes = tuple[int, ...]  # dimensions, counted from 0
MeshAxes = tuple[Hashable, ...]
Mask = jax.Array | None  # of booleans, that broadcasts to x's shape
Dtype = np.dtype[Any]
Aval = jax.core.ShapedArray  # the type of an array in a program
Arrays = Sequence[jax.Array]
Tangent = jax.Array | ad.Zero
Tangents = Sequence[Tangent]
Atom = Var | Literal  # what an equation of a program reads
BatchAxes = Sequence[int | None]  # of each operand


def shardings_of_results(function: Callable[..., Any], avals: Sequence[Aval]) -> list[Any]:
    """The shardings in the types of a function's results. (`jax.eval_shape` has none if a mesh is partly Auto.)"""
    types = [jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=aval.sharding) for aval in avals]
    return [aval.sharding for aval in jax.make_jaxpr(function)(*types).out_avals]


def types_tell_shardings(avals: Iterable[Aval]) -> bool:
    """Whether the type of any of these says that a dimension is sharded."""
    return any(aval.sharding.spec != PartitionSpec(*[None] * aval.ndim) for aval in avals)


def sharded_as_well(x: jax.Array, *others: jax.Array) -> jax.Array:
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


def rows_sharded_as(x: jax.Array, rows: jax.Array) -> jax.Array:
    """Values of x's rows, in explicit mode resharded as x is: else x's gradient would be sharded as these are."""
    avals = [jax.typeof(a) for a in (rows, x)]
    return _sharded_like(rows, avals[1]) if types_tell_shardings(avals) else rows


def _sharded_like(a: jax.Array, aval: Aval) -> jax.Array:
    """The array resharded as this type, whose shape it broadcasts to."""
    dims = zip(a.shape, aval.shape, aval.sharding.spec, strict=True)
    spec = PartitionSpec(*(names if n == like else None for n, like, names in dims))
    if spec == jax.typeof(a).sharding.spec:
        return a
    return jax.sharding.reshard(a, NamedSharding(aval.sharding.mesh, spec))
