"""An array as it is in memory, where XLA combines it with what a kernel has made of it.

A kernel reads its operand from memory, rounded to the operand's dtype. An XLA expression of the same value need not:
of `x * c - largest` XLA makes one fused multiply-add, and of a bfloat16 product that is widened again it leaves out the
rounding. The product is then another number than the one whose maximum the kernel found, by up to half a unit in its
last place, which at 1e9 is 32. `in_memory(x)` is x as the kernel reads it: `runtime/lowering.py` puts a barrier around
the array, through which XLA's optimizations do not look.

The primitive has the name of JAX's own identity, which `fuse` folds into kernels. Programs that `fuse` rewrites for
CUDA have none: `fusion/made_twice.py` says there what is in memory.
"""

from jax.extend.core import Primitive

in_memory_p = Primitive("copy")


def in_memory(x):
    return in_memory_p.bind(x)


def jvp(primals, tangents):
    """The tangent is the operand's: it is no operand of a kernel."""
    return in_memory(*primals), *tangents


def batch(operands, batch_axes):
    return in_memory(*operands), *batch_axes
