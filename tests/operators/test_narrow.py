"""int8, uint8 and float8 are computed as float32, and results in float8 are rounded once."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
import support
from oracles import check
from support import NAMES, NARROW, OPERATORS, assert_same_bits, every_name, sampled

FLOAT8, INTEGERS = NARROW[:2], NARROW[2:]

every_dtype = pytest.mark.parametrize("dtype", NARROW)


def numbers(shape, dtype, seed=0):
    """All of an integer's values, or float8 of a few exponents."""
    rng = np.random.default_rng(seed)
    if dtype in INTEGERS:
        return rng.integers(0, 256, shape, np.uint8).view(dtype)
    return (rng.standard_normal(shape) * 3).astype(jnp.dtype(dtype))


def pairs_of_all(dtype):
    """Rows of each number beside 0, and of each beside the next: with infinities, NaNs, and overflows."""
    every = np.arange(256, dtype=np.uint8).view(dtype)
    return np.stack([every, np.zeros_like(every)], 1), np.stack([every, np.roll(every, 1)], 1)


def by_float32(f):
    """The composition that a call means."""
    return lambda x, *args: f(x.astype(jnp.float32), *args).astype(x.dtype if x.dtype.name in FLOAT8 else jnp.float32)


def check_narrow(actual, name, x, axis=-1, where=None):
    expected = oracles.reference(name, np.asarray(x).astype(np.float32), axis, where)
    if x.dtype.name in INTEGERS:
        return check(actual, expected)
    oracles.check_float8(actual, expected.value, x.dtype)


VIEWS = [
    ((300, 7), -1),
    ((64, 32), -1),
    ((40, 65), -1),
    ((5, 1999), -1),
    ((3, 70_001), -1),
    ((130, 33), 0),
    ((3, 300, 16), 1),
    ((6, 5, 13, 16), (0, 2)),
]


@sampled("view,dtype,name", itertools.product(VIEWS, NARROW, NAMES), 9)
def test_values(name, dtype, view):
    shape, axis = view
    x = numbers(shape, dtype)
    row_mask = support.random_mask(shape[-1:], 1)
    for where in (None, support.random_mask(shape), row_mask):
        check_narrow(OPERATORS[name](x, axis, where), name, x, axis, where)
    f = functools.partial(OPERATORS[name], axis=axis)
    check_narrow(jax.vmap(f, 1, 1)(np.stack([x, x[::-1]], 1))[:, 0], name, x, axis)


@every_name
def test_integers_from_end_to_end(name):
    """Differences of up to 255, which int8 has no room for."""
    x = np.arange(-128, 128, dtype=np.int8)
    for a in (x, x.view(np.uint8), np.stack([x, x[::-1]]), np.array([-128, 127], np.int8)):
        check_narrow(OPERATORS[name](a), name, a)


@every_name
@every_dtype
@pytest.mark.parametrize("columns", [7, 1999])
def test_rows_far_below_0(columns, dtype, name):
    """exp(x) of such numbers is 0: a maximum that began at 0 would leave nothing."""
    x = numbers((5, columns), dtype)
    x = np.where(np.arange(columns) == 3, np.asarray(-104 if dtype != "uint8" else 0, x.dtype), x.min())
    check_narrow(OPERATORS[name](x), name, x)


@every_name
@pytest.mark.parametrize("dtype", FLOAT8)
def test_all_numbers_of_float8(dtype, name):
    for x in pairs_of_all(dtype):
        actual = np.asarray(OPERATORS[name](x)).astype(np.float64)
        expected = oracles.reference(name, x.astype(np.float32)).value
        rounded = np.asarray(jnp.asarray(expected, jnp.float32).astype(dtype)).astype(np.float64)
        info = jnp.finfo(dtype)
        # The neighbour where a result is next to a tie.
        np.testing.assert_allclose(actual, rounded, rtol=float(info.eps), atol=float(info.smallest_subnormal))


@sampled("dtype,name", itertools.product(FLOAT8, NAMES), 4)
def test_float8_is_float32_rounded_once(dtype, name):
    """To the bit, as JAX converts: ties, subnormals, and what is beyond the largest number."""
    views = [(numbers(shape, dtype) * jnp.asarray(20, dtype), axis) for shape, axis in VIEWS]
    for x, axis in [*views, *((x, -1) for x in pairs_of_all(dtype))]:
        for where in (None, support.random_mask(x.shape)):
            actual, expected = (f(x, axis, where) for f in (OPERATORS[name], by_float32(OPERATORS[name])))
            # Which of its NaNs is not promised; no result is 7.
            actual, expected = (jnp.where(jnp.isnan(y), jnp.asarray(7, dtype), y) for y in (actual, expected))
            assert_same_bits(actual, expected, f"{name} {x.shape}")


# ---- Derivatives


@support.sampled("dtype,name", itertools.product(FLOAT8, NAMES), 4)
def test_gradients_of_float8_go_through_float32(dtype, name):
    x, t = numbers((5, 33), dtype), numbers((5, 33), dtype, 1)
    where = support.random_mask(x.shape)

    def pullback(f):
        return jax.vjp(lambda x: f(x, 0, where), jnp.asarray(x))[1](jnp.asarray(t))[0]

    def tangent(f):
        return jax.jvp(lambda x: f(x, 0, where), (jnp.asarray(x),), (jnp.asarray(t),))[1]

    def second(f):
        return jax.vjp(lambda x: jax.grad(lambda x: jnp.sum(f(x, 0, where) ** 2))(x), jnp.asarray(x))[1](t)[0]

    f = OPERATORS[name]
    for derivative in (pullback, tangent, second):
        assert_same_bits(derivative(f), derivative(by_float32(f)))


@every_name
@pytest.mark.parametrize("dtype", INTEGERS)
def test_integers_have_no_tangents(dtype, name):
    x = jnp.asarray(numbers((3, 5), dtype))
    zeros = np.zeros(x.shape, jax.dtypes.float0)
    y, dy = jax.jvp(OPERATORS[name], (x,), (zeros,))
    assert y.dtype == dy.dtype == jnp.float32 and not np.any(dy)
    assert jax.vjp(OPERATORS[name], x)[1](y)[0].dtype == jax.dtypes.float0
