"""`fuse`: the same results with fewer arrays in memory, under every transformation.

The CPU runs a fused function as it is. For values it runs what a GPU would, with the custom calls done by the host (see
emulated.py).
"""

import contextlib
import functools

import emulated
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import support

import jax_softmax
from jax_softmax import fuse

SHAPE = (4, 6, 16)
F32, BF16 = jnp.float32, jnp.bfloat16
INF, NAN = np.inf, np.nan
compiler_is_needed = pytest.mark.skipif(emulated.COMPILER is None, reason="no C++ compiler found")


def x_of(dtype="float32", shape=SHAPE, seed=0, scale=1.5):
    return support.normal(shape, "float32", seed, scale).astype(jnp.dtype(dtype))


def assert_same(found, expected, roundings):
    """Up to so many of float32, relative to the largest number, or one of 16 bits."""
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        if jnp.issubdtype(a.dtype, jnp.integer) or a.dtype == bool:
            np.testing.assert_array_equal(a, b)
            continue
        eps = max(float(jnp.finfo(a.dtype).eps), roundings * 2.0**-23)
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        largest = np.abs(b[np.isfinite(b)]).max(initial=0)
        np.testing.assert_allclose(a, b, rtol=eps, atol=roundings * 2.0**-23 * largest)


def compiled(lowered):
    """In haste, with each operation rounded to its dtype."""
    return lowered.compile(compiler_options={"xla_backend_optimization_level": 0, "xla_allow_excess_precision": False})


def unfused(f, *args):
    with jax_softmax.use():
        return compiled(jax.jit(lambda *args: f(*args)).lower(*args))(*args)


class Case:
    """A function whose fused results are its own."""

    def __init__(self, f, *args, calls=1, folded=True, roundings=16):
        """`folded`: nothing that could be in a kernel is outside."""
        self.f, self.args, self.calls, self.folded, self.roundings = f, args, calls, folded, roundings

    @functools.cached_property
    def lowered(self):
        """The fused program, and the custom calls in it."""
        with emulated.kernels() as made:
            return jax.jit(fuse(self.f)).lower(*self.args), made

    def check(self):
        lowered, made = self.lowered
        assert_same(compiled(lowered)(*self.args), unfused(self.f, *self.args), self.roundings)
        assert len(made) == self.calls, made
        if self.folded:
            for line in fuse(self.f).explain(*self.args):
                assert line.why_not == "" and line.outside == (), str(line)


def gradients_of(f, by=0):
    """The gradients of a weighted sum of f's results."""

    def weighted(*args):
        return sum(jnp.sum(y.astype(F32) * weights(y.shape)) for y in jax.tree.leaves(f(*args)))

    return jax.grad(weighted, by)


def weights(shape):
    return jnp.asarray(support.normal(shape, seed=9, scale=1))


# ---- Values


def causal(x, fill=-1e9):
    rows, columns = jnp.arange(x.shape[-2])[:, None], jnp.arange(x.shape[-1])
    return jnp.where(rows >= columns, x, jnp.asarray(fill, x.dtype))


def biased(shape):
    return lambda x: x + x_of(shape=shape, seed=1)


CAUSAL_MASK = np.tril(np.ones(SHAPE[-2:], bool))
MASK = support.random_mask(SHAPE, 3)
PAIR = x_of(seed=7)
STEPS = np.arange(SHAPE[-1], dtype=np.int32)
BIG = np.int32(2**31 - 3)
SPECIAL = x_of()
SPECIAL.reshape(-1)[3:300:7] = np.resize([NAN, INF, -INF, -0.0, 0.0, 3e38, -3e38, 1e-40], 43)

# What is done to an array before the operator.
BEFORE = {
    "nothing": lambda x: x,
    "scale": lambda x: x * 0.125,
    "cast": lambda x: x.astype(BF16).astype(F32),
    **{f"bias of {shape}": biased(shape) for shape in [(), (16,), (6, 16), (1, 6, 1), (4, 1, 16), (4, 1, 1), SHAPE]},
    "causal by indices": causal,
    "causal by -inf": lambda x: causal(x, -INF) + 0,
    "causal by an array": lambda x: jnp.where(CAUSAL_MASK, x, -1e30),
    "mask": lambda x: jnp.where(MASK, x * 0.5, jnp.finfo(F32).min),
    "added mask": lambda x: x + jnp.where(CAUSAL_MASK, 0, -1e9)[None],
    "soft cap": lambda x: 3 * jnp.tanh(x / 3),
    "exp, log": lambda x: jnp.log(jnp.exp(x) + 1),
    "log1p, expm1": lambda x: jnp.log1p(jnp.abs(x)) - jnp.expm1(-jnp.square(x)),
    "powers": lambda x: (x**2 + 0.5) ** -1.5 + x**3 + (jnp.abs(x) + 0.1) ** jnp.sin(x),
    "roots": lambda x: jnp.sqrt(jnp.abs(x)) + jax.lax.rsqrt(1 + x * x) + jnp.cos(x),
    "gelu, sigmoid": lambda x: jax.nn.gelu(x) - jax.nn.sigmoid(x) + jax.nn.relu(x),
    "rounding": lambda x: x + jnp.floor(x) + 0.5 * jnp.ceil(x) + jnp.sign(x),
    "bounds": lambda x: jnp.clip(x, -1, 1.5) + jnp.maximum(x, 0.25) - jnp.minimum(x, PAIR),
    "literals": lambda x: jnp.where(x > 3, 1e30, jnp.where(x < -3, -INF, x)) / 3 - 0.0,
    "bits": lambda x: x + ((STEPS & 1) ^ (jnp.arange(16) | 4)).astype(F32) - (~STEPS).astype(F32) * 0.01,
    "integers that wrap": lambda x: x + ((STEPS * BIG + BIG - jnp.square(STEPS * 77777)) > 0).astype(F32),
    "distances": lambda x: x - 0.5 * jnp.abs(jnp.arange(6)[:, None] - jnp.arange(16)).astype(F32),
    "an array with itself": lambda x: x * x - x / (1 + jnp.abs(x)),
    "two arrays": lambda x: x * PAIR + jnp.where((x > PAIR) | jnp.isnan(x), 1.0, 0.0),
    "transposed": lambda x: jnp.swapaxes(jnp.swapaxes(x, 0, 1) * 2 + x_of(shape=(6, 4, 16), seed=5), 0, 1),
    "reshaped": lambda x: (x.reshape(24, 2, 8) + x_of(shape=(2, 8), seed=6)).reshape(x.shape),
    "heads joined": lambda x: x.reshape(2, 2, 6, 16) * 2 + x_of(shape=(2, 6, 16)),
    "added dimensions": lambda x: (x[:, None] + 1)[:, 0, ..., None].squeeze(-1),
    "reduced precision": lambda x: jax.lax.reduce_precision(x, 8, 7),
    "calls": lambda x: jax.jit(lambda x: jax.nn.softplus(x) * jax.jit(jnp.tanh)(x))(x),
    "many selects": lambda x: jnp.where(MASK, causal(jnp.where(x > 0, x, 0.1 * x)), -1e9),
}
AFTER = {
    "scale": lambda y: y * 2 - 1,
    "cast": lambda y: y.astype(BF16),
    "cast both": lambda y: (y.astype(BF16), y),
    "two chains": lambda y: (jnp.exp(y).astype(BF16), jnp.tanh(y) * PAIR),
    "mask": lambda y: jnp.where(MASK, y, 0).astype(jnp.float16),
    "of rows": lambda y: y * x_of(shape=(4, 1, 16), seed=4),
    "transposed": lambda y: jnp.swapaxes(y, 0, 1).astype(BF16) * 2,
    "reshaped": lambda y: (y.reshape(-1, 8) * 3).astype(BF16),
    "indices": lambda y: jnp.where(jnp.arange(16) % 2 == 0, y, -y),
    "squared": lambda y: jnp.square(y) / 3 + y,
    "comparison": lambda y: (y > 0.1).astype(F32),
}


def softmax_of(before, axis=-1, name="softmax"):
    return lambda x, *more: getattr(jax.nn, name)(before(x, *more), axis=axis)


def both(x, after=lambda y: y):
    return after(jax.nn.softmax(x)), after(jax.nn.log_softmax(x))


CASES = {
    **{f"before: {name}": Case(softmax_of(f), x_of()) for name, f in BEFORE.items()},
    **{
        f"backward: {name}": Case(gradients_of(softmax_of(f, name=op)), x_of(), calls=2, folded=False, roundings=256)
        for (name, f), op in zip(BEFORE.items(), len(BEFORE) * ["softmax", "log_softmax"], strict=False)
    },
    **{
        f"after: {name}": Case(lambda x, after=after: after(jax.nn.log_softmax(x * 0.5)), x_of(), folded=False)
        for name, after in AFTER.items()
    },
}

TARGETS = np.array([[3, 1, 0, 15, -1, 2]] * 4)


def loss_of(dtype, **options):
    return lambda x: jax_softmax.cross_entropy_loss(x.astype(dtype), jnp.asarray(TARGETS), **options)


CASES |= {
    **{
        f"{dtype}: {name}": Case(f, x_of(dtype, shape), roundings=64, folded=False, calls=calls)
        for dtype in ("bfloat16", "float16")
        for name, f, shape, calls in [
            ("own roundings", softmax_of(lambda x: jnp.tanh(x * 0.3 + 0.1) * 1.4 - x * x * 0.05), SHAPE, 1),
            ("a chain after", lambda x: jnp.exp(jax.nn.softmax(x) * 3) * 0.1 - 1, SHAPE, 1),
            ("through float32", lambda x: jax.nn.softmax(x.astype(F32)).astype(x.dtype), SHAPE, 1),
            (
                "p twice",
                lambda x: (jax.nn.softmax(x.astype(F32)), jax.nn.softmax(x.astype(F32)).astype(x.dtype)),
                SHAPE,
                2,
            ),
            ("of bool", lambda x: jax.nn.log_softmax(jnp.where(x > 0, x, x.dtype.type(-100))), SHAPE, 1),
            ("gradient", gradients_of(lambda x: jax.nn.softmax(x * 0.5) * 2), SHAPE, 2),
            ("gradient through float32", gradients_of(lambda x: jax.nn.log_softmax(x.astype(F32) * 0.5)), SHAPE, 2),
            ("column", softmax_of(lambda x: x.astype(F32) * 0.5, 1), SHAPE, 1),
        ]
    },
    **{
        f"{name} of special numbers": Case(lambda x, f=f: jax.nn.softmax(f(x)), SPECIAL)
        for name, f in {
            "max": lambda x: jnp.maximum(x, 0.5),
            "min": lambda x: jnp.minimum(x, PAIR),
            "clamp": lambda x: jax.lax.clamp(-1.0, x, 3.0),
            "abs, neg": lambda x: -jnp.abs(x),
            "sign": lambda x: jnp.sign(x) + x * 0,
            "select": lambda x: jnp.where(jnp.isfinite(x), x, -1e9),
            "nan_to_num": lambda x: jnp.nan_to_num(x, nan=1.0, posinf=2.0, neginf=-2.0),
            "ne": lambda x: jnp.where(x != x, 0.0, x),
            "relu": lambda x: jax.nn.relu(x) + 1 / x,
            "signed zero": lambda x: jnp.where(1 / x < 0, 1.0, x),
        }.items()
    },
    **{
        f"{op} after special numbers": Case(
            lambda x, op=op: getattr(jnp, op)(jax.nn.log_softmax(x), -2.0), SPECIAL, folded=False
        )
        for op in ("maximum", "minimum", "add", "multiply")
    },
    "a row of fills is uniform": Case(lambda x: jax.nn.softmax(jnp.where(x > 100, x, jnp.finfo(F32).min)), x_of()),
    "a row of fills in 16 bits": Case(
        lambda x: jax.nn.softmax(jnp.where(x > 100, x, -1e9).astype(BF16)), x_of("bfloat16"), folded=False
    ),
    "where": Case(lambda x: jax.nn.softmax(x.astype(F32) * 2, where=MASK), x_of("bfloat16")),
    "where of rows": Case(lambda x: jax.nn.log_softmax(x * 2, where=MASK[:, :1]), x_of()),
    "where, transposed": Case(
        lambda x: jax.nn.softmax(jnp.swapaxes(x, 0, 1).astype(F32) * 2, where=MASK[0][:, None]), x_of("bfloat16")
    ),
    "where, backward": Case(
        gradients_of(lambda x: jax.nn.softmax(x * 2, where=MASK)), x_of(), calls=2, roundings=256, folded=False
    ),
    **{
        f"axis {axis}": Case(lambda x, axis=axis: jax.nn.softmax(causal(x * 0.3), axis=axis) * 2, x_of())
        for axis in (0, 1, -1, (1, 2), (0, 2), (0, 1, 2), ())
    },
    **{
        f"of {shape}": Case(lambda x: (jax.nn.softmax(x.astype(F32) * 2 + 1)).astype(BF16), x_of("bfloat16", shape))
        for shape in [(16,), (1, 16), (3, 1), (2, 1, 3, 1, 5), (1, 1), (2, 3, 2, 2, 2, 3, 2, 5)]
    },
    "a scalar operand": Case(lambda x, t: jax.nn.softmax(x / t), x_of(), np.float32(0.7)),
    "operands of 8 bits": Case(
        lambda x, b, c: jax.nn.softmax(x + b + jnp.where(c == 3, 1.0, c)),
        x_of(),
        (np.arange(16) - 8).astype(np.int8),
        np.arange(6, dtype=np.uint8)[:, None],
    ),
    "int32 operands": Case(
        lambda x, b: jax.nn.softmax(jnp.where(b * b > 20, x, x + b)), x_of(), np.arange(16, dtype=np.int32) * 65537
    ),
    "two results of rows' operators": Case(lambda x: both(x.astype(F32) * 2), x_of("bfloat16"), calls=2),
    "bias's gradient": Case(
        gradients_of(lambda b, x: jax.nn.softmax(x.astype(F32) + b)),
        x_of(shape=(6, 16), seed=2),
        x_of("bfloat16"),
        calls=2,
        folded=False,
        roundings=256,
    ),
    "soft cap's gradient": Case(
        gradients_of(lambda x: jax.nn.softmax(5 * jnp.tanh(x.astype(F32) / 5)).astype(BF16)),
        x_of("bfloat16"),
        calls=2,
        folded=False,
        roundings=64,
    ),
    "a row's sum outside": Case(lambda x: jnp.sum(jax.nn.softmax(x * 2) * PAIR, -1), x_of(), folded=False),
    "products around": Case(
        lambda x, w: jax.nn.softmax((x @ w).astype(F32) * 0.2).astype(BF16) @ w,
        x_of("bfloat16"),
        x_of("bfloat16", (16, 16)),
        roundings=64,
    ),
    "logsumexp": Case(lambda x: jax_softmax.logsumexp(x.astype(F32) * 2, -1), x_of("bfloat16")),
    "entropy": Case(lambda x: jax_softmax.entropy(x.astype(F32) * 2), x_of("bfloat16"), roundings=64),
    "divergence": Case(
        lambda x: jax_softmax.kl_divergence(x.astype(F32) * 2, jnp.flip(x).astype(F32) * 0.5),
        x_of("bfloat16"),
        calls=2,
        roundings=64,
        folded=False,
    ),
    "loss": Case(loss_of(F32), x_of("bfloat16")),
    "loss's gradient": Case(jax.grad(loss_of(F32)), x_of("bfloat16"), roundings=64),
    "loss and gradient": Case(
        jax.value_and_grad(loss_of(F32, label_smoothing=0.1, z_loss=1e-3)), x_of("bfloat16"), roundings=64
    ),
    "second derivatives of a loss": Case(
        gradients_of(jax.grad(lambda x: loss_of(F32)(x * 2))), x_of(), calls=2, folded=False, roundings=256
    ),
    "scaling": Case(lambda x: jax_softmax.absmax_scale(x.astype(F32) * 2), x_of("bfloat16")),
    "scaling to int8": Case(lambda x: jax_softmax.absmax_scale(x.astype(F32) * 2, dtype=jnp.int8), x_of("bfloat16")),
    "scaled back": Case(
        lambda x: (lambda q, s: q.astype(F32) * s)(*jax_softmax.absmax_scale(x.astype(F32) * 2, dtype=jnp.int8)),
        x_of("bfloat16"),
        folded=False,
    ),
    "a loop": Case(lambda x: jax.lax.fori_loop(0, 3, lambda k, x: jax.nn.softmax(x * 2) + 0.1, x), x_of()),
    "a scan": Case(
        lambda x: jax.lax.scan(lambda c, row: (c + 1, jax.nn.softmax(row.astype(F32) * c)), 1.0, x), x_of("bfloat16")
    ),
    "scan's gradient": Case(
        gradients_of(lambda x: jax.lax.scan(lambda c, row: (jax.nn.softmax(row * c), None), x[0], x)[0]),
        x_of(),
        calls=2,
        roundings=256,
        folded=False,
    ),
    "branches": Case(
        lambda x: jax.lax.cond(x[0, 0, 0] > 0, lambda x: jax.nn.softmax(x * 2), lambda x: jax.nn.log_softmax(x - 1), x),
        x_of(),
        calls=2,
    ),
    "checkpoint": Case(
        gradients_of(jax.checkpoint(lambda x: jax.nn.softmax(x.astype(F32) * 2).astype(BF16))),
        x_of("bfloat16"),
        calls=2,
        folded=False,
        roundings=64,
    ),
    "fused within": Case(lambda x: fuse(lambda y: jax.nn.softmax(y * 2))(x + 1) * 3, x_of()),
    "derivative of fused": Case(
        gradients_of(fuse(lambda x: jax.nn.softmax(jnp.tanh(x) * 2))), x_of(), calls=2, roundings=256, folded=False
    ),
    "vmap of fused": Case(
        jax.vmap(fuse(lambda x, b: jax.nn.softmax(x * 2 + b)), (1, None)), x_of(), x_of(shape=(16,), seed=1)
    ),
    "layers": Case(
        lambda x, w: jax.nn.softmax(jax.nn.softmax(x * 2 + 1) * 3 @ w) - 0.5, x_of(), x_of(shape=(16, 16)), calls=2
    ),
    "one after another": Case(
        lambda x: jax.nn.log_softmax(jax.nn.softmax(x * 2) * 3) - 0.5, x_of(), calls=2, roundings=64, folded=False
    ),
    "a result that an operand needs": Case(
        lambda x: jax.nn.softmax(x * 2) + jax.nn.softmax(x * 3, axis=0), x_of(), calls=2, folded=False
    ),
    "results of each other": Case(
        lambda x: (lambda p, q: (p * jnp.sum(q), q * jnp.sum(p)))(jax.nn.softmax(x * 2), jax.nn.softmax(x * 3)),
        x_of(),
        calls=2,
        folded=False,
    ),
}


@functools.cache
def lower_all():
    """All expressions are then compiled at once. What cannot be lowered says so in its own test."""
    for case in CASES.values():
        with contextlib.suppress(Exception):
            case.lowered  # noqa: B018


@compiler_is_needed
@pytest.mark.parametrize("name", CASES)
def test_values(name):
    lower_all()
    CASES[name].check()
