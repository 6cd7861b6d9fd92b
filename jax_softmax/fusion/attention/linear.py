"""Expressions that are linear in a name, as those of weights after the softmax have to be."""

import math
from collections import Counter
from typing import Any

from jax_softmax.fusion.program.expressions import ROUNDED, Expression, Number, Operation


def depending_on(expression: Expression, name: str) -> set[str]:
    """A name, and those of an expression's operations that are made of it."""
    found = {name}
    for k, op in enumerate(expression.operations):
        if not found.isdisjoint(a for a in op.operands if isinstance(a, str)):
            found.add(f"v{k}")
    return found


def is_linear(expression: Expression, name: str) -> bool:
    """Whether an expression is linear in a name, and depends on it."""
    dependent = depending_on(expression, name)
    for op in expression.operations:
        which = [isinstance(a, str) and a in dependent for a in op.operands]
        if not any(which):
            continue
        zeros = [isinstance(a, Number) and a.value == 0 for a in op.operands]
        if op.name == "mul" or op.name in ("convert_element_type", "neg", "reduce_precision"):
            linear = sum(which) == 1
        elif op.name == "div":
            linear = which == [True, False]
        elif op.name == "select_n":
            linear = not which[0] and all(a or b for a, b in zip(which[1:], zeros[1:], strict=True))
        else:
            linear = op.name in ("add", "add_any", "sub") and all(which)
        if not linear or op.dtype not in ("float32", *ROUNDED):
            return False
    return expression.result in dependent


def without_roundings(expression: Expression, name: str) -> Expression:
    """An expression that is linear in a name, in float32."""

    def wide(op: Operation) -> Operation:
        if op.name == "reduce_precision":
            op = op._replace(name="convert_element_type", params=())
        return op._replace(dtypes=tuple("float32" if d in ROUNDED else d for d in op.dtypes), dtype="float32")

    dependent = depending_on(expression, name)
    operations = (wide(op) if f"v{k}" in dependent else op for k, op in enumerate(expression.operations))
    return expression._replace(operations=tuple(operations))


def without_scale(expression: Expression, name: str) -> tuple[Expression, float]:
    """An expression that is linear in a name, without the numbers that multiply all of it, and their product."""
    dependent, operations, scale = depending_on(expression, name), list(expression.operations), 1.0
    times_read = Counter(a for op in expression.needed().values() for a in op.operands)
    pending: list[Any] = [expression.result]  # what multiplies all of it
    while pending:
        a = pending.pop()
        op = operations[int(a[1:])] if isinstance(a, str) and a.startswith("v") and times_read[a] <= 1 else None
        # What is rounded beside the name, and not with it, is as it is in the gradients' expressions.
        if op is None or op.dtype not in ("float32", *ROUNDED) or (op.rounds_to and a not in dependent):
            continue
        of_product: tuple[Any, ...] = ()
        if op.name in ("mul", "div"):
            of_product = op.operands
        elif op.name == "select_n":
            of_product = tuple(b for b in op.operands[1:] if not (isinstance(b, Number) and b.value == 0))
            of_product = of_product if len(of_product) == 1 else ()
        elif op.name in ("convert_element_type", "neg", "reduce_precision"):
            of_product = op.operands
        numbers = [b for b in of_product if isinstance(b, Number) and b.value and math.isfinite(b.value)]
        for n in numbers:
            scale = scale / n.value if op.name == "div" and n is op.operands[1] else scale * n.value
        operands: list[Any] = [*op.operands]
        ones = (b._replace(value=1.0) if any(b is n for n in numbers) else b for b in operands)
        operations[int(a[1:])] = op._replace(operands=tuple(ones))
        pending += of_product[:1] if op.name == "div" else of_product
    return expression._replace(operations=tuple(operations)), scale


def multipliers(expression: Expression, name: str) -> list[tuple[str, tuple[Any, ...]]]:
    """The operations that a linear expression does to a name, sorted and without roundings: a linear map and its
    transpose have the same."""
    dependent, texts, found = depending_on(expression, name), dict[str, Any](), []

    def text(a: str | Number) -> Any:
        return texts.get(a, a) if isinstance(a, str) else ("number", float(a.value))

    for k, op in enumerate(expression.operations):
        others = tuple(None if a in dependent else text(a) for a in op.operands)
        if f"v{k}" in dependent:
            if op.name not in ("convert_element_type", "reduce_precision"):
                others = tuple(sorted(others, key=str)) if op.name == "mul" else others
                found.append((op.name, others))
        elif op.name == "convert_element_type" and op.dtype in ("float32", *ROUNDED):
            texts[f"v{k}"] = others[0]
        else:
            texts[f"v{k}"] = op.name, others
    return sorted(found, key=str)
