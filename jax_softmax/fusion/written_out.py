"""Softmaxes that a program writes out, as exp(x - max(x)) / sum, become operators: before and after differentiation.

An array has a form here, a polynomial: in x, its rows' maximum M, E = exp(x - M), its rows' sum S, log S, and other
arrays. A sum over a row is one more factor, without what all of its elements share; that of E is S. Whatever the order
of the program's equations is, E / S is softmax then, and x - M - log S is log_softmax. E t / S - E sum(E t) / S² and
t - E sum(t) / S are their linear maps. The derivative of the maximum cancels out. What remains is softmax times numbers
of rows plus other arrays: the gradient of a loss, where these are at labels.

M and S are then the operator's. If something else needs E, the program stays as it was.
"""

import functools
import heapq
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jax_softmax.fusion import at_labels, divided_later, expressions, places, splicing
from jax_softmax.fusion.expressions import is_variable
from jax_softmax.fusion.graph import Graph, InCirclesError, result_of
from jax_softmax.fusion.groups import has_kernels
from jax_softmax.fusion.places import factors_of, key_of
from jax_softmax.primitives import labels, reference
from jax_softmax.primitives.operators import Coefficients, bind

X, M, E, S, LOG_S = "x", "M", "E", "S", "log S"
_FOLLOWED = ("add", "add_any", "sub", "mul", "div", "neg", "square", "integer_pow", "exp", "log", "reduce_sum")
_FOLLOWED += ("convert_element_type", "select_n", "eq", "abs", "is_finite", *expressions.VIEWS, *expressions.SAME)
_ALIKE = ("neg", *expressions.VIEWS, *expressions.SAME)  # arrays of other values are followed as far as these
_MOST_TERMS = 24


class Array(NamedTuple):
    """A variable that has no other form."""

    variable: object
    dims: tuple | None  # of x, which its own ones are; None if they are not x's in order
    place: tuple


class Sum(NamedTuple):
    """The sum over a row of a product."""

    product: frozenset


# A form is a dictionary: by products, which are sets of factors with their powers, their coefficients.
_ONE: frozenset = frozenset()


def _of(factor, power=1):
    return {frozenset([(factor, power)]): 1.0}


def _plus(a, b, times=1.0):
    found = dict(a)
    for product, c in b.items():
        total = found.pop(product, 0.0) + times * c
        if not abs(total) <= 1e-6 * abs(c):
            found[product] = total
    return found


def _product(*products):
    powers: dict = {}
    for factor, power in (pair for product in products for pair in product):
        powers[factor] = powers.get(factor, 0) + power
    return frozenset((factor, power) for factor, power in powers.items() if power)


def _times(a, b):
    if len(a) * len(b) > _MOST_TERMS:
        return None
    found: dict = {}
    for p, c in a.items():
        for q, d in b.items():
            found = _plus(found, {_product(p, q): c * d})
    return found


def _to_the(a, power):
    if len(a) == 1 and abs(power) <= 4:
        ((product, c),) = a.items()
        return {_product([(factor, n * power) for factor, n in product]): c**power} if c else None
    return _times(a, a) if power == 2 else None


def _is_widened(maker):
    """Whether it gives a number more bits."""
    (a, *_), v = maker.inputs, maker.outputs[0]
    return maker.name == "convert_element_type" and _is_float(a) and a.aval.dtype.itemsize <= v.aval.dtype.itemsize


def _is_float(a):
    return jnp.issubdtype(a.aval.dtype, jnp.floating)


_SHIFTED = _plus(_of(X), _of(M), -1.0)
_OPERATORS = {
    "softmax": _times(_of(E), _of(S, -1)),
    "log_softmax": _plus(_SHIFTED, _of(LOG_S), -1.0),
}


def applied(graph: Graph, without=()) -> tuple[Graph, list]:
    """The graph with operators, and the variables that these are of: none of those that it is to be `without`."""
    found = []
    for equation in graph.equations:
        if equation.name != "reduce_max" and not splicing.is_plain(equation, "logsumexp"):
            continue
        x, axes = equation.inputs[0], tuple(equation.params["axes"])
        if equation not in graph.position or x in without or len(axes) != 1 or not is_variable(x) or not has_kernels(x):
            continue
        new = Rows(graph, equation, axes).replaced() if x.aval.shape[axes[0]] > 1 else None
        if new is not None:
            graph = new
            found.append(x)
    return graph, found


class Rows:
    """The rows of an array, and what a program makes of their maxima."""

    def __init__(self, graph, equation, axes):
        self.graph, self.equation, self.axes = graph, equation, axes
        self.x, self.shape = equation.inputs[0], equation.inputs[0].aval.shape
        self.place = places.whole(self.shape)
        self.along = self.place[axes[0]]
        self.root = self._root(self.x)
        self.has_operator = equation.name == "logsumexp"
        self.rows = equation.outputs if self.has_operator else splicing.row_variables(equation)
        self.made: set = set(equation.outputs)  # the maxima, and what is made of them
        self.forms: dict = {}  # by variable and place
        self.operators: dict = {}  # the variables that are softmax or log_softmax, by which it is
        self.named: set = set()  # what is not made of others any more: these, and results of softmax's linear map
        self.products: dict = {}  # and the sums, of `divided_later.Quotients`
        self.sums_of_products: dict = {}
        self.numbers = {factor: k for k, factor in enumerate((X, M, E, S, LOG_S))}  # of factors, in their order

    def _root(self, a):
        """What a value is, before it was copied or had more bits."""
        while is_variable(a) and (maker := self.graph.maker.get(a)) is not None:
            if not _is_widened(maker) and maker.name not in expressions.SAME:
                break
            (a,) = maker.inputs
        return a

    # ---- Forms

    def _form(self, a, place):
        if not is_variable(a):
            return {_ONE: float(a.val)} if a.val else {}  # a number
        key = a, key_of(place)
        if key not in self.forms:
            form = yield self._found(a, place)
            if form is None or len(form) > _MOST_TERMS or not all(map(math.isfinite, form.values())):
                form = _of(self._array(a, place))
            self.forms[key] = form
        return self.forms[key]

    def _array(self, a, place):
        factors = factors_of(place)
        dims = [d for d, dim in enumerate(self.place) if not set(factors_of([dim])).isdisjoint(factors)]
        is_in_order = factors == factors_of([self.place[d] for d in dims])
        found = Array(a, tuple(dims) if is_in_order else None, key_of(place))
        self.numbers.setdefault(found, len(self.numbers))
        return found

    def _found(self, a, place):
        """The form of a variable, or None where it has no other than its name."""
        maker = self.graph.maker.get(a)
        if self._root(a) is self.root and key_of(place) == key_of(self.place):
            return _of(X)
        if a in self.equation.outputs and factors_of(place) == self._factors_of_rows():
            return _of((M, S)[self.equation.outputs.index(a)])
        if a in self.products and key_of(place) == key_of(self.products[a][1]):
            return _times(_of(S, -1), _of(self._array(self.products[a][0], place)))
        if a in self.sums_of_products and key_of(place) == key_of(self.sums_of_products[a][0]):
            _, form, (product, its_place) = self.sums_of_products[a]
            return _times(form, self._summed(_times(_of(E), _of(self._array(product, its_place)))))
        if a in self.named or maker is None or maker.name not in _FOLLOWED:
            return None
        if a not in self.made and self._is_along(place) and not (maker.name in _ALIKE or _is_widened(maker)):
            return None
        if maker.name == "reduce_sum":
            return (yield self._sum(maker, place))
        inputs = places.inputs_of(maker, place)
        if inputs is None:
            return None
        of = []
        for operand, its_place in zip(maker.inputs, inputs, strict=True):
            of.append((yield self._form(operand, its_place)))
        if maker.name in expressions.VIEWS or maker.name in expressions.SAME:
            return of[0]
        found = self._of_operation(maker, of)
        return self._in_most_rows(maker, of) if found is None and self.has_operator else found

    def _is_along(self, place):
        """Whether a value at a place is not the same in all columns."""
        return not set(factors_of([self.along])).isdisjoint(factors_of(place))

    def _factors_of_rows(self):
        return factors_of([dim for d, dim in enumerate(self.place) if d not in self.axes])

    def _of_operation(self, maker, of):
        name = maker.name
        if name in ("add", "add_any"):
            return _plus(*of)
        if name == "sub":
            return _plus(*of, -1.0)
        if name == "neg":
            return _plus({}, of[0], -1.0)
        if name == "mul":
            return _times(*of)
        if name == "div":
            inverse = _to_the(of[1], -1)
            return None if inverse is None else _times(of[0], inverse)
        if name in ("square", "integer_pow"):
            return _to_the(of[0], maker.params.get("y", 2))
        if name == "convert_element_type" and _is_float(maker.inputs[0]) and _is_float(maker.outputs[0]):
            return of[0]
        if name == "exp" and of[0] == _SHIFTED:
            return _of(E)
        return _of(LOG_S) if name == "log" and of[0] == _of(S) else None

    def _in_most_rows(self, maker, of):
        """What the logarithm of the operator's sum, and its derivative, are in rows whose maximum is finite."""
        number = {frozenset(): 0.0} | of[-1] if maker.name == "eq" else {}
        if maker.name == "eq" and of[0] == _of(S) and set(number) == {_ONE} and number[_ONE] in (0, math.inf):
            return {}
        if maker.name == "is_finite" and of[0] == _of(M):
            return {_ONE: 1.0}
        if maker.name == "select_n" and len(of) == 3 and of[0] in ({}, {_ONE: 1.0}):
            return of[1 + len(of[0])]
        is_kept = maker.name == "abs" and of[0] == _of(S)
        is_kept |= maker.name == "convert_element_type" and not of[0]  # False
        return of[0] if is_kept else None

    def _sum(self, maker, place):
        """Of a sum over a row; axes of extent 1 may be summed as well."""
        (a,), (axis,) = maker.inputs, self.axes
        over = [d for d in maker.params["axes"] if a.aval.shape[d] > 1]
        rest = iter(place)
        if len(over) > 1 or any(a.aval.shape[d] != self.shape[axis] for d in over):
            return None
        if over and self._is_along(place):
            return None
        summed = maker.params["axes"]
        its_place = [
            next(rest) if d not in summed else self.along if d in over else [] for d in range(len(a.aval.shape))
        ]
        form = yield self._form(a, its_place)
        return self._summed(form) if over else form

    def _summed(self, form):
        found: dict = {}
        for product, c in form.items():
            of_rows, of_elements = self._split(product)
            if len(of_elements) == 1 and self._adds_up_to_0(*of_elements):
                continue
            if of_elements == frozenset([(E, 1)]):
                of_rows = _product(of_rows, [(S, 1)])
            elif of_elements:
                self.numbers.setdefault(Sum(of_elements), len(self.numbers))
                of_rows = _product(of_rows, [(Sum(of_elements), 1)])
            else:
                c *= self.shape[self.axes[0]]
            found = _plus(found, {of_rows: c})
        return found

    def _adds_up_to_0(self, pair):
        factor, power = pair
        is_named = isinstance(factor, Array) and factor.variable in self.named
        return is_named and power == 1 and factor.variable not in self.operators

    def _split(self, product):
        """The factors that all elements of a row share, and the others."""
        of_rows = frozenset(pair for pair in product if self._is_of_rows(pair[0]))
        return of_rows, product - of_rows

    def _is_of_rows(self, factor):
        if isinstance(factor, Array):
            return factor.dims is not None and self.axes[0] not in factor.dims
        return factor not in (X, E)

    # ---- What becomes of the program

    def replaced(self) -> Graph | None:
        """The graph with operators; None if they would not make all that is needed."""
        graph, replacements, exponentials, sums = self.graph, {}, [], []
        pending = sorted({graph.position[r] for v in self.equation.outputs for r in graph.readers.get(v, ())})
        seen = set(pending)
        while pending:
            equation = graph.equations[heapq.heappop(pending)]
            if equation.name not in _FOLLOWED or len(equation.outputs) != 1:
                continue
            (v,) = equation.outputs
            self.made.add(v)
            new = None
            if v.aval.shape == self.shape and v.aval.dtype.name in expressions.WRITABLE:
                form = result_of(self._form(v, self.place))
                if form == _of(E) and equation.name == "exp" and not self.has_operator:
                    exponentials.append(equation)
                    replacements |= self._divided_later(equation)
                op = next((op for op, its_form in _OPERATORS.items() if form == its_form), None)
                op = None if self.has_operator and op == "softmax" else op  # logsumexp's own derivative has one
                new = self._operator(op, equation) if op is not None else self._gradient(form, equation)
            elif equation.name == "reduce_sum" and self._is_total(v):
                sums.append(equation)
            if new is not None:
                replacements[equation] = new
            for reader in () if self.operators.get(v) == "log_softmax" else graph.readers.get(v, ()):
                if graph.position[reader] not in seen:
                    seen.add(graph.position[reader])
                    heapq.heappush(pending, graph.position[reader])
        if not self.has_operator and (sums or replacements):
            replacements |= self._of_rows(sums)
        try:
            new = graph.with_replaced(replacements) if replacements else None
        except InCirclesError:
            return None
        return None if new is None or any(e in new.position for e in exponentials) else new

    def _divided_later(self, equation):
        (e,) = equation.outputs
        softmax = type(e)(e.aval)

        replacements, new, self.products, self.sums_of_products = divided_later.found(self, e, softmax)
        if new:
            made = self._made(
                lambda given: self._bound("softmax", given, e.aval.dtype), [], equation, outputs=[softmax]
            )
            replacements[equation] = [equation, *made, *new]
            self.operators[softmax] = "softmax"
            self.named.add(softmax)
        return replacements

    def power_of_sums(self, a, place):
        """1 of S, -1 of 1 / S."""
        form = result_of(self._form(a, place))
        return next((n for n in (1, -1) if form == _of(S, n)), None)

    def ratio(self, a, others):
        """The number of rows that a value is a multiple of others' product by, or None. Each has a place with it."""
        form, *forms = (result_of(self._form(*one)) for one in (a, *others))
        form = functools.reduce(lambda a, b: a and b and _times(a, b), (_to_the(other, -1) for other in forms), form)
        return form if form and not any(self._split(product)[1] for product in form) else None

    def _is_total(self, v):
        rows = [dim for d, dim in enumerate(self.place) if d not in self.axes]
        is_one = not self.has_operator and v.aval.shape == tuple(
            n for d, n in enumerate(self.shape) if d not in self.axes
        )
        return is_one and result_of(self._form(v, rows)) == _of(S)

    def _of_rows(self, sums):
        """The maxima and the sums, where the program has them, of the operator's. They are NaN where it has NaN."""

        def largest(largest, total):
            return jnp.where(jnp.isnan(total), total, largest)

        def total(largest, total):
            return jnp.where(jnp.isinf(largest), jnp.nan, total)

        found = {self.equation: splicing.rows_of(self.equation, self.rows)}
        for equation, function in ((self.equation, largest), *((equation, total) for equation in sums)):
            (v,) = equation.outputs

            def made(*rows, v=v, function=function):
                return jnp.reshape(function(*rows), v.aval.shape).astype(v.aval.dtype)

            found[equation] = found.get(equation, []) + splicing.spliced(made, self.rows, [v], equation)
        return found

    def _operator(self, op, equation):
        (v,) = equation.outputs
        self.operators[v] = op
        self._name(v)
        return self._made(lambda given: self._bound(op, given, v.aval.dtype), [], equation)

    def _name(self, v):
        self.named.add(v)
        self.forms[v, key_of(self.place)] = _of(self._array(v, self.place))

    def _bound(self, op, given, dtype):
        """softmax or log_softmax, which the program may have."""
        v = next((v for v, its_op in self.operators.items() if its_op == op and v in given), None)
        return bind(op, given[X], where=None, axes=self.axes, dtype=dtype) if v is None else given[v]

    def _made(self, function, forms, equation, others=(), outputs=None):
        """The equations of a function, whose argument has arrays by factors, and others by variables."""
        arrays, pending = {}, [product for form in forms for product in form]
        while pending:
            for factor, _ in pending.pop():
                if isinstance(factor, Array):
                    arrays[factor] = factor.variable
                elif isinstance(factor, Sum):
                    pending.append(factor.product)
        if any(array.dims is None for array in arrays):
            return None
        arrays = {array: arrays[array] for array in sorted(arrays, key=self.numbers.get)}
        names = [X, M, S, *arrays, *others]

        def made(*given):
            given = dict(zip(names, given, strict=True))
            given[S] = given[S] if self.has_operator else jnp.where(jnp.isinf(given[M]), jnp.nan, given[S])
            for array, variable in arrays.items():
                shape = [n if d in array.dims else 1 for d, n in enumerate(self.shape)]
                given[array] = jnp.reshape(given[array], shape if variable.aval.shape != self.shape else self.shape)
            return function(given).astype(outputs[0].aval.dtype)

        outputs = equation.outputs if outputs is None else outputs
        return splicing.spliced(made, [self.x, *self.rows, *arrays.values(), *others], outputs, equation)

    def _value(self, form, given):
        """What a form is of these arrays."""
        result = None
        for product, c in form.items():
            of_rows, of_elements = self._split(product)
            term = None if c == 1 and product else jnp.float32(c)
            for pairs, shape in ((of_rows, self._shape_of_rows()), (of_elements, self.shape)):
                for factor, power in sorted(pairs, key=lambda pair: self.numbers[pair[0]]):
                    value = self._value_of(factor, given)
                    value = value if power == 1 else jax.lax.integer_pow(reference.widened(value), power)
                    term = value if term is None else reference.widened(term) * reference.widened(value)
                term = term if term is None or not pairs else jnp.broadcast_to(term, shape)
            result = term if result is None else reference.widened(result) + reference.widened(term)
        return jnp.zeros(self._shape_of_rows(), jnp.float32) if result is None else result

    def _value_of(self, factor, given):
        if factor == E:
            return jnp.exp(reference.widened(given[X]) - given[M])
        if factor == LOG_S:
            return jnp.log(given[S])
        if isinstance(factor, Sum):
            return jnp.sum(reference.widened(self._value({factor.product: 1.0}, given)), self.axes, keepdims=True)
        return given[factor]

    def _shape_of_rows(self):
        return tuple(1 if d in self.axes else n for d, n in enumerate(self.shape))

    def _gradient(self, form, equation):
        """What makes an array of the linear maps and of softmax, or None where these do not."""
        if equation.name in ("add", "add_any") and len(form) == 1 and all(map(self._adds_up_to_0, next(iter(form)))):
            return self._made(
                lambda given: self._value(form, given), [form], equation
            )  # without the maximum's derivative
        has_exp = any((E, 1) in product for product in form)
        form = form if has_exp else self._by_exponentials(form)
        powers = [dict(product).get(E, 0) for product in form]
        if 1 not in powers or not {0, 1}.issuperset(powers):
            return None
        rest, of_softmax, of_logarithms = dict(form), {}, {}
        for product, c in form.items():
            of_rows, of_elements = self._split(product)
            others = of_elements - {(E, 1)}
            if (of_elements and not others) or not (summed := self._summed({of_elements: c})):
                continue
            ((of_sum, n),) = summed.items()
            less = _product(of_rows, of_sum, [(S, -1), (E, 1)])
            if abs(rest.get(less, 0.0) + n) > 1e-5 * abs(n):
                continue
            del rest[product], rest[less]
            if (E, 1) in product:
                of_softmax = _plus(of_softmax, {_product(of_rows, others, [(S, 1)]): c})
            else:
                of_logarithms = _plus(of_logarithms, {product: c})
        times = {_product(product, [(E, -1), (S, 1)]): c for product, c in rest.items() if (E, 1) in product}
        plus = {product: c for product, c in rest.items() if (E, 1) not in product}
        if any(factor == S for product in times for factor, _ in product):
            return None
        if not of_softmax and (loss := self._gradient_of_loss(times, plus, of_logarithms, equation)) is not None:
            return loss
        if (self.has_operator or not has_exp) and not of_softmax and not of_logarithms:
            return None
        if not of_logarithms and not rest:
            self._name(equation.outputs[0])
        axes, dtype = self.axes, equation.outputs[0].aval.dtype
        by_rows = not any(self._split(product)[1] for product in times) and not plus

        def gradient(given):
            terms = []
            if of_softmax:
                p, t = self._bound("softmax", given, dtype), self._value(of_softmax, given)
                t = jnp.broadcast_to(t, self.shape)
                terms.append(bind("softmax_linear", p, t, where=None, axes=axes, dtype=dtype))
            if of_logarithms:
                y, t = self._bound("log_softmax", given, "float32"), self._value(of_logarithms, given)
                t = jnp.broadcast_to(t, self.shape)
                terms.append(bind("log_softmax_vjp", y, t, where=None, axes=axes, dtype=dtype))
            if times and by_rows:
                terms.append(self._value(_times(_OPERATORS["softmax"], times), given))
            elif times:
                terms.append(reference.widened(self._bound("softmax", given, dtype)) * self._value(times, given))
            return functools.reduce(jnp.add, terms + ([self._value(plus, given)] if plus else []))

        return self._made(gradient, [of_softmax, of_logarithms, times, plus], equation, list(self.operators))

    def _by_exponentials(self, form):
        """A form in which E / S stands for the program's softmax."""
        found: dict = {}
        for product, c in form.items():
            new: dict = {_ONE: c}
            for factor, power in product:
                factors = _of(factor, power)
                if isinstance(factor, Array) and self.operators.get(factor.variable) == "softmax":
                    factors = _to_the(_OPERATORS["softmax"], power)
                elif isinstance(factor, Sum) and power == 1:
                    factors = self._summed(self._by_exponentials({factor.product: 1.0}))
                new = {} if factors is None else _times(new, factors)
            found = _plus(found, new)
        return found

    def _gradient_of_loss(self, times, plus, of_logarithms, equation):
        """The gradient of a cross entropy of labels: softmax times numbers of rows, and arrays that are at labels."""
        if any(self._split(product)[1] for product in times):
            return None
        at, array, parts = None, None, []  # numbers of rows, whether they multiply the array, and whether less its sum
        for form, is_map in ((plus, False), (of_logarithms, True)):
            for product, c in form.items():
                of_rows, of_elements = self._split(product)
                if of_elements and array is None:
                    array = of_elements
                    ((factor, power),) = of_elements if len(of_elements) == 1 else [(X, 1)]
                    if not isinstance(factor, Array) or power != 1 or factor.variable.aval.shape != self.shape:
                        return None
                    at = at_labels.at_label(self.graph, factor.variable, self.axes[0])
                if of_elements and (at is None or of_elements != array):
                    return None
                parts.append(({of_rows: c}, bool(of_elements), is_map))
        if at is None:
            return None
        of_lse, rest = {}, dict(times)
        for product, c in times.items():
            others = _product(product, [(LOG_S, -1)])
            if (LOG_S, 1) in product and rest.get(_product(others, [(M, 1)])) == c:
                of_lse[others] = c
                del rest[product], rest[_product(others, [(M, 1)])]
        axes, dtype, n = self.axes, equation.outputs[0].aval.dtype, self.shape[self.axes[0]]

        def gradient(given):
            label, element, offset = at.function(*(given[v] for v in at.variables))
            offset = 0.0 if offset is None else offset
            exists = labels.exists(label, self.shape, axes)
            at_label = to_all = total = jnp.zeros(self._shape_of_rows(), jnp.float32)
            for of_rows, has_array, is_map in parts:
                by = reference.widened(self._value(of_rows, given))
                here = jnp.where(exists, by * (element - offset), 0) if has_array else jnp.zeros_like(by)
                everywhere = by * offset if has_array else by
                at_label, to_all = at_label + here, to_all + everywhere
                total += here + n * everywhere if is_map else 0
            factor = reference.widened(self._value(rest, given)) - total
            rows = (factor, reference.widened(self._value(of_lse, given)), to_all, at_label)
            coefficients = Coefficients(*(jnp.broadcast_to(a, self._shape_of_rows()) for a in rows))
            return bind("cross_entropy_gradient", given[X], *coefficients, label, where=None, axes=axes, dtype=dtype)[0]

        forms = [rest, of_lse, *(part for part, _, _ in parts)]
        return self._made(gradient, forms, equation, at.variables)
