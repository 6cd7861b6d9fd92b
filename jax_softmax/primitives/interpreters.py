"""What JAX's interpreters besides differentiation and batching have to know of the primitives."""

import contextlib
import functools

from jax.experimental import jet

from jax_softmax.primitives import reference
from jax_softmax.primitives.rows import ROW_PRIMITIVES
from jax_softmax.primitives.softmax import PRIMITIVES

_ALL = {**PRIMITIVES, **ROW_PRIMITIVES}


def _jet(op, primals, series, *, axes, axis_name):
    """The Taylor series of the same function in jax.numpy."""
    if axis_name:
        raise NotImplementedError(f"{op}: jet does not work for rows that are spread over devices, by axis_name.")
    # Between rules the terms are Taylor coefficients, without the factorials that they are scaled by outside.
    return jet.jet(functools.partial(reference.apply, op, axes), primals, series, factorial_scaled=False)


def register() -> None:
    """Tells jet and checkify of all primitives."""
    for op, primitive in _ALL.items():
        jet.jet_rules[primitive] = functools.partial(_jet, op)
    # The table has no public name. With a JAX that moved it, checkify sees no NaN that the operators make.
    with contextlib.suppress(ImportError):
        from jax._src.checkify import error_checks, nan_error_check

        for primitive in _ALL.values():
            error_checks[primitive] = functools.partial(nan_error_check, primitive)
