"""A language model's head whose vocabulary is divided among devices, and the bytes that its loss makes travel.

Eight simulated CPU devices form a mesh of 2 (data) by 4 (model). Each holds a quarter of the head's columns, so of
every row of logits it has a quarter. optax's loss needs whole rows, so inside ``jax.shard_map`` the logits are gathered
for it. ``cross_entropy_loss`` takes the name of the mesh axis, and only numbers of rows travel. Under ``jax.jit`` it
needs nothing but the layout of the arguments.

The script prints the bytes of what the collectives of a gradient step give each device. It exits with status 1 if the
losses or gradients differ, or if the logits travel with this package.

    pip install ".[examples]"
    python examples/vocabulary_parallel_head.py
"""

import os
import re
import sys

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_softmax import cross_entropy_loss

TOKENS, DIM, VOCABULARY = 512, 128, 8192
MESH = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices("cpu")[:8])
SPECS = P(None, "model"), P("data"), P("data")  # of the head's weights, the tokens' features, their labels


def gathered(w, hidden, labels):
    logits = jax.lax.all_gather(hidden @ w, "model", axis=-1, tiled=True)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return jax.lax.pmean(losses.mean(), ("data", "model"))


def in_parts(w, hidden, labels):
    return jax.lax.pmean(cross_entropy_loss(hidden @ w, labels, axis_name="model"), "data")


def by_layout(w, hidden, labels):
    return cross_entropy_loss(hidden @ w, labels)


STEPS = {
    "optax, logits gathered": jax.shard_map(gathered, mesh=MESH, in_specs=SPECS, out_specs=P()),
    "cross_entropy_loss(axis_name=)": jax.shard_map(in_parts, mesh=MESH, in_specs=SPECS, out_specs=P()),
    "cross_entropy_loss under jit": by_layout,
}


def collectives(program) -> dict[str, int]:
    """The bytes of the results of each kind of collective on a device."""
    found = {}
    for results, kind in re.findall(
        r"= (.+?) (all-gather|all-reduce|all-to-all|collective-\w+|reduce-scatter)(?:-start)?\(", program.as_text()
    ):
        sizes = [
            4 * np.prod([int(n) for n in shape.split(",") if n]) for shape in re.findall(r"[fs]32\[(.*?)\]", results)
        ]
        found[kind] = found.get(kind, 0) + int(sum(sizes))
    return found


def main() -> int:
    rng = np.random.default_rng(0)
    arguments = [
        rng.standard_normal((DIM, VOCABULARY), np.float32) / DIM**0.5,
        rng.standard_normal((TOKENS, DIM), np.float32),
        rng.integers(VOCABULARY, size=TOKENS, dtype=np.int32),
    ]
    arguments = [jax.device_put(a, NamedSharding(MESH, spec)) for a, spec in zip(arguments, SPECS, strict=True)]
    logits = 4 * TOKENS // 2 * VOCABULARY
    print(f"rows of logits of a device, were they whole: {logits / 1e6:.2f} MB")

    results, travelling = {}, {}
    for name, loss in STEPS.items():
        program = jax.jit(jax.value_and_grad(loss, argnums=(0, 1))).lower(*arguments).compile()
        results[name] = program(*arguments)
        found = collectives(program)
        travelling[name] = sum(found.values())
        kinds = ", ".join(f"{kind} {size / 1e6:.2f}" for kind, size in sorted(found.items()))
        print(f"{name:31} loss {results[name][0]:.6f}, {travelling[name] / 1e6:5.2f} MB travel: {kinds}")

    theirs, *ours = (jax.tree.leaves(r) for r in results.values())
    same = all(
        np.allclose(a, b, rtol=1e-5, atol=1e-5 * jnp.abs(b).max())
        for one in ours
        for a, b in zip(one, theirs, strict=True)
    )
    print("the same losses and gradients" if same else "THE LOSSES OR THE GRADIENTS DIFFER")
    small = all(size < logits for name, size in travelling.items() if name.startswith("cross_entropy_loss"))
    return int(not (same and small))


if __name__ == "__main__":
    sys.exit(main())
