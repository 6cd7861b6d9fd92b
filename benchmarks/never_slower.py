"""Views on which XLA was found to be as fast as our kernels: the time of jax.nn's formula over ours.

    python benchmarks/never_slower.py    # a minute; prints a table

Views on which no kernel is faster are XLA's own, by `faster_than_xla` in csrc/plan/plan.cc. There the ratio of float32
is 1; of bfloat16 XLA computes ours in float32, and jax.nn's in bfloat16.
"""

import os

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
from peers import OURS, XLA, Case, function
from run import random_array
from timing import device_times

CASES = [
    Case((120, 20000, 100), (1,), "bfloat16", direction="backward"),
    Case((60, 20000, 100), (1,), "float32", direction="backward"),
    Case((400, 640, 1000), (0, 2), "bfloat16", direction="backward"),
    Case((200, 48, 100, 280), (0, 2), "bfloat16", direction="backward"),
    Case((2000, 20, 300, 20), (1, 3), "bfloat16"),
    Case((11184810, 24), (1,), "bfloat16", "log_softmax"),
]


def main() -> None:
    print(f"{jax.devices()[0].device_kind}, JAX {jax.__version__}\n")
    print("| array, axes | what | XLA's time over ours |\n| --- | --- | --- |")
    for case in CASES:
        arguments = [random_array(case.shape, case.dtype, seed) for seed in range(1 + (case.direction == "backward"))]
        times = device_times({peer: (jax.jit(function(peer, case)), tuple(arguments)) for peer in (OURS, XLA)})
        what = f"{case.op} of {case.dtype}, {case.direction}"
        print(f"| {case.shape}, {case.axes} | {what} | {times[XLA] / times[OURS]:.2f} |", flush=True)


if __name__ == "__main__":
    main()
