"""The options of losses of integer labels, label_smoothing and z_loss: None, a number of the program, or an array."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_softmax.functions import arguments

_LARGEST_NUMBER = np.finfo(np.float64).max  # that an option may be


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Constant:
    """A number that is part of a program, and no operand of it: there is nothing to transfer to a device."""

    value: float


class Options(NamedTuple):
    """None stands for the number 0, which leaves out what it would take to compute them."""

    label_smoothing: _Constant | jax.Array | None
    z_loss: _Constant | jax.Array | None

    def as_arrays(self, dtype):
        def converted(value):
            return jnp.asarray(value.value if isinstance(value, _Constant) else value, dtype)

        return Options(*(None if value is None else converted(value) for value in self))


def checked_options(name: str, label_smoothing: Any, z_loss: Any) -> Options:
    return Options(
        _checked(name, "label_smoothing", label_smoothing, 0, 1),
        _checked(name, "z_loss", z_loss, -_LARGEST_NUMBER, _LARGEST_NUMBER),
    )


def _checked(name: str, argument: str, value: Any, least: float, most: float) -> _Constant | jax.Array | None:
    if isinstance(value, int | float | np.integer | np.floating):
        if not least <= value <= most:
            raise ValueError(f"{name}: {argument} must be a number from {least} to {most}, got {value}.")
        return _Constant(float(value)) if value else None
    value = arguments.checked_real_array(name, value, argument)
    if value.shape:
        raise ValueError(f"{name}: {argument} must be a scalar, got shape {value.shape}.")
    return value
