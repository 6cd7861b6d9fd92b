"""Arrays sharded over devices: nothing is gathered, and the results are those of one device.

Eight simulated CPU devices (see conftest.py), in a mesh of 4 by 2. What travels is read off the compiled programs.
"""

import contextlib
import functools
import itertools
import json
import math
import socket
import subprocess
import sys
import textwrap
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
import support
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from oracles import check, reference, reference_vjp
from support import CUSTOM_VJPS, JAX_NN, NAMES, OPERATORS, every_name, in_haste, normal, one_name, sampled

import jax_softmax
from jax_softmax import _private
from jax_softmax.devices import division, partitioning, row_shards
from jax_softmax.primitives import reference as reference_module
from jax_softmax.primitives.operators import bind

SHAPE = (8, 4, 32)


@pytest.fixture(autouse=True)
def on_the_cpu():
    """Also where there is a GPU: what is not sharded is where the devices are that it is compared with."""
    partitioning._warned.clear()
    with support.on_a_cpu():
        yield


# Layouts of an array of SHAPE, and axes to reduce that they leave whole.
KEPT = [(P("data", "model"), -1), (P(None, "model", "data"), 0), (P("data", None, "model"), 1)]
KEPT += [(P(("data", "model")), (1, 2)), (P(None, None, ("data", "model")), (0, 1))]
# Axes that they divide.
DIVIDED = [(P("data", None, "model"), -1), (P(None, None, ("model", "data")), -1), (P("data", "model"), 0)]
DIVIDED += [(P("model", None, "data"), (0, 2)), (P("data", "model"), (1, 2)), (P(None, "model", "data"), None)]


def mesh(kind=AxisType.Auto):
    return support.mesh_of_cpus((4, 2), kind)


def in_mode(kind):
    """The context in which types tell shardings, if `kind` is explicit."""
    return jax.set_mesh(mesh(kind)) if kind == AxisType.Explicit else contextlib.nullcontext()


def place(x, spec, kind=AxisType.Auto):
    return jax.device_put(x, NamedSharding(mesh(kind), P(*spec[len(spec) - x.ndim :]) if x.ndim < len(spec) else spec))


def run_compiled(f, *args, kernels=None):
    """The results of the compiled program, and its collectives with the number of elements that each of them sends.

    `kernels`, where it is given, is how many calls of kernels the program must have."""
    program = support.compiled_in_haste(f, *args)
    if kernels is not None:
        assert program.as_text().count('custom_call_target="jax_softmax"') == kernels
    return program(*args), support.collectives(program)


def kinds(collectives):
    return {kind for kind, _ in collectives}


def same(actual, expected, terms=1):
    """Equal but for the order in which a row may be added up, by which each of the two may be off by 16 eps of the
    largest, or of terms that are so many times as large."""
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        assert a.dtype == b.dtype and a.shape == b.shape
        finite = np.isfinite(b)
        np.testing.assert_array_equal(a[~finite], b[~finite])
        scale = terms * np.abs(b[finite]).max(initial=0)
        np.testing.assert_allclose(a[finite], b[finite], rtol=0, atol=2 * 16 * scale * float(jnp.finfo(b.dtype).eps))


def check_sharded(f, arrays, specs, travels, most=None, kernels=None):
    """f of arrays in these layouts is f of the arrays on one device; only this travels, and at most so much at once."""
    results, found = run_compiled(f, *map(place, arrays, specs), kernels=kernels)
    assert kinds(found) == set(travels)
    assert most is None or all(size <= most for _, size in found)
    same(results, in_haste(f, *arrays))
    return results


def everything(f):
    """Values, both modes of differentiation, and a second order."""

    def run(x, t, *where):
        def g(x):
            return f(x, *where)

        y, pullback = jax.vjp(g, x)
        _, tangent = jax.jvp(g, (x,), (t,))
        _, second = jax.jvp(lambda x: jax.vjp(g, x)[1](t)[0], (x,), (t,))
        return y, pullback(t)[0], tangent, second

    return run


def masked(f, axis, **options):
    return lambda x, where=None: f(x, axis, where, **options)


def labels_of(x):
    return np.arange(math.prod(x.shape[:-1])).reshape(x.shape[:-1])


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


# ---- Batch dimensions: nothing travels, and the results stay where the operands are.


def manual(spec, names):
    """What is left of a layout when only the mesh axes of the given names are named."""

    def only(entry):
        given = entry if isinstance(entry, tuple) else (entry,)
        return tuple(name for name in given if name in names) or None

    return P(*map(only, spec))


@functools.cache
def jax_divides(spec, kept):
    """Whether a partly manual shard_map in explicit mode leaves an array where it is: JAX 0.10 does not."""
    with jax.set_mesh(mesh(AxisType.Explicit)):
        double = jax.shard_map(lambda x: 2 * x, in_specs=kept, out_specs=kept, axis_names={"data"})
        try:
            return run_compiled(double, place(normal(SHAPE), spec, AxisType.Explicit))[1] == []
        except ValueError:  # JAX 0.8 wants no dimension along both a manual and an explicit mesh axis
            return False


MODES = ("automatic", "explicit", "shard_map", "partly manual", "partly manual, explicit")


@sampled("mode,layout,name", itertools.product(MODES, KEPT, NAMES), 11)
def test_kept_axes(mode, layout, name):
    spec, axis = layout
    kind = AxisType.Explicit if mode.endswith("explicit") else AxisType.Auto
    x, t, where = normal(SHAPE), normal(SHAPE, seed=1), support.random_mask(SHAPE[1:])
    f = masked(OPERATORS[name], axis)

    def run(x, t, where):
        return everything(f)(x, t), everything(f)(x, t, where)

    sharded = run
    if mode == "shard_map" or "manual" in mode:
        names = {"data"} if "manual" in mode else {"data", "model"}
        kept = manual(spec, names)
        in_specs = kept, kept, P(*kept[1:])
        sharded = jax.shard_map(run, mesh=mesh(kind), in_specs=in_specs, out_specs=kept, axis_names=names)
    if mode == "partly manual, explicit" and not jax_divides(spec, kept):
        pytest.skip("this JAX refuses the layout, or gathers whatever is inside shard_map")
    with in_mode(kind):
        where_spec = (*spec, *[None] * (3 - len(spec)))
        results, travels = run_compiled(
            sharded, place(x, spec, kind), place(t, spec, kind), place(where, where_spec, kind)
        )
    assert travels == []
    same(results, in_haste(run, x, t, where))
    for y in jax.tree.leaves(results):
        assert y.sharding.is_equivalent_to(NamedSharding(mesh(kind), spec), y.ndim)


@every_name
@pytest.mark.parametrize("where_spec", [P(), P(None, "model"), P("data", "model")], ids=str)
@pytest.mark.parametrize("shape", [(1, 4, 1), (8, 1, 32), (4, 32), (32,), ()], ids=str)
def test_masks_that_broadcast(shape, where_spec, name):
    x, where = normal(SHAPE), support.random_mask(shape)
    spec = P(
        *[s if n > 1 else None for s, n in zip([*where_spec, *[None] * 3][:3][3 - len(shape) :], shape, strict=True)]
    )
    f = masked(OPERATORS[name], -1)
    x_sharded, where_sharded = place(x, P("data", "model")), jax.device_put(where, NamedSharding(mesh(), spec))
    y, travels = run_compiled(f, x_sharded, where_sharded)
    assert travels == []
    check(y, reference(name, x, -1, where))


@one_name
def test_eager(name):
    x = place(normal(SHAPE), P("data", "model"))
    y, pullback = jax.vjp(OPERATORS[name], x)
    assert y.sharding.is_equivalent_to(x.sharding, 3)
    assert pullback(y)[0].sharding.is_equivalent_to(x.sharding, 3)


OTHER_DTYPES = ("bfloat16", "float16", "float64", *support.NARROW)


@sampled("dtype,name", itertools.product(OTHER_DTYPES, NAMES), 3)
def test_dtypes(dtype, name):
    x = normal(SHAPE, "float32", scale=20.0 if "int" in dtype else 1.0)
    x = (np.abs(x) if dtype == "uint8" else x).astype(jnp.dtype(dtype))
    with support.precision(dtype) if dtype == "float64" else contextlib.nullcontext():
        for spec, allowed in ((P("data", "model"), []), (P("data", None, "model"), ["all-reduce"] * 2)):
            y, travels = run_compiled(OPERATORS[name], place(x, spec))
            assert [kind for kind, _ in travels] == allowed
            if dtype not in support.NARROW:
                t = normal(SHAPE, dtype, seed=1)
                check(y, reference(name, x))
                check(jax.vjp(OPERATORS[name], place(x, spec))[1](place(t, spec))[0], reference_vjp(name, x, t))
            whole = OPERATORS[name](x)
            same(y.astype(jnp.float32), whole.astype(jnp.float32))
            assert y.dtype == whole.dtype


@sampled("axis,name", itertools.product([-1, (1, 2)], NAMES), 4)
def test_uneven_layouts(axis, name):
    """Arrays inside a program may be divided unevenly; XLA fills the last parts up."""
    x = normal((7, 5, 33))
    x[0, 0, 32], x[1, 1, 0], x[2, 2] = np.nan, np.inf, -np.inf
    where = support.random_mask(x.shape)
    f = masked(OPERATORS[name], axis)
    for spec in (P("data", "model"), P("model", None, "data"), P(None, "data", "model")):
        layout = NamedSharding(mesh(), spec)

        def run(x, *where, layout=layout):
            return f(*(jax.lax.with_sharding_constraint(a, layout) for a in (x, *where)))

        check(jax.jit(run)(x), reference(name, x, axis))
        check(jax.jit(run)(x, where), reference(name, x, axis, where))


@one_name
def test_vmap_with_spmd_axis_name(name):
    x, t, where = normal(SHAPE), normal(SHAPE, seed=1), support.random_mask(SHAPE)
    run = everything(masked(OPERATORS[name], -1))
    mapped = jax.vmap(run, spmd_axis_name="data")
    layout = P("data", "model")
    args = [place(a, layout) for a in (x, t, where)]
    results, travels = run_compiled(mapped, *args)
    assert travels == []
    same(results, in_haste(run, x, t, where))
    for y in results:
        assert y.sharding.is_equivalent_to(args[0].sharding, 3)
    only_mask = jax.vmap(masked(OPERATORS[name], -1), in_axes=(None, 0), spmd_axis_name="data")
    y, travels = run_compiled(only_mask, place(x[0], P("model")), args[2])
    assert travels == []
    check(y, reference(name, np.broadcast_to(x[0], SHAPE), -1, where))


def test_inside_scan_and_checkpoint():
    x = place(normal(SHAPE), P("data", "model"))

    def loss(x):
        def layer(x, _):
            return jax.checkpoint(jax_softmax.softmax)(x), None

        return jax.lax.scan(layer, x, length=3)[0]

    def run(x):
        y, pullback = jax.vjp(loss, x)
        return pullback(y)[0]

    x_bar, travels = run_compiled(run, x)
    assert travels == []
    same(x_bar, run(np.asarray(x)))


def test_attention_takes_no_more_memory():
    def attention(softmax, q, k, v):
        return softmax(q @ k.swapaxes(-1, -2)) @ v

    args = [place(normal((8, 2, 128, 16), seed=i), P("data", "model")) for i in range(3)]
    programs = [
        jax.jit(functools.partial(attention, f)).lower(*args).compile() for f in (jax_softmax.softmax, jax.nn.softmax)
    ]
    ours, theirs = (program.memory_analysis().temp_size_in_bytes for program in programs)
    scores = 2 * 1 * 128 * 128 * 4  # of one device
    assert ours <= theirs + scores


# ---- Reduced axes: only the rows' states travel.


def check_states(found, limit, shape, axis):
    """Up to `limit` all-reduces (XLA may send several states as one), of no more than the states of the rows each."""
    axes = oracles._axes_of(axis, len(shape))
    rows = math.prod(n for d, n in enumerate(shape) if d not in axes)
    assert kinds(found) == {"all-reduce"}
    assert len(found) <= limit
    assert all(size <= rows for _, size in found)


@sampled(
    "name,kind,spec,axis",
    [("softmax", AxisType.Auto, *layout) for layout in DIVIDED]
    + [("log_softmax", AxisType.Auto, *layout) for layout in DIVIDED[-2:]]
    + [(name, AxisType.Explicit, *DIVIDED[0]) for name in NAMES],
    4,
)
def test_divided_rows(name, kind, spec, axis):
    x, t, where = normal(SHAPE), normal(SHAPE, seed=1), support.random_mask(SHAPE)
    f = masked(OPERATORS[name], axis)
    with in_mode(kind):
        sharded = [place(a, spec, kind) for a in (x, t, where)]
        for args, mask in ((sharded[:2], None), (sharded, where)):
            x_s, t_s, *where_s = args
            y, travels = run_compiled(f, x_s, *where_s, kernels=1)  # for the rows' states
            check_states(travels, 2, SHAPE, axis)
            check(y, reference(name, x, axis, mask))
            assert y.sharding.is_equivalent_to(x_s.sharding, 3)
            _, pullback = jax.vjp(lambda x, where_s=where_s: f(x, *where_s), x_s)
            (x_bar,), travels = run_compiled(pullback, t_s)
            check_states(travels, 1, SHAPE, axis)
            check(x_bar, reference_vjp(name, x, t, axis, mask))
        results, travels = run_compiled(everything(f), *sharded)
        assert kinds(travels) == {"all-reduce"}
    same(results, in_haste(everything(f), x, t, where))


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
def test_a_mask_that_varies_where_x_does_not(name):
    """All devices' gradients are added up."""
    x, where = normal((4, 32)), support.random_mask((4, 4, 32))

    def total(x, mask):
        return jnp.sum(jnp.exp(OPERATORS[name](x, -1, mask)) ** 2)

    def of_all(x, where):
        return jax.lax.psum(total(x, where[0]), "data")

    f = jax.shard_map(of_all, mesh=mesh(), in_specs=(P(), P("data")), out_specs=P())
    same(jax.jit(jax.value_and_grad(f))(x, where), jax.value_and_grad(lambda x: sum(total(x, m) for m in where))(x))


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


@one_name
def test_rows_that_are_not_finite(name):
    """NaN, infinities and masks mean in a row of several devices what they mean in one of a single device."""
    rows = support.nonfinite_rows(32)
    rows = np.concatenate([rows, np.full((-len(rows) % 4, 32), 1.0, rows.dtype)])
    masks = [np.ones(rows.shape, bool), np.isfinite(rows), np.zeros(rows.shape, bool), ~np.isnan(rows)]
    masks += [np.arange(32) < 16, np.arange(32) >= 16, support.random_mask(rows.shape)]
    t = normal(rows.shape, seed=1)
    x = place(rows, P("data", "model"))
    f = jax.jit(OPERATORS[name])
    for where in masks:
        check(f(x, where=where), reference(name, rows, -1, where))
        x_bar = jax.vjp(lambda x, where=where: f(x, where=where), x)[1](place(t, P("data", "model")))[0]
        check(x_bar, reference_vjp(name, rows, t, -1, where))


@one_name
def test_large_numbers_far_apart(name):
    """Sums of terms of one device that are nothing beside those of another neither overflow nor count."""
    lowest = np.finfo(np.float32).min
    x = normal((4, 32)) + np.repeat([3e4, -3e4, 1e38, 88.0], 8).astype("float32")
    x[1, ::2], x[1, 1::2], x[2], x[3, 8:] = lowest, 0, lowest, -np.inf
    y = jax.jit(OPERATORS[name])(place(x, P(None, "data")))
    check(y, reference(name, x))


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


def test_sums_of_weighted_exponentials_of_parts():
    x, b = normal(SHAPE), normal(SHAPE, seed=1)
    b[0, 0] = 0

    def run(x, b, **axis_name):
        return jax_softmax.logsumexp(x, b=b, return_sign=True, **axis_name)

    of_parts = functools.partial(run, axis_name="model")
    f = jax.shard_map(of_parts, mesh=mesh(), in_specs=P(None, None, "model"), out_specs=P())
    same(f(x, b), run(x, b))


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


# ---- Results for whole rows, and the losses that are made of them.


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


@one_name
def test_many_dimensions(name):
    """Also more of them, of all operands together, than there are letters to name them."""
    x, where = normal([2] * 10), np.ones([1] * 10, bool)
    y, travels = run_compiled(masked(OPERATORS[name], (4, 9)), place(x, P("model")), where)
    assert travels == []
    check(y, reference(name, x, (4, 9)))


@sampled("dtype", ["float32", "bfloat16", "float64"], 2)
def test_normalizers_of_shards(dtype):
    """By the kernel and by jax.numpy: the maximum of a row, and the sum as it is, however large the maximum."""
    rows = np.concatenate([support.nonfinite_rows(100), normal((4, 100)) + 1e4, normal((1, 100)) * 1e30])
    rows = rows.astype(jnp.dtype(dtype))
    for where in (None, support.random_mask(rows.shape), np.isfinite(rows.astype("float64"))):
        with support.precision(dtype):
            for f in (row_shards.shard_normalizer, reference_module.logsumexp):
                largest, total = (np.asarray(r) for r in f(jnp.asarray(rows), where, (1,)))
                expected = oracles.reference_normalizer(rows, (1,), where)
                check(total, expected[1])
                check(np.where(np.isnan(total), expected[0].value, largest).astype(total.dtype), expected[0])


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


# ---- Programs that are kept.


def exported(f, *specs):
    return jax.export.export(jax.jit(f), platforms=["cpu"], disabled_checks=jax_softmax.export_checks())(*specs)


def round_trip(program):
    pytest.importorskip("flatbuffers", reason="jax.export serializes by it")
    return jax.export.deserialize(program.serialize(vjp_order=0))


@sampled("name,spec", itertools.product(NAMES, [None, P("data", "model"), P("data", None, "model")]), 2, ids=str)
def test_export(name, spec):
    x, t = normal(SHAPE), normal(SHAPE, seed=1)
    args = (x, t) if spec is None else (place(x, spec), place(t, spec))
    run = everything(OPERATORS[name])
    program = round_trip(exported(run, *args))
    expected = {None: set(), 2: set(), 3: {"all-reduce"}}[spec and len(spec)]
    results, travels = run_compiled(program.call, *args)
    assert kinds(travels) == expected
    same(results, jax.jit(run)(x, t))


@one_name
def test_export_with_a_symbolic_batch(name):
    (batch,) = jax.export.symbolic_shape("4*quarter")
    program = round_trip(exported(OPERATORS[name], jax.ShapeDtypeStruct((batch, 32), "float32")))
    layout = NamedSharding(mesh(), P("data"))
    with pytest.warns(UserWarning, match="without its kernel.*a shape is symbolic"):
        sharded = exported(OPERATORS[name], jax.ShapeDtypeStruct((batch, 32), "float32", sharding=layout))
    for n in (4, 8):
        x = normal((n, 32))
        check(program.call(x), reference(name, x))
        y, travels = run_compiled(round_trip(sharded).call, jax.device_put(x, layout))
        assert travels == []
        check(y, reference(name, x))


def test_persistent_cache(tmp_path):
    """A program that is compiled again comes from JAX's cache: it holds nothing of the process that compiled it."""
    script = f"""
        import jax, numpy as np, jax_softmax
        from jax.sharding import NamedSharding, PartitionSpec as P
        hits = []
        jax.monitoring.register_event_listener(lambda event, **_: hits.append(event.endswith("/cache_hits")))
        jax.config.update("jax_compilation_cache_dir", {str(tmp_path)!r})
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
        x = jax.device_put(np.ones((8, 32), "f"), NamedSharding(jax.make_mesh((8,), ("data",)), P(None, "data")))
        jax.jit(jax_softmax.softmax)(x)
        print("hits", sum(hits))
    """
    outputs = [run_script(script) for _ in range(2)]
    assert ["hits 0" in outputs[0], "hits 1" in outputs[1]] == [True, True], outputs


# ---- Several processes.


def started(script, *args):
    environment = {"PATH": "/usr/bin:/bin", "JAX_PLATFORMS": "cpu", "PYTHONPATH": ":".join(p for p in sys.path if p)}
    environment["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
    command = [sys.executable, "-P", "-c", textwrap.dedent(script), *args]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def output(process):
    try:
        text, _ = process.communicate(timeout=100)
    finally:
        process.kill()
    assert process.returncode == 0, text
    return text


def run_script(script):
    return output(started(script))


def test_two_processes():
    script = """
        import sys, jax, numpy as np, jax_softmax, support
        from jax.sharding import NamedSharding, PartitionSpec as P
        port, number = sys.argv[1:]
        jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=2, process_id=int(number))
        assert len(jax.devices()) == 16 and len(jax.local_devices()) == 8
        mesh = jax.make_mesh((4, 4), ("data", "model"))
        x = np.random.default_rng(0).normal(size=(16, 64)).astype("float32")
        t = np.random.default_rng(1).normal(size=(16, 64)).astype("float32")

        def run(x, t, softmax=jax_softmax.softmax):
            y, pullback = jax.vjp(softmax, x)
            return y, pullback(t)[0]

        expected = run(x, t, jax.nn.softmax)
        for spec, collectives in ((P(("data", "model")), set()), (P(None, ("model", "data")), {"all-reduce"})):
            layout = NamedSharding(mesh, spec)
            a, b = (jax.make_array_from_callback(v.shape, layout, lambda i, v=v: v[i]) for v in (x, t))
            program = jax.jit(run).lower(a, b).compile()
            found = support.collectives(program)
            assert {kind for kind, _ in found} == collectives, found
            for actual, whole in zip(program(a, b), expected):
                for shard in actual.addressable_shards:
                    np.testing.assert_allclose(shard.data, whole[shard.index], rtol=1e-5, atol=1e-7)
        print("right")
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    processes = [started(script, port, str(number)) for number in range(2)]
    try:
        for process in processes:
            assert "right" in output(process)
    finally:
        for process in processes:  # the other one, if one was not
            process.kill()
            process.communicate()


def test_divided_calls_of_another_version():
    """As programs hold them that another version exported."""
    with pytest.raises(ValueError, match="another version of jax_softmax"):
        division._divide((), (), None, None, json.dumps({"primitive": "softmax"}))
