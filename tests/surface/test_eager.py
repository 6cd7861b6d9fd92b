"""An eager call is one program that is compiled once, whatever is given, and follows JAX's settings of the moment."""

import itertools
import logging

import jax
import jax.numpy as jnp
import numpy as np
import support
from oracles import check, reference
from support import NAMES, OPERATORS, assert_same_bits, every_name, normal, sampled

X = normal((3, 5))
WHERE = support.random_mask((3, 5))
ARGUMENTS = {
    "array": (lambda: jnp.asarray(X), {}),
    "NumPy array": (lambda: X, {}),
    "mask": (lambda: jnp.asarray(X), {"where": WHERE}),
    "mask of JAX": (lambda: X, {"where": jnp.asarray(WHERE)}),
    "enlarging mask": (lambda: X, {"where": support.random_mask((2, 3, 5))}),
    "mask of one number": (lambda: X, {"where": True}),
    "axis": (lambda: X, {"axis": 0}),
    "axes": (lambda: X, {"axis": [0, 1]}),
    "axes of NumPy": (lambda: X, {"axis": np.array([0, 1])}),
    "integers": (lambda: np.arange(6, dtype=np.int16).reshape(2, 3), {}),
    "float8": (lambda: jnp.asarray(X, jnp.float8_e4m3fn), {}),
    "number": (lambda: 1.5, {"axis": None}),
    "number of NumPy": (lambda: np.float32(1.5), {"axis": None}),
    "complex": (lambda: X + 1j, {"where": WHERE}),
    "many dimensions": (lambda: X.reshape((1,) * 12 + (3, 5)), {}),
}


@sampled("label,name", itertools.product(ARGUMENTS, NAMES), 3)
def test_one_program(label, name, caplog):
    make, arguments = ARGUMENTS[label]
    f = OPERATORS[name]
    jax.clear_caches()

    def log_of_a_call():
        x = make()
        caplog.clear()
        with caplog.at_level(logging.DEBUG, "jax"):
            f(x, **arguments).block_until_ready()
        return [record.getMessage() for record in caplog.records]

    compiled = [log for log in log_of_a_call() if log.startswith("Compiling ")]
    assert len(compiled) == 1 and f"Compiling jit({f.__name__})" in compiled[0], compiled
    assert log_of_a_call() == []


@every_name
def test_numbers(name):
    """Of Python and of NumPy; the result is of the default float type, which is not a weak one."""
    for x64, default in ((False, "float32"), (True, "float64")):
        with jax.enable_x64(x64):
            for x in (1.5, 3, np.float64(2), np.int64(2), np.array(2.0)):
                y = OPERATORS[name](x, axis=None)
                assert y.dtype == default and not y.weak_type and y.shape == ()
            for x in (1.5, 3, True, np.bool_(True)):
                assert OPERATORS[name](x, axis=None) == (1 if name == "softmax" else 0)
            assert OPERATORS[name](np.float32(2), axis=None).dtype == "float32"
            assert OPERATORS[name](2j, axis=None).dtype == ("complex128" if x64 else "complex64")


@every_name
def test_what_converts_to_an_array(name):
    class Parameter:
        """As those of neural network libraries."""

        def __init__(self, value):
            self.value = value

        def __jax_array__(self):
            return jnp.asarray(self.value)

    check(OPERATORS[name](Parameter(X), -1, Parameter(WHERE)), reference(name, X, where=WHERE))
    check(jax.jit(lambda x: OPERATORS[name](Parameter(x), -1, Parameter(WHERE)))(X), reference(name, X, where=WHERE))


@every_name
def test_64_bits_are_the_settings_of_the_call(name):
    x = normal((3, 5), "float64")
    for _ in range(2):
        assert OPERATORS[name](x).dtype == "float32"
        with jax.enable_x64(True):
            check(OPERATORS[name](x), reference(name, x))


@every_name
def test_device_is_that_of_the_operand_or_the_default(name):
    cpu, first = jax.devices("cpu")[0], jax.devices()[0]
    for device in (first, cpu, first):
        with jax.default_device(device):
            assert OPERATORS[name](X).devices() == {device}
        assert OPERATORS[name](jax.device_put(X, device)).devices() == {device}


@every_name
def test_function_is_the_same_under_jit(name):
    f = OPERATORS[name]
    for axis in (-1, 0, (0, 1), None):
        assert_same_bits(f(X, axis, WHERE), jax.jit(f, static_argnums=1)(X, axis, WHERE))
    with jax.disable_jit():
        assert_same_bits(f(X, 0, WHERE), f(jnp.asarray(X), [0], jnp.asarray(WHERE)))
