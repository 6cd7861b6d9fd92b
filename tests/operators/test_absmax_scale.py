"""absmax_scale: y and scales to the bit, of every dtype to every dtype; masks, ties, infinities, derivatives."""

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import support
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from oracles import LARGEST, check, reference_absmax_scale
from support import DEVICES, FIRST, SCHEDULES, SECOND, THIRD, VIEWS_OF_ROWS, WAYS, normal, outliers, random_mask

from jax_softmax import absmax_scale, explain

RESULTS = ("float16", "bfloat16", "float32", "float64", *LARGEST)
# That kernels cover: XLA's division on a GPU is not to the nearest.
VIEWS = [*(view for view in VIEWS_OF_ROWS if view != ((4, 5, 6), (0, 2))), ((4, 5, 16), (0, 2))]


def check_both(found, expected, label=""):
    for name, array, bounded in zip(("y", "scale"), found, expected, strict=True):
        check(array, bounded, f"{name} {label}")


def written_out(x, where=None, axis=-1):
    """What the function means for results of the arithmetic's dtype, whose derivatives are JAX's own."""
    kept = x if where is None else jnp.where(where, x, 0)
    scale = jnp.max(jnp.abs(kept), axis, keepdims=True)
    return kept / scale, scale


# ---- Values


@support.sampled("masked,dtype,result,view", itertools.product([False, True], support.DTYPES, RESULTS, VIEWS), 53)
def test_values(masked, dtype, result, view):
    shape, axis = view
    x, where = outliers(shape, dtype), random_mask(shape) if masked else None
    with jax.enable_x64("float64" in (dtype, result)):
        y, scale = absmax_scale(x, axis, where, dtype=result)
    narrower = result == "float64" and dtype != "float64"  # of y, than the arithmetic
    rounded = "float32" if narrower else result
    expected = reference_absmax_scale(x, axis, where, rounded)
    if dtype == "float64" and result not in ("float64", "float32", "int8"):
        # Whether float64 is rounded to so few bits by way of float32 is not promised.
        step = float(jnp.finfo(result).eps)
        assert y.dtype == jnp.dtype(result)
        np.testing.assert_allclose(
            np.asarray(y, np.float64), expected[0].value, rtol=step, atol=float(jnp.finfo(result).smallest_subnormal)
        )
        return check(scale, expected[1])
    y = np.asarray(y).astype(rounded) if narrower else y
    check_both((y, scale), expected, f"of {dtype}{shape} along {axis} to {result}")


@support.sampled(
    "result,dtype,columns",
    itertools.product([None, *LARGEST], ["bfloat16", "float32"], [5, 33, 1000, 20_001, 70_000]),
    7,
)
def test_what_is_not_finite(result, dtype, columns):
    """A NaN is seen wherever it is; in int8 it is 0."""
    x = support.nonfinite_rows(columns, dtype)
    both = x[:3].copy()
    both[:, 0], both[:, -1] = np.inf, np.nan
    for array in (x, -x, both):
        check_both(absmax_scale(array, dtype=result), reference_absmax_scale(array, dtype=result))


@pytest.mark.parametrize("result", [None, *LARGEST])
def test_rows_of_zeros_and_of_numbers_that_are_too_small(result):
    x = np.zeros((6, 40), np.float32)
    x[1], x[2, 3], x[3, 7], x[4] = -0.0, 1e-40, -2e-38, np.linspace(-3e38, 3e38, 40)
    x[5, ::2] = 1e-33
    check_both(absmax_scale(x, dtype=result), reference_absmax_scale(x, dtype=result))
    y, scale = absmax_scale(x, dtype=result)
    assert np.all(np.asarray(y)[:3].astype(float) == 0) and np.all(np.asarray(scale)[:3] == 0)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("result", RESULTS[:3] + tuple(LARGEST))
def test_the_maximum_is_mapped_exactly(result, dtype):
    """Of rows of any magnitude: to 1, or to the largest number of 8 bits, and nothing beyond."""
    largest = LARGEST.get(result, 1)
    x = (normal((4000, 12)) * np.logspace(-30, 37, 4000)[:, None]).astype(dtype)
    y = np.asarray(absmax_scale(x, dtype=result)[0]).astype(np.float64)
    wide = x.astype(np.float64)
    at = np.argmax(np.abs(wide), 1)[:, None]
    assert np.array_equal(np.take_along_axis(y, at, 1), np.sign(np.take_along_axis(wide, at, 1)) * largest)
    assert np.abs(y).max() == largest


def test_the_largest_numbers():
    """Of which not even a reciprocal is lost."""
    x = np.array([[3e38, 1.5e38, -3e38, 1e37]], "bfloat16")
    for result in ("float16", "bfloat16", "float32", *LARGEST):
        check_both(absmax_scale(x, dtype=result), reference_absmax_scale(x, dtype=result), result)


def test_x_again():
    """y times the scale is x, but for half a step."""
    x = normal((50, 300))
    y, scale = absmax_scale(x, dtype=jnp.int8)
    assert y.dtype == jnp.int8 and scale.shape == (50, 1)
    assert np.all(np.abs(y * scale - x) <= 0.5001 * np.asarray(scale))
    y, scale = absmax_scale(x, (0, 1))
    assert scale.shape == (1, 1)
    np.testing.assert_allclose(y * scale, x, rtol=2e-7)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_ties_are_rounded_to_even(dtype):
    with jax.enable_x64(dtype == "float64"):
        x = np.array([127, 0.5, 1.5, 2.5, -0.5, -1.5, 63.5, 126.5], dtype)
        assert np.array_equal(absmax_scale(x, dtype="int8")[0], [127, 0, 2, 2, 0, -2, 64, 126])
        x = np.array([448, 17, 19, -21, 2**-10, 3 * 2**-10], dtype)
        y = np.asarray(absmax_scale(x, dtype="float8_e4m3fn")[0])
        assert np.array_equal(y.astype(float), [448, 16, 20, -20, 0, 2**-8])


def test_default_dtypes():
    for dtype in support.DTYPES[:3]:
        y, scale = absmax_scale(np.ones((2, 3), dtype))
        assert y.dtype == np.dtype(dtype) and scale.dtype == np.float32
    for dtype in (float, "float64"):  # which JAX has only if it is told to
        assert [a.dtype for a in absmax_scale(np.ones(3, "float32"), dtype=dtype)] == [np.float32] * 2
    with jax.enable_x64(True):
        assert [a.dtype for a in absmax_scale(np.ones(3))] == [np.float64] * 2
        assert [a.dtype for a in absmax_scale(np.ones(3, "float32"), dtype="float64")] == [np.float64, np.float32]
    for x in (np.arange(-3, 4), np.arange(4, dtype=np.uint8), jnp.arange(4.0).astype("float8_e4m3fn"), [True, False]):
        x = np.asarray(x)
        y, scale = absmax_scale(x)
        assert y.dtype == scale.dtype == np.float32
        np.testing.assert_allclose(y * scale, x.astype(np.float32), rtol=2e-7)


def test_empty():
    y, scale = absmax_scale(np.zeros((3, 0), np.float32), dtype="int8")
    assert y.shape == (3, 0) and y.dtype == np.int8 and np.array_equal(scale, np.zeros((3, 1)))
    y, scale = absmax_scale(np.zeros((0, 3), np.float32))
    assert y.shape == (0, 3) and scale.shape == (0, 1)


@support.sampled("result", [None, *LARGEST], 2)
def test_masks(result):
    """What is masked counts for nothing, whatever it is; masks broadcast, and may enlarge y."""
    x = normal((6, 5, 40))
    for name, where in support.mask_forms(x.shape).items():
        check_both(absmax_scale(x, 1, where, dtype=result), reference_absmax_scale(x, 1, where, result), name)
    where = random_mask(x.shape)
    x[~where] = np.resize([np.nan, np.inf, 1e38], np.sum(~where))
    check_both(absmax_scale(x, -1, where, dtype=result), reference_absmax_scale(x, -1, where, result))
    where = random_mask((3, 40))
    check_both(absmax_scale(normal(40), -1, where, dtype=result), reference_absmax_scale(normal(40), -1, where, result))


finite = st.floats(width=32, allow_nan=False, min_value=-(2.0**100), max_value=2.0**100).filter(
    lambda v: v == 0 or abs(v) > 2.0**-80
)


@given(
    x=hnp.arrays(np.float32, hnp.array_shapes(min_dims=1, max_dims=3, max_side=9), elements=finite),
    data=st.data(),
    result=st.sampled_from(["int8", "float8_e4m3fn", "float8_e5m2"]),
)
def test_quantised_numbers_are_near(x, data, result):
    """Half a step off, along any axes, and of the same sign."""
    axes = tuple(data.draw(st.sets(st.integers(0, x.ndim - 1))))
    y, scale = (np.asarray(a) for a in absmax_scale(x, axes, dtype=result))
    assert scale.shape == tuple(1 if d in axes else n for d, n in enumerate(x.shape))
    y, scale, x = y.astype(np.float64), scale.astype(np.float64), x.astype(np.float64)
    assert np.all(np.abs(y) <= LARGEST[result]) and np.all(y * x >= 0)
    if result == "int8":
        step = np.ones_like(y)
    else:
        info = jnp.finfo(result)
        step = np.maximum(2.0 ** np.floor(np.log2(np.maximum(np.abs(y), 1e-30))), float(info.tiny)) * float(info.eps)
    np.testing.assert_array_less(np.abs(y * scale - x), 0.501 * step * scale + 1e-5 * np.abs(x) + 1e-300)


# ---- Derivatives


@support.sampled("ties,masked", itertools.product([False, True], [False, True]), 3)
def test_derivatives(ties, masked):
    """As JAX derives the same in jax.numpy: at ties, too, where elements share the maximum's."""
    with jax.enable_x64(True):
        x = normal((3, 4), "float64")
        where = random_mask((3, 4), 1) if masked else None
        if ties:
            x = np.sign(x) * np.ceil(np.abs(x) / 2)
        if masked:
            where[:, 0] = True
        x = jnp.asarray(x)

        def of(f):
            return lambda x: sum(jnp.sum(jnp.sin(a * (1 + k))) for k, a in enumerate(f(x)))

        ours, theirs = of(lambda x: absmax_scale(x, -1, where)), of(lambda x: written_out(x, where))
        support.same_derivatives(ours, theirs, (*FIRST, *SECOND, *THIRD), [x], rtol=1e-11, atol=1e-12)


def test_derivatives_along_other_axes():
    x = normal((3, 4, 5))
    for axis in (0, (0, 2), None, ()):
        ours, theirs = (
            lambda x, f=f: jnp.sum(jnp.cos(f(x)[0]) + f(x)[1])
            for f in (lambda x: absmax_scale(x, axis), lambda x: written_out(x, None, axis))  # noqa: B023
        )
        support.same_derivatives(ours, theirs, [jax.grad], [x], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("result", LARGEST)
def test_derivatives_of_8_bits(result):
    """The scale's, and y's as that of the formula which is rounded; an integer has none."""
    x, t = normal((3, 5)), normal((3, 5), seed=1, scale=0.1)
    largest = LARGEST[result]
    (y_dot, scale_dot), expected = (
        jax.jvp(f, (x,), (t,))[1] for f in (lambda x: absmax_scale(x, dtype=result), lambda x: written_out(x))
    )
    np.testing.assert_allclose(scale_dot, expected[1] / largest, rtol=1e-6)
    g = jax.grad(lambda x: absmax_scale(x, dtype=result)[1].sum())(x)
    np.testing.assert_allclose(g, jax.grad(lambda x: written_out(x)[1].sum())(x) / largest, rtol=1e-6)
    if result == "int8":
        assert y_dot.dtype == jax.dtypes.float0
    else:
        assert y_dot.dtype == jnp.dtype(result)
        step = float(jnp.finfo(result).eps)
        np.testing.assert_allclose(np.asarray(y_dot, np.float64), expected[0] * largest, rtol=step, atol=1e-6 * largest)


def test_derivatives_of_rows_without_a_scale():
    """Of zeros, and of what is masked altogether, they are 0; what stands under the mask has no effect."""
    x, where = np.zeros((3, 4), np.float32), np.ones((3, 4), bool)
    x[1], x[2], where[1], where[2, 1:] = np.nan, [2, np.nan, np.inf, 1e38], False, False

    def f(x):
        y, scale = absmax_scale(x, -1, where)
        return jnp.sum(jnp.sin(y)) + jnp.sum(scale)

    expected = np.zeros((3, 4))
    expected[2, 0] = 1
    gradient, (_, tangent), hessian = support.in_haste(
        lambda x: (jax.grad(f)(x), jax.jvp(f, (x,), (jnp.ones_like(x),)), jax.hessian(f)(x)), x
    )
    np.testing.assert_allclose(gradient, expected, atol=1e-6)
    np.testing.assert_allclose(tangent, 1, atol=1e-6)
    assert np.all(np.isfinite(hessian))


@support.sampled("columns,result", itertools.product([5, 70_000], LARGEST), 2)
def test_derivative_of_a_scale_that_is_nan(columns, result):
    """That of a maximum, wherever the NaN is, and however long the row."""
    x, t = normal((3, columns)), np.ones((3, columns), np.float32)
    x[[0, 1, 2], [0, columns // 2, -1]] = np.nan

    def of(dtype):
        def f(x):
            return absmax_scale(x, dtype=dtype)[1] * LARGEST.get(dtype, 1)

        return jax.jvp(f, (x,), (t,))[1], jax.grad(lambda x: f(x).sum())(x)

    (tangent, gradient), expected = of(result), of("float32")
    assert np.isnan(tangent).all() and np.array_equal(gradient, expected[1], equal_nan=True)


def test_what_is_kept_for_the_backward_pass():
    """x, and the scales."""
    x = jnp.ones((64, 4096), jnp.bfloat16)
    assert support.kept_bytes(lambda x: absmax_scale(x)[0], x) <= x.nbytes + 4 * 64


# ---- Programs


@support.sampled("result", [None, "int8", "float8_e4m3fn"], 2)
def test_vmap(result):
    x, where = normal((4, 5, 6)), random_mask((4, 5, 6))

    def f(x, *where):
        return absmax_scale(x, 0, *where, dtype=result)

    for axis, masked in itertools.product(range(3), (False, True)):
        mask = [where] if masked else []
        each = [f(np.take(x, i, axis), *(np.take(m, i, axis) for m in mask)) for i in range(x.shape[axis])]
        found = jax.jit(jax.vmap(f, axis, axis))(x, *mask)
        for k in range(2):
            support.assert_same_bits(found[k], np.stack([e[k] for e in each], axis))
    found = jax.vmap(f, (None, 0))(x[0], where[:, 0])
    each = [f(x[0], row) for row in where[:, 0]]
    support.assert_same_bits(found[0], np.stack([e[0] for e in each]))
    text = str(jax.make_jaxpr(jax.vmap(f, 1, 1))(x))
    assert "transpose" not in text and "broadcast_in_dim" not in text


@pytest.mark.parametrize("spec", [("data", None), (None, "model"), ("data", "model")])
def test_sharded_arrays_are_not_gathered(spec):
    mesh = support.mesh_of_cpus((2, 4))
    x = jax.device_put(normal((16, 12)), jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec)))
    compiled = jax.jit(lambda x: absmax_scale(x, dtype="int8")).lower(x).compile()
    check_both(compiled(x), reference_absmax_scale(np.asarray(x), dtype="int8"))
    # Of rows that are spread over devices their maxima travel, and whether there is a NaN; of others nothing.
    assert [kind for kind, _ in support.collectives(compiled)] == ["all-reduce"] * (2 if spec[1] else 0)
    assert all(size <= 16 for _, size in support.collectives(compiled))


@pytest.mark.parametrize("result", [None, *LARGEST])
def test_a_kernel_makes_both_results(result):
    """On CUDA, whatever is here: no operation of XLA's stands before the call, or after it."""
    x = jax.ShapeDtypeStruct((64, 4096), jnp.bfloat16)
    text = jax.jit(lambda x: absmax_scale(x, dtype=result)).trace(x).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("stablehlo.") == text.count("@jax_softmax(") == 1 and "@jax_softmax(%arg0)" in text, text


@pytest.mark.parametrize("dtype,result", [(x, y) for x in support.ON_CUDA for y in LARGEST])
def test_every_schedule_has_a_plan(dtype, result):
    plans = [way.plan("absmax_scale", dtype, out_dtype=result) for way in WAYS]
    assert {plan["schedule"] for plan in plans} == SCHEDULES
    assert {kernel for plan in plans for kernel in support.kernel_names(plan)} == support.KERNEL_NAMES
    assert all(way.plan("absmax_scale", dtype, list(way.shape), out_dtype=result) for way in WAYS)


@pytest.mark.parametrize("name", DEVICES)
@pytest.mark.parametrize("dtype,result", [("bfloat16", "int8"), ("float32", "float8_e4m3fn")])
def test_short_rows_fit_shared_memory(dtype, result, name):
    """However many of them it takes so that what a block writes is whole sectors."""
    for columns in range(1, 520):
        way = support.Way((70, columns), (1,))
        plan = way.plan("absmax_scale", dtype, on=DEVICES[name], out_dtype=result)
        most = DEVICES[name]["shared_memory_per_block"]
        assert all(step["shared_bytes"] <= most for step in plan["steps"]), columns


def test_explain():
    found = explain((16384, 4096), dtype="bfloat16", op="absmax_scale_int8", device="H200")
    assert found.bytes == 16384 * 4096 * 3 and found.schedule == "registers"
    assert (
        found.launches == explain((16384, 4096), dtype="bfloat16", op="absmax_scale_bfloat16", device="H200").launches
    )


def test_names_in_programs():
    text = str(jax.make_jaxpr(lambda x: absmax_scale(x, dtype="int8"))(normal((2, 3))))
    assert re.search(r"absmax_scale\[[^]]*dtype=int8", text)


@pytest.mark.parametrize(
    "call,error,message",
    [
        (lambda x: absmax_scale("x"), TypeError, "absmax_scale: x must be an array"),
        (lambda x: absmax_scale(x, 2), ValueError, "absmax_scale: axis must be an int from -2 to 1"),
        (lambda x: absmax_scale(x, (0, 0)), ValueError, "absmax_scale: axis must not name an axis twice"),
        (lambda x: absmax_scale(x, where=x), TypeError, "absmax_scale: where must be a boolean array"),
        (lambda x: absmax_scale(x, where=np.ones(2, bool)), ValueError, "absmax_scale: where must broadcast with x"),
        (lambda x: absmax_scale(x + 0j), TypeError, "absmax_scale: x must be real, got complex64"),
        (
            lambda x: absmax_scale(x, dtype="int4"),
            TypeError,
            "absmax_scale: dtype must be one of float16, .*, got 'int4'",
        ),
        (lambda x: absmax_scale(x, dtype=int), TypeError, "absmax_scale: dtype must be one of float16, "),
        (lambda x: absmax_scale(x, dtype=3), TypeError, "absmax_scale: dtype must be one of float16, .*, got 3"),
    ],
)
def test_what_is_refused(call, error, message):
    with pytest.raises(error, match=message):
        call(normal((2, 3)))
