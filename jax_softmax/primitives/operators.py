"""The primitives by name, and what the C++ table says of them. What they take, give and mean: `records.py`.

There is one for each operator, of its name, so that programs, profiles and errors show which it is.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive

from jax_softmax import _kernels


class Operator(NamedTuple):
    """A row of the table `_kernels.OPERATORS`."""

    inputs: int  # operands of x's shape
    element_results: int  # results of x's shape
    row_results: int
    row_numbers: int  # operands with a number for each row
    labelled: bool  # whether there is an operand with a label for each row
    on_cpu: bool  # whether there is a CPU kernel
    quantizes: bool  # whether the dtype of the result changes what is computed
    logarithms: int  # of a row, or powers

    @property
    def operands(self):
        """How many come before the mask, where no results of rows are given."""
        return self.inputs + self.row_numbers + self.labelled

    def given(self, operands, masked):
        """How many results of rows are among these operands."""
        return len(operands) - masked - self.operands


OPERATORS = {op: Operator(*(facts[name] for name in Operator._fields)) for op, facts in _kernels.OPERATORS.items()}
PRIMITIVES = {op: Primitive(op) for op in OPERATORS}
for _op, _primitive in PRIMITIVES.items():
    _primitive.multiple_results = OPERATORS[_op].element_results + OPERATORS[_op].row_results > 1


class Coefficients(NamedTuple):
    """What each row has that makes a cross entropy's gradient."""

    factor: jax.Array  # of softmax(x)
    lse_factor: jax.Array  # of softmax(x) lse
    offset: jax.Array  # added to all elements
    at_label: jax.Array  # added to the label's


def bind(op, *operands, where, axes, axis_name=(), dtype=None, in_place=False):
    """The results of the primitive of a name, with a mask or None. dtype None stands for x's."""
    params = {"in_place": True} if in_place else {}
    if OPERATORS[op].element_results:
        params["dtype"] = jnp.dtype(operands[0].dtype if dtype is None else dtype).name
    mask = [] if where is None else [where]
    return PRIMITIVES[op].bind(*operands, *mask, axes=axes, axis_name=axis_name, **params)


def split(operands):
    """A primitive's operands: those before the mask, and the mask or None."""
    *others, last = operands
    return (others, last) if last.dtype == bool else (operands, None)
