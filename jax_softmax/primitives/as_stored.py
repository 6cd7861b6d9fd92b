"""An array with the values that it has in memory, for XLA expressions that are combined with a kernel's results.

A kernel reads its operand from memory, rounded to the operand's dtype. An XLA expression that uses the same value need
not: of `x * c - largest` XLA makes one fused multiply-add, and it does not round a bfloat16 product that is widened
again. Its x is then not the one whose maximum the kernel found: it differs by up to half a unit in the last
place, which at 1e9 is 32. `as_stored(x)` is x as the kernel reads it: `runtime/lowering.py` makes it a barrier for
XLA's optimizations.

The primitive has the name of JAX's own identity, which `fuse` folds into kernels. In programs that `fuse` rewrites for
CUDA `fusion/made_twice.py` does this work instead.
"""

from jax.extend.core import Primitive

as_stored_p = Primitive("copy")


def as_stored(x):
    return as_stored_p.bind(x)


def jvp(primals, tangents):
    """The tangent is passed on as it is: no kernel reads it."""
    return as_stored(*primals), *tangents


def batching_rule(operands, batch_axes):
    return as_stored(*operands), *batch_axes
