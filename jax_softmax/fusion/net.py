"""A net under `fuse`: where this package fails on a program, the program runs as under `jax.jit`, with a warning."""

import functools
import warnings
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import jax

_P = ParamSpec("_P")
_R = TypeVar("_R")


def fused_or_as_it_is(fused: Callable[[], _R], as_it_is: Callable[[Exception], _R]) -> _R:
    """The result of `fused()`; where that raises an error, it is a warning, and the result is `as_it_is(error)`.

    If `as_it_is` raises as well, the mistake is the program's, and its error is what `jax.jit` raises.
    """
    try:
        return fused()
    except FloatingPointError:  # `jax_debug_nans` finds a NaN of the program's
        raise
    except Exception as error:
        failure = error
    result = as_it_is(failure)
    message = " ".join(str(failure).split())
    warnings.warn(
        f"jax_softmax: fuse leaves a function as it is, because of a failure of its own: {type(failure).__name__}: "
        f"{message[:400]}. The results are those of jax.jit. Please report this to the maintainers of jax_softmax, "
        "with what `python -P -m jax_softmax` prints.",
        stacklevel=2,
    )
    return result


def by_own_settings(f: Callable[_P, _R]) -> Callable[_P, _R]:
    """A decorator for what traces this package's own functions while a program of the user is rewritten or lowered:
    settings with which JAX refuses a user's mistakes are not for them."""

    @functools.wraps(f)
    def by_own(*args: _P.args, **kwargs: _P.kwargs) -> Any:
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            return f(*args, **kwargs)

    return by_own
