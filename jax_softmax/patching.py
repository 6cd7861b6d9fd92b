"""Puts the operators in the place of those of `jax.nn`, for code that one does not own."""

import contextlib
import sys
from collections.abc import Iterator

import jax

from jax_softmax import api
from jax_softmax.reference import ORIGINALS

_OURS = {name: getattr(api, name) for name in ORIGINALS}


def use(on: bool = True) -> contextlib.AbstractContextManager[None]:
    """Makes `jax.nn.softmax` and `jax.nn.log_softmax` this package's, or with `use(False)` JAX's own again.

    So are the references to them within JAX, whose `jax.nn.dot_product_attention` uses one, and within Flax, such as
    `flax.linen.softmax`. It happens at once and for all threads; in a `with` statement until the end of the block:

        with jax_softmax.use():
            y = model(x)

    It counts when a program is traced: one that was compiled before stays as it is, and one that is compiled within the
    block keeps this package's operators afterwards. References that other code took before (`from jax.nn import
    softmax`) are not changed.
    """
    before = {name: getattr(jax.nn, name) is _OURS[name] for name in _OURS}
    _switch(dict.fromkeys(_OURS, on))
    return _until_exit(before)


@contextlib.contextmanager
def _until_exit(before: dict[str, bool]) -> Iterator[None]:
    try:
        yield
    finally:
        _switch(before)


def _switch(on: dict[str, bool]) -> None:
    """Also in modules that were imported since the last time, which took what was there."""
    modules = [m for name, m in list(sys.modules.items()) if name.partition(".")[0] in ("jax", "flax") and m]
    for name, ours in _OURS.items():
        old, new = (ORIGINALS[name], ours) if on[name] else (ours, ORIGINALS[name])
        for module in modules:
            if vars(module).get(name) is old:
                setattr(module, name, new)
