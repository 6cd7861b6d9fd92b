"""The programs that benchmarks/attention.py measures: kernels of attention make all that their softmaxes are for."""

import emulated
import jax
import pytest
from programs_of_attention import CASES, difference, operands_of, parts_of, swin

from jax_softmax import fuse
from jax_softmax.fusion.attention.kernels import attention_p
from jax_softmax.fusion.rewriting import rewritten

pytestmark = pytest.mark.usefixtures("on_the_cpu")
PROGRAMS = {" ".join([case[0].__name__, *case[6:]]): case for case in CASES}  # and a dtype, if it is another one


@pytest.mark.parametrize("name", PROGRAMS)
def test_program_is_found(name):
    program, _, _, heads, of_keys, _, *dtype = PROGRAMS[name]
    case = program, 64 if program is swin else 2, 64, heads // 2, of_keys // 2, 32, *dtype
    for part, made in parts_of(program).items():
        (eqn,) = jax.make_jaxpr(fuse(made(program)))(*operands_of(*case)).eqns
        with emulated.kernels(attention=True):
            eqns = rewritten(eqn.params["jaxpr"]).eqns
        assert not any("softmax" in e.primitive.name for e in eqns if e.primitive is not attention_p)
        kernels = [kernel for e in eqns if e.primitive is attention_p for kernel in e.params["kernels"]]
        n = 2 if program is difference else 1
        assert len(kernels) >= n * (1 if part == "forward" else 3)
