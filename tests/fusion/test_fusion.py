"""`fuse`: the same results with fewer arrays in memory; and what it does not fold.

A CPU has the custom calls done by the host (see emulated.py).
"""

import contextlib
import functools

import emulated
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
import support
from fusion_cases import CASES, WITH_CONSTANTS
from fusion_support import BF16, F32, SHAPE, Case, X, assert_same, compiled, gradients_of, loss_at_labels, unfused, x_of
from hypothesis import given, settings
from hypothesis import strategies as st

import jax_softmax
from jax_softmax import fuse

pytestmark = pytest.mark.usefixtures("default_flags")


@functools.cache
def lower_fifth(fifth):
    """All expressions are then compiled at once. What cannot be lowered says so in its own test."""
    for case in list(CASES.values())[fifth::5]:
        with contextlib.suppress(Exception):
            case.lowered  # noqa: B018


@emulated.compiler_is_needed
@support.sampled("name,fifth", [(name, i % 5) for i, name in enumerate(CASES)], 5)
def test_values(name, fifth):
    lower_fifth(fifth)
    CASES[name].check()


@emulated.compiler_is_needed
@pytest.mark.parametrize("name", WITH_CONSTANTS)
def test_constants_that_stand_in_equations(name):
    """As JAX writes arrays with this setting, which it says will be the only way."""
    setting = "jax_use_simplified_jaxpr_constants"
    if not hasattr(jax.config, setting):
        pytest.skip(f"this JAX has no {setting}")
    jax.config.update(setting, True)
    try:
        WITH_CONSTANTS[name].check()
    finally:
        jax.config.update(setting, False)


# Steps of chains, of values and a side operand that broadcasts.
STEPS_OF_CHAINS = [
    lambda x, b: x * b,
    lambda x, b: x - b,
    lambda x, b: x * 0.5 + 0.1,
    lambda x, b: x / 3,
    lambda x, b: jnp.tanh(x),
    lambda x, b: jnp.exp(-jnp.abs(x)),
    lambda x, b: jnp.log1p(jnp.square(x)),
    lambda x, b: jnp.sin(x),
    lambda x, b: jax.nn.relu(x) - 0.1 * x,
    lambda x, b: jnp.maximum(x, b),
    lambda x, b: jnp.clip(x, -1, 1),
    lambda x, b: jnp.where(x > b, x, b),
    lambda x, b: jnp.where(jnp.arange(x.shape[-1]) % 3 == 0, x, -x),
    lambda x, b: x.astype(F32),
    lambda x, b: x.astype(BF16),
    lambda x, b: x.reshape(-1).reshape(x.shape) + 0.25,
    lambda x, b: jnp.swapaxes(jnp.swapaxes(x, 0, -1) * 0.5, 0, -1),
]


@st.composite
def chains(draw):
    shape = draw(st.sampled_from([(4, 6, 16), (5, 12), (2, 3, 4, 6), (7,)]))
    axis = draw(st.integers(-len(shape), len(shape) - 1))
    side = tuple(n if draw(st.booleans()) else 1 for n in shape)[draw(st.integers(0, len(shape) - 1)) :]
    dtype, name = draw(st.sampled_from(["float32", "bfloat16"])), draw(st.sampled_from(support.NAMES))
    steps = st.lists(st.sampled_from(STEPS_OF_CHAINS), max_size=4)
    before, after = draw(steps), draw(steps)

    def f(x, b):
        for step in before:
            x = step(x, b)
        x = getattr(jax.nn, name)(x, axis)
        for step in after:
            x = step(x, b)
        return x

    operands = x_of(dtype, shape, scale=1), x_of(dtype, side, seed=1, scale=1)
    return Case(gradients_of(f) if draw(st.booleans()) else f, *operands)


@emulated.compiler_is_needed
@settings(max_examples=settings.default.max_examples // 8)
@given(st.lists(chains(), min_size=6, max_size=6))
def test_chains(cases):
    """Roundings to 16 bits may fall the other way, and count as much as what they are of."""
    for case in cases:
        case.lowered  # noqa: B018
    for case in cases:
        found, expected = compiled(case.lowered[0])(*case.args), unfused(case.f, *case.args)
        assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
        found, expected = np.asarray(found, np.float64), np.asarray(expected, np.float64)
        eps = 2.0**-5 if "bf16" in str(jax.make_jaxpr(case.f)(*case.args)) else 2.0**-16
        assert np.abs(found - expected).max() <= eps * max(1, np.abs(expected).max())


NAMES_THAT_COMPILE = (
    "before: many selects",
    "before: powers",
    "before: integers that wrap",
    "before: bounds",
    "before: roots",
    "bfloat16: own roundings",
    "after: two chains",
    "soft cap's gradient",
    "loss and gradient",
    "where, transposed",
    "operands of 8 bits",
    "before: reshaped",
)


@pytest.mark.parametrize("name", NAMES_THAT_COMPILE)
def test_compiles(jit, name):
    for call in CASES[name].lowered[1]:
        for step in call.spec.plan(**support.H200)["steps"]:
            assert jit.binary(step["code"])[:4] == b"\x7fELF"


def test_no_product_is_merged_with_a_sum(jit):
    """x * w less the largest x * w of a row is 0 at the largest, where kernels are compiled so."""
    code = 'extern "C" __global__ void kernel(float* x) {{ x[0] = {}; }}'
    found = jit.binary(code.format("x[0] * x[1] - x[2]"))
    assert found == jit.binary(code.format("__fsub_rn(__fmul_rn(x[0], x[1]), x[2])"))
    assert found != jit.binary(code.format("__fmaf_rn(x[0], x[1], -x[2])"))


# ---- What is not folded


def left(f, *args):
    """Fused for a GPU, a program without custom calls, whose results are f's."""
    Case(f, *args, calls=0, folded=False).check()


class TestNotFolded:
    pytestmark = emulated.compiler_is_needed

    def test_numbers_of_64_bits(self):
        with jax.enable_x64(True):
            left(lambda x: jax.nn.softmax(x * 2) + 1, x_of().astype(np.float64))

    def test_integers_of_64_bits(self):
        with jax.enable_x64(True):
            Case(lambda x, k: jax.nn.softmax(x + k.astype(F32)), x_of(), np.arange(16) << 40, folded=False).check()

    def test_unknown_primitives(self):
        case = Case(lambda x: jax.nn.softmax(jnp.cumsum(x, -1) * 2), x_of(), folded=False)
        case.check()
        (line,) = fuse(case.f).explain(*case.args)
        assert line.folded_before == ("mul",)

    def test_rows_that_devices_share(self):
        mesh = support.mesh_of_cpus((1, 8))
        P = jax.sharding.PartitionSpec
        f = lambda x: jax_softmax.softmax(x * 2, axis_name="model")  # noqa: E731
        sharded = jax.shard_map(f, mesh=mesh, in_specs=P(None, "model"), out_specs=P(None, "model"))
        left(sharded, x_of(shape=(4, 16)))

    def test_rows_of_each_device_beside_those_that_devices_share(self):
        mesh = support.mesh_of_cpus((1, 8))
        P = jax.sharding.PartitionSpec

        def f(x, k):
            loss = jax_softmax.softmax_cross_entropy_with_integer_labels(x, k, axis_name="model")
            return loss, jax_softmax.logsumexp(x, -1)[:, None]

        sharded = jax.shard_map(f, mesh=mesh, in_specs=(P(None, "model"), P()), out_specs=(P(), P(None, "model")))
        Case(sharded, x_of(shape=(4, 16)), np.arange(4)).check()

    @pytest.mark.parametrize("outside", [True, False])
    def test_folds_in_shard_map(self, outside):
        mesh = support.mesh_of_cpus((2, 4))
        P = jax.sharding.PartitionSpec
        mapped = lambda f: jax.shard_map(f, mesh=mesh, in_specs=P("data"), out_specs=P("data"))  # noqa: E731
        f = lambda x: jax.value_and_grad(fuse(loss_at_labels))(x)[1]  # noqa: E731
        g = (lambda x: fuse(mapped(jax.grad(loss_at_labels)))(x)) if outside else mapped(f)
        Case(g, x_of("bfloat16"), calls=1 if outside else 2, folded=False, roundings=64).check()

    def test_no_elements(self):
        left(lambda x: jax.nn.softmax(x * 2, 0) + 1, x_of(shape=(3, 0)))

    def test_no_operator(self):
        left(lambda x: jnp.tanh(x) * 2, x_of())

    def test_effects_keep_their_order_and_count(self, capfd):
        def f(x):
            jax.debug.print("first {}", x[0, 0, 0] * 0 + 1, ordered=True)
            y = jax.nn.softmax(x * 2)
            jax.debug.print("second {}", jnp.round(jnp.sum(y)), ordered=True)
            return y * 2

        case = Case(f, x_of())
        with emulated.kernels() as made:
            lowered = jax.jit(fuse(f)).lower(*case.args)
        capfd.readouterr()
        compiled(lowered)(*case.args)
        jax.effects_barrier()
        assert capfd.readouterr().out.split("\n")[:-1] == ["first 1.0", "second 24.0"]
        assert len(made) == 1

    def test_effects_between_an_operator_and_what_reads_it(self):
        """A number that a callback returns later may not be a part of the kernel before."""
        seen = []

        def f(x):
            y = jax.nn.softmax(x * 2)
            total = jnp.sum(y) * 0 + y[0, 0, 0]
            jax.experimental.io_callback(lambda n: seen.append(float(n)), None, total, ordered=True)
            shape = jax.ShapeDtypeStruct(SHAPE, F32)
            z = jax.experimental.io_callback(lambda: np.full(SHAPE, len(seen), np.float32), shape, ordered=True)
            return y * z, jax.nn.softmax(x * 2 + z)

        lowered = jax.jit(fuse(f)).lower(x_of())
        found = lowered.compile()(x_of())
        jax.effects_barrier()
        assert len(seen) == 1
        with emulated.kernels() as made:
            lowered = jax.jit(fuse(f)).lower(x_of())
        seen.clear()
        assert_same(compiled(lowered)(x_of()), found, 16)
        assert len(made) == 2

    def test_long_chains_that_meet_take_no_longer(self):
        def f(x, b):
            for _ in range(60):
                x, b = x + b, b - x
            y = jax.nn.softmax(x)
            for _ in range(60):
                y = y + y * b
            return y

        assert len(fuse(f).explain(X, X)) == 1

    def test_symbolic_shapes(self):
        (n,) = jax.export.symbolic_shape("n")
        f = fuse(lambda x: jax.nn.softmax(x * 2 + 1))
        with emulated.kernels() as made:
            exported = jax.export.export(
                jax.jit(f), platforms=["cpu", "cuda"], disabled_checks=jax_softmax.export_checks()
            )(jax.ShapeDtypeStruct((n, 16), F32))
        assert made == []
        x = x_of(shape=(3, 16))
        assert_same(exported.call(x), jax.nn.softmax(x * 2 + 1), 16)
