"""Attention, losses and models as people write them with jax.nn, Flax, optax, Equinox or Haiku: what `fuse` is
measured and tested with. Only `cross_entropy_loss` is this package's.

Most are in bfloat16. A layer is value and cotangents, a loss value and gradient, as in training.
"""

import functools

import gpt_model
import jax
import jax.numpy as jnp
import numpy as np
from computation import Computation, forward_and_backward, normal
from jax.tree_util import Partial
from their_losses import (
    FEWER_LOGITS,
    LOGITS,
    SEQUENCES,
    SMALL_LOGITS,
    SMALL_SEQUENCES,
    arrays_and_cotangents,
    at_labels,
    distillation_arguments,
    distillation_loss,
    dpo_arguments,
    dpo_loss,
    gemma_loss,
    grpo_arguments,
    grpo_loss,
    head_arguments,
    head_loss,
    log_softmax_loss,
    logits_and_labels,
    one_hot_loss,
    optax_loss,
    our_loss,
    our_loss_cast,
    ppo_arguments,
    ppo_loss,
    smoothed_loss,
    softmax_written_out,
    t5x_loss,
)

import jax_softmax

# ---- Attention written by hand. Sizes are batch, length, heads, features.

ATTENTION = 8, 2048, 16, 64
SHORTER_ATTENTION = 8, 1024, 16, 64
SMALL_ATTENTION = 2, 16, 4, 8


def queries_keys_values(key, *sizes):
    *inputs, cotangent = normal(key, *[sizes] * 4)
    return tuple(inputs), cotangent


def queries_keys_values_bias(key, batch, length, heads, features):
    inputs, cotangent = queries_keys_values(key, batch, length, heads, features)
    (bias,) = normal(jax.random.fold_in(key, 1), (1, heads, length, length))
    return (*inputs, bias), cotangent


def scores_of(q, k):
    return jnp.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5


def causal_fill(scores):
    causal = jnp.tri(scores.shape[-1], dtype=bool)
    return jnp.where(causal, scores, jnp.finfo(scores.dtype).min)


def weighted(weights, v):
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v)


def attention(inputs):
    q, k, v = inputs
    return weighted(jax.nn.softmax(causal_fill(scores_of(q, k))), v)


def attention_float32(inputs):
    q, k, v = inputs
    weights = jax.nn.softmax(causal_fill(scores_of(q, k).astype(jnp.float32)))
    return weighted(weights.astype(v.dtype), v)


def attention_bias(inputs):
    q, k, v, bias = inputs
    return weighted(jax.nn.softmax(causal_fill(scores_of(q, k) + bias)), v)


def attention_tanh_cap(inputs):
    q, k, v = inputs
    return weighted(jax.nn.softmax(causal_fill(50 * jnp.tanh(scores_of(q, k) / 50))), v)


# ---- Without a gradient


def scaled_arguments(key, rows, columns):
    return tuple(normal(key, (rows, columns), (columns,)))


def scaled_softmax(x, bias):
    return jax.nn.softmax(x * 0.125 + bias).astype(jnp.float32) * 2


def sampling_arguments(key, rows, classes):
    (logits,) = normal(key, (rows, classes), scale=3.0)
    return logits, jax.random.fold_in(key, 1)


def sampling(logits, key):
    """A token for each row, and the logarithm of its probability."""
    log_p = jax.nn.log_softmax(logits.astype(jnp.float32) / 0.7)
    tokens = jax.random.categorical(key, log_p)
    return tokens, at_labels(log_p, tokens)


def gate_arguments(key, tokens, experts):
    return tuple(normal(key, (tokens, experts)))


def mixture_gate(logits):
    """The two experts of each token, and their weights."""
    weights, experts = jax.lax.top_k(jax.nn.softmax(logits.astype(jnp.float32)), 2)
    return weights / weights.sum(-1, keepdims=True), experts


# ---- A whole model


def gpt_arguments(key, *size):
    return gpt_model.initial_arguments(key, gpt_model.Size(*size))


def gpt_loss(parameters, tokens, labels):
    return optax_loss(gpt_model.logits_of(parameters, tokens), labels)


# ---- jax.nn's attention


def jax_bias_mask(inputs):
    q, k, v, bias = inputs
    mask = jnp.tri(q.shape[1], dtype=bool)[None, None]
    return jax.nn.dot_product_attention(q, k, v, bias, mask, implementation="xla")


def jax_causal(inputs):
    return jax.nn.dot_product_attention(*inputs, is_causal=True, implementation="xla")


def jax_window(inputs):
    window = inputs[0].shape[1] // 4, 0
    return jax.nn.dot_product_attention(*inputs, local_window_size=window, implementation="xla")


# ---- Layers of packages. An argument is the layer with its parameters, as a function that is a pytree. Their
# projections have no biases: the gradient of the keys' is 0, so that nothing but roundings would be compared.


def apply(inputs, key):
    layer, x = inputs
    return layer(x, key)


def layer_arguments(key, function, parameters, shape):
    """Of `apply`, for a function of parameters, x and a key for dropout."""
    x, cotangent = normal(key, shape, shape)
    return (Partial(function, parameters), x), cotangent, key


def nnx_arguments(key, batch, length, heads, features):
    from flax import nnx

    width = heads * features
    options = {"dtype": jnp.bfloat16, "use_bias": False, "decode": False}
    model = nnx.MultiHeadAttention(heads, width, **options, rngs=nnx.Rngs(key))
    graph, parameters, rest = nnx.split(model, nnx.Param, ...)

    def function(parameters, x, _):
        model = nnx.merge(graph, parameters, rest)
        return model(x, mask=nnx.make_causal_mask(x[..., 0]))

    return layer_arguments(key, function, parameters, (batch, length, width))


def nnx_bias_dropout(inputs, key):
    from flax import nnx

    q, k, v, bias = inputs
    mask = nnx.make_causal_mask(jnp.ones(q.shape[:2]))
    return nnx.dot_product_attention(q, k, v, bias, mask, dropout_rng=key, dropout_rate=0.1)


def queries_keys_values_bias_key(key, *sizes):
    return *queries_keys_values_bias(key, *sizes), key


def linen_arguments(key, batch, length, heads, features, dropout=0.0, float32_softmax=False):
    from flax import linen

    options = {"dropout_rate": dropout, "force_fp32_for_softmax": float32_softmax}
    model = linen.MultiHeadDotProductAttention(heads, dtype=jnp.bfloat16, use_bias=False, **options)

    def function(parameters, x, key):
        mask = linen.make_causal_mask(x[..., 0])
        return model.apply(parameters, x, mask=mask, deterministic=False, rngs={"dropout": key})

    shape = batch, length, heads * features
    parameters = model.init(key, jnp.zeros(shape, jnp.bfloat16), deterministic=True)
    return layer_arguments(key, function, parameters, shape)


def linen_bias(inputs):
    from flax import linen

    q, k, v, bias = inputs
    return linen.dot_product_attention(q, k, v, bias, linen.make_causal_mask(jnp.ones(q.shape[:2])))


def equinox_arguments(key, batch, length, heads, features):
    import equinox

    width = heads * features
    model = equinox.nn.MultiheadAttention(heads, width, dtype=jnp.bfloat16, key=key)
    parameters, rest = equinox.partition(model, equinox.is_array)

    def function(parameters, x, _):
        model = equinox.combine(parameters, rest)
        mask = jnp.tri(length, dtype=bool)
        return jax.vmap(lambda x: model(x, x, x, mask))(x)

    return layer_arguments(key, function, parameters, (batch, length, width))


def haiku_arguments(key, batch, length, heads, features):
    import haiku

    @haiku.without_apply_rng
    @haiku.transform
    def model(x):
        scaling = haiku.initializers.VarianceScaling()
        layer = haiku.MultiHeadAttention(heads, features, w_init=scaling, with_bias=False)
        return layer(x, x, x, jnp.tri(length, dtype=bool)[None, None])

    shape = batch, length, heads * features
    parameters = model.init(key, jnp.zeros(shape, jnp.bfloat16))
    return layer_arguments(key, lambda parameters, x, _: model.apply(parameters, x), parameters, shape)


# ---- Attention as in published models


def gemma_arguments(key, batch, length, heads, features):
    """With half as many keys and values as queries."""
    many, few = (batch, length, heads, features), (batch, length, heads // 2, features)
    *inputs, cotangent = normal(key, many, few, few, many)
    return tuple(inputs), cotangent


def gemma_attention(inputs):
    """Gemma 2's, in a layer with a sliding window: a soft cap, and a fill that is finite."""
    q, k, v = inputs
    batch, length, heads, features = q.shape
    q = (q * features**-0.5).reshape(batch, length, k.shape[2], -1, features)
    scores = jnp.einsum("btkgh,bskh->btkgs", q, k).reshape(batch, length, heads, length)
    scores = 50 * jnp.tanh(scores / 50)
    age = jnp.arange(length)[:, None] - jnp.arange(length)
    visible = (age >= 0) & (age < length // 2)
    weights = jax.nn.softmax(jnp.where(visible[:, None], scores, -2.3819763e38), axis=-1).astype(v.dtype)
    weights = weights.reshape(batch, length, k.shape[2], -1, length)
    return jnp.einsum("btkgs,bskh->btkgh", weights, v).reshape(batch, length, heads, features)


def alphafold_arguments(key, rows, length, heads, features):
    keys = jax.random.split(key, 3)
    width = heads * features
    x, cotangent, pair_bias = normal(keys[0], (rows, length, width), (rows, length, width), (heads, length, length))
    matrices = normal(keys[1], *[(width, heads, features)] * 4, (heads, features, width), scale=width**-0.5)
    parameters = dict(zip(("query", "key", "value", "gate", "output"), matrices, strict=True))
    mask = jax.random.bernoulli(keys[2], 0.9, (rows, length)).astype(jnp.bfloat16)
    return (parameters, x, pair_bias), cotangent, mask


def alphafold_attention(inputs, mask):
    """The gated attention of AlphaFold 2, with a bias for each pair of residues."""
    parameters, x, pair_bias = inputs
    q, k, v, gate = (jnp.einsum("bqa,ahc->bqhc", x, parameters[name]) for name in ("query", "key", "value", "gate"))
    q *= q.shape[-1] ** -0.5
    logits = jnp.einsum("bqhc,bkhc->bhqk", q, k) + (1e9 * (mask - 1))[:, None, None, :]
    logits += jnp.expand_dims(pair_bias, axis=0)
    average = weighted(jax.nn.softmax(logits), v) * jax.nn.sigmoid(gate)
    return jnp.einsum("bqhc,hca->bqa", average, parameters["output"])


def t5_arguments(key, batch, length, heads, features):
    inputs, cotangent = queries_keys_values(key, batch, length, heads, features)
    embedding = jax.random.normal(jax.random.fold_in(key, 1), (32, heads))
    return (*inputs, embedding), cotangent


def t5_buckets(length, buckets=32, most=128):
    """Of a decoder: one for each of the nearest positions, and others for ranges that grow with the distance."""
    distance = jnp.maximum(jnp.arange(length)[:, None] - jnp.arange(length), 0)
    exact = buckets // 2
    growth = jnp.log(distance / exact + np.finfo(np.float32).eps) / np.log(most / exact)
    far = exact + (growth * (buckets - exact)).astype(jnp.int32)
    return jnp.where(distance < exact, distance, jnp.minimum(far, buckets - 1))


def t5_attention(inputs):
    """As T5X has it: a bias by how far apart two positions are, and one of -1e10 for those that come later."""
    q, k, v, embedding = inputs
    length = q.shape[1]
    buckets = jax.nn.one_hot(t5_buckets(length), len(embedding), dtype=q.dtype)
    bias = jnp.einsum("qkb,bh->hqk", buckets, embedding.astype(q.dtype))[None]
    bias += jnp.where(jnp.tri(length, dtype=bool), 0, -1e10).astype(q.dtype)
    scores = jnp.einsum("bqhd,bkhd->bhqk", q * q.shape[-1] ** -0.5, k) + bias
    return weighted(jax.nn.softmax(scores).astype(v.dtype), v)


# ---- All of them


def layer(name, function, arguments=queries_keys_values, sizes=SHORTER_ATTENTION, package=None):
    return Computation(name, forward_and_backward(function), arguments, sizes, SMALL_ATTENTION, package=package)


def loss(name, function, arguments=logits_and_labels, sizes=LOGITS, small_sizes=SMALL_LOGITS, package=None):
    return Computation(name, jax.value_and_grad(function), arguments, sizes, small_sizes, "float32", package)


COMPUTATIONS = [
    layer("attention", attention, sizes=ATTENTION),
    layer("attention_float32", attention_float32, sizes=ATTENTION),
    layer("attention_float32, derivative of fused", attention_float32, sizes=ATTENTION)._replace(
        inner=forward_and_backward(jax_softmax.fuse(attention_float32))
    ),
    layer("attention_bias", attention_bias, queries_keys_values_bias, ATTENTION),
    layer("attention_tanh_cap", attention_tanh_cap, sizes=ATTENTION),
    loss("loss_log_softmax", log_softmax_loss),
    loss("loss_log_softmax, derivative of fused", log_softmax_loss)._replace(
        inner=jax.value_and_grad(jax_softmax.fuse(log_softmax_loss))
    ),
    loss("loss_optax", optax_loss, package="optax"),
    loss("loss_one_hot", one_hot_loss, package="optax"),
    loss("loss_smoothed", smoothed_loss, package="optax"),
    loss("cross_entropy_loss", our_loss),
    loss("cross_entropy_loss_cast", our_loss_cast),
    loss("loss_t5x", t5x_loss, sizes=(8192, 50304)),
    loss("head_with_bias", head_loss, head_arguments, (4096, 32000, 512), (6, 31, 8))._replace(precision="bfloat16"),
    Computation(
        "softmax_written_out",
        forward_and_backward(softmax_written_out),
        arrays_and_cotangents,
        (16384, 4096),
        (6, 31),
        "float32",
    ),
    Computation("scaled_softmax", scaled_softmax, scaled_arguments, (16384, 4096), (6, 31)),
    Computation("sampling", sampling, sampling_arguments, (64, 151936), (6, 31), "float32"),
    Computation("mixture_gate", mixture_gate, gate_arguments, (131072, 64), (31, 8), "float32"),
    Computation(
        "gpt",
        jax.value_and_grad(gpt_loss),
        gpt_arguments,
        gpt_model.FULL,
        gpt_model.Size(layers=1, width=16, heads=2, batch=2, length=16, vocabulary=40),
        package="optax",
    ),
    layer("jax_bias_mask", jax_bias_mask, queries_keys_values_bias),
    layer("jax_causal", jax_causal),
    layer("jax_window", jax_window),
    layer("nnx_mask", apply, nnx_arguments, package="flax"),
    layer("nnx_bias_dropout", nnx_bias_dropout, queries_keys_values_bias_key, package="flax"),
    layer("linen_mask", apply, linen_arguments, package="flax"),
    layer(
        "linen_float32_dropout",
        apply,
        functools.partial(linen_arguments, dropout=0.1, float32_softmax=True),
        package="flax",
    ),
    layer("linen_bias", linen_bias, queries_keys_values_bias, package="flax"),
    layer("equinox", apply, equinox_arguments, package="equinox"),
    layer("haiku", apply, haiku_arguments, package="haiku"),
    layer("gemma_attention", gemma_attention, gemma_arguments),
    loss("gemma_loss", gemma_loss, sizes=(2048, 256000), package="optax")._replace(precision="bfloat16"),
    layer("alphafold", alphafold_attention, alphafold_arguments, (256, 256, 8, 32)),
    layer("t5", t5_attention, t5_arguments),
    loss("ppo", ppo_loss, ppo_arguments, FEWER_LOGITS),
    loss("dpo", dpo_loss, dpo_arguments, SEQUENCES, SMALL_SEQUENCES),
    loss("grpo", grpo_loss, grpo_arguments, SEQUENCES, SMALL_SEQUENCES),
    loss("distillation", distillation_loss, distillation_arguments, FEWER_LOGITS),
]
