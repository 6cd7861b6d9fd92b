"""softmax_vjp and log_softmax_vjp are softmax and log_softmax in all but forward mode, which they refuse.

They share the kernels of both passes and the checks of arguments, so that other files do without them.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import support
from jax.sharding import PartitionSpec as P
from support import CUSTOM_VJPS, OPERATORS, assert_same_bits, every_name, normal

SHAPE = (3, 4, 5)
WHERE = support.random_mask(SHAPE)
CALLS = {
    "last axis": (-1, None),
    "first axis": (0, None),
    "several axes": ((0, 2), None),
    "all axes": (None, None),
    "mask": (1, WHERE),
    "mask of lower rank": (-1, WHERE[0, 0]),
    "mask that enlarges": (-1, support.random_mask((2, *SHAPE))),
}


def value_and_pullback(f, x, g, *where):
    y, pullback = jax.vjp(f, x, *where)
    return y, pullback(jnp.broadcast_to(g, y.shape).astype(y.dtype))[0]


def same_bits(of, name):
    """What `of` makes of the two functions."""
    found, expected = (jax.tree.leaves(of(table[name])) for table in (CUSTOM_VJPS, OPERATORS))
    for a, b in zip(found, expected, strict=True):
        assert_same_bits(a, b)


@every_name
@pytest.mark.parametrize("call", CALLS)
def test_values_and_gradients(call, name):
    axis, where = CALLS[call]
    x, g = normal(SHAPE), normal(SHAPE, seed=1)
    same_bits(lambda f: f(x, axis, where), name)
    same_bits(lambda f: value_and_pullback(lambda x: f(x, axis, where), x, g), name)


@every_name
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64", "float8_e4m3fn", "float8_e5m2"])
def test_dtypes(dtype, name):
    with support.precision(dtype):
        x, g = (jnp.asarray(normal(SHAPE, seed=seed), dtype) for seed in range(2))
        same_bits(lambda f: value_and_pullback(lambda x: f(x, 0, WHERE), x, g), name)


@every_name
@pytest.mark.parametrize("dtype", ["int8", "uint8", "int32", "bool"])
def test_integers_have_no_tangents(dtype, name):
    x = np.arange(60).reshape(SHAPE).astype(dtype)
    same_bits(lambda f: f(x), name)
    y, tangent = jax.jvp(CUSTOM_VJPS[name], (x,), (np.zeros(SHAPE, jax.dtypes.float0),))
    assert y.dtype == tangent.dtype == jnp.float32 and not np.any(tangent)
    assert jax.vjp(CUSTOM_VJPS[name], x)[1](y)[0].dtype == jax.dtypes.float0


def in_jit(f):
    return jax.jit(f)


def without_jit(f):
    def run(*operands):
        with jax.disable_jit():
            return f(*operands)

    return run


def in_vmap(f):
    return jax.vmap(f)


def in_vmap_of_some(f):
    """Of the cotangent, or of x and the mask along different axes."""
    return lambda x, g, where: (
        jax.vmap(f, (None, 0, None))(x[0], g, where[0]),
        jax.vmap(f, (1, None, 0))(x, g[0], where),
    )


def in_vmap_of_vmap(f):
    return jax.vmap(jax.vmap(f, 1), 0)


def in_scan(f):
    return lambda *operands: jax.lax.scan(lambda carry, of_step: (carry, f(*of_step)), 0, operands)[1]


def in_checkpoint(f):
    return jax.checkpoint(f)


@every_name
@pytest.mark.parametrize(
    "context", [in_jit, without_jit, in_vmap, in_vmap_of_some, in_vmap_of_vmap, in_scan, in_checkpoint]
)
def test_in_context(context, name):
    x, g = normal((3, 3, 4, 3)), normal((3, 3, 4, 3), seed=1)
    where = support.random_mask(x.shape)

    def run(f):
        return context(lambda x, g, where: value_and_pullback(lambda x: f(x, 0, where), x, g))(x, g, where)

    for found, expected in zip(*(jax.tree.leaves(run(table[name])) for table in (CUSTOM_VJPS, OPERATORS)), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)


@every_name
def test_mask_as_an_operand(name):
    """A traced mask has a cotangent of the type that JAX gives to booleans."""
    x, g, where = normal((3, 5)), normal((3, 5), seed=1), support.random_mask((3, 5))
    y, pullback = jax.vjp(lambda x, where: CUSTOM_VJPS[name](x, -1, where), x, where)
    of_x, of_where = pullback(g)
    assert_same_bits(y, OPERATORS[name](x, -1, where))
    assert_same_bits(of_x, value_and_pullback(lambda x: OPERATORS[name](x, -1, where), x, g)[1])
    assert of_where.dtype == jax.dtypes.float0 and of_where.shape == where.shape


@every_name
def test_the_result_is_the_only_residual(name):
    y, pullback = jax.vjp(CUSTOM_VJPS[name], jnp.asarray(normal((6, 50))))
    (residual,) = [leaf for leaf in jax.tree.leaves(pullback) if leaf.size > 1]
    assert_same_bits(residual, y)


@every_name
def test_forward_mode_is_refused(name):
    x = normal((3, 4))
    with pytest.raises(TypeError, match="custom_vjp"):
        jax.jvp(CUSTOM_VJPS[name], (x,), (x,))
    with pytest.raises(TypeError, match="custom_vjp"):
        jax.jacfwd(CUSTOM_VJPS[name])(x)


@every_name
def test_programs_have_the_same_operations(name):
    """By their names, and no other than the two kernels' on CUDA."""
    linear = {"softmax": "softmax_linear", "log_softmax": "log_softmax_vjp"}[name]
    x = normal((3, 5))
    gradient = jax.grad(lambda x: jnp.sum(CUSTOM_VJPS[name](x) ** 2))
    jaxpr = str(jax.make_jaxpr(gradient)(x))
    assert f" {name}[" in jaxpr and f" {linear}[" in jaxpr, jaxpr
    text = jax.jit(gradient).trace(x).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@jax_softmax(") == text.count("stablehlo.custom_call") == 2, text
    assert "stablehlo.transpose" not in text, text


@every_name
@pytest.mark.parametrize("axis_name", [None, "model"])
def test_several_devices(axis_name, name):
    """Nothing but the rows' states travels, in either pass."""
    mesh = support.mesh_of_cpus((4, 2))
    spec = P("data", None, "model") if axis_name else P("data", "model")
    layout = jax.sharding.NamedSharding(mesh, spec)
    x, g = (jax.device_put(normal((8, 4, 32), seed=seed), layout) for seed in range(2))

    def run(f):
        f = functools.partial(f, axis_name=axis_name)
        f = jax.shard_map(f, mesh=mesh, in_specs=spec, out_specs=spec) if axis_name else f
        program = jax.jit(functools.partial(value_and_pullback, f)).lower(x, g).compile()
        assert {kind for kind, _ in support.collectives(program)} == ({"all-reduce"} if axis_name else set())
        return program(x, g)

    with support.on_a_cpu():
        same_bits(run, name)


@every_name
def test_wrong_arguments_are_refused_by_its_name(name):
    f, x = CUSTOM_VJPS[name], normal((3, 4))
    for error, message, arguments in (
        (TypeError, "x must be an array", ("logits",)),
        (TypeError, "axis must be an int", (x, 1.5)),
        (ValueError, "axis must be an int from -2 to 1", (x, 2)),
        (TypeError, "where must be a boolean array", (x, -1, x)),
        (ValueError, "where must broadcast", (x, -1, np.ones(3, bool))),
    ):
        with pytest.raises(error, match=f"^{name}_vjp: {message}"):
            f(*arguments)
