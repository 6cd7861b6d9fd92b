"""Logits that are a product made in the same program: results are those of the product as it is rounded.

A kernel reads the product from memory, and XLA could make it anew for what it combines with the kernel's results, as a
fused multiply-add without the rounding. So every program is compared with the same one on a product made before.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import support
from jax.sharding import NamedSharding, PartitionSpec
from support import normal

import jax_softmax

SHAPE = (4, 64)
LABELS = np.array([3, 0, 60, 10])
PROBABILITIES = np.asarray(jax.nn.softmax(normal(SHAPE, seed=1)))
OTHERS = normal(SHAPE, seed=2)
SMOOTHED = {"label_smoothing": 0.1, "z_loss": 1e-4}

# Of logits, a number that others are scaled by, and a mask.
FUNCTIONS = {
    "softmax": lambda x, c, where: jax_softmax.softmax(x, where=where),
    "log_softmax": lambda x, c, where: jax_softmax.log_softmax(x, where=where),
    "logsumexp": lambda x, c, where: jax_softmax.logsumexp(x, where=where, return_max=True),
    "row losses": lambda x, c, where: jax_softmax.softmax_cross_entropy_with_integer_labels(x, LABELS, where=where),
    "smoothed row losses": lambda x, c, where: jax_softmax.softmax_cross_entropy_with_integer_labels(
        x, LABELS, where=where, **SMOOTHED
    ),
    "row losses of probabilities": lambda x, c, where: jax_softmax.softmax_cross_entropy(x, PROBABILITIES, where=where),
    "mean loss": lambda x, c, where: jax_softmax.cross_entropy_loss(x, LABELS, where=where),
    "smoothed mean loss": lambda x, c, where: jax_softmax.cross_entropy_loss(x, LABELS, where=where, **SMOOTHED),
    "entropy": lambda x, c, where: jax_softmax.entropy(x, where=where),
    "divergence": lambda x, c, where: jax_softmax.kl_divergence(x, OTHERS.astype(x.dtype) * c, where=where),
    "divergence from it": lambda x, c, where: jax_softmax.kl_divergence(OTHERS.astype(x.dtype) * c, x, where=where),
    "absmax_scale": lambda x, c, where: jax_softmax.absmax_scale(x, where=where),
}


def values(f, x):
    return f(x)


def forward(f, x):
    return jax.jvp(f, (x,), (normal(SHAPE, seed=3).astype(x.dtype),))[1]


def reverse(f, x):
    y, pullback = jax.vjp(f, x)
    cotangents = [jnp.asarray(normal(of_y.shape, seed=4), of_y.dtype) for of_y in jax.tree.leaves(y)]
    return pullback(jax.tree.unflatten(jax.tree.structure(y), cotangents))


OPERANDS = [("float32", False), ("float32", True), ("bfloat16", False)]


@support.sampled("mode,divided,operand", itertools.product([values, forward, reverse], [False, True], OPERANDS), 8)
def test_products(mode, divided, operand):
    (dtype, masked), where = operand, None
    if masked:
        where = support.random_mask(SHAPE) | np.eye(SHAPE[1], dtype=bool)[LABELS]
    x = jnp.asarray(normal(SHAPE), dtype)
    if divided:
        mesh = support.mesh_of_cpus((1, 8))
        x = jax.device_put(x, NamedSharding(mesh, PartitionSpec(None, "model")))
    functions = dict(FUNCTIONS)
    if divided and dtype == "bfloat16":
        del functions["absmax_scale"]  # all of which XLA makes then, of a product that it does not round

    @jax.jit
    def of_array(x, c):
        return {name: mode(lambda x, f=f: f(x, c, where), x) for name, f in functions.items()}

    of_product = {
        name: jax.jit(lambda x, c, f=f: mode(lambda x: f(x, c, where), x * c)) for name, f in functions.items()
    }
    wrong = []
    for scale in (40.0, 3e3, 1e6, 1e9):
        c = jnp.asarray(scale, dtype)
        expected_of = of_array(jax.jit(jnp.multiply)(x, c), c)
        for name, f in of_product.items():
            for found, expected in zip(*map(jax.tree.leaves, (f(x, c), expected_of[name])), strict=True):
                found, expected = np.asarray(found, np.float64), np.asarray(expected, np.float64)
                largest = np.max(np.abs(expected), where=np.isfinite(expected), initial=0)
                if not np.allclose(found, expected, rtol=1e-5, atol=1e-6 * largest):
                    wrong.append(f"{name} at {scale}: {found} instead of {expected}")
    assert not wrong, "\n".join(wrong)
