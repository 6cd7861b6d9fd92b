"""The source of attention's kernels: the struct Problem, whose constants csrc/attention/blocks.cuh describes, and which
has the program's expressions as functions."""

import functools
import math
from typing import NamedTuple

import numpy as np

from jax_softmax import _kernels
from jax_softmax.fusion.expressions import ROUNDED
from jax_softmax.fusion.printing import of_mask

KERNELS = ("forward", "keys", "queries")  # the output; dk and dv; dq
MOST_BATCH_DIMS = 6
_TYPES = {
    **{"float32": "float", "bfloat16": "BFloat16", "float16": "Float16", "int32": "Int32", "bool": "Bool"},
    **{"float8_e4m3fn": "Float8E4M3", "float8_e5m2": "Float8E5M2", "int8": "Int8", "uint8": "UInt8"},
}


class Letters(NamedTuple):
    """A letter for each dimension of q, k and v: see `call.py`."""

    q: str
    k: str
    v: str

    @property
    def o(self) -> str:
        return self.q[:-1] + "e"

    @property
    def shared(self) -> str:
        """Batch letters that keys have as well."""
        return "".join(letter for letter in self.q[:-1] if letter in self.k)

    @property
    def groups(self) -> str:
        """Batch letters along which queries share keys."""
        return "".join(letter for letter in self.q[:-1] if letter not in self.k and letter != "i")

    @property
    def batch(self) -> str:
        """Batch letters, in the order in which blocks count them."""
        return self.shared + self.groups

    @property
    def rows(self) -> str:
        """The letters of an array with a number of each row of scores."""
        return self.batch + "i"

    def check(self, sides, bounds) -> None:
        """Raises a ValueError that says what kernels cannot do."""
        for letters, own, last in zip(self, ("i", "j", "j"), "dde", strict=True):
            if len(set(letters)) != len(letters) or own not in letters or letters[-1] != last:
                raise ValueError(f"{letters} must have {own} and, last, {last}, and no letter twice")
        if set(self.k) != {*self.shared, *"jd"} or set(self.v) != {*self.shared, *"je"}:
            raise ValueError("keys and values must have the same batch letters, of those of q")
        if not set("".join(sides)) <= {*self.batch, *"ij"} or not set(bounds) <= set(self.batch):
            raise ValueError("what scores read beside, and bounds, must have letters of q and k")
        if len(self.batch) > MOST_BATCH_DIMS:
            raise ValueError(f"at most {MOST_BATCH_DIMS} dimensions of the batch")


def has_attention_kernels(extents: dict[str, int], dtype: str) -> bool:
    """Whether there are kernels for these extents, by letters, and a dtype of q, k and v."""
    features = extents["d"], extents["e"]
    return dtype in ROUNDED and all(n % 8 == 0 and n <= 256 for n in features) and min(extents.values()) > 0


class Plan(NamedTuple):
    """A kernel's source, a line about it, and its launch."""

    code: str
    plan: str
    blocks: int
    threads: int
    shared_bytes: int


def attention_plan(
    kernel, letters: Letters, extents, dtype, sides, bounds, masks, functions, empty_rows_are_zero, written_dtype
) -> Plan:
    """`sides`: the letters and the dtype, or "index", of each side operand. `bounds`: the letters of bounds, or None.
    `masks`: values that are the same in all of a tile which is whole, by the names of sides. `functions`: by name, the
    names of their arguments, in float32, and C++ of these and s0, s1, .... `written_dtype`: of what is written for each
    score, or None."""
    letters.check([of for of, _ in sides], bounds or "")
    if not has_attention_kernels(extents, dtype):
        raise ValueError(f"attention of {dtype}, {extents}")
    tiling = _kernels.attention_tiling(kernel, extents["d"], extents["e"])
    blocks = -(-extents["j" if kernel == "keys" else "i"] // tiling["rows"])
    staged, free = _staged_bytes(sides, extents, tiling)
    is_array = [side_dtype != "index" for _, side_dtype in sides]
    first_side = (3 if kernel == "forward" else 6) + (bounds is not None)
    first_result = first_side + sum(is_array)
    n_results = 2 if kernel != "queries" or written_dtype else 1
    strides = functools.partial(_strides, letters, extents)
    of_type = "attention::Strides"
    fields = ("warps", "fragments", "step", "parts", "resident")
    # The outermost extent stays out of it, so that batch sizes share a kernel.
    inner = ["0", *(str(extents[letter]) for letter in letters.batch[1:])]
    problem = [
        f"  using T = {_TYPES[dtype]};\n  using Addresses = attention::Addresses<{first_result + n_results}>;\n",
        _constexpr("kTiling", _listed(tiling[field] for field in fields), "attention::Tiling"),
        *map(_constexpr, ("kQueries", "kKeys", "kFeatures", "kValueFeatures"), (extents[c] for c in "ijde")),
        _constexpr("kBatchDims", len(letters.batch)) + _constexpr("kExtents[]", _listed(inner)),
        _constexpr("kGroups", math.prod(extents[letter] for letter in letters.groups)),
        *(_constexpr(f"k{name.upper()}", strides(getattr(letters, name)), of_type) for name in "qkvo"),
        # A block's four bounds are their innermost dimension.
        _constexpr("kBounded", bounds is not None, "bool") + _constexpr("kBoundsAddress", first_side - 1),
        _constexpr("kBounds", strides(bounds or "", 4 * blocks), of_type),
        _constexpr("kSides", len(sides)),
        _constexpr("kSideStrides[]", _listed([strides(of) for of, _ in sides] or ["{}"]), of_type),
        _constexpr("kSideAddresses[]", _listed([first_side + sum(is_array[:k]) for k in range(len(sides))] or [0])),
        _constexpr("kStagedBytes[]", _listed(staged or [0])),
        _constexpr("kFirstResult", first_result) + _constexpr("kEmptyRowsAreZero", empty_rows_are_zero, "bool"),
        _constexpr("kWrites", written_dtype is not None, "bool")
        + f"  using Written = {_TYPES[written_dtype or dtype]};\n",
        _constexpr("kWrittenStrides", strides(letters.rows + "j"), of_type),
        *(_member(name, arguments, text, sides, masks) for name, (arguments, text) in functions.items()),
    ]
    batch = math.prod(extents[letter] for letter in (letters.shared if kernel == "keys" else letters.batch))
    described = f"attention {kernel} of {', '.join(letters)}: {extents}"
    shared_bytes = tiling["shared_bytes"] + tiling["free_bytes"] - free
    code = _code(kernel, tiling, "".join(problem))
    return Plan(code, described, blocks * batch * tiling["parts"], tiling["threads"], shared_bytes)


def _staged_bytes(sides, extents, tiling):
    """For each side, the bytes of an element if it passes through shared memory, or 0; and the bytes left there.

    Arrays of queries x keys whose rows begin at multiples of 16 bytes do, as long as there is room."""
    staged, free = [], tiling["free_bytes"]
    for of, dtype in sides:
        size = 0 if dtype == "index" or not {"i", "j"} <= {*of} or of[-1] != "j" else np.dtype(dtype).itemsize
        fits = size and extents["j"] * size % 16 == 0 and tiling["bytes_of_sides"][size] <= free
        free -= tiling["bytes_of_sides"][size] if fits else 0
        staged.append(size if fits else 0)
    return staged, free


def _listed(items):
    return f"{{{', '.join(map(str, items))}}}"


def _constexpr(name, value, type_="int"):
    return f"  static constexpr {type_} {name} = {str(value).lower() if isinstance(value, bool) else value};\n"


def _strides(letters, extents, of, times=1):
    """Those of an array with the letters `of`, along the batch, queries and keys."""
    along = dict.fromkeys((*letters.batch, "i", "j"), 0)
    along |= {letter: times * math.prod(extents[c] for c in of[k + 1 :]) for k, letter in enumerate(of)}
    batch = ", ".join(f"{along[letter]}ll" for letter in letters.batch)
    return f"{{{{{batch}}}, {along['i']}ll, {along['j']}ll}}"


def _member(name, arguments, text, sides, masks):
    """A function of Problem that returns an expression of arguments and sides."""
    lines = ""
    for k, (_, dtype) in enumerate(sides):
        read = f"index<{k}>" if dtype == "index" else f"array<{k}, {_TYPES[dtype]}>"
        read = f"side.template {read}()"
        read = of_mask(read, masks[f"s{k}"]) if f"s{k}" in masks else read
        lines += f"    [[maybe_unused]] const auto s{k} = {read};\n"
    parameters = ", ".join(f"float {x}" for x in arguments)
    head = f"  template <class Side>\n  static __device__ __forceinline__ float {name}({parameters}, const Side& side)"
    return f"{head} {{\n{lines}    return {text};\n  }}\n"


def _code(kernel, tiling, problem):
    return (
        f'#include "attention/{"forward" if kernel == "forward" else "backward"}.cuh"\n\n'
        f"namespace jax_softmax::device {{\n\nstruct Problem {{\n{problem}}};\n\n}}  // namespace\n\n"
        f'extern "C" __global__ void __launch_bounds__({tiling["threads"]}, {tiling["resident"]})\n'
        "    kernel(const __grid_constant__ jax_softmax::device::Problem::Addresses operands) {\n"
        f"  jax_softmax::device::attention_{kernel}<jax_softmax::device::Problem>(operands);\n}}\n"
    )
