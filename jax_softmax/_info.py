"""What is in this build."""

from typing import Any

from jax_softmax import _kernels


def build_info() -> dict[str, Any]:
    """What was compiled into this installation.

    Returns:
      A dict with `version`; `compiler`; `ffi_api`, the (major, minor) version of the FFI headers; `cpu_variants`, the
      instruction sets that CPU kernels were compiled for, and `cpu_variant`, the one that this processor runs. CUDA
      kernels are made at run time, in every build.
    """
    return _kernels.build_info()
