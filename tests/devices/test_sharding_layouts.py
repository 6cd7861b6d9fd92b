"""Operands and results in different layouts: what travels, what warns, and what types say where they tell shardings."""

import functools
import itertools
import math
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import support
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from oracles import check, reference
from sharded import SHAPE, kinds, labels_of, masked, mesh, place, run_compiled, same
from support import CUSTOM_VJPS, JAX_NN, NAMES, OPERATORS, in_haste, normal, one_name, sampled

import jax_softmax
from jax_softmax import _private

pytestmark = pytest.mark.usefixtures("on_the_cpu")


# Functions of two arrays, one of them a mask or logits of another distribution.
OF_TWO = {
    **{name: lambda x, where, f=f: f(x, -1, where) for name, f in OPERATORS.items()},
    "softmax_vjp": lambda x, where: CUSTOM_VJPS["softmax"](x, -1, where),
    "logsumexp": lambda x, where: jax_softmax.logsumexp(x, -1, where),
    "entropy": lambda x, where: jax_softmax.entropy(x, -1, where),
    "losses": lambda x, where: jax_softmax.softmax_cross_entropy_with_integer_labels(x, labels_of(x), -1, where),
    "loss": lambda x, where: jax_softmax.cross_entropy_loss(x, labels_of(x), where=where),
    "kl_divergence": jax_softmax.kl_divergence,
    "distillation": lambda p, q: jax.value_and_grad(lambda q: jax_softmax.kl_divergence(p, q).sum())(q),
}
OF_ROWS_OF_TWO = [name for name in OF_TWO if name not in (*OPERATORS, "softmax_vjp")]
SUMS = ("loss", "distillation")
TWO_LAYOUTS = [(P(), P("data")), (P("data"), P("data", "model")), (P("data"), P(None, "model"))]


def of_two(name):
    of_floats = name in ("kl_divergence", "distillation")
    return normal(SHAPE), normal(SHAPE, seed=1) if of_floats else support.random_mask(SHAPE)


def check_sharded(f, arrays, specs, travels, most=None, kernels=None):
    """f of arrays in these layouts is f of the arrays on one device; only this travels, and at most so much at once."""
    results, found = run_compiled(f, *map(place, arrays, specs), kernels=kernels)
    assert kinds(found) == set(travels)
    assert most is None or all(size <= most for _, size in found)
    same(results, in_haste(f, *arrays))
    return results


@sampled("name,specs", itertools.product(["softmax", *OF_ROWS_OF_TWO], TWO_LAYOUTS), 9)
def test_operands_in_different_layouts(name, specs):
    """All are cut as finely as one of them is, and none is gathered."""
    f, arrays = OF_TWO[name], of_two(name)
    check_sharded(f, arrays, specs, {"all-reduce"} if name in SUMS else {}, most=2)


@sampled("name", OF_ROWS_OF_TWO, 2)
def test_operands_that_divide_rows_differently(name):
    """Numbers of rows travel."""
    specs = P("data"), P(None, None, "model")
    check_sharded(OF_TWO[name], of_two(name), specs, {"all-reduce"}, most=4 * math.prod(SHAPE[:2]) // 4)


MOVED = [
    (P("model"), P(None, "model"), 0),
    (P("data"), P(None, "model", "data"), 2),
    (P(None, None, "data"), P("data"), 0),
    (P(("data", "model")), P("data", "model"), 0),
]


@pytest.mark.parametrize("given,wanted,n_states", MOVED, ids=str)
def test_a_mesh_axis_that_moves_to_another_dimension(given, wanted, n_states, recwarn):
    """Each device sends the others their parts, and nobody has the whole: so nothing warns of that."""
    x, layout = normal(SHAPE), NamedSharding(mesh(), wanted)
    y, travels = run_compiled(jax.jit(jax_softmax.softmax, out_shardings=layout), place(x, given))
    assert sorted(kind for kind, _ in travels) == ["all-reduce"] * n_states + ["all-to-all"]
    assert all(size <= x.size / 2 for _, size in travels)
    assert y.sharding.is_equivalent_to(layout, 3)
    check(y, reference("softmax", x))
    where = support.random_mask(SHAPE)
    y, travels = run_compiled(masked(jax_softmax.softmax, -1), place(x, wanted), place(where, given))
    assert sorted(kind for kind, _ in travels) == ["all-reduce"] * n_states + ["all-to-all"]
    check(y, reference("softmax", x, -1, where))
    assert not recwarn.list


EQUALLY_LONG = [
    (P(("data", "model")), P("model", "data")),
    (P("data"), P("model")),
    (P("data", "model"), P("model", "data")),
]


@pytest.mark.parametrize("given,wanted", EQUALLY_LONG, ids=str)
def test_a_result_that_an_equally_long_mesh_axis_cuts(given, wanted):
    """What lies elsewhere is fetched from there, and nobody has the whole."""
    x, devices = normal(SHAPE), np.array(jax.devices("cpu")[:4]).reshape(2, 2)
    given, wanted = (NamedSharding(Mesh(devices, ("data", "model")), spec) for spec in (given, wanted))
    with pytest.warns(UserWarning, match="may be gathered"):
        y, travels = run_compiled(jax.jit(jax_softmax.softmax, out_shardings=wanted), jax.device_put(x, given))
    assert "collective-permute" in kinds(travels) and "all-gather" not in kinds(travels)
    assert y.sharding.is_equivalent_to(wanted, 3)
    check(y, reference("softmax", x))


@pytest.mark.parametrize("shape", [(5, 7, 6), (5, 8, 6), (8, 7, 6)], ids=str)
def test_a_mesh_axis_that_moves_over_extents_that_it_does_not_divide(shape):
    x = normal(shape)

    def run(x):
        y = jax_softmax.softmax(jax.lax.with_sharding_constraint(x, NamedSharding(mesh(), P("data"))))
        return 1 * jax.lax.with_sharding_constraint(y, NamedSharding(mesh(), P(None, "data")))

    with pytest.warns(UserWarning, match="may be gathered"):
        y = jax.jit(run, out_shardings=NamedSharding(mesh(), P()))(x)
    check(y, reference("softmax", x))


MASKS_ELSEWHERE = [(P("data"), P("model")), (P("model"), P("data")), (P(None, None, "data"), P(None, None, "model"))]
MASKS_ELSEWHERE += [(P("data"), P(("model", "data"))), (P("data", "model"), P("model", "data"))]


@pytest.mark.parametrize("spec,elsewhere", MASKS_ELSEWHERE, ids=str)
def test_masks_and_cotangents_along_other_mesh_axes(spec, elsewhere):
    """Results lie as the first operand does, and each device gets no more of the others than it has of this one."""
    x, t, where = normal(SHAPE), normal(SHAPE, seed=1), support.random_mask(SHAPE)

    def pull_back(x, t):
        return jax.vjp(jax_softmax.softmax, x)[1](t)[0]

    part = math.prod(NamedSharding(mesh(), spec).shard_shape(SHAPE))
    for f, other in ((masked(jax_softmax.softmax, -1), where), (pull_back, t)):
        y, travels = run_compiled(f, place(x, spec), place(other, elsewhere))
        assert all(size <= part for _, size in travels)
        assert y.sharding.is_equivalent_to(NamedSharding(mesh(), spec), 3)
        same(y, jax.jit(f)(x, other))


@pytest.mark.parametrize(
    "loss", [jax_softmax.softmax_cross_entropy_with_integer_labels, jax_softmax.cross_entropy_loss]
)
def test_a_mask_of_losses_along_another_mesh_axis(loss):
    """Numbers of rows travel."""
    x, labels, where = normal((40, 16, 16)), np.arange(16) * 40, np.arange(16) % 5 > 0

    def run(x, labels, where):
        return jax.value_and_grad(lambda x: jnp.sum(loss(x, labels, axis=(0, 1), where=where[None, None])))(x)

    args = place(x, P("data", None, "model")), place(labels, P("model")), place(where, P("data"))
    results, travels = run_compiled(run, *args)
    assert all(size <= 2 * labels.size for _, size in travels)
    assert results[1].sharding.is_equivalent_to(args[0].sharding, 3)
    same(results, jax.jit(run)(x, labels, where))


@pytest.mark.parametrize("of_labels", [("model", "data"), "model", ("data", "model")], ids=str)
def test_soft_labels_along_other_mesh_axes(of_labels):
    """They are brought to the logits' layout."""
    logits, labels = place(normal((16, 32)), P(None, "data")), place(normal((16, 32), seed=1), P(None, of_labels))
    losses, travels = run_compiled(jax_softmax.softmax_cross_entropy, logits, labels)
    assert all(size <= 16 * 32 // 4 for _, size in travels)
    same(losses, jax_softmax.softmax_cross_entropy(np.asarray(logits), np.asarray(labels)))


def test_two_mesh_axes_that_move():
    x, layout = normal(SHAPE), NamedSharding(mesh(), P(None, "data", "model"))
    with pytest.warns(UserWarning, match="may be gathered"):
        y = jax.jit(jax_softmax.softmax, out_shardings=layout)(place(x, P("data", "model")))
    check(y, reference("softmax", x))


def test_distributions_along_other_mesh_axes():
    """Each dimension is cut as where it has most parts: numbers of rows are reduced, and the coarser array is cut."""
    x, y = normal(SHAPE), normal(SHAPE, seed=1)
    specs = P(None, None, "data"), P(None, None, ("model", "data"))
    for given in (specs, specs[::-1]):
        result, travels = run_compiled(jax_softmax.kl_divergence, *map(place, (x, y), given))
        assert all(size <= x.size // 8 for _, size in travels)
        same(result, jax_softmax.kl_divergence(x, y))


def test_results_of_rows_along_the_mesh_axis_of_another_dimension():
    """They are brought there, and not the array."""
    x, layout = normal(SHAPE), NamedSharding(mesh(), P("data"))
    f = jax.jit(functools.partial(jax_softmax.logsumexp, axis=2), out_shardings=layout)
    y, travels = run_compiled(f, place(x, P(None, None, "data")))
    assert all(size <= y.size for _, size in travels)
    assert y.sharding.is_equivalent_to(layout, 2)
    same(y, jax_softmax.logsumexp(x))


def test_a_mesh_axis_that_moves_inside_a_partly_manual_shard_map():
    x, layout = normal(SHAPE), NamedSharding(mesh(), P("data", None, "model"))
    f = jax.shard_map(
        lambda x: jax_softmax.softmax(x, 0), mesh=mesh(), in_specs=P("data"), out_specs=P("data"), axis_names={"data"}
    )
    with pytest.warns(UserWarning, match="may be gathered"):
        y = jax.jit(f, out_shardings=layout)(place(x, P("data", "model")))
    parts = (4, 2, *SHAPE[1:])
    check(np.reshape(y, parts), reference("softmax", x.reshape(parts), 1))


# ---- What cannot be divided is right, and says so.


def test_a_divided_axis_that_is_not_manual():
    x = normal(SHAPE)
    sharded = jax.shard_map(
        jax_softmax.softmax, mesh=mesh(), in_specs=P("data"), out_specs=P("data"), axis_names={"data"}
    )
    with pytest.warns(UserWarning, match="may be gathered.*Make that mesh axis manual too and pass it as axis_name"):
        y = jax.jit(sharded)(place(x, P("data", None, "model")))
    check(y, reference("softmax", x))


def test_layouts_that_do_not_go_together():
    x, y = normal(SHAPE), normal(SHAPE, seed=1)
    operands = place(x, P(("model", "data"))), place(y, P("data", "model"))
    with pytest.warns(UserWarning, match="may be gathered.*Bring it to that one before, by jax.lax") as warned:
        found = jax.jit(lambda *a: jax.jvp(jax_softmax.kl_divergence, a, a))(*operands)
        jax.jit(jax_softmax.kl_divergence)(*operands)
    assert len(warned) == 1
    same(found, jax.jvp(jax_softmax.kl_divergence, (x, y), (x, y)))


def test_a_filter_that_makes_errors_of_warnings():
    """XLA calls back to where nothing may be raised: the warning is shown, and the program runs."""
    x, y = normal(SHAPE), normal(SHAPE, seed=1)
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("error")
        f = jax.jit(lambda x, y: jax_softmax.kl_divergence(x, y))  # which no other test has compiled
        found = f(place(x, P(("model", "data"))), place(y, P("data", "model")))
    assert ["may be gathered" in str(warning.message) for warning in shown] == [True]
    same(found, jax_softmax.kl_divergence(x, y))


@pytest.fixture
def gspmd():
    jax.config.update("jax_use_shardy_partitioner", False)
    yield
    jax.config.update("jax_use_shardy_partitioner", True)


def test_gspmd(gspmd):
    """It takes no rules of sharding: what it divides is jax.numpy."""
    x = normal(SHAPE)
    with pytest.warns(UserWarning, match="without its kernel.*jax_use_shardy_partitioner"):
        y, travels = run_compiled(lambda x: jax_softmax.softmax(x), place(x, P("data", "model")), kernels=0)
    assert travels == []
    check(y, reference("softmax", x))


def test_a_jax_that_moved_its_private_names(monkeypatch):
    monkeypatch.setattr(_private.DIVISION, "available", False)
    x = normal(SHAPE)
    y, travels = run_compiled(lambda x: jax_softmax.softmax(x), place(x, P("data", "model")), kernels=0)
    assert travels == []
    check(y, reference("softmax", x))


def test_a_jax_that_does_not_say_how_many_devices(monkeypatch):
    monkeypatch.setattr(_private, "_axis_context", lambda ctx: None)
    monkeypatch.setattr(jax, "device_count", lambda: 8)  # also where there is one GPU
    x = normal(SHAPE)
    with pytest.warns(UserWarning, match="without its kernel.*Upgrade jax_softmax"):
        y, travels = run_compiled(lambda x: jax_softmax.softmax(x), place(x, P("data", "model")), kernels=0)
    assert travels == []
    check(y, reference("softmax", x))


# ---- Types, where they tell shardings.


def _mask_of_vmap(f, put):
    x, where = put(normal((4, 32)), P("model")), put(support.random_mask(SHAPE), P("data"))
    return jax.vmap(f, (None, None, 0))(x, -1, where)


def _both_of_vmap(f, put):
    x, where = (
        put(normal((32, 8, 4)), P(None, "data", "model")),
        put(support.random_mask((4, 32, 8)), P(None, None, "data")),
    )
    return jax.vmap(f, (1, None, 2))(x, 0, where.swapaxes(0, 1))


def _cotangent_of_vmap(f, put):
    x, t = put(normal((4, 32)), P("model")), put(normal(SHAPE), P("data", "model"))
    return jax.vmap(jax.vjp(f, x)[1])(t)[0]


def _tangent_of_vmap(f, put):
    x, t = put(normal((4, 32)), P("model")), put(normal(SHAPE), P("data", "model"))
    return jax.vmap(lambda t: jax.jvp(f, (x,), (t,))[1])(t)


def _masked_case(x_shape, x_spec, mask_shape, mask_spec):
    return lambda f, put: f(put(normal(x_shape), x_spec), -1, put(support.random_mask(mask_shape), mask_spec))


TYPED = {
    "a sharded mask": _masked_case(SHAPE, P(), SHAPE, P("data", "model")),
    "a mask of lower rank": _masked_case(SHAPE, P("data"), (4, 32), P("model")),
    "a mask of higher rank": _masked_case((4, 32), P("model"), (8, 1, 1), P("data")),
    "a mask that enlarges": _masked_case((8, 1, 32), P("data"), SHAPE, P(None, "model")),
    "vmap of the mask": _mask_of_vmap,
    "vmap of both": _both_of_vmap,
    "vmap of the cotangent": _cotangent_of_vmap,
    "vmap of the tangent": _tangent_of_vmap,
}


@sampled("case,name", itertools.product(TYPED, NAMES), 5)
def test_types_follow_all_operands(case, name):
    with jax.set_mesh(mesh(AxisType.Explicit)):
        ours, theirs = (TYPED[case](f[name], jax.device_put) for f in (OPERATORS, JAX_NN))
    assert jax.typeof(ours) == jax.typeof(theirs)
    same(ours, TYPED[case](OPERATORS[name], lambda value, spec: value))


def derivatives(f, x, other, forward):
    """Pairs of what must have one type: each float operand and its cotangent, the result and its tangent."""
    pairs = []
    for k, operand in enumerate([x] if other.dtype == bool else [x, other]):

        def of_one(a, k=k):
            return f(a, other) if k == 0 else f(x, a)

        y, pullback = jax.vjp(of_one, operand)
        pairs.append((operand, pullback(y)[0]))
        if forward:
            pairs.append((y, jax.jvp(of_one, (operand,), (operand,))[1]))
    return pairs


FINER = P("data", None, "model")


@sampled(
    "name,specs",
    itertools.product(
        ["softmax", "log_softmax", "softmax_vjp", "losses", "kl_divergence"],
        [(P("data"), FINER), (P(), FINER), (FINER, P("data"))],
    ),
    5,
)
def test_types_of_derivatives(name, specs):
    """Those of what they belong to, also where another operand is sharded over more mesh axes."""
    f, arrays = functools.partial(derivatives, OF_TWO[name], forward=not name.endswith("vjp")), of_two(name)
    with jax.set_mesh(mesh(AxisType.Explicit)):
        pairs = f(*map(jax.device_put, arrays, specs))
    assert all(jax.typeof(like) == jax.typeof(derivative) for like, derivative in pairs)
    # A derivative of a divergence is a mean of products of logits and of differences of logarithms that nearly cancel.
    same(pairs, in_haste(f, *arrays), terms=4 if name == "kl_divergence" else 1)


@one_name
def test_types_on_a_mesh_of_which_one_axis_is_explicit(name):
    """The other one is automatic."""
    kinds = AxisType.Explicit, AxisType.Auto
    with jax.set_mesh(Mesh(mesh().devices, ("data", "model"), axis_types=kinds)):
        x = jax.device_put(normal(SHAPE), P("data", "model"))
        assert jax.make_jaxpr(OPERATORS[name])(x).out_avals[0].sharding.spec == P("data", None, None)


@sampled("name", ["softmax", "losses", "kl_divergence"], 2)
def test_types_of_derivatives_of_vmap(name):
    """Also if it is the axis of the batch along which only the other operand is sharded."""
    x, other = of_two(name)
    f = functools.partial(derivatives, jax.vmap(OF_TWO[name], (None, 0)), forward=True)
    with jax.set_mesh(mesh(AxisType.Explicit)):
        pairs = f(jax.device_put(x[0], P("model")), jax.device_put(other, P("data")))
    assert all(jax.typeof(like) == jax.typeof(derivative) for like, derivative in pairs)
    same(pairs, in_haste(f, x[0], other))


@one_name
def test_shardings_that_do_not_go_together(name):
    with jax.set_mesh(mesh(AxisType.Explicit)):
        x = jax.device_put(normal(SHAPE), P("data"))
        where = jax.device_put(support.random_mask(SHAPE), P("model"))
        errors = []
        for f in (JAX_NN[name], OPERATORS[name]):
            with pytest.raises(Exception, match="sharding") as error:
                f(x, -1, where)
            errors.append(error.type)
        assert errors[0] is errors[1] and errors[0].__name__ == "ShardingTypeError"
        f = OPERATORS[name]
        _, pullback = jax.vjp(f, x)
        assert jax.typeof(pullback(x)[0]) == jax.typeof(x)
