"""The lowering rules of the primitives: FFI custom calls where there are kernels, jax.numpy elsewhere."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

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
from jax_softmax.runtime import cuda, judge, kernel_spec
from jax_softmax.runtime.judge import Avals, Maker

TARGET = "jax_softmax"
ATTENTION_TARGET = "jax_softmax_attention"  # for `fusion/attention/`
Rule = Callable[..., Any]  # a lowering rule of JAX


def register() -> None:
    """Registers the kernels with XLA, and the primitives' lowering rules with JAX."""
    cuda.availability()
    division.register()
    jax.ffi.register_ffi_target(TARGET, _kernels.cpu_handler(), platform="cpu")
    jax.ffi.register_ffi_target(TARGET, _kernels.cuda_handlers(), platform="CUDA")
    mlir.register_lowering(several_devices_p, _several_devices)
    barrier, cpu_barrier = (mlir.lower_fun(f, False) for f in (jax.lax.optimization_barrier, _cpu_barrier))
    for platform, rule in {None: lambda ctx, x: [x], "cpu": cpu_barrier, "cuda": barrier}.items():
        mlir.register_lowering(as_stored_p, rule, platform=platform)
    for op, primitive in PRIMITIVES.items():
        record, several = RECORDS[op], primitive.multiple_results
        by_reference = mlir.lower_fun(functools.partial(apply, op), several)
        rules = {Maker.XLA: by_reference}
        if record.composed:
            rules[Maker.COMPOSED] = mlir.lower_fun(functools.partial(call_on_operands, record.composed), several)
        on_cpu, on_cuda = _cpu_rule(op, rules), _cuda_rule(op, rules[judge.without_cuda_kernel(op)])
        for platform, rule in {None: by_reference, "cpu": on_cpu, "cuda": on_cuda}.items():
            rule = partitioning.partitioned(primitive, platform, rule, by_reference)
            mlir.register_lowering(primitive, rule, platform=platform)


def _several_devices(ctx: Any) -> Any:
    several = _private.devices_of(ctx) != 1
    return mlir.lower_fun(lambda: jnp.array(several), multiple_results=False)(ctx)


def _cpu_barrier(x: jax.Array) -> jax.Array:
    """On CPUs XLA of JAX 0.8 combines a product and a sum even through a barrier, but not through a copysign."""
    x = jax.lax.optimization_barrier(x)
    return jnp.copysign(jnp.abs(x), x) if x.dtype in (jnp.float32, jnp.float64) else x


def export_checks() -> list[jax.export.DisabledSafetyCheck]:
    """The safety checks that `jax.export` must skip for programs that call these functions.

    JAX only guarantees that its own custom calls keep working. Pass the list as `disabled_checks`. Where the exported
    program runs, jax_softmax must be imported::

        jax.export.export(jax.jit(f), disabled_checks=jax_softmax.export_checks())(x)
    """
    targets = TARGET, ATTENTION_TARGET, partitioning.TARGET
    return [jax.export.DisabledSafetyCheck.custom_call(target) for target in targets]


# ---- Custom calls of kernels.


def _cpu_rule(op: str, other_rules: dict[Maker, Rule]) -> Rule:
    call, in_one_dtype = jax.ffi.ffi_lowering(TARGET), _in_one_dtype_rule(op, judge.cpu_makes)

    def kernel(ctx: Any, *operands: Any, axes: tuple[int, ...], in_place: bool = False, **dtype: str) -> Sequence[Any]:
        own = _without_given_results(op, operands, ctx.avals_in)
        ctx = ctx.replace(avals_in=_without_given_results(op, ctx.avals_in, ctx.avals_in))
        return call(ctx, *own, **kernel_spec.attributes(op, axes, ctx.avals_in[-1].dtype == bool))

    rules = {Maker.KERNEL: kernel, Maker.WIDER_KERNEL: in_one_dtype, **other_rules}

    def rule(ctx: Any, *operands: Any, **params: Any) -> Any:
        return rules[judge.on_cpu(op, ctx.avals_in, ctx.avals_out)](ctx, *operands, **params)

    return rule


def reason_for_operator(op: str, avals_in: Avals, avals_out: Avals, axes: Sequence[int]) -> str:
    """Why XLA computes a call into whose kernel nothing is folded, on CUDA; "" if the kernel does."""
    n_inputs, avals_in, result = OPERATORS[op].inputs, _without_given_results(op, avals_in, avals_in), avals_out[0]
    maker, _, reason = judge.on_cuda(op, avals_in, avals_out, axes)
    if maker is Maker.WIDER_KERNEL:
        dtype, result_dtype = _dtypes_of_wider_kernel(avals_in[:n_inputs], result.dtype, judge.cuda_makes)
        wider = [a.update(dtype=dtype) for a in avals_in[:n_inputs]]
        results = [result.update(dtype=result_dtype), *avals_out[1:]]
        _, _, reason = judge.on_cuda(op, [*wider, *avals_in[n_inputs:]], results, axes)
    return reason


def _without_given_results(op: str, operands: Sequence[Any], avals_in: Avals) -> list[Any]:
    """A kernel computes them again, still faster than XLA would compute the gradient from them."""
    return OPERATORS[op].without_given(operands, avals_in[-1].dtype == bool)


def _cuda_rule(op: str, by_xla: Rule) -> Rule:
    """An FFI call unless XLA itself is as fast. Its last result is scratch memory, for blocks to exchange states.

    It is a result so that XLA owns it, and it lives as long as a CUDA graph that captures the call.
    """
    call = jax.ffi.ffi_lowering(TARGET)
    call_in_place = jax.ffi.ffi_lowering(TARGET, operand_output_aliases={0: 0})
    in_one_dtype = _in_one_dtype_rule(op, judge.cuda_makes)

    def rule(ctx: Any, *operands: Any, axes: tuple[int, ...], in_place: bool = False, **dtype: str) -> Any:
        avals_in = _without_given_results(op, ctx.avals_in, ctx.avals_in)
        maker, scratch_bytes, _ = judge.on_cuda(op, avals_in, ctx.avals_out, axes)
        if maker not in (Maker.KERNEL, Maker.WIDER_KERNEL):
            return by_xla(ctx, *operands, axes=axes, **dtype)
        own, ctx = _without_given_results(op, operands, ctx.avals_in), ctx.replace(avals_in=avals_in)
        if maker is Maker.WIDER_KERNEL:
            return in_one_dtype(ctx, *own, axes=axes, in_place=in_place, **dtype)
        n_results, spec = len(ctx.avals_out), kernel_spec.of_operator(op, axes, avals_in, ctx.avals_out)
        if all(isinstance(n, int) for n in avals_in[0].shape):
            judge.start_compiling(spec)
        if scratch_bytes:
            ctx = ctx.replace(avals_out=[*ctx.avals_out, jax.core.ShapedArray((scratch_bytes,), np.dtype(np.uint8))])
        in_place &= ctx.avals_out[0].dtype == avals_in[0].dtype
        return (call_in_place if in_place else call)(ctx, *own, **spec.attributes)[:n_results]

    return rule


# ---- Calls whose inputs have several dtypes, or a result another one. A kernel's inputs have one dtype.


def _common_dtype(*dtypes: np.dtype) -> np.dtype:
    return dtypes[0] if len(set(dtypes)) == 1 else jnp.dtype("float64" if jnp.float64 in dtypes else "float32")


def _dtypes_of_wider_kernel(
    inputs: Sequence[Any], result_dtype: np.dtype, makes: judge.Makes
) -> tuple[np.dtype, np.dtype]:
    """The dtype of the inputs, and that of the result, of a kernel for these inputs and this result."""
    input_dtype = _common_dtype(*(a.dtype for a in inputs))
    if makes(input_dtype, result_dtype):
        return input_dtype, result_dtype
    return (_common_dtype(input_dtype, result_dtype),) * 2


def _in_one_dtype_rule(op: str, makes: judge.Makes) -> Rule:
    """By a kernel whose dtype holds all inputs, and the result too if the kernel cannot give that dtype (`makes`)."""

    def by_wider_kernel(*operands: jax.Array, axes: tuple[int, ...], dtype: str, **params: Any) -> Any:
        n, result_dtype = OPERATORS[op].inputs, jnp.dtype(dtype)
        input_dtype, kernel_result = _dtypes_of_wider_kernel(operands[:n], result_dtype, makes)
        inputs = (a.astype(input_dtype) for a in operands[:n])
        params |= {"axes": axes, "axis_name": (), "dtype": kernel_result.name}
        results = PRIMITIVES[op].bind(*inputs, *operands[n:], **params)
        if not PRIMITIVES[op].multiple_results:
            return results.astype(result_dtype)
        return [results[0].astype(result_dtype), *results[1:]]

    return mlir.lower_fun(by_wider_kernel, PRIMITIVES[op].multiple_results)
