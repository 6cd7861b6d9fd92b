"""The primitives by name: what each takes and gives.

There is one for each operation, of its name, so that programs, profiles and errors show which it is.

    x, [where]                               softmax | log_softmax      y
    y, t, [where]                            softmax_linear | log_softmax_jvp | log_softmax_vjp
    x, [where]                               logsumexp                  largest, total
    x, [where]                               entropy                    entropy, largest, total
    x, y, largest_y, log_total_y, [where]    kl_divergence              divergence, largest, total
    x, label, [where]                        cross_entropy              loss, largest, total
    x, [largest, total], *Coefficients, label, [where]
                                             cross_entropy_gradient     gradient, largest, total
    x, [where]                               absmax_scale               scaled, scale
    x, [where]                               softmax_and_normalizer     y, largest, total
    x, [where]                               logsumexp_and_distances    largest, total, distance, count
    x, *Coefficients, label, [where]         cross_entropy_gradient_and_distances
                                                                        gradient, largest, total, distance, count

x is an array of float16, bfloat16, float32 or float64. The second array of a primitive has x's shape; y of
kl_divergence has its dtype, t may have another than y. `where` is a boolean mask that broadcasts to that shape; masked
elements count for nothing and give the operator's neutral result, in the linear maps 0. `label` is as in `labels.py`.
`axes` are the reduced axes, sorted. `axis_name` is a tuple of mesh axes, inside `shard_map`, along which each device
has a part of every row; else it is empty, as it is wherever there is a label: losses have their own way with parts of
rows. `dtype` names the dtype of the result for elements, where there is one: float64 of float64 alone, and 8 bits of
absmax_scale alone.

What rows have, as operands or as results, is of x's shape with extent 1 along `axes`, in float32 (float64 for float64).
`largest` is a row's maximum, and `total` the sum of exp(x - largest), relative to 0 where that is infinite, both of
elements that are not masked: two parts of the log-sum-exp lse (`reference.Normalizer`). No derivative depends on
`largest`, which counts as a constant: with another one `total` is another. `entropy` is that of softmax(x), and
`divergence` that of softmax(x) from softmax(y), of which log_total_y is the logarithm of the sum; of rows that are
masked altogether both may be any number but NaN. loss is lse less the label's element of x, 0 of a row without a label.
The gradient is a cross entropy's: softmax(x) (factor + lse_factor lse) + offset, and at_label added at the label; where
all four are 0, so is the gradient, even if x is NaN. Where largest and total are known already they may be given.
`in_place` says of a gradient that nothing else reads x: on CUDA the gradient takes x's place if it has x's dtype.
`scaled` is x divided by its row's `scale`, in a dtype of `reference.SCALED`. `distance` is the sum of x - largest,
relative to 0 where that is infinite, over the elements that are not masked and whose distance is not -inf, and `count`
is their number, up to `reference.MOST_COUNTED`.
`softmax_and_normalizer` and `logsumexp_and_distances` have no derivative: `fuse` alone makes them, of programs that
have been differentiated.
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
