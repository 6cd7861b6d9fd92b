"""The implementations under comparison: this package, XLA through jax.nn, and PyTorch where it is installed."""

import contextlib
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import jax_softmax
from jax_softmax.primitives.operators import bind
from jax_softmax.primitives.records import VJP

OURS, XLA, TORCH = "jax_softmax", "XLA", "PyTorch"

try:
    import torch

    HAS_TORCH = torch.cuda.is_available()
except Exception:  # not installed, or for another CUDA than the driver's
    HAS_TORCH = False


class Case(NamedTuple):
    """One computation: an operator, forward or backward, on an array."""

    shape: tuple[int, ...]
    axes: tuple[int, ...]
    dtype: str
    op: str = "softmax"
    direction: str = "forward"
    vmapped: bool = False  # along the one reduced axis of an array of three dimensions, under two vmaps

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """The bytes that must be read and written: x and y; or y, its cotangent and x's."""
        return self.elements * jnp.dtype(self.dtype).itemsize * (2 if self.direction == "forward" else 3)


def precision(dtype: str):
    """The context in which arrays of `dtype` exist."""
    return jax.enable_x64(True) if dtype == "float64" else contextlib.nullcontext()


def forward_or_backward(peer: str, case: Case) -> Callable:
    """The operator as a function of x, or its backward pass as one of y and its cotangent, not yet jitted."""
    if case.vmapped:
        inner = forward_or_backward(peer, case._replace(axes=(0,), vmapped=False))
        # The outer vmap is over the first of the two dimensions that are not reduced, the inner one over the second.
        outer = 1 if case.axes == (0,) else 0
        last = 0 if case.axes == (2,) else 1
        return jax.vmap(jax.vmap(inner, in_axes=last, out_axes=last), in_axes=outer, out_axes=outer)
    axes = case.axes
    if case.direction == "forward":
        module = jax_softmax if peer == OURS else jax.nn
        return lambda x: getattr(module, case.op)(x, axes)
    if peer == OURS:
        return lambda y, t: bind(VJP[case.op], y, t, where=None, axes=axes)
    if case.op == "softmax":
        return lambda y, t: y * (t - jnp.sum(y * t, axes, keepdims=True))
    return lambda y, t: t - jnp.exp(y) * jnp.sum(t, axes, keepdims=True)


def compiled(peer: str, case: Case, n_arguments: int) -> Callable:
    with precision(case.dtype):  # a thread has its own
        x = jax.ShapeDtypeStruct(case.shape, case.dtype)
        return jax.jit(forward_or_backward(peer, case)).lower(*[x] * n_arguments).compile()


def torch_covers(case: Case) -> bool:
    return HAS_TORCH and len(case.axes) == 1 and not case.vmapped


def torch_time(case: Case, arguments: tuple[jax.Array, ...], repeats: int) -> float:
    """Seconds a call, by CUDA events around a CUDA graph of calls, so that the host's time for launches does not
    count."""
    operands = [torch.from_dlpack(a) for a in arguments]
    (dim,) = case.axes

    def call() -> Any:
        if case.direction == "forward":
            return getattr(torch, case.op)(operands[0], dim)
        y, t = operands
        return getattr(torch, f"_{case.op}_backward_data")(t, y, dim, y.dtype)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        for _ in range(repeats):
            call()
    times = []
    with torch.cuda.stream(stream):
        graph.replay()
        for _ in range(3):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) * 1e-3 / repeats)
    del graph
    torch.cuda.empty_cache()
    return sorted(times)[1]
