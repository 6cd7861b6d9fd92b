"""Kernels made at run time: what NVRTC is asked for, what it is told when it fails, threads, forks, and the end."""

import concurrent.futures
import os
import pathlib
import re
import struct
import subprocess
import sys
import textwrap

import emulated
import jax
import jax.numpy as jnp
import pytest

import jax_softmax
from jax_softmax import _kernels
from jax_softmax.runtime import cuda

CODE = """
#include <cstdint>
struct Argument { float* x; int64_t n; };
static_assert(sizeof(int8_t) == 1 && sizeof(uint16_t) == 2 && sizeof(int32_t) == 4 && sizeof(uint64_t) == 8);
static_assert(sizeof(uintptr_t) == sizeof(void*) && int64_t(-1) < 0 && uint64_t(-1) > 0);
extern "C" __global__ void kernel(Argument a) {
  const int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x;
  if (i < a.n) a.x[i] *= %d;
}
"""
ELF_MACHINE_CUDA = 190


@pytest.mark.parametrize("compute_capability", [75, 80, 90, 100, 120])
def test_cubin(jit, compute_capability):
    jit.needs(compute_capability)
    cubin = jit.binary(CODE % 2, compute_capability)
    assert cubin[:4] == b"\x7fELF" and struct.unpack_from("<H", cubin, 18) == (ELF_MACHINE_CUDA,)


def test_ptx_for_gpus_newer_than_nvrtc(jit):
    ptx = jit.binary(CODE % 2, 999)
    assert re.search(rb"\.target sm_\d+\n", ptx) and b".entry kernel(" in ptx
    assert ptx[-1] == 0  # as the driver wants it


def test_gpus_older_than_nvrtc_are_refused(jit):
    with pytest.raises(RuntimeError, match=r"NVRTC \d+\.\d+ \(.*\) makes no code for compute capability 3\.0"):
        jit.binary(CODE % 2, 30)


def test_failed_compile(jit, monkeypatch, tmp_path):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    code = 'extern "C" __global__ void kernel(int n) { mistake(n); }\n'
    with pytest.raises(RuntimeError) as caught:
        jit.binary(code, plan="registers(lanes=4)")
    message = str(caught.value)
    assert re.search(r"NVRTC \d+\.\d+ \(.*libnvrtc.*\) could not compile a kernel", message)
    assert 'identifier "mistake" is undefined' in message
    assert "plan: registers(lanes=4)\n" in message and "--gpu-architecture=sm_90" in message and "driver: " in message
    source = pathlib.Path(re.search(r"^source: (.*)$", message, re.MULTILINE)[1])
    assert source.read_text() == code and source.is_relative_to(tmp_path)
    assert (source.parent / "cstdint").exists()  # what it includes lies beside it
    with pytest.raises(RuntimeError, match="mistake"):  # and is not tried again
        jit.binary(code)
    assert len(list(tmp_path.glob("jax_softmax-*"))) == 1


def test_resources(jit):
    text = _kernels.jit_binary(CODE % 2, "a test", 90)[1]
    assert re.search(r"Used \d+ registers", text) and "0 bytes spill stores" in text


def test_made_once(jit):
    first = jit.binary(CODE % 2)
    assert jit.binary(CODE % 2) == first and jit.counts() == (1, 0, 1)
    assert jit.binary(CODE % 3) != first and jit.counts() == (2, 0, 2)
    assert jit.binary(CODE % 2, 80) != first and jit.counts() == (3, 0, 3)


def test_threads_share_a_compile(jit):
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        binaries = list(pool.map(lambda i: jit.binary(CODE % (i % 2)), range(16)))
    assert len(set(binaries)) == 2 and jit.counts() == (2, 0, 2)


def test_prepared_kernels_are_not_made_again(jit):
    for i in range(4):
        _kernels.jit_prepare(CODE % i, "a test", 90)
        _kernels.jit_prepare(CODE % i, "a test", 90)
    assert len({jit.binary(CODE % i) for i in range(4)}) == 4
    assert jit.counts() == (4, 0, 4)


def test_the_process_ends_while_kernels_are_made(jit):
    process = jit.python(
        f"""
        import atexit
        atexit.register(_kernels.jit_stop)
        for i in range(20):
            _kernels.jit_prepare({CODE!r} % i, "a test", 90)
        """
    )
    output = process.communicate(timeout=60)[0]
    assert (process.returncode, output) == (0, "")


def test_fork_while_kernels_are_made(jit):
    # The child finds what its parent had begun not begun, and makes it without the parent's threads.
    process = jit.python(
        f"""
        import atexit, signal, warnings
        atexit.register(_kernels.jit_stop)
        warnings.simplefilter("ignore")  # Python's and JAX's of forks
        for i in range(4):
            _kernels.jit_prepare({CODE!r} % i, "a test", 90)
        child = os.fork()
        signal.alarm(60)
        for i in range(6):
            assert binary({CODE!r} % i)[:4] == b"\\x7fELF"
        if child:
            assert os.waitpid(child, 0)[1] == 0
        """
    )
    output = process.communicate(timeout=90)[0]
    assert (process.returncode, output) == (0, "")


# An NVRTC that promises larger cubins than there is memory for.
THROWING_NVRTC = """
#include <cstddef>
#include <cstdint>
extern "C" {
int nvrtcVersion(int* major, int* minor) { return *major = 13, *minor = 0; }
int nvrtcGetNumSupportedArchs(int* n) { return *n = 1, 0; }
int nvrtcGetSupportedArchs(int* architectures) { return *architectures = 90, 0; }
const char* nvrtcGetErrorString(int) { return ""; }
int nvrtcCreateProgram(void**, const char*, const char*, int, const char* const*, const char* const*) { return 0; }
int nvrtcDestroyProgram(void**) { return 0; }
int nvrtcCompileProgram(void*, int, const char* const*) { return 0; }
int nvrtcGetPTXSize(void*, size_t* size) { return *size = 0, 0; }
int nvrtcGetPTX(void*, char*) { return 0; }
int nvrtcGetCUBINSize(void*, size_t* size) { return *size = SIZE_MAX / 4, 0; }
int nvrtcGetCUBIN(void*, char*) { return 0; }
int nvrtcGetProgramLogSize(void*, size_t* size) { return *size = 0, 0; }
int nvrtcGetProgramLog(void*, char*) { return 0; }
}
"""


@emulated.compiler_is_needed
def test_a_compile_that_throws_ends(tmp_path):
    """For all threads that wait for it, for those that try again, for a fork and for the end of the process."""
    (tmp_path / "nvrtc.cc").write_text(THROWING_NVRTC)
    library = emulated.shared_library(tmp_path / "nvrtc.cc")
    body = f"""
        import concurrent.futures, os
        from jax_softmax import _kernels
        _kernels.jit_configure({library!r}, "", 0)
        def thrown(i):
            try:
                _kernels.jit_binary(str(i % 2), "a test", 90)
            except MemoryError:
                return True
        _kernels.jit_prepare("0", "a test", 90)
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            assert all(pool.map(thrown, range(64)))
        child = os.fork()
        assert thrown(0)
        if child:
            assert os.waitpid(child, 0)[1] == 0
        _kernels.jit_stop()
    """
    command = [sys.executable, "-P", "-c", textwrap.dedent(body)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_no_nvrtc():
    with pytest.raises(RuntimeError, match=r"NVRTC could not be loaded: .*/nowhere/libnvrtc\.so\.13"):
        _kernels.jit_configure("/nowhere/libnvrtc.so.13", "", 0)


def test_availability_names_what_is_missing(monkeypatch):
    def missing():
        raise RuntimeError("NVRTC was not found: install it")

    monkeypatch.setattr(_kernels, "driver_version", lambda: 12040)
    monkeypatch.setattr(cuda, "find_nvrtc", missing)
    assert cuda.availability.__wrapped__() == "NVRTC was not found: install it"


def test_nvrtc_and_driver_must_match():
    assert cuda.mismatch(12000, "12.9", "/nvrtc") is None
    assert cuda.mismatch(13000, "12.9", "/nvrtc") is None
    assert "a driver of CUDA 12.4 cannot load" in cuda.mismatch(12040, "13.0", "/nvrtc")


def test_without_a_driver_nothing_is_searched_for():
    try:
        _kernels.driver_version()
    except RuntimeError as error:
        assert "libcuda.so.1" in str(error) and "install" in str(error)
    else:
        pytest.skip("there is a driver")
    assert "libcuda.so.1" in cuda.availability()
    code = (
        "import sys; from jax_softmax.runtime import cuda; cuda.availability(); "
        "sys.exit('cuda.pathfinder' in sys.modules or 'platformdirs' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-P", "-c", code], timeout=60).returncode == 0


def test_cpu_count_is_not_exceeded(jit):
    before = len(os.listdir("/proc/self/task"))
    for i in range(50):
        _kernels.jit_prepare(CODE % (100 + i), "a test", 90)
    assert len(os.listdir("/proc/self/task")) <= before + len(os.sched_getaffinity(0))
    _kernels.jit_stop()


class Recording(emulated.Host):
    """`started_before`: the kernels that began to be compiled before one was lowered."""

    def __init__(self, **options):
        super().__init__(**options)
        self.started_before = []

    def start_compiling(self, kernel):
        self.started_before += [] if self.called else [kernel]


def test_fused_kernels_start_to_compile_before_any_is_lowered():
    def f(x):
        return [jax.nn.softmax(x * k) for k in (2.0, 3.0)]

    x, backend = jax.ShapeDtypeStruct((64, 1024), jnp.float32), Recording(in_jax=True)
    with emulated.as_on_a_gpu(backend):
        jax.jit(jax_softmax.fuse(f)).lower(x)
    assert len(backend.called) == 2 and set(backend.called) == set(backend.started_before)


def test_questions_compile_nothing():
    """What is folded, and, of a derivative, whether a kernel is faster."""

    def f(x):
        return jax.nn.softmax(x * 2).sum()

    x, backend = jax.ShapeDtypeStruct((64, 1024), jnp.float32), Recording(in_jax=True)
    with emulated.as_on_a_gpu(backend):
        assert not any(line.why_xla for line in jax_softmax.fuse(jax.grad(f)).explain(x))
        jax.jit(jax.grad(jax_softmax.fuse(f))).trace(x)
    assert backend.started_before == []
