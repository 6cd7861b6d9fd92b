"""Gradients of the cross entropies: of every order, by all operands, mapped, and what their programs have."""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import support
from oracles import lse
from support import FIRST, SECOND, THIRD, normal, random_mask

import jax_softmax
from jax_softmax import cross_entropy_loss, softmax_cross_entropy
from jax_softmax import softmax_cross_entropy_with_integer_labels as integer_labels
from jax_softmax.fusion.program.graph import jaxprs_of
from jax_softmax.primitives import reference

# ---- derivatives, against those of jax.numpy


@support.sampled("masked", [True, False], 2)
def test_derivatives_of_soft_labels(masked):
    with jax.enable_x64(True):
        x, t = jnp.asarray(normal((3, 5), "float64")), jax.nn.softmax(normal((3, 5), "float64", seed=1))
        where = random_mask((3, 5)) if masked else None

        def ours(operands):
            return jnp.sum(softmax_cross_entropy(*operands, where=where) ** 2)

        def theirs(operands):
            x, t = operands
            kept = jnp.ones((3, 5), bool) if where is None else where
            distance = jax.nn.logsumexp(x, -1, where=kept, keepdims=True) - x
            return jnp.sum(jnp.sum(jnp.where(kept, t * distance, 0), -1) ** 2)

        support.same_derivatives(ours, theirs, (*FIRST, *SECOND), [(x, t)], rtol=1e-12, atol=1e-13)


def mean_loss(x, labels, weights, smoothing, z, reduction="mean"):
    """In jax.numpy."""
    n = x.shape[-1]
    valid = (labels >= 0) & (labels < n)
    of_rows = jax.nn.logsumexp(x, -1)
    logit = jnp.take_along_axis(x, jnp.where(valid, labels, 0)[:, None], -1)[:, 0]
    found = of_rows - logit + smoothing * (logit - jnp.mean(x, -1)) + z * of_rows**2
    weights = jnp.where(valid, weights, 0)
    total = jnp.sum(jnp.where(valid, found, 0) * weights)
    return total / jnp.where(jnp.sum(weights) == 0, 1, jnp.sum(weights)) if reduction == "mean" else total


@support.sampled(
    "reduction,weighted,smoothing,z",
    [(r, w, *o) for r, w, o in itertools.product(("mean", "sum"), (False, True), ((0.1, 0.01), (0.0, 0.0)))],
    8,
)
def test_loss_and_its_derivatives(reduction, weighted, smoothing, z):
    with jax.enable_x64(True):
        x, labels = jnp.asarray(normal((5, 7), "float64")), np.array([0, 6, -1, 7, 3])
        weights = np.linspace(0.5, 2, 5) if weighted else None

        def ours(x):
            options = {"label_smoothing": smoothing, "z_loss": z}
            return cross_entropy_loss(x, labels, weights=weights, reduction=reduction, **options)

        def theirs(x):
            return mean_loss(x, labels, np.ones(5) if weights is None else weights, smoothing, z, reduction)

        np.testing.assert_allclose(ours(x), theirs(x), rtol=1e-13)
        support.same_derivatives(ours, theirs, (*FIRST, *SECOND, *THIRD), [x], rtol=1e-12, atol=1e-13)
        assert np.all(np.asarray(jax.grad(ours)(x))[2:4] == 0)


def sum_of_losses(x, labels, weights, smoothing, z):
    return jnp.sum(integer_labels(x, labels, label_smoothing=smoothing, z_loss=z) * weights)


@support.sampled("smoothing,z", [(0.1, 0.01), (0.0, 0.0)], 2)
def test_derivatives_of_losses(smoothing, z):
    with jax.enable_x64(True):
        x, labels = jnp.asarray(normal((5, 7), "float64")), np.array([0, 6, -1, 7, 3])
        weights = np.linspace(0.5, 2, 5)

        def ours(x):
            return sum_of_losses(x, labels, weights, smoothing, z)

        def theirs(x):
            return mean_loss(x, labels, weights, smoothing, z, "sum")

        transposed = (lambda f: lambda x: jax.linear_transpose(lambda t: jax.jvp(f, (x,), (t,))[1], x)(1.0)[0],)
        orders = (*FIRST, *SECOND, *THIRD, *transposed)
        support.same_derivatives(ours, theirs, orders, [x], rtol=1e-12, atol=1e-13)
        assert np.all(np.asarray(jax.grad(ours)(x))[2:4] == 0)


SUMS = support.sampled(
    "f",
    [
        functools.partial(cross_entropy_loss, reduction="sum"),
        lambda *arguments, **options: integer_labels(*arguments, **options).sum(),
    ],
    2,
    ids=["cross_entropy_loss", "integer_labels"],
)


@support.sampled("smoothing,z", [(0.1, 0.01), (0.0, 0.0)], 2)
@SUMS
def test_derivatives_of_value_and_gradient(f, smoothing, z):
    """The value's is the gradient's product with the tangent, also where labels are ignored."""
    with jax.enable_x64(True):
        x, t = (jnp.asarray(normal((5, 7), "float64", seed=seed)) for seed in range(2))
        labels = np.array([0, 6, -1, 7, 3])

        def loss(x):
            return f(x, labels, label_smoothing=smoothing, z_loss=z)

        def run(x, t):
            by_reverse = jax.grad(lambda x: jax.value_and_grad(loss)(x)[0])(x)
            return by_reverse, jax.jvp(jax.value_and_grad(loss), (x,), (t,))

        by_reverse, ((_, g), (value_dot, g_dot)) = support.in_haste(run, x, t)
        np.testing.assert_allclose(value_dot, jnp.vdot(g, t), rtol=1e-12)
        assert np.all(g_dot[2:4] == 0)
        np.testing.assert_allclose(by_reverse, g, rtol=1e-12, atol=1e-15)


@SUMS
def test_second_derivatives_where_a_row_is_left_out(f):
    """By the logits and by what weighs a term of the loss, in either order."""
    x, labels, where = normal((3, 5)), np.array([0, 1, 2]), random_mask((3, 5), 1)
    where[[0, 2], [0, 2]], where[1] = True, False

    def loss(x, z, smoothing):
        return f(x, labels, where=where, z_loss=z, label_smoothing=smoothing)

    for k in (1, 2):
        orders = jax.jacfwd(jax.grad(loss), k), jax.jacrev(jax.grad(loss), k), jax.jacrev(jax.grad(loss, k))
        found, *others = support.in_haste(lambda *operands, orders=orders: [f(*operands) for f in orders], x, 0.1, 0.2)
        assert np.isfinite(found).all() and np.all(found[1] == 0)
        support.assert_close(others, [found] * 2, rtol=1e-5, atol=1e-6)


def weighted_mean(x, labels, weights, smoothing, z):
    return cross_entropy_loss(x, labels, weights=weights, label_smoothing=smoothing, z_loss=z)


@pytest.mark.parametrize("ours,reduction", [(weighted_mean, "mean"), (sum_of_losses, "sum")])
def test_derivatives_of_weights_and_options(ours, reduction):
    with jax.enable_x64(True):
        x, labels = jnp.asarray(normal((5, 7), "float64")), np.array([0, 6, -1, 7, 3])

        def of_options(f):
            return lambda *arguments: f(x, labels, *arguments)

        theirs = functools.partial(mean_loss, reduction=reduction)
        orders, at = [lambda f: jax.grad(f, (0, 1, 2))], (np.linspace(0.5, 2, 5), 0.1, 0.02)
        support.same_derivatives(of_options(ours), of_options(theirs), orders, at, rtol=1e-12, atol=0)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_derivative_of_a_weight_of_0(dtype):
    """It is the loss, as of any other weight; but 0 where that is not finite."""
    x, labels = normal((4, 5), dtype), np.array([0, 1, 2, 7])
    x[0, 0] = -np.inf
    weights = np.array([0.0, 0.0, 2.0, 1.0], "float32")
    found = jax.grad(lambda w: cross_entropy_loss(x, labels, weights=w, reduction="sum"))(weights)
    np.testing.assert_allclose(found, [0, *integer_labels(x, labels)[1:]], rtol=1e-6)


def test_forward_mode_of_an_infinite_loss():
    x, labels = normal((3, 5)), np.array([0, 1, 2])
    x[0, 0] = -np.inf
    tangent = jax.jvp(lambda x: cross_entropy_loss(x, labels, reduction="sum"), (x,), (np.ones_like(x),))[1]
    np.testing.assert_allclose(tangent, 0, atol=1e-6)


# ---- the gradient, rounded once, and what it takes


def mean_of_losses(*arguments, **options):
    return integer_labels(*arguments, **options).mean()


BOTH = pytest.mark.parametrize("f", [cross_entropy_loss, mean_of_losses])


GRADIENTS_OF = [((7, 32), -1), ((4, 50257), 1), ((33, 6, 8), 1), ((130, 5), 0), ((9, 8192), -1)]


@support.sampled(
    "f,dtype,view", itertools.product([cross_entropy_loss, mean_of_losses], ["bfloat16", "float32"], GRADIENTS_OF), 7
)
def test_gradient(f, dtype, view):
    """Of 16 bits rounded once, at the label too, where it may cancel."""
    shape, axis = view
    x = normal(shape, dtype, scale=5.0)
    labels = np.argmax(np.asarray(x, np.float32), axis)
    g = jax.jit(jax.grad(lambda x: f(x, labels, axis=axis)))(x)
    wide = np.asarray(x, np.float64)
    y = np.exp(wide - np.expand_dims(lse(wide, axis), axis))
    index = np.expand_dims(labels, axis)
    exact = y.copy()
    np.put_along_axis(exact, index, np.take_along_axis(y, index, axis) - 1, axis)
    exact /= labels.size
    eps = float(jnp.finfo(dtype).eps)
    bound = 0.51 * eps * np.abs(exact) + 64 * np.finfo(np.float32).eps * y / labels.size + 1e-37
    assert g.dtype == np.dtype(dtype)
    assert np.all(np.abs(np.asarray(g, np.float64) - exact) <= bound)


@BOTH
def test_float16_under_loss_scaling(f):
    """The gradient is scaled before it is rounded, once."""
    x, labels = normal((4096, 64), "float16"), np.arange(4096) % 64
    g = jax.grad(lambda x: f(x, labels) * 2.0**15)(x)
    wide = np.asarray(x, np.float64)
    exact = np.exp(wide - lse(wide)[:, None]) - (labels[:, None] == np.arange(64))
    np.testing.assert_allclose(g, exact * 2.0**15 / 4096, rtol=np.finfo("float16").eps, atol=1e-5)


@BOTH
@pytest.mark.parametrize("z_loss", [0.0, 1e-4])
def test_what_a_gradient_takes(f, z_loss):
    """On CUDA the kernels alone read the logits, and nothing of their size is made but the gradient."""
    x, labels = jax.ShapeDtypeStruct((64, 5000), jnp.bfloat16), jax.ShapeDtypeStruct((64,), jnp.int32)
    step = jax.jit(jax.value_and_grad(lambda x, labels: f(x, labels, z_loss=z_loss)))
    text = step.trace(x, labels).lower(lowering_platforms=("cuda",)).as_text()
    assert len(re.findall("custom_call @jax_softmax.*64x5000xbf16.*64x1xf32.*64x5000xbf16", text)) == 1
    if f is mean_of_losses:  # the other's product with a cotangent that is the number 1 XLA leaves out
        assert "64x5000xf32" not in text
    if jax.default_backend() == "cpu":
        x = x.update(dtype="float32")  # older XLA for CPUs scatters 16 bits in float32
        assert step.lower(x, labels).compile().memory_analysis().temp_size_in_bytes < 64 * 5000


@BOTH
def test_what_is_kept_of_losses(f):
    """The logits or their gradient, and a few numbers of each row."""
    x, labels = jnp.ones((64, 4096), jnp.bfloat16), jnp.zeros(64, jnp.int32)
    assert support.kept_bytes(lambda x: f(x, labels), x) <= x.nbytes + 8 * 64 * 4


def test_soft_labels_are_not_widened_in_memory(default_flags):
    """Labels of 16 bits are kept as they are, and neither they nor the logits are written in float32."""
    x, t = normal((64, 4096), "bfloat16"), jnp.zeros((64, 4096), jnp.bfloat16)
    assert support.kept_bytes(lambda x: softmax_cross_entropy(x, t), x) <= x.nbytes + t.nbytes + 8 * 64 * 4
    gradient = jax.jit(jax.grad(lambda x, t: softmax_cross_entropy(x, t).sum()))
    if jax.default_backend() == "cpu" and jax.__version_info__ >= (0, 12):  # older XLA for CPUs widens what it reads
        assert gradient.lower(x, t).compile().memory_analysis().temp_size_in_bytes < x.size


def test_only_what_is_asked_for_is_computed():
    """Without a derivative by the logits no gradient of theirs is made."""
    x, labels = normal((3, 5)), np.array([0, 1, 2])
    f = jax.grad(lambda w: cross_entropy_loss(x, labels, weights=w))
    assert "cross_entropy_gradient" not in str(jax.make_jaxpr(f)(np.ones(3, "float32")))


def equations_of(jaxpr):
    """How many, also within equations."""
    inner = [inner for e in jaxpr.eqns for inner in jaxprs_of(e.params)]
    return len(jaxpr.eqns) + sum(map(equations_of, inner))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_programs_are_short(reduction):
    """What users read when they print one, and JAX and XLA go through."""
    x, labels = np.ones((4, 8), np.float32), np.arange(4, dtype=np.int32)
    gradient = jax.grad(lambda x: cross_entropy_loss(x, labels, reduction=reduction))
    assert equations_of(jax.make_jaxpr(gradient)(x).jaxpr) <= 40


def test_smoothed_labels_take_no_other_reading():
    def f(x):
        return cross_entropy_loss(x, np.arange(64), label_smoothing=0.1)

    x = jax.ShapeDtypeStruct((64, 5000), jnp.float32)
    text = jax.jit(jax.value_and_grad(f)).trace(x).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count('op = "cross_entropy_gradient_and_distances"') == 1
    assert not re.search(r"stablehlo\.reduce\(.*64x5000xf32", text)


def test_smoothed_labels_of_rows_too_long_to_count(monkeypatch):
    """In float32, up to which the kernel's count is exact."""
    x, labels = normal((3, 40)), np.array([0, 5, 39])

    def traced():
        jax.clear_caches()
        return jax.make_jaxpr(jax.value_and_grad(lambda x: cross_entropy_loss(x, labels, label_smoothing=0.1)))(x)

    counted = traced()
    monkeypatch.setattr(reference, "MOST_COUNTED", 39)
    found = traced()
    monkeypatch.undo()
    jax.clear_caches()
    assert "_and_distances" in str(counted) and "_and_distances" not in str(found)
    results = (jax.core.eval_jaxpr(program.jaxpr, program.consts, x) for program in (found, counted))
    for a, b in zip(*results, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)


def test_names_in_programs():
    """Profiles and dumps show what it is."""
    text = str(jax.make_jaxpr(jax.grad(lambda x: cross_entropy_loss(x, np.array([0, 1]))))(normal((2, 3))))
    assert "cross_entropy_gradient" in text
    assert "logsumexp" in str(jax.make_jaxpr(jax_softmax.logsumexp)(normal((2, 3))))


def test_explained():
    """Along an axis that is not the last XLA reads the labels' logits, and a kernel the rest."""
    text = str(jax_softmax.explain((65536, 1000), dtype="bfloat16", op="cross_entropy", device="H200"))
    assert "cross_entropy of bfloat16 (65536, 1000)" in text and "schedule  registers" in text and "1 read" in text
    text = str(jax_softmax.explain((64, 1000, 1024), 1, dtype="bfloat16", op="cross_entropy", device="H200"))
    assert "logsumexp of bfloat16 (64, 1000, 1024)" in text and "schedule  tile" in text


# ---- transformations


def test_vmap_of_soft_labels():
    x, t = normal((3, 4, 6)), np.asarray(jax.nn.softmax(normal((3, 4, 6), seed=1)))

    def gradients(x, t):
        return jax.grad(lambda x, t: softmax_cross_entropy(x, t).sum(), (0, 1))(x, t)

    gradients = jax.jit(gradients)
    for axes in ((0, 0), (0, None), (None, 0)):
        found = jax.vmap(gradients, axes)(x if axes[0] == 0 else x[0], t if axes[1] == 0 else t[0])
        each = [gradients(x[i * (axes[0] == 0)], t[i * (axes[1] == 0)]) for i in range(3)]
        for a, b in zip(found, zip(*each, strict=True), strict=True):
            np.testing.assert_allclose(a, np.stack(b), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("f", [cross_entropy_loss, lambda x, labels: integer_labels(x, labels).sum()])
def test_vmap_and_scan(f):
    x, labels = normal((3, 4, 6)), np.arange(12).reshape(3, 4) % 6
    one = jax.jit(jax.value_and_grad(f))
    each, gradients = (np.stack(a) for a in zip(*(one(x[i], labels[i]) for i in range(3)), strict=True))

    def together(x, labels):
        mapped = jax.vmap(f)(x, labels), jax.lax.map(lambda a: f(*a), (x, labels)), jax.vmap(f, (None, 0))(x[0], labels)
        of_first = jax.grad(jax.checkpoint(lambda x: f(x, labels[0])))(x[0])
        return mapped, (jax.vmap(jax.grad(f))(x, labels), of_first)

    values, found = support.in_haste(together, x, labels)
    support.assert_close(values, (each, each, np.stack([one(x[0], row)[0] for row in labels])), rtol=1e-6)
    support.assert_close(found, (gradients, gradients[0]), rtol=1e-5, atol=1e-7)


@BOTH
def test_vmap_over_labels_alone(f):
    """The kernels see the logits as they are, without a copy for each."""
    x, labels = normal((5, 40)), np.random.default_rng(0).integers(0, 40, (3, 5))
    where = random_mask((5, 40))

    def values(x):
        return jax.vmap(lambda labels: f(x, labels, where=where))(labels)

    def gradients(x):
        return jax.vmap(lambda labels: jax.grad(f)(x, labels, where=where))(labels)

    one = jax.jit(lambda x, row: (f(x, row, where=where), jax.grad(f)(x, row, where=where)))
    losses_of_rows, each = (np.stack(a) for a in zip(*(one(x, row) for row in labels), strict=True))
    run = lambda x: (values(x), gradients(x), jax.grad(lambda x: values(x).sum())(x))  # noqa: E731
    value, *found = support.in_haste(run, x)
    np.testing.assert_allclose(value, losses_of_rows, rtol=1e-6)
    support.assert_close(found, (each, each.sum(0)), rtol=1e-7, atol=1e-6)
    for function in (values, gradients, jax.grad(lambda x: values(x).sum())):
        text = jax.jit(function).trace(x).lower(lowering_platforms=("cuda",)).as_text()
        calls = re.findall("custom_call @jax_softmax.*", text)
        assert calls and not any("3x5x40" in call for call in calls)


def test_vmap_over_weights_alone():
    x, labels, weights = normal((5, 40)), np.arange(5), np.linspace(0.5, 2, 15).reshape(3, 5)

    def gradient(weights):
        return jax.grad(lambda x: cross_entropy_loss(x, labels, weights=weights))(x)

    np.testing.assert_allclose(jax.vmap(gradient)(weights), [gradient(row) for row in weights], atol=1e-6)
    text = jax.jit(jax.vmap(gradient)).trace(weights).lower(lowering_platforms=("cuda",)).as_text()
    assert not any("3x5x40" in call for call in re.findall("custom_call @jax_softmax.*", text))


P = jax.sharding.PartitionSpec


@support.sampled("f,varies", itertools.product([cross_entropy_loss, mean_of_losses], ["labels", "z_loss"]), 3)
def test_logits_that_all_devices_have(f, varies):
    """Inside shard_map, labels or an option of each device's own."""
    x, labels, z = normal((4, 12)), np.arange(8).reshape(2, 4), np.array([0.1, 0.2], "float32")

    def loss(x, labels, z):
        of_device = f(x, labels[0] if varies == "labels" else labels, z_loss=z[0] if varies == "z_loss" else z)
        return jax.lax.psum(of_device, "data")

    labels, z = (labels, 0.1) if varies == "labels" else (labels[0], z)
    specs = P(), P("data") if varies == "labels" else P(), P("data") if varies == "z_loss" else P()
    spread = jax.shard_map(jax.value_and_grad(loss), mesh=support.mesh_of_cpus((2, 4)), in_specs=specs, out_specs=P())
    with support.on_a_cpu():
        value, g = jax.jit(spread)(x, labels, z)
        each = [(labels[i], z) if varies == "labels" else (labels, z[i]) for i in range(2)]
        expected, of_x = jax.value_and_grad(lambda x: sum(f(x, n, z_loss=z) for n, z in each))(x)
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    np.testing.assert_allclose(g, of_x, rtol=1e-5, atol=1e-7)
