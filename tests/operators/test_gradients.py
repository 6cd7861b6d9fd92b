"""Every mode and order of differentiation works, inside every transformation, and agrees with jax.nn in float64.

Finite differences (`check_grads` with its default modes) stand beside the comparison with jax.nn, which could share a
mistake in what a derivative ought to be.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
import support
from by_numpy import by_numpy
from jax.sharding import Mesh, PartitionSpec
from jax.test_util import check_grads
from oracles import check
from support import JAX_NN, NAMES, OPERATORS, every_name, normal, one_name, sampled

import jax_softmax

SHAPE = (3, 4)
FULL = np.array([[1, 0, 1, 1], [0, 0, 0, 0], [1, 1, 1, 1]], bool)
VARIANTS = {
    "last": (-1, None),
    "first": (0, None),
    "all": (None, None),
    "each": ((), None),
    "masked": (-1, FULL),
    "masked-first": (0, FULL),
    "masked-row": (-1, np.array([True, False, True, True])),
}

every_variant = sampled("variant,name", itertools.product(VARIANTS, NAMES), 5)


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield


def operands():
    return tuple(jnp.asarray(normal(SHAPE, "float64", seed, 1.0)) for seed in range(3))


def bound_to(table, name, variant):
    """The operator with its axis and mask bound, and what is masked made finite: -inf has no finite difference."""
    axis, where = VARIANTS[variant]

    def f(x):
        y = table[name](x, axis, where)
        return y if where is None else jnp.where(where, y, 0.0)

    return f


def mode_jvp(f, x, t, g):
    return jax.jvp(f, (x,), (t,))


def mode_vjp(f, x, t, g):
    y, pullback = jax.vjp(f, x)
    return y, pullback(g)


def mode_grad(f, x, t, g):
    return jax.value_and_grad(lambda x: jnp.sum(f(x) * g))(x)


def mode_jacfwd(f, x, t, g):
    return jax.jacfwd(f)(x)


def mode_jacrev(f, x, t, g):
    return jax.jacrev(f)(x)


def mode_linearize(f, x, t, g):
    y, linear = jax.linearize(f, x)
    return y, linear(t), jax.linear_transpose(linear, x)(g)


def mode_hessian(f, x, t, g):
    return jax.hessian(lambda x: jnp.sum(f(x) * g))(x)


def mode_forward_over_forward(f, x, t, g):
    return jax.jacfwd(jax.jacfwd(f))(x)


def mode_reverse_over_reverse(f, x, t, g):
    return jax.jacrev(jax.jacrev(f))(x)


def mode_reverse_over_forward(f, x, t, g):
    return jax.grad(lambda x: jnp.sum(jax.jvp(f, (x,), (t,))[1] * g))(x)


def mode_third_order(f, x, t, g):
    return jax.jvp(jax.grad(lambda x: jnp.sum(jax.jvp(f, (x,), (t,))[1] * g)), (x,), (t,))


def in_jit(f):
    return jax.jit(f)


def in_vmap(f):
    return lambda x: jax.vmap(f)(jnp.stack([x, 2 * x, -x])).sum(0)


def in_vmap_of_last(f):
    return lambda x: jax.vmap(f, in_axes=-1, out_axes=1)(jnp.stack([x, 2 * x], axis=-1)).sum(1)


def in_checkpoint(f):
    return jax.checkpoint(f)


def in_scan(f):
    return lambda x: jax.lax.scan(lambda carry, a: (f(carry * a), None), x, jnp.stack([x, 3 - x]))[0]


def in_cond(f):
    return lambda x: jax.lax.cond(x[0, 0] > -9.0, f, lambda x: x * 2, x)


def in_shard_map(f):
    mesh, spec = Mesh(np.array(jax.devices()[:1]), ("devices",)), PartitionSpec("devices")
    return jax.shard_map(f, mesh=mesh, in_specs=spec, out_specs=spec)


MODES = {k.removeprefix("mode_"): v for k, v in list(globals().items()) if k.startswith("mode_")}
CONTEXTS = {k.removeprefix("in_"): v for k, v in list(globals().items()) if k.startswith("in_")}


def assert_trees_close(actual, expected, tolerance=1e-11):
    actual, expected = jax.tree.leaves(actual), jax.tree.leaves(expected)
    assert len(actual) == len(expected)
    for a, e in zip(actual, expected, strict=True):
        assert a.dtype == e.dtype
        np.testing.assert_allclose(a, e, rtol=tolerance, atol=tolerance)


# The rest are compositions of these.
MODES_IN_CONTEXT = ("jvp", "vjp", "linearize", "hessian", "reverse_over_forward", "third_order")


def several_modes(f, modes, *operands, run=support.in_haste):
    """All in one program."""
    return run(lambda x, t, g: {mode: MODES[mode](f, x, t, g) for mode in modes}, *operands)


def expected_modes(context, variant, name):
    """jax.nn's, of the operator itself where the context computes nothing else."""
    return expected_from_jax_nn(context if context in ("vmap", "vmap_of_last", "scan") else None, variant, name)


@functools.cache
def expected_from_jax_nn(context, variant, name):
    f = bound_to(JAX_NN, name, variant)
    if context is None:
        return several_modes(f, tuple(MODES), *operands(), run=by_numpy)
    return several_modes(CONTEXTS[context](f), MODES_IN_CONTEXT, *operands(), run=by_numpy)


@every_variant
def test_modes(x64, variant, name):
    expected = expected_modes(None, variant, name)
    f = bound_to(OPERATORS, name, variant)
    for mode, actual in several_modes(f, tuple(MODES), *operands()).items():
        assert_trees_close(actual, expected[mode])


@sampled("context,variant,name", itertools.product(CONTEXTS, ["last", "masked-first"], NAMES), 9)
def test_modes_in_context(x64, context, variant, name):
    f = CONTEXTS[context](bound_to(OPERATORS, name, variant))
    expected = expected_modes(context, variant, name)
    for mode, actual in several_modes(f, MODES_IN_CONTEXT, *operands()).items():
        assert_trees_close(actual, expected[mode])


EAGER_CONTEXTS = ("vmap", "checkpoint", "scan", "cond", "shard_map")
EAGER_MODES = ("jvp", "vjp", "linearize", "reverse_over_forward")


@sampled("context,mode,name", itertools.product(EAGER_CONTEXTS, EAGER_MODES, NAMES), 13)
def test_modes_in_context_eagerly(x64, context, mode, name):
    f = CONTEXTS[context](bound_to(OPERATORS, name, "last"))
    assert_trees_close(MODES[mode](f, *operands()), expected_modes(context, "last", name)[mode])


@every_variant
def test_finite_differences(x64, variant, name):
    check_grads(jax.jit(bound_to(OPERATORS, name, variant)), (operands()[0],), order=2)


@sampled("context,name", itertools.product(CONTEXTS, NAMES), 5)
def test_finite_differences_in_context(x64, context, name):
    check_grads(jax.jit(CONTEXTS[context](bound_to(OPERATORS, name, "last"))), (operands()[0],), order=2)


@one_name
def test_finite_differences_in_float32(name):
    check_grads(jax.jit(OPERATORS[name]), (normal((3, 4), scale=1.0),), order=2, eps=1e-2, atol=2e-2, rtol=2e-2)


@every_name
@pytest.mark.parametrize("dtype", support.DTYPES)
@pytest.mark.parametrize("axis", [-1, 0, (0, 2), None], ids=str)
def test_jvp_against_reference(axis, dtype, name):
    """The Jacobian is symmetric for softmax; for log-softmax, <g, J t> = <J' g, t> ties it to the tested vjp."""
    x, t = normal((3, 5, 8), dtype), normal((3, 5, 8), dtype, 1, 1.0)
    with support.precision(dtype):
        tangent = jax.jvp(lambda x: OPERATORS[name](x, axis), (jnp.asarray(x),), (jnp.asarray(t),))[1]
        if name == "softmax":
            check(tangent, oracles.reference_vjp(name, x, t, axis))
            return
        assert tangent.dtype == dtype
        wide, t = x.astype(np.float64), t.astype(np.float64)
        p = np.exp(oracles.reference("log_softmax", wide, axis).value)
        axes = tuple(range(3)) if axis is None else axis
        expected = t - np.sum(p * t, axis=axes, keepdims=True)
        np.testing.assert_allclose(tangent.astype(float), expected, rtol=0, atol=24 * float(jnp.finfo(dtype).eps))


@every_name
@pytest.mark.parametrize("columns", [1, 4, 33, 1000, 5003])
def test_nonfinite_entries(columns, name):
    """A -inf has the gradient of a probability of 0; a row that has NaNs has nothing but NaNs for its gradient."""
    x = support.nonfinite_rows(columns)
    g = normal(x.shape, seed=1, scale=1.0)
    dx = jax.vjp(OPERATORS[name], jnp.asarray(x))[1](jnp.asarray(g))[0]
    check(dx, oracles.reference_vjp(name, x, g))
    tangent = jax.jvp(OPERATORS[name], (jnp.asarray(x),), (jnp.asarray(g),))[1]
    undefined = ~np.isfinite(np.max(x, axis=1))  # by a NaN, by +inf, or by nothing but -inf
    np.testing.assert_array_equal(np.isnan(tangent).all(1), undefined)
    np.testing.assert_array_equal(np.isnan(tangent).any(1), undefined)


@every_name
def test_minus_infinity_stays_out_of_every_order(x64, name):
    """Attention masks by adding -inf: no derivative of the remaining entries may turn into NaN because of it."""
    x, t, g = operands()
    x = x.at[0, 1].set(-jnp.inf).at[2, :3].set(-jnp.inf)
    hidden = jnp.isinf(x)

    def run(f, x):
        def loss(x):
            return jnp.sum(jnp.where(hidden, 0.0, f(x) * g))

        return jnp.where(hidden, 0.0, jax.jvp(f, (x,), (t,))[1]), *jax.jvp(jax.grad(loss), (x,), (t,))

    actual = support.in_haste(lambda x: run(OPERATORS[name], x), x)
    assert all(np.isfinite(a).all() for a in actual)
    # jax.nn's with what has next to no weight instead of none, since its own derivatives may be NaN there.
    assert_trees_close(actual, by_numpy(lambda x: run(JAX_NN[name], x), jnp.where(hidden, -700.0, x)))


@one_name
def test_masked_entries_have_no_gradient(name):
    """Whatever they hold, and whatever cotangent arrives at them."""
    x, g = normal((4, 40)), normal((4, 40), seed=1)
    where = support.random_mask(x.shape)
    where[1] = False
    x[~where] = np.nan
    dx = jax.vjp(lambda x: OPERATORS[name](x, where=where), x)[1](g)[0]
    np.testing.assert_array_equal(dx[~where], 0)
    assert np.isfinite(dx).all()
    g_else = np.where(where, g, 1e9).astype(np.float32)
    support.assert_same_bits(jax.vjp(lambda x: OPERATORS[name](x, where=where), x)[1](g_else)[0], dx)
    tangent = jax.jvp(lambda x: OPERATORS[name](x, where=where), (x,), (g,))[1]
    np.testing.assert_array_equal(tangent[~where], 0)
    assert np.isfinite(tangent).all()


@every_name
@pytest.mark.parametrize("axis", [-1, 0])
def test_masked_entries_have_no_second_derivative(x64, axis, name):
    """As before, in both orders of the modes, against jax.nn with harmless numbers in their place."""
    x, t, g = operands()
    where = jnp.asarray(FULL)

    def run(table, x, g):
        def pullback(x):
            return jax.vjp(lambda x: table[name](x, axis, where), x)[1](g)[0]

        def push(x):
            return jax.jvp(lambda x: jnp.where(where, table[name](x, axis, where), 0.0), (x,), (t,))[1]

        return jax.jvp(pullback, (x,), (t,)), jax.vjp(push, x)[1](g)[0]

    ours, theirs = (functools.partial(run, table) for table in (OPERATORS, JAX_NN))
    actual = support.in_haste(ours, jnp.where(where, x, jnp.nan), jnp.where(where, g, 1e6))
    assert_trees_close(actual, by_numpy(theirs, jnp.where(where, x, 0.0), jnp.where(where, g, 0.0)))


@one_name
def test_mask_as_an_operand(name):
    """A traced mask has a cotangent of its own, of the type that JAX gives to booleans."""
    x, where, g = normal((3, 5)), support.random_mask((3, 5)), normal((3, 5), seed=1)
    y, pullback = jax.vjp(lambda x, where: OPERATORS[name](x, -1, where), x, where)
    dx, dwhere = pullback(g)
    check(y, oracles.reference(name, x, where=where))
    check(dx, oracles.reference_vjp(name, x, g, where=where))
    assert dwhere.dtype == jax.dtypes.float0 and dwhere.shape == where.shape
    tangent = np.zeros(where.shape, jax.dtypes.float0)
    jax.jvp(lambda x, where: OPERATORS[name](x, -1, where), (x, where), (g, tangent))


@every_name
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("jitted", [False, True])
def test_the_result_is_the_only_residual(jitted, dtype, name):
    x = jnp.asarray(normal((6, 50), dtype))
    f = jax.jit(OPERATORS[name]) if jitted else OPERATORS[name]
    y, pullback = jax.vjp(f, x)
    (residual,) = jax.tree.leaves(pullback)
    support.assert_same_bits(residual, y)


@one_name
def test_residuals_of_the_masked_operator(name):
    """The result and the mask: no third array as large as x."""
    x, where = jnp.asarray(normal((6, 50))), jnp.asarray(support.random_mask((6, 50)))
    y, pullback = jax.vjp(lambda x, where: OPERATORS[name](x, -1, where), x, where)
    residuals = jax.tree.leaves(pullback)
    assert {(leaf.dtype.name, leaf.shape) for leaf in residuals} <= {("float32", (6, 50)), ("bool", (6, 50))}
    (floating,) = [leaf for leaf in residuals if leaf.dtype != bool]
    support.assert_same_bits(floating, y)


@every_name
@pytest.mark.parametrize("dtype", ["int32", "bool"])
def test_integers_differentiate_as_in_jax_nn(dtype, name):
    """By their tangents of type float0; x itself has no gradient, and nothing else may be disturbed by that."""
    x = jnp.asarray(np.arange(6).reshape(2, 3) % 2, dtype)
    _, tangent = jax.jvp(OPERATORS[name], (x,), (np.zeros(x.shape, jax.dtypes.float0),))
    np.testing.assert_array_equal(tangent, np.zeros(x.shape))
    grad = jax.grad(lambda scale: jnp.sum(scale * OPERATORS[name](x)))(2.0)
    np.testing.assert_allclose(grad, np.sum(oracles.reference(name, np.float32(x)).value), rtol=1e-6)


@pytest.mark.parametrize("power", [1, 2])
def test_logsumexp_of_rows_that_are_not_finite(power):
    """Its derivatives are JAX's, also of a row that is masked altogether."""
    x = normal((6, 8))
    x[1, 2], x[2], x[3, 4], x[4, 4] = np.inf, -np.inf, np.nan, -np.inf
    where = jnp.ones(x.shape, bool).at[0].set(False)

    def derivatives(logsumexp):
        f = lambda x: jnp.sum(jnp.maximum(logsumexp(x, axis=-1, where=where), -1e30) ** power)  # noqa: E731
        g = lambda x: logsumexp(x, axis=-1, where=where) ** power  # noqa: E731
        return jax.grad(f)(x), jax.vjp(g, x)[1](jnp.ones(6))[0], jax.jvp(g, (x,), (jnp.ones_like(x),))[1][1:]

    for found, expected in zip(derivatives(jax_softmax.logsumexp), derivatives(jax.nn.logsumexp), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5)
