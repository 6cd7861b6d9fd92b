"""Arrays that are one number in each row but at a label, as one-hot targets and what is made of them are."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_softmax.fusion.program import expressions, places
from jax_softmax.fusion.program.graph import Equation, Graph, is_variable, size_of
from jax_softmax.fusion.program.kinds import may_fold
from jax_softmax.fusion.program.splicing import is_alike, spliced
from jax_softmax.fusion.program.walk import through
from jax_softmax.primitives.types import Atom, Var

# Chosen, a limit to the time that a search takes: targets in the tests are made of up to 5 arrays.
_MOST_ARRAYS = 64
SCATTERS = ("scatter-add", "scatter_add")


class OneHot(NamedTuple):
    """An array whose elements are alike in each row, but for the one at the label."""

    variables: list[Var]
    # Of these variables: the label, int32, the index of that element in each row, or beyond the row if there is none;
    # that element, and the others. These are float32, or None for 0.
    make: Callable[..., tuple[jax.Array, Any, Any]]


class _RowNumber(NamedTuple):
    """A number of each row: an array of x's shape with extent 1 along the axis, or one number for all rows."""

    variables: list[Var]
    make: Callable[..., Any]  # of these variables: the number


def one_hot_of(graph: Graph, a: Atom, axis: int) -> OneHot | None:
    """An array as one that is alike in each row but at a label; None if it is not."""
    return _Search(graph, a.aval.shape, axis).one_hot_of(a) if is_variable(a) else None


class _Search:
    """A search for how an array of this shape is one-hot along an axis."""

    def __init__(self, graph: Graph, shape: tuple[int, ...], axis: int) -> None:
        self.graph, self.axis = graph, axis
        self.shape_of_rows = _shape_of_rows(shape, axis)
        self.of_arrays: dict[Var, OneHot | None] = {}

    def one_hot_of(self, a: Atom) -> OneHot | None:
        a = through(self.graph, a, _is_copy)
        if not is_variable(a):
            return None
        if a not in self.of_arrays and len(self.of_arrays) < _MOST_ARRAYS:
            self.of_arrays[a] = None
            self.of_arrays[a] = self._one_hot_of_result(a)
        return self.of_arrays.get(a)

    def _one_hot_of_result(self, a: Var) -> OneHot | None:
        maker, dtype = self.graph.maker.get(a), a.aval.dtype.name
        if maker is None or dtype not in expressions.WRITABLE:
            return None
        if maker.name in SCATTERS:
            return _of_scatter(self.graph, maker, self.axis)
        if maker.name in ("mul", "add", "add_any"):
            for array, number in (maker.inputs, maker.inputs[::-1]):
                one_hot = self.one_hot_of(array)
                row = None if one_hot is None else self._row_number(number)
                if one_hot is not None and row is not None:
                    return _combined(one_hot, row, maker.name, dtype)
            return None
        is_cast = maker.name == "convert_element_type"
        if maker.name == "neg" or (is_cast and maker.inputs[0].aval.dtype != bool):
            one_hot = self.one_hot_of(maker.inputs[0])
            return None if one_hot is None else _combined(one_hot, _constant(1.0 if is_cast else -1.0), "mul", dtype)
        if is_cast:
            return self._chosen(maker.inputs[0], _constant(0.0), _constant(1.0))
        if maker.name == "select_n" and len(maker.inputs) == 3:
            condition, *numbers = maker.inputs
            return self._chosen(condition, *map(self._row_number, numbers))
        return None

    def _chosen(self, condition: Atom, offset: _RowNumber | None, element: _RowNumber | None) -> OneHot | None:
        """An array that is one number of each row where the index equals a label, and another one elsewhere."""
        compared = self.graph.maker_of(condition)
        if compared is None or compared.name != "eq" or offset is None or element is None:
            return None
        for label, index in (compared.inputs, compared.inputs[::-1]):
            is_label = is_variable(label) and is_variable(index) and label.aval.dtype.name == "int32"
            row = self._row_number(label) if is_label and _is_index(self.graph, index, self.axis) else None
            if row is not None:
                return self._of_comparison(row, element, offset)
        return None

    def _of_comparison(self, *numbers: _RowNumber) -> OneHot:
        """An array with these labels, elements at the labels, and others."""

        def by_comparison(*arrays: jax.Array) -> tuple[Any, ...]:
            rest = iter(arrays)
            label, element, offset = (one.make(*(next(rest) for _ in one.variables)) for one in numbers)
            has_offset = numbers[2].variables or offset != 0
            return jnp.broadcast_to(label, self.shape_of_rows), element, offset if has_offset else None

        return OneHot([v for one in numbers for v in one.variables], by_comparison)

    def _row_number(self, a: Atom) -> _RowNumber | None:
        """An array of x's shape, or one that broadcasts to it, as a number of each row; None if rows have several."""
        a, rows = through(self.graph, a, _is_copy), self.shape_of_rows
        if not is_variable(a):
            return _constant(float(a.val)) if a.aval.shape == () else None
        if a.aval.shape in (rows, ()):
            return _RowNumber([a], lambda value: value)
        maker = self.graph.maker.get(a)
        if maker is None or maker.name != "broadcast_in_dim" or len(maker.inputs) != 1:
            return None
        inner, dims = through(self.graph, maker.inputs[0], _is_copy), maker.params["broadcast_dimensions"]
        if not is_variable(inner):
            return _constant(float(inner.val)) if inner.aval.shape == () else None
        if any(n != rows[d] for d, n in zip(dims, inner.aval.shape, strict=True)):
            return None
        return _RowNumber([inner], lambda value: jax.lax.broadcast_in_dim(value, rows, dims) if value.shape else value)


def _constant(value: float) -> _RowNumber:
    return _RowNumber([], lambda: value)


def _combined(one_hot: OneHot, row: _RowNumber, operation: str, dtype: str) -> OneHot:
    """A one-hot array times or plus a number of each row, rounded to a dtype."""
    n = len(one_hot.variables)

    def combined(*arrays: jax.Array) -> tuple[Any, ...]:
        label, *elements = one_hot.make(*arrays[:n])
        number = row.make(*arrays[n:])

        def combine(element: Any) -> jax.Array | None:
            if element is None and (operation == "mul" or (not row.variables and number == 0)):
                return None
            result = element * number if operation == "mul" else number + (0 if element is None else element)
            result = jnp.asarray(result, jnp.float32)
            return expressions.rounded(result, dtype) if dtype in expressions.ROUNDED else result

        return label, *map(combine, elements)

    return OneHot([*one_hot.variables, *row.variables], combined)


def _of_scatter(graph: Graph, scatter: Equation, axis: int) -> OneHot | None:
    """Zeros to which each row's update is added at its index, as a one-hot array; None if it is anything else."""
    zeros, _, updates = scatter.inputs
    if zeros.aval.dtype.name not in expressions.WRITABLE or not is_zero(graph, zeros) or not is_variable(updates):
        return None
    shape, labels = zeros.aval.shape, labels_of(graph, scatter, axis)
    if labels is None:
        return None
    rows, clips = _shape_of_rows(shape, axis), scatter.params["mode"] == jax.lax.GatherScatterMode.CLIP

    def scattered(labels: jax.Array, updates: jax.Array) -> tuple[Any, ...]:
        label = jnp.reshape(labels, rows)
        label = jnp.clip(label, 0, shape[axis] - 1) if clips else label
        return label, jnp.reshape(updates, rows).astype(jnp.float32), None

    return OneHot([labels, updates], scattered)


def labels_of(graph: Graph, equation: Equation, axis: int) -> Var | None:
    """The array of the indices at which a scatter has each row's one update, or at which a gather reads each row's one
    element: an int32 for each row, in the order of the rows. None if there is none.

    `take_along_axis(x, i)` and `vmap(lambda x, i: x[i])` have rows as dimensions of the batch. `x[arange(n), i]` has
    the rows' own numbers as a first column of indices.
    """
    (operand, indices), dims = equation.inputs[:2], equation.params["dimension_numbers"]
    # `indexed`: the dimension that each column has indices of.
    elements: Atom
    if equation.name == "gather":
        elements, indexed, batch = equation.outputs[0], dims.start_index_map, dims.start_indices_batching_dims
    else:
        elements, indexed = equation.inputs[2], dims.scatter_dims_to_operand_dims
        batch = dims.scatter_indices_batching_dims
    shape = operand.aval.shape
    others = [d for d in range(len(shape)) if d != axis]
    extents = [shape[d] for d in others]
    batching = zip(dims.operand_batching_dims, batch, strict=True)
    if axis not in indexed or not all(others.index(d) == at for d, at in batching):
        return None
    count = math.prod(extents)
    if size_of(elements) != count or math.prod(indices.aval.shape[:-1]) != count or indices.aval.dtype != jnp.int32:
        return None
    columns: Sequence[Atom] = [indices]
    if len(indexed) > 1:
        joined = graph.maker_of(indices)
        if joined is None or joined.name != "concatenate" or [*indices.aval.shape[:-1]] != extents:
            return None
        if joined.params["dimension"] != len(extents):
            return None
        columns = joined.inputs
    if len(columns) != len(indexed) or len(indexed) + len(dims.operand_batching_dims) != len(shape):
        return None
    column_of = dict(zip(indexed, columns, strict=True))
    if not all(_is_index(graph, column, others.index(d)) for d, column in column_of.items() if d != axis):
        return None
    labels = column_of[axis]
    return labels if is_variable(labels) else None


def scattered(graph: Graph, equation: Equation) -> dict[Equation, list[Equation]] | None:
    """A comparison of indices with the label: no array has to be cleared, and the comparison can be folded."""
    if equation.name not in SCATTERS or not all(map(may_fold, graph.readers_of(equation))):
        return None
    (result,) = equation.outputs
    axes = equation.params["dimension_numbers"].scatter_dims_to_operand_dims if result not in graph.results else ()
    found = ((axis, one_hot) for axis in axes if (one_hot := _of_scatter(graph, equation, axis)) is not None)
    axis, one_hot = next(found, (None, None))
    if axis is None or one_hot is None:
        return None

    def compared(*variables: jax.Array) -> jax.Array:
        label, value, _ = one_hot.make(*variables)
        index = jax.lax.broadcasted_iota(jnp.int32, result.aval.shape, axis)
        return jnp.where(index == label, value.astype(result.aval.dtype), 0)

    return {equation: spliced(compared, one_hot.variables, [result], equation)}


def multiplied(graph: Graph, equation: Equation) -> dict[Equation, list[Equation]] | None:
    """`einsum("nv,nv->n", one_hot, y)` as a sum of products, and its derivative `einsum("n,nv->nv", c, one_hot)` as a
    product of elements: in float32, with the rows' dimensions in front. And so `vdot(one_hot, y)`."""
    if any(a.aval.dtype != jnp.float32 for a in (*equation.inputs, *equation.outputs)):
        return None
    if equation.name == "reshape":  # of c one_hot, the derivative of vdot
        product = graph.maker_of(equation.inputs[0])
        of_vdot = None if product is None or product.name != "dot_general" else _of_raveled(graph, product)
        if of_vdot is None or of_vdot[1].aval.shape != equation.outputs[0].aval.shape:
            return None
        return {equation: spliced(lambda c, a: c * a, of_vdot, equation.outputs, equation)}
    if equation.name != "dot_general":
        return None
    if (of_vdot := _of_raveled(graph, equation)) and of_vdot[0].aval.shape:
        return {equation: spliced(lambda a, b: jnp.sum(a * b), of_vdot, equation.outputs, equation)}
    contracted, batch = equation.params["dimension_numbers"]
    rows = len(batch[0])
    sums = contracted == ((rows,), (rows,))
    if any(tuple(dims) != tuple(range(rows)) for dims in batch) or not (sums or contracted == ((), ())):
        return None
    ranks = [a.aval.ndim for a in equation.inputs]
    if sorted(ranks) != ([rows + 1, rows + 1] if sums else [rows, rows + 1]):
        return None
    if not any(one_hot_of(graph, a, rows) for a in equation.inputs if a.aval.ndim > rows):
        return None

    def by_elements(*operands: jax.Array) -> jax.Array:
        a, b = (a if a.ndim > rows else a[..., None] for a in operands)
        return jnp.sum(a * b, -1) if sums else a * b

    return {equation: spliced(by_elements, equation.inputs, equation.outputs, equation)}


def _of_raveled(graph: Graph, product: Equation) -> list[Atom] | None:
    """The arrays of which a product has all elements in a row, a one-hot one among them: two of one shape, of whose
    products it is the sum, or a number before one array."""
    makers = [graph.maker_of(a) for a in product.inputs]
    raveled = [m.inputs[0] for m in makers if m is not None and m.name == "reshape"]
    numbers = [a for a in product.inputs if not a.aval.shape]
    contracted = ((0,), (0,)) if not numbers else ((), ())
    if product.params["dimension_numbers"] != (contracted, ((), ())) or len(numbers) + len(raveled) != 2:
        return None
    if any(a.aval.ndim > 1 for a in product.inputs) or len({a.aval.shape for a in raveled}) != 1:
        return None
    return [*numbers, *raveled] if any(one_hot_of(graph, a, a.aval.ndim - 1) for a in raveled) else None


# ---- Values of rows


def _shape_of_rows(shape: tuple[int, ...], axis: int) -> tuple[int, ...]:
    return tuple(1 if d == axis else n for d, n in enumerate(shape))


def _is_copy(equation: Equation) -> bool:
    return equation.name in expressions.SAME


def is_zero(graph: Graph, a: Atom) -> bool:
    """Whether a value is the number 0, or is broadcast of it."""
    a = through(graph, a, is_alike)
    return not is_variable(a) and a.val == 0


def _is_index(graph: Graph, a: Atom, axis: int) -> bool:
    """Whether a value is its index along an axis."""
    if axis >= a.aval.ndim:  # it is one number
        return False
    place = places.new_place(a.aval.shape)
    along = places.factors_of([place[axis]])
    while (maker := graph.maker_of(a)) is not None and maker.name != "iota":
        if (same := _without_wrapping(graph, maker)) is not None:
            a = same
            continue
        is_followed = expressions.is_view(maker) or _is_copy(maker)
        inputs = places.input_places(maker, place) if is_followed else None
        if inputs is None:
            return False
        (a,), (place,) = maker.inputs, inputs
    return maker is not None and bool(along) and places.factors_of([place[maker.params["dimension"]]]) == along


def _without_wrapping(graph: Graph, equation: Equation) -> Atom | None:
    """The index i, if an equation is where(i < 0, i + n, i), by which JAX counts from the end, and i is an iota."""
    if equation.name != "select_n" or len(equation.inputs) != 3:
        return None
    condition, index, _ = equation.inputs
    compared, maker = graph.maker_of(condition), graph.maker_of(through(graph, index, is_alike))
    if compared is None or compared.name != "lt" or compared.inputs[0] is not index or maker is None:
        return None
    zero = compared.inputs[1]
    return index if maker.name == "iota" and not is_variable(zero) and zero.val == 0 else None
