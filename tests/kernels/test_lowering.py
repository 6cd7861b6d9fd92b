"""What a program lowers to: one custom call per operator on CPU and CUDA, on a machine that may have neither GPU nor
driver, and never a transposed copy, whatever the axes and wherever a batch is mapped; plain XLA elsewhere."""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import DEVICES, OPERATORS, every_name, one_name, plan, sampled

import jax_softmax
from jax_softmax.runtime import cuda, judge, kernel_spec

SHAPE = (2, 3, 4, 40)
AXES = (-1, 0, 1, 2, (0, 1), (2, 3), (0, 2), (1, 3), (3, 0), None)


@pytest.fixture(params=["cpu", "cuda"])
def platform(request):
    return request.param


def spec(shape, dtype="float32"):
    return jax.ShapeDtypeStruct(tuple(int(n) for n in shape), dtype)


def lower(f, *specs, platforms, disabled=None):
    disabled = jax_softmax.export_checks() if disabled is None else disabled
    return jax.export.export(jax.jit(f), platforms=platforms, disabled_checks=disabled)(*specs).mlir_module()


def assert_calls(text, count, transposes=False):
    assert text.count("@jax_softmax(") == count, text
    assert text.count("stablehlo.custom_call") == count, text  # and no other library's
    if not transposes:
        assert "stablehlo.transpose" not in text, text


def pullback(name, axis, x, g, where=None):
    return jax.vjp(lambda x: OPERATORS[name](x, axis, where), x)[1](g)[0]


@every_name
@pytest.mark.parametrize("axis", AXES, ids=str)
def test_forward(platform, axis, name):
    assert_calls(lower(functools.partial(OPERATORS[name], axis=axis), spec(SHAPE), platforms=[platform]), 1)


@every_name
@pytest.mark.parametrize("axis", AXES, ids=str)
def test_gradient(platform, axis, name):
    f = functools.partial(pullback, name, axis)
    assert_calls(lower(f, spec(SHAPE), spec(SHAPE), platforms=[platform]), 2)
    grad = jax.grad(lambda x: jnp.sum(OPERATORS[name](x, axis) ** 2))
    assert_calls(lower(grad, spec(SHAPE), platforms=[platform]), 2)


@every_name
def test_masks(platform, name):
    for axis, mask_shape in itertools.product((-1, 0, (0, 2), None), (SHAPE, SHAPE[-1:], (4, 1), (2, 1, 1, 1), ())):
        specs = spec(SHAPE), spec(mask_shape, "bool")
        assert_calls(lower(lambda x, m, a=axis: OPERATORS[name](x, a, m), *specs, platforms=[platform]), 1)
        backward = functools.partial(pullback, name, axis)
        assert_calls(lower(lambda x, m, g, f=backward: f(x, g, m), *specs, spec(SHAPE), platforms=[platform]), 2)


@every_name
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_dtypes(platform, dtype, name):
    with jax.enable_x64(dtype == "float64"):
        text = lower(functools.partial(pullback, name, -1), *[spec(SHAPE, dtype)] * 2, platforms=[platform])
    assert_calls(text, 0 if (platform, dtype) == ("cuda", "float64") else 2)
    assert "stablehlo.convert" not in text, text


@one_name
@pytest.mark.parametrize("batch", [0, 1, 2, 3])
@pytest.mark.parametrize("axis", [-1, 0, 1, (0, 2), None], ids=str)
def test_vmap(platform, axis, batch, name):
    f = jax.vmap(functools.partial(OPERATORS[name], axis=axis), batch, batch)
    assert_calls(lower(f, spec(SHAPE), platforms=[platform]), 1)


@one_name
@pytest.mark.parametrize("x_batch,g_batch", [(b, c) for b in (0, 1, 3) for c in (b, None)] + [(None, 0), (None, 2)])
def test_vmap_of_the_gradient(platform, x_batch, g_batch, name):
    out = g_batch if x_batch is None else x_batch
    for axis in (-1, 0, (0, 2)):
        f = jax.vmap(functools.partial(pullback, name, axis), (x_batch, g_batch), out)
        specs = [spec(SHAPE) if b is not None else spec(np.delete(SHAPE, out)) for b in (x_batch, g_batch)]
        assert_calls(lower(f, *specs, platforms=[platform]), 2)


@one_name
@pytest.mark.parametrize("x_batch,mask_batch", [(b, c) for b in (0, 1, 3) for c in (b, None)] + [(None, 0), (None, 2)])
def test_vmap_with_a_mask(platform, x_batch, mask_batch, name):
    out = mask_batch if x_batch is None else x_batch
    for axis in (-1, 0, (0, 2)):
        f = jax.vmap(lambda x, where, axis=axis: OPERATORS[name](x, axis, where), (x_batch, mask_batch), out)
        shapes = [SHAPE if b is not None else np.delete(SHAPE, out) for b in (x_batch, mask_batch)]
        text = lower(f, spec(shapes[0]), spec(shapes[1], "bool"), platforms=[platform])
        assert_calls(text, 1)


@one_name
@sampled("inner,outer", itertools.product((0, 1, 2), (0, 1, 3)), 2)
def test_vmap_of_vmap(platform, inner, outer, name):
    for axis in (0, -1, (0, 1)):
        forward = functools.partial(OPERATORS[name], axis=axis)
        twice = jax.vmap(jax.vmap(forward, inner, inner), outer, outer)
        assert_calls(lower(twice, spec(SHAPE), platforms=[platform]), 1)
        backward = functools.partial(pullback, name, axis)
        twice = jax.vmap(jax.vmap(backward, (inner, inner), inner), (outer, outer), outer)
        assert_calls(lower(twice, *[spec(SHAPE)] * 2, platforms=[platform]), 2)


@every_name
def test_vmap_over_different_axes_moves_one_operand_at_most(platform, name):
    f = jax.vmap(functools.partial(pullback, name, -1), (0, 2))
    text = lower(f, spec((2, 3, 40)), spec((3, 40, 2)), platforms=[platform])
    assert_calls(text, 2, transposes=True)
    assert text.count("stablehlo.transpose") <= 1, text


@one_name
def test_hessian(platform, name):
    """The linear map is a kernel in every order, beside the elementwise terms of its own derivative."""
    text = lower(jax.hessian(lambda x: jnp.sum(OPERATORS[name](x) ** 2)), spec((6,)), platforms=[platform])
    assert text.count("@jax_softmax(") >= 3, text
    assert "exponential" not in text or name == "log_softmax", text


@one_name
def test_jit_inside_jit_and_scan(platform, name):
    def f(x):
        return jax.lax.scan(lambda c, a: (OPERATORS[name](c + a), None), x[0], x)[0]

    assert_calls(lower(f, spec((3, 4, 5)), platforms=[platform]), 1)


@every_name
def test_cuda_uses_plain_xla_where_that_is_as_fast(name):
    """And where no schedule covers a view."""
    for shape, axes in (((1000, 300, 4, 3), (1, 3)), ((2,) * 13, -1), ((2**31, 2**31), None)):
        text = lower(functools.partial(OPERATORS[name], axis=axes), spec(shape), platforms=["cuda"], disabled=())
        assert "custom_call" not in text and "stablehlo.exponential" in text, text


@every_name
def test_other_platforms_use_plain_xla(name):
    """Without any check disabled: nothing but portable operations."""
    for f, specs in (
        (OPERATORS[name], [spec(SHAPE)]),
        (functools.partial(pullback, name, 0), [spec(SHAPE)] * 2),
        (lambda x, m: OPERATORS[name](x, -1, m), [spec(SHAPE), spec(SHAPE, "bool")]),
        (jax.vmap(OPERATORS[name]), [spec(SHAPE, "bfloat16")]),
    ):
        text = lower(f, *specs, platforms=["tpu"], disabled=())
        assert "custom_call" not in text, text
        assert "stablehlo.exponential" in text, text


def test_the_gradient_of_losses():
    """On CUDA by a kernel, which computes the normalizer anew; on a CPU by one that is given what the first made."""

    def gradient(x, labels):
        return jax.grad(lambda x: jax_softmax.softmax_cross_entropy_with_integer_labels(x, labels).sum())(x)

    for platform in ("cuda", "cpu"):
        text = lower(gradient, spec((64, 32000)), spec((64,), "int32"), platforms=[platform])
        assert text.count('op = "cross_entropy_gradient"') == 1, text


@every_name
def test_one_program_for_several_platforms(name):
    text = lower(OPERATORS[name], spec(SHAPE), platforms=["cpu", "tpu"])
    assert "@jax_softmax(" in text and "stablehlo.exponential" in text, text


@every_name
def test_what_runs_here_is_the_kernel(name):
    """The compiled program of this machine's own backend still has the call, and no copy of its operand beside it."""
    if jax.default_backend() == "gpu" and (reason := cuda.availability()):
        pytest.skip(reason)
    for axis in (0, 1, 2):
        text = jax.jit(OPERATORS[name], static_argnums=1).lower(spec((8, 16, 32)), axis).compile().as_text()
        assert text.count('custom_call_target="jax_softmax"') == 1, text
        assert "transpose(" not in text and "copy(" not in text, text


# Views whose blocks exchange states through memory on some devices, of which masks need more or less.
EXCHANGING = [
    ((33, 300_001), (1,), None),
    ((2, 3000, 96), (1,), None),
    ((2, 4000, 4001), (1, 2), None),
    ((2, 4000, 4001), (1, 2), ()),
    ((2, 4000, 4001), (1, 2), (4000, 1)),
    ((2, 400, 4001, 3), (1, 2), None),
    ((2, 400, 4001, 3), (1, 2), (400, 1, 1)),
]
OPERANDS_OF = {
    "softmax": (1, jax_softmax.softmax, None),
    "softmax_linear": (2, functools.partial(pullback, "softmax"), None),
    "entropy": (1, jax_softmax.entropy, None),
    "absmax_scale": (1, functools.partial(jax_softmax.absmax_scale, dtype="int8"), "int8"),
}


@pytest.mark.parametrize("op", OPERANDS_OF)
@pytest.mark.parametrize("shape,axes,mask_shape", EXCHANGING)
def test_cuda_has_memory_to_exchange_states(shape, axes, mask_shape, op):
    """A last result of as many bytes as the plans of this very call may need, or none."""
    inputs, f, result = OPERANDS_OF[op]
    specs = inputs * [spec(shape)] + ([] if mask_shape is None else [spec(mask_shape, "bool")])

    def call(*operands):
        where = None if mask_shape is None else operands[-1]
        if op == "softmax_linear":
            return f(axes, *operands[:2], where)
        return f(operands[0], axes, where=where)

    text = lower(call, *specs, platforms=["cuda"])
    call = kernel_spec.described(op, shape, axes, "float32", mask_shape, result)
    expected = 0 if judge.reason_on_all_gpus(call) else judge.scratch_bytes(call)
    assert re.findall(rf"@jax_softmax\(.*op = \"{op}\".*tensor<(\d+)xui8>", text) == [str(expected)] * bool(expected)


@pytest.mark.parametrize(
    "shape,axes,calls",
    [
        ("b, 1000", -1, 1),
        ("b, 4, s, 1000", -1, 1),
        ("4, b, 37, 24", (2, 3), 1),
        ("b, 8, 64", 1, 1),
        # Blocks exchange states through memory, whatever the number of rows or where there are some.
        ("b, 300001", -1, 0),
        ("b, 50000", -1, 0),
        ("b, 3000, 96", 1, 0),
        # The rows themselves are not known.
        ("4, n", -1, 0),
        ("b, n, 64", 1, 0),
        ("4, 8, n", 1, 0),
    ],
)
@pytest.mark.parametrize("mask", ["none", "full", "columns"])
def test_symbolic_shapes_have_calls_that_need_no_memory(mask, shape, axes, calls):
    shape = jax.export.symbolic_shape(shape)
    specs = [jax.ShapeDtypeStruct(shape, "float32")]
    if mask != "none":
        specs.append(jax.ShapeDtypeStruct(shape if mask == "full" else (1, *shape[1:]), "bool"))
    text = lower(lambda x, *m: OPERATORS["softmax"](x, axes, *m), *specs, platforms=["cuda"])
    assert text.count("@jax_softmax(") == calls, text
    assert "xui8>" not in text, text
    assert calls or "stablehlo.exponential" in text, text


@pytest.mark.parametrize("op", ["softmax", "softmax_linear", "entropy"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_what_needs_no_memory_for_some_numbers_of_rows_needs_none_for_any(dtype, op):
    """Those that stand for all numbers of rows, against others; on the GPUs of the tests."""
    for columns in (1, 7, 1000, 8192, 20_000, 41_325, 60_001, 100_000, 151_936):
        known = judge.known_shapes((jax.export.symbolic_shape("b")[0], columns), (1,))
        calls = [kernel_spec.described(op, shape, (1,), dtype) for shape in known]
        if any(judge.reason_on_all_gpus(call) or judge.scratch_bytes(call) for call in calls):
            continue
        for on, rows in itertools.product(DEVICES.values(), (3, 5, 13, 37, 99, 250, 600, 1025, 5000, 3 << 20)):
            assert plan((rows, columns), (1,), op, dtype, on=on)["scratch_bytes"] == 0, (columns, rows)
