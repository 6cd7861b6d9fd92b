"""JAX, Flax and optax under `use()`, of which they know nothing: arguments, names, results and gradients stay."""

import importlib
import inspect
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import support
from support import NAMES, OPERATORS, assert_patched, calls, operators, sampled

import jax_softmax
from jax_softmax.functions import patching

pytestmark = pytest.mark.usefixtures("switched_off_afterwards")


@pytest.mark.parametrize("name", [*NAMES, "logsumexp"])
def test_signatures_and_names_stay(name):
    original = inspect.unwrap(getattr(jax.nn, name))
    jax_softmax.use(losses=True)
    here = getattr(jax.nn, name)
    assert inspect.signature(here) == inspect.signature(original)
    assert (here.__name__, here.__doc__, here.__module__) == (name, original.__doc__, original.__module__)
    assert here.__doc__


ARGUMENTS = {
    "positional": lambda f, x: f(x, 0, jnp.tril(jnp.ones((3, 4), bool))),
    "by name": lambda f, x: f(x=x, axis=(0, 1), where=x > 0),
    "numpy": lambda f, x: f(np.asarray(x), where=np.asarray(x) > 0),
    "vmap": lambda f, x: jax.vmap(f)(x),
    "grad": lambda f, x: jax.grad(lambda x: jnp.sum(f(x) ** 2))(x),
    "jit": lambda f, x: jax.jit(f, static_argnums=1)(x, 0),
    "the name of a mapped axis": lambda f, x: jax.vmap(lambda row: f(row, axis="i"), axis_name="i")(x),
}


@pytest.mark.parametrize("arguments", ARGUMENTS)
@pytest.mark.parametrize("name", NAMES)
def test_arguments_of_jax(name, arguments):
    x = jnp.asarray(support.normal((3, 4)))
    expected = ARGUMENTS[arguments](getattr(jax.nn, name), x)
    with jax_softmax.use():
        actual = ARGUMENTS[arguments](getattr(jax.nn, name), x)
    assert actual.dtype == expected.dtype
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("argument, bad", [("initial", 0.0), ("where", np.ones((2, 3))), ("axis", 2)])
@pytest.mark.parametrize("name", NAMES)
def test_arguments_that_jax_has_not_are_refused_as_there(name, argument, bad):
    x, errors = jnp.ones((2, 3)), []
    for on in (False, True):
        with jax_softmax.use(on), pytest.raises((TypeError, ValueError)) as caught:
            getattr(jax.nn, name)(x, **{argument: bad})
        errors.append(caught.type)
    assert errors[0] is errors[1]


def test_references_in_jax():
    q = jnp.asarray(support.normal((1, 5, 2, 8)))
    attention = jax.jit(lambda q: jax.nn.dot_product_attention(q, q, q, is_causal=True, implementation="xla"))
    expected = attention(q)
    for on in (True, False):
        with jax_softmax.use(on):
            assert calls(lambda q: attention(q), q) == on
            np.testing.assert_allclose(attention(q), expected, rtol=1e-5, atol=1e-6)


# ---- Losses

LOGITS = {  # arguments of logsumexp, and whether ours has kernels for them
    "all": (lambda f, x: f(x), True),
    "last": (lambda f, x: f(x, -1), True),
    "keepdims": (lambda f, x: f(x, axis=(1, 2), keepdims=True), True),
    "where": (lambda f, x: f(x, axis=1, where=jnp.arange(4)[:, None] > 1), True),
    "larger where": (lambda f, x: f(x, axis=1, where=jnp.ones((2, 2, 4, 5), bool)), True),
    "nothing": (lambda f, x: f(x, axis=1, where=jnp.zeros((4, 5), bool)), True),
    "infinities": (lambda f, x: f(jnp.where(x > 1, jnp.inf, jnp.where(x < 0, -jnp.inf, x)), axis=1), True),
    "b": (lambda f, x: f(x, axis=1, b=jnp.arange(5.0, dtype=x.dtype)), False),
    "return_sign": (lambda f, x: f(x, axis=1, return_sign=True)[1], True),
    "complex": (lambda f, x: f(x.astype("complex64"), axis=1), False),
    "integers": (lambda f, x: f(jnp.arange(5)), False),
    "a number": (lambda f, x: f(2.0), False),
    "the name of a mapped axis": (lambda f, x: jax.vmap(lambda row: f(row, axis="i"), axis_name="i")(x), False),
}


@sampled("dtype", ["bfloat16", "float32"], 2)
@sampled("case", list(LOGITS), 6)
def test_logsumexp_of_jax(case, dtype):
    f, has_kernel = LOGITS[case]
    x = jnp.asarray(support.normal((2, 4, 5))).astype(dtype)
    expected = f(jax.nn.logsumexp, x)
    for module in (jax.nn, jax.scipy.special):
        with jax_softmax.use():
            assert calls(lambda x, module=module: f(module.logsumexp, x), x) == 0
        with jax_softmax.use(losses=True):
            assert calls(lambda x, module=module: f(module.logsumexp, x), x) == has_kernel
            actual = f(module.logsumexp, x)
        assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
        tolerance = 2e-2 if dtype == "bfloat16" else 1e-5
        wide = np.complex64 if case == "complex" else np.float32
        np.testing.assert_allclose(actual.astype(wide), expected.astype(wide), rtol=tolerance, atol=tolerance)
    assert_patched(False)


INTEGERS = jnp.array([[0, 3, -1, 4], [2, -5, 1, 0]])
ROWS = jnp.array([[True, False, True, True], [False, True, True, True]])


def one_hot(labels, dtype):
    return jax.nn.one_hot(labels, 5, dtype=dtype) * 0.6875 + jnp.asarray(0.0625, dtype)  # which bfloat16 has


def many_classes(x):
    """More than 8 bits can count."""
    more = (jnp.arange(300) % 63 / -16).astype(x.dtype)
    return jnp.concatenate([x, jnp.broadcast_to(more, (*x.shape[:-1], 300))], -1)


SOFT_LOSSES = {
    "one-hot": lambda f, x: f(x, one_hot(INTEGERS, x.dtype)),
    "float32 labels": lambda f, x: f(x, one_hot(INTEGERS, "float32")),
    "bfloat16 labels": lambda f, x: f(x, one_hot(INTEGERS, "bfloat16")),
    "integer labels": lambda f, x: f(x, jax.nn.one_hot(INTEGERS, 5, dtype=int)),
    "float64 labels of numpy": lambda f, x: f(x, np.eye(5)[np.asarray(INTEGERS)]),
    "one distribution": lambda f, x: f(x, one_hot(2, x.dtype)),
    "axis": lambda f, x: f(x, one_hot(INTEGERS, x.dtype), axis=(0, 2)),
    "axes": lambda f, x: f(x, one_hot(INTEGERS, x.dtype), axis=None),
    "rows": lambda f, x: f(x, one_hot(INTEGERS, x.dtype), where=ROWS),
    "elements": lambda f, x: f(x, one_hot(INTEGERS, x.dtype), where=ROWS[..., None] & (jnp.arange(5) < 4)),
}
SOFT_LOSSES_OF_OPTAX = {
    "many labels": lambda f, x: f(x[0, 0], one_hot(INTEGERS, x.dtype)),
    "complex labels": lambda f, x: jnp.real(f(x, one_hot(INTEGERS, "complex64"))),
}
INTEGER_LOSSES = {
    "integers": lambda f, x: f(x, INTEGERS),
    "int8": lambda f, x: f(many_classes(x), INTEGERS.astype("int8")),
    "uint8": lambda f, x: f(many_classes(x), jnp.abs(INTEGERS).astype("uint8")),
    "no class": lambda f, x: jnp.nan_to_num(f(x, jnp.where(INTEGERS == 3, -100, INTEGERS)), nan=7),
    "no class in rows left out": lambda f, x: f(x, jnp.where(ROWS, INTEGERS, -100), where=ROWS),
    "axis": lambda f, x: f(x, INTEGERS[:, :1].repeat(5, 1) % 4, axis=1),
    "axes": lambda f, x: f(x, INTEGERS[0] + 5, axis=(2, 0)),
    "rows": lambda f, x: f(x, INTEGERS, where=ROWS),
    "elements": lambda f, x: f(x, INTEGERS, where=ROWS[..., None] & (jnp.arange(5) < 3)),
}
INTEGER_LOSSES_OF_OPTAX = {"labels that broadcast": lambda f, x: f(x, INTEGERS[:, :1])}
OF_OPTAX = {  # and by which of our operators the first ones are
    "softmax_cross_entropy": (SOFT_LOSSES, SOFT_LOSSES_OF_OPTAX, "logsumexp"),
    "softmax_cross_entropy_with_integer_labels": (INTEGER_LOSSES, INTEGER_LOSSES_OF_OPTAX, "cross_entropy"),
}


@sampled("dtype", ["bfloat16", "float32"], 2)
@sampled("name, case", [(name, case) for name, (ours, theirs, _) in OF_OPTAX.items() for case in ours | theirs], 4)
def test_cross_entropies_of_optax(name, case, dtype):
    """Their values, shapes, dtypes and gradients."""
    optax = pytest.importorskip("optax")
    ours, theirs, operator = OF_OPTAX[name]
    f = (ours | theirs)[case]
    x = jnp.asarray(support.normal((2, 4, 5))).astype(dtype)

    def total(x):
        losses = f(getattr(optax, name), x)
        return jnp.sum(losses.astype("float32")), losses

    def as_float32(tree):
        return jax.tree.map(lambda a: np.asarray(a, "float32"), tree)

    gradient = jax.grad(total, has_aux=True)
    exact = as_float32(support.in_haste(gradient, x.astype("float32")))
    expected = jax.eval_shape(gradient, x)
    with jax_softmax.use():
        assert operators(total, x) <= {"log_softmax"}
    with jax_softmax.use(losses=True):
        if case in ours:
            assert operators(total, x) == {operator}
        actual = support.in_haste(gradient, x)
    tolerance = 2e-2 if dtype == "bfloat16" else 1e-5
    for a, wanted, true in zip(*map(jax.tree.leaves, (actual, expected, exact)), strict=True):
        assert (a.dtype, a.shape) == (wanted.dtype, wanted.shape)
        np.testing.assert_allclose(np.asarray(a, "float32"), true, rtol=tolerance, atol=tolerance)


def test_labels_of_optax_that_are_no_class():
    """The loss is NaN in either; docs/migrating.md says how the gradients differ."""
    optax, x, labels = pytest.importorskip("optax"), support.normal((3, 5)), np.array([5, -6, -1])

    def total(x):
        losses = optax.softmax_cross_entropy_with_integer_labels(x, labels)
        return jnp.sum(losses), losses

    gradient, losses = jax.grad(total, has_aux=True)(x)
    with jax_softmax.use(losses=True):
        ours, our_losses = jax.grad(total, has_aux=True)(x)
    np.testing.assert_allclose(our_losses, losses, rtol=1e-5)
    assert np.isnan(losses[:2]).all()
    np.testing.assert_allclose(gradient[:2], jax.nn.softmax(x)[:2], rtol=1e-5)
    assert not ours[:2].any()
    np.testing.assert_allclose(ours[2], gradient[2], rtol=1e-5)


@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_what_has_no_kernel_is_still_computed(monkeypatch, name, by_hand):
    """Complex numbers, many dimensions and other platforms go through what `jax.nn` had at first."""
    z = jnp.asarray(support.normal((3, 5)) + 1j * support.normal((3, 5), seed=1))
    x = jnp.asarray(support.normal((2,) * 13))
    expected = [patching.originals[name](a) for a in (z, x)]
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

    expected, gradient = support.in_haste(jax.value_and_grad(loss), x, mask)
    assert calls(loss, x, mask) == 0
    with jax_softmax.use():
        actual, own_gradient = support.in_haste(jax.value_and_grad(loss), x, mask)
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


def test_references_of_modules_that_are_there_at_the_call(monkeypatch):
    """And not yet when the function is decorated."""

    @jax_softmax.use()
    def patched(module):
        assert_patched(True, module)

    module = types.ModuleType("flax.imported_late")
    vars(module).update(patching.originals)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    patched(module)
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
    expected = support.in_haste(jax.value_and_grad(total), logits)
    with jax_softmax.use():
        assert calls(total, logits) > 0
        actual = support.in_haste(jax.value_and_grad(total), logits)
    for a, wanted in zip(actual, expected, strict=True):
        np.testing.assert_allclose(a, wanted, rtol=1e-5, atol=1e-6)
