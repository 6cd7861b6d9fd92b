"""Softmaxes that a program writes out, as exp(x - max(x)) / sum, become operators: before and after differentiation.

In the words of `polynomials.py`, E / S is softmax and x - M - log S log_softmax, in whatever order the program computes
them; the maximum's derivative cancels out. `gradients.py` makes operators of their derivatives. M and S are then the
operator's. If something else needs E, the program stays as it was.
"""

import heapq
from collections.abc import Callable, Container, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jax_softmax.fusion.forms import deferred_division
from jax_softmax.fusion.forms.gradients import Gradients
from jax_softmax.fusion.forms.one_hot import is_zero
from jax_softmax.fusion.forms.polynomials import LOG_SOFTMAX, SOFTMAX, E, Forms, S, form_of, is_followed
from jax_softmax.fusion.program import expressions, splicing
from jax_softmax.fusion.program.graph import CycleError, Equation, Graph, each_once, is_variable, variables_of
from jax_softmax.fusion.program.kinds import why_no_kernels
from jax_softmax.primitives.types import Var

_COMPARE = (*expressions.COMPARISONS, "sign", "floor", "ceil", "round", "max", "min", "clamp")
_MOST_FOLLOWED = 100  # equations of one softmax, so that the time for a program grows linearly; the tests have up to 86


def with_operators(graph: Graph, without: Container[Any] = ()) -> tuple[Graph, list[Var]]:
    """The graph with operators, and the arrays of whose rows they are; arrays `without` operators stay so."""
    arrays = []
    for equation in graph.equations:
        if equation.name != "reduce_max" and not splicing.is_unmasked(equation, "logsumexp"):
            continue
        x, axes = equation.inputs[0], equation.params["axes"]
        if equation not in graph.position or x in without or len(axes) != 1 or not is_variable(x):
            continue
        if why_no_kernels(x) or x.aval.shape[axes[0]] <= 1:
            continue
        graph, operator = _with_operator_of_rows(graph, equation)
        if operator is not None:
            equation = operator
            arrays.append(x)
        new = WrittenOut(graph, equation).graph_with_operators()
        if new is not None:
            graph = new
            arrays.append(x)
    return graph, arrays


def _with_operator_of_rows(graph: Graph, equation: Equation) -> tuple[Graph, Equation | None]:
    """The graph with the operator logsumexp for M and S, and its equation, where a program has `jax.nn.logsumexp`'s own
    operations: M, the result of `equation`, is read as m = where(isfinite(M), M, 0) alone, and S = sum(exp(x - m)) for
    its logarithm and derivatives, as the operator means it. If not, the same graph and None: what else a program makes
    of them may be for the rows whose maximum is infinite."""
    forms = Forms(graph, equation)
    forms.in_most_rows = True
    maxima = list(each_once([equation], lambda e: [r for r in graph.readers_of(e) if splicing.is_alike(r)]))
    guard = _guard_of(graph, maxima)
    if guard is None or _compares_maxima(graph, guard.outputs, forms.shape):
        return graph, None

    def following(e: Equation) -> list[Equation]:
        return [r for r in graph.readers_of(e) if r.name in ("sub", "exp", "reduce_sum") or splicing.is_alike(r)]

    equations = list(each_once([guard], lambda e: following(e) if e.name != "reduce_sum" else []))
    forms.followed.update(v for e in (*maxima, *equations) for v in e.outputs)
    place = forms.place_of_rows
    sums = [e for e in equations if e.name == "reduce_sum" and len(e.outputs[0].aval.shape) == len(place)]
    sums = [e for e in sums if forms.form(e.outputs[0], place) == form_of(S)]
    copies = list(each_once(sums, lambda e: [r for r in graph.readers_of(e) if _is_copy_of_sum(r)]))
    of_sums = [r for e in copies for r in graph.readers_of(e) if not _is_copy_of_sum(r)]
    if "log" not in {r.name for r in of_sums} or not all(_is_of_logarithm(graph, r, forms.shape) for r in of_sums):
        return graph, None
    rows = splicing.row_variables(equation)
    graph = graph.with_replaced(_of_operator(equation, sums, rows, lambda _, total: total))
    return graph, graph.maker[rows[0]]


def _guard_of(graph: Graph, maxima: list[Equation]) -> Equation | None:
    """The equation where(isfinite(M), M, 0) if nothing else reads M, which these equations make and copy."""
    readers = dict.fromkeys(r for e in maxima for r in graph.readers_of(e) if r not in maxima)
    if len(readers) != 2:
        return None
    test, guard = sorted(readers, key=lambda e: e.name)
    if (test.name, guard.name) != ("is_finite", "select_n"):
        return None
    if graph.readers_of(test) != [guard] or guard.inputs[0] is not test.outputs[0] or len(guard.inputs) != 3:
        return None
    is_result = any(v in graph.results for e in (*maxima, test) for v in e.outputs)
    return guard if is_zero(graph, guard.inputs[1]) and not is_result else None


def _is_copy_of_sum(equation: Equation) -> bool:
    return splicing.is_alike(equation) or equation.name == "abs"


def _is_of_logarithm(graph: Graph, equation: Equation, shape: tuple[int, ...]) -> bool:
    """Whether what reads S is its logarithm, a division of rows' numbers by it, or the test in abs's derivative, which
    chooses one number twice: where(S >= 0, t, 0) and where(S >= 0, 0, t)."""
    if equation.name != "ge":
        return equation.name == "log" or (equation.name == "div" and equation.outputs[0].aval.shape != shape)
    chosen = [e.inputs[1:] for e in graph.readers_of(equation)]
    is_pair = {e.name for e in graph.readers_of(equation)} == {"select_n"} and len(chosen) == 2
    return is_pair and chosen[0] == chosen[1][::-1] and graph.results.isdisjoint(equation.outputs)


def _compares_maxima(graph: Graph, maxima: Sequence[Var], shape: tuple[int, ...]) -> bool:
    """Whether the maxima, or elements of an array of this shape less maxima, are compared with anything, or the maxima
    are results of the program: a kernel's maxima may have other bits than those that XLA compares with."""
    pending = [(v, True) for v in maxima]
    for v, is_maximum in pending:  # or else the difference of an element and the maximum
        if is_maximum and v in graph.results:
            return True
        for reader in graph.readers.get(v, ()):
            if reader.name in _COMPARE:
                return True
            is_difference = is_maximum and reader.name == "sub" and reader.outputs[0].aval.shape == shape
            if is_difference or splicing.is_alike(reader):
                result = reader.outputs[0], is_maximum and not is_difference
                pending += [result] if result not in pending else []
    return False


def _of_operator(
    equation: Equation, sums: list[Equation], rows: Sequence[Var], program_sum: Callable[..., jax.Array]
) -> dict[Equation, list[Equation]]:
    """The program's maxima and sums of the operator's: `rows`. The maximum is NaN where the program's is."""

    def program_maximum(largest: jax.Array, total: jax.Array) -> jax.Array:
        return jnp.where(total == total, largest, total)

    def equations(equation: Equation, of: Callable[..., jax.Array]) -> list[Equation]:
        (v,) = equation.outputs
        return splicing.spliced(lambda *rows: of(*rows).reshape(v.aval.shape).astype(v.aval.dtype), rows, [v], equation)

    of_operator = [*splicing.rows_of(equation, rows), *equations(equation, program_maximum)]
    return {equation: of_operator} | {e: equations(e, program_sum) for e in sums}


class WrittenOut(Gradients):
    """The operators that replace what a program makes of an array x and its rows' maxima."""

    def __init__(self, graph: Graph, equation: Equation, forms: Forms | None = None) -> None:
        forms = Forms(graph, equation) if forms is None else forms
        super().__init__(graph, forms, equation.outputs if forms.has_operator else splicing.row_variables(equation))
        self.equation, self.has_operator = equation, forms.has_operator
        self.replacements: dict[Equation, list[Equation]] = {}
        self.exponentials: list[Equation] = []  # those that make E
        self.sums: list[Equation] = []  # those that make S

    def graph_with_operators(self) -> Graph | None:
        """The graph with operators; None if they would not make all that is needed."""
        position, readers = self.graph.position, self.graph.readers
        pending = sorted({position[r] for v in self.forms.of_rows for r in readers.get(v, ())})
        seen = set(pending)
        while pending:
            equation = self.graph.equations[heapq.heappop(pending)]
            if not is_followed(equation) or len(self.forms.followed) > _MOST_FOLLOWED:
                continue
            (v,) = equation.outputs
            self.forms.followed.add(v)
            self._follow(v, equation)
            if self.forms.operators.get(v) == "log_softmax":
                continue
            for k in {position[r] for r in readers.get(v, ())} - seen:
                seen.add(k)
                heapq.heappush(pending, k)
        if not self.has_operator and (self.sums or self.replacements):
            self._replace_rows()
        try:
            new = self.graph.with_replaced(self.replacements) if self.replacements else None
        except CycleError:
            return None
        if new is None or any(e in new.position for e in self.exponentials):
            return None
        return None if not self.has_operator and _compares_maxima(new, self.equation.outputs, self.shape) else new

    def _follow(self, v: Var, equation: Equation) -> None:
        """Notes what replaces the equation that makes v, if anything does."""
        new = None
        if v.aval.shape == self.shape and v.aval.dtype.name in expressions.WRITABLE:
            form = self.forms.form(v, self.forms.place)
            if form == form_of(E) and equation.name == "exp" and not self.has_operator:
                self.exponentials.append(equation)
                self._replace_products(v, equation)
            elif form == LOG_SOFTMAX or (form == SOFTMAX and not self.has_operator):  # logsumexp's derivative has it
                new = self._operator("log_softmax" if form == LOG_SOFTMAX else "softmax", v, equation)
            elif not self._is_multiple(equation):
                new = self._gradient(form, equation)
        elif equation.name == "reduce_sum" and not self.has_operator and v.aval.dtype.name in expressions.WRITABLE:
            place = self.forms.place_of_rows
            if len(v.aval.shape) == len(place) and self.forms.form(v, place) == form_of(S):
                self.sums.append(equation)
        if new is not None:
            self.replacements[equation] = new

    def _is_multiple(self, equation: Equation) -> bool:
        """Whether it multiplies the result of a linear map by a number: that is left to the program."""
        return equation.name in ("mul", "div", "neg") and self.with_maps.issuperset(variables_of(equation.inputs))

    def _replace_rows(self) -> None:
        """The program's maxima and sums are made of the operator's. They are NaN where the program's are."""

        def program_sum(largest: jax.Array, total: jax.Array) -> jax.Array:
            return jnp.where(jnp.isfinite(largest), total, jnp.nan)

        self.replacements |= _of_operator(self.equation, self.sums, self.rows, program_sum)

    def _replace_products(self, e: Var, equation: Equation) -> None:
        """Products of E that are divided by S."""
        softmax = type(e)(e.aval)
        replacements, new, self.forms.products, self.forms.sums = deferred_division.quotients_of(self.forms, e, softmax)
        if new:
            self.replacements |= replacements
            of_softmax = self._operator("softmax", softmax, equation)
            assert of_softmax is not None  # it is made of no forms
            self.replacements[equation] = [equation, *of_softmax, *new]

    def _operator(self, op: str, v: Var, equation: Equation) -> list[Equation] | None:
        new = self._spliced(lambda given: self._operator_value(op, given, v.aval.dtype), [], equation, [v])
        self.forms.operators[v] = op
        self.forms.add_symbol(v)
        return new
