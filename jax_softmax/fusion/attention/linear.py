"""Expressions that are linear in a name, as those of weights after the softmax have to be."""

from jax_softmax.fusion.expressions import ROUNDED, Number


def depending_on(expression, name) -> set:
    """A name, and those of an expression's operations that are made of it."""
    found = {name}
    for k, op in enumerate(expression.operations):
        if not found.isdisjoint(a for a in op.operands if isinstance(a, str)):
            found.add(f"v{k}")
    return found


def is_linear(expression, name) -> bool:
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


def multipliers(expression, name):
    """The operations that a linear expression does to a name, sorted and without roundings: a linear map and its
    transpose have the same."""
    dependent, texts, found = depending_on(expression, name), {}, []

    def text(a):
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
