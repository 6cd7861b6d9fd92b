"""Says what is tested, and on what."""

import functools
import gc
import os
import platform
import subprocess
import sys
import textwrap
import zlib

os.environ["XLA_FLAGS"] = " ".join(
    [
        "--xla_force_host_platform_device_count=8",
        # AVX-512 has instructions for float16, with which XLA does not round a product before it adds to it.
        "--xla_cpu_max_isa=AVX2" if platform.machine() == "x86_64" else "",
        os.environ.get("XLA_FLAGS", ""),
    ]
)

import jax
import pytest
from hypothesis import HealthCheck, settings

import jax_softmax
from jax_softmax import _kernels
from jax_softmax.devices import partitioning
from jax_softmax.runtime import cuda

pytest.register_assert_rewrite(
    *("support", "oracles", "by_numpy", "sharded", "fusion_support", "attention_programs", "zoo_checks")
)


def pytest_addoption(parser):
    parser.addoption("--sweeps", action="store_true", help="run the long sweeps as well")
    parser.addoption("--every", type=int, default=1, metavar="N", help="of the long sweeps a part: each Nth test")


def pytest_xdist_auto_num_workers(config):
    """A process for each core, but none beside this one on a GPU, the memory of which they would have to share."""
    return None if jax.default_backend() == "cpu" else 0


def pytest_configure(config):
    config.addinivalue_line("markers", "sweep: runs with --sweeps alone")
    settings.register_profile(
        "jax_softmax",
        deadline=None,
        derandomize=True,
        database=None,
        max_examples=max(16, 300 // config.getoption("--every")) if config.getoption("--sweeps") else 16,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
    )
    settings.load_profile("jax_softmax")
    gc.set_threshold(50_000, 20, 20)  # a process has the caches of many tests, which are looked through every time
    hurry(not config.getoption("--sweeps"))


def hurry(hasty):
    """Whether XLA optimises little on a CPU, in processes that tests start as well."""
    hasty = hasty and jax.default_backend() == "cpu"
    jax.config.update("jax_disable_most_optimizations", hasty)
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = str(hasty)


@pytest.fixture
def default_flags(request):
    """XLA's, for what depends on how it optimises."""
    hurry(False)
    yield
    hurry(not request.config.getoption("--sweeps"))


@pytest.fixture
def in_haste(request):
    """With --sweeps, too: what XLA's programs compute matters, and not their code."""
    hurry(True)
    yield
    hurry(not request.config.getoption("--sweeps"))


@pytest.fixture
def on_the_cpu():
    """Also where there is a GPU: what is not sharded is where the devices are that it is compared with. What may be
    gathered warns again."""
    import support  # not above, where its asserts would not be rewritten

    partitioning._warned.clear()
    with support.on_a_cpu():
        yield


@pytest.fixture
def switched_off_afterwards():
    """`use`, whatever a test leaves on."""
    yield
    jax_softmax.use(False)


@pytest.fixture
def products_in_float32():
    """Also on a GPU, which by default rounds float32 operands of products."""
    with jax.default_matmul_precision("highest"):
        yield


@pytest.fixture
def small_chunks(monkeypatch):
    """So that the rule of linear_cross_entropy chooses chunks."""
    monkeypatch.setattr("jax_softmax.functions.linear_cross_entropy._CHUNK_BYTES", 256)
    jax.clear_caches()
    yield
    jax.clear_caches()


def pytest_collection_modifyitems(config, items):
    """Leaves out the sweeps, if they are not asked for, and what cannot run here, which the header says."""

    def is_left_out(item):
        if item.get_closest_marker("sweep") and not (
            config.getoption("--sweeps") and zlib.crc32(item.nodeid.encode()) % config.getoption("--every") == 0
        ):
            return True
        cannot_run = any(mark.args[0] is True for mark in item.iter_markers("skipif"))
        return cannot_run or ("jit" in item.fixturenames and _why_no_nvrtc() is not None)

    left_out = [item for item in items if is_left_out(item)]
    config.hook.pytest_deselected(items=left_out)
    kept = set(items) - set(left_out)
    items[:] = [item for item in items if item in kept]


@functools.cache
def _why_no_nvrtc():
    """Why kernels cannot be compiled, or None if they can."""
    try:
        cuda.find_nvrtc()
    except RuntimeError as error:
        return str(error)


def pytest_report_header(config):
    every = config.getoption("--every")
    without = [] if config.getoption("--sweeps") else ["the long sweeps (--sweeps)"]
    without += [f"of the long sweeps all but each {every}th"] if config.getoption("--sweeps") and every > 1 else []
    without += [] if _why_no_nvrtc() is None else [f"compiling CUDA kernels ({_why_no_nvrtc()})"]
    without += [] if jax.default_backend() == "gpu" else ["running them (needs a GPU)"]
    return (
        f"jax_softmax on JAX {jax.__version__}, {jax.devices()[0].device_kind}: {jax_softmax.build_info()}"
        f"{'; left out: ' if without else ''}{', '.join(without)}"
    )


@pytest.fixture
def jit(tmp_path):
    """The run-time compiler with an empty cache folder; after `jit.fresh()` it is as in a new process."""
    compiler = Compiler(cuda.find_nvrtc(), tmp_path / "cache")
    compiler.fresh()
    yield compiler
    if cuda.availability() is None:
        cuda.configure()


# The first NVRTC that knows an architecture, of those that the oldest supported one does not know.
FIRST_NVRTC = {100: (12, 8), 120: (12, 8)}


class Compiler:
    def __init__(self, nvrtc, folder):
        self.nvrtc = nvrtc
        self.folder = folder

    def fresh(self, folder=None, most_bytes=cuda.CACHE_BYTES):
        _kernels.jit_configure(self.nvrtc, str(folder if folder is not None else self.folder), most_bytes)

    def binary(self, code, compute_capability=90, plan="a test"):
        return _kernels.jit_binary(code, plan, compute_capability)[0]

    @property
    def version(self):
        return tuple(map(int, _kernels.jit_facts()["nvrtc"].split(".")))

    def needs(self, compute_capability):
        """Skips the test where NVRTC is too old for this architecture."""
        if self.version < FIRST_NVRTC.get(compute_capability, (0, 0)):
            pytest.skip(f"NVRTC {self.version} does not know compute capability {compute_capability / 10}")

    def counts(self):
        facts = _kernels.jit_facts()
        return facts["compiled"], facts["read"], facts["written"]

    def entries(self):
        return sorted(self.folder.iterdir())

    def python(self, body, **options):
        """Runs `body`, with `binary` and `_kernels` at hand, in a process that has the same NVRTC and folder."""
        start = (
            "import os, sys\n"
            "from jax_softmax import _kernels\n"
            f"_kernels.jit_configure({self.nvrtc!r}, {str(self.folder)!r}, {cuda.CACHE_BYTES})\n"
            "def binary(code): return _kernels.jit_binary(code, 'a test', 90)[0]\n"
        )
        command = [sys.executable, "-P", "-c", start + textwrap.dedent(body)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options)
