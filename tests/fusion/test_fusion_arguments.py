"""What a fused function is given, and returns: trees, keywords, static arguments, references, and Flax's modules."""

import dataclasses
import functools
import gc
import inspect
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fusion_support import BF16, X, assert_same, pairs, x_of

import jax_softmax
from jax_softmax import fuse

pytestmark = pytest.mark.usefixtures("default_flags")


class TestReferences:
    """Functions of references run as they are."""

    @staticmethod
    def both_ways(f):
        """f's result, and what it leaves in a reference, alone and fused, under `jit` and not."""
        results = []
        for transform in (lambda f: f, fuse, lambda f: jax.jit(fuse(f))):
            ref = jax.new_ref(jnp.asarray(X))
            results.append((transform(f)(ref, X * 2), ref[...]))
        for found in results[1:]:
            assert_same(found, results[0], 16)

    def test_of_arguments(self):
        def f(ref, x):
            y = jax.nn.softmax(x + ref[...])
            ref[...] = y * 3
            return y * ref[...]

        self.both_ways(f)
        for line in fuse(f).explain(jax.new_ref(jnp.asarray(X)), X):
            assert "references" in str(line.why_not)

    def test_of_closures(self):
        self.both_ways(lambda ref, x: fuse(lambda x: jax.nn.softmax(x * 2) + ref[...])(x))

    def test_of_their_own(self):
        def f(x):
            ref = jax.new_ref(jax.nn.softmax(x * 2))
            ref[0] = 3 * x[0]
            return jax.nn.log_softmax(ref[...])

        assert_same(fuse(f)(X), f(X), 16)


class TestArguments:
    def test_trees_and_keywords(self):
        def f(tree, *, scale=1.0, kind="softmax", other=None):
            assert other is None
            return {"y": getattr(jax.nn, kind)(tree["x"] * scale), "n": len(tree)}

        found = fuse(f)({"x": X, "b": None}, scale=2.0, kind="log_softmax")
        np.testing.assert_allclose(found["y"], jax.nn.log_softmax(X * 2), rtol=1e-5)
        assert found["n"] == 2
        np.testing.assert_allclose(fuse(f)({"x": X})["y"], jax.nn.softmax(X), rtol=1e-5)

    def test_numbers_keep_weak_types(self):
        assert fuse(lambda x, s: jax.nn.softmax(x * s))(x_of("bfloat16"), 2.0).dtype == BF16

    def test_methods(self):
        class Model:
            scale = 2.0

            @fuse
            def __call__(self, x):
                return jax.nn.softmax(x * self.scale)

        np.testing.assert_allclose(Model()(X), jax.nn.softmax(X * 2), rtol=1e-5)

    def test_static_arguments(self):
        def f(x, axis, train=False, *, repeats=1):
            y = jax.nn.softmax(x, axis)
            for _ in range(repeats):
                y = y * 2
            return y if train else -y

        for train in (True, False):
            expected = f(X, 0, train, repeats=3)
            jitted = jax.jit(fuse(f), static_argnames=("axis", "train", "repeats"))
            np.testing.assert_allclose(jitted(X, 0, train, repeats=3), expected, rtol=1e-5)
            inner = fuse(jax.jit(f, static_argnames=("axis", "train", "repeats")))
            outer = jax.jit(functools.partial(inner, axis=0, train=train, repeats=3))
            np.testing.assert_allclose(outer(X), expected, rtol=1e-5)
            np.testing.assert_allclose(fuse(lambda x, train: f(x, 0, train, repeats=3))(X, train), expected, rtol=1e-5)
            assert len(fuse(f).explain(X, 0, train, repeats=3)) == 1

    def test_keywords_of_any_name(self):
        def f(x, self, f, g, args):
            return jax.nn.softmax(x * self) * f + g * args

        given = {"self": 2.0, "f": X, "g": 3.0, "args": X}
        np.testing.assert_allclose(fuse(f)(X, **given), f(X, **given), rtol=1e-5)
        assert len(fuse(f).explain(X, **given)) == 1

    def test_no_arrays(self):
        assert_same(fuse(lambda: jax.nn.softmax(jnp.arange(4.0)))(), jax.nn.softmax(jnp.arange(4.0)), 4)
        assert fuse(lambda: ())() == ()

    def test_results_that_are_operands_or_constants(self):
        a, b, _ = fuse(lambda x: (x, jnp.float32(3), jax.nn.softmax(x)))(X)
        np.testing.assert_array_equal(a, X)
        assert b == 3

    def test_integers(self):
        label = np.array([1, 0, 3, 2])
        f = lambda x, k: jax_softmax.cross_entropy_loss(x * 2, k)  # noqa: E731
        np.testing.assert_allclose(jax.grad(fuse(f))(X, label), jax.grad(f)(X, label), rtol=1e-5, atol=1e-7)
        zero = jax.grad(fuse(f), 1, allow_int=True)(X, label)
        assert zero.dtype == jax.dtypes.float0

    def test_values_of_an_outer_trace(self):
        outer = jax.grad(lambda s: jnp.sum(fuse(lambda x: jax.nn.softmax(x * s) * X)(X)))
        plain = jax.grad(lambda s: jnp.sum(jax.nn.softmax(X * s) * X))
        np.testing.assert_allclose(jax.jit(outer)(0.5), plain(0.5), rtol=1e-4)
        np.testing.assert_allclose(outer(0.5), plain(0.5), rtol=1e-4)

    def test_objects_that_change(self):
        class Model:
            scale = 2.0

            @fuse
            def __call__(self, x):
                return jax.nn.softmax(x * self.scale)

            def __eq__(self, other):
                return np.zeros(3) == 0  # no truth value

            __hash__ = None

        model = Model()
        f = fuse(lambda config, x: jax.nn.softmax(x * config["object"].scale))
        for model.scale in (2.0, 3.0):
            expected = jax.nn.softmax(X * model.scale)
            np.testing.assert_allclose(model(X), expected, rtol=1e-5)
            np.testing.assert_allclose(f({"object": model}, X), expected, rtol=1e-5)

    def test_keeps_nothing_alive(self):
        array = jnp.asarray(X)

        def function(x, kind):
            return getattr(jax.nn, kind)(x + array)

        gone = weakref.ref(function)
        for g in (fuse(function), jax.jit(fuse(function), static_argnums=1)):
            g(X, "softmax")
        del function, g
        gc.collect()
        assert gone() is None

    def test_is_traced_for_the_first_call_alone(self):
        """With this package's operators, and without."""
        traced = []

        @fuse
        def f(x, kind):
            traced.append(kind)
            return getattr(jax.nn, kind)(x)

        for _ in range(3):
            f(X, "softmax")
        f(X, "log_softmax")
        assert traced == ["softmax"] * 2 + ["log_softmax"] * 2

    def test_donation(self):
        x = jnp.array(X)
        y = jax.jit(fuse(lambda x: jax.nn.softmax(x * 2)), donate_argnums=0)(x)
        np.testing.assert_allclose(y, jax.nn.softmax(X * 2), rtol=1e-5)
        assert x.is_deleted()

    def test_what_is_no_function(self):
        with pytest.raises(TypeError, match="fuse: f must be a function, got int"):
            fuse(3)
        for kind in (staticmethod, classmethod):
            with pytest.raises(TypeError, match=rf"fuse: f must be .*, got {kind.__name__}. Write .*\(fuse\(f\)\)"):
                fuse(kind(pairs))
        method = vars(type("Methods", (), {"f": staticmethod(fuse(pairs))}))["f"]
        assert_same(method(X), pairs(X), 16)

    def test_functions_that_return_no_results(self):
        def generator(x):
            yield jax.nn.softmax(x)

        async def coroutine(x):
            return jax.nn.softmax(x)

        async def asynchronous(x):
            yield jax.nn.softmax(x)

        called = type("Called", (), {"__call__": generator})()
        for f in (generator, coroutine, asynchronous, functools.partial(generator), called):
            name = getattr(f, "__name__", "generator")
            with pytest.raises(TypeError, match=f"fuse: f must be .* returns its results, got an? {name}"):
                fuse(f)

    @pytest.mark.parametrize("x", [{1, 2}, "a", (4, 8)], ids=lambda x: type(x).__name__)
    def test_errors_say_which_is_no_array(self, x):
        def f(params, x, axis=-1):
            return jax.nn.softmax(jnp.exp(x), axis)

        for g in (fuse(f), fuse(f).explain):
            with pytest.raises(TypeError) as raised:
                g({"w": X}, x, axis=1)
            notes = "".join(raised.value.__notes__)
            assert f"f was given x of type {type(x).__name__}, as it is" in notes and "ShapeDtypeStruct" in notes
        with pytest.raises(TypeError) as raised:
            fuse(f)({"w": X}, X, axis=1.5)
        assert "as it is" not in "".join(raised.value.__notes__)

    def test_jax_nn_is_its_own_again(self):
        fuse(lambda x: jax.nn.softmax(x))(X)
        with pytest.raises(ZeroDivisionError):
            fuse(lambda x: 1 / 0)(X)
        assert "softmax[" not in str(jax.make_jaxpr(lambda x: jax.nn.softmax(x))(X))

    def test_name_and_signature(self):
        assert fuse(pairs).__name__ == "pairs"
        assert inspect.signature(fuse(pairs)) == inspect.signature(pairs)


def scaled(x, axis, scale, *, power=1):
    """Which needs to know the axis."""
    return jax.nn.softmax(x * scale, axis) ** power


@functools.partial(jax.tree_util.register_dataclass, data_fields=["axis", "w"], meta_fields=[])
@dataclasses.dataclass
class Layer:
    """A tree that holds a number."""

    axis: object
    w: jax.Array

    def __call__(self, x):
        return scaled(x, self.axis, self.w)

    def method(self, x):
        return self(x)


BOUND = {
    "partial": functools.partial(jax.nn.softmax, axis=0),
    "partial of partial": functools.partial(functools.partial(scaled, axis=0), scale=jnp.ones(8), power=2),
    "positional": functools.partial(lambda axis, scale, x: scaled(x, axis, scale), 0, 2.0),
    "a number of numpy": functools.partial(jax.nn.softmax, axis=np.int64(0)),
    "a partial that is a tree": jax.tree_util.Partial(jax.nn.softmax, axis=0),
    "in a tree": functools.partial(lambda options, x: scaled(x, **options), {"axis": 0, "scale": 2}),
    "an object": Layer(0, jnp.ones(8)),
    "an object's method": Layer(0, jnp.ones(8)).method,
    "a partial of a method": functools.partial(Layer(0, jnp.ones(8)).method),
}


class TestNumbers:
    """Those to which a function is bound are constants."""

    @pytest.mark.parametrize("f", BOUND.values(), ids=list(BOUND))
    def test_of_bound_functions(self, f):
        assert_same(fuse(f)(X), f(X), 16)
        assert_same(jax.jit(fuse(f))(X), f(X), 16)
        assert len(fuse(f).explain(X)) == 1

    def test_that_are_equal_but_not_the_same(self):
        def f(scale, x):
            return jax.nn.softmax(x), jnp.copysign(x, scale), jnp.asarray(scale)

        for scale in (1, 1.0, True, 0.0, -0.0):
            assert_same(fuse(functools.partial(f, scale))(X), f(scale, X), 16)

    def test_keep_the_program(self):
        traced = []

        def f(scale, x):
            traced.append(scale)
            return jax.nn.softmax(x * scale)

        for scale in (2.0, 2.0, 3.0, 2.0):
            assert_same(fuse(functools.partial(f, scale))(X), jax.nn.softmax(X * scale), 16)
        assert traced == [2.0, 2.0, 3.0, 3.0]


class TestModules:
    """Objects of Flax's nnx as arguments, which a function may change."""

    @staticmethod
    def model():
        nnx = pytest.importorskip("flax.nnx")

        class Layer(nnx.Module):
            def __init__(self):
                self.w, self.calls = nnx.Param(jnp.asarray(X)), nnx.Variable(jnp.zeros(()))

            def __call__(self, x):
                self.calls[...] += 1
                return jax.nn.softmax(x * self.w[...])

        return nnx, Layer()

    def both_ways(self, transform, f):
        """The results, and the module afterwards, of f alone and fused."""
        results = []
        for g in (lambda *args: f(*args), fuse(f)):
            nnx, model = self.model()
            results.append([(transform(nnx, g)(model, X * n), nnx.state(model)) for n in (1, 2)])
        assert_same(results[1], results[0], 64)

    @pytest.mark.parametrize("transform", [lambda nnx, f: f, lambda nnx, f: nnx.jit(f)], ids=["call", "jit"])
    def test_call(self, transform):
        self.both_ways(transform, lambda model, x: model(x))

    def test_gradient_of_fused(self):
        transform = lambda nnx, f: nnx.jit(nnx.value_and_grad(f))  # noqa: E731
        self.both_ways(transform, lambda model, x: jnp.sum(model(x) ** 2))

    def test_fused_gradient(self):
        def f(model, x):
            nnx = pytest.importorskip("flax.nnx")
            return nnx.value_and_grad(lambda model, x: jnp.sum(model(x) ** 2))(model, x)

        self.both_ways(lambda nnx, f: nnx.jit(f), f)

    @pytest.mark.parametrize("jitted", [False, True])
    def test_changes_of_more_than_arrays(self, jitted):
        """Attributes, submodules that are others, shared or gone, and which object is which."""
        nnx = pytest.importorskip("flax.nnx")

        class Model(nnx.Module):
            def __init__(self):
                self.layer = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
                self.other = nnx.Linear(4, 4, rngs=nnx.Rngs(1))
                self.first = self.left = nnx.Param(jnp.asarray(X))
                self.dropout, self.calls = nnx.Dropout(0.5), 0

        def f(model, x):
            model.calls += 1
            model.eval()
            model.other = model.layer
            model.layer = nnx.LayerNorm(4, rngs=nnx.Rngs(0))
            del model.left
            return model, jax.nn.softmax(x * model.first[...])

        model = Model()
        layer, first, g = model.layer, model.first, nnx.jit(fuse(f)) if jitted else fuse(f)
        result, y = g(model, X)
        np.testing.assert_allclose(y, jax.nn.softmax(X * X), rtol=1e-5)
        assert result is model and model.other is layer and model.first is first
        assert type(model.layer) is nnx.LayerNorm and not hasattr(model, "left")
        assert model.calls == 1 and model.dropout.deterministic

    def test_variables(self):
        nnx = pytest.importorskip("flax.nnx")

        def f(p):
            p[...] *= 2
            return jax.nn.softmax(p[...])

        p, g = nnx.Param(jnp.asarray(X)), fuse(f)
        for n in (2, 4):
            np.testing.assert_allclose(g(p), jax.nn.softmax(X * n), rtol=1e-5)
            np.testing.assert_allclose(p[...], X * n)
