"""What became of a program's calls of operators, for people."""

import collections
import functools
import math
import textwrap
from typing import NamedTuple

import numpy as np

from jax_softmax.fusion.kernels.memory import Balance
from jax_softmax.fusion.kernels.traffic import Traffic, byte_text


class InMemory(NamedTuple):
    """An array of queries x keys that attention's kernels read or write."""

    what: str
    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.what}, {self.dtype}{list(self.shape)}, {_bytes_of(self.dtype, self.shape)}"


class Line(NamedTuple):
    """What became of a call of an operator."""

    op: str
    dtype: str
    shape: tuple[int, ...]
    axes: tuple[int, ...]
    path: str  # names of the equations around it, as /scan/cond
    folded_before: tuple[str, ...]  # names of equations
    folded_after: tuple[str, ...]
    outside: tuple[str, ...]  # names of the equations where folding stopped
    traffic: Traffic | None  # None of attention, and of calls for which nothing is counted
    why_not: str  # why nothing can be folded, or ""
    why_xla: str  # why XLA makes it, or "" if its kernel does
    no_attention: str = ""  # why a softmax whose weights are multiplied is not attention
    in_memory: tuple[InMemory, ...] = ()  # of attention
    balance: Balance | None = None  # of a program whose kernels need more memory than XLA


class FusionReport(tuple[Line, ...]):
    """What became of each call of an operator; as text, equal calls once with their number."""

    def __str__(self) -> str:
        calls = collections.Counter(self).items()
        return "\n".join(_paragraph(line, count) for line, count in calls) or "no call of softmax or the like"


def _bytes_of(dtype: str, shape: tuple[int, ...]) -> str:
    return byte_text(math.prod(shape) * np.dtype(dtype).itemsize)


def _paragraph(line: Line, count: int) -> str:
    """A line that says who makes the call and why, and the details, indented."""
    title = f"{line.op} of {line.dtype}{list(line.shape)}{f', x {count}' if count > 1 else ''}: by "
    details = [f"along {line.axes}{f' in {line.path[1:]}' if line.path else ''}"]
    if line.op == "attention":
        title += f"its kernels: {_bytes_of(line.dtype, line.shape)} of weights are never in memory"
    else:
        title += f"XLA: {line.why_xla}" if line.why_xla else "the kernel"
    if line.traffic is not None:
        unfolded, ours, xla = map(byte_text, line.traffic)
        title += "" if line.why_xla else f": moves {ours}, XLA {xla}"
        details[0] += f"; {unfolded} with nothing folded"
    for what, names in (
        ("folded before it", line.folded_before),
        ("folded after it", line.folded_after),
        ("outside", line.outside),
    ):
        details += [f"{what}: {', '.join(names)}"] if names else []
    details += [f"in memory: {array}" for array in line.in_memory]
    details += [f"with kernels the program needs {line.balance}"] if line.balance else []
    details += [f"not folded: {line.why_not}"] if line.why_not else []
    details += [f"not attention: {line.no_attention}"] if line.no_attention else []
    wrapped = functools.partial(textwrap.fill, width=100, break_long_words=False, subsequent_indent=4 * " ")
    return "\n".join([wrapped(title), *(wrapped(detail, initial_indent="  ") for detail in details)])
