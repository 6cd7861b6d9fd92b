"""What a program is replaced by before it is cut into groups, so that fewer bytes move.

First, equal operations of the same variables become one. Then:

1. log_softmax(x), and softmax(x) of which a backward pass keeps a copy in more bytes than x has, are made anew of x and
   the rows' maximum and sum wherever they are read.
2. A cotangent of log_softmax that is one number but at a label: the gradient of a cross entropy, by its own kernel.
3. The sum over a row of its product with such an array: a multiple of the element at the label, and of the row's sum.
   What is scattered to a label of each row: a comparison of indices with it.
4. The sum of softmax's cotangent and log_softmax's of the same array: one cotangent of log_softmax.
5. softmax and log_softmax of the same array, if both are still to be written: exp of the latter is a second result.
6. What rows of one array have, the sums of its elements that smoothed labels take, and the rows' cross entropies come
   from the kernel that makes a gradient of it, if that needs nothing that depends on them; else they are made once.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from jax_softmax.fusion import expressions
from jax_softmax.fusion.expressions import is_variable
from jax_softmax.fusion.graph import Equation, Graph, bytes_of, graph_of, opened, size_of, variables_of
from jax_softmax.fusion.groups import Group, Groups, foldable, is_loop, may_fold
from jax_softmax.primitives import labels, reference
from jax_softmax.primitives.operators import WITH_DISTANCES, Coefficients, bind

# Bytes that memory could move while a kernel makes an element of softmax again; and how many fewer bytes are worth it.
_BYTES_OF_EXPONENTIAL, _WORTH_IT = 1.8, 0.8

_LINEAR_MAPS = ("softmax_linear", "log_softmax_vjp", "log_softmax_jvp")


def applied(graph: Graph) -> Graph:
    """The graph after all rules."""
    graph = _without_duplicates(graph)
    for rule in (
        _gradients_with_rows,
        _sums_of_cotangents,
        _gradients_at_labels,
        _sums_at_labels,
        _scattered,
        _made_anew,
        _two_results,
    ):
        replacements: dict[Equation, list[Equation]] = {}
        stands = Groups(graph, left=graph.position).stands
        for equation in graph.equations:
            replacements |= rule(graph, equation, stands) or {}
        if replacements:
            graph = graph.with_replaced(replacements)
    while shared := next(filter(None, (_shared_rows(graph, e) for e in graph.equations)), None):
        graph = graph.with_replaced(*shared)
    return graph


def _without_duplicates(graph):
    known: dict = {}
    renamed: dict = {}
    for equation in graph.equations:
        if not may_fold(equation) or equation.eqn.effects:
            continue
        inputs = tuple(_identity(renamed.get(a, a) if is_variable(a) else a) for a in equation.inputs)
        params = tuple(sorted((name, str(value)) for name, value in equation.params.items()))
        key = equation.name, inputs, params, tuple(str(v.aval) for v in equation.outputs)
        first = known.setdefault(key, equation)
        if first is not equation:
            renamed |= zip(equation.outputs, first.outputs, strict=True)
    duplicates = {equation: [] for equation in graph.equations if equation.outputs and equation.outputs[0] in renamed}
    return graph.with_replaced(duplicates, renamed) if duplicates else graph


def _identity(a):
    return a if is_variable(a) else (str(a.aval), np.asarray(a.val).tobytes())


class _Made(NamedTuple):
    """What a function makes of variables: numbers of rows, of x's shape with extent 1 along an axis.

    Of an array that is one number in each row but at one element: the label, int32, none of the row's elements where
    there is none; what the label's element has more than the others; and what these have, or None for 0.
    """

    variables: list
    function: Callable


def is_plain(equation, *names) -> bool:
    """Whether it is one of these operators, of whole rows, without a mask, along one axis."""
    if equation is None or equation.name not in names or len(equation.params["axes"]) != 1:
        return False
    return foldable(equation) and all(a.aval.dtype != bool for a in equation.inputs)


def spliced(function, inputs, outputs, like) -> list[Equation]:
    """The equations of a function of these variables, of which the last ones make these outputs."""
    given = [a.aval.update(weak_type=False) for a in inputs]

    def of_their_own(*a):
        """No result is an operand, or another result."""
        results = jax.tree.leaves(function(*a))
        before = [*a, *results]
        return [jnp.copy(r) if any(r is b for b in before[: len(a) + k]) else r for k, r in enumerate(results)]

    with like.eqn.ctx.manager:  # the mesh that it stands in, for one
        jaxpr, constants = opened(jax.make_jaxpr(of_their_own)(*given))
    inner = graph_of(jaxpr)
    renamed = dict(zip(jaxpr.invars, inputs, strict=True))
    renamed |= {v: Literal(c, v.aval) for v, c in zip(jaxpr.constvars, constants, strict=True)}
    renamed |= zip(inner.outputs, outputs, strict=True)

    def new(a):
        return a if not is_variable(a) else renamed.setdefault(a, type(a)(a.aval))

    found = []
    for e in inner.equations:
        info = like.eqn.source_info
        eqn = e.eqn.replace(source_info=info)
        found.append(Equation(eqn, [new(a) for a in e.inputs], [new(v) for v in e.outputs], e.params))
    return found


# ---- 1


def _made_anew(graph, equation, stands):
    if not is_plain(equation, "softmax", "log_softmax"):
        return None
    (x,), (y,) = equation.inputs, equation.outputs
    readers = graph.readers.get(y, ())
    if y in graph.outputs or not readers:
        return None
    maps = [r for r in readers if r.name in _LINEAR_MAPS and r.inputs[0] is y and y not in r.inputs[1:]]
    others = [r for r in readers if r not in maps]
    if not all(is_loop(r) or r.name == "gather" for r in others):
        return None
    if equation.name == "softmax":
        again = Group(graph, equation).cost_of_reading(x, stands) + _BYTES_OF_EXPONENTIAL * size_of(x)
        if again > _WORTH_IT * 2 * bytes_of(y):  # y is written, and read by the backward pass
            return None
        if others and not any(_is_summed(graph, r) for r in others):
            return _softmax_made_anew(equation, maps) if maps else None
    rows = row_variables(equation)
    return {equation: [*rows_of(equation, rows), *made_of_rows(equation, rows)]}


def row_variables(equation):
    """For the maxima and sums of the rows of softmax or log_softmax."""
    (y,), axes = equation.outputs, equation.params["axes"]
    shape = tuple(1 if d in axes else n for d, n in enumerate(y.aval.shape))
    aval = y.aval.update(shape=shape, dtype=jnp.dtype("float32"), weak_type=False)
    return type(y)(aval), type(y)(aval)


def rows_of(equation, rows) -> list[Equation]:
    """What makes them of its operand."""
    axes = equation.params["axes"]
    return spliced(lambda x: bind("logsumexp", x, where=None, axes=axes), equation.inputs, rows, equation)


def made_of_rows(equation, rows, y=None) -> list[Equation]:
    """What makes its result, or y in its place, of its operand and these."""
    y = equation.outputs[0] if y is None else y
    function = _log_probabilities if equation.name == "log_softmax" else _probabilities
    return spliced(lambda *a: function(*a, y.aval.dtype), [*equation.inputs, *rows], [y], equation)


def _is_summed(graph, reader):
    """Whether a loop, or one that reads what it makes, is a sum or the like."""
    pending, seen = [reader], set()
    while pending:
        equation = pending.pop()
        if equation in seen or not is_loop(equation):
            continue
        seen.add(equation)
        if not expressions.prints(equation):
            return True
        pending += [r for v in equation.outputs for r in graph.readers.get(v, ())]
    return False


def _softmax_made_anew(equation, maps):
    """softmax with its rows' maxima and sums, of which the linear maps make it again."""
    (x,), (y,), axes = equation.inputs, equation.outputs, equation.params["axes"]
    rows = row_variables(equation)

    def with_rows(x):
        return bind("softmax_and_normalizer", x, where=None, axes=axes, dtype=y.aval.dtype)

    replaced = {equation: spliced(with_rows, [x], [y, *rows], equation)}
    for reader in maps:
        again = type(y)(y.aval)
        replaced[reader] = [*made_of_rows(equation, rows, again), reader.with_inputs([again, *reader.inputs[1:]])]
    return replaced


def _probabilities(x, largest, total, dtype):
    rows = reference.Normalizer(largest, total).without_infinity()
    return (jnp.exp(reference.widened(x) - largest) * (1 / rows.total)).astype(dtype)


def _log_probabilities(x, largest, total, dtype):
    rows = reference.Normalizer(largest, total).without_infinity()
    return (reference.distances(x, rows) - jnp.log(rows.total)).astype(dtype)


# ---- 2 and 3


def _gradients_at_labels(graph, equation, stands):
    if not is_plain(equation, "log_softmax_vjp"):
        return None
    y, t = equation.inputs
    forward, axes = graph.maker.get(y), equation.params["axes"]
    if not is_plain(forward, "log_softmax") or forward.params["axes"] != axes or not is_variable(t):
        return None
    at = _at_label(graph, t, axes[0])
    if at is None:
        return None
    (x,), dtype = forward.inputs, equation.params["dtype"]

    def gradient(x, *variables):
        label, value, offset = at.function(*variables)
        value = jnp.where(labels.exists(label, x.shape, axes), value, 0)
        offset = jnp.zeros_like(value) if offset is None else jnp.broadcast_to(offset, value.shape)
        total = value + x.shape[axes[0]] * offset
        coefficients = Coefficients(-total, jnp.zeros_like(total), offset, value)
        return bind("cross_entropy_gradient", x, *coefficients, label, where=None, axes=axes, dtype=dtype)[0]

    return {equation: spliced(gradient, [x, *at.variables], equation.outputs, equation)}


def _sums_at_labels(graph, equation, stands):
    if equation.name != "reduce_sum" or len(equation.params["axes"]) != 1:
        return None
    (product,), axes = equation.inputs, tuple(equation.params["axes"])
    times = graph.maker.get(product) if is_variable(product) else None
    if times is None or times.name != "mul" or len(graph.readers[product]) != 1:
        return None
    for one_hot, values in (times.inputs, times.inputs[::-1]):
        maker = graph.maker.get(values) if is_variable(values) else None
        if not is_variable(one_hot) or not is_plain(maker, "log_softmax", "softmax") or maker.params["axes"] != axes:
            continue
        at = _at_label(graph, one_hot, axes[0])
        if at is None:
            continue

        # Where it is written anyway, its own sum is read from it.
        from_x = maker.name == "log_softmax" and values not in graph.outputs

        def total(x, y, *variables, at=at, from_x=from_x):
            label, value, offset = at.function(*variables)
            counts = labels.exists(label, y.shape, axes)
            if offset is not None:
                counts &= value != 0  # the element at the label may be -inf
            result = jnp.where(counts, labels.at_labels(y, axes, label) * value, 0)
            if offset is not None:
                result += offset * (_sum_of_logarithms(x, axes) if from_x else jnp.sum(y, axes, keepdims=True))
            return jnp.squeeze(result, axes).astype(y.dtype)

        return {equation: spliced(total, [*maker.inputs, values, *at.variables], equation.outputs, equation)}
    return None


def _sum_of_logarithms(x, axes):
    """The sum of log_softmax(x) over each row."""
    (n,) = (x.shape[axis] for axis in axes)
    if n > reference.MOST_COUNTED:
        return jnp.sum(bind("log_softmax", x, where=None, axes=axes, dtype="float32"), axes, keepdims=True)
    largest, total, distance, count = bind("logsumexp_and_distances", x, where=None, axes=axes)
    rows = reference.Normalizer(largest, total).without_infinity()
    return reference.distance_of_all(distance, count, n) - n * jnp.log(rows.total)


def _scattered(graph, equation, stands):
    """A number of each row scattered to zeros: no array has to be cleared for it, and it folds."""
    if equation.name not in _SCATTERS or not all(map(may_fold, graph.readers.get(equation.outputs[0], ()))):
        return None
    dims = equation.params["dimension_numbers"]
    axis = tuple(dims.inserted_window_dims)
    at = _of_scatter(graph, equation, axis[0]) if len(axis) == 1 else None
    if at is None or equation.outputs[0] in graph.outputs:
        return None
    (result,) = equation.outputs

    def compared(*variables):
        label, value, _ = at.function(*variables)
        index = jax.lax.broadcasted_iota(jnp.int32, result.aval.shape, axis[0])
        return jnp.where(index == label, value.astype(result.aval.dtype), 0)

    return {equation: spliced(compared, at.variables, [result], equation)}


_SCATTERS = ("scatter-add", "scatter_add")


def _at_label(graph, a, axis, known=None) -> _Made | None:
    """The label, and so on, of an array that is one number in each row but at one element."""
    known, a = {} if known is None else known, _value(graph, a)
    if not is_variable(a):
        return None
    if a not in known:
        known[a] = _found_at_label(graph, a, axis, known)
    return known[a]


def _value(graph, a):
    """What a value is, before it was copied or said to vary along a mesh axis."""
    while is_variable(a) and a in graph.maker and graph.maker[a].name in expressions.SAME:
        (a,) = graph.maker[a].inputs
    return a


def _found_at_label(graph, a, axis, known):
    maker, shape = graph.maker.get(a), a.aval.shape
    if maker is None or a.aval.dtype.name not in expressions.WRITABLE:
        return None
    if maker.name in _SCATTERS:
        return _of_scatter(graph, maker, axis)
    if maker.name in ("mul", "add", "add_any"):
        for array, number in (maker.inputs, maker.inputs[::-1]):
            at = _at_label(graph, array, axis, known)
            row = None if at is None else _of_rows(graph, number, shape, axis)
            if row is not None:
                return _combined(at, row, maker.name)
        return None
    if maker.name != "convert_element_type" or maker.inputs[0].aval.dtype != bool:
        inner = maker.inputs[0] if maker.name in ("convert_element_type", "neg") else None
        at = _at_label(graph, inner, axis, known) if inner is not None else None
        return _combined(at, _Made([], lambda: -1.0), "mul") if at is not None and maker.name == "neg" else at
    compared = graph.maker.get(maker.inputs[0])
    if compared is None or compared.name != "eq":
        return None
    for label, index in (compared.inputs, compared.inputs[::-1]):
        if not is_variable(label) or not is_variable(index) or not _is_index(graph, index, axis):
            continue
        row = _of_rows(graph, label, shape, axis)
        if row is not None and label.aval.dtype.name == "int32":
            return _Made(row.variables, lambda *v, row=row: (row.function(*v), 1.0, None))
    return None


def _combined(at, row, operation):
    """An array times, or plus, a number of each row."""
    if operation != "mul" and not row.variables and row.function() == 0:
        return at
    n = len(at.variables)

    def function(*variables):
        label, value, offset = at.function(*variables[:n])
        number = row.function(*variables[n:])
        if operation == "mul":
            return label, value * number, None if offset is None else offset * number
        return label, value, number if offset is None else offset + number

    return _Made([*at.variables, *row.variables], function)


def _is_index(graph, a, axis):
    """Whether a value is its index along an axis."""
    maker = graph.maker.get(_value(graph, a))
    while maker is not None and maker.name == "broadcast_in_dim" and len(maker.inputs) == 1:
        inner, dims = _value(graph, maker.inputs[0]), maker.params["broadcast_dimensions"]
        if not is_variable(inner) or axis not in dims:
            return False
        axis = tuple(dims).index(axis)
        maker = graph.maker.get(inner)
    return maker is not None and maker.name == "iota" and maker.params["dimension"] == axis


def _of_rows(graph, a, shape, axis) -> _Made | None:
    """What all elements of a row have."""
    rows, a = tuple(1 if d == axis else n for d, n in enumerate(shape)), _value(graph, a)
    if not is_variable(a):
        return _Made([], lambda: float(a.val)) if a.aval.shape == () else None
    if a.aval.shape in (rows, ()):
        return _Made([a], lambda value: value)
    maker = graph.maker.get(a)
    if maker is None or maker.name != "broadcast_in_dim" or len(maker.inputs) != 1:
        return None
    inner, dims = _value(graph, maker.inputs[0]), maker.params["broadcast_dimensions"]
    if not is_variable(inner):
        return _Made([], lambda: float(inner.val)) if inner.aval.shape == () else None
    if any(d == axis and n != 1 for d, n in zip(dims, inner.aval.shape, strict=True)):
        return None
    if any(n != rows[d] for d, n in zip(dims, inner.aval.shape, strict=True)):
        return None
    return _Made([inner], lambda value: jax.lax.broadcast_in_dim(value, rows, dims) if value.shape else value)


def _of_scatter(graph, scatter, axis) -> _Made | None:
    """A row's value added to zeros, at an index of its own."""
    zeros, indices, updates = scatter.inputs
    if zeros.aval.dtype.name not in expressions.WRITABLE:
        return None
    shape, dims = zeros.aval.shape, scatter.params["dimension_numbers"]
    kept = tuple(d for d in range(len(shape)) if d != axis)
    if not _is_zero(graph, zeros) or not is_variable(indices) or not is_variable(updates):
        return None
    batching = tuple(dims.operand_batching_dims), tuple(dims.scatter_indices_batching_dims)
    if dims.update_window_dims or tuple(dims.inserted_window_dims) != (axis,) or batching[0] != kept:
        return None
    if tuple(dims.scatter_dims_to_operand_dims) != (axis,) or batching[1] != tuple(range(len(kept))):
        return None
    count = math.prod(shape[d] for d in kept)
    if size_of(indices) != count or size_of(updates) != count or indices.aval.dtype.name != "int32":
        return None
    rows = tuple(1 if d == axis else n for d, n in enumerate(shape))
    clips = "CLIP" in str(scatter.params["mode"])

    def function(indices, updates):
        label = jnp.reshape(indices, rows)
        label = jnp.clip(label, 0, shape[axis] - 1) if clips else label
        return label, jnp.reshape(updates, rows).astype(jnp.float32), None

    return _Made([indices, updates], function)


def _is_zero(graph, a):
    a = _value(graph, a)
    if not is_variable(a):
        return a.aval.shape == () and float(a.val) == 0
    maker = graph.maker.get(a)
    return maker is not None and maker.name == "broadcast_in_dim" and _is_zero(graph, maker.inputs[0])


# ---- 4


def _sums_of_cotangents(graph, equation, stands):
    """p (t - sum(p t)) + (u - p sum(u)) is v - p sum(v), where v is p t + u."""
    if equation.name not in ("add", "add_any") or not all(map(is_variable, equation.inputs)):
        return None
    for one, other in (equation.inputs, equation.inputs[::-1]):
        of_p, of_y = graph.maker.get(one), graph.maker.get(other)
        if not is_plain(of_p, "softmax_linear") or not is_plain(of_y, "log_softmax_vjp"):
            continue
        (p, t), (y, u) = of_p.inputs, of_y.inputs
        forward, log_forward = graph.maker.get(p), graph.maker.get(y)
        if not is_plain(forward, "softmax") or not is_plain(log_forward, "log_softmax"):
            continue
        same = forward.inputs[0] is log_forward.inputs[0] and forward.params["axes"] == log_forward.params["axes"]
        same &= of_p.params["axes"] == of_y.params["axes"] == forward.params["axes"]
        same &= all(a.aval.dtype == jnp.float32 for a in (p, t, y, u, one, other))
        if not same or len(graph.readers[one]) + len(graph.readers[other]) > 2:
            continue

        def cotangent(p, t, y, u, params=of_y.params):
            return bind("log_softmax_vjp", y, p * t + u, where=None, axes=params["axes"], dtype=params["dtype"])

        return {equation: spliced(cotangent, [p, t, y, u], equation.outputs, equation)}
    return None


# ---- 5


def _two_results(graph, equation, stands):
    if not is_plain(equation, "softmax"):
        return None
    alike = [r for r in graph.readers[equation.inputs[0]] if r.params.get("axes") == equation.params["axes"]]
    first = next(r for r in alike if is_plain(r, "softmax"))
    other = next((r for r in alike if is_plain(r, "log_softmax")), None)
    return _both_of(equation, other) if first is equation and other is not None else None


def _both_of(softmax, log_softmax):
    (p,), (y,), axes = softmax.outputs, log_softmax.outputs, softmax.params["axes"]
    wide = type(y)(y.aval.update(dtype=jnp.dtype("float32"), weak_type=False))

    def logs(x):
        return bind("log_softmax", x, where=None, axes=axes, dtype="float32")

    return {
        log_softmax: [
            *spliced(logs, log_softmax.inputs, [wide], log_softmax),
            *spliced(lambda wide: wide.astype(y.aval.dtype), [wide], [y], log_softmax),
        ],
        softmax: spliced(lambda wide: jnp.exp(wide).astype(p.aval.dtype), [wide], [p], softmax),
    }


# ---- 6


def _gradients_with_rows(graph, equation, stands):
    """The kernel of a gradient makes what its rows have again, faster than XLA makes a gradient of these."""
    if equation.name != "tangent_sums_transpose" or not foldable(equation):
        return None
    params = {name: equation.params[name] for name in ("axes", "dtype")}

    def gradient(x, largest, total, factor, offset, at_label, label, where=None):
        coefficients = Coefficients(factor, jnp.zeros_like(factor), offset, at_label)
        return bind("cross_entropy_gradient", x, *coefficients, label, where=where, **params)[0]

    return {equation: spliced(gradient, equation.inputs, equation.outputs, equation)}


# Operators that make the maxima and sums of rows, and which result the maximum is. An operator takes them from one that
# stands before it in this list.
_FIRST_OF_ROWS = {
    "cross_entropy_gradient_and_distances": 1,
    "cross_entropy_gradient": 1,
    "softmax_and_normalizer": 1,
    "logsumexp_and_distances": 0,
    "cross_entropy": 1,
    "logsumexp": 0,
}


def _shared_rows(graph, equation):
    if equation.name == "logsumexp_and_distances" and foldable(equation):
        return _distances_by_another(graph, equation) or _distances_of_gradient(graph, equation)
    if equation.name not in ("logsumexp", "cross_entropy") or not foldable(equation):
        return None
    return _rows_by_another(graph, equation) or _rows_of_softmax(graph, equation)


def _distances_by_another(graph, equation):
    """All that it makes of the rows, from an operator that makes this already."""
    for other in graph.readers[equation.inputs[0]]:
        if other.name not in WITH_DISTANCES or not _are_of_same_rows(graph, other, equation):
            continue
        if other.name != equation.name or graph.position[other] < graph.position[equation]:
            n = len(equation.outputs)
            return {equation: []}, dict(zip(equation.outputs, other.outputs[-n:], strict=True))
    return None


def _distances_of_gradient(graph, equation):
    """A row's sums of elements, from the kernel of a gradient."""
    for other in graph.readers[equation.inputs[0]]:
        if other.name != "cross_entropy_gradient" or not _are_of_same_rows(graph, other, equation):
            continue
        largest, total, *sums = equation.outputs
        params = {name: other.params[name] for name in ("axes", "dtype")}

        def with_sums(x, *of_rows, params=params):  # without a mask, as `equation` is
            return bind("cross_entropy_gradient_and_distances", x, *of_rows, where=None, **params)

        made = spliced(with_sums, other.inputs, [*other.outputs, *sums], other)
        return {equation: [], other: made}, dict(zip((largest, total), other.outputs[1:], strict=True))
    return None


def _are_of_same_rows(graph, other, equation):
    """Whether an operator reads these rows, and needs nothing that depends on what the equation makes of them."""
    if other.inputs[0] is not equation.inputs[0] or _mask_of(other) is not _mask_of(equation):
        return False
    if any(other.params[name] != equation.params[name] for name in ("axes", "axis_name")):
        return False
    return not any(_depends(graph, a, equation) for a in variables_of(other.inputs))


def _rows_of_softmax(graph, equation):
    """The maxima and sums of softmax's rows, from its own kernel."""
    if equation.name != "logsumexp":
        return None
    for other in graph.readers[equation.inputs[0]]:
        if other.name != "softmax" or other.params["axes"] != equation.params["axes"] or not foldable(other):
            continue
        (y,), where = other.outputs, _mask_of(other)
        if where is not _mask_of(equation) or y.aval.dtype.name not in expressions.WRITABLE:
            continue

        def with_rows(x, where=None, params=other.params):
            return bind("softmax_and_normalizer", x, where=where, axes=params["axes"], dtype=params["dtype"])

        return ({equation: [], other: spliced(with_rows, other.inputs, [y, *equation.outputs], other)},)
    return None


def _rows_by_another(graph, equation):
    for other in graph.equations:
        better = list(_FIRST_OF_ROWS).index(other.name) if other.name in _FIRST_OF_ROWS else len(_FIRST_OF_ROWS)
        own = list(_FIRST_OF_ROWS).index(equation.name)
        earlier = better == own and graph.position[other] < graph.position[equation]
        if other is equation or not (better < own or earlier) or not _are_of_same_rows(graph, other, equation):
            continue
        if other.name == equation.name == "cross_entropy" and other.inputs[1] is not equation.inputs[1]:
            continue
        first = _FIRST_OF_ROWS[other.name]
        largest, total = other.outputs[first : first + 2]
        if equation.name == "logsumexp":
            return {equation: []}, dict(zip(equation.outputs, (largest, total), strict=True))
        axes = equation.params["axes"]

        def loss(x, label, largest, total, axes=axes):
            return reference.cross_entropy_given(reference.Normalizer(largest, total), x, label, axes)

        made = spliced(loss, [*equation.inputs[:2], largest, total], equation.outputs[:1], equation)
        return {equation: made}, dict(zip(equation.outputs[1:], (largest, total), strict=True))
    return None


def _mask_of(equation):
    return next((a for a in variables_of(equation.inputs) if a.aval.dtype == bool), None)


def _depends(graph, variable, equation):
    pending, seen = [variable], set()
    while pending:
        a = pending.pop()
        maker = graph.maker.get(a)
        if maker is None or maker in seen:
            continue
        if maker is equation or graph.has_effects_after(maker, equation):
            return True
        seen.add(maker)
        pending += variables_of(maker.inputs)
    return False
