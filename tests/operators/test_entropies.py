"""entropy and kl_divergence: values, gradients of every order, masks, what is not finite, and what is refused."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
import support
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from oracles import Bounded, check, expected_entropy, reference_entropy, squeezed
from support import FIRST, SECOND, THIRD, normal, outliers, random_mask

import jax_softmax
from jax_softmax import entropy, kl_divergence

SHAPES = support.VIEWS_OF_ROWS
CASES = list(itertools.product([False, True], support.DTYPES, SHAPES))


def expected_divergence(x, y, axis=-1, where=None):
    """In float64, with its bound, which that of y's sum is a part of."""
    _, largest, total = reference_entropy(y, axis, where)
    with np.errstate(divide="ignore", invalid="ignore"):
        found = reference_entropy(x, axis, where, y, largest.value, np.log(total.value))[0]
        bound = np.where(np.isfinite(found.value), found.bound + total.bound / total.value, 0)
    return squeezed(Bounded(found.value, bound, found.dtype), np.shape(x), axis, where)


# ---- values


@support.sampled("masked,dtype,view", CASES, 9)
def test_entropy(masked, dtype, view):
    shape, axis = view
    where = random_mask(shape) if masked else None
    for x in (normal(shape, dtype), outliers(shape, dtype)):
        with support.precision(dtype):
            check(entropy(x, axis, where), expected_entropy(x, axis, where), f"of {dtype}{shape} along {axis}")


@support.sampled("masked,dtype,view", CASES, 9)
def test_divergence(masked, dtype, view):
    shape, axis = view
    where = random_mask(shape) if masked else None
    y = normal(shape, dtype, seed=1)
    for x in (normal(shape, dtype), outliers(shape, dtype)):
        with support.precision(dtype):
            found = kl_divergence(x, y, axis, where)
        check(found, expected_divergence(x, y, axis, where), f"of {dtype}{shape} along {axis}")


@support.sampled("offset,columns", itertools.product([1000, -1000, 1e6], [5, 32, 1000, 8191, 70_000]), 4)
def test_a_common_offset_costs_nothing(offset, columns):
    """The offset numbers are the operands; float32 leaves them their distances from one another, and so the results."""
    x = (normal((4, columns)) + np.float32(offset)).astype(np.float32)
    y = (normal((4, columns), seed=1) - np.float32(offset)).astype(np.float32)
    check(entropy(x), expected_entropy(x))
    check(kl_divergence(x, y), expected_divergence(x, y))
    g = jax.grad(lambda x: entropy(x).sum())(x)
    plain = jax.grad(lambda x: entropy(x).sum())(x - np.float32(offset))
    np.testing.assert_allclose(g, plain, rtol=1e-4, atol=1e-7)


def test_nearly_one_hot_rows():
    """Never negative, and not 0 as long as there is something left."""
    x = np.zeros((5, 300), np.float32)
    x[:, 7] = [20, 30, 50, 80, 1000]
    found = np.asarray(entropy(x))
    check(found, expected_entropy(x))
    assert np.all(found[:4] > 0) and found[4] == 0


@pytest.mark.parametrize("n", [1, 2, 300, 70_000])
def test_uniform_rows(n):
    x = np.full((3, n), 5.0, np.float32)
    np.testing.assert_allclose(entropy(x), np.log(n), rtol=1e-6)
    np.testing.assert_allclose(kl_divergence(x, 2 * x), 0, atol=1e-6)


@support.sampled("dtype,columns", itertools.product(["bfloat16", "float32"], [5, 33, 1000, 8191, 20_001]), 4)
def test_what_is_not_finite(dtype, columns):
    """A row with a NaN or +inf, or nothing but -inf, is NaN; a -inf among others is a class of probability 0."""
    x = support.nonfinite_rows(columns, dtype)
    check(entropy(x), expected_entropy(x))
    y = normal(x.shape, dtype, seed=1)
    check(kl_divergence(x, y), expected_divergence(x, y))
    with np.errstate(invalid="ignore"):
        whole = np.isnan(expected_entropy(x).value)
    found = np.asarray(kl_divergence(y, x))
    assert np.isnan(found[whole]).all()
    has_zero = np.any(np.isneginf(x.astype(np.float32)), -1) & ~whole
    assert np.all(found[has_zero] == np.inf) and np.isfinite(found[~has_zero & ~whole]).all()
    # Nothing is there in either: 0 log 0 adds 0.
    check(kl_divergence(x, x), Bounded(np.where(whole, np.nan, 0.0), np.full(len(x), 1e-5), np.dtype(np.float32)))


def test_what_is_masked_has_no_effect():
    x, y, where = normal((4, 50)), normal((4, 50), seed=1), random_mask((4, 50))
    where[1] = False
    for f in (
        lambda x, y: entropy(x, where=where),
        lambda x, y: kl_divergence(x, y, where=where),
        lambda x, y: jax.grad(lambda x: entropy(x, where=where).sum())(x),
        lambda x, y: jax.grad(lambda x, y: kl_divergence(x, y, where=where).sum(), (0, 1))(x, y),
    ):
        expected = f(np.where(where, x, 0), np.where(where, y, 0))
        assert all(np.isfinite(a).all() and np.all(np.asarray(a)[1] == 0) for a in jax.tree.leaves(expected))
        for under in (300.0, np.inf, -np.inf, np.nan):
            found = f(np.where(where, x, under), np.where(where, y, under))
            jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.parametrize("form", ["trailing", "leading", "inner", "empty", "scalar"])
def test_forms_of_masks(form):
    shape = (6, 5, 40)
    x, y, where = normal(shape), normal(shape, seed=1), support.mask_forms(shape)[form]
    full = np.broadcast_to(where, shape)
    check(entropy(x, where=where), expected_entropy(x, where=full))
    check(kl_divergence(x, y, where=where), expected_divergence(x, y, where=full))


def test_a_mask_of_rows():
    x, y, where = normal((3, 8)), normal((3, 8), seed=1), np.array([True, False, True])
    np.testing.assert_array_equal(entropy(x, where=where), np.where(where, entropy(x), 0))
    np.testing.assert_array_equal(kl_divergence(x, y, where=where), np.where(where, kl_divergence(x, y), 0))


def test_a_mask_of_rows_or_of_classes():
    """One of a shape that says which is taken as that, or as either if it is the same; of any other it is refused."""
    x, y = normal((2, 4, 6, 6)), normal((2, 4, 6, 6), seed=1)
    for axis, shape in (((0, 1), (6, 6)), ((0, 2), (4, 6)), (None, ())):
        where = random_mask(shape)
        full = np.broadcast_to(np.expand_dims(where, tuple(range(4)) if axis is None else axis), x.shape)
        check(entropy(x, axis, where), expected_entropy(x, axis, full))
        check(kl_divergence(x, y, axis, where), expected_divergence(x, y, axis, full))
    x, y = x[0, 0], y[0, 0]
    where = random_mask((6,))
    message = r"where\[:, None\] leaves out rows, where\[None, :\] elements of each row"
    for f in (entropy, functools.partial(kl_divergence, y)):
        with pytest.raises(ValueError, match=message):
            f(x, where=where)
        np.testing.assert_array_equal(f(x, where=where[:, None]), np.where(where, f(x), 0))
        np.testing.assert_allclose(f(x, where=where[None, :]), f(x, where=np.broadcast_to(where, (6, 6))))
    with pytest.raises(
        ValueError, match=r"where of shape \(4, 6\) .* where\[:, None, :\] leaves .* where\[None, :, :\]"
    ):
        entropy(normal((4, 4, 6)), 1, random_mask((4, 6)))
    with pytest.raises(ValueError, match=r"to shape \(4, 6\) of logits, or have shape \(4,\) to .*, got shape \(5,\)"):
        entropy(normal((4, 6)), where=random_mask((5,)))


def test_other_dtypes():
    assert entropy(np.arange(3)).dtype == np.float32
    np.testing.assert_allclose(entropy(np.arange(3, dtype=np.uint8)), entropy(np.arange(3.0)), rtol=1e-6)
    np.testing.assert_allclose(entropy(jnp.ones(4, jnp.float8_e4m3fn)), np.log(4), rtol=1e-6)
    x, y = normal((3, 8), "bfloat16"), normal((3, 8), seed=1)
    np.testing.assert_array_equal(kl_divergence(x, y), kl_divergence(x.astype("float32"), y))
    assert kl_divergence(x, x).dtype == np.float32
    g = jax.grad(lambda x: entropy(x).sum())(x)
    assert g.dtype == x.dtype


def test_operands_broadcast():
    x, y = normal((3, 1, 8)), normal((5, 8), seed=1)
    expected = [[float(kl_divergence(a, b)) for b in y] for a in x[:, 0]]
    np.testing.assert_allclose(kl_divergence(x, y), expected, rtol=1e-5)


def test_empty_arrays():
    for f in (entropy, lambda x: kl_divergence(x, x)):
        assert np.array_equal(f(np.zeros((3, 0), np.float32)), np.zeros(3))
        assert f(np.zeros((0, 3), np.float32)).shape == (0,)
        assert jax.grad(lambda x, f=f: f(x).sum())(np.zeros((3, 0), np.float32)).shape == (3, 0)


FLOATS = st.floats(-(2.0**100), 2.0**100, width=32) | st.floats(-20, 20, width=32) | st.just(-np.inf)
SIZES = arrays.array_shapes(min_dims=2, max_dims=3, max_side=12)


@given(arrays.arrays(np.float32, SIZES, elements=FLOATS), st.data())
def test_any_numbers(x, data):
    axis = data.draw(st.integers(-x.ndim, x.ndim - 1))
    where = data.draw(st.none() | arrays.arrays(bool, x.shape))
    check(entropy(x, axis, where), expected_entropy(x, axis, where))
    found = np.asarray(kl_divergence(x, x, axis, where))
    np.testing.assert_array_equal(np.isnan(found), np.isnan(expected_entropy(x, axis, where).value))


# ---- derivatives


def entropy_in_numpy(x, where=None):
    kept = jnp.ones(x.shape, bool) if where is None else where
    log_p = jax.nn.log_softmax(jnp.where(kept, x, -1e300))
    return -jnp.sum(jnp.where(kept, jnp.exp(log_p) * log_p, 0), -1)


def divergence_in_numpy(x, y, where=None):
    kept = jnp.ones(x.shape, bool) if where is None else where
    log_p, log_q = (jax.nn.log_softmax(jnp.where(kept, a, -1e300)) for a in (x, y))
    return jnp.sum(jnp.where(kept, jnp.exp(log_p) * (log_p - log_q), 0), -1)


ORDERS = (*FIRST, *SECOND, lambda f: jax.jacfwd(jax.jacfwd(f)), *THIRD)


@support.sampled("of,masked", itertools.product(["entropy", "p", "q", "both"], [False, True]), 7)
def test_derivatives(of, masked):
    """Of every order and in both modes, against jax.numpy in float64."""
    with jax.enable_x64(True):
        x, y = jnp.asarray(normal((3, 5), "float64")), jnp.asarray(normal((3, 5), "float64", seed=1))
        where = jnp.asarray(random_mask((3, 5), 3)) if masked else None
        ours, theirs, at = {
            "entropy": (lambda x: entropy(x, where=where), lambda x: entropy_in_numpy(x, where), x),
            "p": (lambda x: kl_divergence(x, y, where=where), lambda x: divergence_in_numpy(x, y, where), x),
            "q": (lambda y: kl_divergence(x, y, where=where), lambda y: divergence_in_numpy(x, y, where), y),
            "both": (
                lambda x: kl_divergence(x, x**2, where=where),
                lambda x: divergence_in_numpy(x, x**2, where),
                x / 3,
            ),
        }[of]
        support.same_derivatives(ours, theirs, ORDERS, [at], rtol=1e-11, atol=1e-12)


@support.sampled("dtype,view", itertools.product(["float16", "bfloat16", "float32"], SHAPES[:6]), 5)
def test_gradients(dtype, view):
    """-p (log p + entropy); p (log p - log q - divergence) and q - p: rounded once, to the logits' dtype."""
    shape, axis = view
    x, y = normal(shape, dtype), normal(shape, dtype, seed=1)
    wide = [np.asarray(a, np.float64) for a in (x, y)]
    log_p, log_q = (a - oracles.reference_logsumexp(a, axis, keepdims=True)[0].value for a in wide)
    p, q = np.exp(log_p), np.exp(log_q)
    total = np.sum(p * log_p, axis, keepdims=True)
    divergence = np.sum(p * (log_p - log_q), axis, keepdims=True)

    def gradients(x, y):
        of_divergence = jax.grad(lambda x, y: kl_divergence(x, y, axis).sum(), (0, 1))
        return jax.grad(lambda x: entropy(x, axis).sum())(x), *of_divergence(x, y)

    found = jax.jit(gradients)(x, y)
    expected = [-p * (log_p - total), p * (log_p - log_q - divergence), q - p]
    # What each is a difference of, rounded in float32.
    sizes = [p * (np.abs(log_p) - total), p * (np.abs(log_p) + np.abs(log_q) + divergence), p + q]
    rounding = 0.51 * float(jnp.finfo(dtype).eps)
    tiny = max(float(jnp.finfo(dtype).smallest_subnormal), 1e-37)
    for a, b, size in zip(found, expected, sizes, strict=True):
        assert a.dtype == np.dtype(dtype)
        error = np.abs(np.asarray(a, np.float64) - b)
        depth = 1 + np.abs(log_p) + np.abs(log_q)
        assert np.all(error <= rounding * np.abs(b) + 8 * np.finfo(np.float32).eps * depth * size + tiny)


def test_gradients_of_classes_that_are_not_there():
    """Of a logit of -inf the gradient is 0, and it changes none of the others'."""
    with jax.enable_x64(True):
        x, y = normal((4, 6), "float64"), normal((4, 6), "float64", seed=1)
        x[:, 2] = y[:, 2] = -np.inf
        x[1, 4] = -np.inf
        rest = [0, 1, 3, 5]

        def both(x, y):
            return (entropy(x) + kl_divergence(x, y)).sum()

        for of in (jax.grad(both, (0, 1)), lambda x, y: (jax.grad(lambda x: jax.grad(both)(x, y)[:, 0].sum())(x),)):
            found, (alone, *_) = support.in_haste(of, x, y), support.in_haste(of, x[1:2], y[1:2])
            for i, a in enumerate(found):
                assert np.isfinite(a).all() and np.all(a[:, 2] == 0) and (i == 1 or a[1, 4] == 0)
            np.testing.assert_allclose(found[0][1, rest], alone[0, rest], rtol=1e-12)


def test_what_is_kept_for_the_backward_pass():
    """The logits and what rows have, but no exponentials."""
    x, y = jnp.ones((64, 4096), jnp.bfloat16), jnp.zeros((64, 4096), jnp.bfloat16)
    for f, logits in ((entropy, (x,)), (kl_divergence, (x, y))):
        assert support.kept_bytes(f, *logits) <= sum(a.nbytes for a in logits) + 8 * 64 * 4


def test_memory_that_a_divergence_takes(default_flags):
    """Besides its operands and results no array of their size, with gradients two; not p, log p and log q."""
    x = jax.ShapeDtypeStruct((512, 2048), jnp.float32)
    gradients = jax.grad(lambda x, y: kl_divergence(x, y).sum(), (0, 1))
    for f, arrays_of_x in ((kl_divergence, 0), (gradients, 2)):
        memory = jax.jit(f).lower(x, x).compile().memory_analysis()
        assert memory.temp_size_in_bytes <= (0.1 + arrays_of_x) * 4 * x.size


def test_only_what_is_asked_for_is_differentiated():
    """Of the divergence from a fixed p, as in distillation, nothing is multiplied by p's tangent."""
    x, y = normal((2, 3)), normal((2, 3), seed=1)
    one = jax.make_jaxpr(lambda y: jax.jvp(lambda y: kl_divergence(x, y), (y,), (y,))[1])(y)
    two = jax.make_jaxpr(lambda x, y: jax.jvp(kl_divergence, (x, y), (x, y))[1])(x, y)
    assert len(str(one)) < len(str(two))


# ---- transformations


def test_vmap():
    x, y = normal((3, 4, 6)), normal((3, 4, 6), seed=1)
    each = np.stack([entropy(a) for a in x])
    np.testing.assert_allclose(jax.vmap(entropy)(x), each, rtol=1e-6)
    np.testing.assert_allclose(jax.vmap(entropy, 1, 1)(x), each, rtol=1e-6)
    np.testing.assert_allclose(jax.vmap(functools.partial(entropy, axis=0), 2)(np.moveaxis(x, 2, 0)).shape, (4, 3))
    for in_axes, operands in ((0, (x, y)), ((0, None), (x, y[0])), ((None, 0), (x[0], y)), ((0, 2), (x, y.T))):
        if in_axes == (0, 2):
            operands = x, np.moveaxis(y, 0, 2)
        pairs = [(operands[0] if operands[0].ndim == 2 else operands[0][i], i) for i in range(3)]
        expected = np.stack(
            [kl_divergence(a, y[i] if in_axes in (0, (0, 2), (None, 0)) else operands[1]) for a, i in pairs]
        )
        np.testing.assert_allclose(jax.vmap(kl_divergence, in_axes)(*operands), expected, rtol=1e-5, atol=1e-6)
    gradients = np.stack([jax.grad(lambda x, i=i: kl_divergence(x, y[i]).sum())(x[i]) for i in range(3)])
    found = jax.vmap(jax.grad(lambda x, y: kl_divergence(x, y).sum()))(x, y)
    np.testing.assert_allclose(found, gradients, rtol=1e-5, atol=1e-6)
    where = random_mask((3, 6))
    found = jax.vmap(lambda x, where: entropy(x, where=where[None]))(x, where)
    np.testing.assert_allclose(found, [entropy(a, where=w[None]) for a, w in zip(x, where, strict=True)], rtol=1e-6)


def test_in_programs():
    x, y = normal((4, 6)), normal((4, 6), seed=1)
    np.testing.assert_allclose(jax.jit(entropy)(x), entropy(x), rtol=1e-6)
    np.testing.assert_allclose(jax.lax.map(entropy, x[:, None])[:, 0], entropy(x), rtol=1e-6)
    f = jax.checkpoint(lambda x: kl_divergence(x, y).sum())
    np.testing.assert_allclose(jax.grad(f)(x), jax.grad(lambda x: kl_divergence(x, y).sum())(x), rtol=1e-5, atol=1e-7)
    assert "entropy" in str(jax.make_jaxpr(entropy)(x)) and "kl_divergence" in str(jax.make_jaxpr(kl_divergence)(x, y))


P = jax.sharding.PartitionSpec


def mesh():
    return support.mesh_of_cpus((2, 4))


def test_over_a_mesh_axis():
    """Inside shard_map, each device with a part of every row; the third row is masked altogether."""
    x, y, where = normal((4, 12)), normal((4, 12), seed=1), random_mask((4, 12))
    where[2] = False
    spec = P("data", "model")

    def ours(x, y, where):
        options = {"where": where, "axis_name": "model"}

        def total(x, y):
            return (entropy(x, **options) + kl_divergence(x, y, **options)).sum()

        return entropy(x, **options), kl_divergence(x, y, **options), jax.grad(total, (0, 1))(x, y)

    sharded = jax.shard_map(ours, mesh=mesh(), in_specs=spec, out_specs=(P("data"), P("data"), spec))
    with support.on_a_cpu():
        found = jax.jit(sharded)(x, y, where)
    check(found[0], expected_entropy(x, where=where))
    check(found[1], expected_divergence(x, y, where=where))
    expected = jax.grad(lambda x, y: (entropy(x, where=where) + kl_divergence(x, y, where=where)).sum(), (0, 1))(x, y)
    for a, b in zip(found[2], expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("spec", [P("data"), P(None, "model"), P("data", "model")], ids=str)
def test_sharded_logits(spec):
    x, y = normal((8, 12)), normal((8, 12), seed=1)
    with support.on_a_cpu():
        expected = entropy(x), kl_divergence(x, y)
    sharding = jax.sharding.NamedSharding(mesh(), spec)
    compiled = jax.jit(lambda x, y: (entropy(x), kl_divergence(x, y))).lower(
        *(jax.device_put(a, sharding) for a in (x, y))
    )
    compiled = compiled.compile()
    travels = support.collectives(compiled)
    assert {kind for kind, _ in travels} == ({"all-reduce"} if len(spec) > 1 else set())
    assert all(size <= 3 * 8 for _, size in travels)  # numbers of rows, of which XLA may send several together
    found = compiled(*(jax.device_put(a, sharding) for a in (x, y)))
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


# ---- what is refused


@pytest.mark.parametrize(
    "call,error,message",
    [
        (lambda x: entropy("x"), TypeError, "entropy: logits must be an array"),
        (lambda x: entropy(x, 2), ValueError, "entropy: axis must be an int from -2 to 1"),
        (lambda x: entropy(x + 0j), TypeError, "entropy: logits must be real"),
        (lambda x: entropy(x, where=x), TypeError, "entropy: where must be a boolean array"),
        (lambda x: entropy(x, where=x[None] > 0), ValueError, "entropy: where must broadcast to shape"),
        (lambda x: entropy(x, axis_name="i"), ValueError, "entropy: axis_name must be a mesh axis"),
        (lambda x: kl_divergence("x", x), TypeError, "kl_divergence: logits_p must be an array"),
        (lambda x: kl_divergence(x, "x"), TypeError, "kl_divergence: logits_q must be an array"),
        (lambda x: kl_divergence(x, x + 0j), TypeError, "kl_divergence: logits_q must be real"),
        (
            lambda x: kl_divergence(x, x[:, :2]),
            ValueError,
            r"logits_p and logits_q must broadcast together, got shapes \(2, 3\) and \(2, 2\)",
        ),
        (lambda x: kl_divergence(x, x, (0, 0)), ValueError, "axis must not name an axis twice"),
    ],
)
def test_what_is_refused(call, error, message):
    with pytest.raises(error, match=message):
        call(normal((2, 3)))


@pytest.mark.parametrize("op", ["entropy", "kl_divergence"])
def test_explained(op):
    text = str(jax_softmax.explain((65536, 4096), dtype="bfloat16", op=op, device="H200"))
    assert f"{op} of bfloat16 (65536, 4096)" in text and "schedule  registers" in text
    assert ("1 read" if op == "entropy" else "2 read") in text
