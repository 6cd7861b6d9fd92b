"""Primitives whose results have another dtype than their operands: as in float32, but for what is stored."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import support
from jax.interpreters import ad
from support import normal

from jax_softmax.primitives.operators import OPERATORS, PRIMITIVES, bind

OPS = [op for op, operator in OPERATORS.items() if operator.element_results and not operator.quantizes]
DTYPES = [("bfloat16", "float32"), ("float16", "float32"), ("float32", "bfloat16"), ("float32", "float16")]
SHAPE = (6, 40)

every_dtype = support.sampled("given,result", DTYPES, 3)


def operands_of(op, given):
    """Floats in the dtypes that they have, and the label, if there is one, bound."""
    x = normal(SHAPE, given, scale=1.0)
    if OPERATORS[op].operands == 1:
        return [x], []
    if not OPERATORS[op].labelled:
        y = jax.nn.softmax(x) if op == "softmax_linear" else jax.nn.log_softmax(x)
        return [y, normal(SHAPE, given, seed=1, scale=1.0)], []
    *coefficients, label = support.row_numbers("cross_entropy_gradient", SHAPE, (1,), given)
    return [x, *coefficients], [label]


def function(op, labels, where, dtype=None):
    def f(*floats):
        return jax.tree.leaves(bind(op, *floats, *labels, where=where, axes=(1,), dtype=dtype))[0]

    return f


def wide(arrays):
    return [jnp.asarray(a, jnp.float32) for a in arrays]


def same(actual, expected, dtype, *rounded_to):
    """As the dtypes that arrays were rounded to allow."""
    assert actual.dtype == dtype and actual.shape == expected.shape
    eps = max(float(jnp.finfo(d).eps) for d in (dtype, *rounded_to))
    expected = np.asarray(expected, np.float64)
    largest = np.abs(expected, where=np.isfinite(expected), out=np.zeros(expected.shape)).max()
    np.testing.assert_allclose(np.asarray(actual, np.float64), expected, rtol=4 * eps, atol=4 * eps * largest)


@support.sampled("masked,dtypes,op", itertools.product([False, True], DTYPES, OPS), 7, ids=str)
def test_values(masked, dtypes, op):
    given, result = dtypes
    floats, labels = operands_of(op, given)
    where = support.random_mask(SHAPE) if masked else None
    expected = function(op, labels, where)(*wide(floats))
    f = function(op, labels, where, result)
    same(f(*floats), expected, result)
    same(jax.jit(f)(*floats), expected, result)


@support.sampled(
    "dtypes,op", itertools.product(DTYPES, [op for op in OPS if PRIMITIVES[op] in ad.primitive_jvps]), 4, ids=str
)
def test_derivatives(dtypes, op):
    given, result = dtypes
    floats, labels = operands_of(op, given)
    f, in_float32 = function(op, labels, None, result), function(op, labels, None)
    tangents = [normal(a.shape, a.dtype, seed=5 + i, scale=1.0) for i, a in enumerate(floats)]
    cotangent = normal(SHAPE, result, seed=9, scale=1.0)

    def derivatives(f):
        def run(floats, tangents, cotangent):
            return *jax.jvp(f, tuple(floats), tuple(tangents)), jax.vjp(f, *floats)[1](cotangent)

        return run

    y, y_dot, found = support.in_haste(derivatives(f), floats, tangents, cotangent)
    _, expected, gradients = support.in_haste(derivatives(in_float32), wide(floats), wide(tangents), *wide([cotangent]))
    assert y.dtype == result
    same(y_dot, expected, result, given, result)
    for a, actual, gradient in zip(floats, found, gradients, strict=True):
        same(actual, gradient, a.dtype, result)


@support.sampled("dtypes,op", itertools.product(DTYPES, OPS), 3, ids=str)
def test_vmap(dtypes, op):
    given, result = dtypes
    floats, labels = operands_of(op, given)
    f = function(op, labels, None, result)
    batches = [np.stack([a, np.flip(a, 0)], 1) for a in map(np.asarray, floats)]
    for mapped in (range(len(floats)), [0], [len(floats) - 1]):
        operands = [batches[i] if i in mapped else a for i, a in enumerate(floats)]
        axes = [1 if i in mapped else None for i in range(len(floats))]
        expected = [f(*(a[:, k] if i in mapped else a for i, a in enumerate(operands))) for k in range(2)]
        same(jax.jit(jax.vmap(f, axes))(*operands), jnp.stack(expected), result)


@pytest.mark.parametrize("op", ["softmax_linear", "log_softmax_jvp", "log_softmax_vjp"])
@every_dtype
def test_a_tangent_of_another_dtype(op, given, result):
    """Its cotangent has its own dtype."""
    (y, t), _ = operands_of(op, given)
    y = jnp.asarray(y, result)
    apply = functools.partial(function(op, [], None, result), y)
    expected, pullback = jax.vjp(functools.partial(function(op, [], None), *wide([y])), *wide([t]))
    same(apply(t), expected, result)
    cotangent = normal(SHAPE, result, seed=9, scale=1.0)
    same(jax.vjp(apply, jnp.asarray(t))[1](cotangent)[0], pullback(*wide([cotangent]))[0], given)
