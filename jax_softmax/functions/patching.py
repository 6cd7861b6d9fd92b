"""Puts this package's functions in the place of those of `jax.nn` and of optax, for code that one cannot change.

The originals are replaced by dispatchers. Whenever a dispatcher is called, it looks its name up in a context of JAX,
and calls this package's function or the original. The context belongs to the thread, and to the key under which
`jax.jit` caches what it has traced: a function that was traced with one setting is traced again for the other.
"""

import functools
import inspect
import math
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp

from jax_softmax.functions import arguments, losses, softmax
from jax_softmax.functions.logsumexp import logsumexp
from jax_softmax.primitives.labels import widened_labels

_P = ParamSpec("_P")
_R = TypeVar("_R")

_FLOATS = ("float16", "bfloat16", "float32", "float64")


# ---- This package's functions with the signatures of JAX and optax. They return NotImplemented for calls that mean
# something else there.


def _softmax_for_jax(x: Any, axis: Any = -1, where: Any = None) -> Any:
    return softmax.softmax(x, axis, where) if _is_axis(axis) and _is_mask(where) else NotImplemented


def _log_softmax_for_jax(x: Any, axis: Any = -1, where: Any = None) -> Any:
    return softmax.log_softmax(x, axis, where) if _is_axis(axis) and _is_mask(where) else NotImplemented


def _logsumexp_for_jax(
    a: Any, axis: Any = None, b: Any = None, keepdims: Any = False, return_sign: Any = False, where: Any = None
) -> Any:
    if (
        b is not None
        or not isinstance(return_sign, bool)
        or not _is_float(a)
        or not _is_axis(axis)
        or not _is_mask(where)
    ):
        return NotImplemented
    return logsumexp(a, axis, where, bool(keepdims), return_sign=return_sign)


def _soft_loss_for_optax(logits: Any, labels: Any, axis: Any = -1, where: Any = None) -> Any:
    if not _is_float(logits) or not hasattr(labels, "dtype") or jnp.iscomplexobj(labels):
        return NotImplemented
    if not _is_axis(axis) or not _is_mask(where):
        return NotImplemented
    where = _with_class_axis(where, logits, axis)
    if not _broadcast(logits.shape, labels, where):
        return NotImplemented
    return losses.softmax_cross_entropy(logits, labels, axis, where).astype(jnp.result_type(logits, labels))


def _integer_loss_for_optax(logits: Any, labels: Any, axis: Any = -1, where: Any = None) -> Any:
    if not _is_float(logits) or not _is_integer(labels) or not _is_mask(where) or not isinstance(axis, int | tuple):
        return NotImplemented
    logits, labels = jnp.asarray(logits), jnp.asarray(labels)
    axes = arguments.checked_axes("softmax_cross_entropy_with_integer_labels", logits.ndim, axis)
    classes = math.prod(logits.shape[d] for d in axes)
    where = _with_class_axis(where, logits, axis)
    rows = tuple(n for d, n in enumerate(logits.shape) if d not in axes)
    if labels.shape != rows or not axes or classes == 0 or not _broadcast(logits.shape, where):
        return NotImplemented
    # Our function ignores labels that are no class. In optax negative ones count from the last class, and others give
    # NaN.
    labels = widened_labels(labels)
    labels = jnp.where(labels < 0, labels + classes, labels)
    loss = losses.softmax_cross_entropy_with_integer_labels(logits, labels, axis, where)
    counted = (labels >= 0) & (labels < classes)
    if where is not None:
        counted |= ~jnp.any(jnp.broadcast_to(where, logits.shape), axes)
    return jnp.where(counted, loss, jnp.nan).astype(logits.dtype)


def _is_float(x: Any) -> bool:
    return str(getattr(x, "dtype", None)) in _FLOATS


def _is_integer(x: Any) -> bool:
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.integer)


def _is_axis(axis: Any) -> bool:
    """Whether it is an axis or axes of an array: JAX also takes a set, or the name of a mapped axis."""
    axes = axis if isinstance(axis, tuple | list) else () if axis is None else (axis,)
    return all(hasattr(a, "__index__") for a in axes)


def _is_mask(where: Any) -> bool:
    return where is None or getattr(where, "dtype", None) == jnp.bool_


def _with_class_axis(where: Any, logits: Any, axis: Any) -> Any:
    """The mask with as many dimensions as the logits: optax takes a mask with fewer for one of rows."""
    return where if where is None or where.ndim == logits.ndim else jnp.expand_dims(where, axis)


def _broadcast(shape: tuple[int, ...], *others: Any) -> bool:
    """Whether they broadcast to this shape."""
    return all(a is None or arguments.broadcasts(a.shape, shape) for a in others)


# ---- Dispatchers

_SOFTMAXES = {"softmax": _softmax_for_jax, "log_softmax": _log_softmax_for_jax}
_OPTAX_LOSSES = {
    "softmax_cross_entropy": _soft_loss_for_optax,
    "softmax_cross_entropy_with_integer_labels": _integer_loss_for_optax,
}
_PREFIXES = ("", "_", "nn_")  # of the names that JAX's own modules give the originals
_OURS: dict[str, Callable[..., Any]] = {**_SOFTMAXES, "logsumexp": _logsumexp_for_jax, **_OPTAX_LOSSES}

# Its value is the set of names of the functions that are replaced by ours.
_context: Any = jax.make_user_context(frozenset())


def _dispatcher(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def dispatcher(*args: Any, **kwargs: Any) -> Any:
        result = _OURS[name](*args, **kwargs) if name in _context.value else NotImplemented
        return original(*args, **kwargs) if result is NotImplemented else result

    for attribute in dir(original):  # as `lower` of what is under `jax.jit`: these stay the original's
        if not hasattr(dispatcher, attribute):
            setattr(dispatcher, attribute, getattr(original, attribute))
    return dispatcher


originals = {name: getattr(jax.nn, name) for name in ("softmax", "log_softmax", "logsumexp")}
_dispatchers = {name: _dispatcher(name, original) for name, original in originals.items()}


def _install_dispatchers() -> None:
    """Replaces the originals in all modules imported so far. The dispatchers stay there for good."""
    optax = sys.modules.get("optax.losses")
    for name in _OPTAX_LOSSES:
        if name not in originals and hasattr(optax, name):
            originals[name] = getattr(optax, name)
            _dispatchers[name] = _dispatcher(name, originals[name])
    modules = [m for name, m in list(sys.modules.items()) if name.partition(".")[0] in ("jax", "flax", "optax") and m]
    places = [(prefix + name, name) for name in _dispatchers for prefix in _PREFIXES]
    for module in modules:
        own = vars(module)
        for place, name in places:
            if own.get(place) is originals[name]:
                setattr(module, place, _dispatchers[name])


# ---- Switches


class _Switch:
    """What `use` returns, after it has set the context: a context manager and a decorator."""

    def __init__(self, context: Callable[[], AbstractContextManager[None]]) -> None:
        self._context = context
        self._entered: list[AbstractContextManager[None]] = []
        self._enter()
        self._is_fresh = True  # until the first `with`, which must not enter once more

    def _enter(self) -> None:
        context = self._context()
        context.__enter__()
        self._entered.append(context)

    def __enter__(self) -> None:
        if not self._is_fresh:
            self._enter()
        self._is_fresh = False

    def __exit__(self, *exception: object) -> None:
        self._entered.pop().__exit__(None, None, None)

    def __call__(self, function: Callable[_P, _R]) -> Callable[_P, _R]:
        with self:  # undoes what `use` did: a decorated function sets the context while it is called
            pass
        if not callable(function) or isinstance(function, type):
            hint = " Decorate its methods with @jax_softmax.use()." if isinstance(function, type) else ""
            raise TypeError(f"use: what is decorated must be a function, got {function!r}.{hint}")
        if _runs_later(function) or _runs_later(type(function).__call__):
            raise TypeError(
                f"use: a decorated function must not be a generator or asynchronous, got {function!r}: it would run "
                "after the call has ended. Write `with jax_softmax.use():` inside of it."
            )

        @functools.wraps(function)
        def switched(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            with self._context():
                return function(*args, **kwargs)

        return switched


def _runs_later(function: Any) -> bool:
    """Whether a call returns before the function's body has run."""
    kinds = inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction
    return any(is_one(function) for is_one in kinds)


def use(on: bool = True, *, losses: bool = False) -> _Switch:
    """Makes `jax.nn.softmax` and `jax.nn.log_softmax` this package's, or with `use(False)` JAX's own again.

    This includes JAX's own uses of them, such as in `jax.nn.dot_product_attention`, and those within Flax, such as
    `flax.linen.softmax`. It takes effect at once, for this thread and for good; in a `with` statement until the end of
    the block::

        with jax_softmax.use():
            y = model(x)

    and for a decorated function, `@jax_softmax.use()`, only during its calls.

    What counts is the setting when a program is traced; `jax.jit` traces a function again if the setting has changed.
    Programs that were compiled ahead of time stay as they are, as do references that other code took before
    (`from jax.nn import softmax`).

    Args:
      on: whether they are this package's.
      losses: whether to replace also `jax.nn.logsumexp` (and so `jax.scipy.special.logsumexp`) and, if optax has been
        imported, its `softmax_cross_entropy` and `softmax_cross_entropy_with_integer_labels`, for floating arrays.
        Results have the same dtypes, and are the same up to rounding; but a class of probability 0 whose logit is -inf
        adds 0 and not NaN. Calls of `logsumexp` with factors, `b`, are left to JAX.

    Raises:
      TypeError: an argument is not True or False, or what is decorated is no function, a class, a generator or
        asynchronous.
    """
    if callable(on):
        what = "a class's methods" if isinstance(on, type) else "a function"
        raise TypeError(f"use: {what} must be decorated with @jax_softmax.use(), in parentheses, got {on!r}.")
    on = arguments.checked_bool("use", on, "on")
    losses = arguments.checked_bool("use", losses, "losses")
    ours = () if not on else _OURS if losses else _SOFTMAXES
    return _Switch(functools.partial(_switched, frozenset(ours)))


def while_fusing() -> AbstractContextManager[None]:
    """A context manager within which all these functions are this package's, but for optax's `softmax_cross_entropy`:
    it calls `log_softmax`, and `fuse` recognises one-hot labels there."""
    return _switched(frozenset(_OURS) - {"softmax_cross_entropy"})


def _switched(ours: frozenset[str]) -> AbstractContextManager[None]:
    _install_dispatchers()
    return _context(ours)
