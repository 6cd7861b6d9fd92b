"""A kernel's custom call, described once: plans are made of it and kept by it, and XLA's call has its attributes."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jax_softmax import _kernels
from jax_softmax.primitives.operators import OPERATORS

Array = tuple[tuple[int, ...], str]  # a shape and a dtype


class KernelSpec(NamedTuple):
    """A kernel's custom call. csrc/core/call.h says what its attributes mean."""

    op: str
    axes: tuple[int, ...]
    operands: tuple[Array, ...]
    results: tuple[Array, ...]  # without scratch memory
    masked: bool  # whether the last operand is a mask
    arrays: str = ""  # the roles of the arrays and indices that `load` and `store` read
    load: str = ""
    store: str = ""

    @property
    def attributes(self) -> dict[str, Any]:
        """The attributes of XLA's custom call."""
        return attributes(self.op, self.axes, self.masked, self.arrays, self.load, self.store)

    def plan(self, *device: Any, **options: Any) -> dict[str, Any] | None:
        """The plan for a GPU, whose numbers are all of a `Gpu` but its copy rate; None if there is none.

        Raises:
          ValueError: there is no such call.
        """
        return _kernels.plan(self.operands, self.results, self.attributes, *device, **options)


def attributes(
    op: str, axes: Sequence[int], masked: bool, arrays: str = "", load: str = "", store: str = ""
) -> dict[str, Any]:
    """The attributes of a kernel's custom call.

    `arrays` are the roles of the operands that the expressions `load` and `store` read.
    """
    operator = OPERATORS[op]
    numbers = ["number"] * operator.row_numbers
    sides = [*arrays.split(), *numbers, *["label"] * operator.labelled, *["mask"] * masked]
    return {
        "version": np.int64(_kernels.CALL_VERSION),
        "op": op,
        "axes": np.array(axes, np.int64),
        "sides": " ".join(sides),
        "load": load,
        "store": store,
    }


def described(
    op: str,
    shape: Iterable[int],
    axes: Sequence[int],
    dtype: str,
    mask_shape: Iterable[int] | None = None,
    out_dtype: str | None = None,
    more_results: Iterable[str] = (),
    arrays: str = "",
    beside: Iterable[tuple[Iterable[int], str]] = (),
    load: str = "",
    store: str = "",
) -> KernelSpec:
    """The call of an operator's kernel for an array of this shape and dtype.

    `more_results` has the dtypes of results of elements after the first one. `beside` has the shapes and dtypes of the
    arrays that expressions read. `arrays` has their roles, and those of indices.
    """
    operator, shape = OPERATORS[op], tuple(shape)
    rows = tuple(1 if d in axes else n for d, n in enumerate(shape))
    wide = "float64" if "float64" in (dtype, out_dtype) else "float32"
    operands = operator.inputs * [(shape, dtype)] + [(tuple(shape), dtype) for shape, dtype in beside]
    operands += operator.row_numbers * [(rows, wide)] + operator.labelled * [(rows, "int32")]
    operands += [] if mask_shape is None else [(tuple(mask_shape), "bool")]
    results = operator.element_results * [(shape, out_dtype or dtype)] + [(shape, dtype) for dtype in more_results]
    results += operator.row_results * [(rows, wide)]
    masked = mask_shape is not None
    return KernelSpec(op, tuple(axes), tuple(operands), tuple(results), masked, arrays, load, store)


def of_operator(
    op: str, axes: Sequence[int], avals_in: Sequence[Any], avals_out: Sequence[Any], shape: Sequence[int] | None = None
) -> KernelSpec:
    """The call of an operator's kernel for these operands and results. `shape`: x's with an extent for each symbol."""
    operands, results = (
        tuple(_array(a, avals_in[0].shape if shape is None else shape) for a in avals)
        for avals in (avals_in, avals_out)
    )
    return KernelSpec(op, tuple(axes), operands, results, avals_in[-1].dtype == bool)


def _array(aval: jax.core.ShapedArray, shape: Sequence[int]) -> Array:
    """The shape and dtype of an operand or a result, with the extents of x's `shape` for symbols."""
    known = zip(aval.shape, shape[len(shape) - aval.ndim :], strict=True)
    return tuple(n if isinstance(n, int) else m for n, m in known), aval.dtype.name
