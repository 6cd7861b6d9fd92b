"""From the primitives to a program: an FFI custom call where there are kernels, jax.numpy elsewhere."""

import functools

import jax
import numpy as np
from jax.interpreters import mlir

from jax_softmax import _kernels, reference, sharding
from jax_softmax.primitives import PRIMITIVES, float_operands

TARGET = "jax_softmax"

HAS_CUDA = _kernels.build_info()["cuda"]


def _reference_rule():
    def function(*operands, op, axes):
        return reference.apply(op, axes, *operands)

    return mlir.lower_fun(function, multiple_results=False)


def _ffi_rule(by_reference):
    call = jax.ffi.ffi_lowering(TARGET)

    def rule(ctx, *operands, op, axes):
        if len(ctx.avals_in[0].shape) > _kernels.MAX_DIMS:
            return by_reference(ctx, *operands, op=op, axes=axes)
        return call(ctx, *operands, op=op, axes=np.array(axes, np.int64))

    return rule


def _cuda_rule(by_reference, n_floats):
    """As `_ffi_rule`, with a second result for the kernels to exchange states through where they need one.

    XLA owns it, so that it lives as long as a CUDA graph that the call was captured into. A shape with symbolic
    dimensions has no known size; kernels that need no such memory do then.
    """
    ffi_rule = _ffi_rule(by_reference)

    def rule(ctx, *operands, op, axes):
        x = ctx.avals_in[0]
        n = 0
        if len(x.shape) <= _kernels.MAX_DIMS and all(isinstance(d, int) for d in x.shape):
            mask_shape = None
            if len(ctx.avals_in) > n_floats:
                shape = ctx.avals_in[n_floats].shape
                mask_shape = [*[1] * (len(x.shape) - len(shape)), *shape]
            n = _kernels.scratch_bytes(list(x.shape), list(axes), op, x.dtype.name, mask_shape)
        if n:
            ctx = ctx.replace(avals_out=[*ctx.avals_out, jax.core.ShapedArray((n,), np.dtype(np.uint8))])
        return ffi_rule(ctx, *operands, op=op, axes=axes)[:1]

    return rule


def _register():
    jax.ffi.register_ffi_target(TARGET, _kernels.cpu_handler(), platform="cpu")
    if HAS_CUDA:
        jax.ffi.register_ffi_target(TARGET, _kernels.cuda_handler(), platform="CUDA")
    for op, primitive in PRIMITIVES.items():
        by_reference = _reference_rule()
        rules = {None: by_reference, "cpu": _ffi_rule(by_reference)}
        if HAS_CUDA:
            rules["cuda"] = _cuda_rule(by_reference, float_operands(op))
        for platform, rule in rules.items():
            rule = sharding.partitioned(primitive, platform, functools.partial(rule, op=op))
            mlir.register_lowering(primitive, rule, platform=platform)


_register()
