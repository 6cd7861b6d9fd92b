"""Attention as programs write it, under `jit` and under `jit(fuse(...))`, on one GPU.

    python benchmarks/attention.py            # minutes; prints two tables
    python benchmarks/attention.py --quick    # small arrays, to try the script

Device time of the output, with its tangent in forward mode, and of the output with the gradients of q, k, v and of
what is learned beside. `triangle` is the attention of structures' pairs: a row has a bias that all rows share, and a
mask. Memory is what is needed besides arguments and results. Errors are the fused program's largest distances from
the unfused one, as parts of the largest value, where that has room. cuDNN's attention stands beside where it takes the
mask: the output, and with gradients.

The other tables are what `fuse` decides by: programs of many features, with kernels of attention and with kernels of
rows alone, whichever it would choose; and some with those kernels of attention that other chips than Hopper have.
"""

import argparse
import concurrent.futures
import functools
import os

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp
from timing import device_times

import jax_softmax
from jax_softmax import _kernels
from jax_softmax.fusion import backend


def scores_of(q, k, dtype=None):
    return jnp.einsum("bihd,bjhd->bhij", q, k, preferred_element_type=dtype) * q.shape[-1] ** -0.5


def weighted(scores, v):
    return jnp.einsum("bhij,bjhd->bihd", jax.nn.softmax(scores).astype(v.dtype), v)


def indices(q):
    n = jnp.arange(q.shape[1])
    return n[:, None], n


def plain(q, k, v):
    return weighted(scores_of(q, k), v)


def causal(q, k, v):
    i, j = indices(q)
    return weighted(jnp.where(i >= j, scores_of(q, k), -1e30), v)


def causal_float32(q, k, v):
    i, j = indices(q)
    return weighted(jnp.where(i >= j, scores_of(q, k).astype(jnp.float32), -1e30), v)


def jax_nn(q, k, v):
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)


def capped(q, k, v):
    i, j = indices(q)
    return weighted(jnp.where(i >= j, 50 * jnp.tanh(scores_of(q, k) / 50), -1e30), v)


def packed(q, k, v, segments):
    i, j = indices(q)
    mask = (i >= j) & (segments[:, None, :, None] == segments[:, None, None, :])
    return weighted(jnp.where(mask, scores_of(q, k), -1e30), v)


def alibi_in_a_window(q, k, v):
    i, j = indices(q)
    slopes = jnp.exp2(-jnp.arange(1, q.shape[2] + 1, dtype=jnp.float32) * 8 / q.shape[2])[:, None, None]
    scores = scores_of(q, k).astype(jnp.float32) - slopes * (i - j).astype(jnp.float32)
    return weighted(jnp.where((i >= j) & (i - j < 512), scores, -1e30), v)


def grouped(q, k, v):
    b, n, h, d = q.shape
    q = q.reshape(b, n, k.shape[2], h // k.shape[2], d)
    scores = jnp.einsum("bikgd,bjkd->bkgij", q, k).astype(jnp.float32) * d**-0.5
    i, j = indices(q)
    weights = jax.nn.softmax(jnp.where(i >= j, scores, jnp.finfo(jnp.float32).min)).astype(v.dtype)
    return jnp.einsum("bkgij,bjkd->bikgd", weights, v).reshape(b, n, h, d)


def dropped(q, k, v, keep):
    weights = jax.nn.softmax(scores_of(q, k))
    return jnp.einsum("bhij,bjhd->bihd", jnp.where(keep, weights / 0.9, 0).astype(v.dtype), v)


def biased(q, k, v, bias):
    return weighted(scores_of(q, k) + bias, v)


def triangle(q, k, v, bias, mask):
    return weighted(jnp.where(mask, scores_of(q, k) + bias, -1e9), v)


def with_sink(q, k, v, sink):
    i, j = indices(q)
    scores = jnp.where(i >= j, scores_of(q, k), jnp.finfo(q.dtype).min)
    column = jnp.broadcast_to(sink[None, :, None, None], (*scores.shape[:-1], 1))
    weights = jax.nn.softmax(jnp.concatenate([scores, column], -1))[..., :-1]
    return jnp.einsum("bhij,bjhd->bihd", weights, v)


def of_temperatures(q, k, v, temperature):
    return weighted(scores_of(q, k) * jnp.exp(temperature)[:, None, None], v)


def swin(q, k, v, temperature, bias):
    """Swin v2's windows, with queries and keys of length 1. 64 windows have masks by turns."""
    q, k = (a / jnp.linalg.norm(a.astype(jnp.float32), axis=-1, keepdims=True).astype(a.dtype) for a in (q, k))
    scores = scores_of(q, k, jnp.float32) * jnp.exp(jnp.minimum(temperature, 4.6))[:, None, None] + bias
    n, quarter = q.shape[1], jnp.arange(q.shape[1]) * 2 // q.shape[1]
    masks = jnp.where((jnp.arange(64) % 8 == 7)[:, None, None] & (quarter[:, None] != quarter), -100.0, 0)
    scores = scores.reshape(-1, 64, *scores.shape[1:]) + masks[None, :, None]
    return weighted(scores.reshape(-1, *scores.shape[2:4], n), v)


def t5(q, k, v, table):
    """A bias for each distance, of 32 that grow, from a table for each head, whose gradient is summed in float32."""
    i, j = indices(q)
    far = 8 + (jnp.log(jnp.maximum(jnp.abs(i - j), 1) / 8) * (8 / jnp.log(16))).astype(int)
    distance = jnp.where(jnp.abs(i - j) < 8, jnp.abs(i - j), jnp.minimum(far, 15)) + 16 * (j > i)
    bias = table.astype(jnp.float32)[distance].transpose(2, 0, 1)
    return weighted(scores_of(q, k) + bias, v)


def difference(q, k, v, q2, k2, factor):
    """Differential attention."""
    weights = jax.nn.softmax(scores_of(q, k)) - factor * jax.nn.softmax(scores_of(q2, k2))
    return jnp.einsum("bhij,bjhd->bihd", weights.astype(v.dtype), v)


def moving(q, k, v):
    """In forward mode: the output and its tangent."""
    return jax.jvp(plain, (q, k, v), (k, v, q))


def linen_float32(q, k, v):
    """Weights of float32, as Flax's `force_fp32_for_softmax` has them, and values of 16 bits."""
    weights = jax.nn.softmax(scores_of(q, k).astype(jnp.float32))
    return jnp.einsum("bhij,bjhd->bihd", weights, v).astype(v.dtype)


# A program, batch, length, heads, heads of k and v, features.
USUAL = 8, 2048, 16, 16, 64
CASES = [
    *((program, *USUAL) for program in (causal, causal_float32, jax_nn, plain, capped, packed, alibi_in_a_window)),
    *((program, *USUAL) for program in (dropped, biased, with_sink)),
    (causal, 4, 4096, 16, 16, 128),
    *((causal, 4, 2048, 16, 16, features) for features in (192, 256)),
    (grouped, 4, 2048, 32, 8, 64),
    (plain, 256, 197, 12, 12, 64),
    (triangle, 384, 384, 4, 4, 32),
    (of_temperatures, 8, 1024, 16, 16, 64),
    (of_temperatures, 4, 2048, 16, 16, 128),
    (swin, 2048, 64, 6, 6, 32),
    (t5, 8, 2048, 16, 16, 64),
    (difference, 8, 1024, 8, 8, 64),
    (difference, 8, 1024, 8, 8, 128),
    (linen_float32, 8, 2048, 16, 16, 64),
    (moving, 8, 1024, 16, 16, 64),
    (moving, 4, 2048, 16, 16, 128),
    (causal, 8, 512, 16, 16, 64),
    (causal, 1, 16384, 16, 16, 128),
    (causal, 8, 1024, 16, 16, 64, "float32"),
    (causal, 4, 2048, 16, 16, 128, "float32"),
    (with_sink, 8, 1024, 16, 16, 64, "float32"),
]
BY_FEATURES = [
    (program, batch, length, 16, 16, features)
    for batch, length, many in ((8, 1024, (32, 64, 80, 96, 128, 160, 192, 256)), (4, 2048, (96, 128, 192, 256)))
    for program in (plain, causal)
    for features in many
]
BY_FEATURES += [
    (program, 8, 1024, 16, 16, features, "float32") for program in (plain, causal) for features in (32, 64, 96, 128)
]
ON_OTHER_CHIPS = [
    (plain, *USUAL),
    *((plain, 4, 2048, 16, 16, features) for features in (128, 192)),
    *((plain, 8, 1024, 16, 16, features) for features in (64, 128)),
    (plain, 8, 1024, 16, 16, 128, "float32"),
    (moving, 8, 1024, 16, 16, 64),
]
LARGEST_BLOCK = 99 << 10  # bytes of shared memory, on other chips than Hopper
# What is differentiated beside q, k and v, by the program.
LEARNED = {
    biased: lambda q: [(1, q[2], q[1], q[1])],
    triangle: lambda q: [(1, q[2], q[1], q[1])],
    with_sink: lambda q: [(q[2],)],
    of_temperatures: lambda q: [(q[2],)],
    swin: lambda q: [(q[2],), (q[2], q[1], q[1])],
    t5: lambda q: [(32, q[2])],
    difference: lambda q: [q, q, ()],
}
# Programs that cuDNN's attention does, by how it is asked.
BY_CUDNN = {plain: {}, causal: {"is_causal": True}, grouped: {"is_causal": True}}
MOST_BYTES = 16 << 30  # of an array of scores, beyond which the unfused program is not tried


def nothing(q):
    return []


def operands_of(program, batch, length, heads, of_keys, features, dtype="bfloat16"):
    keys = jax.random.split(jax.random.key(0), 5)
    shapes = [(batch, length, n, features) for n in (heads, of_keys, of_keys, heads)]
    arrays = [jax.random.normal(key, shape, dtype) for key, shape in zip(keys, shapes, strict=False)]
    if program is packed:
        arrays.append(jnp.sort(jax.random.randint(keys[4], (batch, length), 0, 4)))
    arrays += [jax.random.normal(keys[4], shape, dtype) for shape in LEARNED.get(program, nothing)(shapes[0])]
    if program is triangle:
        arrays.append(jnp.arange(length) < jax.random.randint(keys[4], (batch, 1, 1, 1), length // 2, length + 1))
    if program is dropped:
        arrays.append(jax.random.bernoulli(keys[4], 0.9, (batch, heads, length, length)))
    return arrays


def with_gradient(program):
    def both(q, k, v, o_cotangent, *beside):
        n = len(LEARNED.get(program, nothing)((1,) * 4))
        o, transposed = jax.vjp(lambda *a: program(*a, *beside[n:]), q, k, v, *beside[:n])
        return o, *transposed(o_cotangent)

    return both


def forward(program):
    return lambda q, k, v, _, *beside: program(q, k, v, *beside)


def distances(a, b):
    found = []
    for x, y in zip(a, b, strict=True):
        x, y = x.astype(jnp.float32), y.astype(jnp.float32)
        found.append(f"{float(jnp.abs(x - y).max() / jnp.abs(x).max()):.0e}")
    return " ".join(found)


def name_of(case):
    program, batch, length, heads, of_keys, features, *dtype = case
    name = f"{program.__name__} B{batch} S{length} H{heads}{f'/{of_keys}' * (heads != of_keys)} D{features}"
    return " ".join([name, *dtype])


def compiled_at_once(lowered):
    """By their names, lowered programs as compiled ones."""
    with concurrent.futures.ThreadPoolExecutor() as pool:
        return dict(zip(lowered, pool.map(lambda one: one.compile(), lowered.values()), strict=True))


def lowered_by_cudnn(program, parts, operands):
    """cuDNN's attention, where it takes the mask, the dtype and the lengths."""
    if program not in BY_CUDNN or operands[0].dtype.itemsize != 2 or jax.default_backend() != "gpu":
        return {}
    attention = functools.partial(jax.nn.dot_product_attention, implementation="cudnn", **BY_CUDNN[program])
    try:
        return {("cuDNN", part): jax.jit(made(attention)).lower(*operands) for part, made in parts.items()}
    except NotImplementedError:
        return {}


def measured(case):
    program, batch, length, heads, *_ = case
    operands = operands_of(*case)
    transforms = {"XLA": lambda f: f, "fuse": jax_softmax.fuse}
    if 2 * batch * heads * length**2 > MOST_BYTES:
        del transforms["XLA"]
    parts = parts_of(program)
    last = list(parts)[-1]
    lowered = {
        (who, part): jax.jit(transform(made(program)), keep_unused=True).lower(*operands)
        for who, transform in transforms.items()
        for part, made in parts.items()
    } | lowered_by_cudnn(program, parts, operands)
    compiled = compiled_at_once(lowered)
    results = [compiled[who, last](*operands) for who in transforms]
    errors = distances(*results) if len(results) > 1 else "-"
    memory = {who: compiled[who, last].memory_analysis().temp_size_in_bytes >> 20 for who in transforms}
    del results
    times = device_times({which: (one, tuple(operands)) for which, one in compiled.items()}, repeats=5)

    def time_of(*which):
        found = times.get(which, "-")
        return f"{1e6 * found:.0f}" if isinstance(found, float) else str(found)

    shown = [time_of(who, part) for part in ("forward", "both") for who in ("XLA", "fuse")]
    of_cudnn = [time_of("cuDNN", part) for part in ("forward", "both")]
    return [name_of(case), *shown, *(memory.get(who, "-") for who in ("XLA", "fuse")), errors, *of_cudnn]


class Told(backend.Backend):
    """Makes attention by its kernels, or never."""

    def __init__(self, attention: bool):
        self.attention = attention

    def reason_against_attention(self, found):
        return "" if self.attention else "told so"


def by_features(case):
    program = case[0]
    operands, forced, chosen = operands_of(*case), {}, []
    for part, made in (("forward", forward), ("both", with_gradient)):
        for who in ("rows", "attention"):
            with backend.using(Told(who == "attention")):
                forced[who, part] = jax.jit(jax_softmax.fuse(made(program)), keep_unused=True).lower(*operands)
        lowered = jax.jit(jax_softmax.fuse(made(program))).lower(*operands)
        chosen.append("attention" if "jax_softmax_attention" in lowered.as_text() else "rows")
    times = device_times({which: (one, tuple(operands)) for which, one in compiled_at_once(forced).items()}, repeats=5)
    shown = [[f"{1e6 * times[who, part]:.0f}" for who in ("rows", "attention")] for part in ("forward", "both")]
    return [name_of(case), *shown[0], chosen[0], *shown[1], chosen[1]]


def on_other_chips(case):
    """The kernels that chips have which are not Hopper's, on this one."""
    program, operands, forced = case[0], operands_of(*case), {}
    with backend.using(Told(True)):
        for part, made in parts_of(program).items():
            forced[part] = jax.jit(jax_softmax.fuse(made(program)), keep_unused=True).lower(*operands)
    try:
        _kernels.limit_devices(shared_memory_per_block=LARGEST_BLOCK)
        times = device_times(
            {part: (one, tuple(operands)) for part, one in compiled_at_once(forced).items()}, repeats=5
        )
    finally:
        _kernels.limit_devices()
    return [name_of(case), *(f"{1e6 * times[part]:.0f}" if part in times else "-" for part in ("forward", "both"))]


def parts_of(program):
    return {"forward": forward} | ({} if program is moving else {"both": with_gradient})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small arrays")
    small = parser.parse_args().quick
    cases = (
        [
            (program, 64 if program is swin else 1, min(n, 256), heads // 4, of // 4, *rest)
            for program, _, n, heads, of, *rest in CASES
        ]
        if small
        else CASES
    )

    device = f"{jax.devices()[0].device_kind}, JAX {jax.__version__}"
    print(f"# Attention\n\n{device}, microseconds, of bfloat16 unless it says otherwise\n")
    heads = [
        "",
        "output: XLA",
        "fuse",
        "with gradients: XLA",
        "fuse",
        "MiB: XLA",
        "fuse",
        "errors of o, dq, dk, dv",
        "cuDNN",
        "cuDNN",
    ]
    show(heads, map(measured, cases))
    print("\n## Kernels of rows, and of attention\n")
    heads = ["", "output: rows", "attention", "chosen", "with gradients: rows", "attention", "chosen"]
    of_one = [(plain, 1, 256, 4, 4, 64)]
    show(heads, map(by_features, of_one if small else BY_FEATURES))
    print("\n## By the kernels of chips before Hopper\n")
    show(["", "output", "with gradients"], map(on_other_chips, of_one if small else ON_OTHER_CHIPS))


def show(heads, rows) -> None:
    print(f"| {' | '.join(heads)} |\n|{' --- |' * len(heads)}")
    for row in rows:
        print(f"| {' | '.join(map(str, row))} |", flush=True)


if __name__ == "__main__":
    main()
