"""Attention whose weights are never in memory next to the program that has them there, bfloat16, on one GPU.

    python benchmarks/attention.py            # less than a minute; prints a table
    python benchmarks/attention.py --quick    # small arrays, to try the script

Device time of the jitted function; of it with its gradient by q, k and v; and by k and v alone, which has no kernel of
dq. Memory besides arguments and results. Errors are the kernels' largest distances from the program, as parts of the
largest value.
"""

import argparse
import os
import time

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp
from timing import device_times

from jax_softmax.fusion.attention.traced import attend, attention_of


def plain(x, i, j, scale):
    return x * scale


def causal(x, i, j, scale):
    return jnp.where(i >= j, x * scale, -1e30)


def capped(x, i, j, scale):
    return jnp.where(i >= j, 50 * jnp.tanh(x * (scale / 50)), -1e30)


def of(score, batch, length, heads, features):
    """A name, q, k, v and the output's cotangent, and what is compared: the program, and the kernels."""
    scale = features**-0.5

    def of_product(x, i, j):
        return score(x, i, j, scale)

    def program(q, k, v):
        i, j = jnp.arange(length)[:, None], jnp.arange(length)
        scores = of_product(jnp.einsum("bihd,bjhd->bhij", q, k), i, j)
        return jnp.einsum("bhij,bjhd->bihd", jax.nn.softmax(scores), v)

    attention = attention_of(of_product, "bihd,bjhd,bjhe", ["i", "j"], ["index", "index"], "bfloat16")
    kernels = attend(attention, None if score is plain else lambda i, j: i >= j)
    keys = jax.random.split(jax.random.key(0), 4)
    operands = [jax.random.normal(key, (batch, length, heads, features), jnp.bfloat16) for key in keys]
    return f"B{batch} S{length} H{heads} D{features} {score.__name__}", operands, {"XLA": program, "kernels": kernels}


def with_gradient(function):
    def both(q, k, v, o_cotangent):
        o, transposed = jax.vjp(function, q, k, v)
        return o, *transposed(o_cotangent)

    return both


def without_dq(function):
    def some(*operands):
        o, _, dk, dv = with_gradient(function)(*operands)
        return o, dk, dv

    return some


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small arrays")
    small = parser.parse_args().quick
    usual, long = ((1, 256, 2, 64), (1, 256, 2, 128)) if small else ((8, 2048, 16, 64), (4, 4096, 16, 128))
    cases = [of(score, *usual) for score in (causal, plain, capped)] + [of(causal, *long)]

    begun = time.perf_counter()
    print(f"{jax.devices()[0].device_kind}, JAX {jax.__version__}, bfloat16, microseconds\n")
    heads = ["", "forward: XLA", "kernels", "with gradient: XLA", "kernels", "without dq", "MiB: XLA", "kernels"]
    print(f"| {' | '.join([*heads, 'errors of o, dq, dk, dv'])} |\n|{' --- |' * (len(heads) + 1)}")
    for name, operands, functions in cases:
        calls = {}
        for who, function in functions.items():
            calls[f"{who}, forward"] = jax.jit(function).lower(*operands[:3]).compile(), tuple(operands[:3])
            calls[f"{who}, both"] = jax.jit(with_gradient(function)).lower(*operands).compile(), tuple(operands)
        calls["kernels, without dq"] = (
            jax.jit(without_dq(functions["kernels"])).lower(*operands).compile(),
            tuple(operands),
        )
        memory = [calls[f"{who}, both"][0].memory_analysis().temp_size_in_bytes >> 20 for who in functions]
        results = [calls[f"{who}, both"][0](*operands) for who in functions]
        errors = []
        for a, b in zip(*results, strict=True):
            a, b = a.astype(jnp.float32), b.astype(jnp.float32)
            errors.append(f"{float(jnp.abs(a - b).max() / jnp.abs(a).max()):.0e}")
        del results
        order = [f"{who}, {part}" for part in ("forward", "both") for who in functions] + ["kernels, without dq"]
        times = device_times(calls, repeats=5)
        shown = [t if isinstance(t, Exception) else f"{1e6 * t:.0f}" for t in map(times.get, order)]
        print(f"| {name} | {' | '.join(map(str, [*shown, *memory, ' '.join(errors)]))} |", flush=True)
    print(f"\n{time.perf_counter() - begun:.0f} s")


if __name__ == "__main__":
    main()
