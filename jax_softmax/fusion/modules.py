"""Modules as arguments: Flax's nnx modules and variables, which a function may change, and Equinox's."""

import functools
import inspect
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import jax

_TAG = "jax_softmax.fuse"


def has_modules(arguments: Any) -> bool:
    """Whether a tree has objects of nnx."""
    return any(map(is_of_nnx, jax.tree.leaves(arguments, is_leaf=is_of_nnx)))


def outside_of_equinox(arguments: Any) -> list[bool]:
    """Of each leaf of a tree, whether it is in no module of Equinox, where numbers are constants."""
    if "equinox" not in sys.modules:
        return [True] * len(jax.tree.leaves(arguments))

    def is_module(value: Any) -> bool:
        return isinstance(value, sys.modules["equinox"].Module)

    subtrees = jax.tree.leaves(arguments, is_leaf=is_module)
    return [not is_module(subtree) for subtree in subtrees for _ in jax.tree.leaves(subtree)]


def call_with_modules(
    call_pure: Callable[..., Any], f: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """f's results, and f's changes in the modules among args and kwargs: of arrays, attributes and submodules.

    `call_pure(g, state, *args, **kwargs)` calls g, a pure function, instead. What f does not change is not written to:
    it may belong to a trace outside, in which it must not be."""
    with context():
        g, args_of_g, kwargs_of_g = pure(f, args, kwargs)
        changed, everything, results = call_pure(g, *args_of_g, **kwargs_of_g)
        modules = _modules(args, kwargs)
        _check_may_be_written(modules, _nnx().state(modules) if changed is None else changed)
        if changed is not None:
            _nnx().update(modules, changed)
            return results
        with _nnx().merge_context(_TAG, inner=False) as outside:
            _, results = outside.merge(*everything)
    return results


def _check_may_be_written(modules: tuple[Any, ...], state: Any) -> None:
    """Raises Flax's error, before any variable is written to, if one that the state has belongs to a trace outside:
    `update` of Flax 0.12.0 does not look."""
    variables = {path: value for path, value in _nnx().iter_graph(modules) if isinstance(value, _nnx().Variable)}
    for path in dict(_nnx().to_flat_state(state)):
        variables[path].set_metadata(variables[path].get_metadata())


def context() -> AbstractContextManager[Any]:
    """A context for `pure` and for calls of what it returns: in it nnx remembers which objects are the same."""
    return _nnx().update_context(_TAG)


def pure(
    f: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Callable[..., Any], tuple[Any, ...], dict[Any, Any]]:
    """g, and what it is called with: the state of the modules, and args and kwargs with None for each of them."""
    leaves, tree = jax.tree.flatten((args, kwargs), is_leaf=is_of_nnx)
    with _nnx().split_context(_TAG) as outside:
        definition, state = outside.split(_modules(args, kwargs))
    is_module = tuple(map(is_of_nnx, leaves))
    rest = [None if is_one else leaf for leaf, is_one in zip(leaves, is_module, strict=True)]
    args, kwargs = jax.tree.unflatten(tree, rest)
    return _Pure(f, definition, tree, is_module), (state, *args), kwargs


def _modules(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(filter(is_of_nnx, jax.tree.leaves((args, kwargs), is_leaf=is_of_nnx)))


class _Pure:
    """f as a function of its modules' state and its other arguments. It returns (changed arrays, None, f's results). If
    f changes more than arrays, or returns modules, it is (None, modules and results as nnx splits them, None).
    """

    def __init__(self, f: Callable[..., Any], definition: Any, tree: Any, is_module: tuple[bool, ...]) -> None:
        self._key = f, definition, tree, is_module
        functools.update_wrapper(self, f, updated=())
        signature = inspect.signature(f)
        modules = inspect.Parameter("modules", inspect.Parameter.POSITIONAL_ONLY)
        self.__signature__ = signature.replace(parameters=[modules, *signature.parameters.values()])

    def __call__(self, state: Any, /, *args: Any, **kwargs: Any) -> tuple[Any, Any, Any]:
        f, definition, tree, is_module = self._key
        with _nnx().merge_context(_TAG, inner=True) as inside:
            modules = inside.merge(definition, state)
        before = _Before(modules)
        own, rest = iter(modules), iter(jax.tree.leaves((args, kwargs)))
        args, kwargs = jax.tree.unflatten(tree, [next(own if is_one else rest) for is_one in is_module])
        results = f(*args, **kwargs)
        if before.has_same_objects(modules) and not has_modules(results):
            return before.changed(modules), None, results
        with _nnx().split_context(_TAG) as inside:
            return None, inside.split((modules, results)), None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Pure) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)


class _Before:
    """What modules are before they are used."""

    def __init__(self, modules: tuple[Any, ...]) -> None:
        self._definition = _nnx().graphdef(modules)
        self._objects = self._objects_of(modules)
        self._arrays = {path: jax.tree.leaves(variable) for path, variable in self._variables_of(modules)}

    @staticmethod
    def _objects_of(modules: tuple[Any, ...]) -> list[tuple[Any, ...]]:
        return [(path, value) for path, value in _nnx().iter_graph(modules) if is_of_nnx(value)]

    @staticmethod
    def _variables_of(modules: tuple[Any, ...]) -> Any:
        return _nnx().to_flat_state(_nnx().state(modules))

    def has_same_objects(self, modules: tuple[Any, ...]) -> bool:
        """Whether they are the same at the same places, with the same attributes other than arrays."""
        objects = self._objects_of(modules)
        return (
            _nnx().graphdef(modules) == self._definition
            and len(objects) == len(self._objects)
            and all(a == b and x is y for (a, x), (b, y) in zip(objects, self._objects, strict=True))
        )

    def changed(self, modules: tuple[Any, ...]) -> Any:
        """The part of their state that has other arrays."""

        def is_same(path: tuple[Any, ...], variable: Any) -> bool:
            return all(a is b for a, b in zip(jax.tree.leaves(variable), self._arrays[path], strict=True))

        return _nnx().from_flat_state([(p, v) for p, v in self._variables_of(modules) if not is_same(p, v)])


def _nnx() -> Any:
    return sys.modules["flax.nnx"]


def is_of_nnx(leaf: Any) -> bool:
    """Whether it is a module or a variable of nnx."""
    return "flax.nnx" in sys.modules and isinstance(leaf, (getattr(_nnx(), "Pytree", _nnx().Object), _nnx().Variable))
