"""Code of other people under `fuse`, unchanged: what benchmarks/models.py measures, on small arrays."""

import jax
import pytest
from computations import COMPUTATIONS, largest_difference

import jax_softmax

every_computation = pytest.mark.parametrize("computation", COMPUTATIONS, ids=lambda computation: computation.name)
# Of packages that are older than this JAX.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@every_computation
def test_what_is_folded_can_be_said(computation):
    """On any platform, and of the sizes that are measured."""
    if computation.package is not None:
        pytest.importorskip(computation.package)
    arguments = jax.eval_shape(computation.make_args, jax.random.key(0))
    report = jax_softmax.fuse(computation.function).explain(*arguments)
    assert report and all(line.why_not == "" for line in report), str(report)


@every_computation
def test_fused_is_equal_up_to_roundings(computation):
    if computation.package is not None:
        pytest.importorskip(computation.package)
    arguments = computation.make_small_args(jax.random.key(0))
    expected = jax.jit(computation.function)(*arguments)
    actual = jax.jit(computation.fused)(*arguments)
    assert largest_difference(computation, actual, expected) <= 1
