"""A gradient is written over its logits, also where the program makes losses and accuracies of these."""

import emulated
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fusion_support import BF16, F32
from jax.experimental import io_callback

from jax_softmax import fuse
from jax_softmax.fusion import rewriting
from jax_softmax.fusion.kernels.calls import kernel_call_p
from jax_softmax.fusion.program.graph import eqns_within

T, D, V = 256, 64, 4096


def by_labels(x, t):
    return jax.nn.logsumexp(x, -1) - jnp.take_along_axis(x, t[:, None], -1)[:, 0]


def with_gradient(*makers, cap=lambda x: x):
    """The mean loss's gradients by weights and features, and what is made of the logits beside."""

    def step(w, h, t):
        def loss(w, h):
            logits = cap(h @ w)
            return by_labels(logits, t).mean(), logits

        (_, logits), gradients = jax.value_and_grad(loss, (0, 1), has_aux=True)(w, h)
        return gradients, [make(logits, t) for make in makers]

    return step


def accuracy(logits, t):
    return jnp.mean(jnp.argmax(logits, -1) == t)


def loss(logits, t):
    return by_labels(logits, t).mean()


def by_logarithms(w, h, t):
    """As the README's."""

    def loss(w, h):
        logarithms = jax.nn.log_softmax((h @ w).astype(F32))
        return -jnp.take_along_axis(logarithms, t[:, None], -1).mean()

    return jax.value_and_grad(loss, (0, 1))(w, h)


def smoothed(w, h, t):
    targets = 0.9 * jax.nn.one_hot(t, V) + 0.1 / V
    return jax.value_and_grad(lambda w, h: -(targets * jax.nn.log_softmax(h @ w)).sum(-1).mean(), (0, 1))(w, h)


def two_heads(w, h, t):
    """Of each head something is made of the other one's gradient: one of the gradients has to come first."""
    logits = h @ w, jnp.tanh(h) @ w
    a, b = (jax.grad(lambda x: by_labels(x, t).mean())(x) for x in logits)
    return a @ w.T, b @ w.T, (logits[0] * b.max()).max(), (logits[1] * a.max()).max()


OVERWRITTEN = {
    "gradient": with_gradient(),
    "value": with_gradient(loss),
    "accuracy": with_gradient(accuracy),
    "value and accuracy of scaled logits": with_gradient(loss, accuracy, cap=lambda x: x * 0.3),
    "one-hot": with_gradient(lambda x, t: -(jax.nn.one_hot(t, V) * jax.nn.log_softmax(x)).sum(-1).mean()),
    "logarithms": by_logarithms,
    "smoothed": smoothed,
    "five best": with_gradient(lambda x, t: jnp.any(jax.lax.top_k(x, 5)[1] == t[:, None], -1)),
    "some rows": with_gradient(lambda x, t: x[-1]),
    "a small product": with_gradient(lambda x, t: x @ jnp.ones((V, 8), x.dtype)),
}
KEPT = {
    "a result": with_gradient(lambda x, t: x),
    "a large product": with_gradient(lambda x, t: x @ jnp.ones((V, V // 2), x.dtype)),
    "sorted": with_gradient(lambda x, t: jnp.sort(x, -1)[:, -5:]),
    "large": with_gradient(lambda x, t: jnp.max(x.reshape(T, -1, 2), -1)),
    "read after the gradient": lambda w, h, t: (lambda x: jnp.sum(x * jax.grad(lambda x: loss(x, t))(x)))(h @ w),
}


def operands(dtype=F32):
    rng = np.random.default_rng(0)
    w, h = (jnp.asarray(rng.normal(size=shape), dtype) for shape in ((D, V), (T, D)))
    return w, h, jnp.asarray(rng.integers(0, V, T), jnp.int32)


def gradients_in_place(f, *args):
    """Of each kernel that writes an array of the logits' size, whether it is written over them."""
    closed = jax.make_jaxpr(fuse(f))(*args)
    with emulated.kernels():  # whoever would be faster
        eqns = [e for outer in eqns_within([closed.jaxpr]) if "unfused" in outer.params for e in _rewritten(outer)]
    return [e.params["call"].kernel.in_place is not None for e in eqns if e.outvars[0].aval.size == T * V]


def _rewritten(eqn):
    jaxpr = rewriting.rewritten(eqn.params["jaxpr"], eqn.params["unfused"])
    return [e for e in eqns_within([jaxpr]) if e.primitive is kernel_call_p]


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("name", OVERWRITTEN)
def test_logits_that_are_read_first_are_overwritten(name, dtype):
    assert gradients_in_place(OVERWRITTEN[name], *operands(dtype)) == [True]


@pytest.mark.parametrize("name", KEPT)
def test_logits_that_are_needed_afterwards_are_kept(name):
    assert gradients_in_place(KEPT[name], *operands()) == [False]


def test_effects_stay_in_their_order():
    """Kernels do not wait for what is made of an effect that comes after them."""
    order, number = [], jax.ShapeDtypeStruct((), F32)

    def noted(name, *_):
        order.append(name)
        return np.float32(2)

    def step(w, h, t):
        a, b = h @ w, jnp.tanh(h) @ w
        of_a = jax.grad(lambda x: loss(x, t))(a)
        first = io_callback(lambda x: noted("first"), number, of_a.max(), ordered=True)
        second = io_callback(lambda: noted("second"), number, ordered=True)
        of_b = jax.grad(lambda x: loss(x, t))(b)
        return of_a @ w.T, of_b @ w.T, (a * of_b.max()).max(-1), (b * second).max(-1), first

    with emulated.kernels():
        jax.block_until_ready(jax.jit(fuse(step))(*operands()))
        jax.effects_barrier()
    assert order == ["first", "second"]


def test_two_kernels_of_which_each_needs_the_other_one_first():
    assert sorted(gradients_in_place(two_heads, *operands())) == [False, True]


@emulated.compiler_is_needed
@pytest.mark.parametrize("name", [*OVERWRITTEN, *KEPT, "two heads"])
def test_values(name):
    f = {**OVERWRITTEN, **KEPT, "two heads": two_heads}[name]
    with jax.default_matmul_precision("highest"), emulated.all_kernels():
        found = jax.jit(fuse(f))(*operands())
        expected = jax.jit(f)(*operands())
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * float(jnp.max(jnp.abs(b))))
