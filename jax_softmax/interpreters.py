"""What JAX's interpreters besides differentiation and batching have to know of the primitives."""

import functools

from jax._src import checkify  # has no public hook
from jax.experimental import jet

from jax_softmax import reference
from jax_softmax.primitives import PRIMITIVES


def _jet(op, primals, series, *, axes, axis_name):
    """The Taylor series of the same function in jax.numpy."""
    if axis_name:
        raise NotImplementedError(f"{op}: jet does not work for rows that are spread over devices, by axis_name.")
    # Between rules the terms are Taylor coefficients, without the factorials that they are scaled by outside.
    return jet.jet(functools.partial(reference.apply, op, axes), primals, series, factorial_scaled=False)


for _op, _primitive in PRIMITIVES.items():
    checkify.error_checks[_primitive] = functools.partial(checkify.nan_error_check, _primitive)
    jet.jet_rules[_primitive] = functools.partial(_jet, _op)
