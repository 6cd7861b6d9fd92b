"""Rules for arrays that are one number in each row but at a label, as one-hot arrays and gradients of losses are.

1. A cotangent of log_softmax that is such an array: the gradient of a cross entropy, by its own kernel.
2. The sum over a row of such an array times log_softmax or softmax: of the element at the label, and of the row's sum.
3. A number of each row that is scattered to a label: a comparison of indices with the label.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jax_softmax.fusion import expressions, places
from jax_softmax.fusion.graph import is_variable, size_of
from jax_softmax.fusion.groups import may_fold
from jax_softmax.fusion.splicing import is_unmasked, spliced
from jax_softmax.primitives import labels, reference
from jax_softmax.primitives.operators import Coefficients, bind

_MOST_STEPS = 64  # arrays that are looked at to find out whether one is such an array


class _RowNumber(NamedTuple):
    """A number of each row: an array of x's shape with extent 1 along the axis, or one number for all rows."""

    variables: list
    make: Callable  # of these variables: the number


class _AtLabel(NamedTuple):
    """An array whose elements are alike in each row, but for one of them."""

    variables: list
    # Of these variables: the label, int32, the index of that element in each row, or beyond the row if there is none;
    # that element, and the others. These are float32, or None for 0.
    make: Callable


def loss_gradients(graph, equation):
    """Rule 1."""
    if not is_unmasked(equation, "log_softmax_vjp"):
        return None
    y, t = equation.inputs
    forward, axes = graph.maker.get(y), equation.params["axes"]
    if not is_unmasked(forward, "log_softmax") or forward.params["axes"] != axes or not is_variable(t):
        return None
    at = at_label(graph, t, axes[0])
    if at is None:
        return None
    (x,), dtype = forward.inputs, equation.params["dtype"]

    def gradient(x, *variables):
        label, element, offset = at.make(*variables)
        value = jnp.where(labels.has_label(label, x.shape, axes), element - (0 if offset is None else offset), 0)
        offset = jnp.zeros_like(value) if offset is None else jnp.broadcast_to(offset, value.shape)
        row_sum = value + x.shape[axes[0]] * offset
        coefficients = Coefficients(-row_sum, jnp.zeros_like(value), offset, value)
        return bind("cross_entropy_gradient", x, *coefficients, label, where=None, axes=axes, dtype=dtype)[0]

    return {equation: spliced(gradient, [x, *at.variables], equation.outputs, equation)}


def sums_at_labels(graph, equation):
    """Rule 2."""
    if equation.name != "reduce_sum" or len(equation.params["axes"]) != 1:
        return None
    (product,), axes = equation.inputs, tuple(equation.params["axes"])
    times = graph.maker_of(product)
    if times is None or times.name != "mul" or len(graph.readers[product]) != 1:
        return None
    for one_hot, values in (times.inputs, times.inputs[::-1]):
        maker = graph.maker_of(values)
        if not is_variable(one_hot) or not is_unmasked(maker, "log_softmax", "softmax") or maker.params["axes"] != axes:
            continue
        at = at_label(graph, one_hot, axes[0])
        if at is None:
            continue

        # A log_softmax that is written anyway is summed itself.
        from_x = maker.name == "log_softmax" and values not in graph.results

        def weighted_sum(x, y, *variables, at=at, from_x=from_x):
            label, value, offset = at.make(*variables)
            counts = labels.has_label(label, y.shape, axes)
            if offset is not None:
                value -= offset
                counts &= value != 0  # the element at the label may be -inf
            result = jnp.where(counts, labels.label_elements(y, axes, label) * value, 0)
            if offset is not None:
                result += offset * (_sum_of_logarithms(x, axes) if from_x else jnp.sum(y, axes, keepdims=True))
            return jnp.squeeze(result, axes).astype(y.dtype)

        return {equation: spliced(weighted_sum, [*maker.inputs, values, *at.variables], equation.outputs, equation)}
    return None


def _sum_of_logarithms(x, axes):
    """The sum of log_softmax(x) over each row."""
    (n,) = (x.shape[axis] for axis in axes)
    if n > reference.MOST_COUNTED:
        return jnp.sum(bind("log_softmax", x, where=None, axes=axes, dtype="float32"), axes, keepdims=True)
    largest, total, distance, count = bind("logsumexp_and_distances", x, where=None, axes=axes)
    rows = reference.Normalizer(largest, total).without_infinity()
    return reference.distance_sum_of_all(distance, count, n) - n * jnp.log(rows.sum_exp)


def scattered(graph, equation):
    """Rule 3: no array has to be cleared, and the comparison can be folded."""
    if equation.name not in _SCATTERS or not all(map(may_fold, graph.readers.get(equation.outputs[0], ()))):
        return None
    dims = equation.params["dimension_numbers"]
    axis = tuple(dims.inserted_window_dims)
    at = _of_scatter(graph, equation, axis[0]) if len(axis) == 1 else None
    if at is None or equation.outputs[0] in graph.results:
        return None
    (result,) = equation.outputs

    def compared(*variables):
        label, value, _ = at.make(*variables)
        index = jax.lax.broadcasted_iota(jnp.int32, result.aval.shape, axis[0])
        return jnp.where(index == label, value.astype(result.aval.dtype), 0)

    return {equation: spliced(compared, at.variables, [result], equation)}


_SCATTERS = ("scatter-add", "scatter_add")


def at_label(graph, a, axis, known=None) -> _AtLabel | None:
    """An array as one that is alike in each row but at a label; None if it is not. `known`: found on the way."""
    known, a = {} if known is None else known, _uncopied(graph, a)
    if not is_variable(a):
        return None
    if a not in known and len(known) < _MOST_STEPS:
        known[a] = None
        known[a] = _found_at_label(graph, a, axis, known)
    return known.get(a)


def _uncopied(graph, a):
    """The variable of which a value is a copy."""
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
            at = at_label(graph, array, axis, known)
            row = None if at is None else _row_number(graph, number, shape, axis)
            if row is not None:
                return _combined(at, row, maker.name, a.aval.dtype.name)
        return None
    if maker.name == "neg" or (maker.name == "convert_element_type" and maker.inputs[0].aval.dtype != bool):
        at, sign = at_label(graph, maker.inputs[0], axis, known), -1.0 if maker.name == "neg" else 1.0
        return None if at is None else _combined(at, _constant(sign), "mul", a.aval.dtype.name)
    if maker.name == "select_n" and len(maker.inputs) == 3:
        offset, element = (_row_number(graph, number, shape, axis) for number in maker.inputs[1:])
        if offset is None or element is None:
            return None
        return _chosen(graph, maker.inputs[0], shape, axis, offset, element)
    if maker.name == "convert_element_type":
        return _chosen(graph, maker.inputs[0], shape, axis, _constant(0.0), _constant(1.0))
    return None


def _constant(value):
    return _RowNumber([], lambda: value)


def _chosen(graph, condition, shape, axis, offset, element):
    """An array that is one number of each row where the index equals a label, and another one elsewhere."""
    compared = graph.maker.get(condition)
    if compared is None or compared.name != "eq":
        return None
    rows = tuple(1 if d == axis else n for d, n in enumerate(shape))
    for label, index in (compared.inputs, compared.inputs[::-1]):
        if not is_variable(label) or not is_variable(index) or not _is_index(graph, index, axis):
            continue
        row = _row_number(graph, label, shape, axis)
        if row is None or label.aval.dtype.name != "int32":
            continue
        numbers = (row, element, offset)

        def by_comparison(*arrays, numbers=numbers):
            arrays = iter(arrays)
            label, element, offset = (one.make(*(next(arrays) for _ in one.variables)) for one in numbers)
            return jnp.broadcast_to(label, rows), element, offset if numbers[2].variables or offset != 0 else None

        return _AtLabel([v for one in numbers for v in one.variables], by_comparison)
    return None


def _combined(at, row, operation, dtype):
    """An array that is alike but at labels, times or plus a number of each row, rounded to a dtype."""
    n = len(at.variables)

    def combined(*arrays):
        label, *elements = at.make(*arrays[:n])
        number = row.make(*arrays[n:])

        def combine(element):
            if element is None and (operation == "mul" or (not row.variables and number == 0)):
                return None
            result = element * number if operation == "mul" else number + (0 if element is None else element)
            result = jnp.asarray(result, jnp.float32)
            return expressions.rounded(result, dtype) if dtype in expressions.ROUNDED else result

        return label, *map(combine, elements)

    return _AtLabel([*at.variables, *row.variables], combined)


def _is_index(graph, a, axis):
    """Whether a value is its index along an axis."""
    if axis >= a.aval.ndim:  # it is one number
        return False
    place = places.new_place(a.aval.shape)
    along = places.factors_of([place[axis]])
    maker = graph.maker.get(_uncopied(graph, a))
    while maker is not None and expressions.is_view(maker):
        found = places.input_places(maker, place)
        if found is None or not is_variable(maker.inputs[0]):
            return False
        (place,) = found
        maker = graph.maker.get(_uncopied(graph, maker.inputs[0]))
    is_one = maker is not None and maker.name == "iota" and bool(along)
    return is_one and places.factors_of([place[maker.params["dimension"]]]) == along


def _row_number(graph, a, shape, axis) -> _RowNumber | None:
    """An array of x's shape, or one that broadcasts to it, as a number of each row; None if rows have several."""
    rows, a = tuple(1 if d == axis else n for d, n in enumerate(shape)), _uncopied(graph, a)
    if not is_variable(a):
        return _RowNumber([], lambda: float(a.val)) if a.aval.shape == () else None
    if a.aval.shape in (rows, ()):
        return _RowNumber([a], lambda value: value)
    maker = graph.maker.get(a)
    if maker is None or maker.name != "broadcast_in_dim" or len(maker.inputs) != 1:
        return None
    inner, dims = _uncopied(graph, maker.inputs[0]), maker.params["broadcast_dimensions"]
    if not is_variable(inner):
        return _RowNumber([], lambda: float(inner.val)) if inner.aval.shape == () else None
    if any(n != rows[d] for d, n in zip(dims, inner.aval.shape, strict=True)):
        return None
    return _RowNumber([inner], lambda value: jax.lax.broadcast_in_dim(value, rows, dims) if value.shape else value)


def _of_scatter(graph, scatter, axis) -> _AtLabel | None:
    """Zeros to which each row's update is added at its index."""
    zeros, indices, updates = scatter.inputs
    if zeros.aval.dtype.name not in expressions.WRITABLE:
        return None
    shape, dims = zeros.aval.shape, scatter.params["dimension_numbers"]
    others = tuple(d for d in range(len(shape)) if d != axis)
    if not _is_zero(graph, zeros) or not is_variable(indices) or not is_variable(updates):
        return None
    batching = tuple(dims.operand_batching_dims), tuple(dims.scatter_indices_batching_dims)
    if dims.update_window_dims or tuple(dims.inserted_window_dims) != (axis,) or batching[0] != others:
        return None
    if tuple(dims.scatter_dims_to_operand_dims) != (axis,) or batching[1] != tuple(range(len(others))):
        return None
    count = math.prod(shape[d] for d in others)
    if size_of(indices) != count or size_of(updates) != count or indices.aval.dtype.name != "int32":
        return None
    rows = tuple(1 if d == axis else n for d, n in enumerate(shape))
    clips = scatter.params["mode"] == jax.lax.GatherScatterMode.CLIP

    def scattered(indices, updates):
        label = jnp.reshape(indices, rows)
        label = jnp.clip(label, 0, shape[axis] - 1) if clips else label
        return label, jnp.reshape(updates, rows).astype(jnp.float32), None

    return _AtLabel([indices, updates], scattered)


def _is_zero(graph, a):
    a = _uncopied(graph, a)
    while is_variable(a) and a in graph.maker and graph.maker[a].name == "broadcast_in_dim":
        a = _uncopied(graph, graph.maker[a].inputs[0])
    return not is_variable(a) and a.aval.shape == () and float(a.val) == 0
