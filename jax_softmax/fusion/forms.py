"""Forms: what arrays are, as polynomials, in terms of a softmax that a program writes out.

The symbols are x, its rows' maximum M, E = exp(x - M), its rows' sum S, log S, and other arrays. A sum over a row is
one more symbol, without the factors that all its elements share; that of E is S. So two ways to compute the same have
one form.

A form is a dictionary of monomials with their coefficients; a monomial is a set of symbols with their powers.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_softmax.fusion import expressions, places
from jax_softmax.fusion.graph import is_variable, trampolined
from jax_softmax.fusion.places import factors_of, place_key
from jax_softmax.primitives import reference

X, M, E, S, LOG_S = "x", "M", "E", "S", "log S"
_FOLLOWED = ("add", "add_any", "sub", "mul", "div", "neg", "square", "integer_pow", "exp", "log", "reduce_sum")
_FOLLOWED += ("convert_element_type", "select_n", "eq", "ge", "abs", "is_finite", *expressions.VIEWS, *expressions.SAME)
_ALIKE = ("neg", *expressions.VIEWS, *expressions.SAME)  # of arrays that are not made of the maxima, only these
_MOST_TERMS = 24


class Array(NamedTuple):
    """The symbol of a variable that has no other form."""

    variable: object
    dims: tuple | None  # x's dimensions that it has; None if it has them in another order
    place: tuple  # a key


class Sum(NamedTuple):
    """The symbol of a sum over a row, of a monomial."""

    monomial: frozenset


ONE: frozenset = frozenset()


def form_of(symbol, power=1):
    return {frozenset([(symbol, power)]): 1.0}


def added(a, b, times=1.0):
    found = dict(a)
    for monomial, c in b.items():
        total = found.pop(monomial, 0.0) + times * c
        if not abs(total) <= 1e-6 * abs(c):
            found[monomial] = total
    return found


def monomial_product(*monomials):
    powers: dict = {}
    for symbol, power in (pair for monomial in monomials for pair in monomial):
        powers[symbol] = powers.get(symbol, 0) + power
    return frozenset((symbol, power) for symbol, power in powers.items() if power)


def multiplied(a, b):
    if len(a) * len(b) > _MOST_TERMS:
        return None
    found: dict = {}
    for p, c in a.items():
        for q, d in b.items():
            found = added(found, {monomial_product(p, q): c * d})
    return found


def power_of(a, power):
    if len(a) == 1 and abs(power) <= 4:
        ((monomial, c),) = a.items()
        return {monomial_product([(symbol, n * power) for symbol, n in monomial]): c**power} if c else None
    return multiplied(a, a) if power == 2 else None


def is_followed(equation):
    """Whether an equation's result may have a form that is made of its operands' forms."""
    return equation.name in _FOLLOWED and len(equation.outputs) == 1


def is_widened(maker):
    """Whether it casts to a dtype of kernels that has no fewer bits."""
    if maker.name != "convert_element_type" or maker.outputs[0].aval.dtype.name not in expressions.WRITABLE:
        return False
    (a,), (v,) = maker.inputs, maker.outputs
    return is_float(a) and a.aval.dtype.itemsize <= v.aval.dtype.itemsize


def is_float(a):
    return jnp.issubdtype(a.aval.dtype, jnp.floating)


_SHIFTED = added(form_of(X), form_of(M), -1.0)
SOFTMAX = multiplied(form_of(E), form_of(S, -1))
LOG_SOFTMAX = added(_SHIFTED, form_of(LOG_S), -1.0)


class Forms:
    """The forms of what a program makes of an array x and of the result of one equation: M by reduce_max, or M and S by
    the operator logsumexp."""

    def __init__(self, graph, equation):
        self.graph, self.equation, self.axes = graph, equation, tuple(equation.params["axes"])
        self.x, self.shape = equation.inputs[0], equation.inputs[0].aval.shape
        self.shape_of_rows = tuple(1 if d in self.axes else n for d, n in enumerate(self.shape))
        self.place = places.new_place(self.shape)
        self.place_of_rows = [dim for d, dim in enumerate(self.place) if d not in self.axes]
        self.along = self.place[self.axes[0]]
        self.root = self._root(self.x)
        self.has_operator = equation.name == "logsumexp"
        self.in_most_rows = self.has_operator  # whether forms need hold only in rows whose maximum is finite
        self.made: set = set(equation.outputs)  # the maxima, and what is made of them
        self.known: dict = {}  # by variable and place
        self.operators: dict = {}  # the variables that are softmax or log_softmax, by which it is
        self.maps: set = set()  # those that are results of softmax's linear map, which add up to 0 in each row
        self.products: dict = {}  # as `divided_later.Quotients` has them
        self.sums: dict = {}
        self.numbers = {symbol: k for k, symbol in enumerate((X, M, E, S, LOG_S))}  # all symbols, in order

    def form(self, a, place) -> dict:
        """The form of a value at a place."""
        return trampolined(self._form(a, place))

    def add_symbol(self, v):
        """Gives a variable a symbol, so that others' forms are in terms of it."""
        self.known[v, place_key(self.place)] = form_of(self._symbol(v, self.place))

    def _root(self, a):
        """The variable of which a value is a copy, or a cast to more bits."""
        while is_variable(a) and (maker := self.graph.maker.get(a)) is not None:
            if not is_widened(maker) and maker.name not in expressions.SAME:
                break
            (a,) = maker.inputs
        return a

    # ---- Forms

    def _form(self, a, place):
        if not is_variable(a):
            return {ONE: math.nan if np.iscomplexobj(a.val) else float(a.val)} if a.val else {}
        key = a, place_key(place)
        if key not in self.known:
            form = yield self._form_of_result(a, place)
            if form is None or len(form) > _MOST_TERMS or not all(map(math.isfinite, form.values())):
                form = form_of(self._symbol(a, place))
            self.known[key] = form
        return self.known[key]

    def _symbol(self, a, place):
        factors = factors_of(place)
        dims = [d for d, dim in enumerate(self.place) if not set(factors_of([dim])).isdisjoint(factors)]
        is_in_order = factors == factors_of([self.place[d] for d in dims])
        found = Array(a, tuple(dims) if is_in_order else None, place_key(place))
        self.numbers.setdefault(found, len(self.numbers))
        return found

    def _form_of_result(self, a, place):
        """The form of what an equation makes; None if it is just a symbol."""
        maker = self.graph.maker.get(a)
        if self._root(a) is self.root and place_key(place) == place_key(self.place):
            return form_of(X)
        if a in self.equation.outputs and factors_of(place) == factors_of(self.place_of_rows):
            return form_of((M, S)[self.equation.outputs.index(a)])
        if a in self.products and place_key(place) == place_key(self.products[a][1]):
            return multiplied(form_of(S, -1), form_of(self._symbol(self.products[a][0], place)))
        if a in self.sums and place_key(place) == place_key(self.sums[a][0]):
            _, form, (w, its_place) = self.sums[a]
            return multiplied(form, self.summed(multiplied(form_of(E), form_of(self._symbol(w, its_place)))))
        if a in self.operators or a in self.maps or maker is None or not is_followed(maker):
            return None
        if a not in self.made and self._is_along(place) and not (maker.name in _ALIKE or is_widened(maker)):
            return None
        if maker.name == "reduce_sum":
            return (yield self._sum(maker, place))
        inputs = places.input_places(maker, place)
        if inputs is None:
            return None
        of = []
        for operand, its_place in zip(maker.inputs, inputs, strict=True):
            of.append((yield self._form(operand, its_place)))
        if maker.name in expressions.VIEWS or maker.name in expressions.SAME:
            return of[0]
        found = self._of_operation(maker, of)
        return self._in_most_rows(maker, of) if found is None and self.in_most_rows else found

    def _is_along(self, place):
        """Whether a value at a place has the dimension of a row's elements."""
        return not set(factors_of([self.along])).isdisjoint(factors_of(place))

    def _of_operation(self, maker, of):
        name = maker.name
        if name in ("add", "add_any"):
            return added(*of)
        if name == "sub":
            return added(*of, -1.0)
        if name == "neg":
            return added({}, of[0], -1.0)
        if name == "mul":
            return multiplied(*of)
        if name == "div":
            inverse = power_of(of[1], -1)
            return None if inverse is None else multiplied(of[0], inverse)
        if name in ("square", "integer_pow"):
            return power_of(of[0], maker.params.get("y", 2))
        if name == "convert_element_type" and is_float(maker.inputs[0]):
            # The operator rounds its results once. So a rounding of what is made of x, M, E, S and log S is left out,
            # unless it is to fewer bits than x has. Roundings of other arrays stay.
            dtype, of_x = maker.outputs[0].aval.dtype, self.root.aval.dtype
            is_own = all(any(not isinstance(symbol, Array) for symbol, _ in monomial) for monomial in of[0])
            is_own &= dtype.name in expressions.WRITABLE and dtype.itemsize >= of_x.itemsize
            return of[0] if is_own or is_widened(maker) else None
        if name == "exp" and of[0] == _SHIFTED:
            return form_of(E)
        return form_of(LOG_S) if name == "log" and of[0] == form_of(S) else None

    def _in_most_rows(self, maker, of):
        """The form, in rows whose maximum is finite, of what logsumexp and its derivative do for the sake of others."""
        number = {frozenset(): 0.0} | of[-1] if maker.name == "eq" else {}
        if maker.name == "eq" and of[0] == form_of(S) and set(number) == {ONE} and number[ONE] in (0, math.inf):
            return {}
        if of[0] == form_of(S) and (maker.name, of[-1]) in (("eq", of[0]), ("ge", {})):
            return {ONE: 1.0}
        if maker.name == "is_finite" and of[0] == form_of(M):
            return {ONE: 1.0}
        if maker.name == "select_n" and len(of) == 3 and of[0] in ({}, {ONE: 1.0}):
            return of[1 + len(of[0])]
        is_kept = maker.name == "abs" and of[0] == form_of(S)
        is_kept |= maker.name == "convert_element_type" and not of[0]  # False
        return of[0] if is_kept else None

    def _sum(self, maker, place):
        """The form of a reduce_sum over a row; None if it is over others. It may be over axes of extent 1 as well."""
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
        return self.summed(form) if over else form

    def summed(self, form):
        found: dict = {}
        for monomial, c in form.items():
            of_rows, of_elements = self.split(monomial)
            if len(of_elements) == 1 and self.adds_up_to_0(*of_elements):
                continue
            if of_elements == frozenset([(E, 1)]):
                of_rows = monomial_product(of_rows, [(S, 1)])
            elif of_elements:
                self.numbers.setdefault(Sum(of_elements), len(self.numbers))
                of_rows = monomial_product(of_rows, [(Sum(of_elements), 1)])
            else:
                c *= self.shape[self.axes[0]]
            found = added(found, {of_rows: c})
        return found

    def adds_up_to_0(self, pair):
        symbol, power = pair
        return self.is_in_place(symbol) and symbol.variable in self.maps and power == 1

    def is_in_place(self, symbol):
        """Whether a symbol is an array at x's place: one that has x's shape, and was not transposed."""
        return isinstance(symbol, Array) and symbol.place == place_key(self.place)

    def split(self, monomial):
        """A monomial as a product of two: of symbols that all elements of a row share, and of the others."""
        of_rows = frozenset(pair for pair in monomial if self._is_of_rows(pair[0]))
        return of_rows, monomial - of_rows

    def _is_of_rows(self, symbol):
        if isinstance(symbol, Array):
            return symbol.dims is not None and self.axes[0] not in symbol.dims
        return symbol not in (X, E)

    def power_of_sums(self, a, place):
        """1 if a value is S, -1 if it is 1 / S, else None."""
        form = trampolined(self._form(a, place))
        return next((n for n in (1, -1) if form == form_of(S, n)), None)

    def ratio(self, a, others):
        """The form of a value over the product of others, each with its place, if all elements of a row share it."""
        form, *forms = (trampolined(self._form(*one)) for one in (a, *others))
        form = functools.reduce(
            lambda a, b: a and b and multiplied(a, b), (power_of(other, -1) for other in forms), form
        )
        return form if form and not any(self.split(monomial)[1] for monomial in form) else None

    # ---- Values

    def value(self, form, given):
        """The array that a form is, given the symbols' arrays."""
        result = None
        for monomial, c in form.items():
            of_rows, of_elements = self.split(monomial)
            term = None if c == 1 and monomial else jnp.float32(c)
            for pairs, shape in ((of_rows, self.shape_of_rows), (of_elements, self.shape)):
                for symbol, power in sorted(pairs, key=lambda pair: self.numbers[pair[0]]):
                    value = self._value_of(symbol, given)
                    value = value if power == 1 else jax.lax.integer_pow(reference.widened(value), power)
                    term = value if term is None else reference.widened(term) * reference.widened(value)
                term = term if term is None or not pairs else jnp.broadcast_to(term, shape)
            result = term if result is None else reference.widened(result) + reference.widened(term)
        return jnp.zeros(self.shape_of_rows, jnp.float32) if result is None else result

    def _value_of(self, symbol, given):
        if symbol == E:
            return jnp.exp(reference.widened(given[X]) - given[M])
        if symbol == LOG_S:
            return jnp.log(given[S])
        if isinstance(symbol, Sum):
            return jnp.sum(reference.widened(self.value({symbol.monomial: 1.0}, given)), self.axes, keepdims=True)
        return given[symbol]
