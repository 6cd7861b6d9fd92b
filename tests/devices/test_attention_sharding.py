"""Attention in programs that XLA divides along sequences: heads are divided instead, if they go evenly; or else queries
stay where they are, and keys and values are gathered.

Eight simulated CPU devices. What a device's kernels do is done in JAX, as it is where devices share rows.
"""

import functools
import math
import re

import attention_on_host
import emulated
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import support
from attention_programs import normal
from by_numpy import by_numpy
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from sharded import in_mode, mesh

from jax_softmax import fuse
from jax_softmax.fusion.attention import kernels

pytestmark = pytest.mark.usefixtures("default_flags", "on_the_cpu")

B, H, D, QUERIES, KEYS = 2, 6, 16, 96, 160  # lengths that nothing else has; heads that four devices do not share
SEQUENCE, BOTH, OVER_BOTH = P(None, "data"), P("model", "data"), P(None, ("data", "model"))

TRAVELS = {"all-gather", "all-to-all"}
KERNELS = "forward", "queries", "keys"


def operands(heads_of_keys=H, queries=QUERIES, heads=H):
    keys = [normal(B, KEYS, heads_of_keys, D, seed=n) for n in (1, 2)]
    return [normal(B, queries, heads, D), *keys]


def scores_of(q, k):
    return jnp.einsum("bihd,bjhd->bhij", q, k).astype(jnp.float32) / 4


def is_causal(s):
    """The last query sees all keys."""
    i, j = (jnp.arange(n) for n in s.shape[-2:])
    return i[:, None] + KEYS - QUERIES >= j


def attend(s, v):
    return jnp.einsum("bhij,bjhd->bihd", jax.nn.softmax(s).astype(v.dtype), v)


def causal(q, k, v):
    s = scores_of(q, k)
    return attend(jnp.where(is_causal(s), s, -1e30), v)


def grouped(q, k, v):
    groups = q.reshape(B, QUERIES, k.shape[2], -1, D)
    s = jnp.einsum("bihgd,bjhd->bhgij", groups, k).astype(jnp.float32) / 4
    p = jax.nn.softmax(jnp.where(is_causal(s), s, -jnp.inf)).astype(v.dtype)
    return jnp.einsum("bhgij,bjhd->bihgd", p, v).reshape(q.shape)


def masked(q, k, v, mask):
    return attend(jnp.where(mask, scores_of(q, k), -1e30), v)


def biased(q, k, v, bias):
    s = scores_of(q, k) + bias
    return attend(jnp.where(is_causal(s), s, -1e30), v)


def with_sink(q, k, v, sink):
    s = scores_of(q, k)
    s = jnp.where(is_causal(s), s, -jnp.inf)
    sink = jnp.broadcast_to(sink[:, None, None].astype(jnp.float32), (*s.shape[:3], 1))
    p = jax.nn.softmax(jnp.concatenate([s, sink], -1))[..., :-1]
    return jnp.einsum("bhij,bjhd->bihd", p.astype(v.dtype), v)


def values_and_gradients(attend):
    """Of the operands and the output's cotangent: the output, and those of all floats."""

    def program(*operands):
        *read, o_cotangent = operands
        learned = [a for a in read if a.dtype in (jnp.float32, jnp.bfloat16)]
        o, transposed = jax.vjp(lambda *a: attend(*a, *read[len(a) :]), *learned)
        return o, *transposed(o_cotangent)

    return program


def compiled_by_kernels(program, given, specs, kind=AxisType.Auto):
    """The compiled program, its results, and of each kernel its name and its numbers of queries and keys."""
    placed = [jax.device_put(a, NamedSharding(mesh(kind), spec)) for a, spec in zip(given, specs, strict=True)]
    with emulated.kernels(attention=True), attention_on_host.kernels(in_jax=True) as made, in_mode(kind):
        compiled = support.compiled_in_haste(fuse(program), *placed)
        found = compiled(*placed)
    extents = [(params["kernel"], params["attention"].extents(*operands[:3])) for params, operands in made]
    return compiled, found, {(kernel, of["i"], of["j"]) for kernel, of in extents}


def assert_about_as_exact(found, program, given):
    """As the program on one device."""
    wide = [a.astype(jnp.float32) if a.dtype == jnp.bfloat16 else a for a in given]
    exact, alone = by_numpy(program, *wide), support.in_haste(program, *given)
    for n, (own, one, right) in enumerate(zip(found, alone, exact, strict=True)):
        own_error, error = (np.abs(np.asarray(a, np.float64) - right).max() for a in (own, one))
        assert (own.shape, own.dtype) == (one.shape, one.dtype)
        assert own_error <= (3 if n else 2) * error + float(jnp.finfo(own.dtype).eps) * np.abs(right).max()


def check(attend, given, specs, queries, travels=TRAVELS, kind=AxisType.Auto, cut=lambda a: a, kernels=KERNELS):
    """Values and gradients are about as exact as on one device, by kernels of so many queries and all keys. Nothing but
    indices has all queries in a device's program."""
    program = values_and_gradients(attend)
    given, specs = [*given, normal(*given[0].shape, seed=7)], [*specs, specs[0]]
    compiled, found, calls = compiled_by_kernels(lambda *a: program(*map(cut, a)), given, specs, kind)
    assert calls == {(kernel, queries, KEYS) for kernel in kernels}
    assert travels is None or {name for name, _ in support.collectives(compiled)} == travels
    if queries != QUERIES:
        shapes = {tuple(map(int, dims.split(","))) for dims in re.findall(r"\[([\d,]+)\]", compiled.as_text())}
        assert not [shape for shape in shapes if QUERIES in shape and math.prod(shape) > QUERIES]
    assert_about_as_exact(found, program, given)
    return compiled


@pytest.mark.parametrize("spec,queries", [(SEQUENCE, 24), (BOTH, 24), (OVER_BOTH, 12)], ids=str)
def test_sequences(spec, queries):
    """Keys and values come once in each pass, their cotangents once to the devices that have them."""
    compiled = check(causal, operands(), [spec] * 3, queries)
    whole = B * KEYS * H * D // (2 if spec == BOTH else 1)
    found = support.collectives(compiled)
    assert [size for name, size in found if name == "all-gather"] == [whole] * 4
    assert [size for name, size in found if name == "all-to-all"] == [whole] * 2


@emulated.compiler_is_needed
def test_kernels_of_a_part():
    """They are given the places of their rows, and skip what these do not see."""
    given = operands()
    placed = [jax.device_put(a, NamedSharding(mesh(), SEQUENCE)) for a in given]
    with emulated.kernels(attention=True), attention_on_host.kernels(in_jax=True) as made:
        jax.jit(fuse(causal)).lower(*placed).compile()
    ((params, _),) = made
    (q, k, v), attention = given, params["attention"]
    with attention_on_host.kernels():
        forward = jax.jit(functools.partial(kernels.forward, attention))
        parts = [forward(q[:, n : n + 24], k, v, jnp.arange(n, n + 24, dtype=jnp.int32))[0] for n in range(0, 96, 24)]
    extents = attention.extents(q[:, :24], k, v)
    ends = [attention.visible.bounds("forward", extents, [jnp.arange(n, n + 24)])[0, 1] for n in (0, 72)]
    assert ends == [2, 3]  # cells of 64 keys
    assert_about_as_exact([jnp.concatenate(parts, 1)], lambda *a: [causal(*a)], given)


def test_slopes_of_heads():
    check(with_slopes, operands(), [P("model", "data")] * 3, 24)


def test_sequences_of_queries_alone():
    """Keys and values are whole on all devices, and so are their cotangents."""
    check(causal, operands(), [SEQUENCE, P(), P()], 24)


@pytest.mark.parametrize("spec", [SEQUENCE, P("model", "data"), P(None, "data", "model")], ids=str)
def test_heads_that_share_keys(spec):
    check(grouped, operands(heads_of_keys=2), [spec] * 3, 24)


def test_groups_that_share_keys_are_divided():
    """Each device makes a part of dk and dv."""

    def attend(q, k, v):
        s = jnp.einsum("bighd,bjhd->bghij", q, k).astype(jnp.float32) / 4
        p = jax.nn.softmax(jnp.where(jax.lax.broadcasted_iota(jnp.int32, s.shape, 3) >= 7, s, -1e30))
        return jnp.einsum("bghij,bjhd->bighd", p.astype(v.dtype), v)

    given = normal(B, QUERIES, 4, 2, D), *operands(heads_of_keys=2)[1:]
    check(attend, given, [P(None, None, "data"), P(), P()], QUERIES)


def test_masks_that_are_arrays():
    mask = support.random_mask((B, 1, QUERIES, KEYS), 3)
    mask[..., 0] = True
    check(masked, [*operands(), mask], [SEQUENCE] * 3 + [P(None, None, "data")], 24)


def test_biases():
    """The cotangent lies as the bias does."""
    bias = normal(B, H, QUERIES, KEYS, seed=4).astype(jnp.float32)
    check(biased, [*operands(), bias], [SEQUENCE] * 3 + [P(None, None, "data")], 24)


def of_temperatures(q, k, v, temperatures, of_keys, bias):
    return attend(scores_of(q, k) * temperatures[:, None, None] + of_keys[:, None, None] + bias, v)


@pytest.mark.parametrize("spec,queries", [(SEQUENCE, 24), (BOTH, 24), (P("model"), QUERIES)], ids=str)
def test_learned_terms(spec, queries):
    """Devices add up what each of them has of a cotangent that all share."""
    of_heads, of_keys, bias = (normal(*shape, seed=4) for shape in ((H,), (B, KEYS), (H, QUERIES, KEYS)))
    learned = [a.astype(jnp.float32) for a in (of_heads, of_keys, bias)]
    specs = [spec] * 3 + [P(), P(*spec[:1]), P(None, *spec[1:2])]
    check(of_temperatures, [*operands(), *learned], specs, queries, None, kernels=(*KERNELS, "scores"))


@pytest.mark.parametrize("spec,queries", [(SEQUENCE, 24), (P("model"), QUERIES)], ids=str)
def test_tangents(spec, queries):
    given = [*operands(), *(a[::-1] for a in operands())]

    def program(*a):
        return jax.jvp(causal, a[:3], a[3:])

    _, found, calls = compiled_by_kernels(program, given, [spec] * 6)
    assert calls == {("tangents", queries, KEYS)}
    assert_about_as_exact(found, program, given)


def test_sinks():
    check(with_sink, [*operands(), normal(H, seed=5)], [SEQUENCE] * 3 + [P()], 24, TRAVELS | {"all-reduce"})


def test_extents_that_do_not_divide():
    """What pads the last shard adds nothing."""

    def cut(a):
        a = jax.lax.with_sharding_constraint(a, NamedSharding(mesh(), SEQUENCE))
        return jnp.where(a == 0, 1, a)  # by which XLA pads with 1

    check(causal, operands(queries=90), [P()] * 3, 23, None, cut=cut)


@pytest.mark.parametrize("heads,queries", [(H, 24), (8, QUERIES)])
def test_explicit_mode(heads, queries):
    """There JAX itself asks for whole keys, as scores would be sharded twice by one mesh axis."""

    def cut(a):
        return jax.sharding.reshard(a, P()) if a.shape[1] == KEYS else a

    given = operands(heads, heads=heads)
    check(causal, given, [SEQUENCE] * 3, queries, kind=AxisType.Explicit, cut=cut)


def test_shard_map():
    """A device's program has its queries, and the program gathers keys."""

    def local(q, k, v):
        k, v = (jax.lax.all_gather(a, "data", axis=1, tiled=True) for a in (k, v))
        i = jnp.arange(q.shape[1]) + jax.lax.axis_index("data") * q.shape[1]
        visible = i[:, None] + KEYS - QUERIES >= jnp.arange(KEYS)
        return attend(jnp.where(visible, scores_of(q, k), -1e30), v)

    given = [*operands(), normal(B, QUERIES, H, D, seed=7)]
    mapped = jax.shard_map(values_and_gradients(local), mesh=mesh(), in_specs=SEQUENCE, out_specs=SEQUENCE)
    _, found, calls = compiled_by_kernels(mapped, given, [SEQUENCE] * 4)
    assert calls == {(kernel, 24, KEYS) for kernel in ("forward", "queries", "keys")}
    assert_about_as_exact(found, values_and_gradients(causal), given)


def test_partly_manual_shard_map():
    """No device knows with whom to add what it has of dk and dv: each makes all gradients, and a warning says so."""
    given, program = [*operands(), normal(B, QUERIES, H, D, seed=7)], values_and_gradients(causal)
    spec = P("model")
    mapped = jax.shard_map(program, mesh=mesh(), in_specs=spec, out_specs=spec, axis_names={"model"})
    with pytest.warns(UserWarning, match="partly manual"):
        _, found, calls = compiled_by_kernels(mapped, given, [BOTH] * 4)
    assert calls == {("forward", 24, KEYS), ("queries", QUERIES, KEYS), ("keys", QUERIES, KEYS)}
    assert_about_as_exact(found, program, given)


def test_features():
    """They are gathered, and a warning says so."""
    given, program = [*operands(), normal(B, QUERIES, H, D, seed=7)], values_and_gradients(causal)
    with pytest.warns(UserWarning, match="whole features"):
        _, found, _ = compiled_by_kernels(program, given, [P(None, None, None, "data")] * 4)
    assert_about_as_exact(found, program, given)


# ---- Sequences that are exchanged for heads or for batches


def with_slopes(q, k, v):
    s = scores_of(q, k)
    h, i, j = (jax.lax.broadcasted_iota(jnp.int32, s.shape, d) for d in (1, 2, 3))
    return attend(jnp.where(is_causal(s), s - 0.01 * ((h + 1) * (i - j)).astype(jnp.float32), -1e30), v)


def of_segments(q, k, v, of_queries, of_keys):
    visible = of_queries[:, None, :, None] == of_keys[:, None, None]
    return attend(jnp.where(visible, scores_of(q, k), -1e30), v)


@pytest.mark.parametrize(
    "spec,parts", [(SEQUENCE, 4), (P(None, "model"), 2), (BOTH, 8), (P(None, ("model", "data")), 8)], ids=str
)
def test_whole_sequences(spec, parts):
    """Each device has as much to do as the others. Of all arrays it sends what it has, and gets as much."""
    compiled = check(with_slopes, operands(8, heads=8), [spec] * 3, QUERIES, {"all-to-all"})
    assert all(size <= B * KEYS * 8 * D // parts for _, size in support.collectives(compiled))


def test_whole_sequences_of_grouped_queries():
    check(grouped, operands(4, heads=12), [SEQUENCE] * 3, QUERIES, {"all-to-all"})


def test_whole_sequences_of_segments():
    """Their numbers are gathered where devices divide heads, which they do not have."""
    segments = [jnp.arange(B * n, dtype=jnp.int32).reshape(B, n) * 6 // n for n in (QUERIES, KEYS)]
    compiled = check(of_segments, [*operands(4, heads=4), *segments], [SEQUENCE] * 5, QUERIES)
    gathered = [size for name, size in support.collectives(compiled) if name == "all-gather"]
    assert gathered and max(gathered) == B * KEYS
