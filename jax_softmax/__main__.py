"""The doctor: `python -m jax_softmax` says what is built in and whether it is right on the devices that are here."""

import sys

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np

import jax_softmax

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


def main() -> int:
    info = jax_softmax.build_info()
    python = sys.version.split()[0]
    print(f"jax_softmax {info['version']}, JAX {jax.__version__}, jaxlib {jaxlib.__version__}, Python {python}")
    print(f"built with {info['compiler']}, FFI headers of API {'.'.join(map(str, info['ffi_api']))}")
    print(f"CPU kernels: {', '.join(info['cpu_variants'])}; {info['cpu_variant']} runs here")
    if info["cuda"]:
        print(f"CUDA kernels: CUDA {info['cuda_version']}, architectures {', '.join(info['cuda_architectures'])}")
    else:
        print("CUDA kernels: not built (install the CUDA toolkit and reinstall with JAX_SOFTMAX_CUDA=on)")

    healthy = True
    devices = [jax.devices()[0]] if jax.default_backend() == "cpu" else [jax.devices()[0], jax.devices("cpu")[0]]
    for device in devices:
        with jax.default_device(device):
            error = largest_error(device)
        # exp(y) of a y that was rounded to its dtype, which log-softmax's gradient needs, is off by |y| / 2 eps.
        right = error < 16
        kernels = device.platform == "cpu" or (device.platform == "gpu" and info["cuda"])
        healthy &= right
        print(
            f"{device.platform} ({device.device_kind}): {'our kernels' if kernels else 'jax.numpy'}, "
            f"largest difference from jax.nn {error:.2g} eps: {'ok' if right else 'WRONG'}"
        )
    if "gpu" in {d.platform for d in jax.devices()} and not info["cuda"]:
        healthy = False
    return 0 if healthy else 1


if __name__ == "__main__":
    sys.exit(main())
