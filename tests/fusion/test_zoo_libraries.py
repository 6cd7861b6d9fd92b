"""Layers, distributions and optimisers of libraries run under `fuse` as under `jax.jit`."""

import functools
import importlib.util
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest
import zoo_libraries
from zoo_checks import assert_all, has_the_results_of_jit, is_lowered_for_cuda, weighted, without_keys
from zoo_libraries import X, is_installed

from jax_softmax import fuse

pytestmark = [
    pytest.mark.sweep,
    pytest.mark.usefixtures("in_haste", "products_in_float32"),
    # Of libraries, which also use what JAX will remove; but not this package's.
    pytest.mark.filterwarnings("ignore", "error:jax_softmax"),
]
AT_ONCE = 8


class Program(NamedTuple):
    name: str
    f: Callable
    args: Any


def of_layer(name, apply, parameters, inputs):
    """The results and gradients of a layer, by its parameters and by the array whose softmax it is given."""

    def f(parameters, x, *others):
        def loss(parameters, x):
            results = apply(parameters, jax.nn.softmax(x) if jnp.issubdtype(x.dtype, jnp.floating) else x, *others)
            y = results[0] if isinstance(results, tuple) else results
            return weighted(y) + weighted(jax.nn.softmax(jax.tree.leaves(y)[0])), without_keys(results)

        by = (0, 1) if jnp.issubdtype(x.dtype, jnp.floating) else 0
        return jax.grad(loss, by, has_aux=True, allow_int=True)(parameters, x)

    return Program(name, f, (parameters, *inputs))


def flax_linen(nn):
    for name, make in zoo_libraries.LINEN.items():
        if hasattr(nn, name):
            made = make(nn)
            layer, *inputs = made if isinstance(made, tuple) else (made, X)
            options = inputs.pop() if isinstance(inputs[-1], dict) else {}
            rngs = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
            variables = layer.init(rngs, *inputs, **options)
            held = {k: v for k, v in variables.items() if k != "params"}

            def apply(parameters, *inputs, layer=layer, held=held, options=options):
                rngs = {"dropout": jax.random.key(2)}
                return layer.apply({"params": parameters, **held}, *inputs, rngs=rngs, mutable=list(held), **options)

            yield of_layer(name, apply, variables.get("params", {}), inputs)


def flax_nnx(nnx):
    for name, make in zoo_libraries.NNX.items():
        if hasattr(nnx, name):
            definition, parameters, others = nnx.split(make(nnx, nnx.Rngs(0)), nnx.Param, ...)

            def apply(parameters, x, definition=definition, others=others):
                own = jax.tree.map(jnp.asarray, others)  # which this call may change
                module = nnx.merge(definition, parameters, own)
                return module(x), nnx.state(module)

            yield of_layer(name, apply, parameters, [X])


def equinox_nn(nn):
    equinox = importlib.import_module("equinox")
    for name, make in zoo_libraries.EQUINOX.items():
        layer, *inputs = make(nn, jax.random.key(0))
        parameters, others = equinox.partition(layer, equinox.is_inexact_array)

        def apply(parameters, *inputs, others=others):
            return equinox.combine(parameters, others)(*inputs)

        yield of_layer(name, apply, parameters, inputs)


def haiku(hk):
    for name, call in zoo_libraries.HAIKU.items():
        transformed = hk.transform_with_state(functools.partial(call, hk))
        parameters, state = transformed.init(jax.random.PRNGKey(0), X)

        def apply(parameters, x, transformed=transformed, state=state):
            return transformed.apply(parameters, state, jax.random.PRNGKey(1), x)

        yield of_layer(name, apply, parameters, [X])


def of_distribution(name, make):
    def density(x):
        distribution = make(jax.nn.softmax(x))
        sample = jax.lax.stop_gradient(distribution.sample(seed=jax.random.key(0)))
        p = distribution.log_prob(sample)
        return weighted(p), (sample, p)

    def f(x):
        return jax.grad(density, has_aux=True)(x)

    return Program(name, f, (X[0],))


def distrax(library):
    for name, make in zoo_libraries.DISTRAX.items():
        yield of_distribution(name, functools.partial(make, library))


class WithSeeds:
    """NumPyro's distribution, called as distrax's."""

    def __init__(self, distribution):
        self.sample = lambda seed: distribution.sample(seed)
        self.log_prob = distribution.log_prob


def numpyro_distributions(d):
    without = {"Distribution", "ImproperUniform"}  # no values of their own
    if importlib.util.find_spec("tensorflow_probability") is None:
        without.add("GaussianCopulaBeta")
    for name in sorted(zoo_libraries.public("numpyro.distributions", "Distribution") - without):
        yield of_distribution(name, lambda p, name=name: WithSeeds(zoo_libraries.numpyro_distribution(d, name, p)))


def optax(library):
    for name, optimiser in zoo_libraries.optimisers(library).items():
        yield Program(name, *zoo_libraries.step_of(optimiser, "hutchinson" in name or "sophia" in name))


LIBRARIES = {
    "optax": optax,
    "flax.linen": flax_linen,
    "flax.nnx": flax_nnx,
    "equinox.nn": equinox_nn,
    "haiku": haiku,
    "distrax": distrax,
    "numpyro.distributions": numpyro_distributions,
}


def check(programs):
    def all_of(args):
        return {p.name: without_keys(p.f(*args[p.name])) for p in programs}

    args = {p.name: p.args for p in programs}
    jax.eval_shape(all_of, args)  # JAX takes it
    has_the_results_of_jit(all_of, args)
    is_lowered_for_cuda(fuse(all_of), all_of, args)
    str(fuse(all_of).explain(args))


@pytest.mark.parametrize(
    "library",
    [pytest.param(name, marks=pytest.mark.skipif(not is_installed(name), reason=name)) for name in LIBRARIES],
)
def test_a_library(library):
    programs = list(LIBRARIES[library](importlib.import_module(library)))
    assert_all(check, programs, AT_ONCE)
