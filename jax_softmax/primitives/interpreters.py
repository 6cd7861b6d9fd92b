"""What JAX's interpreters have to know of the primitives: one place that says which rule each has."""

import functools

import jax
from jax.interpreters import ad, batching, mlir

from jax_softmax import _private
from jax_softmax.primitives import (
    cross_entropy,
    entropies,
    in_memory,
    product,
    reference,
    rows,
    scaling,
    softmax,
    types,
)
from jax_softmax.primitives.batching import batch
from jax_softmax.primitives.operators import PRIMITIVES

_GRADIENTS = ("cross_entropy_gradient", "cross_entropy_gradient_and_distances")
_JVPS = {
    **{op: functools.partial(softmax.jvp, op) for op in softmax.JVP},
    **{op: functools.partial(softmax.linear_jvp, op) for op in softmax.TRANSPOSED},
    "logsumexp": rows.logsumexp_jvp,
    "cross_entropy": cross_entropy.cross_entropy_jvp,
    **{op: functools.partial(cross_entropy.gradient_jvp, op) for op in _GRADIENTS},
    "entropy": entropies.entropy_jvp,
    "absmax_scale": scaling.absmax_scale_jvp,
}  # kl_divergence has none: `entropies.divergence` differentiates what binds it
_TRANSPOSES = {op: functools.partial(softmax.linear_transpose, op) for op in softmax.TRANSPOSED}
_BATCHES = {op: functools.partial(batch, op) for op in PRIMITIVES} | {
    "cross_entropy": cross_entropy.cross_entropy_batch,
    **{op: functools.partial(cross_entropy.gradient_batch, op) for op in _GRADIENTS},
}


def register() -> None:
    """Tells JAX of all rules but the lowerings."""
    for op, primitive in PRIMITIVES.items():
        primitive.def_impl(implementation(primitive))
        primitive.def_abstract_eval(functools.partial(types.abstract_eval, op))
        batching.fancy_primitive_batchers[primitive] = _BATCHES[op]
        if op in _JVPS:
            ad.primitive_jvps[primitive] = _JVPS[op]
        if op in _TRANSPOSES:
            ad.primitive_transposes[primitive] = _TRANSPOSES[op]
        if JET.available:
            JET.jet_rules[primitive] = functools.partial(_jet, op)
    _register_cross_entropy_tangent(cross_entropy.tangent_p)
    _register_product(product.product_p)
    _register_in_memory(in_memory.in_memory_p)
    if CHECKIFY.available:
        for primitive in PRIMITIVES.values():
            CHECKIFY.error_checks[primitive] = functools.partial(CHECKIFY.nan_error_check, primitive)


CHECKIFY, JET = _private.FOUND["checkify"], _private.FOUND["jet"]


def implementation(primitive):
    """What a call outside of `jit` does."""
    apply = _private.FOUND["eager"].apply_primitive
    if apply:
        return functools.partial(apply, primitive)
    return lambda *operands, **params: jax.jit(functools.partial(primitive.bind, **params))(*operands)


def _register_cross_entropy_tangent(primitive):
    primitive.def_impl(implementation(primitive))
    primitive.def_abstract_eval(cross_entropy.tangent_abstract_eval)
    batching.fancy_primitive_batchers[primitive] = cross_entropy.tangent_batch
    ad.primitive_jvps[primitive] = cross_entropy.tangent_jvp
    ad.primitive_transposes[primitive] = cross_entropy.tangent_transpose
    mlir.register_lowering(primitive, mlir.lower_fun(cross_entropy.tangent_lowered, multiple_results=False))


def _register_product(primitive):
    primitive.def_impl(implementation(primitive))
    primitive.def_abstract_eval(product.abstract_eval)
    batching.primitive_batchers[primitive] = product.batch
    ad.primitive_jvps[primitive] = product.jvp
    ad.primitive_transposes[primitive] = product.transpose
    mlir.register_lowering(primitive, mlir.lower_fun(product.lowered, multiple_results=False))


def _register_in_memory(primitive):
    primitive.def_impl(lambda x: x)
    primitive.def_abstract_eval(lambda x: x)
    batching.primitive_batchers[primitive] = in_memory.batch
    ad.primitive_jvps[primitive] = in_memory.jvp
    if JET.available:
        JET.jet_rules[primitive] = lambda primals, series: (*primals, *series)


def _jet(op, primals, series, *, axes, axis_name, **dtype):
    """The Taylor series of the same function in jax.numpy."""
    if axis_name:
        raise NotImplementedError(f"{op}: jet does not work for rows that are spread over devices, by axis_name.")
    function = functools.partial(reference.apply, op, axes=axes, **dtype)
    # Between rules the terms are Taylor coefficients, without the factorials that they are scaled by outside.
    return JET.jet(function, primals, series, factorial_scaled=False)
