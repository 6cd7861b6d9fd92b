"""Kernels with expressions before and after the operator: their time over that of the plain kernel of the same shape,
or the copy rate that they reach. Needs a GPU.

    python benchmarks/fused.py    # two minutes; prints two tables
"""

import os

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp
import numpy as np
from timing import copy_rate, device_times

import jax_softmax  # noqa: F401
from jax_softmax.runtime.kernel_spec import attributes

# Rows of square score matrices: (matrices, rows, columns).
SHAPES = [(16, 4096, 4096), (128, 2048, 2048), (64, 1024, 1024), (4096, 256, 256)]


def call(op, dtypes, arrays="", load="", store="", masked=False):
    """The custom call with results of these dtypes, along the last axis."""

    def kernel(*operands):
        x = operands[0]
        results = [jax.ShapeDtypeStruct(x.shape, dtype) for dtype in dtypes]
        call_attributes = attributes(op, (x.ndim - 1,), masked, arrays, load, store)
        return jax.ffi.ffi_call("jax_softmax", results)(*operands, **call_attributes)

    return jax.jit(kernel)


def relative_to_plain(shape):
    """By name, the function and its arguments."""
    _, rows, columns = shape
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], shape, jnp.bfloat16)
    row = jax.random.normal(keys[1], (1, 1, columns), jnp.bfloat16)
    matrix = jax.random.normal(keys[2], (1, rows, columns), jnp.bfloat16)
    causal = jnp.tril(jnp.ones((1, rows, columns), bool))
    bf16 = ["bfloat16"]
    return {
        "plain": (call("softmax", bf16), (x,)),
        "a scale": (call("softmax", bf16, load="x0 * C(0.125)"), (x,)),
        "scale + bias of shape (1, n)": (call("softmax", bf16, "array", "x0 * C(0.125) + s0"), (x, row)),
        "tanh cap": (call("softmax", bf16, load="C(50) * tanh(x0 * C(0.02))"), (x,)),
        "causal, by index": (
            call("softmax", bf16, "index:1 index:2", "s0 >= s1 ? x0 : C(-1e30)"),
            (x,),
        ),
        "causal, by a (1, S, S) mask": (call("softmax", bf16, masked=True), (x, causal)),
        "scale, bias (1, S, S), mask (1, S, S)": (
            call("softmax", bf16, "array", "x0 * C(0.125) + s0", masked=True),
            (x, matrix, causal),
        ),
    }


def relative_to_copy(shape):
    """By name, the function, its arguments and the bytes that move for an element."""
    keys = jax.random.split(jax.random.key(0), 2)
    x = jax.random.normal(keys[0], shape, jnp.bfloat16)
    wide = x.astype(jnp.float32)
    y = jax.nn.softmax(x)
    t = jax.random.normal(keys[1], shape, jnp.bfloat16)
    f32, bf16 = ["float32"], ["bfloat16"]
    found = {}
    for op in ("softmax", "log_softmax"):
        found[f"{op} to float32"] = call(op, f32), (x,), 6
        found[f"{op} from float32"] = call(op, bf16), (wide,), 6
    for op in ("softmax_linear", "log_softmax_vjp", "log_softmax_jvp"):
        found[f"{op}, a scale and float32 after it"] = call(op, f32, store="y * C(0.125)"), (y, t), 8
        found[f"{op} of float32, a scale and bfloat16 after it"] = (
            call(op, bf16, store="y * C(0.125)"),
            (wide, y.astype(jnp.float32)),
            10,
        )
    found["softmax, a full-size bias"] = call("softmax", bf16, "array", "x0 + s0"), (x, t), 6
    found["softmax, a second result in float32"] = call("softmax", ["bfloat16", "float32"], store="y\ny"), (x,), 8
    return found


def main() -> None:
    print(f"{jax.devices()[0].device_kind}, JAX {jax.__version__}, bfloat16 unless a row says otherwise\n")
    columns = [f"({matrices * rows}, {n})" for matrices, rows, n in SHAPES]
    rate = copy_rate()
    print(f"copy rate {rate / 1e12:.2f} TB/s\n")
    relative, rates = {}, {}
    for shape in SHAPES:
        times = device_times(relative_to_plain(shape))
        plain_rate = 4 * np.prod(shape) / times["plain"] / rate
        for name, time in times.items():
            text = f"{plain_rate:.2f} of copy rate" if name == "plain" else f"{time / times['plain']:.3f}"
            relative.setdefault(name, []).append(text)
        for name, (function, arguments, n) in relative_to_copy(shape).items():
            time = device_times({name: (function, arguments)})[name]
            rates.setdefault(name, []).append(f"{n * np.prod(shape) / time / rate:.2f}")
    for title, table in (("time over the plain kernel's", relative), ("part of the copy rate", rates)):
        print(f"| {title} | {' | '.join(columns)} |\n|{' --- |' * (len(columns) + 1)}")
        for name, cells in table.items():
            print(f"| {name} | {' | '.join(cells)} |")
        print()


if __name__ == "__main__":
    main()
