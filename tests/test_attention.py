"""Attention's kernels: that they compile, that tiles fit and cover everything, and what they compute.

Values and gradients are compared with float64, beside the error of the program that has its weights in memory: on the
host, which runs the kernels' whole text, and the same cases on a GPU, if there is one. A failure names the first
element that is wrong, and the tile, row and column where it lies; `pytest -s` prints the largest errors of every case.
"""

import contextlib
import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Callable

import attention_on_host
import emulated
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import support
from by_numpy import by_numpy
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_softmax
from jax_softmax import _kernels
from jax_softmax.fusion.attention.kernels import attention_p
from jax_softmax.fusion.attention.source import KERNELS, Letters
from jax_softmax.fusion.rewriting import rewritten

MOST_SPILLED = 128  # bytes, as of the other kernels
MOST_SHARED = 99 << 10  # bytes, of the smallest chips
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
    n_batch: tuple[int, int] = (2, 2)  # extents of b and h

    def __str__(self):
        words = [self.score.__name__, "x".join(map(str, self.lengths)), "-".join(map(str, self.features)), self.dtype]
        words += [self.letters] * (self.letters != USUAL) + [self.product] * bool(self.product)
        words += ["drops"] * self.drops + ["where"] * self.where + [str(self.special)] * bool(self.special)
        return " ".join(words)

    @property
    def sides(self):
        batch = set(self.letters) - {"i", "j", "d", "e", ","}
        return [("".join(c for c in letters if c in batch | {"i", "j"}), d) for letters, d in SCORES[self.score]]

    @property
    def extents(self):
        (i, j), (d, e) = self.lengths, self.features
        return {**dict(zip("bh", self.n_batch, strict=True)), "g": 3, "i": i, "j": j, "d": d, "e": e}

    def operands(self):
        """q, k, v, the output's cotangent, and the arrays among the sides."""
        rng, extents = np.random.default_rng(0), self.extents
        q, k, v = self.letters.split(",")
        arrays = [
            rng.standard_normal([extents[c] for c in of]).astype(jnp.dtype(self.dtype))
            for of in (q, k, v, q[:-1] + "e")
        ]
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
            weights = jnp.where(arrays[0], weights / 0.8, 0)
        o = jnp.einsum(f"{rows}j,{letters.v}->{letters.o}", weights.astype(v.dtype), v)
        return o.astype(q.dtype)


def values_and_gradients(function, q, k, v, o_cotangent, *sides):
    """Of all arrays of floats."""
    moving = [k for k, a in enumerate(sides) if jnp.issubdtype(a.dtype, jnp.floating)]

    def of_floats(q, k, v, *moved):
        moved = iter(moved)
        return function(q, k, v, *(next(moved) if k in moving else a for k, a in enumerate(sides)))

    o, transposed = jax.vjp(of_floats, q, k, v, *(sides[k] for k in moving))
    return o, *transposed(o_cotangent)


jitted = jax.jit(values_and_gradients, static_argnums=0)


@functools.cache
def references(case):
    """In float64, and by the program that has its weights in memory."""
    return in_float64(case, case.operands()), jitted(case.program, *case.operands())


def in_float64(case, operands):
    operands = [a.astype(np.float64) if jnp.issubdtype(a.dtype, jnp.floating) else a for a in operands]
    with jax.enable_x64(True):
        return by_numpy(functools.partial(values_and_gradients, case.program), *operands)


def fused(case):
    return jax_softmax.fuse(lambda *operands: values_and_gradients(case.program, *operands))


@np.errstate(invalid="ignore")  # of infinities
def check(case):
    """The fused program's values and gradients: finite where the program's are, and about as exact."""
    operands = case.operands()
    assert set(attention_in(case)) == set(KERNELS)
    expected, unfused = references(case)
    found = jax.jit(fused(case))(*operands)
    letters = Letters(*case.letters.split(","))
    of = dict(zip(("o", "dq", "dk", "dv"), (letters.o, *letters), strict=True))
    of |= {f"d{letters}": letters for letters, dtype in case.sides if dtype in ("bfloat16", "float32")}
    # What p (do v^T - delta) may be off by in float32 where its terms cancel, times a row of k or q.
    q, k, v, o_cotangent = (np.abs(a[np.isfinite(a)].astype(np.float64)).max() for a in operands[:4])
    cancelled = float(np.finfo(np.float32).eps) * max(q, k) * v * o_cotangent * case.features[1]
    mistakes = []
    for (name, letters), right, with_weights, own in zip(of.items(), expected, unfused, found, strict=True):
        with_weights, own = np.asarray(with_weights, np.float64), np.asarray(own, np.float64)
        finite = np.isfinite(with_weights) & np.isfinite(right)
        largest = np.abs(right[finite]).max(initial=0)
        errors = {"own": np.abs(own - right), "unfused": np.abs(with_weights - right)}
        worst = {who: error[finite & np.isfinite(own)].max(initial=0) for who, error in errors.items()}
        bound = (2 if name == "o" else 3) * worst["unfused"] + float(jnp.finfo(case.dtype).eps) * largest + cancelled
        print(f"{case}: {name}: error {worst['own']:.1e}, unfused {worst['unfused']:.1e}, largest {largest:.1e}")
        wrong = np.where(finite, ~(errors["own"] <= bound), np.isnan(own) != np.isnan(with_weights))
        if wrong.any():
            at = tuple(np.argwhere(wrong)[0])
            mistakes.append(
                f"{name}: {wrong.sum()} of {wrong.size} wrong, error {worst['own']:.1e} of {bound:.1e}; "
                f"{own[at]} for {right[at]} at {where(name, letters, at, case)}; wrong {extent_of(wrong, letters)}"
            )
    assert not mistakes, f"{case}:\n" + "\n".join(mistakes)


def where(name, letters, at, case):
    """An element's indices, and the tile, row of it and column where the kernel that made it has it."""
    indices = dict(zip(letters, (int(n) for n in at), strict=True))
    kernel = {"o": "forward", "dk": "keys", "dv": "keys"}.get(name, "queries")
    rows = _kernels.attention_tiling(kernel, *case.features)["rows"]
    row = indices.get("i" if kernel != "keys" else "j", 0)
    return f"{indices} (tile {row // rows} of {rows} rows, row {row % rows}, column {at[-1]})"


def extent_of(wrong, letters):
    found = np.argwhere(wrong)
    return ", ".join(f"{c} {low}..{high}" for c, low, high in zip(letters, found.min(0), found.max(0), strict=True))


# ---- Cases: the first ones run on the host as well, in one of the ways to copy; the others there with --sweeps alone

LENGTHS = [(63, 65), (64, 64), (65, 63), (197, 197), (197, 1500), (1500, 197)]
LAYOUTS = ["bhid,bhjd,bhje", "bihd,bhjd,jhbe", "id,jd,je", "bihgd,bjhd,bjhe", "gihd,jhd,jhe", "ihd,jd,je"]
FIRST = [
    Case(capped_in_its_dtype, (40, 40), (32, 32)),
    Case(masked, (70, 63), (64, 64), where=True),
    Case(biased, (17, 65), (128, 128), "bhid,bhjd,jhbe", product="float32", drops=True),
    Case(causal_and_smallest, (65, 65), (256, 192)),
    Case(growing, (17, 200), (32, 32)),
]
OTHERS = [
    Case(capped, (65, 197), (40, 64)),
    Case(masked, (70, 63), (64, 64)),
    Case(filled, (70, 163), (80, 128), "bihgd,bjhd,bjhe", "float16"),
    Case(causal, (197, 1500), (64, 64), "id,jd,je"),
    Case(biased_causal, (256, 144), (64, 64), drops=True),
    *(Case(causal, lengths) for lengths in LENGTHS),
    *(Case(masked, (130, 200), letters=letters, where=True) for letters in LAYOUTS if "b" in letters),
    *(Case(capped, (197, 130), letters=letters) for letters in LAYOUTS),
    *(Case(scaled, (150, 130), (d, e)) for d, e in ((32, 32), (40, 40), (80, 80), (96, 96), (128, 128), (192, 128))),
    *(Case(causal, (150, 130), (d, e)) for d, e in ((64, 128), (128, 64), (256, 256), (248, 40), (160, 160))),
    *(Case(score, (200, 190)) for score in SCORES if score not in (causal, scaled)),
    *(Case(score, (200, 190), dtype="float16") for score in SCORES),
    *(Case(score, (200, 190), product="float32") for score in SCORES),
    Case(of_one_segment, (256, 256)),
    *(Case(score, (200, 190), drops=True) for score in (scaled, masked, biased_causal, capped)),
    *(Case(biased_causal, lengths) for lengths in ((300, 300), (301, 197), (64, 63))),
    Case(biased_causal, (128, 256), (64, 64), "bihgd,bjhd,bjhe", product="float32"),
    Case(alibi_in_a_window, (300, 300)),
    *(Case(in_windows_of_heads, (300, 300), letters=letters) for letters in ("bihd,bjhd,bjhe", "ihd,jd,je")),
    *(Case(causal, (70, 70), special=special) for special in (np.nan, np.inf, -np.inf)),
    *(Case(masked, (70, 70), where=True, special=special) for special in (np.nan, np.inf)),
]
on_gpu = pytest.mark.skipif(support.why_no_cuda() is not None, reason=str(support.why_no_cuda()))
on_host = pytest.mark.skipif(attention_on_host.COMPILER is None, reason="needs a C++ compiler and the sources")


# Copies are made when they begin, or late: when they are waited for.
COPIES = list(itertools.product([*FIRST, *OTHERS], [False, True]))
FIRST_COPIES = [(case, k % 2 == 1) for k, case in enumerate(FIRST)]


@on_host
@pytest.mark.parametrize(
    "case,late", [pytest.param(*c, marks=[pytest.mark.sweep] * (c not in FIRST_COPIES)) for c in COPIES], ids=str
)
def test_on_the_host(case, late):
    with emulated.kernels(attention=True), attention_on_host.kernels(late):
        check(case)


@on_gpu
@pytest.mark.parametrize("case", [*FIRST, *OTHERS], ids=str)
def test_on_a_gpu(case):
    with emulated.all_kernels(attention=True):
        check(case)


@on_gpu
def test_the_same_bits_every_time():
    case = Case(causal, (1500, 1500), (128, 128), "bihgd,bjhd,bjhe")
    operands = case.operands()
    with emulated.all_kernels(attention=True):
        function = jax.jit(fused(case)).lower(*operands).compile()
    first = function(*operands)
    for _ in range(3):
        for a, b in zip(first, function(*operands), strict=True):
            np.testing.assert_array_equal(np.asarray(a).view(np.uint16), np.asarray(b).view(np.uint16))


# ---- On several devices


def alibi_and_mask(x, h, i, j, mask):
    return jnp.where(
        mask & (i >= j), wide(x) * SCALE - wide(h.astype(jnp.float32)) * (i - j).astype(jnp.float32), -1e30
    )


SCORES[alibi_and_mask] = (("h", "index"), ("i", "index"), ("j", "index"), ("bij", "bool"))


DIVIDED = [("data", None, "model"), (("data", "model"), None, None), (None, None, "data")]


@support.sampled(
    "specs,kind",
    [(specs, kind) for specs in DIVIDED for kind in (AxisType.Auto, AxisType.Explicit)]
    + [(("data", "model", None), AxisType.Auto)],
    3,
)
def test_batch_and_heads_are_divided(specs, kind):
    """Nothing travels; a divided sequence is gathered, with a warning."""
    case = dataclasses.replace(Case(alibi_and_mask, (40, 32), (16, 24)), n_batch=(8, 4))
    mesh = support.mesh_of_cpus((4, 2), kind)
    *arrays, mask = case.operands()
    placed = [jax.device_put(a, NamedSharding(mesh, P(*specs))) for a in arrays]
    placed.append(jax.device_put(mask, NamedSharding(mesh, P(specs[0]))))
    expected = jax.jit(values_and_gradients, static_argnums=0)(case.program, *arrays, mask)
    is_whole = specs[1] is None
    with (
        emulated.kernels(attention=True),
        attention_on_host.kernels(in_jax=True) as made,
        jax.set_mesh(mesh) if kind == AxisType.Explicit else contextlib.nullcontext(),
        contextlib.nullcontext() if is_whole else pytest.warns(UserWarning, match="whole sequences"),
    ):
        program = jax.jit(fused(case)).lower(*placed).compile()
        found = program(*placed)
    assert {params["kernel"] for params, _ in made} == set(KERNELS)
    if is_whole:
        assert not support.collectives(program)
        parts = [math.prod(mesh.shape[name] for name in np.atleast_1d(of) if name) for of in specs]
        assert {operands[0].shape[::2] for _, operands in made} == {(8 // parts[0], 4 // parts[2])}
    for a, b in zip(found, expected, strict=True):
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        np.testing.assert_allclose(a, b, rtol=0, atol=0.02 * np.abs(b).max())


@support.sampled("outside", [True, False], 2)
def test_in_shard_map(outside):
    mesh, operands = support.mesh_of_cpus((4, 2), AxisType.Auto), Case(scaled, n_batch=(8, 2)).operands()

    def program(*operands):
        return values_and_gradients(functools.partial(jax.nn.dot_product_attention, is_causal=True), *operands)

    def divided(f):
        return jax.shard_map(f, mesh=mesh, in_specs=P("data"), out_specs=P("data"))

    expected = jax.jit(program)(*operands)
    with emulated.kernels(attention=True), attention_on_host.kernels(in_jax=True) as made:
        f = jax_softmax.fuse(divided(program)) if outside else divided(jax_softmax.fuse(program))
        compiled = jax.jit(f).lower(*operands).compile()
        found = compiled(*operands)
    assert not support.collectives(compiled)
    assert {operands[0].shape[0] for _, operands in made} == {2}
    for a, b in zip(found, expected, strict=True):
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        np.testing.assert_allclose(a, b, rtol=0, atol=0.02 * np.abs(b).max())


# ---- Compiling


def attention_in(case):
    """The kernels that the fused program calls, by name: an `Attention`, and the extents by its letters."""
    operands = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in case.operands()]
    (eqn,) = jax.make_jaxpr(fused(case))(*operands).eqns
    with emulated.all_kernels(attention=True):
        calls = [e for e in rewritten(eqn.params["jaxpr"]).eqns if e.primitive is attention_p]
    found = [(e.params["kernel"], e.params["attention"], [v.aval for v in e.invars[:3]]) for e in calls]
    return {kernel: (attention, attention.extents(*avals)) for kernel, attention, avals in found}


def plan_of(kernel, case):
    attention, extents = attention_in(case)[kernel]
    return attention.plan(kernel, case.dtype, extents)


def mask_cap_and_bias(x, i, j, bias):
    return jnp.where(i >= j, 20 * jnp.tanh(wide(x) * (SCALE / 20)) + wide(bias), -1e30)


SCORES[mask_cap_and_bias] = (("i", "index"), ("j", "index"), ("hij", "bfloat16"))
# A case for each row of the table, of lengths that are a multiple of every tile or of none.
COMPILED = [
    Case(mask_cap_and_bias, (n, n), (features, features), dtype=dtype)
    for features, n, dtype in ((64, 2048, "bfloat16"), (128, 2048, "float16"), (256, 197, "bfloat16"))
]


@support.sampled("compute_capability,case", itertools.product([90, 80, 100, 120], COMPILED), 4, ids=str)
def test_compiles(jit, case, compute_capability):
    jit.needs(compute_capability)
    for kernel in KERNELS:
        plan = plan_of(kernel, case)
        _, text = _kernels.jit_binary(plan.code, plan.plan, compute_capability)
        spilled = [int(n) for n in re.findall(r"(\d+) bytes spill stores", text)]
        assert spilled and max(spilled) <= MOST_SPILLED, f"{plan.plan}: {text}"


# ---- Geometry


@pytest.mark.parametrize("kernel", KERNELS)
def test_tiles_fit_and_cover_everything(kernel):
    attention, _ = attention_in(Case(scaled))[kernel]
    for d, e in itertools.product(range(8, 257, 8), (8, 64, 128, 136, 256)):
        tiling = _kernels.attention_tiling(kernel, d, e)
        assert tiling["rows"] % 16 == 0 and tiling["step"] % 16 == 0
        for n in (1, 15, 16, 197, 2048):
            extents = {"b": 2, "h": 2, "i": n, "j": n, "d": d, "e": e}
            plan = attention.plan(kernel, "bfloat16", extents)
            assert plan.shared_bytes <= MOST_SHARED
            assert plan.blocks == 4 * -(-n // tiling["rows"]) * tiling["parts"]
            assert plan.threads >= tiling["step"] or kernel != "keys"  # which copy the rows' numbers


def late_and_causal(x, i, j):
    return jnp.where((i >= j) & (i > 100), x, -jnp.inf)


SCORES[late_and_causal] = (("i", "index"), ("j", "index"))


@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize("kernel", KERNELS)
def test_bounds_visit_what_is_seen(kernel, zero):
    attention, extents = attention_in(Case(late_and_causal, (300, 300)))[kernel]
    attention = attention._replace(empty_rows_are_zero=zero)
    tiling = _kernels.attention_tiling(kernel, 64, 64)
    i, j = np.arange(300)[:, None], np.arange(300)
    shown = (i >= j) & (i > 100)
    seen = shown | ((not zero) & (i <= 100))
    if kernel == "keys":
        shown, seen = shown.T, seen.T
    ends = attention.bounds(kernel, extents, [])
    assert len(ends) == -(-300 // tiling["rows"])
    rows, step = tiling["rows"], tiling["step"]
    n_whole = 0
    for block, (first, end, first_whole, end_whole) in enumerate(np.asarray(ends)):
        steps = np.flatnonzero(seen[block * rows :][:rows].any(0)) // step
        assert (first, end) == (steps.min(), steps.max() + 1) if steps.size else first >= end
        tiles = [shown[block * rows :, k * step :][:rows, :step] for k in range(-(-300 // step))]
        whole = [k for k, tile in enumerate(tiles) if tile.shape == (rows, step) and tile.all()]
        assert list(range(first_whole, end_whole)) == whole
        n_whole += len(whole)
    assert n_whole


def test_bounds_read_what_may_hold_fills():
    def letters_of_bounds(score):
        return attention_in(Case(score, (300, 300)))["forward"][0].letters_of_bounds

    assert letters_of_bounds(alibi_in_a_window) == ""
    assert letters_of_bounds(biased_causal) == ""  # whose bias has a gradient
    attention, _ = attention_in(Case(biased_causal, (300, 300)))["forward"]
    assert attention._replace(written=None).letters_of_bounds == "h"


@pytest.mark.parametrize(
    "letters,message",
    [
        ("bihd,bjhd,bjd", "bjd must have j and, last, e"),
        ("dbih,bjhd,bjhe", "dbih must have i and, last, d"),
        ("bihd,bjhd,jhe", "the same batch letters"),
        ("bid,bjhd,bjhe", "of those of q"),
        ("bihd,bjhd,bjhhe", "twice"),
    ],
)
def test_other_letters_are_refused(letters, message):
    with pytest.raises(ValueError, match=message):
        Letters(*letters.split(",")).check([], "")


@pytest.mark.parametrize(
    "case",
    [
        Case(features=(36, 64)),
        Case(features=(64, 264)),
        Case(dtype="float32"),
        Case(lengths=(1, 17)),
        Case(lengths=(17, 1)),
    ],
    ids=str,
)
def test_what_kernels_cannot_do_stays(case):
    assert not attention_in(case)
