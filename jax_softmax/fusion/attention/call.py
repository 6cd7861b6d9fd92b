"""What a program's attention computes, in terms of letters, and which cells of its scores have to be visited.

A letter names each dimension of an operand: i the queries, j the keys, d the features of q and k, e those of v, any
other one of the batch. `bihd,bjhd,bjhe` is the usual layout; in `bikgd,bjkd,bjke` the heads g share keys and values.
Features are last. Operands are read where they lie.
"""

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np

from jax_softmax import _kernels
from jax_softmax.fusion.attention.linear import depending_on, without_scale
from jax_softmax.fusion.kernels import printing
from jax_softmax.fusion.program.expressions import ARITHMETIC, SAME, WRITABLE, Expression, Number, Operation, rounded
from jax_softmax.primitives.types import Aval, Dtype

ArrayOrAval = jax.Array | Aval  # of which the shape and the dtype are read


class Letters(NamedTuple):
    """A letter for each dimension of q, k and v."""

    q: str
    k: str
    v: str

    @property
    def o(self) -> str:
        return self.q[:-1] + "e"

    @property
    def batch(self) -> str:
        """Batch letters, in the order in which blocks count them: last those along which queries share keys."""
        return "".join(sorted(self.q[:-1].replace("i", ""), key=lambda letter: letter not in self.k))

    @property
    def batch_of_keys(self) -> str:
        return "".join(c for c in self.batch if c in self.k)

    @property
    def rows(self) -> str:
        """The letters of an array with a number of each row of scores."""
        return self.batch + "i"


class LetteredSide(NamedTuple):
    """A side operand of the expressions: an array, or the index along a letter."""

    letters: str
    dtype: str  # or "index"
    is_learned: bool = False  # whether the side's cotangent is its own, as far as letters tell

    @property
    def is_array_of_scores(self) -> bool:
        """Whether it is one of queries x keys."""
        return self.dtype != "index" and {"i", "j"} <= set(self.letters)


OUTPUT = "forward", "tangents"  # the kernels that make the output


class SideCotangent(NamedTuple):
    """The cotangent of something that scores read beside the product: of a bias that is added it is g, of a temperature
    g x0. Or of something that weights are multiplied with: y t.

    A kernel has an array of it for each score, or sums over all letters but these: `queries` over keys, `keys` over
    queries, `scores` over the batch. The last one's array has the letter p, of parts whose sum it is.
    """

    expression: Expression  # of g, x0, y, t and the sides, what a score adds
    kernel: str
    letters: str
    dtype: str
    parts: int = 1

    @property
    def of_weights(self) -> "SideCotangent | None":
        """Of a sum over keys of what is linear in g = y (t - delta): the sum of the same of y. Of another one None.

        The sum of g itself is 0, if delta is the sum of y t. But delta is made of o, for which weights were rounded: so
        of the sum of c g there are left delta's error times the sum of c y. See `kernels.backward`.
        """
        read = (a for op in self.expression.operations for a in op.operands)
        if "j" in self.letters or "g" not in (self.expression.result, *read):
            return None
        return self._replace(expression=self.expression.after(Expression((), "y"), "g"))


class Attention(NamedTuple):
    """weight(softmax(score(q kᵀ))) v, where `weight` is linear.

    Expressions are of float32 numbers and the sides s0, s1, .... `score` is one of the product x0, `weight` one of the
    softmax y. `score_transposed`, of the score's cotangent g and x0, is x0's cotangent, and `weight_transposed`, of the
    weight's cotangent t, is y's. `score_tangent`, of the product's tangent x1 and x0, is the score's tangent.
    """

    letters: Letters
    sides: tuple[LetteredSide, ...]
    n_forward: int  # `score` and `weight` read the first so many sides
    score: Expression
    weight: Expression
    score_transposed: Expression | None = None
    weight_transposed: Expression | None = None
    score_tangent: Expression | None = None
    side_cotangents: tuple[SideCotangent, ...] = ()
    empty_rows_are_zero: bool = False  # weights of rows whose scores are all -inf; otherwise these are NaN

    def sides_of(self, kernel: str) -> tuple[LetteredSide, ...]:
        return self.sides[: self.n_forward] if kernel in OUTPUT else self.sides

    def reads_arrays(self, kernel: str) -> bool:
        """Whether a kernel reads arrays of queries x keys."""
        return any(side.is_array_of_scores for side in self.sides_of(kernel))

    @property
    def output(self) -> str:
        """The kernel that makes the output."""
        return "tangents" if self.score_tangent else "forward"

    @property
    def kernels(self) -> list[str]:
        """The kernels that make it, and its gradients."""
        of_batch = ["scores"] * len(self.side_cotangents_of("scores"))
        return [self.output, *(["queries", "keys", *of_batch] if self.score_transposed else [])]

    def side_cotangents_of(self, kernel: str) -> list[SideCotangent]:
        """What a kernel makes beside its gradients: first what has an element for each score."""
        own = [one for one in self.side_cotangents if one.kernel == kernel]
        of_weights = [of for one in own if (of := one.of_weights)] if kernel == "queries" else []
        found = sorted(
            [*own, *of_weights, *([self.exact_delta] if of_weights else [])], key=lambda one: "j" not in one.letters
        )
        return list(dict.fromkeys(found))

    @property
    def exact_delta(self) -> SideCotangent:
        """The sum of y t over keys, where t is the weight's cotangent."""
        assert self.weight_transposed is not None
        n = len(self.weight_transposed.operations)
        times = Operation("mul", ("y", self.weight_transposed.result), ("float32", "float32"), "float32")
        expression = Expression((*self.weight_transposed.operations, times), f"v{n}")
        return SideCotangent(expression, "queries", self.letters.rows, "float32")

    def extents(self, q: ArrayOrAval, k: ArrayOrAval, v: ArrayOrAval) -> dict[str, int]:
        dims = (zip(letters, a.shape, strict=True) for letters, a in zip(self.letters, (q, k, v), strict=True))
        return {letter: n for of_operand in dims for letter, n in of_operand}

    def _weight_of(self, kernel: str) -> tuple[Expression, float]:
        """`weight`, and a number that multiplies what is made of it. In the forward pass the number comes after the
        product with values, so that a weight of 1, of a row with one large score, is rounded exactly."""
        return without_scale(self.weight, "y") if kernel in OUTPUT else (self.weight, 1.0)

    def attributes(self, kernel: str) -> dict[str, str | np.int64]:
        """The attributes of a kernel's custom call: see csrc/plan/attention.h."""
        weight, scale = self._weight_of(kernel)
        expressions = [self.score, weight]
        if kernel == "tangents":
            expressions += filter(None, [self.score_tangent])
        if kernel not in OUTPUT:
            expressions += filter(None, [self.score_transposed, self.weight_transposed])
            expressions += [one.expression for one in self.side_cotangents_of(kernel)]
        words = [] if self.letters_of_bounds is None else [f"bounds:{self.letters_of_bounds}"]
        for side in self.sides_of(kernel):
            words.append(f"{'index' if side.dtype == 'index' else 'array'}:{side.letters}")
        return {
            "version": np.int64(_kernels.CALL_VERSION),
            "kernel": kernel,
            "letters": ",".join(self.letters),
            "sides": " ".join(words),
            "expressions": "\n".join(self._texts_of(expressions)),
            "factor": f"{float(scale).hex()}f",
            "empty_rows": "zero" if self.empty_rows_are_zero else "nan",
            "side_cotangents": " ".join(one.letters for one in self.side_cotangents_of(kernel)),
        }

    def _texts_of(self, expressions: Sequence[Expression]) -> list[str]:
        """Expressions as C++, in which masks have their values in tiles that are whole."""
        numbers: dict[Operation, int] = {}
        numbered = _numbered(self.score, numbers)
        sides = {name: value for name, value in self._masks if name not in numbered}
        known = {numbered[name]: value for name, value in self._masks if name in numbered}
        uniform = {f"s{k}" for k, side in enumerate(self.sides) if not {"i", "j"} & set(side.letters)}
        texts = []
        for expression in expressions:
            own = {name: known[n] for name, n in _numbered(expression, numbers).items() if n in known}
            texts.append(printing.text_of(expression, coarse=True, masks=sides | own, uniform=uniform))
        return texts

    # ---- In JAX

    def results(self, kernel: str, dtype: Dtype) -> list[tuple[str, Any]]:
        """The letters and the dtype of each result of a kernel, for operands of a dtype."""
        letters = self.letters
        found: list[tuple[str, Any]] = [(letters.q, dtype)] if kernel == "queries" else []
        if kernel in OUTPUT:
            found = [(letters.o, dtype), (letters.rows + "n", "float32")]
            found += [] if self.score_transposed is None or dtype == jnp.float32 else [(letters.o, "int8")]
            found += [(letters.o, dtype)] if kernel == "tangents" else []
        elif kernel == "keys":
            found = [(letters.k, dtype), (letters.v, dtype)]
        return found + [(one.letters, one.dtype) for one in self.side_cotangents_of(kernel)]

    def sizes(self, kernel: str, extents: Mapping[str, int]) -> dict[str, int]:
        """The extents of a kernel's letters, with n, the two numbers of a row, and p, the parts of a sum."""
        (parts,) = {one.parts for one in self.side_cotangents_of(kernel)} or {1}
        return {**extents, "n": 2, "p": parts}

    def result_types(self, kernel: str, q: ArrayOrAval, k: ArrayOrAval, v: ArrayOrAval) -> list[jax.ShapeDtypeStruct]:
        extents = self.sizes(kernel, self.extents(q, k, v))
        return [jax.ShapeDtypeStruct([extents[c] for c in of], dtype) for of, dtype in self.results(kernel, q.dtype)]

    def in_jax(self, kernel: str, *operands: jax.Array, visited: jax.Array | bool = True) -> list[jax.Array]:
        """What a kernel does, of the primitive's operands (`kernels.py`). `visited`: the scores in tiles that are."""
        q, k, v, *rest = operands
        types, letters, extents = self.result_types(kernel, q, k, v), self.letters, self.extents(q, k, v)
        dims = letters.rows + "j"

        def product(of: str, *operands: jax.Array) -> jax.Array:
            return jnp.einsum(of, *(a.astype(jnp.float32) for a in operands), precision="highest")

        def value(expression: Expression | None, **values: jax.Array) -> jax.Array:
            assert expression is not None  # the backward kernels have all expressions
            values = {name: a.astype(expression.dtype_of(name)) for name, a in values.items()}
            return jnp.broadcast_to(expression.in_jax(values | sides).astype(jnp.float32), x.shape)

        sides = self.values_of_sides(dims, extents, rest[0 if kernel == "forward" else 3 :])
        x = product(f"{letters.q},{letters.k}->{dims}", q, k)
        s = jnp.where(visited, value(self.score, x0=x), -jnp.inf)
        empty = (s == -jnp.inf).all(-1, keepdims=True) & self.empty_rows_are_zero
        if kernel in OUTPUT:
            pivot = jnp.where(empty, jnp.float32(0), s.max(-1, keepdims=True))
            terms = jnp.exp(s - jnp.where(pivot == -jnp.inf, 0, pivot))
            total = jnp.where(empty, jnp.float32(jnp.inf), terms.sum(-1, keepdims=True))
            weight, scale = self._weight_of(kernel)
            y = jnp.exp(s - pivot) / total

            def weighted(y: jax.Array, v: jax.Array) -> jax.Array:
                return scale * product(f"{dims},{letters.v}->{letters.o}", jnp.where(visited, value(weight, y=y), 0), v)

            o, *lost = rounded_and_lost(weighted(y, v), q.dtype)
            found = [o, jnp.concatenate([pivot, jnp.log2(total)], -1), *lost]
            if kernel == "tangents":
                q_tangent, k_tangent, v_tangent = rest[:3]
                of_q, of_k = (
                    product(f"{letters.q},{letters.k}->{dims}", *of) for of in ((q_tangent, k), (q, k_tangent))
                )
                tangent = y * value(self.score_tangent, x1=of_q + of_k, x0=x)
                o_tangent = weighted(tangent - y * tangent.sum(-1, keepdims=True), v) + weighted(y, v_tangent)
                found = [*found[: len(types) - 1], o_tangent.astype(q.dtype)]
            return found[: len(types)]
        o_cotangent, rows, delta = rest[:3]
        y = jnp.where(empty, jnp.float32(0), jnp.exp(s - rows[..., :1]) * jnp.exp2(-rows[..., 1:]))
        t = product(f"{letters.o},{letters.v}->{dims}", o_cotangent, v)
        g = y * (value(self.weight_transposed, t=t) - delta[..., None])
        x_cotangent = jnp.where(visited, value(self.score_transposed, g=g, x0=x), 0)
        made = {
            "scores": [],
            "queries": [(letters.k, k, letters.q, x_cotangent)],
            "keys": [
                (letters.q, q, letters.k, x_cotangent),
                (letters.o, o_cotangent, letters.v, jnp.where(visited, value(self.weight, y=y), 0)),
            ],
        }[kernel]
        found = [product(f"{dims},{of}->{to}", w, a).astype(types[0].dtype) for of, a, to, w in made]
        for one, type_ in zip(self.side_cotangents_of(kernel), types[len(found) :], strict=True):
            of_scores = jnp.where(visited, value(one.expression, g=g, x0=x, y=y, t=t), 0)
            summed = jnp.einsum(f"{dims}->{one.letters.removeprefix('p')}", of_scores)
            if one.letters.startswith("p"):
                summed = jnp.zeros(type_.shape, jnp.float32).at[0].set(summed)
            found.append(summed.astype(one.dtype))
        return found

    def values_of_sides(self, dims: str, extents: dict[str, int], arrays: Iterable[jax.Array]) -> dict[str, jax.Array]:
        """The sides as arrays of these dimensions, but those that have others. `arrays`: the arrays among the sides."""
        rest, found = list(arrays), {}
        for k, side in enumerate(self.sides):
            shape = [extents[c] if c in side.letters else 1 for c in dims]
            a = None if side.dtype == "index" or not rest else rest.pop(0)
            if not set(side.letters) <= set(dims):
                continue
            if side.dtype == "index":
                found[f"s{k}"] = jnp.arange(extents[side.letters], dtype=jnp.int32).reshape(shape)
            elif a is not None:
                order = [side.letters.index(c) for c in dims if c in side.letters]
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
    def _masks(self) -> list[tuple[str, bool]]:
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
        sides = self.values_of_sides(letters + "ij", extents, arrays)
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
        for name, value in self._masks:
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
                scores = self._without_product({**given, **arrays}).astype(jnp.float32)
                found = max(found, float(jnp.mean(~(scores <= _FILL))))
            return found or 1.0


def lost_shift(dtype: str | Dtype) -> int:
    """How many of float32's bits are left out of what o lost by rounding to a dtype, which is kept in 8 bits."""
    return jnp.finfo(jnp.float32).nmant - jnp.finfo(dtype).nmant - 8


def rounded_and_lost(o: jax.Array, dtype: str | Dtype) -> tuple[jax.Array, ...]:
    """An array of float32, rounded to a dtype, and, unless that is float32, what it lost: the difference of both
    numbers' bits as float32, the upper 8 of those that rounding may change."""
    if dtype == jnp.float32:
        return (o,)
    wide, shift = rounded(o, jnp.dtype(dtype).name), lost_shift(dtype)
    bits = _bits_of(o) - _bits_of(wide) + (1 << shift >> 1)
    return wide.astype(dtype), jnp.clip(bits >> shift, -128, 127).astype(jnp.int8)


def unrounded(o: jax.Array, lost: jax.Array | None = None) -> jax.Array:
    """The array before `rounded_and_lost`, in float32; without `lost` the rounded one."""
    if lost is None:
        return o.astype(jnp.float32)
    bits = _bits_of(o.astype(jnp.float32)) + (lost.astype(jnp.int32) << lost_shift(o.dtype))
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def _bits_of(x: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(x, jnp.int32)


_CELL = _kernels.ATTENTION_CELL

# Scores that are not fills are larger than this. Fills of float16 cannot be as small: they are not taken for such.
_FILL = -1e8


# Operations after which a score is a fill of every product, or of none.
_KEEP_SIZE = (*SAME, *ARITHMETIC, "neg", "div", "tanh", "select_n", "convert_element_type", "reduce_precision")


def _is_fill(a: str | Number) -> TypeGuard[Number]:
    return isinstance(a, Number) and not isinstance(a.value, bool) and a.value <= _FILL


def _numbered(expression: Expression, numbers: dict[Operation, int]) -> dict[str, int]:
    """A number for the result of each operation of an expression. Equal ones that one dictionary numbers share it."""
    found: dict[Any, Any] = {}
    for k, op in enumerate(expression.operations):
        key = op._replace(operands=tuple(found.get(a, a) for a in op.operands))
        found[f"v{k}"] = numbers.setdefault(key, len(numbers))
    return found
