"""Equations as C++: what a kernel does to an element before the operator and after it.

An expression computes in float32, int32 and bool, and rounds where the program does: a result of 16 bits is rounded
as it is by JAX's own operations, one by one. Functions that CUDA lacks are in `csrc/device/functions.cuh`.
"""

import math
import re
from typing import NamedTuple

import numpy as np
from jax.extend.core import Literal

from jax_softmax.fusion import places

ROUNDED = {"bfloat16": "BFloat16", "float16": "Float16"}
_INTEGERS = ("int32", "int16", "int8", "uint8", "uint16")
# Dtypes of arrays that a kernel reads beside its operands.
READABLE = ("float32", *ROUNDED, "float8_e4m3fn", "float8_e5m2", "int8", "uint8", "int32", "bool")
WRITABLE = ("float32", *ROUNDED)

VIEWS = ("broadcast_in_dim", "reshape", "squeeze", "expand_dims", "transpose")
# They change nothing, and none of them is rounded.
SAME = ("copy", "pvary", "pcast", "name", "stop_gradient")
_COMPARISONS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_LOGIC = {"and": "&", "or": "|", "xor": "^"}
_ARITHMETIC = {"add": "+", "add_any": "+", "sub": "-", "mul": "*"}
# Which is not made one operation with an addition after it: x * w less the largest x * w of a row is 0 at the largest.
_PRODUCT = "__fmul_rn({}, {})"
_FUNCTIONS = {
    **{"exp": "expf({})", "exp2": "exp2f({})", "log": "logf({})", "log1p": "log1pf({})", "expm1": "expm1f({})"},
    **{"tanh": "tanh({})", "logistic": "1.0f / (1.0f + expf(-{}))", "sqrt": "sqrtf({})", "rsqrt": "rsqrtf({})"},
    **{
        "one_minus_square": "1.0f - __fmul_rn({0}, {0})",
        "erf": "erff({})",
        "sin": "sinf({})",
        "cos": "cosf({})",
        "pow": "powf({}, {})",
    },
}
_EXACT = {"floor": "floorf({})", "ceil": "ceilf({})", "is_finite": "(fabsf({}) <= 3.40282347e38f)"}
_OF_TWO_KINDS = ("neg", "abs", "sign", "square", "max", "min", "clamp", "integer_pow")
# Whose results are of the operands' dtype, or fewer bits, without rounding.
_NOT_ROUNDED = ("select_n", "neg", "abs", "sign", "max", "min", "clamp", "floor", "ceil", "iota", *SAME)

_ELEMENTWISE = frozenset(
    (*SAME, *_COMPARISONS, *_LOGIC, *_ARITHMETIC, *_FUNCTIONS, *_EXACT, *_OF_TWO_KINDS, "not", "div", "select_n")
) | {"convert_element_type", "reduce_precision"}


def is_long(equation) -> bool:
    """Whether it takes a kernel as long as many additions do."""
    if equation.name == "div":
        return not isinstance(equation.inputs[1], Literal)
    return equation.name in _FUNCTIONS and equation.name != "one_minus_square"


def instructions(equation) -> int:
    """About how many a processor takes for an element."""
    if equation.name in VIEWS or equation.name in SAME:
        return 0
    rounds = equation.outputs[0].aval.dtype.name in ROUNDED and equation.name not in _NOT_ROUNDED
    rounds = rounds and not _is_exact(equation)
    return (10 if is_long(equation) else 1) + 2 * rounds


class Side(NamedTuple):
    """What an expression reads beside an element: an array, or, where there is none, the index along a factor."""

    variable: object
    place: list
    factor: object = None


def is_variable(atom) -> bool:
    return not isinstance(atom, Literal)


def renamed(text, name, new) -> str:
    """The text with a C++ name replaced by another."""
    return re.sub(rf"\b{name}\b", new, text)


def kind(dtype) -> str | None:
    """The C++ type of values of a dtype, or None of those that expressions do not compute with."""
    name = dtype.name if hasattr(dtype, "name") else np.dtype(dtype).name
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
    if name in ("div", "pow", "integer_pow", *_FUNCTIONS) or name in _EXACT:
        return kinds == {"float"}
    if name in _ARITHMETIC:
        return out != "bool"
    if name == "convert_element_type":
        return out != "int" or kinds == {"bool"} or (kinds == {"int"} and dtypes[-1].name == "int32")
    if name == "reduce_precision":
        wide = (equation.params["exponent_bits"], equation.params["mantissa_bits"])
        return wide in ((8, 23), (8, 7))  # XLA's of float16 has no subnormal numbers
    if name in ("not", *_LOGIC):
        return out in ("bool", "int")
    return True


class Expressions:
    """The expressions of a call. They share what they read, numbered in the order of use."""

    def __init__(self, own):
        self.own = own  # the names of the operator's operands and of its result, by variable and place
        self.sides: list[Side] = []

    def line(self, variable, place, inside, stored_as=None) -> str:
        """What a variable is at an element: a C++ expression, made of the equations `inside`.

        Storing it in a dtype rounds it at the end.
        """
        statements: list[str] = []
        result = self._value(variable, place, inside, {}, statements)
        last = re.fullmatch(
            rf"const float {result} = rounded<{ROUNDED.get(stored_as)}>\((.*)\);", (statements or [""])[-1]
        )
        if last:
            statements.pop()
            result = last[1]
        if not statements:
            return result
        return f"[&] {{ {' '.join(statements)} return {result}; }}()"

    def _value(self, a, place, inside, known, statements):
        if isinstance(a, Literal):
            return literal(a.val, a.aval.dtype)
        key = a, places.key_of(place)
        if key not in known:
            equation = inside.get(a)
            known[key] = (
                self._read(a, place) if equation is None else self._made(equation, place, inside, known, statements)
            )
        return known[key]

    def _read(self, a, place):
        name = self.own.get((a, places.key_of(place)))
        if name is not None:
            return name
        name = self._side(Side(a, place))
        return f"static_cast<int>({name})" if a.aval.dtype.name in ("int8", "uint8") else name

    def _side(self, side):
        for k, other in enumerate(self.sides):
            same_place = places.key_of(side.place) == places.key_of(other.place)
            if other.variable is side.variable and other.factor is side.factor and same_place:
                return f"s{k}"
        self.sides.append(side)
        return f"s{len(self.sides) - 1}"

    def _index(self, factors):
        text = ""
        for factor in factors:
            index = self._side(Side(None, [], factor))
            text = f"({text} * {factor.extent} + {index})" if text else index
        return text or "0"

    def _made(self, equation, place, inside, known, statements):
        name, dtype = equation.name, equation.outputs[0].aval.dtype
        if name == "iota":
            index = self._index(places.factors_of([place[equation.params["dimension"]]]))
            return index if kind(dtype) == "int" else self._put(statements, "float", f"static_cast<float>({index})")
        inputs = places.inputs_of(equation, place)
        given = [self._value(a, p, inside, known, statements) for a, p in zip(equation.inputs, inputs, strict=True)]
        if name in VIEWS or name in SAME:
            return given[0]
        if name == "mul" and given[0] == _ONE:
            return given[1]
        text = None if name in ("mul", "div") and given[1] == _ONE else _text(equation, given)
        if text is None:
            return given[0]
        rounded = ROUNDED.get(dtype.name)
        if rounded and name not in _NOT_ROUNDED and not _is_exact(equation):
            text = f"rounded<{rounded}>({text})"
        return self._put(statements, kind(dtype), text)

    def _put(self, statements, type_, text):
        name = f"v{len(statements)}"
        statements.append(f"const {type_} {name} = {text};")
        return name


def _text(equation, given):
    """The C++ of an elementwise equation, or None if it changes nothing."""
    name = equation.name
    before = [kind(a.aval.dtype) for a in equation.inputs]
    out = kind(equation.outputs[0].aval.dtype)
    if name in _ARITHMETIC:
        operator = _ARITHMETIC[name]
        if out == "int":
            return f"static_cast<int>(static_cast<unsigned>({given[0]}) {operator} static_cast<unsigned>({given[1]}))"
        if name == "mul":
            return _PRODUCT.format(*given)
        return f"{given[0]} {operator} {given[1]}"
    if name == "div":
        divisor = equation.inputs[1]
        if isinstance(divisor, Literal) and np.size(divisor.val) == 1:
            # As XLA has it, which multiplies by the reciprocal of a constant.
            inverse = np.float32(1) / np.float32(divisor.val)
            if np.isfinite(inverse) and inverse != 0:
                return _PRODUCT.format(given[0], literal(inverse, np.float32))
        return f"{given[0]} / {given[1]}"
    if name in _COMPARISONS:
        return f"{given[0]} {_COMPARISONS[name]} {given[1]}"
    if name in _LOGIC:
        return f"{given[0]} {_LOGIC[name]} {given[1]}"
    if name == "not":
        return f"!{given[0]}" if out == "bool" else f"~{given[0]}"
    if name in _FUNCTIONS or name in _EXACT:
        return (_FUNCTIONS | _EXACT)[name].format(*given)
    if name == "select_n":
        return f"{given[0]} ? {given[2]} : {given[1]}"
    if name == "convert_element_type":
        return _converted(equation, given[0], before[0], out)
    if name == "reduce_precision":
        return f"rounded<BFloat16>({given[0]})" if equation.params["mantissa_bits"] == 7 else None
    if name == "integer_pow":
        return f"power({given[0]}, {equation.params['y']})"
    if name == "clamp":
        return f"min_or_nan(max_or_nan({given[1]}, {given[0]}), {given[2]})"
    if name in ("max", "min"):
        return f"{name}_or_nan({given[0]}, {given[1]})"
    if name == "neg":
        return f"-{given[0]}" if out == "float" else f"static_cast<int>(0u - static_cast<unsigned>({given[0]}))"
    if name == "square":
        product = "static_cast<int>(static_cast<unsigned>({0}) * static_cast<unsigned>({0}))"
        return _PRODUCT.format(given[0], given[0]) if out == "float" else product.format(given[0])
    return {"abs": "magnitude({})", "sign": "sign_of({})"}[name].format(given[0])


def _is_exact(equation) -> bool:
    """Whether it multiplies a bfloat16 with a power of 2."""
    if equation.name not in ("mul", "div") or equation.outputs[0].aval.dtype.name != "bfloat16":
        return False
    numbers = [
        a.val for a in equation.inputs[equation.name == "div" :] if isinstance(a, Literal) and np.size(a.val) == 1
    ]
    return any(math.frexp(abs(float(number)))[0] == 0.5 for number in numbers)


def _converted(equation, given, before, out):
    narrow = equation.inputs[0].aval.dtype.name, equation.outputs[0].aval.dtype.name
    if before == out:
        return None if narrow[1] not in ROUNDED or narrow[0] == narrow[1] else given
    if out == "bool":
        return f"{given} != 0"
    return f"static_cast<{out}>({given})"


def literal(value, dtype) -> str:
    """A number as C++, exactly."""
    value = np.asarray(value).reshape(())
    of = kind(dtype)
    if of == "bool":
        return "true" if value else "false"
    if of == "int":
        return f"({int(value)})" if int(value) > -(2**31) else "(-2147483647 - 1)"
    number = float(np.asarray(value).astype(dtype).astype(np.float32))
    if math.isfinite(number):
        return f"({number.hex()}f)"
    bits = np.float32(number).view(np.uint32)
    return f"__uint_as_float(0x{int(bits):08x}u)"


_ONE = literal(1, np.float32)
