"""Programs of attention that are drawn, and pitfalls: fused, they compute the same.

What kernels do is done in JAX (`attention_on_host.py`).
"""

import functools
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_programs import D, check_together, gradients, normal

from jax_softmax import fuse

pytestmark = pytest.mark.usefixtures("on_the_cpu")


# ---- Programs that nobody chose


class Drawn:
    """A program of q, k and v that a number decides; it is the same at each trace."""

    def __init__(self, seed):
        rng = random.Random(seed)
        extents = {"b": 2, "h": 3, "g": 2, "i": rng.choice([33, 64]), "j": rng.choice([65, 72])}
        extents |= {"d": rng.choice([8, 16]), "e": rng.choice([8, 16])}
        batch = rng.choice(["", "b", "bh"])

        def shuffled(letters):
            return "".join(rng.sample(letters, len(letters)))

        self.q, self.k, self.v = shuffled(batch + "gi") + "d", shuffled(batch + "j") + "d", shuffled(batch + "j") + "e"
        self.x, self.o = shuffled(batch + "gi") + "j", shuffled(batch + "gi") + "e"
        around = rng.choice([lambda f: f, lambda f: f, jax.checkpoint, jax.jit])
        dtype = rng.choice([jnp.bfloat16, jnp.bfloat16, jnp.float32])
        self.operands = [
            normal(*(extents[c] for c in of), seed=seed + n).astype(dtype)
            for n, of in enumerate((self.q, self.k, self.v))
        ]
        self.arrays, self._given = [], None  # what it reads beside; None while these are made
        jax.eval_shape(lambda *a: self._program(random.Random(seed + 1), *a), *self.operands)
        self.function = around(lambda *a: self._reading(a[3:])._program(random.Random(seed + 1), *a[:3]))

    def _reading(self, arrays):
        self._given = iter(arrays)
        return self

    def _beside(self, array):
        if self._given is not None:
            return next(self._given)
        self.arrays.append(array)
        return array

    def _program(self, rng, q, k, v):
        terms, given = [self.q, self.k], [q, k]
        if rng.random() < 0.5:
            terms, given = terms[::-1], given[::-1]
        dtype = rng.choice([q.dtype, jnp.float32])
        if rng.random() < 0.3:  # widened before the product
            given = [rng.choice([a, a * 0.5, a / 3]) for a in (b.astype(jnp.float32) for b in given)]
            dtype = jnp.float32
        x = jnp.einsum(f"{','.join(terms)}->{self.x}", *given, preferred_element_type=dtype)
        where = self._array(rng, x.shape, "bool") if rng.random() < 0.3 else None
        if where is not None:
            where = jnp.broadcast_to(where, x.shape)
        of_product = rng.choice([v.dtype, v.dtype, jnp.float32])
        weights = self._weights(rng, self._softmax(rng, x, where), of_product)
        return jnp.einsum(f"{self.x},{self.v}->{self.o}", weights, v.astype(of_product)).astype(v.dtype)

    def _softmax(self, rng, x, where):
        scores = self._scores(rng, x)
        if where is not None:
            return jax.nn.softmax(scores, where=where)
        written = {
            "softmax": lambda: jax.nn.softmax(scores),
            "of logarithms": lambda: jnp.exp(jax.nn.log_softmax(scores)),
            "less logsumexp": lambda: jnp.exp(scores - jax.nn.logsumexp(scores, -1, keepdims=True)),
            "difference": lambda: jax.nn.softmax(scores) - 0.4 * jax.nn.softmax(self._scores(rng, x * 0.7)),
            "mixture": lambda: 0.5 * (jax.nn.softmax(self._scores(rng, x * 0.7)) + jax.nn.softmax(scores)),
        }
        return written[rng.choice([*written, "softmax", "softmax"])]()

    def _array(self, rng, shape, dtype):
        a = np.random.default_rng(rng.randrange(99)).standard_normal([rng.choice([1, n]) for n in shape])
        return self._beside(a < 1 if dtype == "bool" else a.astype(jnp.dtype(dtype)))

    def _scores(self, rng, x):
        i, j = (jax.lax.broadcasted_iota(jnp.int32, x.shape, self.x.index(c)) for c in "ij")
        seen = {"causal": i >= j, "window": abs(i - j) < 9, "mask": self._array(rng, x.shape, "bool") | (i == j)}
        steps = {
            "scale": lambda x: x * 0.25,
            "divide": lambda x: x / 3,
            "float32": lambda x: x.astype(jnp.float32),
            "cap": lambda x: 20 * jnp.tanh(x / 20),
            "bias": lambda x: x + self._array(rng, x.shape, rng.choice(["float32", "bfloat16"])).astype(x.dtype),
            "distance": lambda x: x - (abs(i - j) / 8).astype(x.dtype),
            "fill": lambda x: jnp.where(seen[rng.choice(list(seen))], x, rng.choice([-1e30, -1e9, -1e4, -jnp.inf])),
            "added": lambda x: x + jnp.where(seen[rng.choice(list(seen))], 0, -1e9).astype(x.dtype),
        }
        for name in rng.sample(list(steps), rng.randrange(1, 5)):
            x = steps[name](x)
        return x

    def _weights(self, rng, y, dtype):
        seed = rng.randrange(99)
        keep = self._beside(np.random.default_rng(seed).random(y.shape) < 0.8)
        steps = {
            "as they are": lambda y: y,
            "dropout": lambda y: jnp.where(keep, y / 0.8, 0),
            "multiplied": lambda y: y * (keep.astype(y.dtype) / jnp.asarray(0.8, y.dtype)),
            "cast and dropout": lambda y: jnp.where(keep, y.astype(dtype) / 0.8, 0),
            "half": lambda y: -y * 0.5,
        }
        return steps[rng.choice(list(steps))](y).astype(dtype)


def drawn_program(seed):
    """A program, its operands, and what it is when it, its derivative, the function of that, or a map of its derivative
    is fused."""
    drawn = Drawn(100 * seed)
    operands = [*drawn.operands, *drawn.arrays]

    def differentiated(f, *operands):
        return gradients(lambda *qkv: f(*qkv, *operands[3:]), *operands[:3])

    unfused, fused = {
        0: (lambda *a: differentiated(drawn.function, *a), fuse(lambda *a: differentiated(drawn.function, *a))),
        1: (lambda *a: differentiated(drawn.function, *a), lambda *a: differentiated(fuse(drawn.function), *a)),
        2: (drawn.function, fuse(drawn.function)),
    }.get(seed % 4, (None, None))
    if unfused is None:
        rng = random.Random(seed)
        examples = rng.choice([2, 70])  # fewer and more than queries
        after = rng.choice([jnp.sin, lambda o: o])  # of which examples share the cotangent
        axes = rng.choice([(0, 0, 0), (0, 0, None), (0, None, 0), (0, None, None), (None, 0, 0), (None, 0, None)])
        unfused = jax.vmap(
            lambda *a: differentiated(lambda *b: after(drawn.function(*b)), *a), (*axes, *(None for _ in drawn.arrays))
        )
        fused = fuse(unfused)
        operands[:3] = (
            a if axis is None else a * normal(examples, *(1 for _ in a.shape), seed=seed + n).astype(a.dtype)
            for n, (a, axis) in enumerate(zip(drawn.operands, axes, strict=True))
        )
    return unfused, operands, fused


@pytest.mark.parametrize(
    "first", [pytest.param(first, marks=[pytest.mark.sweep] * (first > 0)) for first in range(0, 200, 5)]
)
def test_drawn_programs(first):
    seeds = range(first, first + 5)
    called = check_together({str(seed): drawn_program(seed) for seed in seeds})
    # The derivative of what is fused keeps weights that have fewer bytes than what they are made of.
    assert called["forward"] >= sum(seed % 4 != 1 for seed in seeds)
    assert called["keys"] == called["queries"] >= sum(seed % 4 in (0, 3) for seed in seeds)


def drawn_derivative(seed, mode):
    """A program of the derivative by all floats that a drawn function reads, and its operands. `mode`: reverse or
    forward, or how many tangents it has."""
    drawn = Drawn(100 * seed)
    operands = [*drawn.operands, *map(jnp.asarray, drawn.arrays)]
    moving = [n for n, a in enumerate(operands) if jnp.issubdtype(a.dtype, jnp.floating)]
    several = [mode] if isinstance(mode, int) else []
    tangents = [normal(*several, *operands[n].shape, seed=n).astype(operands[n].dtype) for n in moving]

    def program(*operands):
        def of_floats(*moved):
            known = dict(zip(moving, moved, strict=True))
            return drawn.function(*(known.get(n, a) for n, a in enumerate(operands[: len(operands) - len(tangents)])))

        floats, given = tuple(operands[n] for n in moving), tuple(operands[len(operands) - len(tangents) :])
        if several:
            return jax.vmap(lambda *tangents: jax.jvp(of_floats, floats, tangents))(*given)
        return jax.jvp(of_floats, floats, given) if mode == "forward" else gradients(of_floats, *floats)

    return program, [*operands, *tangents]


@pytest.mark.parametrize("mode", ["reverse", "forward", 1, 3])
@pytest.mark.parametrize(
    "first", [pytest.param(first, marks=[pytest.mark.sweep] * (first > 0)) for first in range(0, 100, 5)]
)
def test_drawn_derivatives(first, mode):
    """Of biases as well. In forward mode some weights that are made of logarithms, or of two softmaxes, stay."""
    drawn = {str(seed): drawn_derivative(seed, mode) for seed in range(first, first + 5)}
    called = check_together({seed: (f, operands, fuse(f)) for seed, (f, operands) in drawn.items()})
    assert called["forward"] >= len(drawn) if mode == "reverse" else called["tangents"]


# ---- Programs whose tiles must not be skipped, or which are no attention at all. Of more than a tile.


N = 300


def scores(q, k):
    return jnp.einsum("bihd,bjhd->bhij", q, k).astype(jnp.float32) / 4


def attended(scores, v, **options):
    return jnp.einsum("bhij,bjhd->bihd", jax.nn.softmax(scores, **options).astype(v.dtype), v)


def seen(scores):
    i, j = (jax.lax.broadcasted_iota(jnp.int32, scores.shape, d) for d in (2, 3))
    return i, j


def causal(s):
    i, j = seen(s)
    return jnp.where(i >= j, s, -1e30)


def updated_bias(q, k, v, bias):
    def loss(q, k, v, bias):
        return attended(causal(scores(q, k) + bias), v).astype(jnp.float32).sum()

    *gradients, of_bias = jax.grad(loss, (0, 1, 2, 3))(q, k, v, bias)
    return *gradients, bias - 0.1 * of_bias


def loss_of_scores(q, k, v):
    s = scores(q, k)
    return attended(causal(s), v).astype(jnp.float32) * jnp.cos(jnp.arange(D)) + 0.01 * s.sum()


def two_masks(q, k, v):
    s = scores(q, k)
    i, j = seen(s)
    return attended(causal(s), v) + attended(jnp.where(abs(i - j) < 30, s, -1e30), v * 2)


def mask_by_scores(q, k, v):
    s = scores(q, k) * 4
    i, j = seen(s)
    s = s - abs(i - j).astype(jnp.float32) / 16
    return attended(jnp.where(s > -1, s, -1e30), v)


def logarithms(q, k, v):
    s = scores(q, k)
    i, j = seen(s)
    return attended(jnp.log(jnp.maximum(s, 0)), v, where=i >= j - 40)


def logarithms_of_fills(q, k, v):
    s = scores(q, k)
    i, j = seen(s)
    return attended(jnp.log(jnp.maximum(jnp.where(i >= j - 20, s, -1e30), 0)), v, where=i >= j - 40)


def filled_logarithms(q, k, v):
    s = scores(q, k)
    i, j = seen(s)
    return attended(jnp.where(i >= j - 3, jnp.log(jnp.maximum(s, 0)), -1e30), v)


def rows_of_infinities(q, k, v, bias):
    return gradients(lambda q, k, v: attended(causal(scores(q, k) + bias), v), q, k, v)


def left_padding(q, k, v):
    s = scores(q, k)
    i, j = seen(s)
    return attended(jnp.where(i >= j, s, -1e9), v, where=j >= 200)


def sink_of_fills(q, k, v):
    s = scores(q, k)
    i, j = seen(s)
    s = jnp.where((i >= j) & (i > 150), s, -1e30)
    weights = jax.nn.softmax(jnp.concatenate([s, jnp.full((*s.shape[:-1], 1), -1e30)], -1))[..., :-1]
    return jnp.einsum("bhij,bjhd->bihd", weights.astype(v.dtype), v)


def largest_alone(q, k, v):
    s = jnp.einsum("bihd,bjhd->bhij", q, k)
    return attended(jnp.where(s >= s.max(-1, keepdims=True), s, -jnp.inf), v)


def scores_as_well(q, k, v):
    s = scores(q, k)
    return attended(causal(s), v).astype(jnp.float32) + s.max()


LONG = [normal(1, N, 2, D, seed=seed) for seed in range(3)]
PITFALLS = {
    "updated bias": (updated_bias, [*LONG, jnp.float32(normal(1, 2, N, N, seed=3))]),
    **{
        f.__name__: (functools.partial(gradients, f), LONG)
        for f in (loss_of_scores, two_masks, mask_by_scores, logarithms, left_padding, sink_of_fills, scores_as_well)
    },
    "filled logarithms": (filled_logarithms, LONG),
    "logarithms of fills": (logarithms_of_fills, LONG),
    # Rows of which all that is visible is -inf, so that they see fills.
    "rows of infinities": (
        rows_of_infinities,
        [*LONG, jnp.where(jnp.arange(N)[:, None] % 7 == 3, -jnp.inf, jnp.zeros((N, N), jnp.float32))],
    ),
    "largest alone": (largest_alone, LONG),
}


def test_pitfalls():
    check_together({name: (f, operands, fuse(f)) for name, (f, operands) in PITFALLS.items()})
