"""Kernels with expressions, on the host: a fused function runs as it would on a GPU, but for the operator itself.

While `kernels()` lasts, the CPU has programs that are rewritten as CUDA's are, and the custom call that they make is
done here: the host's C++ compiler compiles its expressions, and `reference.py` is the operator, in float32.
"""

import contextlib
import ctypes
import functools
import pathlib
import shutil
import subprocess
import tempfile
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.interpreters import mlir

from jax_softmax.fusion import primitive
from jax_softmax.fusion.backend import Backend, using
from jax_softmax.fusion.kernels.fused_kernel import kernel_p, lower
from jax_softmax.primitives.operators import OPERATORS
from jax_softmax.primitives.records import apply

# `device/functions.cuh` is the kernels' own; what it includes, and a warp's part of attention, the tests have.
SOURCES = pathlib.Path(__file__).parents[2] / "csrc"
ON_HOST = pathlib.Path(__file__).with_name("on_host")
_COMPILERS = map(shutil.which, ("c++", "g++", "clang++"))
COMPILER = next((path for path in _COMPILERS if path and SOURCES.is_dir()), None)
compiler_is_needed = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler found")
_PRELUDE = '#include "device/functions.cuh"\nnamespace jax_softmax::device {\nusing C = float;\n'
_TYPES = {"float32": "float", "int32": "int", "bool": "bool"}
_folder = tempfile.TemporaryDirectory()


class Whoever(Backend):
    """A kernel makes what it can make, whoever would be faster. `called`: the kernels whose calls are lowered."""

    def __init__(self, attention=False):
        """`attention`: attention is done by its kernels."""
        self.called = []
        self.attention = attention

    def kernel_wins(self, traffic):
        return True

    def reason_against_attention(self, found):
        return "" if self.attention else "it is not asked for"

    def call(self, kernel, *operands):
        self.called.append(kernel)
        return super().call(kernel, *operands)


class Host(Whoever):
    """The same, where the host does what a kernel does, and nothing is compiled for a GPU."""

    def __init__(self, always=True, in_jax=False, attention=False):
        super().__init__(attention)
        self.always = always
        self.in_jax = in_jax

    def kernel_wins(self, traffic):
        return self.always or traffic.kernel_wins

    def reason_for_xla(self, kernel):
        reason = super().reason_for_xla(kernel)
        return "" if self.always else reason

    def start_compiling(self, kernel):
        pass

    def call(self, kernel, *operands):
        self.called.append(kernel)
        return kernel.in_jax(*operands) if self.in_jax else _call(kernel, *operands)


@contextlib.contextmanager
def kernels(always=True, in_jax=False, attention=False):
    """Yields the kernels whose calls are lowered from here on.

    `always`: of each operator that can be one, whoever would be faster. `in_jax`: what kernels do is done in JAX, as it
    has to be in programs that XLA divides, where the host cannot be called. `attention`: what is attention is done by
    its kernels, which `attention_on_host` has to run.
    """
    with as_on_a_gpu(Host(always, in_jax, attention)) as backend:
        yield backend.called


@contextlib.contextmanager
def as_on_a_gpu(backend):
    """The CPU has programs that are rewritten as CUDA's are, by this backend."""
    mlir.register_lowering(primitive.fused_p, primitive._lower_for_cuda, platform="cpu")
    mlir.register_lowering(kernel_p, functools.partial(lower, platform="cpu"), platform="cpu")
    try:
        with using(backend), jax.default_device(jax.devices("cpu")[0]):
            yield backend
    finally:
        mlir.register_lowering(primitive.fused_p, primitive._lower_for_cpu, platform="cpu")


@contextlib.contextmanager
def all_kernels(attention=False):
    """On a GPU: what a kernel can do is done by one, whoever would be faster. Yields the kernels that are lowered.

    `attention`: attention is done by its own.
    """
    backend = Whoever(attention)
    with using(backend):
        yield backend.called


def _call(kernel, *operands):
    """What the custom call of a kernel does."""
    spec, types, facts, shape = kernel.spec, kernel.result_types, OPERATORS[kernel.op], operands[0].shape
    own, rest = list(operands[: facts.inputs]), list(operands[facts.inputs :])
    assert all((a.shape, a.dtype) == (shape, own[0].dtype) for a in own)  # a kernel reads them alike
    read = []
    for role in spec.arrays.split():
        if role.startswith("index:"):
            along = int(role.removeprefix("index:"))
            read.append(jax.lax.broadcasted_iota(jnp.int32, shape, along))
        else:
            read.append(jnp.broadcast_to(_widened(rest.pop(0)), shape))
    own = [_widened(a) for a in own]
    given = {f"s{k}": a for k, a in enumerate(read)} | {f"x{k}": a for k, a in enumerate(own)}
    loaded = _by_lines(spec.load, [f"x{k}" for k in range(len(own))], given, own)
    dtype = {"dtype": types[0].dtype.name if facts.quantizes else "float32"} if facts.element_results else {}
    found = apply(kernel.op, *loaded, *rest, axes=kernel.axes, **dtype)
    found = list(found) if isinstance(found, tuple | list) else [found]
    of_elements = []
    if facts.element_results:
        y = found.pop(0).astype(jnp.float32)
        count = len(kernel.dtypes)
        of_elements = _by_lines(spec.store, ["y"] * count, given | {"y": y}, [y] * count)
    return [a.astype(type_.dtype) for a, type_ in zip([*of_elements, *found], types, strict=True)]


def _widened(a):
    return a if a.dtype in (jnp.int32, jnp.bool) else a.astype(jnp.float32)


def _by_lines(text, names, given, unchanged):
    """What a line each makes of the values; an empty one stands for the value of its name."""
    lines = (text.split("\n") if text else []) + [""] * len(names)
    lines = [line or name for line, name in zip(lines, names, strict=False)]
    if lines == names:
        return unchanged
    arrays = list(given.values())
    function = _Compiled(tuple((name, _TYPES[a.dtype.name]) for name, a in given.items()), tuple(lines))
    types = [jax.ShapeDtypeStruct(unchanged[0].shape, jnp.float32) for _ in lines]

    def run(*arrays):
        arrays = [np.ascontiguousarray(a) for a in arrays]
        results = [np.empty(t.shape, np.float32) for t in types]
        pointers = [(ctypes.c_void_p * len(of))(*(a.ctypes.data for a in of)) for of in (arrays, results)]
        function(ctypes.c_long(results[0].size), *pointers)
        return results

    return list(jax.pure_callback(run, types, *arrays, vmap_method="sequential"))


@functools.cache
class _Compiled:
    """A function of the number of elements, the arrays of these names and types, and the lines' results.

    Functions are compiled when one of them is called, all that there are by then at once.
    """

    def __init__(self, values, lines):
        self.values, self.lines, self.function = values, lines, None
        _waiting.append(self)

    def __call__(self, *args):
        with _compiling:  # XLA calls from several threads
            if self.function is None:
                _compile_all()
        self.function(*args)

    def source(self, name):
        body = [
            f"const {type_} {name} = static_cast<const {type_}*>(given[{k}])[i]; (void){name};"
            for k, (name, type_) in enumerate(self.values)
        ]
        body += [f"static_cast<float*>(made[{k}])[i] = static_cast<C>({line});" for k, line in enumerate(self.lines)]
        loop = "  for (long i = 0; i < n; ++i) {\n    " + "\n    ".join(body) + "\n  }\n"
        return f'extern "C" void {name}(long n, const void* const* given, void* const* made) {{\n{loop}}}\n'


def shared_library(source, *options):
    """The path of the library that the host's compiler makes of a file."""
    library = str(source.with_suffix(".so"))
    command = [COMPILER, "-std=c++17", "-O0", *options, f"-I{ON_HOST}", f"-I{SOURCES}"]
    command += ["-ffp-contract=off", "-shared", "-fPIC", str(source), "-o", library]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return library


_waiting = []
_compiling = threading.Lock()


def _compile_all():
    path = pathlib.Path(_folder.name) / f"{len(list(pathlib.Path(_folder.name).iterdir()))}.cc"
    sources = [function.source(f"run{k}") for k, function in enumerate(_waiting)]
    path.write_text(_PRELUDE + "".join(sources) + "}  // namespace jax_softmax::device\n")
    functions = ctypes.CDLL(shared_library(path))
    for k, function in enumerate(_waiting):
        function.function = getattr(functions, f"run{k}")
    _waiting.clear()
