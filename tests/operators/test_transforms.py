"""JAX's transformations of a whole program: jit, vmap, scan, cond, checkpoint, shard_map, export, donation, threads.

What they do to derivatives is in test_gradients.py, what they leave of the custom call in test_lowering.py.
"""

import functools
import itertools
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
import support
from jax.extend.core import Primitive
from jax.interpreters.batching import fancy_primitive_batchers
from jax.sharding import Mesh, PartitionSpec
from oracles import check, reference, reference_vjp
from support import NAMES, OPERATORS, assert_same_bits, every_name, normal, one_name, sampled

import jax_softmax
from jax_softmax.primitives import batching, operators


def stacked(bounded, axis=0):
    return oracles.Bounded(*(np.stack(part, axis) for part in list(zip(*bounded, strict=True))[:2]), bounded[0].dtype)


def along(array, axis, size):
    """The slices that vmap hands out."""
    return [array] * size if axis is None else list(np.moveaxis(array, axis, 0))


@every_name
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_jit_is_eager(dtype, name):
    x = normal((5, 33), dtype)
    where = support.random_mask(x.shape)
    f = OPERATORS[name]
    for axis in (-1, 0, None):
        assert_same_bits(jax.jit(f, static_argnames="axis")(x, axis=axis), f(x, axis))
        assert_same_bits(jax.jit(f, static_argnums=1)(x, axis, where), f(x, axis, where))


@sampled("axis,batch,name", itertools.product([0, 1, -1, (0, 1), None], [0, 1, 2, -1], NAMES), 3)
def test_vmap(axis, batch, name):
    x = normal((3, 4, 5))
    for out in (0, 1, 2):
        actual = jax.vmap(functools.partial(OPERATORS[name], axis=axis), in_axes=batch, out_axes=out)(x)
        expected = [reference(name, part, axis) for part in along(x, batch, 0)]
        check(actual, stacked(expected, out))


BATCHES = (0, 1, 2, None)


@sampled("mask_batch,x_batch,name", list(itertools.product(BATCHES, BATCHES, NAMES))[:-2], 5)
def test_vmap_with_a_mask(mask_batch, x_batch, name):
    size = 3
    x = normal(np.insert((4, 5), x_batch or 0, size) if x_batch is not None else (4, 5))

    @functools.partial(jax.jit, static_argnums=2)
    def run(x, where, axis):
        return jax.vmap(lambda x, where: OPERATORS[name](x, axis, where), in_axes=(x_batch, mask_batch))(x, where)

    for axis, mask_shape in ((-1, (4, 5)), (0, (4, 5)), (None, (4, 5)), (-1, (1, 5)), (0, (4, 1)), (-1, (1, 1))):
        if mask_batch is not None:
            mask_shape = np.insert(mask_shape, mask_batch, size)
        where = support.random_mask(tuple(mask_shape))
        parts = zip(along(x, x_batch, size), along(where, mask_batch, size), strict=True)
        check(run(x, where, axis), stacked([reference(name, a, axis, m) for a, m in parts]))


@every_name
def test_vmap_with_a_mask_of_another_rank(name):
    x = normal((3, 4, 5))
    rows = support.random_mask((3, 5), 1)
    actual = jax.vmap(lambda x, where: OPERATORS[name](x, -1, where))(x, rows)
    check(actual, reference(name, x, -1, rows[:, None]))
    switches = np.array([True, False, True])
    actual = jax.vmap(lambda x, where: OPERATORS[name](x, -1, where))(x, switches)
    check(actual, reference(name, x, -1, switches[:, None, None]))
    wide = support.random_mask((3, 2, 6, 5), 2)
    actual = jax.vmap(lambda x, where: OPERATORS[name](x, -1, where))(x[:, :1], wide)
    check(actual, reference(name, x[:, None, :1], -1, wide))


MAPPED = ((0, 0), (1, 1), (2, 2), (0, 2), (2, 1), (1, None), (None, 0), (None, 2))


@sampled("masked,batches,name", itertools.product([False, True], MAPPED, NAMES), 5)
def test_vmap_of_the_vjp(masked, batches, name):
    x_batch, g_batch = batches
    size = 3
    x = normal(np.insert((4, 5), x_batch, size) if x_batch is not None else (4, 5))
    g = normal(np.insert((4, 5), g_batch, size) if g_batch is not None else (4, 5), seed=1)
    where = support.random_mask((4, 5)) if masked else None
    for axis in (0, -1, None):

        def pullback(x, g, axis=axis):
            return jax.vjp(lambda x: OPERATORS[name](x, axis, where), x)[1](g)[0]

        actual = jax.jit(jax.vmap(pullback, in_axes=(x_batch, g_batch)))(x, g)
        parts = zip(along(x, x_batch, size), along(g, g_batch, size), strict=True)
        check(actual, stacked([reference_vjp(name, a, b, axis, where) for a, b in parts]))


@every_name
@pytest.mark.parametrize("inner,outer", [*itertools.product((0, 1, 2), (0, 1, 2, 3))])
def test_vmap_of_vmap(outer, inner, name):
    x = normal((2, 3, 4, 5))
    f = jax.vmap(jax.vmap(functools.partial(OPERATORS[name], axis=0), inner, inner), outer, outer)
    rest = [i for i in range(4) if i != outer]
    del rest[inner]
    check(jax.jit(f)(x), reference(name, x, rest[0]))


@one_name
def test_vmap_of_nothing(name):
    assert jax.vmap(OPERATORS[name])(jnp.zeros((0, 4))).shape == (0, 4)


@one_name
def test_vmap_with_a_collective(name):
    """A named axis is for collectives only: the operator reduces over positions."""
    x = normal((3, 4))
    f = jax.vmap(lambda x: jax.lax.psum(OPERATORS[name](x), "batch"), axis_name="batch")
    np.testing.assert_allclose(f(x)[0], reference(name, x).value.sum(0), rtol=1e-5)


@pytest.mark.parametrize("batch", [0, 1, None])
@pytest.mark.parametrize("elements,rows", [(1, 0), (0, 1), (0, 2), (1, 1), (1, 2)])
def test_batching_rule_for_every_number_of_results(monkeypatch, elements, rows, batch):
    """Rows along a mapped axis have one value for the whole batch, which is not batched."""

    def results(x, *, axes, axis_name):
        assert axis_name == ()
        total = jnp.sum(x, axes, keepdims=True)
        found = [x / total] * elements + [total, total + 1][:rows]
        return found if len(found) > 1 else found[0]

    made_up = Primitive("made_up")
    made_up.multiple_results = elements + rows > 1
    made_up.def_impl(results)
    like = operators.OPERATORS["softmax"]._replace(element_results=elements, row_results=rows)
    monkeypatch.setitem(operators.OPERATORS, "made_up", like)
    monkeypatch.setitem(operators.PRIMITIVES, "made_up", made_up)
    monkeypatch.setitem(fancy_primitive_batchers, made_up, functools.partial(batching.batching_rule, "made_up"))
    x, size = 1 + jnp.arange(12.0).reshape(3, 4), 3 if batch is None else (3, 4)[batch]
    whole = jnp.broadcast_to(x, (size, 3, 4)) if batch is None else jnp.moveaxis(x, batch, 0)

    def row(x):
        return made_up.bind(x, axes=(x.ndim - 1,), axis_name=("i",))

    out = [0] * elements + [None] * rows
    out = out if made_up.multiple_results else out[0]
    found = jax.vmap(row, in_axes=batch, out_axes=out, axis_name="i", axis_size=size)(x)
    total = jnp.sum(whole, (0, whole.ndim - 1), keepdims=True)
    expected = [whole / total] * elements + [total[0], total[0] + 1][:rows]
    for a, b in zip(jax.tree.leaves(found), expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


@one_name
def test_scan(name):
    x = normal((6, 4, 5))
    where = support.random_mask((6, 5))

    @jax.jit
    def program(x, where):
        def step(total, operands):
            y = OPERATORS[name](*operands[:1], 0, None)
            return total + y, (y, OPERATORS[name](operands[0], -1, operands[1]))

        return jax.lax.scan(step, jnp.zeros((4, 5)), (x, where))

    total, (plain, masked) = program(x, where)
    check(plain, reference(name, x, 1))
    check(masked, reference(name, x, -1, where[:, None]))
    np.testing.assert_allclose(total, np.sum(plain, axis=0), rtol=1e-5)


@one_name
def test_while_loop(name):
    """An executable that calls the kernel many times, on its own output."""
    x = normal((4, 16))
    actual = jax.jit(lambda x: jax.lax.fori_loop(0, 20, lambda i, x: 3 * OPERATORS[name](x), x))(x)
    expected = x
    for _ in range(20):
        expected = 3 * OPERATORS[name](expected)
    np.testing.assert_allclose(actual, expected, rtol=1e-5)


@one_name
def test_cond_and_switch(name):
    x = normal((4, 5))
    branches = [lambda x, a=a: OPERATORS[name](x, a) for a in (0, 1, None)]
    for index, axis in enumerate((0, 1, None)):
        check(jax.jit(lambda i, x: jax.lax.switch(i, branches, x))(index, x), reference(name, x, axis))
    for first in (True, False):
        actual = jax.lax.cond(first, branches[0], branches[1], x)
        check(actual, reference(name, x, 0 if first else 1))
    picked = jax.vmap(lambda p, x: jax.lax.cond(p, branches[0], lambda x: x, x))(np.array([True, False]), x[:2])
    check(picked[0], reference(name, x[0]))
    assert_same_bits(picked[1], x[1])


@one_name
def test_checkpoint(name):
    x, g = normal((4, 50)), normal((4, 50), seed=1)
    f = functools.partial(OPERATORS[name], axis=0)
    for policy in (None, jax.checkpoint_policies.nothing_saveable, jax.checkpoint_policies.everything_saveable):
        y, pullback = jax.vjp(jax.checkpoint(f, policy=policy), x)
        assert_same_bits(y, f(x))
        check(pullback(g)[0], reference_vjp(name, x, g, 0))


@every_name
def test_shard_map(name):
    mesh, spec = Mesh(np.array(jax.devices()[:1]), ("data",)), PartitionSpec("data")
    x, g = normal((4, 6)), normal((4, 6), seed=1)
    where = support.random_mask(x.shape)

    def pullback(x, g):
        return jax.vjp(OPERATORS[name], x)[1](g)[0]

    sharded = functools.partial(jax.shard_map, mesh=mesh, out_specs=spec)
    check(jax.jit(sharded(OPERATORS[name], in_specs=spec))(x), reference(name, x))
    masked = sharded(lambda x, where: OPERATORS[name](x, 0, where), in_specs=(spec, spec))
    check(jax.jit(masked)(x, where), reference(name, x, 0, where))
    replicated = sharded(lambda x, where: OPERATORS[name](x, 0, where), in_specs=(spec, PartitionSpec()))
    check(jax.jit(replicated)(x, where), reference(name, x, 0, where))
    check(jax.jit(sharded(pullback, in_specs=(spec, spec)))(x, g), reference_vjp(name, x, g))
    check(jax.jit(jax.vmap(sharded(OPERATORS[name], in_specs=spec), 1, 1))(x), reference(name, x, 0))


@one_name
@pytest.mark.parametrize("shared", ["x", "where"])
def test_shard_map_knows_that_the_result_varies(shared, name):
    """Whichever operand differs between devices; else a gradient would lack its sum over them, silently."""
    mesh, spec = Mesh(np.array(jax.devices()[:1]), ("data",)), PartitionSpec("data")
    x, where = normal((4, 6)), support.random_mask((4, 6))
    in_specs = (PartitionSpec(), spec) if shared == "x" else (spec, PartitionSpec())

    def run(x, where):
        return OPERATORS[name](x, -1, where)

    check(
        jax.jit(jax.shard_map(run, mesh=mesh, in_specs=in_specs, out_specs=spec))(x, where),
        reference(name, x, -1, where),
    )
    with pytest.raises(ValueError, match="out_specs"):
        jax.shard_map(run, mesh=mesh, in_specs=in_specs, out_specs=PartitionSpec())(x, where)


def export(f, *specs):
    return jax.export.export(jax.jit(f), disabled_checks=jax_softmax.export_checks())(*specs)


def round_trip(exported, vjp_order=0):
    pytest.importorskip("flatbuffers", reason="jax.export serializes by it")
    return jax.export.deserialize(exported.serialize(vjp_order=vjp_order))


@every_name
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_export_round_trip(dtype, name):
    x, g = normal((4, 37), dtype), normal((4, 37), dtype, seed=1)
    where = support.random_mask(x.shape)
    forward = export(lambda x, where: OPERATORS[name](x, 0, where), x, where)
    backward = export(lambda x, g: jax.vjp(OPERATORS[name], x)[1](g)[0], x, g)
    for pass_on in (lambda exported: exported, round_trip):
        check(pass_on(forward).call(x, where), reference(name, x, 0, where))
        check(pass_on(backward).call(x, g), reference_vjp(name, x, g))


@one_name
def test_export_with_its_gradient(name):
    x, g = normal((4, 37)), normal((4, 37), seed=1)
    exported = round_trip(export(OPERATORS[name], x), vjp_order=1)
    y, pullback = jax.vjp(exported.call, x)
    check(y, reference(name, x))
    check(pullback(g)[0], reference_vjp(name, x, g))


@every_name
@pytest.mark.parametrize("axis", [-1, 1, (1, 2)], ids=str)
def test_export_with_a_symbolic_batch(axis, name):
    """One program for every batch size, by the kernel or by plain XLA: the results are what counts."""
    (batch,) = jax.export.symbolic_shape("batch")
    exported = export(functools.partial(OPERATORS[name], axis=axis), jax.ShapeDtypeStruct((batch, 5, 8), "float32"))
    for size in (1, 3, 64):
        x = normal((size, 5, 8))
        check(exported.call(x), reference(name, x, axis))


@one_name
def test_export_of_the_gradient_with_a_symbolic_batch(name):
    (batch,) = jax.export.symbolic_shape("batch")
    spec = jax.ShapeDtypeStruct((batch, 8), "float32")
    exported = export(lambda x, g: jax.vjp(OPERATORS[name], x)[1](g)[0], spec, spec)
    for size in (1, 5):
        x, g = normal((size, 8)), normal((size, 8), seed=1)
        check(exported.call(x, g), reference_vjp(name, x, g))


@every_name
def test_donation(name):
    x, g = normal((8, 1024)), normal((8, 1024), seed=1)
    donated = jnp.array(x)
    check(jax.jit(OPERATORS[name], donate_argnums=0)(donated), reference(name, x))
    assert donated.is_deleted()
    donated = jnp.array(g)
    pullback = jax.jit(lambda x, g: jax.vjp(OPERATORS[name], x)[1](g)[0], donate_argnums=1)
    check(pullback(jnp.array(x), donated), reference_vjp(name, x, g))
    assert donated.is_deleted()


@one_name
def test_input_is_left_alone(name):
    """Nor does a value that is used again afterwards change, in a program that is free to reuse buffers."""
    x = normal((8, 1024))

    @jax.jit
    def program(x):
        moved = x * 2
        y = OPERATORS[name](moved)
        z = OPERATORS[name](moved, axis=0)
        return moved, y, z, moved + 1

    device = jnp.array(x)
    moved, y, z, after = program(device)
    np.testing.assert_array_equal(device, x)
    np.testing.assert_array_equal(moved, 2 * x)
    np.testing.assert_array_equal(after, 2 * x + 1)
    check(y, reference(name, 2 * x))
    check(z, reference(name, 2 * x, 0))


@every_name
def test_shapes_without_values(name):
    where = jax.ShapeDtypeStruct((3, 5), "bool")
    for dtype in ("float16", "bfloat16", "float32"):
        out = jax.eval_shape(OPERATORS[name], jax.ShapeDtypeStruct((3, 5), dtype))
        assert out.shape == (3, 5) and out.dtype == dtype
        spec = jax.ShapeDtypeStruct((3, 1), dtype)
        out = jax.eval_shape(lambda x, where: OPERATORS[name](x, -1, where), spec, where)
        assert out.shape == (3, 5) and out.dtype == dtype


@one_name
def test_without_jit(name):
    """As one debugs."""
    x, g = normal((4, 6)), normal((4, 6), seed=1)
    where = support.random_mask(x.shape)
    with jax.disable_jit():
        check(OPERATORS[name](x), reference(name, x))
        y, pullback = jax.vjp(lambda x: OPERATORS[name](x, 0, where), x)
        check(y, reference(name, x, 0, where))
        check(pullback(g)[0], reference_vjp(name, x, g, 0, where))
        check(jax.vmap(OPERATORS[name])(x), reference(name, x))


@every_name
def test_debug_nans(name):
    """Neither a mask nor a -inf makes a NaN, not even one that is discarded afterwards; nothing but -inf does."""
    x, g, where = normal((4, 6)), normal((4, 6), seed=1), support.random_mask((4, 6))
    where[1], where[:, 0] = False, [True, False, True, True]
    x[:, 3] = -np.inf
    with jax.debug_nans(True):
        y, pullback = jax.vjp(lambda x: OPERATORS[name](x, -1, where), x)
        check(y, reference(name, x, -1, where))
        check(pullback(g)[0], reference_vjp(name, x, g, -1, where))
        jax.jvp(lambda x: jax.vjp(lambda x: OPERATORS[name](x, -1, where), x)[1](g)[0], (x,), (g,))
        with pytest.raises(FloatingPointError):
            OPERATORS[name](np.full((2, 3), -np.inf, np.float32))


@sampled("dtype,name", itertools.product(["float16", "bfloat16", "float32", "int32"], NAMES), 7)
def test_strict_promotion(dtype, name):
    """Nothing inside relies on two dtypes meeting."""
    x = normal((3, 5)).astype(dtype)
    where = support.random_mask(x.shape)
    with jax.numpy_dtype_promotion("strict"):
        for mask in (None, where):
            y = OPERATORS[name](x, -1, mask)
            check(y, reference(name, x.astype(y.dtype), -1, mask))
            if dtype != "int32":
                f = functools.partial(OPERATORS[name], axis=-1, where=mask)
                assert jax.eval_shape(jax.jacfwd(jax.jacrev(f)), x).dtype == dtype
                assert jax.eval_shape(jax.jacrev(jax.jacfwd(f)), x).dtype == dtype


@one_name
def test_no_tracer_leaks(name):
    x = normal((3, 5))
    with support.checking_leaks():
        jax.jit(jax.vmap(jax.grad(lambda x: jnp.sum(OPERATORS[name](x) ** 2))))(x)
        jax.jit(jax.hessian(lambda x: jnp.sum(OPERATORS[name](x, 0) ** 2)))(x)


def test_many_threads():
    """Executables, and the state that they keep, are shared by every thread of a server."""

    def program(x, axis, where):
        out = []
        for name in NAMES:
            y, pullback = jax.vjp(lambda x, name=name: OPERATORS[name](x, axis, where), x)
            out += [y, pullback(x)[0]]
        return out

    # Along 0 some have one kernel, with more or less shared memory.
    shapes = [(64, 1000), (3, 50257), (1000, 16), (7, 33, 5), (40000, 2), (300, 256), (3000, 64)]
    jobs = [(normal(s, d, i), a) for i, s in enumerate(shapes) for d, a in (("float32", -1), ("bfloat16", 0))]
    programs = [jax.jit(program, static_argnums=1) for _ in jobs]
    where = [None if i % 3 else support.random_mask(x.shape) for i, (x, _) in enumerate(jobs)]

    def run(i):
        return jax.device_get(programs[i](*jobs[i], where[i]))

    expected = [run(i) for i in range(len(jobs))]
    order = np.random.default_rng(0).permutation(np.repeat(np.arange(len(jobs)), 12))
    with ThreadPoolExecutor(8) as pool:
        for i, outputs in zip(order, pool.map(run, order), strict=True):
            for actual, wanted in zip(outputs, expected[i], strict=True):
                assert_same_bits(actual, wanted, f"job {i}")


def test_threads_that_compile_at_once():
    def run(i):
        x = normal((3, 10 + i))
        return check(jax.jit(OPERATORS[NAMES[i % 2]])(x), reference(NAMES[i % 2], x))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(run, range(16)))
