"""Cases of attention: scores, operands, and programs that have their weights in memory or are fused."""

import dataclasses
from collections.abc import Callable

import emulated
import jax
import jax.numpy as jnp
import numpy as np

import jax_softmax
from jax_softmax.fusion.attention.kernels import attention_p
from jax_softmax.fusion.attention.letters import Letters
from jax_softmax.fusion.program.graph import graph_of, is_variable
from jax_softmax.fusion.rewriting import rewritten

KERNELS = ("forward", "keys", "queries")  # the output; dk and dv; dq. "scores": of a bias that the batch shares
SCALE = 0.125


def wide(x):
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


# ---- Scores, of the product and of what is read beside


def scaled(x):
    return x * SCALE


def causal(x, i, j):
    return jnp.where(i >= j, x * SCALE, -1e30)


def causal_and_smallest(x, i, j):
    return jnp.where(i >= j, wide(x) * SCALE, float(jnp.finfo(jnp.float32).min))


def capped(x, i, j):
    return jnp.where(i >= j, 20 * jnp.tanh(wide(x) * (SCALE / 20)), -1e30)


def capped_in_its_dtype(x, i, j):
    return jnp.where(i >= j, 20 * jnp.tanh(x * (SCALE / 20)), -3e4)


def masked(x, mask):
    return jnp.where(mask, wide(x) * SCALE, -jnp.inf)


def filled(x, mask):
    return jnp.where(mask, wide(x) * SCALE, -1e9)


def biased(x, bias):
    return wide(x) * SCALE + wide(bias)


def biased_causal(x, i, j, bias):
    return jnp.where(i >= j, wide(x) * SCALE + wide(bias), -1e30)


def far_below(x):
    return wide(x) * 8 - 6e7


def growing(x, j):  # so that sums begin anew
    return wide(x) * SCALE + 2 * j.astype(jnp.float32)


def biased_keys(x, bias):
    return x * SCALE + bias.astype(x.dtype)


def alibi_in_a_window(x, h, i, j):
    slope = jnp.exp2(-wide(h.astype(jnp.float32)) - 1)
    return jnp.where((i >= j) & (i - j < 50), wide(x) * SCALE - slope * (i - j).astype(jnp.float32), -1e30)


def in_windows_of_heads(x, h, i, j):
    return jnp.where((i >= j) & (i - j < 20 * (h + 1)), wide(x) * SCALE, -jnp.inf)


def of_one_segment(x, of_queries, of_keys):
    return jnp.where(of_queries == of_keys, x * SCALE, -1e30)


def of_learned_slopes(x, i, j, temperature, slopes):
    return jnp.where(i >= j, wide(x) * temperature - jnp.exp(slopes) * (i - j).astype(jnp.float32), -1e30)


def of_gains(x, of_queries, of_keys):
    return wide(x) * (SCALE * of_queries) + of_keys * 2


def biased_by_temperature(x, temperature, bias):
    return wide(x) * (SCALE * temperature) + bias


SCORES: dict[Callable, tuple] = {
    scaled: (),
    far_below: (),
    growing: (("j", "index"),),
    causal: (("i", "index"), ("j", "index")),
    causal_and_smallest: (("i", "index"), ("j", "index")),
    capped: (("i", "index"), ("j", "index")),
    capped_in_its_dtype: (("i", "index"), ("j", "index")),
    masked: (("bij", "bool"),),
    filled: (("bij", "bool"),),
    biased: (("hij", "bfloat16"),),
    biased_causal: (("i", "index"), ("j", "index"), ("hij", "float32")),
    biased_keys: (("bj", "bfloat16"),),
    alibi_in_a_window: (("h", "index"), ("i", "index"), ("j", "index")),
    in_windows_of_heads: (("h", "index"), ("i", "index"), ("j", "index")),
    of_one_segment: (("bi", "int32"), ("bj", "int32")),
    of_learned_slopes: (("i", "index"), ("j", "index"), ("h", "float32"), ("bh", "float32")),
    of_gains: (("bhi", "float32"), ("bj", "float32")),
    biased_by_temperature: (("h", "float32"), ("ij", "float32")),
}
USUAL = "bihd,bjhd,bjhe"


@dataclasses.dataclass(frozen=True)
class Case:
    score: Callable = causal
    lengths: tuple[int, int] = (130, 130)  # of queries and keys
    features: tuple[int, int] = (64, 64)
    letters: str = USUAL
    dtype: str = "bfloat16"
    product: str = ""  # the product's dtype, if it is another one
    where: bool = False  # the mask is that of the softmax, so that rows without visible elements are 0
    special: float = 0.0  # what some elements of q and k are
    drops: bool = False  # some weights
    peaks: str = ""  # what makes rows have one large weight or a few: see `_with_peaks`
    n_batch: tuple[int, int] = (2, 2)  # extents of b and h

    def __str__(self):
        words = [self.score.__name__, "x".join(map(str, self.lengths)), "-".join(map(str, self.features)), self.dtype]
        words += [self.letters] * (self.letters != USUAL) + [self.product] * bool(self.product)
        words += (
            ["drops"] * self.drops
            + ["where"] * self.where
            + [self.peaks] * bool(self.peaks)
            + [str(self.special)] * bool(self.special)
        )
        return " ".join(words)

    @property
    def sides(self):
        batch = set(self.letters) - {"i", "j", "d", "e", ","}
        return [("".join(c for c in letters if c in batch | {"i", "j"}), d) for letters, d in SCORES[self.score]]

    @property
    def extents(self):
        (i, j), (d, e) = self.lengths, self.features
        return {**dict(zip("bh", self.n_batch, strict=True)), "g": 3, "i": i, "j": j, "d": d, "e": e}

    @property
    def kernels(self):
        """Those of values and gradients."""
        q, k, _ = self.letters.split(",")

        def is_shared(of, dtype):
            lacks = any(self.extents[c] > 1 for c in q if c not in of + "id")
            return dtype in ("bfloat16", "float32") and "j" in of and not set(of) <= set(k) and lacks

        return {*KERNELS, *["scores"] * any(is_shared(*side) for side in self.sides)}

    def operands(self):
        """q, k, v, the output's cotangent, and the arrays among the sides."""
        rng, extents = np.random.default_rng(0), self.extents
        q, k, v = self.letters.split(",")
        arrays = [
            rng.standard_normal([extents[c] for c in of]).astype(jnp.dtype(self.dtype))
            for of in (q, k, v, q[:-1] + "e")
        ]
        arrays = _with_peaks(self.peaks, arrays, rng)
        if self.special:
            arrays[0][(0,) * (len(q) - 1)] = self.special
            arrays[1][(1,) * (len(k) - 1)] = self.special
        for of, dtype in self.sides:
            shape = [extents[c] for c in of]
            if dtype == "bool":
                mask = rng.random(shape) < 0.7
                mask[..., min(5, shape[-2] - 1) :: 7, :] = False  # rows that see nothing
                arrays.append(mask)
            elif dtype == "int32":
                arrays.append(np.sort(rng.integers(0, 4, shape), -1).astype(np.int32))
            elif dtype != "index":
                arrays.append(rng.standard_normal(shape).astype(jnp.dtype(dtype)))
        if self.drops:
            arrays.append(rng.random([extents[c] for c in Letters(q, k, v).rows + "j"]) < 0.8)
        return arrays

    def program(self, q, k, v, *sides):
        """With the weights in memory."""
        letters, extents = Letters(*self.letters.split(",")), self.extents
        rows = letters.batch + "i"
        product = jnp.dtype(q.dtype if q.dtype == jnp.float64 else self.product or self.dtype)
        x = jnp.einsum(f"{letters.q},{letters.k}->{rows}j", q, k, preferred_element_type=product)
        given, arrays = [], list(sides)
        for of, dtype in self.sides:
            a = jnp.arange(extents[of], dtype=jnp.int32) if dtype == "index" else arrays.pop(0)
            order = sorted(of, key=(rows + "j").index)
            a = jnp.transpose(a, [of.index(c) for c in order])
            given.append(a.reshape([extents[c] if c in of else 1 for c in rows + "j"]))
        where = jnp.broadcast_to(given[0], x.shape) if self.where else None
        weights = jax.nn.softmax(self.score(x, *given), -1, where=where)
        if self.drops:
            weights = jnp.where(arrays[0], weights / 0.9, 0)
        o = jnp.einsum(f"{rows}j,{letters.v}->{letters.o}", weights.astype(v.dtype), v)
        return o.astype(q.dtype)


def _with_peaks(kind, arrays, rng):
    """q, k, v and o's cotangent. Where a row has one large weight, the scores' cotangents are small differences of
    numbers, which are large if o's cotangent is like the value with that weight."""
    q, k, v, o_cotangent = arrays
    if kind == "all equal":
        return [q] * 4
    if kind == "equal q and k":
        return [q, q, v, o_cotangent]
    if kind == "large":
        return [4 * q, 4 * k, v, o_cotangent]
    if kind == "one peak":  # anywhere
        at = rng.integers(0, k.shape[1], q.shape[1])
        return [4 * k[:, at], k, v, v[:, at]]
    return arrays


def values_and_gradients(function, q, k, v, o_cotangent, *sides):
    """Of all arrays of floats."""
    moving = [k for k, a in enumerate(sides) if jnp.issubdtype(a.dtype, jnp.floating)]

    def of_floats(q, k, v, *moved):
        moved = iter(moved)
        return function(q, k, v, *(next(moved) if k in moving else a for k, a in enumerate(sides)))

    o, transposed = jax.vjp(of_floats, q, k, v, *(sides[k] for k in moving))
    return o, *transposed(o_cotangent)


def by_tensor_cores(function, *operands):
    """The results of a program whose products round float32 to TF32, as on a GPU."""
    program = jax.make_jaxpr(function)(*operands)
    graph = graph_of(program.jaxpr)

    def run(*operands):
        variables = [*program.jaxpr.constvars, *program.jaxpr.invars]
        known = dict(zip(variables, [*program.consts, *operands], strict=True))
        for e in graph.equations:
            given = [known[a] if is_variable(a) else a.val for a in e.inputs]
            if e.name == "dot_general" and given[0].dtype == jnp.float32:
                given = [jax.lax.reduce_precision(a, exponent_bits=8, mantissa_bits=10) for a in given]
            made = e.eqn.primitive.bind(*given, **e.params)
            known |= zip(e.outputs, made if e.eqn.primitive.multiple_results else [made], strict=True)
        return [known[v] for v in graph.outputs]

    return jax.jit(run)(*operands)


def fused(case):
    return jax_softmax.fuse(lambda *operands: values_and_gradients(case.program, *operands))


def attention_in(case):
    """The kernels that the fused program calls, by name: an `Attention`, and the extents by its letters."""
    operands = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in case.operands()]
    (eqn,) = jax.make_jaxpr(fused(case))(*operands).eqns
    with emulated.all_kernels(attention=True):
        calls = [e for e in rewritten(eqn.params["jaxpr"]).eqns if e.primitive is attention_p]
    found = [(kernel, e.params["attention"], e.invars[:3]) for e in calls for kernel in e.params["kernels"]]
    return {kernel: (attention, attention.extents(*(v.aval for v in own))) for kernel, attention, own in found}


def described_call(attention, kernel, dtype, extents):
    """A kernel's custom call as `_kernels.plan_attention` takes it, for operands of these extents."""
    letters = attention.letters
    own = [(of, dtype) for of in (*letters, letters.o)] + [(letters.rows + "n", "float32"), (letters.rows, "float32")]
    own = own[: 3 if kernel in ("forward", "tangents") else 6]
    own += own if kernel == "tangents" else []
    stay = extents["j" if kernel == "keys" else "i"]
    of_bounds = attention.visible.letters_of_bounds
    own += [] if of_bounds is None else [(of_bounds + "cm", "int32")]
    own += [(side.letters, side.dtype) for side in attention.sides_of(kernel) if side.dtype != "index"]
    known = attention.sizes(kernel, extents) | {"c": -(-stay // 64), "m": 4}  # c and m: of bounds
    operands = [([known[c] for c in of], of_dtype) for of, of_dtype in own]
    results = attention.result_types(kernel, *(jax.ShapeDtypeStruct(*operand) for operand in operands[:3]))
    return {
        "operands": operands,
        "results": [(list(a.shape), a.dtype.name) for a in results],
        "attributes": attention.attributes(kernel),
    }


# ---- Cases: the first ones run on the host as well, in one of the ways to copy; the others there with --sweeps alone


LENGTHS = [(63, 65), (64, 64), (65, 63), (197, 197), (197, 1500), (1500, 197)]
LAYOUTS = ["bhid,bhjd,bhje", "bihd,bhjd,jhbe", "id,jd,je", "bihgd,bjhd,bjhe", "gihd,jhd,jhe", "ihd,jd,je"]
FIRST = [
    Case(capped_in_its_dtype, (40, 40), (32, 32)),
    Case(masked, (70, 63), (64, 64), where=True),
    Case(biased, (17, 65), (128, 128), "bhid,bhjd,jhbe", product="float32", drops=True),
    Case(causal_and_smallest, (65, 65), (256, 192), n_batch=(1, 1)),
    Case(growing, (17, 200), (32, 32), n_batch=(1, 1)),
    Case(causal, (70, 70), peaks="all equal", product="float32", n_batch=(1, 2)),
    Case(scaled, (40, 150), peaks="one peak", drops=True, n_batch=(1, 2)),
    Case(capped, (40, 72), (40, 64), dtype="float32", drops=True, n_batch=(1, 2)),
    Case(masked, (70, 35), (128, 24), "bihgd,bjhd,bjhe", "float32", where=True, n_batch=(1, 1)),
    Case(of_learned_slopes, (65, 40), (32, 16), "bihgd,bjhd,bjhe", n_batch=(2, 2)),
    Case(of_gains, (33, 65), (16, 16), dtype="float32"),
    Case(biased_by_temperature, (130, 37), (32, 32), n_batch=(3, 3)),
]
LEARNED = [biased_causal, of_learned_slopes, of_gains, biased_by_temperature]
PEAKS = ["all equal", "equal q and k", "large", "one peak"]
OTHERS = [
    Case(capped, (65, 197), (40, 64)),
    Case(masked, (70, 63), (64, 64)),
    Case(filled, (70, 163), (80, 128), "bihgd,bjhd,bjhe", "float16"),
    Case(causal, (197, 1500), (64, 64), "id,jd,je"),
    Case(biased_causal, (256, 144), (64, 64), drops=True),
    *(Case(causal, lengths) for lengths in LENGTHS),
    *(Case(masked, (130, 200), letters=letters, where=True) for letters in LAYOUTS if "b" in letters),
    *(Case(capped, (197, 130), letters=letters) for letters in LAYOUTS),
    *(
        Case(scaled, (150, 130), (d, e))
        for d, e in ((32, 32), (40, 40), (80, 80), (96, 96), (128, 128), (192, 128), (36, 20))
    ),
    *(Case(causal, (150, 130), (d, e)) for d, e in ((64, 128), (128, 64), (256, 256), (248, 40), (160, 160))),
    *(Case(score, (200, 190)) for score in SCORES if score not in (causal, scaled)),
    *(Case(score, (200, 190), dtype="float16") for score in SCORES),
    *(Case(score, (200, 190), product="float32") for score in SCORES),
    *(Case(score, (200, 190), dtype="float32") for score in SCORES),
    *(Case(score, (130, 70), (136, 64), "bihgd,bjhd,bjhe", n_batch=(5, 2)) for score in LEARNED),
    *(Case(score, (9, 21), (16, 32), "bihd,bjhd,bjhe", n_batch=(300, 2)) for score in LEARNED),
    *(Case(score, (70, 100), (128, 96), dtype="float32") for score in LEARNED),
    *(
        Case(causal, (150, 130), (d, e), dtype="float32")
        for d, e in ((32, 32), (40, 40), (80, 96), (96, 80), (128, 128), (128, 64), (20, 101))
    ),
    *(Case(causal, (150, 150), dtype="float32", peaks=peaks) for peaks in PEAKS),
    Case(biased, (70, 163), (128, 128), "ihd,jd,je", "float32", drops=True),
    Case(of_one_segment, (256, 256)),
    *(Case(score, (200, 190), drops=True) for score in (scaled, masked, biased_causal, capped)),
    *(Case(biased_causal, lengths) for lengths in ((300, 300), (301, 197), (64, 63))),
    Case(biased_causal, (128, 256), (64, 64), "bihgd,bjhd,bjhe", product="float32"),
    Case(alibi_in_a_window, (300, 300)),
    *(Case(in_windows_of_heads, (300, 300), letters=letters) for letters in ("bihd,bjhd,bjhe", "ihd,jd,je")),
    *(
        Case(causal, (197, 197), peaks=peaks, product="float32", drops=drops)
        for peaks in PEAKS
        for drops in (False, True)
    ),
    *(
        Case(score, (150, 150), (128, 128), peaks=peaks, dtype="float16")
        for peaks in PEAKS
        for score in (scaled, capped)
    ),
    *(Case(score, (130, 130), peaks=peaks) for peaks in PEAKS for score in (alibi_in_a_window, biased, masked)),
    *(Case(causal, (70, 70), special=special) for special in (np.nan, np.inf, -np.inf)),
    *(Case(masked, (70, 70), where=True, special=special) for special in (np.nan, np.inf)),
]
