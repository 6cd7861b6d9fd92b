"""A kernel with expressions before and after its operator, and the primitive that calls it.

In a program for one device that is an FFI call. In a program that XLA divides among several, each of them calls the
kernel for its part. Where devices have parts of rows, and where there is no kernel, the same is done in JAX.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import mlir

from jax_softmax.devices import division, layouts, partitioning, row_shards
from jax_softmax.fusion import backend
from jax_softmax.fusion.kernels import printing
from jax_softmax.fusion.program.expressions import Expression
from jax_softmax.primitives import reference
from jax_softmax.primitives.operators import OPERATORS
from jax_softmax.primitives.records import apply
from jax_softmax.runtime.kernel_spec import KernelSpec, described


class SideOperand(NamedTuple):
    """An array that expressions read, or the index along a dimension, for which no memory is read."""

    shape: tuple[int, ...]
    dtype: str
    index_along: int | None = None


class FusedKernel(NamedTuple):
    """Its operands are the operator's own ones, of `shape`, the arrays among `sides`, numbers and labels of rows, and
    the mask. Its results are those of elements, as `store` makes them, and those of rows."""

    op: str
    shape: tuple[int, ...]
    axes: tuple[int, ...]
    dtype: str  # of the operator's own operands
    sides: tuple[SideOperand, ...]
    mask_shape: tuple[int, ...] | None
    load: tuple[Expression, ...]  # of each of the operator's own operands
    store: tuple[Expression, ...]  # of each result of elements
    dtypes: tuple[str, ...]  # of these
    loaded_dtypes: tuple[str, ...]  # of the operator's operands in the program, which `load` makes
    result_dtype: str | None  # of the operator's result in the program
    n_row_results: int
    in_place: int | None  # the operand in whose memory the first result is written

    def _text_of_load(self) -> str:
        texts = map(printing.text_of, self.load)
        lines = ["" if text == f"x{k}" else text for k, text in enumerate(texts)]
        return "\n".join(lines) if any(lines) else ""

    def _text_of_store(self) -> str:
        lines = [
            printing.text_of(expression, stored_as=dtype, result_dtype=self.result_dtype)
            for expression, dtype in zip(self.store, self.dtypes, strict=True)
        ]
        lines = ["" if line == "y" else line for line in lines]
        return "\n".join(lines) if any(lines) or len(lines) > 1 else ""

    @property
    def spec(self) -> KernelSpec:
        """The custom call, with expressions as C++."""
        return described(
            *(self.op, self.shape, self.axes, self.dtype, self.mask_shape, self.dtypes[0] if self.dtypes else None),
            more_results=self.dtypes[1:],
            arrays=" ".join("array" if s.index_along is None else f"index:{s.index_along}" for s in self.sides),
            beside=[(side.shape, side.dtype) for side in self.sides if side.index_along is None],
            load=self._text_of_load(),
            store=self._text_of_store(),
        )

    @property
    def result_types(self) -> list[jax.ShapeDtypeStruct]:
        rows = tuple(1 if d in self.axes else n for d, n in enumerate(self.shape))
        of_elements = [jax.ShapeDtypeStruct(self.shape, dtype) for dtype in self.dtypes]
        return of_elements + [jax.ShapeDtypeStruct(rows, jnp.float32)] * self.n_row_results

    def in_jax(self, *operands: jax.Array, operator: Callable[..., Any] = apply) -> list[jax.Array]:
        """The kernel's results, made in JAX. `operator` is called with what is loaded, instead of the operator."""
        facts = OPERATORS[self.op]
        own, rest = operands[: facts.inputs], list(operands[facts.inputs :])
        values = {f"x{k}": a for k, a in enumerate(own)}
        for k, side in enumerate(self.sides):
            if side.index_along is None:
                values[f"s{k}"] = rest.pop(0)
            else:
                values[f"s{k}"] = jax.lax.broadcasted_iota(jnp.int32, side.shape, side.index_along)
        loaded = [
            jnp.broadcast_to(expression.in_jax(values), own[0].shape).astype(dtype)
            for expression, dtype in zip(self.load, self.loaded_dtypes, strict=True)
        ]
        dtype = {"dtype": self.result_dtype} if facts.element_results else {}
        found = operator(self.op, *loaded, *rest, axes=self.axes, **dtype)
        found = list(found) if isinstance(found, tuple | list) else [found]
        if not facts.element_results:
            return found
        values["y"] = found.pop(0)
        of_elements = zip(self.store, self.dtypes, strict=True)
        stored = (jnp.broadcast_to(e.in_jax(values), values["y"].shape).astype(dtype) for e, dtype in of_elements)
        return [*stored, *found]

    # ---- A device's part

    @property
    def n_arrays(self) -> int:
        """The number of operands before those of rows: the operator's own ones, and the arrays among `sides`."""
        return OPERATORS[self.op].inputs + sum(side.index_along is None for side in self.sides)

    @property
    def dims_with_indices(self) -> list[int]:
        """The dimensions along which expressions read an index."""
        return [side.index_along for side in self.sides if side.index_along is not None]

    def of_part(self, layout: np.ndarray) -> "FusedKernel":
        """The kernel for a device's part. To an index along a divided dimension it adds the part's first one: a scalar
        array after the other arrays."""
        part = tuple(layouts.shard_shape(self.shape, layout))

        def cut(shape: tuple[int, ...]) -> tuple[int, ...]:
            return tuple(m if n == whole else n for n, m, whole in zip(shape, part, self.shape, strict=True))

        sides = [side._replace(shape=cut(side.shape)) for side in self.sides]
        sums = {}
        for k, side in enumerate(self.sides):
            if side.index_along is not None and layout.shape[side.index_along] > 1:
                sums[f"s{k}"] = f"s{len(sides)}"
                sides.append(SideOperand((1,) * len(part), "int32"))
        return self._replace(
            shape=part,
            sides=tuple(sides),
            mask_shape=None if self.mask_shape is None else cut(self.mask_shape),
            load=tuple(expression.with_sums(sums) for expression in self.load),
            store=tuple(expression.with_sums(sums) for expression in self.store),
        )


def _from_json(fields: dict[str, Any]) -> FusedKernel:
    def frozen(a: Any) -> Any:
        return tuple(map(frozen, a)) if isinstance(a, list) else a

    known: dict[str, Any] = {name: tuple(map(Expression.from_json, fields[name])) for name in ("load", "store")}
    known["sides"] = tuple(SideOperand(*map(frozen, side)) for side in fields["sides"])
    return FusedKernel(**{name: frozen(value) for name, value in fields.items()} | known)


# ---- The primitive.

kernel_p = Primitive("fused_kernel")
kernel_p.multiple_results = True


@kernel_p.def_abstract_eval  # type: ignore[untyped-decorator]  # JAX gives it no type
def _(*operands: jax.core.ShapedArray, kernel: FusedKernel) -> list[jax.core.ShapedArray]:
    return [jax.core.ShapedArray(t.shape, t.dtype) for t in kernel.result_types]


def lower(ctx: Any, *operands: Any, kernel: FusedKernel, platform: str) -> Any:
    """A call, in a program for one device or several."""

    def lowered(f: Callable[..., Any]) -> Any:
        return mlir.lower_fun(f, multiple_results=True)(ctx, *operands)

    return partitioning.divided(
        ctx,
        operands,
        {"primitive": kernel_p.name, "platform": platform, "params": {"kernel": kernel}},
        local=lambda: lowered(functools.partial(backend.in_use().call, kernel)),
        by_reference=lambda: lowered(kernel.in_jax),
    )


class _DeviceProgram(division.DeviceProgram):
    """What each device does of a kernel."""

    def __init__(self, kernel: list[Any]) -> None:
        self.kernel = _from_json(dict(zip(FusedKernel._fields, kernel, strict=True)))
        self.axes = self.kernel.axes
        self.dims_with_indices = self.kernel.dims_with_indices

    def on_whole_rows(self, layout: np.ndarray) -> Callable[..., Sequence[jax.Array]]:
        kernel = self.kernel.of_part(layout)

        def on_device(*operands: jax.Array) -> Sequence[jax.Array]:
            operands = self._with_starts(layout, kernel.shape, operands)
            if backend.in_use().reason_for_xla(kernel):
                return kernel.in_jax(*operands)
            return backend.in_use().call(kernel, *operands)

        return on_device

    def on_row_shards(self, layout: np.ndarray, sharded_dims: list[int]) -> Callable[..., Sequence[jax.Array]]:
        kernel = self.kernel.of_part(layout)

        def on_device(*operands: jax.Array) -> Sequence[jax.Array]:
            operands = self._with_starts(layout, kernel.shape, operands)
            normalizer = functools.partial(_normalizer, kernel, operands)

            def operator(op: str, *loaded: jax.Array, axes: tuple[int, ...], **params: Any) -> Any:
                params = {"axes": axes, **params}
                return row_shards.in_divided_program(op, params, self.kernel.shape, layout, sharded_dims, normalizer)(
                    *loaded
                )

            return kernel.in_jax(*operands, operator=operator)

        return on_device

    def _with_starts(
        self, layout: np.ndarray, part: tuple[int, ...], operands: tuple[jax.Array, ...]
    ) -> tuple[jax.Array, ...]:
        """The operands, with the first indices of this device's part after the side arrays (`FusedKernel.of_part`)."""
        n = self.kernel.n_arrays
        dims = (d for d in self.dims_with_indices if layout.shape[d] > 1)
        starts = (row_shards.first_index(layout, part, d).reshape([1] * len(part)) for d in dims)
        return *operands[:n], *starts, *operands[n:]


def _normalizer(
    kernel: FusedKernel,
    operands: tuple[jax.Array, ...],
    x: jax.Array,
    where: jax.Array | None,
    axes: tuple[int, ...],
) -> reference.Normalizer:
    """The maxima and sums of parts of rows of x, which `load` makes: by a kernel that makes x, if there is one."""
    of_rows = kernel._replace(
        op="logsumexp",
        mask_shape=None if where is None else where.shape,
        store=(),
        dtypes=(),
        result_dtype=None,
        n_row_results=2,
        in_place=None,
    )
    if OPERATORS[kernel.op].inputs > 1 or backend.in_use().reason_for_xla(of_rows):
        return reference.logsumexp(x, where, axes)
    mask = () if where is None else (where,)
    return reference.Normalizer(*backend.in_use().call(of_rows, *operands[: kernel.n_arrays], *mask))


def register() -> None:
    division.PROGRAMS[kernel_p.name] = _DeviceProgram

    def rule(ctx: Any, *operands: Any, kernel: FusedKernel) -> Any:
        return lower(ctx, *operands, kernel=kernel, platform="cuda")

    mlir.register_lowering(kernel_p, rule, platform="cuda")
    # In a program that is lowered for several platforms at once, CUDA's part is lowered for the others as well.
    in_jax = mlir.lower_fun(lambda *operands, kernel: kernel.in_jax(*operands), multiple_results=True)
    mlir.register_lowering(kernel_p, in_jax)
