"""What is in this build; and the refusal to run without compiled kernels, or with a jaxlib that does not take them.

XLA would accept the module and fail when its first backend starts, with a message that names neither the package nor
the versions.
"""

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jaxlib

# Before any of the package's own imports, so that what is found missing is the kernels alone.
if find_spec("jax_softmax._kernels") is None:
    raise ImportError(
        f"{Path(__file__).parent} has no compiled kernels: it is jax_softmax's source, found before an installed "
        "package because Python looks in the current folder first. Run `pip install .` there once; then start Python "
        "in another folder or with -P, as in `python -P -m pytest`."
    )

from jax_softmax import _kernels

OLDEST_JAXLIB = (0, 8)


def check(jaxlib_version: str, runtime_ffi: tuple[int, int] | None, built_ffi: tuple[int, int]) -> None:
    """Raises ImportError unless handlers built against `built_ffi` run on the given jaxlib."""
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
    """The FFI API version of the jaxlib that is installed, as its headers state it, if they still do."""
    header = Path(find_spec("jaxlib").submodule_search_locations[0], "include", "xla", "ffi", "api", "c_api.h")
    if not header.exists():
        return None
    numbers = dict(re.findall(r"#define XLA_FFI_API_(MAJOR|MINOR) (\d+)", header.read_text()))
    return (int(numbers["MAJOR"]), int(numbers["MINOR"])) if len(numbers) == 2 else None


check(jaxlib.__version__, runtime_ffi_version(), _kernels.build_info()["ffi_api"])


def build_info() -> dict[str, Any]:
    """What was compiled into this installation.

    Returns:
      A dict with `version`; `compiler`; `ffi_api`, the (major, minor) version of the FFI headers; `cpu_variants`, the
      instruction sets that CPU kernels were compiled for, and `cpu_variant`, the one that this processor runs. CUDA
      kernels are made at run time, in every build.
    """
    return _kernels.build_info()
