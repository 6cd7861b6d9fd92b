"""softmax with a sink: values, gradients, dtypes, and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import normal

import jax_softmax


def test_a_number_as_a_sink_keeps_the_dtype():
    x = jnp.ones((2, 3), jnp.bfloat16)
    with jax.numpy_dtype_promotion("strict"):
        found = jax_softmax.softmax(x, sink=1.0)
    assert found.dtype == x.dtype
    np.testing.assert_allclose(np.asarray(found, np.float32), 0.25, rtol=1e-2)


@pytest.mark.parametrize("masked", [False, True])
def test_sink(masked):
    """A factor of each row; and of a row that has nothing else all is the sink's."""
    x, where = normal((2, 3, 5)), np.arange(15).reshape(3, 5) % 4 != 0 if masked else None
    sink = np.array([[0.5], [-np.inf], [2]], np.float32)

    def by_factor(x, sink):
        lse = jax_softmax.logsumexp(x, where=where, keepdims=True)
        return jnp.sin(jax_softmax.softmax(x, where=where) * jax.nn.sigmoid(lse - sink))

    def ours(x, sink):
        return jnp.sin(jax_softmax.softmax(x, where=where, sink=sink))

    np.testing.assert_allclose(ours(x, sink), by_factor(x, sink), rtol=2e-6, atol=1e-7)
    sink[1] = 1
    gradients = [jax.grad(lambda *a, f=f: jnp.sum(f(*a)), (0, 1))(x, sink) for f in (ours, by_factor)]
    for found, expected in zip(*gradients, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    x[0, 0] = -np.inf
    assert np.all(np.asarray(jax_softmax.softmax(x, sink=0.0))[0, 0] == 0)
    assert np.all(np.asarray(jax_softmax.softmax(np.float32("nan") * x, where=False, sink=0.0)) == 0)


def test_a_sink_of_a_wider_dtype_is_not_rounded():
    x, sink = normal((4, 9), "bfloat16"), np.float32(1.2345)
    found = jax_softmax.softmax(x, sink=sink)
    assert found.dtype == x.dtype
    expected = jax_softmax.softmax(x.astype(np.float32), sink=sink).astype(x.dtype)
    assert np.array_equal(found, expected)
    assert jax_softmax.softmax(np.arange(3), sink=1).dtype == np.float32


@pytest.mark.parametrize(
    "options,error,message",
    [
        ({"sink": np.ones(3)}, ValueError, r"sink must broadcast to shape \(3, 1\), got shape \(3,\)"),
        ({"sink": 1j}, TypeError, "sink must be real"),
        ({"sink": "a"}, TypeError, "sink must be an array or a number"),
        ({"sink": 1.0, "axis": None}, ValueError, "axis must be a single one, got None"),
        ({"sink": 1.0, "axis_name": "i"}, ValueError, "sink must be None where axis_name is given. Write softmax"),
    ],
)
def test_sinks_that_are_refused(options, error, message):
    with pytest.raises(error, match=f"softmax: {message}"):
        jax_softmax.softmax(normal((3, 5)), **options)
