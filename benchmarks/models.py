"""Times unchanged code of other people as it is, and under `jax_softmax.fuse`: whole jitted functions on a GPU.

python benchmarks/models.py [--only NAME ...] [--explain] [--output FOLDER]

Device time, temporary memory, and whether results agree. Writes models.md.
"""

import argparse
import importlib.util
import sys
from pathlib import Path

import jax
from computation import largest_difference
from computations import COMPUTATIONS
from timing import device_times

import jax_softmax


def run(computations, description: str, name: str, title: str) -> int:
    """Measures computations as the command line says, and writes a table of this name."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], help="a part of a computation's name")
    parser.add_argument(
        "--part", type=int, nargs=2, default=(0, 1), metavar=("K", "N"), help="the K-th of N, from 0 on"
    )
    parser.add_argument("--explain", action="store_true", help="print what is folded")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    if jax.default_backend() != "gpu":
        print(f"{name}.py: a GPU is needed: on other platforms fuse changes nothing", file=sys.stderr)
        return 1
    rows, failed = [], []
    for computation in part_of(computations, *options.part):
        if options.only and not any(part in computation.name for part in options.only):
            continue
        if computation.package is not None and importlib.util.find_spec(computation.package) is None:
            print(f"{computation.name}: {computation.package} is not installed", flush=True)
            continue
        try:
            row = measured(computation, options)
        except Exception as error:  # the others are measured all the same
            print(f"{computation.name}: {type(error).__name__}: {str(error)[:600]}", flush=True)
            failed.append(computation.name)
            continue
        rows.append(row)
        print(row, flush=True)
    options.output.mkdir(parents=True, exist_ok=True)
    head = "| computation | XLA, µs | fused, µs | XLA / fused | temporary memory, MiB: XLA | fused |"
    head += "\n|---|---|---|---|---|---|"
    text = f"# {title}\n\n{jax.devices()[0].device_kind}, JAX {jax.__version__}, device time.\n\n"
    (options.output / f"{name}.md").write_text(text + "\n".join([head, *rows]) + "\n")
    return len(failed)


def part_of(sequence, k: int, n: int):
    return sequence[len(sequence) * k // n : len(sequence) * (k + 1) // n]


def measured(computation, options) -> str:
    """A row of the table."""
    arguments = computation.make_args(jax.random.key(0))
    if options.explain:
        print(computation.name, jax_softmax.fuse(computation.function).explain(*arguments), sep="\n", flush=True)
    compiled = {
        name: jax.jit(function).lower(*arguments).compile()
        for name, function in (("XLA", computation.function), ("fused", computation.fused))
    }
    results = {name: program(*arguments) for name, program in compiled.items()}
    difference = largest_difference(computation, results["fused"], results["XLA"])
    del results
    times = device_times({name: (program, arguments) for name, program in compiled.items()}, options.repeats)
    for time in times.values():
        if isinstance(time, Exception):
            raise time
    memory = {name: program.memory_analysis().temp_size_in_bytes / 2**20 for name, program in compiled.items()}
    note = "" if difference <= 1 else f" (results differ by {difference:.1f} of what roundings may do)"
    return (
        f"| {computation.name}{note} | {times['XLA'] * 1e6:.0f} | {times['fused'] * 1e6:.0f} | "
        f"{times['XLA'] / times['fused']:.2f} | {memory['XLA']:.0f} | {memory['fused']:.0f} |"
    )


if __name__ == "__main__":
    sys.exit(run(COMPUTATIONS, __doc__, "models", "Whole computations"))
