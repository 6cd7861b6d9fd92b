"""The primitives, and what the C++ table says of them. `records.py` says what they mean.

Each operator has a primitive of its own, of its name, which programs, profiles and errors show.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.typing import DTypeLike

from jax_softmax import _kernels
from jax_softmax.primitives.types import Axes, Mask, MeshAxes


class Operator(NamedTuple):
    """A row of the table `_kernels.OPERATORS`."""

    inputs: int  # operands of x's shape
    element_results: int  # results of x's shape
    row_results: int
    row_numbers: int  # operands that are a number for each row
    labelled: bool  # whether there is an operand that is a label for each row
    on_cpu: bool  # whether there is a CPU kernel
    quantizes: bool  # whether the dtype of the result changes what is computed
    logarithms: int  # how many logarithms or powers are computed for a row

    @property
    def operands(self) -> int:
        """How many there are, without the mask and results of rows that are given."""
        return self.inputs + self.row_numbers + self.labelled

    def without_given(self, operands: Sequence[Any], masked: bool) -> list[Any]:
        """These operands without results of rows, which another operator made."""
        n_given = len(operands) - masked - self.operands
        return [operands[0], *operands[1 + n_given :]]


OPERATORS = {op: Operator(*(facts[name] for name in Operator._fields)) for op, facts in _kernels.OPERATORS.items()}
PRIMITIVES = {op: Primitive(op) for op in OPERATORS}
for _op, _primitive in PRIMITIVES.items():
    _primitive.multiple_results = OPERATORS[_op].element_results + OPERATORS[_op].row_results > 1


class Coefficients(NamedTuple):
    """Of each row of a cross entropy's gradient, which is softmax(x) (factor + lse_factor lse) + offset, and at_label
    added at the label."""

    factor: jax.Array
    lse_factor: jax.Array
    offset: jax.Array
    at_label: jax.Array


def bind(
    op: str,
    *operands: jax.Array,
    where: Mask,
    axes: Axes,
    axis_name: MeshAxes = (),
    dtype: DTypeLike | None = None,
    in_place: bool = False,
) -> Any:
    """The results of an operator's primitive. `where` is a mask or None; a `dtype` of None is x's."""
    params: dict[str, Any] = {"in_place": True} if in_place else {}
    if OPERATORS[op].element_results:
        params["dtype"] = jnp.dtype(operands[0].dtype if dtype is None else dtype).name
    mask = [] if where is None else [where]
    return PRIMITIVES[op].bind(*operands, *mask, axes=axes, axis_name=axis_name, **params)


def split(operands: Sequence[jax.Array]) -> tuple[Sequence[jax.Array], Mask]:
    """A primitive's operands without the mask, and the mask or None."""
    *others, last = operands
    return (others, last) if last.dtype == bool else (operands, None)
