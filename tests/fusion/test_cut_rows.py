"""Losses of logits whose first or last rows are cut off, as language models have them: one kernel of all rows."""

import emulated
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import support
from by_numpy import by_numpy
from rule_programs import array, log_softmax, logsumexp, softmax, weights

from jax_softmax import fuse

B, S, V = 3, 6, 24
X = array(B, S, V)
TOKENS = np.random.default_rng(0).integers(0, V, (B, S)).astype(np.int32)
MASK = support.random_mask((B, S - 1), 3, 0.7)


def at(lp, labels):
    return jnp.take_along_axis(lp, labels[..., None], -1)[..., 0]


def losses(x, labels):
    return -at(log_softmax(x), labels)


def flat(x, labels):
    return losses(x.reshape(-1, V), labels.reshape(-1))


def smoothed(x, labels):
    targets = 0.9 * jax.nn.one_hot(labels, V) + 0.1 / V
    return -jnp.sum(targets * log_softmax(x), -1)


def written_out(x, labels):
    shifted = x - jax.lax.stop_gradient(jnp.max(x, -1, keepdims=True))
    return jnp.log(jnp.sum(jnp.exp(shifted), -1)) - at(shifted, labels)


def other():
    return jnp.asarray(array(B, S, V, seed=1))[:, :-1]


def divergence(log_p, log_q):
    return jnp.sum(jnp.exp(log_p) * (log_p - log_q), -1)


def mean_of(f, weights=None):
    """Of losses whose labels are the next tokens."""

    def mean(x, tokens):
        of_each = f(x[:, :-1].astype(jnp.float32), tokens[:, 1:])
        return of_each.mean() if weights is None else (of_each * weights).sum() / weights.sum()

    return mean


PROGRAMS = {
    "take_along_axis": mean_of(losses),
    "with a mask": mean_of(losses, MASK),
    "flat": mean_of(flat),
    "one-hot": mean_of(lambda x, t: -jnp.sum(jax.nn.one_hot(t, V) * log_softmax(x), -1)),
    "one-hot, summed at once": lambda x, t: -jnp.sum(jax.nn.one_hot(t[:, 1:], V) * log_softmax(x[:, :-1])) / B,
    "one-hot, in a product": mean_of(lambda x, t: -jnp.einsum("btv,btv->bt", jax.nn.one_hot(t, V), log_softmax(x))),
    "label smoothing": mean_of(smoothed),
    "written out": mean_of(written_out),
    "normalizer and element": mean_of(lambda x, t: logsumexp(x, -1) - at(x, t)),
    "with a regularizer": mean_of(lambda x, t: losses(x, t) + 1e-2 * logsumexp(x, -1) ** 2),
    "cut behind the cast": lambda x, t: losses(x.astype(jnp.float32)[:, :-1], t[:, 1:]).mean(),
    "first rows": lambda x, t: losses(x[:, 1:], t[:, :-1]).mean(),
    "both ends": lambda x, t: losses(x[:, 1:-1], t[:, 2:]).mean(),
    "mapped": lambda x, t: jax.vmap(lambda x, t: losses(x[:-1], t[1:]).mean())(x, t).mean(),
    "mapped over elements": mean_of(lambda x, t: -jax.vmap(jax.vmap(lambda row, k: row[k]))(log_softmax(x), t)),
    "first dimension": lambda x, t: losses(x.swapaxes(0, 1)[:-1], t.T[1:]).mean(),
    "each": lambda x, t: losses(x[:, :-1], t[:, 1:]),
    "a policy's, with its entropy": mean_of(lambda x, t: losses(x, t) + 0.1 * jnp.sum(softmax(x) * log_softmax(x), -1)),
    "a teacher's probabilities": lambda x, t: -jnp.sum(softmax(other() / 2) * log_softmax(x[:, :-1] / 2), -1).mean(),
    "a divergence from another policy": lambda x, t: divergence(log_softmax(x[:, :-1]), log_softmax(other())).mean(),
    "a preference": lambda x, t: (jnp.tanh(losses(x[:, :-1], t[:, 1:]) - losses(other(), t[:, 1:])) * MASK).sum(-1),
    "scaled before": mean_of(lambda x, t: losses(jnp.tanh(x / 30) * 30 / 0.7, t)),
    "by its own index": lambda x, t: losses(x[:, 1:] * jnp.arange(S - 1)[:, None], t[:, 1:]).mean(),
    "a learned number for each token": mean_of(lambda x, t: losses(x + jnp.cos(jnp.arange(V)), t)),
}


def both(f):
    def weighted(x, tokens):
        y = f(x, tokens)
        return jnp.sum(y * weights(y.shape)), y

    return lambda x, tokens: jax.value_and_grad(weighted, has_aux=True)(x, tokens)


def lines_of(f, *operands):
    with emulated.kernels():
        return list(fuse(f).explain(*operands))


@pytest.mark.parametrize("name", PROGRAMS)
def test_kernels_are_of_all_rows(name):
    for f in (PROGRAMS[name], both(PROGRAMS[name])):
        lines = lines_of(f, X, TOKENS)
        assert lines
        for line in lines:
            assert np.prod(line.shape) == X.size
            assert not {"slice", "pad"}.intersection(line.outside)


@emulated.compiler_is_needed
@pytest.mark.usefixtures("default_flags")
def test_numbers():
    """What has been cut off may be NaN."""
    x = X.copy()
    x[:, 0, 3] = x[:, -1, 5] = np.nan
    operands = {name: x if name == "both ends" else np.nan_to_num(x) for name in PROGRAMS}
    for name, end in (("take_along_axis", -1), ("flat", -1), ("written out", -1), ("first rows", 0)):
        operands[name] = np.where(np.arange(S)[:, None] == end % S, x, np.nan_to_num(x))
    kernels = emulated.kernels if jax.default_backend() == "cpu" else emulated.all_kernels
    with kernels():
        found = jax.jit(lambda: [fuse(both(f))(operands[name], TOKENS) for name, f in PROGRAMS.items()])()
    with jax.enable_x64(True):
        exact = [by_numpy(both(f), operands[name].astype(np.float64), TOKENS) for name, f in PROGRAMS.items()]
    for name, own, expected in zip(PROGRAMS, found, exact, strict=True):
        for a, b in zip(jax.tree.leaves(own), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(a, b, rtol=3e-5, atol=1e-5 * np.abs(b).max(), err_msg=name)


OTHERS = {
    "more than half is cut off": lambda x, t: losses(x[:, :2], t[:, 1:3]),
    "columns are cut off": lambda x, t: log_softmax(x[..., :-1]).sum(-1),
    "the result is large": lambda x, t: softmax(x[:, :-1]),
    "rows depend on each other": lambda x, t: jnp.cumsum(log_softmax(x[:, :-1]), 1).sum(-1),
    "softmax of the columns": lambda x, t: at(softmax(x[:, :-1], 1), t[:, 1:]),
    "every other row": lambda x, t: losses(x[:, ::2], t[:, ::2]),
    "two dimensions are cut": lambda x, t: losses(x[:-1, :-1], t[1:, 1:]),
    "by its own index": lambda x, t: losses(
        x[:, 1:] * jax.lax.broadcasted_iota(jnp.float32, (B, S - 1, V), 1), t[:, 1:]
    ),
    "no operator": lambda x, t: jnp.sin(x[:, :-1]).sum(-1),
}


@pytest.mark.parametrize("name", OTHERS)
def test_others_stay(name):
    x = jax.ShapeDtypeStruct(X.shape, X.dtype)
    assert all(line.shape != X.shape for line in lines_of(OTHERS[name], x, TOKENS))
