"""Times computations: by the profiler's kernel durations on a GPU, by the wall clock on a CPU."""

import concurrent.futures
import glob
import math
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def kernel_times(run: Callable[[], None]) -> list[tuple[str, float, float]]:
    """Name, start and duration in seconds of every GPU kernel and copy that `run` causes, in order of their start."""
    folder = tempfile.mkdtemp()
    try:
        with jax.profiler.trace(folder):
            run()
        events = []
        for path in glob.glob(str(Path(folder, "**", "*.xplane.pb")), recursive=True):
            for plane in jax.profiler.ProfileData.from_file(path).planes:
                if not plane.name.startswith("/device:GPU"):
                    continue
                for line in plane.lines:
                    if line.name.startswith("Stream"):
                        events += [(e.name, e.start_ns * 1e-9, e.duration_ns * 1e-9) for e in line.events]
        return sorted(events, key=lambda event: event[1])
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def device_time(function: Callable, argument_sets: list[tuple], repeats: int = 10) -> float:
    """Seconds that one call of a jitted function keeps the device busy: the median over rounds of calls.

    The calls go through `argument_sets` in turn; together these should be larger than the last cache.
    """
    for arguments in argument_sets:
        jax.block_until_ready(function(*arguments))
    if jax.default_backend() != "gpu":
        return _wall_time(function, argument_sets, repeats)

    def run():
        for i in range(repeats):
            jax.block_until_ready(function(*argument_sets[i % len(argument_sets)]))

    return _median_call(kernel_times(run), repeats)


def copy_rate(elements: int = 1 << 28) -> float:
    """Bytes read and written per second by the negation of a float32 array of so many elements."""
    x = jnp.ones(elements, jnp.float32)
    return 2 * x.nbytes / device_time(jax.jit(jnp.negative), [(x,)])


def device_times(calls: Mapping[str, tuple[Callable, tuple]], repeats: int = 10) -> dict[str, float | Exception]:
    """`device_time` of several functions, each with its arguments; or the error that one raised.

    On a GPU they share one trace, since starting and reading a trace takes far longer than the calls. On a CPU they
    take turns, so that a slow moment of the machine is the same for all.
    """
    times: dict[str, float | Exception] = {}
    ready = {}
    for name, (function, arguments) in calls.items():
        try:
            jax.block_until_ready(function(*arguments))
            ready[name] = function, arguments
        except Exception as error:  # out of memory, or not supported: the others are measured all the same
            times[name] = error
    if jax.default_backend() != "gpu":
        rounds = [{name: _wall_time(f, [a], 1) for name, (f, a) in ready.items()} for _ in range(repeats)]
        return times | {name: min(r[name] for r in rounds) for name in ready}

    def run():
        for function, arguments in ready.values():
            # A copy to the device, which separates one function's kernels from another's in the trace.
            jax.block_until_ready(jax.device_put(np.zeros(1, np.float32)))
            for _ in range(repeats):
                jax.block_until_ready(function(*arguments))

    traces: list[list] = []
    for event in kernel_times(run) if ready else []:
        if "h2d" in event[0].lower():
            traces.append([])
        elif traces:
            traces[-1].append(event)
    if len(traces) != len(ready):
        traces = [[] for _ in ready]
    for (name, (function, arguments)), events in zip(ready.items(), traces, strict=True):
        try:
            times[name] = _median_call(events, repeats)
        except RuntimeError:
            try:
                times[name] = device_time(function, [arguments], repeats)  # in a trace of its own
            except Exception as error:
                times[name] = error
    return times


def step_times(
    steps: Mapping[str, tuple[Callable, Any, Any]], turns: int = 15, seconds: float = 0.3
) -> dict[str, float]:
    """Seconds of a step that is fed back into itself, by the wall clock: medians of turns that the steps take.

    `steps`: by name, a function of a state and a batch to the next state and a loss, a state, and a batch. The function
    may reuse the state's memory. A turn has as many steps as fit into `seconds`.
    """
    states = {name: copied(state) for name, (_, state, _) in steps.items()}

    def turn(name: str, n: int) -> float:
        step, _, batch = steps[name]
        state = states.pop(name)
        start = time.perf_counter()
        for _ in range(n):
            state, loss = step(state, batch)
        jax.block_until_ready((state, loss))
        states[name] = state
        return (time.perf_counter() - start) / n

    first = [(turn(name, 1), turn(name, 3))[1] for name in steps]
    n = max(1, round(seconds / max(first)))
    rounds = [{name: turn(name, n) for name in steps} for _ in range(turns)]
    return {name: statistics.median(r[name] for r in rounds) for name in steps}


def copied(tree: Any) -> Any:
    """The same arrays at other places of the memory, of which a function may reuse each once."""
    return jax.tree.map(jnp.copy, tree)


def peak_memory(program: jax.stages.Compiled) -> int:
    """Bytes of a program's arguments, results and temporary arrays together."""
    m = program.memory_analysis()
    return m.argument_size_in_bytes + m.output_size_in_bytes - m.alias_size_in_bytes + m.temp_size_in_bytes


def _median_call(events: list[tuple[str, float, float]], repeats: int) -> float:
    """The median over calls of the time that their kernels keep the device busy; kernels of a call may overlap."""
    per_call, rest = divmod(len(events), repeats)
    if rest or not per_call:
        raise RuntimeError(f"{len(events)} kernels in {repeats} calls: the profiler lost some")
    calls = [_busy(events[i * per_call : (i + 1) * per_call]) for i in range(repeats)]
    return statistics.median(calls)


def _busy(events: list[tuple[str, float, float]]) -> float:
    """Seconds in which at least one of the kernels, given in order of their start, ran."""
    busy, end = 0.0, -math.inf
    for _, start, duration in events:
        busy += max(0.0, start + duration - max(start, end))
        end = max(end, start + duration)
    return busy


def _wall_time(function: Callable, argument_sets: list[tuple], repeats: int) -> float:
    """Seconds of the fastest call: what makes another one slower is not the computation."""
    times = []
    for i in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(function(*argument_sets[i % len(argument_sets)]))
        times.append(time.perf_counter() - start)
    return min(times)


def compiled_at_once(lowered: Mapping[Any, jax.stages.Lowered]) -> dict[Any, jax.stages.Compiled]:
    """Lowered programs as compiled ones, by the same names."""
    with concurrent.futures.ThreadPoolExecutor() as pool:
        return dict(zip(lowered, pool.map(lambda one: one.compile(), lowered.values()), strict=True))
