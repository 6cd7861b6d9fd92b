"""What running the CUDA kernels takes: a driver, NVRTC, which compiles them, and a folder for compiled kernels."""

import atexit
import functools
import os
import warnings

from jax_softmax import _kernels

CACHE_BYTES = 256 << 20


def cache_folder() -> str:
    """The folder of compiled kernels: JAX_SOFTMAX_CACHE_DIR or the user's cache folder; "" if there is no home."""
    folder = os.environ.get("JAX_SOFTMAX_CACHE_DIR")
    if folder:
        return os.path.abspath(folder)
    import platformdirs  # here, because a process that uses no GPU should not wait for it

    try:
        folder = platformdirs.user_cache_dir("jax_softmax", appauthor=False)
    except RuntimeError:
        return ""
    return folder if os.path.isabs(folder) else ""  # older versions of platformdirs return it with a ~


def find_nvrtc() -> str:
    """The path of libnvrtc: the loaded one, or that of a wheel, of conda, or of the system.

    Raises:
      RuntimeError: there is none.
    """
    from cuda import pathfinder  # type: ignore[import-untyped]  # here, because a process that uses no GPU should not wait for it

    try:
        return pathfinder.load_nvidia_dynamic_lib("nvrtc").abs_path
    except pathfinder.DynamicLibNotFoundError as error:
        raise RuntimeError(
            "CUDA's run-time compiler NVRTC (libnvrtc.so.13 or libnvrtc.so.12) was not found: install it with `pip "
            "install nvidia-cuda-nvrtc`, or `nvidia-cuda-nvrtc-cu12` for a driver of CUDA 12"
        ) from error


def configure() -> None:
    """Hands NVRTC and the cache folder to the C++ code, which then forgets the kernels that it has loaded.

    Raises:
      RuntimeError: NVRTC is missing or too old.
    """
    _kernels.jit_configure(find_nvrtc(), cache_folder(), CACHE_BYTES)
    atexit.unregister(_kernels.jit_stop)
    atexit.register(_kernels.jit_stop)


def mismatch(driver: int, nvrtc: str, path: str) -> str | None:
    """Why a driver of CUDA `driver` (12040 for 12.4) cannot run what this NVRTC compiles; None if it can."""
    if int(nvrtc.split(".")[0]) <= driver // 1000:
        return None
    return (
        f"NVRTC {nvrtc} ({path}) makes kernels that a driver of CUDA {driver // 1000}.{driver % 1000 // 10} cannot "
        f"load: update the driver, or have NVRTC {driver // 1000} alone installed"
    )


@functools.cache
def availability() -> str | None:
    """Why the CUDA kernels cannot run in this process, with what to do about it; None if they can.

    The first call does all preparations, but uses no GPU. It warns if there are kernels on disk that must not be
    trusted. `import jax_softmax` makes this call, because this process may only run programs that were lowered in
    another one.
    """
    try:
        driver = _kernels.driver_version()
        configure()
    except RuntimeError as error:
        return str(error)
    facts = _kernels.jit_facts()
    if facts["cache_unsafe"]:
        warnings.warn(
            f"jax_softmax does not use kernels that somebody else may have put on disk: {facts['cache_unsafe']}. Have "
            "JAX_SOFTMAX_CACHE_DIR name a folder that you own and that neither group nor others may write to.",
            stacklevel=2,
        )
    return mismatch(driver, facts["nvrtc"], facts["nvrtc_path"])
