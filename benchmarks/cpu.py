"""The operators on a CPU next to XLA's best formulation of each: ours over XLA's time, so that less is better.

    python benchmarks/cpu.py                           # half an hour; prints a table
    python benchmarks/cpu.py --operators entropy ...   # those alone
    python benchmarks/cpu.py --quick                   # small arrays, to try the script

All of a figure take turns in one process, and of each the fastest call counts. A gradient is made with its value, and
once more alone, from a cotangent that is an argument, as within a larger program. XLA's are `jax.nn`, optax of float32,
and for entropies and scaled rows what their documentation says in jax.numpy.
"""

import argparse
import functools
import os
import platform
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

os.environ["JAX_PLATFORMS"] = "cpu"

import absmax_scale
import jax
import jax.numpy as jnp
import losses
import optax
from models import part_of
from timing import device_times
from tqdm import tqdm

import jax_softmax
from jax_softmax import _kernels

# Arrays and axes: features, a vocabulary, few classes, an odd number of them, attention, images' classes; small batches
# of training, long rows, and an axis between others.
CASES = [
    ((8192, 512), 1),
    ((512, 50257), 1),
    ((65536, 32), 1),
    ((16384, 129), 1),
    ((64, 197, 197), 2),
    ((16, 21, 16384), 1),
    ((8, 128, 128), 2),
    ((256, 1000), 1),
    ((12000, 1500), 1),
    ((60, 1100, 256), 1),
]
DTYPES = ("float32", "bfloat16")


class Operator(NamedTuple):
    """One of this package's, and what XLA is given instead; each of the operands and axis."""

    ours: Callable
    theirs: tuple[Callable, ...]
    operands: tuple[str, ...] = ("logits",)
    differentiated: int | None = 1  # so many operands, the first ones


def of_float32(f):
    """optax's functions as they are used with logits of 16 bits."""
    return lambda logits, labels, axis: f(logits.astype(jnp.float32), labels, axis)


def scaled(x, axis):
    return absmax_scale.theirs(x, axis, x.dtype.name)


def quantized(x, axis):
    return absmax_scale.theirs(x, axis, "int8")


integer_labels = of_float32(optax.softmax_cross_entropy_with_integer_labels)
MADE = ("{}", "{} + gradient", "gradient of {}")
OPERATORS = {
    "softmax": Operator(jax_softmax.softmax, (jax.nn.softmax,)),
    "log_softmax": Operator(jax_softmax.log_softmax, (jax.nn.log_softmax,)),
    "logsumexp": Operator(functools.partial(jax_softmax.logsumexp, dtype="float32"), (losses.theirs_logsumexp,)),
    "softmax_cross_entropy_with_integer_labels": Operator(
        jax_softmax.softmax_cross_entropy_with_integer_labels, (integer_labels,), ("logits", "labels")
    ),
    "cross_entropy_loss": Operator(
        jax_softmax.cross_entropy_loss,
        (lambda *operands, axis: integer_labels(*operands, axis).mean(),),
        ("logits", "labels"),
    ),
    "fuse of optax's mean loss": Operator(
        lambda *operands, axis: jax_softmax.fuse(lambda *operands: integer_labels(*operands, axis).mean())(*operands),
        (lambda *operands, axis: integer_labels(*operands, axis).mean(),),
        ("logits", "labels"),
    ),
    "softmax_cross_entropy": Operator(
        jax_softmax.softmax_cross_entropy,
        (of_float32(optax.softmax_cross_entropy),),
        ("logits", "probabilities"),
    ),
    "entropy": Operator(*losses.ENTROPIES["entropy"]),
    "kl_divergence": Operator(*losses.ENTROPIES["kl_divergence"], ("logits", "others"), 2),
    "absmax_scale": Operator(jax_softmax.absmax_scale, (scaled,)),
    "absmax_scale to int8": Operator(
        functools.partial(jax_softmax.absmax_scale, dtype="int8"), (quantized,), differentiated=None
    ),
}


def operand(name, shape, axis, dtype):
    keys = jax.random.split(jax.random.key(0), 3)
    if name == "labels":
        return jax.random.randint(keys[1], [n for d, n in enumerate(shape) if d != axis], 0, shape[axis])
    x = jax.random.normal(keys[2 if name == "others" else 0], shape, dtype)
    return jax.nn.softmax(x.astype(jnp.float32), axis).astype(dtype) if name == "probabilities" else x


def with_gradient(f, differentiated, value):
    def gradient(cotangent, *operands):
        constant = operands[differentiated:]
        y, pullback = jax.vjp(lambda *operands: f(*operands, *constant), *operands[:differentiated])
        of_operands = pullback(cotangent.astype(y.dtype))
        return (y, of_operands) if value else of_operands

    return gradient


def first_result(f):
    """What is differentiated of it."""

    def result(*operands):
        found = f(*operands)
        return found[0] if isinstance(found, tuple) else found

    return result


def ratio(operator, what, shape, axis, dtype, repeats):
    """Our time over XLA's for one of `MADE`; nothing of what has no gradient."""
    operands = [operand(name, shape, axis, dtype) for name in operator.operands]
    calls = [functools.partial(f, axis=axis) for f in (operator.ours, *operator.theirs)]
    if what != "{}":
        if operator.differentiated is None:
            return ""
        calls = [with_gradient(first_result(f), operator.differentiated, "+" in what) for f in calls]
        result = jax.eval_shape(first_result(functools.partial(operator.ours, axis=axis)), *operands)
        operands = [jax.random.normal(jax.random.key(1), result.shape, dtype), *operands]
    times = device_times({str(k): (jax.jit(f), tuple(operands)) for k, f in enumerate(calls)}, repeats)
    ours, *theirs = times.values()
    return f"{ours / min(theirs):.2f}"


def processor():
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--operators", nargs="+", choices=OPERATORS, default=list(OPERATORS), metavar="NAME")
    parser.add_argument(
        "--part", type=int, nargs=2, default=(0, 1), metavar=("K", "N"), help="the K-th of N, from 0 on"
    )
    parser.add_argument("--quick", action="store_true", help="small arrays")
    arguments = parser.parse_args()
    smaller = (lambda shape: tuple(min(n, 300) for n in shape)) if arguments.quick else lambda shape: shape

    repeats = 2 if arguments.quick else 15
    variant = _kernels.build_info()["cpu_variant"]
    print(f"{processor()}, {os.cpu_count()} cores, kernels for {variant}, JAX {jax.__version__}\n")
    print(f"Our time over XLA's, of {' and '.join(DTYPES)}; of `+ gradient` with the value.\n")
    print("| | " + " | ".join(f"{smaller(shape)}, {axis}" for shape, axis in CASES) + " |")
    print("|" + " --- |" * (1 + len(CASES)))
    rows = [(name, what) for name in arguments.operators for what in MADE]
    for name, what in tqdm(part_of(rows, *arguments.part), disable=None):
        cells = [
            [ratio(OPERATORS[name], what, smaller(shape), axis, dtype, repeats) for dtype in DTYPES]
            for shape, axis in CASES
        ]
        if any(cells[0]):
            tqdm.write(f"| {what.format(name)} | " + " | ".join(", ".join(pair) for pair in cells) + " |")


if __name__ == "__main__":
    main()
