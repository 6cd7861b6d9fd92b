"""The primitives' rules for JAX's interpreters; the lowering rules of operators are in `runtime/`."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jax_softmax import _private
from jax_softmax.primitives import as_stored, cross_entropy, product
from jax_softmax.primitives.operators import OPERATORS, PRIMITIVES
from jax_softmax.primitives.records import RECORDS, apply
from jax_softmax.primitives.reference import wide_dtype
from jax_softmax.primitives.types import Aval, Axes, MeshAxes, shardings_of_results, types_tell_shardings

CHECKIFY, JET = _private.FOUND["checkify"], _private.FOUND["jet"]


def register() -> None:
    for op, primitive in PRIMITIVES.items():
        record = RECORDS[op]
        primitive.def_impl(implementation(primitive))
        primitive.def_abstract_eval(functools.partial(abstract_eval, op))
        batching.fancy_primitive_batchers[primitive] = functools.partial(record.batch, op)
        if record.jvp:
            ad.primitive_jvps[primitive] = functools.partial(record.jvp, op)
        if record.transpose:
            ad.primitive_transposes[primitive] = functools.partial(record.transpose, op)
        if JET.available:
            JET.jet_rules[primitive] = functools.partial(_jet, op)
        if CHECKIFY.available:
            CHECKIFY.error_checks[primitive] = functools.partial(CHECKIFY.nan_error_check, primitive)
    for primitive, rules in ((cross_entropy.tangent_p, cross_entropy), (product.product_p, product)):
        primitive.def_impl(implementation(primitive))
        primitive.def_abstract_eval(rules.abstract_eval)
        ad.primitive_jvps[primitive] = rules.jvp
        ad.primitive_transposes[primitive] = rules.transpose
        mlir.register_lowering(primitive, mlir.lower_fun(rules.compute, multiple_results=False))
    batching.fancy_primitive_batchers[cross_entropy.tangent_p] = cross_entropy.batching_rule
    batching.primitive_batchers[product.product_p] = product.batching_rule
    primitive = as_stored.as_stored_p
    primitive.def_impl(lambda x: x)
    primitive.def_abstract_eval(lambda x: x)
    batching.primitive_batchers[primitive] = as_stored.batching_rule
    ad.primitive_jvps[primitive] = as_stored.jvp
    if JET.available:
        JET.jet_rules[primitive] = lambda primals, series: (*primals, *series)


def implementation(primitive: Primitive) -> Callable[..., Any]:
    """The rule for a call outside of `jit`."""
    apply_primitive = _private.FOUND["eager"].apply_primitive
    if apply_primitive:
        return functools.partial(apply_primitive, primitive)
    return lambda *operands, **params: jax.jit(functools.partial(primitive.bind, **params))(*operands)


def abstract_eval(op: str, *avals: Aval, axes: Axes, axis_name: MeshAxes, **dtype: str) -> Aval | list[Aval]:
    """The type, or types, of an operator's results: in explicit mode with the shardings of `reference.py`'s results.

    Raises:
      ShardingTypeError: the operands' shardings are incompatible.
    """
    x, operator = avals[0], OPERATORS[op]
    rows = tuple(1 if d in axes else n for d, n in enumerate(x.shape))
    types = operator.element_results * [(x.shape, jnp.dtype(dtype.get("dtype", x.dtype)))]
    types += operator.row_results * [(rows, wide_dtype(x.dtype))]
    shardings = [x.sharding] * len(types)
    if types_tell_shardings(avals):
        shardings = shardings_of_results(functools.partial(apply, op, axes=axes, **dtype), avals)
    # An update keeps the mesh axes that x varies over.
    results = [
        x.update(shape=shape, dtype=dtype, weak_type=False, sharding=sharding)
        for (shape, dtype), sharding in zip(types, shardings, strict=True)
    ]
    for k in range(operator.element_results, len(results)):
        results[k] = _private.not_varying_over(results[k], axis_name)
    return results if len(results) > 1 else results[0]


def _jet(op: str, primals: Sequence[Array], series: Any, *, axes: Axes, axis_name: MeshAxes, **dtype: str) -> Any:
    """The Taylor series of the operator in jax.numpy."""
    if axis_name:
        raise NotImplementedError(f"{op}: jet does not work for rows that are spread over devices, by axis_name.")
    in_jax_numpy = functools.partial(apply, op, axes=axes, **dtype)
    # The terms that rules get and give are Taylor coefficients; only those of the user are multiplied by factorials.
    return JET.jet(in_jax_numpy, primals, series, factorial_scaled=False)
