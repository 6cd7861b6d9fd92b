"""Expressions as C++.

A kernel computes in float32, int32 and bool, and rounds where the program does: a result of 16 bits is rounded at once,
as in JAX. Kernels are compiled so that no product is merged with a sum that follows it: x * w less the largest x * w of
a row is 0 at the largest. Functions that CUDA lacks are in `csrc/device/functions.cuh`.
"""

import math
from collections.abc import Mapping

import numpy as np

from jax_softmax.fusion.expressions import ROUNDED, Expression, Number, Operation, kind

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
) -> str:
    """An expression as a C++ expression.

    `stored_as`: the dtype in which it is stored, which rounds it. `result_dtype`: of the operator's result y in the
    program; if it has 16 bits, y is rounded first. `coarse`: tanh that is rounded to bfloat16 may be off by 2^-11, a
    quarter of that rounding, for kernels that are not bound by memory. `masks`: by name, values that operations have in
    all of a tile that is whole (`csrc/attention/tiles.cuh`)."""
    statements: list[tuple[str, str]] = []  # a type and a text: the k-th one declares vk
    names: dict[str, str] = {}  # in C++, of the expression's names

    def declared(type_, text):
        statements.append((type_, text))
        return f"v{len(statements) - 1}"

    def name(a, dtype):
        if isinstance(a, Number):
            return _literal(a)
        if a not in names:
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
        text, rounds_to = _cpp(operation, operands), operation.rounds_to
        if text is None and rounds_to is None:
            names[f"v{k}"] = operands[0]
            continue
        text = operands[0] if text is None else text
        if coarse and operation.name == "tanh" and rounds_to == "bfloat16":
            text = f"coarse_{text}"
        if rounds_to and not (k == last and expression.result == f"v{k}" and rounds_to == stored_as):
            text = f"rounded<{ROUNDED[rounds_to]}>({text})"
        if f"v{k}" in masks:
            text = of_mask(text, masks[f"v{k}"])
        names[f"v{k}"] = declared(kind(operation.dtype), text)
    result = name(expression.result, "")
    if statements and result == f"v{len(statements) - 1}" and statements[-1][0] == "float":
        _, result = statements.pop()
    if not statements:
        return result
    lines = (f"const {type_} v{k} = {text};" for k, (type_, text) in enumerate(statements))
    return f"[&] {{ {' '.join(lines)} return {result}; }}()"


def of_mask(text: str, value: bool) -> str:
    return f"side.template known<{str(value).lower()}>({text})"


def _cpp(operation: Operation, given: list[str]) -> str | None:
    """An operation without its rounding; None if nothing is left of it."""
    name, out = operation.name, kind(operation.dtype)
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
        before = kind(operation.dtypes[0])
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
    value, of = number.value, kind(number.dtype)
    if of == "bool":
        return "true" if value else "false"
    if of == "int":
        return f"({value})" if value > -(2**31) else "(-2147483647 - 1)"
    if math.isfinite(value):
        return f"({float(value).hex()}f)"
    return f"__uint_as_float(0x{int(np.float32(value).view(np.uint32)):08x}u)"
