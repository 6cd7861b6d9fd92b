"""Operands of linear_cross_entropy, and the losses that are expected of them, in jax.numpy."""

import jax
import jax.numpy as jnp
import numpy as np
from support import normal

TOKENS, FEATURES, VOCABULARY = 11, 5, 9


def operands(dtype="float32", tokens=(TOKENS,), features=FEATURES, vocabulary=VOCABULARY):
    """x, w, labels of which some are ignored, and a bias."""
    labels = np.random.default_rng(2).integers(-1, vocabulary + 1, tokens)
    x, w = normal((*tokens, features), dtype, scale=1.0), normal((features, vocabulary), dtype, seed=1, scale=1.0)
    return x, w, labels, normal((vocabulary,), dtype, seed=3)


def probabilities(dtype="float32", tokens=(TOKENS,), vocabulary=VOCABULARY):
    """Of classes along the last axis; some are 0, and so are all of the first token."""
    p = np.exp(normal((*tokens, vocabulary), "float64", seed=5, scale=2.0))
    p /= p.sum(-1, keepdims=True)
    p[p < 0.05], p[(0,) * len(tokens)] = 0, 0
    return p.astype(dtype)


def expected_losses(logits, labels, weights=1.0, label_smoothing=0.0, z_loss=0.0, soft_cap=None, temperature=1.0):
    """In jax.numpy, of x·w + bias, and labels that are classes or probabilities."""
    if soft_cap is not None:
        logits = soft_cap * jnp.tanh(logits / soft_cap)
    logits = logits / temperature
    lse, n, found = jax.nn.logsumexp(logits, -1), logits.shape[-1], jnp.full(logits.shape[:-1], True)
    if jnp.issubdtype(labels.dtype, jnp.integer):
        found = (labels >= 0) & (labels < n)
        labels = jax.nn.one_hot(labels, n, dtype=logits.dtype)
    labels = (1 - label_smoothing) * labels + label_smoothing / n
    losses = jnp.sum(labels * (lse[..., None] - logits), -1) + z_loss * lse**2
    weights = jnp.where(found, weights, 0)
    return jnp.where(found, losses, 0) * weights, weights


def expected_loss(logits, labels, reduction="mean", **options):
    losses, weights = expected_losses(logits, labels, **options)
    if reduction is None:
        return losses
    return losses.sum() / (jnp.where(weights.sum() == 0, 1, weights.sum()) if reduction == "mean" else 1)
