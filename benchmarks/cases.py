"""What is measured: row lengths, axes, and shapes of few rows; less of it for a quick run, smaller arrays on a CPU."""

import math

LENGTHS = [
    *(1, 2, 3, 4, 7, 8, 16, 31, 32, 33, 64, 65, 100, 128, 256, 257, 300, 512, 513, 1000, 1024, 1999, 2048, 3072),
    *(4096, 4097, 6144, 8192, 8200, 12000, 16384, 16385, 20000, 32768, 50257, 65536, 100000, 131072),
    *(151936, 151937, 262144, 524288, 1 << 20, 1_500_001, 1_500_008, 1 << 21, 1 << 24),
]
# For the other dtypes and operators, which hardly differ.
FEWER_LENGTHS = [
    *(1, 7, 31, 32, 65, 128, 257, 300, 1000, 1024, 1999, 4096, 8192, 8200, 16384),
    *(20000, 32768, 50257, 131072, 151937, 262144, 1 << 20, 1 << 24),
]
QUICK_LENGTHS = [7, 32, 257, 1024, 4096, 16384, 50257, 131072, 1 << 20]

# (shape, axes) for bfloat16. float32 has `halved` shapes, so that an array takes about 0.5 GB in both.
AXES = [
    ((256, 1024, 1024), (1,)),
    ((64, 4096, 1024), (1,)),
    ((4096, 512, 128), (1,)),
    ((8192, 32768), (0,)),
    ((255, 1023, 1023), (1,)),
    ((1 << 22, 16, 4), (1,)),
    ((65536, 1024, 3), (1,)),
    ((4096, 8192, 7), (1,)),
    ((1 << 25, 4, 2), (1,)),
    ((4, 1 << 26), (0,)),
    ((16, 1 << 24), (0,)),
    ((46, 21, 513 * 513), (1,)),
    ((256, 1024, 1024), (0, 2)),
    ((255, 1023, 1023), (0, 2)),
    ((4096, 16, 256, 16), (1, 3)),
    ((16384, 64, 16, 16), (2, 3)),
    ((1024, 512, 512), (1, 2)),
    ((128, 64, 128, 256), (0, 2)),
    ((127, 63, 127, 255), (0, 2)),
    ((16, 255, 9001, 7), (0, 2)),
    ((1024, 3001, 3, 29), (1, 3)),
    ((256, 1024, 1024), (0, 1)),
    ((1 << 18, 1024), (0,)),
    ((1 << 20, 256), (0,)),
]
VMAPPED = ((256, 1024, 1024), (1,))
QUICK_AXES = [AXES[i] for i in (0, 3, 5, 9, 12, 14, 17)]

FEW = [
    *((1, 32768), (1, 151936), (1, 1 << 20), (1, 1 << 24), (8, 131072), (32, 151936), (128, 32768), (4096, 1024)),
]
QUICK_FEW = [FEW[i] for i in (0, 1, 4, 7)]

CHAIN_LENGTH, CHAIN_SHAPE = 100, (64 * 16, 2048)

ACCURACY_SHAPES = [(256, 1000), (16, 50257)]
MAGNITUDES = [0.01, 1.0, 30.0, 1000.0, 10000.0]


def halved(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape with the first extent above 16 halved."""
    i = next(i for i, n in enumerate(shape) if n > 16)
    return (*shape[:i], shape[i] // 2, *shape[i + 1 :])


def shrunk(shape: tuple[int, ...], elements: int) -> tuple[int, ...]:
    """The shape with its largest extents halved until it has no more elements than that."""
    while math.prod(shape) > elements:
        i = shape.index(max(shape))
        shape = (*shape[:i], shape[i] // 2, *shape[i + 1 :])
    return shape
