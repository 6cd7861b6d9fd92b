"""Times programs for which a kernel of their softmax alone may be the wrong choice, as they are and under `fuse`; views
of which XLA's kernels are as fast as ours, by jax.nn and by this package; and what operators that are left to XLA are
there, next to jax.nn and optax.

python benchmarks/never_slower.py [--only NAME ...] [--explain] [--output FOLDER]

What XLA makes in the same kernel as its softmax, a kernel of ours would have to read; what only a reduction, a slice or
a gather reads, it would have to write. Writes never_slower.md: asked are no less than 0.98 of XLA's speed and no more
than 1.02 times its memory.
"""

import sys

import jax
import jax.numpy as jnp
from computation import Computation
from computations import (
    ATTENTION,
    apply,
    jax_causal,
    layer,
    linen_arguments,
    queries_keys_values,
    weighted,
)
from jax.extend.core import Literal
from models import run
from their_losses import exponentials

import jax_softmax
from jax_softmax.fusion.program.graph import graph_of
from jax_softmax.primitives import records
from jax_softmax.primitives.operators import PRIMITIVES

F32 = jnp.float32


def normal(key, *shapes):
    keys = jax.random.split(key, len(shapes))
    return tuple(jax.random.normal(k, shape, F32) for k, shape in zip(keys, shapes, strict=True))


def with_gradient(function):
    """Value and gradient of a sum of the results."""
    return jax.value_and_grad(lambda *args: jnp.sum(function(*args)))


# ---- From the figures of held-out code


def straight_through_gumbel(logits, noise, values):
    soft = jax.nn.softmax(logits + noise)
    hard = jax.nn.one_hot(jnp.argmax(soft, -1), soft.shape[-1])
    return (soft + jax.lax.stop_gradient(hard - soft)) * values


def softmax_of_squares(x, values):
    """Written out, of short rows."""
    _, e, total = exponentials(x * x)
    return e / total * values


def attention_written_out(q, k, v):
    """The product is divided, not the weights."""
    _, e, total = exponentials(q @ k.mT * q.shape[-1] ** -0.5)
    return e @ v / total


def pixels(key, batch, classes, side):
    labels = jax.random.randint(key, (batch, side, side), 0, classes)
    return *normal(key, (batch, classes, side, side)), labels


def pixels_with_classes_last(key, batch, classes, side):
    logits, labels = pixels(key, batch, classes, side)
    return jnp.moveaxis(logits, 1, -1), labels


def integer_labels(logits, labels):
    import optax

    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def layer_norm_softmax(x, scale, bias):
    mean = x.mean(-1, keepdims=True)
    normalised = (x - mean) * jax.lax.rsqrt(jnp.square(x - mean).mean(-1, keepdims=True) + 1e-6)
    return jax.nn.softmax(normalised * scale + bias)


def hidden_markov_model(log_start, log_transitions, log_likelihoods):
    def step(log_alpha, log_likelihood):
        joint = log_alpha[:, :, None] + log_transitions[None]
        return jax.nn.logsumexp(joint, axis=1) + log_likelihood, None

    last, _ = jax.lax.scan(step, log_start, log_likelihoods)
    return jax.nn.logsumexp(last, axis=-1)


def clip_by_diagonals(logits):
    return -(jnp.diag(jax.nn.log_softmax(logits, 0)) + jnp.diag(jax.nn.log_softmax(logits, 1))).mean() / 2


def clip_by_labels(logits):
    labels = jnp.arange(len(logits))
    return (integer_labels(logits, labels) + integer_labels(logits.T, labels)) / 2


def sink_arguments(key, batch, length, heads, features):
    inputs, cotangent = queries_keys_values(key, batch, length, heads, features)
    return (*inputs, jnp.zeros((heads,), jnp.bfloat16)), cotangent


def attention_with_sink(inputs):
    q, k, v, sink = inputs
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
    scores = jnp.where(jnp.tri(scores.shape[-1], dtype=bool), scores, jnp.finfo(scores.dtype).min)
    column = jnp.broadcast_to(sink[None, :, None, None], (*scores.shape[:-1], 1))
    return weighted(jax.nn.softmax(jnp.concatenate([scores, column], -1))[..., :-1], v)


def sampled_by_cumsum(logits, uniform):
    return jnp.sum(jnp.cumsum(jax.nn.softmax(logits), -1) < uniform, -1)


def entropy_of_log_softmax_twice(logits):
    log_p = jax.nn.log_softmax(jax.nn.log_softmax(logits))
    return -jnp.sum(jnp.exp(log_p) * log_p, -1)


# ---- Of our own


def predicted(logits):
    return jnp.argmax(jax.nn.softmax(logits), -1)


def confidence(logits):
    p = jax.nn.softmax(logits)
    return p.max(-1), p.argmax(-1)


def first_class(logits):
    return jax.nn.softmax(logits)[..., 0]


def soft_argmax(heatmaps):
    p = jax.nn.softmax(heatmaps.reshape(*heatmaps.shape[:-2], -1)).reshape(heatmaps.shape)
    rows, columns = jnp.arange(p.shape[-2], dtype=F32), jnp.arange(p.shape[-1], dtype=F32)
    return jnp.stack([(p.sum(-1) * rows).sum(-1), (p.sum(-2) * columns).sum(-1)], -1)


def mixture_density(log_weights, means, log_scales, y):
    log_weights = jax.nn.log_softmax(log_weights)
    distance = (y[:, None] - means) * jnp.exp(-log_scales)
    return -jax.nn.logsumexp(log_weights - 0.5 * jnp.square(distance) - log_scales, -1)


def beam_step(logits, scores):
    total = scores[..., None] + jax.nn.log_softmax(logits)
    return jax.lax.top_k(total.reshape(len(total), -1), 8)


def likelihood(logits, labels):
    return jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], -1)[..., 0]


def entropy(logits):
    log_p = jax.nn.log_softmax(logits)
    return -jnp.sum(jnp.exp(log_p) * log_p, -1)


def router(x, w):
    x = x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6)
    return jax.lax.top_k(jax.nn.softmax(x @ w), 2)


def attention_pooling(x, w):
    weights = jax.nn.softmax(jnp.einsum("btd,d->bt", x, w))
    return jnp.einsum("bt,btd->bd", weights, x)


def info_nce(a, b):
    a, b = (x / jnp.linalg.norm(x, axis=-1, keepdims=True) for x in (a, b))
    return integer_labels(a @ b.T / 0.07, jnp.arange(len(a)))


def distance_of_probabilities(student, teacher):
    return jnp.square(jax.nn.softmax(student) - jax.nn.softmax(teacher)).mean()


def dice(logits, labels):
    p, targets = jax.nn.softmax(logits), jax.nn.one_hot(labels, logits.shape[-1])
    both, each = (p * targets).sum((1, 2)), (p + targets).sum((1, 2))
    return 1 - (2 * both / (each + 1e-6)).mean()


def linear_attention(q, k, v):
    q, k = jax.nn.softmax(q), jax.nn.softmax(k, axis=-2)
    return jnp.einsum("bhqd,bhde->bhqe", q, jnp.einsum("bhkd,bhke->bhde", k, v))


def slot_attention(scores, values):
    weights = jax.nn.softmax(scores, axis=1) + 1e-8
    return jnp.einsum("bst,btd->bsd", weights / weights.sum(-1, keepdims=True), values)


def nucleus(logits):
    p = jnp.flip(jnp.sort(jax.nn.softmax(logits), -1), -1)
    return jnp.sum(jnp.cumsum(p, -1) < 0.9, -1)


def masked_loss(logits, labels):
    counted = labels % 3 != 0
    log_p = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], -1)[..., 0]
    return -jnp.sum(jnp.where(counted, log_p, 0)) / jnp.sum(counted)


def gated_by_instance_norm(x):
    x = (x - x.mean((1, 2), keepdims=True)) / (x.std((1, 2), keepdims=True) + 1e-5)
    return jax.nn.softmax(x, axis=-1) * x


def arrays(*make_shapes):
    """Arguments of normal numbers, their shapes made of the sizes."""
    return lambda key, *sizes: normal(key, *(make(*sizes) for make in make_shapes))


def float32_logits(key, *shape):
    labels = jax.random.randint(jax.random.fold_in(key, 1), shape[:-1], 0, shape[-1])
    return *normal(key, shape), labels


def same(*shape):
    return shape


def _one(name, function, arguments, sizes, small_sizes, package=None, precision="float32"):
    return Computation(name, function, arguments, sizes, small_sizes, precision, package)


def view(shape, axes, dtype, op="softmax", backward=False):
    """An operator of an array, or its derivative: jax.nn's next to this package's."""

    def function(module):
        def forward(x):
            return getattr(module, op)(x, axis=axes)

        return (lambda x, t: jax.vjp(forward, x)[1](t)[0]) if backward else (lambda x, t: forward(x))

    def arguments(key, *shape):
        return tuple(a.astype(dtype) for a in normal(key, shape, shape))

    name = f"{op} of {dtype} {shape} along {axes}{', derivative' * backward}"
    small = tuple(min(n, 5) for n in shape)
    return Computation(name, function(jax.nn), arguments, shape, small, dtype, inner=function(jax_softmax))


def left_to_xla(op, theirs, dtype):
    """An operator's value and gradient: another package's next to this one's, of which no kernel is used."""

    def with_sum(function):
        return jax.value_and_grad(lambda x, weights, *args: jnp.sum(function(x, *args).astype(F32) * weights))

    def arguments(key, rows, columns):
        x, weights = normal(key, (rows, columns), (rows, columns if op in ("softmax", "log_softmax") else 1))
        weights = weights if op in ("softmax", "log_softmax") else weights[:, 0]
        if op == "softmax_cross_entropy_with_integer_labels":
            return x.astype(dtype), weights, jax.random.randint(key, (rows,), 0, columns)
        return (x.astype(dtype), weights, *([x] if op == "softmax_cross_entropy" else []))

    name = f"{op} of {dtype}, left to XLA"
    theirs = _optax(theirs) if isinstance(theirs, str) else theirs
    ours = by_formulas(with_sum(getattr(jax_softmax, op)))
    return Computation(name, with_sum(theirs), arguments, ROWS, FEW, dtype, "optax", ours)


def by_formulas(function):
    """A function with jax.numpy's formulas in the place of this package's operators."""

    def call(*args):
        closed = jax.make_jaxpr(function)(*args)
        graph = graph_of(closed.jaxpr)
        variables = [*closed.jaxpr.constvars, *closed.jaxpr.invars]
        values = dict(zip(variables, [*closed.consts, *args], strict=True))

        def read(atoms):
            return [a.val if isinstance(a, Literal) else values[a] for a in atoms]

        for equation in graph.equations:
            params = dict(equation.params)
            if equation.name in PRIMITIVES:
                del params["axis_name"]
                results = records.apply(equation.name, *read(equation.inputs), **params)
            else:
                results = equation.eqn.primitive.bind(*read(equation.inputs), **params)
            results = results if isinstance(results, list | tuple) else [results]
            values.update(zip(equation.outputs, results, strict=True))
        return tuple(read(graph.outputs))

    return call


def _optax(name):
    def function(*args):
        import optax

        return getattr(optax, name)(*args)

    return function


ROWS, FEW = (16384, 4096), (6, 32)
COMPUTATIONS = [
    _one(
        "straight-through Gumbel", with_gradient(straight_through_gumbel), arrays(same, same, same), (65536, 1024), FEW
    ),
    _one(
        "pixels, classes moved last",
        with_gradient(lambda logits, labels: integer_labels(jnp.moveaxis(logits, 1, -1), labels)),
        pixels,
        (32, 21, 512),
        (2, 5, 4),
        "optax",
    ),
    _one(
        "pixels, classes last",
        with_gradient(integer_labels),
        pixels_with_classes_last,
        (32, 21, 512),
        (2, 5, 4),
        "optax",
    ),
    _one(
        "layer norm, softmax",
        layer_norm_softmax,
        arrays(same, lambda r, c: (c,), lambda r, c: (c,)),
        (65536, 2048),
        FEW,
    ),
    _one(
        "hidden Markov model",
        hidden_markov_model,
        arrays(lambda b, n, t: (b, n), lambda b, n, t: (n, n), lambda b, n, t: (t, b, n)),
        (64, 128, 128),
        (2, 5, 3),
    ),
    _one("CLIP by diagonals", with_gradient(clip_by_diagonals), arrays(lambda n: (n, n)), (8192,), (9,)),
    _one("CLIP by optax", with_gradient(clip_by_labels), arrays(lambda n: (n, n)), (8192,), (9,), "optax"),
    layer("attention with a sink column", attention_with_sink, sink_arguments, ATTENTION),
    _one("sampled by a cumsum", sampled_by_cumsum, arrays(same, lambda r, c: (r, 1)), (512, 131072), FEW),
    _one("entropy of log_softmax twice", with_gradient(entropy_of_log_softmax_twice), arrays(same), (4096, 50257), FEW),
    layer("jax.nn causal attention", jax_causal, sizes=ATTENTION),
    layer("linen, dropout", apply, lambda key, *sizes: linen_arguments(key, *sizes, dropout=0.1), ATTENTION, "flax"),
    layer(
        "linen, float32 softmax",
        apply,
        lambda key, *sizes: linen_arguments(key, *sizes, float32_softmax=True),
        ATTENTION,
        "flax",
    ),
    _one("predicted class", predicted, arrays(same), ROWS, FEW),
    _one("confidence", confidence, arrays(same), ROWS, FEW),
    _one("first class", first_class, arrays(same), ROWS, FEW),
    _one("soft argmax", with_gradient(soft_argmax), arrays(same), (64, 17, 256, 256), (2, 3, 4, 4)),
    _one(
        "mixture density",
        with_gradient(mixture_density),
        arrays(same, same, same, lambda r, c: (r,)),
        (1048576, 32),
        FEW,
    ),
    _one("beam step", beam_step, arrays(same, lambda b, k, n: (b, k)), (64, 8, 32000), (2, 8, 16)),
    _one("likelihood", likelihood, float32_logits, (8, 1024, 50257), (2, 3, 31)),
    _one("entropy", with_gradient(entropy), arrays(same), ROWS, FEW),
    _one(
        "router",
        router,
        arrays(lambda r, d, e: (r, d), lambda r, d, e: (d, e)),
        (65536, 1024, 64),
        (6, 8, 4),
        precision="tf32",
    ),
    _one(
        "attention pooling",
        with_gradient(attention_pooling),
        arrays(same, lambda b, t, d: (d,)),
        (64, 4096, 256),
        (2, 5, 8),
        precision="tf32",
    ),
    _one("InfoNCE", with_gradient(info_nce), arrays(same, same), (8192, 512), FEW, "optax", "tf32"),
    _one("distance of probabilities", with_gradient(distance_of_probabilities), arrays(same, same), ROWS, FEW),
    _one("dice", with_gradient(dice), float32_logits, (16, 256, 256, 8), (2, 4, 4, 3)),
    _one(
        "linear attention",
        with_gradient(linear_attention),
        arrays(same, same, same),
        (8, 16, 4096, 64),
        (2, 2, 5, 8),
        precision="tf32",
    ),
    _one(
        "slot attention",
        with_gradient(slot_attention),
        arrays(lambda b, s, t, d: (b, s, t), lambda b, s, t, d: (b, t, d)),
        (64, 8, 16384, 64),
        (2, 3, 5, 4),
        precision="tf32",
    ),
    _one("softmax written out", with_gradient(softmax_of_squares), arrays(same, same), (524288, 48), FEW),
    _one(
        "attention written out",
        with_gradient(attention_written_out),
        arrays(same, same, same),
        (64, 1024, 64),
        (2, 5, 4),
        precision="tf32",
    ),
    _one("nucleus", nucleus, arrays(same), (256, 32000), FEW),
    _one("masked loss", with_gradient(masked_loss), float32_logits, (64, 512, 8192), (2, 3, 31)),
    _one("instance norm gate", gated_by_instance_norm, arrays(same), (256, 64, 64, 64), (2, 4, 4, 8)),
    view((120, 20000, 100), (1,), "bfloat16", backward=True),
    view((60, 20000, 100), (1,), "float32", backward=True),
    view((400, 640, 1000), (0, 2), "bfloat16", backward=True),
    view((200, 48, 100, 280), (0, 2), "bfloat16", backward=True),
    view((2000, 20, 300, 20), (1, 3), "bfloat16"),
    view((11184810, 24), (1,), "bfloat16", "log_softmax"),
    *(
        left_to_xla(op, theirs, dtype)
        for dtype in ("float32", "bfloat16")
        for op, theirs in (
            ("softmax", jax.nn.softmax),
            ("log_softmax", jax.nn.log_softmax),
            ("logsumexp", lambda x: jax.nn.logsumexp(x, -1)),
            ("softmax_cross_entropy_with_integer_labels", "softmax_cross_entropy_with_integer_labels"),
            ("softmax_cross_entropy", "softmax_cross_entropy"),
            ("entropy", entropy),
        )
    ),
]

if __name__ == "__main__":
    sys.exit(run(COMPUTATIONS, __doc__, "never_slower", "Programs for which a kernel may be the wrong choice"))
