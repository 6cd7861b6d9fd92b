"""The primitive that calls attention's kernels.

In a program for one device that is an FFI call. In a program that XLA divides among several, each of them calls the
kernel for its part of the batch. Where there is no kernel, the same is done in JAX.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import PartitionSpec

from jax_softmax import _kernels, _private
from jax_softmax.devices import division, partitioning
from jax_softmax.fusion.attention.call import Attention, LetteredSide
from jax_softmax.fusion.attention.source import Letters
from jax_softmax.fusion.expressions import Expression
from jax_softmax.primitives import interpreters
from jax_softmax.runtime import cuda
from jax_softmax.runtime.lowering import ATTENTION_TARGET

# Operands: q, k, v; of the backward kernels also the output's cotangent, the rows' numbers as `forward` makes them, and
# delta; then the arrays among the sides.
attention_p = Primitive("softmax_attention")
attention_p.multiple_results = True


@attention_p.def_abstract_eval
def _(*operands, attention, kernel):
    space, types = _Space(attention, kernel), attention.result_types(kernel, *operands[:3])
    return space.sharded(operands, space.operands, types, space.results)


def forward(attention: Attention, q, k, v, *arrays):
    """The output, and two numbers of each row for the backward kernels: its pivot, and the logarithm to base 2 of the
    sum of exp(score - pivot). `arrays`: those among the sides."""
    return attention_p.bind(q, k, v, *_of_kernel(attention, "forward", arrays), attention=attention, kernel="forward")


def delta(attention: Attention, o, o_cotangent):
    """The sum of o times its cotangent over features."""
    letters = attention.letters
    return jnp.einsum(f"{letters.o},{letters.o}->{letters.rows}", *(a.astype(jnp.float32) for a in (o, o_cotangent)))


def backward(attention: Attention, q, k, v, o_cotangent, rows, delta, *arrays):
    """dq, dk, dv, and what is written of the scores' cotangents, if anything is."""
    operands = q, k, v, o_cotangent, rows, delta, *arrays
    (dq, *written), (dk, dv) = (
        attention_p.bind(*operands, attention=attention, kernel=name) for name in ("queries", "keys")
    )
    return dq, dk, dv, *written


def with_sink(attention: Attention, o, rows, sink):
    """The output and the rows' numbers where a sink is beside the scores (`rows.py`), and the sink's weights."""
    letters, log_2 = attention.letters, float(np.log(2))
    distance = (rows[..., 0] - sink.astype(jnp.float32)) + rows[..., 1] * log_2  # both may be as large as fills
    factor = jnp.transpose(jax.nn.sigmoid(distance), [letters.rows.index(c) for c in letters.o[:-1]])
    o = (o.astype(jnp.float32) * factor[..., None]).astype(o.dtype)
    rows = jnp.stack([rows[..., 0], rows[..., 1] - jax.nn.log_sigmoid(distance) / log_2], -1)
    return o, rows, jax.nn.sigmoid(-distance)


def _of_kernel(attention, kernel, arrays):
    """The arrays among the sides that a kernel reads."""
    return arrays[: sum(side.dtype != "index" for side in attention.sides_of(kernel))]


def can_run() -> bool:
    """Whether the GPUs that are here have the instructions; True where there are none, as the program is for others."""
    gpus = [device for device in jax.local_devices() if device.platform == "gpu"]
    return not gpus or (cuda.availability() is None and all(float(gpu.compute_capability) >= 8 for gpu in gpus))


# ---- Lowering


def ffi_call(*operands, attention: Attention, kernel: str):
    """The FFI call, whose kernel begins to be made for the GPUs that are here."""
    plan, types, operands = plan_and_operands(attention, kernel, *operands)
    for device in jax.local_devices():
        if device.platform == "gpu":
            _kernels.jit_prepare(plan.code, plan.plan, int(device.compute_capability.replace(".", "")))
    numbers = {"blocks": plan.blocks, "threads": plan.threads, "shared_bytes": plan.shared_bytes}
    attributes = {name: np.int64(n) for name, n in (numbers | {"version": _kernels.CALL_VERSION}).items()}
    return jax.ffi.ffi_call(ATTENTION_TARGET, types)(*operands, code=plan.code, plan=plan.plan, **attributes)


def plan_and_operands(attention: Attention, kernel: str, q, k, v, *rest):
    """A kernel's plan, the types of its results, and its operands: the primitive's ones and, if there are masks, the
    bounds of the steps that blocks visit, before the arrays."""
    extents, n = attention.extents(q, k, v), 0 if kernel == "forward" else 3
    bounds = [] if attention.letters_of_bounds is None else [attention.bounds(kernel, extents, rest[n:])]
    plan = attention.plan(kernel, q.dtype.name, extents)
    return plan, attention.result_types(kernel, q, k, v), [q, k, v, *rest[:n], *bounds, *rest[n:]]


# ---- On several devices. There all operands and results of a call have all letters as dimensions, with an extent of 1
# for those that they lack: so XLA sees which dimensions are the same.

divided_p = Primitive("softmax_attention_divided")
divided_p.multiple_results = True


class _Space:
    """The letters of a call, and those of its operands and results; n are the two numbers of a row."""

    def __init__(self, attention: Attention, kernel: str):
        letters = attention.letters
        self.attention, self.kernel = attention, kernel
        self.dims = letters.batch + "ijden"
        of_backward = [] if kernel == "forward" else [letters.o, letters.rows + "n", letters.rows]
        arrays = [side.letters for side in attention.sides_of(kernel) if side.dtype != "index"]
        self.operands = [*letters, *of_backward, *arrays]
        self.results = attention.result_letters(kernel)

    def expanded(self, arrays, letters):
        """Arrays with dimensions for all letters."""

        def expand(a, of):
            extents = dict(zip(of, a.shape, strict=True))
            order = sorted(range(a.ndim), key=lambda k: self.dims.index(of[k]))
            return jnp.transpose(a, order).reshape([extents.get(c, 1) for c in self.dims])

        return [expand(a, of) for a, of in zip(arrays, letters, strict=True)]

    def contracted(self, arrays, letters):
        """The inverse."""

        def contract(a, of):
            own = [c for c in self.dims if c in of]
            a = a.reshape([a.shape[self.dims.index(c)] for c in own])
            return jnp.transpose(a, [own.index(c) for c in of])

        return [contract(a, of) for a, of in zip(arrays, letters, strict=True)]

    def sharded(self, avals, letters, types, of_results):
        """The results' types. In explicit mode each letter is sharded as in the first operand in which it is."""
        names: dict = {}
        for aval, of in zip(avals, letters, strict=True):
            for c, name in zip(of, aval.sharding.spec, strict=True):
                names[c] = names.get(c) or name
        q = avals[0]  # whose type also says which mesh axes it varies over

        def sharded_type(type_, of):
            sharding = q.sharding.update(spec=PartitionSpec(*(names.get(c) for c in of)))
            return q.update(shape=type_.shape, dtype=type_.dtype, weak_type=False, sharding=sharding)

        return [sharded_type(type_, of) for type_, of in zip(types, of_results, strict=True)]

    def apply(self, f, *operands):
        """The expanded results of a function of the contracted operands."""
        found = f(*self.contracted(operands, self.operands), attention=self.attention, kernel=self.kernel)
        return self.expanded(found, self.results)


def _in_jax(*operands, attention, kernel):
    return attention.in_jax(kernel, *operands)


def _in_space(*operands, attention, kernel):
    """A call by `divided_p`. Indices along the batch are arrays there: each device has its part of them."""
    extents, rest, sides = attention.extents(*operands[:3]), list(operands), []
    given = [rest.pop(0) for _ in range(3 if kernel == "forward" else 6)]
    for side in attention.sides_of(kernel):
        of_batch = side.dtype == "index" and side.letters in attention.letters.batch
        sides.append(LetteredSide(side.letters, "int32") if of_batch else side)
        if of_batch:
            given.append(jnp.arange(extents[side.letters], dtype=jnp.int32))
        elif side.dtype != "index":
            given.append(rest.pop(0))
    space = _Space(attention._replace(sides=(*sides, *attention.sides[len(sides) :])), kernel)
    shape = tuple((extents | {"n": 2})[c] for c in space.dims)
    found = divided_p.bind(
        *space.expanded(given, space.operands), attention=space.attention, kernel=kernel, shape=shape
    )
    return space.contracted(found, space.results)


@divided_p.def_abstract_eval
def _(*operands, attention, kernel, shape):
    space, dtype = _Space(attention, kernel), operands[0].dtype
    shapes = [tuple(n if c in of else 1 for c, n in zip(space.dims, shape, strict=True)) for of in space.results]
    types = map(jax.ShapeDtypeStruct, shapes, attention.result_dtypes(kernel, dtype))
    return space.sharded(operands, [space.dims] * len(operands), list(types), [space.dims] * len(shapes))


class _DeviceProgram(division.DeviceProgram):
    """What each device does: the same of its part of the batch."""

    axes = dims_with_indices = ()

    def __init__(self, attention, kernel):
        known = dict(zip(Attention._fields, attention, strict=True))
        for name in ("score", "weight", "score_transposed", "weight_transposed", "written"):
            known[name] = known[name] and Expression.from_json(known[name])
        known |= {"letters": Letters(*known["letters"]), "sides": tuple(LetteredSide(*side) for side in known["sides"])}
        self.space = _Space(Attention(**known), kernel)
        self.undivided = tuple(self.space.dims.index(c) for c in "ijden")

    def on_whole_rows(self, layout):
        return lambda *operands: self.space.apply(attention_p.bind, *operands)


def lower(ctx, *operands, attention, kernel, platform):
    """A call, in a program for one device or several."""
    params = {"attention": attention, "kernel": kernel}
    f = ffi_call if _private.devices_of(ctx) == 1 else _in_space
    return mlir.lower_fun(lambda *a: f(*a, **params), multiple_results=True)(ctx, *operands)


def lower_divided(ctx, *operands, attention, kernel, shape, platform):
    def by(f):
        space = _Space(attention, kernel)
        made = mlir.lower_fun(lambda *a: space.apply(f, *a), multiple_results=True)
        return lambda: made(ctx, *operands)

    config = {"primitive": divided_p.name, "platform": platform, "params": {"attention": attention, "kernel": kernel}}
    return partitioning.divided(ctx, operands, config, by(attention_p.bind), by(_in_jax), shape)


def register() -> None:
    jax.ffi.register_ffi_target(ATTENTION_TARGET, _kernels.attention_handlers(), platform="CUDA")
    attention_p.def_impl(interpreters.implementation(attention_p))
    division.PROGRAMS[divided_p.name] = _DeviceProgram
    for primitive, rule in ((attention_p, lower), (divided_p, lower_divided)):
        mlir.register_lowering(primitive, functools.partial(rule, platform="cuda"), platform="cuda")
    # In a program that is lowered for several platforms at once, CUDA's part is lowered for the others as well.
    mlir.register_lowering(attention_p, mlir.lower_fun(_in_jax, multiple_results=True))
