"""Train an unchanged Flax language model with jit(step) and with jit(fuse(step)), side by side.

The model is Flax's own attention, which calls `jax.nn.softmax` in float32, and optax's loss; it knows nothing of
jax_softmax. Both runs start from the same seed. The script prints what `fuse` would fold into each kernel on a GPU, the
losses of both and the time of a step, and exits with status 1 if the losses differ by more than rounding explains. On a
CPU `fuse` changes nothing.

The text is the reference that ``help()`` shows, which is part of Python; nothing is downloaded:

    pip install jax_softmax flax optax
    python fuse_language_model.py
"""

import argparse
import sys
import time
from pydoc_data.topics import topics

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jax_softmax

TOLERANCE = 0.02  # of losses, between runs whose sums are of another order, in bfloat16


class Block(nnx.Module):
    def __init__(self, features, heads, rngs):
        types = {"dtype": jnp.bfloat16, "rngs": rngs}
        self.attention = nnx.MultiHeadAttention(heads, features, decode=False, **types)
        self.norms = nnx.List([nnx.LayerNorm(features, rngs=rngs) for _ in range(2)])
        self.up, self.down = nnx.Linear(features, 4 * features, **types), nnx.Linear(4 * features, features, **types)

    def __call__(self, x):
        mask = nnx.make_causal_mask(x[..., 0])
        x = x + self.attention(self.norms[0](x), mask=mask)
        return x + self.down(nnx.gelu(self.up(self.norms[1](x))))


class LanguageModel(nnx.Module):
    def __init__(self, vocabulary, features, heads, layers, length, rngs):
        self.tokens = nnx.Embed(vocabulary, features, rngs=rngs)
        self.positions = nnx.Embed(length, features, rngs=rngs)
        self.blocks = nnx.List([Block(features, heads, rngs) for _ in range(layers)])
        self.head = nnx.Linear(features, vocabulary, dtype=jnp.bfloat16, rngs=rngs)

    def __call__(self, tokens):
        x = self.tokens(tokens) + self.positions(jnp.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def train_step(model, optimizer, tokens):
    def loss(model):
        logits = model(tokens[:, :-1]).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    value, gradients = nnx.value_and_grad(loss)(model)
    optimizer.update(model, gradients)
    return value


def batches(text, steps, batch, length):
    rng = np.random.default_rng(0)
    for _ in range(steps):
        starts = rng.integers(0, len(text) - length - 1, batch)
        yield jnp.asarray(np.stack([text[start : start + length + 1] for start in starts]))


def train(step, options, text):
    """The losses, and the seconds of a step."""
    sizes = options.features, options.heads, options.layers, options.length
    model = LanguageModel(options.vocabulary, *sizes, nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    losses, times = [], []
    for tokens in batches(text, options.steps, options.batch, options.length):
        start = time.perf_counter()
        losses.append(float(step(model, optimizer, tokens)))
        times.append(time.perf_counter() - start)
    return np.array(losses), np.median(times[1:])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--features", type=int, default=64)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--vocabulary", type=int, default=256, help="at least 256, of bytes")
    options = parser.parse_args()
    text = np.frombuffer("\n".join(topics.values()).encode(), np.uint8).astype(np.int32)

    fused = jax_softmax.fuse(train_step)
    model = LanguageModel(options.vocabulary, options.features, options.heads, 1, options.length, nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    tokens = next(batches(text, 1, options.batch, options.length))
    print("Of one layer:", fused.explain(model, optimizer, tokens), sep="\n")

    results = {"jit(step)": train(nnx.jit(train_step), options, text)}
    results["jit(fuse(step))"] = train(nnx.jit(fused), options, text)
    for name, (losses, seconds) in results.items():
        print(f"{name:16s} losses {losses[0]:.4f} ... {losses[-1]:.4f}, {seconds * 1e3:.1f} ms a step")
    plain, ours = (losses for losses, _ in results.values())
    difference = np.abs(plain - ours).max()
    print(f"largest difference of losses: {difference:.2e}")
    return int(not (difference <= TOLERANCE and plain[-1] < plain[0]))


if __name__ == "__main__":
    sys.exit(main())
