"""What the tests share: the functions under test, what plans are made for, and makers of inputs."""

import contextlib
import functools
import gc
import math
import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from by_numpy import by_numpy
from oracles import (
    check,
    reference,
    reference_vjp,
)

import jax_softmax
from jax_softmax import _kernels
from jax_softmax.runtime import cuda, judge
from jax_softmax.runtime.kernel_spec import attributes, described

OPERATORS = {"softmax": jax_softmax.softmax, "log_softmax": jax_softmax.log_softmax}
CUSTOM_VJPS = {"softmax": jax_softmax.softmax_vjp, "log_softmax": jax_softmax.log_softmax_vjp}
JAX_NN = {"softmax": jax.nn.softmax, "log_softmax": jax.nn.log_softmax}
NAMES = tuple(OPERATORS)
every_name = pytest.mark.parametrize("name", NAMES)
DTYPES = ("float16", "bfloat16", "float32", "float64")
ON_CUDA = DTYPES[:3]  # float64 is left to XLA there
NARROW = ("float8_e4m3fn", "float8_e5m2", "int8", "uint8")  # that are computed as float32


def device(compute_capability, multiprocessors, shared_kilobytes, largest_cluster):
    return {
        "compute_capability": compute_capability,
        "multiprocessors": multiprocessors,
        "shared_memory_per_block": shared_kilobytes << 10,
        "largest_cluster": largest_cluster,
    }


# What plans are made for.
H200 = device(90, 132, 227, 16)
DEVICES = {
    "T4": device(75, 40, 64, 1),
    "A100": device(80, 108, 163, 1),
    "H200": H200,
    "RTX 3090": device(86, 82, 99, 1),
    "B200": device(100, 148, 227, 16),
    "RTX 5090": device(120, 170, 99, 8),
}
# The kernels: those that have results for rows, the others, and those that read two arrays of one shape.
KERNELS = _kernels.OPERATORS
ROW_OPS = tuple(op for op, facts in KERNELS.items() if facts["row_results"])
OPS = tuple(op for op in KERNELS if op not in ROW_OPS)
TWO_OPERANDS = tuple(op for op, facts in KERNELS.items() if facts["inputs"] == 2)


# Arrays and axes for functions that have results for rows.
VIEWS_OF_ROWS = [
    ((7, 32), -1),
    ((5, 1000), 1),
    ((3, 50257), -1),
    ((300, 7), -1),
    ((6, 130), 0),
    ((3, 33, 24), 1),
    ((4, 5, 6), (0, 2)),
    ((4, 5), None),
    ((9, 1), 1),
    ((11,), 0),
    ((2, 3), ()),
]


class Way(NamedTuple):
    """A view that leads to a schedule: on a GPU as it is, or a smaller one."""

    shape: tuple[int, ...]
    axes: tuple[int, ...]
    small: bool = False

    @property
    def limits(self):
        return {"shared_memory_per_block": 64 << 10, "largest_cluster": 1} if self.small else {}

    def plan(self, op="softmax", dtype="bfloat16", mask_shape=None, on=H200, **fused):
        on = {**on, **{key: min(on[key], value) for key, value in self.limits.items()}}
        return plan(self.shape, self.axes, op, dtype, mask_shape, on, **fused)


SCHEDULES = {"registers", "staged", "chunks", "ring", "tile", "twice"}
KERNEL_NAMES = {
    *("registers", "staged", "clear_words", "chunks", "ring", "tile", "whole_tiles", "combine_pieces"),
    *("sum_pieces", "finish_pieces", "sum_tile_pieces", "finish_tile_pieces"),
}
# Together they reach them all: test_schedules.py holds them to it.
WAYS = [
    Way((37, 32), (1,)),
    Way((5, 1999), (1,)),
    Way((5, 8192), (1,)),
    Way((5, 16, 12, 16), (1, 3)),
    Way((300, 7), (1,)),
    Way((40, 65), (1,)),
    Way((67, 8191), (1,)),
    Way((5, 50257), (1,)),
    Way((63, 3, 1023), (0, 2)),
    Way((2, 300_000), (1,)),
    Way((33, 300_001), (1,)),
    Way((3, 300, 7), (1,)),
    Way((5, 130), (0,)),
    Way((9, 64, 256), (1,)),
    Way((2, 3000, 96), (1,)),
    Way((12, 5, 13, 33), (0, 2)),
    Way((2, 300_001), (1,), small=True),
    Way((2, 300_000), (1,), small=True),
    Way((2, 30_000, 33), (1,), small=True),
    Way((2, 30_000, 64), (1,), small=True),
    Way((1, 301, 2, 33, 33), (1, 3), small=True),
]


def kernel_names(plan):
    """The functions of csrc/device that the plan's kernels call."""
    return [re.search(r"using namespace jax_softmax::device;\s*(\w+)", step["code"])[1] for step in plan["steps"]]


@contextlib.contextmanager
def limited(**limits):
    """Plans are made as if every GPU had no more than this."""
    _kernels.limit_devices(**limits)
    judge.plans_of.cache_clear()
    jax.clear_caches()
    try:
        yield
    finally:
        _kernels.limit_devices()
        judge.plans_of.cache_clear()
        jax.clear_caches()


@contextlib.contextmanager
def checking_leaks():
    """JAX's, which collects garbage after every trace: for this to be quick, of what is made from here on alone."""
    gc.freeze()
    try:
        with jax.checking_leaks():
            yield
    finally:
        gc.unfreeze()


def why_no_cuda():
    """Why the CUDA kernels cannot run here, or None if they can."""
    if jax.default_backend() != "gpu":
        return "needs a GPU"
    return cuda.availability()


def on_a_cpu():
    """The context in which arrays that are not on several devices are on the first CPU, also where there is a GPU."""
    return jax.default_device(jax.devices("cpu")[0])


def mesh_of_cpus(shape, kind=jax.sharding.AxisType.Auto):
    """Of the simulated devices that conftest.py asks for."""
    cpus = jax.devices("cpu")
    if len(cpus) < math.prod(shape):
        pytest.skip(f"needs {math.prod(shape)} devices")
    devices = cpus[: math.prod(shape)]
    return jax.make_mesh(shape, ("data", "model"), axis_types=(kind, kind), devices=devices)


def in_haste(f, *operands):
    """Of the operands, in one program that XLA compiles in haste: what it computes matters, and not its code."""
    return compiled_in_haste(f, *operands)(*operands)


def compiled_in_haste(f, *operands):
    haste = {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else None
    return jax.jit(f).lower(*operands).compile(compiler_options=haste)


def assert_close(actual, expected, rtol, atol=0.0):
    """Arrays, or trees of them."""
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=atol)


def same_derivatives(ours, theirs, orders, operands, rtol, atol):
    """Of two functions, each by one program of derivatives of all these orders; theirs, in jax.numpy, NumPy runs."""
    programs = (lambda *args, f=f: [d(f)(*args) for d in orders] for f in (ours, theirs))
    found, expected = (run(f, *operands) for run, f in zip((in_haste, by_numpy), programs, strict=True))
    assert_close(found, expected, rtol, atol)


# First and second derivatives, in both modes and in every order of them; and a third.
FIRST = (jax.jacfwd, jax.jacrev)
SECOND = (jax.hessian, lambda f: jax.jacrev(jax.jacrev(f)))
THIRD = (lambda f: jax.jacfwd(jax.hessian(f)),)


def kept_bytes(f, *operands):
    """Of what f's backward pass keeps of the forward one."""
    _, pullback = jax.eval_shape(functools.partial(jax.vjp, f), *operands)
    return sum(math.prod(a.shape) * a.dtype.itemsize for a in jax.tree.leaves(pullback))


def name_of(value):
    return getattr(value, "__name__", str(value))


def sampled(names, cases, every, ids=name_of, **options):
    """As pytest.mark.parametrize, but plain `pytest` has every so many-th case alone; `--sweeps` has all."""
    params = []
    for i, case in enumerate(cases):
        values = case if "," in names else (case,)
        params.append(pytest.param(*values, marks=[pytest.mark.sweep] if i % every else []))
    return pytest.mark.parametrize(names, params, ids=ids, **options)


one_name = sampled("name", NAMES, 2)  # where both run the same lines


_COLLECTIVE = re.compile(
    r"= (\S+|\(.*?\)) (all-gather|all-reduce|all-to-all|collective-[a-z]+|reduce-scatter)(?:-start)?\("
)


def collectives(program):
    """Those of a compiled program, each with the number of elements that a device sends or receives."""
    found = []
    for types, kind in _COLLECTIVE.findall(program.as_text()):
        sizes = [math.prod(map(int, filter(None, dims.split(",")))) for dims in re.findall(r"\[([\d,]*)\]", types)]
        found.append((kind, sum(sizes)))
    return found


def calls(f, *args):
    """Of the kernels, in the program of f, traced anew."""
    return jax.jit(lambda *args: f(*args)).lower(*args).as_text().count("@jax_softmax(")


def operators(f, *args):
    """Those of this package that f, traced anew, has."""
    names = re.findall(r"\b(\w+)\[", str(jax.make_jaxpr(lambda *args: f(*args))(*args)))
    return {*names} & {"softmax", "log_softmax", "logsumexp", "cross_entropy"}


def assert_patched(patched, module=jax.nn, names=NAMES):
    for name in names:
        assert calls(lambda x, name=name: getattr(module, name)(x), jnp.ones((2, 3))) == patched


def plan(shape, axes, op="softmax", dtype="float32", mask_shape=None, on=H200, sides=(), **fused):
    """`sides`: shapes and dtypes of the arrays that expressions read; or "index", of an index."""
    roles = [f"index:{np.argmax(shape)}" if dtype == "index" else "array" for shape, dtype in sides]
    beside = [side for side in sides if side[1] != "index"]
    spec = described(op, shape, axes, dtype, mask_shape, arrays=" ".join(roles), beside=beside, **fused)
    made = spec.plan(**on)
    return made and made | {"why_xla": judge.reason_on_gpu(spec, made)}


def call_kernel(
    op, *operands, axes, out_dtype=None, more_results=(), arrays="", load="", store="", scratch_bytes=0, in_place=None
):
    """The custom call itself, on a GPU, wherever the lowering would rather have XLA's own operations.

    `arrays`: the roles of what the expressions `load` and `store` read, whose operands come after the operator's own.
    `in_place`: the operand whose place the first result takes. Its result, or all of them if there are several."""
    x = operands[0]
    of_elements, of_rows = KERNELS[op]["element_results"], KERNELS[op]["row_results"]
    rows = [1 if d in axes else n for d, n in enumerate(x.shape)]
    results = of_elements * [jax.ShapeDtypeStruct(x.shape, out_dtype or x.dtype)]
    results += [jax.ShapeDtypeStruct(x.shape, dtype) for dtype in more_results]
    results += of_rows * [jax.ShapeDtypeStruct(rows, np.float64 if x.dtype == np.float64 else np.float32)]
    n = len(results)
    if scratch_bytes:
        results.append(jax.ShapeDtypeStruct((scratch_bytes,), np.uint8))
    aliases = None if in_place is None else {in_place: 0}
    call = jax.ffi.ffi_call("jax_softmax", results, input_output_aliases=aliases)
    given = attributes(op, axes, operands[-1].dtype == bool, arrays, load, store)
    found = jax.jit(lambda *operands: call(*operands, **given)[:n])(*operands)
    return found if n > 1 or op in ROW_OPS else found[0]


def row_numbers(op, shape, axes, dtype, seed=3):
    """What rows have of their own, as an operator of ROW_OPS takes it."""
    rows = [1 if d in axes else n for d, n in enumerate(shape)]
    wide = np.float64 if np.dtype(dtype) == np.float64 else np.float32
    operands = [normal(rows, wide, seed=seed + i, scale=0.5) for i in range(KERNELS[op]["row_numbers"])]
    if KERNELS[op]["labelled"]:
        # The first two rows have no label, the next their first element and their last.
        columns = int(np.prod([shape[d] for d in axes]))
        label = np.random.default_rng(seed).integers(0, columns, rows, np.int32)
        some = min(label.size, 4)
        label.reshape(-1)[:some] = [-1, columns, 0, columns - 1][:some]
        operands.append(label)
    return operands


def precision(dtype):
    """The context in which arrays of `dtype` exist."""
    return jax.enable_x64(True) if np.dtype(dtype).itemsize == 8 else contextlib.nullcontext()


@functools.partial(jax.jit, static_argnames=("axis", "names"))
def run_all(x, g, axis=-1, where=None, names=NAMES):
    """Result and cotangent of every operator, in one program."""
    out = {}
    for name in names:
        y, pullback = jax.vjp(lambda x, name=name: OPERATORS[name](x, axis, where), x)
        out[name] = y, pullback(g)[0]
    return out


def check_all(x, axis=-1, where=None, names=NAMES):
    """Result and cotangent of every operator against the float64 reference."""
    shape = np.broadcast_shapes(np.shape(x), np.shape(where if where is not None else True))
    g = normal(shape, x.dtype, seed=1, scale=1.0)
    with precision(x.dtype):
        actual = jax.device_get(run_all(x, g, axis, where, names))
    for name in names:
        label = f"{name} of {x.dtype}{list(x.shape)}, axis {axis}"
        y, dx = actual[name]
        check(y, reference(name, x, axis, where), label)
        check(dx, reference_vjp(name, x, g, axis, where), f"vjp of {label}")


def normal(shape, dtype="float32", seed=0, scale=3.0):
    return (np.random.default_rng(seed).standard_normal(shape) * scale).astype(dtype)


def outliers(shape, dtype="float32", seed=0):
    """Normal numbers, some of which are replaced by 1e4 or -1e4."""
    x = normal(shape, "float32", seed)
    rng = np.random.default_rng(seed + 1)
    return np.where(rng.random(shape) < 0.05, rng.choice([-1e4, 1e4], size=shape), x).astype(dtype)


def nonfinite_rows(columns, dtype="float32", seed=0):
    """Rows of `columns` elements with infinities and NaNs wherever an implementation may overlook them."""
    fills = []
    for value in (np.nan, np.inf, -np.inf):
        fills += [(value, slice(i, i + 1)) for i in sorted({0, columns // 3, columns // 2, columns - 1})]
    half = max(columns // 2, 1)
    fills += [(-np.inf, slice(0, half)), (-np.inf, slice(half, None)), (-np.inf, slice(None))]
    fills += [(-np.inf, slice(0, columns - 1)), (-np.inf, slice(1, None)), (-np.inf, slice(None, None, 2))]
    # An ordinary row between any two, which must not be touched by its neighbours.
    x = normal((2 * len(fills) + 1, columns), "float32", seed)
    for i, (value, where) in enumerate(fills):
        x[2 * i + 1, where] = value
    return x.astype(dtype)


def random_mask(shape, seed=0, density=0.6):
    return np.random.default_rng(seed).random(shape) < density


def mask_forms(shape):
    """Masks that broadcast with `shape` in every way; the last of them leaves the first half of the rows empty."""
    rank = len(shape)
    forms = {"none": None, "full": random_mask(shape)}
    forms["scalar"] = np.array(False)
    forms["trailing"] = random_mask(shape[-1:], 1)
    forms["leading"] = random_mask(shape[:1] + (1,) * (rank - 1), 2)
    forms["inner"] = random_mask((1, *shape[1:-1], 1), 3)
    empty = random_mask(shape, 4)
    empty[: (shape[0] + 1) // 2] = False
    forms["empty"] = empty
    return forms


def assert_same_bits(actual, expected, label=""):
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert actual.dtype == expected.dtype and actual.shape == expected.shape, label
    assert actual.tobytes() == expected.tobytes(), f"{label}: {np.sum(actual != expected)} of {actual.size} differ"


def device_bytes():
    """What the first device lets a process have of its memory; 0 for a CPU."""
    try:
        return jax.devices()[0].memory_stats()["bytes_limit"]
    except (TypeError, KeyError):
        return 0
