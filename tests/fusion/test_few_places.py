"""Sums of many rows into a table of few are made in several tables, and are right wherever indices point."""

import emulated
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jax_softmax
from jax_softmax import fuse
from jax_softmax.fusion import rewriting
from jax_softmax.fusion.program.graph import eqns_within

MANY, FEW = 8192, 2
RANDOM = np.random.default_rng(0)
INDICES = RANDOM.integers(-FEW - 2, FEW + 2, MANY).astype("int32")  # before the table, in it, and beyond it
INSIDE = np.abs(INDICES) % FEW


def normal(*shape):
    return RANDOM.normal(size=shape).astype("float32")


def added(table, indices, updates, **how):
    """The sum, and a softmax, without which `fuse` leaves a program as it is."""
    return table.at[indices].add(jax.nn.softmax(updates, 0), **how)


def expected(table, indices, updates, mode):
    found, weights = np.array(table, "float64"), np.exp(np.asarray(updates, "float64"))
    weights /= weights.sum(0)
    at = np.where(indices < 0, indices + FEW, indices)
    at = at.clip(0, FEW - 1) if mode == "clip" else at
    inside = (at >= 0) & (at < FEW)
    np.add.at(found, at[inside], weights[inside])
    return found


def rows_of_tables(f, *args):
    """The rows of the tables into which a fused program adds."""
    args = [jax.numpy.asarray(a) for a in args]
    (eqn,) = (e for e in eqns_within([jax.make_jaxpr(fuse(f))(*args).jaxpr]) if "unfused" in e.params)
    with emulated.kernels():
        within = eqns_within([rewriting.rewritten(eqn.params["jaxpr"])])
    return [e.outvars[0].aval.shape[0] for e in within if e.primitive.name in ("scatter-add", "scatter_add")]


def fused(f, *args):
    with emulated.kernels() if jax.default_backend() == "cpu" else emulated.all_kernels():
        return jax.jit(fuse(f))(*args)


@emulated.compiler_is_needed
@pytest.mark.parametrize("dtype", ["int32", "uint8", "int8"])
@pytest.mark.parametrize("mode", ["drop", "clip", "promise_in_bounds"])
@pytest.mark.parametrize("row", [(), (3,), (2, 3)], ids=str)
def test_adds(row, mode, dtype):
    indices = (INSIDE if mode == "promise_in_bounds" or dtype == "uint8" else INDICES).astype(dtype)
    args = normal(FEW, *row), indices, normal(MANY, *row)

    def f(*args):
        return added(*args, mode=mode)

    assert rows_of_tables(f, *args)[0] % FEW == 0 and rows_of_tables(f, *args)[0] > FEW
    np.testing.assert_allclose(fused(f, *args), expected(*args, mode), rtol=1e-5, atol=1e-6)


@emulated.compiler_is_needed
def test_gradient_of_a_relative_bias():
    """T5's: the bias of a head is looked up by how far a key is."""
    n = 256
    distance = np.clip(np.arange(n)[:, None] - np.arange(n), -8, 7).astype("int32") + 8
    table, scores, cotangent = normal(16, 4), normal(4, n, n), normal(4, n, n)

    def gradient(table, scores, cotangent):
        return jax.vjp(lambda t: jax.nn.softmax(scores + t[distance].transpose(2, 0, 1)), table)[1](cotangent)[0]

    assert rows_of_tables(gradient, table, scores, cotangent) == [16 * 256]
    with jax.enable_x64(True):
        exact = gradient(*(np.float64(a) for a in (table, scores, cotangent)))
    np.testing.assert_allclose(fused(gradient, table, scores, cotangent), exact, rtol=1e-4, atol=1e-4)


@emulated.compiler_is_needed
@pytest.mark.parametrize(
    "look_up", [lambda t, i: t[i].transpose(2, 0, 1), lambda t, i: t.T[:, i]], ids=["rows", "columns"]
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_sums_of_16_bits_are_of_float32(dtype, look_up):
    """Of many numbers, each as large as a step of the sum's, a sum of 16 bits would end where it no longer grows."""
    n, k = 128, 4
    distance = np.abs(np.arange(n)[:, None] - np.arange(n)) % k
    table, scores = (jnp.asarray(normal(*shape), dtype) for shape in ((k, 3), (3, n, n)))

    def gradient(table, scores):
        weights, transposed = jax.vjp(lambda t: jax.nn.softmax(scores + look_up(t, distance)), table)
        return transposed(weights / 4 + jnp.eye(n, dtype=dtype))[0]

    found, exact = fused(gradient, table, scores), gradient(*(a.astype("float32") for a in (table, scores)))
    assert found.dtype == dtype
    np.testing.assert_allclose(found.astype("float32"), exact, rtol=0.02, atol=0.02 * abs(exact).max())


def test_batches_that_are_symbols():
    """`fuse` would warn if it failed."""
    (b,) = jax.export.symbolic_shape("b")
    types = [jax.ShapeDtypeStruct(*of) for of in (((FEW, 4), "bfloat16"), ((b,), "int32"), ((b, 4), "bfloat16"))]
    with emulated.kernels():
        exported = jax.export.export(jax.jit(fuse(added)), disabled_checks=jax_softmax.export_checks())(*types)
    assert "scatter" in exported.mlir_module()


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="eight devices are simulated")
def test_tables_that_are_divided_in_explicit_mode_stay():
    """As T5's, whose heads devices have parts of."""
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,))
    index = np.zeros((256, 256), "int32")
    with jax.set_mesh(mesh):
        table = jax.device_put(normal(8, 16), P(None, "x"))
        scores = jax.device_put(normal(16, 256, 256), P("x"))

        def gradient(table, scores):
            weights = lambda t: jax.nn.softmax(scores + t.at[index].get().transpose(2, 0, 1))  # noqa: E731
            return jax.grad(lambda t: (weights(t) ** 2).sum())(table)

        assert rows_of_tables(gradient, table, scores) == [8]


@emulated.compiler_is_needed
@pytest.mark.parametrize(
    "f, args",
    {
        "few rows": (added, (normal(FEW), INDICES[:100], normal(100))),
        "as many places": (added, (normal(MANY), INSIDE, normal(MANY))),
        "a column": (lambda t, i, x: t.at[:, i].add(jax.nn.softmax(x)), (normal(3, FEW), INSIDE, normal(3, MANY))),
        "two indices": (lambda t, i, x: t.at[i, i].add(jax.nn.softmax(x)), (normal(FEW, FEW), INSIDE, normal(MANY))),
        "a part of a row": (
            lambda t, i, x: t.at[i, :2].add(jax.nn.softmax(x)),
            (normal(FEW, 3), INSIDE, normal(MANY, 2)),
        ),
    }.values(),
    ids=["few rows", "as many places", "a column", "two indices", "a part of a row"],
)
def test_others_stay(f, args):
    assert rows_of_tables(f, *args) == [args[0].shape[0]]
    np.testing.assert_allclose(fused(f, *args), jax.jit(f)(*args), rtol=1e-4, atol=1e-5)
