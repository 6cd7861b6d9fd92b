"""A GPT's gradient step as it is, under `fuse`, with this package's functions, and with cuDNN's attention.

    python benchmarks/gpt.py            # two minutes; prints a table
    python benchmarks/gpt.py --quick    # a small model on any device, to try the script

The model is in bfloat16, the loss in float32. What is timed is the jitted loss with its gradient by all parameters; the
memory is what XLA needs beside these and the gradients. The loss beside cuDNN's attention is under `fuse`, too.
"""

import argparse
import functools
import os

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp
import optax
from gpt_model import FULL, LONG, Size, attention, initial_arguments, logits_of
from timing import device_times

import jax_softmax

QUICK = Size(2, 64, 4, 2, 128, 1000)


def our_softmax(scores, causal):
    return jax_softmax.softmax(scores, where=causal)


def xla_loss(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels).mean()


def cudnn_attention(q, k, v):
    """Of (batch, heads, length, features); cuDNN's has the heads behind the length."""
    q, k, v = (a.swapaxes(1, 2) for a in (q, k, v))
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn").swapaxes(1, 2)


def gradient_step(loss, attention):
    return jax.value_and_grad(lambda parameters, tokens, labels: loss(logits_of(parameters, tokens, attention), labels))


AS_IT_IS = gradient_step(xla_loss, attention)
PROGRAMS = {
    "jax.nn and optax": AS_IT_IS,
    "`fuse` of it": jax_softmax.fuse(AS_IT_IS),
    "softmax and cross_entropy_loss": gradient_step(
        jax_softmax.cross_entropy_loss, functools.partial(attention, softmax=our_softmax)
    ),
    "`fuse` of it with cuDNN's attention": jax_softmax.fuse(gradient_step(xla_loss, cudnn_attention)),
}


def rows(size: Size) -> list[str]:
    arguments = initial_arguments(jax.random.key(0), size)
    compiled = {}
    for name, step in PROGRAMS.items():
        try:
            compiled[name] = jax.jit(step).lower(*arguments).compile()
        except (RuntimeError, ValueError) as refusal:  # of cuDNN, which takes no small models and needs a GPU
            print(f"{name}: {str(refusal)[:200]}")
    losses = {name: float(program(*arguments)[0]) for name, program in compiled.items()}
    times = device_times({name: (program, arguments) for name, program in compiled.items()})
    found = []
    for name, program in compiled.items():
        time = str(times[name])[:80] if isinstance(times[name], Exception) else f"{times[name] * 1e3:.2f}"
        memory = program.memory_analysis().temp_size_in_bytes / 2**20
        found.append(f"| {size.batch} x {size.length} | {name} | {time} | {memory:.0f} | {losses[name]:.4f} |")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a small model")
    sizes = [QUICK] if parser.parse_args().quick else [FULL, LONG]

    shown = [row for size in sizes for row in rows(size)]
    size = sizes[0]
    model = f"{size.layers} layers of {size.width} features and {size.heads} heads, {size.vocabulary} words"
    print(f"{jax.devices()[0].device_kind}, JAX {jax.__version__}, {model}, bfloat16\n")
    print("| tokens | step | ms | temporary memory, MiB | loss |\n| --- | --- | --- | --- | --- |")
    print("\n".join(shown))


if __name__ == "__main__":
    main()
