"""The text of attention's kernels: a struct of constants, which csrc/attention/tiles.cuh describes, and the scores."""

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
    """Of the dimensions of q, k and v: see `call.py`."""

    q: str
    k: str
    v: str

    @property
    def o(self) -> str:
        return self.q[:-1] + "e"

    @property
    def shared(self) -> str:
        """Of the batch: those that keys have as well."""
        return "".join(letter for letter in self.q[:-1] if letter in self.k)

    @property
    def groups(self) -> str:
        """Of the batch: those that share keys."""
        return "".join(letter for letter in self.q[:-1] if letter not in self.k and letter != "i")

    @property
    def batch(self) -> str:
        """In the order in which blocks count them."""
        return self.shared + self.groups

    @property
    def rows(self) -> str:
        """Of what a row has."""
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


def has_kernels(extents: dict[str, int], dtype: str) -> bool:
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


def plan_of(
    kernel, letters: Letters, extents, dtype, sides, bounds, masks, functions, empty_rows_are_zero, written_dtype
) -> Plan:
    """`sides`: letters and dtype, or "index", of what is read beside. `bounds`: their letters, or None. `masks`: sides
    that are masks, by name, with their value in all of a tile that is whole. `functions`: by name what they are given,
    in float32, and C++ of that and s0, s1, .... `written_dtype`: of what is written for each score, or None."""
    letters.check([of for of, _ in sides], bounds or "")
    if not has_kernels(extents, dtype):
        raise ValueError(f"attention of {dtype}, {extents}")
    tiling = _kernels.attention_tiling(kernel, extents["d"], extents["e"])
    blocks = -(-extents["j" if kernel == "keys" else "i"] // tiling["rows"])

    def strides(of, times=1):
        along = dict.fromkeys((*letters.batch, "i", "j"), 0)
        along |= {letter: times * math.prod(extents[c] for c in of[k + 1 :]) for k, letter in enumerate(of)}
        batch = ", ".join(f"{along[letter]}ll" for letter in letters.batch)
        return f"{{{{{batch}}}, {along['i']}ll, {along['j']}ll}}"

    def constant(name, value, type_="int"):
        return f"  static constexpr {type_} {name} = {str(value).lower() if isinstance(value, bool) else value};\n"

    first_side = (3 if kernel == "forward" else 6) + (bounds is not None)
    values, word, words, staged, free = "", first_side, [], [], tiling["free_bytes"]
    for k, (of, side_dtype) in enumerate(sides):
        read = f"index<{k}>" if side_dtype == "index" else f"array<{k}, {_TYPES[side_dtype]}>"
        read = f"side.template {read}()"
        read = of_mask(read, masks[f"s{k}"]) if f"s{k}" in masks else read
        values += f"    [[maybe_unused]] const auto s{k} = {read};\n"
        words.append(word)
        word += side_dtype != "index"
        # Arrays of queries x keys whose rows begin at multiples of 16 bytes, as long as there is room.
        size = 0 if side_dtype == "index" or not {"i", "j"} <= {*of} or of[-1] != "j" else np.dtype(side_dtype).itemsize
        fits = size and extents["j"] * size % 16 == 0 and tiling["bytes_of_sides"][size] <= free
        free -= tiling["bytes_of_sides"][size] if fits else 0
        staged.append(size if fits else 0)

    def function(name, given, text):
        given = ", ".join(f"float {x}" for x in given)
        head = "  template <class Side>\n  static __device__ __forceinline__ float "
        return f"{head}{name}({given}, const Side& side) {{\n{values}    return {text};\n  }}\n"

    of_type = "attention::Strides"
    fields = ("warps", "fragments", "step", "parts", "resident")
    # The outermost extent stays out of it, so that batch sizes share a kernel.
    inner = ["0", *(str(extents[letter]) for letter in letters.batch[1:])]
    results = 2 if kernel != "queries" or written_dtype else 1
    problem = [
        f"  using T = {_TYPES[dtype]};\n  using Addresses = attention::Addresses<{word + results}>;\n",
        constant("kTiling", f"{{{', '.join(str(tiling[field]) for field in fields)}}}", "attention::Tiling"),
        *(
            constant(name, extents[c])
            for name, c in zip(("kQueries", "kKeys", "kFeatures", "kValueFeatures"), "ijde", strict=True)
        ),
        constant("kBatchDims", len(letters.batch)) + constant("kExtents[]", f"{{{', '.join(inner)}}}"),
        constant("kGroups", math.prod(extents[letter] for letter in letters.groups)),
        *(constant(f"k{name.upper()}", strides(getattr(letters, name)), of_type) for name in "qkvo"),
        # A block's four bounds are their innermost dimension.
        constant("kBounded", bounds is not None, "bool") + constant("kBoundsAddress", first_side - 1),
        constant("kBounds", strides(bounds or "", 4 * blocks), of_type),
        constant("kSides", len(sides)),
        constant("kSideStrides[]", f"{{{', '.join(strides(of) for of, _ in sides) or '{}'}}}", of_type),
        constant("kSideAddresses[]", f"{{{', '.join(map(str, words)) or 0}}}"),
        constant("kStagedBytes[]", f"{{{', '.join(map(str, staged)) or 0}}}"),
        constant("kFirstResult", word) + constant("kEmptyRowsAreZero", empty_rows_are_zero, "bool"),
        constant("kWrites", written_dtype is not None, "bool")
        + f"  using Written = {_TYPES[written_dtype or dtype]};\n",
        constant("kWrittenStrides", strides(letters.rows + "j"), of_type),
        *(function(name, given, text) for name, (given, text) in functions.items()),
    ]
    code = (
        f'#include "attention/{"forward" if kernel == "forward" else "backward"}.cuh"\n\n'
        f"namespace jax_softmax::device {{\n\nstruct Problem {{\n{''.join(problem)}}};\n\n}}  // namespace\n\n"
        f'extern "C" __global__ void __launch_bounds__({tiling["threads"]}, {tiling["resident"]})\n'
        "    kernel(const __grid_constant__ jax_softmax::device::Problem::Addresses operands) {\n"
        f"  jax_softmax::device::attention_{kernel}<jax_softmax::device::Problem>(operands);\n}}\n"
    )
    batch = math.prod(extents[letter] for letter in (letters.shared if kernel == "keys" else letters.batch))
    described = f"attention {kernel} of {', '.join(letters)}: {extents}"
    shared_bytes = tiling["shared_bytes"] + tiling["free_bytes"] - free
    return Plan(code, described, blocks * batch * tiling["parts"], tiling["threads"], shared_bytes)
