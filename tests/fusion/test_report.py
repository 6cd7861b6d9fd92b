"""What `fuse(f).explain` says, and that the program holds it: the calls that are by the kernel are its custom calls.

Programs are lowered for CUDA. That needs no GPU.
"""

import collections
import functools
import re

import emulated
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import random_programs
import support
from fusion_cases import CASES, TRANSFORMED, WITH_CONSTANTS
from fusion_support import X, assert_same, compiled, unfused, x_of
from hypothesis import given, settings
from rule_cases import RULES

import jax_softmax
from jax_softmax import fuse
from jax_softmax.fusion.kernels import traffic
from jax_softmax.primitives import operators
from jax_softmax.runtime import costs, judge
from jax_softmax.runtime.lowering import reason_for_operator

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


def model(weights, embedding, tokens):
    """The loss of layers of attention."""
    x = embedding[tokens]
    for of_layer in weights:
        q, k, v = jnp.einsum("bsf,nfhd->nbshd", x, of_layer)
        x += jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape)
    log_p = jax.nn.log_softmax((x @ embedding.T).astype(F32))
    return -jnp.take_along_axis(log_p, tokens[..., None], -1).mean()


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
OF_OTHER_TESTS = {name: (case.f, *case.args) for name, case in (CASES | WITH_CONSTANTS).items()}
OF_OTHER_TESTS |= {
    f"{rule}: {name}": (program.function, *program.args)
    for rule, programs in RULES.items()
    for name, program in programs.items()
}
OF_OTHER_TESTS |= {f"transformed: {name}": (t(f), X) for name, (t, f) in TRANSFORMED.items()}


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
        assert has_call == (not reason_for_operator("softmax_linear", *avals, axes))


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


@pytest.mark.parametrize("length,n_calls", [(128, 0), (2048, 7)])
def test_a_small_program_calls_no_kernel(length, n_calls):
    """What kernels save there is less than their calls cost."""
    arrays = shaped(2, 3, 128, 2, 64, dtype=BF16), shaped(1024, 128, dtype=BF16), shaped(8, length, dtype=jnp.int32)
    step = jax.jit(fuse(jax.value_and_grad(model, (0, 1))))
    lowered = step.trace(*arrays).lower(lowering_platforms=("cuda",))
    assert lowered.as_text().count("custom_call @jax_softmax") == n_calls


def test_float64():
    with jax.enable_x64(True):
        check(lambda x: jax.nn.softmax(x * 2), shaped(128, 512, dtype=jnp.float64))


def test_a_gpu_for_which_nothing_can_be_compiled(monkeypatch):
    monkeypatch.setattr(judge, "has_cuda_kernels", lambda shape: False)
    for name in ("not folded", "folded, and XLA is as fast", "one is called", "a constant"):
        check(*PROGRAMS[name])
        assert {line.why_xla for line in fuse(PROGRAMS[name][0]).explain(*PROGRAMS[name][1:])} == {judge.NOT_COMPILED}


def attention_row(x):
    return jax.nn.softmax(x.astype(F32) * 0.125).astype(BF16)


LARGE = jax.ShapeDtypeStruct((8192, 4096), BF16)


@pytest.mark.usefixtures("default_flags")
class TestExplain:
    def test_says_what_is_folded_and_who_wins(self):
        (line,) = report = fuse(attention_row).explain(LARGE)
        assert line.folded_before == ("convert_element_type", "mul") and line.folded_after == ("convert_element_type",)
        assert line.traffic.ours == 4 * 8192 * 4096 and line.traffic.kernel_wins
        title, *details = str(report).split("\n")
        assert title == "softmax of float32[8192, 4096]: by the kernel: moves 128.0 MiB, XLA 158.0 MiB"
        assert details == [
            "  along (1,); 512.0 MiB with nothing folded",
            "  folded before it: convert_element_type, mul",
            "  folded after it: convert_element_type",
        ]

    def test_equal_calls_are_told_once_in_short_lines(self):
        def f(x):
            for _ in range(18):
                x = jnp.sort(jax.nn.softmax(functools.reduce(lambda x, k: jnp.tanh(x * k), range(9), x)))
            return jax.nn.log_softmax(x)

        report = fuse(f).explain(jax.ShapeDtypeStruct((8, 16, 1024, 1024), F32))
        assert len(report) == 19 and len(set(report)) == 2
        lines = str(report).split("\n")
        titles = [line for line in lines if not line.startswith(" ")]
        assert [title.split(": ")[0] for title in titles] == [
            "softmax of float32[8, 16, 1024, 1024], x 18",
            "log_softmax of float32[8, 16, 1024, 1024]",
        ]
        assert max(map(len, lines)) <= 100 and sum("folded before it" in line for line in lines) == 1

    def test_one_line_each_and_where_it_stands(self):
        def f(x):
            step = lambda x, _: (jnp.sort(jax.nn.softmax(x * 2)), None)  # noqa: E731
            return jax.lax.scan(step, jax.nn.log_softmax(x), None, 3)[0]

        report = fuse(f).explain(jax.ShapeDtypeStruct((8192, 4096), F32))
        assert [(line.op, line.path) for line in report] == [("softmax", "/scan"), ("log_softmax", "")]
        assert "\n  along (1,) in scan; " in str(report) and "\nlog_softmax of " in str(report)

    def test_attention_and_the_arrays_that_stay_in_memory(self):
        """Those of queries x keys alone: the second bias is one row for each head."""
        q, mask = shaped(8, 2048, 16, 64, dtype=BF16), shaped(2048, 2048, dtype=bool)
        bias, of_keys = shaped(16, 2048, 2048, dtype=BF16), shaped(16, 1, 2048, dtype=BF16)

        def attend(q, k, v, bias, of_keys, mask):
            scores = jnp.einsum("bihd,bjhd->bhij", q, k) / 8 + bias + of_keys
            weights = jax.nn.softmax(jnp.where(mask, scores.astype(F32), -jnp.inf))
            return jnp.einsum("bhij,bjhd->bihd", weights.astype(v.dtype), v)

        def layers(q, k, v, bias, *others):
            def layer(carry, _):
                return jax.grad(lambda *a: attend(*a, *others).astype(F32).sum(), (0, 1, 2, 3))(*carry), None

            return jax.lax.scan(layer, (q, k, v, bias), None, 3)

        title = "attention of float32[8, 16, 2048, 2048]: by its kernels: 2.00 GiB of weights are never in memory"
        assert str(fuse(attend).explain(q, q, q, bias, of_keys, mask)).split("\n") == [
            title,
            "  along (3,)",
            "  in memory: a mask, bool[2048, 2048], 4.0 MiB",
            "  in memory: an operand, bfloat16[16, 2048, 2048], 128.0 MiB",
        ]
        (line,) = report = fuse(layers).explain(q, q, q, bias, of_keys, mask)
        assert line.path == "/scan" and "  along (3,) in scan\n" in str(report)
        gradient = "  in memory: an operand's gradient, bfloat16[1, 16, 2048, 2048], 128.0 MiB"
        assert str(report).endswith("\n" + gradient) and len(line.in_memory) == 3

    def test_without_an_operator(self):
        assert str(fuse(jnp.tanh).explain(x_of())) == "no call of softmax or the like"

    def test_a_tie_is_xlas(self):
        (line,) = report = fuse(attention_row).explain(jax.ShapeDtypeStruct((1 << 17, 128), BF16))
        assert line.traffic.ours == line.traffic.xla
        title = "softmax of float32[131072, 128]: by XLA: moves 64.0 MiB, the kernel 64.0 MiB" + traffic.NOT_FEWER
        assert str(report).split("\n")[0] == title

    def test_rows_on_which_xla_is_as_fast(self):
        f = fuse(lambda x: jax.nn.softmax(x * 2, axis=(1, 3)))
        x = jax.ShapeDtypeStruct((64, 3001, 3, 29), BF16)
        (line,) = report = f.explain(x)
        assert line.traffic.kernel_wins and line.why_xla
        title = " ".join(str(report).split("\n  along")[0].split())
        assert title == (
            "softmax of bfloat16[64, 3001, 3, 29]: by XLA: rows of short runs that do not begin with whole packs cost "
            "more at their edges, though it moves 127.5 MiB, the kernel 63.7 MiB"
        )
        assert "jax_softmax" not in jax.jit(f).trace(x).lower(lowering_platforms=("cuda",)).as_text()

    def test_the_model_decides(self, monkeypatch):
        monkeypatch.setattr(costs, "XLA_SPEED_OF_ROWS", {8192: 1.0})
        assert not fuse(attention_row).explain(LARGE)[0].traffic.kernel_wins
        monkeypatch.setattr(costs, "XLA_SPEED_OF_ROWS", {8192: 0.5})
        assert fuse(attention_row).explain(LARGE)[0].traffic.kernel_wins

    @pytest.mark.parametrize("steps,n_calls", [(0, 2), (10000, 0)])
    def test_more_memory_is_taken_for_a_tenth_of_the_time(self, steps, n_calls):
        """Kernels keep probabilities, which XLA makes again. They save much of a program's time, unless it has a long
        loop as well."""

        def loss(logits, values, carry):
            soft = jax.nn.softmax(logits)
            hard = jax.nn.one_hot(jnp.argmax(soft, -1), soft.shape[-1])
            carry, _ = jax.lax.scan(lambda carry, _: (jnp.sin(carry), None), carry, None, steps)
            return jnp.sum((soft + jax.lax.stop_gradient(hard - soft)) * values) + carry.sum()

        program = jax.value_and_grad(loss), shaped(65536, 1024), shaped(65536, 1024), shaped(64)
        check(*program)
        report = fuse(program[0]).explain(*program[1:])
        assert [line.op for line in report if not line.why_xla] == ["softmax", "softmax_linear"][:n_calls]
        words = " ".join(str(report).split())
        if n_calls:
            assert all(0.98 < line.balance.more / 2**28 <= 1 for line in report)
            assert words.count(f" with kernels the program needs {report[0].balance}") == 2
            assert report[0].balance.memory > costs.MORE_MEMORY and report[0].balance.time < costs.WORTH_MEMORY
        else:
            assert re.search(
                rf": by XLA: {judge.MORE_MEMORY} 25\d.\d MiB more memory, 1.\d\d times XLA's, for 0.99", words
            )

    def test_memory_that_xla_needs_as_well(self):
        """A kernel writes over a product that nothing else reads. Beside a sorted array, XLA has its result as well."""
        x, w = shaped(8192, 64), shaped(64, 4096)
        (line,) = fuse(lambda x, w: jax.nn.softmax(x @ w * 2)).explain(x, w)
        assert not line.why_xla and line.balance is None
        (line,) = fuse(lambda x: jax.nn.softmax(jnp.sort(x) * 2)).explain(shaped(8192, 4096))
        assert not line.why_xla and line.balance is None

    def test_memory_beside_products(self):
        """Slot attention with kernels has 41 MiB besides operands and results, where XLA has 72. A router has 48, where
        XLA has 32: that compiles them so for an H100."""

        def slots(scores, values):
            weights = jax.nn.softmax(scores, axis=1) + 1e-8
            return jnp.einsum("bst,btd->bsd", weights / weights.sum(-1, keepdims=True), values).sum()

        def router(x, w):
            p = jax.nn.softmax(x @ w)
            chosen, experts = jax.lax.top_k(p, 2)
            load = jax.nn.one_hot(experts, w.shape[1]).sum(1).mean(0)
            return chosen.sum() + (load * p.mean(0)).sum() * w.shape[1]

        report = fuse(jax.value_and_grad(slots)).explain(shaped(64, 8, 16384), shaped(64, 16384, 64))
        assert [line.op for line in report if not line.why_xla] == ["logsumexp", "softmax_linear"]
        report = fuse(jax.value_and_grad(router, (0, 1))).explain(shaped(65536, 1024), shaped(1024, 64))
        assert report[-1].why_xla.startswith(f"{judge.MORE_MEMORY} 14.5 MiB")

    def test_memory_of_attention_in_loops(self):
        """A loss's kernel is not blamed for what the loop before it needs."""

        def layer(x, w):
            heads = x.reshape(8, 512, 8, 128).transpose(0, 2, 1, 3)
            keep = jax.random.bernoulli(jax.random.key(1), 0.9, (8, 8, 512, 512))
            mixed = (jax.nn.softmax(heads @ heads.swapaxes(-1, -2) * 0.1) * keep) @ heads
            return x + mixed.transpose(0, 2, 1, 3).reshape(x.shape) @ w, None

        def loss(layers, head, x, labels):
            log_p = jax.nn.log_softmax((jax.lax.scan(jax.checkpoint(layer), x, layers)[0] @ head).astype(jnp.float32))
            return -jnp.take_along_axis(log_p, labels[:, None], -1).mean()

        arrays = shaped(8, 1024, 1024, dtype=BF16), shaped(1024, 8192, dtype=BF16), shaped(4096, 1024, dtype=BF16)
        report = fuse(jax.value_and_grad(loss, (0, 1))).explain(*arrays, shaped(4096, dtype="int32"))
        assert report[-1].op == "cross_entropy_gradient" and not report[-1].why_xla

    @emulated.compiler_is_needed
    def test_xlas_are_its_own_operations(self):
        with emulated.kernels(always=False) as made:
            lowered = jax.jit(fuse(attention_row)).lower(x_of("bfloat16"))
        assert made == [] and "custom_call" not in lowered.as_text()
        assert_same(compiled(lowered)(x_of("bfloat16")), unfused(attention_row, x_of("bfloat16")), 16)
