"""Calls of attention's kernels, and the skipping of tiles.

A letter names each dimension of an operand: i the queries, j the keys, d the features of q and k, e those of v, any
other one of the batch. `bihd,bjhd,bjhe` is the usual layout; in `bikgd,bjkd,bjke` the heads g share keys and values.
Features are last. Operands are read where they lie.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_softmax import _kernels
from jax_softmax.fusion import printing
from jax_softmax.fusion.attention.source import KERNELS, Letters, Plan, plan_of
from jax_softmax.fusion.expressions import Expression

TARGET = "jax_softmax_attention"


def register() -> None:
    jax.ffi.register_ffi_target(TARGET, _kernels.attention_handlers(), platform="CUDA")


class Side(NamedTuple):
    """What scores read beside their product: an array, or the index along a letter."""

    letters: str
    is_index: bool = False


class Bounds(NamedTuple):
    """Which steps each block visits: of each kernel an int32 array (letters, blocks, 2), the first and the end."""

    letters: str
    of: dict[str, jax.Array]


class Attention(NamedTuple):
    """Scores are an expression of x0, the product in float32, and of the sides s0, s1, ...; `cotangent` makes that of
    the product of that of the score, g, and the same."""

    letters: Letters
    sides: tuple[Side, ...]
    score: Expression
    cotangent: Expression
    empty_rows_are_zero: bool = False  # the weights of a row whose scores are all -inf, which otherwise are NaN

    @property
    def rows(self) -> str:
        """The letters of what a row has."""
        return self.letters.batch + "i"

    def extents(self, *operands) -> dict[str, int]:
        """Of q, k and v."""
        dims = (zip(letters, a.shape, strict=True) for letters, a in zip(self.letters, operands, strict=True))
        return {letter: n for of_operand in dims for letter, n in of_operand}

    def plan(self, kernel: str, dtype: str, extents: dict[str, int], side_dtypes, bounds=None) -> Plan:
        """`side_dtypes`: those of the arrays among the sides; `bounds`: their letters, if there are any."""
        dtypes = iter(side_dtypes)
        sides = [(side.letters, "index" if side.is_index else next(dtypes)) for side in self.sides]
        texts = (printing.text_of(expression, coarse=True) for expression in (self.score, self.cotangent))
        return plan_of(kernel, self.letters, extents, dtype, sides, bounds, *texts, self.empty_rows_are_zero)

    def forward(self, q, k, v, *sides, bounds: Bounds | None = None):
        """The output, and what the backward kernels need to know of each row: its pivot, and the logarithm to base 2 of
        the sum of exp(score - pivot)."""
        extents = self.extents(q, k, v)
        of_o, of_rows = ([extents[letter] for letter in letters] for letters in (self.letters.o, self.rows))
        types = [jax.ShapeDtypeStruct(of_o, q.dtype), jax.ShapeDtypeStruct((*of_rows, 2), jnp.float32)]
        return self._call("forward", types, (q, k, v), (), sides, bounds)

    def backward(self, q, k, v, o, rows, o_cotangent, *sides, bounds: Bounds | None = None):
        """dq, dk, dv."""
        letters = self.letters.o
        delta = jnp.einsum(f"{letters},{letters}->{self.rows}", *(a.astype(jnp.float32) for a in (o, o_cotangent)))
        given = (o_cotangent, rows, delta)
        types = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (q, k, v)]
        dk, dv = self._call("keys", types[1:], (q, k, v), given, sides, bounds)
        (dq,) = self._call("queries", types[:1], (q, k, v), given, sides, bounds)
        return dq, dk, dv

    def _call(self, kernel, types, operands, given, sides, bounds):
        dtypes = [a.dtype.name for a in sides]
        letters = None if bounds is None else bounds.letters
        plan = self.plan(kernel, operands[0].dtype.name, self.extents(*operands), dtypes, letters)
        ends = () if bounds is None else (bounds.of[kernel],)
        return call(plan, types, *operands, *given, *ends, *sides)


def call(plan: Plan, types, *operands):
    """The FFI call, whose kernel begins to be made for the GPUs that are here."""
    for device in jax.local_devices():
        if device.platform == "gpu":
            _kernels.jit_prepare(plan.code, plan.plan, int(device.compute_capability.replace(".", "")))
    numbers = {"blocks": plan.blocks, "threads": plan.threads, "shared_bytes": plan.shared_bytes}
    attributes = {name: np.int64(n) for name, n in (numbers | {"version": _kernels.CALL_VERSION}).items()}
    return jax.ffi.ffi_call(TARGET, types)(*operands, code=plan.code, plan=plan.plan, **attributes)


def bounds_of(visible, letters, attention: Attention, extents) -> Bounds:
    """Of a boolean function of indices along batch letters, queries and keys. XLA makes them in one reduction each.

    A query that sees nothing is taken to see everything, because its weights are uniform or NaN; but nothing at all
    where they are 0.
    """
    ends = {}
    for kernel in KERNELS:
        tiling = _kernels.attention_tiling(kernel, extents["d"], extents["e"])
        of_queries, of_keys = (tiling["rows"], tiling["step"])[:: -1 if kernel == "keys" else 1]
        blocks = -(-extents["i"] // of_queries), -(-extents["j"] // of_keys)
        shape = [extents[letter] for letter in letters] + [blocks[0] * of_queries, blocks[1] * of_keys]
        *batch, i, j = jnp.ix_(*(jnp.arange(n, dtype=jnp.int32) for n in shape))
        exist = (i < extents["i"]) & (j < extents["j"])
        seen = visible(*batch, jnp.minimum(i, extents["i"] - 1), jnp.minimum(j, extents["j"] - 1)) & exist
        seen = jnp.broadcast_to(seen, shape)
        if not attention.empty_rows_are_zero:
            seen |= ~seen.any(-1, keepdims=True) & exist
        tiles = seen.reshape(*shape[:-2], blocks[0], of_queries, blocks[1], of_keys).any((-3, -1))
        if kernel == "keys":
            tiles = tiles.swapaxes(-1, -2)
        n, at = tiles.shape[-1], jnp.arange(tiles.shape[-1], dtype=jnp.int32)
        first, end = jnp.where(tiles, at, n).min(-1), jnp.where(tiles, at + 1, 0).max(-1)
        ends[kernel] = jnp.stack([first, end], -1)
    return Bounds(letters, ends)
