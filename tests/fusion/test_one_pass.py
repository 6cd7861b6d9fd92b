"""Linear maps of a softmax or log_softmax that nothing else reads are one kernel; and what XLA makes by one kernel, of
several operators of the same rows, is left to it."""

import emulated
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fusion_support import BF16, F32, compiled
from hypothesis import given
from hypothesis import strategies as st

from jax_softmax import fuse
from jax_softmax.runtime import judge

pytestmark = pytest.mark.usefixtures("default_flags")


def gradient(f):
    return jax.grad(lambda x, *others: jnp.sum(f(x, *others)))


def straight_through(logits, noise, w):
    soft = jax.nn.softmax((logits + noise) / 0.5)
    hard = jax.nn.one_hot(jnp.argmax(soft, -1), soft.shape[-1], dtype=soft.dtype)
    return (hard + soft - jax.lax.stop_gradient(soft)) * w


def list_net(scores, relevance, mask):
    target = jax.nn.softmax(jnp.where(mask, relevance, -1e9))
    return -target * jax.nn.log_softmax(jnp.where(mask, scores, -1e9))


@st.composite
def operands(draw):
    """x with outliers, cotangents, masks, one or none, and the axis."""
    shape = draw(st.tuples(st.integers(2, 5), st.integers(2, 40)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    x, t = rng.normal(size=shape) * draw(st.sampled_from([0.1, 3, 1e3])), rng.normal(size=shape)
    for _ in range(draw(st.integers(0, 3))):
        at = tuple(rng.integers(0, shape))
        x[at] = draw(st.sampled_from([1e4, -1e4, np.inf, -np.inf, np.nan]))
    if draw(st.booleans()):
        t *= 10.0 ** rng.integers(-3, 4, size=shape)
    dtype = draw(st.sampled_from(["float32", "bfloat16", "float16"]))
    masks = [rng.random(shape) < 0.7] * draw(st.integers(0, 1))
    return x.astype(jnp.dtype(dtype)), t.astype(jnp.dtype(dtype)), masks, draw(st.integers(0, 1))


def errors(found, exact, t, axis):
    """The largest error of each row, relative to its largest cotangent and result; 0 where both are not finite."""
    found, exact = np.asarray(found, np.float64), np.asarray(exact, np.float64)
    finite = np.isfinite(exact)
    assert (np.isfinite(found) == finite).all()
    error = np.max(np.where(finite, np.abs(found - exact), 0), axis, where=finite, initial=0)
    return error / np.max(np.where(finite, np.maximum(np.abs(exact), np.abs(t)), 0), axis, initial=1e-30)


@emulated.compiler_is_needed
@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
@given(operands())
def test_numbers(name, given):
    """At most three times the unfused program's error, or a few roundings."""
    x, t, masks, axis = given

    def f(x, t, mask=None):
        y = getattr(jax.nn, name)(x, axis, where=mask)
        return (y if mask is None else jnp.where(mask, y, 0)) * t

    with emulated.kernels() as called:
        found = compiled(jax.jit(fuse(gradient(f))).lower(x, t, *masks))(x, t, *masks)
    assert [kernel.op for kernel in called] == [f"{name}_gradient"]
    unfused = jax.jit(gradient(f))(x, t, *masks)
    with jax.enable_x64(True):
        exact = gradient(f)(x.astype(np.float64), t.astype(np.float64), *masks)
    least = 4 * x.shape[axis] ** 0.5 * 2.0**-23 + float(jnp.finfo(x.dtype).eps)
    assert (errors(found, exact, t, axis) <= 3 * errors(unfused, exact, t, axis) + least).all()


def specs(shape, *dtypes):
    return [jax.ShapeDtypeStruct(shape, dtype) for dtype in dtypes]


ALONE = {
    "straight through": (straight_through, (F32, F32, F32)),
    "soft labels": (lambda x, w: -w * jax.nn.log_softmax(x), (F32, F32)),
    "soft labels in bfloat16": (lambda x, w: -w * jax.nn.log_softmax(x.astype(F32)), (BF16, BF16)),
    "of columns": (lambda x, w: jax.nn.softmax(x, 0) * w, (F32, F32)),
}


@pytest.mark.parametrize("name", ALONE)
def test_one_call(name):
    """It reads each operand once and writes the result. Nothing of the logits' size is kept besides."""
    f, dtypes = ALONE[name]
    given = specs((65536, 1024), *dtypes)
    (line,) = fuse(gradient(f)).explain(*given)
    assert line.op.endswith("_gradient") and not line.why_xla and not line.outside
    moved = sum(x.size * x.dtype.itemsize for x in given) + given[0].size * given[0].dtype.itemsize
    assert line.traffic.ours == moved


KEPT = {
    "in a result": lambda x, w: (jax.nn.softmax(x), gradient(lambda x: jax.nn.softmax(x) * w)(x)),
    "in the cotangent": lambda x, w: gradient(lambda x: jax.nn.softmax(x) ** 2 * w)(x),
    "in two derivatives": lambda x, w: jax.vmap(lambda w: gradient(lambda x: jax.nn.softmax(x) * w)(x), out_axes=0)(
        jnp.stack([w, 2 * w])
    ),
    "beside a loss of its rows": lambda x, w: (
        jax.nn.logsumexp(x, -1),
        gradient(lambda x: jax.nn.softmax(x) * w)(x),
    ),
}


@pytest.mark.parametrize("name", KEPT)
def test_values_that_something_else_reads(name):
    with emulated.kernels():
        report = fuse(KEPT[name]).explain(*specs((64, 1024), F32, F32))
    assert report and not any(line.op == "softmax_gradient" for line in report)


ONE_KERNEL = {  # each is one fusion of XLA's on an H100, by JAX 0.12
    "entropy": (lambda x: jax.nn.softmax(x) * jax.nn.log_softmax(x), (F32,)),
    "squares": (lambda x, w: (jax.nn.softmax(x) - w) ** 2, (F32, F32)),
    "focal loss": (lambda x, w: -w * (1 - jax.nn.softmax(x)) ** 2 * jax.nn.log_softmax(x), (F32, F32)),
    "distillation": (lambda x, y: -jax.nn.softmax(y) * jax.nn.log_softmax(x), (F32, F32)),
    "ListNet": (list_net, (F32, F32, bool)),
}


@pytest.mark.parametrize("columns", [200, 1024, 8192])
@pytest.mark.parametrize("name", ONE_KERNEL)
def test_chains_are_left_to_xla(name, columns):
    """All of them, so that the program is as it was."""
    f, dtypes = ONE_KERNEL[name]
    report = fuse(gradient(f)).explain(*specs((65536, columns), *dtypes))
    assert report and all(line.why_xla for line in report)
    assert columns == 200 or any(judge.IN_A_CHAIN in line.why_xla for line in report)


NO_CHAINS = {
    "long rows": (gradient(ONE_KERNEL["distillation"][0]), (512, 65536)),
    "columns": (gradient(lambda x, y: -jax.nn.softmax(y, 0) * jax.nn.log_softmax(x, 0)), (8192, 1024)),
    "a value besides": (
        lambda x, w: jax.value_and_grad(lambda x: jnp.sum(jax.nn.softmax(x) * w))(x),
        (65536, 1024),
    ),
    "probabilities that are kept": (
        lambda x, y: (jax.nn.softmax(y), gradient(ONE_KERNEL["distillation"][0])(x, y)),
        (65536, 1024),
    ),
}


@pytest.mark.parametrize("name", NO_CHAINS)
def test_what_is_no_chain(name):
    f, shape = NO_CHAINS[name]
    report = fuse(f).explain(*specs(shape, F32, F32))
    assert not any(judge.IN_A_CHAIN in line.why_xla for line in report)
    assert not all(line.why_xla for line in report)
