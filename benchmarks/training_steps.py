"""Training steps of other people's repositories, as `real.py` times them: their models, losses and steps as they are.

`checkouts.py` imports them. Batches are random. Where a repository's step cannot be imported, its loss is
differentiated here and optax's AdamW updates the parameters.
"""

import __future__

import functools
import json
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import flax.nnx
import flax.training.train_state
import jax
import jax.numpy as jnp
import optax


class Step(NamedTuple):
    """A function that takes the state of a training and a batch, and gives the next state and a loss."""

    function: Any
    state: Any
    batch: Any


class Program(NamedTuple):
    """A training of a repository. `folder`: what is on the path there. `make`: from a key and `small` to a Step."""

    repository: str
    folder: str
    make: Callable[[jax.Array, bool], Step]


def of_one_device(f, axis="batch"):
    """f, which adds gradients up over an axis of devices, of which there is one here."""

    def on_it(*arguments):
        results = jax.vmap(f, axis_name=axis, axis_size=1, in_axes=None, out_axes=0)(*arguments)
        return jax.tree.map(lambda a: a[0], results)

    return on_it


def by_gradients(loss_of, params, batch) -> Step:
    """AdamW's step of a loss of parameters, a batch, and a key."""
    optimizer = _optimizer()

    def step(state, batch):
        params, opt_state, key = state
        key, new_key = jax.random.split(key)
        loss, gradients = jax.value_and_grad(loss_of)(params, batch, key)
        updates, opt_state = optimizer.update(gradients, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state, new_key), loss

    return Step(step, (params, jax.jit(optimizer.init)(params), jax.random.key(1)), batch)


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


def lm1b(key, small, batch=32, length=512):
    import models
    import train

    batch, length, vocabulary = (2, 24, 50) if small else (batch, length, 30_000)
    config = models.TransformerConfig(
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
    model = models.TransformerLM(config.replace(deterministic=True))
    params = jax.jit(model.init)(key, tokens)["params"]
    state = flax.training.train_state.TrainState.create(apply_fn=model.apply, params=params, tx=_optimizer())

    def step(state, given):
        new, metrics = train.train_step(state, given, config, lambda step: 1e-3, label_smoothing=0.1, dropout_rng=key)
        return new, metrics["loss"] / metrics["denominator"]

    return Step(step, state, given)


def lm1b_long(key, small):
    return lm1b(key, small, 8, 2048)


def wmt(key, small):
    import models
    import train

    batch, length, vocabulary = (2, 24, 50) if small else (32, 256, 32_000)
    config = models.TransformerConfig(
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
    model = models.Transformer(config.replace(deterministic=True))
    params = jax.jit(model.init)(key, given["inputs"], given["targets"])["params"]
    state = train.TrainState.create(apply_fn=model.apply, params=params, tx=_optimizer(), dynamic_scale=None)

    @of_one_device
    def step(state, given):
        new, metrics = train.train_step(state, given, config, lambda step: 1e-3, label_smoothing=0.1, dropout_rng=key)
        return new, metrics["loss"] / metrics["denominator"]

    return Step(step, state, given)


def gemma(key, small):
    import train
    import transformer
    import transformer_cfg

    nnx = flax.nnx
    batch, length, vocabulary = (2, 24, 50) if small else (4, 2048, 32_000)
    kind = transformer_cfg.AttentionType
    config = transformer_cfg.TransformerConfig(
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
    batch = packed(key, batch, length, vocabulary)
    model = transformer.Transformer(config, rngs=nnx.Rngs(params=0))
    graph, params, others = nnx.split(model, nnx.Param, ...)

    def loss_of(params, batch, key):
        tokens, segments, positions = batch
        module = nnx.merge(graph, params, others)
        mask = transformer.make_causal_attn_mask(tokens > 0)
        mask = mask & (segments[:, :, None] == segments[:, None, :])
        logits, _ = module(tokens, positions=positions, attention_mask=mask, cache=None)
        weights = (tokens > 0).astype(jnp.float32)
        loss = train.compute_weighted_cross_entropy(logits, jnp.roll(tokens, -1, 1), weights, 0.1)
        return jnp.mean(loss[0] if isinstance(loss, tuple) else loss)

    return by_gradients(loss_of, params, batch)


def nanodo(key, small):
    from nanodo import model_factory, train
    from nanodo.configs import default

    c = default.get_config()
    c.model.update({"D": 32, "H": 2, "L": 24, "N": 2, "F": 64} if small else {})
    batch, vocabulary = (2, 50) if small else (64, 32_000)
    model, loss_of = model_factory.get_model_and_loss(c, vocabulary)
    mesh = jax.sharding.Mesh(jax.devices()[:1], ("data",))
    _, state = train._init_train_state(c, model, key, mesh)

    def step(state, tokens):
        new, metrics = train._train_step(state, tokens, c, loss_of, mesh)
        return new, metrics["train_loss"]

    return Step(step, state, jax.random.randint(key, (batch, c.model.L), 1, vocabulary))


def _pictures(key, small, batch):
    return jax.random.uniform(key, (2, 32, 32, 3) if small else (batch, 224, 224, 3), minval=-1)


def vit(key, small):
    from big_vision import utils
    from big_vision.models import vit

    images = _pictures(key, small, 128)
    classes = 10 if small else 1000
    size = {"width": 32, "depth": 2, "num_heads": 2} if small else {"variant": "B/16"}
    model = vit.Model(classes, **size, posemb="sincos2d", scan=True, dtype_mm="bfloat16")
    labels = jax.nn.one_hot(jax.random.randint(key, images.shape[:1], 0, classes), classes)

    def loss_of(params, batch, key):
        images, labels = batch
        logits, _ = model.apply({"params": params}, images, train=True, rngs={"dropout": key})
        return utils.softmax_xent(logits=logits, labels=labels)

    return by_gradients(loss_of, jax.jit(model.init)(key, images)["params"], (images, labels))


def contrastive(key, small):
    from big_vision import utils
    from big_vision.models.proj.image_text import two_towers

    images = _pictures(key, small, 256)
    size = {"width": 32, "depth": 2, "num_heads": 2, "mlp_dim": 64} if small else {"variant": "B"}
    length, vocabulary = (8, 50) if small else (64, 32_000)
    texts = jax.random.randint(key, (images.shape[0], length), 1, vocabulary)
    image = {
        **size,
        "patch_size": (16, 16),
        "pool_type": "map",
        "head_zeroinit": False,
        "scan": True,
        "dtype_mm": "bfloat16",
    }
    text = {**size, "vocab_size": vocabulary, "scan": True}
    model = two_towers.Model(image=image, text=text, out_dim=32 if small else 768, temperature_init=10.0)

    def loss_of(params, batch, key):
        image, text, out = model.apply({"params": params}, *batch, train=True, rngs={"dropout": key})
        return utils.bidirectional_contrastive_loss(image, text, out["t"], reduction=True)[0]

    return by_gradients(loss_of, jax.jit(model.init)(key, images, texts)["params"], (images, texts))


def easylm(key, small):
    from EasyLM.jax_utils import JaxRNG, cross_entropy_loss_and_accuracy
    from EasyLM.models.llama.llama_model import FlaxLLaMAForCausalLMModule, LLaMAConfigurator

    batch, length, vocabulary = (2, 24, 50) if small else (4, 2048, 32_000)
    width, hidden, layers, heads = (32, 64, 2, 2) if small else (2048, 5504, 4, 16)
    config = types.SimpleNamespace(
        **{"vocab_size": vocabulary, "hidden_size": width, "intermediate_size": hidden, "num_hidden_layers": layers},
        **{"num_attention_heads": heads, "num_key_value_heads": heads, "initializer_range": 0.02},
        **{"rms_norm_eps": 1e-6, "max_position_embeddings": length, "rope_theta": 1e4},
        **dict.fromkeys(("embedding_dropout", "feedforward_dropout", "attention_dropout", "residue_dropout"), 0.0),
        **{"remat_policy": "nothing_saveable", "scan_attention": False, "scan_mlp": False},
        **{"fcm_min_ratio": 0.0, "fcm_max_ratio": 0.0},
    )
    model = FlaxLLaMAForCausalLMModule(config, dtype=jnp.bfloat16)
    tokens = jax.random.randint(key, (batch, length), 1, vocabulary)
    init = functools.partial(model.init, return_dict=False)

    def loss_of(params, tokens, key):
        rngs = JaxRNG(key)(LLaMAConfigurator.rng_keys())
        logits = model.apply(params, tokens, deterministic=False, rngs=rngs, return_dict=False)[0]
        return cross_entropy_loss_and_accuracy(logits, jnp.roll(tokens, -1, 1))[0]

    return by_gradients(loss_of, jax.jit(init)(key, tokens), tokens)


def meanflow(key, small):
    from configs import default
    from meanflow import MeanFlow
    from models import models_dit

    config = default.get_config()
    # Their DiT-B/2, of half the layers.
    size = (
        {"depth": 2, "hidden_size": 32, "num_heads": 2} if small else {"depth": 6, "hidden_size": 768, "num_heads": 12}
    )
    models_dit.sized = functools.partial(models_dit.DiT, patch_size=8 if small else 2, **size)
    config.method.norm_p = 0.0  # no weights, which would make every loss nearly 1
    model = MeanFlow("sized", {}, **config.sampling, **config.method)
    images = jax.random.normal(key, (4 if small else 64, 32, 32, 4))
    labels = jax.random.randint(key, images.shape[:1], 0, config.dataset.num_classes)
    params = jax.jit(model.init)({"params": key}, images[:1], jnp.ones(1, int), jnp.ones(1, int))["params"]

    def loss_of(params, batch, key):
        return model.apply({"params": params}, *batch, rngs={"gen": key}, method=model.forward)[0]

    return by_gradients(loss_of, params, (images, labels))


def evoformer(key, small):
    import haiku as hk
    from alphafold.model import config, layer_stack, modules, prng

    c = config.model_config("model_3").model
    gc, evoformer = c.global_config, c.embeddings_and_evoformer
    gc.use_remat = True
    layers, sequences, residues, msa, pair = (2, 4, 8, 128, 64) if small else (4, 128, 256, 256, 128)
    keys = jax.random.split(key, 5)
    batch = {
        "msa": jax.random.normal(keys[0], (sequences, residues, msa)),
        "pair": jax.random.normal(keys[1], (residues, residues, pair)),
        "true_msa": jax.random.randint(keys[2], (sequences, residues), 0, 22),
        "bert_mask": jax.random.bernoulli(keys[3], 0.15, (sequences, residues)).astype(jnp.float32),
        "pseudo_beta": 10 * jax.random.normal(keys[4], (residues, 3)),
        "pseudo_beta_mask": jnp.ones(residues),
    }

    @hk.transform
    def loss_of(batch):
        masks = {"msa": jnp.ones((sequences, residues)), "pair": jnp.ones((residues, residues))}
        block = modules.EvoformerIteration(evoformer.evoformer, gc, is_extra_msa=False)

        def layer(x):
            activations, safe_key = x
            safe_key, key = safe_key.split()
            return block(activations, masks, is_training=True, safe_key=key), safe_key

        x = {name: batch[name] for name in ("msa", "pair")}, prng.SafeKey(hk.next_rng_key())
        x, _ = layer_stack.layer_stack(layers)(hk.remat(layer))(x)
        heads = (modules.MaskedMsaHead, c.heads.masked_msa), (modules.DistogramHead, c.heads.distogram)
        heads = [(make(of, gc), of.weight) for make, of in heads]
        return sum(weight * head.loss(head(x, batch, True), batch)["loss"] for head, weight in heads)

    params = jax.jit(loss_of.init)(key, batch)
    return by_gradients(lambda params, batch, key: loss_of.apply(params, key, batch), params, batch)


def levanter(key, small):
    import equinox
    import haliax
    import jmp
    from levanter.layers.attention import AttentionBackend
    from levanter.models.gpt2 import Gpt2Config, Gpt2LMHeadModel
    from levanter.models.lm_model import LmExample, compute_next_token_loss

    batch, length, vocabulary = (2, 24, 50) if small else (16, 1024, 50_257)
    size = {"hidden_dim": 32, "num_layers": 2, "num_heads": 2} if small else {}
    config = Gpt2Config(seq_len=length, attn_backend=AttentionBackend.VANILLA, **size)
    init = functools.partial(Gpt2LMHeadModel.init, haliax.Axis("vocab", vocabulary), config)
    params, others = equinox.partition(equinox.filter_jit(init)(key=key), equinox.is_inexact_array)
    policy = jmp.get_policy("p=f32,c=bfloat16")
    Batch = haliax.Axis("batch", batch)

    def loss_of(params, tokens, key):
        model = equinox.combine(policy.cast_to_compute(params), others)
        example = haliax.vmap(LmExample.causal, Batch)(haliax.named(tokens, (Batch, config.Pos)))
        return haliax.mean(compute_next_token_loss(model, example, key=key, reduction=None)).scalar()

    return by_gradients(loss_of, params, jax.random.randint(key, (batch, length), 1, vocabulary))


def bert(key, small):
    import equinox

    theirs: dict[str, Any] = {}
    for cell in json.loads(Path(sys.path[0], "bert.ipynb").read_text())["cells"]:
        text = "".join(cell["source"])
        if cell["cell_type"] == "code" and text.startswith(("import", "class", "@")):
            exec(
                compile(text, "bert.ipynb", "exec", __future__.annotations.compiler_flag), theirs
            )  # of none is a value needed
    batch, length, vocabulary = (2, 24, 50) if small else (64, 512, 30_522)
    width, layers, heads = (32, 2, 2) if small else (768, 6, 12)
    config = {
        **{"vocab_size": vocabulary, "hidden_size": width, "intermediate_size": 4 * width},
        **{"num_hidden_layers": layers, "num_attention_heads": heads, "max_position_embeddings": 512},
        **{"type_vocab_size": 2, "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1},
    }
    model = theirs["BertClassifier"](config=config, num_classes=2, key=key)
    params, others = equinox.partition(model, equinox.is_inexact_array)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-5))
    tokens = jax.random.randint(key, (batch, length), 1, vocabulary)
    seen = jnp.arange(length) < jax.random.randint(key, (batch, 1), length // 4, length + 1)
    inputs = {"token_ids": tokens * seen, "segment_ids": 0 * tokens, "label": tokens[:, 0] % 2}

    @functools.partial(of_one_device, axis="devices")
    def step(state, inputs):
        params, opt_state, key = state
        model = equinox.combine(params, others)
        loss, model, opt_state, key = theirs["make_step"](model, inputs, opt_state, key, optimizer)
        return (equinox.filter(model, equinox.is_inexact_array), opt_state, key), loss

    return Step(step, (params, optimizer.init(params), key), inputs)


def ppo(key, small):
    import ppo

    updates, environments, steps = (2, 4, 16) if small else (4, 1024, 128)
    config = {
        **{"LR": 2.5e-4, "NUM_ENVS": environments, "NUM_STEPS": steps, "UPDATE_EPOCHS": 4, "NUM_MINIBATCHES": 4},
        **{"TOTAL_TIMESTEPS": updates * environments * steps, "GAMMA": 0.99, "GAE_LAMBDA": 0.95, "CLIP_EPS": 0.2},
        **{"ENT_COEF": 0.01, "VF_COEF": 0.5, "MAX_GRAD_NORM": 0.5, "ACTIVATION": "tanh"},
        **{"ENV_NAME": "CartPole-v1", "ANNEAL_LR": True, "DEBUG": False},
    }
    train = ppo.make_train(config)

    def step(key, batch):
        """A training from the beginning; in the place of a loss, the mean return of an episode."""
        new_key, key = jax.random.split(key)
        return new_key, jnp.mean(train(key)["metrics"]["returned_episode_returns"][-1])

    return Step(step, key, ())


def penzai(key, small):
    from penzai import pz
    from penzai.models.transformer.variants import llamalike_common as common

    batch, length, vocabulary = (2, 24, 50) if small else (4, 2048, 32_000)
    width, heads, features = (32, 2, 16) if small else (1024, 8, 64)
    config = common.LlamalikeTransformerConfig(
        num_kv_heads=heads,
        query_head_multiplier=2,
        embedding_dim=width,
        projection_dim=features,
        mlp_hidden_dim=4 * width,
        num_decoder_blocks=2 if small else 4,
        vocab_size=vocabulary,
        mlp_variant="geglu_approx",
        tie_embedder_and_logits=True,
        attention_type=(
            common.AttentionTypeSlidingWindowCausal(8 if small else 512),
            common.AttentionTypeGlobalCausal(),
        ),
        use_post_attn_norm=True,
        use_post_ffw_norm=True,
        final_logit_softcap=30.0,
        attn_logits_soft_cap=50.0,
        activation_dtype=jnp.bfloat16,
    )
    model, params = pz.unbind_params(common.build_llamalike_transformer(config, key), freeze=True)

    def loss_of(params, tokens, key):
        bound = pz.bind_variables(model, params)
        logits = bound(pz.nx.wrap(tokens, "batch", "seq")).unwrap("batch", "seq", "vocabulary")
        labels = jnp.roll(tokens, -1, 1)
        return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels).mean()

    return by_gradients(loss_of, params, jax.random.randint(key, (batch, length), 1, vocabulary))


PROGRAMS = {
    "wmt": Program("flax", "examples/wmt", wmt),
    "lm1b": Program("flax", "examples/lm1b", lm1b),
    "lm1b, B8 L2048": Program("flax", "examples/lm1b", lm1b_long),
    "gemma": Program("flax", "examples/gemma", gemma),
    "nanodo": Program("nanodo", "", nanodo),
    "big_vision, ViT": Program("big_vision", "", vit),
    "big_vision, contrastive": Program("big_vision", "", contrastive),
    "EasyLM, LLaMA": Program("EasyLM", "", easylm),
    "MeanFlow": Program("meanflow", "", meanflow),
    "AlphaFold, Evoformer": Program("alphafold", "", evoformer),
    "Levanter, GPT-2": Program("levanter", "src", levanter),
    "Equinox, BERT": Program("equinox", "docs/examples", bert),
    "purejaxrl, PPO": Program("purejaxrl", "purejaxrl", ppo),
    "penzai, Gemma 2": Program("penzai", "", penzai),
}
