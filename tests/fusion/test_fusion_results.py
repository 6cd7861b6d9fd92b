"""What a fused function may return beside arrays: modules of Equinox, and leaves of its arguments."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fusion_support import X, assert_same

from jax_softmax import fuse

pytestmark = pytest.mark.usefixtures("default_flags")


class TestResultsOfEquinox:
    """Modules come back as from `eqx.filter_jit`."""

    @staticmethod
    def model():
        eqx = pytest.importorskip("equinox")

        class Model(eqx.Module):
            w: jax.Array
            names: list = eqx.field(static=True)  # which has no hash
            activation: object = jax.nn.relu
            scale: float = 0.5
            inference: bool = False
            state: object = None

            def __call__(self, x):
                return jax.nn.softmax(self.activation(x @ self.w) * (1 if self.inference else self.scale))

        return eqx, Model(jnp.ones((8, 8)), ["w"])

    @staticmethod
    def step(model, x):
        eqx = pytest.importorskip("equinox")
        value, gradient = eqx.filter_value_and_grad(lambda model: jnp.sum(model(x) ** 2))(model)
        return {"model": eqx.apply_updates(model, gradient), "value": value}, value > 0, 3

    @pytest.mark.parametrize("transform", [lambda eqx, f: f, lambda eqx, f: eqx.filter_jit(f)], ids=["call", "jit"])
    def test_of_a_step(self, transform):
        eqx, model = self.model()
        traced = []

        def f(model, x):
            traced.append(0)
            return self.step(model, x)

        f = transform(eqx, fuse(f))
        found = expected = {"model": model}, None, None
        for _ in range(3):
            found, expected = f(found[0]["model"], X), eqx.filter_jit(self.step)(expected[0]["model"], X)
            arrays, others = eqx.partition(found, eqx.is_array)
            expected_arrays, expected_others = eqx.partition((*expected[:2], jnp.asarray(3)), eqx.is_array)
            assert_same(arrays, expected_arrays, 64)
            assert eqx.tree_equal(others, expected_others)
        assert len(traced) == 2  # with this package's operators, and without
        assert len(fuse(self.step).explain(model, X)) > 0

    def test_of_what_makes_one(self):
        eqx, model = self.model()
        made = fuse(lambda w: eqx.tree_at(lambda model: model.w, model, jax.nn.softmax(w)))(X)
        assert made.activation is jax.nn.relu and made.inference is False and made.names == ["w"]
        np.testing.assert_allclose(made.w, jax.nn.softmax(X), rtol=1e-5)


def test_leaves_of_arguments():
    """They may be results, whatever they are."""

    class Other:
        pass

    for others in ["b", (jnp.tanh, None, np.dtype("int8")), [Other(), "c"]]:
        y, found = fuse(lambda x, others: (jax.nn.softmax(x), others))(X, others)
        np.testing.assert_allclose(y, jax.nn.softmax(X), rtol=1e-5)
        assert found == others
    assert isinstance(fuse(lambda x, flag: (x, flag))(X, True)[1], jax.Array)  # as from `jit`


@pytest.mark.parametrize("other", ["a", {1}, jnp.tanh], ids=lambda other: type(other).__name__)
def test_what_jit_refuses(other):
    """Its error names the component."""
    with pytest.raises(TypeError, match=r"returned a value of type <class '.*'> at output component"):
        fuse(lambda x: (jax.nn.softmax(x), other))(X)
