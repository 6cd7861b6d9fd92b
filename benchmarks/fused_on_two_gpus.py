"""Times unchanged code on two GPUs as it is and under `jax_softmax.fuse`, of arrays that are sharded in several ways.

python benchmarks/fused_on_two_gpus.py

Prints a table: device time while either GPU is busy, of the fused program also on one GPU, its collectives, and how far
its results are from one GPU's without `fuse`, in units of what roundings may do.
"""

import sys

import jax
import numpy as np
from computation import largest_difference
from computations import COMPUTATIONS
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from timing import device_times

# Of attention, which is causal, the specification of queries, keys, values and the cotangent; of a loss, of logits.
# Sizes are batch, length, heads and features, if they are not the computation's own.
CASES = [
    ("attention_float32", "batch", P("x"), None),
    ("attention_float32", "heads", P(None, None, "x"), None),
    ("attention_float32", "sequence", P(None, "x"), None),
    ("attention_float32", "sequence of 8192", P(None, "x"), (2, 8192, 16, 128)),
    ("loss_log_softmax", "rows", P("x"), None),
]
COLLECTIVES = "all-reduce", "all-gather", "all-to-all", "collective-permute"


def main() -> int:
    if jax.default_backend() != "gpu" or jax.device_count() < 2:
        print("fused_on_two_gpus.py: two GPUs are needed", file=sys.stderr)
        return 1
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,))
    computations = {computation.name: computation for computation in COMPUTATIONS}
    print("# Whole computations on two GPUs\n")
    print(f"{jax.devices()[0].device_kind}, JAX {jax.__version__}, device time.\n")
    columns = ["computation", "sharded", "XLA, µs", "fused, µs", "XLA / fused", "fused on one, µs", "times as fast"]
    print("| " + " | ".join([*columns, "collectives", "difference"]) + " |\n" + "|---" * (len(columns) + 2) + "|")
    for name, what, spec, sizes in CASES:
        computation = computations[name]
        print(row(computation._replace(sizes=sizes or computation.sizes), what, spec, mesh), flush=True)
    return 0


def row(computation, what, spec, mesh) -> str:
    alone = computation.make_args(jax.random.key(0))
    expected = jax.jit(computation.function)(*alone)

    def placed(a):  # labels are sharded as the logits' rows are
        return jax.device_put(a, NamedSharding(mesh, P(*spec[: a.ndim])))

    arguments = jax.tree.map(placed, alone)
    programs = {"XLA": jax.jit(computation.function), "fused": jax.jit(computation.fused)}
    text = programs["fused"].lower(*arguments).compile().as_text()
    difference = largest_difference(
        computation, *(jax.tree.map(np.asarray, r) for r in (programs["fused"](*arguments), expected))
    )
    calls = {which: (program, arguments) for which, program in programs.items()}
    times = device_times(calls | {"one": (programs["fused"], alone)}, 4)
    counts = {kind: text.count(f"{kind}(") + text.count(f"{kind}-start(") for kind in COLLECTIVES}
    travels = ", ".join(f"{n} {kind}" for kind, n in counts.items() if n) or "none"
    return (
        f"| {computation.name} | {what} | {times['XLA'] * 1e6:.0f} | {times['fused'] * 1e6:.0f} | "
        f"{times['XLA'] / times['fused']:.2f} | {times['one'] * 1e6:.0f} | {times['one'] / times['fused']:.2f} | "
        f"{travels} | {difference:.2f} |"
    )


if __name__ == "__main__":
    sys.exit(main())
