"""An array with the values that it has in memory, for XLA expressions that are combined with a kernel's results.

A kernel reads its operand from memory, rounded to the operand's dtype. An XLA expression that uses the same value need
not: of `x * c - largest` XLA makes one fused multiply-add, and it does not round a bfloat16 product that is widened
again. Its x is then not the one whose maximum the kernel found: it differs by up to half a unit in the last
place, which at 1e9 is 32. `as_stored(x)` is x as the kernel reads it: `runtime/lowering.py` makes it a barrier for
XLA's optimizations.

The primitive has the name of JAX's own identity, which `fuse` folds into kernels. In programs that `fuse` rewrites for
CUDA `fusion/kernels/recomputed.py` does this work instead.
"""

from jax import Array
from jax.extend.core import Primitive

from jax_softmax.primitives.types import Arrays, BatchAxes, Tangent, Tangents

as_stored_p = Primitive("copy")


def as_stored(x: Array) -> Array:
    return as_stored_p.bind(x)


def jvp(primals: Arrays, tangents: Tangents) -> tuple[Array, Tangent]:
    """The tangent is passed on as it is: no kernel reads it."""
    (x,), (t,) = primals, tangents
    return as_stored(x), t


def batching_rule(operands: Arrays, batch_axes: BatchAxes) -> tuple[Array, int | None]:
    (x,), (axis,) = operands, batch_axes
    return as_stored(x), axis
