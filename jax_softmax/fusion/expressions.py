"""Expressions: what a kernel does to an element before the operator and after it, as a list of JAX's operations.

`printing.py` makes C++ of them. Where no kernel can do them, because devices share rows, they are done in JAX.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from jax_softmax.fusion import places

# Dtypes of 16 bits, and their names in C++.
ROUNDED = {"bfloat16": "BFloat16", "float16": "Float16"}
_INTEGERS = ("int32", "int16", "int8", "uint8", "uint16")
# Dtypes of arrays that a kernel reads beside its operands.
READABLE = ("float32", *ROUNDED, "float8_e4m3fn", "float8_e5m2", "int8", "uint8", "int32", "bool")
WRITABLE = ("float32", *ROUNDED)

VIEWS = ("broadcast_in_dim", "reshape", "squeeze", "expand_dims", "transpose")
# They change nothing, and none of them is rounded.
SAME = ("copy", "pvary", "pcast", "name", "stop_gradient")
COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
LOGIC = ("and", "or", "xor")
ARITHMETIC = ("add", "add_any", "sub", "mul")
FUNCTIONS = ("exp", "exp2", "log", "log1p", "expm1", "tanh", "logistic", "sqrt", "rsqrt", "one_minus_square", "erf")
FUNCTIONS += ("sin", "cos", "pow")
EXACT = ("floor", "ceil", "is_finite")
_OF_TWO_KINDS = ("neg", "abs", "sign", "square", "max", "min", "clamp", "integer_pow")
# Whose results are of the operands' dtype, or fewer bits, without rounding.
_NOT_ROUNDED = ("select_n", "neg", "abs", "sign", "max", "min", "clamp", "floor", "ceil", "iota", *SAME)

_ELEMENTWISE = frozenset(
    (*SAME, *COMPARISONS, *LOGIC, *ARITHMETIC, *FUNCTIONS, *EXACT, *_OF_TWO_KINDS, "not", "div", "select_n")
) | {"convert_element_type", "reduce_precision"}


class Number(NamedTuple):
    value: float | int | bool
    dtype: str


class Operation(NamedTuple):
    """Operands are numbers or names: x0 of the operator's first operand, s0 of the first array or index that is read
    beside, y of the operator's result, v0 of the result of an expression's first operation."""

    name: str  # of JAX's primitive
    operands: tuple[str | Number, ...]
    dtypes: tuple[str, ...]  # of the operands
    dtype: str  # of the result
    params: tuple[tuple[str, int], ...] = ()

    @property
    def rounds_to(self) -> str | None:
        """The dtype of 16 bits that its result is rounded to."""
        if self.dtype not in ROUNDED or self.name in _NOT_ROUNDED or self._is_exact():
            return None
        return None if self.name == "convert_element_type" and self.dtypes[0] == self.dtype else self.dtype

    def _is_exact(self):
        """Whether it multiplies a bfloat16 with a power of 2."""
        if self.name not in ("mul", "div") or self.dtype != "bfloat16":
            return False
        numbers = (a.value for a in self.operands[self.name == "div" :] if isinstance(a, Number))
        return any(math.frexp(abs(float(number)))[0] == 0.5 for number in numbers)


class Expression(NamedTuple):
    operations: tuple[Operation, ...]
    result: str | Number  # one of the values

    def with_sums(self, sums: dict[str, str]) -> "Expression":
        """With int32 values plus others in the places of some that are read."""
        n = len(sums)
        if not n:
            return self
        new = {f"v{k}": f"v{k + n}" for k in range(len(self.operations))}
        added = []
        for k, (name, other) in enumerate(sums.items()):
            added.append(Operation("add", (name, other), ("int32", "int32"), "int32"))
            new[name] = f"v{k}"
        operations = [op._replace(operands=tuple(new.get(a, a) for a in op.operands)) for op in self.operations]
        return Expression((*added, *operations), new.get(self.result, self.result))

    def value(self, given: dict[str, jax.Array]) -> jax.Array:
        """In JAX, of these values, which broadcast to one shape."""
        values: dict[Any, Any] = dict(given)

        def of(a):
            return jnp.asarray(a.value, a.dtype) if isinstance(a, Number) else values[a]

        for k, operation in enumerate(self.operations):
            operands = jnp.broadcast_arrays(*map(of, operation.operands))
            values[f"v{k}"] = _done(operation, operands)
        return of(self.result)


_NAMES_IN_LAX = {"and": "bitwise_and", "or": "bitwise_or", "xor": "bitwise_xor", "not": "bitwise_not", "add_any": "add"}


def _done(operation, operands):
    if operation.name == "convert_element_type":
        return operands[0].astype(operation.dtype)
    if operation.name == "one_minus_square":
        return 1 - operands[0] * operands[0]
    return getattr(jax.lax, _NAMES_IN_LAX.get(operation.name, operation.name))(*operands, **dict(operation.params))


# ---- Equations as operations


def is_long(equation) -> bool:
    """Whether it takes a kernel as long as many additions do."""
    if equation.name == "div":
        return not isinstance(equation.inputs[1], Literal)
    return equation.name in FUNCTIONS and equation.name != "one_minus_square"


def instructions(equation) -> int:
    """About how many a processor takes for an element."""
    if equation.name in VIEWS or equation.name in SAME:
        return 0
    given = [_number(a) if isinstance(a, Literal) else "" for a in equation.inputs]
    return (10 if is_long(equation) else 1) + 2 * (_operation(equation, given).rounds_to is not None)


class Side(NamedTuple):
    """What an expression reads beside an element: an array, or, where there is none, the index along a factor."""

    variable: object
    place: list
    factor: object = None


def is_variable(atom) -> bool:
    return not isinstance(atom, Literal)


def kind(dtype) -> str | None:
    """The C++ type of values of a dtype, or None of those that expressions do not compute with."""
    name = dtype if isinstance(dtype, str) else dtype.name  # which keys of random numbers have as well
    if name in ("float32", *ROUNDED):
        return "float"
    return "int" if name in _INTEGERS else "bool" if name == "bool" else None


def is_view(equation) -> bool:
    return equation.name in VIEWS


def prints(equation) -> bool:
    """Whether an equation can be a part of an expression."""
    if len(equation.outputs) != 1:
        return False
    dtypes = [a.aval.dtype for a in (*equation.inputs, *equation.outputs)]
    if equation.name in VIEWS:
        return len(equation.inputs) == 1
    if any(kind(dtype) is None for dtype in dtypes):
        return False
    name, out = equation.name, kind(dtypes[-1])
    if name == "iota":
        return dtypes[-1].name in ("int32", "float32")
    if name not in _ELEMENTWISE:
        return False
    if out == "int" and name not in (*SAME, "convert_element_type") and dtypes[-1].name != "int32":
        return False  # it would wrap elsewhere
    kinds = {kind(dtype) for dtype in dtypes[:-1]}
    if name == "select_n":
        return kind(dtypes[0]) == "bool" and len(dtypes) == 4
    if name in ("div", "pow", "integer_pow", *FUNCTIONS) or name in EXACT:
        return kinds == {"float"}
    if name in ARITHMETIC:
        return out != "bool"
    if name == "convert_element_type":
        return out != "int" or kinds == {"bool"} or (kinds == {"int"} and dtypes[-1].name == "int32")
    if name == "reduce_precision":
        wide = (equation.params["exponent_bits"], equation.params["mantissa_bits"])
        return wide in ((8, 23), (8, 7))  # XLA's of float16 has no subnormal numbers
    if name in ("not", *LOGIC):
        return out in ("bool", "int")
    return True


class Expressions:
    """The expressions of a call. They share what they read, numbered in the order of use."""

    def __init__(self, own):
        self.own = own  # the names of the operator's operands and of its result, by variable and place
        self.sides: list[Side] = []

    def of(self, variable, place, inside) -> Expression:
        """What a variable is at an element, made of the equations `inside`."""
        operations: list[Operation] = []
        result = self._value(variable, place, inside, {}, operations)
        return Expression(tuple(operations), result)

    def _value(self, a, place, inside, known, operations):
        if isinstance(a, Literal):
            return _number(a)
        key = a, places.key_of(place)
        if key not in known:
            equation = inside.get(a)
            known[key] = (
                self._read(a, place) if equation is None else self._made(equation, place, inside, known, operations)
            )
        return known[key]

    def _read(self, a, place):
        return self.own.get((a, places.key_of(place))) or self._side(Side(a, place))

    def _side(self, side):
        for k, other in enumerate(self.sides):
            same_place = places.key_of(side.place) == places.key_of(other.place)
            if other.variable is side.variable and other.factor is side.factor and same_place:
                return f"s{k}"
        self.sides.append(side)
        return f"s{len(self.sides) - 1}"

    def _index(self, factors, operations):
        """Along a dimension of these factors."""
        of_two, index = ("int32", "int32"), Number(0, "int32")
        for k, factor in enumerate(factors):
            along = self._side(Side(None, [], factor))
            if k == 0:
                index = along
                continue
            scaled = _put(operations, Operation("mul", (index, Number(factor.extent, "int32")), of_two, "int32"))
            index = _put(operations, Operation("add", (scaled, along), of_two, "int32"))
        return index

    def _made(self, equation, place, inside, known, operations):
        if equation.name == "iota":
            index = self._index(places.factors_of([place[equation.params["dimension"]]]), operations)
            dtype = equation.outputs[0].aval.dtype.name
            if dtype == "int32":
                return index
            return _put(operations, Operation("convert_element_type", (index,), ("int32",), dtype))
        inputs = places.inputs_of(equation, place)
        given = [self._value(a, p, inside, known, operations) for a, p in zip(equation.inputs, inputs, strict=True)]
        if equation.name in VIEWS or equation.name in SAME:
            return given[0]
        if equation.name == "mul" and _is_one(given[0]):
            return given[1]
        if equation.name in ("mul", "div") and _is_one(given[1]):
            return given[0]
        return _put(operations, _operation(equation, given))


def _put(operations, operation):
    operations.append(operation)
    return f"v{len(operations) - 1}"


def _operation(equation, given):
    params = tuple((k, equation.params[k]) for k in ("y", "exponent_bits", "mantissa_bits") if k in equation.params)
    dtypes = tuple(a.aval.dtype.name for a in equation.inputs)
    return Operation(equation.name, tuple(given), dtypes, equation.outputs[0].aval.dtype.name, params)


def _number(literal):
    value, dtype = np.asarray(literal.val).reshape(()).astype(literal.aval.dtype), literal.aval.dtype.name
    of_kind = {"float": lambda v: float(v.astype(np.float32)), "int": int, "bool": bool}
    return Number(of_kind.get(kind(dtype), float)(value), dtype)


def _is_one(a):
    return isinstance(a, Number) and kind(a.dtype) == "float" and a.value == 1
