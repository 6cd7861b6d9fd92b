"""Prints the seconds that the first call of a program takes: 50 softmaxes of 10 shapes, and their gradient.

    python benchmarks/first_call.py jax_softmax|XLA

A process of its own, so that nothing of it has been compiled before.
"""

import sys
import time

import jax
import jax.numpy as jnp

import jax_softmax

LENGTHS = (128, 257, 512, 1000, 1999, 4096, 8192, 16384, 32768, 50257)
SOFTMAXES = 50


def main() -> None:
    softmax = jax_softmax.softmax if sys.argv[1] == "jax_softmax" else jax.nn.softmax
    arrays = [jnp.ones((64, n), jnp.bfloat16) for n in LENGTHS]

    @jax.jit
    @jax.grad
    def gradient(arrays):
        return sum(
            jnp.sum(softmax(arrays[i % len(arrays)] * (i + 1)).astype(jnp.float32) ** 2) for i in range(SOFTMAXES)
        )

    jax.block_until_ready(arrays)
    start = time.perf_counter()
    jax.block_until_ready(gradient(arrays))
    print(time.perf_counter() - start)


if __name__ == "__main__":
    main()
