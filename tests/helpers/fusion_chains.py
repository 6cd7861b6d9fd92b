"""`CHAINS`: one operator, and chains of operations on elements that `fuse` folds around it.

Of several dtypes, along several axes, with masks, and of special numbers.
"""

import jax
import jax.numpy as jnp
import numpy as np
from fusion_support import BF16, F32, MASK, PAIR, SHAPE, Case, gradients_of, x_of

INF, NAN = np.inf, np.nan


def causal(x, fill=-1e9):
    rows, columns = jnp.arange(x.shape[-2])[:, None], jnp.arange(x.shape[-1])
    return jnp.where(rows >= columns, x, jnp.asarray(fill, x.dtype))


def biased(shape):
    return lambda x: x + x_of(shape=shape, seed=1)


CAUSAL_MASK = np.tril(np.ones(SHAPE[-2:], bool))
STEPS = np.arange(SHAPE[-1], dtype=np.int32)
BIG = np.int32(2**31 - 3)
SPECIAL = x_of()
# XLA takes subnormal numbers for 0 on a GPU, in some operations.
TINY = 1e-40 if jax.default_backend() == "cpu" else 1e-30
SPECIAL.reshape(-1)[3:300:7] = np.resize([NAN, INF, -INF, -0.0, 0.0, 3e38, -3e38, TINY], 43)

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
    "rotated": lambda y: jnp.transpose(y, (1, 2, 0)) * x_of(shape=(6, 16, 4), seed=8),
    "reshaped": lambda y: (y.reshape(-1, 8) * 3).astype(BF16),
    "indices": lambda y: jnp.where(jnp.arange(16) % 2 == 0, y, -y),
    "squared": lambda y: jnp.square(y) / 3 + y,
    "comparison": lambda y: (y > 0.1).astype(F32),
}


def softmax_of(before, axis=-1, name="softmax"):
    return lambda x, *more: getattr(jax.nn, name)(before(x, *more), axis=axis)


def both(x, after=lambda y: y):
    return after(jax.nn.softmax(x)), after(jax.nn.log_softmax(x))


CHAINS = {
    **{f"before: {name}": Case(softmax_of(f), x_of()) for name, f in BEFORE.items()},
    **{
        f"backward: {name}": Case(gradients_of(softmax_of(f, name=op)), x_of(), folded=False, roundings=256)
        for (name, f), op in zip(BEFORE.items(), len(BEFORE) * ["softmax", "log_softmax"], strict=False)
    },
    **{
        f"after: {name}": Case(lambda x, after=after: after(jax.nn.log_softmax(x * 0.5)), x_of(), folded=False)
        for name, after in AFTER.items()
    },
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
                1,
            ),
            ("two results", lambda x: (jax.nn.softmax(x * 0.5), jax.nn.log_softmax(x * 0.5) * 2), SHAPE, 1),
            ("of bool", lambda x: jax.nn.log_softmax(jnp.where(x > 0, x, x.dtype.type(-100))), SHAPE, 1),
            ("gradient through float32", gradients_of(lambda x: jax.nn.log_softmax(x.astype(F32) * 0.5)), SHAPE, 1),
            ("column", softmax_of(lambda x: x.astype(F32) * 0.5, 1), SHAPE, 1),
        ]
    },
    **{  # f alone rounds softmax to 16 bits before its linear map
        f"{dtype}: gradient": Case(
            gradients_of(lambda x: jax.nn.softmax(x * 0.5) * 2), x_of(dtype), roundings=2**13, folded=False
        )
        for dtype in ("bfloat16", "float16")
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
            # 1 / x is no subnormal number, which some threads of a CPU take for 0.
            "signed zero": lambda x: jnp.where(1 / jnp.clip(x, -1e30, 1e30) < 0, 1.0, x),
        }.items()
    },
    **{
        f"{op} after special numbers": Case(
            lambda x, op=op: getattr(jnp, op)(jax.nn.log_softmax(x), -2.0), SPECIAL, folded=False
        )
        for op in ("maximum", "minimum", "add", "multiply")
    },
    "two results of special numbers": Case(
        lambda x: (jax.nn.softmax(x), jax.nn.log_softmax(x)), SPECIAL, folded=False, roundings=64
    ),
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
        gradients_of(lambda x: jax.nn.softmax(x * 2, where=MASK)), x_of(), roundings=256, folded=False
    ),
    **{
        f"axis {axis}": Case(lambda x, axis=axis: jax.nn.softmax(causal(x * 0.3), axis=axis) * 2, x_of())
        for axis in (0, 1, -1, (1, 2), (0, 2), (0, 1, 2), ())
    },
    **{
        f"of {shape}": Case(lambda x: (jax.nn.softmax(x.astype(F32) * 2 + 1)).astype(BF16), x_of("bfloat16", shape))
        for shape in [(16,), (1, 16), (3, 1), (2, 1, 3, 1, 5), (1, 1), (2, 3, 2, 2, 2, 3, 2, 5)]
    },
    "float16 without subnormal numbers": Case(
        softmax_of(lambda x: jax.lax.reduce_precision(x * 3e-5, 5, 10) * 3e4), x_of(), folded=False
    ),
    "subnormal numbers of float16": Case(
        lambda x: jax.nn.softmax((x * jnp.float16(2.0**-20)).astype(F32) * 2.0**20), x_of("float16", scale=20)
    ),
    "a comparison that others read": Case(
        lambda x: (lambda y, large: (jnp.where(large, y, 0) * 2, large))(y := jax.nn.log_softmax(x), y > -3),
        x_of(),
        folded=False,
    ),
    "constants of calls": Case(
        lambda x: jax.jit(lambda x: jax.nn.softmax(x + PAIR, where=MASK) * PAIR)(x) * 2, x_of(), folded=False
    ),
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
    "two results of rows' operators": Case(lambda x: both(x.astype(F32) * 2), x_of("bfloat16")),
    "bias's gradient": Case(
        gradients_of(lambda b, x: jax.nn.softmax(x.astype(F32) + b)),
        x_of(shape=(6, 16), seed=2),
        x_of("bfloat16"),
        folded=False,
        roundings=256,
    ),
    "soft cap's gradient": Case(
        gradients_of(lambda x: jax.nn.softmax(5 * jnp.tanh(x.astype(F32) / 5)).astype(BF16)),
        x_of("bfloat16"),
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
}
