"""The doctor: `python -m jax_softmax` says what it found, and whether it is right on the devices that are here."""

import concurrent.futures
import functools
import os
import platform
import re
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np

import jax_softmax
from jax_softmax import _kernels
from jax_softmax.runtime import cuda


def _tangent(f):
    """f's derivative in forward mode, whose operators may be others than those of the gradient."""
    return lambda x, axis: jax.jvp(lambda x: f(x, axis), (x,), (jnp.sin(x),))[1]


def _labels(x):
    """Along the last axis; the first one is ignored."""
    return 29 * jnp.arange(x.shape[0]) - 1


def _losses(x, axis, label_smoothing=0.0, z_loss=0.0):
    log_p, lse = jax.nn.log_softmax(x, axis), jax.nn.logsumexp(x, axis)
    of_labels = jnp.take_along_axis(log_p, _labels(x)[:, None], axis)[:, 0]
    losses = -(1 - label_smoothing) * of_labels - label_smoothing * jnp.mean(log_p, axis) + z_loss * lse**2
    return jnp.where(_labels(x) >= 0, losses, 0)


def _loss(x, axis, **options):
    return jnp.sum(_losses(x, axis, **options)) / jnp.sum(_labels(x) >= 0)


def _distributions(x):
    return jax.nn.softmax(-x.astype(jnp.float32))


def _divergence(x, y, axis):
    log_p, log_q = jax.nn.log_softmax(x, axis), jax.nn.log_softmax(y, axis)
    return jnp.sum(jnp.exp(log_p) * (log_p - log_q), axis)


def _scaled(x, axis, dtype):
    largest = jnp.max(jnp.abs(x), axis, keepdims=True)
    if dtype == "float32":
        return x / largest, largest
    most = 127 if dtype == "int8" else float(jnp.finfo(dtype).max)
    y = x * (most / largest)
    return (jnp.round(y) if dtype == "int8" else y).astype(dtype), largest / most


_WORDS = 256  # of a vocabulary


def _head(x):
    """A linear layer, of numbers that are exact in 16 bits."""
    return ((jnp.arange(x.shape[-1] * _WORDS) % 17 - 8) / 64).reshape(-1, _WORDS).astype(x.dtype)


# Each operator, and the same by jax.nn and jax.numpy.
_OPERATORS = {
    "softmax": (jax_softmax.softmax, jax.nn.softmax),
    "softmax_vjp": (jax_softmax.softmax_vjp, jax.nn.softmax),
    "log_softmax": (jax_softmax.log_softmax, jax.nn.log_softmax),
    "log_softmax_vjp": (jax_softmax.log_softmax_vjp, jax.nn.log_softmax),
    "log_softmax in forward mode": (_tangent(jax_softmax.log_softmax), _tangent(jax.nn.log_softmax)),
    "logsumexp": (jax_softmax.logsumexp, jax.nn.logsumexp),
    "softmax_cross_entropy_with_integer_labels": (
        lambda x, axis: jax_softmax.softmax_cross_entropy_with_integer_labels(x, _labels(x), axis),
        _losses,
    ),
    "softmax_cross_entropy": (
        lambda x, axis: jax_softmax.softmax_cross_entropy(x, _distributions(x), axis),
        lambda x, axis: -jnp.sum(_distributions(x) * jax.nn.log_softmax(x, axis), axis),
    ),
    "cross_entropy_loss": (
        lambda x, axis: jax_softmax.cross_entropy_loss(x, _labels(x), axis=axis, z_loss=0.01),
        functools.partial(_loss, z_loss=0.01),
    ),
    "cross_entropy_loss with smoothed labels": (
        lambda x, axis: jax_softmax.cross_entropy_loss(x, _labels(x), axis=axis, label_smoothing=0.1),
        functools.partial(_loss, label_smoothing=0.1),
    ),
    "linear_cross_entropy": (
        lambda x, axis: jax_softmax.linear_cross_entropy(x, _head(x), _labels(x), logits_dtype=jnp.float32),
        lambda x, axis: _loss(x @ _head(x), axis),
    ),
    "entropy": (
        jax_softmax.entropy,
        lambda x, axis: -jnp.sum(jax.nn.softmax(x, axis) * jax.nn.log_softmax(x, axis), axis),
    ),
    "kl_divergence": (
        lambda x, axis: jax_softmax.kl_divergence(x, -x, axis),
        lambda x, axis: _divergence(x, -x, axis),
    ),
    **{
        f"absmax_scale to {dtype}": (
            functools.partial(jax_softmax.absmax_scale, dtype=dtype),
            functools.partial(_scaled, dtype=dtype),
        )
        for dtype in ("float32", "int8", "float8_e4m3fn", "float8_e5m2")
    },
}
# What they are run with: so few that a GPU without a cache has its kernels soon.
_ROWS = (8, 1000), -1
_CASES = [
    ("softmax", "float32", *_ROWS),
    ("softmax_vjp", "float32", *_ROWS),
    ("softmax", "bfloat16", (3, 50257), -1),
    ("softmax", "float64", (6, 7, 8), (0, 2)),
    ("softmax", "int8", *_ROWS),
    ("softmax", "float8_e4m3fn", *_ROWS),
    ("log_softmax", "float16", (64, 33, 40), 1),
    ("log_softmax_vjp", "float32", *_ROWS),
    ("log_softmax", "uint8", *_ROWS),
    ("log_softmax", "float8_e5m2", *_ROWS),
    ("log_softmax in forward mode", "float32", *_ROWS),
    ("logsumexp", "float16", *_ROWS),
    ("softmax_cross_entropy_with_integer_labels", "float32", *_ROWS),
    ("softmax_cross_entropy", "float32", *_ROWS),
    ("cross_entropy_loss", "bfloat16", *_ROWS),
    ("cross_entropy_loss with smoothed labels", "bfloat16", *_ROWS),
    ("linear_cross_entropy", "bfloat16", *_ROWS),
    ("entropy", "bfloat16", *_ROWS),
    ("kl_divergence", "float32", *_ROWS),
    ("absmax_scale to float32", "float32", *_ROWS),
    ("absmax_scale to int8", "float16", *_ROWS),
    ("absmax_scale to float8_e4m3fn", "bfloat16", *_ROWS),
    ("absmax_scale to float8_e5m2", "float32", *_ROWS),
]


def _values_and_gradients(f, x, axis):
    """Arrays: f's results and, but of x in 8 bits, the gradient of their inner product with something."""
    if x.dtype.itemsize == 1:
        return jax.tree.leaves(f(x, axis))

    def cotangent(a):
        if not jnp.issubdtype(a.dtype, jnp.floating):
            return np.zeros(a.shape, jax.dtypes.float0)
        return ((jnp.arange(a.size) % 17 - 8) / 8).reshape(a.shape).astype(a.dtype)  # which has so few bits

    results, pullback = jax.vjp(lambda x: f(x, axis), x)
    return [*jax.tree.leaves(results), *pullback(jax.tree.map(cotangent, results))]


def _difference(a, b):
    """The relative difference of two arrays, in norm, in units of the first one's eps."""
    eps = 1 / 128 if a.dtype == np.int8 else float(jnp.finfo(a.dtype).eps)
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    difference = np.linalg.norm(a - b) / np.linalg.norm(b) / eps
    return difference if difference == difference else np.inf


def largest_differences(device: jax.Device) -> dict[str, float]:
    """The largest difference of each operator's values and gradients from jax.nn's in float32 (float64 of that)."""

    def both(x, operator, axis):
        ours, theirs = _OPERATORS[operator]
        wide = x if x.dtype == np.float64 else x.astype(np.float32)
        return _values_and_gradients(ours, x, axis), _values_and_gradients(theirs, wide, axis)

    programs = []
    for operator, dtype, shape, axis in _CASES:
        x = 3 * np.random.default_rng(0).normal(size=shape)
        with jax.enable_x64(dtype == "float64"):
            x = jax.device_put((abs(x) if dtype == "uint8" else x).astype(dtype), device)
            program = jax.jit(functools.partial(both, operator=operator, axis=axis)).lower(x)
        programs.append((operator, x, program))
    found = dict.fromkeys(_OPERATORS, 0.0)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        compiled = pool.map(lambda program: program[-1].compile(), programs)
        for (operator, x, _), run in zip(programs, compiled, strict=True):
            ours, theirs = run(x)
            # Of 8 bits there are values alone.
            found[operator] = max(found[operator], *map(_difference, ours, theirs))
    return found


def check(device: jax.Device, kernels: bool) -> bool:
    """Runs the operators on the device, says how that went, and returns whether it went well."""
    before, start = _kernels.jit_facts() if kernels and device.platform == "gpu" else None, time.monotonic()
    with jax.default_device(device):
        differences = largest_differences(device)
    # exp(y) of a y that was rounded to its dtype, which log-softmax's gradient needs, is off by |y| / 2 eps.
    wrong = [operator for operator, difference in differences.items() if not difference < 16]
    made = ""
    if before is not None:
        after = _kernels.jit_facts()
        compiled, read = (after[name] - before[name] for name in ("compiled", "read"))
        made = f", {compiled} compiled and {read} from the cache in {time.monotonic() - start:.1f} s"
    print(
        f"{device.platform} {device.id} ({device.device_kind}): {'our kernels' if kernels else 'jax.numpy'}{made}, "
        f"largest difference from jax.nn {max(differences.values()):.2g} eps: "
        f"{'WRONG: ' + ', '.join(wrong) if wrong else 'ok'}"
    )
    return not wrong


def describe_cuda() -> None:
    """Says which driver, NVRTC and cache folder there are, or what is missing and what to do about it."""
    driver = None
    try:
        driver = _kernels.driver_version()
        print(f"CUDA driver: supports CUDA {driver // 1000}.{driver % 1000 // 10}")
    except RuntimeError as error:
        print(f"CUDA driver: {error}")
    try:
        cuda.configure()
    except RuntimeError as error:
        print(f"NVRTC: {error}")
        print(f"cache: {cuda.cache_folder() or 'none'}: not used without NVRTC")
        return
    facts = _kernels.jit_facts()
    print(f"NVRTC: {facts['nvrtc']} ({facts['nvrtc_path']})")
    if driver is not None and (reason := cuda.mismatch(driver, facts["nvrtc"], facts["nvrtc_path"])):
        print(f"NVRTC: {reason}")
    if facts["cache_folder"]:
        kept = f"{facts['cache_entries']} kernels, {facts['cache_bytes']:,} bytes"
        print(f"cache: {facts['cache_folder']}: {kept}")
        if facts["cache_unsafe"]:
            print(f"cache: not all of it is used: {facts['cache_unsafe']}")
    else:
        print("cache: none, for want of a home folder: set JAX_SOFTMAX_CACHE_DIR")


def cpu_model() -> str:
    """The processor's name, or its architecture where Linux has no name for it."""
    try:
        facts = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        facts = ""
    named = re.search(r"^model name\s*: (.+)$", facts, re.MULTILINE)
    return named[1] if named else platform.machine()


def main() -> int:
    info = jax_softmax.build_info()
    versions = {"JAX": jax.__version__, "jaxlib": jaxlib.__version__, "NumPy": np.__version__}
    versions["Python"] = platform.python_version()
    print(", ".join(f"{name} {version}" for name, version in {"jax_softmax": info["version"], **versions}.items()))
    print(f"built with {info['compiler']}, FFI headers of API {'.'.join(map(str, info['ffi_api']))}")
    print(f"platform: {platform.platform()}")
    print(f"CPU: {cpu_model()}, {os.cpu_count()} cores")
    print(f"CPU kernels: {', '.join(info['cpu_variants'])}; {info['cpu_variant']} runs here")
    describe_cuda()

    reason = cuda.availability()
    gpus = [device for device in jax.local_devices() if device.platform == "gpu"]
    for gpu in gpus:
        print(f"GPU {gpu.id}: {gpu.device_kind}, compute capability {gpu.compute_capability}")
    healthy = [check(jax.local_devices(backend="cpu")[0], True)]
    healthy += [check(gpu, reason is None) for gpu in gpus]
    if gpus and reason is not None:
        print(f"the GPU runs jax.numpy: {reason}")
        healthy.append(False)
    if not gpus:
        print("JAX has no GPU here")
    return 0 if all(healthy) else 1
