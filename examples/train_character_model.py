"""Train a small causal character model on Python's own documentation with jax_softmax and with jax.nn, side by side.

Attention weights use ``softmax`` with a causal mask, and the loss is ``cross_entropy_loss``. The same model is trained
twice, from the same seed and on the same batches: once with jax_softmax, once with jax.nn and optax. The script prints
both losses and some text that the first model writes, saves a picture of the curves, and exits with status 1 if a model
learns no more than which characters follow each other, or if the losses differ by more than rounding explains.

The text is the reference that ``help()`` shows, which is part of Python; nothing is downloaded. CPU or GPU, whichever
JAX finds:

    pip install jax_softmax flax optax matplotlib tqdm
    python train_character_model.py --output character_model.png
"""

import argparse
import sys
from collections.abc import Callable
from pydoc_data.topics import topics
from typing import NamedTuple

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import optax
from flax import nnx
from tqdm import tqdm

import jax_softmax

matplotlib.use("Agg")  # no display needed
import matplotlib.pyplot as plt

LENGTH, DIM, HEADS, DEPTH = 64, 64, 4, 2
BATCH, LEARNING_RATE = 32, 5e-3
SAMPLES, WRITTEN, TEMPERATURE = 3, 240, 0.7
FINAL_STEPS = 20  # the last, whose mean loss must be less than that of counting pairs

# Two correct float32 softmaxes may differ in the last bits. The first loss is computed from identical weights, so it
# must agree to a few float32 roundings, of which one is up to 4.8e-7 here. From then on every step feeds the difference
# back into the weights, where it grows: if jax.nn's softmax itself is perturbed by two roundings, the losses differ by
# up to 1e-6 in the first 50 steps, 2e-6 in 800 and 4e-6 in 2000. With weights rounded to bfloat16 it is 1e-4 at once.
FIRST_STEP_TOLERANCE = 2e-6
TOLERANCE = 2e-5


class Functions(NamedTuple):
    """The two functions under comparison."""

    softmax: Callable
    loss: Callable


def optax_loss(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


IMPLEMENTATIONS = {
    "jax_softmax": Functions(jax_softmax.softmax, jax_softmax.cross_entropy_loss),
    "jax.nn": Functions(jax.nn.softmax, optax_loss),
}


class Attention(nnx.Module):
    def __init__(self, softmax: Callable, rngs: nnx.Rngs):
        self.softmax = softmax
        # No bias: softmax cancels a key bias, so its gradient is pure rounding noise, which Adam would scale up.
        self.qkv = nnx.Linear(DIM, 3 * DIM, use_bias=False, rngs=rngs)
        self.out = nnx.Linear(DIM, DIM, rngs=rngs)

    def __call__(self, x):
        batch, length, _ = x.shape
        q, k, v = jnp.moveaxis(self.qkv(x).reshape(batch, length, 3, HEADS, DIM // HEADS), 2, 0)
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(DIM // HEADS)
        weights = self.softmax(scores, axis=-1, where=jnp.tri(length, dtype=bool))
        return self.out(jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(x.shape))


class Block(nnx.Module):
    def __init__(self, softmax: Callable, rngs: nnx.Rngs):
        self.norm1 = nnx.LayerNorm(DIM, rngs=rngs)
        self.attention = Attention(softmax, rngs)
        self.norm2 = nnx.LayerNorm(DIM, rngs=rngs)
        self.expand = nnx.Linear(DIM, 4 * DIM, rngs=rngs)
        self.contract = nnx.Linear(4 * DIM, DIM, rngs=rngs)

    def __call__(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.contract(jax.nn.gelu(self.expand(self.norm2(x))))


class CharacterModel(nnx.Module):
    """Characters to vectors, DEPTH causal transformer blocks, logits of the next character at every position."""

    def __init__(self, functions: Functions, characters: int, rngs: nnx.Rngs):
        self.loss_of_logits = functions.loss
        self.embed = nnx.Embed(characters, DIM, rngs=rngs)
        self.position = nnx.Param(0.1 * jax.random.normal(rngs.params(), (LENGTH, DIM)))
        self.blocks = nnx.List([Block(functions.softmax, rngs) for _ in range(DEPTH)])
        self.norm = nnx.LayerNorm(DIM, rngs=rngs)
        self.head = nnx.Linear(DIM, characters, rngs=rngs)

    def __call__(self, text):
        x = self.embed(text) + self.position[...]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def loss(self, text):
        """The mean loss of predicting each of LENGTH characters from those before it; text has LENGTH + 1."""
        return self.loss_of_logits(self(text[:, :-1]), text[:, 1:])


@nnx.jit
def train_step(model, optimizer, text):
    loss, grads = nnx.value_and_grad(lambda model: model.loss(text))(model)
    optimizer.update(model, grads)
    return loss


@nnx.jit
def write(model, beginning, key):
    """The WRITTEN characters by which the model goes on, for each row of LENGTH characters."""

    def write_one(context, key):
        character = jax.random.categorical(key, model(context)[:, -1] / TEMPERATURE)
        return jnp.concatenate([context[:, 1:], character[:, None]], axis=1), character

    return jax.lax.scan(write_one, beginning, jax.random.split(key, WRITTEN))[1].T


def pair_entropy(text, characters):
    """The entropy of a character given the one before it, in nats: the least loss of counting pairs."""
    pairs = np.zeros((characters, characters))
    np.add.at(pairs, (text[:-1], text[1:]), 1)
    probabilities = pairs / pairs.sum()
    given = pairs / pairs.sum(axis=1, keepdims=True).clip(1)
    return -np.sum(probabilities * np.log(given, where=given > 0, out=np.zeros_like(given)))


def train(models, text, steps, seed):
    """Train the models on the same batches; return the loss of every step."""
    schedule = optax.cosine_decay_schedule(LEARNING_RATE, steps)
    optimizers = {name: nnx.Optimizer(model, optax.adam(schedule), wrt=nnx.Param) for name, model in models.items()}
    losses = {name: [] for name in models}

    windows = np.lib.stride_tricks.sliding_window_view(text, LENGTH + 1)
    random = np.random.default_rng(seed)
    progress = tqdm(range(1, steps + 1), desc="steps")
    for step in progress:
        batch = windows[random.integers(len(windows), size=BATCH)]
        for name, model in models.items():
            losses[name].append(float(train_step(model, optimizers[name], batch)))
        if step == 1 or step % 100 == 0 or step == steps:
            progress.write(f"step {step:4d}  loss:  " + "  ".join(f"{name} {losses[name][-1]:.7f}" for name in models))
    return {name: np.array(values) for name, values in losses.items()}


def save_picture(path, losses, entropy):
    steps = np.arange(1, len(losses["jax.nn"]) + 1)
    styles = {"jax_softmax": dict(color="tab:orange", linewidth=4, alpha=0.6), "jax.nn": dict(color="black", ls="--")}
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for name, style in styles.items():
        left.plot(steps, losses[name], label=name, **style)
    left.axhline(entropy, color="gray", linewidth=0.8, linestyle=":", label="counting pairs of characters")
    left.set(xlabel="step", ylabel="training loss (nats per character)", title="Cross-entropy")
    right.semilogy(steps, np.abs(losses["jax_softmax"] - losses["jax.nn"]), ".", color="tab:orange", markersize=3)
    right.axhline(TOLERANCE, color="gray", linewidth=0.8, linestyle=":", label="tolerance")
    right.set(xlabel="step", ylabel="|difference|, where it is not 0", title="Loss with jax_softmax minus with jax.nn")
    for axes in (left, right):
        axes.legend(frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", default="character_model.png", help="picture to write")
    arguments = parser.parse_args()

    # GPUs may otherwise multiply float32 matrices at TF32 precision, which would hide float32-level agreement.
    jax.config.update("jax_default_matmul_precision", "float32")
    print(f"device: {jax.devices()[0].device_kind}")
    alphabet, text = np.unique(list("\n\n".join(topics.values())), return_inverse=True)
    text = text.astype(np.int32)  # the numbers of the characters in the alphabet
    entropy = pair_entropy(text, len(alphabet))
    print(f"text: {len(text)} characters, {len(alphabet)} different; the loss of counting pairs: {entropy:.2f}")

    models = {
        name: CharacterModel(functions, len(alphabet), nnx.Rngs(arguments.seed))
        for name, functions in IMPLEMENTATIONS.items()
    }
    losses = train(models, text, arguments.steps, arguments.seed)
    save_picture(arguments.output, losses, entropy)
    print(f"picture: {arguments.output}")
    beginnings = np.tile(text[:LENGTH], (SAMPLES, 1))
    for sample in write(models["jax_softmax"], beginnings, jax.random.key(arguments.seed)):
        print("---- sample\n" + "".join(alphabet[sample]))
    print("----")

    failures = []
    for name, values in losses.items():
        value = values[-FINAL_STEPS:].mean()
        print(f"mean loss of the last {FINAL_STEPS} steps, {name}: {value:.7f}")
        if not value < entropy:
            failures.append(f"the loss of {name} is no less than {entropy:.2f}, that of counting pairs")

    difference = np.abs(losses["jax_softmax"] - losses["jax.nn"])
    for what, value, tolerance in (
        ("loss difference of the first step", difference[0], FIRST_STEP_TOLERANCE),
        ("largest loss difference of any step", difference.max(), TOLERANCE),
    ):
        print(f"{what}: {value:.1e} (tolerance {tolerance:.0e})")
        if not value <= tolerance:  # also catches NaN
            failures.append(f"{what} is {value:.1e}")
    if failures:
        sys.exit("FAILED: " + "; ".join(failures))
    print("OK")


if __name__ == "__main__":
    main()
