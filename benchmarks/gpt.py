"""A GPT's gradient step with jax.nn and optax, with this package's softmax, and with its loss as well.

    python benchmarks/gpt.py            # a minute; prints a table
    python benchmarks/gpt.py --quick    # a small model on any device, to try the script

The model is in bfloat16, the loss in float32. What is timed is the jitted loss with its gradient by all parameters; the
memory is what XLA needs beside these and the gradients.
"""

import argparse
import os
from collections.abc import Callable

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp
import optax
from gpt_model import FULL, Size, initial_arguments, logits_of, softmax_with_fill
from timing import device_times

import jax_softmax

QUICK = Size(2, 64, 4, 2, 128, 1000)


def our_softmax(scores, causal):
    return jax_softmax.softmax(scores, where=causal)


def xla_loss(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels).mean()


VARIANTS: dict[str, tuple[Callable, Callable]] = {
    "jax.nn and optax": (softmax_with_fill, xla_loss),
    "softmax, and optax": (our_softmax, xla_loss),
    "softmax and cross_entropy_loss": (our_softmax, jax_softmax.cross_entropy_loss),
}


def gradient_step(softmax, loss):
    return jax.jit(
        jax.value_and_grad(lambda parameters, tokens, labels: loss(logits_of(parameters, tokens, softmax), labels))
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a small model")
    size = QUICK if parser.parse_args().quick else FULL

    arguments = initial_arguments(jax.random.key(0), size)
    programs = {name: gradient_step(*parts).lower(*arguments).compile() for name, parts in VARIANTS.items()}
    losses = {name: float(program(*arguments)[0]) for name, program in programs.items()}
    times = device_times({name: (program, arguments) for name, program in programs.items()})

    print(f"{jax.devices()[0].device_kind}, JAX {jax.__version__}, {size}, bfloat16\n")
    print("| softmax and loss | ms | temporary memory, MiB | loss |\n| --- | --- | --- | --- |")
    for name, program in programs.items():
        time = times[name]
        shown = str(time)[:80] if isinstance(time, Exception) else f"{time * 1e3:.2f}"
        print(f"| {name} | {shown} | {program.memory_analysis().temp_size_in_bytes / 2**20:.0f} | {losses[name]:.4f} |")


if __name__ == "__main__":
    main()
