"""Runs every schedule once, small, for compute-sanitizer:

XLA_PYTHON_CLIENT_ALLOCATOR=platform compute-sanitizer --tool memcheck python tests/sanitize_schedules.py

(and --tool racecheck). With that allocator each array is an allocation of its own, so that one element beyond it is
found. Launches no other kernels than the package's, which keeps it fast. Prints what it ran.
"""

import itertools

import jax
import numpy as np

import jax_softmax
from jax_softmax import _kernels
from jax_softmax.primitives import PRIMITIVES

jax.config.update("jax_enable_x64", True)

CASES = [
    ((37, 3), (1,)),
    ((300, 7), (1,)),
    ((5, 31), (1,)),
    ((5, 33), (1,)),
    ((3, 64), (1,)),
    ((3, 100), (1,)),
    ((3, 1999), (1,)),
    ((2, 2048), (1,)),
    ((2, 3001), (1,)),
    ((2, 8192), (1,)),
    ((2, 9001), (1,)),
    ((2, 16384), (1,)),
    ((2, 20000), (1,)),
    ((2, 50257), (1,)),
    ((300, 1), (1,)),
    ((301, 2), (1,)),
    ((40, 65), (1,)),
    ((9, 129), (1,)),
    ((3, 511), (1,)),
    ((4, 8191), (1,)),
    ((1, 300001), (1,)),
    ((9, 70_001), (1,)),
    ((64, 150_001), (1,)),
    ((64, 150_008), (1,)),
    ((200, 65), (1,)),
    ((100, 257), (1,)),
    ((50, 300), (1,)),
    ((3, 33, 40), (1,)),
    ((3, 300, 7), (1,)),
    ((9, 64, 256), (1,)),
    ((3, 5, 7, 2), (1, 3)),
    ((16, 24, 32), (0, 2)),
    ((7, 40), (0,)),
    ((4, 4000), (0,)),
    ((2, 3000, 96), (1,)),
    ((60_000, 24), (0,)),
    ((2, 300, 1001), (1,)),
    ((70, 4, 2), (1,)),
    ((51, 2, 4), (1,)),
    ((51, 4, 4), (1,)),
    ((33, 15, 3), (1,)),
    ((9, 100, 5), (1,)),
    ((5, 1024, 3), (1,)),
    ((2, 2001, 33), (1,)),
    ((1, 150_000, 3), (1,)),
    ((5, 16, 12, 16), (1, 3)),
    ((5, 16, 13, 15), (1, 3)),
    ((16, 9, 1024), (0, 2)),
    ((63, 3, 1023), (0, 2)),
    ((130, 2, 5001), (0, 2)),
    ((12, 5, 13, 64), (0, 2)),
    ((300, 2, 100, 32), (0, 2)),
    ((3, 3, 5, 201), (0, 2)),
    ((12, 3, 65, 101), (0, 2)),
    ((300, 2, 301, 33), (0, 2)),
    ((300, 3, 41, 7), (0, 2)),
    ((121, 2, 103, 129), (0, 2)),
    ((9, 50, 3, 11), (1, 3)),
    ((2, 200, 79, 9), (1, 3)),
    ((2, 400, 41, 45), (1, 3)),
    ((7, 3, 97, 3, 5), (0, 2, 4)),
    ((3, 4, 4099), (1,)),
    ((3, 5, 4099), (1,)),
    ((3, 20, 4099), (1,)),
    ((3, 30, 1025), (1,)),
    ((3, 2, 7, 401), (0, 2)),
    ((2, 5, 9, 2, 501), (1, 3)),
    ((2, 4, 377, 3), (1, 3)),
    ((2, 8, 177, 13), (1, 3)),
    ((301, 2, 9, 5), (1, 3)),
    ((17, 4, 5, 6, 7), (1, 3)),
]


# Rows that smaller chips do not hold, in bfloat16: with clusters and without.
LONG_CASES = [
    ({"shared_memory_per_block": 99 << 10, "largest_cluster": 16}, (5, 90_001)),
    ({"shared_memory_per_block": 99 << 10, "largest_cluster": 16}, (2, 5_000_000)),
    ({"shared_memory_per_block": 163 << 10, "largest_cluster": 16}, (2, 8_000_001)),
    ({"shared_memory_per_block": 99 << 10, "largest_cluster": 16}, (1, 2_600_000)),
    ({"shared_memory_per_block": 163 << 10, "largest_cluster": 16}, (1, 3_900_001)),
    ({"shared_memory_per_block": 64 << 10, "largest_cluster": 1}, (2, 3_000_001)),
]


# Of programs exported with a dimension "n", which have no scratch memory; it is 2 then.
EXPORTED_CASES = [
    (("n", 70_000, 33), (1,)),
    ((130, "n", 30_001), (0, 2)),
    (("n", 1_100_001), (1,)),
]


def main() -> None:
    schedules = run(("bfloat16", "float32", "float64"), CASES)
    for limits, shape in LONG_CASES:
        _kernels.limit_cuda_device(**limits)
        jax.clear_caches()
        schedules |= run(("bfloat16",), [(shape, (1,))], limits)
    _kernels.limit_cuda_device()
    jax.clear_caches()
    schedules |= {run_exported(shape, axes) for shape, axes in EXPORTED_CASES}
    print("ran", ", ".join(sorted(schedules)))


def run(dtypes, cases, limits=None) -> set[str]:
    """Runs every operator, with a mask and without; returns the schedules of the softmaxes."""
    rng = np.random.default_rng(0)
    schedules = set()
    for dtype, (shape, axes) in itertools.product(dtypes, cases):
        if np.prod(shape) > 1_000_000 and dtype != "bfloat16":
            continue  # the same code with other types, which shorter rows cover: a sanitizer takes its time
        x, t = (jax.device_put(rng.normal(size=shape).astype(jax.numpy.dtype(dtype))) for _ in range(2))
        for where in (None, jax.device_put(rng.random(size=shape) < 0.8)):
            mask = [] if where is None else [where]
            jax_softmax.softmax(x, axes, where).block_until_ready()
            jax_softmax.log_softmax(x, axes, where).block_until_ready()
            for op in ("softmax_linear", "log_softmax_jvp", "log_softmax_vjp"):
                PRIMITIVES[op].bind(x, t, *mask, axes=axes, axis_name=()).block_until_ready()
            mask_shape = None if where is None else list(shape)
            schedules.add(
                _kernels.plan(list(shape), list(axes), "softmax", dtype, mask_shape, **(limits or {}))["schedule"]
            )
    return schedules


def run_exported(shape, axes) -> str:
    """Runs softmax and its derivative in bfloat16; returns their schedule."""
    known = [2 if n == "n" else n for n in shape]
    x = jax.device_put(np.random.default_rng(0).normal(size=known).astype(jax.numpy.bfloat16))
    symbolic = jax.ShapeDtypeStruct(jax.export.symbolic_shape(", ".join(map(str, shape))), x.dtype)
    allowed = [jax.export.DisabledSafetyCheck.custom_call("jax_softmax")]

    @jax.jit
    def both(x):
        y = jax_softmax.softmax(x, axes)
        return y, PRIMITIVES["softmax_linear"].bind(y, x, axes=axes, axis_name=())

    exported = jax.export.export(both, disabled_checks=allowed)(symbolic)
    jax.block_until_ready(jax.jit(exported.call)(x))
    return _kernels.plan(known, list(axes), "softmax", "bfloat16", scratch=False)["schedule"]


if __name__ == "__main__":
    main()
