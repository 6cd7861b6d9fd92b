"""absmax_scale next to XLA's jax.numpy formulation: fractions of the copy rate of one read and one write.

    python benchmarks/absmax_scale.py            # a minute; prints a table
    python benchmarks/absmax_scale.py --quick    # small arrays on any device, to try the script

XLA's is what the function's documentation says, written in jax.numpy, in one jitted program.
"""

import argparse
import os

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp
from timing import copy_rate, device_times

import jax_softmax

LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0}
CASES = [
    ((442368, 128), 1, "float32", "float32"),
    ((16384, 4096), 1, "bfloat16", "int8"),
    ((8192, 8192), 1, "bfloat16", "float8_e4m3fn"),
    ((65536, 1024), 1, "bfloat16", "bfloat16"),
    ((4096, 50257), 1, "bfloat16", "int8"),
    ((1024, 262144), 1, "bfloat16", "int8"),
    ((2000000, 33), 1, "bfloat16", "int8"),
    ((256, 1024, 1024), 1, "bfloat16", "int8"),
    ((64, 1024, 1000), 1, "float32", "float8_e4m3fn"),
]


def theirs(x, axis, result):
    wide = x.astype(jnp.float32)
    largest = jnp.max(jnp.abs(wide), axis, keepdims=True)
    if result not in LARGEST:
        return (wide / largest).astype(result), largest
    y = wide * (LARGEST[result] / largest)
    return (jnp.round(y) if result == "int8" else y).astype(result), largest / LARGEST[result]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small arrays")
    arguments = parser.parse_args()
    smaller = (lambda shape: tuple(min(n, 300) for n in shape)) if arguments.quick else lambda shape: shape

    rate = copy_rate(1 << (20 if arguments.quick else 28))
    print(f"{jax.devices()[0].device_kind}, JAX {jax.__version__}, copies {rate / 1e12:.2f} TB/s\n")
    print("| array, axis | dtypes | absmax_scale | XLA |\n" + "|" + " --- |" * 4)
    for shape, axis, dtype, result in CASES:
        shape = smaller(shape)
        x = jax.random.normal(jax.random.key(0), shape, dtype)
        calls = {
            "absmax_scale": lambda x, axis=axis, result=result: jax_softmax.absmax_scale(x, axis, dtype=result),
            "XLA": lambda x, axis=axis, result=result: theirs(x, axis, result),
        }
        times = device_times({name: (jax.jit(f), (x,)) for name, f in calls.items()}, 10)
        n_bytes = x.nbytes + x.size * jnp.dtype(result).itemsize
        fractions = [t if isinstance(t, Exception) else f"{n_bytes / rate / t:.2f}" for t in times.values()]
        print(f"| {shape}, {axis} | {dtype} to {result} | " + " | ".join(map(str, fractions)) + " |")


if __name__ == "__main__":
    main()
