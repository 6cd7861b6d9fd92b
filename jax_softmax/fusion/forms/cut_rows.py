"""Programs that cut rows off an array, and go on with those that are left, as `log_softmax(logits[:, :-1])` does.

A kernel reads whole arrays: before it XLA would copy what is left, and behind the gradient's it would put the rows back
as zeros. But rows do not depend on each other, so that the same is computed of all rows, and cut where little is left,
as of losses. With B sequences of S tokens, and V logits of each:

    as it is written                                   instead

    x = logits[:, :-1]              (B, S-1, V)
    y = log_softmax(x)              (B, S-1, V)        y = log_softmax(logits)         (B, S, V)
    l = take(y, labels)             (B, S-1)           l = take(y, pad(labels))[:, :-1]
    dx = log_softmax_vjp(g, y)      (B, S-1, V)        d = log_softmax_vjp(g', y)      (B, S, V)
    dlogits = pad(dx)               (B, S, V)          dlogits = where(s < S-1, d, 0)

where g' is g, made for all rows. What the rows that were cut off have there is left out again, be it NaN.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_softmax.fusion.program.graph import Equation, Graph, about_size_of, is_variable, variables_of
from jax_softmax.fusion.program.kinds import kind_of
from jax_softmax.fusion.program.splicing import spliced
from jax_softmax.primitives.types import Atom, Var

# Chosen. A program with less than this part of the rows is faster as it is: with a gradient it moves p N bytes six
# times and N once, where p is that part, and the other way N bytes three times.
_LEAST_LEFT = 1 / 2
_LITTLE = 1 / 8  # of the array that was cut: what is cut later has at most so many elements


class _NotOfAllRowsError(Exception):
    """Something cannot be made of all rows."""


class _Rows(NamedTuple):
    """Where an array has the rows: in a dimension, which may have other dimensions merged in front of them, as that of
    `logits[:, :-1].reshape(-1, V)`."""

    dim: int
    outer: int = 1  # the extent of those other dimensions


class _Cut(NamedTuple):
    """A slice that leaves `left` of n rows, from `begin` on."""

    n: int
    begin: int
    left: int

    def of(self, a: jax.Array, rows: _Rows) -> jax.Array:
        """What is left of an array that has all rows."""
        apart = a.reshape(*a.shape[: rows.dim], rows.outer, self.n, *a.shape[rows.dim + 1 :])
        left = jax.lax.slice_in_dim(apart, self.begin, self.begin + self.left, axis=rows.dim + 1)
        return left.reshape(*a.shape[: rows.dim], rows.outer * self.left, *a.shape[rows.dim + 1 :])

    def padded(self, a: jax.Array, rows: _Rows) -> jax.Array:
        """An array with zeros for the rows that were cut off."""
        apart = a.reshape(*a.shape[: rows.dim], rows.outer, self.left, *a.shape[rows.dim + 1 :])
        config = [(0, 0, 0)] * apart.ndim
        config[rows.dim + 1] = (self.begin, self.n - self.begin - self.left, 0)
        apart = jax.lax.pad(apart, jnp.zeros((), a.dtype), config)
        return apart.reshape(*a.shape[: rows.dim], rows.outer * self.n, *a.shape[rows.dim + 1 :])

    def where_left(self, a: jax.Array, dim: int) -> jax.Array:
        """An array that has all rows, with zeros for those that were cut off."""
        row = jax.lax.broadcasted_iota(jnp.int32, a.shape, dim)
        is_left = row < self.begin + self.left
        return jnp.where(is_left if self.begin == 0 else is_left & (row >= self.begin), a, jnp.zeros((), a.dtype))


def with_all_rows(graph: Graph) -> Graph:
    """The graph in which softmax-like operators, and what is made of what they make, are of all rows."""
    done: set[Var] = set()
    while True:
        slices = (e for e in graph.equations if e.name == "slice" and e.outputs[0] not in done)
        found = next(((e, *cut) for e in slices if (cut := _cut_of(e)) is not None), None)
        if found is None:
            return graph
        done.update(found[0].outputs)
        graph = _OfAllRows(graph, *found).graph() or graph


def _cut_of(equation: Equation) -> tuple[int, _Cut] | None:
    """The only dimension that a slice cuts, and how; None if it cuts the last one, several or too much."""
    (x,), (y,) = equation.inputs, equation.outputs
    extents = list(zip(x.aval.shape, y.aval.shape, strict=True))
    if not is_variable(x) or not all(isinstance(n, int) for of in extents for n in of):
        return None
    dims = [d for d, (n, left) in enumerate(extents) if n != left]
    if len(dims) != 1 or dims[0] == len(extents) - 1 or any(n != 1 for n in equation.params["strides"] or ()):
        return None
    (d,) = dims
    cut = _Cut(extents[d][0], equation.params["start_indices"][d], extents[d][1])
    return (d, cut) if cut.left > 1 and cut.left >= _LEAST_LEFT * cut.n else None


class _OfAllRows:
    """What is made of the rows that a slice leaves, made of all rows."""

    def __init__(self, graph: Graph, equation: Equation, dim: int, cut: _Cut) -> None:
        (x,), (y,) = equation.inputs, equation.outputs
        self.before, self.slice, self.cut = graph, equation, cut
        self.little = _LITTLE * about_size_of(y)
        self.rows = {y: _Rows(dim)}  # of what is made of the slice
        self.whole: dict[tuple[Var, _Rows], Atom] = {(y, _Rows(dim)): x}  # an array with all rows instead of a variable
        self.replacements: dict[Equation, list[Equation]] = {}
        self.added: list[Equation] = []

    def graph(self) -> Graph | None:
        """The graph after it; None if no operator is of these rows, or if too much would be cut later."""
        has_operator, cut_later = False, set[Var]()
        for equation in self.before.equations:
            own = [v for v in variables_of(equation.inputs) if v in self.rows]
            if not own or self._puts_back(equation) or self._sums(equation):
                continue
            try:
                self._make(equation)
            except _NotOfAllRowsError:
                cut_later.update(own)
            else:
                has_operator |= kind_of(equation) == "operator" or equation.name == "reduce_max"
        cut_later |= self.before.results & self.rows.keys()
        if not has_operator or any(about_size_of(v) > self.little for v in cut_later):
            return None
        for equation, made in self.replacements.items():
            for v in (v for v in equation.outputs if v in cut_later):
                rows = self.rows[v]
                made += spliced(functools.partial(self.cut.of, rows=rows), [self.whole[v, rows]], [v], equation)
        return self.before.with_replaced({**self.replacements, self.slice: [*self.added, self.slice]})

    def _make(self, equation: Equation) -> None:
        """Has an equation made of all rows."""
        rows = self._rows_of_results(equation)
        inputs, params = self._of_all(equation, rows)
        outputs = [self._new(v, rows) for v in equation.outputs]
        self.rows |= dict.fromkeys(equation.outputs, rows)
        self.whole |= {(v, rows): a for v, a in zip(equation.outputs, outputs, strict=True)}
        self.replacements[equation] = [Equation(equation.eqn, inputs, outputs, params)]

    def _puts_back(self, equation: Equation) -> bool:
        """Whether an equation puts zeros where rows were cut off; then its result is chosen of all rows."""
        v, (n, begin, left) = equation.inputs[0], self.cut
        if equation.name != "pad" or not is_variable(v) or v not in self.rows or is_variable(equation.inputs[1]):
            return False
        rows, config = self.rows[v], [tuple(map(int, of)) for of in equation.params["padding_config"]]
        expected = [(begin, n - begin - left, 0) if k == rows.dim else (0, 0, 0) for k in range(v.aval.ndim)]
        if config != expected or equation.inputs[1].val != 0 or rows.outer != 1:
            return False
        whole = [self.whole[v, rows]]
        chosen = spliced(lambda a: self.cut.where_left(a, rows.dim), whole, equation.outputs, equation)
        self.replacements[equation] = chosen
        return True

    def _sums(self, equation: Equation) -> bool:
        """Whether an equation sums over rows and other dimensions; then the rows' sums are cut, and summed."""
        v = equation.inputs[0]
        if equation.name != "reduce_sum" or not is_variable(v) or v.aval.dtype != jnp.float32:
            return False
        rows, axes = self.rows[v], tuple(equation.params["axes"])
        others = tuple(axis for axis in axes if axis != rows.dim)
        if rows.dim not in axes or not others:
            return False

        def sums(a: jax.Array) -> jax.Array:
            of_rows = self.cut.of(jnp.sum(a, others, keepdims=True), rows)
            return jnp.sum(of_rows, axes)

        self.replacements[equation] = spliced(sums, [self.whole[v, rows]], equation.outputs, equation)
        return True

    # ---- An equation of all rows

    def _rows_of_results(self, equation: Equation) -> _Rows:
        """Where an equation's results have the rows, by the first operand that is made of the slice."""
        k, a = next((k, a) for k, a in enumerate(equation.inputs) if is_variable(a) and a in self.rows)
        rows, kind, params = self.rows[a], kind_of(equation), equation.params
        if kind in ("elementwise", "copy", "cast", "operator") or equation.name == "concatenate":
            return rows
        if kind == "reduction" and rows.dim not in params["axes"]:
            return rows._replace(dim=rows.dim - sum(axis < rows.dim for axis in params["axes"]))
        if equation.name == "broadcast_in_dim":
            return rows._replace(dim=params["broadcast_dimensions"][rows.dim])
        if kind == "view":
            return self._rows_of_view(equation, a, rows, equation.outputs[0])
        if equation.name == "gather" and k == 0:
            dims = params["dimension_numbers"]
            if rows.dim in dims.operand_batching_dims:
                of_indices = dims.start_indices_batching_dims[dims.operand_batching_dims.index(rows.dim)]
                return rows._replace(dim=_dims_but(equation.outputs[0], dims.offset_dims)[of_indices])
        raise _NotOfAllRowsError

    def _of_all(self, equation: Equation, rows: _Rows) -> tuple[list[Atom], dict[str, Any]]:
        """The operands and parameters with which an equation's results have all rows."""
        kind, params, inputs, (out, *_) = kind_of(equation), equation.params, equation.inputs, equation.outputs
        d, n, spec = rows.dim, rows.outer * self.cut.n, getattr(equation.params.get("sharding"), "spec", ())
        if equation.eqn.effects or (d < len(spec) and spec[d] is not None):
            raise _NotOfAllRowsError
        if equation.name == "iota" and (params["dimension"] != d or (self.cut.begin == 0 and rows.outer == 1)):
            return [], {**params, "shape": _with_extent(params["shape"], d, n)}
        if (kind in ("elementwise", "copy", "cast") and equation.name != "iota") or (
            equation.name == "concatenate" and params["dimension"] != d
        ):
            return [self._whole(a, rows) if a.aval.shape else a for a in inputs], params
        if kind == "operator" and not params["axis_name"] and d not in params["axes"]:
            if all(a.aval.ndim == out.aval.ndim for a in inputs):
                return [self._whole(a, rows) for a in inputs], params
        if kind == "reduction":
            kept = [k for k in range(inputs[0].aval.ndim) if k not in params["axes"]]
            return [self._whole(inputs[0], rows._replace(dim=kept[d]))], params
        if equation.name == "broadcast_in_dim" and len(inputs) == 1:
            dims, a = params["broadcast_dimensions"], inputs[0]
            a = self._whole(a, rows._replace(dim=dims.index(d))) if d in dims else a
            return [a], {**params, "shape": _with_extent(params["shape"], d, n)}
        if kind == "view" and len(inputs) == 1:
            a = self._whole(inputs[0], self._rows_of_view(equation, out, rows, inputs[0]))
            sizes = {"new_sizes": _with_extent(params["new_sizes"], d, n)} if equation.name == "reshape" else {}
            return [a], params | sizes
        if equation.name == "gather":
            return self._of_gather(equation, rows), params
        if equation.name == "scatter-add":
            return self._of_scatter(equation, rows), params
        raise _NotOfAllRowsError

    def _of_gather(self, gather: Equation, rows: _Rows) -> list[Atom]:
        """The operands of a gather at an index of each row."""
        dims, (a, indices) = gather.params["dimension_numbers"], gather.inputs
        of_batch = _dims_but(gather.outputs[0], dims.offset_dims)  # as the indices have them
        at = of_batch.index(rows.dim) if rows.dim in of_batch else -1
        if at not in dims.start_indices_batching_dims:
            raise _NotOfAllRowsError
        own = dims.operand_batching_dims[dims.start_indices_batching_dims.index(at)]
        return [self._whole(a, rows._replace(dim=own)), self._whole(indices, rows._replace(dim=at))]

    def _of_scatter(self, scatter: Equation, rows: _Rows) -> list[Atom]:
        """The operands of a scatter to an index of each row."""
        dims, (zeros, indices, updates) = scatter.params["dimension_numbers"], scatter.inputs
        if rows.dim not in dims.operand_batching_dims:
            raise _NotOfAllRowsError
        at = dims.scatter_indices_batching_dims[dims.operand_batching_dims.index(rows.dim)]
        of_updates = _dims_but(updates, dims.update_window_dims)[at]
        return [
            self._whole(zeros, rows),
            self._whole(indices, rows._replace(dim=at)),
            self._whole(updates, rows._replace(dim=of_updates)),
        ]

    def _rows_of_view(self, equation: Equation, a: Atom, rows: _Rows, b: Atom) -> _Rows:
        """Where b has the rows, where a has them there, and one of the two is a view of the other."""
        if equation.name == "transpose":
            order = equation.params["permutation"]
            dim = order[rows.dim] if a is equation.outputs[0] else order.index(rows.dim)
            return rows._replace(dim=dim)
        shape, outer = b.aval.shape, math.prod(a.aval.shape[: rows.dim]) * rows.outer
        for d, n in enumerate(shape):
            merged, rest = divmod(n, self.cut.left)
            if rest == 0 and math.prod(shape[:d]) * merged == outer:
                return _Rows(d, merged)
        raise _NotOfAllRowsError

    # ---- Operands of all rows

    def _whole(self, a: Atom, rows: _Rows) -> Atom:
        """An operand with all rows: with zeros where they were cut off, or whatever is made there."""
        if a.aval.shape[rows.dim] == 1:
            return a
        if not is_variable(a) or a.aval.shape[rows.dim] != rows.outer * self.cut.left:
            raise _NotOfAllRowsError
        if (a, rows) not in self.whole:
            if a in self.rows:  # it has them elsewhere
                raise _NotOfAllRowsError
            self.whole[a, rows] = self._made_of_all(a, rows)
        return self.whole[a, rows]

    def _made_of_all(self, a: Var, rows: _Rows) -> Atom:
        """A variable that is not made of the slice, with all rows: what another array was before it was cut alike; what
        is small is padded."""
        made, maker = self._new(a, rows), self.before.maker.get(a)
        if maker is not None and maker.name == "slice" and _cut_of(maker) == (rows.dim, self.cut) and rows.outer == 1:
            return maker.inputs[0]
        if about_size_of(a) <= self.little and isinstance(a.aval.dtype, np.dtype):  # and no key
            self.added += spliced(lambda a: self.cut.padded(a, rows), [a], [made], self.slice)
        elif maker is not None and len(maker.outputs) == 1:
            inputs, params = self._of_all(maker, rows)
            self.added.append(Equation(maker.eqn, inputs, [made], params))
        else:
            raise _NotOfAllRowsError
        return made

    def _new(self, v: Var, rows: _Rows) -> Var:
        shape = _with_extent(v.aval.shape, rows.dim, rows.outer * self.cut.n)
        return type(v)(v.aval.update(shape=shape))


def _dims_but(a: Atom, others: Sequence[int]) -> list[int]:
    return [d for d in range(a.aval.ndim) if d not in others]


def _with_extent(shape: Sequence[int], d: int, n: int) -> tuple[int, ...]:
    return (*shape[:d], n, *shape[d + 1 :])
