"""Train a small word model on Python's own documentation with linear_cross_entropy and with optax, side by side.

The model predicts a word from the eight before it, and its last layer is its table of embeddings. Every word of the
text is one of the vocabulary, so the logits are by far the largest array of a step. The same model is trained from the
same weights and on the same batches with optax's loss of all logits, with ``linear_cross_entropy``, and with the same
in chunks. The script prints the losses and the temporary memory of a step, and exits with status 1 if the losses differ
by more than rounding explains, or if a model has learnt no more in 40 steps than how often words are used.

The text is the reference that ``help()`` shows, which is part of Python; nothing is downloaded. CPU or GPU, whichever
JAX finds:

    pip install ".[examples]"
    python examples/train_word_model.py
"""

import argparse
import functools
import re
import sys
from pydoc_data.topics import topics

import jax
import numpy as np
import optax
from tqdm import tqdm

from jax_softmax import linear_cross_entropy

CONTEXT, DIM, BATCH, LEARNING_RATE, STEPS = 8, 64, 1024, 3e-3, 40
# Rounding in float32 is fed back into the weights by every step, where it grows.
TOLERANCE = 1e-4


def by_optax(hidden, table, words):
    return optax.softmax_cross_entropy_with_integer_labels(hidden @ table.T, words).mean()


LOSSES = {
    "optax": by_optax,
    "linear_cross_entropy": functools.partial(linear_cross_entropy, transpose_w=True),
    "in chunks of 128": functools.partial(linear_cross_entropy, transpose_w=True, chunk=128),
}


def new_weights(vocabulary, key):
    keys = jax.random.split(key, 3)
    return {
        "table": jax.random.normal(keys[0], (vocabulary, DIM)) / 8,
        "mix": jax.random.normal(keys[1], (CONTEXT * DIM, DIM)) / DIM,
        "out": jax.random.normal(keys[2], (DIM, DIM)) / DIM,
    }


def mean_loss(loss, weights, windows):
    before, words = windows[:, :-1], windows[:, -1]
    mixed = jax.nn.gelu(weights["table"][before].reshape(len(windows), -1) @ weights["mix"])
    return loss(mixed @ weights["out"], weights["table"], words)


def compiled_step(loss, optimizer, *arguments):
    """A step of training as a compiled program."""

    def step(weights, state, windows):
        value, gradients = jax.value_and_grad(functools.partial(mean_loss, loss))(weights, windows)
        updates, state = optimizer.update(gradients, state)
        return optax.apply_updates(weights, updates), state, value

    return jax.jit(step).lower(*arguments).compile()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=STEPS)
    steps = parser.parse_args().steps

    # GPUs may otherwise multiply float32 matrices at TF32 precision, which would hide float32-level agreement.
    jax.config.update("jax_default_matmul_precision", "float32")
    alphabet, text = np.unique(re.findall(r"\w+|[^\w\s]", "\n".join(topics.values())), return_inverse=True)
    windows = np.lib.stride_tricks.sliding_window_view(text.astype(np.int32), CONTEXT + 1)
    frequencies = np.bincount(text) / len(text)
    entropy = -np.sum(frequencies * np.log(frequencies))
    print(f"{len(text)} words, {len(alphabet)} different; the loss of counting words: {entropy:.2f}")

    optimizer = optax.adam(LEARNING_RATE)
    weights = new_weights(len(alphabet), jax.random.key(0))
    state, random, models = optimizer.init(weights), np.random.default_rng(0), {}
    for name, loss in LOSSES.items():
        program = compiled_step(loss, optimizer, weights, state, windows[:BATCH])
        memory = program.memory_analysis().temp_size_in_bytes / 2**20
        print(f"{name}: a step takes {memory:.0f} MiB of temporary memory")
        models[name] = program, weights, state
    losses = {name: [] for name in models}
    progress = tqdm(range(1, steps + 1), "steps")
    for step in progress:
        batch = windows[random.integers(len(windows), size=BATCH)]
        for name, (program, weights, state) in models.items():
            weights, state, value = program(weights, state, batch)
            models[name] = program, weights, state
            losses[name].append(float(value))
        if step == 1 or step % 10 == 0:
            progress.write(
                f"step {step:3d}  " + "  ".join(f"{name} {values[-1]:.6f}" for name, values in losses.items())
            )

    failures = []
    for name, values in losses.items():
        difference = np.abs(np.array(values) - losses["optax"]).max()
        print(f"{name}: loss {values[-1]:.6f}, largest difference from optax's {difference:.1e}")
        if not difference <= TOLERANCE:  # also catches NaN
            failures.append(f"{name} differs by {difference:.1e}, more than {TOLERANCE:.0e}")
        if steps >= STEPS and not values[-1] < entropy:
            failures.append(f"the loss of {name} is no less than {entropy:.2f}, that of counting words")
    print("FAILED: " + "; ".join(failures) if failures else "OK")
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
