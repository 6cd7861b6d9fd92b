"""A GPT's gradient step with jax.nn and optax, with this package's softmax, and with its loss as well.

    python benchmarks/gpt.py            # a minute; prints a table
    python benchmarks/gpt.py --quick    # a small model on any device, to try the script

The model is in bfloat16, the loss in float32. What is timed is the jitted loss with its gradient by all parameters; the
memory is what XLA needs beside these and the gradients.
"""

import argparse
import os
from collections.abc import Callable
from typing import NamedTuple

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp
import optax
from timing import device_times

import jax_softmax


class Size(NamedTuple):
    layers: int
    width: int
    heads: int
    batch: int
    length: int
    vocabulary: int


FULL = Size(6, 768, 12, 8, 1024, 50304)
QUICK = Size(2, 64, 4, 2, 128, 1000)


def xla_softmax(scores, causal):
    return jax.nn.softmax(jnp.where(causal, scores, jnp.finfo(scores.dtype).min))


def our_softmax(scores, causal):
    return jax_softmax.softmax(scores, where=causal)


def xla_loss(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels).mean()


VARIANTS: dict[str, tuple[Callable, Callable]] = {
    "jax.nn and optax": (xla_softmax, xla_loss),
    "softmax, and optax": (our_softmax, xla_loss),
    "softmax and cross_entropy_loss": (our_softmax, jax_softmax.cross_entropy_loss),
}


def initial_parameters(size: Size) -> dict:
    keys = iter(jax.random.split(jax.random.key(0), 2 + 4 * size.layers))

    def matrix(*shape):
        return 0.02 * jax.random.normal(next(keys), shape, jnp.bfloat16)

    d = size.width
    blocks = [
        {
            "norm1": jnp.ones(d, jnp.bfloat16),
            "qkv": matrix(d, 3, size.heads, d // size.heads),
            "out": matrix(size.heads, d // size.heads, d),
            "norm2": jnp.ones(d, jnp.bfloat16),
            "up": matrix(d, 4 * d),
            "down": matrix(4 * d, d),
        }
        for _ in range(size.layers)
    ]
    return {
        "tokens": matrix(size.vocabulary, d),
        "positions": matrix(size.length, d),
        "blocks": blocks,
        "norm": jnp.ones(d, jnp.bfloat16),
    }


def normalized(x, scale):
    wide = x.astype(jnp.float32)
    centered = wide - wide.mean(-1, keepdims=True)
    deviation = jnp.sqrt(jnp.square(centered).mean(-1, keepdims=True) + 1e-5)
    return (centered / deviation).astype(x.dtype) * scale


def logits_of(parameters, tokens, softmax):
    length = tokens.shape[1]
    causal = jnp.tri(length, dtype=bool)
    x = parameters["tokens"][tokens] + parameters["positions"]
    for block in parameters["blocks"]:
        q, k, v = jnp.einsum("bld,dihe->ibhle", normalized(x, block["norm1"]), block["qkv"])
        scores = jnp.einsum("bhqe,bhke->bhqk", q * q.shape[-1] ** -0.5, k)
        values = jnp.einsum("bhqk,bhke->bhqe", softmax(scores, causal), v)
        x += jnp.einsum("bhqe,hed->bqd", values, block["out"])
        x += jax.nn.gelu(normalized(x, block["norm2"]) @ block["up"]) @ block["down"]
    return normalized(x, parameters["norm"]) @ parameters["tokens"].T


def gradient_step(softmax, loss):
    return jax.jit(
        jax.value_and_grad(lambda parameters, tokens, labels: loss(logits_of(parameters, tokens, softmax), labels))
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a small model")
    size = QUICK if parser.parse_args().quick else FULL

    text = jax.random.randint(jax.random.key(1), (size.batch, size.length + 1), 0, size.vocabulary)
    arguments = initial_parameters(size), text[:, :-1], text[:, 1:]
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
