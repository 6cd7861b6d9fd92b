"""What `fuse` decides by, of attention: its kernels beside those of rows alone, whichever it would choose.

    python benchmarks/attention_prices.py            # minutes; prints two tables
    python benchmarks/attention_prices.py --quick    # small arrays, to try the script

Programs of few features and of many, with kernels of attention and with kernels of rows, which keep the weights in
memory; and some with those kernels of attention that other chips than Hopper have. Microseconds of device time.
"""

import argparse
import os

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
from attention import show
from programs_of_attention import USUAL, causal, moving, name_of, operands_of, parts_of, plain
from timing import compiled_at_once, device_times

import jax_softmax
from jax_softmax import _kernels
from jax_softmax.fusion import backend

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


class Told(backend.Backend):
    """Makes attention by its kernels, or never."""

    def __init__(self, attention: bool):
        self.attention = attention

    def reason_against_attention(self, found):
        return "" if self.attention else "told so"


def by_features(case):
    program = case[0]
    operands, forced, chosen = operands_of(*case), {}, []
    for part, made in parts_of(program).items():
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small arrays")
    small = parser.parse_args().quick
    device = f"{jax.devices()[0].device_kind}, JAX {jax.__version__}"
    print(f"# Prices of attention\n\n{device}, microseconds, of bfloat16 unless it says otherwise\n")
    print("### Kernels of rows, and of attention\n")
    heads = ["", "output: rows", "attention", "chosen", "with gradients: rows", "attention", "chosen"]
    of_one = [(plain, 1, 256, 4, 4, 64)]
    show(heads, map(by_features, of_one if small else BY_FEATURES))
    print("\n### By the kernels of chips before Hopper\n")
    show(["", "output", "with gradients"], map(on_other_chips, of_one if small else ON_OTHER_CHIPS))


if __name__ == "__main__":
    main()
