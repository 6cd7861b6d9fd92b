"""Times linear_cross_entropy next to its matrix products alone, to optax's loss of float32 logits, and to tokamax's.

    python benchmarks/linear_cross_entropy.py [--only NAME ...] [--chunks TOKENS ...] [--repeats N] [--output FOLDER]
    python benchmarks/linear_cross_entropy.py --quick    # small arrays on any device, to try the script

bfloat16. "Products" are x·w, g·wᵀ and xᵀ·g, as one program in the same run. Temporary memory is what a program takes
besides its arguments and results. "Copies" are those of logits in the compiled program: there should be none.
tokamax is timed where it is installed. Differences are of the loss, and in norm of the gradients, from optax's. Writes
linear_cross_entropy.md.
"""

import argparse
import functools
import importlib.util
import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp
import optax
from timing import device_times

from jax_softmax import linear_cross_entropy

SHAPES = [(8192, 4096, 128256), (8192, 2048, 50304), (4096, 4096, 262144), (32768, 2560, 128256)]
QUICK = [(512, 64, 1000), (1000, 32, 3000)]
HEAD = (
    "| (tokens, features, vocabulary) | program | ms | of the products | temporary memory, GB | copies of logits | "
    "difference |\n|" + "---|" * 7
)


class Program(NamedTuple):
    name: str
    function: Callable  # of x, w, labels and g, an array of the logits' shape
    base: str  # of which program's time its own is given as a multiple


def by_optax(x, w, labels):
    return optax.softmax_cross_entropy_with_integer_labels((x @ w).astype(jnp.float32), labels).mean()


def by_tokamax(implementation):
    def loss(x, w, labels):
        import tokamax

        function = tokamax.linear_softmax_cross_entropy_loss
        return function(x, labels, w, reduction="mean", implementation=implementation)

    return loss


def gradients(loss):
    return lambda x, w, labels, g: jax.value_and_grad(loss, (0, 1))(x, w, labels)


def with_probabilities(loss):
    """The same with labels that are probabilities: any array of their shape takes as long."""
    return lambda x, w, labels, g: jax.value_and_grad(loss, (0, 1))(x, w, g)


def by_optax_with_probabilities(x, w, labels):
    return optax.softmax_cross_entropy((x @ w).astype(jnp.float32), labels).mean()


def forward(loss):
    return lambda x, w, labels, g: loss(x, w, labels)


def of_tokens(**options):
    """The mean loss by the losses of tokens, and its gradients, as in a policy gradient that weighs these losses."""

    def mean_and_gradients(x, w, labels, g):
        losses, pullback = jax.vjp(lambda x, w: linear_cross_entropy(x, w, labels, reduction=None, **options), x, w)
        return losses.mean(), pullback(jnp.full_like(losses, 1 / losses.size))

    return mean_and_gradients


def programs(shape, chunks):
    """The programs that are measured for a shape. `chunks`: further numbers of tokens in a chunk."""
    tokens = shape[0]
    sizes = [2048 if tokens > 2048 else tokens // 4, *chunks]
    ours = {"as the rule has it": {}, "all logits": {"chunk": tokens}, "bfloat16 sum": {"accumulate_dtype": "bfloat16"}}
    ours |= {f"chunks of {n}, float32 sum": {"chunk": n} for n in sizes}
    ours |= {f"chunks of {n}, bfloat16 sum": {"chunk": n, "accumulate_dtype": "bfloat16"} for n in chunks}
    found = [
        Program("products", lambda x, w, labels, g: (x @ w, g @ w.T, x.T @ g), "products"),
        Program("optax", gradients(by_optax), "products"),
    ]
    if importlib.util.find_spec("tokamax"):
        found += [
            Program(f"tokamax, {implementation}", gradients(by_tokamax(implementation)), "products")
            for implementation in ("xla", "chunked_xla")
        ]
    for name, options in ours.items():
        found.append(Program(name, gradients(functools.partial(linear_cross_entropy, **options)), "products"))
    if shape not in (SHAPES[0], QUICK[0]):
        return found
    found += [
        Program("x·w", lambda x, w, labels, g: x @ w, "x·w"),
        Program("forward, optax", forward(by_optax), "x·w"),
        Program("forward", forward(linear_cross_entropy), "x·w"),
        Program("probabilities, optax", with_probabilities(by_optax_with_probabilities), "products"),
        Program("probabilities", with_probabilities(linear_cross_entropy), "products"),
        Program("per token, as the rule has it", of_tokens(), "products and x·w"),
        Program("per token, chunks", of_tokens(chunk=sizes[0]), "products and x·w"),
    ]
    return found


def compiled_programs(wanted, arguments):
    """From names to compiled programs, or to the errors that they raised."""
    compiled = {}
    for program in wanted:
        start = time.monotonic()
        try:
            compiled[program.name] = jax.jit(program.function).lower(*arguments).compile()
        except Exception as error:  # the others are measured all the same
            compiled[program.name] = error
        print(f"{program.name}: compiled in {time.monotonic() - start:.1f} s", flush=True)
    return compiled


@jax.jit
def _differences(found, expected):
    def relative(a, b):
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
        return jnp.linalg.norm(a - b) / jnp.linalg.norm(b)

    return jax.tree.map(relative, found, expected)


def differences(compiled, arguments):
    """For each program with gradients the relative differences of its loss and gradients from optax's, as text."""
    try:
        expected = compiled["optax"](*arguments)
    except Exception:
        return {}
    texts = {}
    for name, program in compiled.items():
        others = name in ("products", "x·w", "optax") or name.startswith(("forward", "probabilities"))
        if others or isinstance(program, Exception):
            continue
        try:
            loss, (x_gradient, w_gradient) = _differences(program(*arguments), expected)
            texts[name] = f"{loss:.0e}, {x_gradient:.0e}, {w_gradient:.0e}"
        except Exception as error:
            texts[name] = type(error).__name__
    return texts


def measured(shape, options) -> list[str]:
    """The table's rows for a shape."""
    tokens, features, vocabulary = shape
    wanted = programs(shape, options.chunks)
    wanted = [p for p in wanted if chosen(p, options) or p.name in ("products", "x·w")]
    keys = jax.random.split(jax.random.key(0), 4)
    x = jax.random.normal(keys[0], (tokens, features), jnp.bfloat16)
    w = jax.random.normal(keys[1], (features, vocabulary), jnp.bfloat16) * features**-0.5
    labels = jax.random.randint(keys[2], (tokens,), 0, vocabulary)
    g = jax.random.normal(keys[3], (tokens, vocabulary), jnp.bfloat16)
    arguments = x, w, labels, g
    compiled = compiled_programs(wanted, arguments)
    good = {name: program for name, program in compiled.items() if not isinstance(program, Exception)}
    times = compiled | device_times({name: (program, arguments) for name, program in good.items()}, options.repeats)
    different = differences(compiled, arguments) if "optax" in good else {}
    both = [times[name] for name in ("products", "x·w") if name in times]
    times["products and x·w"] = next((t for t in both if isinstance(t, Exception)), None) or sum(both)
    return [row(shape, program, compiled, times, different) for program in wanted]


def row(shape, program, compiled, times, different) -> str:
    found, base = times[program.name], times[program.base]
    start = f"| {shape} | {program.name} |"
    if isinstance(found, Exception):
        return f"{start} {type(found).__name__}: {' '.join(str(found).split())[:80]} | | | | |".replace("\n", " ")
    ratio = "" if isinstance(base, Exception) else f"{found / base:.3f}"
    text = compiled[program.name].as_text()
    copies = len(re.findall(rf"= \w+\[\d+,{shape[2]}\]\S* copy\(", text))
    memory = compiled[program.name].memory_analysis().temp_size_in_bytes / 2**30
    return f"{start} {found * 1e3:.2f} | {ratio} | {memory:.2f} | {copies} | {different.get(program.name, '')} |"


def chosen(program, options):
    return not options.only or any(part in program.name for part in options.only)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], help="a part of a program's name")
    parser.add_argument("--shapes", type=int, nargs="+", default=[0, 1, 2, 3], help="which of the shapes, from 0 on")
    parser.add_argument("--chunks", type=int, nargs="+", default=[], help="further sizes of chunks, in tokens")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="small arrays on any device, written nowhere")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    if jax.default_backend() != "gpu" and not options.quick:
        print("linear_cross_entropy.py: a GPU is needed, or --quick", file=sys.stderr)
        return 1
    rows, failed = [], 0
    device = f"{jax.devices()[0].device_kind}, JAX {jax.__version__}, device time, GB of 2^30 bytes."
    for shape in QUICK if options.quick else [SHAPES[k] for k in options.shapes]:
        start = time.monotonic()
        try:
            rows += measured(shape, options)
        except Exception as error:
            print(f"{shape}: {type(error).__name__}: {str(error)[:600]}", flush=True)
            failed += 1
        print(f"{shape}: {time.monotonic() - start:.0f} s\n", flush=True)
        text = f"# Linear layers with their cross entropy\n\n{device}\n\n" + "\n".join([HEAD, *rows]) + "\n"
        if not options.quick:  # what there is, should the next shape take too long
            options.output.mkdir(parents=True, exist_ok=True)
            (options.output / "linear_cross_entropy.md").write_text(text)
    print(text)
    return failed


if __name__ == "__main__":
    sys.exit(main())
