"""Train a small Vision Transformer on handwritten digits with jax_softmax and with jax.nn, side by side.

Attention weights use ``softmax`` and the cross-entropy loss uses ``log_softmax``. The same model is trained twice, from
the same seed and on the same batches: once with jax_softmax, once with jax.nn. The script prints both losses, saves a
picture of the curves, and exits with status 1 if the losses differ by more than rounding explains, or if either
accuracy is below 95 % after 630 steps, which are 30 epochs.

The data are the 8x8 digits bundled with scikit-learn; nothing is downloaded. CPU or GPU, whichever JAX finds:

    pip install ".[examples]"
    python examples/train_digits_vit.py --output digits_vit.png
"""

import argparse
import sys
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import optax
from flax import nnx
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from tqdm import tqdm

import jax_softmax

matplotlib.use("Agg")  # no display needed
import matplotlib.pyplot as plt

PATCH, DIM, HEADS, DEPTH = 2, 64, 4, 2
BATCH, LEARNING_RATE = 64, 2e-3
NOISE = 0.1  # pixel noise against overfitting; pixels lie in [0, 1]
STEPS, EPOCH = 630, 21
MIN_ACCURACY = 0.95  # after STEPS

# Two correct float32 softmaxes may differ in the last bits. The first loss is computed from identical weights, so it
# must agree to a few float32 roundings. From then on training is chaotic: every step feeds the difference back into the
# weights, where it grows exponentially while the learning rate is high. If jax.nn itself is perturbed by a few
# roundings, the losses differ by less than 1e-5 in the first five epochs, and by less than 1e-4 in all 30. In a run of
# 100 epochs single steps come to differ by 0.1; only the mean loss of the last epoch still agrees, to 1e-3.
FIRST_STEP_TOLERANCE = 2e-6
EARLY_STEPS, EARLY_TOLERANCE = 5 * EPOCH, 1e-4
FINAL_MEAN_TOLERANCE = 2e-3


class Functions(NamedTuple):
    """The two functions under comparison."""

    softmax: Callable
    log_softmax: Callable


IMPLEMENTATIONS = {
    "jax_softmax": Functions(jax_softmax.softmax, jax_softmax.log_softmax),
    "jax.nn": Functions(jax.nn.softmax, jax.nn.log_softmax),
}


class Attention(nnx.Module):
    def __init__(self, softmax: Callable, rngs: nnx.Rngs):
        self.softmax = softmax
        # No bias: softmax cancels a key bias, so its gradient is pure rounding noise, which Adam would scale up.
        self.qkv = nnx.Linear(DIM, 3 * DIM, use_bias=False, rngs=rngs)
        self.out = nnx.Linear(DIM, DIM, rngs=rngs)

    def __call__(self, x):
        batch, tokens, _ = x.shape
        q, k, v = jnp.moveaxis(self.qkv(x).reshape(batch, tokens, 3, HEADS, DIM // HEADS), 2, 0)
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(DIM // HEADS)
        weights = self.softmax(scores, axis=-1)
        return self.out(jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(x.shape))


class Block(nnx.Module):
    def __init__(self, softmax: Callable, rngs: nnx.Rngs):
        self.norm1 = nnx.LayerNorm(DIM, rngs=rngs)
        self.attention = Attention(softmax, rngs)
        self.norm2 = nnx.LayerNorm(DIM, rngs=rngs)
        self.expand = nnx.Linear(DIM, 2 * DIM, rngs=rngs)
        self.contract = nnx.Linear(2 * DIM, DIM, rngs=rngs)

    def __call__(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.contract(jax.nn.gelu(self.expand(self.norm2(x))))


class VisionTransformer(nnx.Module):
    """Patches to tokens, DEPTH transformer blocks, mean over tokens, ten logits."""

    def __init__(self, functions: Functions, rngs: nnx.Rngs):
        self.log_softmax = functions.log_softmax
        self.embed = nnx.Linear(PATCH * PATCH, DIM, rngs=rngs)
        self.position = nnx.Param(0.5 * jax.random.normal(rngs.params(), ((8 // PATCH) ** 2, DIM)))
        self.blocks = nnx.List([Block(functions.softmax, rngs) for _ in range(DEPTH)])
        self.norm = nnx.LayerNorm(DIM, rngs=rngs)
        self.head = nnx.Linear(DIM, 10, rngs=rngs)

    def __call__(self, images):
        side = 8 // PATCH
        patches = images.reshape(-1, side, PATCH, side, PATCH).swapaxes(2, 3).reshape(-1, side * side, PATCH * PATCH)
        x = self.embed(patches) + self.position[...]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(axis=1))

    def loss(self, images, labels):
        log_probabilities = self.log_softmax(self(images), axis=-1)
        return -jnp.take_along_axis(log_probabilities, labels[:, None], axis=-1).mean()


@nnx.jit
def train_step(model, optimizer, images, labels):
    loss, grads = nnx.value_and_grad(lambda model: model.loss(images, labels))(model)
    optimizer.update(model, grads)
    return loss


@nnx.jit
def accuracy(model, images, labels):
    return (model(images).argmax(axis=-1) == labels).mean()


def train(steps, seed):
    """Train one model per implementation; return the loss of every step and the test accuracy after some steps."""
    images, labels = load_digits(return_X_y=True)
    images = (images.reshape(-1, 8, 8) / 16).astype(np.float32)
    x_train, x_test, y_train, y_test = train_test_split(
        images, labels.astype(np.int32), test_size=0.25, stratify=labels, random_state=0
    )
    schedule = optax.cosine_decay_schedule(LEARNING_RATE, steps)

    models = {name: VisionTransformer(functions, nnx.Rngs(seed)) for name, functions in IMPLEMENTATIONS.items()}
    optimizers = {name: nnx.Optimizer(model, optax.adam(schedule), wrt=nnx.Param) for name, model in models.items()}
    losses = {name: [] for name in models}
    accuracies = {name: {} for name in models}

    random = np.random.default_rng(seed)
    progress = tqdm(range(1, steps + 1), "steps")
    for step in progress:
        if step % EPOCH == 1:
            batches = iter(random.permutation(len(x_train))[: EPOCH * BATCH].reshape(EPOCH, BATCH))
        batch = next(batches)
        x = x_train[batch] + NOISE * random.standard_normal((BATCH, 8, 8), dtype=np.float32)
        for name, model in models.items():
            losses[name].append(train_step(model, optimizers[name], x, y_train[batch]))
        if step % EPOCH == 0 or step == steps:
            for name, model in models.items():
                accuracies[name][step] = accuracy(model, x_test, y_test)
        if step % (5 * EPOCH) == 0 or step == steps:
            text = (f"{name} {np.mean(losses[name][-EPOCH:]):.7f}" for name in models)
            progress.write(f"step {step:3d}  mean training loss of {EPOCH} steps:  " + "  ".join(text))
    return {name: np.array(values) for name, values in losses.items()}, accuracies


def save_picture(path, losses, accuracies):
    styles = {"jax_softmax": dict(color="tab:orange", linewidth=4, alpha=0.6), "jax.nn": dict(color="black", ls="--")}
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for name, style in styles.items():
        left.semilogy(np.arange(1, len(losses[name]) + 1), losses[name], label=name, **style)
        right.plot([*accuracies[name]], [100 * value for value in accuracies[name].values()], label=name, **style)
    right.axhline(100 * MIN_ACCURACY, color="gray", linewidth=0.8, linestyle=":", label="required")
    left.set(xlabel="step", ylabel="training loss", title="Cross-entropy")
    right.set(xlabel="step", ylabel="test accuracy (%)", title="Test accuracy")
    for axes in (left, right):
        axes.legend(frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", default="digits_vit.png", help="picture to write")
    arguments = parser.parse_args()

    # GPUs may otherwise multiply float32 matrices at TF32 precision, which would hide float32-level agreement.
    jax.config.update("jax_default_matmul_precision", "float32")
    print(f"device: {jax.devices()[0].device_kind}")
    losses, accuracies = train(arguments.steps, arguments.seed)
    save_picture(arguments.output, losses, accuracies)
    print(f"picture: {arguments.output}")

    failures = []
    for name in accuracies:
        value = accuracies[name][arguments.steps]
        print(f"final test accuracy, {name}: {value:.2%}")
        if arguments.steps >= STEPS and value < MIN_ACCURACY:
            failures.append(f"test accuracy of {name} is below {MIN_ACCURACY:.0%}")

    difference = np.abs(losses["jax_softmax"] - losses["jax.nn"])
    final_difference = abs(losses["jax_softmax"][-EPOCH:].mean() - losses["jax.nn"][-EPOCH:].mean())
    for what, value, tolerance in (
        ("loss difference of the first step", difference[0], FIRST_STEP_TOLERANCE),
        (f"largest loss difference in {EARLY_STEPS} steps", difference[:EARLY_STEPS].max(), EARLY_TOLERANCE),
        (f"difference of the mean losses of the last {EPOCH} steps", final_difference, FINAL_MEAN_TOLERANCE),
    ):
        print(f"{what}: {value:.1e} (tolerance {tolerance:.0e})")
        if not value <= tolerance:  # also catches NaN
            failures.append(f"{what} is {value:.1e}")
    print(f"largest loss difference of any step: {difference.max():.1e}")
    if failures:
        sys.exit("FAILED: " + "; ".join(failures))
    print("OK")


if __name__ == "__main__":
    main()
