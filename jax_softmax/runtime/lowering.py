"""From the primitives to a program: an FFI custom call where there are kernels, jax.numpy elsewhere."""

import functools

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from jax.interpreters import mlir

from jax_softmax import _kernels, _private
from jax_softmax.devices import division, partitioning
from jax_softmax.primitives.in_memory import in_memory_p
from jax_softmax.primitives.operators import OPERATORS, PRIMITIVES
from jax_softmax.primitives.product import several_devices_p
from jax_softmax.primitives.records import RECORDS, applied, apply
from jax_softmax.runtime import cuda

TARGET = "jax_softmax"
ATTENTION_TARGET = "jax_softmax_attention"  # that `fusion/attention/` calls


def register() -> None:
    """Tells XLA of the kernels, and JAX which program each primitive becomes on each platform."""
    cuda.availability()  # finds what a program that was lowered elsewhere needs, too
    division.register()
    jax.ffi.register_ffi_target(TARGET, _kernels.cpu_handler(), platform="cpu")
    jax.ffi.register_ffi_target(TARGET, _kernels.cuda_handlers(), platform="CUDA")
    mlir.register_lowering(several_devices_p, _several_devices)
    barrier, kept = (mlir.lower_fun(f, multiple_results=False) for f in (jax.lax.optimization_barrier, _kept_as_it_is))
    for platform, rule in {None: lambda ctx, x: [x], "cpu": kept, "cuda": barrier}.items():
        mlir.register_lowering(in_memory_p, rule, platform=platform)
    for op, primitive in PRIMITIVES.items():
        record, several = RECORDS[op], primitive.multiple_results
        by_reference = mlir.lower_fun(functools.partial(apply, op), several)
        from_parts = by_reference
        if record.from_parts:
            from_parts = mlir.lower_fun(functools.partial(applied, record.from_parts), several)
        on_cpu = _cpu_rule(op, by_reference) if OPERATORS[op].on_cpu else from_parts
        on_cuda = _cuda_rule(op, from_parts if record.from_parts_on_cuda else by_reference)
        for platform, rule in {None: by_reference, "cpu": on_cpu, "cuda": on_cuda}.items():
            rule = partitioning.partitioned(primitive, platform, rule, by_reference)
            mlir.register_lowering(primitive, rule, platform=platform)


def _several_devices(ctx):
    several = _private.devices_of(ctx) != 1
    return mlir.lower_fun(lambda: jnp.array(several), multiple_results=False)(ctx)


def _kept_as_it_is(x):
    """For CPUs, where XLA of JAX 0.8 makes a product and a sum in one operation beyond a barrier, but not beyond a
    sign."""
    x = jax.lax.optimization_barrier(x)
    return jnp.copysign(jnp.abs(x), x) if x.dtype in (jnp.float32, jnp.float64) else x


def export_checks() -> list[jax.export.DisabledSafetyCheck]:
    """The safety checks that `jax.export` must leave out for programs that call these functions.

    JAX vouches only for custom calls of its own. Pass the list as `disabled_checks`; where the exported program runs,
    jax_softmax must be imported::

        jax.export.export(jax.jit(f), disabled_checks=jax_softmax.export_checks())(x)
    """
    targets = TARGET, ATTENTION_TARGET, partitioning.TARGET
    return [jax.export.DisabledSafetyCheck.custom_call(target) for target in targets]


# ---- Calls of kernels.


def attributes(op, axes, masked, arrays="", load="", store="", given=0):
    """What a custom call of a kernel says of itself, besides its buffers: see csrc/core/call.h.

    `arrays`: the roles of the operands that the expressions `load` and `store` read. `given`: how many results of rows
    are operands instead, before the rows' own numbers.
    """
    operator = OPERATORS[op]
    numbers = ["number"] * (given + operator.row_numbers)
    sides = [*arrays.split(), *numbers, *["label"] * operator.labelled, *["mask"] * masked]
    return {
        "version": np.int64(_kernels.CALL_VERSION),
        "op": op,
        "axes": np.array(axes, np.int64),
        "sides": " ".join(sides),
        "load": load,
        "store": store,
    }


def described(
    op, shape, axes, dtype, mask_shape=None, out_dtype=None, more_results=(), arrays="", beside=(), load="", store=""
):
    """A custom call of a kernel as `_kernels.plan` takes it: shapes and dtypes of operands and results, and attributes.

    `beside`: shapes and dtypes of the arrays that expressions read, among whose roles in `arrays` indices are as well.
    """
    operator, shape = OPERATORS[op], list(shape)
    rows = [1 if d in axes else n for d, n in enumerate(shape)]
    results = operator.element_results * [(shape, out_dtype or dtype)] + [(shape, dtype) for dtype in more_results]
    wide = "float64" if "float64" in (dtype, out_dtype) else "float32"
    operands = operator.inputs * [(shape, dtype)] + [(list(shape), dtype) for shape, dtype in beside]
    operands += operator.row_numbers * [(rows, wide)] + operator.labelled * [(rows, "int32")]
    operands += [] if mask_shape is None else [(list(mask_shape), "bool")]
    return {
        "operands": operands,
        "results": results + operator.row_results * [(rows, wide)],
        "attributes": attributes(op, axes, mask_shape is not None, arrays, load, store),
    }


def _typed(avals, shape):
    """Shapes and dtypes. Symbolic dimensions have x's extent, `shape`, there."""
    return [
        (
            [n if isinstance(n, int) else m for n, m in zip(a.shape, shape[len(shape) - a.ndim :], strict=True)],
            a.dtype.name,
        )
        for a in avals
    ]


def _cpu_rule(op, by_reference):
    call = jax.ffi.ffi_lowering(TARGET)
    in_one_dtype = _in_one_dtype_rule(op, _cpu_makes)

    def rule(ctx, *operands, axes, in_place=False, **dtype):
        x, masked = ctx.avals_in[0], ctx.avals_in[-1].dtype == bool
        if len(x.shape) > _kernels.MAX_DIMS or 0 in x.shape:
            return by_reference(ctx, *operands, axes=axes, **dtype)
        if not _makes(op, _cpu_makes, ctx):
            rule = by_reference if OPERATORS[op].quantizes else in_one_dtype
            return rule(ctx, *operands, axes=axes, **dtype)
        given = OPERATORS[op].given(operands, masked)  # which the kernel then does not make
        made = ctx.replace(avals_out=ctx.avals_out[:1]) if given else ctx
        results = call(made, *operands, **attributes(op, axes, masked, given=given))
        return [*results, *operands[1 : 1 + given]]

    return rule


def known_shapes(shape, axes):
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


def _cuda_rule(op, by_xla):
    """An FFI call unless XLA itself is as fast, with a last result for blocks to exchange states through.

    XLA owns that memory, so that it lives as long as a CUDA graph that the call was captured into.
    """
    call = jax.ffi.ffi_lowering(TARGET)
    call_in_place = jax.ffi.ffi_lowering(TARGET, operand_output_aliases={0: 0})
    in_one_dtype = _in_one_dtype_rule(op, _cuda_makes)

    def rule(ctx, *operands, axes, in_place=False, **dtype):
        x, masked = ctx.avals_in[0], ctx.avals_in[-1].dtype == bool
        if len(x.shape) > _kernels.MAX_DIMS or _without_cuda():
            return by_xla(ctx, *operands, axes=axes, **dtype)
        given = OPERATORS[op].given(operands, masked)  # which the kernel makes anew, faster than XLA makes the gradient
        ctx = ctx.replace(avals_in=[x, *ctx.avals_in[1 + given :]])
        operands = operands[0], *operands[1 + given :]
        if not OPERATORS[op].quantizes and not _makes(op, _cuda_makes, ctx):
            return in_one_dtype(ctx, *operands, axes=axes, in_place=in_place, **dtype)

        call_attributes = attributes(op, axes, masked)

        def scratch_bytes(shape):
            return _kernels.lower_for_cuda(_typed(ctx.avals_in, shape), _typed(ctx.avals_out, shape), call_attributes)

        if all(isinstance(d, int) for d in x.shape):
            n = scratch_bytes(x.shape)
        else:
            # The memory would have no known size: the call is made only if no number of rows needs any.
            shapes = known_shapes(x.shape, axes)
            n = 0 if shapes and all(scratch_bytes(shape) == 0 for shape in shapes) else None
        if n is None:
            return by_xla(ctx, *operands, axes=axes, **dtype)
        n_results = len(ctx.avals_out)
        if n:
            ctx = ctx.replace(avals_out=[*ctx.avals_out, jax.core.ShapedArray((n,), np.dtype(np.uint8))])
        in_place &= ctx.avals_out[0].dtype == x.dtype
        made = (call_in_place if in_place else call)(ctx, *operands, **call_attributes)
        return made[:n_results]

    return rule


def _without_cuda() -> bool:
    """Whether the kernels cannot be made here, of which a program that is to run here warns once.

    A program that is lowered on a machine without a GPU is for another one, where they can.
    """
    reason = cuda.availability()
    if reason is None or "gpu" not in {device.platform for device in jax.local_devices()}:
        return False
    partitioning.warn(f"runs as jax.numpy on this GPU: {reason}")
    return True


# ---- Dtypes. A kernel's inputs have one.


def _makes(op, makes, ctx):
    """Whether the kernel of a platform takes these operands and gives these results."""
    inputs = {aval.dtype for aval in ctx.avals_in[: OPERATORS[op].inputs]}
    if not OPERATORS[op].element_results:
        return len(inputs) == 1
    return len(inputs) == 1 and makes(*inputs, ctx.avals_out[0].dtype)


def _cpu_makes(given, result):
    return result == given or (result == jnp.int8 and given != jnp.float64)


def _cuda_makes(given, result):
    """What quantizes makes all."""
    return result == given or (result.name in ("float16", "bfloat16", "float32") and given != jnp.float64)


def _common(*dtypes):
    """The dtype of all, or one that holds them."""
    return dtypes[0] if len(set(dtypes)) == 1 else jnp.dtype("float64" if jnp.float64 in dtypes else "float32")


def _in_one_dtype_rule(op, makes):
    """By a kernel of a dtype that holds all inputs and, if it gives no other result, the result as well."""

    def function(*operands, axes, dtype, **params):
        n, result = OPERATORS[op].inputs, jnp.dtype(dtype)
        wide, made = _common(*(a.dtype for a in operands[:n])), result
        if not makes(wide, result):
            wide = made = _common(wide, result)
        inputs = (a.astype(wide) for a in operands[:n])
        results = PRIMITIVES[op].bind(*inputs, *operands[n:], axes=axes, axis_name=(), dtype=made.name, **params)
        if not PRIMITIVES[op].multiple_results:
            return results.astype(result)
        return [results[0].astype(result), *results[1:]]

    return mlir.lower_fun(function, PRIMITIVES[op].multiple_results)
