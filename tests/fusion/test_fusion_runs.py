"""What runs without `fuse` runs with it: functions that are objects, modules, pickles, programs of any size."""

import dataclasses
import functools
import inspect
import pickle
import sys

import emulated
import jax
import jax.experimental.jet
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
import support
from by_numpy import by_numpy
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jax_softmax
from jax_softmax import fuse
from jax_softmax.fusion import backend
from jax_softmax.runtime import judge

pytestmark = pytest.mark.usefixtures("default_flags")

X = support.normal((4, 8), "float32", 0, 1.5)
LABELS = np.array([1, 0, 7, 3], np.int32)


def halves(x):
    return jax.nn.softmax(x / 2)


@fuse
def decorated(x):
    return jax.nn.softmax(x * 2)


def assert_close(found, expected):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


# ---- Pickles


@pytest.mark.parametrize("f", [fuse(halves), decorated, fuse(functools.partial(halves))])
def test_pickle(f):
    assert_close(pickle.loads(pickle.dumps(f))(X), f(X))


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit])
def test_cloudpickle(transform):
    cloudpickle = pytest.importorskip("cloudpickle")
    f = transform(fuse(lambda x: jax.nn.softmax(x * 3)))
    assert_close(cloudpickle.loads(cloudpickle.dumps(f))(X), f(X))


# ---- What `fuse` returns


def softmax_of(x, scale=2):
    """What it does."""
    return jax.nn.softmax(x * scale)


class OfMethods:
    @fuse
    def method(self, x, scale=2):
        return softmax_of(x, scale)


def test_what_fuse_returns():
    fused = fuse(softmax_of)
    assert isinstance(fused, jax_softmax.Fused) and fused.__wrapped__ is softmax_of
    assert (fused.__name__, fused.__doc__) == ("softmax_of", "What it does.")
    assert str(inspect.signature(fused)) == "(x, scale=2)" and repr(fused) == f"fuse({softmax_of!r})"
    assert_close(fused.lower(X).compile()(X), softmax_of(X))
    assert "fused" in str(fused.trace(X, scale=3).jaxpr)


def test_methods_are_bound():
    """And share what has been traced."""
    method = OfMethods().method
    assert isinstance(OfMethods.method, jax_softmax.Fused) and isinstance(method, jax_softmax.Fused)
    assert str(inspect.signature(method)) == "(x, scale=2)" and "OfMethods object" in repr(method)
    f = OfMethods.method.__wrapped__
    assert method._programs_of(f) is OfMethods.method._programs_of(f) is fuse(f)._programs_of(f)
    for f in (method, jax.jit(method), lambda x: method.lower(x).compile()(x)):
        assert_close(f(X), softmax_of(X))
    assert len(method.explain(X)) == 1
    assert_close(OfMethods.method(OfMethods(), X, scale=3), softmax_of(X, 3))


# ---- Objects that are called


@dataclasses.dataclass
class Scaled:
    """Has no hash."""

    scale: object

    def __call__(self, x):
        return jax.nn.softmax(x * self.scale)


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["call", "jit"])
@pytest.mark.parametrize("called", [lambda f: f, lambda f: f.__call__, functools.partial])
def test_objects_that_are_called(transform, called):
    """They may change from call to call."""
    f = Scaled(X)
    fused = fuse(called(f))
    for f.scale in (X, 2.0):
        assert_close(transform(lambda x: fused(x))(X), f(X))
        assert len(fused.explain(X)) == 1


def module_of_equinox():
    eqx = pytest.importorskip("equinox")

    class Model(eqx.Module):
        w: jax.Array
        names: list = eqx.field(static=True)  # which has no hash
        activation: object = jax.nn.relu
        scale: float = 0.5

        def __call__(self, x):
            return jax.nn.softmax(self.activation(x @ self.w) * self.scale)

    return eqx, Model(jnp.ones((8, 8)), ["w"])


@pytest.mark.parametrize("jitted", [False, True])
def test_modules_of_equinox(jitted):
    eqx, model = module_of_equinox()
    jit = eqx.filter_jit if jitted else lambda f: f

    def loss(model, x):
        return jnp.sum(model(x) ** 2)

    expected = eqx.filter_value_and_grad(loss)(model, X)
    assert_close(jit(fuse(eqx.filter_value_and_grad(loss)))(model, X), expected)
    assert_close(jit(eqx.filter_value_and_grad(fuse(loss)))(model, X), expected)
    assert_close(jit(fuse(model))(X), model(X))
    assert_close(jit(fuse(model.__call__))(X), model(X))


TRANSFORMS = {
    "grad": jax.grad,
    "jit": jax.jit,
    "vmap": jax.vmap,
    "eval_shape": lambda f: lambda x: jnp.zeros(jax.eval_shape(f, x).shape),
    "jvp": lambda f: lambda x: jax.jvp(f, (x,), (x,)),
}


class TestModulesOfFlax:
    @staticmethod
    def model():
        nnx = pytest.importorskip("flax.nnx")

        class Layer(nnx.Module):
            def __init__(self):
                self.w, self.calls = nnx.Param(jnp.asarray(X)), nnx.Variable(jnp.zeros(()))

            def __call__(self, x, changes=None):
                if changes == "array":
                    self.calls[...] += 1
                if changes == "attribute":
                    self.was_called = True
                return jnp.sum(jax.nn.softmax(x * self.w[...]) ** 2)

        return Layer()

    @support.sampled("transform", TRANSFORMS.values(), 3, ids=list(TRANSFORMS))
    def test_of_an_outer_trace(self, transform):
        """They may be read there, not written to."""
        flax, model = pytest.importorskip("flax"), self.model()
        given = (lambda x: model(x)), (lambda x: fuse(lambda model, x: model(x))(model, x)), lambda x: fuse(model)(x)
        expected, *found = (transform(f)(X) for f in given)
        for results in found:
            assert_close(results, expected)
        for changes in ("array", "attribute"):
            with pytest.raises(flax.errors.TraceContextError):
                transform(lambda x, changes=changes: fuse(lambda model, x: model(x, changes))(model, x))(X)
            np.testing.assert_array_equal(model.w[...], X)
            assert model.calls[...] == 0 and not hasattr(model, "was_called")

    def test_as_arguments(self):
        for changes in (None, "array", "attribute"):
            f = lambda model, x, changes=changes: model(x, changes)  # noqa: E731
            for transform in (jax.grad, jax.jit, lambda f: jax.vmap(f, (None, 0))):
                assert_close(transform(fuse(f))(self.model(), X), transform(f)(self.model(), X))

    def test_that_are_called(self):
        model = self.model()
        fused = fuse(model)
        for n in (1, 2):
            assert_close(fused(X, "array"), self.model()(X))
            assert model.calls[...] == n
        model.w[...] *= 0
        assert_close(fused(X), model(X))

    def test_errors_change_nothing(self):
        model = self.model()

        def fails(model, x):
            model(x, "array")
            del model.w
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            fuse(fails)(model, X)
        np.testing.assert_array_equal(model.w[...], X)
        assert model.calls[...] == 0


def test_keeps_no_more_than_some_programs(monkeypatch):
    """Of functions that are given, and definitions of modules."""
    monkeypatch.setattr("jax_softmax.fusion.transform._MOST_PROGRAMS", 4)
    traced = []

    def f(g, x):
        traced.append(g)
        return jax.nn.softmax(g(x))

    fused, given = fuse(f), [lambda x, k=k: x * k for k in range(6)]
    for g in [*given, given[-1]]:
        fused(g, X)
    assert traced == [g for g in given for _ in range(2)]  # with this package's operators, and without
    assert fused._programs_of(f).jitted.cache_info().currsize == 4


# ---- Transformations and programs


def test_jet():
    def f(x):
        return jax.nn.log_softmax(x * 2) * x

    found, expected = (jax.experimental.jet.jet(g, (X,), ((X, X + 1),)) for g in (fuse(f), f))
    assert_close(found, expected)


def test_two_platforms_at_once():
    def f(x):
        return jax.nn.softmax(x.astype(jnp.float32) * 0.5).astype(jnp.bfloat16)

    x = jnp.asarray(support.normal((256, 128)), jnp.bfloat16)
    checks = jax_softmax.export_checks()
    with backend.using(emulated.Whoever()):
        exported = jax.export.export(jax.jit(fuse(f)), platforms=("cpu", "cuda"), disabled_checks=checks)(x)
    assert "x0 * (0x1" in str(exported.mlir_module())
    found = jax.export.deserialize(exported.serialize()).call(x).astype(jnp.float32)
    expected = jax.nn.softmax(x.astype(jnp.float32) * 0.5)
    np.testing.assert_allclose(found, expected, rtol=0.502 * jnp.finfo(jnp.bfloat16).eps)  # one rounding to bfloat16


@support.sampled(
    "name,spec",
    [("softmax", P("data", "model")), ("softmax", P(None, "model")), ("log_softmax", P("data", "model"))],
    2,
)
def test_meshes_of_explicit_mode(name, spec):
    """Which `jax.make_mesh` makes, where rows are sharded."""

    def loss(x):
        return jnp.sum(getattr(jax.nn, name)(x * 2) ** 2)

    with support.on_a_cpu(), jax.set_mesh(support.mesh_of_cpus((2, 4), AxisType.Explicit)):
        x = jax.device_put(X, spec)
        expected = jax.grad(loss)(X)
        assert_close(support.in_haste(jax.grad(fuse(loss)), x), expected)
        with emulated.kernels(in_jax=True):
            assert_close(support.in_haste(jax.grad(fuse(loss)), x), expected)


def rewritten_and_run(f, *args):
    """As a GPU would run it, and the kernels."""
    with emulated.kernels() as made:
        return support.in_haste(lambda *args: f(*args), *args), made


def stopped_anywhere(x):
    """Softmaxes that are written out, parts of which are constants for the derivative, or maxima for it."""
    stop, largest = jax.lax.stop_gradient, jnp.max(x, -1, keepdims=True)
    e = jnp.exp(x - largest)
    total = jnp.sum(e, -1, keepdims=True)
    of_constants = jnp.exp(x - jnp.max(stop(x), -1, keepdims=True))
    return [
        of_constants / jnp.sum(of_constants, -1, keepdims=True),
        e / stop(total),
        stop(e) / total,
        e / total + jnp.tanh(largest),
        x - largest - stop(jnp.log(total)),
        jnp.log(jnp.sum(jnp.exp(x - jnp.max(x, -1, keepdims=True)), -1)) + jnp.max(x, -1),
        jnp.sqrt(total),
        stop(jnp.round(e / total) - e / total) + e / total,
    ]


@emulated.compiler_is_needed
def test_derivatives_of_what_is_stopped_anywhere():
    def derivatives(f):
        gradients = [jax.grad(lambda x, k=k: jnp.sum(jnp.sin(f(x)[k]))) for k in range(8)]
        return lambda x: [(g(x), jax.jvp(g, (x,), (jnp.cos(x),))[1]) for g in gradients]

    expected = by_numpy(derivatives(stopped_anywhere), X)
    for f in (derivatives(fuse(stopped_anywhere)), fuse(derivatives(stopped_anywhere))):
        assert_close(rewritten_and_run(f, X)[0], expected)


@emulated.compiler_is_needed
def test_a_gpu_for_which_nothing_can_be_compiled(monkeypatch):
    """The program is as it is without `fuse`."""
    monkeypatch.setattr(judge, "has_cuda_kernels", lambda shape: False)
    gradient = jax.grad(lambda x: jnp.sum(jax.nn.softmax(2 * x) ** 2))
    for f in (fuse(gradient), jax.grad(fuse(lambda x: jnp.sum(jax.nn.softmax(2 * x) ** 2)))):
        found, made = rewritten_and_run(f, X)
        assert made == []
        assert_close(found, gradient(X))


def many_times(f, n=1200):
    return lambda x: functools.reduce(lambda x, k: f(x, k / n), range(n), x)


LONG = {
    "before": lambda x: jax.nn.softmax(many_times(jnp.add)(x)),
    "after": lambda x: many_times(lambda x, k: x * (1 + k))(jax.nn.softmax(x)),
    "of an array at labels": lambda x: jnp.sum(
        many_times(jnp.multiply)(jax.nn.one_hot(LABELS, x.shape[-1])) * jax.nn.log_softmax(x), -1
    ),
    "of a label": lambda x: jnp.sum(
        jax.nn.one_hot(many_times(lambda k, _: k + 1)(LABELS) % 8, x.shape[-1]) * jax.nn.log_softmax(x), -1
    ),
}


@emulated.compiler_is_needed
@support.sampled("name", LONG, 3)
def test_long_chains(name):
    """Longer than Python's stack is deep."""

    def with_gradient(f):
        return lambda x: (f(x), jax.grad(lambda x: jnp.sum(f(x) ** 2))(x))

    f = LONG[name]
    assert_close(rewritten_and_run(with_gradient(fuse(f)), X)[0], by_numpy(with_gradient(f), X))


@emulated.compiler_is_needed
def test_more_arrays_than_a_kernel_reads():
    def f(x, arrays):
        return jax.nn.softmax(sum(arrays, start=x))

    arrays = [X * k for k in range(40)]
    found, made = rewritten_and_run(fuse(f), X, arrays)
    assert_close(found, f(X, arrays))
    assert made == []
    (line,) = fuse(f).explain(X, arrays)
    assert "expressions read at most 31 arrays" in str(line.why_not)


@emulated.compiler_is_needed
def test_more_results_than_a_kernel_writes():
    def f(x):
        y = jax.nn.softmax(x * 2)
        return [(y * k).astype(jnp.bfloat16) for k in range(200)]

    found, _ = rewritten_and_run(fuse(f), X)
    for a, b in zip(found, by_numpy(f, X), strict=True):
        np.testing.assert_allclose(np.asarray(a, np.float32), b.astype(np.float32), rtol=0.01)


@emulated.compiler_is_needed
@pytest.mark.parametrize("reduced", [-1, None])
def test_one_label_for_all_rows(reduced):
    def f(x, label):
        index = jax.lax.broadcasted_iota(jnp.int32, x.shape, 1)
        return jnp.sum((index == label).astype(jnp.float32) * jax.nn.log_softmax(x), reduced)

    def gradient(x, label):
        return jax.grad(lambda x: jnp.sum(f(x, label) ** 2))(x)

    for g in (f, gradient):
        for label in (3, 8):
            assert_close(rewritten_and_run(fuse(g), X, jnp.int32(label))[0], by_numpy(g, X, jnp.int32(label)))


@emulated.compiler_is_needed
def test_losses_that_cannot_both_be_shared():
    """Each gradient needs the other loss: just one of the losses can come from the kernel of its gradient."""

    def product(x, y):
        loss_of = jax_softmax.softmax_cross_entropy_with_integer_labels
        return jnp.sum(loss_of(x, LABELS)) * jnp.sum(loss_of(y, LABELS))

    f = jax.value_and_grad(product, (0, 1))
    assert_close(rewritten_and_run(fuse(f), X, 2 * X)[0], f(X, 2 * X))
    operators = sorted(line.op for line in fuse(f).explain(X, 2 * X))
    assert operators == ["cross_entropy", "cross_entropy_gradient", "cross_entropy_gradient"]


def test_time_grows_as_programs_do():
    """Counted in calls of this package's functions."""

    def layers(n):
        def f(x, w):
            mask = jnp.tril(jnp.ones((x.shape[-2], x.shape[-2]), bool))
            for _ in range(n):
                p = jax.nn.softmax(jnp.where(mask, (x @ w @ x.T) * 0.5, -1e9))
                x = x + p @ jax.nn.gelu(x / (1 + jnp.abs(x).mean(-1, keepdims=True)))
            return jnp.sum(x**2)

        return jax.grad(f, 1)

    def calls(n):
        count = 0

        def called(frame, event, _):
            nonlocal count
            count += event == "call" and "jax_softmax" in frame.f_code.co_filename

        x, w = jax.ShapeDtypeStruct((32, 16), "float32"), jax.ShapeDtypeStruct((16, 16), "float32")
        sys.setprofile(called)
        try:
            fuse(layers(n)).explain(x, w)
        finally:
            sys.setprofile(None)
        return count

    calls(1)
    few, some, many = map(calls, (2, 6, 14))
    assert (many - some) < 2.3 * (some - few)


@pytest.mark.parametrize(("n", "has_kernels"), [(100, False), (2000, True)])
@pytest.mark.parametrize("transformed", [lambda f: f, jax.grad], ids=["value", "gradient"])
def test_kernels_of_long_rows_alone_on_a_cpu(n, has_kernels, transformed):
    """Nothing is folded into them, so that XLA's loops are faster of short rows."""

    def loss(x):
        return -jnp.log(jax.nn.softmax(x)[:, 0]).mean()

    traced = jax.jit(fuse(transformed(loss))).trace(support.normal((4, n), "float32", 0, 1))
    assert ("custom_call @jax_softmax" in traced.lower(lowering_platforms=("cpu",)).as_text()) == has_kernels
