"""From the primitives to a program: an FFI custom call where there are kernels, jax.numpy elsewhere."""

import functools

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from jax.interpreters import mlir

from jax_softmax import _kernels, _private
from jax_softmax.devices import division, partitioning
from jax_softmax.primitives.as_stored import as_stored_p
from jax_softmax.primitives.operators import OPERATORS, PRIMITIVES
from jax_softmax.primitives.product import several_devices_p
from jax_softmax.primitives.records import RECORDS, apply, call_on_operands
from jax_softmax.runtime import cuda, judge
from jax_softmax.runtime.judge import Maker

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
        mlir.register_lowering(as_stored_p, rule, platform=platform)
    for op, primitive in PRIMITIVES.items():
        record, several = RECORDS[op], primitive.multiple_results
        by_reference = mlir.lower_fun(functools.partial(apply, op), several)
        composed = mlir.lower_fun(functools.partial(call_on_operands, record.composed or record.reference), several)
        ways = {Maker.COMPOSED: composed, Maker.XLA: by_reference}
        on_cpu, on_cuda = _cpu_rule(op, ways), _cuda_rule(op, ways[judge.left_on_cuda(op)])
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


def _cpu_rule(op, ways):
    call, in_one_dtype = jax.ffi.ffi_lowering(TARGET), _in_one_dtype_rule(op, judge.cpu_makes)

    def kernel(ctx, *operands, axes, in_place=False, **dtype):
        masked = ctx.avals_in[-1].dtype == bool
        given = OPERATORS[op].known_results(operands, masked)  # which the kernel then does not make
        made = ctx.replace(avals_out=ctx.avals_out[:1]) if given else ctx
        results = call(made, *operands, **attributes(op, axes, masked, given=given))
        return [*results, *operands[1 : 1 + given]]

    ways = {Maker.KERNEL: kernel, Maker.WIDER_KERNEL: in_one_dtype, **ways}

    def rule(ctx, *operands, **params):
        return ways[judge.on_cpu(op, ctx.avals_in, ctx.avals_out)](ctx, *operands, **params)

    return rule


def _cuda_rule(op, by_xla):
    """An FFI call unless XLA itself is as fast, with a last result for blocks to exchange states through.

    XLA owns that memory, so that it lives as long as a CUDA graph that the call was captured into.
    """
    call = jax.ffi.ffi_lowering(TARGET)
    call_in_place = jax.ffi.ffi_lowering(TARGET, operand_output_aliases={0: 0})
    in_one_dtype = _in_one_dtype_rule(op, judge.cuda_makes)

    def rule(ctx, *operands, axes, in_place=False, **dtype):
        x, masked = ctx.avals_in[0], ctx.avals_in[-1].dtype == bool
        if not judge.has_cuda_kernels(x.shape):
            return by_xla(ctx, *operands, axes=axes, **dtype)
        given = OPERATORS[op].known_results(
            operands, masked
        )  # which the kernel makes anew, faster than XLA makes the gradient
        ctx = ctx.replace(avals_in=[x, *ctx.avals_in[1 + given :]])
        operands = operands[0], *operands[1 + given :]
        call_attributes = attributes(op, axes, masked)
        maker, n = judge.on_cuda(op, ctx.avals_in, ctx.avals_out, axes, call_attributes)
        if maker is Maker.WIDER_KERNEL:
            return in_one_dtype(ctx, *operands, axes=axes, in_place=in_place, **dtype)
        if maker is not Maker.KERNEL:
            return by_xla(ctx, *operands, axes=axes, **dtype)
        n_results = len(ctx.avals_out)
        if n:
            ctx = ctx.replace(avals_out=[*ctx.avals_out, jax.core.ShapedArray((n,), np.dtype(np.uint8))])
        in_place &= ctx.avals_out[0].dtype == x.dtype
        made = (call_in_place if in_place else call)(ctx, *operands, **call_attributes)
        return made[:n_results]

    return rule


# ---- Dtypes. A kernel's inputs have one.


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
