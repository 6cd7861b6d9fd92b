"""What work costs, each price once. `runtime/judge.py` and `fusion/` decide by these prices who computes what.

A price is a number of bytes: those that an H200's memory moves in the time that the work takes for one element. A price
that was measured names its row in benchmarks/results/; `tests/surface/test_costs.py` computes it from there, and fails
where it is more than 10 % off. The others were chosen.

An exponential has one price, `FUNCTION`. What it adds to a decision depends on what runs beside it:

- Where a whole kernel is judged, arithmetic and memory overlap: the larger of both counts (`kernels/traffic.py`).
- Where an equation is folded into a kernel that waits for memory, a small part remains (`FOLDED_FUNCTION`).
- Where softmax is made again at every place that reads it, it counts in full (`REMADE_SOFTMAX`).
"""

import math

# ---- Memory and instructions

COPY_RATE = 4.3e12  # bytes a second, of an H200. fused.md, "copy rate"
MULTIPROCESSORS = 132  # of an H200
INSTRUCTION = 0.15  # COPY_RATE over 128 lanes of each multiprocessor at 1.7 GHz

# How many instructions an element takes. Chosen.
INSTRUCTIONS_OF_FUNCTION = 10  # exp, tanh, a division and the like
INSTRUCTIONS_OF_ROUNDING = 2  # to 16 bits
INSTRUCTIONS_OF_OPERATOR = 8  # one number for all operators

FUNCTION = INSTRUCTIONS_OF_FUNCTION * INSTRUCTION

# ---- Equations that are made where they are read

# Most of an equation's time passes while the kernel waits for memory. What remains of a function is measured: fused.md,
# "tanh cap", whose largest time is 0.055 more than that of a kernel that moves 4 bytes. What remains of another
# operation is chosen: little but not nothing, so that a small array which many rows share is made once.
FOLDED_FUNCTION = FUNCTION * 2 / 15
FOLDED_OPERATION = INSTRUCTION / 75

# exp(x - maximum) * (1 / sum): a function, a difference and a product.
REMADE_SOFTMAX = FUNCTION + 2 * INSTRUCTION

# Softmax is made again where that costs at most this part of writing and reading it. Chosen: a float32 softmax of
# float32 is made again (4 + 1.8 bytes against 8), a bfloat16 one of bfloat16 is kept (2 + 1.8 against 4).
WORTH_REMAKING = 0.8
# An array that all layers of a scan share is made in the loop where it is made of less than this part of its bytes.
# Chosen.
MADE_OF_LITTLE = 1 / 8

# What a row waits that XLA adds to a table where another one is added to the same place. Chosen: of 2048² rows for 32
# places, of which 2 have most, each took 2.6 ns (H200, T5's bias).
SAME_PLACE = 2.6e-9 * COPY_RATE

# ---- Calls

# What a call takes more than a kernel of XLA's, by the wall clock: 2 to 3 microseconds in a CUDA graph, for a row
# operator. Chosen. What saves less is left to XLA, so that small programs compile no kernels.
CALL = 2.5e-6 * COPY_RATE

# ---- Memory that a program needs at once

MORE_MEMORY = 1.02  # times XLA's is as little. Chosen
WORTH_MEMORY = 1 / 1.1  # of XLA's time is worth more than that. Chosen

# ---- Row kernels

KERNEL_WINS = 0.95  # of XLA's bytes: where the kernel moves more, XLA counts as equally fast. Chosen

LONGEST_ROW_OF_XLA = 8192  # elements that a block of XLA's kernels holds in registers

# The speed of these kernels, as a part of the memory's, by the most elements of a row. results.md, "softmax, bfloat16",
# column "forward: XLA": rows 256, 1024 and 8192. Longer float32 rows, and log_softmax, reach 0.89 to 0.95: kernels are
# then chosen a little too often.
XLA_SPEED_OF_ROWS = {256: 1.0, 2048: 0.91, LONGEST_ROW_OF_XLA: 0.81}

# What XLA takes at least for an element of rows whose bytes are no multiple of 16, by the most elements of a row.
# Chosen: of rows of 9 to 512 it makes 0.12 to 0.68e12 elements a second, of a softmax or a log-sum-exp, and 0.06 to
# 0.34e12 of a softmax's gradient; of longer ones 0.1 to 0.84e12. These are geometric means (H200; the kernels make
# 0.5e12 of float32 and 1e12 of bfloat16).
ELEMENT_OF_ODD_ROWS = {512: COPY_RATE / 0.25e12, math.inf: COPY_RATE / 0.4e12}

# ---- On a CPU

# Elements of the shortest rows whose kernels are faster than XLA's loops. Chosen: before this rule, mean losses under
# `fuse` took 0.6 to 2.9 times XLA's time of rows of 512 and fewer, 1.3 to 1.4 with gradients; of longer rows cpu.md.
LONG_ROW_ON_CPU = 1024

# ---- Attention

# Memory's rate where attention is judged. Chosen: the geometric mean of an H100's 3.0 and an H200's 4.3, because the
# kernels take about as long on both.
BYTES_OF_PICOSECOND = 3.6

# For a score: of the forward kernel, and of both backward ones. "plain B8 S2048 H16 D64": microseconds of the output,
# and those that gradients take besides, for B H S² scores; of Hopper's kernels in attention.md. What follows is in
# attention_prices.md, and is of other chips' kernels but for PRODUCT_OF_FEATURE.
ATTENTION_FORWARD_ON_HOPPER = 0.575 * BYTES_OF_PICOSECOND
ATTENTION_BACKWARD_ON_HOPPER = 1.77 * BYTES_OF_PICOSECOND
ATTENTION_FORWARD = 0.95 * BYTES_OF_PICOSECOND
ATTENTION_BACKWARD = 2.7 * BYTES_OF_PICOSECOND
ATTENTION_TANGENTS = 2.15  # of the forward kernel's time: that of tangents: "moving B8 S1024 H16 D64"
ATTENTION_FEATURES = 64  # of a query and of a value in that row; times are proportional to them
ATTENTION_LEAST = 0.7  # the part of these times that kernels take with few features. Chosen
# With more features than these, other chips' backward kernels have smaller tiles, and take so many times as long.
# "plain B4 S2048 H16 D192", beside 128 features and half as many more.
ATTENTION_FEW_FEATURES = 128
ATTENTION_MANY = 1.79

# In float32, multiplied as TF32, so many times as long: "plain B8 S1024 H16 D128 float32" with gradients.
ATTENTION_OF_FLOAT32 = 2.6

# In float32, with smaller tiles where scores read arrays of queries x keys, so many times as long. Chosen.
ATTENTION_WITH_ARRAYS = 1.3

# What a program without these kernels pays, beside its bytes, for a score and a feature of each product:
# "plain B8 S1024 H16 D256" beside 128 features, of 6 products.
PRODUCT_OF_FEATURE = 0.0037 * BYTES_OF_PICOSECOND

# Kernels that keep no weights in memory may take so many times as long as what does. Chosen.
WORTH_NO_WEIGHTS = 1.02
