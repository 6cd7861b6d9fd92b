"""Sums of many rows, or other numbers, into a table of few, as the gradient of a relative bias has them: T5's, of 32
distances.

XLA adds up one after the other the rows that have the same place. In several tables, which are added in the end, they
have as many places: 2048² rows of 16 numbers into 32 took 5.4 ms, into 64 times 32 0.4 (H200, JAX 0.11.2). And it has
no instruction that adds 16 bits: 2048² rows of 16 numbers into 4095 took 13.2 ms in bfloat16, and in float32 0.15.
"""

import math

import jax
import jax.numpy as jnp
from jax.lax import GatherScatterMode

from jax_softmax.fusion.forms.one_hot import SCATTERS
from jax_softmax.fusion.forms.shared_normalizers import Replacements
from jax_softmax.fusion.program.expressions import ROUNDED
from jax_softmax.fusion.program.graph import Equation, Graph, bytes_of, size_of
from jax_softmax.fusion.program.splicing import spliced
from jax_softmax.runtime import costs

_MOST_TABLES = 256
_TABLES = 1 / 16  # of the updates, at most: numbers of tables. Both chosen


def in_float32(graph: Graph, equation: Equation) -> Replacements | None:
    """The sum of many numbers of 16 bits in float32, rounded once."""
    if equation.name not in SCATTERS or equation.outputs[0].aval.dtype.name not in ROUNDED:
        return None
    table, _, updates = equation.inputs
    are_known = all(isinstance(n, int) for a in (table, updates) for n in a.aval.shape)
    if not are_known or size_of(table) > _TABLES * size_of(updates) or equation.params["unique_indices"]:
        return None
    names = "dimension_numbers", "indices_are_sorted", "unique_indices", "mode"
    params = {name: equation.params[name] for name in names}

    def added(table: jax.Array, indices: jax.Array, updates: jax.Array) -> jax.Array:
        wide = jax.lax.scatter_add(table.astype(jnp.float32), indices, updates.astype(jnp.float32), **params)
        return wide.astype(table.dtype)

    return {equation: spliced(added, equation.inputs, equation.outputs, equation)}


def in_several_tables(graph: Graph, equation: Equation) -> Replacements | None:
    """The sum of several tables, of which a row goes to one by its number."""
    if equation.name not in SCATTERS or not _adds_whole_rows(equation):
        return None
    table, indices, updates = (a.aval for a in equation.inputs)
    places, count = table.shape[0], indices.size
    tables = min(_MOST_TABLES, int(_TABLES * updates.size / table.size))
    waits, moves = costs.SAME_PLACE * count / places, 2 * bytes_of(equation.inputs[2]) + costs.CALL
    if tables < 2 or waits < moves:
        return None
    clips = equation.params["mode"] == GatherScatterMode.CLIP

    def added(table: jax.Array, indices: jax.Array, updates: jax.Array) -> jax.Array:
        at = indices[..., 0].astype(jnp.promote_types(indices.dtype, jnp.int32))
        at = jnp.clip(at, 0, places - 1) if clips else at
        # Without a reshape, which devices that have parts of the rows would need to exchange.
        along = (jax.lax.broadcasted_iota(at.dtype, at.shape, d) for d in range(at.ndim))
        number = sum(n * math.prod(at.shape[d + 1 :]) for d, n in enumerate(along))
        at = jnp.where((at >= 0) & (at < places), number % tables * places + at, tables * places)
        several = jnp.zeros((tables * places, *table.shape[1:]), table.dtype).at[at].add(updates, mode="drop")
        return table + several.reshape(tables, *table.shape).sum(0, dtype=table.dtype)

    return {equation: spliced(added, equation.inputs, equation.outputs, equation)}


def _adds_whole_rows(equation: Equation) -> bool:
    """Whether an index is a row's place along the table's first dimension, and updates have the other ones last. Arrays
    whose types say that they are divided over devices are not looked at."""
    table, indices, updates = avals = [a.aval for a in equation.inputs]
    if any(axis is not None for a in avals for axis in a.sharding.spec):
        return False
    dims = equation.params["dimension_numbers"]
    window = tuple(range(updates.ndim - table.ndim + 1, updates.ndim))
    return (
        (dims.inserted_window_dims, dims.scatter_dims_to_operand_dims, dims.update_window_dims) == ((0,), (0,), window)
        and not dims.operand_batching_dims
        and (jnp.issubdtype(indices.dtype, jnp.signedinteger) or indices.dtype.itemsize < 4)
        and updates.shape == (*indices.shape[:-1], *table.shape[1:])
        and all(isinstance(n, int) and n > 0 for n in (*table.shape, *updates.shape))
    )
