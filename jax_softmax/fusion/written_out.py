"""Softmaxes that a program writes out, as exp(x - max(x)) / sum, become operators: before and after differentiation.

Whatever the order of the program's equations is, E / S is softmax, and x - M - log S log_softmax, in the words of
`forms.py`. E t / S - E sum(E t) / S² and t - E sum(t) / S are their linear maps. The derivative of the maximum cancels
out. What remains is softmax times numbers of rows plus other arrays: the gradient of a loss, where these are at labels.

M and S are then the operator's. If something else needs E, the program stays as it was.
"""

import functools
import heapq

import jax.numpy as jnp

from jax_softmax.fusion import at_labels, divided_later, expressions, splicing
from jax_softmax.fusion.expressions import is_variable
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
    joined,
    multiplied,
    power_of,
)
from jax_softmax.fusion.graph import Graph, InCirclesError
from jax_softmax.fusion.groups import has_kernels
from jax_softmax.primitives import labels, reference
from jax_softmax.primitives.operators import Coefficients, bind

_COMPARE = (*expressions.COMPARISONS, "sign", "floor", "ceil", "round", "max", "min", "clamp")
_MOST_FOLLOWED = 100  # equations, so that a program's time grows as the program does


def applied(graph: Graph, without=()) -> tuple[Graph, list]:
    """The graph with operators, and the variables that these are of: none of those that it is to be `without`."""
    found = []
    for equation in graph.equations:
        if equation.name != "reduce_max" and not splicing.is_plain(equation, "logsumexp"):
            continue
        x, axes = equation.inputs[0], equation.params["axes"]
        if equation not in graph.position or x in without or len(axes) != 1 or not is_variable(x) or not has_kernels(x):
            continue
        new = _Rows(graph, equation).replaced() if x.aval.shape[axes[0]] > 1 else None
        if new is not None:
            graph = new
            found.append(x)
    return graph, found


class _Rows:
    """The operators of an array's rows, in the place of what a program writes out."""

    def __init__(self, graph, equation):
        self.graph, self.equation = graph, equation
        self.forms = Forms(graph, equation)
        self.x, self.axes, self.shape = self.forms.x, self.forms.axes, self.forms.shape
        self.has_operator = self.forms.has_operator
        self.rows = equation.outputs if self.has_operator else splicing.row_variables(equation)
        self.replacements: dict = {}
        self.exponentials: list = []  # the equations that make E
        self.sums: list = []  # and S

    def replaced(self) -> Graph | None:
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
            self._replace(v, equation)
            if self.forms.operators.get(v) == "log_softmax":
                continue
            for k in {position[r] for r in readers.get(v, ())} - seen:
                seen.add(k)
                heapq.heappush(pending, k)
        if not self.has_operator and (self.sums or self.replacements):
            self._replace_rows()
        try:
            new = self.graph.with_replaced(self.replacements) if self.replacements else None
        except InCirclesError:
            return None
        if new is None or any(e in new.position for e in self.exponentials) or self._compares_maxima(new):
            return None
        return new

    def _compares_maxima(self, graph):
        """Whether elements are compared with the maxima: a kernel's may have other bits than what XLA compares."""
        pending = [] if self.has_operator else list(self.equation.outputs)
        differences: list = []  # of elements and maxima
        for v in pending:
            for reader in graph.readers.get(v, ()):
                if reader.name in _COMPARE:
                    return True
                if splicing.is_alike(reader):
                    pending += [w for w in reader.outputs if w not in pending]
                elif reader.name == "sub" and reader.outputs[0].aval.shape == self.shape:
                    differences += reader.outputs
        for v in differences:
            for reader in graph.readers.get(v, ()):
                if reader.name in _COMPARE:
                    return True
                if splicing.is_alike(reader):
                    differences += [w for w in reader.outputs if w not in differences]
        return not graph.results.isdisjoint(pending)

    def _replace(self, v, equation):
        """What an equation is replaced by, if it is one that matters."""
        new = None
        if v.aval.shape == self.shape and v.aval.dtype.name in expressions.WRITABLE:
            form = self.forms.of(v, self.forms.place)
            if form == form_of(E) and equation.name == "exp" and not self.has_operator:
                self.exponentials.append(equation)
                self._replace_products(v, equation)
            elif form == LOG_SOFTMAX or (form == SOFTMAX and not self.has_operator):  # whose own derivative has one
                new = self._operator("log_softmax" if form == LOG_SOFTMAX else "softmax", v, equation)
            else:
                new = self._gradient(form, equation)
        elif equation.name == "reduce_sum" and not self.has_operator and v.aval.dtype.name in expressions.WRITABLE:
            place = self.forms.place_of_rows
            if len(v.aval.shape) == len(place) and self.forms.of(v, place) == form_of(S):
                self.sums.append(equation)
        if new is not None:
            self.replacements[equation] = new

    def _replace_rows(self):
        """The maxima and the sums, where the program has them, are the operator's. They are NaN where it has NaN."""

        def largest(largest, total):
            return jnp.where(jnp.isnan(total), total, largest)

        def total(largest, total):
            return jnp.where(jnp.isinf(largest), jnp.nan, total)

        self.replacements[self.equation] = splicing.rows_of(self.equation, self.rows)
        for equation, function in ((self.equation, largest), *((equation, total) for equation in self.sums)):
            (v,) = equation.outputs

            def made(*rows, v=v, function=function):
                return jnp.reshape(function(*rows), v.aval.shape).astype(v.aval.dtype)

            new = splicing.spliced(made, self.rows, [v], equation)
            self.replacements[equation] = [*self.replacements.get(equation, []), *new]

    def _replace_products(self, e, equation):
        """Products of E that are divided by S."""
        softmax = type(e)(e.aval)
        replacements, new, self.forms.products, self.forms.sums = divided_later.found(self.forms, e, softmax)
        if new:
            self.replacements |= replacements
            self.replacements[equation] = [equation, *self._operator("softmax", softmax, equation), *new]

    def _operator(self, op, v, equation):
        new = self._made(lambda given: self._bound(op, given, v.aval.dtype), [], equation, [v])
        self.forms.operators[v] = op
        self.forms.name(v)
        return new

    def _bound(self, op, given, dtype):
        """softmax or log_softmax, which the program may have."""
        v = next((v for v, its_op in self.forms.operators.items() if its_op == op and v in given), None)
        return bind(op, given[X], where=None, axes=self.axes, dtype=dtype) if v is None else given[v]

    def _made(self, function, forms, equation, outputs, others=()):
        """The equations of a function, whose argument has arrays by factors, and others by variables."""
        arrays, pending = set(), [product for form in forms for product in form]
        while pending:
            for factor, _ in pending.pop():
                if isinstance(factor, Array):
                    arrays.add(factor)
                elif isinstance(factor, Sum):
                    pending.append(factor.product)
        if any(array.dims is None for array in arrays):
            return None
        in_order = sorted(arrays, key=self.forms.numbers.get)
        names = [X, M, S, *in_order, *others]

        def made(*given):
            given = dict(zip(names, given, strict=True))
            if not self.has_operator:
                given[S] = jnp.where(jnp.isinf(given[M]), jnp.nan, given[S])
            for array in in_order:
                if array.variable.aval.shape != self.shape:
                    shape = [n if d in array.dims else 1 for d, n in enumerate(self.shape)]
                    given[array] = jnp.reshape(given[array], shape)
            return function(given).astype(outputs[0].aval.dtype)

        inputs = [self.x, *self.rows, *(array.variable for array in in_order), *others]
        return splicing.spliced(made, inputs, outputs, equation)

    # ---- Cotangents of x

    def _gradient(self, form, equation):
        """What makes an array of the linear maps and of softmax, or None where these do not."""
        (product, *others) = form or [ONE]
        is_sum = equation.name in ("add", "add_any")
        if is_sum and product and not others and all(map(self.forms.adds_up_to_0, product)):
            # Itself, without the maximum's derivative.
            return self._made(lambda given: self.forms.value(form, given), [form], equation, equation.outputs)
        has_exp = any((E, 1) in product for product in form)
        form = form if has_exp else self._by_exponentials(form) or {}
        powers = [dict(product).get(E, 0) for product in form]
        if 1 not in powers or not {0, 1}.issuperset(powers):
            return None
        of_softmax, of_logarithms, rest = self._maps(form)
        times = {joined(product, [(E, -1), (S, 1)]): c for product, c in rest.items() if (E, 1) in product}
        plus = {product: c for product, c in rest.items() if (E, 1) not in product}
        if any(factor == S for product in times for factor, _ in product):
            return None
        by_rows = not any(self.forms.split(product)[1] for product in times)
        if not of_softmax and by_rows:
            loss = self._gradient_of_loss(times, plus, of_logarithms, equation)
            if loss is not None:
                return loss
        if (self.has_operator or not has_exp) and not of_softmax and not of_logarithms:
            return None
        if not of_logarithms and not rest:
            self.forms.maps.add(equation.outputs[0])
            self.forms.name(equation.outputs[0])
        dtype = equation.outputs[0].aval.dtype

        def mapped(linear, y, t, given):
            t = jnp.broadcast_to(self.forms.value(t, given), self.shape)
            return bind(linear, y, t, where=None, axes=self.axes, dtype=dtype)

        def gradient(given):
            terms = []
            if of_softmax:
                terms.append(mapped("softmax_linear", self._bound("softmax", given, dtype), of_softmax, given))
            if of_logarithms:
                y = self._bound("log_softmax", given, "float32")
                terms.append(mapped("log_softmax_vjp", y, of_logarithms, given))
            if times and by_rows and not plus:
                terms.append(self.forms.value(multiplied(SOFTMAX, times), given))
            elif times:
                p = reference.widened(self._bound("softmax", given, dtype))
                terms.append(p * self.forms.value(times, given))
            if plus:
                terms.append(self.forms.value(plus, given))
            return functools.reduce(jnp.add, terms)

        forms = [of_softmax, of_logarithms, times, plus]
        return self._made(gradient, forms, equation, equation.outputs, list(self.forms.operators))

    def _by_exponentials(self, form):
        """A form in which E / S stands for the program's softmax; None if it is too long."""
        found: dict = {}
        for product, c in form.items():
            new: dict | None = {ONE: c}
            for factor, power in product:
                factors: dict | None = form_of(factor, power)
                if self.forms.is_in_place(factor) and self.forms.operators.get(factor.variable) == "softmax":
                    factors = power_of(SOFTMAX, power)
                elif isinstance(factor, Sum) and power == 1:
                    inner = self._by_exponentials({factor.product: 1.0})
                    factors = None if inner is None else self.forms.summed(inner)
                new = None if new is None or factors is None else multiplied(new, factors)
            if new is None:
                return None
            found = added(found, new)
        return found

    def _maps(self, form):
        """The forms of which softmax's and log_softmax's linear maps are, and what is left of a form besides."""
        of_softmax, of_logarithms, rest = {}, {}, dict(form)
        for product, c in form.items():
            of_rows, of_elements = self.forms.split(product)
            others = of_elements - {(E, 1)}
            summed = self.forms.summed({of_elements: c}) if others or not of_elements else {}
            for of_sum, n in summed.items():
                less = joined(of_rows, of_sum, [(S, -1), (E, 1)])
                if abs(rest.get(less, 0.0) + n) > 1e-5 * abs(n):
                    continue
                del rest[product], rest[less]
                if (E, 1) in product:
                    of_softmax = added(of_softmax, {joined(of_rows, others, [(S, 1)]): c})
                else:
                    of_logarithms = added(of_logarithms, {product: c})
        return of_softmax, of_logarithms, rest

    def _gradient_of_loss(self, times, plus, of_logarithms, equation):
        """The gradient of a cross entropy of labels: softmax times numbers of rows, and an array that is at labels."""
        terms = [(product, c, form is of_logarithms) for form in (plus, of_logarithms) for product, c in form.items()]
        arrays = {of_elements for product, _, _ in terms if (of_elements := self.forms.split(product)[1])}
        at = self._at_label(*arrays) if len(arrays) == 1 else None
        if at is None:
            return None
        of_lse, rest = {}, dict(times)
        for product, c in times.items():
            others = joined(product, [(LOG_S, -1)])
            if (LOG_S, 1) in product and rest.get(joined(others, [(M, 1)])) == c:
                of_lse[others] = c
                del rest[product], rest[joined(others, [(M, 1)])]
        n, rows = self.shape[self.axes[0]], self.forms.shape_of_rows

        def value(form, given):
            return jnp.broadcast_to(reference.widened(self.forms.value(form, given)), rows)

        def gradient(given):
            label, element, offset = at.function(*(given[v] for v in at.variables))
            offset = 0.0 if offset is None else offset
            exists = labels.has_label(label, self.shape, self.axes)
            at_label = to_all = jnp.zeros(rows, jnp.float32)
            factor = value(rest, given)
            for product, c, is_map in terms:
                of_rows, has_array = self.forms.split(product)
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

        forms = [rest, of_lse, *({self.forms.split(product)[0]: c} for product, c, _ in terms)]
        return self._made(gradient, forms, equation, equation.outputs, at.variables)

    def _at_label(self, of_elements):
        ((factor, power), *others) = of_elements
        if others or power != 1 or not self.forms.is_in_place(factor) or factor.variable.aval.shape != self.shape:
            return None
        return at_labels.at_label(self.graph, factor.variable, self.axes[0])
