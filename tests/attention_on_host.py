"""Attention's kernels on the host: their whole text, compiled by the host's compiler, with what is in `on_host/` in the
place of what a GPU's warps do together."""

import contextlib
import ctypes
import functools
import pathlib
import tempfile
import threading

import emulated
import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import mlir

from jax_softmax import _kernels
from jax_softmax.fusion.attention import kernels as attention

_running = threading.Lock()
_folder = tempfile.TemporaryDirectory()


@contextlib.contextmanager
def kernels(late=False, in_jax=False):
    """While it lasts, calls of attention's kernels are done here. `late`: copies are made when they are waited for.
    `in_jax`: what kernels do is done in JAX, as it has to be in programs that XLA divides. Yields the calls that are
    lowered: the primitive's parameters, and the operands."""
    made, kept = [], attention.ffi_call

    def emulated_call(*operands, **params):
        if in_jax:
            made.append((params, operands))
            return in_jax_by_tiles(*operands, **params)
        plan, types, operands = attention.plan_and_operands(params["attention"], params["kernel"], *operands)
        made.append((params, operands))

        def run(*arrays):
            arrays = [np.ascontiguousarray(a) for a in arrays]
            results = [np.full(t.shape, np.nan, t.dtype) for t in types]
            words = [a.ctypes.data for a in (*arrays, *results)]
            ends = [a.ctypes.data + a.nbytes for a in arrays]
            addresses = [(ctypes.c_uint64 * len(of))(*of) for of in (words, ends)]
            with _running:  # a kernel's threads have the emulator for themselves
                _function(plan.code)(plan.blocks, plan.threads, late, *addresses, len(ends))
            return results

        return jax.pure_callback(run, types, *operands)

    attention.ffi_call = emulated_call
    for primitive, rule in ((attention.attention_p, attention.lower), (attention.divided_p, attention.lower_divided)):
        mlir.register_lowering(primitive, functools.partial(rule, platform="cpu"), platform="cpu")
    try:
        yield made
    finally:
        attention.ffi_call = kept
        by_jax = mlir.lower_fun(attention._in_jax, multiple_results=True)
        mlir.register_lowering(attention.attention_p, by_jax, platform="cpu")


def in_jax_by_tiles(*operands, attention, kernel):
    """What kernels do, in JAX, without the tiles that they skip."""
    visited, extents, n = True, attention.extents(*operands[:3]), 3 if kernel == "forward" else 6
    if attention.letters_of_bounds is not None:
        ends = attention.bounds(kernel, extents, operands[n:])
        tiling = _kernels.attention_tiling(kernel, extents["d"], extents["e"])
        stay, pass_by = "ji" if kernel == "keys" else "ij"
        block, step = jnp.arange(extents[stay]) // tiling["rows"], jnp.arange(extents[pass_by]) // tiling["step"]
        first, end = (ends[..., k][..., block, None] for k in (0, 1))
        visited = (step >= first) & (step < end)
        visited = visited.swapaxes(-1, -2) if kernel == "keys" else visited
        of_batch = [extents[c] if c in attention.letters_of_bounds else 1 for c in attention.letters.batch]
        visited = visited.reshape(*of_batch, extents["i"], extents["j"])
    return attention.in_jax(kernel, *operands, visited=visited)


@functools.cache
def _function(code):
    run = (
        "\nstatic const jax_softmax::device::Problem::Addresses* given;\n"
        'extern "C" void run(int blocks, int threads, int late, const void* words, const char** ends, int n) {\n'
        "  emulator::arrays.clear();\n"
        "  const char* const* begins = static_cast<const char* const*>(words);\n"
        "  for (int k = 0; k < n; ++k) emulator::arrays.push_back({begins[k], ends[k]});\n"
        "  given = static_cast<decltype(given)>(words);\n  emulator::late = late;\n"
        "  emulator::gridDim.x = blocks;\n"
        "  emulator::body = [] { kernel(*given); };\n"
        "  for (int block = 0; block < blocks; ++block) emulator::run_block(block, threads);\n}\n"
    )
    n = len(list(pathlib.Path(_folder.name).iterdir()))
    path = pathlib.Path(_folder.name, f"{n}.cc")
    # A name of its own: constants of classes of one name are one in all libraries.
    path.write_text((code + run).replace("Problem", f"Problem{n}"))
    return ctypes.CDLL(emulated.shared_library(path, "-O1", "-w")).run
