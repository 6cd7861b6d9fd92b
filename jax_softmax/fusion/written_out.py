"""Softmaxes that a program writes out, as exp(x - max(x)) / sum, become operators: before and after differentiation.

In the words of `forms.py`, E / S is softmax and x - M - log S log_softmax, in whatever order the program computes them.
Their linear maps are E t / S - E sum(E t) / S² and t - E sum(t) / S; the maximum's derivative cancels out. What remains
of a gradient is softmax times numbers of rows, plus other arrays: the gradient of a loss, if these are at labels.

M and S are then the operator's. If something else needs E, the program stays as it was.
"""

import functools
import heapq

import jax.numpy as jnp

from jax_softmax.fusion import at_labels, divided_later, expressions, splicing
from jax_softmax.fusion.forms import (
    LOG_S,
    LOG_SOFTMAX,
    ONE,
    SOFTMAX,
    Array,
    E,
    Forms,
    M,
    S,
    Sum,
    X,
    added,
    form_of,
    is_followed,
    monomial_product,
    multiplied,
    power_of,
)
from jax_softmax.fusion.graph import CycleError, Graph, each_once, is_variable
from jax_softmax.fusion.groups import why_no_kernels
from jax_softmax.primitives import labels, reference
from jax_softmax.primitives.operators import Coefficients, bind

_COMPARE = (*expressions.COMPARISONS, "sign", "floor", "ceil", "round", "max", "min", "clamp")
_MOST_FOLLOWED = 100  # equations of one softmax, so that the time for a program grows linearly with it


def with_operators(graph: Graph, without=()) -> tuple[Graph, list]:
    """The graph with operators, and the arrays of whose rows they are; arrays `without` operators stay so."""
    found = []
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
            found.append(x)
        new = _WrittenOut(graph, equation).graph_with_operators()
        if new is not None:
            graph = new
            found.append(x)
    return graph, found


def _with_operator_of_rows(graph, equation):
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

    def following(e):
        return [r for r in graph.readers_of(e) if r.name in ("sub", "exp", "reduce_sum") or splicing.is_alike(r)]

    made = list(each_once([guard], lambda e: following(e) if e.name != "reduce_sum" else []))
    forms.made.update(v for e in (*maxima, *made) for v in e.outputs)
    place = forms.place_of_rows
    sums = [e for e in made if e.name == "reduce_sum" and len(e.outputs[0].aval.shape) == len(place)]
    sums = [e for e in sums if forms.form(e.outputs[0], place) == form_of(S)]
    copies = list(each_once(sums, lambda e: [r for r in graph.readers_of(e) if _is_copy_of_sum(r)]))
    of_sums = [r for e in copies for r in graph.readers_of(e) if not _is_copy_of_sum(r)]
    if "log" not in {r.name for r in of_sums} or not all(_is_of_logarithm(graph, r, forms.shape) for r in of_sums):
        return graph, None
    rows = splicing.row_variables(equation)
    replacements = {e: splicing.spliced(_as_program_has(e, lambda _, total: total), rows, e.outputs, e) for e in sums}
    maximum = _as_program_has(equation, lambda largest, total: jnp.where(total == total, largest, total))
    new = splicing.spliced(maximum, rows, equation.outputs, equation)
    replacements[equation] = [*splicing.rows_of(equation, rows), *new]
    graph = graph.with_replaced(replacements)
    return graph, graph.maker[rows[0]]


def _guard_of(graph, maxima):
    """The equation where(isfinite(M), M, 0) if nothing else reads M, which these equations make and copy."""
    readers = dict.fromkeys(r for e in maxima for r in graph.readers_of(e) if r not in maxima)
    (test, guard) = sorted(readers, key=lambda e: e.name) if len(readers) == 2 else (None, None)
    if test is None or (test.name, guard.name) != ("is_finite", "select_n"):
        return None
    if graph.readers_of(test) != [guard] or guard.inputs[0] is not test.outputs[0] or len(guard.inputs) != 3:
        return None
    is_result = any(v in graph.results for e in (*maxima, test) for v in e.outputs)
    return guard if _is_zero(graph, guard.inputs[1]) and not is_result else None


def _is_zero(graph, a):
    """Whether a value is the number 0, or is broadcast of it."""
    while (maker := graph.maker_of(a)) is not None and splicing.is_alike(maker):
        a = maker.inputs[0]
    return not is_variable(a) and a.val == 0


def _is_copy_of_sum(equation):
    return splicing.is_alike(equation) or equation.name == "abs"


def _is_of_logarithm(graph, equation, shape):
    """Whether what reads S is its logarithm, a division of rows' numbers by it, or the test in abs's derivative, which
    chooses one number twice: where(S >= 0, t, 0) and where(S >= 0, 0, t)."""
    if equation.name != "ge":
        return equation.name == "log" or (equation.name == "div" and equation.outputs[0].aval.shape != shape)
    chosen = [e.inputs[1:] for e in graph.readers_of(equation)]
    is_pair = {e.name for e in graph.readers_of(equation)} == {"select_n"} and len(chosen) == 2
    return is_pair and chosen[0] == chosen[1][::-1] and graph.results.isdisjoint(equation.outputs)


def _compares_maxima(graph, maxima, shape):
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
                made = reader.outputs[0], is_maximum and not is_difference
                pending += [made] if made not in pending else []
    return False


def _as_program_has(equation, of):
    """A function of the operator's M and S, with the shape and dtype of the equation's result."""
    (v,) = equation.outputs
    return lambda *rows: jnp.reshape(of(*rows), v.aval.shape).astype(v.aval.dtype)


class _WrittenOut:
    """What a program makes of an array x and its rows' maxima, and the operators instead of it."""

    def __init__(self, graph, equation):
        self.graph, self.equation = graph, equation
        self.forms = Forms(graph, equation)
        self.x, self.axes, self.shape = self.forms.x, self.forms.axes, self.forms.shape
        self.has_operator = self.forms.has_operator
        self.rows = equation.outputs if self.has_operator else splicing.row_variables(equation)
        self.replacements: dict = {}
        self.exponentials: list = []  # the equations that make E
        self.sums: list = []  # and S

    def graph_with_operators(self) -> Graph | None:
        """The graph with operators; None if they would not make all that is needed."""
        position, readers = self.graph.position, self.graph.readers
        pending = sorted({position[r] for v in self.equation.outputs for r in readers.get(v, ())})
        seen = set(pending)
        while pending:
            equation = self.graph.equations[heapq.heappop(pending)]
            if not is_followed(equation) or len(self.forms.made) > _MOST_FOLLOWED:
                continue
            (v,) = equation.outputs
            self.forms.made.add(v)
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

    def _follow(self, v, equation):
        """Notes what replaces the equation that makes v, if anything does."""
        new = None
        if v.aval.shape == self.shape and v.aval.dtype.name in expressions.WRITABLE:
            form = self.forms.form(v, self.forms.place)
            if form == form_of(E) and equation.name == "exp" and not self.has_operator:
                self.exponentials.append(equation)
                self._replace_products(v, equation)
            elif form == LOG_SOFTMAX or (form == SOFTMAX and not self.has_operator):  # logsumexp's derivative has it
                new = self._operator("log_softmax" if form == LOG_SOFTMAX else "softmax", v, equation)
            else:
                new = self._gradient(form, equation)
        elif equation.name == "reduce_sum" and not self.has_operator and v.aval.dtype.name in expressions.WRITABLE:
            place = self.forms.place_of_rows
            if len(v.aval.shape) == len(place) and self.forms.form(v, place) == form_of(S):
                self.sums.append(equation)
        if new is not None:
            self.replacements[equation] = new

    def _replace_rows(self):
        """The program's maxima and sums are made of the operator's. They are NaN where the program's are."""

        def program_maximum(largest, total):
            return jnp.where(jnp.isnan(total), total, largest)

        def program_sum(largest, total):
            return jnp.where(jnp.isinf(largest), jnp.nan, total)

        self.replacements[self.equation] = splicing.rows_of(self.equation, self.rows)
        for equation, of in ((self.equation, program_maximum), *((equation, program_sum) for equation in self.sums)):
            new = splicing.spliced(_as_program_has(equation, of), self.rows, equation.outputs, equation)
            self.replacements[equation] = [*self.replacements.get(equation, []), *new]

    def _replace_products(self, e, equation):
        """Products of E that are divided by S."""
        softmax = type(e)(e.aval)
        replacements, new, self.forms.products, self.forms.sums = divided_later.quotients_of(self.forms, e, softmax)
        if new:
            self.replacements |= replacements
            self.replacements[equation] = [equation, *self._operator("softmax", softmax, equation), *new]

    def _operator(self, op, v, equation):
        new = self._spliced(lambda given: self._operator_value(op, given, v.aval.dtype), [], equation, [v])
        self.forms.operators[v] = op
        self.forms.add_symbol(v)
        return new

    def _operator_value(self, op, given, dtype):
        """softmax or log_softmax of x: the program's own, if it is given."""
        v = next((v for v, its_op in self.forms.operators.items() if its_op == op and v in given), None)
        return bind(op, given[X], where=None, axes=self.axes, dtype=dtype) if v is None else given[v]

    def _spliced(self, f, forms, equation, outputs, others=()):
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
        in_order = sorted(arrays, key=self.forms.numbers.get)
        names = [X, M, S, *in_order, *others]

        def from_arrays(*given):
            given = dict(zip(names, given, strict=True))
            if not self.has_operator:
                given[S] = jnp.where(jnp.isinf(given[M]), jnp.nan, given[S])
            for array in in_order:
                if array.variable.aval.shape != self.shape:
                    shape = [n if d in array.dims else 1 for d, n in enumerate(self.shape)]
                    given[array] = jnp.reshape(given[array], shape)
            return f(given).astype(outputs[0].aval.dtype)

        inputs = [self.x, *self.rows, *(array.variable for array in in_order), *others]
        return splicing.spliced(from_arrays, inputs, outputs, equation)

    # ---- Cotangents of x

    def _gradient(self, form, equation):
        """The equations that make an array of this form by linear maps and softmax; None if they do not."""
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
        of_softmax, of_logarithms, rest = self._maps(form)
        times = {monomial_product(monomial, [(E, -1), (S, 1)]): c for monomial, c in rest.items() if (E, 1) in monomial}
        plus = {monomial: c for monomial, c in rest.items() if (E, 1) not in monomial}
        if any(symbol == S for monomial in times for symbol, _ in monomial):
            return None
        by_rows = not any(self.forms.split(monomial)[1] for monomial in times)
        if not of_softmax and by_rows:
            loss = self._gradient_of_loss(times, plus, of_logarithms, equation)
            if loss is not None:
                return loss
        if (self.has_operator or not has_exp) and not of_softmax and not of_logarithms:
            return None
        if not of_logarithms and not rest:
            self.forms.maps.add(equation.outputs[0])
            self.forms.add_symbol(equation.outputs[0])
        dtype = equation.outputs[0].aval.dtype

        def mapped(linear, y, t, given):
            t = jnp.broadcast_to(self.forms.value(t, given), self.shape)
            return bind(linear, y, t, where=None, axes=self.axes, dtype=dtype)

        def gradient(given):
            terms = []
            if of_softmax:
                terms.append(mapped("softmax_linear", self._operator_value("softmax", given, dtype), of_softmax, given))
            if of_logarithms:
                y = self._operator_value("log_softmax", given, "float32")
                terms.append(mapped("log_softmax_vjp", y, of_logarithms, given))
            if times and by_rows and not plus:
                terms.append(self.forms.value(multiplied(SOFTMAX, times), given))
            elif times:
                p = reference.widened(self._operator_value("softmax", given, dtype))
                terms.append(p * self.forms.value(times, given))
            if plus:
                terms.append(self.forms.value(plus, given))
            return functools.reduce(jnp.add, terms)

        forms = [of_softmax, of_logarithms, times, plus]
        return self._spliced(gradient, forms, equation, equation.outputs, list(self.forms.operators))

    def _by_exponentials(self, form):
        """A form with E / S instead of variables that are softmax; None if it is too long."""
        found: dict = {}
        for monomial, c in form.items():
            new: dict | None = {ONE: c}
            for symbol, power in monomial:
                factors: dict | None = form_of(symbol, power)
                if self.forms.is_in_place(symbol) and self.forms.operators.get(symbol.variable) == "softmax":
                    factors = power_of(SOFTMAX, power)
                elif isinstance(symbol, Sum) and power == 1:
                    inner = self._by_exponentials({symbol.monomial: 1.0})
                    factors = None if inner is None else self.forms.summed(inner)
                new = None if new is None or factors is None else multiplied(new, factors)
            if new is None:
                return None
            found = added(found, new)
        return found

    def _maps(self, form):
        """A form as softmax's linear map of a form, log_softmax's of another one, and the rest: these three."""
        of_softmax, of_logarithms, rest = {}, {}, dict(form)
        for monomial, c in form.items():
            of_rows, of_elements = self.forms.split(monomial)
            others = of_elements - {(E, 1)}
            summed = self.forms.summed({of_elements: c}) if others or not of_elements else {}
            for of_sum, n in summed.items():
                less = monomial_product(of_rows, of_sum, [(S, -1), (E, 1)])
                if abs(rest.get(less, 0.0) + n) > 1e-5 * abs(n):
                    continue
                del rest[monomial], rest[less]
                if (E, 1) in monomial:
                    of_softmax = added(of_softmax, {monomial_product(of_rows, others, [(S, 1)]): c})
                else:
                    of_logarithms = added(of_logarithms, {monomial: c})
        return of_softmax, of_logarithms, rest

    def _gradient_of_loss(self, times, plus, of_logarithms, equation):
        """The equations of `times` softmax, `plus` another form, and log_softmax's linear map of a third, if all arrays
        in these are one that is at labels: a cross entropy's gradient. None if not."""
        terms = [(monomial, c, form is of_logarithms) for form in (plus, of_logarithms) for monomial, c in form.items()]
        arrays = {of_elements for monomial, _, _ in terms if (of_elements := self.forms.split(monomial)[1])}
        at = self._at_label(*arrays) if len(arrays) == 1 else None
        if at is None:
            return None
        of_lse, rest = {}, dict(times)
        for monomial, c in times.items():
            others = monomial_product(monomial, [(LOG_S, -1)])
            if (LOG_S, 1) in monomial and rest.get(monomial_product(others, [(M, 1)])) == c:
                of_lse[others] = c
                del rest[monomial], rest[monomial_product(others, [(M, 1)])]
        n, rows = self.shape[self.axes[0]], self.forms.shape_of_rows

        def value(form, given):
            return jnp.broadcast_to(reference.widened(self.forms.value(form, given)), rows)

        def gradient(given):
            label, element, offset = at.make(*(given[v] for v in at.variables))
            offset = 0.0 if offset is None else offset
            exists = labels.has_label(label, self.shape, self.axes)
            at_label = to_all = jnp.zeros(rows, jnp.float32)
            factor = value(rest, given)
            for monomial, c, is_map in terms:
                of_rows, has_array = self.forms.split(monomial)
                by = value({of_rows: c}, given)
                here = jnp.where(exists, by * (element - offset), 0) if has_array else jnp.zeros_like(by)
                everywhere = by * offset if has_array else by
                at_label, to_all = at_label + here, to_all + everywhere
                factor = factor - (here + n * everywhere) if is_map else factor
            coefficients = Coefficients(factor, value(of_lse, given), to_all, at_label)
            dtype = equation.outputs[0].aval.dtype
            made = bind(
                "cross_entropy_gradient", given[X], *coefficients, label, where=None, axes=self.axes, dtype=dtype
            )
            return made[0]

        forms = [rest, of_lse, *({self.forms.split(monomial)[0]: c} for monomial, c, _ in terms)]
        return self._spliced(gradient, forms, equation, equation.outputs, at.variables)

    def _at_label(self, of_elements):
        ((symbol, power), *others) = of_elements
        if others or power != 1 or not self.forms.is_in_place(symbol) or symbol.variable.aval.shape != self.shape:
            return None
        return at_labels.at_label(self.graph, symbol.variable, self.axes[0])
