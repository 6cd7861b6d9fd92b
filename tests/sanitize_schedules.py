"""Runs every kernel once, with a mask and without, for compute-sanitizer:

XLA_PYTHON_CLIENT_ALLOCATOR=platform compute-sanitizer --tool memcheck python tests/sanitize_schedules.py

(and --tool racecheck). With that allocator each array is an allocation of its own, so that one element beyond it is
found. Prints what it ran; test_schedules.py checks the values.
"""

import itertools

import jax
import numpy as np
from support import DTYPES, OPS, WAYS, call_kernel, kernel_names, limited

jax.config.update("jax_enable_x64", True)


def main() -> None:
    ran = set()
    rng = np.random.default_rng(0)
    for way, dtype in itertools.product(WAYS, DTYPES):
        if np.prod(way.shape) > 1_000_000 and dtype != "bfloat16":
            continue  # the same code with other types, which smaller views cover: a sanitizer takes its time
        x = jax.device_put(rng.normal(size=way.shape).astype(jax.numpy.dtype(dtype)))
        with limited(**way.limits):
            for op, masked in itertools.product(OPS, (False, True)):
                operands = [x] if op in ("softmax", "log_softmax") else [x, x]
                if masked:
                    operands.append(jax.device_put(rng.random(way.shape) < 0.8))
                plan = way.plan(op, dtype, list(way.shape) if masked else None)
                call_kernel(op, *operands, axes=way.axes, scratch_bytes=plan["scratch_bytes"]).block_until_ready()
                ran.update(kernel_names(plan))
    print("ran", ", ".join(sorted(ran)))


if __name__ == "__main__":
    main()
