"""Flax's nnx modules and variables as arguments: objects that a function may change."""

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import jax

_TAG = "jax_softmax.fuse"


def has_modules(arguments: Any) -> bool:
    """Whether a tree has objects of nnx."""
    return "flax.nnx" in sys.modules and any(map(_is_module, jax.tree.leaves(arguments, is_leaf=_is_module)))


def call(function: Callable, f: Callable, args: tuple, kwargs: dict) -> Any:
    """`function(g, state, arrays)` calls g, a pure function that does what f does of args and kwargs. Then the modules
    among these are what f made of them: arrays, attributes, submodules."""
    with context():
        definition, state = function(*pure(f, args, kwargs))
        with _nnx().merge_context(_TAG, inner=False) as outside:
            _, results = outside.merge(definition, state)
    return results


def context() -> AbstractContextManager[Any]:
    """In which `pure` is called, and what it returns: nnx remembers which objects are the same."""
    return _nnx().update_context(_TAG)


def pure(f: Callable, args: tuple, kwargs: dict) -> tuple[Callable, Any, Any]:
    """g, and what it is called with: the state of the modules, and the other leaves."""
    leaves, tree = jax.tree.flatten((args, kwargs), is_leaf=_is_module)
    with _nnx().split_context(_TAG) as outside:
        definition, state = outside.split(tuple(filter(_is_module, leaves)))
    return _Pure(f, definition, tree), state, [None if _is_module(leaf) else leaf for leaf in leaves]


class _Pure:
    """f as a function of the state of its modules: of what is left of them, and its results."""

    def __init__(self, f, definition, tree):
        self._known = f, definition, tree

    def __call__(self, state, others):
        f, definition, tree = self._known
        with _nnx().merge_context(_TAG, inner=True) as inside:
            modules = inside.merge(definition, state)
        rest = iter(modules)
        args, kwargs = jax.tree.unflatten(tree, [next(rest) if leaf is None else leaf for leaf in others])
        results = f(*args, **kwargs)
        with _nnx().split_context(_TAG) as inside:
            return inside.split((modules, results))

    def __eq__(self, other):
        return isinstance(other, _Pure) and self._known == other._known

    def __hash__(self):
        return hash(self._known)


def _nnx():
    return sys.modules["flax.nnx"]


def _is_module(leaf):
    return isinstance(leaf, (getattr(_nnx(), "Pytree", _nnx().Object), _nnx().Variable))
