"""Which scores a program's masks leave visible: the cells that kernels visit, and those among them that are whole."""

import functools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np

from jax_softmax import _kernels
from jax_softmax.fusion.attention.letters import LetteredSide, Letters, values_of_sides
from jax_softmax.fusion.attention.linear import depending_on
from jax_softmax.fusion.program.expressions import ARITHMETIC, SAME, WRITABLE, Expression, Number

_CELL = _kernels.ATTENTION_CELL

# Scores that are not fills are larger than this. Fills of float16 cannot be as small: they are not taken for such.
_FILL = -1e8


# Operations after which a score is a fill of every product, or of none.
_KEEP_SIZE = (*SAME, *ARITHMETIC, "neg", "div", "tanh", "select_n", "convert_element_type", "reduce_precision")


def _is_fill(a: str | Number) -> TypeGuard[Number]:
    return isinstance(a, Number) and not isinstance(a.value, bool) and a.value <= _FILL


class Visible(NamedTuple):
    """The scores of an attention that are visible, by what its `call.Attention` says of them."""

    letters: Letters
    sides: tuple[LetteredSide, ...]
    score: Expression
    empty_rows_are_zero: bool

    @property
    def letters_of_bounds(self) -> str | None:
        """The batch letters along which masks differ; None if there are no masks, or if they depend on the product."""
        read = [a for op in self._fills.needed().values() for a in op.operands]
        if not self.empty_rows_are_zero and not any(map(_is_fill, read)):
            return None
        made_of_product = depending_on(self.score, "x0")
        for op in self.score.operations:
            which = [a in made_of_product for a in op.operands]
            if any(which) and (
                op.name not in _KEEP_SIZE or (op.name in ("div", "select_n") and which[op.name == "div"])
            ):
                return None
        letters = {c for k, side in enumerate(self.sides) if f"s{k}" in read for c in side.letters}
        return "".join(c for c in self.letters.batch if c in letters)

    @property
    def _fills(self) -> Expression:
        """The score with 0 instead of what a `select_n` chooses where it does not choose a fill (`_FILL`), unless that
        may have fills as well."""

        def may_hold_fills(side: LetteredSide) -> bool:
            return side.dtype in WRITABLE and not {"i", "j"}.isdisjoint(side.letters) and not side.is_learned

        made_of_fills = {f"s{k}" for k, side in enumerate(self.sides) if may_hold_fills(side)}
        operations = []
        for k, op in enumerate(self.score.operations):
            is_fill = [_is_fill(a) or a in made_of_fills for a in op.operands]
            if op.name == "select_n" and op.dtypes[0] == "bool" and any(is_fill[1:]):
                zero = Number(0.0, op.dtype)
                others = (a if fill else zero for a, fill in zip(op.operands[1:], is_fill[1:], strict=True))
                op = op._replace(operands=(op.operands[0], *others))
            if any(is_fill):
                made_of_fills.add(f"v{k}")
            operations.append(op)
        return Expression(tuple(operations), self.score.result)

    @property
    def masks(self) -> list[tuple[str, bool]]:
        """The conditions by which the score chooses fills, and their values where it chooses something else."""
        if self.letters_of_bounds is None:
            return []
        operations = self._fills.needed().values()
        chosen = [op for op in operations if op.name == "select_n" and op.dtypes[0] == "bool"]
        fills = [tuple(map(_is_fill, op.operands[1:])) for op in chosen]
        found = [(op.operands[0], of == (True, False)) for op, of in zip(chosen, fills, strict=True) if sum(of) == 1]
        return [(name, value) for name, value in found if isinstance(name, str)]

    def bounds(self, kernel: str, extents: dict[str, int], arrays: Sequence[jax.Array]) -> jax.Array:
        """Where a kernel has work, in cells of 64 x 64 scores, which it rounds outwards to its tiles. For each cell of
        rows that stay in a block: the first cell of those that pass which is visited, and the one after the last; and
        the same of those among them that are whole: all scores exist, and no mask hides any. int32 (letters, cells, 4).

        `arrays`: those among the sides. A query whose keys are all hidden visits all, for its weights are uniform or
        NaN. If they are 0, it visits none.
        """
        letters = self.letters_of_bounds or ""
        shape, (i, j) = [extents[c] for c in letters], (-(-extents[c] // _CELL) for c in "ij")
        sides = values_of_sides(self.sides, letters + "ij", extents, arrays)
        scores = self._without_product(sides)

        def with_any(elements: jax.Array, beyond: bool = False) -> jax.Array:
            """Whether any score of a query and a cell's keys is one of these elements. What all queries have alike is
            looked at once."""

            def padded(a: jax.Array, dim: int, n: int) -> jax.Array:
                return jnp.pad(
                    a, [(0, n - a.shape[dim]) if k == dim else (0, 0) for k in range(a.ndim)], constant_values=beyond
                )

            dims = len(shape)
            elements = jnp.broadcast_to(
                elements, np.broadcast_shapes(elements.shape, [1] * (dims + 1) + [extents["j"]])
            )
            found = padded(elements, dims + 1, j * _CELL).reshape(*elements.shape[:-1], j, _CELL).any(-1)
            return padded(jnp.broadcast_to(found, [*shape, extents["i"], j]), dims, i * _CELL)

        def cells(of_queries: jax.Array) -> jax.Array:
            """Whether any score of two cells is one of these: cells that stay x cells that pass."""
            found = of_queries.reshape(*shape, i, _CELL, j).any(-2)
            return found.swapaxes(-1, -2) if kernel == "keys" else found

        seen = with_any(~(scores.astype(jnp.float32) <= _FILL))
        if self.empty_rows_are_zero:
            operations = self._fills.needed().values()
            if any(_is_fill(a) and math.isfinite(a.value) for op in operations for a in op.operands):
                filled = with_any(scores > -jnp.inf)
                seen |= ~seen.any(-1, keepdims=True) & filled
        else:
            exist = jax.lax.broadcasted_iota(jnp.int32, seen.shape, seen.ndim - 2) < extents["i"]
            seen |= ~seen.any(-1, keepdims=True) & exist
        hidden = jnp.zeros((), bool)
        for name, value in self.masks:
            hidden |= self._without_product(sides, name) != value
        visited, whole = cells(seen), ~cells(with_any(hidden, beyond=True))
        cell, n = jax.lax.broadcasted_iota(jnp.int32, visited.shape, visited.ndim - 1), visited.shape[-1]
        first, end = jnp.where(visited, cell, n).min(-1), jnp.where(visited, cell + 1, 0).max(-1)
        first_whole = jnp.where(whole, cell, n).min(-1)
        end_whole = jnp.where(whole | (cell < first_whole[..., None]), n, cell).min(-1)
        return jnp.stack([first, end, first_whole, end_whole], -1)

    def _without_product(self, sides: Mapping[str, jax.typing.ArrayLike], name: str | None = None) -> jax.Array:
        """The scores that products of 0 have, in which fills are as they are; or one of their operations, by name."""
        values = {"x0": jnp.zeros((), self.score.dtype_of("x0")), **sides}
        return self._fills._replace(result=name or self.score.result).in_jax(values)

    @functools.lru_cache(256)  # noqa: B019  (instances that are equal share it)
    def part(self, **extents: int) -> float:
        """About which part of the scores is visible, if masks that are arrays hide nothing."""
        read = {a for op in self._fills.needed().values() for a in op.operands}
        sides = {f"s{k}": side for k, side in enumerate(self.sides) if f"s{k}" in read}
        if self.letters_of_bounds is None:
            return 1.0
        try:
            cpu = jax.local_devices(backend="cpu")[0]
        except RuntimeError:  # JAX was told to do without
            return 1.0
        indices = {name: side.letters for name, side in sides.items() if side.dtype == "index"}
        given, dims = {}, "".join(dict.fromkeys([*indices.values(), "i", "j"]))
        for name, letter in indices.items():
            n = extents[letter]
            some = np.linspace(0, n - 1, min(n, 64)).astype(np.int32)
            given[name] = some.reshape([-1 if c == letter else 1 for c in dims])
        with (
            jax.ensure_compile_time_eval(),
            jax.default_device(cpu),
            jax.transfer_guard("allow"),
            jax.debug_infs(False),
        ):

            @jax.jit
            def visible(n: jax.Array) -> jax.Array:
                """Where arrays of masks are all true or all false, and arrays that are compared are equal."""
                arrays = {name: n.astype(side.dtype) for name, side in sides.items() if name not in indices}
                scores = self._without_product({**given, **arrays}).astype(jnp.float32)
                return jnp.mean(~(scores <= _FILL))

            return max(float(visible(jnp.asarray(n))) for n in (0, 1)) or 1.0
