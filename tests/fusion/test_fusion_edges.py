"""Cases at the edges of what kernels compute: numbers of 16 and 8 bits, special numbers, and what just is not folded.

They are one program to XLA, and one to the host's compiler.
"""

import emulated
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fusion_cases import CASES
from fusion_support import F32, PAIR, SHAPE, Case, assert_same, compiled, x_of

import jax_softmax
from jax_softmax import fuse

pytestmark = pytest.mark.usefixtures("default_flags")

WHICH = np.arange(16, dtype=np.int32) % 3
BYTES = np.arange(16, dtype=np.uint8) * np.uint8(16)
EDGES = {
    "a select of three by a number": Case(lambda x, k: jax.nn.softmax(_selected(k, x, x * 2, -x)), x_of(), WHICH),
    "a select of two by a number": Case(lambda x, k: jax.nn.softmax(_selected(k, x, -x)), x_of(), WHICH // 2),
    "unsigned bytes that wrap": Case(lambda x, b: jax.nn.softmax(x + (b + b * b).astype(F32) / 64), x_of(), BYTES),
    "short integers that wrap": Case(
        lambda x, k: jax.nn.softmax(x + (k * k).astype(F32) / 9999), x_of(), WHICH.astype(np.int16) * np.int16(200)
    ),
    "an integer of a large number": Case(
        lambda x, k: jax.nn.softmax(x + (k.astype(jnp.int8) * 2).astype(F32) / 64), x_of(), WHICH * 77
    ),
    "at least 0": Case(lambda x: jax.nn.softmax(jnp.maximum(x, 0) + jnp.maximum(-jnp.inf, x)), x_of()),
    "sums of columns of what is written": Case(
        lambda x: (lambda p: (p * jnp.sum(p * PAIR, 1, keepdims=True), p * 2))(jax.nn.softmax(x * 2)), x_of()
    ),
    "an operand and a result of one array": Case(
        lambda x: (lambda p: jax.nn.softmax(x * 3 + jnp.sum(p, 0)) * p)(jax.nn.softmax(x * 2)), x_of()
    ),
    "float16 halves": Case(
        lambda x: jax.nn.softmax((x * jnp.float16(2.0**-13)).astype(F32) * 2.0**13), x_of("float16")
    ),
    "divided by powers of 2": Case(
        lambda x: jax.nn.softmax((x / jnp.float16(2.0**15)).astype(F32) * 2.0**15), x_of("float16", scale=20)
    ),
}
# Those of `CASES` that are about such numbers.
NAMES = (
    *("subnormal numbers of float16", "float16 without subnormal numbers", "int32 operands", "operands of 8 bits"),
    *("scattered integers", "one-hot integers", "results of each other", "a result that an operand needs"),
    *("before: integers that wrap", "before: powers", "before: literals", "before: bits", "before: reduced precision"),
    *(f"{name} of special numbers" for name in ("max", "min", "clamp", "sign", "select", "ne", "signed zero")),
    *("float16: own roundings", "bfloat16: a chain after", "a row of fills in 16 bits", "where, transposed"),
    *("a comparison that others read", "branches", "a loss that others read", "smoothed labels of rows with -inf"),
)


def _selected(k, *cases):
    return jax.lax.select_n(jnp.broadcast_to(k, SHAPE), *cases)


@emulated.compiler_is_needed
def test_values():
    cases = EDGES | {name: CASES[name] for name in NAMES}
    args = [case.args for case in cases.values()]

    def by(transform):
        return jax.jit(lambda *args: [transform(c.f)(*own) for c, own in zip(cases.values(), args, strict=True)])

    with emulated.kernels() as made:
        fused = by(fuse).lower(*args)
    assert len(made) >= len(cases)
    with jax_softmax.use():
        unfused = by(lambda f: f).lower(*args)
    wrong = {}
    for name, found, expected in zip(cases, compiled(fused)(*args), compiled(unfused)(*args), strict=True):
        try:
            assert_same(found, expected, cases[name].roundings)
        except AssertionError as error:
            wrong[name] = str(error)
    assert not wrong, "\n".join(f"{name}: {error}" for name, error in wrong.items())
