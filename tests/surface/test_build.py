"""What a build says of itself, and what it refuses to run with."""

import os
import platform
import pydoc
import re
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from typing import get_type_hints

import jax
import jaxlib
import pytest
from support import sampled

import jax_softmax
from jax_softmax import __main__ as doctor
from jax_softmax import _build
from jax_softmax.devices import partitioning
from jax_softmax.fusion.attention.kernels import attention_p
from jax_softmax.primitives.operators import OPERATORS, PRIMITIVES
from jax_softmax.primitives.records import RECORDS
from jax_softmax.runtime import cuda


def test_build_info():
    info = jax_softmax.build_info()
    assert info["version"] == jax_softmax.__version__
    assert info["cpu_variants"][-1] == "plain" and info["cpu_variant"] in info["cpu_variants"]
    assert info["ffi_api"] <= _build.runtime_ffi_version()


def test_public_names():
    assert sorted(jax_softmax.__all__) == [
        "Explanation",
        "Fused",
        "FusionReport",
        "TokenLosses",
        "absmax_scale",
        "build_info",
        "cross_entropy_loss",
        "entropy",
        "explain",
        "export_checks",
        "fuse",
        "kl_divergence",
        "linear_cross_entropy",
        "log_softmax",
        "log_softmax_vjp",
        "logsumexp",
        "softmax",
        "softmax_cross_entropy",
        "softmax_cross_entropy_with_integer_labels",
        "softmax_vjp",
        "use",
    ]
    for name in jax_softmax.__all__:
        assert getattr(jax_softmax, name).__doc__
    assert sorted([*jax_softmax.__all__, "__version__"]) == dir(jax_softmax)
    assert "softmax(x, axis=-1, where=None, *, sink=None, axis_name=None)\n" in pydoc.plain(
        pydoc.render_doc(jax_softmax.softmax)
    )
    assert get_type_hints(jax_softmax.softmax)["return"] is jax.Array


def test_records_and_table_agree():
    """Each operator has a record, which names as many operands and results as the C++ table counts."""
    assert RECORDS.keys() == OPERATORS.keys()
    for op, record in RECORDS.items():
        always = re.sub(r"\[.*?\]", "", record.takes).split()
        assert len(always) == OPERATORS[op].operands, op
        assert len(record.gives.split()) == OPERATORS[op].element_results + OPERATORS[op].row_results, op
        if record.extended:
            extended = RECORDS[record.extended]
            assert extended.takes == record.takes and extended.gives.startswith(f"{record.gives} "), op


# What a folder may import besides itself. Nothing in them imports the package's own names.
MAY_IMPORT = {"primitives": set(), "functions": {"primitives"}, "devices": {"primitives"}}
MAY_IMPORT["runtime"] = {"primitives", "functions", "devices"}
MAY_IMPORT["fusion"] = {"primitives", "functions", "devices", "runtime"}


@pytest.mark.parametrize("folder", MAY_IMPORT)
def test_imports_go_one_way(folder):
    for source in (Path(jax_softmax.__file__).parent / folder).rglob("*.py"):
        text = source.read_text(encoding="utf-8")
        imported = set(re.findall(r"^ *from jax_softmax\.(\w+)", text, re.MULTILINE))
        assert imported <= MAY_IMPORT[folder] | {folder}, source
        assert not re.search(r"^ *import jax_softmax", text, re.MULTILINE), source


ROOMS = ["program", "kernels", "forms", "attention"]  # of fusion/: each imports only those before it


@pytest.mark.parametrize("room", ROOMS)
def test_imports_between_rooms_go_one_way(room):
    for source in (Path(jax_softmax.__file__).parent / "fusion" / room).rglob("*.py"):
        imported = set(re.findall(r"^ *from jax_softmax\.fusion\.(\w+)", source.read_text("utf-8"), re.MULTILINE))
        assert imported <= set(ROOMS[: ROOMS.index(room) + 1]), source


@pytest.mark.parametrize(
    "jaxlib,runtime,built,match",
    [
        ("0.7.2", (0, 1), (0, 1), "needs jaxlib 0.8 or newer, found 0.7.2"),
        ("0.10.2", (0, 3), (0, 4), "built against FFI headers of API 0.4, but jaxlib 0.10.2 offers 0.3"),
        ("1.0.0", (1, 0), (0, 1), "built against FFI headers of API 0.1"),
    ],
)
def test_unsupported_jaxlib_is_refused(jaxlib, runtime, built, match):
    with pytest.raises(ImportError, match=match):
        _build.check_jaxlib(jaxlib, runtime, built)


@pytest.mark.parametrize(
    "jaxlib,runtime", [("0.8.0", (0, 1)), ("0.12.0.1", (0, 5)), ("0.13.0.dev1", (0, 6)), ("9.0", None)]
)
def test_supported_jaxlib_is_accepted(jaxlib, runtime):
    _build.check_jaxlib(jaxlib, runtime, (0, 1))


@pytest.mark.parametrize(
    "command", [["-c", "import jax_softmax"], ["-m", "pytest"], ["-m", "jax_softmax"]], ids=" ".join
)
def test_source_without_kernels_says_what_to_do(tmp_path, command):
    """As in a checkout, which Python finds before the installed package."""
    (tmp_path / "jax_softmax").mkdir()
    for source in Path(jax_softmax.__file__).parent.glob("*.py"):
        shutil.copy(source, tmp_path / "jax_softmax")
    (tmp_path / "conftest.py").write_text("import jax_softmax")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    result = subprocess.run(
        [sys.executable, *command], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
    )
    output = result.stdout + result.stderr
    assert result.returncode != 0
    assert f"{tmp_path / 'jax_softmax'} has no compiled kernels" in output, output
    assert "pip install ." in output and "python -P" in output and "circular" not in output, output


def run_doctor(tmp_path, *command):
    return subprocess.run(
        [sys.executable, *command],
        cwd=tmp_path,
        env={**os.environ, "JAX_SOFTMAX_CACHE_DIR": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
    )


def test_doctor(tmp_path):
    result = run_doctor(tmp_path, "-m", "jax_softmax")
    assert result.returncode == 0, result.stdout + result.stderr
    assert f"jax_softmax {jax_softmax.__version__}" in result.stdout
    versions = (f"JAX {jax.__version__}, ", f"jaxlib {jaxlib.__version__}, ", f"Python {platform.python_version()}\n")
    assert all(version in result.stdout for version in versions), result.stdout
    for said in (f"platform: {platform.platform()}\n", "CPU: ", "CPU kernels: ", "CUDA driver: ", "NVRTC: ", "cpu 0 ("):
        assert f"\n{said}" in result.stdout, result.stdout
    if "NVRTC: CUDA's" not in result.stdout:  # found
        assert f"\ncache: {tmp_path / 'cache'}: 0 kernels, 0 bytes\n" in result.stdout
    for gpu in (device for device in jax.local_devices() if device.platform == "gpu"):
        assert f"\nGPU {gpu.id}: {gpu.device_kind}, compute capability " in result.stdout
        assert f"\ngpu {gpu.id} ({gpu.device_kind}): our kernels, " in result.stdout
    assert ": ok" in result.stdout and "WRONG" not in result.stdout


def test_doctor_says_which_folder_is_not_used(tmp_path):
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(0o770)
    without_results = (
        "from jax_softmax import __main__ as doctor; doctor.largest_differences = lambda device: {'softmax': 0.0}; "
    )
    result = run_doctor(tmp_path, "-c", without_results + "raise SystemExit(doctor.main())")
    assert result.returncode == 0, result.stdout + result.stderr
    if "NVRTC: CUDA's" not in result.stdout:  # found
        assert f"\ncache: not all of it is used: group or others may write to {tmp_path / 'cache'} (" in result.stdout


@pytest.fixture
def doctor_here(monkeypatch):
    """The doctor in this process, which finds no errors in results that it does not look at."""
    monkeypatch.setattr(doctor, "largest_differences", lambda device: {"softmax": 1.0})
    yield doctor.main
    monkeypatch.undo()
    if cuda.availability() is None:
        cuda.configure()


class FakeGpu:
    platform, device_kind, id, compute_capability = "gpu", "Fake", 0, "9.0"


def test_doctor_says_what_is_missing(doctor_here, monkeypatch, capsys):
    def missing():
        raise RuntimeError("NVRTC was not found: install it")

    monkeypatch.setattr(cuda, "find_nvrtc", missing)
    monkeypatch.setattr(cuda, "availability", lambda: "NVRTC was not found: install it")
    cpu = jax.devices("cpu")[0]
    monkeypatch.setattr(jax, "local_devices", lambda backend=None: [cpu])
    assert doctor_here() == 0  # a machine without a GPU is well
    said = capsys.readouterr().out
    assert "\nNVRTC: NVRTC was not found: install it\n" in said
    assert f"\ncache: {cuda.cache_folder()}: not used without NVRTC\n" in said


def test_doctor_fails_where_a_gpu_cannot_run_the_kernels(doctor_here, monkeypatch, capsys):
    cpu = jax.devices("cpu")[0]
    monkeypatch.setattr(doctor, "check_device", lambda device, kernels: True)
    monkeypatch.setattr(cuda, "availability", lambda: "the driver is too old")
    monkeypatch.setattr(jax, "local_devices", lambda backend=None: [cpu if backend else FakeGpu()])
    assert doctor_here() == 1
    assert "the GPU runs jax.numpy: the driver is too old\n" in capsys.readouterr().out


def test_doctor_fails_on_wrong_results(doctor_here, monkeypatch, capsys):
    for wrong in (float("inf"), float("nan"), 1e3):
        monkeypatch.setattr(doctor, "largest_differences", lambda device, wrong=wrong: {"softmax": 1, "entropy": wrong})
        assert doctor_here() == 1
        assert "WRONG: entropy\n" in capsys.readouterr().out


CHECKED = {**PRIMITIVES, "attention": attention_p}


@sampled("op", CHECKED, 5)
def test_doctor_fails_on_a_wrong_operator(op, monkeypatch, capsys):
    """Of which a row is not written. The doctor looks at this alone, for the test to be quick."""
    cpu = jax.devices("cpu")[0]
    monkeypatch.setattr(jax, "local_devices", lambda backend=None: [cpu])
    monkeypatch.setattr(doctor, "OPERATORS", {name: doctor.OPERATORS[name] for name in PRIMITIVES if name == op})
    monkeypatch.setattr(doctor.attention_kernels, "can_run", lambda: op == "attention")
    monkeypatch.setattr(doctor, "_MORE", [])
    primitive = CHECKED[op]
    bind = primitive.bind

    def wrong(*operands, **params):
        return jax.tree.map(lambda a: a.at[-1].set(0), bind(*operands, **params))

    monkeypatch.setattr(primitive, "bind", wrong)
    jax.clear_caches()
    try:
        assert doctor.main() == 1
        assert f"WRONG: {op}\n" in capsys.readouterr().out
    finally:
        jax.clear_caches()  # of programs with the wrong one
        if cuda.availability() is None:
            cuda.configure()


@pytest.mark.parametrize(
    "platform,reason,expected",
    [("gpu", "there is no NVRTC", 1), ("gpu", None, 0), ("cpu", "there is no NVRTC", 0)],
)
def test_one_warning_where_kernels_cannot_be_made(monkeypatch, platform, reason, expected):
    """Of a program for CUDA that is lowered where it is to run; elsewhere it is for another machine."""
    device = FakeGpu()
    device.platform = platform
    monkeypatch.setattr(cuda, "availability", lambda: reason)
    monkeypatch.setattr(jax, "local_devices", lambda: [device])
    monkeypatch.setattr(partitioning, "_warned", set())
    allowed = [jax.export.DisabledSafetyCheck.custom_call("jax_softmax")]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for n in (2, 3):
            lowered = jax.export.export(
                jax.jit(lambda x: jax_softmax.softmax(x)), platforms=["cuda"], disabled_checks=allowed
            )
            text = lowered(jax.ShapeDtypeStruct((4, n), "float32")).mlir_module()
            assert ("@jax_softmax(" in text) == (not expected)
    assert len(caught) == expected
    assert all("runs as jax.numpy on this GPU: there is no NVRTC." in str(w.message) for w in caught)
