"""Whatever the shape, axes, dtype and mask: the float64 reference, and what makes a softmax a softmax."""

import jax
import numpy as np
import oracles
import pytest
import support
from hypothesis import given
from hypothesis import strategies as st
from oracles import reference
from support import NAMES, OPERATORS, check_all, normal


@st.composite
def shapes(draw, smallest=0):
    """Up to five dimensions, of which one may be long."""
    shape = draw(st.lists(st.integers(smallest, 9), max_size=5))
    if shape and draw(st.booleans()):
        shape[draw(st.integers(0, len(shape) - 1))] = draw(st.sampled_from([17, 32, 65, 130, 257, 1000]))
    while np.prod(shape) > 40000:
        shape.pop()
    return tuple(shape)


@st.composite
def axes(draw, rank):
    """An int, a tuple in any order, (), or None; of either sign."""
    kind = draw(st.sampled_from(["int", "int", "tuple", "none"]))
    if rank == 0 or kind == "none":
        return draw(st.sampled_from([None, ()]))
    position = st.integers(-rank, rank - 1)
    if kind == "int":
        return draw(position)
    return tuple(draw(st.lists(position, max_size=rank, unique_by=lambda a: a % rank)))


@st.composite
def masks(draw, shape):
    """None, or one that broadcasts with the shape, and may leave out leading dimensions or enlarge those of size 1."""
    if draw(st.integers(0, 2)) == 0:
        return None
    mask_shape = tuple(1 if draw(st.integers(0, 3)) == 0 else n for n in shape)
    if draw(st.integers(0, 3)) == 0:
        mask_shape = tuple(
            draw(st.integers(0, 4)) if n == 1 and m == 1 else m for n, m in zip(shape, mask_shape, strict=True)
        )
    mask_shape = mask_shape[draw(st.integers(0, len(shape))) if draw(st.booleans()) else 0 :]
    density = draw(st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0]))
    return support.random_mask(mask_shape, draw(st.integers(0, 99)), density)


@st.composite
def operands(draw, smallest=0, masked=True):
    shape = draw(shapes(smallest))
    axis = draw(axes(len(shape)))
    dtype = draw(st.sampled_from(support.DTYPES))
    make = draw(st.sampled_from([normal, normal, support.outliers]))
    x = np.asarray(make(shape, dtype, draw(st.integers(0, 99))))
    if draw(st.integers(0, 3)) == 0:
        x = np.where(support.random_mask(shape, 5, 0.1), np.array(-np.inf, x.dtype), x)
    return x, axis, draw(masks(shape)) if masked else None


def twice_bound(other, expected):
    """What differs from another result by the roundings of both."""
    return oracles.Bounded(np.asarray(other).astype(np.float64), 2 * expected.bound, expected.dtype)


@given(operands())
def test_reference(case):
    x, axis, where = case
    check_all(x, axis, where)


@given(operands(smallest=1))
def test_probabilities(case):
    """Between 0 and 1, and every row that has something to choose from sums to 1."""
    x, axis, where = case
    x = np.where(np.isfinite(x), x, np.array(0, x.dtype))
    with support.precision(x.dtype):
        y = np.asarray(OPERATORS["softmax"](x, axis, where)).astype(np.float64)
    keep = np.broadcast_to(True if where is None else where, y.shape)
    assert (y >= 0).all() and (y <= 1 + 2**-7).all()
    assert (y[~keep] == 0).all()
    expected = reference("softmax", x, axis, where)
    reduced = tuple(range(y.ndim)) if axis is None else axis
    total, slack = (np.sum(part, axis=reduced, dtype=np.float64) for part in (y, expected.bound))
    full = np.any(keep, axis=reduced)
    assert (total[~full] == 0).all()
    assert (np.abs(total - 1) <= slack + 1e-15)[full].all()


@given(operands(masked=False), st.integers(-20, 20))
def test_shift_invariance(case, shift):
    """To within both results' roundings, where adding the shift is exact."""
    x, axis, _ = case
    coarse = np.clip(np.round(np.nan_to_num(x.astype(np.float64), neginf=-50.0)), -50, 50)
    for name in NAMES:
        with support.precision(x.dtype):
            actual, plain = (OPERATORS[name]((coarse + by).astype(x.dtype), axis) for by in (shift, 0))
        oracles.check(actual, twice_bound(plain, reference(name, coarse.astype(x.dtype), axis)))


@given(operands())
def test_a_mask_is_minus_infinity(case):
    """In what it keeps of a row that it does not leave empty."""
    x, axis, where = case
    where = np.array(True) if where is None else where
    shape = np.broadcast_shapes(x.shape, where.shape)
    keep = np.broadcast_to(where, shape)
    filled = np.where(keep, x, np.array(-np.inf, x.dtype))
    axis = tuple(range(len(shape))) if axis is None else axis
    for name in NAMES:
        with support.precision(x.dtype):
            masked, plain = OPERATORS[name](x, axis, where), OPERATORS[name](filled, axis)
        expected = twice_bound(plain, reference(name, x, axis, where))
        oracles.check(np.where(keep, masked, 0), expected._replace(value=np.where(keep, expected.value, 0.0)))


@given(operands(smallest=1))
def test_log_softmax_is_its_logarithm(case):
    x, axis, where = case
    with support.precision(x.dtype):
        y = np.asarray(OPERATORS["softmax"](x, axis, where)).astype(np.float64)
        log_y = np.asarray(OPERATORS["log_softmax"](x, axis, where)).astype(np.float64)
    bounds = reference("softmax", x, axis, where).bound, reference("log_softmax", x, axis, where).bound
    with np.errstate(all="ignore"):
        p = np.exp(log_y)
        np.testing.assert_array_equal(np.isnan(p), np.isnan(y))
        slack = bounds[0] + p * np.expm1(bounds[1]) * 1.01
    assert (np.abs(p - y) <= slack + 1e-300)[~np.isnan(y)].all()


@given(shapes(smallest=1), st.data())
def test_moving_axes_changes_nothing_but_rounding(shape, data):
    """softmax over an axis is softmax over the last one, of the moved array."""
    if not shape:
        return
    axis = data.draw(st.integers(-len(shape), len(shape) - 1))
    x = normal(shape)
    for name in NAMES:
        moved = np.moveaxis(np.asarray(OPERATORS[name](np.moveaxis(x, axis, -1))), -1, axis)
        oracles.check(OPERATORS[name](x, axis), twice_bound(moved, reference(name, x, axis)))


@pytest.mark.parametrize("name", NAMES)
def test_permuting_a_row_permutes_the_result(name):
    x = normal((5, 1000))
    order = np.random.default_rng(3).permutation(1000)
    permuted = twice_bound(np.asarray(OPERATORS[name](x))[:, order], reference(name, x[:, order]))
    oracles.check(jax.jit(OPERATORS[name])(x[:, order]), permuted)
