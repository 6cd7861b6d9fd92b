"""Times training steps of other people's repositories, as they are and under `fuse`.

python benchmarks/real.py --checkout NAME=PATH ... [--only NAME ...] [--explain] [--small] [--output FOLDER]

PATH is a checkout of the repository NAME: flax, nanodo, big_vision, EasyLM, meanflow, alphafold, levanter, equinox,
purejaxrl, or penzai. `training_steps.py` says what is done with them. Programs without a checkout are left out.

Of each step: time by the wall clock where it is fed back into itself and may reuse the state's memory, peak memory,
and its loss after 20 steps. Then what `fuse` found in it and what it left, and why. Writes real.md. `--small`: small
models, also on a CPU; they are hardly timed, and nothing is written.
"""

import argparse
import collections
import os
import sys
from pathlib import Path

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
from checkouts import on_path
from models import part_of
from timing import copied, peak_memory, step_times
from training_steps import PROGRAMS

import jax_softmax

STEPS = 20


def loss_after(step, state, batch, steps: int) -> float:
    for _ in range(steps):
        state, loss = step(state, batch)
    return float(loss)


def found_and_left(report) -> str:
    """The calls that have kernels, and those that XLA makes, with the reasons, as two cells of a table."""
    found = collections.Counter(line.op for line in report if not line.why_xla)
    left = collections.Counter(f"{line.op}: {line.why_xla}" for line in report if line.why_xla)
    left += collections.Counter(f"not attention: {line.no_attention}" for line in report if line.no_attention)
    return " | ".join(", ".join(f"{n} {name}" for name, n in counts.items()) for counts in (found, left))


def measured(name, step, options) -> str:
    """A row of the table."""
    fused = jax_softmax.fuse(step.function)
    report = fused.explain(step.state, step.batch)
    if options.explain:
        print(report, flush=True)
    arguments = step.state, step.batch
    compiled = {
        which: jax.jit(f, donate_argnums=0).lower(*arguments).compile()
        for which, f in (("XLA", step.function), ("fused", fused))
    }
    losses = {which: loss_after(program, copied(step.state), step.batch, STEPS) for which, program in compiled.items()}
    memory = {which: peak_memory(program) / 2**20 for which, program in compiled.items()}
    steps = {which: (program, step.state, step.batch) for which, program in compiled.items()}
    times = step_times(steps, *((1, 0) if options.small else (options.turns,)))
    return (
        f"| {name} | {times['XLA'] * 1e3:.2f} | {times['fused'] * 1e3:.2f} | {times['XLA'] / times['fused']:.2f} | "
        f"{memory['XLA']:.0f} | {memory['fused']:.0f} | {losses['XLA']:.5f} | {losses['fused']:.5f} | "
        f"{found_and_left(report)} |"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkout", action="append", default=[], metavar="NAME=PATH", help="of a repository")
    parser.add_argument("--only", nargs="+", default=[], help="a part of a step's name")
    parser.add_argument(
        "--part", type=int, nargs=2, default=(0, 1), metavar=("K", "N"), help="the K-th of N, from 0 on"
    )
    parser.add_argument("--explain", action="store_true", help="print what is folded")
    parser.add_argument("--small", action="store_true", help="small models")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    if jax.default_backend() != "gpu" and not options.small:
        print("real.py: a GPU is needed", file=sys.stderr)
        return 1
    checkouts = dict(checkout.split("=", 1) for checkout in options.checkout)
    wanted = [
        (name, program)
        for name, program in PROGRAMS.items()
        if program.repository in checkouts and (not options.only or any(part in name for part in options.only))
    ]
    rows, failed = [], 0
    for name, program in part_of(wanted, *options.part):
        try:
            with on_path(Path(checkouts[program.repository], program.folder).absolute()):
                step = program.make(jax.random.key(0), options.small)
                rows.append(measured(name, step, options))
        except Exception as error:  # the others are measured all the same
            print(f"{name}: {type(error).__name__}: {str(error)[:600]}", flush=True)
            failed += 1
            continue
        print(rows[-1], flush=True)
    if not options.small:
        text = f"# Training steps of other repositories\n\n{jax.devices()[0].device_kind}, JAX {jax.__version__}.\n\n"
        head = "| step | XLA, ms | fused, ms | XLA / fused | peak memory, MiB: XLA | fused | loss: XLA | fused | "
        head += "kernels | left to XLA, and why |\n" + "|---" * 10 + "|"
        options.output.mkdir(parents=True, exist_ok=True)
        (options.output / "real.md").write_text(text + "\n".join([head, *rows]) + "\n")
    return failed


if __name__ == "__main__":
    sys.exit(main())
