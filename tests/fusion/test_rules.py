"""Every rule of `fuse` gives float64's numbers, and so do programs that look as if it held for them.

Programs run as on a GPU, with the custom calls done by the host (see emulated.py). Those of a table are one program to
XLA and to the host's compiler.
"""

import functools

import emulated
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from by_numpy import by_numpy
from fusion_support import BF16, F32
from rule_cases import RULES
from rule_programs import MASK, X, Y, both, gradient, log_softmax, softmax, wide
from written_out_cases import exponentials, written_log_softmax, written_logsumexp, written_softmax

from jax_softmax import fuse
from jax_softmax.fusion import rewriting
from jax_softmax.runtime import judge

pytestmark = pytest.mark.usefixtures("default_flags")


def in_float64(programs):
    def widened(a):
        return a if np.issubdtype(a.dtype, np.integer) or a.dtype == bool else a.astype(np.float64)

    with jax.enable_x64(True):
        return [by_numpy(p.function, *jax.tree.map(widened, p.args)) for p in programs]


HASTE = {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else {}


fused = functools.cache(fuse)  # so that a function is traced once


def results(programs):
    kernels = emulated.kernels if jax.default_backend() == "cpu" else emulated.all_kernels
    args = [p.args for p in programs]

    def all_of(*args):
        return [fused(p.function)(*given) for p, given in zip(programs, args, strict=True)]

    with kernels(), jax.default_matmul_precision("highest"):
        lowered = jax.jit(all_of).lower(*args)
    options = HASTE | {"xla_allow_excess_precision": False}  # on a GPU XLA would leave out roundings of sums
    return lowered.compile(compiler_options=options)(*args), in_float64(programs)


# Second derivatives take longest, by lines that others run as well.
LONG = {rule: {name for name in programs if "second derivatives" in name} for rule, programs in RULES.items()}
OF_LONG = [
    pytest.param(rule, names, marks=pytest.mark.sweep, id=f"{rule}, second derivatives")
    for rule, names in LONG.items()
    if names
]


@emulated.compiler_is_needed
@pytest.mark.parametrize(
    "rule,names", [*(pytest.param(rule, RULES[rule].keys() - LONG[rule], id=rule) for rule in RULES), *OF_LONG]
)
def test_numbers(rule, names):
    """Of a rule's programs; those that are wrong are named."""
    wrong, programs = {}, {name: program for name, program in RULES[rule].items() if name in names}
    for name, found, expected in zip(programs, *results(list(programs.values())), strict=True):
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            try:
                eps = max(2e-5, 2 * float(jnp.finfo(a.dtype).eps))
                a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
                largest = np.abs(b[np.isfinite(b)]).max(initial=0)
                np.testing.assert_allclose(a, b, rtol=eps, atol=1e-5 * largest)
            except AssertionError as error:
                wrong[name] = str(error)
    assert not wrong, "\n".join(f"{name}: {error}" for name, error in wrong.items())


def shifted_exponentials(x, shift):
    return (lambda e: e / jnp.sum(e, -1, keepdims=True))(jnp.exp(x - shift(x)))


def normalized(x, total):
    return (lambda e: e / total(e))(jnp.exp(x - jnp.max(x, -1, keepdims=True)))


OTHERS = {
    "no shift": lambda x: shifted_exponentials(x, lambda x: 0.0),
    "a shift by more": lambda x: shifted_exponentials(x, lambda x: jnp.max(x, -1, keepdims=True) + 1),
    "maxima of columns": lambda x: shifted_exponentials(x, lambda x: jnp.max(x, 0, keepdims=True)),
    "maxima of columns, turned": lambda x: shifted_exponentials(x, lambda x: jnp.max(x, 0)[:, None]),
    "maxima of rows, turned": lambda x: shifted_exponentials(x, lambda x: jnp.max(x, 1)[None]),
    "a maximum of all": lambda x: shifted_exponentials(x, jnp.max),
    "maxima of some": lambda x: shifted_exponentials(x, lambda x: jnp.max(x[:, :3], -1, keepdims=True)),
    "maxima of another array": lambda x: shifted_exponentials(x, lambda x: jnp.max(x * Y, -1, keepdims=True)),
    "rounded maxima": lambda x: shifted_exponentials(x, lambda x: jnp.max(x.astype(BF16), -1, keepdims=True)),
    "minima": lambda x: shifted_exponentials(x, lambda x: jnp.min(x, -1, keepdims=True)),
    "powers of 2": lambda x: (lambda e: e / jnp.sum(e, -1, keepdims=True))(jnp.exp2(x - jnp.max(x, -1, keepdims=True))),
    "sums of columns": lambda x: normalized(x, lambda e: jnp.sum(e, 0, keepdims=True)),
    "sums of columns, turned": lambda x: normalized(x, lambda e: jnp.sum(e, 0)[:, None]),
    "sums of rows, turned": lambda x: normalized(x, lambda e: jnp.sum(e, 1)[None]),
    "a sum of all": lambda x: normalized(x, jnp.sum),
    "sums of some": lambda x: normalized(x, lambda e: jnp.sum(e[:, 1:], -1, keepdims=True)),
    "sums of what is masked": lambda x: normalized(x, lambda e: jnp.sum(jnp.where(MASK, e, 0), -1, keepdims=True)),
    "sums of squares": lambda x: normalized(x, lambda e: jnp.sum(e * e, -1, keepdims=True)),
    "sums and a little": lambda x: normalized(x, lambda e: jnp.sum(e, -1, keepdims=True) + 1e-3),
    "roots of sums": lambda x: normalized(x, lambda e: jnp.sqrt(jnp.sum(e, -1, keepdims=True))),
    "maxima": lambda x: normalized(x, lambda e: jnp.max(e, -1, keepdims=True)),
    "what is masked": lambda x: (lambda e: e / jnp.sum(e, -1, keepdims=True))(
        jnp.where(MASK, jnp.exp(x - jnp.max(x, -1, keepdims=True)), 0)
    ),
    "maxima that are returned": lambda x: (written_softmax(x), jnp.max(x, -1)),
    "maxima that are compared": lambda x: written_softmax(x) * (x == jnp.max(x, -1, keepdims=True)),
    "differences from maxima that are compared": lambda x: (
        written_softmax(x) * (x - jnp.max(x, -1, keepdims=True) == 0)
    ),
    "signs of differences from maxima": lambda x: (
        written_softmax(x) * (1 + jnp.sign(x - jnp.max(x, -1, keepdims=True)))
    ),
    "exponentials that are returned": lambda x: exponentials(x)[2:],
    "exponentials that are multiplied": lambda x: exponentials(x)[2] @ Y,
    "a product divided by sums of columns": lambda x: exponentials(x)[2] @ Y / exponentials(x)[3].T,
    "a turned product divided": lambda x: Y @ exponentials(x)[2] / exponentials(x)[3],
    "a product divided and not": lambda x: (lambda o: (o, o / exponentials(x)[3]))(exponentials(x)[2] @ Y),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_no_softmax_stays(name):
    """Of its value, and of its gradient."""
    for f in (OTHERS[name], gradient(OTHERS[name], X).function):
        jaxpr = jax.make_jaxpr(f)(X).jaxpr
        with emulated.kernels():  # whoever would be faster
            assert rewriting.rewritten(jaxpr) is jaxpr


def test_callbacks_read_what_is_replaced():
    """Equations without results."""

    def f(x, v):
        _, _, e, total = exponentials(x)
        jax.debug.callback(lambda total: None, total)
        return e @ v / total

    assert [line.op for line in fuse(f).explain(X, X.T)] == ["softmax_and_normalizer"]


@emulated.compiler_is_needed
def test_rows_that_are_not_finite():
    """They are NaN in what is written out, where the library has infinities."""
    x = np.array(X)
    x[1, 2], x[2, 3], x[3], x[4, 1:] = np.inf, np.nan, -np.inf, -np.inf
    functions = [both(f, x).function for f in (written_softmax, written_log_softmax, written_logsumexp)]
    kernels = emulated.kernels if jax.default_backend() == "cpu" else emulated.all_kernels
    with kernels():
        found = jax.jit(lambda x: [fuse(f)(x) for f in functions])(x)
    expected = jax.jit(lambda x: [f(x) for f in functions])(x)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(np.isnan(a), np.isnan(b))
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


NAMED = [(rule, name) for rule, programs in RULES.items() for name, program in programs.items() if program.ops]


@pytest.mark.parametrize("rule,name", NAMED)
def test_operators(rule, name):
    """The rule holds."""
    program = RULES[rule][name]
    with emulated.kernels():  # whoever would be faster
        report = fused(program.function).explain(*program.args)
    assert " ".join(sorted(line.op for line in report if line.why_xla != judge.MADE_OF_ROWS)) == program.ops


@pytest.mark.parametrize(
    "f,shape,before,after",
    [
        (lambda x: softmax(x * 2, 0) * 3, (5, 7), ["mul"], ["mul"]),
        (lambda x: softmax(x * 2).astype(BF16), (5, 7), ["mul"], ["convert_element_type"]),
        (
            lambda x: jnp.transpose(softmax(jnp.transpose(x * 2, (1, 2, 0))) + 1, (1, 2, 0)) * 3,
            (3, 4, 5),
            ["mul"],
            None,
        ),
        (
            lambda x: jnp.exp(softmax(jnp.tanh(x.reshape(6, 4)))).reshape(2, 3, 4) * x,
            (2, 3, 4),
            ["tanh"],
            ["exp", "mul"],
        ),
        (lambda x: jnp.exp(softmax(x - 1).reshape(4, 3, 8)), (4, 24), ["sub"], ["exp"]),
        (lambda x: jnp.exp(jnp.squeeze(softmax(x[:, None] - 1), 1)), (5, 7), ["sub"], ["exp"]),
    ],
)
def test_what_is_folded(f, shape, before, after):
    """Around transposes and reshapes as well; of what is written nothing else is."""
    (line,) = fuse(f).explain(jax.ShapeDtypeStruct(shape, F32))
    assert line.folded_before == tuple(before) and line.folded_after == tuple(after or ["add", "mul"])
    assert line.outside == () and line.why_not == ""


def test_functions_of_16_bits_are_made_once():
    """Where rows' maxima and sums are a kernel's, and the elements XLA's."""

    def f(x):
        return jnp.sum(jnp.exp(log_softmax(wide(jnp.tanh(x * 0.5)) * 2)), -1)

    line, _ = fuse(f).explain(jax.ShapeDtypeStruct((8192, 4096), BF16))
    assert line.folded_before == ("convert_element_type", "mul")
    line, _ = fuse(f).explain(jax.ShapeDtypeStruct((8192, 4096), F32))
    assert line.folded_before == ("mul", "tanh", "mul")
