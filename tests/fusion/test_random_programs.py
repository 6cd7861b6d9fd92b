"""Random programs under `fuse` have the program's numbers: no further from float64's than the program itself is.

By default XLA may leave out roundings to 16 bits. The program itself is therefore run with them and, where that is not
enough, without, and the larger error counts. On a CPU the kernels are emulated, and XLA does not optimise its code:
there it would merge products with sums, by which two float32 programs were off.
"""

import functools

import emulated
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from by_numpy import by_numpy
from hypothesis import event, example, given, settings
from hypothesis import strategies as st
from random_programs import (
    FLOATS,
    Program,
    argument,
    derivatives_of_fused,
    function_of,
    logits_of,
    programs,
    transformed,
)

import jax_softmax

pytestmark = pytest.mark.usefixtures("default_flags")


HASTE = {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else {}
# Seldom drawn: an index that is the same in all columns.
ONE_INDEX = Program((3, 5, 16), "float32", 4.0, False, (), ("loss", "index of extent 1"), (), "gradient", 5)
# The derivative is given the maximum, and makes an x of its own.
MAXIMUM_KEPT = Program(
    *((3, 5, 16), "float16", 4.0, False, (("abs",), ("divided", 0.7), ("cast", "float32"), ("where", "causal", "inf"))),
    *(("written", "finite logsumexp", -1), (("times array", "column"),), "gradient of fused", 99),
)
# A kernel and XLA have a tanh of their own; of x^4 - maximum XLA rounds the difference alone.
LOGITS_MADE_TWICE = [
    Program((6, 64), "float32", 20.0, False, (step, ("cast", "float32")), ("sum of p",), (), "value", 0)
    for step in (("cap", 30.0), ("power", 4), ("divided", 0.7))
]
# XLA leaves the roundings before the row's numbers out, and not those of the logits that are kept.
NUMBERS_KEPT = [
    Program(
        *((6, 64), "bfloat16", 20.0, False, (("times array", "column"), ("plus array", "full"), ("cast", "float32"))),
        *(("by name", name, "float32"), (), "gradient of fused", 1),
    )
    for name in ("softmax", "log_softmax")
]
AT_ONCE = 8  # programs that XLA and the host's compiler have together


def all_of(programs, fuse=lambda f: f, wide=False):
    functions = [transformed(function_of(program, wide), program, fuse) for program in programs]
    return lambda *args: [f(x) for f, x in zip(functions, args, strict=True)]


def in_float64(programs, args):
    with jax.enable_x64(True):
        return by_numpy(all_of(programs, wide=True), *(np.asarray(x, np.float64) for x in args))


def check(programs):
    args = [argument(program) for program in programs]
    kernels = emulated.kernels if jax.default_backend() == "cpu" else emulated.all_kernels
    with kernels() as made:
        fused = jax.jit(all_of(programs, jax_softmax.fuse)).lower(*args)
    event(f"something is folded into {sum(bool(k.load or k.store) for k in made)} kernels")
    unfused = jax.jit(all_of(programs))
    found, exact = fused.compile(HASTE)(*args), in_float64(programs, args)
    types = jax.eval_shape(unfused, *args)

    @functools.cache
    def own(**options):
        return unfused.lower(*args).compile(HASTE | options)(*args)

    def itself(k):
        """What the program may give: exact numbers, which nearly always are enough, or else its own."""
        yield [jax.tree.map(lambda a: np.where(np.isnan(a), 0, a), exact[k])]
        yield [own(xla_allow_excess_precision=False)[k]]
        yield [own(xla_allow_excess_precision=False)[k], own()[k]]

    for k, program in enumerate(programs):
        assert jax.tree.map(type_of, found[k]) == jax.tree.map(type_of, types[k]), program
        failures = []
        for own_ways in itself(k):
            try:
                assert_all_no_worse(program, found[k], exact[k], *own_ways)
                break
            except AssertionError as error:
                failures.append(error)
        else:
            raise failures[-1]


def type_of(a):
    return a.shape, a.dtype


def assert_all_no_worse(program, *results):
    for found, expected, *others in zip(*map(jax.tree.leaves, results), strict=True):
        times = 8 if program.transform == "second" else 4  # of second derivatives the roundings are a matter of chance
        assert_no_worse(found, expected, others, coarsest_eps(program), times, of_logits_made_twice(program))


HEADS_WITHOUT_ERRORS_OF_LOGITS = ["sum of p", "entropy", "divergence"]


def of_logits_made_twice(program):
    """What a result changes by if a kernel and XLA make float32 logits s that differ by 1 in 2^23.

    They may: XLA merges a product with the difference after it, divides by multiplying, and has a tanh of its own. The
    program itself makes s once. Its sum of p is 1 whatever error s has, and says nothing about that error.
    """
    if program.head[0] not in HEADS_WITHOUT_ERRORS_OF_LOGITS:
        return 0
    logits, x = logits_of(program, wide=True), np.asarray(argument(program), np.float64)
    with jax.enable_x64(True):
        s, slope = by_numpy(lambda x: jax.jvp(logits, (x,), (jnp.ones_like(x),)), x)
    s, slope = (np.abs(a[np.isfinite(a) & (np.abs(a) < OF_FILLS)]).max(initial=0) for a in (s, slope))
    power = {"value": 0, "scan": 0, "second": 2}.get(program.transform, 1)  # a derivative has a factor ds/dx
    return float(np.finfo("float32").eps) * s * max(slope, 1) ** power


def coarsest_eps(program):
    """Of the dtypes that the program computes with. Rows of float32 add up to 1 whatever was rounded before."""
    steps = (program.dtype,), *program.before, program.head, *program.after
    if program.head == ("sum of p",) and ("cast", "float32") in program.before[-1:]:
        steps = ("float32",), *program.after
    dtypes = {word for step in steps for word in step}
    return max(float(jnp.finfo(dtype).eps) for dtype in dtypes.intersection(FLOATS))


# Such numbers are sums of fills of masks, which may overflow in another order.
OF_FILLS = 1e30


def assert_no_worse(found, exact, own, eps, times=4, beside=0):
    found, exact, *own = (np.asarray(a, np.float64) for a in (found, exact, *own))
    alike = np.abs(exact) < OF_FILLS
    for a in own:
        alike &= np.isfinite(a)
    # Where the program itself overflows, or is not sure, anything that one of its ways gives; and anything where it is
    # NaN, as a sum of products of a one-hot array with -inf is: `fuse` looks the label's element up.
    same = [np.isnan(found) & np.isnan(a) | (found == a) for a in (exact, *own)]
    unknown = np.all([np.isnan(a) for a in (exact, *own)], 0) | (np.abs(exact) >= OF_FILLS) & ~np.isnan(found)
    assert np.all(alike | np.any(same, 0) | np.isfinite(found) | unknown), "not finite where the program is"
    assert np.isfinite(found[alike]).all(), "not finite where the program is"
    if not alike.any():
        return
    largest = max(np.abs(exact[alike]).max(), 1 / 16)  # of numbers that nearly cancel out the terms are larger
    error = np.abs(found - exact)[alike].max()
    errors = [np.abs(a - exact)[alike].max() for a in own]
    bound = times * (max(errors) + beside) + 4 * max(eps, 2.0**-20) * largest
    assert error <= bound, f"off by {error:.3g}; the program itself by {errors}, numbers up to {largest:.3g}"


@emulated.compiler_is_needed
@settings(max_examples=16 if settings.default.max_examples < 100 else 48)  # 20 s, or a minute
@example([ONE_INDEX, MAXIMUM_KEPT, *LOGITS_MADE_TWICE])
@given(st.lists(programs(), min_size=AT_ONCE, max_size=AT_ONCE))
def test_random_programs_have_their_own_numbers(programs):
    with np.errstate(all="ignore"):  # numbers that overflow in NumPy, too
        check(programs)


@settings(max_examples=4 if settings.default.max_examples < 100 else 32)
@example(NUMBERS_KEPT)
@given(st.lists(derivatives_of_fused(), min_size=AT_ONCE, max_size=AT_ONCE))
def test_derivatives_of_fused_programs_by_default(programs):
    """On the device as it is, where XLA may leave out roundings in one place and not in another."""
    args = [argument(program) for program in programs]
    with np.errstate(all="ignore"):
        exact = in_float64(programs, args)
    found, own = (jax.jit(all_of(programs, f))(*args) for f in (jax_softmax.fuse, lambda f: f))
    for k, program in enumerate(programs):
        assert_all_no_worse(program, found[k], exact[k], own[k])
