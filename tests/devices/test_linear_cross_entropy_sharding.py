"""linear_cross_entropy on several devices: eight simulated ones, in a mesh of 4 by 2."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import support
from by_numpy import by_numpy
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from linear_losses import expected_loss, operands, probabilities
from support import normal

from jax_softmax import linear_cross_entropy

pytestmark = pytest.mark.usefixtures("products_in_float32")


@functools.cache
def spread_operands():
    x, w, labels, _ = operands(tokens=(64,), features=64, vocabulary=48)
    expected = by_numpy(jax.value_and_grad(lambda x, w: expected_loss(x @ w, labels, "sum"), (0, 1)), x, w)
    return (x, w, labels.astype(np.int32)), expected


def collectives(f, args, expected):
    program = support.compiled_in_haste(f, *args)
    support.assert_close(program(*args), expected, rtol=1e-5, atol=1e-4)
    return [(kind, size - size % 64) for kind, size in support.collectives(program) if size > 600]


TOKENS_SPREAD, VOCABULARY_SPREAD = (P("data"), P(), P("data")), (P(), P(None, "model"), P())
BOTH = P("data"), P(None, "model"), P("data")
X_SIZE, W_SIZE = 64 * 64, 64 * 48  # what else travels is smaller, but for a few numbers that travel with these


SPREAD = {
    "both": (BOTH, [X_SIZE // 4, W_SIZE // 2]),
    "tokens": (TOKENS_SPREAD, [W_SIZE]),
    "vocabulary": (VOCABULARY_SPREAD, [X_SIZE]),
}


@support.sampled("reduction,check_vma,spread", itertools.product(["sum", None], [True, False], SPREAD), 5)
def test_shard_map(on_the_cpu, spread, reduction, check_vma):
    """One reduction of w's gradient, one of x's; per chunk numbers of tokens alone travel."""
    specs, sizes = SPREAD[spread]
    args, expected = spread_operands()
    of_tokens, of_vocabulary = specs[0] == P("data"), specs[1] != P()

    def loss(x, w, labels):
        axis_name = "model" if of_vocabulary else None
        total = jnp.sum(linear_cross_entropy(x, w, labels, reduction=reduction, chunk=4, axis_name=axis_name))
        return jax.lax.psum(total, "data") if of_tokens else total

    f = jax.shard_map(loss, mesh=support.mesh_of_cpus((4, 2)), in_specs=specs, out_specs=P(), check_vma=check_vma)
    found = collectives(jax.value_and_grad(f, (0, 1)), args, expected)
    assert all(kind == "all-reduce" for kind, _ in found)
    if check_vma:
        assert sorted(size for _, size in found) == sorted(sizes)


FSDP = P("data"), P("data"), P("data")
UNDER_JIT = [
    (AxisType.Auto, BOTH, [("all-reduce", X_SIZE // 4), ("all-reduce", W_SIZE // 2)]),
    (AxisType.Explicit, TOKENS_SPREAD, [("all-reduce", W_SIZE)]),
    (AxisType.Explicit, BOTH, [("all-reduce", X_SIZE // 4), ("all-reduce", W_SIZE // 2)]),
    (AxisType.Explicit, VOCABULARY_SPREAD, [("all-reduce", X_SIZE)]),
    (AxisType.Explicit, FSDP, [("all-gather", W_SIZE), ("all-reduce", W_SIZE)]),
    (AxisType.Explicit, (P(), P("data"), P()), [("all-gather", W_SIZE)]),
    (AxisType.Auto, FSDP, [("all-gather", W_SIZE), ("all-reduce", W_SIZE)]),
    (AxisType.Auto, TOKENS_SPREAD, [("all-reduce", W_SIZE)]),
    (AxisType.Auto, VOCABULARY_SPREAD, [("all-reduce", X_SIZE)]),
]


@support.sampled("kind,specs,sizes", UNDER_JIT, 4, ids=str)
def test_jit(on_the_cpu, small_chunks, kind, specs, sizes):
    """The same: chunks are not the rule's choice here. A weight that is cut along its features is gathered once."""
    mesh = support.mesh_of_cpus((4, 2), kind)
    args, expected = spread_operands()
    args = [jax.device_put(a, NamedSharding(mesh, spec)) for a, spec in zip(args, specs, strict=True)]
    f = jax.value_and_grad(functools.partial(linear_cross_entropy, reduction="sum"), (0, 1))

    def step(*args):
        value, gradients = f(*args)
        if kind == AxisType.Auto:
            laid = [NamedSharding(mesh, spec) for spec in specs[:2]]
            gradients = tuple(map(jax.lax.with_sharding_constraint, gradients, laid))
        return value, gradients

    with jax.set_mesh(mesh):
        found = collectives(step, args, expected)
    assert sorted(found) == sorted(sizes)


@support.sampled("chunk", [7, 16, 24], 3)
def test_chunks_under_jit(on_the_cpu, chunk):
    """Where the caller asks for them each device has a part of every chunk: x does not travel."""
    args, expected = spread_operands()
    mesh = support.mesh_of_cpus((4, 2))
    args = [jax.device_put(a, NamedSharding(mesh, spec)) for a, spec in zip(args, TOKENS_SPREAD, strict=True)]
    f = jax.value_and_grad(functools.partial(linear_cross_entropy, reduction="sum", chunk=chunk), (0, 1))
    found = collectives(f, args, expected)
    assert set(found) == {("all-reduce", W_SIZE)}


def test_the_rules_chunks_under_jit(on_the_cpu, small_chunks):
    """There are none, nor in the backward pass of losses for each token: x would travel."""
    args, expected = spread_operands()
    mesh = support.mesh_of_cpus((4, 2))
    x, w, labels = (
        jax.device_put(a.reshape(16, 4, *a.shape[1:]) if k != 1 else a, NamedSharding(mesh, spec))
        for k, (a, spec) in enumerate(zip(args, TOKENS_SPREAD, strict=True))
    )
    expected = expected[0], (expected[1][0].reshape(16, 4, -1), expected[1][1])

    def f(x, w, labels):
        return jax.value_and_grad(lambda *xw: jnp.sum(linear_cross_entropy(*xw, labels, reduction=None)), (0, 1))(x, w)

    assert set(collectives(f, (x, w, labels), expected)) == {("all-reduce", W_SIZE)}


IN_EXPLICIT_MODE = {
    "tokens": (P("data"), P()),
    "vocabulary": (P(), P(None, "model")),
    "both": (P("data"), P(None, "model")),
    "features of w": (P(), P("data")),
    "tokens and features of w": (P("data"), P("data", "model")),
    "features of x": (P(None, "model"), P()),
    "all of x": (P("data", "model"), P()),
}


def laid_explicitly(mesh, layout, x, w, bias):
    of_x, of_w = IN_EXPLICIT_MODE[layout]
    specs = of_x, of_w, P(*of_w[1:])
    return [jax.device_put(a, NamedSharding(mesh, spec)) for a, spec in zip((x, w, bias), specs, strict=True)]


OPTIONS = [("mean", None), (None, None), (None, 2.0)]


@support.sampled("options,layout", itertools.product(OPTIONS, IN_EXPLICIT_MODE), 5, ids=str)
def test_explicit_mode(on_the_cpu, layout, options):
    """Each gradient lies as its operand does."""
    x, w, labels, bias = operands(tokens=(16,), features=8, vocabulary=24)
    reduction, soft_cap = options
    options = {"reduction": reduction, "soft_cap": soft_cap}

    def step(losses_of, *args):
        def total(*args):
            losses = losses_of(*args)
            return jnp.sum(losses**2), losses

        return jax.value_and_grad(total, (0, 1, 2), has_aux=True)(*args)

    def ours(transpose_w, x, w, bias):
        w = w.T if transpose_w else w
        return linear_cross_entropy(x, w, labels, bias=bias, transpose_w=transpose_w, **options)

    theirs = functools.partial(step, lambda x, w, bias: expected_loss(x @ w + bias, labels, **options))
    expected = by_numpy(theirs, x, w, bias)
    mesh = support.mesh_of_cpus((4, 2), AxisType.Explicit)
    args = laid_explicitly(mesh, layout, x, w, bias)

    def both_ways(*args):
        return [step(functools.partial(ours, transpose_w), *args) for transpose_w in (False, True)]

    with jax.set_mesh(mesh):
        results = support.in_haste(both_ways, *args)
    for found in results:
        support.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        for gradient, a in zip(found[1], args, strict=True):
            assert gradient.sharding.is_equivalent_to(a.sharding, a.ndim)


@support.sampled("layout", IN_EXPLICIT_MODE, 8)
def test_derivatives_of_gradients_in_explicit_mode(on_the_cpu, layout):
    """Also mapped."""
    x, w, labels, bias = operands(tokens=(16,), features=8, vocabulary=24)

    def f(loss_of, *args):
        def along(scale):
            return jax.jvp(jax.grad(loss_of, (0, 1, 2)), args, tuple(scale * a for a in args))

        return jax.vmap(along)(jnp.arange(3.0))

    theirs = functools.partial(f, lambda x, w, bias: expected_loss(x @ w + bias, labels))
    expected = by_numpy(theirs, x, w, bias)
    mesh = support.mesh_of_cpus((4, 2), AxisType.Explicit)
    with jax.set_mesh(mesh):
        args = laid_explicitly(mesh, layout, x, w, bias)
        ours = functools.partial(f, lambda x, w, bias: linear_cross_entropy(x, w, labels, bias=bias))
        support.assert_close(support.in_haste(ours, *args), expected, rtol=1e-5, atol=1e-5)


def test_explicit_mode_and_an_array_on_a_single_device(on_the_cpu):
    """Its type knows no mesh."""
    (x, w, labels), expected = spread_operands()
    laid = jax.device_put(w, NamedSharding(support.mesh_of_cpus((4, 2), AxisType.Explicit), P(None, "model")))
    f = jax.value_and_grad(functools.partial(linear_cross_entropy, reduction="sum"), (0, 1))
    support.assert_close(support.in_haste(f, x, laid, labels), expected, rtol=1e-5, atol=1e-4)


@support.sampled("specs", [BOTH, FSDP, TOKENS_SPREAD], 3, ids=str)
def test_explicit_mode_of_one_mesh_axis(on_the_cpu, specs):
    """The other one is automatic."""
    args, expected = spread_operands()
    kinds = AxisType.Explicit, AxisType.Auto
    mesh = Mesh(support.mesh_of_cpus((4, 2)).devices, ("data", "model"), axis_types=kinds)
    args = [jax.device_put(a, NamedSharding(mesh, spec)) for a, spec in zip(args, specs, strict=True)]
    f = jax.value_and_grad(functools.partial(linear_cross_entropy, reduction="sum"), (0, 1))
    with jax.set_mesh(mesh):
        support.assert_close(support.in_haste(f, *args), expected, rtol=1e-5, atol=1e-4)


def test_chunks_in_explicit_mode(on_the_cpu):
    (x, w, labels), _ = spread_operands()
    mesh = support.mesh_of_cpus((4, 2), AxisType.Explicit)
    with jax.set_mesh(mesh):
        x = jax.device_put(x, NamedSharding(mesh, P("data")))
        with pytest.raises(ValueError, match=r"linear_cross_entropy: chunk must be None where x's type .* got 16"):
            linear_cross_entropy(x, w, labels, chunk=16)


def test_labels_that_are_cut_more_finely(on_the_cpu):
    """x follows them, and its gradient has its own type."""
    (x, w, labels), expected = spread_operands()
    mesh = support.mesh_of_cpus((4, 2), AxisType.Explicit)
    with jax.set_mesh(mesh):
        labels = jax.device_put(labels, NamedSharding(mesh, P("data")))
        x, w = (jax.device_put(a, NamedSharding(mesh, P())) for a in (x, w))

        def f(x, w):
            return jnp.sum(linear_cross_entropy(x, w, labels, reduction=None))

        support.assert_close(support.in_haste(jax.value_and_grad(f, (0, 1)), x, w), expected, rtol=1e-5, atol=1e-4)


@support.sampled("check_vma", [True, False], 2)
def test_all_gradients_of_a_vocabulary_that_is_spread(on_the_cpu, check_vma):
    """By x, w, weights and options, from outside of shard_map."""
    (x, w, labels), _ = spread_operands()
    given = x, w, jnp.linspace(0.5, 2, 64), jnp.asarray(0.01), jnp.asarray(0.1)

    def theirs(x, w, weights, z_loss, smoothing):
        options = {"weights": weights, "z_loss": z_loss, "label_smoothing": smoothing}
        return expected_loss(x @ w, labels, "sum", **options)

    def ours(x, w, weights, z_loss, smoothing):
        options = {"weights": weights, "z_loss": z_loss, "label_smoothing": smoothing}
        return linear_cross_entropy(x, w, labels, reduction="sum", chunk=24, axis_name="model", **options)

    specs = P(), P(None, "model"), P(), P(), P()
    f = jax.shard_map(ours, mesh=support.mesh_of_cpus((4, 2)), in_specs=specs, out_specs=P(), check_vma=check_vma)
    which = tuple(range(len(given)))
    found = support.in_haste(jax.value_and_grad(f, which), *given)
    support.assert_close(found, by_numpy(jax.value_and_grad(theirs, which), *given), rtol=1e-5, atol=2e-4)


@support.sampled("chunk,check_vma", itertools.product([None, 4], [True, False]), 2)
def test_probabilities_that_are_spread(on_the_cpu, chunk, check_vma):
    """As the logits are: inside of shard_map, and by their types."""
    (x, w, _), _ = spread_operands()
    args, specs = (x, w, probabilities(tokens=(64,), vocabulary=48)), (P("data"), P(None, "model"), P("data", "model"))

    def theirs(x, w, labels):
        return expected_loss(x @ w, labels, "sum", label_smoothing=0.1, z_loss=0.01)

    def ours(x, w, labels, **options):
        options |= {"reduction": "sum", "label_smoothing": 0.1, "z_loss": 0.01}
        return linear_cross_entropy(x, w, labels, **options)

    def shards(*args):
        return jax.lax.psum(ours(*args, axis_name="model", chunk=chunk), "data")

    f = jax.shard_map(shards, mesh=support.mesh_of_cpus((4, 2)), in_specs=specs, out_specs=P(), check_vma=check_vma)
    expected = by_numpy(jax.value_and_grad(theirs, (0, 1, 2)), *args)
    support.assert_close(support.in_haste(jax.value_and_grad(f, (0, 1, 2)), *args), expected, rtol=1e-5, atol=2e-4)
    mesh = support.mesh_of_cpus((4, 2), AxisType.Explicit)
    with jax.set_mesh(mesh):
        for of_labels in (specs[2], P("data"), P()):
            laid = zip(args, (*specs[:2], of_labels), strict=True)
            laid = [jax.device_put(a, NamedSharding(mesh, spec)) for a, spec in laid]
            found = support.in_haste(jax.value_and_grad(ours, (0, 1, 2)), *laid)
            support.assert_close(found, expected, rtol=1e-5, atol=2e-4)
            assert all(g.sharding.is_equivalent_to(a.sharding, 2) for g, a in zip(found[1], laid, strict=True))


def test_labels_that_were_gathered(on_the_cpu):
    """They are the same on all devices, but their type says that they may differ."""
    (x, w, labels), expected = spread_operands()

    def ours(x, w, part):
        labels = jax.lax.all_gather(part, "model", tiled=True)
        return jax.lax.pmean(linear_cross_entropy(x, w, labels, reduction="sum", axis_name="model"), "model")

    specs = P(), P(None, "model"), P("model")
    f = jax.shard_map(ours, mesh=support.mesh_of_cpus((4, 2)), in_specs=specs, out_specs=P())
    found = support.in_haste(jax.value_and_grad(f, (0, 1)), x, w, labels)
    support.assert_close(found, expected, rtol=1e-5, atol=1e-4)


@support.sampled("reduction", ["mean", None], 2)
def test_gradients_inside_shard_map(on_the_cpu, reduction):
    """Of this device's own loss, by value_and_grad inside; by all that is real."""
    (x, w, labels), _ = spread_operands()
    operands = x, w, jnp.asarray(normal((48,), seed=4)), jnp.linspace(0.5, 2, 64)

    def theirs(x, w, bias, weights):
        return jnp.sum(expected_loss(x @ w + bias, labels, reduction, weights=weights, z_loss=0.01))

    def step(x, w, bias, weights):
        def ours(x, w, bias, weights):
            options = {"reduction": reduction, "chunk": 24, "axis_name": "model", "z_loss": 0.01}
            return jnp.sum(linear_cross_entropy(x, w, labels, bias=bias, weights=weights, **options))

        return jax.value_and_grad(ours, (0, 1, 2, 3))(x, w, bias, weights)

    specs = P(), P(None, "model"), P("model"), P()
    f = jax.shard_map(step, mesh=support.mesh_of_cpus((4, 2)), in_specs=specs, out_specs=(P(), specs))
    expected = by_numpy(jax.value_and_grad(theirs, (0, 1, 2, 3)), *operands)
    support.assert_close(support.in_haste(f, *operands), expected, rtol=1e-5, atol=1e-4)
