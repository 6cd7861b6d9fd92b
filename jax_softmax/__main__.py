"""The doctor: `python -m jax_softmax` says what it found, and whether it is right on the devices that are here."""

import sys
import time

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np

import jax_softmax
from jax_softmax import _cuda, _kernels

_SHAPES = [((8, 1000), -1), ((3, 50257), -1), ((64, 33, 40), 1), ((6, 7, 8), (0, 2))]
_DTYPES = ["float32", "bfloat16", "float16"]


def largest_error(device: jax.Device) -> float:
    """The largest relative difference, in norm, from jax.nn's values and gradients in float32, in units of eps."""
    worst = 0.0
    for dtype in _DTYPES:
        for shape, axis in _SHAPES:
            x, t = np.random.default_rng(0).normal(size=(2, *shape)).astype(np.float32)
            x, t = (jax.device_put(jnp.asarray(a, dtype), device) for a in (3 * x, t))
            for ours, theirs in (
                (jax_softmax.softmax, jax.nn.softmax),
                (jax_softmax.log_softmax, jax.nn.log_softmax),
            ):
                y, vjp = jax.vjp(lambda a, f=ours, axis=axis: f(a, axis), x)
                y_ref, vjp_ref = jax.vjp(lambda a, f=theirs, axis=axis: f(a, axis), x.astype(jnp.float32))
                for a, b in ((y, y_ref), (vjp(t)[0], vjp_ref(t.astype(jnp.float32))[0])):
                    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
                    error = np.linalg.norm(a - b) / np.linalg.norm(b) / float(jnp.finfo(dtype).eps)
                    worst = max(worst, error if error == error else np.inf)
    return worst


def check(device: jax.Device, kernels: bool) -> bool:
    """Runs the operators on the device, says how that went, and returns whether it went well."""
    before, start = _kernels.jit_facts() if kernels and device.platform == "gpu" else None, time.monotonic()
    with jax.default_device(device):
        error = largest_error(device)
    # exp(y) of a y that was rounded to its dtype, which log-softmax's gradient needs, is off by |y| / 2 eps.
    right = error < 16
    made = ""
    if before is not None:
        after = _kernels.jit_facts()
        compiled, read = (after[name] - before[name] for name in ("compiled", "read"))
        made = f", {compiled} compiled and {read} from the cache in {time.monotonic() - start:.1f} s"
    print(
        f"{device.platform} {device.id} ({device.device_kind}): {'our kernels' if kernels else 'jax.numpy'}{made}, "
        f"largest difference from jax.nn {error:.2g} eps: {'ok' if right else 'WRONG'}"
    )
    return right


def describe_cuda() -> None:
    """Says which driver, NVRTC and cache folder there are, or what is missing and what to do about it."""
    driver = None
    try:
        driver = _kernels.driver_version()
        print(f"CUDA driver: supports CUDA {driver // 1000}.{driver % 1000 // 10}")
    except RuntimeError as error:
        print(f"CUDA driver: {error}")
    try:
        _cuda.configure()
    except RuntimeError as error:
        print(f"NVRTC: {error}")
        return
    facts = _kernels.jit_facts()
    print(f"NVRTC: {facts['nvrtc']} ({facts['nvrtc_path']})")
    if driver is not None and (reason := _cuda.mismatch(driver, facts["nvrtc"], facts["nvrtc_path"])):
        print(f"NVRTC: {reason}")
    if facts["cache_folder"]:
        kept = f"{facts['cache_entries']} kernels, {facts['cache_bytes']:,} bytes"
        print(f"cache: {facts['cache_folder']}: {kept}")
        if facts["cache_unsafe"]:
            print(f"cache: not used, because {facts['cache_unsafe']}")
    else:
        print("cache: none, for want of a home folder: set JAX_SOFTMAX_CACHE_DIR")


def main() -> int:
    info = jax_softmax.build_info()
    python = sys.version.split()[0]
    print(f"jax_softmax {info['version']}, JAX {jax.__version__}, jaxlib {jaxlib.__version__}, Python {python}")
    print(f"built with {info['compiler']}, FFI headers of API {'.'.join(map(str, info['ffi_api']))}")
    print(f"CPU kernels: {', '.join(info['cpu_variants'])}; {info['cpu_variant']} runs here")
    describe_cuda()

    reason = _cuda.availability()
    gpus = [device for device in jax.local_devices() if device.platform == "gpu"]
    healthy = [check(jax.local_devices(backend="cpu")[0], True)]
    healthy += [check(gpu, reason is None) for gpu in gpus]
    if gpus and reason is not None:
        print(f"the GPU runs jax.numpy: {reason}")
        healthy.append(False)
    if not gpus:
        print("JAX has no GPU here")
    return 0 if all(healthy) else 1


if __name__ == "__main__":
    sys.exit(main())
