"""Expressions: what a kernel does to an element before the operator and after it, as a list of JAX's operations.

`printing.py` makes C++ of them. `Expression.in_jax` does the same where there is no kernel: where devices share rows.
"""

import functools
import math
from collections.abc import Generator, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_softmax.fusion.program.graph import Equation, Graph, is_variable, trampolined, variables_of
from jax_softmax.fusion.program.places import Factor, Parts, Place, Placed, place_key
from jax_softmax.primitives.types import Atom, Literal, Var
from jax_softmax.runtime import costs

# Dtypes of 16 bits, and their names in C++.
ROUNDED = {"bfloat16": "BFloat16", "float16": "Float16"}
_INTEGERS = ("int32", "int16", "int8", "uint8", "uint16")
# Dtypes of arrays that a kernel reads beside its operands.
READABLE = ("float32", *ROUNDED, "float8_e4m3fn", "float8_e5m2", "int8", "uint8", "int32", "bool")
WRITABLE = ("float32", *ROUNDED)

VIEWS = ("broadcast_in_dim", "reshape", "squeeze", "expand_dims", "transpose")
# Results are operands, unchanged.
SAME = ("copy", "pvary", "pcast", "name", "stop_gradient")
COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
LOGIC = ("and", "or", "xor")
ARITHMETIC = ("add", "add_any", "sub", "mul")
_EXPONENTIALS = ("exp", "exp2", "log", "log1p", "expm1", "tanh", "logistic", "pow")
FUNCTIONS = (*_EXPONENTIALS, "sqrt", "rsqrt", "one_minus_square", "erf", "sin", "cos")
EXACT = ("floor", "ceil", "is_finite")
_OTHERS = ("neg", "abs", "sign", "square", "max", "min", "clamp", "integer_pow")
# Operations of 16 bits whose results need no rounding.
_NOT_ROUNDED = ("select_n", "neg", "abs", "sign", "max", "min", "clamp", "floor", "ceil", "iota", *SAME)

ELEMENTWISE = frozenset(
    (*SAME, *COMPARISONS, *LOGIC, *ARITHMETIC, *FUNCTIONS, *EXACT, *_OTHERS, "not", "div", "select_n")
) | {"convert_element_type", "reduce_precision"}


class Number(NamedTuple):
    value: float | int | bool
    dtype: str


class Operation(NamedTuple):
    """Operands are numbers or names: x0 is the operator's first operand, s0 the first side operand, y the operator's
    result, v0 the result of the expression's first operation."""

    name: str  # of JAX's primitive
    operands: tuple[str | Number, ...]
    dtypes: tuple[str, ...]  # of the operands
    dtype: str  # of the result
    params: tuple[tuple[str, int], ...] = ()

    @property
    def rounds_to(self) -> str | None:
        """The dtype of 16 bits that its result is rounded to, if it is."""
        if self.dtype not in ROUNDED or self.name in _NOT_ROUNDED or self._is_exact():
            return None
        return None if self.name == "convert_element_type" and self.dtypes[0] == self.dtype else self.dtype

    def _is_exact(self) -> bool:
        """Whether it multiplies by a power of 2. In float16 that is not exact: small numbers have fewer bits."""
        if self.name not in ("mul", "div") or self.dtype == "float16":
            return False
        numbers = (a.value for a in self.operands[self.name == "div" :] if isinstance(a, Number))
        return any(math.frexp(abs(float(number)))[0] == 0.5 for number in numbers)

    def inverse(self) -> np.float32 | None:
        """1 / c of a division by a constant c: as XLA does, a kernel multiplies by it."""
        divisor = self.operands[1]
        if self.name != "div" or not isinstance(divisor, Number) or not divisor.value:
            return None
        inverse = np.float32(1) / np.float32(divisor.value)
        return inverse if np.isfinite(inverse) and inverse != 0 else None

    @property
    def is_function(self) -> bool:
        """Whether a kernel and XLA may differ in the last places of its result."""
        if self.name == "div":
            return self.inverse() is None
        return self.name in FUNCTIONS and self.name != "one_minus_square"

    @property
    def is_reproducible(self) -> bool:
        """Whether its result has the same bits wherever XLA makes it, and in a kernel, without `rounded`."""
        return self.rounds_to is None and not self.is_function and self.name != "reduce_precision"


class Expression(NamedTuple):
    operations: tuple[Operation, ...]
    result: str | Number  # a name, as operands have them

    @classmethod
    def from_json(cls, given: Any) -> "Expression":
        """JSON has lists instead of tuples."""

        def atom(a: Any) -> str | Number:
            return a if isinstance(a, str) else Number(*a)

        operations = (
            Operation(name, tuple(map(atom, operands)), tuple(dtypes), dtype, tuple(map(tuple, params)))
            for name, operands, dtypes, dtype, params in given[0]
        )
        return cls(tuple(operations), atom(given[1]))

    def after(self, other: "Expression", name: str | None = None) -> "Expression":
        """The expression behind the operations of another one, whose result a name stands for, if one is given."""
        n = len(other.operations)
        new: dict[str | Number, str | Number] = {f"v{k}": f"v{k + n}" for k in range(len(self.operations))}
        new |= {} if name is None else {name: other.result}
        operations = (op._replace(operands=tuple(new.get(a, a) for a in op.operands)) for op in self.operations)
        return Expression((*other.operations, *operations), new.get(self.result, self.result))

    def with_sums(self, sums: dict[str, str]) -> "Expression":
        """With s0 + s3 instead of s0 for each pair s0, s3 whose first name is read: sums of int32."""
        read = {a for op in self.operations for a in op.operands} | {self.result}
        sums = {name: other for name, other in sums.items() if name in read}
        n = len(sums)
        new: dict[str | Number, str | Number] = {f"v{k}": f"v{k + n}" for k in range(len(self.operations))}
        added = []
        for k, (name, other) in enumerate(sums.items()):
            added.append(Operation("add", (name, other), ("int32", "int32"), "int32"))
            new[name] = f"v{k}"
        operations = [op._replace(operands=tuple(new.get(a, a) for a in op.operands)) for op in self.operations]
        return Expression((*added, *operations), new.get(self.result, self.result))

    def dtype_of(self, name: str) -> str:
        """The dtype of a name where it is read; float32 if it is not."""
        read = ((a, dtype) for op in self.operations for a, dtype in zip(op.operands, op.dtypes, strict=True))
        return next((dtype for a, dtype in read if a == name), "float32")

    def needed(self) -> dict[int, Operation]:
        """The operations that the result needs, by their numbers."""
        read, found = {self.result}, {}
        for k in reversed(range(len(self.operations))):
            if f"v{k}" in read:
                found[k] = self.operations[k]
                read.update(a for a in found[k].operands if isinstance(a, str))
        return dict(reversed(found.items()))

    def in_jax(self, given: Mapping[str, jax.typing.ArrayLike]) -> jax.Array:
        """The result of arrays by name, which broadcast to one shape. But for functions, it has a kernel's bits."""
        values: dict[Any, Any] = dict(given)

        def value_of(a: str | Number) -> jax.Array:
            return jnp.asarray(a.value, a.dtype) if isinstance(a, Number) else values[a]

        for k, operation in self.needed().items():
            operands = zip(map(value_of, operation.operands), operation.dtypes, strict=True)
            arrays = jnp.broadcast_arrays(*(a.astype(dtype) for a, dtype in operands))
            values[f"v{k}"] = _apply(operation, arrays)
        return value_of(self.result)


_NAMES_IN_LAX = {"and": "bitwise_and", "or": "bitwise_or", "xor": "bitwise_xor", "not": "bitwise_not", "add_any": "add"}


def _apply(operation: Operation, operands: Sequence[jax.Array]) -> jax.Array:
    """An operation in JAX, rounded as a kernel rounds it, even where XLA leaves out roundings."""
    if operation.name == "convert_element_type":
        result = rounded(operands[0].astype(jnp.float32), operation.rounds_to) if operation.rounds_to else operands[0]
        return result.astype(operation.dtype)
    if operation.rounds_to:
        operands = [a.astype(jnp.float32) if a.dtype.name in ROUNDED else a for a in operands]
    if operation.name == "one_minus_square":
        result = 1 - operands[0] * operands[0]
    elif operation.name == "div" and (inverse := operation.inverse()) is not None:
        result = operands[0] * inverse
    else:
        params = dict(operation.params)
        result = getattr(jax.lax, _NAMES_IN_LAX.get(operation.name, operation.name))(*operands, **params)
    result = rounded(result, operation.rounds_to) if operation.rounds_to else result
    return result.astype(operation.dtype)


def rounded(x: jax.Array, dtype: str) -> jax.Array:
    """float32 numbers rounded to a dtype of 16 bits. XLA may leave out a cast to 16 bits and back, but not this."""
    if dtype == "bfloat16":
        return jax.lax.reduce_precision(x, 8, 7)
    # reduce_precision takes float16's subnormal numbers for 0: the multiples of 2^-24 below 2^-14.
    subnormal = jax.lax.round(x * 2.0**24, jax.lax.RoundingMethod.TO_NEAREST_EVEN) * 2.0**-24
    return jnp.where(jnp.abs(x) < 2.0**-14, subnormal, jax.lax.reduce_precision(x, 5, 10))


# ---- Equations as operations


def is_long(equation: Equation) -> bool:
    """Whether it takes a kernel as long as many additions: a division, exp and the like."""
    return any(op.is_function for op in operations_of(equation))


def is_reproducible(equation: Equation) -> bool:
    """Whether its result has the same bits wherever XLA makes it."""
    return all(op.is_reproducible for op in operations_of(equation))


def instructions(equation: Equation) -> int:
    """About how many instructions a processor takes for an element."""
    if equation.name == "iota":
        return 1
    operations = operations_of(equation)
    return sum(
        (costs.INSTRUCTIONS_OF_FUNCTION if op.is_function else 1)
        + costs.INSTRUCTIONS_OF_ROUNDING * (op.rounds_to is not None)
        for op in operations
    )


def elementwise_ancestors(graph: Graph, variables: Iterable[Var]) -> dict[Var, Equation | None]:
    """The variables, and all that they are made of by equations which can be parts of expressions: each with the
    equation that makes it, or None where there is no such equation."""
    pending, found = list(variables), {}
    while pending:
        a = pending.pop()
        if a not in found:
            maker = graph.maker.get(a)
            found[a] = maker if maker is not None and is_expressible(maker) else None
            pending += variables_of(maker.inputs) if maker is not None and found[a] is not None else []
    return found


class NotFolded(Exception):
    """Why a group cannot be a call of a kernel."""


def required_operands(equation: Equation, place: Place, parts: Parts) -> list[Placed]:
    """The operands of an equation that is folded, and their places.

    Raises:
      NotFolded: there are none. The equation was folded for a reader at another place.
    """
    operands = parts.operands(equation, place)
    if operands is None:
        raise NotFolded(f"{equation.name} cannot be followed wherever its result is read")
    return operands


class SideVariable(NamedTuple):
    """A side operand of expressions: a variable at a place, or, without a variable, the index along a factor."""

    variable: Any
    place: Place
    factor: Factor | None = None


@functools.cache
def cpp_type(dtype: Any) -> str | None:
    """The C++ type that a kernel computes in for a dtype; None if expressions do not compute with it."""
    name = dtype if isinstance(dtype, str) else dtype.name  # keys of random numbers have one, too
    if name in ("float32", *ROUNDED):
        return "float"
    return "int" if name in _INTEGERS else "bool" if name == "bool" else None


def is_view(equation: Equation) -> bool:
    return equation.name in VIEWS


def is_expressible(equation: Equation) -> bool:
    """Whether an equation can be a part of an expression."""
    if len(equation.outputs) != 1:
        return False
    dtypes = [a.aval.dtype for a in (*equation.inputs, *equation.outputs)]
    if equation.name in VIEWS:
        return len(equation.inputs) == 1
    if any(cpp_type(dtype) is None for dtype in dtypes):
        return False
    name, out = equation.name, cpp_type(dtypes[-1])
    if name == "iota":
        return dtypes[-1].name in ("int32", "float32")
    if name not in ELEMENTWISE:
        return False
    if out == "int" and name not in (*SAME, "convert_element_type") and dtypes[-1].name != "int32":
        return False  # it would overflow at another number than the kernel's int
    kinds = {cpp_type(dtype) for dtype in dtypes[:-1]}
    if name == "select_n":
        return cpp_type(dtypes[0]) == "bool" and len(dtypes) == 4
    if name in ("div", "pow", "integer_pow", *FUNCTIONS) or name in EXACT:
        return kinds == {"float"}
    if name in ARITHMETIC:
        return out != "bool"
    if name == "convert_element_type":
        return out != "int" or kinds == {"bool"} or (kinds == {"int"} and dtypes[-1].name == "int32")
    if name == "reduce_precision":
        bits = (equation.params["exponent_bits"], equation.params["mantissa_bits"])
        return bits in ((8, 23), (8, 7))  # float32 and bfloat16; XLA's float16 has no subnormal numbers
    if name in ("not", *LOGIC):
        return out in ("bool", "int")
    return True


Names = Mapping[Placed, str]
Known = dict[Placed, str | Number]  # names and numbers of values that are made


class Expressions:
    """Makes expressions of one kernel, which share its side operands, numbered in the order of use."""

    def __init__(self, names: Names, sides: list[SideVariable] | None = None, parts: Parts | None = None) -> None:
        """`names`: those of the operator's operands and of its result, by variable and place. `sides`: a list of side
        operands, to which others are added. `parts`: into which the kernel splits dimensions."""
        self.names = names
        self.parts = Parts() if parts is None else parts
        self.sides: list[SideVariable] = [] if sides is None else sides

    def make(self, variable: Any, place: Place, inside: Mapping[Var, Equation]) -> Expression:
        """The expression that the equations `inside` are for a variable's element at a place."""
        operations: list[Operation] = []
        result = trampolined(self._value(variable, place, inside, {}, operations))
        return Expression(tuple(operations), result)

    def _value(
        self, a: Atom, place: Place, inside: Mapping[Var, Equation], known: Known, operations: list[Operation]
    ) -> Generator[Any, str | Number, str | Number]:
        if isinstance(a, Literal):
            return _number_of(a)
        key: Placed = a, place_key(place)
        if key not in known:
            if a in inside:
                known[key] = yield self._computed(inside[a], place, inside, known, operations)
            else:
                known[key] = self.names.get(key) or self._side(SideVariable(a, place))
        return known[key]

    def _side(self, side: SideVariable) -> str:
        """The name of a side operand."""
        for k, other in enumerate(self.sides):
            same_place = place_key(side.place) == place_key(other.place)
            if other.variable is side.variable and other.factor == side.factor and same_place:
                return f"s{k}"
        self.sides.append(side)
        return f"s{len(self.sides) - 1}"

    def _index(self, factors: list[Factor], operations: list[Operation]) -> str | Number:
        """The index along a dimension that is made of these factors."""
        of_two = ("int32", "int32")
        index: str | Number = Number(0, "int32")
        for k, factor in enumerate(factors):
            along = self._side(SideVariable(None, [], factor))
            if k == 0:
                index = along
                continue
            scaled = _put(operations, Operation("mul", (index, Number(factor.extent, "int32")), of_two, "int32"))
            index = _put(operations, Operation("add", (scaled, along), of_two, "int32"))
        return index

    def _computed(
        self, maker: Equation, place: Place, inside: Mapping[Var, Equation], known: Known, operations: list[Operation]
    ) -> Generator[Any, str | Number, str | Number]:
        if maker.name == "iota":
            index = self._index(self.parts.factors_of([place[maker.params["dimension"]]]), operations)
            dtype = maker.outputs[0].aval.dtype.name
            if dtype == "int32":
                return index
            return _put(operations, Operation("convert_element_type", (index,), ("int32",), dtype))
        given = []
        for operand in required_operands(maker, place, self.parts):
            given.append((yield self._value(*operand, inside, known, operations)))
        return _elementwise(maker, given, operations)


def _power(x: str | Number, equation: Equation, operations: list[Operation]) -> str | Number:
    """x to an integer power by repeated squaring, each product rounded, as in JAX."""
    power, dtype = equation.params.get("y", 2), equation.outputs[0].aval.dtype.name
    result: str | Number = Number(1.0 if cpp_type(dtype) == "float" else 1, dtype)
    rest = abs(power)
    while rest:
        if rest % 2:
            result = x if _is_one(result) else _put(operations, Operation("mul", (result, x), (dtype, dtype), dtype))
        rest //= 2
        if rest:
            x = _put(operations, Operation("mul", (x, x), (dtype, dtype), dtype))
    if power < 0:
        result = _put(operations, Operation("div", (Number(1.0, dtype), result), (dtype, dtype), dtype))
    return result


def expression_of(equation: Equation) -> tuple[Expression, list[Var]]:
    """An elementwise equation as an expression of x0, x1, ...: the variables that it reads, which are returned too."""
    operations: list[Operation] = []
    variables = variables_of(equation.inputs)
    names = (f"x{k}" for k in range(len(variables)))
    given = [next(names) if is_variable(a) else _number_of(a) for a in equation.inputs]
    result = _elementwise(equation, given, operations)
    return Expression(tuple(operations), result), variables


def operations_of(equation: Equation) -> list[Operation]:
    """What an equation does to an element: nothing, if it is a view or an index."""
    operations: list[Operation] = []
    if not is_view(equation) and equation.name != "iota":
        _elementwise(equation, [_number_of(a) if isinstance(a, Literal) else "" for a in equation.inputs], operations)
    return operations


def _elementwise(equation: Equation, given: Sequence[str | Number], operations: list[Operation]) -> str | Number:
    """Appends an equation's operations on the values `given` to the others. Returns its result's name or number."""
    if equation.name in VIEWS or equation.name in SAME:
        return given[0]
    if equation.name in ("square", "integer_pow"):
        return _power(given[0], equation, operations)
    if equation.name == "mul" and _is_one(given[0]):
        return given[1]
    if equation.name in ("mul", "div") and _is_one(given[1]):
        return given[0]
    return _put(operations, _operation(equation, given))


def _put(operations: list[Operation], operation: Operation) -> str:
    operations.append(operation)
    return f"v{len(operations) - 1}"


def _operation(equation: Equation, given: Iterable[str | Number]) -> Operation:
    params = tuple((k, equation.params[k]) for k in ("y", "exponent_bits", "mantissa_bits") if k in equation.params)
    dtypes = tuple(a.aval.dtype.name for a in equation.inputs)
    return Operation(equation.name, tuple(given), dtypes, equation.outputs[0].aval.dtype.name, params)


def _number_of(literal: Literal) -> Number:
    value, dtype = np.asarray(literal.val).reshape(()).astype(literal.aval.dtype), literal.aval.dtype.name
    of_kind: dict[Any, Any] = {"float": lambda v: float(v.astype(np.float32)), "int": int, "bool": bool}
    return Number(of_kind.get(cpp_type(dtype), float)(value), dtype)


def _is_one(a: str | Number) -> bool:
    return isinstance(a, Number) and a.value == 1
