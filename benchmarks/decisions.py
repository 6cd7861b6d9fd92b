"""What `fuse` decides, beside what else could be decided: time and memory of each, of whole programs.

python benchmarks/decisions.py [--only NAME ...] [--part K N] [--drawn N]

Of every program of models.py, never_slower.py and programs_of_attention.py, and of N drawn ones. Alternatives: XLA
alone; kernels of rows wherever there are any; attention's kernels, too; and what is chosen. Regret is the time of what
is chosen over the least of all.
"""

import argparse
import functools
import math
import sys

import jax
import jax.numpy as jnp
import never_slower
import numpy as np
from computation import Computation
from computations import COMPUTATIONS
from models import part_of
from programs_of_attention import CASES, forward, moving, name_of, operands_of, with_gradient
from timing import compiled_at_once, device_times

import jax_softmax
from jax_softmax.fusion import backend


class Told(backend.Backend):
    """Has kernels make all that they can: of rows, and of attention if it is told so."""

    def __init__(self, attention: bool) -> None:
        self.attention = attention

    def kernel_wins(self, traffic) -> bool:
        return True

    def reason_for_xla(self, kernel) -> str:
        return ""

    def reason_against_attention(self, found) -> str:
        return "" if self.attention else "told so"


ALTERNATIVES = {
    "XLA": None,
    "rows": Told(attention=False),
    "attention": Told(attention=True),
    "chosen": backend.Backend(),
}


# ---- Programs


def of_attention(case) -> Computation:
    program = forward(case[0]) if case[0] is moving else with_gradient(case[0])
    return Computation(name_of(case), program, lambda key: operands_of(*case), (), ())


BEFORE = {
    "": lambda x, a: x,
    "scaled": lambda x, a: x * 0.3,
    "capped": lambda x, a: 20 * jnp.tanh(x / 20),
    "masked": lambda x, a: jnp.where(a > -1, x, -1e9),
    "with an array added": lambda x, a: x + a,
    "widened": lambda x, a: x.astype(jnp.float32),
    "narrowed": lambda x, a: x.astype(jnp.bfloat16),
}
OPERATORS = {
    "softmax": jax.nn.softmax,
    "log_softmax": jax.nn.log_softmax,
    "logsumexp": lambda x, axis: jax.nn.logsumexp(x, axis, keepdims=True),
}
AFTER = {
    "": lambda y, a: y,
    "multiplied": lambda y, a: y * a.astype(y.dtype),
    "summed": lambda y, a: (y * a.astype(y.dtype)).sum(),
    "of one row": lambda y, a: jnp.take(y, 0, 0).max(),
    "rounded": lambda y, a: y.astype(jnp.bfloat16),
}


def drawn(seed: int) -> Computation:
    """A program of one array of 1 to 128 MiB, as the seed says."""
    rng = np.random.default_rng(seed)
    elements, columns = 2.0 ** rng.uniform(18, 25), int(2.0 ** rng.uniform(3, 16))
    shape = [max(1, int(elements / columns)), columns]
    if rng.random() < 0.3:
        shape.insert(2, int(2 ** rng.uniform(1, 6)))
        shape[0] = max(1, shape[0] // shape[2])
    dtype, gradient = rng.choice(["float32", "bfloat16"]), rng.random() < 0.6
    before, op, after = (str(rng.choice(list(of))) for of in (BEFORE, OPERATORS, AFTER))

    def program(x, a):
        return AFTER[after](OPERATORS[op](BEFORE[before](x, a), axis=1), a)

    def step(x, a, cotangent):
        return jax.vjp(lambda x: program(x, a), x)[1](cotangent)

    def arguments(key):
        of_x, of_a, of_result = jax.random.split(key, 3)
        operands = tuple(jax.random.normal(k, shape, dtype) for k in (of_x, of_a))
        y = jax.eval_shape(program, *operands)
        return (*operands, jax.random.normal(of_result, y.shape, y.dtype)) if gradient else operands

    words = f"{before} {op} {after}".split()
    name = f"drawn {seed}: {' '.join(words)} of {dtype} {tuple(shape)}{', gradient' * gradient}"
    return Computation(name, step if gradient else program, arguments, (), ())


def programs(n_drawn: int) -> list[Computation]:
    cases = map(of_attention, CASES)
    own = [c for c in (*COMPUTATIONS, *never_slower.COMPUTATIONS) if c.inner is None]
    return [*own, *cases, *map(drawn, range(n_drawn))]


# ---- Measuring


def measured(computation: Computation) -> list[str]:
    arguments = computation.make_args(jax.random.key(0))
    lowered = {}
    for name, told in ALTERNATIVES.items():
        function = computation.function if told is None else jax_softmax.fuse(computation.function)
        with backend.using(told or backend.in_use()):
            lowered[name] = jax.jit(function).lower(*arguments)
    texts = {name: one.as_text().partition("\n")[2] for name, one in lowered.items()}  # without the program's name
    by_text = {text: name for name, text in texts.items()}  # those that are alike are measured once
    same = {name: by_text[text] for name, text in texts.items()}
    compiled = compiled_at_once({name: lowered[name] for name in by_text.values()})
    times = device_times({name: (one, tuple(arguments)) for name, one in compiled.items()}, 5)
    memory = {name: one.memory_analysis().temp_size_in_bytes for name, one in compiled.items()}
    found = {name: times[same[name]] for name in ALTERNATIVES}
    seconds = [t for t in found.values() if isinstance(t, float)]
    shown = [f"{1e6 * t:.0f}" if isinstance(t, float) else type(t).__name__ for t in found.values()]
    regret = found["chosen"] / min(seconds)
    in_mib = [f"{memory[same[name]] / 2**20:.0f}" for name in ("XLA", "chosen")]
    return [computation.name, *shown, f"{regret:.2f}", f"{found['XLA'] / found['chosen']:.2f}", *in_mib]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], help="a part of a program's name")
    parser.add_argument("--part", type=int, nargs=2, default=(0, 1), metavar=("K", "N"), help="the K-th of N")
    parser.add_argument("--drawn", type=int, default=200)
    options = parser.parse_args()
    if jax.default_backend() != "gpu":
        print("decisions.py: a GPU is needed", file=sys.stderr)
        return 1
    rows = []
    print_row = functools.partial(print, flush=True)
    heads = ["program", *(f"{name}, µs" for name in ALTERNATIVES), "regret", "XLA / chosen", "MiB: XLA", "chosen"]
    print_row(f"# Decisions\n\n{jax.devices()[0].device_kind}, JAX {jax.__version__}, device time.\n")
    print_row(f"| {' | '.join(heads)} |\n{'|---' * len(heads)}|")
    for computation in part_of(programs(options.drawn), *options.part):
        if options.only and not any(part in computation.name for part in options.only):
            continue
        try:
            rows.append(measured(computation))
            print_row(f"| {' | '.join(rows[-1])} |")
        except Exception as error:  # the others are measured all the same
            print_row(f"{computation.name}: {type(error).__name__}: {str(error)[:300]}")
    regrets = [float(row[5]) for row in rows]
    mean = math.exp(sum(map(math.log, regrets)) / len(regrets)) if rows else math.nan
    slower = [row[0] for row in rows if float(row[6]) < 0.98]
    summary = f"Regret: mean {mean:.3f}, largest {max(regrets, default=math.nan):.2f}. Slower than XLA: {len(slower)}."
    print(summary, *slower, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
