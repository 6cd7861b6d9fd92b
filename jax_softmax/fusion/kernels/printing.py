"""Expressions as C++.

A kernel computes in float32, int32 and bool, and rounds where the program does: a result of 16 bits is rounded at once,
as in JAX. Kernels are compiled so that no product is merged with a sum that follows it: x * w less the largest x * w of
a row is 0 at the largest. Functions that CUDA lacks are in `csrc/device/functions.cuh`.
"""

import math
from collections.abc import Container, Mapping

import numpy as np

from jax_softmax.fusion.program.expressions import ROUNDED, Expression, Number, Operation, cpp_type

_COMPARISONS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_LOGIC = {"and": "&", "or": "|", "xor": "^"}
_ARITHMETIC = {"add": "+", "add_any": "+", "sub": "-", "mul": "*"}
_FUNCTIONS = {
    **{"exp": "expf({})", "exp2": "exp2f({})", "log": "logf({})", "log1p": "log1pf({})", "expm1": "expm1f({})"},
    **{"tanh": "tanh({})", "logistic": "1.0f / (1.0f + expf(-{}))", "sqrt": "sqrtf({})", "rsqrt": "rsqrtf({})"},
    **{"one_minus_square": "1.0f - {0} * {0}", "erf": "erff({})", "sin": "sinf({})", "cos": "cosf({})"},
    **{"pow": "powf({}, {})", "floor": "floorf({})", "ceil": "ceilf({})"},
    "is_finite": "(fabsf({}) <= 3.40282347e38f)",
}


def text_of(
    expression: Expression,
    stored_as: str | None = None,
    result_dtype: str | None = None,
    coarse: bool = False,
    masks: Mapping[str, bool] = {},
    uniform: Container[str] = (),
) -> str:
    """An expression as a C++ expression.

    `stored_as`: the dtype in which it is stored, which rounds it. `result_dtype`: of the operator's result y in the
    program; if it has 16 bits, y is rounded first. `coarse`: tanh that is rounded to bfloat16 may be off by 2^-11, a
    quarter of that rounding, for kernels that are not bound by memory. `masks`: by name, values that sides and
    operations have in all of a tile that is whole (`csrc/attention/scores.cuh`). `uniform`: sides that all elements of
    a tile share, by whose inverse a kernel multiplies rather than divide each element."""
    statements: list[tuple[str | None, str]] = []  # a type and a text: the k-th one declares vk
    names: dict[str, str] = {}  # in C++, of the expression's names

    def declared(type_: str | None, text: str) -> str:
        statements.append((type_, text))
        return f"v{len(statements) - 1}"

    def name(a: str | Number, dtype: str) -> str:
        if isinstance(a, Number):
            return _literal(a)
        if a not in names and a in masks:
            names[a] = _of_mask(a, masks[a])
        elif a not in names:
            # A side operand of 8 bits, whose elements C++ would take for characters.
            names[a] = f"static_cast<int>({a})" if dtype in ("int8", "uint8") else a
        return names[a]

    if result_dtype in ROUNDED and not (expression.result == "y" and stored_as == result_dtype):
        names["y"] = f"rounded<{ROUNDED[result_dtype]}>(y)"
        if expression.operations:
            names["y"] = declared("float", names["y"])
    last = len(expression.operations) - 1
    for k, operation in enumerate(expression.operations):
        operands = [name(a, dtype) for a, dtype in zip(operation.operands, operation.dtypes, strict=True)]
        is_stored = k == last and expression.result == f"v{k}"
        if operation.name == "div" and operation.operands[1] in uniform:
            operation, operands[1] = operation._replace(name="mul"), f"(1.0f / {operands[1]})"
        text = _rounded(operation, operands, coarse, by_store=is_stored and operation.rounds_to == stored_as)
        if text is None:
            names[f"v{k}"] = operands[0]
            continue
        if f"v{k}" in masks:
            text = _of_mask(text, masks[f"v{k}"])
        names[f"v{k}"] = declared(cpp_type(operation.dtype), text)
    result = name(expression.result, "")
    if statements and result == f"v{len(statements) - 1}" and statements[-1][0] == "float":
        _, result = statements.pop()
    if not statements:
        return result
    lines = (f"const {type_} v{k} = {text};" for k, (type_, text) in enumerate(statements))
    return f"[&] {{ {' '.join(lines)} return {result}; }}()"


def _of_mask(text: str, value: bool) -> str:
    return f"side.template known<{str(value).lower()}>({text})"


def _rounded(operation: Operation, given: list[str], coarse: bool, by_store: bool) -> str | None:
    """An operation with its rounding, unless that is the store's; None if nothing is left of it."""
    text = _cpp(operation, given)
    if operation.rounds_to is None:
        return text
    text = given[0] if text is None else text
    if coarse and operation.name == "tanh" and operation.rounds_to == "bfloat16":
        text = f"coarse_{text}"
    return text if by_store else f"rounded<{ROUNDED[operation.rounds_to]}>({text})"


def _cpp(operation: Operation, given: list[str]) -> str | None:
    """An operation without its rounding; None if nothing is left of it."""
    name, out = operation.name, cpp_type(operation.dtype)
    if name in _ARITHMETIC:
        operator = _ARITHMETIC[name]
        if out == "int":
            return f"static_cast<int>(static_cast<unsigned>({given[0]}) {operator} static_cast<unsigned>({given[1]}))"
        return f"{given[0]} {operator} {given[1]}"
    if name == "div":
        if (inverse := operation.inverse()) is not None:
            return f"{given[0]} * {_literal(Number(float(inverse), 'float32'))}"
        return f"{given[0]} / {given[1]}"
    if name in _COMPARISONS:
        return f"{given[0]} {_COMPARISONS[name]} {given[1]}"
    if name in _LOGIC:
        return f"{given[0]} {_LOGIC[name]} {given[1]}"
    if name == "not":
        return f"!{given[0]}" if out == "bool" else f"~{given[0]}"
    if name in _FUNCTIONS:
        return _FUNCTIONS[name].format(*given)
    if name == "select_n":
        return f"{given[0]} ? {given[2]} : {given[1]}"
    if name == "convert_element_type":
        before = cpp_type(operation.dtypes[0])
        if before == out:
            return None
        return f"{given[0]} != 0" if out == "bool" else f"static_cast<{out}>({given[0]})"
    if name == "reduce_precision":
        return f"rounded<BFloat16>({given[0]})" if dict(operation.params)["mantissa_bits"] == 7 else None
    if name == "clamp":
        return f"min_or_nan(max_or_nan({given[1]}, {given[0]}), {given[2]})"
    if name in ("max", "min"):
        return f"{name}_or_nan({given[0]}, {given[1]})"
    if name == "neg":
        return f"-{given[0]}" if out == "float" else f"static_cast<int>(0u - static_cast<unsigned>({given[0]}))"
    return {"abs": "magnitude({})", "sign": "sign_of({})"}[name].format(given[0])


def _literal(number: Number) -> str:
    """A number as C++, exactly."""
    value, of = number.value, cpp_type(number.dtype)
    if of == "bool":
        return "true" if value else "false"
    if of == "int":
        return f"({value})" if value > -(2**31) else "(-2147483647 - 1)"
    if math.isfinite(value):
        return f"({float(value).hex()}f)"
    return f"__uint_as_float(0x{int(np.float32(value).view(np.uint32)):08x}u)"
