"""Times training steps of other people's repositories, as they are and under `fuse`.

python benchmarks/real.py --flax PATH [--only NAME ...] [--explain] [--small] [--output FOLDER]

PATH is a checkout of https://github.com/google/flax. Its examples are imported from there; what they import besides
and is not installed, as TensorFlow, is replaced by an object that does nothing. Batches are random tokens, packed.

Of each step: time, temporary memory, and its loss after two steps. Writes real.md. `--small`: small models, also on a
CPU, where nothing is timed.
"""

import argparse
import contextlib
import importlib
import importlib.machinery
import importlib.util
import sys
import types
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import MagicMock

import flax.nnx
import flax.training.train_state
import jax
import jax.numpy as jnp
import numpy as np
import optax
from timing import device_times

import jax_softmax


class Step(NamedTuple):
    """A function that takes the state of a training and gives the next one and a loss."""

    function: Any
    state: Any


class _Absent:
    """Finds modules that nobody else has, and makes them up."""

    def find_spec(self, name, path=None, target=None):
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        module = MagicMock(spec=None, name=spec.name)
        module.__spec__, module.__path__, module.__name__ = spec, [], spec.name
        return module

    def exec_module(self, module):
        pass


@contextlib.contextmanager
def imported(folder: Path, *names: str):
    """Modules of a folder, which import one another as if they were on the path."""
    if importlib.util.find_spec("jaxtyping"):  # it looks for packages of which there is no half
        importlib.import_module("jaxtyping")
    before = dict(sys.modules)
    absent = _Absent()
    sys.path.insert(0, str(folder))
    sys.meta_path.append(absent)
    try:
        yield types.SimpleNamespace(**{name: importlib.import_module(name) for name in names})
    finally:
        sys.meta_path.remove(absent)
        sys.path.remove(str(folder))
        for name in set(sys.modules) - set(before):
            file = getattr(sys.modules[name], "__file__", None)
            if isinstance(sys.modules[name], MagicMock) or str(file).startswith(str(folder)):
                del sys.modules[name]


def packed(key, batch, length, vocabulary):
    """Tokens, the number of the sequence that each belongs to, and its position there: about four sequences a row."""
    tokens = jax.random.randint(key, (batch, length), 1, vocabulary)
    starts = jax.random.uniform(jax.random.fold_in(key, 1), (batch, length)) < 4 / length
    segments = 1 + jnp.cumsum(starts, -1)
    index = jnp.arange(length)
    positions = index - jax.lax.cummax(jnp.where(starts, index, 0), axis=1)
    return tokens, segments, positions


def _optimizer():
    return optax.adamw(1e-3, b1=0.9, b2=0.98, eps=1e-9, weight_decay=0.1)


def _sizes(small):
    return {"emb_dim": 32, "num_heads": 2, "num_layers": 2, "qkv_dim": 32, "mlp_dim": 64} if small else {}


def lm1b(flax_path, key, small, batch=32, length=512):
    with imported(flax_path / "examples/lm1b", "train", "models") as theirs:
        batch, length, vocabulary = (2, 24, 50) if small else (batch, length, 30_000)
        config = theirs.models.TransformerConfig(
            vocab_size=vocabulary,
            output_vocab_size=vocabulary,
            logits_via_embedding=True,
            dtype=jnp.bfloat16,
            max_len=max(length, 32),
            kernel_init=flax.linen.initializers.xavier_uniform(),
            bias_init=flax.linen.initializers.normal(stddev=1e-6),
            **_sizes(small),
        )
        tokens, segments, positions = packed(key, batch, length, vocabulary)
        given = {"inputs": tokens, "inputs_segmentation": segments, "inputs_position": positions}
        model = theirs.models.TransformerLM(config.replace(deterministic=True))
        params = jax.jit(model.init)(key, tokens)["params"]
        state = flax.training.train_state.TrainState.create(apply_fn=model.apply, params=params, tx=_optimizer())

        def step(state):
            new, metrics = theirs.train.train_step(
                state, given, config, lambda step: 1e-3, label_smoothing=0.1, dropout_rng=key
            )
            return new, metrics["loss"] / metrics["denominator"]

        return Step(step, state)


def lm1b_long(flax_path, key, small):
    return lm1b(flax_path, key, small, 8, 2048)


def wmt(flax_path, key, small):
    with imported(flax_path / "examples/wmt", "train", "models") as theirs:
        batch, length, vocabulary = (2, 24, 50) if small else (32, 256, 32_000)
        config = theirs.models.TransformerConfig(
            vocab_size=vocabulary,
            output_vocab_size=vocabulary,
            share_embeddings=True,
            logits_via_embedding=True,
            dtype=jnp.bfloat16,
            max_len=max(length, 32),
            **_sizes(small),
        )
        given = {}
        for name, its_key in zip(("inputs", "targets"), jax.random.split(key), strict=True):
            tokens, segments, positions = packed(its_key, batch, length, vocabulary)
            given |= {name: tokens, f"{name}_segmentation": segments, f"{name}_position": positions}
        model = theirs.models.Transformer(config.replace(deterministic=True))
        params = jax.jit(model.init)(key, given["inputs"], given["targets"])["params"]
        state = theirs.train.TrainState.create(apply_fn=model.apply, params=params, tx=_optimizer(), dynamic_scale=None)

        def step(state):
            def of_one_device(state):
                return theirs.train.train_step(
                    state, given, config, lambda step: 1e-3, label_smoothing=0.1, dropout_rng=key
                )

            # Their step adds gradients up over devices, of which there is one here.
            new, metrics = jax.vmap(of_one_device, axis_name="batch", axis_size=1, in_axes=None, out_axes=0)(state)
            return jax.tree.map(lambda a: a[0], new), (metrics["loss"] / metrics["denominator"])[0]

        return Step(step, state)


def gemma(flax_path, key, small):
    with imported(flax_path / "examples/gemma", "train", "transformer", "transformer_cfg") as theirs:
        nnx = flax.nnx
        batch, length, vocabulary = (2, 24, 50) if small else (4, 2048, 32_000)
        kind = theirs.transformer_cfg.AttentionType
        config = theirs.transformer_cfg.TransformerConfig(
            num_layers=2 if small else 8,
            num_embed=vocabulary,
            embed_dim=32 if small else 1024,
            hidden_dim=64 if small else 4096,
            num_heads=4 if small else 16,
            head_dim=16 if small else 64,
            num_kv_heads=2 if small else 8,
            final_logit_softcap=30.0,
            attn_logits_soft_cap=50.0,
            use_post_attn_norm=True,
            use_post_ffw_norm=True,
            attention_types=(kind.LOCAL_SLIDING, kind.GLOBAL) * (1 if small else 4),
            sliding_window_size=8 if small else 512,
            dtype=jnp.bfloat16,
        )
        tokens, segments, positions = packed(key, batch, length, vocabulary)
        given = {"inputs": tokens, "targets": jnp.roll(tokens, -1, 1)}
        given |= {"inputs_segmentation": segments, "inputs_position": positions}
        model = theirs.transformer.Transformer(config, rngs=nnx.Rngs(params=0))
        graph, params, others = nnx.split(model, nnx.Param, ...)
        optimizer = _optimizer()

        def step(state):
            params, opt_state = state

            def loss_of(params):
                module = nnx.merge(graph, params, others)
                mask = theirs.transformer.make_causal_attn_mask(tokens > 0)
                mask = mask & (segments[:, :, None] == segments[:, None, :])
                logits, _ = module(tokens, positions=positions, attention_mask=mask, cache=None)
                weights = (tokens > 0).astype(jnp.float32)
                loss = theirs.train.compute_weighted_cross_entropy(logits, given["targets"], weights, 0.1)
                return jnp.mean(loss[0] if isinstance(loss, tuple) else loss)

            loss, gradients = jax.value_and_grad(loss_of)(params)
            updates, opt_state = optimizer.update(gradients, opt_state, params)
            return (optax.apply_updates(params, updates), opt_state), loss

        return Step(step, (params, optimizer.init(params)))


STEPS = {"wmt": wmt, "lm1b": lm1b, "lm1b, B8 L2048": lm1b_long, "gemma": gemma}


def after_two(program, state):
    """The loss of the second step."""
    state, _ = program(state)
    return float(program(state)[1])


def measured(name, step, options) -> str:
    """A row of the table."""
    functions = {"XLA": step.function, "fused": jax_softmax.fuse(step.function)}
    if options.explain:
        print(functions["fused"].explain(step.state), flush=True)
    compiled = {which: jax.jit(f).lower(step.state).compile() for which, f in functions.items()}
    losses = {which: after_two(program, step.state) for which, program in compiled.items()}
    memory = {which: p.memory_analysis().temp_size_in_bytes / 2**20 for which, p in compiled.items()}
    times = {"XLA": np.nan, "fused": np.nan}
    if not options.small:
        times = device_times({which: (p, (step.state,)) for which, p in compiled.items()}, options.repeats)
    for time in times.values():
        if isinstance(time, Exception):
            raise time
    return (
        f"| {name} | {times['XLA'] * 1e3:.2f} | {times['fused'] * 1e3:.2f} | {times['XLA'] / times['fused']:.2f} | "
        f"{memory['XLA']:.0f} | {memory['fused']:.0f} | {losses['XLA']:.5f} | {losses['fused']:.5f} |"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flax", type=Path, required=True, help="a checkout of Flax")
    parser.add_argument("--only", action="append", default=[], help="a part of a step's name")
    parser.add_argument("--explain", action="store_true", help="print what is folded")
    parser.add_argument("--small", action="store_true", help="small models, not timed")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    rows, failed = [], 0
    for name, make in STEPS.items():
        if options.only and not any(part in name for part in options.only):
            continue
        try:
            rows.append(measured(name, make(options.flax, jax.random.key(0), options.small), options))
        except Exception as error:  # the others are measured all the same
            print(f"{name}: {type(error).__name__}: {str(error)[:600]}", flush=True)
            failed += 1
            continue
        print(rows[-1], flush=True)
    if not options.small:
        head = "| step | XLA, ms | fused, ms | XLA / fused | temporary memory, MiB: XLA | fused | loss: XLA | fused |"
        head += "\n|---|---|---|---|---|---|---|---|"
        text = f"# Training steps of other repositories\n\n{jax.devices()[0].device_kind}, JAX {jax.__version__}.\n\n"
        options.output.mkdir(parents=True, exist_ok=True)
        (options.output / "real.md").write_text(text + "\n".join([head, *rows]) + "\n")
    return failed


if __name__ == "__main__":
    sys.exit(main())
