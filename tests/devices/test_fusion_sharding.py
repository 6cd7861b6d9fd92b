"""`fuse` in programs that XLA divides among devices: what stands around an operator stays in its kernel.

Eight simulated CPU devices. A device's kernel is done in JAX, as it is where devices share rows (see emulated.py).
"""

import functools
import itertools
import re

import emulated
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
import support
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from sharded import in_mode, mesh

import jax_softmax
from jax_softmax import fuse
from jax_softmax.fusion import backend

pytestmark = pytest.mark.usefixtures("default_flags", "on_the_cpu")

BF16, F32 = jnp.bfloat16, jnp.float32


def arrays(*shapes, dtype="float32"):
    return [support.normal(shape, "float32", k, 1.5).astype(jnp.dtype(dtype)) for k, shape in enumerate(shapes)]


def check(f, given, specs, kernels, travels=(), most=None, kind=AxisType.Auto):
    """Fused and divided, f is f; every kernel of a device has one of these shapes, and only this travels."""
    placed = [jax.device_put(a, NamedSharding(mesh(kind), spec)) for a, spec in zip(given, specs, strict=True)]
    with emulated.kernels(in_jax=True) as made, in_mode(kind):
        program = support.compiled_in_haste(fuse(f), *placed)
        results = program(*placed)
    found = support.collectives(program)
    assert {name for name, _ in found} == set(travels)
    assert most is None or all(size <= most for _, size in found)
    assert {(kernel.op, kernel.shape) for kernel in made} == set(kernels)
    assert_close(results, support.in_haste(f, *given))
    return made


def assert_close(found, expected):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        np.testing.assert_allclose(a, b, rtol=0, atol=64 * float(jnp.finfo(coarsest(expected)).eps) * np.abs(b).max())


def coarsest(results):
    """The coarsest dtype among the results: what others were made of may have had it."""
    return max((a.dtype for a in jax.tree.leaves(results)), key=lambda dtype: float(jnp.finfo(dtype).eps))


SHAPE = (8, 4, 16, 16)  # batch, heads, queries, keys


def scaled(x):
    return jax.nn.softmax(x * 0.5) * 2


def causal(x):
    rows, columns = (jax.lax.broadcasted_iota(jnp.int32, x.shape, d) for d in (2, 3))
    return jax.nn.softmax(jnp.where(rows >= columns, x * 0.5, -1e9))


def biased(x, bias):
    return jax.nn.softmax(x.astype(F32) * 0.5 + bias).astype(x.dtype)


def derivative_of(f):
    """The result, and its derivative for a cotangent that depends on it."""

    def g(x, *others):
        y, pullback = jax.vjp(lambda x: f(x, *others), x)
        return y, pullback(jnp.cos(y.astype(F32)).astype(y.dtype))[0]

    return g


KEPT = {P("data"): (2, 4, 16, 16), P("data", "model"): (2, 2, 16, 16), P("data", None, "model"): (2, 4, 8, 16)}


@support.sampled("spec,f,kind", itertools.product(KEPT, [scaled, causal], [AxisType.Auto, AxisType.Explicit]), 3)
def test_kept_axes(f, spec, kind):
    check(f, arrays(SHAPE), [spec], {("softmax", KEPT[spec])}, kind=kind)


@pytest.mark.parametrize("spec", KEPT, ids=str)
def test_derivatives(spec):
    made = check(derivative_of(causal), arrays(SHAPE), [spec], {(op, KEPT[spec]) for op in OPS_OF_A_DERIVATIVE})
    assert all(kernel.dims_with_indices for kernel in made)


OPS_OF_A_DERIVATIVE = ("softmax", "softmax_linear")


@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_gradients_alone(name):
    """Of whole rows by a kernel; of rows that are divided in JAX."""

    def f(x, w):
        return jax.grad(lambda x: jnp.sum(getattr(jax.nn, name)(x * 2) * w))(x)

    given = arrays((8, 32), (8, 32))
    check(f, given, [P("data"), P("data")], {(f"{name}_gradient", (2, 32))})
    check(f, given, [P("data", "model"), P("data", "model")], {}, {"all-reduce"}, most=8)


@pytest.mark.parametrize("of_bias", [P(), P(None, "model"), P(None, None, "model")], ids=str)
def test_arrays_that_are_read_beside(of_bias):
    """They are cut as the operand is, where they lie."""
    given = [*arrays(SHAPE, dtype="bfloat16"), *arrays((1, 4, 16, 16))]
    travels = () if of_bias != P(None, None, "model") else {"all-to-all"}
    check(biased, given, [P("data", "model"), of_bias], {("softmax", (2, 2, 16, 16))}, travels)


def test_softmax_that_is_made_again():
    def attention(x, v):
        p = jax.nn.softmax(causal_scores(x)).astype(BF16)
        return jnp.einsum("bhqk,bhkd->bhqd", p, v)

    def causal_scores(x):
        rows, columns = (jax.lax.broadcasted_iota(jnp.int32, x.shape, d) for d in (2, 3))
        return jnp.where(rows >= columns, x.astype(F32), -1e30)

    given = arrays(SHAPE, (8, 4, 16, 8), dtype="bfloat16")
    specs = [P("data", "model"), P("data", "model")]
    kernels = {("softmax_and_normalizer", (2, 2, 16, 16)), ("softmax_linear", (2, 2, 16, 16))}
    check(derivative_of(attention), given, specs, kernels)


def test_masks_beside_indices():
    def masked(x, mask):
        rows, columns = (jax.lax.broadcasted_iota(jnp.int32, x.shape, d) for d in (2, 3))
        return jax.nn.softmax(jnp.where(rows >= columns, x, -1e9), where=mask)

    mask = support.random_mask(SHAPE, 3)
    mask[..., 0] = True
    given = [*arrays(SHAPE), mask]
    spec = P("data", None, "model")
    check(masked, given, [spec, spec], {("softmax", KEPT[spec])})


# ---- Rows that devices share


DIVIDED = {P("data", None, None, "model"): (2, 4, 16, 8), P(None, None, "model", "data"): (8, 4, 8, 4)}


@pytest.mark.parametrize("spec", DIVIDED, ids=str)
@pytest.mark.parametrize("f", [scaled, causal, derivative_of(causal)], ids=["scaled", "causal", "derivative"])
def test_divided_rows(f, spec):
    """States of rows travel, and nothing else. Those of parts come from a kernel that loads them."""
    check(f, arrays(SHAPE), [spec], {("logsumexp", DIVIDED[spec])}, {"all-reduce"}, most=8 * 4 * 16)


LABELS = np.arange(8, dtype=np.int32) * 3 - 1


def loss(logits):
    log_p = jax.nn.log_softmax(logits.astype(F32))
    labels = jnp.maximum(jnp.asarray(LABELS), 0)
    return -jnp.take_along_axis(log_p, labels[:, None], -1).mean()


@pytest.mark.parametrize(
    "spec,kernels",
    [
        (P("data"), {("cross_entropy_gradient", (2, 32))}),
        (P("data", "model"), {("logsumexp", (2, 16))}),
        (P(None, ("data", "model")), {("logsumexp", (8, 4))}),
    ],
    ids=str,
)
def test_losses(spec, kernels):
    given = arrays((8, 32), dtype="bfloat16")
    # Rows' sums, and their logits at labels, which XLA may send together.
    check(jax.value_and_grad(loss), given, [spec], kernels, {"all-reduce"}, most=8 + 8)


def smoothed_loss(logits):
    targets = 0.9 * jax.nn.one_hot(LABELS, logits.shape[-1]) + 0.1 / logits.shape[-1]
    return -jnp.sum(targets * jax.nn.log_softmax(logits.astype(F32)), -1).mean()


@pytest.mark.parametrize(
    "spec,kernels",
    [
        (P("data"), {("cross_entropy_gradient_and_distances", (2, 32))}),
        (P("data", "model"), {("logsumexp", (2, 16))}),
    ],
    ids=str,
)
def test_smoothed_losses(spec, kernels):
    given = arrays((8, 32), dtype="bfloat16")
    check(jax.value_and_grad(smoothed_loss), given, [spec], kernels, {"all-reduce"}, most=8)


def distillation(student, teacher):
    student, teacher = (logits.astype(F32) / 2 for logits in (student, teacher))
    difference = jax.nn.log_softmax(teacher) - jax.nn.log_softmax(student)
    return jnp.sum(jax.nn.softmax(teacher) * difference, -1).mean()


@pytest.mark.parametrize(
    "spec,ops,shape",
    [
        (P("data"), ("logsumexp", "kl_divergence", "log_softmax_vjp"), (2, 32)),
        (P("data", "model"), ("logsumexp",), (2, 16)),
    ],
    ids=str,
)
def test_divergences(spec, ops, shape):
    given = arrays((8, 32), (8, 32), dtype="bfloat16")
    kernels = {(op, shape) for op in ops}
    check(jax.value_and_grad(distillation), given, [spec, spec], kernels, {"all-reduce"}, most=8)


@emulated.compiler_is_needed
def test_printed_indices_begin_where_the_part_does():
    """The kernel of each of four devices, before the operator and after it."""
    (x,) = arrays((2, 3, 16, 16))

    def f(x):
        rows, columns = (jax.lax.broadcasted_iota(jnp.int32, x.shape, d) for d in (2, 3))
        return jnp.where(rows > 3, jax.nn.softmax(jnp.where(rows >= columns, x, -1e9)), columns * 0.5)

    with emulated.kernels() as made:
        jax.jit(fuse(f)).lower(x)
        (kernel,) = made
        part = kernel.of_part(np.arange(4).reshape(1, 1, 4, 1, 1))
        start = jnp.zeros((1, 1, 1, 1), jnp.int32)
        call = functools.partial(backend.in_use().call, part)
        program = jax.jit(call).lower(x[:, :, :4], start).compile()
    for k in range(4):
        (found,) = program(x[:, :, 4 * k : 4 * k + 4], start + 4 * k)
        assert_close(found, f(x)[:, :, 4 * k : 4 * k + 4])


# ---- Other ways to divide


def test_inside_a_partly_manual_shard_map():
    mapped = jax.shard_map(causal, mesh=mesh(), in_specs=P("data"), out_specs=P("data"), axis_names={"data"})
    check(mapped, arrays(SHAPE), [P("data", "model")], {("softmax", (2, 2, 16, 16))})


def test_indices_that_no_device_knows():
    """Those of a part along a mesh axis that is not manual: all have all of it, and a warning says so."""
    mapped = jax.shard_map(causal, mesh=mesh(), in_specs=P("data"), out_specs=P("data"), axis_names={"data"})
    with pytest.warns(UserWarning, match="whose indices are needed"):
        check(mapped, arrays(SHAPE), [P("data", None, "model")], {("softmax", (2, 4, 16, 16))}, {"all-gather"})


def test_extents_that_do_not_divide():
    def f(x):
        x = jax.lax.with_sharding_constraint(x, NamedSharding(mesh(), P(None, None, "data", "model")))
        return derivative_of(causal)(x)

    check(f, arrays((3, 2, 7, 9)), [P()], {("logsumexp", (3, 2, 2, 5))}, {"all-reduce", "all-gather"})


def test_a_jax_that_moved_its_private_names(monkeypatch):
    monkeypatch.setattr("jax_softmax._private.DIVISION.available", False)
    check(causal, arrays(SHAPE), [P("data", "model")], ())


def test_export():
    pytest.importorskip("flatbuffers", reason="jax.export serializes by it")
    sharding = NamedSharding(mesh(), P("data", None, "model"))
    (x,) = arrays(SHAPE)
    with emulated.kernels(in_jax=True) as made:
        exported = jax.export.export(
            jax.jit(fuse(causal)), platforms=["cpu"], disabled_checks=jax_softmax.export_checks()
        )(jax.ShapeDtypeStruct(SHAPE, F32, sharding=sharding))
        kept = jax.export.deserialize(exported.serialize(vjp_order=0))
        found = jax.jit(kept.call)(jax.device_put(x, sharding))
    assert re.search("fused_kernel", exported.mlir_module())
    assert [kernel.shape for kernel in made] == [(2, 4, 8, 16)]
    assert_close(found, causal(x))
