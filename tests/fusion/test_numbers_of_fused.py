"""Faults that fused programs had, each with a program that showed it, which has its own numbers now.

XLA's flags are its defaults, but that the host's products are not merged with sums (see test_random_programs.py).
"""

import emulated
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import support

from jax_softmax import fuse
from jax_softmax.fusion.kernels.printing import text_of
from jax_softmax.fusion.program import places
from jax_softmax.fusion.program.expressions import Expressions
from jax_softmax.fusion.program.graph import graph_of

pytestmark = pytest.mark.usefixtures("default_flags")

F32, BF16, F16 = jnp.float32, jnp.bfloat16, jnp.float16
X = jnp.asarray(support.normal((16, 64), seed=1, scale=20)).astype(BF16)
WIDE = jnp.asarray(support.normal((16, 17), seed=2, scale=4))
OTHER = jnp.asarray(support.normal((16, 64), seed=3, scale=1))
MASK = jnp.asarray(support.random_mask((16, 64), 4))
LABELS = jnp.asarray(np.random.default_rng(5).integers(0, 16, 16), jnp.int32)


def log_p(x):
    return jax.nn.log_softmax(x.astype(F32))


def cap(x):
    return 30 * jnp.tanh(x / 30)


def entropy(x):
    return -jnp.sum(jax.nn.softmax(x.astype(F32)) * log_p(x), -1)


def divergence(x, y):
    return jnp.sum(jax.nn.softmax(x.astype(F32)) * (log_p(x) - log_p(y)), -1)


def loss(x, targets):
    return -jnp.sum(targets.astype(F32) * log_p(x), -1)


def at_first_index(x):
    """The label is 0; the index that it is compared with is 0 as well, wherever it is broadcast to."""
    index = jnp.broadcast_to(jax.lax.broadcasted_iota(jnp.int32, (16, 1), 1), x.shape)
    return jnp.sum((index == jnp.zeros((16, 1), jnp.int32)).astype(F32) * log_p(x), -1)


# The program, its argument, and how far its numbers may be from the nearest of its own.
PROGRAMS = {
    "a mask of int8 is added": (lambda x: jax.nn.softmax(x.astype(F32) + MASK.astype(jnp.int8).astype(F32)), X, 1e-5),
    "a one-hot array of int8 is added": (
        lambda x: jax.nn.softmax(x + jax.nn.one_hot(LABELS, 17, dtype=jnp.int8)),
        WIDE,
        1e-5,
    ),
    "a mask of int8 is added afterwards": (
        lambda x: jax.nn.softmax(x.astype(F32)) + MASK.astype(jnp.int8),
        X,
        1e-5,
    ),
    "rows of a scaled array add up to 1": (lambda x: jnp.sum(jnp.exp(log_p(x * 0.3)), -1), X, 1e-5),
    "rows of a capped array add up to 1": (lambda x: jnp.sum(jnp.exp(log_p(cap(x))), -1), X, 1e-5),
    "rows of subnormal numbers add up to 1": (
        lambda x: jnp.sum(jnp.exp(log_p((x.astype(F16) * F16(2.0**-20)).astype(F32) * 2.0**20)), -1),
        X,
        1e-5,
    ),
    "division by a constant": (lambda x: jax.nn.log_softmax(x / 0.7), X, 1.01),  # a rounding of bfloat16, at 186
    "entropy of a scaled array": (lambda x: entropy(x * 0.3), X, 1e-4),
    "its gradient": (jax.grad(lambda x: entropy(x * 0.3).sum()), X, 1e-3),
    "divergence of a capped float16 array": (lambda x: divergence(cap(x.astype(F16)), OTHER), X, 0.02),
    "gradient of a power": (jax.grad(lambda x: jnp.sum(jax.nn.softmax(x**4) * jnp.arange(17.0))), WIDE / 2, 1e-3),
    "an index of extent 1": (at_first_index, WIDE, 1e-4),
    "targets through float16": (lambda x: loss(x, (jax.nn.one_hot(LABELS, 17) * 1e5).astype(F16)), WIDE, 0),
    # A rounding of bfloat16, at 69.
    "a bfloat16 result in float32": (lambda x: jax.nn.log_softmax(x).astype(F32) + OTHER, X, 0.51),
}


@emulated.compiler_is_needed
@support.sampled("name", PROGRAMS, 3)
def test_a_fused_program_has_its_own_numbers(name):
    """Those of the program with, or those without, the roundings to 16 bits that XLA may leave out."""
    f, x, most = PROGRAMS[name]
    on_cpu = jax.default_backend() == "cpu"
    options = {"xla_backend_optimization_level": 0} if on_cpu else {}
    with (emulated.kernels if on_cpu else emulated.all_kernels)() as made:
        fused = jax.jit(fuse(f)).lower(x)
    assert made
    unfused = jax.jit(f).lower(x)
    own = [unfused.compile(options | {"xla_allow_excess_precision": excess})(x) for excess in (True, False)]
    found, *own = (np.asarray(a, np.float64) for a in (fused.compile(options)(x), *own))
    apart = [np.where(found == a, 0, np.abs(found - np.where(found == a, 0, a))).max() for a in own]
    assert min(apart) <= most, apart


# Not functions, of which a kernel's may differ from XLA's in the last places.
SAME_BITS = {
    "division by a constant": lambda x: x / 0.7,
    "division of bfloat16 by a constant": lambda x: (x.astype(BF16) / BF16(0.7)).astype(F32),
    "a product and a sum": lambda x: x * 0.3 + 0.1,
    "a power": lambda x: x**5,
    "a negative power": lambda x: x**-3,
    "casts": lambda x: x.astype(F16).astype(F32) - x.astype(BF16).astype(F32),
    "float16": lambda x: (x.astype(F16) * F16(1e-6)).astype(F32),
    "choices": lambda x: jnp.where(x > 1, jnp.clip(x, -2, 3), -jnp.abs(x)) * jnp.sign(x),
}


@emulated.compiler_is_needed
@support.sampled("name", SAME_BITS, 2)
def test_text_and_jax_make_the_same_bits(name):
    """What a kernel and XLA both make of an element is one list of operations: as C++ and as JAX it is the same."""
    x = jnp.asarray(support.normal((4096,), seed=6, scale=3))
    jaxpr = jax.make_jaxpr(SAME_BITS[name])(jax.ShapeDtypeStruct((), F32))
    graph = graph_of(jaxpr)
    own = {(jaxpr.jaxpr.invars[0], places.place_key([])): "x0"}
    expression = Expressions(own).make(graph.outputs[0], [], graph.maker)
    with support.on_a_cpu():
        (found,) = emulated._by_lines(text_of(expression), ["x0"], {"x0": x}, [x])
        np.testing.assert_array_equal(found, expression.in_jax({"x0": x}))
