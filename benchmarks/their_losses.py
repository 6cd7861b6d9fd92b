"""Losses of bfloat16 logits, in float32, as people write them with jax.nn and optax, and a softmax written out."""

import jax
import jax.numpy as jnp
from computation import normal

import jax_softmax

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
