"""A call on the same arrays gives the same bits each time, and a row the same ones in every batch."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import support
from support import OPERATORS, assert_same_bits, normal, sampled


def outputs(x, g, where=None):
    return jax.tree.leaves(jax.device_get(support.run_all(x, g, where=where)))


@pytest.mark.parametrize("shape", [(40, 1000), (40, 1001), (2, 131072), (2, 151937), (3001, 7), (1, 1 << 20)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_same_from_run_to_run(dtype, shape):
    x, g = normal(shape, dtype), normal(shape, dtype, 1)
    first = outputs(x, g)
    for _ in range(3):
        for actual, wanted in zip(outputs(x, g), first, strict=True):
            assert_same_bits(actual, wanted)


def test_the_same_from_run_to_run_along_other_axes():
    x = normal((64, 33, 50), "bfloat16")
    run = jax.jit(lambda x, axis: [f(x, axis) for f in OPERATORS.values()], static_argnums=1)
    for axis in (0, 1, (0, 2), None):
        for actual, wanted in zip(run(x, axis), run(x, axis), strict=True):
            assert_same_bits(actual, wanted)


# Columns in units of 16 bytes; every schedule of a contiguous row has a few.
PACKS = (1, 2, 3, 5, 8, 31, 32, 33, 125, 128, 256, 300, 512, 1024, 2049, 4096, 8192, 32768)


@sampled("dtype,packs", itertools.product(["float32", "bfloat16"], PACKS), 5)
def test_a_row_is_the_same_in_every_batch(dtype, packs):
    """Bitwise: alone, anywhere in a batch of any size, and under vmap."""
    columns = packs * 16 // np.dtype(dtype).itemsize
    largest = 67 if packs < 300 else 5
    x, g = normal((largest, columns), dtype), normal((largest, columns), dtype, 1)
    batch = outputs(x, g)
    for rows in (1, 2, 5, largest - 1):
        for actual, wanted in zip(outputs(x[:rows], g[:rows]), batch, strict=True):
            assert_same_bits(actual, wanted[:rows], f"{rows} of {largest} rows")
    for row in (1, 3, largest - 1):
        for actual, wanted in zip(outputs(x[row], g[row]), batch, strict=True):
            assert_same_bits(actual, wanted[row], f"row {row} alone")
    for actual, wanted in zip(jax.tree.leaves(jax.vmap(support.run_all)(x, g)), batch, strict=True):
        assert_same_bits(actual, wanted, "vmap")


@sampled(
    "dtype,columns",
    [
        ("bfloat16", 65_544),
        ("bfloat16", 131_072),
        ("bfloat16", 151_944),
        ("bfloat16", 300_000),
        ("float32", 24_600),
        ("float32", 300_004),
        *([("float64", 40_000)] if jax.default_backend() == "cpu" else []),  # XLA's on a GPU
    ],
    4,
)
def test_a_long_row_is_the_same_in_a_large_batch(dtype, columns):
    """Bitwise: on a GPU such a batch passes through clusters or a ring, and the row alone does not."""
    rows = 150
    with support.precision(dtype):
        x, g = (jnp.asarray(normal((rows, columns), dtype, seed)) for seed in range(2))
        batch = outputs(x, g)
        for row in (0, 77, rows - 1):
            for actual, wanted in zip(outputs(x[row : row + 1], g[row : row + 1]), batch, strict=True):
                assert_same_bits(actual, wanted[row : row + 1], f"row {row}")


@pytest.mark.parametrize("columns", [999, 4099, 50_257, 151_937, 300_001])
def test_odd_rows_that_begin_alike_are_the_same(columns):
    """Bitwise, where rows of a batch begin alike in a line of 128 bytes, as every 64th of 16 bits does."""
    x, g = (np.broadcast_to(normal((1, columns), "bfloat16", seed), (65, columns)) for seed in range(2))
    for batch in outputs(x, g):
        assert_same_bits(batch[64], batch[0])


@pytest.mark.parametrize("packs", [3, 33, 300, 4096])
def test_a_masked_row_is_the_same_in_every_batch(packs):
    columns = packs * 8
    x, g = normal((17, columns), "bfloat16"), normal((17, columns), "bfloat16", 1)
    where = support.random_mask(x.shape)
    batch = outputs(x, g, where)
    for rows in (1, 2, 5):
        for actual, wanted in zip(outputs(x[-rows:], g[-rows:], where[-rows:]), batch, strict=True):
            assert_same_bits(actual, wanted[-rows:], f"the last {rows} rows")
