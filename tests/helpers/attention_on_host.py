"""Attention's kernels on the host: their whole text, compiled by the host's compiler, with what is in `on_host/` in the
place of what a GPU's warps do together."""

import contextlib
import ctypes
import functools
import itertools
import pathlib
import struct
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
def kernels(late=False, in_jax=False, compute_capability=80):
    """While it lasts, calls of attention's kernels are done here, as a chip does them. `late`: copies are made when
    they are waited for; otherwise products of warpgroups are. `in_jax`: what kernels do is done in JAX, as it has to
    be in programs that XLA divides. Yields the calls that are lowered: the primitive's parameters, and the operands."""
    made, kept = [], attention.ffi_call

    def emulated_call(*operands, **params):
        if in_jax:
            made.append((params, operands))
            return in_jax_by_cells(*operands, **params)
        call, types, operands = attention.described_call(params["attention"], params["kernel"], *operands)
        made.append((params, operands))
        step = _kernels.plan_attention(**call, compute_capability=compute_capability)
        function = _Function(step["code"])

        def run(*arrays):
            arrays = [np.ascontiguousarray(a) for a in arrays]
            results = [np.full(t.shape, 127 if t.dtype == jnp.int8 else np.nan, t.dtype) for t in types]
            words = [a.ctypes.data for a in (*arrays, *results)]
            ends = [a.ctypes.data + a.nbytes for a in arrays]
            maps = [_packed(*of, a) for of, a in zip(step["maps"], words, strict=False)]
            addresses = [(ctypes.c_uint64 * len(of))(*of) for of in (words, ends)]
            argument = b"".join(maps) + bytes(addresses[0]) + bytes(64)  # to the end of its type
            with _running:  # a kernel's threads have the emulator for themselves
                launch = step["blocks"], step["threads"], step["shared_bytes"]
                function(*launch, late, argument, *addresses, len(ends))
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


def in_jax_by_cells(*operands, attention, kernel):
    """What kernels do, in JAX, without the cells of scores that they may skip."""
    visited, extents, n = True, attention.extents(*operands[:3]), 3 if kernel == "forward" else 6
    if attention.visible.letters_of_bounds is not None:
        ends = attention.visible.bounds(kernel, extents, operands[n:])
        stay, pass_by = "ji" if kernel == "keys" else "ij"
        own, other = (jnp.arange(extents[c]) // _kernels.ATTENTION_CELL for c in (stay, pass_by))
        first, end = (ends[..., k][..., own, None] for k in (0, 1))
        visited = (other >= first) & (other < end)
        visited = visited.swapaxes(-1, -2) if kernel == "keys" else visited
        of_batch = [extents[c] if c in attention.visible.letters_of_bounds else 1 for c in attention.letters.batch]
        visited = visited.reshape(*of_batch, extents["i"], extents["j"])
    return attention.in_jax(kernel, *operands, visited=visited)


def _packed(extents, box, address):
    """A tensor map, as on_host/attention/hopper/warpgroup.cuh has it."""
    return struct.pack("Q5Q5I", address, *extents, *box).ljust(128, b"\0")


@functools.cache
class _Function:
    """A kernel, by its text. Kernels are compiled when one of them is called, all that there are by then at once: what
    they include takes as long as a kernel."""

    def __init__(self, code):
        self.code, self.run = code, None
        _waiting.append(self)

    def __call__(self, *args):
        if self.run is None:
            _compile_all()
        self.run(*args)

    def source(self, n):
        """With names of its own: constants of classes of one name are one in all libraries."""
        run = (
            f"\nstatic jax_softmax::device::Problem::Addresses given{n};\n"
            f'extern "C" void run{n}(int blocks, int threads, int shared_bytes, int late, const void* argument, '
            "const char** begins, const char** ends, int n) {\n"
            "  emulator::arrays.clear();\n"
            "  for (int k = 0; k < n; ++k) emulator::arrays.push_back({begins[k], ends[k]});\n"
            f"  memcpy(&given{n}, argument, sizeof given{n});\n  emulator::late = late;\n"
            "  emulator::shared_bytes = shared_bytes;\n"
            "  emulator::gridDim.x = blocks;\n"
            f"  emulator::body = [] {{ kernel(given{n}); }};\n"
            "  for (int block = 0; block < blocks; ++block) emulator::run_block(block, threads);\n}\n"
        )
        return (self.code + run).replace("Problem", f"Problem{n}").replace(" kernel(", f" kernel{n}(")


_waiting = []
_numbers = itertools.count()


def _compile_all():
    numbered = [(next(_numbers), function) for function in _waiting]
    path = pathlib.Path(_folder.name, f"{numbered[0][0]}.cc")
    path.write_text("".join(function.source(n) for n, function in numbered))
    library = ctypes.CDLL(emulated.shared_library(path, "-O1", "-w"))
    for n, function in numbered:
        function.run = getattr(library, f"run{n}")
    _waiting.clear()
