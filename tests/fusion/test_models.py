"""Code of other people under `fuse`, unchanged: what benchmarks/models.py and never_slower.py measure.

On small arrays, as on a GPU: a CPU has the custom calls done by the host (see emulated.py).
"""

import computations
import emulated
import jax
import jax.numpy as jnp
import never_slower
import numpy as np
import pytest
import support
from by_numpy import by_numpy
from computation import largest_difference

import jax_softmax
from jax_softmax.fusion import rewriting
from jax_softmax.fusion.program import graph
from jax_softmax.primitives.as_stored import as_stored_p

MODELS = {c.name: c for c in computations.COMPUTATIONS}
MODELS |= {c.name: c for c in never_slower.COMPUTATIONS if c.inner is None}  # the others are views


# The kernels that a model's programs call; a + stands where something is folded into one of that name.
ATTENTION = "softmax+ softmax_linear+"
AGAIN = "softmax_and_normalizer+ softmax_linear+"  # of float32, whose probabilities are made anew
LOSS = "cross_entropy_gradient"
GRADIENT_OF_LOGARITHMS = "log_softmax_vjp+ logsumexp"
KERNELS = {
    "attention": ATTENTION,
    "attention_float32": AGAIN,
    "attention_float32, derivative of fused": AGAIN,
    "attention_bias": ATTENTION,
    "attention_tanh_cap": ATTENTION,
    "loss_log_softmax": LOSS,
    "loss_log_softmax, derivative of fused": GRADIENT_OF_LOGARITHMS,
    "loss_one_hot": LOSS,
    "loss_smoothed": "cross_entropy_gradient_and_distances",
    "cross_entropy_loss_cast": LOSS,
    "loss_t5x": LOSS,
    "head_with_bias": "cross_entropy_gradient_and_distances+",
    "softmax_written_out": "softmax softmax_linear",
    "scaled_softmax": "softmax+",
    "sampling": "logsumexp+",
    "gpt": f"{LOSS} {ATTENTION}",
    "jax_bias_mask": AGAIN,
    "jax_causal": AGAIN,
    "jax_window": AGAIN,
    "nnx_mask": AGAIN,
    "nnx_bias_dropout": ATTENTION,
    "linen_mask": ATTENTION,
    "linen_float32_dropout": AGAIN,
    "linen_bias": ATTENTION,
    "equinox": AGAIN,
    "haiku": AGAIN,
    "gemma_attention": ATTENTION,
    "gemma_loss": f"{LOSS}+",
    "alphafold": "softmax+ softmax_linear",
    "t5": "softmax+ softmax_linear",
    "ppo": GRADIENT_OF_LOGARITHMS,
    "dpo": f"{LOSS} logsumexp",
    "grpo": f"{LOSS} logsumexp",
    "distillation": "kl_divergence+ log_softmax_vjp+ logsumexp+",
    "pixels, classes moved last": LOSS,
    "pixels, classes last": LOSS,
    "CLIP by optax": f"logsumexp {LOSS}+",
    "attention with a sink column": "softmax softmax_linear",
    "entropy": GRADIENT_OF_LOGARITHMS,
    "InfoNCE": f"{LOSS}+",
    "masked loss": LOSS,
    "linen, dropout": ATTENTION,
}

# Plain `pytest` runs the first model that calls each of the kernels.
FIRST = {kernel: name for name, kernels in reversed(KERNELS.items()) for kernel in kernels.split()}.values()
every_model = pytest.mark.parametrize(
    "name", [name if name in FIRST else pytest.param(name, marks=pytest.mark.sweep) for name in MODELS]
)
pytestmark = [
    pytest.mark.usefixtures("in_haste"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of packages that are older than this JAX
]


def model_of(name):
    if MODELS[name].package is not None:
        pytest.importorskip(MODELS[name].package)
    return MODELS[name]


@support.sampled("name", [c.name for c in computations.COMPUTATIONS], 4)
def test_what_is_folded_can_be_said(name):
    """On any platform, and of the sizes that are measured."""
    model = model_of(name)
    arguments = jax.eval_shape(model.make_args, jax.random.key(0))
    report = jax_softmax.fuse(model.function).explain(*arguments)
    assert report and all(line.why_not == "" for line in report), str(report)
    rewritten = rewriting.rewritten(jax.make_jaxpr(jax_softmax.fuse(model.function))(*arguments).jaxpr)
    pending = [rewritten]
    while pending:  # `recomputed.py` says what is in memory, not the operators' own formulas
        for eqn in pending.pop().eqns:
            assert eqn.primitive is not as_stored_p, str(eqn)
            pending += graph.jaxprs_of(eqn.params)


def in_float64(model, arguments):
    """Of a model of float32: its results, rounded to their dtypes."""
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda a: a.astype(jnp.float64) if a.dtype == jnp.float32 else a, arguments)
        results = by_numpy(model.function, *wide)
    narrow = {"float64": np.float32, "int64": np.int32}
    return jax.tree.map(lambda a: a.astype(narrow.get(a.dtype.name, a.dtype)), results)


@emulated.compiler_is_needed
@every_model
def test_fused_is_equal_up_to_roundings(name):
    model = model_of(name)
    arguments = model.make_small_args(jax.random.key(0))
    with (emulated.kernels if jax.default_backend() == "cpu" else emulated.all_kernels)() as made:
        fused = jax.jit(model.fused).lower(*arguments)
    actual = fused.compile()(*arguments)
    is_float32 = all(a.dtype in (jnp.float32, jnp.int32) for a in jax.tree.leaves(arguments))
    expected = in_float64(model, arguments) if is_float32 else support.in_haste(model.function, *arguments)
    assert largest_difference(model, actual, expected) <= 1
    if name in KERNELS:
        folds = {kernel.op + "+" * any((kernel._text_of_load(), kernel._text_of_store())) for kernel in made}
        assert folds == set(KERNELS[name].split())
