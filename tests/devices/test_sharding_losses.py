"""Losses and log-sum-exp of sharded logits: numbers of rows travel, and neither logits nor their gradients."""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
import support
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from oracles import check
from sharded import DIVIDED, KEPT, MODES, SHAPE, in_mode, kinds, labels_of, mesh, place, run_compiled, same
from support import in_haste, normal, sampled

import jax_softmax
from jax_softmax.primitives.operators import bind

pytestmark = pytest.mark.usefixtures("on_the_cpu")


def of_losses(x, labels, axis):
    losses, pullback = jax.vjp(
        lambda x: jax_softmax.softmax_cross_entropy_with_integer_labels(x, labels, axis, label_smoothing=0.1), x
    )
    return losses, pullback(losses)[0]


OF_ROWS = {
    "logsumexp": lambda x, labels, axis: jax_softmax.logsumexp(x, axis, return_max=True),
    "losses": of_losses,
    "loss": lambda x, labels, axis: jax.value_and_grad(jax_softmax.cross_entropy_loss)(x, labels, axis=axis),
    "loss with weights": lambda x, labels, axis: jax.value_and_grad(
        lambda x: jax_softmax.cross_entropy_loss(x, labels, axis=axis, weights=labels, z_loss=0.01, reduction="sum")
    )(x),
}


def logits_and_labels(spec, axis, kind):
    axes = oracles._axes_of(axis, len(SHAPE))
    rows = [n for d, n in enumerate(SHAPE) if d not in axes]
    labels = np.random.default_rng(2).integers(-1, math.prod(SHAPE) // math.prod(rows), rows)
    of_labels = P(*(s for d, s in enumerate((*spec, *[None] * 3)[:3]) if d not in axes))
    x = normal(SHAPE)
    return (x, labels), (place(x, spec, kind), jax.device_put(labels, NamedSharding(mesh(kind), of_labels)))


@sampled("mode,layout,name", itertools.product(MODES[:3], KEPT, OF_ROWS), 17)
def test_kept_axes_of_losses(mode, layout, name):
    """Nothing of the rows travels, and each device runs the kernel: of a loss, scalars are added up."""
    spec, axis = layout
    kind = AxisType.Explicit if mode == "explicit" else AxisType.Auto
    one, several = logits_and_labels(spec, axis, kind)
    f = functools.partial(OF_ROWS[name], axis=axis)
    is_scalar = name.startswith("loss ") or name == "loss"
    sharded = f
    if mode == "shard_map":
        specs = [a.sharding.spec for a in several]

        def sharded(x, labels):
            value, of_x = f(x, labels)
            return (jax.lax.psum(value, ("data", "model")) if is_scalar else value), of_x

        out_specs = (P() if is_scalar else specs[1]), specs[1] if name == "logsumexp" else specs[0]
        sharded = jax.shard_map(sharded, mesh=mesh(), in_specs=tuple(specs), out_specs=out_specs)
    with in_mode(kind):
        # The gradient of each row's loss has a kernel of its own, which is given what the first one made.
        results, travels = run_compiled(sharded, *several, kernels=2 if name.startswith("losses") else 1)
    if is_scalar:
        assert kinds(travels) == {"all-reduce"} and all(size <= 2 for _, size in travels)
    else:
        assert travels == []
    if mode == "shard_map" and name == "loss":
        return  # a mean of each device's own rows
    same(results, in_haste(f, *one))
    if not is_scalar:
        assert results[0].sharding.is_equivalent_to(several[1].sharding, several[1].ndim)
    if name != "logsumexp":
        assert results[1].sharding.is_equivalent_to(several[0].sharding, 3)


@sampled("kind,layout,name", itertools.product([AxisType.Auto, AxisType.Explicit], DIVIDED, OF_ROWS), 13)
def test_divided_rows_of_losses(kind, layout, name):
    """Numbers of rows travel: maxima, sums, labels' logits and sums of logits. XLA may send several of them
    together."""
    spec, axis = layout
    one, several = logits_and_labels(spec, axis, kind)
    f = functools.partial(OF_ROWS[name], axis=axis)
    with in_mode(kind):
        results, travels = run_compiled(f, *several, kernels=1)
    assert kinds(travels) == {"all-reduce"}
    assert all(size <= 7 * one[1].size for _, size in travels)
    assert len(travels) <= (2 if name == "logsumexp" else 5)
    same(results, in_haste(f, *one))


def test_weights_of_a_loss_that_are_cut_more_finely():
    """Numbers of rows travel, and not the gradient."""
    x, weights = normal(SHAPE), np.abs(normal(SHAPE[:2], seed=1))

    def run(x, weights):
        return jax.value_and_grad(jax_softmax.cross_entropy_loss)(x, labels_of(x), weights=weights)

    with jax.set_mesh(mesh(AxisType.Explicit)):
        arrays = jax.device_put(x, P("data")), jax.device_put(weights, P("data", "model"))
        results, travels = run_compiled(run, *arrays)
        assert jax.typeof(results[1]) == jax.typeof(arrays[0])
    assert all(size <= weights.size // 4 for _, size in travels)
    same(results, jax.jit(run)(x, weights))


@sampled("kind", [AxisType.Explicit, AxisType.Auto], 2)
def test_class_weights(kind):
    """Looked up by labels that are spread; and inside shard_map by labels that count the classes of all parts."""
    x, class_weights = normal(SHAPE), np.abs(normal(SHAPE[-1:], seed=1))

    def run(x, labels, class_weights, **options):
        f = functools.partial(jax_softmax.cross_entropy_loss, **options)
        return jax.value_and_grad(lambda *a: f(a[0], labels, class_weights=a[1]), (0, 1))(x, class_weights)

    expected = jax.jit(run)(x, labels_of(x), class_weights)
    with in_mode(kind):
        arrays = place(x, P("data"), kind), place(labels_of(x), P("data"), kind), place(class_weights, P(), kind)
        same(jax.jit(run)(*arrays), expected)
    specs = P(None, None, "model"), P(), P()
    of_parts = functools.partial(jax_softmax.cross_entropy_loss, axis_name="model")
    f = jax.shard_map(
        lambda x, labels, w: of_parts(x, labels, class_weights=w), mesh=mesh(), in_specs=specs, out_specs=P()
    )
    same(f(x, labels_of(x), class_weights), expected[0])


BACKWARD = {
    "losses": (jax_softmax.softmax_cross_entropy_with_integer_labels, "float32", {}),
    "losses with options": (
        functools.partial(jax_softmax.softmax_cross_entropy_with_integer_labels, label_smoothing=0.1, z_loss=0.01),
        "bfloat16",
        {"where": support.random_mask(SHAPE[-1:])},
    ),
    "loss": (jax_softmax.cross_entropy_loss, "float32", {}),
    "loss of float16": (jax_softmax.cross_entropy_loss, "float16", {}),
}


@sampled("kind,name", itertools.product([AxisType.Auto, AxisType.Explicit], BACKWARD), 3)
def test_the_backward_pass_of_divided_rows_sends_nothing(kind, name):
    f, dtype, options = BACKWARD[name]
    (x, labels), (x_sharded, labels_sharded) = logits_and_labels(P("data", None, "model"), -1, kind)
    with in_mode(kind):
        losses, pullback = jax.vjp(lambda x: f(x, labels_sharded, **options), x_sharded.astype(dtype))
        (x_bar,), travels = run_compiled(lambda pullback, t: pullback(t), pullback, jnp.ones_like(losses))
    assert travels == []
    assert x_bar.sharding.is_equivalent_to(x_sharded.sharding, 3)
    same(x_bar, jax.grad(lambda x: jnp.sum(f(x, labels, **options)))(x.astype(jnp.dtype(dtype))))


@pytest.mark.parametrize("spec", [P("data"), P("data", "model"), P(None, ("model", "data"))], ids=str)
def test_rows_that_are_given_numbers(spec):
    x, where = normal((8, 32)), support.random_mask((8, 32))
    of_rows = support.row_numbers("cross_entropy_gradient", x.shape, (1,), "float32")

    def run(*operands):
        return bind("cross_entropy_gradient", *operands[:-1], where=operands[-1], axes=(1,))

    results, travels = run_compiled(run, place(x, spec), *of_rows, place(where, spec), kernels=1)
    assert [kind for kind, _ in travels] == ["all-reduce"] * (2 if len(spec) > 1 else 0)
    expected = oracles.reference_cross_entropy_gradient(x, *of_rows, (1,), where)
    for result, bounded in zip(results, expected, strict=True):
        check(result, bounded)


# As optax and JAX compute them, and ours; of logits, labels and probabilities.
OF_OFFSETS = {
    "integer labels": (
        lambda x, labels, soft: -jnp.take_along_axis(jax.nn.log_softmax(x), labels[:, None], -1)[:, 0],
        lambda x, labels, soft, **n: jax_softmax.softmax_cross_entropy_with_integer_labels(x, labels, **n),
    ),
    "loss": (
        lambda x, labels, soft: -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(x), labels[:, None], -1)),
        lambda x, labels, soft, **n: jax_softmax.cross_entropy_loss(x, labels, **n),
    ),
    "soft labels": (
        lambda x, labels, soft: -jnp.sum(soft * jax.nn.log_softmax(x), -1),
        lambda x, labels, soft, **n: jax_softmax.softmax_cross_entropy(x, soft, **n),
    ),
    "logsumexp": (
        lambda x, labels, soft: jax.nn.logsumexp(x, -1),
        lambda x, labels, soft, **n: jax_softmax.logsumexp(x, **n),
    ),
}


@sampled("name,names", itertools.product(OF_OFFSETS, [None, "model"]), 3)
def test_an_offset_of_divided_rows_costs_nothing(name, names):
    """A common offset costs logits digits when they are rounded; a loss and its gradient are as exact as optax's."""
    spec, of_rows = P("data", "model"), P("data")
    labels, soft = np.arange(8) * 101, np.asarray(jax.nn.softmax(normal((8, 1000), seed=1)))
    theirs, ours = OF_OFFSETS[name]
    if names:

        def of_part(*args):
            y = functools.partial(OF_OFFSETS[name][1], axis_name=names)(*args)
            return jax.lax.pmean(y, "data") if name == "loss" else y

        out_specs = P() if name == "loss" else of_rows
        ours = jax.shard_map(of_part, mesh=mesh(), in_specs=(spec, of_rows, spec), out_specs=out_specs)

    def value_and_gradient(f):
        def run(x, *labels):
            y, pullback = jax.vjp(lambda x: f(x, *labels), x)
            return y, pullback(jnp.ones_like(y))[0]

        return jax.jit(run)

    of_ours, of_theirs = value_and_gradient(ours), value_and_gradient(theirs)
    for offset in (0, 300, 30_000):
        x = normal((8, 1000)) + np.float32(offset)
        with jax.enable_x64(True):
            exact = of_theirs(x.astype("float64"), labels, soft.astype("float64"))
        bounds = of_theirs(x, labels, soft)
        found = of_ours(place(x, spec), place(labels, of_rows), place(soft, spec))
        for arrays in zip(found, bounds, exact, strict=True):
            result, like, wide = (np.asarray(a, "float64") for a in arrays)
            error, allowed = (np.abs(a - wide).max() / np.abs(wide).max() for a in (result, like))
            assert error <= 2 * allowed + 4 * np.finfo("float32").eps, f"at an offset of {offset}"


@pytest.mark.parametrize("labels,weights", [([0, 40, 70, 90], np.arange(4) // 2), ([-1, 99_999, 70, 90], None)])
def test_divided_rows_that_do_not_count(labels, weights):
    """Their logits may be anything."""
    x, labels = normal((4, 100)), np.array(labels)
    x[0, 3], x[1, 60] = np.nan, np.inf

    def run(x, axis_name=None):
        def loss(x):
            return jax_softmax.cross_entropy_loss(x, labels, weights=weights, z_loss=0.1, axis_name=axis_name)

        return jax.value_and_grad(loss)(x)

    spec = P(None, ("data", "model"))
    f = functools.partial(run, axis_name=("data", "model"))
    found = jax.shard_map(f, mesh=mesh(), in_specs=spec, out_specs=(P(), spec))(place(x[:, :96], spec))
    assert np.all(np.asarray(found[1])[:2] == 0)
    same(found, run(x[:, :96]))


def test_logsumexp_of_rows_that_are_not_finite():
    rows = support.nonfinite_rows(31)
    rows = np.concatenate([rows, np.full((-len(rows) % 4, 31), 1.0, rows.dtype)])
    layout = NamedSharding(mesh(), P("data", "model"))  # of which XLA fills up the last parts

    def run(x, *where):
        x, *where = (jax.lax.with_sharding_constraint(a, layout) for a in (x, *where))
        return jax_softmax.logsumexp(x, -1, *where, return_max=True)

    masks = [np.isfinite(rows), np.zeros(rows.shape, bool), ~np.isnan(rows), support.random_mask(rows.shape)]
    for where in (None, *masks):
        results = jax.jit(run)(rows, *([] if where is None else [where]))
        for result, bounded in zip(results, oracles.reference_logsumexp(rows, -1, where), strict=True):
            check(result, bounded)
