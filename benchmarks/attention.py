"""Attention as programs write it, under `jit` and under `jit(fuse(...))`, on one GPU.

    python benchmarks/attention.py                 # minutes; prints a table
    python benchmarks/attention.py --part 0 2      # the first half of it
    python benchmarks/attention.py --only swin t5  # programs by parts of their names
    python benchmarks/attention.py --quick         # small arrays, to try the script

Device time of the output, with its tangent in forward mode, and of the output with the gradients of q, k, v and of
what is learned beside. `triangle` is the attention of structures' pairs: a row has a bias that all rows share, and a
mask. Memory is what is needed besides arguments and results. Errors are the fused program's largest distances from
the unfused one, as parts of the largest value, where that has room. cuDNN's attention stands beside where it takes the
mask: the output, and with gradients.
"""

import argparse
import functools
import os

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp
from models import part_of
from programs_of_attention import CASES, causal, grouped, name_of, operands_of, parts_of, plain, swin
from timing import compiled_at_once, device_times

import jax_softmax

# Programs that cuDNN's attention does, by how it is asked.
BY_CUDNN = {plain: {}, causal: {"is_causal": True}, grouped: {"is_causal": True}}
MOST_BYTES = 16 << 30  # of an array of scores, beyond which the unfused program is not tried


def distances(a, b):
    found = []
    for x, y in zip(a, b, strict=True):
        x, y = x.astype(jnp.float32), y.astype(jnp.float32)
        found.append(f"{float(jnp.abs(x - y).max() / jnp.abs(x).max()):.0e}")
    return " ".join(found)


def lowered_by_cudnn(program, parts, operands):
    """cuDNN's attention, where it takes the mask, the dtype and the lengths."""
    if program not in BY_CUDNN or operands[0].dtype.itemsize != 2 or jax.default_backend() != "gpu":
        return {}
    attention = functools.partial(jax.nn.dot_product_attention, implementation="cudnn", **BY_CUDNN[program])
    try:
        return {("cuDNN", part): jax.jit(made(attention)).lower(*operands) for part, made in parts.items()}
    except NotImplementedError:
        return {}


def measured(case):
    program, batch, length, heads, *_ = case
    operands = operands_of(*case)
    transforms = {"XLA": lambda f: f, "fuse": jax_softmax.fuse}
    if 2 * batch * heads * length**2 > MOST_BYTES:
        del transforms["XLA"]
    parts = parts_of(program)
    last = list(parts)[-1]
    lowered = {
        (who, part): jax.jit(transform(made(program)), keep_unused=True).lower(*operands)
        for who, transform in transforms.items()
        for part, made in parts.items()
    } | lowered_by_cudnn(program, parts, operands)
    compiled = compiled_at_once(lowered)
    results = [compiled[who, last](*operands) for who in transforms]
    errors = distances(*results) if len(results) > 1 else "-"
    memory = {who: compiled[who, last].memory_analysis().temp_size_in_bytes >> 20 for who in transforms}
    del results
    times = device_times({which: (one, tuple(operands)) for which, one in compiled.items()}, repeats=5)

    def time_of(*which):
        found = times.get(which, "-")
        return f"{1e6 * found:.0f}" if isinstance(found, float) else str(found)

    shown = [time_of(who, part) for part in ("forward", "both") for who in ("XLA", "fuse")]
    of_cudnn = [time_of("cuDNN", part) for part in ("forward", "both")]
    return [name_of(case), *shown, *(memory.get(who, "-") for who in ("XLA", "fuse")), errors, *of_cudnn]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small arrays")
    parser.add_argument("--only", nargs="+", default=[""], metavar="NAME", help="a part of a program's name")
    parser.add_argument("--part", type=int, nargs=2, default=(0, 1), metavar=("K", "N"), help="the K-th of N")
    options = parser.parse_args()
    cases = [case for case in part_of(CASES, *options.part) if any(name in name_of(case) for name in options.only)]
    if options.quick:
        cases = [
            (program, 64 if program is swin else 1, min(n, 256), heads // 4, of // 4, *rest)
            for program, _, n, heads, of, *rest in cases
        ]
    device = f"{jax.devices()[0].device_kind}, JAX {jax.__version__}"
    print(f"# Attention\n\n{device}, microseconds, of bfloat16 unless it says otherwise\n")
    heads = [
        "",
        "output: XLA",
        "fuse",
        "with gradients: XLA",
        "fuse",
        "MiB: XLA",
        "fuse",
        "errors of o, dq, dk, dv",
        "cuDNN",
        "cuDNN",
    ]
    show(heads, map(measured, cases))


def show(heads, rows) -> None:
    print(f"| {' | '.join(heads)} |\n|{' --- |' * len(heads)}")
    for row in rows:
        print(f"| {' | '.join(map(str, row))} |", flush=True)


if __name__ == "__main__":
    main()
