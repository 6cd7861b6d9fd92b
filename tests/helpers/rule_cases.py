"""`RULES`: for each rule of `fuse`, programs for which it holds, and others that only look as if it held for them."""

import jax
import jax.numpy as jnp
import numpy as np
from fusion_support import BF16, F32
from rule_programs import (
    LABELS,
    MASK,
    MASK2,
    OUTSIDE,
    ROWS,
    SOME_WITHOUT,
    WIDE,
    WITHOUT,
    N,
    X,
    Y,
    Z,
    added,
    added_one_by_one,
    array,
    at_labels,
    both,
    chosen,
    divergence,
    entropy,
    gradient,
    index,
    log_softmax,
    logsumexp,
    loss,
    one_hot,
    softmax,
    value,
    wide,
)
from written_out_cases import WRITTEN_OUT

import jax_softmax
from jax_softmax import fuse

ENTROPY_GRADIENT = "log_softmax_vjp softmax_and_normalizer"
RULES = {
    "cotangents of softmax and log_softmax": {
        "entropy": gradient(entropy, X, ops=ENTROPY_GRADIENT),
        "entropy, with its value": both(entropy, X, ops="log_softmax_vjp logsumexp"),
        "entropy of columns": gradient(lambda x: entropy(x, None, 0, 0, 0), X, ops=ENTROPY_GRADIENT),
        "policy and entropy": gradient(lambda x: at_labels(log_softmax(x), LABELS) + 0.3 * entropy(x), X),
        "log_softmax first": gradient(lambda x: jnp.sum(log_softmax(x) * softmax(x), -1), X),
        "of two arrays": gradient(lambda x, y: entropy(x, y), X, Y, by=(0, 1)),
        "of a shifted array": gradient(lambda x: entropy(x, x + Y), X),
        "along two axes": gradient(lambda x: entropy(x, None, 0, 1), X),
        "along two other axes": gradient(lambda x: entropy(x, None, 1, 0, 0), X),
        "cotangents that are read": gradient(lambda x: jax.grad(lambda x: jnp.sum(jnp.tanh(entropy(x))))(x), X),
        "a sum of results": gradient(lambda x: softmax(x) * Y + log_softmax(x) * Z, X),
        "a difference of results": gradient(lambda x: log_softmax(x) * Z - softmax(x) * Y, X),
        "masked": gradient(lambda x: jnp.where(MASK, softmax(x, where=MASK) * log_softmax(x), 0), X),
    },
    **WRITTEN_OUT,
    "divergences": {
        "of softmax": value(lambda x, y: divergence(softmax(x), log_softmax(x), log_softmax(y)), X, Y),
        "its gradient": gradient(lambda x, y: divergence(softmax(x), log_softmax(x), log_softmax(y)), X, Y, by=(0, 1)),
        "of exp": value(lambda x, y: divergence(jnp.exp(log_softmax(x)), log_softmax(x), log_softmax(y)), X, Y),
        "product turned": value(lambda x, y: jnp.sum((log_softmax(x) - log_softmax(y)) * softmax(x), -1), X, Y),
        "difference turned": value(lambda x, y: divergence(softmax(x), log_softmax(y), log_softmax(x)), X, Y),
        "of columns": value(lambda x, y: divergence(softmax(x, 0), log_softmax(x, 0), log_softmax(y, 0), 0), X, Y),
        "by another softmax": value(lambda x, y, z: divergence(softmax(z), log_softmax(x), log_softmax(y)), X, Y, Z),
        "by another exp": value(
            lambda x, y, z: divergence(jnp.exp(log_softmax(z)), log_softmax(x), log_softmax(y)), X, Y, Z
        ),
        "by q": value(lambda x, y: divergence(softmax(y), log_softmax(x), log_softmax(y)), X, Y),
        "by exp of q": value(lambda x, y: divergence(jnp.exp(log_softmax(y)), log_softmax(x), log_softmax(y)), X, Y),
        "by p along another axis": value(lambda x, y: divergence(softmax(x, 0), log_softmax(x), log_softmax(y)), X, Y),
        "with q along another axis": value(
            lambda x, y: divergence(softmax(x), log_softmax(x), log_softmax(y, 0)), X, Y
        ),
        "summed over another axis": value(lambda x, y: divergence(softmax(x), log_softmax(x), log_softmax(y), 0), X, Y),
        "a sum of logarithms": value(lambda x, y: jnp.sum(softmax(x) * (log_softmax(x) + log_softmax(y)), -1), X, Y),
        "of a masked q": value(
            lambda x, y: divergence(softmax(x), log_softmax(x), log_softmax(y, where=MASK2 | (y > 0))), X, np.abs(Y)
        ),
    },
    "made anew, two results": {
        "logarithms in two sums": value(lambda x: (jnp.sum(log_softmax(x) * Y, -1), jnp.sum(log_softmax(x) ** 2)), X),
        "logarithms that are scaled, and gathered": value(
            lambda x: jnp.take_along_axis(-log_softmax(x), LABELS[:, None], -1), X, ops="logsumexp"
        ),
        "logarithms that are shifted, for an operator": value(
            lambda x, y: logsumexp(log_softmax(x) + y, -1), X, Y, ops="logsumexp logsumexp"
        ),
        "logarithms that are written rounded": value(lambda x: log_softmax(x).astype(BF16), X, ops="log_softmax"),
        "logarithms that are written twice": value(
            lambda x: (log_softmax(x) * Y, log_softmax(x) + Z), X, ops="log_softmax"
        ),
        "logarithms that are written, and summed": value(
            lambda x: (log_softmax(x) * Y, jnp.sum(log_softmax(x) ** 2)), X, ops="logsumexp"
        ),
        "probabilities in two sums": value(lambda x: (jnp.sum(softmax(x) * Y, -1), jnp.sum(softmax(x) ** 2)), X),
        "probabilities of bfloat16": both(
            lambda x, y: jnp.sum(softmax(wide(x)) * Y, -1) + jnp.sum(softmax(wide(x)) * y), array(N, N, dtype=BF16), X
        ),
        "with -inf": both(
            lambda x: jnp.sum(jnp.where(x == -jnp.inf, 0, log_softmax(x)) * Y, -1) + (softmax(x) * Z).max(-1),
            SOME_WITHOUT,
        ),
        "kept for the derivative": gradient(
            lambda x, w: softmax(wide(x) * 3 - 1) @ w, array(N, N, dtype=BF16), Y, by=(0, 1)
        ),
        "columns, kept for the derivative": gradient(
            lambda x, w: softmax(wide(x) * 3 - 1, 0) @ w, array(N, N, dtype=BF16), Y, by=(0, 1)
        ),
        "kept for a product, the cotangent of another one": value(
            lambda x, y, w: (lambda p: (p @ w, jax.grad(lambda y: jnp.sum(softmax(y) * p))(y)))(softmax(wide(x) * 2)),
            array(N, N, dtype=BF16),
            Y,
            Z,
        ),
        "both": value(lambda x: (softmax(x * 2), log_softmax(x * 2)), X, ops="log_softmax"),
        "both along two axes": value(lambda x: (softmax(x, 0), log_softmax(x, 1)), X, ops="log_softmax softmax"),
        "both, twice": value(lambda x: (softmax(x, 0), log_softmax(x, 1), softmax(x, 1), log_softmax(x, 0)), X),
        "both of two arrays": value(lambda x: (softmax(x), log_softmax(2 * x)), X),
        "both with a mask": value(lambda x: (softmax(x, where=MASK), log_softmax(x), softmax(x)), X),
        "both with another mask": value(lambda x: (softmax(x), log_softmax(x, where=MASK)), X),
        "second derivatives": gradient(lambda x: jax.grad(lambda x: jnp.sum(jnp.sin(softmax(x)) * Y))(x), X),
        "second derivatives of logarithms": gradient(
            lambda x: jax.grad(lambda x: jnp.sum(jnp.sin(log_softmax(x)) * Y))(x), X
        ),
        "tangents": value(lambda x, t: jax.jvp(lambda x: (softmax(x) * Y, log_softmax(x) * Z), (x,), (t,)), X, Y),
    },
    "gradients of two directions": {
        "diagonals": both(
            lambda x: jnp.diag(log_softmax(x, 0)) + jnp.diag(log_softmax(x, 1)),
            X,
            ops="cross_entropy_gradient logsumexp",
        ),
        "of the transpose": both(
            lambda x: loss(x * 3, one_hot()) + loss((x * 3).T, one_hot(OUTSIDE)),
            X,
            ops="cross_entropy_gradient logsumexp",
        ),
        "with -inf": both(lambda x: jnp.diag(log_softmax(x, 0)) + jnp.diag(log_softmax(x, 1)), SOME_WITHOUT),
        "of bfloat16": gradient(
            lambda x: (lambda x: loss(x, one_hot()) + loss(x.T, one_hot()))(wide(x)), array(N, N, dtype=BF16)
        ),
        "of products": gradient(
            lambda x, y: (lambda s: loss(s, one_hot()) + loss(s.T, one_hot()))(x @ y.T), X, Y, by=(0, 1)
        ),
        "of one direction": gradient(
            lambda x: loss(x, one_hot()) + loss(x, one_hot(OUTSIDE)),
            X,
            ops="cross_entropy_gradient cross_entropy_gradient",
        ),
        "of two arrays": gradient(
            lambda x: loss(x, one_hot()) + loss(x.T * Y, one_hot()),
            X,
            ops="cross_entropy_gradient cross_entropy_gradient",
        ),
    },
    "one-hot targets": {
        "loss": both(lambda x: loss(x, one_hot()), X, ops="cross_entropy_gradient"),
        "loss alone": value(lambda x: loss(x, one_hot()), X, ops="cross_entropy"),
        "loss beside a product": value(lambda x: (log_softmax(x) @ Y, loss(x, one_hot())), X, ops="log_softmax"),
        "loss with +inf": value(
            lambda x: loss(x, one_hot()),
            np.where(np.eye(N, k=1) > 0, np.inf, X).astype(np.float32),
            ops="cross_entropy",
        ),
        "loss of bfloat16, widened": value(
            lambda x: -jnp.sum(one_hot() * log_softmax(x).astype(F32), -1), array(N, N, dtype=BF16), ops="cross_entropy"
        ),
        "of columns": both(lambda x: -jnp.sum(one_hot(axis=0) * log_softmax(x, 0), 0), X, ops="cross_entropy_gradient"),
        "probabilities": both(lambda x: jnp.sum(one_hot() * softmax(x), -1), X),
        "along two axes": both(lambda x: jnp.sum(one_hot(axis=0) * log_softmax(x, (0, 1)), 0), X),
        "along two axes, of rows": both(lambda x: jnp.sum(one_hot() * log_softmax(x, (0, 1)), 1), X),
        "negated": both(lambda x: jnp.sum(-one_hot() * log_softmax(x), -1), X, ops="cross_entropy_gradient"),
        "negated, scaled": gradient(lambda x: -jnp.sum((-one_hot() * -3) * log_softmax(x), -1), X),
        "scaled, shifted, scaled": both(lambda x: loss(x, (one_hot() * 3 + 0.5) * ROWS), X),
        "shifted twice": both(lambda x: loss(x, one_hot() * ROWS + 0.25 + ROWS), X),
        "shifted negated": both(lambda x: loss(x, 0.3 - one_hot()), X),
        "smoothed": both(lambda x: loss(x, 0.9 * one_hot() + 0.1 / N), X, ops="cross_entropy_gradient_and_distances"),
        "smoothed, of columns": both(lambda x: -jnp.sum((0.9 * one_hot(axis=0) + 0.02) * log_softmax(x, 0), 0), X),
        "smoothed, summed over another axis": both(
            lambda x: jnp.sum((0.9 * one_hot(axis=0) + 0.02) * log_softmax(x), 0), X
        ),
        "smoothed probabilities": both(lambda x: jnp.sum((0.9 * one_hot() + 0.1) * softmax(x), -1), X),
        "chosen": both(lambda x: loss(x, chosen(1.0, 0.0)), X, ops="cross_entropy_gradient"),
        "chosen, smoothed": both(lambda x: loss(x, chosen(0.9, 0.02)), X, ops="cross_entropy_gradient_and_distances"),
        "chosen, of columns": both(
            lambda x: -jnp.sum(chosen(0.9, 0.0, 0) * log_softmax(x, 0), 0), X, ops="cross_entropy_gradient"
        ),
        "chosen of another dimension": both(lambda x: loss(x, chosen(0.9, 0.02, 0)), X),
        "chosen of numbers of rows": both(
            lambda x: loss(x, chosen(ROWS, 0.1 * X[:, :1])), Y, ops="cross_entropy_gradient_and_distances"
        ),
        "chosen of numbers of columns": both(lambda x: loss(x, chosen(ROWS, 0.1 * X[:1])), Y),
        "chosen of two arrays": both(lambda x: loss(x, chosen(X, Z)), Y),
        "chosen the other way round": both(lambda x: loss(x, chosen(0.0, 1.0)), X),
        "after a bias": gradient(
            lambda w, b, x: loss(x @ w + b, chosen(0.9, 0.02)),
            X,
            Y[0],
            Z,
            by=(0, 1),
            ops="cross_entropy_gradient",
        ),
        "smoothed, a result": value(
            lambda x: (lambda y: (y, jnp.sum((0.9 * one_hot() + 0.1) * y, -1)))(log_softmax(x)), X
        ),
        "smoothed and not at all": value(lambda x: loss(x, (1 - 0.0) * one_hot() + 0.0), X),
        "labels outside": both(lambda x: loss(x, one_hot(OUTSIDE)), X),
        "labels outside, smoothed": both(lambda x: loss(x, 0.9 * one_hot(OUTSIDE) + 0.1), X),
        "-inf at the label": value(lambda x: loss(x, one_hot() * 2), np.where(WITHOUT > -9, WITHOUT, -1e30)),
        "infinite at the label": value(lambda x: at_labels(log_softmax(x), LABELS), WITHOUT),
        "uniform targets, -inf at the label": value(lambda x: loss(x, one_hot() * 0.0 + 0.5), WITHOUT),
        "summed over another axis": both(lambda x: jnp.sum(one_hot() * log_softmax(x), 0), X),
        "summed over all": both(lambda x: jnp.sum(one_hot() * log_softmax(x)), X),
        "kept dimensions": both(lambda x: jnp.sum(one_hot() * log_softmax(x), -1, keepdims=True) * x, X),
        "squared": both(lambda x: jnp.sum(one_hot() * log_softmax(x) ** 2, -1), X),
        "with a mask": both(lambda x: jnp.sum(one_hot() * jnp.where(MASK, log_softmax(x, where=MASK), 0), -1), X),
    },
    "comparisons with an index": {
        "of the row": both(lambda x: jnp.sum((index(1) == LABELS[:, None]) * log_softmax(x), -1), X),
        "turned": both(lambda x: jnp.sum((LABELS[:, None] == index(1)) * log_softmax(x), -1), X),
        "of columns": both(lambda x: jnp.sum((index(0) == LABELS[:, None]) * log_softmax(x), -1), X),
        "of another dimension": both(lambda x: jnp.sum((index(0) == LABELS) * log_softmax(x), -1), X),
        "labels of columns": both(lambda x: jnp.sum((index(1) == LABELS) * log_softmax(x), -1), X),
        "of both": both(lambda x: jnp.sum((index(1) == index(0)) * log_softmax(x), -1), X),
        "not equal": both(lambda x: jnp.sum((index(1) != LABELS[:, None]) * log_softmax(x), -1), X),
        "at most": both(lambda x: jnp.sum((index(1) <= LABELS[:, None]) * log_softmax(x), -1), X),
        "reshaped": both(
            lambda x: jnp.sum((jnp.arange(N).reshape(1, 2, 3).reshape(1, N) == LABELS[:, None]) * x, -1), X
        ),
        "by halves": both(
            lambda x: jnp.sum(
                (jnp.arange(2).reshape(1, 2, 1) == LABELS[:, None, None]) * log_softmax(x).reshape(N, 2, 3)
            ),
            X,
        ),
        "turned about": both(lambda x: jnp.sum((index(1).T == LABELS[:, None]) * log_softmax(x), -1), X),
        "reversed": both(lambda x: jnp.sum((N - 1 - index(1) == LABELS[:, None]) * log_softmax(x), -1), X),
        "of one number": both(lambda x: jnp.sum((index(1) == 2) * log_softmax(x), -1), X),
        "of float": both(lambda x: jnp.sum((index(1, F32) == 2.0) * log_softmax(x), -1), X),
        "broadcast of a vector": both(lambda x: jnp.sum((jnp.arange(N)[None] == LABELS[:, None]) * softmax(x), -1), X),
        "broadcast along rows": both(lambda x: jnp.sum((jnp.arange(N)[:, None] == LABELS) * softmax(x), -1), X),
        "times numbers of columns": both(lambda x: jnp.sum(one_hot() * X[0] * log_softmax(x), -1), Y),
        "plus numbers of columns": both(lambda x: jnp.sum((one_hot() + X[0]) * log_softmax(x), -1), Y),
        "times numbers of rows": both(lambda x: jnp.sum(one_hot() * X[0][:, None] * log_softmax(x), -1), Y),
        "times an array": both(lambda x: jnp.sum(one_hot() * Z * log_softmax(x), -1), Y),
        "two of them": both(lambda x: jnp.sum((one_hot() + one_hot(OUTSIDE)) * log_softmax(x), -1), X),
    },
    "labels that are gathered and scattered": {
        "gathered": both(lambda x: at_labels(log_softmax(x), LABELS), X, ops="cross_entropy_gradient"),
        "columns": both(lambda x: at_labels(log_softmax(x, 0), LABELS, 0), X),
        "along another axis": both(lambda x: at_labels(log_softmax(x, 0), LABELS, 1), X),
        "outside": gradient(lambda x: jnp.nan_to_num(at_labels(log_softmax(x), OUTSIDE)), X),
        "outside, clipped": both(lambda x: at_labels(log_softmax(x), OUTSIDE, mode="clip"), X),
        "probabilities outside, clipped": both(lambda x: at_labels(softmax(x), OUTSIDE, mode="clip"), X),
        "probabilities": both(lambda x: at_labels(softmax(x), LABELS), X),
        "scaled": both(lambda x: at_labels(log_softmax(x * 2) * 3 + 1, LABELS) * ROWS[:, 0], X),
        "and smoothed": both(lambda x: 0.9 * at_labels(log_softmax(x), LABELS) + 0.1 * jnp.mean(log_softmax(x), -1), X),
        "and all added up": both(lambda x: at_labels(log_softmax(x), LABELS) * jnp.sum(log_softmax(x), -1), X),
        "two labels": both(lambda x: at_labels(log_softmax(x), LABELS) - at_labels(log_softmax(x), LABELS[::-1]), X),
        "columns of one row": both(lambda x: log_softmax(x)[2], X),
        "added to zeros": value(lambda x, v: softmax(added(0)(x, v)), X, ROWS[:, 0]),
        "added to zeros, outside": value(lambda x, v: softmax(added(0, OUTSIDE)(x, v)), X, ROWS[:, 0]),
        "added to zeros, clipped": value(lambda x, v: softmax(added(0, OUTSIDE, mode="clip")(x, v)), X, ROWS[:, 0]),
        "added to ones": value(lambda x, v: softmax(added(1)(x, v)), X, ROWS[:, 0]),
        "added to an array": value(lambda x, v: softmax(added(Y)(x, v)), X, ROWS[:, 0]),
        "by the rows' numbers": both(
            lambda x, k: log_softmax(x)[jnp.arange(N), k], X, LABELS, ops="cross_entropy_gradient"
        ),
        "by the rows' numbers, outside": gradient(lambda x, k: log_softmax(x)[jnp.arange(N), k], X, OUTSIDE),
        "by the columns' numbers": both(lambda x, k: log_softmax(x, 0)[k, jnp.arange(N)], X, LABELS),
        "by the columns' numbers, of rows": both(lambda x, k: log_softmax(x)[k, jnp.arange(N)], X, LABELS),
        "by the rows' numbers, of columns": both(lambda x, k: log_softmax(x, 0)[jnp.arange(N), k], X, LABELS),
        "by the numbers of other rows": both(lambda x, k: log_softmax(x)[jnp.arange(N)[::-1], k], X, LABELS),
        "by numbers of rows that are given": both(lambda x, k: log_softmax(x)[k, LABELS], X, OUTSIDE % N),
        "by the numbers of some rows": both(lambda x, k: log_softmax(x)[jnp.arange(3), k[:3]], X, LABELS),
        "by numbers of rows and of batches": both(
            lambda x, k: log_softmax(x)[jnp.arange(2)[:, None], jnp.arange(3), k.reshape(2, 3)],
            X.reshape(2, 3, N),
            LABELS,
            ops="cross_entropy_gradient",
        ),
        "by exchanged numbers of rows and of batches": both(
            lambda x, k: log_softmax(x)[jnp.arange(2), jnp.arange(2)[:, None], k.reshape(2, 2)],
            X[:4].reshape(2, 2, N),
            LABELS[:4],
        ),
        "of each row": both(
            lambda x, k: jax.vmap(lambda row, k: row[k])(log_softmax(x), k), X, LABELS, ops="cross_entropy_gradient"
        ),
        "two of each row": both(lambda x, k: jax.vmap(lambda row: row[k[:2]])(log_softmax(x)), X, LABELS),
        "of each row, by its number": both(
            lambda x, k: jax.vmap(lambda x, k: log_softmax(x)[jnp.arange(3), k])(x, k),
            X.reshape(2, 3, N),
            LABELS.reshape(2, 3),
        ),
        "less log-sum-exps": both(
            lambda x, k: logsumexp(x, -1) - x[jnp.arange(N), k], X, LABELS, ops="cross_entropy_gradient"
        ),
        "by indices one after the other": value(
            lambda x, k, v: softmax(added_one_by_one(x, k, v)), X, LABELS, ROWS[:, 0]
        ),
        "multiplied": value(
            lambda x: softmax(jax.vmap(lambda row, k: row.at[k].multiply(3.0))(jnp.zeros_like(x) + 1, LABELS) * x), X
        ),
    },
    "products with one-hot arrays": {
        "of rows": both(lambda x: jnp.einsum("nv,nv->n", one_hot(), log_softmax(x)), X, ops="cross_entropy_gradient"),
        "vdot": both(lambda x: jnp.vdot(one_hot(), log_softmax(x)), X, ops="cross_entropy_gradient"),
        "of all elements": both(lambda x: jnp.outer(one_hot(), log_softmax(x)), X),
        "vdot of scores": both(lambda x: jnp.vdot(log_softmax(x).T, one_hot().T), X),
        "of columns": both(lambda x: jnp.einsum("vn,vn->n", one_hot(axis=0), log_softmax(x, 0)), X),
        "turned": both(lambda x: jnp.einsum("nv,nv->n", log_softmax(x), one_hot()), X, ops="cross_entropy_gradient"),
        "of rows and columns": both(lambda x: jnp.einsum("nv,vn->n", one_hot(), log_softmax(x)), X),
        "of all rows": both(lambda x: jnp.einsum("nv,mv->nm", one_hot(), log_softmax(x)), X),
        "of the sums": both(lambda x: jnp.einsum("nv,nv->v", one_hot(), log_softmax(x)), X),
        "of batches": both(
            lambda x: jnp.einsum("bnv,bnv->bn", one_hot().reshape(2, 3, N), log_softmax(x)), X.reshape(2, 3, N)
        ),
        "of log-sum-exps": both(
            lambda x: logsumexp(x, -1) - jnp.einsum("nv,nv->n", one_hot(), x), X, ops="cross_entropy_gradient"
        ),
        "smoothed": both(lambda x: jnp.einsum("nv,nv->n", 0.9 * one_hot() + 0.1 / N, log_softmax(x)), X),
        "with any array": both(lambda x, y: jnp.einsum("nv,nv->n", y, log_softmax(x)), X, Y),
        "of indices": both(lambda x: softmax(x * jnp.cos(jnp.einsum("n,v->nv", jnp.arange(N, dtype=F32), Y[0]))), X),
        "of 16 bits": both(
            lambda x: jnp.einsum("nv,nv->n", one_hot().astype(BF16), log_softmax(x)), array(N, N, dtype=BF16)
        ),
    },
    "numbers of rows that are shared": {
        "softmax, logsumexp": value(lambda x: (softmax(x), logsumexp(x, -1)), X, ops="softmax_and_normalizer"),
        "of two results": value(lambda x: (softmax(x), softmax(x).astype(BF16), logsumexp(x, -1)), X),
        "of two masks": value(
            lambda x: (softmax(x, where=MASK), jax_softmax.logsumexp(x, where=MASK2), logsumexp(x, -1)), X
        ),
        "of one mask": value(lambda x: (softmax(x, where=MASK), jax_softmax.logsumexp(x, where=MASK)), X),
        "along two axes": value(lambda x: (softmax(x, 0), logsumexp(x, 1)), X, ops="logsumexp softmax"),
        "of two arrays": value(lambda x: (softmax(x), logsumexp(x * 2, 1)), X),
        "along all axes": value(lambda x: (softmax(x, (0, 1)), logsumexp(x, -1)), X),
        "loss and logsumexp": both(lambda x: -at_labels(log_softmax(x), LABELS) + 0.1 * logsumexp(x, -1) ** 2, X),
        "a loss's gradient, another loss": value(
            lambda x: (jax.grad(lambda x: loss(x, one_hot()).mean())(x), loss(x, one_hot(LABELS[::-1]))), X
        ),
        "a loss that its gradient needs": value(
            lambda x: (lambda w: (w, jax.grad(lambda x: jnp.sum(loss(x, one_hot()) * w))(x)))(loss(x, one_hot())), X
        ),
        "a divergence, logsumexp": value(
            lambda x, y: (divergence(softmax(x), log_softmax(x), log_softmax(y)), logsumexp(x, -1), logsumexp(y, -1)),
            X,
            Y,
        ),
        "losses of the package": both(
            lambda x: jax_softmax.softmax_cross_entropy_with_integer_labels(x, jnp.asarray(LABELS)) * logsumexp(x, -1),
            X,
        ),
        "two losses of the package": value(
            lambda x: [
                jax_softmax.softmax_cross_entropy_with_integer_labels(x, jnp.asarray(k), where=m)
                for k in (LABELS, LABELS[::-1])
                for m in (None, MASK | (np.arange(N) == LABELS[:, None]) | (np.arange(N) == LABELS[::-1, None]))
            ],
            X,
        ),
        "a loss's derivative alone": gradient(fuse(lambda x: loss(x, one_hot()) * 2), X),
        "a smoothed loss's derivative alone": gradient(fuse(lambda x: loss(x, one_hot() * 0.8 + 0.2 * ROWS)), X),
    },
    "kept for a derivative": {
        "elementwise functions": gradient(fuse(lambda x: jnp.sin(jnp.tanh(x * Y) * 2) * jnp.exp(-x)), X),
        "attention": gradient(
            fuse(lambda x, w: jnp.tanh(softmax(jnp.tanh(wide(x)) * 2) @ w)), array(N, N, dtype=BF16), Y, by=(0, 1)
        ),
        "a result that is read": gradient(fuse(lambda x: (lambda p: (p, p * p * Y))(softmax(wide(x) * 2))), X),
        "logarithms": gradient(fuse(lambda x: jnp.sin(log_softmax(x * 3)) * Y), X),
        "columns": gradient(fuse(lambda x, w: (softmax(x * 2, 0) * w) @ Y), X, Z, by=(0, 1)),
        "masks": gradient(fuse(lambda x: softmax(jnp.where(MASK, x, -1e30) * 2, where=MASK2 | MASK) ** 2), X),
        "one after another": gradient(fuse(lambda x: softmax(log_softmax(x * 2) * softmax(x, 0)) * Y), X),
        "with -inf": gradient(fuse(lambda x: softmax(jnp.where(MASK, x, -jnp.inf)) @ Y), np.where(MASK, X, 0)),
        "entropy": gradient(fuse(entropy), X),
        "second derivatives": gradient(lambda x: jax.grad(lambda x: jnp.sum(fuse(entropy)(x) ** 2))(x), X),
        "of integers": gradient(fuse(lambda x, k: at_labels(log_softmax(x * 2), k)), X, LABELS),
    },
    "made twice": {
        "a maximum's gradient": gradient(lambda x: (softmax(x) * Z).max(-1), X),
        "the largest of a capped array": value(
            lambda x: (lambda y: softmax(jnp.where(y >= jax.lax.top_k(y, 3)[0][:, 2:], y, -1e9)))(jnp.tanh(x) * 5), X
        ),
        "all but the largest": value(
            lambda x: (lambda y: softmax(jnp.where(y.max(-1, keepdims=True) == y, -1e9, y)))(jnp.sin(x) * 5), X
        ),
        "rows add up to 1": value(lambda x: jnp.sum(jnp.exp(log_softmax(jnp.tanh(x / 3) * 30)), -1), X),
        "sums of what is written": value(lambda x: (lambda y: (y, softmax(y), y.sum(-1)))(jnp.tanh(x) * Y), X),
        "a view of what is made twice": value(lambda x: (lambda y: (softmax(y.T), logsumexp(y, 0)))(jnp.exp(x)), X),
    },
    "places": {
        "a split index of kept dimensions": value(
            lambda x: softmax((x + 0.3 * jax.lax.broadcasted_iota(x.dtype, (4, 24), 0)).reshape(2, 2, 24)), WIDE
        ),
        "a split index of a row": value(
            lambda x: softmax((x * jax.lax.broadcasted_iota(jnp.int32, (4, 24), 1)).reshape(4, 3, 8), 1), WIDE
        ),
        "an index split into three": value(
            lambda x: softmax((x * jax.lax.broadcasted_iota(jnp.int32, (4, 24), 1)).reshape(4, 3, 2, 4), (1, 3)), WIDE
        ),
        "a joined index": value(lambda x: softmax((x.reshape(4, 4, 6) + jnp.arange(6.0)).reshape(4, 24)), WIDE),
        "a split vector": value(lambda x: softmax((x + WIDE[0]).reshape(4, 6, 4), 1) * 2, WIDE),
        "dimensions exchanged": value(lambda x: softmax(x.T + Y) + x, X),
        "dimensions exchanged afterwards": value(lambda x: (softmax(x * 2).T * Y, softmax(x * 2) * 3), X),
        "with itself, exchanged, afterwards": value(lambda x: (lambda y: (y + 2 * y.T, y @ Y))(softmax(x * 3)), X),
        "with itself, exchanged": value(lambda x: softmax(x - 2 * x.T), X),
        "a reshape that divides at one of two places": value(
            lambda x, w: softmax(x + (lambda z: z + 2 * z.T)(jnp.tanh(w).reshape(12, 12)).reshape(4, 3, 3, 4)),
            array(4, 3, 3, 4),
            array(4, 36, seed=1),
        ),
        "rotated": value(
            lambda x: jnp.transpose(softmax(jnp.transpose(x + 1, (2, 0, 1)) * 2, 1), (2, 1, 0)) * array(2, 3, 4),
            array(3, 2, 4),
        ),
        "rotated, of one extent": value(
            lambda x: jnp.transpose(softmax(jnp.transpose(x, (1, 2, 0)) + array(3, 3, 3), 0), (1, 2, 0)) * x,
            array(3, 3, 3, seed=2),
        ),
        "sides of other dimensions": value(
            lambda x, w: softmax(x * 2).reshape(4, 4, 6) * jnp.tanh(w * 2), WIDE, array(4, 4, 6, seed=3)
        ),
        "halves turned": value(lambda x: softmax(jnp.swapaxes(x.reshape(4, 2, 12), 1, 2).reshape(4, 24) * 2, -1), WIDE),
        "halves turned afterwards": value(
            lambda x: jnp.swapaxes(softmax(x * 2).reshape(4, 2, 12), 1, 2).reshape(4, 24) + WIDE, WIDE
        ),
        "broadcast rows": value(lambda x, b: softmax(jnp.broadcast_to(b, x.shape) * x), X, ROWS),
        "broadcast columns": value(lambda x, b: softmax(x, 0) * b[:, 0], X, ROWS),
        "new dimensions": value(lambda x: (softmax(x[:, None] * 2, -1)[:, 0, :, None] + 1)[..., 0] * Y, X),
        "causal": both(lambda x: softmax(jnp.where(index(0) >= index(1), x, -1e9)), X),
        "causal, turned": both(lambda x: softmax(jnp.where(index(0) >= index(1), x, -1e9), 0), X),
        "a window": value(lambda x: softmax(jnp.where(abs(index(0) - index(1)) < 2, x, -1e9)) * index(0), X),
        "times its own sums": value(lambda x: (lambda p: p * jnp.sum(p * Y, 0))(softmax(x * 2)), X),
        "a rotated result": value(lambda x: jnp.transpose(softmax(x * 2, 1), (1, 2, 0)) * 3, array(3, 4, 5)),
        "a mask of fewer dimensions": value(lambda x: softmax(x.reshape(2, 3, N) * 2, where=MASK[:3]) + 1, X),
        "rows gathered again": value(lambda x: softmax(jnp.repeat(x[:2], 3, 0) * Y), X),
    },
    "operations": {
        "clamp between turned bounds": value(lambda x: softmax(jax.lax.clamp(1.5, x, -0.5) + x), X),
        "clamp": value(lambda x: softmax(jax.lax.clamp(-0.5, x, 1.5) + x), X),
        "clamp by arrays": value(lambda x, low, high: softmax(jax.lax.clamp(low, x, high) * x), X, Y, Z),
        "powers": value(lambda x: softmax(x**3 - x**5 + (x + 7) ** -2), X),
        "powers of integers": value(lambda x: softmax(x + 0.01 * index(1) ** 3 - 0.02 * index(0) ** 2), X),
        "select of three": value(lambda x: softmax(jnp.select([x > 1, x > 0], [x * 3, x * 2], -x)), X),
        "constants": value(lambda x: softmax(x / 3 - 2 / (x + 9) + (1 - x) * 0.1), X),
        "integers": value(
            lambda x: softmax(x + ((index(0) * 3 - index(1) * 5) & 7) - (index(0) ^ index(1)) + (index(1) | 2)), X
        ),
        "negative integers": value(lambda x: softmax(x - jnp.sign(index(0) - index(1)) * jnp.abs(index(1) - 4)), X),
        "turned bits": value(lambda x: softmax(x + 0.1 * ~index(1)), X),
        "exact constants": value(lambda x: softmax(x + (index(1) * 123456.75 - index(1) * 123456.0)), X),
        "the largest finite number": value(
            lambda x: softmax(jnp.where(jnp.isfinite(x), 0.0, x)), np.where(X > 1, np.finfo(np.float32).max, X)
        ),
        "finite numbers": value(lambda x: softmax(jnp.where(jnp.isfinite(x), x, 1.0)), SOME_WITHOUT),
        "masks": value(lambda x: softmax(jnp.where((x > 0) & ~((x > 1) | (Y < 0)) ^ MASK, x, -2.0)), X),
        "comparisons": value(
            lambda x: softmax(x + (x < Y) * 2.0 + (x >= Z) * 0.5 - (x != Y) * 3 + (index(0) > index(1)) * x), X
        ),
        "ties": value(lambda x: softmax(x * (index(0) <= index(1)) - 2.0 * (index(0) < index(1))), X),
        "bounds": value(lambda x: softmax(jnp.maximum(x, Y) - jnp.minimum(x, Z) * 2), X),
        "functions": value(
            lambda x: softmax(jnp.log1p(jnp.abs(x)) - jnp.expm1(-x) + jnp.exp2(x) * 0.3 + jax.lax.rsqrt(x * x + 1)), X
        ),
        "more functions": value(
            lambda x: softmax(
                jax.nn.sigmoid(x) * 3 + jax.lax.erf(x) - jnp.cos(x) + jnp.sqrt(jnp.abs(x)) + jnp.log(x + 9)
            ),
            X,
        ),
        "rounding": value(lambda x: softmax(jnp.floor(x) * 0.3 - jnp.ceil(x * 2) + jnp.sign(x)), X),
        "numbers of 8 bits": value(
            lambda x, a, b: softmax(x * a + b),
            X,
            np.arange(-3, 3).astype(np.int8),
            (np.arange(6) + 200).astype(np.uint8),
        ),
        "numbers of 8 bits that wrap": value(
            lambda x, a: softmax(x + (a * np.int8(77)) * 0.02), X, np.arange(-3, 3).astype(np.int8)
        ),
        "truth": value(
            lambda x: softmax(jnp.where((index(0) - 2).astype(bool) ^ jnp.floor(x).astype(bool), x * 2, 1.0)), X
        ),
        "afterwards": both(lambda x: (log_softmax(x) - Y) * jnp.where(x > 0, 2.0, -3.0), X),
        "of both operands": gradient(lambda x, y: jnp.tanh(softmax(x * 2) * y) * Z, X, Y, by=(0, 1)),
    },
}
