"""`axis_name`: rows of which each device, or each element of a batch, has a part, inside shard_map and vmap."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import support
from jax.sharding import PartitionSpec as P
from oracles import check, reference
from sharded import SHAPE, check_states, everything, kinds, manual, masked, mesh, place, run_compiled, same
from support import NAMES, OPERATORS, in_haste, normal, one_name, sampled

import jax_softmax

pytestmark = pytest.mark.usefixtures("on_the_cpu")

AXIS_NAMES = (("model", True), (("model",), False), (("data", "model"), True))


@sampled("name,axis_name", itertools.product(NAMES, AXIS_NAMES), 4)
def test_axis_name(axis_name, name):
    """Inside shard_map, all mesh axes or only those of the rows being manual."""
    names, check_vma = axis_name
    x, t, where = normal(SHAPE), normal(SHAPE, seed=1), support.random_mask(SHAPE)
    given = names if isinstance(names, tuple) else (names,)
    run = everything(masked(OPERATORS[name], -1, axis_name=names))
    spec = P(None if "data" in given else "data", None, given)
    args = [place(a, spec) for a in (x, t, where)]
    for axis_names in ({"data", "model"}, set(given)):
        kept = manual(spec, axis_names)
        sharded = jax.shard_map(
            run, mesh=mesh(), in_specs=kept, out_specs=kept, axis_names=axis_names, check_vma=check_vma
        )
        results, travels = run_compiled(sharded, *args)
        assert kinds(travels) == {"all-reduce"}
        same(results, in_haste(everything(masked(OPERATORS[name], -1)), x, t, where))
    forward = jax.shard_map(
        functools.partial(OPERATORS[name], axis_name=names), mesh=mesh(), in_specs=spec, out_specs=spec
    )
    check_states(run_compiled(forward, args[0])[1], 2, SHAPE, -1)
    _, pullback = jax.vjp(forward, args[0])
    check_states(run_compiled(pullback, args[1])[1], 1, SHAPE, -1)


@one_name
def test_axis_name_of_what_does_not_vary(name):
    """Where each device has the same part of the rows, they are repetitions of it."""
    x = normal((3, 5))
    f = jax.shard_map(
        functools.partial(OPERATORS[name], axis_name="model"), mesh=mesh(), in_specs=P(), out_specs=P(None, "model")
    )
    check(jax.jit(f)(x), reference(name, np.tile(x, (1, 2))))


@sampled("name,in_axes", itertools.product(NAMES, [0, 1, None]), 2)
def test_axis_name_of_vmap(name, in_axes):
    x, t = normal((3, 4, 5)), normal((3, 4, 5), seed=1)
    run = everything(functools.partial(OPERATORS[name], axis_name="parts"))
    mapped = jax.vmap(run, in_axes=in_axes, axis_name="parts", axis_size=None if in_axes is not None else 2)
    if in_axes is None:
        x, t = np.stack([x, x]), np.stack([t, t])
        same(mapped(x[0], t[0]), everything(masked(OPERATORS[name], (0, -1)))(x, t))
    else:
        whole = everything(masked(OPERATORS[name], (in_axes, -1)))(x, t)
        same(mapped(x, t), [np.moveaxis(a, in_axes, 0) for a in whole])


@one_name
def test_axis_name_of_vmap_inside_shard_map(name):
    """Rows that both divide."""
    x, spec = normal((2, 4, 6)), P(None, None, "model")

    def run(x):
        of_both = functools.partial(OPERATORS[name], axis_name=("model", "parts"))
        y, pullback = jax.vjp(jax.vmap(of_both, axis_name="parts"), x)
        return y, pullback(y)[0]

    f = jax.shard_map(run, mesh=mesh(), in_specs=spec, out_specs=(spec, spec))
    y, pullback = jax.vjp(lambda x: OPERATORS[name](x, (0, 2)), x)
    same(jax.jit(f)(x), (y, pullback(y)[0]))


@sampled("name,in_axes", itertools.product(["logsumexp", "entropy", "kl_divergence"], [(0, 0), (1, 1), (0, None)]), 4)
def test_axis_name_of_vmap_and_results_of_rows(name, in_axes):
    """As jax.numpy with collectives, where a batch element is a part of each row."""
    x, y = normal((3, 3, 5)), normal((3, 3, 5), seed=1)
    ours, n = getattr(jax_softmax, name), 2 if name == "kl_divergence" else 1

    def log_probabilities(x):
        largest = jax.lax.pmax(jax.lax.stop_gradient(jnp.max(x, -1, keepdims=True)), "parts")
        lse = jnp.log(jax.lax.psum(jnp.sum(jnp.exp(x - largest), -1, keepdims=True), "parts")) + largest
        return x - lse, lse[..., 0]

    def theirs(x, y=None):
        log_p, lse = log_probabilities(x)
        if name == "logsumexp":
            return lse
        log_q = 0 if y is None else log_probabilities(y)[0]
        mean = jax.lax.psum(jnp.sum(jnp.exp(log_p) * (log_p - log_q), -1), "parts")
        return -mean if y is None else mean

    def run(f):
        def value_and_gradient(x, y):
            value, pullback = jax.vjp(f, *(x, y)[:n])
            return value, pullback(jnp.cos(jnp.arange(value.size, dtype=value.dtype)))

        return jax.vmap(value_and_gradient, in_axes=in_axes, axis_name="parts")(x, y[0] if in_axes[1] is None else y)

    found, expected = run(functools.partial(ours, axis_name="parts")), run(theirs)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_axis_name_that_is_none():
    x, label = np.ones(3), np.array(1)
    for given in ("rows", 3, ("model", "rows"), ["rows"]):
        for f, *args in (
            (jax_softmax.softmax, x),
            (jax_softmax.softmax_cross_entropy_with_integer_labels, x, label),
            (jax_softmax.cross_entropy_loss, x, label),
            (jax_softmax.softmax_cross_entropy, x, x),
            (jax_softmax.absmax_scale, x),
        ):
            with pytest.raises(ValueError, match=f"{f.__name__}: axis_name must be a mesh axis"):
                f(*args, axis_name=given)
    f = jax.shard_map(
        lambda x: jax_softmax.softmax(x, axis_name=("model", "model")), mesh=mesh(), in_specs=P(), out_specs=P()
    )
    with pytest.raises(ValueError, match="axis_name must not name an axis twice"):
        f(np.ones(3))
    f = jax.shard_map(lambda x: jax_softmax.softmax(x, axis_name="model"), mesh=mesh(), in_specs=P(), out_specs=P())
    with pytest.raises(TypeError, match="x must be real where axis_name is given"):
        f(np.ones(3, np.complex64))


def test_sums_of_weighted_exponentials_of_parts():
    x, b = normal(SHAPE), normal(SHAPE, seed=1)
    b[0, 0] = 0

    def run(x, b, **axis_name):
        return jax_softmax.logsumexp(x, b=b, return_sign=True, **axis_name)

    of_parts = functools.partial(run, axis_name="model")
    f = jax.shard_map(of_parts, mesh=mesh(), in_specs=P(None, None, "model"), out_specs=P())
    same(f(x, b), run(x, b))


@pytest.mark.parametrize("axis_name", ["model", ("data", "model")], ids=str)
def test_axis_name_of_logsumexp(axis_name):
    x, where = normal(SHAPE), support.random_mask(SHAPE)
    spec = P(None if "data" in axis_name else "data", None, axis_name)
    f = functools.partial(jax_softmax.logsumexp, return_max=True)
    for axis_names in ({"data", "model"}, {axis_name} if axis_name == "model" else set(axis_name)):
        kept = manual(spec, axis_names)
        sharded = jax.shard_map(
            lambda x, where: f(x, -1, where, axis_name=axis_name),
            mesh=mesh(),
            in_specs=kept,
            out_specs=P(*kept[:2]),
            axis_names=axis_names,
        )
        results, travels = run_compiled(sharded, place(x, spec), place(where, spec), kernels=1)
        check_states(travels, 2, SHAPE, -1)
        same(results, f(x, -1, where))


def integer_losses(x, given, axis=-1, **options):
    return jax_softmax.softmax_cross_entropy_with_integer_labels(x, given["labels"], axis, **options)


# Losses, and how many sorts of numbers they reduce for each row.
LOSSES = {
    "integer labels": (integer_losses, 3),
    "with options": (functools.partial(integer_losses, label_smoothing=0.1, z_loss=0.01), 4),
    "with a mask": (lambda x, given, **n: integer_losses(x, given, where=given["where"], label_smoothing=0.1, **n), 6),
    "with a mask of rows": (lambda x, given, **n: integer_losses(x, given, where=given["labels"] % 3 > 0, **n), 4),
    "soft labels": (lambda x, given, **n: jax_softmax.softmax_cross_entropy(x, given["soft"], **n), 3),
    "soft labels with a mask": (
        lambda x, given, **n: jax_softmax.softmax_cross_entropy(x, given["soft"], where=given["where"], **n),
        3,
    ),
    "sum": (
        lambda x, given, **n: jax_softmax.cross_entropy_loss(
            x, given["labels"], weights=given["weights"], reduction="sum", z_loss=0.01, **n
        ),
        3,
    ),
}


def operands_of_losses():
    """With labels in every part, labels that are ignored, and a row that is masked altogether."""
    labels = np.random.default_rng(2).integers(-1, SHAPE[-1] + 1, SHAPE[:2])
    soft = np.asarray(jax.nn.softmax(normal(SHAPE, seed=4)))
    where = support.random_mask(SHAPE)
    where[0, 1] = False
    return {"labels": labels, "soft": soft, "where": where, "weights": normal(SHAPE[:2], seed=5)}


@sampled("names,name", itertools.product(["model", ("data", "model"), ("model", "data")], LOSSES), 9)
def test_axis_name_of_losses(name, names):
    """Inside shard_map, derivatives too: the rows' numbers travel, as one maximum and one sum, and nothing backward."""
    f, sorts = LOSSES[name]
    x, t, given = normal(SHAPE), normal(SHAPE, seed=1), operands_of_losses()
    axis_names = frozenset([names] if names == "model" else names)
    spec = P(None if "data" in names else "data", None, names)

    def run(x, t, given, axis_name=None):
        def g(x):
            return f(x, given, axis_name=axis_name)

        y, pullback = jax.vjp(g, x)
        _, tangent = jax.jvp(g, (x,), (t,))
        _, second = jax.jvp(lambda x: jax.vjp(g, x)[1](y / (1 + abs(y)))[0], (x,), (t,))
        values = jax.tree.map(lambda a: a if a.ndim else a[None], (y, tangent))
        return *values, pullback(y / (1 + abs(y)))[0], second

    if name == "sum":  # of the rows that a device has parts of: here each has all
        spec = P(None, None, names)
    of = {rank: P(*spec[:rank]) for rank in (1, 2, 3)}
    of_values = of[1] if name == "sum" else of[2]
    expected = in_haste(run, x, t, given)
    for manual_axes in {frozenset({"data", "model"}), axis_names}:
        part, values = manual(of[3], manual_axes), manual(of_values, manual_axes)
        of_given = {key: manual(of[a.ndim], manual_axes) for key, a in given.items()}
        sharded = jax.shard_map(
            functools.partial(run, axis_name=names),
            mesh=mesh(),
            in_specs=(part, part, of_given),
            out_specs=(values, values, part, part),
            axis_names=manual_axes,
        )
        placed = place(x, of[3]), place(t, of[3]), {key: place(a, of[a.ndim]) for key, a in given.items()}
        results, travels = run_compiled(sharded, *placed)
        assert kinds(travels) == {"all-reduce"}
        same(results, expected)
    for check_vma in (True, False):
        forward = jax.shard_map(
            lambda x, given: f(x, given, axis_name=names),
            mesh=mesh(),
            in_specs=(of[3], {key: of[a.ndim] for key, a in given.items()}),
            out_specs=P() if name == "sum" else of[2],
            check_vma=check_vma,
        )
        y, travels = run_compiled(forward, placed[0], placed[2], kernels=1)
        assert kinds(travels) == {"all-reduce"} and len(travels) <= (3 if name.startswith("soft") else 2)
        rows = given["labels"].size // (1 if spec[0] is None else 4)
        assert sum(size for _, size in travels) == sorts * rows
        _, pullback = jax.jit(functools.partial(jax.vjp, lambda x, forward=forward: forward(x, placed[2])))(placed[0])
        (x_bar,), travels = run_compiled(lambda pullback, y: pullback(y), pullback, y / (1 + abs(y)))
        assert travels == [] or not check_vma  # without it JAX does not know that devices have the same
        same(x_bar, expected[2])


@pytest.mark.parametrize("axis,spec", [((0, 2), P(("data", "model"))), ((2, 0), P(None, None, ("data", "model")))])
def test_axis_name_of_labels_along_several_axes(axis, spec):
    """They count the elements of one part after the other's, if the axis that is spread is given first."""
    x, labels = normal(SHAPE), np.array([3, 64, 255, 200])

    def run(x, axis_name=None):
        losses, pullback = jax.vjp(lambda x: integer_losses(x, {"labels": labels}, axis, axis_name=axis_name), x)
        return losses, pullback(losses)[0]

    f = functools.partial(run, axis_name=("data", "model"))
    same(jax.jit(jax.shard_map(f, mesh=mesh(), in_specs=spec, out_specs=(P(), spec)))(place(x, spec)), run(x))


@sampled("names,dtype", itertools.product(["model", ("data", "model")], ["float32", "int8", "float8_e4m3fn"]), 4)
def test_axis_name_of_absmax_scale(names, dtype):
    x, where, t, s = normal(SHAPE), support.random_mask(SHAPE), normal(SHAPE, seed=1), normal((8, 4, 1), seed=2)
    x[0, 0, [1, 31]], where[0, 0, [1, 31]] = 9, True  # which tie
    x[1, 1, 5], x[1, 2, 30], x[2, 2], where[3, 3] = np.nan, np.inf, 0, False
    x[4, 0] = np.resize([127, 0.5, 1.5, 2.5, -0.5, 63.5], 32)  # which lie halfway between two integers
    spec = P(None if "data" in names else "data", None, names)
    of_rows = P(spec[0])

    def run(x, where, t, s, axis_name=None):
        def f(x, mask):
            y, scale = jax_softmax.absmax_scale(x, -1, mask, dtype=dtype, axis_name=axis_name)
            return y.astype(jnp.float32), scale

        def all_of(mask):
            results, pullback = jax.vjp(lambda x: f(x, mask), x)
            _, tangents = jax.jvp(lambda x: f(x, mask), (x,), (t,))
            return results, tangents, pullback((t, s))[0]

        return all_of(None), all_of(where)

    of_results = ((spec, of_rows), (spec, of_rows), spec)
    sharded = jax.shard_map(
        functools.partial(run, axis_name=names),
        mesh=mesh(),
        in_specs=(spec, spec, spec, of_rows),
        out_specs=(of_results, of_results),
    )
    results, travels = run_compiled(sharded, place(x, spec), place(where, spec), place(t, spec), place(s, of_rows))
    assert kinds(travels) == {"all-reduce"}
    same(results, in_haste(run, x, where, t, s))
    forward = jax.shard_map(
        lambda x: jax_softmax.absmax_scale(x, dtype=dtype, axis_name=names),
        mesh=mesh(),
        in_specs=spec,
        out_specs=(spec, of_rows),
    )
    (y, _), travels = run_compiled(forward, place(x, spec))
    check_states(travels, 2, SHAPE, -1)
    assert np.array_equal(
        np.asarray(y), np.asarray(jax_softmax.absmax_scale(x, dtype=dtype)[0]), equal_nan=dtype != "int8"
    )


@sampled("in_axis", range(3), 3)
def test_axis_name_of_vmap_and_losses(in_axis):
    """The elements of the batch are the parts, one after the other."""
    x, given = normal(SHAPE), operands_of_losses()

    def split(a):
        return jnp.moveaxis(jnp.reshape(a, (*a.shape[:-1], 4, a.shape[-1] // 4)), -2, in_axis)

    of_parts = {key: split(a) if a.shape == SHAPE else a for key, a in given.items()}
    axes = {key: in_axis if a.shape == SHAPE else None for key, a in given.items()}
    for f in (LOSSES["with a mask"][0], LOSSES["soft labels"][0]):
        losses, pullback = jax.vjp(lambda x, f=f: f(x, given), x)
        parts = jax.vmap(functools.partial(f, axis_name="parts"), (in_axis, axes), axis_name="parts")
        found, of_found = jax.vjp(lambda x, parts=parts: parts(x, of_parts), split(x))
        same(found, np.stack([losses] * 4))
        cotangent = np.zeros_like(found)
        cotangent[1] = np.cos(losses)
        same(of_found(jnp.asarray(cotangent))[0], split(pullback(jnp.cos(losses))[0]))
    y, scale = jax.vmap(
        functools.partial(jax_softmax.absmax_scale, dtype="int8", axis_name="parts"), in_axis, axis_name="parts"
    )(split(x))
    whole, scales = jax_softmax.absmax_scale(x, dtype="int8")
    assert np.array_equal(y, np.moveaxis(split(whole), in_axis, 0)) and np.array_equal(scale, [scales] * 4)
