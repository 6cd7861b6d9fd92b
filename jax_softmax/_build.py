"""What is in this build; and errors if there are no compiled kernels, or if the installed jaxlib cannot run them.

Without these errors XLA would fail when its first backend starts, with a message that names neither the package nor the
versions.
"""

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jaxlib

# This stands before the package's own imports, so that it is certain that just the kernels are missing.
if find_spec("jax_softmax._kernels") is None:
    raise ImportError(
        f"{Path(__file__).parent} has no compiled kernels: it is jax_softmax's source, found before an installed "
        "package because Python looks in the current folder first. Run `pip install .` there once; then start Python "
        "in another folder or with -P, as in `python -P -m pytest`."
    )

from jax_softmax import _kernels

OLDEST_JAXLIB = (0, 8)


def check_jaxlib(jaxlib_version: str, runtime_ffi: tuple[int, int] | None, built_ffi: tuple[int, int]) -> None:
    """Raises an ImportError unless kernels built against FFI version `built_ffi` run on this jaxlib."""
    version = tuple(int(part) for part in re.findall(r"\d+", jaxlib_version)[:2])
    if version < OLDEST_JAXLIB:
        raise ImportError(
            f"jax_softmax needs jaxlib {'.'.join(map(str, OLDEST_JAXLIB))} or newer, found {jaxlib_version}. "
            "Upgrade with: pip install -U jax jaxlib"
        )
    if runtime_ffi is None:
        return
    if runtime_ffi[0] != built_ffi[0] or runtime_ffi[1] < built_ffi[1]:
        raise ImportError(
            f"jax_softmax was built against FFI headers of API {built_ffi[0]}.{built_ffi[1]}, but jaxlib "
            f"{jaxlib_version} offers {runtime_ffi[0]}.{runtime_ffi[1]}. Reinstall jax_softmax with build isolation "
            "(pip's default), which builds it against the oldest supported jaxlib, or upgrade jaxlib."
        )


def runtime_ffi_version() -> tuple[int, int] | None:
    """The FFI API version (major, minor) in the installed jaxlib's headers; None if it is not found there."""
    header = Path(jaxlib.__file__).with_name("include") / "xla" / "ffi" / "api" / "c_api.h"
    if not header.exists():
        return None
    numbers = dict(re.findall(r"#define XLA_FFI_API_(MAJOR|MINOR) (\d+)", header.read_text()))
    return (int(numbers["MAJOR"]), int(numbers["MINOR"])) if len(numbers) == 2 else None


check_jaxlib(jaxlib.__version__, runtime_ffi_version(), _kernels.build_info()["ffi_api"])


def build_info() -> dict[str, Any]:
    """What was compiled into this installation.

    Returns:
      A dict with `version`; `compiler`; `ffi_api`, the (major, minor) version of the FFI headers; `cpu_variants`, the
      instruction sets that CPU kernels were compiled for; and `cpu_variant`, the one that this processor runs. CUDA
      kernels are not part of a build: they are compiled at run time.
    """
    return _kernels.build_info()
