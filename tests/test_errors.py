"""A wrong argument is refused with its name, what was given and what is allowed, eagerly and under jit alike."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_softmax

FUNCTIONS = {name: getattr(jax_softmax, name) for name in ("softmax", "log_softmax", "softmax_vjp", "log_softmax_vjp")}
X = np.zeros((3, 4), np.float32)

every_function = pytest.mark.parametrize("f", FUNCTIONS.values(), ids=FUNCTIONS)


def assert_refused(kind, words, f, *args, **kwargs):
    """`words`: the argument's name, then what else the message has to mention; "|" between alternatives."""
    with pytest.raises(kind) as caught:
        f(*args, **kwargs)
    message = str(caught.value)
    assert re.search(rf"\b({words[0]})\b", message), f"nothing of {words[0]!r} in {message!r}"
    for alternatives in words[1:]:
        assert any(word in message for word in alternatives.split("|")), f"nothing of {alternatives!r} in {message!r}"
    assert len(message) < 300, message


@every_function
@pytest.mark.parametrize(
    "axis,given", [(1.0, "1.0|float"), (np.float32(0), "0.0|float"), ("rows", "rows|str"), ((0, "rows"), "rows|str")]
)
def test_axis_of_another_type(f, axis, given):
    assert_refused(TypeError, ("axis", given, "int"), f, X, axis)
    assert_refused(TypeError, ("axis", given, "int"), f, X, axis=(axis,) if not isinstance(axis, tuple) else axis)


@every_function
@pytest.mark.parametrize("axis", [2, -3, 100, (0, 2), (-3, 1)], ids=str)
def test_axis_out_of_range(f, axis):
    given = "|".join(str(a) for a in np.atleast_1d(axis) if not -2 <= a < 2)
    assert_refused(ValueError, ("axis|axes", given, "2"), f, X, axis)


@every_function
def test_axis_of_a_scalar(f):
    for axis in (0, -1):
        assert_refused(ValueError, ("axis|axes", str(axis), "0"), f, np.float32(1), axis)
    assert_refused(ValueError, ("axis|axes", "-1"), f, 1.0)


@every_function
@pytest.mark.parametrize("axis", [(0, 0), (1, -1), (0, 1, -2)], ids=str)
def test_axis_given_twice(f, axis):
    assert_refused(ValueError, ("axis|axes", str(axis), "duplicate|twice|distinct|repeat|unique"), f, X, axis)


@every_function
@pytest.mark.parametrize("dtype", ["float32", "int32", "uint8"])
def test_mask_of_another_type(f, dtype):
    for convert in (np.asarray, jnp.asarray):
        assert_refused(TypeError, ("where", dtype, "bool"), f, X, where=convert(np.ones((3, 4), dtype)))
    assert_refused(TypeError, ("where", "bool"), f, X, where=1.0)


@every_function
@pytest.mark.parametrize("shape", [(3,), (4, 3), (2, 4), (5, 3, 5)], ids=str)
def test_mask_that_does_not_broadcast(f, shape):
    given = str(shape)[1:-1].rstrip(",")
    assert_refused(ValueError, ("where", given, "3, 4", "broadcast"), f, X, where=np.ones(shape, bool))


@every_function
@pytest.mark.parametrize(
    "x", ["logits", [1.0, 2.0], [[1, 2], [3, 4]], None, {"a": 1}, object()], ids=lambda x: type(x).__name__
)
def test_x_that_is_no_array(f, x):
    assert_refused(TypeError, ("x", type(x).__name__, "array"), f, x)


@every_function
def test_array_of_no_numbers(f):
    for x in (np.array(["a", "b"]), np.array([object(), None])):
        assert_refused(TypeError, ("x", "ndarray|dtype", "array|dtype|number"), f, x)


@every_function
def test_under_jit(f):
    for kind, words, axis, where in (
        (TypeError, ("axis", "int"), 1.5, None),
        (ValueError, ("axis|axes", "5"), 5, None),
        (ValueError, ("axis|axes", "(0, 0)"), (0, 0), None),
        (TypeError, ("where", "float32", "bool"), -1, jnp.ones(4)),
        (ValueError, ("where", "broadcast"), -1, jnp.ones(3, bool)),
    ):
        assert_refused(kind, words, jax.jit(lambda x, a=axis, m=where, f=f: f(x, a, m)), X)


@every_function
def test_the_fault_is_named_from_within_vmap(f):
    """By the shape of one example, which is what the caller of vmap wrote the axis for."""
    assert_refused(ValueError, ("axis|axes", "1"), jax.vmap(lambda x: f(x, 1)), X)
    assert_refused(ValueError, ("where", "3", "4", "broadcast"), jax.vmap(lambda x: f(x, 0, jnp.ones(3, bool))), X)


@every_function
def test_unknown_arguments(f):
    assert_refused(TypeError, ("initial",), f, X, initial=0.0)
