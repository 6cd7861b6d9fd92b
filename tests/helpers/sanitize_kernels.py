"""Runs the kernels of every operator, with a mask and without, and of attention, for compute-sanitizer:

XLA_PYTHON_CLIENT_ALLOCATOR=platform compute-sanitizer --tool memcheck python tests/helpers/sanitize_kernels.py

(and --tool racecheck). With that allocator each array is an allocation of its own, so that one element beyond it is
found. Prints what it ran; test_schedules.py and test_attention.py check the values. It takes long: with `0 8` after it,
up to `7 8`, each of 8 processes runs its part. Run it without the sanitizer first: kernels are compiled then, and come
from the cache; if JAX_COMPILATION_CACHE_DIR names a folder and JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS is 0, XLA's
programs do as well. Where XLA compiles, compute-sanitizer is slow and often crashes.

racecheck warns, and finds no error, where `begin_exchange` has one thread prepare a barrier and arrive at it at once.
It reports errors in attention's kernels on Hopper, between `begin_copy`, `read_shared` and `write_shared`, because it
does not follow two orders that they keep: one lane arrives at a barrier for its warp, after `__syncwarp`, and
warpgroups take turns by `bar.sync` and `bar.arrive`. It reports them in a kernel of a few lines that does either, and
none where each lane arrives for itself. In attention's other kernels it finds none.
"""

import functools
import itertools
import sys
from collections.abc import Callable

import attention_cases
import emulated
import jax
import numpy as np
from oracles import LARGEST
from support import ON_CUDA, OPS, ROW_OPS, TWO_OPERANDS, WAYS, call_kernel, kernel_names, limited, row_numbers


def main() -> None:
    part, parts = map(int, sys.argv[1:] or (0, 1))
    for run in runs()[part::parts]:
        print("ran", *run(), flush=True)


def runs() -> list[Callable]:
    # Of large views one dtype: the code is the same with others, which smaller views cover.
    views = [c for c in itertools.product(WAYS, ON_CUDA) if np.prod(c[0].shape) <= 1_000_000 or c[1] == "bfloat16"]
    attentions = [*attention_cases.FIRST, *attention_cases.OTHERS]
    return [functools.partial(run_view, *c) for c in views] + [functools.partial(run_attention, c) for c in attentions]


def run_view(way, dtype):
    """All operators on one view of an array."""
    x = jax.device_put(np.random.default_rng(0).normal(size=way.shape).astype(jax.numpy.dtype(dtype)))
    with limited(**way.limits):
        ops = [*((op, None) for op in (*OPS, *ROW_OPS)), *(("absmax_scale", result) for result in LARGEST)]
        for (op, out), masked in itertools.product(ops, (False, True)):
            operands = [x, x] if op in TWO_OPERANDS else [x]
            operands += row_numbers(op, way.shape, way.axes, dtype)
            if masked:
                operands.append(jax.device_put(np.random.default_rng(1).random(way.shape) < 0.8))
            plan = way.plan(op, dtype, list(way.shape) if masked else None, out_dtype=out)
            scratch = plan["scratch_bytes"]
            result = call_kernel(op, *operands, axes=way.axes, out_dtype=out, scratch_bytes=scratch)
            jax.block_until_ready(result)
    return dtype, way, *kernel_names(plan)


def run_attention(case):
    """The three kernels of attention."""
    with emulated.all_kernels(attention=True):
        jax.block_until_ready(jax.jit(attention_cases.fused(case))(*case.operands()))
    return (case,)


if __name__ == "__main__":
    main()
