"""The primitive that calls attention's kernels.

In a program for one device that is an FFI call. In a program that XLA divides among several, each of them calls the
kernel for its part of the batch or of the queries, with all keys. Where there is no kernel, the same is done in JAX.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import PartitionSpec

from jax_softmax import _kernels, _private
from jax_softmax.devices import division, layouts, partitioning
from jax_softmax.fusion.attention.call import Attention, SideCotangent
from jax_softmax.fusion.attention.letters import LetteredSide, Letters
from jax_softmax.fusion.attention.lost import rounded_and_lost, unrounded
from jax_softmax.fusion.program.expressions import Expression
from jax_softmax.primitives import interpreters
from jax_softmax.primitives.types import Arrays, Aval, Dtype, Shape
from jax_softmax.runtime import cuda
from jax_softmax.runtime.lowering import ATTENTION_TARGET

# Of one kernel or several with the same operands. These are q, k, v; of the backward kernels also the output's
# cotangent, the rows' numbers as `forward` makes them, and delta; then the arrays among the sides.
attention_p = Primitive("softmax_attention")
attention_p.multiple_results = True


@attention_p.def_abstract_eval  # type: ignore[untyped-decorator]  # JAX gives it no type
def _(*operands: Aval, attention: Attention, kernels: tuple[str, ...]) -> list[Aval]:
    space = _Space(attention, kernels)
    types = [type_ for kernel in kernels for type_ in attention.result_types(kernel, *operands[:3])]
    return space.sharded(operands, space.given, types, space.letters_of_results(operands[0].dtype))


def forward(attention: Attention, *operands: Array) -> Arrays:
    """The output of q, k and v, and two numbers of each row for the backward kernels: its pivot, and the logarithm to
    base 2 of the sum of exp(score - pivot). If there is a backward pass, also what an output of 16 bits lost by
    rounding. Last the output's tangent, if there is one. Operands: q, k, v; their tangents, if the output has one; the
    arrays among the sides."""
    n = (6 if attention.score_tangent else 3) + sum(side.dtype != "index" for side in attention.sides_of("forward"))
    return attention_p.bind(*operands[:n], attention=attention, kernels=(attention.output,))


def delta(attention: Attention, o: Array, lost: Sequence[Array], o_cotangent: Array) -> Array:
    """The sum of o, as it was before it was rounded, times its cotangent over features. Of a row with one large weight
    the scores' cotangents are the small difference between two numbers, of which this is one."""
    letters, products = attention.letters, unrounded(o, *lost) * o_cotangent.astype(jnp.float32)
    return jnp.transpose(products.sum(-1), [letters.o.index(c) for c in letters.rows])


def backward(attention: Attention, wanted: set[str | int], *operands: Array, delta: Array) -> dict[str | int, Array]:
    """The cotangents of the primitive's operands: dq, dk and dv as far as they are wanted, and those of the sides by
    number; and delta, exact if a kernel makes it. The kernels of the first ones are one call where they can be, so that
    devices exchange operands once. `delta`: without what log-sum-exps add."""
    names = {"queries": ("dq",), "keys": ("dk", "dv")}
    of_sides = {kernel: attention.side_cotangents_of(kernel) for kernel in names}
    kernels = tuple(kernel for kernel, own in names.items() if of_sides[kernel] or wanted.intersection(own))
    made: dict[Any, Array] = {}

    def error_of_delta() -> Array:
        """0 in rows that see nothing, whose weights are NaN."""
        error = made[attention.exact_delta] - delta
        return jnp.where(jnp.isfinite(error), error, 0)

    # Delta's error is left in sums of the scores' cotangents. The kernel of queries makes an exact delta as well. From
    # its sums over keys the error is subtracted; of sums over queries the kernel of keys gets the exact delta.
    calls = [(kernel,) for kernel in kernels] if attention.makes_exact_delta and of_sides["keys"] else [kernels]
    for own in filter(None, calls):
        found = iter(attention_p.bind(*operands, attention=attention, kernels=own))
        made |= {name: next(found) for kernel in own for name in (*names[kernel], *of_sides[kernel])}
        if attention.makes_exact_delta and own == ("queries",):
            q, k, v, o_cotangent, rows, whole_delta, *sides = operands
            operands = q, k, v, o_cotangent, rows, whole_delta + error_of_delta(), *sides

    def side_cotangent(one: SideCotangent) -> Array:
        if one.kernel == "scores":
            alone = attention._replace(side_cotangents=(one,))
            (parts,) = attention_p.bind(*operands, attention=alone, kernels=("scores",))
            return parts.sum(0) if one.parts > 1 else parts[0]
        if one.kernel == "queries" and one.is_of_cotangents:
            return made[one] - error_of_delta() * made[one.of_weights]
        return made[one]

    gradients = {name: made[name] for name in ("dq", "dk", "dv") if name in made}
    gradients["delta"] = delta + error_of_delta() if attention.makes_exact_delta else delta
    return gradients | {k: side_cotangent(one) for k, one in enumerate(attention.side_cotangents)}


def with_sink(attention: Attention, sink: Array, o: Array, rows: Array, *lost: Array) -> tuple[Arrays, Array]:
    """What `forward` gives where a sink is beside the scores (`rows.py`), and the sink's weights."""
    letters, log_2 = attention.letters, float(np.log(2))
    distance = (rows[..., 0] - sink.astype(jnp.float32)) + rows[..., 1] * log_2  # both may be as large as fills
    of_scores = jnp.transpose(jax.nn.sigmoid(distance), [letters.rows.index(c) for c in letters.o[:-1]])
    scaled, *lost_of_scaled = rounded_and_lost(unrounded(o, *lost) * of_scores[..., None], o.dtype)
    rows = jnp.stack([rows[..., 0], rows[..., 1] - jax.nn.log_sigmoid(distance) / log_2], -1)
    return (scaled, rows, *lost_of_scaled)[: 2 + len(lost)], jax.nn.sigmoid(-distance)


def normalizer(rows: Array) -> tuple[Array, Array]:
    """The rows' numbers as the operator logsumexp has them, a maximum and a sum, but for another pivot than the
    maximum. The sum of rows that see nothing is 0."""
    pivot, total = rows[..., 0], jnp.where(rows[..., 1] == jnp.inf, 0, jnp.exp2(rows[..., 1]))
    return pivot, jnp.where(pivot == jnp.inf, jnp.inf, total)


def padded(n_features: int) -> int:
    """The number of features, rounded up to one that kernels have, unless it is too large for them."""
    return -(-n_features // _kernels.ATTENTION_FEATURES_AT_ONCE) * _kernels.ATTENTION_FEATURES_AT_ONCE


def can_run() -> bool:
    """Whether the GPUs that are here have the instructions; True where there are none, as the program is for others."""
    gpus = [device for device in jax.local_devices() if device.platform == "gpu"]
    return not gpus or (cuda.availability() is None and all(float(gpu.compute_capability) >= 8 for gpu in gpus))


# ---- Lowering


def ffi_call(*operands: jax.Array, attention: Attention, kernel: str) -> Arrays:
    """The FFI call, whose kernel begins to be made for the GPUs that are here."""
    call, types, with_bounds = described_call(attention, kernel, *operands)
    for device in _kernels.devices_here():
        step = _kernels.plan_attention(call["operands"], call["results"], call["attributes"], *device)
        _kernels.jit_prepare(step["code"], step["plan"], device[0])
    return jax.ffi.ffi_call(ATTENTION_TARGET, types)(*with_bounds, **call["attributes"])


def described_call(
    attention: Attention, kernel: str, q: jax.Array, k: jax.Array, v: jax.Array, *rest: jax.Array
) -> tuple[dict[str, Any], list[jax.ShapeDtypeStruct], Arrays]:
    """A kernel's custom call as `_kernels.plan_attention` takes it, the types of its results, and its operands: the
    primitive's ones and, if there are masks, their bounds before the arrays."""
    extents, n = attention.extents(q, k, v), 0 if kernel == "forward" else 3
    visible = attention.visible
    bounds = [] if visible.letters_of_bounds is None else [visible.bounds(kernel, extents, rest[n:])]
    operands, types = [q, k, v, *rest[:n], *bounds, *rest[n:]], attention.result_types(kernel, q, k, v)
    call = {
        "operands": [(list(a.shape), a.dtype.name) for a in operands],
        "results": [(list(a.shape), a.dtype.name) for a in types],
        "attributes": attention.attributes(kernel),
    }
    return call, types, operands


# ---- On several devices. There all operands and results of a call have all letters as dimensions, with an extent of 1
# for those that they lack: so XLA sees which dimensions are the same.

divided_p = Primitive("softmax_attention_divided")
divided_p.multiple_results = True


class _Space:
    """The letters of a call, and those of its operands and results."""

    def __init__(self, attention: Attention, kernels: tuple[str, ...]) -> None:
        letters, kernel = attention.letters, kernels[0]
        self.attention, self.kernels = attention, kernels
        self.dims = letters.q[:-1].replace("i", "ij") + "denp"  # in q's order: then nothing is transposed to travel
        beside = {"forward": (), "tangents": letters}.get(kernel, (letters.o, letters.rows + "n", letters.rows))
        sides, own = attention.sides_of(kernel), [*letters, *beside]
        self.given = [*own, *(side.letters for side in sides if side.dtype != "index")]  # operands of `attention_p`
        # To `divided_p` the indices of rows are arrays as well: each device has its part of them.
        self.sides = [side for side in sides if side.dtype != "index" or side.letters in letters.rows]
        self.operands = [*own, *(side.letters for side in self.sides)]

    def results(self, dtype: Dtype) -> list[tuple[str, Any]]:
        return [result for kernel in self.kernels for result in self.attention.results(kernel, dtype)]

    def letters_of_results(self, dtype: Dtype) -> list[str]:
        return [of for of, _ in self.results(dtype)]

    def expanded(self, arrays: Iterable[Array], letters: Sequence[str]) -> list[Array]:
        """Arrays with dimensions for all letters."""

        def expand(a: Array, of: str) -> Array:
            extents = dict(zip(of, a.shape, strict=True))
            order = sorted(range(a.ndim), key=lambda k: self.dims.index(of[k]))
            return jnp.transpose(a, order).reshape([extents.get(c, 1) for c in self.dims])

        return [expand(a, of) for a, of in zip(arrays, letters, strict=True)]

    def contracted(self, arrays: Iterable[Array], letters: Sequence[str]) -> list[Array]:
        """Arrays without the dimensions of letters that are not theirs: the inverse of `expanded`."""

        def contract(a: Array, of: str) -> Array:
            own = [c for c in self.dims if c in of]
            a = a.reshape([a.shape[self.dims.index(c)] for c in own])
            return jnp.transpose(a, [own.index(c) for c in of])

        return [contract(a, of) for a, of in zip(arrays, letters, strict=True)]

    def sharded(
        self, avals: Sequence[Aval], letters: list[str], types: list[jax.ShapeDtypeStruct], of_results: list[str]
    ) -> list[Aval]:
        """The results' types. In explicit mode each letter is sharded as in the first operand in which it is."""
        names: dict[str, Any] = {}
        for aval, of in zip(avals, letters, strict=True):
            for c, name in zip(of, aval.sharding.spec, strict=True):
                names[c] = names.get(c) or name
        q = avals[0]  # whose type also says which mesh axes it varies over

        def sharded_type(type_: jax.ShapeDtypeStruct, of: str) -> Aval:
            spec = (names.get(c) if n > 1 else None for c, n in zip(of, type_.shape, strict=True))
            sharding = q.sharding.update(spec=PartitionSpec(*spec))
            return q.update(shape=type_.shape, dtype=type_.dtype, weak_type=False, sharding=sharding)

        return [sharded_type(type_, of) for type_, of in zip(types, of_results, strict=True)]

    def apply(self, f: Callable[..., Arrays], *operands: Array, divided: Sequence[str] = ()) -> list[Array]:
        """The expanded results of a function of the contracted operands. Indices along divided letters are arrays."""

        def is_array(side: LetteredSide) -> bool:
            return side.dtype != "index" or side.letters in divided

        given = self.contracted(operands, self.operands)
        n = len(given) - len(self.sides)
        arrays = [a for a, side in zip(given[n:], self.sides, strict=True) if is_array(side)]
        sides = [
            LetteredSide(side.letters, "int32") if side.dtype == "index" and is_array(side) else side
            for side in self.attention.sides
        ]
        found = f(*given[:n], *arrays, attention=self.attention._replace(sides=tuple(sides)), kernels=self.kernels)
        return self.expanded(found, self.letters_of_results(operands[0].dtype))


def _in_jax(*operands: Array, attention: Attention, kernels: tuple[str, ...]) -> list[Array]:
    return [a for kernel in kernels for a in attention.in_jax(kernel, *operands)]


def _by_ffi(*operands: Array, attention: Attention, kernels: tuple[str, ...]) -> list[Array]:
    return [a for kernel in kernels for a in ffi_call(*operands, attention=attention, kernel=kernel)]


def _in_space(*operands: Array, attention: Attention, kernels: tuple[str, ...]) -> list[Array]:
    """A call by `divided_p`."""
    extents, space = attention.extents(*operands[:3]), _Space(attention, kernels)
    n = len(space.operands) - len(space.sides)
    given, arrays = list(operands[:n]), iter(operands[n:])
    for side in space.sides:
        is_index = side.dtype == "index"
        given.append(jnp.arange(extents[side.letters], dtype=jnp.int32) if is_index else next(arrays))
    shape = tuple(attention.sizes(kernels[0], extents)[c] for c in space.dims)
    found = divided_p.bind(*space.expanded(given, space.operands), attention=attention, kernels=kernels, shape=shape)
    return space.contracted(found, space.letters_of_results(operands[0].dtype))


@divided_p.def_abstract_eval  # type: ignore[untyped-decorator]  # JAX gives it no type
def _(*operands: Aval, attention: Attention, kernels: tuple[str, ...], shape: Shape) -> list[Aval]:
    space = _Space(attention, kernels)
    results = space.results(operands[0].dtype)
    shapes = [tuple(n if c in of else 1 for c, n in zip(space.dims, shape, strict=True)) for of, _ in results]
    types = [jax.ShapeDtypeStruct(shape, dtype) for shape, (_, dtype) in zip(shapes, results, strict=True)]
    return space.sharded(operands, [space.dims] * len(operands), types, [space.dims] * len(types))


class _DeviceProgram(division.DeviceProgram):
    """What each device does: the same of its part of the batch or of the queries."""

    axes = dims_with_indices = ()

    def __init__(self, attention: Sequence[Any], kernels: Sequence[str]) -> None:
        known = dict(zip(Attention._fields, attention, strict=True))
        for name in ("score", "weight", "score_transposed", "weight_transposed", "score_tangent"):
            known[name] = known[name] and Expression.from_json(known[name])
        known |= {"letters": Letters(*known["letters"]), "sides": tuple(LetteredSide(*side) for side in known["sides"])}
        of_sides = ((Expression.from_json(expression), *rest) for expression, *rest in known["side_cotangents"])
        known["side_cotangents"] = tuple(SideCotangent(*one) for one in of_sides)
        self.space = _Space(Attention(**known), tuple(kernels))
        letters, at = self.space.attention.letters, self.space.dims.index
        self.gathered, self.undivided = (tuple(map(at, of)) for of in ("j", "denp"))
        # Each device has as much to do if it has some heads of all queries, also under a causal mask. An all-to-all of
        # q, k, v and o does that, but would be of arrays of queries x keys as well.
        arrays = [*self.space.operands, *self.space.letters_of_results(np.dtype(np.float32))]
        if not any({"i", "j"} <= set(of) for of in arrays):
            self.exchangeable = at("i"), list(map(at, letters.batch_of_keys))

    def on_whole_rows(self, layout: layouts.Layout) -> Callable[..., list[Array]]:
        divided = [c for c, n in zip(self.space.dims, layout.shape[:-1], strict=True) if n > 1]
        return functools.partial(self.space.apply, attention_p.bind, divided=divided)


def lower(ctx: mlir.LoweringRuleContext, *operands: Any, platform: str, **params: Any) -> Any:
    """A call, in a program for one device or several."""
    f = _by_ffi if _private.devices_of(ctx) == 1 else _in_space
    return mlir.lower_fun(functools.partial(f, **params), multiple_results=True)(ctx, *operands)


def lower_divided(ctx: mlir.LoweringRuleContext, *operands: Any, shape: Shape, platform: str, **params: Any) -> Any:
    def by(f: Callable[..., Arrays]) -> Callable[[], Any]:
        space = _Space(**params)
        made = mlir.lower_fun(lambda *a: space.apply(f, *a), multiple_results=True)
        return lambda: made(ctx, *operands)

    config = {"primitive": divided_p.name, "platform": platform, "params": params}
    return partitioning.divided(ctx, operands, config, by(attention_p.bind), by(_in_jax), shape)


def register() -> None:
    jax.ffi.register_ffi_target(ATTENTION_TARGET, _kernels.attention_handlers(), platform="CUDA")
    attention_p.def_impl(interpreters.implementation(attention_p))
    division.PROGRAMS[divided_p.name] = _DeviceProgram
    for primitive, rule in ((attention_p, lower), (divided_p, lower_divided)):
        mlir.register_lowering(primitive, functools.partial(rule, platform="cuda"), platform="cuda")
    # In a program that is lowered for several platforms at once, CUDA's part is lowered for the others as well.
    mlir.register_lowering(attention_p, mlir.lower_fun(_in_jax, multiple_results=True))
