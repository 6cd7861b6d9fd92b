"""Every result, and the cotangent that goes with it, is within a derived bound of a float64 reference."""

import itertools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
import support
from oracles import check, reference
from support import DTYPES, NAMES, OPERATORS, check_all, normal, one_name, sampled

SHAPE = (3, 5, 7)
AXES = (0, 1, -1, (0, 1), (1, 2), (0, 2), (-1, 0), None, ())

WIDTHS = (
    *range(1, 41),
    *(63, 64, 65, 127, 128, 129, 255, 256, 257),
    *(1000, 1023, 1024, 1025, 1999, 2047, 2048, 2049, 4095, 4096, 4097, 8191, 8192, 8193),
    *(16383, 16384, 16385, 32767, 32768, 32769, 50257, 65535, 65536, 65537),
    *(131071, 131072, 131073, 151937, 262145),
)


def rows_of(width):
    return 7 if width < 300 else 3 if width < 20000 else 2


@sampled("dtype,axis,form", itertools.product(DTYPES, AXES, support.mask_forms(SHAPE)), 8)
def test_axes_and_masks(dtype, axis, form):
    check_all(normal(SHAPE, dtype), axis, support.mask_forms(SHAPE)[form])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_eager(dtype, name):
    x = normal((4, 33), dtype)
    with support.precision(dtype):
        check(OPERATORS[name](x), reference(name, x))
        check(OPERATORS[name](jnp.asarray(x), axis=0), reference(name, x, 0))
        check(OPERATORS[name](x, where=x > 0), reference(name, x, where=x > 0))


@sampled("dtype,width", itertools.product(["float32", "bfloat16"], WIDTHS), 7)
def test_widths(dtype, width):
    check_all(normal((rows_of(width), width), dtype, seed=width))


OTHER_WIDTHS = (1, 3, 8, 17, 31, 64, 127, 1000, 1025, 4099, 8192, 16391, 50257, 131073)


@sampled("dtype,width", itertools.product(["float16", "float64"], OTHER_WIDTHS), 3)
def test_widths_of_other_dtypes(dtype, width):
    check_all(normal((rows_of(width), width), dtype, seed=width))


MASKED_WIDTHS = (1, 2, 7, 8, 9, 31, 32, 33, 100, 257, 1025, 4097, 16391, 50257, 131073)


@sampled("dtype,width", itertools.product(["float32", "bfloat16"], MASKED_WIDTHS), 7)
def test_masked_widths(dtype, width):
    shape = (rows_of(width), width)
    check_all(normal(shape, dtype, seed=width), where=support.random_mask(shape, width))


# (reduced extent, columns side by side): both on either side of tiles, packs, warps and blocks.
COLUMNS = (
    *((n, 1) for n in (1, 33, 1025)),
    *((n, 3) for n in (2, 31, 257, 4097, 33000)),
    *((n, 8) for n in (1, 7, 8, 9, 32, 128, 1024, 8193)),
    *((n, 33) for n in (2, 33, 129, 2047)),
    *((n, 64) for n in (1, 16, 127, 256, 513, 2048)),
    *((n, 130) for n in (5, 64, 511, 1023)),
    *((n, 1024) for n in (3, 32, 128)),
    *((n, 5001) for n in (2, 17)),
)


@sampled("dtype,columns", itertools.product(["float32", "bfloat16"], COLUMNS), 7)
def test_leading_axis(dtype, columns):
    extent, columns = columns
    check_all(normal((extent, columns), dtype, seed=extent), axis=0)


MIDDLE = [(3, 7, 3), (3, 33, 8), (3, 128, 64), (3, 1025, 33), (3, 64, 130), (3, 2, 5001), (3, 7, 70), (5, 2, 255)]


@sampled("dtype,shape", itertools.product(DTYPES, MIDDLE), 5)
def test_middle_axis(dtype, shape):
    x = normal(shape, dtype, seed=shape[1])
    check_all(x, axis=1)
    check_all(x, axis=1, where=support.random_mask(x.shape, 1))
    check_all(x, axis=1, where=support.random_mask((shape[1], 1), 2))


SEVERAL = (
    ((3, 4, 5), (0, 2)),
    ((2, 33, 17), (0, 2)),
    ((64, 3, 64), (0, 2)),
    ((9, 2, 1025), (0, 2)),
    ((5, 2, 8192), (0, 2)),
    ((17, 6, 5, 8), (0, 2)),
    ((4, 3, 65, 5), (1, 2)),
    ((3, 4, 5, 6, 7), (0, 2, 4)),
    ((3, 4, 5, 6, 7), (1, 3)),
    ((3, 4, 5, 6, 7), (4, 0, 3)),
    ((3, 1, 5, 1, 7), (0, 1, 4)),
)


@sampled("dtype,view", itertools.product(["float32", "bfloat16"], SEVERAL), 5)
def test_several_axes(dtype, view):
    shape, axis = view
    x = normal(shape, dtype)
    check_all(x, axis)
    check_all(x, axis, support.random_mask(shape))
    check_all(x, axis, support.random_mask(shape[-2:]))


@pytest.mark.parametrize(
    "shape,axis",
    [
        ((70001, 3), -1),
        ((70001, 8), -1),
        ((300007, 1), -1),
        ((2, 70001), 0),
        ((70001, 2, 3), 1),
        ((3, 70001, 2), (0, 2)),
    ],
)
def test_many_rows(shape, axis):
    check_all(normal(shape), axis)


def test_many_dimensions():
    """None of which can be merged with its neighbour."""
    x = normal((2,) * 11)
    check_all(x, tuple(range(0, 11, 2)))
    check_all(x, tuple(range(1, 11, 2)), support.random_mask((2,) * 11))
    check_all(x, None, support.random_mask((2, 1) * 5 + (2,)))


def test_more_dimensions_than_any_model_has():
    x = normal((2, 1) * 7 + (2,) * 3)
    check_all(x, tuple(range(0, 17, 3)))
    check_all(x, None, support.random_mask((2,) + (1,) * 15 + (2,)))


@sampled("dtype,axis", itertools.product(DTYPES, [-1, 0, None]), 2)
def test_outliers(dtype, axis):
    check_all(support.outliers((5, 403), dtype), axis)
    check_all(support.outliers((2, 9001), dtype), axis)


@sampled("dtype,name", itertools.product(DTYPES, NAMES), 3)
def test_extreme_range(dtype, name):
    """The largest number next to the smallest one: their difference overflows, as it does in jax.nn."""
    with support.precision(dtype):
        big = float(jnp.finfo(dtype).max)
        x = jnp.array([[big, -big, big, 0], [-big, -big, -big, -big], [big, big, big, big]], dtype)
        actual, expected = OPERATORS[name](x), support.JAX_NN[name](x)
        assert actual.dtype == expected.dtype
        np.testing.assert_allclose(actual.astype(float), expected.astype(float), rtol=2 * float(jnp.finfo(dtype).eps))


@sampled("dtype,columns", itertools.product(["float32", "bfloat16"], [1, 2, 5, 8, 33, 1000, 5003, 40000]), 5)
def test_nonfinite(dtype, columns):
    x = support.nonfinite_rows(columns, dtype)
    check_all(x)
    check_all(np.ascontiguousarray(x.T), axis=0)


@pytest.mark.parametrize("columns", [1, 2, 101])
@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_nonfinite_of_other_dtypes(dtype, columns):
    check_all(support.nonfinite_rows(columns, dtype))


@pytest.mark.parametrize("columns", [5, 33, 1000, 5003])
@pytest.mark.parametrize("axis", [-1, 0])
def test_nonfinite_under_a_mask(axis, columns):
    x = support.nonfinite_rows(columns)
    where = np.isfinite(x) | (np.arange(len(x)) % 4 == 1)[:, None]  # half of the rows lose what is not finite
    if axis == 0:
        x, where = np.ascontiguousarray(x.T), np.ascontiguousarray(where.T)
    check_all(x, axis, where)


def test_masked_nan_does_not_leak():
    x = normal((6, 40))
    clean, where = x.copy(), support.random_mask(x.shape)
    where[2] = False
    x[~where] = np.nan
    clean[~where] = 0
    g = normal(x.shape, seed=1)
    dirty, expected = support.run_all(x, g, where=where), support.run_all(clean, g, where=where)
    for name in NAMES:
        for actual, wanted in zip(dirty[name], expected[name], strict=True):
            np.testing.assert_array_equal(actual, wanted)
            assert not np.isnan(actual).any()


def test_fully_masked_row():
    x, where = normal((3, 9)), np.array([[True], [False], [True]])
    out = support.run_all(x, normal((3, 9), seed=1), where=where)
    np.testing.assert_array_equal(out["softmax"][0][1], 0)
    np.testing.assert_array_equal(out["log_softmax"][0][1], -np.inf)
    for name in NAMES:
        np.testing.assert_array_equal(out[name][1][1], 0)
        assert np.isfinite(out[name][1]).all()


ENLARGED = (((3, 1), (3, 5)), ((1, 5), (3, 5)), ((1, 1), (3, 5)), ((2, 1, 5), (4, 1)), ((2, 1, 5, 1), (1, 3, 1, 6)))


@sampled("dtype,axis,shapes", itertools.product(["float32", "bfloat16"], [-1, 0, None], ENLARGED), 11)
def test_mask_that_enlarges(dtype, axis, shapes):
    shape, mask_shape = shapes
    where = support.random_mask(mask_shape)
    check_all(normal(shape, dtype), axis, where)
    for name in NAMES:
        expected = support.JAX_NN[name](normal(shape), axis, where)
        np.testing.assert_allclose(OPERATORS[name](normal(shape), axis, where), expected, rtol=1e-5)


@pytest.mark.parametrize("axis", [-1, None], ids=str)
def test_mask_of_higher_rank(axis):
    """As if x had been broadcast first (jax.nn.softmax takes the maximum over another axis than the sum here)."""
    check_all(normal((5,)), axis, support.random_mask((3, 5)))
    check_all(normal((4, 1)), axis, support.random_mask((2, 3, 4, 5)))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("where", [True, False, np.True_, np.array(False), jnp.array(True)], ids=repr)
def test_scalar_mask(name, where):
    x = normal((3, 5))
    check(OPERATORS[name](x, -1, where), reference(name, x, -1, where))


@sampled("shape", [(0,), (0, 3), (2, 0, 3), (3, 0), (0, 0)], 2)
def test_empty(shape):
    x = np.zeros(shape, np.float32)
    for axis in (*range(-len(shape), len(shape)), None, (), tuple(range(len(shape)))):
        check_all(x, axis)
        check_all(x, axis, np.ones(shape, bool))
        check_all(x, axis, np.ones(shape[-1:], bool))


def test_empty_by_its_mask():
    check_all(np.zeros((3, 1), np.float32), -1, np.ones((3, 0), bool))
    check_all(np.zeros((3, 1), np.float32), 0, np.ones((3, 0), bool))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("axis", [None, ()], ids=str)
def test_scalar(name, axis):
    for value in (2.0, -1e30, np.inf, -np.inf, np.nan):
        x = np.array(value, np.float32)
        check(OPERATORS[name](x, axis), reference(name, x, axis))
        check(OPERATORS[name](value, axis), reference(name, x, axis))
        check(OPERATORS[name](x, axis, False), reference(name, x, axis, False))
    check(jax.grad(OPERATORS[name])(jnp.float32(2), axis), oracles.Bounded(np.array(0.0), np.array(0.0), np.float32))


@one_name
def test_one_column_is_exact(name):
    wanted = 1.0 if name == "softmax" else 0.0
    x = support.outliers((1000, 1))
    np.testing.assert_array_equal(OPERATORS[name](x), wanted)
    np.testing.assert_array_equal(OPERATORS[name](x.T, axis=0), wanted)
    np.testing.assert_array_equal(OPERATORS[name](x, axis=()), wanted)


PRODUCERS = {
    "transpose": lambda x: x.T,
    "slice": lambda x: x[1:, 1:-2],
    "stride": lambda x: x[::2, ::3],
    "flip": lambda x: x[::-1, ::-1],
    "broadcast": lambda x: jnp.broadcast_to(x[1], x.shape),
    "concatenate": lambda x: jnp.concatenate([x[:, 3:], x[:, :5]], axis=1),
    "reshape": lambda x: x.reshape(-1, 6).T,
    "roll": lambda x: jnp.roll(x, 5, axis=1),
}


@sampled("dtype,producer", itertools.product(["float32", "bfloat16"], PRODUCERS), 5)
def test_operands_computed_in_the_same_program(dtype, producer):
    move = PRODUCERS[producer]
    x = normal((12, 51), dtype)
    moved = np.asarray(move(jnp.asarray(x)))
    g = normal(moved.shape, dtype, seed=1)

    @jax.jit
    def program(x, g):
        out = {}
        for name in NAMES:
            y, pullback = jax.vjp(lambda x, name=name: OPERATORS[name](move(x), where=move(x) < 4), x)
            _, inner = jax.vjp(lambda m, name=name: OPERATORS[name](m, where=m < 4), move(x))
            out[name] = y, inner(g[::-1][::-1])[0], pullback(g)[0]
        return out

    for name, (y, dx, outer) in program(x, g).items():
        check(y, reference(name, moved, where=moved < 4))
        check(dx, oracles.reference_vjp(name, moved, g, where=moved < 4))
        assert outer.shape == x.shape and outer.dtype == x.dtype


@pytest.mark.parametrize("offset", [0, 1, 2, 3, 5, 8])
@pytest.mark.parametrize("width", [31, 32, 1000])
def test_operand_sliced_at_an_offset(width, offset):
    """A buffer that starts anywhere within 16 bytes."""
    x = normal((4 * width + 16,), "bfloat16")

    @jax.jit
    def program(x, start):
        return OPERATORS["softmax"](jax.lax.dynamic_slice(x, (start,), (4 * width,)).reshape(4, width))

    check(program(x, offset), reference("softmax", x[offset : offset + 4 * width].reshape(4, width)))


@sampled("dtype,name", itertools.product(["bool", "int8", "int16", "int32", "uint8", "uint16", "uint32"], NAMES), 3)
def test_integers(dtype, name):
    x = np.random.default_rng(0).integers(0, 2 if dtype == "bool" else 120, (5, 37)).astype(dtype)
    x[1] = x[1][::-1] & np.array(1, dtype)
    for axis, where in ((-1, None), (0, None), (None, x > 0)):
        actual = OPERATORS[name](x, axis, where)
        assert actual.dtype == jnp.exp(jnp.asarray(x)).dtype == jnp.float32
        check(actual, reference(name, x.astype(np.float32), axis, where))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", ["int8", "int16", "int32", "int64"])
def test_signed_integers_promote_as_in_jax_nn(dtype, name):
    x = np.array([[3, -2, 0, 1], [-40, 50, 7, 7]], dtype)
    for wide in (False, True):
        with jax.enable_x64(wide):
            actual = OPERATORS[name](x)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # recent versions of jax.nn warn of a cast of their own
                assert actual.dtype == jax.eval_shape(support.JAX_NN[name], x).dtype
            check(actual, reference(name, x.astype(actual.dtype)))
            assert wide or actual.dtype == jnp.float32


@one_name
def test_unsigned_integers_do_not_wrap(name):
    for dtype in ("uint8", "uint16", "uint32"):
        x = np.array([0, 1, 3, 200], dtype)
        check(OPERATORS[name](x), reference(name, x.astype(np.float32)))
        check(OPERATORS[name](x, where=x != 3), reference(name, x.astype(np.float32), where=x != 3))


@sampled("dtype,name", itertools.product(["complex64", "complex128"], NAMES), 3)
def test_complex(dtype, name):
    x = (normal((4, 6), "float32", 0, 1) + 1j * normal((4, 6), "float32", 1, 1)).astype(dtype)
    eps = np.finfo(dtype).eps
    with jax.enable_x64(dtype == "complex128"):
        for axis, where in ((-1, None), (0, None), ((0, 1), None), (-1, x.real > 0)):
            actual, expected = OPERATORS[name](x, axis, where), support.JAX_NN[name](x, axis, where)
            assert actual.dtype == expected.dtype == dtype
            np.testing.assert_allclose(actual, expected, rtol=50 * eps, atol=50 * eps)


@one_name
def test_complex_with_a_mask_that_enlarges(name):
    x = normal((4, 6)) + 1j * normal((4, 6), seed=1)
    where = support.random_mask((3, 4, 6))
    actual, expected = (table[name](a, 0, where) for table, a in ((OPERATORS, x), (support.JAX_NN, x + where * 0)))
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)


FLOAT8 = (
    *("float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz", "float8_e4m3fn", "float8_e4m3fnuz"),
    *("float8_e5m2", "float8_e5m2fnuz"),
)


@sampled("dtype,name", itertools.product(FLOAT8, NAMES), 3)
def test_float8(dtype, name):
    x = normal((40, 30), "float32", scale=1.0).astype(dtype)
    g = normal((40, 30), "float32", seed=1, scale=1.0).astype(dtype)
    for axis, where in ((-1, None), (0, None), (-1, support.random_mask(x.shape))):
        y, pullback = jax.vjp(lambda x, axis=axis, where=where: OPERATORS[name](x, axis, where), jnp.asarray(x))
        dx = pullback(jnp.asarray(g))[0]
        wide = x.astype(np.float32)
        oracles.check_float8(y, reference(name, wide, axis, where).value, x.dtype)
        oracles.check_float8(dx, oracles.reference_vjp(name, wide, g, axis, where).value, x.dtype)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "axis,same",
    [
        (np.int32(1), 1),
        (np.array(-1), 1),
        (jnp.array(0), 0),
        (True, 1),
        ((np.int64(0), 1), (0, 1)),
        (range(2), (0, 1)),
        ([0, -1], (0, 1)),
        (np.array([1]), 1),
        (jnp.array([1, 0]), (0, 1)),
    ],
    ids=repr,
)
def test_axis_of_other_types(axis, same, name):
    x = normal((3, 5))
    check(OPERATORS[name](x, axis), reference(name, x, same))
    check(jax.jit(lambda x: OPERATORS[name](x, axis))(x), reference(name, x, same))
