"""A kernel with expressions before and after its operator, and the primitive that calls it.

In a program for one device that is an FFI call. In a program that XLA divides among several, each of them calls the
kernel for its part. Where devices have parts of rows, and where there is no kernel, the same is done in JAX.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import mlir

from jax_softmax.devices import division, layouts, partitioning, row_shards
from jax_softmax.fusion import printing
from jax_softmax.fusion.expressions import Expression
from jax_softmax.primitives import reference
from jax_softmax.primitives.operators import OPERATORS
from jax_softmax.primitives.records import apply
from jax_softmax.runtime import judge
from jax_softmax.runtime.lowering import TARGET, described


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

    def _text_of_load(self):
        lines = map(printing.text_of, self.load)
        lines = ["" if line == f"x{k}" else line for k, line in enumerate(lines)]
        return "\n".join(lines) if any(lines) else ""

    def _text_of_store(self):
        lines = [
            printing.text_of(expression, stored_as=dtype, result_dtype=self.result_dtype)
            for expression, dtype in zip(self.store, self.dtypes, strict=True)
        ]
        lines = ["" if line == "y" else line for line in lines]
        return "\n".join(lines) if any(lines) or len(lines) > 1 else ""

    def _described(self):
        return described(
            *(self.op, self.shape, self.axes, self.dtype, self.mask_shape, *(self.dtypes[:1] or [None])),
            more_results=self.dtypes[1:],
            arrays=" ".join("array" if s.index_along is None else f"index:{s.index_along}" for s in self.sides),
            beside=[(side.shape, side.dtype) for side in self.sides if side.index_along is None],
            load=self._text_of_load(),
            store=self._text_of_store(),
        )

    def why_xla(self) -> str:
        """Why XLA is as fast on such rows; "" if it is not. Raises a ValueError if there is no such kernel."""
        return judge.why_xla_makes(self._described())

    def start_compiling(self) -> None:
        """For this machine's GPUs, so that kernels are compiled while the rest of a program is rewritten."""
        judge.start_compiling(self._described())

    @property
    def result_types(self) -> list[jax.ShapeDtypeStruct]:
        rows = tuple(1 if d in self.axes else n for d, n in enumerate(self.shape))
        of_elements = [jax.ShapeDtypeStruct(self.shape, dtype) for dtype in self.dtypes]
        return of_elements + [jax.ShapeDtypeStruct(rows, jnp.float32)] * self.n_row_results

    def call(self, *operands):
        """The FFI call."""
        self.start_compiling()  # on several devices each has a kernel for its part
        described_call, types = self._described(), self.result_types
        n = len(types)
        if scratch := judge.scratch_bytes(described_call):
            types.append(jax.ShapeDtypeStruct((scratch,), jnp.uint8))
        aliases = {} if self.in_place is None else {self.in_place: 0}
        ffi_call = jax.ffi.ffi_call(TARGET, types, input_output_aliases=aliases)
        return ffi_call(*operands, **described_call["attributes"])[:n]

    def in_jax(self, *operands, operator=apply):
        """The same in JAX. `operator` is called with what is loaded, instead of the operator."""
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
        return [side.index_along for side in self.sides if side.index_along is not None]

    def of_part(self, layout) -> "FusedKernel":
        """The kernel for a device's part. To an index along a divided dimension it adds the part's first one: a scalar
        array after the other arrays."""
        part = tuple(layouts.shard_shape(self.shape, layout))

        def cut(shape):
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


def _from_json(fields) -> FusedKernel:
    def frozen(a):
        return tuple(map(frozen, a)) if isinstance(a, list) else a

    known: dict[str, Any] = {name: tuple(map(Expression.from_json, fields[name])) for name in ("load", "store")}
    known["sides"] = tuple(SideOperand(*map(frozen, side)) for side in fields["sides"])
    return FusedKernel(**{name: frozen(value) for name, value in fields.items()} | known)


# ---- The primitive.

kernel_p = Primitive("fused_kernel")
kernel_p.multiple_results = True


@kernel_p.def_abstract_eval
def _(*operands, kernel):
    return [jax.core.ShapedArray(t.shape, t.dtype) for t in kernel.result_types]


def lower(ctx, *operands, kernel, platform):
    """A call, in a program for one device or several."""

    def lowered(f):
        return mlir.lower_fun(f, multiple_results=True)(ctx, *operands)

    return partitioning.divided(
        ctx,
        operands,
        {"primitive": kernel_p.name, "platform": platform, "params": {"kernel": kernel}},
        local=lambda: lowered(kernel.call),
        by_reference=lambda: lowered(kernel.in_jax),
    )


class _DeviceProgram(division.DeviceProgram):
    """What each device does of a kernel."""

    def __init__(self, kernel):
        self.kernel = _from_json(dict(zip(FusedKernel._fields, kernel, strict=True)))
        self.axes = self.kernel.axes
        self.dims_with_indices = self.kernel.dims_with_indices

    def on_whole_rows(self, layout):
        kernel = self.kernel.of_part(layout)

        def on_device(*operands):
            operands = self._with_starts(layout, kernel.shape, operands)
            return kernel.in_jax(*operands) if kernel.why_xla() else kernel.call(*operands)

        return on_device

    def on_row_shards(self, layout, sharded_dims):
        kernel = self.kernel.of_part(layout)

        def on_device(*operands):
            operands = self._with_starts(layout, kernel.shape, operands)
            normalizer = functools.partial(_normalizer, kernel, operands)

            def operator(op, *loaded, axes, **params):
                params = {"axes": axes, **params}
                return row_shards.in_divided_program(op, params, self.kernel.shape, layout, sharded_dims, normalizer)(
                    *loaded
                )

            return kernel.in_jax(*operands, operator=operator)

        return on_device

    def _with_starts(self, layout, part, operands):
        """The operands, with the first indices of this device's part after the side arrays (`FusedKernel.of_part`)."""
        n = self.kernel.n_arrays
        dims = (d for d in self.dims_with_indices if layout.shape[d] > 1)
        starts = (row_shards.first_index(layout, part, d).reshape([1] * len(part)) for d in dims)
        return *operands[:n], *starts, *operands[n:]


def _normalizer(kernel, operands, x, where, axes):
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
    if OPERATORS[kernel.op].inputs > 1 or of_rows.why_xla():
        return reference.logsumexp(x, where, axes)
    return reference.Normalizer(*of_rows.call(*operands[: kernel.n_arrays], *(() if where is None else (where,))))


def register() -> None:
    division.PROGRAMS[kernel_p.name] = _DeviceProgram

    def rule(ctx, *operands, kernel):
        return lower(ctx, *operands, kernel=kernel, platform="cuda")

    mlir.register_lowering(kernel_p, rule, platform="cuda")
    # In a program that is lowered for several platforms at once, CUDA's part is lowered for the others as well.
    in_jax = mlir.lower_fun(lambda *operands, kernel: kernel.in_jax(*operands), multiple_results=True)
    mlir.register_lowering(kernel_p, in_jax)
