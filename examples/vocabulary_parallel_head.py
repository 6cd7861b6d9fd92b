"""A Flax language-model head whose vocabulary is divided among devices, with jax_softmax and with jax.nn.

Eight simulated CPU devices form a mesh of 2 (data) by 4 (model). Each holds a quarter of the head's columns, so of
every row of logits it has a quarter. Under ``jax.jit`` nothing but the layout of the arguments says so. The script
takes the loss and its gradients, prints the collectives of the compiled programs, and exits with status 1 if there are
others than all-reduces among those of jax_softmax or if the losses or gradients differ.

    pip install jax_softmax flax
    python vocabulary_parallel_head.py
"""

import collections
import os
import re
import sys

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_softmax

BATCH, LENGTH, DIM, VOCABULARY = 4, 64, 128, 8192


class Head(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.norm = nnx.RMSNorm(DIM, rngs=rngs)
        self.projection = nnx.Linear(DIM, VOCABULARY, use_bias=False, rngs=rngs)

    def __call__(self, hidden):
        return self.projection(self.norm(hidden))


def main() -> int:
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices("cpu")[:8])

    def place(array, *spec):
        return jax.device_put(array, NamedSharding(mesh, P(*spec)))

    structure, weights = nnx.split(Head(nnx.Rngs(0)))
    weights = jax.tree.map(lambda w: place(w, None, "model") if w.ndim == 2 else place(w), weights)
    rng = np.random.default_rng(0)
    hidden = place(rng.standard_normal((BATCH, LENGTH, DIM), np.float32), "data")
    labels = place(rng.integers(VOCABULARY, size=(BATCH, LENGTH)), "data")

    def loss(weights, hidden, labels, log_softmax):
        log_p = log_softmax(nnx.merge(structure, weights)(hidden))
        # A sum over the vocabulary instead of an index into it: each device adds what it has.
        return -jnp.mean(jnp.sum(log_p * jax.nn.one_hot(labels, VOCABULARY), axis=-1))

    results, others = {}, {}
    for name, log_softmax in (("jax_softmax", jax_softmax.log_softmax), ("jax.nn", jax.nn.log_softmax)):
        step = jax.jit(jax.value_and_grad(lambda *args, f=log_softmax: loss(*args, f), argnums=(0, 1)))
        program = step.lower(weights, hidden, labels).compile()
        found = re.findall(
            r" (all-(?:gather|reduce|to-all)|collective-\w+|reduce-scatter)(?:-start)?\(", program.as_text()
        )
        results[name] = program(weights, hidden, labels)
        others[name] = set(found) - {"all-reduce"}
        counts = ", ".join(f"{n} {kind}" for kind, n in sorted(collections.Counter(found).items()))
        print(f"{name:11}  loss {float(results[name][0]):.6f}  collectives of the training step: {counts}")

    ours, theirs = (jax.tree.leaves(results[name]) for name in ("jax_softmax", "jax.nn"))
    same = all(np.allclose(a, b, rtol=1e-5, atol=1e-5 * np.abs(b).max()) for a, b in zip(ours, theirs, strict=True))
    print("the same loss and gradients" if same else "THE LOSS OR THE GRADIENTS DIFFER")
    return 0 if same and not others["jax_softmax"] else 1


if __name__ == "__main__":
    sys.exit(main())
