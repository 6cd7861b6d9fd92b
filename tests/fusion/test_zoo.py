"""Whatever `jax.jit` runs, `fuse` runs, with the same results: every public function of JAX beside a softmax.

Functions stand in groups, each group one program, so that little is compiled; of a group that fails the halves are run,
down to the functions at fault. Plain `pytest` runs those in `SOME`.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import zoo
import zoo_table
from zoo_checks import (
    as_under_jit,
    assert_all,
    has_the_results_of_jit,
    is_lowered_for_cuda,
    results_and_near,
    run,
    same_numbers,
    weighted,
    without_keys,
)

from jax_softmax import fuse

pytestmark = [
    pytest.mark.usefixtures("in_haste"),
    # Of functions of JAX, on what they are given here; but not this package's.
    pytest.mark.filterwarnings("ignore", "error:jax_softmax"),
]
AT_ONCE = 16  # functions in a program
AT_A_TIME = 64  # functions in a test with --sweeps

# Each kind of equation that holds a program, and each way in which one came to be wrong; of each what compiles quickly.
SOME = (
    """
jax.numpy.digitize jax.numpy.frexp jax.numpy.interp jax.numpy.ldexp jax.numpy.nonzero jax.numpy.searchsorted
jax.numpy.where jax.numpy.vectorize jax.numpy.sort jax.numpy.linalg.inv jax.lax.cond jax.lax.custom_linear_solve
jax.lax.custom_root jax.lax.fori_loop jax.lax.map jax.lax.platform_dependent jax.lax.scan jax.lax.switch
jax.lax.while_loop jax.lax.composite jax.lax.reduce jax.lax.reduce_window jax.lax.psum jax.lax.pmean
jax.lax.axis_index jax.lax.ppermute jax.lax.gather jax.lax.scatter_add jax.lax.top_k
jax.lax.reduce_precision jax.lax.optimization_barrier jax.nn.dot_product_attention jax.nn.relu
jax.random.choice jax.random.categorical
""".split()
    + [f"jax.{name}" for name in zoo_table.TRANSFORMATIONS if name not in zoo_table.NOT_FROM_A_CPU]
)


def batches():
    """All functions' names, some at a time, and what each batch is called."""
    names = list(zoo.functions())
    for k in range(0, len(names), AT_A_TIME):
        batch = names[k : k + AT_A_TIME]
        yield pytest.param(batch, id=f"{batch[0]}...{batch[-1]}", marks=pytest.mark.sweep)


in_batches = pytest.mark.parametrize("names", [pytest.param(SOME, id="some"), *batches()])


def logits(count):
    return jnp.asarray(np.random.default_rng(0).standard_normal((count, zoo.N, zoo.N)), "float32")


def program_of(members):
    """A function of logits, a matrix for each member: its results of that matrix's softmax, by the members' names."""

    def program(x):
        p = jax.nn.softmax(x)
        results = {member.name: without_keys(member.call(p[k])) for k, member in enumerate(members)}
        undetermined = zoo_table.UNDETERMINED.intersection(results)
        return results | {name: jax.tree.map(jnp.zeros_like, results[name]) for name in undetermined}

    return program


def loss_of(members):
    """Its gradient by a member's logits is that member's."""
    program = program_of(members)
    return lambda x: weighted(program(x))


@functools.cache
def has_gradient(member):
    if member.name in zoo_table.WITHOUT_GRADIENT:
        return False
    x = logits(1)
    try:
        shapes = jax.eval_shape(program_of([member]), x)
        jax.eval_shape(jax.grad(loss_of([member])), x)
    except Exception:
        return False
    return any(jnp.issubdtype(a.dtype, jnp.inexact) for a in jax.tree.leaves(shapes))


def results(members):
    x, f = logits(len(members)), program_of(members)
    str(fuse(f).explain(x))
    is_lowered_for_cuda(fuse(f), f, x)
    has_the_results_of_jit(f, x)


def gradients(members):
    x, loss = logits(len(members)), loss_of(members)
    gradient = jax.grad(loss)
    expected = as_under_jit(lambda: results_and_near(gradient, x))
    for fused in (fuse(gradient), jax.grad(fuse(loss))):
        is_lowered_for_cuda(fused, gradient, x)
        for member, a, b, near in zip(members, run(fused, x), *expected, strict=True):
            same_numbers(a, b, near, member.name, least=1 / 8)  # of a row's sum, which is 1, all is roundings


@in_batches
def test_results(names):
    assert_all(results, zoo.members(names), AT_ONCE)


@in_batches
def test_gradients(names):
    assert_all(gradients, list(filter(has_gradient, zoo.members(names))), AT_ONCE)


@pytest.mark.sweep
def test_every_function_is_called_or_is_no_part_of_a_program():
    unknown = {name for name in zoo.functions() if zoo.member(name) is None} - zoo_table.NO_PROGRAMS.keys()
    assert not unknown, "to be called in zoo_table.py"


@pytest.mark.sweep
def test_jit_takes_what_is_called_by_hand_and_nothing_that_is_left_out():
    functions = zoo.functions()
    refused = {name: zoo.refusal(call) for name, call in zoo_table.CALLS.items() if name in functions}
    assert not any(refused.values()), refused
    left_out = (name for name, reason in zoo_table.NO_PROGRAMS.items() if not reason.startswith("a type"))
    taken = [name for name in left_out if name in functions and zoo.guessed(functions[name])]
    assert not taken
