"""What `fuse(f).explain` says is what the program holds: the calls that are by the kernel are its custom calls.

Programs are lowered for CUDA. That needs no GPU.
"""

import collections
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import random_programs
import support
import test_fusion
import test_fusion_rules
from hypothesis import given, settings

import jax_softmax
from jax_softmax import fuse
from jax_softmax.primitives import operators
from jax_softmax.runtime import judge
from jax_softmax.runtime.lowering import why_no_custom_call

F32, BF16 = jnp.float32, jnp.bfloat16


def shaped(*shape, dtype=F32):
    return jax.ShapeDtypeStruct(shape, dtype)


def written_out(x, axis):
    e = jnp.exp(x - jnp.max(x, axis, keepdims=True))
    return e / jnp.sum(e, axis, keepdims=True)


def of_many_arrays(x, *arrays):
    """More than expressions read, before a softmax along axes 1 and 3."""
    for k, a in enumerate(arrays):
        x = x * a + k
    return jax.nn.softmax(x, (1, 3))


def with_reference(ref, x):
    ref[...] = jax.nn.softmax(x * 2)
    return jax.nn.softmax(x + ref[...])


SLOW_VIEW = shaped(64, 3001, 3, 29, dtype=BF16)
PROGRAMS = {
    "not folded": (of_many_arrays, shaped(8, 8, 64, 512), *[shaped(8, 8, 64, 512)] * 40),
    "not folded, and XLA is as fast": (of_many_arrays, SLOW_VIEW, *[SLOW_VIEW] * 40),
    "folded, and XLA is as fast": (of_many_arrays, SLOW_VIEW),
    "written out, of which XLA makes one": (lambda x: (written_out(x, -1), written_out(x, 0)), shaped(8192, 128)),
    "one is called": (lambda x: (written_out(x, -1), jax.nn.softmax(x, 0)), shaped(8192, 128)),
    "the other is called": (lambda x: (jax.nn.softmax(x, -1), written_out(x, 0)), shaped(8192, 128)),
    "none is written out": (lambda x: (jax.nn.softmax(x, -1), jax.nn.softmax(x, 0)), shaped(8192, 128)),
    "nothing is needed": (lambda x: (jax.nn.softmax(x), x * 2)[1], shaped(5, 7)),
    "a constant": (lambda x: x + jax_softmax.logsumexp(2.0, axis=None), shaped(4, 5)),
    "no elements": (lambda x: jax.nn.softmax(x * 2), shaped(0, 512)),
    "no kernel of this rank": (lambda x: jax.nn.softmax(x * 2), shaped(*[2] * 14)),
    "a reference": (with_reference, jax.new_ref(jnp.ones((4, 5))), shaped(4, 5)),
    "own functions that XLA makes": (lambda x: jax_softmax.softmax(x), shaped(1 << 17, 128)),
}
OF_OTHER_TESTS = {name: (case.f, *case.args) for name, case in (test_fusion.CASES | test_fusion.WITH_CONSTANTS).items()}
OF_OTHER_TESTS |= {
    f"{rule}: {name}": (program.function, *program.args)
    for rule, programs in test_fusion_rules.RULES.items()
    for name, program in programs.items()
}
OF_OTHER_TESTS |= {f"transformed: {name}": (t(f), test_fusion.X) for name, (t, f) in test_fusion.TRANSFORMED.items()}


def check(f, *args):
    report = fuse(f).explain(*args)
    lowered = jax.jit(fuse(f)).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    called = collections.Counter(re.findall(r'custom_call @jax_softmax\(.*?op = "(\w+)"', lowered))
    assert called == collections.Counter(line.op for line in report if not line.why_xla and line.op != "attention")
    for line in set(report):
        title = " ".join(str(type(report)([line])).split("\n  along")[0].split())
        assert (": by XLA: " in title) == bool(line.why_xla), title


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_program_holds_what_the_report_says(name):
    check(*PROGRAMS[name])


@support.sampled("name", OF_OTHER_TESTS, 5)  # no rule has fewer programs
def test_the_report_of_programs_of_other_tests(name):
    check(*OF_OTHER_TESTS[name])


@settings(max_examples=30)
@given(random_programs.programs())
def test_random_programs(program):
    f = random_programs.transformed(random_programs.function_of(program), program)
    with np.errstate(all="ignore"):
        check(f, random_programs.argument(program))


@pytest.mark.parametrize("dtypes", [(BF16, BF16), (BF16, F32), (F32, BF16), (F32, jnp.float64)])
@pytest.mark.parametrize("shape,axes", [((64, 512), (1,)), (SLOW_VIEW.shape, (1, 3)), ((4, 3 << 20), (1,))])
def test_operators_alone(shape, axes, dtypes):
    """With operands of several dtypes, which a kernel of a wider dtype takes."""
    with jax.enable_x64(True):
        f = jax.jit(lambda *a: operators.bind("softmax_linear", *a, where=None, axes=axes, dtype=F32))
        traced = f.trace(*(shaped(*shape, dtype=dtype) for dtype in dtypes))
        (equation,) = traced.jaxpr.eqns
        avals = [[v.aval for v in of] for of in (equation.invars, equation.outvars)]
        has_call = "custom_call @jax_softmax(" in traced.lower(lowering_platforms=("cuda",)).as_text()
        assert has_call == (not why_no_custom_call("softmax_linear", *avals, axes))


def written_out_log_softmax(x, axis):
    largest = jax.lax.stop_gradient(jnp.max(x, axis, keepdims=True))
    return x - largest - jnp.log(jnp.sum(jnp.exp(x - largest), axis, keepdims=True))


def test_a_call_has_one_line_where_what_is_written_out_stays():
    f = fuse(lambda x: (jnp.sum(jax_softmax.softmax(x) * 2, 1), written_out_log_softmax(x, -1)))
    assert sorted(line.op for line in f.explain(shaped(8192, 3))) == ["log_softmax", "logsumexp", "softmax"]

    def g(x):
        called = jax_softmax.softmax(x) * 2, jax_softmax.logsumexp(x)
        return *called, written_out_log_softmax(x, 0), written_out_log_softmax(x, -1)

    operators = sorted(line.op for line in fuse(g).explain(shaped(64, 100)))
    assert operators == ["log_softmax", "log_softmax", "softmax_and_normalizer"]


@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_elements_that_xla_makes_of_rows(name):
    """The kernel is another operator's, and the program's has its line."""
    report = fuse(lambda x: jnp.sum(getattr(jax.nn, name)(x) * 2, 1)).explain(shaped(8192, 4096))
    assert [(line.op, line.why_xla) for line in report] == [("logsumexp", ""), (name, judge.MADE_OF_ROWS)]


def test_float64():
    with jax.enable_x64(True):
        check(lambda x: jax.nn.softmax(x * 2), shaped(128, 512, dtype=jnp.float64))


def test_a_gpu_for_which_nothing_can_be_compiled(monkeypatch):
    monkeypatch.setattr(judge, "has_cuda_kernels", lambda shape: False)
    for name in ("not folded", "folded, and XLA is as fast", "one is called", "a constant"):
        check(*PROGRAMS[name])
        assert {line.why_xla for line in fuse(PROGRAMS[name][0]).explain(*PROGRAMS[name][1:])} == {judge.NOT_COMPILED}
