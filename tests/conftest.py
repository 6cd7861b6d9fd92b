"""Says what is tested, and on what."""

import os

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"

import jax
import pytest

import jax_softmax

pytest.register_assert_rewrite("support")


def pytest_report_header():
    return f"jax_softmax on JAX {jax.__version__}, {jax.devices()[0].device_kind}: {jax_softmax.build_info()}"
