"""`fuse` under JAX's transformations: functions that run as they are, and what they keep for their derivatives."""

import emulated
import jax
import jax.experimental.checkify
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
import support
from by_numpy import by_numpy
from fusion_cases import TRANSFORMED
from fusion_support import PAIR, SHAPE, X, causal_attention, gradients_of, loss_at_labels, pairs, x_of

import jax_softmax
from jax_softmax import fuse

pytestmark = pytest.mark.usefixtures("default_flags")

P = jax.sharding.PartitionSpec


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.sweep) if name == "third derivatives" else name for name in TRANSFORMED],
)
def test_transformed(name):
    transform, f = TRANSFORMED[name]
    both = [transform(g) for g in (lambda x: f(x), fuse(f))]
    expected, found = support.in_haste(lambda x: [g(x) for g in both], X)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-5)


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit])
def test_results_that_do_not_vary(transform):
    def f(x, b):
        return jax.nn.softmax(x + b), jax.nn.softmax(b), jax.lax.axis_index("batch"), jnp.float32(2)

    def g(f):
        return jax.vmap(f, (0, None), (0, None, 0, None), axis_name="batch")

    for found, expected in zip(transform(g(fuse(f)))(X, X[0]), g(f)(X, X[0]), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_vmap_over_a_mesh_axis():
    mesh = support.mesh_of_cpus((2, 4))
    f = lambda x: jax.lax.with_sharding_constraint(jax.nn.softmax(x * 2), jax.NamedSharding(mesh, P("model")))  # noqa: E731
    found = jax.jit(jax.vmap(fuse(f), spmd_axis_name="data"))(X)
    np.testing.assert_allclose(found, jax.nn.softmax(X * 2), rtol=1e-5)
    assert found.sharding.is_equivalent_to(jax.NamedSharding(mesh, P("data", "model")), 2)


def test_axis_names():
    f = lambda x: jax.nn.softmax(x - jax.lax.pmean(x, "batch"))  # noqa: E731
    np.testing.assert_allclose(jax.vmap(fuse(f), axis_name="batch")(X), jax.vmap(f, axis_name="batch")(X), rtol=1e-5)


@pytest.mark.parametrize("outside", [True, False])
def test_shard_map(outside):
    mesh = support.mesh_of_cpus((2, 4))
    mapped = lambda f: jax.shard_map(f, mesh=mesh, in_specs=P("data"), out_specs=P("data"))  # noqa: E731
    f = lambda x: jax.nn.softmax(x * 2) * jax.lax.axis_index("data")  # noqa: E731
    both = fuse(mapped(f)) if outside else mapped(fuse(f))
    np.testing.assert_allclose(jax.jit(both)(X), jax.jit(mapped(f))(X), rtol=1e-5)
    gradient, expected = (jax.grad(lambda x, g=g: jnp.sum(g(x) ** 2)) for g in (both, mapped(f)))
    np.testing.assert_allclose(jax.jit(gradient)(X), jax.jit(expected)(X), rtol=1e-4, atol=1e-5)


def test_export():
    exported = jax.export.export(jax.jit(fuse(pairs)), disabled_checks=jax_softmax.export_checks())(X)
    again = jax.export.deserialize(exported.serialize())
    np.testing.assert_allclose(again.call(X), pairs(X), rtol=1e-5)


def test_checkify():
    def f(x):
        jax.experimental.checkify.check(jnp.all(x > 0), "not positive")
        return jax.nn.softmax(x * 2)

    for g in (jax.jit, fuse):
        error, _ = jax.experimental.checkify.checkify(g(f))(X)
        assert "not positive" in error.get()
        assert jax.experimental.checkify.checkify(g(f))(np.abs(X) + 1)[0].get() is None


class TestResiduals:
    """What a fused function keeps for its derivative."""

    @staticmethod
    def of(f, *args):
        """Shapes and dtypes, where kernels make what they can."""
        with emulated.all_kernels():
            kept = jax.eval_shape(lambda *args: jax.vjp(f, *args)[1], *args)
        return sorted((a.shape, a.dtype.name) for a in jax.tree.leaves(kept) if a.size > 1)

    def test_of_attention_through_float32(self):
        s, w = x_of("bfloat16"), x_of("bfloat16", (16, 16))
        rows = [((4, 6, 1), "float32")] * 2
        logits_and_probabilities = [(SHAPE, "bfloat16")] * 2
        assert self.of(fuse(causal_attention), s, w) == sorted(
            [*rows, *logits_and_probabilities, (SHAPE, "bfloat16"), ((16, 16), "bfloat16")]
        )

    def test_of_a_loss(self):
        x = x_of("bfloat16")
        rows = [((4, 6, 1), "float32")] * 2
        kept = self.of(fuse(loss_at_labels), x)
        assert [a for a in kept if np.prod(a[0]) >= x.size] == [(SHAPE, "bfloat16")]
        assert set(rows) < set(kept)
        assert (SHAPE, "float32") in self.of(loss_at_labels, x)

    def test_of_elementwise_functions(self):
        x = x_of()
        assert self.of(fuse(lambda x: jnp.sin(jnp.tanh(x) * 2)), x) == [(SHAPE, "float32")]

    def test_what_is_cheaper_as_it_is(self):
        """A mask of two arrays."""
        f = lambda x, b: jnp.where(x > b, 3 * x, b)  # noqa: E731
        assert self.of(fuse(f), x_of(), PAIR) == [(SHAPE, "bool")]

    def test_long_functions(self):
        def f(x):
            for _ in range(400):  # more than Python may be deep
                x = jnp.tanh(x + 0.5 * x)
            return x

        found, expected = (by_numpy(gradients_of(g), X[:1]) for g in (fuse(f), f))
        jax.jit(gradients_of(fuse(f))).lower(X[:1])
        np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-6)
