"""Programs of JAX in NumPy: what a reference's derivatives are, without XLA, which would compile them for a while.

JAX traces and differentiates; NumPy does the operations of the table. Others are JAX's own, one by one.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal


def by_numpy(f, *args):
    """f's results, by NumPy's operations in the dtypes that the program has."""
    program, shape = jax.make_jaxpr(f, return_shape=True)(*args)
    with np.errstate(all="ignore"):
        results = _run(program.jaxpr, program.consts, map(np.asarray, jax.tree.leaves(args)))
    return jax.tree.unflatten(jax.tree.structure(shape), results)


def _run(jaxpr, consts, args):
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))

    def read(a):
        return np.asarray(a.val, a.aval.dtype) if isinstance(a, Literal) else values[a]

    for equation in jaxpr.eqns:
        made = _results(equation, [read(a) for a in equation.invars])
        for var, value in zip(equation.outvars, made, strict=True):
            values[var] = value
    return [read(a) for a in jaxpr.outvars]


def _results(equation, operands):
    name, params = equation.primitive.name, equation.params
    inner = params.get("jaxpr", params.get("call_jaxpr"))
    if name in ("jit", "pjit", "closed_call", "custom_jvp_call", "custom_vjp_call"):
        return _run(inner.jaxpr, inner.consts, operands)
    if name in ("checkpoint", "remat2", "fused"):  # of one name or the other, as JAX's version has it
        return _run(inner, (), operands)
    if name not in OPERATIONS:
        made = equation.primitive.bind(*operands, **params)
        made = made if equation.primitive.multiple_results else [made]
        return [a if jnp.issubdtype(a.dtype, jax.dtypes.prng_key) else np.asarray(a) for a in made]
    made = OPERATIONS[name](*operands, **params)
    made = made if equation.primitive.multiple_results else [made]
    return [np.asarray(a).astype(var.aval.dtype) for a, var in zip(made, equation.outvars, strict=True)]


def _elementwise(function):
    return lambda *operands, **params: function(*operands)


def _reduction(function):
    return lambda a, axes, **params: function(a, axis=axes)


def _broadcast(a, shape, broadcast_dimensions, **params):
    own = [1] * len(shape)
    for d, n in zip(broadcast_dimensions, a.shape, strict=True):
        own[d] = n
    return np.broadcast_to(a.reshape(own), shape)


def _pad(a, value, padding_config, **params):
    lows, highs, inner = zip(*padding_config, strict=True) if a.ndim else ((), (), ())
    spread = [n + max(n - 1, 0) * k for n, k in zip(a.shape, inner, strict=True)]
    made = np.full([n + max(low, 0) + max(high, 0) for n, low, high in zip(spread, lows, highs, strict=True)], value)
    made[tuple(slice(max(low, 0), max(low, 0) + n, k + 1) for n, low, k in zip(spread, lows, inner, strict=True))] = a
    ends = zip(made.shape, lows, highs, strict=True)
    return made[tuple(slice(max(-low, 0), n - max(-high, 0)) for n, low, high in ends)]


def _select(which, *cases, **params):
    return np.choose(which.astype(int), cases) if which.ndim else cases[int(which)]


def _dot(a, b, dimension_numbers, **params):
    (of_a, of_b), (batch_a, batch_b) = dimension_numbers
    letters_a, letters_b = list(range(a.ndim)), list(range(a.ndim, a.ndim + b.ndim))
    for i, j in zip([*of_a, *batch_a], [*of_b, *batch_b], strict=True):
        letters_b[j] = i
    both = {*of_a, *batch_a}
    kept = [*batch_a, *(n for n in (*letters_a, *letters_b) if n not in both)]
    a, b = (x.astype(np.float32) if x.dtype == jnp.bfloat16 else x for x in (a, b))  # einsum knows no bfloat16
    return np.einsum(a, letters_a, b, letters_b, kept)


OPERATIONS = {
    **{
        name: _elementwise(getattr(np, function))
        for name, function in {
            **{n: n for n in ("abs", "exp", "exp2", "log", "log1p", "expm1", "tanh", "sin", "cos", "sqrt", "sign")},
            **{"floor": "floor", "ceil": "ceil", "square": "square", "is_finite": "isfinite"},
            **{"add": "add", "add_any": "add", "sub": "subtract", "mul": "multiply", "neg": "negative"},
            **{"max": "maximum", "min": "minimum", "pow": "power"},
            **{"eq": "equal", "ne": "not_equal", "lt": "less", "le": "less_equal", "gt": "greater"},
            **{"ge": "greater_equal", "and": "bitwise_and", "or": "bitwise_or", "not": "bitwise_not"},
        }.items()
    },
    "div": lambda a, b, **params: a / b if jnp.issubdtype(a.dtype, jnp.floating) else jax.lax.div(a, b),
    "logistic": lambda a, **params: 1 / (1 + np.exp(-a)),
    "integer_pow": lambda a, y, **params: a**y if y >= 0 else 1 / a**-y,
    "stop_gradient": lambda a, **params: a,
    "copy": lambda a, **params: a,
    "convert_element_type": lambda a, new_dtype, **params: a.astype(new_dtype),
    "reduce_sum": _reduction(np.sum),
    "reduce_max": _reduction(np.max),
    "reduce_and": _reduction(np.all),
    "reduce_or": _reduction(np.any),
    "broadcast_in_dim": _broadcast,
    "reshape": lambda a, new_sizes, **params: a.reshape(new_sizes),
    "squeeze": lambda a, dimensions, **params: np.squeeze(a, dimensions),
    "expand_dims": lambda a, dimensions, **params: np.expand_dims(a, dimensions),
    "transpose": lambda a, permutation, **params: np.transpose(a, permutation),
    "pad": _pad,
    "slice": lambda a, start_indices, limit_indices, strides, **params: a[
        tuple(map(slice, start_indices, limit_indices, strides or [None] * a.ndim))
    ],
    "split": lambda a, sizes, axis, **params: np.split(a, np.cumsum(sizes)[:-1], axis),
    "concatenate": lambda *a, dimension, **params: np.concatenate(a, dimension),
    "select_n": _select,
    "dot_general": _dot,
    "iota": lambda dimension, shape, dtype, **params: _broadcast(np.arange(shape[dimension]), shape, [dimension]),
}
