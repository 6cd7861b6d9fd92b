"""Puts the operators in the place of those of `jax.nn`, for code that one does not own."""

import functools
import inspect
import sys
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import jax

from jax_softmax.functions import arguments, softmax
from jax_softmax.primitives.reference import ORIGINALS

_OURS = {name: getattr(softmax, name) for name in ORIGINALS}

_P = ParamSpec("_P")
_R = TypeVar("_R")


class _Switch:
    """What `use` returns, after it has switched: a context manager, and a decorator."""

    def __init__(self, on: bool):
        self._on = on
        self._before = {name: getattr(jax.nn, name) is _OURS[name] for name in _OURS}
        self.__enter__()

    def __enter__(self) -> None:
        _switch(dict.fromkeys(_OURS, self._on))

    def __exit__(self, *exception: object) -> None:
        _switch(self._before)

    def __call__(self, function: Callable[_P, _R]) -> Callable[_P, _R]:
        self.__exit__()  # a decorated function switches when it is called
        if inspect.isgeneratorfunction(function) or inspect.iscoroutinefunction(function):
            raise TypeError(
                f"use: a decorated function must not be a generator or asynchronous, got {function.__qualname__}: it "
                "would run after the call has ended. Write `with jax_softmax.use():` inside of it."
            )

        @functools.wraps(function)
        def switched(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            with _Switch(self._on):
                return function(*args, **kwargs)

        return switched


def use(on: bool = True) -> _Switch:
    """Makes `jax.nn.softmax` and `jax.nn.log_softmax` this package's, or with `use(False)` JAX's own again.

    So are the references to them within JAX, whose `jax.nn.dot_product_attention` uses one, and within Flax, such as
    `flax.linen.softmax`. It happens at once and for all threads; in a `with` statement until the end of the block:

        with jax_softmax.use():
            y = model(x)

    and of a function that is decorated, `@jax_softmax.use()`, during each call, and not before.

    It counts when a program is traced: one that was compiled before stays as it is, and one that is compiled within the
    block keeps this package's operators afterwards. References that other code took before (`from jax.nn import
    softmax`) are not changed.
    """
    return _Switch(arguments.checked_bool("use", on, "on"))


def _switch(on: dict[str, bool]) -> None:
    """Also in modules that were imported since the last time, which took what was there."""
    modules = [m for name, m in list(sys.modules.items()) if name.partition(".")[0] in ("jax", "flax") and m]
    for name, ours in _OURS.items():
        old, new = (ORIGINALS[name], ours) if on[name] else (ours, ORIGINALS[name])
        for module in modules:
            if vars(module).get(name) is old:
                setattr(module, name, new)
