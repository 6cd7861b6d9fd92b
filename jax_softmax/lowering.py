"""From the primitives to a program: an FFI custom call where there are kernels, jax.numpy elsewhere."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import mlir

from jax_softmax import _cuda, _kernels, reference, sharding
from jax_softmax.primitives import PRIMITIVES
from jax_softmax.row_primitives import ABSMAX_SCALE, KERNELS, ROW_PRIMITIVES, normalizer

TARGET = "jax_softmax"


def attributes(kernel, axes, masked, arrays="", load="", store=""):
    """What a custom call of a kernel says of itself, besides its buffers: see csrc/ffi/call.h and csrc/core/call.h.

    `arrays`: the roles of the operands that the expressions `load` and `store` read.
    """
    facts = _kernels.OPERATORS[kernel]
    sides = [*arrays.split(), *["number"] * facts["row_numbers"], *["label"] * facts["labelled"], *["mask"] * masked]
    return {
        "version": np.int64(_kernels.CALL_VERSION),
        "op": kernel,
        "axes": np.array(axes, np.int64),
        "sides": " ".join(sides),
        "load": load,
        "store": store,
    }


def _reference_rule(multiple_results):
    def function(*operands, op, axes):
        return reference.apply(op, axes, *operands)

    return mlir.lower_fun(function, multiple_results)


def _cpu_rule(by_reference):
    call = jax.ffi.ffi_lowering(TARGET)

    def by_float32(x, *mask, op, axes):
        return PRIMITIVES[op].bind(reference.without_narrow(x), *mask, axes=axes, axis_name=())

    by_float32 = mlir.lower_fun(by_float32, multiple_results=False)

    def rule(ctx, *operands, op, axes):
        x, *mask = ctx.avals_in
        if not jnp.issubdtype(x.dtype, jnp.floating):
            # XLA reads integers as they are, about as fast as the kernels would; but with a mask it mostly copies them.
            return (by_float32 if mask else by_reference)(ctx, *operands, op=op, axes=axes)
        if len(x.shape) > _kernels.MAX_DIMS:
            return by_reference(ctx, *operands, op=op, axes=axes)
        return call(ctx, *operands, **attributes(op, axes, ctx.avals_in[-1].dtype == bool))

    return rule


def _rows_on_cpu(by_reference):
    call = jax.ffi.ffi_lowering(TARGET)

    def rule(ctx, *operands, op, axes):
        x = ctx.avals_in[0]
        result = ABSMAX_SCALE.get(op, x.dtype.name)
        made = result == x.dtype.name or (result == "int8" and x.dtype != jnp.float64)
        if len(x.shape) > _kernels.MAX_DIMS or 0 in x.shape or not made:
            return by_reference(ctx, *operands, op=op, axes=axes)
        masked = ctx.avals_in[-1].dtype == bool
        return call(ctx, *operands, **attributes(KERNELS.get(op, op), axes, masked))

    return rule


def _by_logsumexp(function):
    """By the kernel for logsumexp: function(rows, *operands, mask or None, axes), given the rows' normalizer."""

    def of_operands(*operands, op, axes):
        where = operands[-1] if operands[-1].dtype == bool else None
        floats = operands if where is None else operands[:-1]
        return function(normalizer(floats[0], where, axes, ()), *floats, where, axes)

    return mlir.lower_fun(of_operands, multiple_results=True)


def _cross_entropy(rows, x, label, where, axes):
    return reference.cross_entropy_given(rows, x, label, axes), *rows


def _cross_entropy_gradient(rows, *operands):
    return reference.cross_entropy_gradient_given(rows, *operands), *rows


def _kl_divergence(rows, *operands):
    return reference.kl_divergence_given(rows, *operands), *rows


def _tangent_sums_transpose(x, largest, total, a, c, d, label, *mask, op, axes):
    """By the kernel that makes the normalizer anew, which on CUDA is faster than XLA with the one that is known."""
    operands = x, a, jnp.zeros_like(a), c, d, label, *mask
    return ROW_PRIMITIVES["cross_entropy_gradient"].bind(*operands, axes=axes, axis_name=())[:1]


def _known_shapes(shape, axes):
    """Known shapes that stand for all that a shape with symbolic dimensions may be, or none if no few shapes do.

    A symbolic dimension outside of the reduced ones only says how many rows there are. Plans differ by that: up to so
    many rows for each multiprocessor they spread rows over the chip. Powers of 2 meet every such range. One that is
    reduced, or lies inside of a reduced one, changes the rows themselves.
    """
    symbolic = [d for d, n in enumerate(shape) if not isinstance(n, int)]
    if symbolic[-1] >= min(axes, default=len(shape)):
        return []
    known = [n if isinstance(n, int) else 1 for n in shape]
    return [[rows if d == symbolic[0] else n for d, n in enumerate(known)] for rows in (1 << k for k in range(21))]


def _cuda_rule(by_reference):
    """An FFI call unless XLA itself is as fast, with a last result for blocks to exchange states through.

    XLA owns that memory, so that it lives as long as a CUDA graph that the call was captured into.
    """
    call = jax.ffi.ffi_lowering(TARGET)

    def rule(ctx, *operands, op, axes):
        x = ctx.avals_in[0]
        if len(x.shape) > _kernels.MAX_DIMS or _without_cuda():
            return by_reference(ctx, *operands, op=op, axes=axes)
        kernel, result = KERNELS.get(op, op), ABSMAX_SCALE.get(op)
        mask_shape = ctx.avals_in[-1].shape if ctx.avals_in[-1].dtype == bool else None

        def scratch_bytes(shape):
            of_mask = None
            if mask_shape is not None:
                of_mask = [1] * (len(shape) - len(mask_shape)) + list(mask_shape)
                of_mask = [m if isinstance(m, int) else n for m, n in zip(of_mask, shape, strict=True)]
            return _kernels.lower_for_cuda(shape, list(axes), kernel, x.dtype.name, of_mask, result)

        if all(isinstance(d, int) for d in x.shape):
            n = scratch_bytes(list(x.shape))
        else:
            # The memory would have no known size: the call is made only if no number of rows needs any.
            shapes = _known_shapes(x.shape, axes)
            n = 0 if shapes and all(scratch_bytes(shape) == 0 for shape in shapes) else None
        if n is None:
            return by_reference(ctx, *operands, op=op, axes=axes)
        n_results = len(ctx.avals_out)
        if n:
            ctx = ctx.replace(avals_out=[*ctx.avals_out, jax.core.ShapedArray((n,), np.dtype(np.uint8))])
        masked = ctx.avals_in[-1].dtype == bool
        return call(ctx, *operands, **attributes(kernel, axes, masked))[:n_results]

    return rule


_warned = False


def _without_cuda() -> bool:
    """Whether the kernels cannot be made here, of which a program that is to run here warns once.

    A program that is lowered on a machine without a GPU is for another one, where they can.
    """
    global _warned
    reason = _cuda.availability()
    if reason is None or "gpu" not in {device.platform for device in jax.local_devices()}:
        return False
    if not _warned:
        _warned = True
        warnings.warn(f"jax_softmax runs as jax.numpy on this GPU: {reason}.", stacklevel=2)
    return True


def _register():
    _cuda.availability()  # finds what a program that was lowered elsewhere needs, too
    jax.ffi.register_ffi_target(TARGET, _kernels.cpu_handler(), platform="cpu")
    jax.ffi.register_ffi_target(TARGET, _kernels.cuda_handlers(), platform="CUDA")
    by_reference, rows_by_reference = _reference_rule(multiple_results=False), _reference_rule(multiple_results=True)
    cross_entropy = _by_logsumexp(_cross_entropy)
    on_cuda = {op: _cuda_rule(by_reference) for op in PRIMITIVES}
    on_cuda |= {op: _cuda_rule(rows_by_reference) for op in ROW_PRIMITIVES}
    on_cuda |= {
        "cross_entropy": _cuda_rule(cross_entropy),
        "tangent_sums_transpose": mlir.lower_fun(_tangent_sums_transpose, multiple_results=True),
    }
    on_cpu = {op: _cpu_rule(by_reference) for op in PRIMITIVES}
    on_cpu |= {
        **dict.fromkeys(("logsumexp", "entropy", *ABSMAX_SCALE), _rows_on_cpu(rows_by_reference)),
        "cross_entropy": cross_entropy,
        "cross_entropy_gradient": _by_logsumexp(_cross_entropy_gradient),
        "kl_divergence": _by_logsumexp(_kl_divergence),
        "tangent_sums_transpose": rows_by_reference,
    }
    for op, primitive in (PRIMITIVES | ROW_PRIMITIVES).items():
        by_xla = rows_by_reference if primitive.multiple_results else by_reference
        for platform, rule in {None: by_xla, "cpu": on_cpu[op], "cuda": on_cuda[op]}.items():
            rules = (functools.partial(r, op=op) for r in (rule, by_xla))
            mlir.register_lowering(primitive, sharding.partitioned(primitive, platform, *rules), platform=platform)


_register()
