"""Attention: what its kernels compute.

Values and gradients are compared with float64, beside the error of the program that has its weights in memory: on the
host, which runs the kernels' whole text, and the same cases on a GPU, if there is one. A failure names the first
element that is wrong, and the tile, row and column where it lies; `pytest -s` prints the largest errors of every case.
"""

import contextlib
import dataclasses
import functools
import itertools
import math

import attention_on_host
import emulated
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import support
from attention_cases import (
    FIRST,
    KERNELS,
    OTHERS,
    SCALE,
    SCORES,
    USUAL,
    Case,
    alibi_in_a_window,
    attention_in,
    biased,
    biased_causal,
    by_tensor_cores,
    capped,
    causal,
    fused,
    masked,
    of_learned_slopes,
    scaled,
    values_and_gradients,
    wide,
)
from attention_promises import PROMISES
from by_numpy import by_numpy
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_softmax
from jax_softmax import _kernels
from jax_softmax.fusion.attention.letters import Letters

on_gpu = pytest.mark.skipif(support.why_no_cuda() is not None, reason=str(support.why_no_cuda()))
jitted = jax.jit(values_and_gradients, static_argnums=0)


def with_weights_in_memory(case, operands):
    """What the unfused program has on a GPU."""
    if case.dtype == "float32":
        return by_tensor_cores(functools.partial(values_and_gradients, case.program), *operands)
    return jitted(case.program, *operands)


def in_float64(case, operands):
    operands = [a.astype(np.float64) if jnp.issubdtype(a.dtype, jnp.floating) else a for a in operands]
    with jax.enable_x64(True):
        return by_numpy(functools.partial(values_and_gradients, case.program), *operands)


@np.errstate(invalid="ignore")  # of infinities
def check(case):
    """The fused program's values and gradients: finite where the program's are, and about as exact."""
    operands = case.operands()
    assert set(attention_in(case)) == case.kernels
    expected, found = in_float64(case, operands), jax.jit(fused(case))(*operands)
    unfused = functools.cache(
        lambda: with_weights_in_memory(case, operands)
    )  # which runs where this is not exact enough
    letters = Letters(*case.letters.split(","))
    of = dict(zip(("o", "dq", "dk", "dv"), (letters.o, *letters), strict=True))
    of |= {f"d{letters}": letters for letters, dtype in case.sides if dtype in ("bfloat16", "float32")}
    # What p (do v^T - delta) may be off by in float32 where its terms cancel, times a row of k or q.
    q, k, v, o_cotangent = (np.abs(a[np.isfinite(a)].astype(np.float64)).max() for a in operands[:4])
    cancelled = float(np.finfo(np.float32).eps) * max(q, k) * v * o_cotangent * case.features[1]
    mistakes = []
    for n, ((name, letters), right, own) in enumerate(zip(of.items(), expected, found, strict=True)):
        own, least = np.asarray(own, np.float64), float(jnp.finfo(case.dtype).eps) * np.abs(right).max() + cancelled
        if np.isfinite(right).all() and np.all(np.abs(own - right) <= least):
            print(f"{case}: {name}: error {np.abs(own - right).max():.1e}, largest {np.abs(right).max():.1e}")
            continue
        with_weights = np.asarray(unfused()[n], np.float64)
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
    reads_arrays = attention_in(case)[kernel][0].reads_arrays(kernel)
    letter = "j" if kernel == "keys" else "i"
    capability = min((device[0] for device in _kernels.devices_here()), default=0)
    size = jnp.dtype(case.dtype).itemsize
    stay = case.lengths["ij".index(letter)]
    rows, *_ = _kernels.attention_tile(kernel, stay, *case.features, size, reads_arrays, capability)
    row = indices.get(letter, 0)
    return f"{indices} (tile {row // rows} of {rows} rows, row {row % rows}, column {at[-1]})"


def extent_of(wrong, letters):
    found = np.argwhere(wrong)
    return ", ".join(f"{c} {low}..{high}" for c, low, high in zip(letters, found.min(0), found.max(0), strict=True))


# Copies are made when they begin, or late: when they are waited for.
COPIES = list(itertools.product([*FIRST, *OTHERS], [False, True]))
FIRST_COPIES = [(case, k % 2 == 1) for k, case in enumerate(FIRST)]


@emulated.compiler_is_needed
@pytest.mark.parametrize(
    "case,late", [pytest.param(*c, marks=[pytest.mark.sweep] * (c not in FIRST_COPIES)) for c in COPIES], ids=str
)
def test_on_the_host(case, late):
    with emulated.kernels(attention=True), attention_on_host.kernels(late):
        check(case)


# Hopper's schedules take more than 128 queries or, of dk and dv, keys. NaN passes by keys whose tiles are skipped.
ON_HOPPER = [
    dataclasses.replace(
        case, lengths=tuple(n + 130 * (n <= 128 and not (k and case.special)) for k, n in enumerate(case.lengths))
    )
    for case in (*FIRST, *OTHERS, *PROMISES.values())
    if case.dtype != "float32" and case.peaks != "one peak"
]
FIRST_ON_HOPPER = [
    Case(capped, (197, 130), (40, 64)),
    Case(masked, (200, 63), (64, 64), where=True),
    Case(masked, (140, 272), (96, 64)),
    Case(capped, (70, 200), (128, 128), "bihgd,bjhd,bjhe", n_batch=(2, 1)),
    Case(alibi_in_a_window, (450, 450), (64, 64), n_batch=(1, 2)),
    Case(biased_causal, (140, 200), (64, 128), drops=True, n_batch=(2, 1)),
    Case(of_learned_slopes, (197, 150), (64, 64), n_batch=(1, 2)),
    Case(biased, (147, 64), (128, 128), "bhid,bhjd,jhbe", product="float32", drops=True, n_batch=(1, 2)),
    Case(causal, (330, 330), (192, 128), "bihgd,bjhd,bjhe", "float16", n_batch=(1, 1)),
    Case(causal, (197, 300), (24, 256), "id,jd,je"),
    Case(causal, (150, 130), (160, 160), n_batch=(1, 1)),
    Case(capped, (150, 197), (256, 256), "bihgd,bjhd,bjhe", n_batch=(1, 2)),
    Case(masked, (140, 272), (192, 128), "bhid,bhjd,bhje", "float16", where=True, n_batch=(1, 1)),
    Case(biased_causal, (147, 200), (256, 200), drops=True, n_batch=(2, 1)),
    Case(alibi_in_a_window, (300, 300), (256, 256), n_batch=(1, 1)),
    Case(causal, (197, 330), (128, 128), "bihgd,bjhd,bjhe", n_batch=(1, 1)),  # warpgroups pass steps of each group
    Case(capped, (270, 150), (128, 96), dtype="float32", n_batch=(1, 2)),  # by the other kernels, with larger tiles
]


@emulated.compiler_is_needed
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(
    "case", [*FIRST_ON_HOPPER, *(pytest.param(c, marks=pytest.mark.sweep) for c in ON_HOPPER)], ids=str
)
def test_hopper_on_the_host(case, late):
    """Either copies are late or products are."""
    with emulated.kernels(attention=True), attention_on_host.kernels(late, compute_capability=90):
        check(case)


@emulated.compiler_is_needed
@pytest.mark.parametrize("name", PROMISES)
def test_promises_on_the_host(name):
    """Every other case copies late."""
    with emulated.kernels(attention=True), attention_on_host.kernels(list(PROMISES).index(name) % 2 == 0):
        check(PROMISES[name])


@on_gpu
@pytest.mark.parametrize("case", [*FIRST, *OTHERS, *PROMISES.values()], ids=str)
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
    "specs,kind,letters",
    [(*both, USUAL) for both in itertools.product(DIVIDED, (AxisType.Auto, AxisType.Explicit))]
    + [(("data", "model", None), AxisType.Auto, "ibhd,jbhd,jbhe")],
    3,
)
def test_batch_and_heads_are_divided(specs, kind, letters):
    """Nothing travels, but keys and values of a divided sequence."""
    case = dataclasses.replace(Case(alibi_and_mask, (40, 32), (16, 24), letters), n_batch=(8, 4))
    mesh = support.mesh_of_cpus((4, 2), kind)
    *arrays, mask = case.operands()
    of = dict(zip("bih", specs, strict=True))
    spec = P(*(of[c] for c in letters.split(",")[0][:-1]))
    placed = [jax.device_put(a, NamedSharding(mesh, spec)) for a in arrays]
    placed.append(jax.device_put(mask, NamedSharding(mesh, P(specs[0]))))
    expected = jax.jit(values_and_gradients, static_argnums=0)(case.program, *arrays, mask)
    with (
        emulated.kernels(attention=True),
        attention_on_host.kernels(in_jax=True) as made,
        jax.set_mesh(mesh) if kind == AxisType.Explicit else contextlib.nullcontext(),
    ):
        program = jax.jit(fused(case)).lower(*placed).compile()
        found = program(*placed)
    assert {params["kernel"] for params, _ in made} == set(KERNELS)
    assert not support.collectives(program) or specs[1]
    parts = [math.prod(mesh.shape[name] for name in np.atleast_1d(of) if name) for of in specs]
    extents = [params["attention"].extents(*operands[:3]) for params, operands in made]
    assert {tuple(own[c] for c in "bihj") for own in extents} == {(8 // parts[0], 40 // parts[1], 4 // parts[2], 32)}
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
