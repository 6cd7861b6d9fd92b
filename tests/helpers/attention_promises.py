"""`PROMISES`: cases of attention by what they are about, each as small as that allows."""

import jax.numpy as jnp
import numpy as np
from attention_cases import SCALE, SCORES, Case, causal, masked, wide


def in_two_pieces(x, j):
    return jnp.where((j < 64) | (j >= 100), x * SCALE, -jnp.inf)


def biased_by_keys_and_queries(x, bias):
    return wide(x) * SCALE + wide(bias)


def biased_by_each_head(x, bias):
    return wide(x) * SCALE + wide(bias)


def causal_and_biased(x, i, j, bias):
    return jnp.where(i >= j, wide(x) * SCALE + wide(bias), -1e30)


def causal_with_temperatures(x, i, j, temperature):
    return jnp.where(i >= j, wide(x) * temperature, -1e30)


def from_below_to_above(x, j):
    """Beyond -2^26, and not so far."""
    return wide(x) * 2 - 6.8e7 + 1e6 * (j // 64).astype(jnp.float32)


def halves_by_heads(x, h, i, j):
    return jnp.where(((i >= 32) ^ (h % 2 == 1)) == (j >= 128), x * SCALE, -jnp.inf)


def mask_segments_and_bias(x, mask, segment, bias):
    return jnp.where(mask & (segment != 2), wide(x) * SCALE + wide(bias), -1e30)


def first_keys_of_some(x, i, j):
    return jnp.where((j >= 64) | (i % 3 != 0), x * SCALE, -jnp.inf)


def late_queries(x, i, j):
    return jnp.where((i >= j) & (i > 20), x * SCALE, -1e30)


SCORES |= {
    in_two_pieces: (("j", "index"),),
    biased_by_keys_and_queries: (("hji", "bfloat16"),),
    biased_by_each_head: (("gij", "bfloat16"),),
    causal_and_biased: (("i", "index"), ("j", "index"), ("hij", "bfloat16")),
    causal_with_temperatures: (("i", "index"), ("j", "index"), ("h", "float32")),
    from_below_to_above: (("j", "index"),),
    halves_by_heads: (("h", "index"), ("i", "index"), ("j", "index")),
    mask_segments_and_bias: (("bij", "bool"), ("hij", "int32"), ("hij", "bfloat16")),
    first_keys_of_some: (("i", "index"), ("j", "index")),
    late_queries: (("i", "index"), ("j", "index")),
}
ONE = (1, 1)  # a batch and a head
PROMISES = {
    "no mask is left out after a gap": Case(in_two_pieces, (128, 192), (16, 16), n_batch=ONE),
    "an array whose keys are not last": Case(biased_by_keys_and_queries, (16, 24), (16, 8), n_batch=(1, 2)),
    "a bias of each head that shares keys": Case(biased_by_each_head, (17, 24), (8, 16), "bihgd,bjhd,bjhe"),
    "a bias's gradient is 0 where nothing is visited": Case(causal_and_biased, (17, 81), (8, 16), n_batch=ONE),
    "pivots of all sizes": Case(from_below_to_above, (17, 80), (16, 16), n_batch=ONE),
    "each head that shares keys visits its own queries": Case(
        halves_by_heads, (64, 136), (16, 16), "ihd,jd,je", n_batch=(1, 2)
    ),
    "several arrays pass together": Case(mask_segments_and_bias, (17, 32), (16, 16), n_batch=(2, 2)),
    "queries that see nothing at first": Case(first_keys_of_some, (17, 80), (16, 16), n_batch=ONE),
    "queries that see nothing but fills": Case(late_queries, (40, 72), (16, 16), n_batch=ONE),
    "NaN in a query and a key": Case(causal, (20, 20), (8, 8), special=np.nan),
    "dropout of float16 beside a mask": Case(
        masked, (20, 70), (24, 8), "gihd,jhd,jhe", "float16", drops=True, n_batch=(1, 2)
    ),
    "each head's temperature has a gradient": Case(causal_with_temperatures, (17, 81), (8, 16), n_batch=(2, 2)),
}
