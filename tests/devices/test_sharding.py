"""Arrays sharded over devices: nothing is gathered, and the results are those of one device.

Here softmax and log_softmax of one array; and programs that are exported or cached, or run by several processes.
"""

import contextlib
import functools
import itertools
import json
import socket
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
import support
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from oracles import check, reference, reference_vjp
from sharded import (
    DIVIDED,
    KEPT,
    MODES,
    SHAPE,
    check_states,
    everything,
    in_mode,
    kinds,
    manual,
    masked,
    mesh,
    place,
    run_compiled,
    same,
)
from support import NAMES, OPERATORS, every_name, in_haste, normal, one_name, sampled

import jax_softmax
from jax_softmax.devices import division, row_shards
from jax_softmax.primitives import reference as reference_module

pytestmark = pytest.mark.usefixtures("on_the_cpu")


# ---- Batch dimensions: nothing travels, and the results stay where the operands are.


@functools.cache
def jax_divides(spec, kept):
    """Whether a partly manual shard_map in explicit mode leaves an array where it is: JAX 0.10 does not."""
    with jax.set_mesh(mesh(AxisType.Explicit)):
        double = jax.shard_map(lambda x: 2 * x, in_specs=kept, out_specs=kept, axis_names={"data"})
        try:
            return run_compiled(double, place(normal(SHAPE), spec, AxisType.Explicit))[1] == []
        except ValueError:  # JAX 0.8 wants no dimension along both a manual and an explicit mesh axis
            return False


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


@one_name
def test_many_dimensions(name):
    """Also more of them, of all operands together, than there are letters to name them."""
    x, where = normal([2] * 10), np.ones([1] * 10, bool)
    y, travels = run_compiled(masked(OPERATORS[name], (4, 9)), place(x, P("model")), where)
    assert travels == []
    check(y, reference(name, x, (4, 9)))


# ---- Reduced axes: only the rows' states travel.


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
