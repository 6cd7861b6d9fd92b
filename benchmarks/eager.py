"""Eager calls on a small array, which are all overhead: how long they take here and in jax.nn, side by side.

python benchmarks/eager.py
"""

import argparse
import time

import jax
import jax.numpy as jnp
import numpy as np

import jax_softmax

OPERATORS = ("softmax", "log_softmax")


def calls(f):
    """Calls of an operator, by name."""
    host = np.random.default_rng(0).normal(size=(8, 16)).astype(np.float32)
    x, where = jnp.asarray(host), jnp.asarray(host > 0)
    _, pullback = jax.vjp(f, x)
    return {
        "array": lambda: f(x),
        "axis=0": lambda: f(x, axis=0),
        "mask": lambda: f(x, where=where),
        "NumPy array": lambda: f(host),
        "number, axis=None": lambda: f(1.0, axis=None),
        "vjp": lambda: jax.vjp(f, x)[0],
        "its pullback": lambda: pullback(x)[0],
        "jvp": lambda: jax.jvp(f, (x,), (x,))[1],
        "vmap": lambda: jax.vmap(f)(x),
    }


def microseconds(call, repeats):
    start = time.perf_counter()
    for _ in range(repeats):
        result = call()
    result.block_until_ready()
    return (time.perf_counter() - start) / repeats * 1e6


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20, help="the figures are the least of so many (default 20)")
    rounds = parser.parse_args().rounds
    print(f"{'µs':31} {'here':>8} {'jax.nn':>8} {'ratio':>6}")
    for name in OPERATORS:
        ours, theirs = calls(getattr(jax_softmax, name)), calls(getattr(jax.nn, name))
        for label in ours:
            both = ours[label], theirs[label]
            for call in both:
                call()  # compiles
            # 20 ms a round. They take turns, so that a slow moment is the same for both.
            repeats = [max(1, int(2e4 / microseconds(call, 3))) for call in both]
            turns = [[microseconds(call, n) for call, n in zip(both, repeats, strict=True)] for _ in range(rounds)]
            here, there = (min(times) for times in zip(*turns, strict=True))
            print(f"{name + ', ' + label:31} {here:8.1f} {there:8.1f} {here / there:6.2f}")


if __name__ == "__main__":
    main()
