"""Programs for test_zoo.py: every public function of JAX that `jax.jit` takes, of a softmax's results.

Functions are found by looking at JAX's modules, and their arguments by their signatures: a parameter's name says what
it needs (`BY_NAME`), or else it is an array, of the first kind in `KINDS` that `jax.jit` takes. What that does not find
stands in zoo_table.py, by hand or with the reason why it is no part of a program.
"""

import functools
import importlib
import inspect
import pkgutil
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.experimental.sparse
import jax.numpy as jnp
import jax.scipy
import numpy as np
import zoo_table
from zoo_table import N, integer_row, integers, key, regular, row, square, truth_row, truths

MODULES = (
    *("jax.numpy", "jax.numpy.linalg", "jax.numpy.fft", "jax.lax", "jax.lax.linalg", "jax.nn", "jax.nn.initializers"),
    *("jax.random", "jax.image", "jax.experimental.sparse"),
    *(module.name for module in pkgutil.walk_packages(jax.scipy.__path__, "jax.scipy.")),
)
P = jax.ShapeDtypeStruct((N, N), "float32")  # what programs are made of: rows of probabilities


class Member(NamedTuple):
    """A function of JAX with its arguments: `call(p)` has its results, p being rows of probabilities."""

    name: str
    call: Callable[[Any], Any]


@functools.cache
def functions() -> dict[str, Callable]:
    """JAX's public functions, and some transformations. One that is in several modules has the name of the first."""
    found: dict[str, Any] = {}
    seen = set()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        for module in map(importlib.import_module, MODULES):
            for name in sorted(dir(module)):
                value = getattr(module, name)
                is_one = callable(value) and not name.startswith("_") and not inspect.ismodule(value)
                if is_one and id(value) not in seen:
                    seen.add(id(value))
                    found[f"{module.__name__}.{name}"] = value
    return found | {f"jax.{name}": None for name in zoo_table.TRANSFORMATIONS}


# ---- Arguments: functions of p and of how many arguments come before


def number(p, k):
    return p[k % N, 0]


def images(p, k):
    return square(p, k).reshape(1, 4, 4, 4)


def cube(p, k):
    return square(p, k).reshape(2, 4, N)


def pair(p, k):
    return [square(p, k), square(p, k + 1)]


def complex_square(p, k):
    return jax.lax.complex(square(p, k), square(p, k + 3))


def complex_row(p, k):
    return complex_square(p, k)[0]


def integer(p, k):
    return jnp.asarray(k + 2, jnp.int32)


def words(p, k):
    return integers(p, k).astype(jnp.uint32)


def byte_words(p, k):
    return integers(p, k).astype(jnp.uint8)


def sparse(p, k):
    return jax.experimental.sparse.BCOO.fromdense(square(p, k), nse=N * N)


def sparse_rows(p, k):
    return jax.experimental.sparse.BCSR.fromdense(square(p, k), nse=N * N)


KINDS = (
    *(square, row, regular, images, cube, pair, integers, integer_row, number, truths, complex_square, complex_row),
    *(words, byte_words, integer, sparse, sparse_rows, key),
)


def static(value):
    """The maker of an argument that is not traced."""
    return lambda p, k: value


def _one(x):
    return jnp.tanh(x)


_INTEGERS = tuple(map(static, (1, 2, N)))
_SHAPES = tuple(map(static, ((N, N), (N,), N)))
_AXES = tuple(map(static, (1, (1,), (0, 1), (1, 0))))
BY_NAME = {
    **dict.fromkeys(("f", "fn", "fun", "func", "function", "func1d", "pyfunc", "computation"), (static(_one),)),
    **dict.fromkeys(("axis", "axis1", "dimension", "axes", "dimensions", "permutation"), _AXES),
    **dict.fromkeys(("axis2", "source", "spatial_dims"), tuple(map(static, (0, (0, 1))))),
    **dict.fromkeys(("destination", "kth", "deg", "order", "pad_width", "nin", "nout", "d", "v", "y"), _INTEGERS),
    **dict.fromkeys(("num", "n_elements", "total_repeat_length", "num_segments", "num_classes"), (static(N),)),
    **dict.fromkeys(("repeats", "reps", "indices_or_sections"), tuple(map(static, (2, (2, 1))))),
    **dict.fromkeys(("shape", "sizes", "new_sizes", "new_shape", "dims", "out_shape"), _SHAPES),
    **dict.fromkeys(("dtype", "new_dtype", "index_dtype"), tuple(map(static, (np.float32, np.int32)))),
    **dict.fromkeys(("indices", "idxs", "ind", "segment_ids", "obj", "multi_index"), (integer_row, integers)),
    **dict.fromkeys(("condition", "mask", "which"), (truth_row, truths)),
    **dict.fromkeys(("n", "m", "k", "N", "M"), tuple(map(static, (N, 2)))),
    **dict.fromkeys(("rank", "exponent_bits", "permutation_size"), tuple(map(static, (3, N)))),
    **dict.fromkeys(("slice_size", "limit_index", "mantissa_bits", "stop_dimension"), (static(4),)),
    **dict.fromkeys(("slice_sizes", "limit_indices"), (static((4, 4)),)),
    **dict.fromkeys(("start_indices", "strides", "window_strides"), (static((1, 1)),)),
    **dict.fromkeys(("start_index", "start_dimension", "split_axis"), (static(0),)),
    **dict.fromkeys(("method", "mode"), tuple(map(static, ("linear", "BFGS")))),
    "key": (key,),
    "padding": (static("SAME"),),
}
# Parameters with defaults under which the values would decide on shapes.
SIZES = {"size": N, "length": N, "total_repeat_length": 2 * N, "nse": N * N}


def refusal(call) -> str:
    """Why `jax.jit` does not take a function of p, or why there is nothing to compute; "" if it takes it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            shapes = jax.eval_shape(jax.jit(call), P)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return "" if any(hasattr(a, "shape") for a in jax.tree.leaves(shapes)) else "it returns no arrays"


def guessed(function) -> Callable | None:
    """A call of a function that `jax.jit` takes, as a function of p."""
    try:
        signature = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return None
    needed = [q for q in signature if q.default is q.empty and q.kind not in (q.VAR_KEYWORD, q.VAR_POSITIONAL)]
    counts = (2, 1) if any(q.kind is q.VAR_POSITIONAL for q in signature) and len(needed) < 2 else (0,)
    sizes = {q.name: SIZES[q.name] for q in signature if q.name in SIZES and q.default is None}
    for own in ({}, sizes) if sizes else ({},):
        for kind in KINDS:
            for named in _choices(needed, kind):
                for count in counts:
                    call = _call(function, needed, (*named, *[kind] * count), own)
                    if not refusal(call):
                        return call
    return None


def _choices(needed, kind):
    """Makers for each of the parameters: those of their names, first, second, ..., and at last arrays for all."""
    named = [BY_NAME.get(q.name, ()) for q in needed]
    arrays = [(kind,) * len(needed)]
    most = max(map(len, named), default=0)
    by_name = [tuple(c[min(k, len(c) - 1)] if c else kind for c in named) for k in range(most)]
    may_be_numbers = {"n", "m", "k", "N", "M", "y", "d", "v", "f"}  # of arrays as often as of sizes
    return arrays + by_name if may_be_numbers & {q.name for q in needed} else by_name + arrays


def _call(function, needed, makers, others):
    def call(p):
        values = [maker(p, k) for k, maker in enumerate(makers)]
        by_name = {q.name: value for q, value in zip(needed, values, strict=False) if q.kind is q.KEYWORD_ONLY}
        result = function(*values[: len(values) - len(by_name)], **by_name, **others)
        return _called(result, p) if inspect.isfunction(result) else result

    return call


def _called(function, p):
    """The results of a function that a function returned."""
    needed = [q for q in inspect.signature(function).parameters.values() if q.default is q.empty]
    of_names = {"key": key(), "shape": (N, N)}
    return function(*(of_names.get(q.name, p) for q in needed if q.kind is not q.VAR_KEYWORD))


@functools.cache
def member(name) -> Member | None:
    """A function of JAX with arguments; None if it is no part of a program, or nothing is known that it takes."""
    if name in zoo_table.NO_PROGRAMS:
        return None
    if name in zoo_table.CALLS:
        return Member(name, zoo_table.CALLS[name])
    call = guessed(functions()[name])
    return Member(name, call) if call is not None else None


def members(names) -> list[Member]:
    return [m for m in map(member, names) if m is not None]
