"""Attention, losses and models as people write them with jax.nn, Flax, optax, Equinox or Haiku: what `fuse` is
measured and tested with. Only `cross_entropy_loss` is this package's.

Most are in bfloat16. A layer is value and cotangents, a loss value and gradient, as in training.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import gpt_model
import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import Partial

import jax_softmax


class Computation(NamedTuple):
    name: str
    function: Callable
    arguments: Callable  # makes the function's arguments of a key and sizes
    sizes: tuple
    small_sizes: tuple
    precision: str = "bfloat16"  # of the arithmetic: results of other dtypes are no more precise
    package: str | None = None  # that must be installed
    inner: Callable | None = None  # the same, of which a part alone is fused

    @property
    def fused(self) -> Callable:
        return self.inner or jax_softmax.fuse(self.function)

    def make_args(self, key: jax.Array) -> tuple:
        return self.arguments(key, *self.sizes)

    def make_small_args(self, key: jax.Array) -> tuple:
        return self.arguments(key, *self.small_sizes)


# How far results may be apart, relative to the largest of an array: a few roundings, in a float32 loss of many. GPUs
# round operands of float32 products to tf32.
TOLERANCES = {"bfloat16": 0.05, "tf32": 1e-3, "float32": 1e-4}
# How many of the results that are integers, counts or indices, may differ: by a rounding another element is the one.
MOST_OTHER_INTEGERS = 0.01


def largest_difference(computation: Computation, actual: Any, expected: Any) -> float:
    """Of a computation's results, in units of what is allowed: more than 1 is an error."""
    differences = jax.tree.map(
        functools.partial(_difference, precision=computation.precision), actual, expected
    )  # raises where the results' structures differ
    return max(map(float, jax.tree.leaves(differences)))


@functools.partial(jax.jit, static_argnames="precision")
def _difference(actual, expected, precision):
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return jnp.inf
    if not jnp.issubdtype(expected.dtype, jnp.floating):
        return jnp.mean(actual != expected) / MOST_OTHER_INTEGERS
    tolerance = max(TOLERANCES[precision], TOLERANCES[expected.dtype.name])
    actual, expected = actual.astype(jnp.float32), expected.astype(jnp.float32)
    same = (actual == expected) | (jnp.isnan(actual) & jnp.isnan(expected))
    apart = jnp.where(same, 0, jnp.abs(actual - expected)) / (tolerance * jnp.max(jnp.abs(expected)))
    return jnp.max(jnp.where(same, 0, jnp.nan_to_num(apart, nan=jnp.inf, posinf=jnp.inf)))


def normal(key, *shapes, scale=1.0):
    """An array of bfloat16 of each shape."""
    return _normal(key, shapes, scale)


@functools.partial(jax.jit, static_argnames="shapes")
def _normal(key, shapes, scale):
    scale = jnp.bfloat16(scale)
    keys = jax.random.split(key, len(shapes))
    return [scale * jax.random.normal(k, shape, jnp.bfloat16) for k, shape in zip(keys, shapes, strict=True)]


def forward_and_backward(layer):
    """The layer's result, and the cotangents of its first argument, which may be several arrays."""

    def function(inputs, cotangent, *others):
        result, pullback = jax.vjp(lambda inputs: layer(inputs, *others), inputs)
        return result, pullback(cotangent)[0]

    return function


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


# ---- Losses of bfloat16 logits, in float32

LOGITS = 8192, 50257
FEWER_LOGITS = 4096, 50257
SMALL_LOGITS = 6, 31


def logits_and_labels(key, rows, classes):
    (logits,) = normal(key, (rows, classes), scale=3.0)
    return logits, jax.random.randint(jax.random.fold_in(key, 1), (rows,), 0, classes)


def at_labels(values, labels):
    return jnp.take_along_axis(values, labels[..., None], axis=-1)[..., 0]


def log_softmax_loss(logits, labels):
    return -at_labels(jax.nn.log_softmax(logits.astype(jnp.float32)), labels).mean()


def optax_loss(logits, labels):
    import optax

    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels).mean()


def one_hot_loss(logits, labels):
    import optax

    targets = jax.nn.one_hot(labels, logits.shape[-1])
    return optax.softmax_cross_entropy(logits.astype(jnp.float32), targets).mean()


def smoothed_loss(logits, labels):
    import optax

    targets = optax.smooth_labels(jax.nn.one_hot(labels, logits.shape[-1]), 0.1)
    return optax.softmax_cross_entropy(logits.astype(jnp.float32), targets).mean()


def our_loss(logits, labels):
    return jax_softmax.cross_entropy_loss(logits, labels)


def our_loss_cast(logits, labels):
    return jax_softmax.cross_entropy_loss(logits.astype(jnp.float32), labels)


def gemma_loss(logits, labels):
    """Of logits with a soft cap, as Gemma 2 has them."""
    return optax_loss(30 * jnp.tanh(logits / 30), labels)


def exponentials(x):
    """Of a softmax that is written out: the rows' maxima, x less these, and the sums."""
    largest = x.max(-1, keepdims=True)
    e = jnp.exp(x - largest)
    return largest, e, e.sum(-1, keepdims=True)


@jax.custom_vjp
def soft_loss_with_z(logits, targets, z):
    lse = jax.scipy.special.logsumexp(logits, -1, keepdims=True)
    return z * lse[..., 0] ** 2 - jnp.sum(targets * (logits - lse), -1)


def _soft_loss_with_z_forward(logits, targets, z):
    largest, e, total = exponentials(logits)
    lse = (jnp.log(total) + largest)[..., 0]
    loss = z * lse**2 - jnp.sum(targets * (logits - largest - jnp.log(total)), -1)
    return loss, (targets, z, e, total, lse)


def _soft_loss_with_z_backward(kept, cotangent):
    targets, z, e, total, lse = kept
    return cotangent[..., None] * ((1 + 2 * z * lse)[..., None] * e / total - targets), None, None


soft_loss_with_z.defvjp(_soft_loss_with_z_forward, _soft_loss_with_z_backward)


def t5x_loss(logits, labels):
    """As T5X and MaxText write it out, with its derivative."""
    targets = jax.nn.one_hot(labels, logits.shape[-1])
    return soft_loss_with_z(logits.astype(jnp.float32), targets, 1e-4).mean()


def head_arguments(key, rows, classes, features):
    x, matrix, bias = normal(key, (rows, features), (features, classes), (classes,))
    return (matrix * features**-0.5, bias, x), jax.random.randint(jax.random.fold_in(key, 1), (rows,), 0, classes)


def head_loss(parameters, labels):
    """Of a layer with a bias, and of smoothed labels, as Flax's translation has them."""
    matrix, bias, x = parameters
    logits = (x @ matrix + bias).astype(jnp.float32)
    is_label = labels[:, None] == jnp.arange(logits.shape[-1]).reshape(1, -1)
    low = 0.1 / (logits.shape[-1] - 1)
    targets = jax.lax.select(is_label, jnp.full(is_label.shape, 0.9), jnp.full(is_label.shape, low))
    return -jnp.sum(targets * jax.nn.log_softmax(logits), -1).mean()


def ppo_arguments(key, rows, classes):
    logits, actions = logits_and_labels(key, rows, classes)
    noise, advantages = jax.random.normal(jax.random.fold_in(key, 2), (2, rows))
    old = log_probabilities(logits, actions) + 0.2 * noise
    return logits, actions, old, advantages


def ppo_loss(logits, actions, old, advantages):
    logits = logits.astype(jnp.float32)
    log_p = jax.nn.log_softmax(logits)
    entropy = -jnp.sum(jax.nn.softmax(logits) * log_p, axis=-1)
    return -jnp.mean(clipped_surrogate(at_labels(log_p, actions) - old, advantages) + 0.01 * entropy)


def clipped_surrogate(log_ratio, advantages):
    ratio = jnp.exp(log_ratio)
    return jnp.minimum(ratio * advantages, jnp.clip(ratio, 0.8, 1.2) * advantages)


def log_probabilities(logits, tokens):
    return at_labels(jax.nn.log_softmax(logits.astype(jnp.float32)), tokens)


SEQUENCES = 8, 512, 50257
SMALL_SEQUENCES = 4, 8, 31


def sequences(key, batch, length, classes):
    """Logits, the tokens that were chosen, and 1 where a token counts, 0 in the padding behind a sequence."""
    logits, tokens = logits_and_labels(key, batch * length, classes)
    lengths = jax.random.randint(jax.random.fold_in(key, 2), (batch, 1), length // 2, length + 1)
    mask = (jnp.arange(length) < lengths).astype(jnp.float32)
    return logits.reshape(batch, length, classes), tokens.reshape(batch, length), mask


def dpo_arguments(key, batch, length, classes):
    logits, tokens, mask = sequences(key, batch, length, classes)
    (noise,) = normal(jax.random.fold_in(key, 3), logits.shape, scale=0.1)
    return logits, tokens, mask, logits + noise


def dpo_loss(logits, tokens, mask, reference_logits):
    """The first half of the sequences are the chosen answers, the second half the rejected ones."""
    policy = jnp.sum(log_probabilities(logits, tokens) * mask, axis=-1)
    reference = jnp.sum(log_probabilities(reference_logits, tokens) * mask, axis=-1)
    chosen, rejected = jnp.split(policy - reference, 2)
    return -jax.nn.log_sigmoid(0.1 * (chosen - rejected)).mean()


def grpo_arguments(key, batch, length, classes):
    logits, tokens, mask = sequences(key, batch, length, classes)
    noise = jax.random.normal(jax.random.fold_in(key, 3), (2, batch, length))
    old, reference = log_probabilities(logits, tokens) + 0.2 * noise
    rewards = jax.random.normal(jax.random.fold_in(key, 4), (batch,))
    return logits, tokens, mask, old, reference, rewards


def grpo_loss(logits, tokens, mask, old, reference, rewards):
    groups = rewards.reshape(-1, 4)  # four answers to each question
    advantages = (groups - groups.mean(-1, keepdims=True)) / (groups.std(-1, keepdims=True) + 1e-4)
    log_p = log_probabilities(logits, tokens)
    divergence = jnp.exp(reference - log_p) - (reference - log_p) - 1
    gain = clipped_surrogate(log_p - old, advantages.reshape(-1, 1)) - 0.04 * divergence
    return -jnp.sum(gain * mask) / jnp.sum(mask)


def distillation_arguments(key, rows, classes):
    return tuple(normal(key, (rows, classes), (rows, classes), scale=3.0))


def distillation_loss(student, teacher):
    temperature = 2.0
    student, teacher = (logits.astype(jnp.float32) / temperature for logits in (student, teacher))
    difference = jax.nn.log_softmax(teacher) - jax.nn.log_softmax(student)
    return temperature**2 * jnp.sum(jax.nn.softmax(teacher) * difference, axis=-1).mean()


def arrays_and_cotangents(key, rows, columns):
    (x, cotangent) = normal(key, (rows, columns), (rows, columns), scale=3.0)
    return x.astype(jnp.float32), cotangent.astype(jnp.float32)


def softmax_written_out(x):
    _, e, total = exponentials(x)
    return e / total


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
    return optax_loss(gpt_model.logits_of(parameters, tokens, gpt_model.softmax_with_fill), labels)


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
