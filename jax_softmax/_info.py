"""What is in this build."""

from typing import Any

from jax_softmax import _kernels


def build_info() -> dict[str, Any]:
    """What was compiled into this installation.

    Returns:
      A dict with `version`; `compiler`; `ffi_api`, the (major, minor) version of the FFI headers; `cpu_variants`, the
      instruction sets that CPU kernels were compiled for, and `cpu_variant`, the one that this processor runs; `cuda`,
      whether the CUDA kernels are there, and with them `cuda_version` and `cuda_architectures`.
    """
    info = _kernels.build_info()
    info["cuda_architectures"] = [a for a in info["cuda_architectures"].split(";") if a]
    return info
