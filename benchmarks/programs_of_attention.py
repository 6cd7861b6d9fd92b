"""Attention as programs write it, in papers and in libraries: what other programs here measure."""

import math

import jax
import jax.numpy as jnp


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


def scores_and_sink(q, k, sink):
    i, j = indices(q)
    scores = jnp.where(i >= j, scores_of(q, k), jnp.finfo(q.dtype).min)
    column = jnp.broadcast_to(sink[None, :, None, None], (*scores.shape[:-1], 1))
    return jnp.concatenate([scores, column], -1)


def with_sink(q, k, v, sink):
    weights = jax.nn.softmax(scores_and_sink(q, k, sink))
    return jnp.einsum("bhij,bjhd->bihd", weights[..., :-1], v)


def gpt_oss(q, k, v, sink):
    """As libraries have it, which subtract rows' maxima before the softmax."""
    scores = scores_and_sink(q, k, sink)
    weights = jax.nn.softmax(scores - scores.max(-1, keepdims=True))
    return jnp.einsum("bhij,bjhd->bihd", weights[..., :-1], v)


def of_maps(q, k, v):
    """A UNet's, of maps the rows and columns of which become one dimension after the projections."""
    columns = math.isqrt(q.shape[1])
    maps = (a.reshape(a.shape[0], -1, columns, *a.shape[2:]) for a in (q, k, v))
    return jax.nn.dot_product_attention(*(a.reshape(q.shape) for a in maps))


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


def relative(q, k, v, table):
    """A bias for each distance, in the dtype of all else, as BEiT and music transformers have it."""
    i, j = indices(q)
    return weighted(scores_of(q, k, jnp.float32) + table[i - j + q.shape[1] - 1].transpose(2, 0, 1), v)


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


def pairs(q, k, v, of_pairs, w):
    """AlphaFold 3's: a bias that is learned of what is known of each pair of tokens."""
    return weighted(scores_of(q, k, jnp.float32) + (of_pairs @ w).transpose(0, 3, 1, 2), v)


def two_products(q, k, v, rotated_q, rotated_k):
    """DeepSeek's multi-head latent attention: the features with positions have keys that heads share."""
    of_positions = jnp.einsum("bihr,bjr->bhij", rotated_q, rotated_k)
    scores = (jnp.einsum("bihd,bjhd->bhij", q, k) + of_positions).astype(jnp.float32)
    i, j = indices(q)
    return weighted(jnp.where(i >= j, scores * (q.shape[-1] + rotated_q.shape[-1]) ** -0.5, -1e30), v)


def forgetting(q, k, v, gates):
    """Forgetting attention: logarithms of gates are added up from a key to a query."""
    forgotten = jnp.cumsum(jax.nn.log_sigmoid(gates.astype(jnp.float32)), 1).transpose(0, 2, 1)
    scores = scores_of(q, k).astype(jnp.float32) + forgotten[..., :, None] - forgotten[..., None, :]
    i, j = indices(q)
    return weighted(jnp.where(i >= j, scores, -jnp.inf), v)


def watched(q, k, v):
    """Beside the output the largest score of each head, which QK-clip looks at between steps."""
    i, j = indices(q)
    scores = jnp.where(i >= j, scores_of(q, k).astype(jnp.float32), -1e30)
    return weighted(scores, v), jax.lax.stop_gradient(scores.max((0, 2, 3)))


def with_coordinates(q, k, v, x):
    """As structures have it: the weights' mean of keys' coordinates, and how far the query's are from it."""
    weights = jax.nn.softmax(scores_of(q, k, jnp.float32)).astype(v.dtype)
    away = (jnp.einsum("bhij,bjc->bihc", weights, x) - x[:, :, None]).astype(jnp.float32)
    distance = jnp.sqrt((away**2).sum(-1, keepdims=True) + 1e-6)
    return jnp.einsum("bhij,bjhd->bihd", weights, v) + distance.astype(v.dtype)


# A program, batch, length, heads, heads of k and v, features.
USUAL = 8, 2048, 16, 16, 64
CASES = [
    *((program, *USUAL) for program in (causal, causal_float32, jax_nn, plain, capped, packed, alibi_in_a_window)),
    *((program, *USUAL) for program in (dropped, biased, with_sink, gpt_oss)),
    (of_maps, 4, 4096, 8, 8, 64),
    (causal, 4, 4096, 16, 16, 128),
    *((causal, 4, 2048, 16, 16, features) for features in (192, 256)),
    (grouped, 4, 2048, 32, 8, 64),
    (plain, 256, 197, 12, 12, 64),
    (triangle, 384, 384, 4, 4, 32),
    (of_temperatures, 8, 1024, 16, 16, 64),
    (of_temperatures, 4, 2048, 16, 16, 128),
    (swin, 2048, 64, 6, 6, 32),
    (t5, 8, 2048, 16, 16, 64),
    (relative, 8, 2048, 16, 16, 64),
    (difference, 8, 1024, 8, 8, 64),
    (difference, 8, 1024, 8, 8, 128),
    (linen_float32, 8, 2048, 16, 16, 64),
    (moving, 8, 1024, 16, 16, 64),
    (moving, 4, 2048, 16, 16, 128),
    *((program, 4, 2048, 16, 16, 64) for program in (pairs, two_products, forgetting, watched, with_coordinates)),
    *((causal_float32, 4, 2048, 16, 16, features) for features in (12, 20, 36, 100)),
    (causal, 8, 512, 16, 16, 64),
    (causal, 1, 16384, 16, 16, 128),
    (causal, 8, 1024, 16, 16, 64, "float32"),
    (causal, 4, 2048, 16, 16, 128, "float32"),
    (with_sink, 8, 1024, 16, 16, 64, "float32"),
]
# What is differentiated beside q, k and v, by the program.
LEARNED = {
    biased: lambda q: [(1, q[2], q[1], q[1])],
    triangle: lambda q: [(1, q[2], q[1], q[1])],
    **dict.fromkeys((with_sink, gpt_oss), lambda q: [(q[2],)]),
    of_temperatures: lambda q: [(q[2],)],
    swin: lambda q: [(q[2],), (q[2], q[1], q[1])],
    t5: lambda q: [(32, q[2])],
    relative: lambda q: [(2 * q[1] - 1, q[2])],
    difference: lambda q: [q, q, ()],
    pairs: lambda q: [(q[0], q[1], q[1], 16), (16, q[2])],
    two_products: lambda q: [(*q[:3], 32), (*q[:2], 32)],
    forgetting: lambda q: [q[:3]],
    with_coordinates: lambda q: [(*q[:2], 3)],
}


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
    """The output and the gradients; and what the program gives beside its output."""

    def both(q, k, v, o_cotangent, *operands):
        n = len(LEARNED.get(program, nothing)((1,) * 4))

        def output(*learned):
            made = program(*learned, *operands[n:])
            return made if isinstance(made, tuple) else (made, ())

        o, transposed, beside = jax.vjp(output, q, k, v, *operands[:n], has_aux=True)
        return o, *transposed(o_cotangent), *jax.tree.leaves(beside)

    return both


def forward(program):
    return lambda q, k, v, _, *beside: program(q, k, v, *beside)


def parts_of(program):
    return {"forward": forward} | ({} if program is moving else {"both": with_gradient})


def name_of(case):
    program, batch, length, heads, of_keys, features, *dtype = case
    name = f"{program.__name__} B{batch} S{length} H{heads}{f'/{of_keys}' * (heads != of_keys)} D{features}"
    return " ".join([name, *dtype])
