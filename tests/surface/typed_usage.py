"""Usage as it is documented, which type checkers accept; and, where a line ends with `type: ignore`, what they refuse.

`.ci/run` has mypy and pyright check this file. Nothing runs it.
"""

import jax
import numpy as np

import jax_softmax
from jax_softmax import Explanation, Fused, FusionReport, TokenLosses


def functions(x: jax.Array, mask: jax.Array) -> None:
    y: jax.Array = jax_softmax.softmax(x)
    y = jax_softmax.softmax(x, axis=(0, 2), where=mask)
    y = jax_softmax.softmax(np.ones((2, 3)), None, axis_name="model")
    y = jax_softmax.softmax(x, sink=x[:, :1])
    y = jax_softmax.log_softmax(x, axis=[0, 1])
    y = jax_softmax.softmax_vjp(x) + jax_softmax.log_softmax_vjp(x)
    y = jax_softmax.entropy(x, where=mask)
    y = jax_softmax.kl_divergence(x, x, axis=np.array([0]))
    y, scale = jax_softmax.absmax_scale(x, dtype="int8")
    y = y * scale
    jax_softmax.softmax(x, axis="rows")  # type: ignore[arg-type]
    jax_softmax.softmax("x")  # type: ignore[arg-type]
    jax_softmax.softmax(x, initial=0.0)  # type: ignore[call-arg]


def sums(x: jax.Array, some: bool) -> None:
    lse: jax.Array = jax_softmax.logsumexp(x)
    lse = jax_softmax.logsumexp(x, axis=None, keepdims=True, dtype=np.float32)
    lse = jax_softmax.logsumexp(x, b=2.0)
    lse, largest = jax_softmax.logsumexp(x, return_max=True)
    lse, sign = jax_softmax.logsumexp(x, b=x, return_sign=True)
    lse = lse + largest + sign
    either: jax.Array | tuple[jax.Array, jax.Array] = jax_softmax.logsumexp(x, return_max=some)
    lse = either  # type: ignore[assignment]
    lse = jax_softmax.logsumexp(x, return_max=True)  # type: ignore[assignment]
    jax_softmax.logsumexp(x, return_maximum=True)  # type: ignore[call-overload]


def losses(x: jax.Array, w: jax.Array, labels: jax.Array, weights: jax.Array) -> None:
    loss: jax.Array = jax_softmax.softmax_cross_entropy_with_integer_labels(x, labels, label_smoothing=0.1)
    loss = jax_softmax.softmax_cross_entropy(x, x)
    loss = jax_softmax.cross_entropy_loss(x, labels, weights=weights, class_weights=weights)
    loss = jax_softmax.cross_entropy_loss(x, labels, -1, reduction="sum", z_loss=1e-4)
    loss = jax_softmax.cross_entropy_loss(x, labels, reduction=None)
    loss = jax_softmax.linear_cross_entropy(x, w, labels)
    loss = jax_softmax.linear_cross_entropy(x, w, labels, reduction=None, temperature=0.8, transpose_w=True)
    both: TokenLosses = jax_softmax.linear_cross_entropy(x, w, labels, reduction=None, return_entropy=True)
    loss = both.losses
    jax_softmax.cross_entropy_loss(x, labels, reduction="avg")  # type: ignore[arg-type]
    jax_softmax.cross_entropy_loss(x, labels, reduction="none")  # type: ignore[arg-type]
    jax_softmax.linear_cross_entropy(x, w, labels, reduction="avg")  # type: ignore[call-overload]
    jax_softmax.linear_cross_entropy(x, w, labels, return_entropy=True)  # type: ignore[call-overload]
    jax_softmax.linear_cross_entropy(x, w, labels, soft_capp=3.0)  # type: ignore[call-overload]
    loss = both  # type: ignore[assignment]
    print(loss)


def step(parameters: dict[str, jax.Array], batch: jax.Array, train: bool = True) -> tuple[jax.Array, int]:
    return parameters["w"] @ batch, int(train)


@jax_softmax.fuse
def decorated(x: jax.Array) -> jax.Array:
    return jax_softmax.softmax(x)


class Model:
    @jax_softmax.fuse
    def apply(self, x: jax.Array) -> jax.Array:
        return x


def fused(parameters: dict[str, jax.Array], x: jax.Array) -> None:
    f = jax_softmax.fuse(step)
    result, number = f(parameters, x, train=False)
    y: jax.Array = decorated(result) + number
    g: Fused[[jax.Array], jax.Array] = decorated
    report: FusionReport = g.explain(x)
    text: str = str(report) + g.lower(x).as_text() + str(g.trace(x).jaxpr)
    original = g.__wrapped__
    y = original(x) + len(text)
    y = Model().apply(y)
    print(Model().apply.explain(x))
    decorated("x")  # type: ignore[arg-type]
    f(parameters)  # type: ignore[call-arg]
    y = f(parameters, x)  # type: ignore[assignment]
    Model().apply("x")  # type: ignore[arg-type]
    decorated.lower("x")  # type: ignore[arg-type]
    jax_softmax.fuse(3)  # type: ignore[arg-type]


@jax_softmax.use(losses=True)
def switched(x: jax.Array) -> jax.Array:
    return x


def others(x: jax.Array) -> None:
    with jax_softmax.use():
        y: jax.Array = switched(x)
    jax_softmax.use(False)
    explanation: Explanation = jax_softmax.explain((8192, 50257), dtype="bfloat16", op="entropy", device="H200")
    y = y + explanation.bytes
    print(jax_softmax.build_info()["version"], jax_softmax.export_checks())
    jax_softmax.use(losses=1)  # type: ignore[arg-type]
    switched("x")  # type: ignore[arg-type]
