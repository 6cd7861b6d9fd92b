"""What a program's attention computes, its kernels, and what these read and make, in terms of `letters.py`."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_softmax import _kernels
from jax_softmax.fusion.attention.letters import LetteredSide, Letters, values_of_sides
from jax_softmax.fusion.attention.linear import without_scale
from jax_softmax.fusion.attention.lost import rounded_and_lost
from jax_softmax.fusion.attention.visible import Visible
from jax_softmax.fusion.kernels import printing
from jax_softmax.fusion.program.expressions import Expression, Operation
from jax_softmax.primitives.types import Aval, Dtype

ArrayOrAval = jax.Array | Aval  # of which the shape and the dtype are read
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
    def is_of_cotangents(self) -> bool:
        """Whether it is a sum of what is linear in g = y (t - delta) along queries or keys.

        The sum of g itself over keys is 0, if delta is the sum of y t. But delta is made of o, for which weights were
        rounded: of a sum over keys of c g there is left delta's error times the sum of c y. See `kernels.backward`.
        """
        read = (a for op in self.expression.operations for a in op.operands)
        return not {"i", "j"} <= set(self.letters) and "g" in (self.expression.result, *read)

    @property
    def of_weights(self) -> "SideCotangent":
        """The same sum, of y instead of g."""
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
    sink_is_learned: bool = False  # a column beside the scores: see `rows.py`
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
        if kernel == "queries":
            own += [one.of_weights for one in own if one.is_of_cotangents]
            own += [self.exact_delta] if self.makes_exact_delta else []
        return list(dict.fromkeys(sorted(own, key=lambda one: "j" not in one.letters)))

    @property
    def makes_exact_delta(self) -> bool:
        return self.sink_is_learned or any(one.is_of_cotangents for one in self.side_cotangents)

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

    @property
    def visible(self) -> Visible:
        return Visible(self.letters, self.sides, self.score, self.empty_rows_are_zero)

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
        words = [] if (of_bounds := self.visible.letters_of_bounds) is None else [f"bounds:{of_bounds}"]
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
        sides = {name: value for name, value in self.visible.masks if name not in numbered}
        known = {numbered[name]: value for name, value in self.visible.masks if name in numbered}
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

        sides = values_of_sides(self.sides, dims, extents, rest[0 if kernel == "forward" else 3 :])
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


def _numbered(expression: Expression, numbers: dict[Operation, int]) -> dict[str, int]:
    """A number for the result of each operation of an expression. Equal ones that one dictionary numbers share it."""
    found: dict[Any, Any] = {}
    for k, op in enumerate(expression.operations):
        key = op._replace(operands=tuple(found.get(a, a) for a in op.operands))
        found[f"v{k}"] = numbers.setdefault(key, len(numbers))
    return found
