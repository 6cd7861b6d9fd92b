"""Random programs under `fuse` have the program's numbers: no further from float64's than the program itself is.

By default XLA may leave out roundings to 16 bits. The program itself is therefore run twice, with and without these
roundings, and the larger error counts. On a CPU the kernels are emulated, and XLA does not optimise its code: there it
would merge products with sums, by which two float32 programs were off.
"""

import emulated
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import event, given, settings
from random_programs import FLOATS, argument, function_of, programs, transformed

import jax_softmax

compiler_is_needed = pytest.mark.skipif(emulated.COMPILER is None, reason="no C++ compiler found")


def in_float64(program, x):
    with jax.enable_x64(True):
        f = transformed(function_of(program, wide=True), program)
        return jax.tree.map(np.asarray, jax.jit(f)(jnp.asarray(np.asarray(x, np.float64))))


def check(program):
    x = argument(program)
    kernels = emulated.kernels if jax.default_backend() == "cpu" else emulated.all_kernels
    with kernels() as made:
        fused = jax.jit(transformed(function_of(program), program, jax_softmax.fuse)).lower(x)
    event("something is folded" if any(k.load or k.store for k in made) else "nothing is folded")
    unfused = jax.jit(transformed(function_of(program), program)).lower(x)
    # XLA for CPUs makes a product and the sum after it in one operation, which XLA for GPUs does not.
    haste = {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else {}
    flags = [{}] if coarsest_eps(program) < 2.0**-20 else [{}, {"xla_allow_excess_precision": False}]
    found = fused.compile(haste)(x)
    own = [unfused.compile(haste | options)(x) for options in flags]
    exact = in_float64(program, x)
    for result, expected, *others in zip(*map(jax.tree.leaves, (found, exact, *own)), strict=True):
        assert (result.shape, result.dtype) == (others[0].shape, others[0].dtype)
        assert_no_worse(result, expected, others, coarsest_eps(program))


def coarsest_eps(program):
    """Of the dtypes that the program computes with."""
    dtypes = {program.dtype, *(w for step in (*program.before, program.head, *program.after) for w in step)}
    return max(float(jnp.finfo(dtype).eps) for dtype in dtypes.intersection(FLOATS))


def assert_no_worse(found, exact, own, eps):
    found, exact, *own = (np.asarray(a, np.float64) for a in (found, exact, *own))
    alike = np.isfinite(exact)
    for a in own:
        alike &= np.isfinite(a)
    # Where the program itself overflows, or is not sure, anything that one of its ways gives.
    same = [np.isnan(found) & np.isnan(a) | (found == a) for a in (exact, *own)]
    assert np.all(alike | np.any(same, 0) | np.isfinite(found)), "not finite where the program is"
    assert np.isfinite(found[alike]).all(), "not finite where the program is"
    if not alike.any():
        return
    largest = max(np.abs(exact[alike]).max(), 1 / 16)  # of numbers that nearly cancel out the terms are larger
    error = np.abs(found - exact)[alike].max()
    errors = [np.abs(a - exact)[alike].max() for a in own]
    bound = 4 * max(errors) + 4 * max(eps, 2.0**-20) * largest
    assert error <= bound, f"off by {error:.3g}; the program itself by {errors}, numbers up to {largest:.3g}"


@compiler_is_needed
@settings(max_examples=min(60, settings.default.max_examples))  # one takes a second or two
@given(programs())
def test_a_random_program_has_its_own_numbers(program):
    with np.errstate(all="ignore"):  # numbers that overflow in NumPy, too
        check(program)
