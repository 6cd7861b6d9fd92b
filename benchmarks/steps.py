"""Training steps by the wall clock under `jit` and `jit(fuse(...))`: what `examples/` train, and a GPT of four sizes.

    python benchmarks/steps.py [--only NAME ...]            # prints a table of milliseconds a step, and of memory
    python benchmarks/steps.py --first [--only NAME ...]    # one of seconds to the first step

With `--small` programs are small, and a CPU can run them. NAME is a part of a program's name.

A step is fed back into itself, in turns, with the state donated to it or not. Memory is that of arguments, results and
temporary arrays together. The first step begins with its arguments on the device, in a process of its own in which
nothing has been compiled before; once more with the kernels that the fused one kept on disk.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import gpt
import jax
import optax
from checkouts import on_path
from flax import nnx
from gpt_model import FULL, Size, initial_arguments, logits_of
from timing import peak_memory, step_times
from training_steps import Step

import jax_softmax

EXAMPLES = Path(__file__).absolute().parents[1] / "examples"


def gpt_step(size: Size) -> Step:
    optimizer = optax.adamw(1e-4)
    parameters, tokens, labels = initial_arguments(jax.random.key(0), size)

    def step(state, batch):
        parameters, optimizer_state = state
        tokens, labels = batch

        def loss(parameters):
            return gpt.xla_loss(logits_of(parameters, tokens), labels)

        value, gradients = jax.value_and_grad(loss)(parameters)
        updates, optimizer_state = optimizer.update(gradients, optimizer_state, parameters)
        return (optax.apply_updates(parameters, updates), optimizer_state), value

    return Step(step, (parameters, jax.jit(optimizer.init)(parameters)), (tokens, labels))


def of_modules(train_step: Callable[..., Any], modules: tuple, batch: Any) -> Step:
    """A step that changes Flax's modules."""
    graph, state = nnx.split(modules)

    def step(state, batch):
        modules = nnx.merge(graph, state)
        value = train_step(*modules, *batch)
        return nnx.state(modules), value

    return Step(step, state, batch)


def language_model(length: int) -> Step:
    with on_path(EXAMPLES):
        import fuse_language_model as example
    sizes = {"vocabulary": 256, "features": 64, "heads": 4, "layers": 2, "dtype": "bfloat16"}
    tokens = jax.random.randint(jax.random.key(0), (4, length + 1), 0, 256)
    modules = example.model_of(argparse.Namespace(**sizes), length)
    return of_modules(example.train_step, modules, (tokens, tokens // 128))


def digits(batch: int) -> Step:
    with on_path(EXAMPLES):
        import train_digits_vit as example
    model = example.VisionTransformer(example.IMPLEMENTATIONS["jax.nn"], nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(example.LEARNING_RATE), wrt=nnx.Param)
    images = jax.random.uniform(jax.random.key(0), (batch, 8, 8))
    labels = jax.random.randint(jax.random.key(1), (batch,), 0, 10)
    return of_modules(example.train_step.__wrapped__, (model, optimizer), (images, labels))


def words(vocabulary: int) -> Step:
    with on_path(EXAMPLES):
        import train_word_model as example
    optimizer = optax.adam(example.LEARNING_RATE)
    weights = example.new_weights(vocabulary, jax.random.key(0))
    windows = jax.random.randint(jax.random.key(1), (example.BATCH, example.CONTEXT + 1), 0, vocabulary)

    def step(state, windows):
        weights, optimizer_state = state
        value, gradients = jax.value_and_grad(lambda w: example.mean_loss(example.by_optax, w, windows))(weights)
        updates, optimizer_state = optimizer.update(gradients, optimizer_state)
        return (optax.apply_updates(weights, updates), optimizer_state), value

    return Step(step, (weights, optimizer.init(weights)), windows)


SMALL = Size(2, 64, 4, 2, 32, 100)
# By name: what makes the step, of which size, and of which size with `--small`.
PROGRAMS: dict[str, tuple[Callable[[Any], Step], Any, Any]] = {
    "GPT 2x128, 8x128": (gpt_step, Size(2, 128, 4, 8, 128, 1024), SMALL),
    "GPT 6x256, 8x256": (gpt_step, Size(6, 256, 4, 8, 256, 8192), SMALL),
    "GPT 6x256, 8x512": (gpt_step, Size(6, 256, 4, 8, 512, 8192), SMALL),
    "GPT 12x768, 8x1024": (gpt_step, FULL._replace(layers=12), SMALL),
    "fuse_language_model.py": (language_model, 128, 16),
    "train_digits_vit.py": (digits, 64, 4),
    "train_word_model.py": (words, 8000, 100),
}
FIRST = "| program | first step, s: XLA | fused | fused, kernels kept |\n|---|---|---|---|"
STEADY = "| program | donated, ms: XLA | fused | XLA / fused | not donated, ms: XLA | fused | XLA / fused | "
STEADY += "peak memory donated, MiB: XLA | fused | not donated: XLA | fused |\n" + "|---" * 11 + "|"


def function(step: Step, which: str) -> Callable:
    return step.function if which == "XLA" else jax_softmax.fuse(step.function)


def first_step(step: Step, which: str) -> float:
    """Seconds of the first call in this process."""
    jax.block_until_ready(step[1:])
    start = time.perf_counter()
    jax.block_until_ready(jax.jit(function(step, which))(step.state, step.batch))
    return time.perf_counter() - start


def first_steps(name: str, small: bool) -> str:
    """A row of the table of first steps."""
    command = [sys.executable, __file__, "--only", name, *(["--small"] if small else []), "--in-this-process"]
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "JAX_SOFTMAX_CACHE_DIR": folder, "JAX_ENABLE_COMPILATION_CACHE": "false"}
        seconds = []
        for which in ("XLA", "fused", "fused"):
            done = subprocess.run([*command, which], env=environment, stdout=subprocess.PIPE, text=True, check=True)
            seconds.append(float(done.stdout.split()[-1]))
    return " | ".join(f"{s:.2f}" for s in seconds)


def steady(step: Step, turns: int) -> str:
    """A row of the table of later steps."""
    programs = {
        (donated, which): jax.jit(function(step, which), donate_argnums=(0,) if donated else ())
        .lower(step.state, step.batch)
        .compile()
        for donated in (True, False)
        for which in ("XLA", "fused")
    }
    times = step_times({key: (program, step.state, step.batch) for key, program in programs.items()}, turns)
    cells = []
    for donated in (True, False):
        xla, fused = (times[donated, which] * 1e3 for which in ("XLA", "fused"))
        cells += [f"{xla:.3f}", f"{fused:.3f}", f"{xla / fused:.2f}"]
    return " | ".join([*cells, *(f"{peak_memory(program) / 2**20:.0f}" for program in programs.values())])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], help="a part of a program's name")
    parser.add_argument("--first", action="store_true", help="seconds to the first step")
    parser.add_argument("--small", action="store_true", help="small programs")
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--in-this-process", metavar="XLA|fused", help="prints the seconds to one first step")
    options = parser.parse_args()
    if not options.in_this_process:
        print(f"{jax.devices()[0].device_kind}, JAX {jax.__version__}, wall clock\n")
        print(FIRST if options.first else STEADY, flush=True)
    for name, (make, size, small) in PROGRAMS.items():
        if options.only and not any(part in name for part in options.only):
            continue
        if options.first:
            print(f"| {name} | {first_steps(name, options.small)} |", flush=True)
            continue
        step = make(small if options.small else size)
        if options.in_this_process:
            print(first_step(step, options.in_this_process))
        else:
            print(f"| {name} | {steady(step, options.turns)} |", flush=True)


if __name__ == "__main__":
    main()
