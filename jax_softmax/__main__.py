"""`python -m jax_softmax`: prints what is installed, and whether the results are right on the devices of this
machine."""

import argparse
import functools
import os
import platform
import re
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np

import jax_softmax
from jax_softmax import _kernels
from jax_softmax.fusion.attention import kernels as attention_kernels
from jax_softmax.fusion.attention.call import Attention
from jax_softmax.fusion.attention.letters import Letters
from jax_softmax.fusion.program.expressions import Expression, Number, Operation
from jax_softmax.primitives import reference
from jax_softmax.primitives.operators import OPERATORS, bind
from jax_softmax.primitives.records import apply
from jax_softmax.runtime import cuda

# The shape and axes that every operator is run on, and a few other cases: few kernels, which are compiled soon.
_ROWS = (8, 1000), (1,)
_MORE = [
    ("softmax", "bfloat16", (3, 50257), (1,)),
    ("softmax", "float64", (6, 7, 8), (0, 2)),
    ("log_softmax", "float16", (64, 33, 40), (1,)),
]


def _random_operands(op: str, dtype: str, shape: tuple[int, ...], axes: tuple[int, ...]) -> list[np.ndarray]:
    """An operator's operands: arrays like x, and numbers and a label for each row."""
    facts, draw = OPERATORS[op], np.random.default_rng(0)
    rows = [1 if d in axes else n for d, n in enumerate(shape)]
    arrays = [3 * draw.normal(size=shape).astype(dtype) for _ in range(facts.inputs)]
    numbers = [draw.uniform(0.5, 1.5, rows).astype("float32") for _ in range(facts.row_numbers)]
    labels = [draw.integers(-1, 10, rows, np.int32)] if facts.labelled else []
    return [*arrays, *numbers, *labels]


def _difference(op: str, a: np.ndarray, b: np.ndarray) -> float:
    """norm(a - b) / norm(b), in units of eps of a's dtype; of attention in float32, of TF32."""
    eps = 1 / 128 if a.dtype == np.int8 else float(jnp.finfo(a.dtype).eps)
    eps = 2.0**-10 if op == "attention" and a.dtype == np.float32 else eps
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    difference = np.linalg.norm(a - b) / np.linalg.norm(b) / eps
    return difference if difference == difference else np.inf


def _attention(
    q: jax.Array, k: jax.Array, v: jax.Array, o_cotangent: jax.Array
) -> tuple[list[jax.Array], list[jax.Array]]:
    """Attention, its gradients and its tangent by their kernels, and by jax.numpy in float32."""

    def scaled(name: str) -> Expression:
        return Expression((Operation("mul", (name, Number(0.125, "float32")), ("float32",) * 2, "float32"),), "v0")

    maps = scaled("x0"), Expression((), "y"), scaled("g"), Expression((), "t")
    attention = Attention(Letters("ihd", "jhd", "jhe"), (), 0, *maps)
    o, rows, *lost = attention_kernels.forward(attention, q, k, v)
    delta = attention_kernels.delta(attention, o, lost, o_cotangent)

    def in_numpy(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        weights = jax.nn.softmax(0.125 * jnp.einsum("ihd,jhd->hij", q, k, precision="highest"))
        return jnp.einsum("hij,jhe->ihe", weights, v, precision="highest")

    *wide, wide_cotangent = (a.astype(jnp.float32) for a in (q, k, v, o_cotangent))
    expected, transposed = jax.vjp(in_numpy, *wide)
    found = attention_kernels.backward(attention, {"dq", "dk"}, q, k, v, o_cotangent, rows, delta, delta=delta)
    in_forward_mode = attention._replace(score_tangent=scaled("x1"))
    *_, o_tangent = attention_kernels.forward(in_forward_mode, q, k, v, q, v, k)
    _, tangent = jax.jvp(in_numpy, wide, [wide[n] for n in (0, 2, 1)])
    return [o, *(found[name] for name in ("dq", "dk", "dv")), o_tangent], [
        expected,
        *transposed(wide_cotangent),
        tangent,
    ]


def largest_differences(device: jax.Device) -> dict[str, float]:
    """For each operator and for attention, the largest difference of a result from jax.numpy's in float32 (float64 for
    float64), in units of eps."""

    def ours_and_expected(
        *operands: jax.Array, op: str, axes: tuple[int, ...], dtype: str | None
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        wide = [a if a.dtype.itemsize >= 4 else a.astype(np.float32) for a in operands]
        wide_dtype = {"dtype": dtype or wide[0].dtype.name} if OPERATORS[op].element_results else {}
        ours = bind(op, *operands, where=None, axes=axes, dtype=dtype)
        return jax.tree.leaves(ours), jax.tree.leaves(apply(op, *wide, axes=axes, **wide_dtype))

    cases = [(op, dtype, *_ROWS) for op in OPERATORS for dtype in ("float32", "bfloat16")] + _MORE
    programs, found = [], dict.fromkeys(OPERATORS, 0.0)
    if attention_kernels.can_run():
        draw, found["attention"] = np.random.default_rng(0), 0.0
        for dtype in ("bfloat16", "float16", "float32"):
            operands = [draw.normal(size=(n, 2, 64)).astype(dtype) for n in (200, 150, 150, 200)]
            operands = jax.device_put(operands, device)
            programs.append(("attention", operands, jax.jit(_attention).lower(*operands)))
    for op, dtype, shape, axes in cases:
        with jax.enable_x64(dtype == "float64"):
            operands = jax.device_put(_random_operands(op, dtype, shape, axes), device)
            for result_dtype in [None, *reference.LARGEST] if OPERATORS[op].quantizes else [None]:
                program = jax.jit(functools.partial(ours_and_expected, op=op, axes=axes, dtype=result_dtype))
                programs.append((op, operands, program.lower(*operands)))
    with ThreadPoolExecutor() as pool:
        for (op, operands, _), run in zip(programs, pool.map(lambda p: p[-1].compile(), programs), strict=True):
            found[op] = max(found[op], *map(functools.partial(_difference, op), *run(*operands)))
    return found


def check_device(device: jax.Device, kernels: bool) -> bool:
    """Runs the operators on the device, prints how far the results are off, and returns whether they are right."""
    before, start = _kernels.jit_facts() if kernels and device.platform == "gpu" else None, time.monotonic()
    with jax.default_device(device):
        differences = largest_differences(device)
    wrong = [name for name, difference in differences.items() if not difference < 16]
    jit = ""
    if before is not None:
        compiled, read = (_kernels.jit_facts()[name] - before[name] for name in ("compiled", "read"))
        jit = f", {compiled} compiled and {read} from the cache in {time.monotonic() - start:.1f} s"
    print(
        f"{device.platform} {device.id} ({device.device_kind}): {'our kernels' if kernels else 'jax.numpy'}{jit}, "
        f"largest difference from jax.numpy {max(differences.values()):.2g} eps: "
        f"{'WRONG: ' + ', '.join(wrong) if wrong else 'ok'}"
    )
    return not wrong


def describe_cuda() -> None:
    """Prints which driver, NVRTC and cache folder there are, or what is missing and what to do about it."""
    driver = None
    try:
        driver = _kernels.driver_version()
        print(f"CUDA driver: supports CUDA {driver // 1000}.{driver % 1000 // 10}")
    except RuntimeError as error:
        print(f"CUDA driver: {error}")
    try:
        cuda.configure()
    except RuntimeError as error:
        print(f"NVRTC: {error}\ncache: {cuda.cache_folder() or 'none'}: not used without NVRTC")
        return
    facts = _kernels.jit_facts()
    print(f"NVRTC: {facts['nvrtc']} ({facts['nvrtc_path']})")
    if driver is not None and (reason := cuda.mismatch(driver, facts["nvrtc"], facts["nvrtc_path"])):
        print(f"NVRTC: {reason}")
    if not facts["cache_folder"]:
        print("cache: none, for want of a home folder: set JAX_SOFTMAX_CACHE_DIR")
        return
    print(f"cache: {facts['cache_folder']}: {facts['cache_entries']} kernels, {facts['cache_bytes']:,} bytes")
    if facts["cache_unsafe"]:
        print(f"cache: not all of it is used: {facts['cache_unsafe']}")


def cpu_model() -> str:
    """The processor's name, or its architecture where Linux has no name for it."""
    facts = Path("/proc/cpuinfo")
    named = re.search(r"^model name\s*: (.+)$", facts.read_text("utf-8") if facts.exists() else "", re.MULTILINE)
    return named[1] if named else platform.machine()


def main() -> int:
    info = jax_softmax.build_info()
    versions = {"jax_softmax": info["version"], "JAX": jax.__version__, "jaxlib": jaxlib.__version__}
    versions |= {"NumPy": np.__version__, "Python": platform.python_version()}
    print(", ".join(f"{name} {version}" for name, version in versions.items()))
    print(f"built with {info['compiler']}, FFI headers of API {'.'.join(map(str, info['ffi_api']))}")
    print(f"platform: {platform.platform()}")
    print(f"CPU: {cpu_model()}, {os.cpu_count()} cores")
    print(f"CPU kernels: {', '.join(info['cpu_variants'])}; {info['cpu_variant']} runs here")
    describe_cuda()

    reason = cuda.availability()
    gpus = [device for device in jax.local_devices() if device.platform == "gpu"]
    for gpu in gpus:
        print(f"GPU {gpu.id}: {gpu.device_kind}, compute capability {gpu.compute_capability}")
    healthy = [
        check_device(jax.local_devices(backend="cpu")[0], True),
        *(check_device(gpu, reason is None) for gpu in gpus),
    ]
    if not gpus:
        print("JAX has no GPU here")
    elif reason is not None:
        print(f"the GPU runs jax.numpy: {reason}")
        healthy.append(False)
    return 0 if all(healthy) else 1


if __name__ == "__main__":
    argparse.ArgumentParser("python -m jax_softmax", description=__doc__).parse_args()
    sys.exit(main())
