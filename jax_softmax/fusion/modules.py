"""Flax's nnx modules as arguments: objects whose arrays a function may replace."""

import sys
from collections.abc import Callable
from typing import Any

import jax


def has_modules(arguments: Any) -> bool:
    """Whether a tree has objects of nnx."""
    nnx = sys.modules.get("flax.nnx")
    if nnx is None:
        return False

    def is_object(leaf):
        return isinstance(leaf, nnx.Object if hasattr(nnx, "Object") else nnx.Module)

    return any(map(is_object, jax.tree.leaves(arguments, is_leaf=is_object)))


def call(function: Callable, f: Callable, args: tuple, kwargs: dict) -> Any:
    """`function(g, *arrays)` calls g, a pure function that does what f does of args and kwargs; then they have the
    arrays that f left in them."""
    nnx = sys.modules["flax.nnx"]
    left = function(*pure(f, args, kwargs))
    (args_now, kwargs_now), results = nnx.merge(*left)
    nnx.update((args, kwargs), nnx.state((args_now, kwargs_now)))
    return results


def pure(f: Callable, args: tuple, kwargs: dict) -> tuple[Callable, Any]:
    """g, and what it is called with."""
    definition, state = sys.modules["flax.nnx"].split((args, kwargs))
    return _Pure(f, definition), state


class _Pure:
    """f as a function of the state of its arguments: of what is left of them, and its results."""

    def __init__(self, f, definition):
        self._f, self._definition = f, definition

    def __call__(self, state):
        nnx = sys.modules["flax.nnx"]
        args, kwargs = nnx.merge(self._definition, state)
        results = self._f(*args, **kwargs)
        return nnx.split(((args, kwargs), results))

    def __eq__(self, other):
        return isinstance(other, _Pure) and (self._f, self._definition) == (other._f, other._definition)

    def __hash__(self):
        return hash((self._f, self._definition))
