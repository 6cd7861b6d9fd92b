"""What `fuse` finds as attention in programs, and that the programs compute the same.

What kernels do is done in JAX (`attention_on_host.py`): `test_attention.py` is about the kernels.
"""

import collections

import attention_on_host
import emulated
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import support
from flax import nnx

import jax_softmax
from jax_softmax import fuse

# Of packages that are older than this JAX.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

B, S, H, D = 2, 64, 4, 16
WHOLE, AGAIN = "forward queries keys", "forward forward queries keys"


def normal(*shape, seed=0):
    return jnp.asarray(support.normal(shape, "float32", seed, 1.0), jnp.bfloat16)


def qkv(heads_of_keys=H):
    return normal(B, S, H, D), normal(B, S, heads_of_keys, D, seed=1), normal(B, S, heads_of_keys, D, seed=2)


def gradients(attend, *operands):
    """The output, and the gradients by all operands of a sum of it."""
    o, transposed = jax.vjp(attend, *operands)
    weights = jnp.cos(jnp.arange(o.size, dtype=jnp.float32)).reshape(o.shape)
    return o, *transposed(weights.astype(o.dtype))


def layer(x, w):
    q, k, v = (jnp.einsum("bsf,fhd->bshd", x, w[n]) for n in range(3))
    return x + jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape), None


def scanned(layer, x, w):
    return jax.lax.scan(layer, x, w)[0]


def by_hand(q, k, v):
    scores = jnp.einsum("bihd,bjhd->bhij", q, k).astype(jnp.float32) / 4
    scores = jnp.where(jnp.tri(S, dtype=bool), 30 * jnp.tanh(scores / 30), -jnp.inf)
    return jnp.einsum("bhij,bjhd->bihd", jax.nn.softmax(scores).astype(v.dtype), v)


def added_mask(q, k, v):
    mask = jnp.where(jnp.tri(S, dtype=bool), 0, -1e9).astype(jnp.float32)
    scores = jnp.einsum("bihd,bjhd->bhij", q, k).astype(jnp.float32) / 4 + mask
    return jnp.einsum("bhij,bjhd->bihd", jax.nn.softmax(scores).astype(v.dtype), v)


def masked_softmax(q, k, v):
    lengths = jnp.array([S, S // 2])
    weights = jax.nn.softmax(
        jnp.einsum("bihd,bjhd->bhij", q, k) / 4, where=(jnp.arange(S) < lengths[:, None])[:, None, None]
    )
    return jnp.einsum("bhij,bjhd->bihd", weights, v)


def heads_first(q, k, v):
    q, k, v = (a.transpose(0, 2, 1, 3).reshape(B * H, S, D) for a in (q, k, v))
    weights = jax.nn.softmax(q @ k.swapaxes(1, 2) / 4)
    return (weights @ v).reshape(B, H, S, D).transpose(0, 2, 1, 3)


def one_sequence(q, k, v):
    return jax.nn.softmax(q[0, :, 0] @ k[0, :, 0].T) @ v[0, :, 0]


def with_weights(q, k, v):
    weights = jax.nn.softmax(jnp.einsum("bihd,bjhd->bhij", q, k))
    return jnp.concatenate([jnp.einsum("bhij,bjhd->bihd", weights, v).ravel(), weights.ravel()])


def repeated(q, k, v):
    return jax.nn.dot_product_attention(q, *(jnp.repeat(a, H // 2, 2) for a in (k, v)))


def dropped(q, k, v, broadcast=False):
    options = {"dropout_rng": jax.random.key(0), "dropout_rate": 0.2, "broadcast_dropout": broadcast}
    return nn.dot_product_attention(q, k, v, **options)


def nnx_layer(x):
    layer = nnx.MultiHeadAttention(H, H * D, decode=False, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    return layer(x, mask=nnx.make_causal_mask(x[..., 0]))


def linen_layer(x, dtype=jnp.bfloat16):
    module = nn.MultiHeadDotProductAttention(H, dtype=dtype)
    return module.apply(module.init(jax.random.key(0), x), x)


jax_nn = jax.nn.dot_product_attention
BIAS = normal(1, H, S, S, seed=3)
X = normal(B, S, H * D)
LAYERS = normal(3, 3, H * D, H, D, seed=4) / 8
# The program, its operands, which kernels it calls.
PROGRAMS = {
    "jax.nn": (lambda *a: gradients(jax_nn, *a), qkv(), WHOLE),
    "output alone": (jax_nn, qkv(), "forward"),
    "causal": (lambda *a: gradients(lambda q, k, v: jax_nn(q, k, v, is_causal=True), *a), qkv(), WHOLE),
    "window": (lambda *a: gradients(lambda q, k, v: jax_nn(q, k, v, local_window_size=(8, 0)), *a), qkv(), WHOLE),
    "grouped": (lambda *a: gradients(lambda q, k, v: jax_nn(q, k, v, is_causal=True), *a), qkv(2), WHOLE),
    "repeated keys": (lambda *a: gradients(repeated, *a), qkv(2), WHOLE),
    "lengths": (
        lambda n, *a: gradients(lambda q, k, v: jax_nn(q, k, v, key_value_seq_lengths=n), *a),
        (jnp.array([S, 20], jnp.int32), *qkv()),
        WHOLE,
    ),
    "bias": (lambda *a: gradients(lambda q, k, v, bias: jax_nn(q, k, v, bias), *a), (*qkv(), BIAS), WHOLE),
    "bias, constant": (
        lambda bias, *a: gradients(lambda q, k, v: jax_nn(q, k, v, bias, is_causal=True), *a),
        (BIAS, *qkv()),
        WHOLE,
    ),
    "keys alone": (lambda q, *a: gradients(lambda k, v: jax_nn(q, k, v), *a), qkv(), "forward keys"),
    "by hand": (lambda *a: gradients(by_hand, *a), qkv(), WHOLE),
    "added mask": (lambda *a: gradients(added_mask, *a), qkv(), WHOLE),
    "softmax with a mask": (lambda *a: gradients(masked_softmax, *a), qkv(), WHOLE),
    "heads first": (lambda *a: gradients(heads_first, *a), qkv(), WHOLE),
    "one sequence": (lambda *a: gradients(one_sequence, *a), qkv(), WHOLE),
    "dropout": (lambda *a: gradients(dropped, *a), qkv(), WHOLE),
    "dropout that heads share": (lambda *a: gradients(lambda *a: dropped(*a, True), *a), qkv(), WHOLE),
    "nnx": (lambda *a: gradients(nnx_layer, *a), (X,), WHOLE),
    "linen": (lambda *a: gradients(linen_layer, *a), (X,), WHOLE),
    "checkpoint": (lambda *a: gradients(jax.checkpoint(jax_nn), *a), qkv(), AGAIN),
    "vmap": (lambda *a: gradients(jax.vmap(lambda q, k, v: jax_nn(q, k, v, is_causal=True)), *a), qkv(), WHOLE),
    "scan": (lambda *a: gradients(lambda x, w: scanned(layer, x, w), *a), (X, LAYERS), AGAIN),
    "scan of checkpoint": (
        lambda *a: gradients(lambda x, w: scanned(jax.checkpoint(layer), x, w), *a),
        (X, LAYERS),
        AGAIN,
    ),
    # What stays as it was.
    "weights are a result": (lambda *a: gradients(with_weights, *a), qkv(), ""),
    "float32": (lambda *a: gradients(lambda x: linen_layer(x, jnp.float32), *a), (X,), ""),
    "forward mode": (lambda *a: jax.jvp(jax_nn, a, a), qkv(), ""),
    "second derivative": (lambda *a: gradients(jax.grad(lambda *a: jax_nn(*a).sum()), *a), qkv(), ""),
}


@pytest.fixture(autouse=True)
def on_the_cpu():
    with support.on_a_cpu():
        yield


def check(program, operands, kernels):
    with emulated.kernels(attention=True), attention_on_host.kernels(in_jax=True) as made:
        found = jax.jit(program)(*operands)
    assert collections.Counter(params["kernel"] for params, _ in made) == collections.Counter(kernels.split())
    return found


def assert_as_exact(found, program, operands):
    """As the unfused program, measured by the same in float32, and by bfloat16's steps."""
    wide = [a.astype(jnp.float32) if a.dtype == jnp.bfloat16 else a for a in operands]
    unfused, exact = jax.jit(program)(*operands), jax.jit(program)(*wide)
    for own, other, right in zip(*map(jax.tree.leaves, (found, unfused, exact)), strict=True):
        assert (own.shape, own.dtype) == (other.shape, other.dtype)
        own, other, right = (np.asarray(a, np.float64) for a in (own, other, right))
        bound = 3 * np.abs(other - right).max() + 0.02 * np.abs(right).max()
        np.testing.assert_allclose(own, right, rtol=0, atol=bound)


@pytest.mark.parametrize("name", PROGRAMS)
def test_is_found(name):
    program, operands, kernels = PROGRAMS[name]
    assert_as_exact(check(fuse(program), operands, kernels), program, operands)


@pytest.mark.parametrize("attend", [jax_nn, by_hand, dropped], ids=["jax.nn", "by hand", "dropout"])
def test_the_derivative_of_what_is_fused(attend):
    """The weights are made again, not kept."""
    found = check(lambda *a: gradients(fuse(attend), *a), qkv(), AGAIN)
    assert_as_exact(found, lambda *a: gradients(attend, *a), qkv())


def test_scans_stack_no_weights():
    program = fuse(lambda *a: gradients(lambda x, w: scanned(layer, x, w), *a))
    with emulated.kernels(attention=True), attention_on_host.kernels(in_jax=True):
        text = jax.jit(program).lower(X, LAYERS).as_text()
    assert f"3x{B}x{H}x{S}x{S}" not in text and f"3x1x{B}x{H}x{S}x{S}" not in text


def test_explain_says_so():
    operands = [jax.ShapeDtypeStruct((8, 2048, 16, 64), jnp.bfloat16)] * 3
    report = fuse(lambda *a: gradients(by_hand_of(2048), *a)).explain(*operands)
    assert [line.op for line in report] == ["attention"]
    assert "attention of float32[8, 16, 2048, 2048]: by its kernels: no weights in memory, 2.00 GiB" in str(report)


def by_hand_of(n):
    def attend(q, k, v):
        scores = jnp.einsum("bihd,bjhd->bhij", q, k).astype(jnp.float32) / 4
        weights = jax.nn.softmax(jnp.where(jnp.tri(n, dtype=bool), scores, -jnp.inf))
        return jnp.einsum("bhij,bjhd->bihd", weights.astype(v.dtype), v)

    return attend


@pytest.mark.parametrize(
    "shape,is_found",
    [((8, 2048, 16, 64), True), ((4, 4096, 16, 128), True), ((1, 64, 1, 64), False), ((8, 32, 16, 64), False)],
)
def test_short_sequences_stay_as_they_are(shape, is_found):
    """Who is faster is a matter of tiles, bytes and how many blocks there are."""
    report = fuse(by_hand_of(shape[1])).explain(*[jax.ShapeDtypeStruct(shape, jnp.bfloat16)] * 3)
    assert [line.op == "attention" for line in report] == [is_found]


def test_a_program_without_our_operators_is_not_lowered_instead():
    """Where attention is all that is found, the program of jax.nn is not the faster one."""
    operands = [jnp.ones((8, 512, 16, 64), jnp.bfloat16)] * 3
    lowered = jax.jit(fuse(jax_nn)).trace(*operands).lower(lowering_platforms=("cuda",))
    assert "jax_softmax_attention" in lowered.as_text()
    assert jax_softmax.fuse(jax_nn)(*operands).shape == operands[0].shape  # here, too
