"""softmax(x - max(x)) and its gradient are those of softmax(x)."""

import attention_on_host
import emulated
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_programs import assert_as_exact, gradients, normal
from by_numpy import by_numpy

from jax_softmax import fuse
from jax_softmax.fusion.rewriting import rewritten

pytestmark = pytest.mark.usefixtures("on_the_cpu")
B, S, H, D = 2, 64, 4, 16
Q, K, V = (normal(B, S, H, D, seed=k) for k in range(3))
SINK = normal(H, seed=3)
X, G = (normal(30, 40, seed=k).astype("float32") for k in range(2))


def names_of(program, *operands):
    """Of the operations of the fused program, and of what kernels do."""
    (eqn,) = jax.make_jaxpr(fuse(program))(*operands).eqns
    with emulated.kernels():
        return str(rewritten(eqn.params["jaxpr"]))


def less_maxima(x, axis=-1, stop=False):
    largest = jnp.max(x, axis, keepdims=True)
    return x - (jax.lax.stop_gradient(largest) if stop else largest)


@pytest.mark.parametrize("stop", [False, True])
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_maxima_are_not_subtracted(name, axis, stop):
    def program(x, g):
        return jax.value_and_grad(lambda x: (getattr(jax.nn, name)(less_maxima(x, axis, stop), axis) * g).sum())(x)

    assert "reduce_max" not in names_of(program, X, G)
    for found, right in zip(jax.jit(fuse(program))(X, G), by_numpy(program, X, G), strict=True):
        np.testing.assert_allclose(found, right, rtol=1e-5, atol=1e-6)


def of_other_rows(x):
    return jax.nn.softmax(less_maxima(x, 0), 1)


def of_another_array(x):
    return jax.nn.softmax(x - jnp.max(jnp.sin(x), -1, keepdims=True))


def of_all(x):
    return jax.nn.softmax(x - jnp.max(x))


def turned(x):
    square = x[:30, :30]
    return jax.nn.softmax(square - jnp.max(square, 1)[None, :], 1)


@pytest.mark.parametrize("program", [of_other_rows, of_another_array, of_all, turned])
def test_other_numbers_are_subtracted(program):
    assert "reduce_max" in names_of(program, X)
    np.testing.assert_allclose(jax.jit(fuse(program))(X), by_numpy(program, X), rtol=1e-5, atol=1e-6)


def test_sums_of_gradients_that_the_program_adds_itself_stay():
    """To other arrays than the gradient."""

    def program(x, g):
        return x + jax.grad(lambda x: (jax.nn.softmax(x) * g).sum())(x).sum(-1, keepdims=True)

    assert "reduce_sum" in names_of(program, X, G)
    np.testing.assert_allclose(jax.jit(fuse(program))(X, G), by_numpy(program, X, G), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("stop", [False, True])
def test_infinite_rows(stop):
    """They are NaN with the maximum and without."""

    def program(x):
        return jax.nn.softmax(less_maxima(x, stop=stop))

    x = jnp.asarray([[np.inf, 0, 1], [-np.inf] * 3, [-np.inf, 0, 1], [np.nan, 0, 1]], "float32")
    np.testing.assert_allclose(jax.jit(fuse(program))(x), program(x), rtol=1e-6)


def scores_of(q, k):
    return jnp.einsum("bihd,bjhd->bhij", q, k) * 0.25


def plain(q, k, v, stop):
    return jnp.einsum("bhij,bjhd->bihd", jax.nn.softmax(less_maxima(scores_of(q, k), stop=stop)), v)


def with_a_sink(q, k, v, sink, stop):
    """As gpt-oss has it in several libraries."""
    column = jnp.broadcast_to(sink[None, :, None, None], (B, H, S, 1))
    scores = jnp.concatenate([scores_of(q, k), column], -1)
    return jnp.einsum("bhij,bjhd->bihd", jax.nn.softmax(less_maxima(scores, stop=stop))[..., :-1], v)


@pytest.mark.parametrize("stop", [False, True])
@pytest.mark.parametrize("attend, operands", [(plain, (Q, K, V)), (with_a_sink, (Q, K, V, SINK))])
def test_attention_is_found(attend, operands, stop):
    def program(*operands):
        return gradients(lambda *a: attend(*a, stop), *operands)

    with emulated.kernels(attention=True), attention_on_host.kernels(in_jax=True) as made:
        found = jax.jit(fuse(program))(*operands)
        assert "in memory:" not in str(fuse(program).explain(*operands))
    assert {params["kernel"] for params, _ in made} == {"forward", "queries", "keys"}
    assert_as_exact(found, program, operands)
