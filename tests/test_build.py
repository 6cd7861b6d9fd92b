"""What a build says of itself, and what it refuses to run with."""

import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import jax
import pytest

import jax_softmax
from jax_softmax import _compatibility, api, lowering


def test_build_info():
    info = jax_softmax.build_info()
    assert info["version"] == jax_softmax.__version__
    assert info["cpu_variants"][-1] == "plain" and info["cpu_variant"] in info["cpu_variants"]
    assert info["ffi_api"] <= _compatibility.runtime_ffi_version()
    assert bool(info["cuda_version"]) == info["cuda"] == bool(info["cuda_architectures"])


def test_public_names():
    assert sorted(jax_softmax.__all__) == [
        "Explanation",
        "build_info",
        "explain",
        "export_checks",
        "log_softmax",
        "log_softmax_vjp",
        "softmax",
        "softmax_vjp",
        "use",
    ]
    for name in jax_softmax.__all__:
        assert getattr(jax_softmax, name).__doc__


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
        _compatibility.check(jaxlib, runtime, built)


@pytest.mark.parametrize("jaxlib,runtime", [("0.8.0", (0, 1)), ("0.12.0.1", (0, 5)), ("0.13.0.dev1", (0, 6))])
def test_supported_jaxlib_is_accepted(jaxlib, runtime):
    _compatibility.check(jaxlib, runtime, (0, 1))


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


def test_doctor(tmp_path):
    result = subprocess.run([sys.executable, "-m", "jax_softmax"], cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    assert f"jax_softmax {jax_softmax.__version__}" in result.stdout
    assert f"{jax.devices()[0].platform} (" in result.stdout and ": ok" in result.stdout


@pytest.mark.parametrize("backend,has_cuda,expected", [("gpu", False, 1), ("gpu", True, 0), ("cpu", False, 0)])
def test_one_warning_without_cuda_kernels(monkeypatch, backend, has_cuda, expected):
    monkeypatch.setattr(lowering, "HAS_CUDA", has_cuda)
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    api._warn_without_cuda.cache_clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        jax_softmax.softmax(1.0, axis=None)
        jax_softmax.softmax(2.0, axis=None)
    api._warn_without_cuda.cache_clear()
    assert len(caught) == expected
    assert all("JAX_SOFTMAX_CUDA=on" in str(w.message) for w in caught)
