"""Forms: what arrays are, as polynomials, in terms of a softmax that a program writes out.

The symbols are x, its rows' maximum M, E = exp(x - M), its rows' sum S, log S, and other arrays. A sum over a row is
one more symbol, without the factors that all its elements share; that of E is S. So two ways to compute the same have
one form. With a sink c, a number of each row that counts among its elements, C is exp(c - M), and S is its and E's sum.

A form is a dictionary of monomials with their coefficients; a monomial is a set of symbols with their powers.
"""

import math
from collections.abc import Generator, Sequence
from typing import Any, NamedTuple, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np

from jax_softmax.fusion.program import expressions, places
from jax_softmax.fusion.program.graph import Equation, Graph, is_variable, trampolined
from jax_softmax.fusion.program.places import Place, factors_of, place_key
from jax_softmax.fusion.program.walk import through
from jax_softmax.primitives import reference
from jax_softmax.primitives.types import Atom, Var

X, M, E, S, LOG_S, C = "x", "M", "E", "S", "log S", "C"
_ARITHMETIC = ("add", "add_any", "sub", "mul", "div", "neg", "square", "integer_pow", "exp", "log", "reduce_sum")
_GUARDS = ("convert_element_type", "select_n", "eq", "ge", "abs", "is_finite")
_FOLLOWED = (*_ARITHMETIC, *_GUARDS, *expressions.VIEWS, *expressions.SAME)
_ALIKE = ("neg", *expressions.VIEWS, *expressions.SAME)  # of arrays that are not made of the maxima, only these
# Chosen, a limit to the time that forms take. Gradients in the tests have up to 6 terms.
_MOST_TERMS = 24
_MOST_POWER = 4  # chosen; the tests have powers up to 3
_ROUNDING = 1e-6  # what is left of coefficients that cancel: the program's numbers are float32


class Array(NamedTuple):
    """The symbol of a variable that has no other form."""

    variable: Var
    dims: tuple[int, ...] | None  # x's dimensions that it has, in its own order; None if it has parts of them
    place: tuple[Any, ...]  # a key


class Sum(NamedTuple):
    """The symbol of a sum over a row, of a monomial."""

    monomial: "Monomial"


Symbol = Array | Sum | str
Monomial = frozenset[tuple[Symbol, int]]
Form = dict[Monomial, float]
Given = dict[Any, jax.Array]  # arrays by symbols, and by variables

ONE: Monomial = frozenset()


def form_of(symbol: Symbol, power: int = 1) -> Form:
    return {frozenset([(symbol, power)]): 1.0}


def added(a: Form, b: Form, times: float = 1.0) -> Form:
    """The form a + times b."""
    form = dict(a)
    for monomial, c in b.items():
        total = form.pop(monomial, 0.0) + times * c
        if not abs(total) <= _ROUNDING * abs(c):
            form[monomial] = total
    return form


def monomial_product(*monomials: Monomial | Sequence[tuple[Symbol, int]]) -> Monomial:
    powers: dict[Symbol, int] = {}
    for symbol, power in (pair for monomial in monomials for pair in monomial):
        powers[symbol] = powers.get(symbol, 0) + power
    return frozenset((symbol, power) for symbol, power in powers.items() if power)


def multiplied(a: Form, b: Form) -> Form | None:
    """The product of two forms; None if it may have too many terms."""
    if len(a) * len(b) > _MOST_TERMS:
        return None
    form: Form = {}
    for p, c in a.items():
        for q, d in b.items():
            form = added(form, {monomial_product(p, q): c * d})
    return form


def power_of(a: Form, power: int) -> Form | None:
    """A power of a form; None if that is no form, or too high a power."""
    if len(a) == 1 and abs(power) <= _MOST_POWER:
        ((monomial, c),) = a.items()
        return {monomial_product([(symbol, n * power) for symbol, n in monomial]): c**power} if c else None
    return multiplied(a, a) if power == 2 else None


def is_followed(equation: Equation) -> bool:
    """Whether an equation's result may have a form that is made of its operands' forms."""
    return equation.name in _FOLLOWED and len(equation.outputs) == 1


def is_widened(maker: Equation) -> bool:
    """Whether it casts to a dtype of kernels that has no fewer bits."""
    if maker.name != "convert_element_type" or maker.outputs[0].aval.dtype.name not in expressions.WRITABLE:
        return False
    (a,), (v,) = maker.inputs, maker.outputs
    return is_float(a) and a.aval.dtype.itemsize <= v.aval.dtype.itemsize


def is_float(a: Atom) -> bool:
    return jnp.issubdtype(a.aval.dtype, jnp.floating)


_SHIFTED = added(form_of(X), form_of(M), -1.0)
SOFTMAX: Form = {monomial_product([(E, 1), (S, -1)]): 1.0}
LOG_SOFTMAX = added(_SHIFTED, form_of(LOG_S), -1.0)


class Forms:
    """The forms of what a program makes of an array x and of the result of one equation: M by reduce_max, or M and S by
    the operator logsumexp. `pivot`: an equation whose result is M instead. `has_sink`: whether rows have one."""

    def __init__(self, graph: Graph, equation: Equation, pivot: Equation | None = None, has_sink: bool = False) -> None:
        self.graph, self.equation, self.axes = graph, equation, tuple(equation.params["axes"])
        self.x, self.shape = equation.inputs[0], equation.inputs[0].aval.shape
        self.shape_of_rows = tuple(1 if d in self.axes else n for d, n in enumerate(self.shape))
        self.place = places.new_place(self.shape)
        self.place_of_rows = [dim for d, dim in enumerate(self.place) if d not in self.axes]
        self.along = self.place[self.axes[0]]
        self.root = self._root(self.x)
        self.has_operator = equation.name == "logsumexp"
        self.in_most_rows = self.has_operator  # whether forms need hold only in rows whose maximum is finite
        self.of_rows = (equation if pivot is None else pivot).outputs  # M, or M and S
        self.has_sink = has_sink
        self.sink: Form | None = None  # the form of c, once there is C
        self.followed: set[Var] = set(self.of_rows)  # the maxima, and what is made of them
        self.form_at: dict[tuple[Any, ...], Form] = {}  # by variable and place
        self.operators: dict[Var, str] = {}  # softmax or log_softmax, by the variables that are one
        self.maps: set[Var] = set()  # results of softmax's linear map, which add up to 0 in each row
        self.products: dict[Var, tuple[Any, ...]] = {}  # as `deferred_division.Quotients` has them
        self.sums: dict[Var, tuple[Any, ...]] = {}
        self.order: dict[Symbol, int] = {symbol: k for k, symbol in enumerate((X, M, E, S, LOG_S, C))}  # of all symbols

    def form(self, a: Atom, place: Place) -> Form:
        """The form of a value at a place."""
        return trampolined(self._form(a, place))

    def add_symbol(self, v: Var) -> Form:
        """Gives a variable of x's shape a symbol, of which others' forms are made, and returns that as a form."""
        form = self.form_at[v, place_key(self.place)] = form_of(self._symbol(v, self.place))
        return form

    def _root(self, a: Atom) -> Atom:
        """The value of which another one is a copy, or a cast to more bits."""
        return through(self.graph, a, lambda maker: is_widened(maker) or maker.name in expressions.SAME)

    # ---- Forms

    def _form(self, a: Atom, place: Place) -> Generator[Any, Any, Form]:
        if not is_variable(a):
            return {ONE: math.nan if np.iscomplexobj(a.val) else float(a.val)} if a.val else {}
        key = a, place_key(place)
        if key not in self.form_at:
            form = yield self._form_of_result(a, place)
            is_infinite = form is not None and form.keys() == {ONE} and abs(form[ONE]) == math.inf  # and nothing else
            if form is None or len(form) > _MOST_TERMS or not (is_infinite or all(map(math.isfinite, form.values()))):
                form = form_of(self._symbol(a, place))
            self.form_at[key] = form
        return self.form_at[key]

    def _symbol(self, a: Var, place: Place) -> Array:
        dim_of = {factor: d for d, dim in enumerate(self.place) for factor in dim}
        dims = [dim_of.get(factor) for factor in factors_of(place)]
        is_whole = None not in dims and len(set(dims)) == len(dims)
        array = Array(a, tuple(d for d in dims if d is not None) if is_whole else None, place_key(place))
        self.order.setdefault(array, len(self.order))
        return array

    def _form_of_result(self, a: Var, place: Place) -> Generator[Any, Any, Form | None]:
        """The form of what an equation makes; None if it is just a symbol."""
        maker = self.graph.maker.get(a)
        if self._root(a) is self.root and place_key(place) == place_key(self.place):
            return form_of(X)
        if a in self.of_rows and factors_of(place) == factors_of(self.place_of_rows):
            return form_of((M, S)[self.of_rows.index(a)])
        if a in self.products and place_key(place) == place_key(self.products[a][1]):
            return multiplied(form_of(S, -1), form_of(self._symbol(self.products[a][0], place)))
        if a in self.sums and place_key(place) == place_key(self.sums[a][0]):
            _, form, (w, its_place) = self.sums[a]
            product = {monomial_product([(E, 1), (self._symbol(w, its_place), 1)]): 1.0}
            return multiplied(form, self.summed(product))
        if a in self.operators or a in self.maps or maker is None or not is_followed(maker):
            return None
        if a not in self.followed and self._is_along(place) and not (maker.name in _ALIKE or is_widened(maker)):
            return None
        if maker.name == "reduce_sum":
            return (yield self._sum(maker, place))
        inputs = places.input_places(maker, place)
        if inputs is None:
            return None
        of: list[Form] = []
        for operand, its_place in zip(maker.inputs, inputs, strict=True):
            of.append((yield self._form(operand, its_place)))
        if maker.name in expressions.VIEWS or maker.name in expressions.SAME:
            return of[0]
        form = self._of_operation(maker, of)
        return self._in_most_rows(maker, of) if form is None and self.in_most_rows else form

    def _is_along(self, place: Place) -> bool:
        """Whether a value at a place has the dimension of a row's elements."""
        return places.overlap([self.along], place)

    def _of_operation(self, maker: Equation, of: list[Form]) -> Form | None:
        """The form of an operation on values of which the forms are given; None if it is none."""
        name = maker.name
        if name in ("add", "add_any"):
            return added(of[0], of[1])
        if name == "sub":
            return added(of[0], of[1], -1.0)
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
            is_divisor = of[0] == form_of(S) and self._only_divides(maker.outputs[0])
            return of[0] if is_own or is_divisor or is_widened(maker) else None
        if name == "exp" and of[0] == _SHIFTED:
            return form_of(E)
        if name == "exp" and self.has_sink:
            return self._exponential_of_sink(of[0])
        return form_of(LOG_S) if name == "log" and of[0] == form_of(S) else None

    def _only_divides(self, v: Var) -> bool:
        """Whether a variable of bfloat16 only divides arrays of bfloat16, as MaxText's sums do: these quotients are
        rounded as well. In a derivative, its square divides, too."""
        if v.aval.dtype != jnp.bfloat16 or v in self.graph.results:
            return False
        return all(
            self._only_divides(r.outputs[0])
            if r.name in expressions.VIEWS or r.name in expressions.SAME
            else (r.name == "div" and is_variable(r.inputs[0]) and r.inputs[0] is not v)
            or (r.name == "integer_pow" and r.params["y"] == -2)
            for r in self.graph.readers.get(v, ())
        )

    def _exponential_of_sink(self, form: Form) -> Form | None:
        """The form of exp(c - M), where c is the same as before and depends on no element of a row; else None."""
        sink = added(form, form_of(M))
        symbols = [symbol for monomial in sink for symbol, _ in monomial]
        is_of_rows = all(isinstance(symbol, Array) and self._is_of_rows(symbol) for symbol in symbols)
        if self.sink not in (None, sink) or not is_of_rows:
            return None
        self.sink = sink
        return form_of(C)

    def _in_most_rows(self, maker: Equation, of: list[Form]) -> Form | None:
        """The form, in rows whose maximum is finite, of what logsumexp and its derivative do for the sake of others."""
        number: Form = {ONE: 0.0} | of[-1] if maker.name == "eq" else {}
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

    def _sum(self, maker: Equation, place: Place) -> Generator[Any, Any, Form | None]:
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

    def summed(self, form: Form) -> Form:
        """The form of the sum over a row."""
        total: Form = {}
        for monomial, c in form.items():
            of_rows, of_elements = self.split(monomial)
            if of_elements == frozenset([(E, 1)]) and self.has_sink:
                total = added(total, {monomial_product(of_rows, [(C, 1)]): -c})
            if len(of_elements) == 1 and self.adds_up_to_0(*of_elements):
                continue
            if of_elements == frozenset([(E, 1)]):
                of_rows = monomial_product(of_rows, [(S, 1)])
            elif of_elements:
                self.order.setdefault(Sum(of_elements), len(self.order))
                of_rows = monomial_product(of_rows, [(Sum(of_elements), 1)])
            else:
                c *= self.shape[self.axes[0]]
            total = added(total, {of_rows: c})
        return total

    def adds_up_to_0(self, pair: tuple[Symbol, int]) -> bool:
        symbol, power = pair
        return self.is_in_place(symbol) and symbol.variable in self.maps and power == 1

    def is_in_place(self, symbol: Symbol) -> TypeGuard[Array]:
        """Whether a symbol is an array at x's place: one that has x's shape, and was not transposed."""
        return isinstance(symbol, Array) and symbol.place == place_key(self.place)

    def split(self, monomial: Monomial) -> tuple[Monomial, Monomial]:
        """A monomial as a product of two: of symbols that all elements of a row share, and of the others."""
        of_rows = frozenset(pair for pair in monomial if self._is_of_rows(pair[0]))
        return of_rows, monomial - of_rows

    def is_of_rows(self, form: Form) -> bool:
        """Whether all elements of a row share a form's value."""
        return all(self._is_of_rows(symbol) for monomial in form for symbol, _ in monomial)

    def _is_of_rows(self, symbol: Symbol) -> bool:
        if isinstance(symbol, Array):
            return symbol.dims is not None and self.axes[0] not in symbol.dims
        return symbol not in (X, E)

    def power_of_sums(self, a: Atom, place: Place) -> int | None:
        """1 if a value is S, -1 if it is 1 / S, else None."""
        form = trampolined(self._form(a, place))
        return next((n for n in (1, -1) if form == form_of(S, n)), None)

    def ratio(self, a: tuple[Atom, Place], others: Sequence[tuple[Atom, Place]]) -> Form | None:
        """The form of a value over the product of others, each with its place, if all elements of a row share it."""
        form: Form | None = self.form(*a)
        for other in others:
            inverse = power_of(self.form(*other), -1)
            form = form and inverse and multiplied(form, inverse)
        return form if form and self.is_of_rows(form) else None

    # ---- Values

    def value(self, form: Form, given: Given) -> jax.Array:
        """The array that a form is, given the symbols' arrays."""
        result: jax.Array | None = None
        for monomial, c in form.items():
            of_rows, of_elements = self.split(monomial)
            term: Any = None if c == 1 and monomial else jnp.float32(c)
            for pairs, shape in ((of_rows, self.shape_of_rows), (of_elements, self.shape)):
                for symbol, power in sorted(pairs, key=lambda pair: self.order[pair[0]]):
                    value = self._value_of(symbol, given)
                    value = value if power == 1 else jax.lax.integer_pow(reference.widened(value), power)
                    term = value if term is None else reference.widened(term) * reference.widened(value)
                term = term if term is None or not pairs else jnp.broadcast_to(term, shape)
            result = term if result is None else reference.widened(result) + reference.widened(term)
        return jnp.zeros(self.shape_of_rows, jnp.float32) if result is None else result

    def in_order(self, symbol: Array, value: jax.Array) -> jax.Array:
        """A symbol's array with x's dimensions, in x's order."""
        dims = symbol.dims or ()
        if list(dims) != sorted(dims):
            value = jnp.transpose(jnp.reshape(value, [self.shape[d] for d in dims]), np.argsort(dims).tolist())
        return jnp.reshape(value, [n if d in dims else 1 for d, n in enumerate(self.shape)])

    def _value_of(self, symbol: Symbol, given: Given) -> jax.Array:
        if symbol in given:
            return given[symbol]
        if symbol == E:
            return jnp.exp(reference.widened(given[X]) - given[M])
        if symbol == LOG_S:
            return jnp.log(given[S])
        assert isinstance(symbol, Sum)
        return jnp.sum(reference.widened(self.value({symbol.monomial: 1.0}, given)), self.axes, keepdims=True)
