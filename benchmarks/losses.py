"""Losses next to XLA's best formulation of the same: device time, fractions of the copy rate, and temporary memory.

    python benchmarks/losses.py            # minutes; prints tables
    python benchmarks/losses.py --quick    # small arrays on any device, to try the script

XLA's are optax's cross entropy of the logits converted to float32, and jax.nn.logsumexp; of the entropies the faster
one of two formulations. The floor of a loss with its gradient is one read and one write of the logits, of a loss alone
one read, at the rate of copies.
"""

import argparse
import os

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp
import optax
from timing import copy_rate, device_times

import jax_softmax

VOCABULARIES = [(8192, 50257), (4096, 128256), (2048, 262144)]
ROWS = [(1 << 21, 128), (1 << 18, 1024), (65536, 4096), (16384, 16384), (8192, 32768), (8192, 50257), (2048, 262144)]
OTHER_AXES = [((256, 1024, 1024), 1), ((64, 4096, 1024), 1), ((255, 1023, 1023), 1), ((262144, 1024), 0)]


def theirs(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels).mean()


def theirs_logsumexp(x, axis):
    return jax.nn.logsumexp(x.astype(jnp.float32), axis)


def with_softmax(x, axis=-1):
    x = x.astype(jnp.float32)
    return -jnp.sum(jax.nn.softmax(x, axis) * jax.nn.log_softmax(x, axis), axis)


def with_exponential(x, axis=-1):
    log_p = jax.nn.log_softmax(x.astype(jnp.float32), axis)
    return -jnp.sum(jnp.exp(log_p) * log_p, axis)


def difference_of_logarithms(x, y, axis=-1):
    log_p, log_q = (jax.nn.log_softmax(a.astype(jnp.float32), axis) for a in (x, y))
    return jnp.sum(jnp.exp(log_p) * (log_p - log_q), axis)


def of_optax(x, y, axis=-1):
    log_q = jax.nn.log_softmax(y.astype(jnp.float32), axis)
    return optax.losses.kl_divergence(log_q, jax.nn.softmax(x.astype(jnp.float32), axis), axis)


# Ours and XLA's.
ENTROPIES = {
    "entropy": (jax_softmax.entropy, (with_softmax, with_exponential)),
    "kl_divergence": (jax_softmax.kl_divergence, (difference_of_logarithms, of_optax)),
}
LOSSES = {
    "XLA": theirs,
    "cross_entropy_loss": jax_softmax.cross_entropy_loss,
    "losses, then mean": lambda x, labels: jax_softmax.softmax_cross_entropy_with_integer_labels(x, labels).mean(),
}


def gradient_of(f, operands):
    return jax.value_and_grad(lambda *operands: f(*operands).sum(), tuple(range(operands)))


def microseconds(time):
    return str(time)[:80] if isinstance(time, Exception) else f"{time * 1e6:.0f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small arrays")
    arguments = parser.parse_args()
    smaller = (lambda shape: tuple(min(n, 300) for n in shape)) if arguments.quick else lambda shape: shape

    rate = copy_rate(1 << (20 if arguments.quick else 28))
    print(f"{jax.devices()[0].device_kind}, JAX {jax.__version__}, copies {rate / 1e12:.2f} TB/s\n")

    print("A mean loss with its gradient, bfloat16: µs, and MiB of temporary memory.\n")
    print("| logits | floor | " + " | ".join(f"{name} | memory" for name in LOSSES) + " |")
    print("|" + " --- |" * (2 + 2 * len(LOSSES)))
    for shape in map(smaller, VOCABULARIES):
        logits = jax.random.normal(jax.random.key(0), shape, jnp.bfloat16)
        labels = jax.random.randint(jax.random.key(1), shape[:1], 0, shape[1])
        programs = {name: jax.jit(jax.value_and_grad(f)).lower(logits, labels).compile() for name, f in LOSSES.items()}
        times = device_times({name: (program, (logits, labels)) for name, program in programs.items()}, 5)
        memory = {name: program.memory_analysis().temp_size_in_bytes for name, program in programs.items()}
        entries = [f"{microseconds(times[name])} | {memory[name] / 2**20:.1f}" for name in LOSSES]
        print(f"| {shape} | {2 * logits.nbytes / rate * 1e6:.0f} | " + " | ".join(entries) + " |")

    print("\nForward alone, bfloat16 in and float32 out: fraction of the copy rate of one read.\n")
    print("| array, axis | logsumexp | XLA | losses of integer labels | XLA |\n" + "|" + " --- |" * 5)
    for shape, axis in [(smaller(s), 1) for s in ROWS] + [(smaller(s), axis) for s, axis in OTHER_AXES]:
        x = jax.random.normal(jax.random.key(0), shape, jnp.bfloat16)
        rows = [n for d, n in enumerate(shape) if d != axis]
        labels = jax.random.randint(jax.random.key(1), rows, 0, shape[axis])
        calls = {
            "logsumexp": lambda x, labels, axis=axis: jax_softmax.logsumexp(x, axis, dtype=jnp.float32),
            "XLA": lambda x, labels, axis=axis: theirs_logsumexp(x, axis),
            "losses": lambda x, labels, axis=axis: jax_softmax.softmax_cross_entropy_with_integer_labels(
                x, labels, axis
            ),
            "XLA's": lambda x, labels, axis=axis: optax.softmax_cross_entropy_with_integer_labels(
                x.astype(jnp.float32), labels, axis
            ),
        }
        times = device_times({name: (jax.jit(f), (x, labels)) for name, f in calls.items()}, 5)
        fractions = [t if isinstance(t, Exception) else f"{x.nbytes / rate / t:.2f}" for t in times.values()]
        print(f"| {shape}, {axis} | " + " | ".join(map(str, fractions)) + " |")

    shape = smaller((65536, 4096))
    print(
        f"\nEntropies of {shape}, bfloat16: µs. The floor is one read of each operand, and one write of its gradient.\n"
    )
    print("| what | floor | here | XLA |\n" + "|" + " --- |" * 4)
    logits = [jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16) for seed in range(2)]
    for name, (ours, theirs) in ENTROPIES.items():
        operands = logits[: 2 if name == "kl_divergence" else 1]
        for with_gradient in (False, True):
            calls = {f.__name__: gradient_of(f, len(operands)) if with_gradient else f for f in (ours, *theirs)}
            times = device_times({key: (jax.jit(f), operands) for key, f in calls.items()}, 5)
            best = min(
                (t for f in theirs if isinstance(t := times[f.__name__], float)), default=times[theirs[0].__name__]
            )
            floor = (1 + with_gradient) * sum(x.nbytes for x in operands) / rate
            entries = [microseconds(t) for t in (floor, times[ours.__name__], best)]
            print(f"| {name}{', with gradient' if with_gradient else ''} | " + " | ".join(entries) + " |")


if __name__ == "__main__":
    main()
