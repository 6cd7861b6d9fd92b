"""Expressions as C++.

A kernel computes in float32, int32 and bool, and rounds where the program does: a result of 16 bits is rounded as it is
by JAX's own operations, one by one. Functions that CUDA lacks are in `csrc/device/functions.cuh`.
"""

import math
import re

import numpy as np

from jax_softmax.fusion.expressions import ROUNDED, Expression, Number, Operation, kind

_COMPARISONS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_LOGIC = {"and": "&", "or": "|", "xor": "^"}
_ARITHMETIC = {"add": "+", "add_any": "+", "sub": "-", "mul": "*"}
# Which is not made one operation with an addition after it: x * w less the largest x * w of a row is 0 at the largest.
_PRODUCT = "__fmul_rn({}, {})"
_FUNCTIONS = {
    **{"exp": "expf({})", "exp2": "exp2f({})", "log": "logf({})", "log1p": "log1pf({})", "expm1": "expm1f({})"},
    **{"tanh": "tanh({})", "logistic": "1.0f / (1.0f + expf(-{}))", "sqrt": "sqrtf({})", "rsqrt": "rsqrtf({})"},
    **{"one_minus_square": "1.0f - __fmul_rn({0}, {0})", "erf": "erff({})", "sin": "sinf({})", "cos": "cosf({})"},
    **{"pow": "powf({}, {})", "floor": "floorf({})", "ceil": "ceilf({})"},
    "is_finite": "(fabsf({}) <= 3.40282347e38f)",
}


def text_of(expression: Expression, stored_as: str | None = None) -> str:
    """A C++ expression. Storing it in a dtype rounds it at the end."""
    statements: list[str] = []
    names: dict = {}

    def name(a, dtype):
        if isinstance(a, Number):
            return _literal(a)
        return f"static_cast<int>({a})" if dtype in ("int8", "uint8") else names.get(a, a)

    last = len(expression.operations) - 1
    for k, operation in enumerate(expression.operations):
        given = [name(a, dtype) for a, dtype in zip(operation.operands, operation.dtypes, strict=True)]
        text, rounds_to = _text(operation, given), operation.rounds_to
        if text is None and rounds_to is None:
            names[f"v{k}"] = given[0]
            continue
        text = given[0] if text is None else text
        if rounds_to and not (k == last and expression.result == f"v{k}" and rounds_to == stored_as):
            text = f"rounded<{ROUNDED[rounds_to]}>({text})"
        names[f"v{k}"] = f"v{len(statements)}"
        statements.append(f"const {kind(operation.dtype)} v{len(statements)} = {text};")
    result = name(expression.result, "")
    if statements and re.fullmatch(rf"const float {result} = .*;", statements[-1]):
        result = statements.pop().removeprefix(f"const float {result} = ").removesuffix(";")
    if not statements:
        return result
    return f"[&] {{ {' '.join(statements)} return {result}; }}()"


def with_rounded_result(text: str, dtype: str) -> str:
    """A text that reads the operator's result as its own dtype of 16 bits has it."""
    text = re.sub(r"\by\b", "y16", text)
    return f"[&] {{ const float y16 = rounded<{ROUNDED[dtype]}>(y); return {text}; }}()"


def _text(operation: Operation, given: list[str]) -> str | None:
    """The C++ of an operation without its rounding, or None if it changes nothing else."""
    name, out = operation.name, kind(operation.dtype)
    if name in _ARITHMETIC:
        operator = _ARITHMETIC[name]
        if out == "int":
            return f"static_cast<int>(static_cast<unsigned>({given[0]}) {operator} static_cast<unsigned>({given[1]}))"
        if name == "mul":
            return _PRODUCT.format(*given)
        return f"{given[0]} {operator} {given[1]}"
    if name == "div":
        divisor = operation.operands[1]
        if isinstance(divisor, Number) and divisor.value:
            # As XLA has it, which multiplies by the reciprocal of a constant.
            inverse = np.float32(1) / np.float32(divisor.value)
            if np.isfinite(inverse) and inverse != 0:
                return _PRODUCT.format(given[0], _literal(Number(float(inverse), "float32")))
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
    if name == "integer_pow":
        return f"power({given[0]}, {dict(operation.params)['y']})"
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
