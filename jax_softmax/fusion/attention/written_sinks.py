"""Sinks that a program writes out: E / (S + exp(c - M)) in the words of `polynomials.py`, where c is a row's number.

M is the rows' maximum or, as softmax1 has it, the larger of that and c. This becomes softmax([x, c]) without its last
column, which `rows.py` knows, and its derivative the softmax's linear map with such a column: where that makes it
attention, and nowhere else, as [x, c] would have to be written.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jax_softmax.fusion.attention import matcher
from jax_softmax.fusion.forms import written_out
from jax_softmax.fusion.forms.polynomials import Array, C, E, Form, Forms, Given, S, X, added, monomial_product
from jax_softmax.fusion.program import expressions, splicing
from jax_softmax.fusion.program.graph import Equation, Graph, each_once, is_variable
from jax_softmax.fusion.program.kinds import why_no_kernels
from jax_softmax.primitives.operators import bind
from jax_softmax.primitives.types import Var


def with_attention(graph: Graph) -> tuple[Graph, list[matcher.FoundAttention], dict[Var, str]]:
    """What `matcher.with_attention` gives, of a graph that may have sinks written out."""
    stay: set[Any] = set()
    while True:
        with_columns, made = graph, {}
        for equation in graph.equations:
            if equation.name == "reduce_max" and equation not in stay and equation in with_columns.position:
                new = _WithColumn.of(with_columns, equation)
                if new is not None:
                    with_columns, made[equation] = new
        found = matcher.with_attention(with_columns)
        left = {equation for equation, weights in made.items() if weights in found[0].maker}
        if not left:
            return found
        stay |= left


class _WithColumn(written_out.WrittenOut):
    """What a program makes of scores x with a sink, and a softmax with a column more instead of it."""

    @classmethod
    def of(cls, graph: Graph, equation: Equation) -> tuple[Graph, Var] | None:
        """The graph with that softmax, and the variable of its weights; None if this is none."""
        (x,), axes = equation.inputs, equation.params["axes"]
        if len(axes) != 1 or not is_variable(x) or x.aval.dtype.name not in expressions.WRITABLE:
            return None
        if why_no_kernels(x) or x.aval.shape[axes[0]] <= 1:
            return None
        copies = each_once([equation], lambda e: filter(splicing.is_alike, graph.readers_of(e)))
        larger = [r for e in copies for r in graph.readers_of(e) if r.name == "max"]
        if len(larger) > 1:
            return None
        self = cls(graph, equation, Forms(graph, equation, larger[0] if larger else None, has_sink=True))
        new = self.graph_with_operators()
        return None if new is None or self.weights is None else (new, self.weights)

    def __init__(self, graph: Graph, equation: Equation, forms: Forms) -> None:
        super().__init__(graph, equation, forms)
        self.rows = ()
        self.weights: Var | None = None  # with the sink's
        self.maps: list[tuple[Form, Var]] = []  # forms t, and variables of the linear map's results, with the sink's
        self.new: list[Equation] = []  # the equations that make these
        self.of_rows: list[tuple[Equation, Form]] = []  # equations whose results are numbers of rows, and their forms

    def _follow(self, v: Var, equation: Equation) -> None:
        super()._follow(v, equation)
        in_full = [[] if d in self.axes else dim for d, dim in enumerate(self.forms.place)]
        for place in (in_full, self.forms.place_of_rows):
            if list(v.aval.shape) == [math.prod(f.extent for f in dim) for dim in place]:
                self.of_rows.append((equation, self.forms.form(v, place)))

    def _operator(self, op: str, v: Var, equation: Equation) -> list[Equation] | None:
        if op != "softmax" or self.forms.sink is None:
            return None
        weights = self._weights_with(self.forms.sink, equation)
        self.forms.operators[v] = op
        self.forms.add_symbol(v)
        return self._part(weights, [0] * len(self.shape), v, equation)

    def _weights_with(self, sink: Form, equation: Equation) -> Var:
        """The variable of the weights, with the sink's."""
        if self.weights is not None:
            return self.weights
        self.weights = self._new_variable()

        def softmax(given: Given) -> jax.Array:
            x, c = (a.astype(jnp.float32) for a in (given[X], self.forms.value(sink, given)))
            column = jnp.zeros_like(jax.lax.slice(x, [0] * x.ndim, self.forms.shape_of_rows)) + c  # sharded as x is
            with_column = jnp.concatenate([x, column], *self.axes)
            return bind("softmax", with_column, where=None, axes=self.axes, dtype="float32")

        new = self._spliced(softmax, [sink], equation, [self.weights])
        assert new is not None  # a sink's arrays have whole dimensions of x
        self.new += new
        return self.weights

    def _new_variable(self) -> Var:
        """One for an array with the sink's column."""
        shape = [n + (d in self.axes) for d, n in enumerate(self.shape)]
        return Var(self.x.aval.update(shape=tuple(shape), dtype=jnp.dtype("float32"), weak_type=False))

    def _part(self, a: Var, starts: Sequence[int], v: Var, equation: Equation) -> list[Equation]:
        """The equations that make a variable v of an array's columns: those of the scores, or the sink's."""
        ends = a.aval.shape if any(starts) else self.shape

        def part(a: jax.Array) -> jax.Array:
            return jax.lax.slice(a, starts, ends).reshape(v.aval.shape).astype(v.aval.dtype)

        return splicing.spliced(part, [a], [v], equation)

    def _gradient(self, form: Form, equation: Equation) -> list[Equation] | None:
        """The equations that make the cotangent of x by the linear map."""
        form = form if any((E, 1) in monomial for monomial in form) else self._by_exponentials(form) or {}
        t, of_logarithms, rest = self._maps(form)
        symbols = [symbol for monomial in t for symbol, _ in monomial]
        if not t or of_logarithms or rest or self.forms.sink is None:
            return None
        if not all(isinstance(symbol, Array) and symbol.dims is not None for symbol in symbols):
            return None
        self.with_maps.update(equation.outputs)
        made = next((made for of, made in self.maps if of == t), None)
        if made is None:
            weights = self._weights_with(self.forms.sink, equation)
            made = self._new_variable()
            columns = [(0, int(d in self.axes), 0) for d in range(len(self.shape))]

            def linear(given: Given) -> jax.Array:
                t_of_scores = jnp.broadcast_to(self.forms.value(t, given), self.shape).astype(jnp.float32)
                padded = jax.lax.pad(t_of_scores, jnp.float32(0), columns)
                return bind("softmax_linear", given[weights], padded, where=None, axes=self.axes, dtype="float32")

            new = self._spliced(linear, [t], equation, [made], [weights])
            assert new is not None  # t's arrays have whole dimensions of x
            self.new += new
            self.maps.append((t, made))
        return self._part(made, [0] * len(self.shape), equation.outputs[0], equation)

    def _replace_rows(self) -> None:
        """The cotangent of c is the last column of the linear map's result, -C sum(E t) / S² of each row; that of M, by
        which c and the scores would have another one, is 0."""
        column = [n if d in self.axes else 0 for d, n in enumerate(self.shape)]
        for equation in (e for e, form in self.of_rows if not form and self.maps):
            (v,) = equation.outputs
            zeros = functools.partial(jnp.zeros, v.aval.shape, v.aval.dtype)
            self.replacements[equation] = splicing.spliced(zeros, [], [v], equation)
        for t, made in self.maps:
            of_sum = self.forms.summed({monomial_product(m, [(E, 1), (S, -1)]): c for m, c in t.items()})
            cotangent = {monomial_product(m, [(C, 1), (S, -1)]): -c for m, c in of_sum.items()}
            for equation in (e for e, form in self.of_rows if not added(form, cotangent, -1.0)):
                self.replacements[equation] = self._part(made, column, equation.outputs[0], equation)
        first = next(iter(self.replacements))
        self.replacements[first] = [*self.new, *self.replacements[first]]
