"""Measures jax_softmax against XLA's jax.nn and, where it is installed, PyTorch; writes tables and pictures.

    python benchmarks/run.py            everything: minutes on a large GPU
    python benchmarks/run.py --quick    a part of it, in less than one

On a GPU times are device times: the durations of the kernels as the profiler saw them (PyTorch: CUDA events around a
CUDA graph of calls). On a CPU they are the wall clock's, of the fastest call. The yardstick is the copy rate: what
`jnp.negative` reads and writes of a float32 array of as many bytes, timed the same way in the same process.
"""

import argparse
import collections
import concurrent.futures
import datetime
import functools
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # PyTorch needs memory too

import cases
import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
import report
from peers import HAS_TORCH, OURS, TORCH, XLA, Case, compiled, forward_or_backward, precision, torch_covers, torch_time
from timing import device_time, device_times, kernel_times
from tqdm import tqdm

import jax_softmax
from jax_softmax import _kernels
from jax_softmax.primitives.records import VJP
from jax_softmax.runtime import cuda, judge
from jax_softmax.runtime.kernel_spec import described

SECTIONS = ("compiling", "few", "chain", "accuracy", "axes", "rows")
ON_GPU = jax.default_backend() == "gpu"


class Settings:
    """How much is measured, and until when."""

    def __init__(self, quick: bool, minutes: float | None):
        self.quick = quick
        self.repeats = 5 if quick else 10
        # Elements of a 32-bit tensor; twice as many of 16 bits. On a GPU 0.5 GB, far beyond any cache.
        self.elements = 1 << 27 if ON_GPU else 1 << 20 if quick else 1 << 22
        self.deadline = math.inf if minutes is None else time.monotonic() + 60 * minutes

    def tensor(self, dtype: str) -> int:
        """How many elements a tensor of the dtype has."""
        return self.elements * 4 // jnp.dtype(dtype).itemsize


def message(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip() or 'no message'}".splitlines()[0][:200]


@functools.lru_cache(maxsize=3)
def _random(elements: int, dtype: str, seed: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), (elements,), dtype)


def random_array(shape: tuple[int, ...], dtype: str, seed: int) -> jax.Array:
    n = math.prod(shape)
    # A power of two of them, cut to size: making as many as needed would compile the generator for every shape.
    return _cut(_random(1 << (n - 1).bit_length(), dtype, seed), shape)


@functools.partial(jax.jit, static_argnums=1)
def _cut(flat: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return flat[: math.prod(shape)].reshape(shape)


_copy_rates: dict[int, float] = {}


def copy_rate(n_bytes: int, repeats: int) -> float:
    """Bytes read and written per second by an elementwise negation of a float32 array of about so many bytes."""
    size = round(20 * math.log2(n_bytes))  # sizes within some percent share a measurement
    if size not in _copy_rates:
        # Whole packs of 4 KB: of an odd number of elements XLA copies at less than half the rate.
        x = random_array((max(1, n_bytes // 4096) * 1024,), "float32", 0)
        _copy_rates[size] = 2 * x.nbytes / device_time(jax.jit(jnp.negative), [(x,)], repeats)
    return _copy_rates[size]


def measure(pair: list[Case], repeats: int) -> list[dict[str, Any]]:
    """Times the cases, which differ in direction alone: one record each."""
    case = pair[0]
    with precision(case.dtype):
        x = random_array(case.shape, case.dtype, 0)
        arguments = {"forward": (x,)}
        rate = copy_rate(x.nbytes, repeats)
    keys = [(peer, c) for c in pair for peer in (OURS, XLA)]
    with concurrent.futures.ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        jobs = {(peer, c): pool.submit(compiled, peer, c, 1 if c.direction == "forward" else 2) for peer, c in keys}
    outcomes: dict[tuple[str, Case], float | Exception] = {}
    calls = {}
    with precision(case.dtype):
        if any(c.direction == "backward" for c in pair):
            y = jobs[OURS, case].result()(x)  # the first case is the forward one
            arguments["backward"] = y, random_array(case.shape, case.dtype, 1)
        for key, job in jobs.items():
            if error := job.exception():
                outcomes[key] = error
            else:
                calls[key] = job.result(), arguments[key[1].direction]
        outcomes |= device_times(calls, repeats)
        for c in filter(torch_covers, pair):
            try:
                outcomes[TORCH, c] = torch_time(c, arguments[c.direction], repeats)
            except Exception as error:
                outcomes[TORCH, c] = error
    return [_record(c, rate, {peer: o for (peer, of), o in outcomes.items() if of == c}) for c in pair]


def _record(case: Case, rate: float, outcomes: dict[str, float | Exception]) -> dict[str, Any]:
    seconds = {peer: o for peer, o in outcomes.items() if not isinstance(o, Exception)}
    return {
        **case._asdict(),
        "bytes": case.bytes,
        "copy_rate": rate,
        "seconds": seconds,
        "fraction": {peer: case.bytes / (s * rate) for peer, s in seconds.items()},
        "failed": {peer: message(o) for peer, o in outcomes.items() if isinstance(o, Exception)},
    }


def measure_all(pairs: list[list[Case]], settings: Settings, name: str, repeats: int) -> list[dict[str, Any]]:
    records = []
    progress = tqdm(pairs, desc=name)
    for pair in progress:
        case = pair[0]
        progress.set_postfix_str(f"{case.op} {case.dtype} {case.shape} {case.axes}")
        if time.monotonic() > settings.deadline:
            error: Exception = TimeoutError("not measured: the time given was over")
            records += [_record(c, math.nan, {OURS: error}) for c in pair]
            continue
        try:
            records += measure(pair, repeats)
        except Exception as error:  # no memory for the inputs, say: the next case may do
            records += [_record(c, math.nan, {OURS: error}) for c in pair]
    return records


def both(*case) -> list[Case]:
    return [Case(*case, direction=direction) for direction in ("forward", "backward")]


def rows(settings: Settings) -> list[dict[str, Any]]:
    if settings.quick:
        plan = [(dtype, "softmax", cases.QUICK_LENGTHS) for dtype in ("bfloat16", "float32")]
    else:
        plan = [(dtype, "softmax", cases.LENGTHS) for dtype in ("bfloat16", "float32")]
        plan += [(dtype, "log_softmax", cases.FEWER_LENGTHS) for dtype in ("bfloat16", "float32")]
        plan += [("float16", op, cases.FEWER_LENGTHS) for op in ("softmax", "log_softmax")]
    pairs = []
    for dtype, op, lengths in plan:
        for n in lengths:
            pairs.append(both((max(1, settings.tensor(dtype) // n), n), (1,), dtype, op))
    return measure_all(pairs, settings, "rows", settings.repeats)


def axes(settings: Settings) -> list[dict[str, Any]]:
    listed = [(*view, False) for view in (cases.QUICK_AXES if settings.quick else cases.AXES)]
    listed.append((*cases.VMAPPED, True))
    pairs = {}
    for dtype in ("bfloat16",) if settings.quick else ("bfloat16", "float32"):
        for shape, reduced, vmapped in listed:
            if dtype == "float32":
                shape = cases.halved(shape)
            if not ON_GPU:
                shape = cases.shrunk(shape, settings.tensor(dtype))
            pair = [c._replace(vmapped=vmapped) for c in both(shape, reduced, dtype)]
            pairs[pair[0]] = pair  # on a CPU some become the same
    return measure_all(list(pairs.values()), settings, "axes", settings.repeats)


def few(settings: Settings) -> list[dict[str, Any]]:
    shapes = cases.QUICK_FEW if settings.quick else cases.FEW
    pairs = [[Case(shape, (1,), dtype)] for dtype in ("bfloat16", "float32") for shape in shapes]
    return measure_all(pairs, settings, "few rows", settings.repeats if not ON_GPU else 20)


def chain(settings: Settings) -> list[dict[str, Any]]:
    """100 small softmaxes in one jitted function: as they are, and apart, where XLA may not fuse one with the next."""
    shape = cases.CHAIN_SHAPE if ON_GPU else cases.shrunk(cases.CHAIN_SHAPE, 1 << 18)
    x = random_array(shape, "bfloat16", 0)
    records = []
    progress = tqdm([(apart, peer) for apart in (False, True) for peer in (OURS, XLA)], desc="chain")
    for apart, peer in progress:
        step = forward_or_backward(peer, Case(shape, (1,), "bfloat16"))

        def run(x, step=step, apart=apart):
            for _ in range(cases.CHAIN_LENGTH):
                x = step(jax.lax.optimization_barrier(x) if apart else x)
            return x

        record: dict[str, Any] = {"shape": shape, "length": cases.CHAIN_LENGTH, "peer": peer, "apart": apart}
        try:
            record |= _chain_times(jax.jit(run), x, settings)
        except Exception as error:
            record["failed"] = message(error)
        records.append(record)
    return records


def _chain_times(run, x: jax.Array, settings: Settings) -> dict[str, float]:
    """Wall time of a call among several in a row, whose results are dropped or kept; on a GPU also that of kernels."""
    calls = 20 if ON_GPU else 2
    for _ in range(3):  # XLA captures a graph only after a call or two
        jax.block_until_ready(run(x))
    times = {}
    # A result that nobody keeps makes room for one of the next calls. If all are kept, every call gets new addresses,
    # and beyond some of them XLA captures its graphs anew.
    for name, kept in (("wall", 1), ("wall_kept", calls)):
        walls = []
        for _ in range(settings.repeats):
            results = collections.deque(maxlen=kept)
            start = time.perf_counter()
            for _ in range(calls):
                results.append(run(x))
            jax.block_until_ready(list(results))
            walls.append((time.perf_counter() - start) / calls)
        times[name] = min(walls)
    if ON_GPU:
        # XLA launches no graphs while it is traced, so these are the kernels' own times: the wall clock sees graphs.
        traces = [kernel_times(lambda: jax.block_until_ready(run(x))) for _ in range(3)]
        times["device"] = statistics.median(sum(e[2] for e in trace) for trace in traces)
        times["kernels"] = statistics.median(len(trace) for trace in traces)
    return times


def compiling(settings: Settings) -> dict[str, Any]:
    """Seconds to make each kernel of the other sections, with NVRTC and from disk, and those of first calls."""
    try:
        nvrtc = cuda.find_nvrtc()
    except RuntimeError as error:
        return {"failed": message(error)}
    try:
        with tempfile.TemporaryDirectory() as folder:
            found: dict[str, Any] = {"kernels": _kernel_seconds(settings, nvrtc, folder)}
    finally:
        if cuda.availability() is None:
            cuda.configure()
    if ON_GPU:
        with tempfile.TemporaryDirectory() as folder:
            empty, filled = _first_call(OURS, folder), _first_call(OURS, folder)
            found["first_call"] = {"empty": empty, "filled": filled, "xla": _first_call(XLA, folder)}
    return found


def _kernel_seconds(settings: Settings, nvrtc: str, folder: str) -> list[dict[str, Any]]:
    """One kernel after the other, in a process that has made one before."""
    compute_capability = int(jax.devices()[0].compute_capability.replace(".", "")) if ON_GPU else 90
    steps = {}
    for case in _compiled_cases(settings):
        op = case.op if case.direction == "forward" else VJP[case.op]
        spec = described(op, case.shape, case.axes, case.dtype)
        plan = spec.plan(compute_capability)
        for step in plan["steps"] if plan and not judge.reason_on_gpu(spec, plan) else []:
            steps[step["code"]] = step
    times: dict[str, list[float]] = {"made": [], "read": []}
    for name, seconds in times.items():
        _kernels.jit_configure(nvrtc, folder, cuda.CACHE_BYTES)
        if name == "made":
            code = 'extern "C" __global__ void kernel(int) {}'
            _kernels.jit_binary(code, "to load the compiler", compute_capability)
        for step in tqdm(steps.values(), desc=f"kernels {name}"):
            start = time.perf_counter()
            _kernels.jit_binary(step["code"], step["plan"], compute_capability)
            seconds.append(time.perf_counter() - start)
    plans = (step["plan"] for step in steps.values())
    return [{"plan": p, "made": m, "read": r} for p, m, r in zip(plans, times["made"], times["read"], strict=True)]


def _compiled_cases(settings: Settings) -> list[Case]:
    lengths, views = (cases.QUICK_LENGTHS, cases.QUICK_AXES) if settings.quick else (cases.LENGTHS, cases.AXES)
    found = []
    for dtype in ("bfloat16", "float32"):
        for n in lengths:
            found += both((max(1, (1 << 29) // jnp.dtype(dtype).itemsize // n), n), (1,), dtype)
        for shape, reduced in views:
            found += both(cases.halved(shape) if dtype == "float32" else shape, reduced, dtype)
    return found


def _first_call(peer: str, folder: str) -> float:
    script = Path(__file__).parent / "first_call.py"
    environment = {**os.environ, "JAX_SOFTMAX_CACHE_DIR": folder}
    result = subprocess.run([sys.executable, script, peer], env=environment, capture_output=True, text=True, check=True)
    return float(result.stdout.split()[-1])


def accuracy(settings: Settings) -> list[dict[str, Any]]:
    """The largest error of ours and of XLA's against float64 on the same inputs, in units of the dtype's eps."""
    shapes = cases.ACCURACY_SHAPES[:1] if settings.quick else cases.ACCURACY_SHAPES
    magnitudes = cases.MAGNITUDES[1:4] if settings.quick else cases.MAGNITUDES
    dtypes = ("bfloat16", "float32") if settings.quick else ("bfloat16", "float16", "float32")
    records = []
    jitted = functools.cache(lambda peer, case: jax.jit(forward_or_backward(peer, case)))
    grid = [(d, o, s, m) for d in dtypes for o in ("softmax", "log_softmax") for s in shapes for m in magnitudes]
    for dtype, op, shape, magnitude in tqdm(grid, desc="accuracy"):
        x, t = np.random.default_rng(0).normal(size=(2, *shape))
        x, t = jnp.asarray(magnitude * x, dtype), jnp.asarray(t, dtype)
        # What is smaller may underflow: with float32's exponents to zero, in float16 to a multiple of its least number.
        info = jnp.finfo(dtype)
        smallest = float(info.tiny) / (1 if dtype == "float16" else float(info.eps))
        forward = Case(shape, (1,), dtype, op)
        y = jitted(OURS, forward)(x)
        for case, arguments in ((forward, (x,)), (forward._replace(direction="backward"), (y, t))):
            expected, scale = _expected(case, *(np.asarray(a, np.float64) for a in arguments))
            errors = {}
            for peer in (OURS, XLA):
                result = np.asarray(jitted(peer, case)(*arguments), np.float64)
                relative = np.abs(result - expected) / np.maximum(scale, smallest)
                errors[peer] = float(np.max(relative) / float(info.eps))
            records.append({**case._asdict(), "magnitude": magnitude, "error": errors})
    return records


def _expected(case: Case, *arguments: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The result in float64, and what its error is relative to.

    For softmax that is the element itself, for log-softmax the element or 1, the larger, for gradients the terms of the
    difference that an element is: where it cancels, no way of computing it is accurate.
    """
    if case.direction == "forward":
        (x,) = arguments
        shifted = x - x.max(-1, keepdims=True)
        if case.op == "softmax":
            e = np.exp(shifted)
            y = e / e.sum(-1, keepdims=True)
            return y, np.abs(y)
        y = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
        return y, np.maximum(np.abs(y), 1)
    y, t = arguments
    if case.op == "softmax":
        return y * (t - (y * t).sum(-1, keepdims=True)), np.abs(y) * np.abs(t).max(-1, keepdims=True)
    # The sum's own error counts as that of a sum of absolute values.
    p = np.exp(y)
    return t - p * t.sum(-1, keepdims=True), np.abs(t) + p * np.abs(t).sum(-1, keepdims=True)


def environment(date: str) -> dict[str, Any]:
    device = jax.devices()[0]
    versions = {"jax_softmax": jax_softmax.__version__, "jax": jax.__version__, "jaxlib": jaxlib.__version__}
    versions["python"] = platform.python_version()
    try:
        versions["NVRTC"] = _kernels.jit_facts()["nvrtc"]
    except RuntimeError:  # none, or no driver to run what it makes
        versions["NVRTC"] = "none"
    found = {"device": device.device_kind, "platform": device.platform, "date": date, "versions": versions}
    if HAS_TORCH:
        import torch

        versions["torch"] = torch.__version__
    if ON_GPU:
        try:
            query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
            found["driver"] = subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0]
        except (OSError, subprocess.CalledProcessError, IndexError):
            found["driver"] = "unknown"
    else:
        info = Path("/proc/cpuinfo")
        names = [line for line in info.read_text().splitlines() if "model name" in line] if info.exists() else []
        name = names[0].split(":", 1)[1].strip() if names else platform.processor() or platform.machine()
        found["device"] = f"{name}, {os.cpu_count()} cores"
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a part of the cases, fewer calls each")
    parser.add_argument("--only", choices=SECTIONS, action="append", help="measure this section alone (repeatable)")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results", help="folder for the results")
    parser.add_argument("--minutes", type=float, help="begin no case after so many minutes, and say so in the results")
    parser.add_argument("--date", default=datetime.date.today().isoformat(), help="the date to put down")
    parser.add_argument("--plot-only", action="store_true", help="write the tables and pictures of an earlier run anew")
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    path = arguments.output / "results.json"

    if not arguments.plot_only:
        start = time.monotonic()
        settings = Settings(arguments.quick, arguments.minutes)
        results: dict[str, Any] = {**environment(arguments.date), "quick": arguments.quick}
        if arguments.only and path.exists():  # the other sections stay, if they are of the same machine and versions
            earlier = json.loads(path.read_text())
            same = all(earlier.get(k) == results.get(k) for k in ("device", "driver", "versions", "quick"))
            results = {**(earlier if same else {}), **results}
        for section in SECTIONS:
            if not arguments.only or section in arguments.only:
                results[section] = globals()[section](settings)
                path.write_text(json.dumps(_without_nan(results), indent=1) + "\n")
        print(f"measured in {time.monotonic() - start:.0f} s")
    for written in report.write(json.loads(path.read_text()), arguments.output):
        print(written)
    return 0


def _without_nan(value: Any) -> Any:
    """JSON knows no NaN."""
    if isinstance(value, dict):
        return {k: _without_nan(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


if __name__ == "__main__":
    sys.exit(main())
