"""Flax's nnx modules as arguments: objects whose arrays a function may replace."""

import sys
from collections.abc import Callable
from typing import Any

import jax


def has_modules(arguments: Any) -> bool:
    """Whether a tree has objects of nnx."""
    return "flax.nnx" in sys.modules and any(map(_is_module, jax.tree.leaves(arguments, is_leaf=_is_module)))


def call(function: Callable, f: Callable, args: tuple, kwargs: dict) -> Any:
    """`function(g, state, arrays)` calls g, a pure function that does what f does of args and kwargs. Then the modules
    among these have the arrays that f left in them."""
    nnx = sys.modules["flax.nnx"]
    modules, *_ = _taken_apart((args, kwargs))
    now, results = nnx.merge(*function(*pure(f, args, kwargs)))
    for module, left in zip(modules, now, strict=True):
        nnx.update(module, nnx.state(left))
    return results


def pure(f: Callable, args: tuple, kwargs: dict) -> tuple[Callable, Any, Any]:
    """g, and what it is called with: the state of the modules, and the other leaves."""
    modules, others, tree = _taken_apart((args, kwargs))
    definition, state = sys.modules["flax.nnx"].split(tuple(modules))
    return _Pure(f, definition, tree), state, others


class _Pure:
    """f as a function of the state of its modules: of what is left of them, and its results."""

    def __init__(self, f, definition, tree):
        self._known = f, definition, tree

    def __call__(self, state, others):
        nnx, (f, definition, tree) = sys.modules["flax.nnx"], self._known
        modules = nnx.merge(definition, state)
        rest = iter(modules)
        args, kwargs = jax.tree.unflatten(tree, [next(rest) if leaf is None else leaf for leaf in others])
        results = f(*args, **kwargs)
        return nnx.split((modules, results))

    def __eq__(self, other):
        return isinstance(other, _Pure) and self._known == other._known

    def __hash__(self):
        return hash(self._known)


def _is_module(leaf):
    nnx = sys.modules["flax.nnx"]
    return isinstance(leaf, getattr(nnx, "Pytree", nnx.Object))


def _taken_apart(arguments):
    """The modules, the leaves with None in the places of these, and the tree."""
    leaves, tree = jax.tree.flatten(arguments, is_leaf=_is_module)
    modules = [leaf for leaf in leaves if _is_module(leaf)]
    return modules, [None if _is_module(leaf) else leaf for leaf in leaves], tree
