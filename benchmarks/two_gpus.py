"""Two GPUs next to one: the same values, how much faster, what travels, and the memory that each takes.

    python benchmarks/two_gpus.py            # two GPUs of one host; exits with status 2 if a value or a limit is missed
    python benchmarks/two_gpus.py --quick    # small arrays on any devices, to try the script; no limits

Times are of the wall clock around calls that wait for nothing but the last of them; the fastest of several rounds
counts. Memory is what the compiled program takes on a device: arguments, results and temporaries.
"""

import argparse
import os
import re
import sys
import time

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=2"

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import jax_softmax

CALLS, ROUNDS = 20, 5


def forward(op):
    return lambda package: lambda x, t: getattr(package, op)(x)


def forward_and_backward(op):
    def make(package):
        def run(x, t):
            y, pullback = jax.vjp(getattr(package, op), x)
            return y, pullback(t)[0]

        return run

    return make


def loss_and_gradient(package):
    if package is jax_softmax:
        return jax.value_and_grad(jax_softmax.cross_entropy_loss)

    def loss(x, labels):
        log_probabilities = package.log_softmax(x.astype(jnp.float32))
        return -jnp.mean(jnp.take_along_axis(log_probabilities, labels[:, None], axis=1))

    return jax.value_and_grad(loss)


BATCH, VOCABULARY = P("gpus"), P(None, "gpus")
# Name, the maker of a function of a package, shape, layout, and how many times as fast as one GPU two must be.
CASES = [
    ("batch, softmax", forward("softmax"), (16384, 65536), BATCH, 1.9),
    ("batch, softmax with gradient", forward_and_backward("softmax"), (16384, 32768), BATCH, 1.9),
    ("batch, cross_entropy_loss with gradient", loss_and_gradient, (8192, 50257), BATCH, 1.5),
    ("vocabulary, softmax", forward("softmax"), (512, 1048576), VOCABULARY, 1.5),
    ("vocabulary, log_softmax", forward("log_softmax"), (512, 1048576), VOCABULARY, 1.5),
    ("vocabulary, logsumexp", forward("logsumexp"), (512, 1048576), VOCABULARY, 1.5),
    ("vocabulary, softmax with gradient", forward_and_backward("softmax"), (512, 1048576), VOCABULARY, None),
    ("vocabulary, cross_entropy_loss with gradient", loss_and_gradient, (8192, 50176), VOCABULARY, None),
]


def seconds(program, args):
    best = float("inf")
    for _ in range(ROUNDS + 1):  # the first warms up
        start = time.perf_counter()
        for _ in range(CALLS):
            out = program(*args)
        jax.block_until_ready(out)
        best = min(best, (time.perf_counter() - start) / CALLS)
    return best


def memory(program):
    sizes = program.memory_analysis()
    return sizes.argument_size_in_bytes + sizes.output_size_in_bytes + sizes.temp_size_in_bytes


def largest_difference(actual, expected):
    """In units of the dtype's eps, relative to each array's largest magnitude in a row (of a vector, in all of it)."""
    worst = 0.0
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        wide = [jnp.atleast_1d(v.astype(jnp.float32)) for v in (jax.device_put(a, b.sharding), b)]
        scale = jnp.max(jnp.abs(wide[1]), axis=-1, keepdims=True)
        difference = jnp.max(jnp.abs(wide[0] - wide[1]) / scale)
        worst = max(worst, float(difference) / float(jnp.finfo(b.dtype).eps))
    return worst


def measured(program_of, layouts, operands):
    """Results, seconds and program for each of the layouts, which are the operands'."""
    for layout in layouts:
        args = [jax.device_put(a, of_a) for a, of_a in zip(operands, layout, strict=True)]
        program = jax.jit(program_of).lower(*args).compile()
        yield program(*args), seconds(program, args), program


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small arrays on any devices")
    quick = parser.parse_args().quick
    devices = jax.devices()[:2]
    if len(devices) < 2 or (devices[0].platform != "gpu" and not quick):
        print(f"two GPUs are needed, found {jax.devices()}", file=sys.stderr)
        return 1
    mesh = jax.make_mesh((2,), ("gpus",), axis_types=(AxisType.Auto,), devices=devices)
    print(f"jax_softmax {jax_softmax.__version__}, JAX {jax.__version__}, 2 x {devices[0].device_kind}, bfloat16\n")
    columns = ["case", "shape", "one GPU, ms", "two, ms", "times as fast", "jax.nn on two, ms", "collectives"]
    columns += ["MB on one", "each of two", "difference, eps"]
    print("| " + " | ".join(columns) + " |\n|" + " --- |" * len(columns))
    missed = []
    for case, make, shape, spec, limit in CASES:
        shape = tuple(n // 32 for n in shape) if quick else shape
        x, t = (jax.random.normal(jax.random.key(i), shape, jnp.bfloat16) for i in range(2))
        specs = spec, spec
        if make is loss_and_gradient:
            t, specs = jax.random.randint(jax.random.key(1), shape[:1], 0, shape[1]), (spec, P(*spec[:1]))
        layouts = [SingleDeviceSharding(devices[0])] * 2, [NamedSharding(mesh, s) for s in specs]
        ours, theirs = make(jax_softmax), make(jax.nn)
        (y_one, one, program_one), (y_two, two, program_two) = measured(ours, layouts, (x, t))
        difference = largest_difference(y_two, y_one)
        del y_one, y_two
        ((_, of_jax, _),) = measured(theirs, layouts[1:], (x, t))
        found = re.findall(
            r" (all-(?:gather|reduce|to-all)|collective-\w+|reduce-scatter)(?:-start)?\(", program_two.as_text()
        )
        sizes = [memory(program) / 1e6 for program in (program_one, program_two)]
        print(
            f"| {case} | {shape} | {one * 1e3:.3f} | {two * 1e3:.3f} | {one / two:.2f} | {of_jax * 1e3:.3f} | "
            f"{', '.join(f'{found.count(kind)} {kind}' for kind in sorted(set(found))) or 'none'} | "
            f"{sizes[0]:.0f} | {sizes[1]:.0f} | {difference:.2g} |",
            flush=True,
        )
        if difference > 2:
            missed.append(f"{case}: the values differ by {difference:.2g} eps")
        if set(found) - {"all-reduce"}:
            missed.append(f"{case}: {', '.join(sorted(set(found)))} among the collectives")
        if not quick and limit and one / two < limit:
            missed.append(f"{case}: {one / two:.2f} times as fast, not {limit}")
        if not quick and sizes[1] > 0.55 * sizes[0]:
            missed.append(f"{case}: {sizes[1] / sizes[0]:.2f} of one GPU's memory on each")
    print("\n" + "\n".join(missed or ["every limit is met"]))
    return 2 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
