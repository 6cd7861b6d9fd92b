"""Code of other people under `fuse`, unchanged: what benchmarks/models.py measures, on small arrays."""

import jax
import pytest
from computations import COMPUTATIONS, largest_difference


# Of packages that are older than this JAX.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("computation", COMPUTATIONS, ids=lambda computation: computation.name)
def test_fused_is_equal_up_to_roundings(computation):
    if computation.package is not None:
        pytest.importorskip(computation.package)
    arguments = computation.make_small_args(jax.random.key(0))
    expected = jax.jit(computation.function)(*arguments)
    actual = jax.jit(computation.fused)(*arguments)
    assert largest_difference(computation, actual, expected) <= 1
