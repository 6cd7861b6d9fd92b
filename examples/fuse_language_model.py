"""Train an unchanged Flax language model with jit(step) and with jit(fuse(step)), side by side.

The model knows nothing of jax_softmax: attention in einsums, with a soft cap, dropout, and documents that are packed
into rows, and optax's loss. Both runs start from the same seed. The script prints what `fuse` would do on a GPU, the
losses of both and the time of a step, and exits with status 1 if the losses differ by more than rounding explains. On a
CPU `fuse` folds nothing, so there it prints what a GPU would do with a larger model.

`--picture FILE` also compiles the step for longer and longer rows, and draws the memory that it needs.

The text is the reference that ``help()`` shows, which is part of Python; nothing is downloaded:

    pip install ".[examples]"
    python examples/fuse_language_model.py
"""

import argparse
import sys
import time
from pydoc_data.topics import topics

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from flax import nnx
from tqdm import tqdm

import jax_softmax

STEPS = 20  # after which the loss is less than at the beginning
LARGER = {"batch": 8, "length": 1024, "features": 1024, "heads": 16}
TOLERANCE = 0.02  # of losses, between runs whose sums are of another order


class Attention(nnx.Module):
    def __init__(self, features, heads, types):
        self.qkv = nnx.LinearGeneral(features, (3, heads, features // heads), **types)
        self.out = nnx.LinearGeneral((heads, features // heads), features, axis=(-2, -1), **types)
        self.dropout = nnx.Dropout(0.1, rngs=types["rngs"])

    def __call__(self, x, documents):
        q, k, v = jnp.moveaxis(self.qkv(x), -3, 0)
        scores = jnp.einsum("bihd,bjhd->bhij", q, k) / q.shape[-1] ** 0.5
        scores = 30 * jnp.tanh(scores.astype(jnp.float32) / 30)
        n = jnp.arange(x.shape[1])
        seen = (n[:, None] >= n) & (documents[:, None, :, None] == documents[:, None, None, :])
        weights = nnx.softmax(jnp.where(seen, scores, -1e30)).astype(v.dtype)
        return self.out(jnp.einsum("bhij,bjhd->bihd", self.dropout(weights), v))


class Block(nnx.Module):
    def __init__(self, features, heads, types):
        self.attention = Attention(features, heads, types)
        self.norms = nnx.List([nnx.LayerNorm(features, rngs=types["rngs"]) for _ in range(2)])
        self.up, self.down = nnx.Linear(features, 4 * features, **types), nnx.Linear(4 * features, features, **types)

    def __call__(self, x, documents):
        x = x + self.attention(self.norms[0](x), documents)
        return x + self.down(nnx.gelu(self.up(self.norms[1](x))))


class LanguageModel(nnx.Module):
    def __init__(self, vocabulary, features, heads, layers, length, dtype, rngs):
        types = {"dtype": jnp.dtype(dtype), "rngs": rngs}
        self.tokens = nnx.Embed(vocabulary, features, rngs=rngs)
        self.positions = nnx.Embed(length, features, rngs=rngs)
        self.blocks = nnx.List([Block(features, heads, types) for _ in range(layers)])
        self.head = nnx.Linear(features, vocabulary, **types)

    def __call__(self, tokens, documents):
        x = self.tokens(tokens) + self.positions(jnp.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x, documents)
        return self.head(x)


def train_step(model, optimizer, tokens, documents):
    def loss(model):
        logits = model(tokens[:, :-1], documents[:, :-1]).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    value, gradients = nnx.value_and_grad(loss)(model)
    optimizer.update(model, gradients)
    return value


def batches(text, steps, batch, length):
    """Tokens, and the number of the document that each is of."""
    rng = np.random.default_rng(0)
    for _ in range(steps):
        starts = rng.integers(0, text.shape[1] - length - 1, batch)
        yield jnp.asarray(np.stack([text[:, start : start + length + 1] for start in starts], 1))


def model_of(options, length):
    sizes = options.vocabulary, options.features, options.heads, options.layers, length
    model = LanguageModel(*sizes, options.dtype, nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)


def explain(fused, options):
    """What a GPU does with a step of one layer; shapes are enough."""
    options = argparse.Namespace(**vars(options) | {"layers": 1})
    tokens = jax.ShapeDtypeStruct((options.batch, options.length + 1), jnp.int32)
    return fused.explain(*nnx.eval_shape(lambda: model_of(options, options.length)), tokens, tokens)


def train(name, step, options, text):
    """The losses, and the seconds of a step."""
    model, optimizer = model_of(options, options.length)
    losses, times = [], []
    steps = batches(text, options.steps, options.batch, options.length)
    for tokens, documents in tqdm(steps, name, options.steps):
        start = time.perf_counter()
        losses.append(float(step(model, optimizer, tokens, documents)))
        times.append(time.perf_counter() - start)
    return np.array(losses), np.median(times[1:] or times)


def draw_memory(steps, options, text, path):
    """A picture of what a step needs besides its arguments and results, for rows of several lengths."""
    lengths = [options.length << k for k in range(5)]
    axes = plt.figure(figsize=(5, 3.5), layout="constrained").add_subplot()
    for name, step in steps.items():
        sizes = []
        for length in lengths:
            arguments = (*model_of(options, length), *next(batches(text, 1, options.batch, length)))
            sizes.append(nnx.jit(step).lower(*arguments).compile().memory_analysis().temp_size_in_bytes / 2**20)
        axes.loglog(lengths, sizes, "o-", label=name, base=2)
        print(
            f"{name:16s} MiB of rows of {', '.join(f'{n}: {size:.0f}' for n, size in zip(lengths, sizes, strict=True))}"
        )
    axes.set(xlabel="tokens in a row", ylabel="temporary memory, MiB")
    axes.legend()
    axes.figure.savefig(path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--features", type=int, default=64)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--vocabulary", type=int, default=256, help="at least 256, of bytes")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16", help="of layers")
    parser.add_argument("--picture", help="a file for a picture of the memory, which needs matplotlib")
    options = parser.parse_args()
    documents = [np.frombuffer(topic.encode(), np.uint8) for topic in topics.values()]
    text = np.stack(
        [np.concatenate(documents), np.repeat(np.arange(len(documents)), list(map(len, documents)))]
    ).astype(np.int32)

    fused = jax_softmax.fuse(train_step)
    if jax.default_backend() == "gpu":
        print(f"Of one layer, fuse makes this:\n{explain(fused, options)}")
    else:
        larger = argparse.Namespace(**vars(options) | LARGER)
        sizes = ", ".join(f"{name} {size}" for name, size in LARGER.items())
        print(f"Not on a GPU: fuse folds nothing here. A GPU would do this with one layer of {sizes}:")
        print(explain(fused, larger))

    steps = {"jit(step)": train_step, "jit(fuse(step))": fused}
    results = {name: train(name, nnx.jit(step), options, text) for name, step in steps.items()}
    for name, (losses, seconds) in results.items():
        print(f"{name:16s} losses {losses[0]:.4f} ... {losses[-1]:.4f}, {seconds * 1e3:.1f} ms a step")
    if options.picture:
        draw_memory(steps, options, text, options.picture)
    plain, ours = (losses for losses, _ in results.values())
    difference = np.abs(plain - ours).max()
    print(f"largest difference of losses: {difference:.2e}")
    learned = options.steps < STEPS or plain[-1] < plain[0]
    return int(not (difference <= TOLERANCE and learned))


if __name__ == "__main__":
    sys.exit(main())
