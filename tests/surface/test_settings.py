"""Every public function, and `fuse`, under settings of JAX that find what most programs may do: arrays of different
dtypes or ranks that meet, NaNs and infinities, tracers that are kept. And programs for several platforms at once."""

import contextlib

import emulated
import jax
import jax.numpy as jnp
import pytest
import support

import jax_softmax

SHAPE = (4, 8)
LABELS = jnp.array([1, 0, 7, -1], jnp.int32)
MASK = jnp.asarray(support.random_mask(SHAPE, 3)).at[0].set(False).at[:, 0].set(jnp.array([False, True, True, True]))
WEIGHTS = jnp.array([0.0, 1.0, 0.5, 2.0], jnp.float32)


def x_of(dtype):
    return jnp.asarray(support.normal(SHAPE, "float32", 0, 1.5), dtype)


def code_of_others(x):
    """As models have it."""
    x = x + jnp.ones((1, SHAPE[-1]), x.dtype)
    log_p = jax.nn.log_softmax(x.astype(jnp.float32) * 0.5)
    one_hot = jax.nn.one_hot(LABELS, SHAPE[-1], dtype=jnp.float32)
    smoothed = -jnp.sum((one_hot * 0.9 + 0.1 / SHAPE[-1]) * log_p, -1)
    entropy = -jnp.sum(jnp.exp(log_p) * log_p, -1)
    filled = jnp.where(MASK, x, jnp.finfo(x.dtype).min)
    p = jax.nn.softmax(filled)
    chosen = jnp.take_along_axis(log_p, jnp.maximum(LABELS, 0)[:, None], -1)[:, 0]
    z_loss = jax.nn.logsumexp(x.astype(jnp.float32), axis=-1) ** 2
    return p, smoothed + entropy - chosen * WEIGHTS + 1e-4 * z_loss


def losses(x, **options):
    options = {"label_smoothing": 0.1, "z_loss": jnp.float32(1e-4), **options}
    return jax_softmax.softmax_cross_entropy_with_integer_labels(x, LABELS, **options)


def linear(x, **options):
    w = jnp.asarray(support.normal((SHAPE[-1], 6), "float32", 1, 1.5), x.dtype)
    labels = jnp.minimum(LABELS, 5)
    options = {"bias": jnp.ones(6, x.dtype), "label_smoothing": 0.1, "z_loss": 1e-4, "soft_cap": 3.0, **options}
    return jax_softmax.linear_cross_entropy(x, w, labels, **options)


# Functions of logits, with a row that is masked altogether, or does not count, where that makes no infinity.
FUNCTIONS = {
    "softmax": lambda x: jax_softmax.softmax(x, where=MASK),
    "log_softmax": jax_softmax.log_softmax,
    "softmax_vjp": lambda x: jax_softmax.softmax_vjp(x, where=MASK),
    "log_softmax_vjp": jax_softmax.log_softmax_vjp,
    "logsumexp": lambda x: jax_softmax.logsumexp(x, where=MASK.at[0].set(True), return_max=True),
    "logsumexp of weighted exponentials": lambda x: jax_softmax.logsumexp(x, b=2, return_sign=True),
    "softmax with a sink": lambda x: jax_softmax.softmax(x, sink=0.5),
    "entropy": lambda x: jax_softmax.entropy(x, where=MASK),
    "kl_divergence": lambda x: jax_softmax.kl_divergence(x, x * 2, where=MASK),
    "absmax_scale": lambda x: jax_softmax.absmax_scale(x, where=MASK),
    "absmax_scale, int8": lambda x: jax_softmax.absmax_scale(x, dtype="int8")[1],
    "softmax_cross_entropy": lambda x: jax_softmax.softmax_cross_entropy(x, jnp.abs(x), where=MASK),
    "softmax_cross_entropy_with_integer_labels": lambda x: losses(x, where=MASK),
    "cross_entropy_loss": lambda x: jax_softmax.cross_entropy_loss(
        x, LABELS, where=MASK, weights=WEIGHTS, label_smoothing=0.1, z_loss=1e-4
    ),
    "linear_cross_entropy": linear,
    "linear_cross_entropy, in chunks": lambda x: linear(x, chunk=2, weights=WEIGHTS),
    "fuse": jax_softmax.fuse(code_of_others),
}
fused_gradients = jax_softmax.fuse(lambda x: jax.grad(total(code_of_others))(x))


def total(f):
    return lambda x: sum(jnp.sum(jnp.square(y.astype(jnp.float32))) for y in jax.tree.leaves(f(x)))


def programs(name):
    """The function, its gradient, and the gradient of that."""
    gradient = jax.grad(total(FUNCTIONS[name]))
    return FUNCTIONS[name], gradient, jax.grad(total(gradient))


@contextlib.contextmanager
def strict():
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"), support.checking_leaks():
        yield


@support.sampled("dtype", ["bfloat16", "float32"], 2)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_is_traced_and_lowered(name, dtype):
    for f in programs(name):
        with strict():
            jax.jit(f).lower(x_of(dtype))


@support.sampled("dtype", ["bfloat16", "float32"], 2)
def test_fused_programs_are_rewritten(dtype):
    for f in (*programs("fuse"), fused_gradients):
        with strict(), emulated.kernels() as made:
            jax.jit(lambda x, f=f: f(x)).lower(x_of(dtype))
        assert made


@pytest.mark.parametrize("name", FUNCTIONS)
def test_makes_no_nans_and_infinities(name):
    _, gradient, _ = programs(name)
    with jax.debug_nans(True), jax.debug_infs(True):
        if jax.__version_info__ >= (0, 9):  # JAX 0.8 looks at each step of an eager derivative, and finds masks' -inf
            gradient(x_of("float32"))
        jax.jit(gradient)(x_of("float32"))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_is_lowered_for_several_platforms_at_once(name):
    _, gradient, _ = programs(name)
    jax.jit(gradient).trace(x_of("float32")).lower(lowering_platforms=("cpu", "cuda"))
