"""The primitives, and how they differentiate and batch.

There is one for each operation, of its name, so that programs, profiles and errors show which it is. `softmax` and
`log_softmax` are the operators, the others their Jacobians applied to a tangent or, transposed, to a cotangent. These
are linear in that operand, so that with a JVP rule on all and a transpose rule on the linear ones forward mode, reverse
mode and every higher order follow.

    x, [where]      softmax | log_softmax
    y, t, [where]   softmax_linear | log_softmax_jvp | log_softmax_vjp

x, y and t are floats of one shape and dtype; y is the operator's result. x may also be of 8 bits, one of
`reference.NARROW`: of float8 the result has the same dtype, of integers it is float32. `where` is a boolean mask that
broadcasts to that shape; masked elements count for nothing and give the operator's neutral result, in the linear maps
0. `axes` are the reduced axes, sorted. `axis_name` is a tuple of mesh axes, inside `shard_map`, along which each
device has a part of every row; else it is empty.
"""

import functools

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, xla
from jax.sharding import NamedSharding, PartitionSpec

from jax_softmax.primitives import reference

JVP = {"softmax": "softmax_linear", "log_softmax": "log_softmax_jvp"}
VJP = {"softmax": "softmax_linear", "log_softmax": "log_softmax_vjp"}
_TRANSPOSED = {
    "softmax_linear": "softmax_linear",
    "log_softmax_jvp": "log_softmax_vjp",
    "log_softmax_vjp": "log_softmax_jvp",
}


PRIMITIVES = {op: Primitive(op) for op in (*JVP, *_TRANSPOSED)}


def float_operands(op):
    """How many operands come before the mask."""
    return 1 if op in JVP else 2


# An update keeps what else the type says of the array: the mesh axes that it varies over.
def _abstract_eval(op, *avals, axes, axis_name):
    dtype = reference.result_dtype(avals[0].dtype)
    return avals[0].update(dtype=dtype, weak_type=False, sharding=_sharding(avals, op, axes))


def _sharding(avals, op, axes):
    """The result's sharding in its type, which follows all operands as that of the operator in jax.numpy does.

    Raises:
      ShardingTypeError: the operands' types are of shardings that do not go together.
    """
    if not types_tell_shardings(avals):
        return avals[0].sharding
    types = [jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=aval.sharding) for aval in avals]
    return jax.eval_shape(functools.partial(reference.apply, op, axes), *types).sharding


def types_tell_shardings(avals):
    """Whether one is sharded over mesh axes of explicit mode."""
    return any(aval.sharding.spec != PartitionSpec(*[None] * aval.ndim) for aval in avals)


def laid_as_well(x, *others):
    """x, in explicit mode cut along the mesh axes that cut the others, which broadcast to its shape.

    A primitive's result is cut like this, and so are cotangents; this one's transpose brings them back to x's own type.

    Raises:
      ShardingTypeError: as for `_sharding`.
    """
    avals = [jax.typeof(a) for a in (x, *others)]
    if not types_tell_shardings(avals):
        return x
    types = [jax.ShapeDtypeStruct(aval.shape, bool, sharding=aval.sharding) for aval in avals]
    joined = jax.eval_shape(lambda *masks: functools.reduce(jnp.logical_or, masks), *types)
    return _laid_like(x, joined)


def rows_laid_as(x, rows):
    """Numbers of x's rows, of its rank, in explicit mode cut as x is: else x's gradient would be cut as they are."""
    avals = [jax.typeof(a) for a in (rows, x)]
    return _laid_like(rows, avals[1]) if types_tell_shardings(avals) else rows


def _laid_like(a, aval):
    """An array cut as one that it broadcasts to."""
    dims = zip(a.shape, aval.shape, aval.sharding.spec, strict=True)
    spec = PartitionSpec(*(names if n == whole else None for n, whole, names in dims))
    same = spec == jax.typeof(a).sharding.spec
    return a if same else jax.sharding.reshard(a, NamedSharding(aval.sharding.mesh, spec))


def _batch(op, axis_data, operands, batch_axes, *, axes, axis_name):
    batched, to, axes, axis_name = moved_batch_axes(
        axis_data, operands, batch_axes, float_operands(op), axes=axes, axis_name=axis_name
    )
    return PRIMITIVES[op].bind(*batched, axes=axes, axis_name=axis_name), to


def moved_batch_axes(axis_data, operands, batch_axes, n_floats, *, axes, axis_name):
    """Operands that are batched along one axis, that axis, and the parameters that go with them.

    Only the axes change: operands batched along another axis than the first one's are moved to it. One of the first
    `n_floats` that has no batch axis is broadcast; for a mask an extent of 1 will do. A batch axis that `axis_name`
    names, as `vmap`'s argument of that name may, is one of the axes.
    """
    operands, batch_axes = list(operands), list(batch_axes)
    named = axis_data.name in axis_name
    if all(b is None for b in batch_axes):
        if not named:
            return operands, None, axes, axis_name
        operands[0], batch_axes[0] = jnp.broadcast_to(operands[0], (axis_data.size, *operands[0].shape)), 0
    floats = operands[:n_floats]
    ndim = next(x.ndim - (b is not None) for x, b in zip(floats, batch_axes, strict=False))
    size = next(x.shape[b] for x, b in zip(operands, batch_axes, strict=True) if b is not None)
    # The batch axis of each operand, and the new axis, counted from the end: a mask may have fewer axes than x.
    ends = [None if b is None else b - x.ndim for x, b in zip(operands, batch_axes, strict=True)]
    to = max(next(end for end in ends if end is not None), -ndim - 1)
    batched = []
    for i, (x, end) in enumerate(zip(operands, ends, strict=True)):
        if i >= len(floats) and end is None:
            x = jnp.expand_dims(x, to) if x.ndim >= -to - 1 else x
        elif end is None:
            x = jnp.expand_dims(x, to)
            x = jnp.broadcast_to(x, (*x.shape[:to], size, *x.shape[x.ndim + to + 1 :]))
        else:
            if x.ndim < -to:  # a mask whose first axis lies behind the new one
                x = jnp.expand_dims(jnp.moveaxis(x, end, 0), tuple(range(1, -to - x.ndim + 1)))
                end = -x.ndim
            x = jnp.moveaxis(x, end, to)
        batched.append(x)
    batched[:n_floats] = [laid_as_well(x, *batched) for x in batched[:n_floats]]
    to += ndim + 1
    axes = tuple(a + (a >= to) for a in axes)
    if named:
        axes, axis_name = tuple(sorted([*axes, to])), tuple(name for name in axis_name if name != axis_data.name)
    return batched, to, axes, axis_name


def _jvp(op, primals, tangents, **axes):
    x, *mask = primals
    if type(tangents[0]) is ad.Zero:
        y = PRIMITIVES[op].bind(*primals, **axes)
        return y, ad.Zero(jax.typeof(y))
    y = PRIMITIVES[op].bind(reference.without_narrow(x), *mask, **axes)
    y_dot = PRIMITIVES[JVP[op]].bind(y, tangents[0].astype(y.dtype), *mask, **axes)
    return y.astype(x.dtype), y_dot.astype(x.dtype)


def _linear_in_y(y, y_dot, t, where, op, axes, axis_name):
    """The derivative along y_dot of the linear map (y, t), in the dtype that the kernels compute in."""

    def total(a):
        a = jnp.sum(a, axis=axes, keepdims=True)
        return jax.lax.psum(a, axis_name) if axis_name else a

    dtype = t.dtype
    y, y_dot, t = (reference.widened(a) for a in (y, y_dot, t))
    if where is not None:
        y_dot, t = jnp.where(where, y_dot, 0), jnp.where(where, t, 0)
    if op == "softmax_linear":
        derivative = y_dot * (t - total(y * t)) - y * total(y_dot * t)
    elif op == "log_softmax_jvp":
        derivative = jnp.broadcast_to(-total(jnp.exp(y) * y_dot * t), t.shape)
    else:
        derivative = -jnp.exp(y) * y_dot * total(t)
    if where is not None:
        derivative = jnp.where(where, derivative, 0)
    return derivative.astype(dtype)


def _linear_jvp(op, primals, tangents, **axes):
    y, t, *mask = primals
    y_dot, t_dot = tangents[:2]
    out = PRIMITIVES[op].bind(*primals, **axes)
    terms = []
    if type(t_dot) is not ad.Zero:
        terms.append(PRIMITIVES[op].bind(y, t_dot, *mask, **axes))
    if type(y_dot) is not ad.Zero:
        terms.append(_linear_in_y(y, y_dot, t, mask[0] if mask else None, op, **axes))
    return out, functools.reduce(jnp.add, terms) if terms else ad.Zero(jax.typeof(out))


def _linear_transpose(op, cotangent, y, t, *mask, **axes):
    assert ad.is_undefined_primal(t) and not ad.is_undefined_primal(y)
    nothing = [None] * len(mask)
    if type(cotangent) is ad.Zero:
        return [None, ad.Zero(t.aval), *nothing]
    return [None, PRIMITIVES[_TRANSPOSED[op]].bind(y, cotangent, *mask, **axes), *nothing]


for _op, _primitive in PRIMITIVES.items():
    _primitive.def_impl(functools.partial(xla.apply_primitive, _primitive))
    _primitive.def_abstract_eval(functools.partial(_abstract_eval, _op))
    batching.fancy_primitive_batchers[_primitive] = functools.partial(_batch, _op)
    ad.primitive_jvps[_primitive] = functools.partial(_jvp if _op in JVP else _linear_jvp, _op)
    if _op in _TRANSPOSED:
        ad.primitive_transposes[_primitive] = functools.partial(_linear_transpose, _op)
