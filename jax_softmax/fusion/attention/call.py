"""Calls of attention's kernels, and the skipping of tiles.

A letter names each dimension of an operand: i the queries, j the keys, d the features of q and k, e those of v, any
other one of the batch. `bihd,bjhd,bjhe` is the usual layout; in `bikgd,bjkd,bjke` the heads g share keys and values.
Features are last. Operands are read where they lie.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import mlir

from jax_softmax import _kernels
from jax_softmax.fusion import printing
from jax_softmax.fusion.attention.source import KERNELS, Letters, Plan, plan_of
from jax_softmax.fusion.expressions import Expression, Number
from jax_softmax.primitives import interpreters

TARGET = "jax_softmax_attention"


class Side(NamedTuple):
    """What expressions read beside the products: an array, or the index along a letter."""

    letters: str
    dtype: str  # or "index"


class Attention(NamedTuple):
    """weight(softmax(score(q kᵀ))) v, where `weight` is linear.

    Expressions have values of float32 and the sides s0, s1, ...: `score` is made of the product, x0, and `weight` of
    the softmax, y. Of their linear maps, transposed, that of the score is made of its cotangent g, and x0; that of the
    weight of its cotangent t.
    """

    letters: Letters
    sides: tuple[Side, ...]
    n_forward: int  # so many of the sides are all that `score` and `weight` read
    score: Expression
    weight: Expression
    score_transposed: Expression | None = None
    weight_transposed: Expression | None = None
    empty_rows_are_zero: bool = False  # the weights of a row whose scores are all -inf, which otherwise are NaN

    def sides_of(self, kernel: str) -> tuple[Side, ...]:
        return self.sides[: self.n_forward] if kernel == "forward" else self.sides

    def extents(self, q, k, v) -> dict[str, int]:
        dims = (zip(letters, a.shape, strict=True) for letters, a in zip(self.letters, (q, k, v), strict=True))
        return {letter: n for of_operand in dims for letter, n in of_operand}

    def plan(self, kernel: str, dtype: str, extents: dict[str, int], bounds: str | None = None) -> Plan:
        """`bounds`: the letters of the steps that blocks visit, if these are bounded."""
        expressions = {"score": (self.score, ["x0"]), "weight": (self.weight, ["y"])}
        if kernel != "forward":
            expressions["score_transposed"] = self.score_transposed, ["g", "x0"]
            expressions["weight_transposed"] = self.weight_transposed, ["t"]
        functions = {name: (given, printing.text_of(e, coarse=True)) for name, (e, given) in expressions.items()}
        sides = self.sides_of(kernel)
        return plan_of(kernel, self.letters, extents, dtype, sides, bounds, functions, self.empty_rows_are_zero)

    # ---- The calls

    def forward(self, q, k, v, *sides):
        """The output, and what the backward kernels need to know of each row: its pivot, and the logarithm to base 2 of
        the sum of exp(score - pivot). `sides`: the arrays."""
        return attention_p.bind(q, k, v, *self.with_bounds("forward", q, k, v, sides), attention=self, kernel="forward")

    def backward(self, q, k, v, o, rows, o_cotangent, *sides):
        """dq, dk, dv."""
        letters, of_rows = self.letters.o, self.letters.batch + "i"
        delta = jnp.einsum(f"{letters},{letters}->{of_rows}", *(a.astype(jnp.float32) for a in (o, o_cotangent)))
        given = q, k, v, o_cotangent, rows, delta

        def made(kernel):
            return attention_p.bind(*given, *self.with_bounds(kernel, q, k, v, sides), attention=self, kernel=kernel)

        (dq,), (dk, dv) = made("queries"), made("keys")
        return dq, dk, dv

    def result_types(self, kernel: str, q, k, v) -> list[jax.ShapeDtypeStruct]:
        if kernel != "forward":
            return [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in ((q,) if kernel == "queries" else (k, v))]
        extents = self.extents(q, k, v)
        of_o, of_rows = ([extents[c] for c in letters] for letters in (self.letters.o, self.letters.batch + "i"))
        return [jax.ShapeDtypeStruct(of_o, q.dtype), jax.ShapeDtypeStruct((*of_rows, 2), jnp.float32)]

    # ---- Tiles that are skipped

    @property
    def letters_of_bounds(self) -> str | None:
        """The batch letters along which masks differ; None if there are no masks."""
        read = [a for op in self.score.operations for a in op.operands]
        if not self.empty_rows_are_zero and not any(map(_is_fill, read)):
            return None
        letters = {c for k, side in enumerate(self.sides) if f"s{k}" in read for c in side.letters}
        return "".join(c for c in self.letters.batch if c in letters)

    def with_bounds(self, kernel, q, k, v, sides):
        """The operands that follow a kernel's own: the steps that each block visits, an int32 array of its first and
        its end, (letters, blocks, 2), if there are masks; and the arrays that it reads beside.

        A query that sees nothing is taken to see everything, because its weights are uniform or NaN; but nothing at all
        where they are 0.
        """
        extents, letters = self.extents(q, k, v), self.letters_of_bounds
        of_kernel = self.sides_of(kernel)
        arrays = list(sides[: sum(side.dtype != "index" for side in of_kernel)])
        if letters is None:
            return arrays
        tilings = {name: _kernels.attention_tiling(name, extents["d"], extents["e"]) for name in KERNELS}
        sizes = {name: _queries_and_keys(name, tiling) for name, tiling in tilings.items()}
        cells = [math.gcd(*of) for of in zip(*sizes.values(), strict=True)]
        whole = [math.lcm(*of) for of in zip(*sizes.values(), strict=True)]
        i, j = (-(-extents[c] // n) * n for c, n in zip("ij", whole, strict=True))
        shape = [extents[c] for c in letters]
        seen = self.visible(letters, extents, list(sides))
        seen = jnp.pad(seen, [(0, 0)] * len(shape) + [(0, i - extents["i"]), (0, j - extents["j"])])
        seen = seen.reshape(*shape, i, j // cells[1], cells[1]).any(-1)
        if not self.empty_rows_are_zero:
            at = (jax.lax.broadcasted_iota(jnp.int32, seen.shape, seen.ndim - n) for n in (2, 1))
            exist = (next(at) < extents["i"]) & (next(at) * cells[1] < extents["j"])
            seen |= ~seen.any(-1, keepdims=True) & exist
        seen = seen.reshape(*shape, i // cells[0], cells[0], -1).any(-2)
        of_queries, of_keys = sizes[kernel]
        tiles = seen.reshape(*shape, i // of_queries, of_queries // cells[0], j // of_keys, of_keys // cells[1])
        tiles = tiles.any((-3, -1))
        if kernel == "keys":
            tiles = tiles.swapaxes(-1, -2)
        rows = tilings[kernel]["rows"]
        tiles = tiles[..., : -(-extents["j" if kernel == "keys" else "i"] // rows), :]
        at = jax.lax.broadcasted_iota(jnp.int32, tiles.shape, tiles.ndim - 1)
        first, end = jnp.where(tiles, at, tiles.shape[-1]).min(-1), jnp.where(tiles, at + 1, 0).max(-1)
        return [jnp.stack([first, end], -1), *arrays]

    def visible(self, letters: str, extents: dict[str, int], sides: list) -> jax.Array:
        """Which scores are no fills, along these letters, queries and keys. `sides`: the arrays."""
        dims, arrays, given = letters + "ij", list(sides), {}
        for k, side in enumerate(self.sides):
            shape = [extents[c] if c in side.letters else 1 for c in dims]
            if side.dtype == "index":
                given[f"s{k}"] = jnp.arange(extents[side.letters], dtype=jnp.int32).reshape(shape)
            else:
                order = sorted(range(len(side.letters)), key=lambda at, of=side.letters: dims.find(of[at]))
                a = arrays.pop(0)
                if set(side.letters) <= set(dims):
                    given[f"s{k}"] = jnp.transpose(a, order).reshape(shape)
        return jnp.broadcast_to(self._is_no_fill(given), [extents[c] for c in dims])

    def _is_no_fill(self, sides: dict[str, Any]) -> jax.Array:
        """Judged by a product of 0."""
        read = ((a, dtype) for op in self.score.operations for a, dtype in zip(op.operands, op.dtypes, strict=True))
        dtype = next((dtype for a, dtype in read if a == "x0"), "float32")
        return ~(self.score.value({"x0": jnp.zeros((), dtype), **sides}) <= _FILL)

    def visible_part(self, extents: dict[str, int]) -> float:
        """About which part of the scores is visible, as far as that does not depend on arrays."""
        read = {a for op in self.score.operations for a in op.operands}
        sides = {f"s{k}": side for k, side in enumerate(self.sides) if f"s{k}" in read}
        if self.letters_of_bounds is None or any(side.dtype != "index" for side in sides.values()):
            return 1.0
        given = {}
        for name, side in sides.items():
            n = extents[side.letters]
            some = np.linspace(0, n - 1, min(n, 64)).astype(np.int32)
            given[name] = some[:, None] if side.letters == "i" else some if side.letters == "j" else some[:, None, None]
        with jax.ensure_compile_time_eval(), jax.default_device(jax.devices("cpu")[0]):
            return float(jnp.mean(self._is_no_fill(given)))


# No score of a program is as small as this, but for fills. Those of float16, which cannot be, do not count as such.
_FILL = -1e8


def _is_fill(a) -> bool:
    return isinstance(a, Number) and not isinstance(a.value, bool) and a.value <= _FILL


def _queries_and_keys(kernel, tiling) -> tuple[int, int]:
    """Of a block and a step."""
    return (tiling["step"], tiling["rows"]) if kernel == "keys" else (tiling["rows"], tiling["step"])


# ---- The primitive. Operands: q, k, v; those of the backward kernels; bounds; sides.

attention_p = Primitive("softmax_attention")
attention_p.multiple_results = True


@attention_p.def_abstract_eval
def _(q, k, v, *others, attention, kernel):
    return [jax.core.ShapedArray(t.shape, t.dtype) for t in attention.result_types(kernel, q, k, v)]


def call(attention: Attention, kernel: str, *operands):
    """The FFI call, whose kernel begins to be made for the GPUs that are here."""
    q, k, v = operands[:3]
    plan = attention.plan(kernel, q.dtype.name, attention.extents(q, k, v), attention.letters_of_bounds)
    for device in jax.local_devices():
        if device.platform == "gpu":
            _kernels.jit_prepare(plan.code, plan.plan, int(device.compute_capability.replace(".", "")))
    numbers = {"blocks": plan.blocks, "threads": plan.threads, "shared_bytes": plan.shared_bytes}
    attributes = {name: np.int64(n) for name, n in (numbers | {"version": _kernels.CALL_VERSION}).items()}
    types = attention.result_types(kernel, q, k, v)
    return jax.ffi.ffi_call(TARGET, types)(*operands, code=plan.code, plan=plan.plan, **attributes)


def register() -> None:
    jax.ffi.register_ffi_target(TARGET, _kernels.attention_handlers(), platform="CUDA")
    attention_p.def_impl(interpreters.implementation(attention_p))
    lower = mlir.lower_fun(lambda *operands, attention, kernel: call(attention, kernel, *operands), True)
    mlir.register_lowering(attention_p, lower, platform="cuda")
