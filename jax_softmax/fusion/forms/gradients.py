"""Gradients that a program writes out become operators: softmax's linear maps, and the gradient of a loss.

In the words of `polynomials.py`, softmax's linear map is E t / S - E sum(E t) / S², and log_softmax's t - E sum(t) / S.
What remains of a gradient is softmax times numbers of rows, plus other arrays: a loss's gradient, if these are one-hot.
"""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jax_softmax.fusion.forms.one_hot import one_hot_of
from jax_softmax.fusion.forms.polynomials import (
    LOG_S,
    ONE,
    SOFTMAX,
    Array,
    E,
    Form,
    Forms,
    Given,
    M,
    Monomial,
    S,
    Sum,
    X,
    added,
    form_of,
    monomial_product,
    multiplied,
    power_of,
)
from jax_softmax.fusion.program import splicing
from jax_softmax.fusion.program.graph import Equation, Graph
from jax_softmax.primitives import labels, reference
from jax_softmax.primitives.operators import Coefficients, bind
from jax_softmax.primitives.types import Var

# The two coefficients of a linear map may differ by so much: they are products of a few float32 numbers.
_ROUNDING = 1e-5


def loss_gradient(graph: Graph, log_softmax: Equation, t: Var, cotangent: Equation) -> list[Equation] | None:
    """The equations of a cross entropy's gradient instead of log_softmax's cotangent of t; None if t is not one-hot."""
    gradients = Gradients(graph, Forms(graph, log_softmax), rows=())
    of_t = gradients.forms.add_symbol(t)
    of_sum = multiplied(SOFTMAX, gradients.forms.summed(of_t))
    assert of_sum is not None  # it has one term
    form = added(of_t, of_sum, -1.0)
    return gradients.loss_gradient(form, cotangent)


class _Parts(NamedTuple):
    """The forms of which a gradient is made: it is the sum of these four."""

    of_softmax: Form  # by softmax's linear map
    of_logarithms: Form  # by log_softmax's
    times: Form  # times softmax
    plus: Form  # as it is


class Gradients:
    """Gradients by an array x, by their forms."""

    def __init__(self, graph: Graph, forms: Forms, rows: Sequence[Var]) -> None:
        self.graph, self.forms = graph, forms
        self.x, self.axes, self.shape = forms.x, forms.axes, forms.shape
        self.rows = rows  # M and S, where equations may read them
        self.with_maps: set[Var] = set()  # variables whose replacement has softmax's linear map

    def _operator_value(self, op: str, given: Given, dtype: jnp.dtype | str) -> jax.Array:
        """softmax or log_softmax of x: the program's own, if it is given."""
        v = next((v for v, its_op in self.forms.operators.items() if its_op == op and v in given), None)
        return bind(op, given[X], where=None, axes=self.axes, dtype=dtype) if v is None else given[v]

    def _spliced(
        self,
        f: Callable[[Given], jax.Array],
        forms: Sequence[Form],
        equation: Equation,
        outputs: Sequence[Var],
        others: Sequence[Var] = (),
    ) -> list[Equation] | None:
        """The equations of a function of a dictionary: the arrays of the forms' symbols, and `others` by variable."""
        arrays, pending = set(), [monomial for form in forms for monomial in form]
        while pending:
            for symbol, _ in pending.pop():
                if isinstance(symbol, Array):
                    arrays.add(symbol)
                elif isinstance(symbol, Sum):
                    pending.append(symbol.monomial)
        if any(array.dims is None for array in arrays):
            return None
        in_order = sorted(arrays, key=self.forms.order.__getitem__)
        names = [X, *(M, S)[: len(self.rows)], *in_order, *others]

        def from_arrays(*arrays: jax.Array) -> jax.Array:
            given = dict(zip(names, arrays, strict=True))
            if self.rows and not self.forms.has_operator:
                given[S] = jnp.where(jnp.isfinite(given[M]), given[S], jnp.nan)
            for array in in_order:
                given[array] = self.forms.in_order(array, given[array])
            return f(given).astype(outputs[0].aval.dtype)

        inputs = [self.x, *self.rows, *(array.variable for array in in_order), *others]
        return splicing.spliced(from_arrays, inputs, outputs, equation)

    def _gradient(self, form: Form, equation: Equation) -> list[Equation] | None:
        """The equations that make an array of this form by linear maps and softmax; None if they do not.

        With E / S = p, the gradient of sum(w p) + sum(u log p) is written E w / S - E sum(E w) / S² + u - E sum(u) / S:
        softmax_linear(p, w) + log_softmax_vjp(log p, u).
        """
        (monomial, *others) = form or [ONE]
        is_sum = equation.name in ("add", "add_any")
        if is_sum and monomial and not others and all(map(self.forms.adds_up_to_0, monomial)):
            # What is left out is the maximum's derivative: linear maps' results add up to 0 in each row.
            return self._spliced(lambda given: self.forms.value(form, given), [form], equation, equation.outputs)
        has_exp = any((E, 1) in monomial for monomial in form)
        form = form if has_exp else self._by_exponentials(form) or {}
        powers = [dict(monomial).get(E, 0) for monomial in form]
        if 1 not in powers or not {0, 1}.issuperset(powers):
            return None
        loss = self.loss_gradient(form, equation)
        if loss is not None:
            return loss
        of_softmax, of_logarithms, rest = self._maps(form)
        parts = _Parts(of_softmax, of_logarithms, *_by_softmax(rest))
        if any(symbol == S for monomial in parts.times for symbol, _ in monomial):
            return None
        if (self.forms.has_operator or not has_exp) and not of_softmax and not of_logarithms:
            return None
        if not of_logarithms and not rest:
            self.forms.maps.add(equation.outputs[0])
            self.forms.add_symbol(equation.outputs[0])
        if of_softmax:
            self.with_maps.update(equation.outputs)
        gradient = functools.partial(self._sum_of_parts, parts, equation.outputs[0].aval.dtype)
        return self._spliced(gradient, parts, equation, equation.outputs, list(self.forms.operators))

    def _sum_of_parts(self, parts: _Parts, dtype: jnp.dtype, given: Given) -> jax.Array:
        """A gradient, given the symbols' arrays."""

        def mapped(linear: str, y: jax.Array, t: Form) -> jax.Array:
            value = jnp.broadcast_to(self.forms.value(t, given), self.shape)
            return bind(linear, y, value, where=None, axes=self.axes, dtype=dtype)

        terms = []
        if parts.of_softmax:
            terms.append(mapped("softmax_linear", self._operator_value("softmax", given, dtype), parts.of_softmax))
        if parts.of_logarithms:
            y = self._operator_value("log_softmax", given, "float32")
            terms.append(mapped("log_softmax_vjp", y, parts.of_logarithms))
        if parts.times and not parts.plus and self.forms.is_of_rows(parts.times):
            of_softmax = multiplied(SOFTMAX, parts.times)
            assert of_softmax is not None  # a form has few terms
            terms.append(self.forms.value(of_softmax, given))
        elif parts.times:
            p = reference.widened(self._operator_value("softmax", given, dtype))
            terms.append(p * self.forms.value(parts.times, given))
        if parts.plus:
            terms.append(self.forms.value(parts.plus, given))
        return functools.reduce(jnp.add, terms)

    def _by_exponentials(self, form: Form) -> Form | None:
        """A form with E / S instead of variables that are softmax; None if it is too long."""
        result: Form = {}
        for monomial, c in form.items():
            term: Form | None = {ONE: c}
            for symbol, power in monomial:
                factor: Form | None = form_of(symbol, power)
                if self.forms.is_in_place(symbol) and self.forms.operators.get(symbol.variable) == "softmax":
                    factor = power_of(SOFTMAX, power)
                elif isinstance(symbol, Sum) and power == 1:
                    of_sum = self._by_exponentials({symbol.monomial: 1.0})
                    factor = None if of_sum is None else self.forms.summed(of_sum)
                term = None if term is None or factor is None else multiplied(term, factor)
            if term is None:
                return None
            result = added(result, term)
        return result

    def _maps(self, form: Form) -> tuple[Form, Form, Form]:
        """A form as softmax's linear map of a form, log_softmax's of another one, and the rest: these three.

        E t / S - E sum(E t) / S² is softmax's map of t: of_softmax is {t: 1}. 2 u - 2 E sum(u) / S is log_softmax's of
        2 u: of_logarithms is {u: 2}. Of 3 E / S - v all is the rest. Of the sum of these, each is what it is alone.
        """
        of_softmax, of_logarithms, rest = Form(), Form(), dict(form)
        for monomial, c in form.items():
            of_rows, of_elements = self.forms.split(monomial)
            others = of_elements - {(E, 1)}
            summed = self.forms.summed({of_elements: c}) if others or not of_elements else {}
            for of_sum, n in summed.items():
                less = monomial_product(of_rows, of_sum, [(S, -1), (E, 1)])
                if abs(rest.get(less, 0.0) + n) > _ROUNDING * abs(n):
                    continue
                del rest[monomial], rest[less]
                if (E, 1) in monomial:
                    of_softmax = added(of_softmax, {monomial_product(of_rows, others, [(S, 1)]): c})
                else:
                    of_logarithms = added(of_logarithms, {monomial: c})
        return of_softmax, of_logarithms, rest

    def loss_gradient(self, form: Form, equation: Equation) -> list[Equation] | None:
        """The equations of a form that is softmax times numbers of rows, plus numbers of rows times a one-hot array, by
        the kernel of a cross entropy's gradient. None if a form is not that.

        For one-hot targets t and weights g it is g E / S - g t: the factor of softmax is g, and -g is added at labels.
        Of log_softmax's map of -g t, the factor is g sum(t): sum(t) is 1 in a row with a label, and otherwise 0.
        """
        times, plus = _by_softmax(form)
        arrays = {of_elements for monomial in plus if (of_elements := self.forms.split(monomial)[1])}
        array = self._array_of(*arrays) if len(arrays) == 1 and self.forms.is_of_rows(times) else None
        targets = None if array is None else one_hot_of(self.graph, array, *self.axes)
        if targets is None:
            return None
        (of_array,) = arrays
        factor, of_lse = _without_log_sums(times)
        of_targets = {self.forms.split(monomial)[0]: c for monomial, c in plus.items() if of_array <= monomial}
        of_all = {monomial: c for monomial, c in plus.items() if not of_array <= monomial}

        def gradient(given: Given) -> jax.Array:
            label, element, offset = targets.make(*(given[v] for v in targets.variables))
            offset = 0.0 if offset is None else offset
            excess = jnp.where(labels.has_label(label, self.shape, self.axes), element - offset, 0)
            given |= {Sum(of_array): excess + self.shape[self.axes[0]] * offset}

            def value(form: Form) -> jax.Array:
                return jnp.broadcast_to(reference.widened(self.forms.value(form, given)), self.forms.shape_of_rows)

            by = value(of_targets)
            coefficients = Coefficients(value(factor), value(of_lse), value(of_all) + by * offset, by * excess)
            operands, dtype = (given[X], *coefficients, label), equation.outputs[0].aval.dtype
            return bind("cross_entropy_gradient", *operands, where=None, axes=self.axes, dtype=dtype)[0]

        forms = [factor, of_lse, of_targets, of_all]
        return self._spliced(gradient, forms, equation, equation.outputs, targets.variables)

    def _array_of(self, of_elements: Monomial) -> Var | None:
        """The variable of x's shape that a monomial is; None if it is anything else."""
        ((symbol, power), *others) = of_elements
        if others or power != 1 or not self.forms.is_in_place(symbol) or symbol.variable.aval.shape != self.shape:
            return None
        return symbol.variable


def _by_softmax(form: Form) -> tuple[Form, Form]:
    """A form as E / S times a form, and the rest: these two."""
    times = {monomial_product(monomial, [(E, -1), (S, 1)]): c for monomial, c in form.items() if (E, 1) in monomial}
    return times, {monomial: c for monomial, c in form.items() if (E, 1) not in monomial}


def _without_log_sums(form: Form) -> tuple[Form, Form]:
    """A form as one without M + log S, and what that is multiplied by: these two."""
    rest, of_lse = dict(form), {}
    for monomial, c in form.items():
        others = monomial_product(monomial, [(LOG_S, -1)])
        of_maximum = monomial_product(others, [(M, 1)])
        if (LOG_S, 1) in monomial and rest.get(of_maximum) == c:
            of_lse[others] = c
            del rest[monomial], rest[of_maximum]
    return rest, of_lse
