"""What runs under `jax.jit` runs under `fuse`, with the same results: settings, transformations and failures.

`test_zoo.py` has the operations that `fuse` does not know.
"""

import copy
import dataclasses
import functools
import gc
import pickle
import re
import weakref

import emulated
import jax
import jax.numpy as jnp
import pytest
import support
from fusion_support import X, assert_same
from jax import export, monitoring
from jax.ad_checkpoint import checkpoint_name

import jax_softmax
from jax_softmax import fuse
from jax_softmax.functions import patching
from jax_softmax.fusion import primitive, rewriting

KEY = jax.random.key(0)


def total(f):
    """A weighted sum of f's results that are of floats."""

    def summed(*args):
        results = (y for y in jax.tree.leaves(f(*args)) if jnp.issubdtype(y.dtype, jnp.floating))
        return sum(jnp.sum(y * jnp.cos(jnp.arange(y.size, dtype=y.dtype)).reshape(y.shape)) for y in results)

    return summed


def lower_for_cuda(f, *args):
    return jax.jit(f).trace(*args).lower(lowering_platforms=("cuda",))


def check(f, *args):
    """f, and its gradient, are the same under `fuse`; they are lowered for CUDA, and explained."""
    gradient = jax.grad(total(f))
    for expected, fused in ((f, fuse(f)), (gradient, jax.grad(total(fuse(f)))), (gradient, fuse(gradient))):
        assert_same(jax.jit(fused)(*args), jax.jit(expected)(*args), 256)
        lower_for_cuda(fused, *args)
    fuse(f).explain(*args)


def first_row(x):
    return jax.nn.softmax(x)[0]


@pytest.mark.skipif(not hasattr(jax.config, "jax_custom_vjp3"), reason="this JAX has none")
@pytest.mark.parametrize("flag", ["jax_remat3", "jax_custom_vjp3", "jax_custom_jvp3"])
def test_high_level_derivatives(flag):
    @jax.custom_vjp
    def doubled(x):
        return 2 * x

    doubled.defvjp(lambda x: (2 * x, None), lambda _, t: (2 * t,))

    @jax.custom_jvp
    def halved(x):
        return x / 2

    halved.defjvp(lambda primals, tangents: (primals[0] / 2, tangents[0] / 2))
    before = getattr(jax.config, flag)
    jax.config.update(flag, True)
    try:
        check(lambda x: jax.checkpoint(lambda x: jnp.sin(jax.nn.softmax(doubled(halved(x)))))(x), X)
    finally:
        jax.config.update(flag, before)


@pytest.mark.parametrize(
    "f",
    [
        lambda x: jax.lax.pmean(jax.nn.softmax(x), "b"),
        lambda x: jax.nn.softmax(x) * jax.random.uniform(jax.random.fold_in(KEY, jax.lax.axis_index("b"))),
        lambda x: jax.lax.all_gather(jax.nn.softmax(x), "b"),
        jax.nn.softmax,
    ],
    ids=["pmean", "axis_index", "all_gather", "none"],
)
def test_a_mapped_axis_that_no_operand_has(f):
    mapped = functools.partial(jax.vmap, in_axes=None, axis_name="b", axis_size=3)
    for g in (lambda f: mapped(f), lambda f: mapped(jax.grad(total(f))), lambda f: jax.grad(total(mapped(f)))):
        assert_same(jax.jit(g(fuse(f)))(X), jax.jit(g(f))(X), 64)


@pytest.mark.parametrize("collective", [jax.lax.pmean, jax.lax.pmax, jax.lax.all_gather])
def test_what_is_the_same_along_a_mapped_axis_is_not_mapped(collective):
    def f(x):
        return jax.nn.softmax(x), collective(x.sum(), "b")

    for axes in ({"in_axes": 0}, {"in_axes": None, "axis_size": 3}):
        mapped = functools.partial(jax.vmap, axis_name="b", out_axes=(0, None), **axes)
        assert_same(jax.jit(mapped(fuse(f)))(X), jax.jit(mapped(f))(X), 64)


def test_attributes_of_modules_that_cannot_be_keys():
    nnx = pytest.importorskip("flax.nnx")

    @dataclasses.dataclass
    class Settings:
        scale: float = 2.0

    class Model(nnx.Module):
        def __init__(self):
            self.settings, self.by_name = Settings(), nnx.static({"a": Settings()})
            self.w, self.calls = nnx.Param(jnp.ones(8)), nnx.Variable(jnp.zeros(()))

        def __call__(self, x):
            self.calls[...] += 1
            return jax.nn.softmax(x * self.w[...] * self.settings.scale)

    for transform in (lambda f: f, nnx.jit):
        model = Model()
        assert_same(transform(fuse(lambda model, x: model(x)))(model, X), jax.nn.softmax(X * 2), 64)
        assert model.calls[...] == 1


@pytest.mark.parametrize("names", ["b, n", "b, 64, n", "b, n, 16"])
@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_several_symbolic_dimensions(names, platform):
    def f(x):
        return jnp.sum(jax.nn.softmax((x * 2 + 1).astype(jnp.float32)) ** 2)

    x = jax.ShapeDtypeStruct(export.symbolic_shape(names), jnp.bfloat16)
    options = {"platforms": [platform], "disabled_checks": jax_softmax.export_checks()}
    for g in (jax.grad(fuse(f)), fuse(jax.grad(f))):
        export.export(jax.jit(g), **options)(x)
    export.export(jax.jit(fuse(f)), **options)(x).serialize(vjp_order=1)


def test_settings_that_refuse_mixed_dtypes():
    def f(x):
        e = jnp.exp(x - x.max(-1, keepdims=True))
        return jnp.sum((e / e.sum(-1, keepdims=True)) ** 2)

    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        for g in (fuse(jax.grad(f)), jax.grad(fuse(f))):
            lower_for_cuda(g, X.astype(jnp.bfloat16))
        with pytest.raises(Exception, match="promotion"):  # of the function itself they hold
            fuse(lambda x: jax.nn.softmax(x) + jnp.ones(8, jnp.bfloat16))(X)


def test_guards_of_transfers():
    """What is on the device, and constants, may be where nothing may be copied to it."""
    eqx = pytest.importorskip("equinox")

    class Model(eqx.Module):
        w: jax.Array
        scale: float = 0.5

        def __call__(self, x):
            return jax.nn.softmax(x * self.w * self.scale)

    model, x = jax.device_put((Model(jnp.ones(8)), X))
    for f, args in ((lambda model, x: model(x), (model, x)), (functools.partial(jax.nn.softmax, axis=0), (x,))):
        expected = eqx.filter_jit(f)(*args)
        with jax.transfer_guard("disallow"):
            found = fuse(f)(*args), eqx.filter_jit(fuse(f))(*args)
        assert_same(found, (expected, expected), 64)


def test_disable_jit():
    def f(x):
        return jax.nn.softmax(x) if x.sum() > -100 else x  # looks at a value

    with jax.disable_jit():
        assert_same(fuse(f)(X), f(X), 64)


def test_the_attributes_of_functions_that_are_replaced():
    with jax_softmax.use(losses=True):
        for name in ("softmax", "log_softmax", "logsumexp"):
            function, original = getattr(jax.nn, name), jax_softmax.functions.patching.originals[name]
            assert {a for a in dir(original) if not a.startswith("_")} <= set(dir(function))
        if hasattr(jax.nn.log_softmax, "lower"):
            jax.nn.log_softmax.lower(X)


def products(f, x):
    """How many the compiled program has."""
    return len(re.findall(r" dot\(|custom_call_target=\"__cublas", jax.jit(f).lower(x).compile().as_text()))


@pytest.mark.parametrize("policy", ["dots_saveable", "nothing_saveable", "names", None])
def test_policies_of_checkpoint(policy):
    """A fused function saves what the policy says of its operations, in loops too."""
    policies = jax.checkpoint_policies
    policy = policies.save_only_these_names("y") if policy == "names" else policy and getattr(policies, policy)

    def layer(x, w):
        y = checkpoint_name(jax.nn.softmax((x @ w) @ x.T) @ x, "y")
        return jnp.tanh(y @ w), None

    def gradient(fuse):
        checkpointed = jax.checkpoint(fuse(layer), policy=policy)
        return jax.grad(lambda x: jnp.sum(jax.lax.scan(checkpointed, x, jnp.ones((3, 8, 8)) / 8)[0] ** 2))

    fused, unfused = gradient(fuse), gradient(lambda f: f)
    assert_same(jax.jit(fused)(X), jax.jit(unfused)(X), 1024)
    assert products(fused, X) == products(unfused, X)


def test_wrappers_have_programs_of_their_own():
    """`functools.wraps` copies a function's attributes; the function does not hold what its wrappers hold."""

    class Held:
        pass

    def f(x):
        return jax.nn.softmax(x)

    def wrapped():
        held = Held()

        @functools.wraps(f)
        def wrapper(x):
            return f(x) * (2 if held else 1)

        assert_same(fuse(wrapper)(X), 2 * fuse(f)(X), 64)
        return weakref.ref(held)

    fuse(f)(X)
    held = wrapped()
    gc.collect()
    assert held() is None


def test_a_function_that_is_fused_again_compiles_nothing():
    def f(x):
        return jnp.sum(jax.nn.softmax(x) ** 2)

    compilations = []
    monitoring.register_event_duration_secs_listener(
        lambda event, *_, **__: compilations.append(event) if "backend_compile" in event else None
    )
    jax.grad(fuse(f))(X), fuse(f)(X)
    compilations.clear()
    for _ in range(2):
        fuse(f)(X)
    assert not compilations
    f = pickle.loads(pickle.dumps(copy.copy(first_row)))
    assert_same(fuse(f)(X), first_row(X), 64)


# ---- The net


def fail(*_, **__):
    raise RuntimeError("made to fail")


def gradient(f):
    return jax.grad(total(f))


# What fails, and what is done meanwhile with a program that has a fused function.
FAILURES = {
    "tracing": (patching.softmax, "softmax", lambda f: f),
    "residuals": (primitive.residuals, "chosen", gradient),
    "the tangents' call": (primitive, "_traced_and_bound", gradient),
    "a batch": (primitive, "bind_programs", jax.vmap),
    "rewriting": (rewriting, "_decided", lambda f: f),
    "a kernel's call": (emulated.Host, "call", lambda f: f),
}


@emulated.compiler_is_needed
@pytest.mark.parametrize("what", FAILURES)
def test_a_failure_of_ours_is_a_warning(what, monkeypatch):
    """The results are those of `jax.jit`, and `explain` says what failed."""
    owner, name, transform = FAILURES[what]

    def row_sums(x):
        return jnp.sum(jax.nn.softmax(jnp.tanh(x.astype(jnp.float32)) * 3) ** 2, -1)

    x = support.normal((2, 64, 512), "float32", 0, 1.0).astype(jnp.bfloat16)
    traced = jax.make_jaxpr(fuse(row_sums))(x[0] if what == "a batch" else x)

    def fused(x):
        return fuse(row_sums)(x) if what == "tracing" else jax.core.eval_jaxpr(traced.jaxpr, traced.consts, x)[0]

    expected = jax.jit(transform(row_sums))(x)
    with emulated.kernels():
        monkeypatch.setattr(owner, name, fail)
        with pytest.warns(UserWarning, match="RuntimeError: made to fail.* report"):
            found = jax.jit(transform(fused))(x)
    assert_same(found, expected, 256)


def test_explain_says_what_failed(monkeypatch):
    monkeypatch.setattr(rewriting, "_decided", fail)
    with pytest.warns(UserWarning, match="made to fail"):
        (line,) = fuse(jax.nn.softmax).explain(X)
    assert "made to fail" in line.why_not


def test_mistakes_of_the_program_are_its_own():
    """Without a warning."""
    with pytest.raises(TypeError) as raised:
        fuse(lambda x: jax.nn.softmax(x) + "a")(X)
    assert raised.value.__cause__ is None
