"""A checkout of a repository on Python's path, whose modules are imported without all that they need.

What they import and is not installed, and what reads data or other frameworks' models, is replaced by an object that
does nothing.
"""

import contextlib
import importlib
import importlib.machinery
import sys
from pathlib import Path
from typing import NamedTuple
from unittest.mock import MagicMock, patch

import jax
import jax.numpy as jnp

HERE = Path(__file__).absolute().parent
# Packages that are replaced where they are installed, too: they read data or models of other frameworks, or draw.
REPLACED = {"brax", "clu", "datasets", "grain", "huggingface_hub", "matplotlib", "navix", "sklearn", "tensorflow"}
REPLACED |= {"torch", "transformers"}
# Packages that look at what is installed while they are imported.
CURIOUS = ("jaxtyping", "scipy.fft", "tensorflow_probability.substrates.jax")


def _clip(array, min=None, max=None, *, a_min=None, a_max=None):
    return _CLIP(array, min if a_min is None else a_min, max if a_max is None else a_max)


_CLIP = jnp.clip
# Names that older JAX has, and repositories use.
OLDER_NAMES = [
    (jax, "tree_map", jax.tree.map),
    (jax.core, "is_constant_dim", lambda d: isinstance(d, int)),
    (jnp, "clip", _clip),
]


class _Replaced(NamedTuple):
    """Finds modules, and makes them up: those of `packages`, or all that nobody else has."""

    packages: set[str] | None

    def find_spec(self, name, path=None, target=None):
        package = name.partition(".")[0]
        if package in sys.stdlib_module_names or package.startswith("jax"):  # JAX looks for its plugins
            return None
        if self.packages is not None and package not in self.packages:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        module = MagicMock(spec=None, name=spec.name)
        module.__spec__, module.__path__, module.__name__ = spec, [], spec.name
        return module

    def exec_module(self, module):
        pass


def _folder(module) -> Path:
    """Where a module's file is, or a package that has none."""
    file = getattr(module, "__file__", None)
    return Path(file).absolute().parent if file else Path(*list(getattr(module, "__path__", ()))[:1]).absolute()


@contextlib.contextmanager
def on_path(folder: Path):
    """Modules of a folder can be imported, and are forgotten in the end; modules beside this one cannot."""
    for name in CURIOUS:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    jax.devices()  # which imports the libraries of JAX's plugins
    modules, path, finders = dict(sys.modules), sys.path[:], sys.meta_path[:]
    for name, module in modules.items():
        if name != "__main__" and _folder(module) == HERE:
            del sys.modules[name]
    sys.path[:] = [str(folder), *(entry for entry in path if Path(entry).absolute() != HERE)]
    sys.meta_path[:] = [_Replaced(REPLACED), *finders, _Replaced(None)]
    try:
        with contextlib.ExitStack() as stack:
            for name in OLDER_NAMES:
                stack.enter_context(patch.object(*name, create=True))
            yield
    finally:
        sys.path[:], sys.meta_path[:] = path, finders
        folders = {name: _folder(module) for name, module in sys.modules.items()}
        for name, module in [*sys.modules.items()]:
            if isinstance(module, MagicMock) or folders[name].is_relative_to(folder):
                del sys.modules[name]
        sys.modules.update(modules)
