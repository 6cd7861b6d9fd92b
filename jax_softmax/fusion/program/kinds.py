"""The kinds of equations, and what may become of each, whatever kernels a program has."""

from typing import Literal

from jax_softmax import _kernels
from jax_softmax.fusion.program import expressions
from jax_softmax.fusion.program.graph import Equation, is_variable
from jax_softmax.primitives.operators import PRIMITIVES
from jax_softmax.primitives.types import Atom

Kind = Literal["copy", "view", "cast", "elementwise", "reduction", "move", "operator", "product", "other"]

# Equations whose jaxprs are rewritten.
REGIONS: tuple[str, ...] = (
    *("scan", "while", "cond", "remat2", "checkpoint", "shard_map", "jit", "pjit", "closed_call", "core_call"),
    *("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr", "fused"),
)

REDUCTIONS = ("reduce_sum", "reduce_max", "reduce_min", "argmax", "argmin", "reduce_and", "reduce_or")
_NAMES: dict[Kind, tuple[str, ...]] = {
    "elementwise": (*expressions.ELEMENTWISE, "iota"),
    "copy": expressions.SAME,
    "view": expressions.VIEWS,
    "cast": ("convert_element_type",),
    "reduction": REDUCTIONS,
    "move": ("slice", "dynamic_slice", "pad", "concatenate", "rev"),
    "operator": tuple(PRIMITIVES),
    "product": ("dot_general", "ragged_dot", "linear_product"),
}
_KINDS: dict[str, Kind] = {name: kind for kind, names in _NAMES.items() for name in names}  # the last one counts


def kind_of(equation: Equation) -> Kind:
    return _KINDS.get(equation.name, "other")


def is_strided_view(equation: Equation) -> bool:
    """Whether its result has its operand's elements, each once, in other dimensions."""
    return kind_of(equation) == "view" and equation.name != "broadcast_in_dim"


def is_loop(equation: Equation) -> bool:
    """Whether XLA makes it in a loop over elements, which it merges with the loops that make its operands."""
    return expressions.is_expressible(equation) or kind_of(equation) in ("reduction", "move")


def may_fold(equation: Equation) -> bool:
    """Whether it is an operator, or a loop."""
    return is_loop(equation) or kind_of(equation) == "operator"


def foldable(operator: Equation) -> bool:
    """Whether something may be folded into an operator's call."""
    return not why_not_foldable(operator)


def why_not_foldable(operator: Equation) -> str:
    if operator.params["axis_name"]:
        return "devices share its rows"
    if not all(map(is_variable, operator.inputs)):
        return "an operand is a constant"
    return why_no_kernels(operator.inputs[0])


def why_no_kernels(x: Atom) -> str:
    """Why there are no kernels for an array of this dtype and shape; "" if there are."""
    shape = x.aval.shape
    if x.aval.dtype.name not in expressions.WRITABLE:
        return f"it is of {x.aval.dtype}, and kernels are of {', '.join(expressions.WRITABLE)}"
    if len(shape) > _kernels.MAX_DIMS:
        return f"it has {len(shape)} dimensions, and kernels at most {_kernels.MAX_DIMS}"
    if 0 in shape:
        return "it has no elements"
    return "" if all(isinstance(n, int) for n in shape) else "an extent is a symbol"
