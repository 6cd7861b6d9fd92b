"""Says what is tested, and on what."""

import jax
import pytest

import jax_softmax

pytest.register_assert_rewrite("support")


def pytest_report_header():
    return f"jax_softmax on JAX {jax.__version__}, {jax.devices()[0].device_kind}: {jax_softmax.build_info()}"
