"""The operators in the place of `jax.nn`'s, by `use()` and by hand, under Flax and optax that know nothing of it."""

import importlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import support
from support import NAMES, OPERATORS, sampled

import jax_softmax
from jax_softmax.primitives.reference import ORIGINALS


@pytest.fixture(autouse=True)
def nothing_is_left():
    yield
    jax_softmax.use(False)


def calls(f, *args):
    """Of the kernels, in the program of f, traced anew."""
    return jax.jit(lambda *args: f(*args)).lower(*args).as_text().count("@jax_softmax(")


def assert_patched(patched, module=jax.nn):
    for name in NAMES:
        assert getattr(module, name) is (OPERATORS if patched else ORIGINALS)[name]


def test_while_the_block_lasts():
    with jax_softmax.use():
        assert_patched(True)
    assert_patched(False)
    with pytest.raises(ZeroDivisionError), jax_softmax.use():
        1 / 0  # noqa: B018
    assert_patched(False)


def test_until_it_is_switched_off():
    jax_softmax.use(True)
    assert_patched(True)
    jax_softmax.use(True)
    jax_softmax.use(False)
    assert_patched(False)
    jax_softmax.use(False)
    assert_patched(False)


def test_blocks_within_blocks():
    with jax_softmax.use():
        with jax_softmax.use():
            assert_patched(True)
        assert_patched(True)
        with jax_softmax.use(False):
            assert_patched(False)
        assert_patched(True)
    assert_patched(False)


def test_of_a_function_during_each_call():
    """And not before the first one."""

    @jax_softmax.use()
    def patched(raises=False):
        "What it does."
        assert_patched(True)
        return 1 / 0 if raises else 7

    @jax_softmax.use(False)
    def unpatched():
        assert_patched(False)
        return patched()

    assert_patched(False)
    for _ in range(3):
        assert patched() == unpatched() == 7
        assert_patched(False)
    with pytest.raises(ZeroDivisionError):
        patched(raises=True)
    assert_patched(False)
    with jax_softmax.use():
        assert unpatched() == patched() == 7
        assert_patched(True)
    assert_patched(False)
    assert (patched.__name__, patched.__doc__) == ("patched", "What it does.")


@pytest.mark.parametrize("on", ["off", 0, None, jax.nn.softmax], ids=["text", "number", "None", "function"])
def test_what_is_no_bool_is_refused(on):
    with pytest.raises(TypeError, match="use: on must be True or False, got one of type"):
        jax_softmax.use(on)
    assert_patched(False)


def test_what_others_put_there_stays(monkeypatch):
    def another(x):
        return x

    monkeypatch.setattr(jax.nn, "softmax", another)
    with jax_softmax.use():
        assert jax.nn.softmax is another
        assert jax.nn.log_softmax is jax_softmax.log_softmax
    assert jax.nn.softmax is another


@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_what_has_no_kernel_is_still_computed(monkeypatch, name, by_hand):
    """Complex numbers, many dimensions and other platforms go through what `jax.nn` had at first."""
    z = jnp.asarray(support.normal((3, 5)) + 1j * support.normal((3, 5), seed=1))
    x = jnp.asarray(support.normal((2,) * 13))
    expected = [ORIGINALS[name](a) for a in (z, x)]
    if by_hand:
        monkeypatch.setattr(jax.nn, name, OPERATORS[name])
    else:
        jax_softmax.use()
    for a, wanted in zip((z, x), expected, strict=True):
        np.testing.assert_allclose(getattr(jax.nn, name)(a), wanted, rtol=1e-6)
    spec = jax.ShapeDtypeStruct((3, 5), "float32")
    text = jax.export.export(jax.jit(getattr(jax.nn, name)), platforms=["tpu"])(spec).mlir_module()
    assert "stablehlo.exponential" in text and "custom_call" not in text


def attention_nnx(x, mask):
    from flax import nnx

    layer = nnx.MultiHeadAttention(2, 8, decode=False, rngs=nnx.Rngs(0))
    return layer(x, mask=mask)


def attention_linen(x, mask):
    from flax import linen

    layer = linen.MultiHeadDotProductAttention(num_heads=2)
    return layer.apply(layer.init(jax.random.key(0), x), x, mask=mask)


@pytest.mark.parametrize("layer", [attention_nnx, attention_linen])
def test_attention_of_flax(layer):
    pytest.importorskip("flax")
    x, mask = jnp.asarray(support.normal((2, 5, 8))), jnp.tril(jnp.ones((5, 5), bool))

    def loss(x, mask):
        return jnp.sum(layer(x, mask) ** 2)

    expected, gradient = jax.value_and_grad(loss)(x, mask)
    assert calls(loss, x, mask) == 0
    with jax_softmax.use():
        actual, own_gradient = jax.value_and_grad(loss)(x, mask)
        assert calls(loss, x, mask) > 0
    np.testing.assert_allclose(actual, expected, rtol=1e-5)
    np.testing.assert_allclose(own_gradient, gradient, rtol=1e-4, atol=1e-5)
    assert calls(loss, x, mask) == 0


@pytest.mark.parametrize("module", ["flax.linen", "flax.linen.activation", "flax.nnx", "flax.nnx.nn.activations"])
def test_references_of_flax(module):
    pytest.importorskip("flax")
    module = importlib.import_module(module)
    assert_patched(False, module)
    with jax_softmax.use():
        assert_patched(True, module)
    assert_patched(False, module)


def test_references_that_flax_takes_meanwhile(monkeypatch, tmp_path):
    """A module that is imported within the block takes what is there then, and gives it back after the block."""
    pytest.importorskip("flax")
    name = "flax.imported_late"
    (tmp_path / "late.py").write_text("from jax.nn import log_softmax, softmax")
    with jax_softmax.use():
        spec = importlib.util.spec_from_file_location(name, tmp_path / "late.py")
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)
        assert_patched(True, module)
    assert_patched(False, module)


def loss_cross_entropy(losses, logits, labels):
    return losses.softmax_cross_entropy(logits, labels)


def loss_poly(losses, logits, labels):
    return losses.poly_loss_cross_entropy(logits, labels)


def loss_of_sequences(losses, logits, labels):
    return losses.ctc_loss(logits, jnp.zeros((2, 4)), jnp.ones((2, 2), int), jnp.zeros((2, 2)))


def loss_of_rankings(losses, logits, labels):
    return losses.ranking_softmax_loss(logits, labels, where=labels >= 0)


@sampled("loss", [loss_cross_entropy, loss_poly, loss_of_sequences, loss_of_rankings], 2)
def test_losses_of_optax(loss):
    losses = pytest.importorskip("optax").losses
    logits, labels = jnp.asarray(support.normal((2, 4, 5))), jax.nn.one_hot(jnp.arange(8).reshape(2, 4) % 5, 5)

    def total(logits):
        return jnp.sum(loss(losses, logits, labels))

    assert calls(total, logits) == 0
    expected = jax.value_and_grad(total)(logits)
    with jax_softmax.use():
        assert calls(total, logits) > 0
        actual = jax.value_and_grad(total)(logits)
    for a, wanted in zip(actual, expected, strict=True):
        np.testing.assert_allclose(a, wanted, rtol=1e-5, atol=1e-6)


def test_functions_that_run_after_their_call_are_not_decorated():
    def numbers():
        yield 1

    async def number():
        return 1

    for function in (numbers, number):
        with pytest.raises(TypeError, match="use: a decorated function must not be a generator or asynchronous"):
            jax_softmax.use()(function)
        assert_patched(False)
