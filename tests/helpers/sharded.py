"""What the tests of sharded arrays share: a mesh of 4 by 2, layouts, and programs with what travels in them.

The devices are eight simulated CPUs (see conftest.py). What travels is read off the compiled programs.
"""

import contextlib
import math

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import support
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

SHAPE = (8, 4, 32)
# Layouts of an array of SHAPE, and axes to reduce that they leave whole.
KEPT = [(P("data", "model"), -1), (P(None, "model", "data"), 0), (P("data", None, "model"), 1)]
KEPT += [(P(("data", "model")), (1, 2)), (P(None, None, ("data", "model")), (0, 1))]
# Axes that they divide.
DIVIDED = [(P("data", None, "model"), -1), (P(None, None, ("model", "data")), -1), (P("data", "model"), 0)]
DIVIDED += [(P("model", None, "data"), (0, 2)), (P("data", "model"), (1, 2)), (P(None, "model", "data"), None)]
MODES = ("automatic", "explicit", "shard_map", "partly manual", "partly manual, explicit")


def mesh(kind=AxisType.Auto):
    return support.mesh_of_cpus((4, 2), kind)


def in_mode(kind):
    """The context in which types tell shardings, if `kind` is explicit."""
    return jax.set_mesh(mesh(kind)) if kind == AxisType.Explicit else contextlib.nullcontext()


def place(x, spec, kind=AxisType.Auto):
    return jax.device_put(x, NamedSharding(mesh(kind), P(*spec[len(spec) - x.ndim :]) if x.ndim < len(spec) else spec))


def manual(spec, names):
    """What is left of a layout when only the mesh axes of the given names are named."""

    def only(entry):
        given = entry if isinstance(entry, tuple) else (entry,)
        return tuple(name for name in given if name in names) or None

    return P(*map(only, spec))


def run_compiled(f, *args, kernels=None):
    """The results of the compiled program, and its collectives with the number of elements that each of them sends.

    `kernels`, where it is given, is how many calls of kernels the program must have."""
    program = support.compiled_in_haste(f, *args)
    if kernels is not None:
        assert program.as_text().count('custom_call_target="jax_softmax"') == kernels
    return program(*args), support.collectives(program)


def kinds(collectives):
    return {kind for kind, _ in collectives}


def same(actual, expected, terms=1):
    """Equal but for the order in which a row may be added up, by which each of the two may be off by 16 eps of the
    largest, or of terms that are so many times as large."""
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        assert a.dtype == b.dtype and a.shape == b.shape
        finite = np.isfinite(b)
        np.testing.assert_array_equal(a[~finite], b[~finite])
        scale = terms * np.abs(b[finite]).max(initial=0)
        np.testing.assert_allclose(a[finite], b[finite], rtol=0, atol=2 * 16 * scale * float(jnp.finfo(b.dtype).eps))


def everything(f):
    """Values, both modes of differentiation, and a second order."""

    def run(x, t, *where):
        def g(x):
            return f(x, *where)

        y, pullback = jax.vjp(g, x)
        _, tangent = jax.jvp(g, (x,), (t,))
        _, second = jax.jvp(lambda x: jax.vjp(g, x)[1](t)[0], (x,), (t,))
        return y, pullback(t)[0], tangent, second

    return run


def masked(f, axis, **options):
    return lambda x, where=None: f(x, axis, where, **options)


def labels_of(x):
    return np.arange(math.prod(x.shape[:-1])).reshape(x.shape[:-1])


def check_states(found, limit, shape, axis):
    """Up to `limit` all-reduces (XLA may send several states as one), of no more than the states of the rows each."""
    axes = oracles._axes_of(axis, len(shape))
    rows = math.prod(n for d, n in enumerate(shape) if d not in axes)
    assert kinds(found) == {"all-reduce"}
    assert len(found) <= limit
    assert all(size <= rows for _, size in found)
