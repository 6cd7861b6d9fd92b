"""Random programs around softmaxes, as people write them: chains of operations before and after, labels, masks, casts.

A program is data, so that hypothesis can print and shrink it. It runs in its own dtypes, or in float64 throughout,
where its casts do nothing: that is the reference.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

from jax_softmax.functions import patching

SHAPES = [(3, 5, 16), (2, 33), (4, 2, 7), (2, 3, 8, 8), (6, 64)]
FLOATS = ["float32", "bfloat16", "float16"]


class Program(NamedTuple):
    shape: tuple[int, ...]
    dtype: str  # of x
    scale: float  # of x's numbers
    special: bool  # whether some are infinite or NaN
    before: tuple[tuple, ...]
    head: tuple
    after: tuple[tuple, ...]
    transform: str
    seed: int


class Arithmetic:
    """What a program computes with: its own dtypes, or float64."""

    def __init__(self, program, wide):
        self.wide = wide
        self.rng = np.random.default_rng(program.seed)
        self.program = program

    def cast(self, x, dtype):
        return x if self.wide else x.astype(dtype)

    def array(self, shape, like):
        """Random numbers that both runs agree on."""
        a = self.rng.standard_normal(shape).astype(np.float32)
        return jnp.asarray(a).astype(jnp.bfloat16).astype(jnp.float32).astype(like.dtype)

    def bits(self, shape):
        return jnp.asarray(self.rng.random(shape) < 0.7)

    def labels(self, shape, n):
        return jnp.asarray(self.rng.integers(0, n, shape), jnp.int32)


def _bias_shape(shape, kind):
    return {"full": shape, "row": (*shape[:-1], 1), "column": shape[-1:], "scalar": ()}[kind]


def _mask(a, x, kind):
    n = x.shape[-1]
    if kind == "causal":
        return jnp.arange(x.shape[-2])[:, None] >= jnp.arange(n)
    if kind == "window":
        return jnp.abs(jnp.arange(x.shape[-2])[:, None] - jnp.arange(n)) < 3
    if kind == "length":
        return jax.lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - 1) < n - 2
    return a.bits({"full": x.shape, "column": (n,), "row": (*x.shape[:-1], 1)}[kind])


def _fill(x, fill):
    return {"min": jnp.finfo(jnp.float32 if x.dtype == jnp.float64 else x.dtype).min, "big": -1e4, "inf": -jnp.inf}[
        fill
    ]


def _add_bits(a, x, dtype):
    return x + a.bits(x.shape).astype(dtype).astype(x.dtype)


def _add_one_hot(a, x, dtype):
    return x + jax.nn.one_hot(a.labels(x.shape[:-1], x.shape[-1]), x.shape[-1], dtype=dtype).astype(x.dtype)


def _add_broadcast_index(a, x, axis_extent):
    index = jax.lax.broadcasted_iota(jnp.int32, (*x.shape[:-1], axis_extent), x.ndim - 1)
    index = index if axis_extent == x.shape[-1] else jnp.broadcast_to(index, x.shape)
    return x - 0.25 * index.astype(x.dtype)


ELEMENTWISE = {
    "times": lambda a, x, c: x * c,
    "divided": lambda a, x, c: x / c,
    "cast": lambda a, x, dtype: a.cast(x, dtype),
    "plus array": lambda a, x, kind: x + a.array(_bias_shape(x.shape, kind), x),
    "times array": lambda a, x, kind: x * a.array(_bias_shape(x.shape, kind), x),
    "cap": lambda a, x, c: c * jnp.tanh(x / c),
    "power": lambda a, x, n: x**n * 0.01,
    "square": lambda a, x: jnp.square(x) * 0.1,
    "abs": lambda a, x: jnp.abs(x) - 1,
    "clip": lambda a, x: jnp.clip(x, -3, 5),
    "sigmoid": lambda a, x: jax.nn.sigmoid(x) * 3,
    "softplus": lambda a, x: jax.nn.softplus(x),
    "exp": lambda a, x: jnp.exp(jnp.minimum(x, 3)),
    "where": lambda a, x, kind, fill: jnp.where(_mask(a, x, kind), x, jnp.asarray(_fill(x, fill), x.dtype)),
    "plus mask": lambda a, x, kind: x + jnp.where(_mask(a, x, kind), 0, jnp.asarray(-1e4, x.dtype)),
    "plus bits": _add_bits,
    "plus one-hot": _add_one_hot,
    "plus index": _add_broadcast_index,
    "swapped twice": lambda a, x: jnp.swapaxes(jnp.swapaxes(x, 0, -1) * 0.5, 0, -1),
    "others lowered": lambda a, x: jnp.where(x == jnp.max(x, -1, keepdims=True), x, x - 2),
    "cut": lambda a, x: x[..., :-1, :] if x.shape[-2] > 2 else x,
    "cut in front": lambda a, x: x[..., 1:, :] if x.shape[-2] > 2 else x,
    "joined": lambda a, x: (x.reshape(-1, x.shape[-1]) + 1).reshape(x.shape),
}
_MASKS = st.sampled_from(["full", "column", "row", "length"])
_NUMBERS = st.sampled_from([0.3, 0.125, 1.7, -0.6, 3.0])
_KINDS = st.sampled_from(["full", "row", "column", "scalar"])
_SMALL_DTYPES = st.sampled_from(["int8", "int8", "int32", "bool", "float32", "bfloat16"])


def _step(name):
    numbers = st.tuples(st.just(name), _NUMBERS)
    return {
        "times": numbers,
        "divided": st.tuples(st.just(name), st.sampled_from([0.7, 3.0, 4.0])),
        "cast": st.tuples(st.just(name), st.sampled_from(FLOATS)),
        "plus array": st.tuples(st.just(name), _KINDS),
        "times array": st.tuples(st.just(name), _KINDS),
        "cap": st.tuples(st.just(name), st.sampled_from([5.0, 30.0])),
        "power": st.tuples(st.just(name), st.sampled_from([2, 3, 4])),
        "where": st.tuples(st.just(name), _MASKS, st.sampled_from(["min", "big", "inf"])),
        "plus mask": st.tuples(st.just(name), _MASKS),
        "plus bits": st.tuples(st.just(name), _SMALL_DTYPES),
        "plus one-hot": st.tuples(st.just(name), _SMALL_DTYPES),
        "plus index": st.tuples(st.just(name), st.just(1)),
    }.get(name, st.tuples(st.just(name)))


def _picked(a, log_p, kind):
    """A number of each row at its label, as people write it."""
    n, dtype = log_p.shape[-1], log_p.dtype
    labels = a.labels(log_p.shape[:-1], n)
    if kind == "gather":
        return jnp.take_along_axis(log_p, labels[..., None], -1)[..., 0]
    targets = jax.nn.one_hot(labels, n, dtype=dtype)
    if kind == "smoothed":
        targets = targets * 0.9 + 0.1 / n
    if kind == "through bfloat16":
        targets = a.cast(a.cast(targets * 0.3, "bfloat16"), dtype)
    if kind == "negative":
        return jnp.sum(-targets * log_p, -1)
    if kind == "index of extent 1":
        index = jnp.broadcast_to(
            jax.lax.broadcasted_iota(jnp.int32, (*log_p.shape[:-1], 1), log_p.ndim - 1), log_p.shape
        )
        return jnp.sum((index == jnp.zeros_like(labels)[..., None]).astype(dtype) * log_p, -1)
    if kind == "one label":
        index = jax.lax.broadcasted_iota(jnp.int32, log_p.shape, log_p.ndim - 1)
        return jnp.sum((index == jnp.int32(n // 2)).astype(dtype) * log_p, -1)
    return jnp.sum(targets * log_p, -1)


def _divergence(a, x, c):
    other = x * c + a.array(x.shape, x)
    log_p, log_q = jax.nn.log_softmax(x), jax.nn.log_softmax(other)
    return jnp.sum(jnp.exp(log_p) * (log_p - log_q), -1)


def _written(a, x, kind, axis):
    """Softmaxes as people write them out, and what is made of them."""
    x = jnp.minimum(x, 1e4) if kind == "finite loss" else x  # it is -inf, and ours NaN, in a row with inf
    largest = jnp.max(x, axis, keepdims=True)
    if kind.startswith("finite"):  # as jax.nn.logsumexp has it
        largest = jax.lax.stop_gradient(jnp.where(jnp.isfinite(largest), largest, 0))
    shifted = x - (jax.lax.stop_gradient(largest) if kind.startswith("constant") else largest)
    e = jnp.exp(shifted)
    total = jnp.sum(e, axis, keepdims=True)
    log_p = shifted - jnp.log(total)
    return {
        "softmax": lambda: e / total,
        "constant softmax": lambda: e * (1 / total),
        "log_softmax": lambda: log_p,
        "constant log_softmax": lambda: log_p,
        "both": lambda: e / total + 0.1 * log_p,
        "logsumexp": lambda: jnp.log(total) + largest,
        "finite logsumexp": lambda: jnp.log(jnp.abs(total)) + largest,
        "finite softmax": lambda: e / total,
        "finite loss": lambda: -_picked(a, log_p, "gather"),
        # Of a row of fills a difference of such numbers loses what log_softmax has.
        "less logsumexp": lambda: (y := jnp.maximum(x, -1e4)) - jax.nn.logsumexp(y, axis, keepdims=True),
        "and exponentials": lambda: e / total + 0.1 * e,
        "loss": lambda: -_picked(a, log_p, "one-hot"),
        "z loss": lambda: jnp.sum(0.1 * (jnp.log(total) + largest) ** 2) - _picked(a, log_p, "gather"),
        "divided later": lambda: e @ a.array((x.shape[-1], 5), x) / (total if axis == -1 else 3),
    }[kind]()


def _by_name(a, x, name, dtype):
    """Of a function that the program imported before `fuse` replaced it, or by a cumulative sum."""
    if name == "cumlogsumexp":
        return jnp.exp(x - jax.lax.cumlogsumexp(x, axis=x.ndim - 1)[..., -1:])
    y = patching.originals[name](x, -1)
    return a.cast(y, dtype) if name != "logsumexp" else y * y


def _weights(x, kind):
    return {
        "softmax": lambda: jax.nn.softmax(x),
        "of logarithms": lambda: jnp.exp(jax.nn.log_softmax(x)),
        "less logsumexp": lambda: jnp.exp((y := jnp.maximum(x, -1e4)) - jax.nn.logsumexp(y, -1, keepdims=True)),
        "difference": lambda: jax.nn.softmax(x) - 0.3 * jax.nn.softmax(x * 0.5),
    }[kind]()


HEADS = {
    "written": _written,
    "by name": _by_name,
    "softmax": lambda a, x, axis: jax.nn.softmax(x, axis),
    "log_softmax": lambda a, x, axis: jax.nn.log_softmax(x, axis),
    "logsumexp": lambda a, x: jax.nn.logsumexp(x, -1),
    "masked softmax": lambda a, x, kind: jax.nn.softmax(x, -1, where=_mask(a, x, kind)),
    "masked log_softmax": lambda a, x: jnp.where(m := a.bits(x.shape), jax.nn.log_softmax(x, -1, where=m), 0),
    "loss": lambda a, x, kind: -_picked(a, jax.nn.log_softmax(x), kind),
    "z loss": lambda a, x: -_picked(a, jax.nn.log_softmax(x), "gather") + 0.1 * jax.nn.logsumexp(x, -1) ** 2,
    "entropy": lambda a, x: -jnp.sum(jax.nn.softmax(x) * jax.nn.log_softmax(x), -1),
    "sum of p": lambda a, x: jnp.sum(jnp.exp(jax.nn.log_softmax(x)), -1),
    "divergence": _divergence,
    "both": lambda a, x: jax.nn.softmax(x) + 0.1 * jax.nn.log_softmax(x),
    "weights, values": lambda a, x, kind: _weights(x, kind) @ a.array((x.shape[-1], 5), x),
}
_LABELLED = st.sampled_from(
    ["gather", "one-hot", "smoothed", "through bfloat16", "negative", "one label", "index of extent 1"]
)
_HEAD = st.one_of(
    st.tuples(st.sampled_from(["softmax", "log_softmax"]), st.sampled_from([-1, -1, 0, (-2, -1)])),
    st.tuples(st.just("masked softmax"), _MASKS),
    st.tuples(st.just("loss"), _LABELLED),
    st.tuples(st.just("divergence"), st.sampled_from([0.5, 0.3])),
    *(st.just((name,)) for name in ("logsumexp", "masked log_softmax", "z loss", "entropy", "sum of p", "both")),
    st.tuples(
        st.just("weights, values"), st.sampled_from(["softmax", "of logarithms", "less logsumexp", "difference"])
    ),
)
_WRITTEN = ["softmax", "constant softmax", "log_softmax", "constant log_softmax", "both", "logsumexp", "less logsumexp"]
_WRITTEN += ["and exponentials", "loss", "z loss", "divided later"]
_WRITTEN += ["finite logsumexp", "finite softmax", "finite loss"]
_HEAD = st.one_of(_HEAD, st.tuples(st.just("written"), st.sampled_from(_WRITTEN), st.sampled_from([-1, -1, 0])))
_AFTER = ["times", "cast", "times array", "square", "plus bits", "exp", "swapped twice", "plus one-hot", "abs"]
TRANSFORMS = ["gradient of fused", "jvp", "vmap", "scan", "checkpoint", "second", *3 * ["gradient"], *5 * ["value"]]


_TWICE = ["times", "divided", "cap", "sigmoid", "softplus", "power", "others lowered"]


@st.composite
def made_twice(draw):
    """What a kernel reads XLA makes as well, for rows whose sums tell whether both are rounded alike."""
    before = draw(st.lists(st.sampled_from(_TWICE).flatmap(_step), min_size=1, max_size=2))
    return Program(
        shape=draw(st.sampled_from(SHAPES)),
        dtype=draw(st.sampled_from(FLOATS)),
        scale=draw(st.sampled_from([4.0, 20.0])),
        special=False,
        before=(*before, ("cast", "float32")),
        head=draw(st.sampled_from([("sum of p",), ("sum of p",), ("entropy",), ("divergence", 0.5)])),
        after=(),
        transform=draw(st.sampled_from(["value", "value", "gradient"])),
        seed=draw(st.integers(0, 1000)),
    )


_ROUNDED = ["times", "plus array", "times array"]


@st.composite
def derivatives_of_fused(draw):
    """What is kept for a derivative, of rows whose numbers are made after several roundings to 16 bits: less than is
    read, as the last operand is an array."""
    before = draw(st.lists(st.sampled_from(_ROUNDED).flatmap(_step), min_size=1, max_size=2))
    by_name = st.tuples(
        st.just("by name"),
        st.sampled_from(["softmax", "log_softmax", "logsumexp", "cumlogsumexp"]),
        st.sampled_from(FLOATS),
    )
    written = st.tuples(st.just("written"), st.sampled_from(_WRITTEN[:-2]), st.just(-1))
    return Program(
        shape=draw(st.sampled_from(SHAPES)),
        dtype=draw(st.sampled_from(["bfloat16", "bfloat16", "float16"])),
        scale=draw(st.sampled_from([4.0, 20.0])),
        special=False,
        before=(*before, (draw(st.sampled_from(["plus array", "times array"])), "full"), ("cast", "float32")),
        head=draw(st.one_of(by_name, by_name, written, st.just(("softmax", -1)))),
        after=(),
        transform="gradient of fused",
        seed=draw(st.integers(0, 1000)),
    )


@st.composite
def programs(draw):
    if draw(st.integers(0, 2)) == 0:
        return draw(made_twice() if draw(st.booleans()) else derivatives_of_fused())
    shape = draw(st.sampled_from(SHAPES))
    steps = st.sampled_from(sorted(ELEMENTWISE)).flatmap(_step)
    before = draw(st.lists(steps, max_size=2))
    if draw(st.booleans()):
        before.append(("cast", "float32"))
    before += draw(st.lists(steps, max_size=3))
    if len(shape) > 2 and draw(st.booleans()):
        before.append(("where", draw(st.sampled_from(["causal", "window"])), draw(st.sampled_from(["min", "inf"]))))
    after = draw(st.lists(st.sampled_from(_AFTER).flatmap(_step), max_size=3))
    return Program(
        shape=shape,
        dtype=draw(st.sampled_from(FLOATS)),
        scale=draw(st.sampled_from([1.0, 4.0, 20.0])),
        special=draw(st.integers(0, 5)) == 0,
        before=tuple(before),
        head=draw(_HEAD),
        after=tuple(after),
        transform=draw(st.sampled_from(TRANSFORMS)),
        seed=draw(st.integers(0, 1000)),
    )


def argument(program):
    """x: numbers that its dtype holds."""
    x = np.random.default_rng(program.seed + 1).standard_normal(program.shape) * program.scale
    if program.special and program.transform == "value":
        x.reshape(-1)[::23] = np.resize([np.inf, -np.inf, np.nan, -np.inf], x.size)[: len(x.reshape(-1)[::23])]
    return jnp.asarray(x, program.dtype)


def logits_of(program, wide=False, a=None):
    """The function of x that gives what the program's softmax is of."""
    a = a or Arithmetic(program, wide)

    def logits(x):
        for name, *params in program.before:
            x = ELEMENTWISE[name](a, x, *params)
        return x

    return logits


def function_of(program, wide=False):
    """The program's function of x, of one array."""

    def f(x):
        a = Arithmetic(program, wide)
        x = logits_of(program, wide, a)(x)
        y = HEADS[program.head[0]](a, x, *program.head[1:])
        for name, *params in program.after:
            if y.ndim:
                y = ELEMENTWISE[name](a, y, *params)
        return y

    return f


def transformed(f, program, fuse=lambda f: f):
    """The function that is run, which is fused, or a transformation of a fused one."""

    def gradient_of(f):
        """The gradient of a weighted sum of f's results, and these."""

        def total(x):
            y = f(x)
            rng = np.random.default_rng(program.seed + 2)
            weights = jnp.asarray(rng.standard_normal(y.shape).astype(np.float32)).astype(jnp.bfloat16)
            wide = jnp.float64 if x.dtype == jnp.float64 else jnp.float32
            return jnp.sum(y.astype(wide) * weights.astype(wide)), y

        return lambda x: jax.grad(total, has_aux=True)(x)

    def along(x):
        return jnp.cos(jnp.arange(x.size, dtype=jnp.float32)).reshape(x.shape).astype(x.dtype)

    return {
        "value": lambda: fuse(f),
        "gradient": lambda: fuse(gradient_of(f)),
        "gradient of fused": lambda: gradient_of(fuse(f)),
        "jvp": lambda: fuse(lambda x: jax.jvp(f, (x,), (along(x),))),
        "vmap": lambda: fuse(jax.vmap(gradient_of(f), in_axes=0)) if len(program.shape) > 2 else fuse(f),
        "scan": lambda: fuse(lambda x: jax.lax.scan(lambda c, _: (c, f(c)), x, None, length=2)[1]),
        "checkpoint": lambda: fuse(gradient_of(jax.checkpoint(f))),
        "second": lambda: fuse(jax.grad(lambda x: jnp.sum(jnp.sin(gradient_of(f)(x)[0].astype(jnp.float32))))),
    }[program.transform]()
