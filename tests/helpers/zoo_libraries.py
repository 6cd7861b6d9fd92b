"""Programs for test_zoo.py out of libraries: layers and distributions by small constructors, and optimisers.

A table is named as the library's module. Layers are given a softmax's results, X or what the table says.
"""

import importlib
import inspect

import jax
import jax.numpy as jnp
import numpy as np


def is_installed(library):
    return importlib.util.find_spec(library.split(".")[0]) is not None


def array(*shape):
    return jnp.asarray(np.random.default_rng(1).standard_normal(shape), "float32")


X = array(2, 8, 8)
IMAGE = array(2, 8, 8, 4)
ROWS, PLANE, VOLUME = array(8, 8), array(2, 8, 8), array(2, 4, 4, 4)
TOKENS = jnp.arange(16).reshape(2, 8)


def public(library, kind):
    """The classes of a kind that a module has."""
    module = importlib.import_module(library)
    return {name for name, a in vars(module).items() if inspect.isclass(a) and issubclass(a, getattr(module, kind))}


# ---- Optimisers


PARAMETERS = {"w": array(8, 8), "b": array(8)}  # of a tiny model


# Gradient transformations that need other arguments than a learning rate.
OPTIMISERS = {
    "add_noise": lambda optax: optax.add_noise(0.1, 0.5, 0),
    "apply_if_finite": lambda optax: optax.apply_if_finite(optax.adam(0.1), 3),
    "contrib.differentially_private_aggregate": None,  # it is given gradients of each example
    "contrib.dpsgd": None,
    "contrib.mechanize": lambda optax: optax.contrib.mechanize(optax.adam(0.1)),
    "contrib.galore": lambda optax: optax.contrib.galore(0.1, rank=2),  # all of w's directions are not its gradient's
    "contrib.sam": None,  # it takes no value
    "contrib.scale_by_galore": lambda optax: optax.contrib.scale_by_galore(rank=2),
    "contrib.scale_by_muon": None,  # of matrices alone, as `muon` calls it
    "contrib.schedule_free": lambda optax: optax.contrib.schedule_free(optax.sgd(0.1), 0.1),
    "lookahead": None,  # of pairs of parameters
    "masked": lambda optax: optax.masked(optax.adam(0.1), {"w": True, "b": False}),
    "partition": lambda optax: optax.partition({"a": optax.adam(0.1), "b": optax.sgd(0.1)}, {"w": "a", "b": "b"}),
    "scale_by_schedule": lambda optax: optax.scale_by_schedule(lambda count: 0.1 / (1 + count)),
    "stateless": lambda optax: optax.stateless(lambda updates, _: jax.tree.map(jnp.sign, updates)),
    "stateless_with_tree_map": lambda optax: optax.stateless_with_tree_map(lambda g, p: g + 0.1 * p),
}


def optimisers(optax):
    """Every gradient transformation that is made of nothing, of a learning rate, or as `OPTIMISERS` says."""
    found = {f"optax.{name}": optax.with_extra_args_support(make(optax)) for name, make in OPTIMISERS.items() if make}
    for module in (optax, importlib.import_module("optax.contrib")):
        for name in dir(module):
            make = getattr(module, name)
            is_by_hand = f"{module.__name__}.{name}".removeprefix("optax.") in OPTIMISERS
            if name.startswith("_") or not callable(make) or inspect.isclass(make) or is_by_hand:
                continue
            for arguments in ((), (0.1,)):
                try:
                    made = make(*arguments)
                    made.init(PARAMETERS)
                except Exception:  # it needs other arguments, or is no gradient transformation
                    continue
                found[f"{module.__name__}.{name}"] = optax.with_extra_args_support(made)
                break
    return found


def step_of(optimiser, is_stochastic=False):
    """One step of training, and its arguments: the model's parameters and the optimiser's state."""

    def loss(parameters, **_):
        logits = X @ parameters["w"] + parameters["b"]
        return -jnp.mean(jax.nn.log_softmax(logits)[..., 0] * jax.nn.softmax(logits, 1)[..., 1])

    def step(parameters, state):
        value, gradient = jax.value_and_grad(loss)(parameters)
        extra = {"value": value, "grad": gradient, "value_fn": loss}
        if is_stochastic:
            extra |= {"obj_fn": loss, "key": jax.random.key(0)}
        updates, state = optimiser.update(gradient, state, parameters, **extra)
        return value, jax.tree.map(jnp.add, parameters, updates), state

    return step, (PARAMETERS, optimiser.init(PARAMETERS))


# ---- Layers: a constructor with what the layer is called with, if that is not X alone

LINEN = {
    "PReLU": lambda nn: nn.PReLU(),
    "MultiHeadAttention": lambda nn: nn.MultiHeadAttention(2),
    "MultiHeadDotProductAttention": lambda nn: (
        nn.MultiHeadDotProductAttention(2, dropout_rate=0.1, deterministic=False),
        X,
        X,
    ),
    "SelfAttention": lambda nn: nn.SelfAttention(2),
    "Sequential": lambda nn: nn.Sequential([nn.Dense(8), jnp.tanh]),
    "Fp8DirectDotGeneralOp": lambda nn: nn.Dense(8, dot_general_cls=nn.Fp8DirectDotGeneralOp),
    "Fp8DotGeneral": lambda nn: nn.Dense(8, dot_general_cls=nn.Fp8DotGeneral),
    "Fp8DotGeneralOp": lambda nn: nn.Dense(8, dot_general_cls=nn.Fp8DotGeneralOp),
    "Fp8Einsum": lambda nn: _ByItself(nn, nn.Fp8Einsum, lambda op, x: op("abc,cd->abd", x, ROWS)),
    "NANOOFp8DotGeneralOp": lambda nn: nn.Dense(8, dot_general_cls=nn.NANOOFp8DotGeneralOp),
    "ConvLocal": lambda nn: nn.ConvLocal(4, (3,)),
    "ConvTranspose": lambda nn: nn.ConvTranspose(4, (3,)),
    "Conv": lambda nn: (nn.Conv(4, (3, 3)), IMAGE),
    "DenseGeneral": lambda nn: nn.DenseGeneral((4, 2), axis=(-2, -1)),
    "Dense": lambda nn: nn.Dense(8),
    "Einsum": lambda nn: nn.Einsum((8, 8), "abc,cd->abd"),
    "Embed": lambda nn: (nn.Embed(16, 8), TOKENS),
    "BatchNorm": lambda nn: nn.BatchNorm(use_running_average=False),
    "GroupNorm": lambda nn: nn.GroupNorm(2),
    "InstanceNorm": lambda nn: nn.InstanceNorm(),
    "LayerNorm": lambda nn: nn.LayerNorm(),
    "RMSNorm": lambda nn: nn.RMSNorm(),
    "SpectralNorm": lambda nn: (nn.SpectralNorm(nn.Dense(8)), X, {"update_stats": True}),
    "WeightNorm": lambda nn: nn.WeightNorm(nn.Dense(8)),
    "Bidirectional": lambda nn: nn.Bidirectional(nn.RNN(nn.GRUCell(4)), nn.RNN(nn.GRUCell(4))),
    "ConvLSTMCell": lambda nn: (nn.RNN(nn.ConvLSTMCell(2, (3,))), array(2, 3, 8, 4)),
    "GRUCell": lambda nn: nn.RNN(nn.GRUCell(4)),
    "LSTMCell": lambda nn: nn.RNN(nn.LSTMCell(4)),
    "MGUCell": lambda nn: nn.RNN(nn.MGUCell(4)),
    "OptimizedLSTMCell": lambda nn: nn.RNN(nn.OptimizedLSTMCell(4)),
    "RNN": lambda nn: nn.RNN(nn.SimpleCell(4), reverse=True),
    "SimpleCell": lambda nn: nn.RNN(nn.SimpleCell(4)),
    "Dropout": lambda nn: nn.Dropout(0.5, deterministic=False),
}


def _ByItself(nn, make, call):
    """A module of linen that calls another one."""

    class Calls(nn.Module):
        @nn.compact
        def __call__(self, x):
            return call(make(), x)

    return Calls()


NNX = {
    "Dict": lambda nnx, rngs: Calls(nnx, nnx.Dict(a=nnx.Linear(8, 8, rngs=rngs)), lambda m, x: m["a"](x)),
    "List": lambda nnx, rngs: Calls(nnx, nnx.List([nnx.Linear(8, 8, rngs=rngs)]), lambda m, x: m[0](x)),
    "Sequential": lambda nnx, rngs: nnx.Sequential(nnx.Linear(8, 8, rngs=rngs), jnp.tanh),
    "PReLU": lambda nnx, rngs: nnx.PReLU(),
    "MultiHeadAttention": lambda nnx, rngs: nnx.MultiHeadAttention(
        2, 8, decode=False, dropout_rate=0.1, deterministic=False, rngs=rngs
    ),
    "RoPE": lambda nnx, rngs: nnx.RoPE(8),
    "LSTMCell": lambda nnx, rngs: nnx.RNN(nnx.LSTMCell(8, 4, rngs=rngs)),
    "GRUCell": lambda nnx, rngs: nnx.RNN(nnx.GRUCell(8, 4, rngs=rngs)),
    "OptimizedLSTMCell": lambda nnx, rngs: nnx.RNN(nnx.OptimizedLSTMCell(8, 4, rngs=rngs)),
    "SimpleCell": lambda nnx, rngs: nnx.RNN(nnx.SimpleCell(8, 4, rngs=rngs)),
    "RNN": lambda nnx, rngs: nnx.RNN(nnx.SimpleCell(8, 4, rngs=rngs), reverse=True),
    "Bidirectional": lambda nnx, rngs: nnx.Bidirectional(
        nnx.RNN(nnx.GRUCell(8, 4, rngs=rngs)), nnx.RNN(nnx.GRUCell(8, 4, rngs=rngs))
    ),
    "Conv": lambda nnx, rngs: nnx.Conv(8, 4, (3,), rngs=rngs),
    "ConvTranspose": lambda nnx, rngs: nnx.ConvTranspose(8, 4, (3,), rngs=rngs),
    "Embed": lambda nnx, rngs: Calls(nnx, nnx.Embed(16, 8, rngs=rngs), lambda m, x: m(TOKENS) * x),
    "Linear": lambda nnx, rngs: nnx.Linear(8, 8, rngs=rngs),
    "LinearGeneral": lambda nnx, rngs: nnx.LinearGeneral((8, 8), (4, 2), axis=(-2, -1), rngs=rngs),
    "Einsum": lambda nnx, rngs: nnx.Einsum("abc,cd->abd", (8, 8), rngs=rngs),
    "LoRA": lambda nnx, rngs: nnx.LoRA(8, 2, 8, rngs=rngs),
    "LoRALinear": lambda nnx, rngs: nnx.LoRALinear(8, 8, lora_rank=2, rngs=rngs),
    "BatchNorm": lambda nnx, rngs: nnx.BatchNorm(8, rngs=rngs),
    "LayerNorm": lambda nnx, rngs: nnx.LayerNorm(8, rngs=rngs),
    "RMSNorm": lambda nnx, rngs: nnx.RMSNorm(8, rngs=rngs),
    "GroupNorm": lambda nnx, rngs: nnx.GroupNorm(8, num_groups=2, rngs=rngs),
    "InstanceNorm": lambda nnx, rngs: nnx.InstanceNorm(8, rngs=rngs),
    "SpectralNorm": lambda nnx, rngs: nnx.SpectralNorm(nnx.Linear(8, 8, rngs=rngs), rngs=rngs),
    "WeightNorm": lambda nnx, rngs: nnx.WeightNorm(nnx.Linear(8, 8, rngs=rngs), rngs=rngs),
    "Dropout": lambda nnx, rngs: nnx.Dropout(0.5, rngs=rngs),
}


def Calls(nnx, module, call):
    """A module of nnx that calls another one's parts."""

    class Called(nnx.Module):
        def __init__(self):
            self.module = module

        def __call__(self, x):
            return call(self.module, x)

    return Called()


EQUINOX = {
    "PReLU": lambda nn, key: (nn.PReLU(), ROWS),
    "MultiheadAttention": lambda nn, key: (nn.MultiheadAttention(2, 8, key=key), ROWS, ROWS, ROWS),
    "Conv": lambda nn, key: (nn.Conv(2, 2, 3, 3, key=key), PLANE),
    "Conv1d": lambda nn, key: (nn.Conv1d(8, 4, 3, key=key), ROWS),
    "Conv2d": lambda nn, key: (nn.Conv2d(2, 4, 3, key=key), PLANE),
    "Conv3d": lambda nn, key: (nn.Conv3d(2, 4, 3, key=key), VOLUME),
    "ConvTranspose": lambda nn, key: (nn.ConvTranspose(2, 2, 3, 3, key=key), PLANE),
    "ConvTranspose1d": lambda nn, key: (nn.ConvTranspose1d(8, 4, 3, key=key), ROWS),
    "ConvTranspose2d": lambda nn, key: (nn.ConvTranspose2d(2, 4, 3, key=key), PLANE),
    "ConvTranspose3d": lambda nn, key: (nn.ConvTranspose3d(2, 4, 3, key=key), VOLUME),
    "Dropout": lambda nn, key: (lambda x: nn.Dropout(0.5)(x, key=key), ROWS),
    "Embedding": lambda nn, key: (lambda x: jax.vmap(nn.Embedding(8, 8, key=key))(jnp.arange(8)) * x, ROWS),
    "RotaryPositionalEmbedding": lambda nn, key: (nn.RotaryPositionalEmbedding(8), ROWS),
    "Identity": lambda nn, key: (nn.Identity(), ROWS),
    "Linear": lambda nn, key: (jax.vmap(nn.Linear(8, 4, key=key)), ROWS),
    "MLP": lambda nn, key: (jax.vmap(nn.MLP(8, 4, 8, 2, key=key)), ROWS),
    "GroupNorm": lambda nn, key: (nn.GroupNorm(2, 8), ROWS),
    "LayerNorm": lambda nn, key: (nn.LayerNorm((8, 8)), ROWS),
    "RMSNorm": lambda nn, key: (nn.RMSNorm((8, 8)), ROWS),
    **{
        f"Adaptive{kind}Pool{d}d": lambda nn, key, kind=kind, d=d: (
            getattr(nn, f"Adaptive{kind}Pool{d}d")(2),
            (ROWS, PLANE, VOLUME)[d - 1],
        )
        for kind in ("Avg", "Max")
        for d in (1, 2, 3)
    },
    **{
        f"{kind}Pool{d}d": lambda nn, key, kind=kind, d=d: (
            getattr(nn, f"{kind}Pool{d}d")(2, 2),
            (ROWS, PLANE, VOLUME)[d - 1],
        )
        for kind in ("Avg", "Max")
        for d in (1, 2, 3)
    },
    "AdaptivePool": lambda nn, key: (nn.AdaptivePool(2, 1, jnp.max), ROWS),
    "Pool": lambda nn, key: (nn.Pool(0.0, jax.lax.add, 1, 2, 2), ROWS),
    "GRUCell": lambda nn, key: (jax.vmap(nn.GRUCell(8, 8, key=key)), ROWS, ROWS),
    "LSTMCell": lambda nn, key: (jax.vmap(lambda x: nn.LSTMCell(8, 8, key=key)(x, (x, x))), ROWS),
    "Lambda": lambda nn, key: (nn.Lambda(jnp.tanh), ROWS),
    "Sequential": lambda nn, key: (jax.vmap(nn.Sequential([nn.Linear(8, 8, key=key), nn.Lambda(jnp.tanh)])), ROWS),
    "Shared": lambda nn, key: (
        lambda x: jax.vmap(nn.Shared([nn.Linear(8, 8, key=key)] * 2, lambda m: m[1], lambda m: m[0])()[1])(x),
        ROWS,
    ),
    "WeightNorm": lambda nn, key: (jax.vmap(nn.WeightNorm(nn.Linear(8, 8, key=key))), ROWS),
    "BatchNorm": lambda nn, key: (stateful(nn, nn.BatchNorm(8, "batch", mode="batch"), "batch"), ROWS),
    "SpectralNorm": lambda nn, key: (stateful(nn, nn.SpectralNorm(nn.Linear(8, 8, key=key), "weight", key=key)), ROWS),
}


def stateful(nn, layer, name="batch"):
    """A layer of Equinox with state, on rows, with its new state as a result."""
    return lambda x: jax.vmap(layer, (0, None), (0, None), axis_name=name)(x, nn.State(layer))


HAIKU = {
    "MultiHeadAttention": lambda hk, x: hk.MultiHeadAttention(2, 4, w_init=hk.initializers.RandomNormal())(x, x, x),
    "Linear": lambda hk, x: hk.Linear(4)(x),
    "Sequential": lambda hk, x: hk.Sequential([hk.Linear(4), jnp.tanh])(x),
    "BatchNorm": lambda hk, x: hk.BatchNorm(True, True, 0.9)(x, is_training=True),
    "Bias": lambda hk, x: hk.Bias()(x),
    "Conv1D": lambda hk, x: hk.Conv1D(4, 3)(x),
    "Conv1DTranspose": lambda hk, x: hk.Conv1DTranspose(4, 3)(x),
    "Conv2D": lambda hk, x: hk.Conv2D(4, 3)(x[..., None]),
    "Conv2DTranspose": lambda hk, x: hk.Conv2DTranspose(4, 3)(x[..., None]),
    "Conv3D": lambda hk, x: hk.Conv3D(4, 3)(x[..., None, None]),
    "Conv3DTranspose": lambda hk, x: hk.Conv3DTranspose(4, 3)(x[..., None, None]),
    "ConvND": lambda hk, x: hk.ConvND(1, 4, 3)(x),
    "ConvNDTranspose": lambda hk, x: hk.ConvNDTranspose(1, 4, 3)(x),
    "DepthwiseConv1D": lambda hk, x: hk.DepthwiseConv1D(2, 3)(x),
    "DepthwiseConv2D": lambda hk, x: hk.DepthwiseConv2D(2, 3)(x[..., None]),
    "DepthwiseConv3D": lambda hk, x: hk.DepthwiseConv3D(2, 3)(x[..., None, None]),
    "SeparableDepthwiseConv2D": lambda hk, x: hk.SeparableDepthwiseConv2D(2, 3)(x[..., None]),
    "Embed": lambda hk, x: hk.Embed(16, 8)(TOKENS) * x,
    "GroupNorm": lambda hk, x: hk.GroupNorm(2)(x),
    "InstanceNorm": lambda hk, x: hk.InstanceNorm(True, True)(x),
    "LayerNorm": lambda hk, x: hk.LayerNorm(-1, True, True)(x),
    "EMAParamsTree": lambda hk, x: hk.EMAParamsTree(0.9)({"layer": {"w": x}})["layer"]["w"],
    "ExponentialMovingAverage": lambda hk, x: hk.ExponentialMovingAverage(0.9)(x),
    "AvgPool": lambda hk, x: hk.AvgPool(2, 2, "SAME")(x),
    "MaxPool": lambda hk, x: hk.MaxPool(2, 2, "SAME")(x),
    "Conv1DLSTM": lambda hk, x: _unrolled(hk, hk.Conv1DLSTM((8,), 2, 3), x[..., None]),
    "Conv2DLSTM": lambda hk, x: _unrolled(hk, hk.Conv2DLSTM((4, 2), 2, 3), x.reshape(2, 8, 4, 2, 1)),
    "Conv3DLSTM": lambda hk, x: _unrolled(hk, hk.Conv3DLSTM((2, 2, 2), 2, 3), x.reshape(2, 8, 2, 2, 2, 1)),
    "DeepRNN": lambda hk, x: _unrolled(hk, hk.DeepRNN([hk.LSTM(4), jnp.tanh, hk.GRU(4)]), x),
    "GRU": lambda hk, x: _unrolled(hk, hk.GRU(4), x),
    "IdentityCore": lambda hk, x: _unrolled(hk, hk.IdentityCore(), x),
    "LSTM": lambda hk, x: _unrolled(hk, hk.LSTM(4), x),
    "ResetCore": lambda hk, x: _unrolled(hk, hk.ResetCore(hk.LSTM(4)), (x, jnp.arange(16).reshape(2, 8) % 3 == 0)),
    "VanillaRNN": lambda hk, x: _unrolled(hk, hk.VanillaRNN(4), x),
    "Flatten": lambda hk, x: hk.Flatten()(x),
    "Reshape": lambda hk, x: hk.Reshape((4, 16))(x),
    "RMSNorm": lambda hk, x: hk.RMSNorm(-1)(x),
    "SNParamsTree": lambda hk, x: hk.SNParamsTree()({"layer": {"w": x[0]}})["layer"]["w"],
    "SpectralNorm": lambda hk, x: hk.SpectralNorm()(x[0]),
}


def _unrolled(hk, core, x):
    return hk.dynamic_unroll(core, x, core.initial_state(8))


# ---- Distributions, by rows of probabilities


def _normal(module, p):
    return module.Normal(p, 1 + p)


DISTRAX = {
    "Bernoulli": lambda d, p: d.Bernoulli(probs=p),
    "Beta": lambda d, p: d.Beta(1 + p, 2 + p),
    "Categorical": lambda d, p: d.Categorical(probs=p),
    "CategoricalUniform": lambda d, p: d.CategoricalUniform(low=0 * p, high=1 + p, logits=p),
    "Clipped": lambda d, p: d.Clipped(_normal(d, p), -1.0, 1.0),
    "ClippedLogistic": lambda d, p: d.ClippedLogistic(p, 1 + p, -1.0, 1.0),
    "ClippedNormal": lambda d, p: d.ClippedNormal(p, 1 + p, -1.0, 1.0),
    "Deterministic": lambda d, p: d.Deterministic(p),
    "Dirichlet": lambda d, p: d.Dirichlet(1 + p),
    "EpsilonGreedy": lambda d, p: d.EpsilonGreedy(p, 0.1),
    "Gamma": lambda d, p: d.Gamma(1 + p, 2 + p),
    "Greedy": lambda d, p: d.Greedy(p),
    "Gumbel": lambda d, p: d.Gumbel(p, 1 + p),
    "Independent": lambda d, p: d.Independent(_normal(d, p), 1),
    "Joint": lambda d, p: d.Joint({"a": _normal(d, p), "b": d.Laplace(p, 1 + p)}),
    "Laplace": lambda d, p: d.Laplace(p, 1 + p),
    "LogStddevNormal": lambda d, p: d.LogStddevNormal(p, p),
    "Logistic": lambda d, p: d.Logistic(p, 1 + p),
    "MixtureOfTwo": lambda d, p: d.MixtureOfTwo(p[0, 0], _normal(d, p), _normal(d, 2 * p)),
    "MixtureSameFamily": lambda d, p: d.MixtureSameFamily(d.Categorical(probs=p), _normal(d, p)),
    "Multinomial": lambda d, p: d.Multinomial(5, probs=p),
    "MultivariateNormalDiag": lambda d, p: d.MultivariateNormalDiag(p, 1 + p),
    "MultivariateNormalDiagPlusLowRank": lambda d, p: d.MultivariateNormalDiagPlusLowRank(p, 1 + p, p[:, :, None]),
    "MultivariateNormalFromBijector": lambda d, p: d.MultivariateNormalFromBijector(p, d.DiagLinear(1 + p)),
    "MultivariateNormalFullCovariance": lambda d, p: d.MultivariateNormalFullCovariance(p[0], p @ p.T + jnp.eye(8)),
    "MultivariateNormalTri": lambda d, p: d.MultivariateNormalTri(p[0], p + jnp.eye(8)),
    "Normal": _normal,
    "OneHotCategorical": lambda d, p: d.OneHotCategorical(probs=p),
    "Quantized": lambda d, p: d.Quantized(d.Uniform(0.0, 9 + p), low=1.0, high=8.0),
    "Softmax": lambda d, p: d.Softmax(p, 2.0),
    "Transformed": lambda d, p: d.Transformed(_normal(d, p), d.Tanh()),
    "Uniform": lambda d, p: d.Uniform(p, 1 + p),
    "VonMises": lambda d, p: d.VonMises(p, 1 + p),
}

# By the constraint of each parameter; those of which a constraint says too little by hand.
NUMPYRO_BY_CONSTRAINT = {
    "Real": lambda p: p,
    "Circular": lambda p: p,
    "Positive": lambda p: 1 + p,
    "Nonnegative": lambda p: 1 + p,
    "GreaterThan": lambda p: 1 + p,
    "GreaterThanEq": lambda p: 1 + p,
    "LessThan": lambda p: -2 - p,
    "UnitInterval": lambda p: p,
    "OpenInterval": lambda p: p,
    "Simplex": lambda p: p,
    "RealVector": lambda p: p,
    "IndependentConstraint": lambda p: 1 + p,
    "IntegerNonnegative": lambda p: 5,
    "PositiveDefinite": lambda p: p @ p.T + jnp.eye(8),
    "LowerCholesky": lambda p: jnp.tril(p) + jnp.eye(8),
    "OrderedVector": lambda p: jnp.cumsum(p, -1),
    "L1Ball": lambda p: p / 8,
    "Boolean": lambda p: p < 0.1,
}
NUMPYRO = {
    "CAR": lambda d, p: d.CAR(p[0], 0.5, 1 + p[0, 0], jnp.eye(8)[:, ::-1]),
    "CirculantNormal": lambda d, p: d.CirculantNormal(p[0], covariance_rfft=1 + p[0, :5]),
    "Delta": lambda d, p: d.Delta(p),
    "DiscreteUniform": lambda d, p: d.DiscreteUniform(0, 5),
    "DoublyTruncatedPowerLaw": lambda d, p: d.DoublyTruncatedPowerLaw(-2 - p, 1 + p, 3 + p),
    "EulerMaruyama": lambda d, p: d.EulerMaruyama(jnp.arange(8.0), lambda x, t: (-x, 1 + 0 * x), d.Normal(p[0, 0])),
    "ExpandedDistribution": lambda d, p: d.Normal(p[0]).expand((8, 8)),
    "FoldedDistribution": lambda d, p: d.FoldedDistribution(_normal(d, p)),
    "GaussianCopula": lambda d, p: d.GaussianCopula(_normal(d, p[0]), jnp.eye(8) / 2 + 0.5),
    "GaussianCopulaBeta": lambda d, p: d.GaussianCopulaBeta(1 + p[0], 2 + p[0], jnp.eye(8) / 2 + 0.5),
    "GaussianRandomWalk": lambda d, p: d.GaussianRandomWalk(1 + p, 4),
    "GaussianStateSpace": lambda d, p: d.GaussianStateSpace(3, p / 2, p @ p.T + jnp.eye(8)),
    "HurdleLogits": lambda d, p: d.HurdleLogits(d.Poisson(1 + p), p),
    "HurdleProbs": lambda d, p: d.HurdleProbs(d.Poisson(1 + p), p),
    "Independent": lambda d, p: d.Independent(_normal(d, p), 1),
    "IntervalCensoredDistribution": lambda d, p: d.IntervalCensoredDistribution(_normal(d, p), p < 0.1, p > 0.2),
    "InverseWishart": lambda d, p: d.InverseWishart(9 + p[0, 0], scale_matrix=p @ p.T + jnp.eye(8)),
    "InverseWishartCholesky": lambda d, p: d.InverseWishartCholesky(9 + p[0, 0], scale_matrix=p @ p.T + jnp.eye(8)),
    "LKJ": lambda d, p: d.LKJ(3, 1 + p[0, 0]),
    "LKJCholesky": lambda d, p: d.LKJCholesky(3, 1 + p[0, 0]),
    "LeftCensoredDistribution": lambda d, p: d.LeftCensoredDistribution(_normal(d, p), p < 0.1),
    "LeftTruncatedDistribution": lambda d, p: d.LeftTruncatedDistribution(_normal(d, p), p),
    "LeftTruncatedGamma": lambda d, p: d.LeftTruncatedGamma(d.Gamma(1 + p, 1 + p), 0.5 * p),
    "LowRankMultivariateNormal": lambda d, p: d.LowRankMultivariateNormal(p[0], p[:, :2], 1 + p[0]),
    "MaskedDistribution": lambda d, p: _normal(d, p).mask(p < 0.1),
    "MatrixNormal": lambda d, p: d.MatrixNormal(p, jnp.tril(p) + jnp.eye(8), jnp.tril(p) + jnp.eye(8)),
    "MixtureGeneral": lambda d, p: d.MixtureGeneral(d.Categorical(probs=p[:, :2]), [_normal(d, p[0]), d.Laplace(p[0])]),
    "MixtureSameFamily": lambda d, p: d.MixtureSameFamily(d.Categorical(probs=p), _normal(d, p)),
    "MultivariateNormal": lambda d, p: d.MultivariateNormal(p[0], p @ p.T + jnp.eye(8)),
    "MultivariateStudentT": lambda d, p: d.MultivariateStudentT(3 + p[0, 0], p[0], jnp.tril(p) + jnp.eye(8)),
    "ProjectedNormal": lambda d, p: d.ProjectedNormal(p[:, :3]),
    "RightCensoredDistribution": lambda d, p: d.RightCensoredDistribution(_normal(d, p), p < 0.1),
    "RightTruncatedDistribution": lambda d, p: d.RightTruncatedDistribution(_normal(d, p), p),
    "RightTruncatedGamma": lambda d, p: d.RightTruncatedGamma(d.Gamma(1 + p, 1 + p), 1 + p),
    "SineBivariateVonMises": lambda d, p: d.SineBivariateVonMises(p, p, 1 + p, 1 + p, weighted_correlation=p),
    "SineSkewed": lambda d, p: d.SineSkewed(d.VonMises(p, 1 + p).to_event(1), p / 8),
    "TransformedDistribution": lambda d, p: d.TransformedDistribution(_normal(d, p), d.transforms.ExpTransform()),
    "TruncatedPolyaGamma": lambda d, p: d.TruncatedPolyaGamma((8,)),
    "TwoSidedTruncatedDistribution": lambda d, p: d.TwoSidedTruncatedDistribution(_normal(d, p), 0.0, 1 + p),
    "TwoSidedTruncatedGamma": lambda d, p: d.TwoSidedTruncatedGamma(d.Gamma(1 + p, 1 + p), 0.5, 2 + p),
    "Uniform": lambda d, p: d.Uniform(p, 1 + p),
    "Unit": lambda d, p: d.Unit(p),
    "Wishart": lambda d, p: d.Wishart(9 + p[0, 0], scale_matrix=p @ p.T + jnp.eye(8)),
    "WishartCholesky": lambda d, p: d.WishartCholesky(9 + p[0, 0], scale_matrix=p @ p.T + jnp.eye(8)),
    "ZeroInflatedLogits": lambda d, p: d.ZeroInflatedDistribution(d.Poisson(1 + p), gate_logits=p),
    "ZeroInflatedProbs": lambda d, p: d.ZeroInflatedDistribution(d.Poisson(1 + p), gate=p),
    "ZeroSumNormal": lambda d, p: d.ZeroSumNormal(1 + p[0, 0], (8,)),
}


def numpyro_distribution(d, name, p):
    if name in NUMPYRO:
        return NUMPYRO[name](d, p)
    kind = getattr(d, name)
    needed = [q.name for q in inspect.signature(kind).parameters.values() if q.default is q.empty]
    return kind(**{k: NUMPYRO_BY_CONSTRAINT[type(kind.arg_constraints[k]).__name__.lstrip("_")](p) for k in needed})
