"""What a program's attention computes, in terms of letters, and which tiles of its scores have to be visited.

A letter names each dimension of an operand: i the queries, j the keys, d the features of q and k, e those of v, any
other one of the batch. `bihd,bjhd,bjhe` is the usual layout; in `bikgd,bjkd,bjke` the heads g share keys and values.
Features are last. Operands are read where they lie.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_softmax import _kernels
from jax_softmax.fusion import printing
from jax_softmax.fusion.attention.linear import depending_on
from jax_softmax.fusion.attention.source import KERNELS, Letters, Plan, attention_plan
from jax_softmax.fusion.expressions import ARITHMETIC, SAME, WRITABLE, Expression, Number


class LetteredSide(NamedTuple):
    """A side operand of the expressions: an array, or the index along a letter."""

    letters: str
    dtype: str  # or "index"


class Attention(NamedTuple):
    """weight(softmax(score(q kᵀ))) v, where `weight` is linear.

    Expressions are of float32 numbers and the sides s0, s1, .... `score` is one of the product x0, `weight` one of the
    softmax y. `score_transposed`, of the score's cotangent g and x0, is x0's cotangent, and `weight_transposed`, of the
    weight's cotangent t, is y's. `written`, of g and x0, is an array of queries x keys that the program makes of the
    scores' cotangents, as the gradient of a bias.
    """

    letters: Letters
    sides: tuple[LetteredSide, ...]
    n_forward: int  # `score` and `weight` read the first so many sides
    score: Expression
    weight: Expression
    score_transposed: Expression | None = None
    weight_transposed: Expression | None = None
    written: Expression | None = None
    written_dtype: str | None = None
    empty_rows_are_zero: bool = False  # weights of rows whose scores are all -inf; otherwise these are NaN

    def sides_of(self, kernel: str) -> tuple[LetteredSide, ...]:
        return self.sides[: self.n_forward] if kernel == "forward" else self.sides

    def extents(self, q, k, v) -> dict[str, int]:
        dims = (zip(letters, a.shape, strict=True) for letters, a in zip(self.letters, (q, k, v), strict=True))
        return {letter: n for of_operand in dims for letter, n in of_operand}

    def plan(self, kernel: str, dtype: str, extents: dict[str, int]) -> Plan:
        expressions = {"score": (self.score, ["x0"]), "weight": (self.weight, ["y"])}
        if kernel != "forward":
            expressions["score_transposed"] = self.score_transposed, ["g", "x0"]
            expressions["weight_transposed"] = self.weight_transposed, ["t"]
        written_dtype = self.written_dtype if kernel == "queries" else None
        if written_dtype:
            expressions["written"] = self.written, ["g", "x0"]
        numbers: dict = {}
        numbered = _numbered(self.score, numbers)
        masks = {numbered.get(name, name): value for name, value in self._masks}  # by number, or by a side's name

        def text(expression):
            own = _numbered(expression, numbers)
            values = {name: masks[n] for name, n in own.items() if n in masks}
            return printing.text_of(expression, coarse=True, masks=values)

        functions = {name: (arguments, text(e)) for name, (e, arguments) in expressions.items()}
        described = self.letters, extents, dtype, self.sides_of(kernel), self.letters_of_bounds, masks, functions
        return attention_plan(kernel, *described, self.empty_rows_are_zero, written_dtype)

    # ---- In JAX

    def result_letters(self, kernel: str) -> list[str]:
        letters = self.letters
        return {
            "forward": [letters.o, letters.rows + "n"],
            "keys": [letters.k, letters.v],
            "queries": [letters.q] + [letters.rows + "j"] * bool(self.written_dtype),
        }[kernel]

    def result_dtypes(self, kernel: str, dtype: str) -> list:
        """For operands of a dtype."""
        return [dtype, {"forward": "float32", "keys": dtype, "queries": self.written_dtype}[kernel]]

    def result_types(self, kernel: str, q, k, v) -> list[jax.ShapeDtypeStruct]:
        extents = self.extents(q, k, v) | {"n": 2}  # the numbers of a row, its pivot and its sum's logarithm
        results = zip(self.result_letters(kernel), self.result_dtypes(kernel, q.dtype), strict=False)
        return [jax.ShapeDtypeStruct([extents[c] for c in of], dtype) for of, dtype in results]

    def in_jax(self, kernel: str, q, k, v, *rest, visited=True) -> list[jax.Array]:
        """What a kernel does, of the primitive's operands (`kernels.py`). `visited`: the scores in tiles that are."""
        types, letters, extents = self.result_types(kernel, q, k, v), self.letters, self.extents(q, k, v)
        dims = letters.rows + "j"

        def product(of, *operands):
            return jnp.einsum(of, *(a.astype(jnp.float32) for a in operands), precision="highest")

        def value(expression, **values):
            values = {name: a.astype(expression.dtype_of(name)) for name, a in values.items()}
            return jnp.broadcast_to(expression.in_jax(values | sides).astype(jnp.float32), x.shape)

        sides = self.values_of_sides(dims, extents, rest[0 if kernel == "forward" else 3 :])
        x = product(f"{letters.q},{letters.k}->{dims}", q, k)
        s = jnp.where(visited, value(self.score, x0=x), -jnp.inf)
        empty = (s == -jnp.inf).all(-1, keepdims=True) & self.empty_rows_are_zero
        if kernel == "forward":
            pivot = jnp.where(empty, jnp.float32(0), s.max(-1, keepdims=True))
            total = jnp.where(empty, jnp.float32(jnp.inf), jnp.exp(s - pivot).sum(-1, keepdims=True))
            weights = jnp.where(visited, value(self.weight, y=jnp.exp(s - pivot) / total), 0)
            o = product(f"{dims},{letters.v}->{letters.o}", weights, v)
            return [o.astype(types[0].dtype), jnp.concatenate([pivot, jnp.log2(total)], -1)]
        o_cotangent, rows, delta = rest[:3]
        y = jnp.where(empty, jnp.float32(0), jnp.exp(s - rows[..., :1]) * jnp.exp2(-rows[..., 1:]))
        t = value(self.weight_transposed, t=product(f"{letters.o},{letters.v}->{dims}", o_cotangent, v))
        g = y * (t - delta[..., None])
        x_cotangent = jnp.where(visited, value(self.score_transposed, g=g, x0=x), 0)
        made = {
            "queries": [(letters.k, k, letters.q, x_cotangent)],
            "keys": [
                (letters.q, q, letters.k, x_cotangent),
                (letters.o, o_cotangent, letters.v, jnp.where(visited, value(self.weight, y=y), 0)),
            ],
        }[kernel]
        found = [product(f"{dims},{of}->{to}", w, a).astype(types[0].dtype) for of, a, to, w in made]
        if kernel == "queries" and self.written_dtype:
            found.append(jnp.where(visited, value(self.written, g=g, x0=x), 0).astype(self.written_dtype))
        return found

    def values_of_sides(self, dims: str, extents: dict[str, int], arrays) -> dict[str, jax.Array]:
        """The sides as arrays of these dimensions, but those that have others. `arrays`: the arrays among the sides."""
        rest, found = list(arrays), {}
        for k, side in enumerate(self.sides):
            shape = [extents[c] if c in side.letters else 1 for c in dims]
            a = None if side.dtype == "index" or not rest else rest.pop(0)
            if side.dtype == "index":
                found[f"s{k}"] = jnp.arange(extents[side.letters], dtype=jnp.int32).reshape(shape)
            elif a is not None and set(side.letters) <= set(dims):
                order = sorted(range(a.ndim), key=lambda d, of=side.letters: dims.index(of[d]))
                found[f"s{k}"] = jnp.transpose(a, order).reshape(shape)
        return found

    # ---- Tiles that are skipped, and those that are whole

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

        def may_hold_fills(letters, dtype):
            is_learned = self.written is not None and {"i", "j"} <= set(letters)  # a bias, which has a gradient
            return dtype in WRITABLE and not {"i", "j"}.isdisjoint(letters) and not is_learned

        made_of_fills = {f"s{k}" for k, side in enumerate(self.sides) if may_hold_fills(*side)}
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
    def _masks(self) -> list[tuple[str, bool]]:
        """The conditions by which the score chooses fills, and their values where it chooses something else."""
        if self.letters_of_bounds is None:
            return []
        operations = self._fills.needed().values()
        chosen = [op for op in operations if op.name == "select_n" and op.dtypes[0] == "bool"]
        fills = [tuple(map(_is_fill, op.operands[1:])) for op in chosen]
        found = [(op.operands[0], of == (True, False)) for op, of in zip(chosen, fills, strict=True) if sum(of) == 1]
        return [(name, value) for name, value in found if isinstance(name, str)]

    def bounds(self, kernel: str, extents: dict[str, int], arrays) -> jax.Array:
        """The first step that each block visits and the one after its last; and the same of those among them whose
        tiles are whole: all scores exist, and no mask hides any. int32 (letters, blocks, 4).

        `arrays`: those among the sides. A query whose keys are all hidden visits all, for its weights are uniform or
        NaN. If they are 0, it visits none.
        """
        letters = self.letters_of_bounds
        tilings = {name: _kernels.attention_tiling(name, extents["d"], extents["e"]) for name in KERNELS}
        sizes = {name: _queries_and_keys(name, tiling) for name, tiling in tilings.items()}
        cells, multiples = ([f(*of) for of in zip(*sizes.values(), strict=True)] for f in (math.gcd, math.lcm))
        i, j = (-(-extents[c] // n) * n for c, n in zip("ij", multiples, strict=True))
        shape = [extents[c] for c in letters]
        sides = self.values_of_sides(letters + "ij", extents, arrays)
        scores = self._without_product(sides)

        def cells_with(elements, beyond=False):
            """Whether any score of a query and a cell's keys is one of these elements."""
            elements = jnp.broadcast_to(elements, [*shape, extents["i"], extents["j"]])
            pad = [(0, 0)] * len(shape) + [(0, i - extents["i"]), (0, j - extents["j"])]
            elements = jnp.pad(elements, pad, constant_values=beyond)
            return elements.reshape(*shape, i, j // cells[1], cells[1]).any(-1)

        def tiles_with(cells_of_rows):
            """Whether any score of a block's step is in one of these cells."""
            found = cells_of_rows.reshape(*shape, i // cells[0], cells[0], -1).any(-2)
            of_queries, of_keys = sizes[kernel]
            found = found.reshape(*shape, i // of_queries, of_queries // cells[0], j // of_keys, of_keys // cells[1])
            found = found.any((-3, -1))
            found = found.swapaxes(-1, -2) if kernel == "keys" else found
            return found[..., : -(-extents["j" if kernel == "keys" else "i"] // tilings[kernel]["rows"]), :]

        seen = cells_with(~(scores.astype(jnp.float32) <= _FILL))
        if self.empty_rows_are_zero:
            operations = self._fills.needed().values()
            if any(_is_fill(a) and math.isfinite(a.value) for op in operations for a in op.operands):
                filled = cells_with(scores > -jnp.inf)
                seen |= ~seen.any(-1, keepdims=True) & filled
        else:
            index = functools.partial(jax.lax.broadcasted_iota, jnp.int32, seen.shape)
            exist = (index(seen.ndim - 2) < extents["i"]) & (index(seen.ndim - 1) * cells[1] < extents["j"])
            seen |= ~seen.any(-1, keepdims=True) & exist
        hidden = jnp.zeros((), bool)
        for name, value in self._masks:
            hidden |= self._without_product(sides, name) != value
        tiles, whole = tiles_with(seen), ~tiles_with(cells_with(hidden, beyond=True))
        step, n = jax.lax.broadcasted_iota(jnp.int32, tiles.shape, tiles.ndim - 1), tiles.shape[-1]
        first, end = jnp.where(tiles, step, n).min(-1), jnp.where(tiles, step + 1, 0).max(-1)
        first_whole = jnp.where(whole, step, n).min(-1)
        end_whole = jnp.where(whole | (step < first_whole[..., None]), n, step).min(-1)
        return jnp.stack([first, end, first_whole, end_whole], -1)

    def _without_product(self, sides, name: str | None = None) -> jax.Array:
        """The scores that products of 0 have, in which fills are as they are; or one of their operations, by name."""
        values = {"x0": jnp.zeros((), self.score.dtype_of("x0")), **sides}
        return self._fills._replace(result=name or self.score.result).in_jax(values)

    @functools.lru_cache(256)  # noqa: B019  (instances that are equal share it)
    def visible_part(self, **extents: int) -> float:
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
            # Arrays of masks are all true or all false, and arrays that are compared are equal.
            found = 0.0
            for n in (0, 1):
                arrays = {name: jnp.asarray(n, side.dtype) for name, side in sides.items() if name not in indices}
                scores = self._without_product(given | arrays).astype(jnp.float32)
                found = max(found, float(jnp.mean(~(scores <= _FILL))))
            return found or 1.0


# Scores that are not fills are larger than this. Fills of float16 cannot be as small: they are not taken for such.
_FILL = -1e8


# Operations after which a score is a fill of every product, or of none.
_KEEP_SIZE = (*SAME, *ARITHMETIC, "neg", "div", "tanh", "select_n", "convert_element_type", "reduce_precision")


def _is_fill(a) -> bool:
    return isinstance(a, Number) and not isinstance(a.value, bool) and a.value <= _FILL


def _numbered(expression: Expression, numbers: dict):
    """A number for the result of each operation of an expression. Equal ones that one dictionary numbers share it."""
    found: dict = {}
    for k, op in enumerate(expression.operations):
        key = op._replace(operands=tuple(found.get(a, a) for a in op.operands))
        found[f"v{k}"] = numbers.setdefault(key, len(numbers))
    return found


def _queries_and_keys(kernel, tiling) -> tuple[int, int]:
    """How many queries and keys a block has in a step."""
    return (tiling["step"], tiling["rows"]) if kernel == "keys" else (tiling["rows"], tiling["step"])
