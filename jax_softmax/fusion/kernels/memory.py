"""What a program needs in memory at once, and how long it takes, about.

In memory are a program's results, results of reductions and of all that is no loop over elements, as products and
kernels are, and what the latter read. XLA makes other elements where they are read. It runs equations in about the
program's order, and a loop writes over an array that is not read any more.
"""

import collections
import itertools
from collections.abc import Collection, Container, Mapping
from typing import NamedTuple

from jax_softmax.fusion.kernels.calls import by_xla_p, kernel_call_p
from jax_softmax.fusion.kernels.traffic import byte_text
from jax_softmax.fusion.program.graph import (
    Equation,
    Graph,
    about,
    about_size_of,
    bytes_of,
    graph_of,
    is_variable,
    jaxprs_of,
    variables_of,
)
from jax_softmax.fusion.program.kinds import REGIONS, is_strided_view, kind_of, may_fold
from jax_softmax.primitives.records import LINEAR_MAPS
from jax_softmax.primitives.types import Atom, Var
from jax_softmax.runtime import costs


class Balance(NamedTuple):
    """What a program needs with its kernels, beside the same where XLA makes what they make."""

    more: int  # bytes in memory at once
    memory: float  # times XLA's, operands and results included
    time: float  # times XLA's

    @property
    def needs_more(self) -> bool:
        return self.memory > costs.MORE_MEMORY

    @property
    def kernel_wins(self) -> bool:
        """Whether kernels save enough time for the memory that they need."""
        return not self.needs_more or self.time <= costs.WORTH_MEMORY

    def __str__(self) -> str:
        return f"{byte_text(self.more)} more memory, {self.memory:.2f} times XLA's, for {self.time:.2f} times its time"


def balance_of(graph: Graph, saved: Mapping[Equation, float], alone: int) -> Balance:
    """`saved`: the bytes that each kernel's call saves. `alone`: what the program needs as it was written, or 0."""
    # The two programs by XLA differ in order, scans and attention. Kernels need what is more than in both.
    needs, of_xla = _needs_of(graph), max(alone, _needs_of(graph, saved).memory)
    operands = sum(bytes_of(v) for v in graph.readers if v not in graph.maker)
    memory = (operands + needs.memory) / max(1, operands + of_xla)
    return Balance(needs.memory - of_xla, memory, needs.moved / max(1, needs.moved + sum(saved.values())))


def memory_of(graph: Graph) -> int:
    """The bytes that a program needs at once, without operands."""
    return _needs_of(graph).memory


def costly(graph: Graph, calls: Collection[Equation]) -> list[Equation]:
    """The calls of kernels for which arrays are in memory when most is; all calls, if there are none."""
    needs, of_xla = _needs_of(graph), _needs_of(graph, calls)
    alive = {v for v, (made, until) in needs.lives.items() if made <= needs.most_at < until}
    alive -= {v for v, (made, until) in of_xla.lives.items() if made <= needs.most_at < until}

    def needs_one(call: Equation) -> bool:
        return not alive.isdisjoint([*(_stored(graph, v) for v in variables_of(call.inputs)), *call.outputs])

    return list(filter(needs_one, calls)) or list(calls)


class _Needs(NamedTuple):
    memory: int  # bytes at once, without operands
    moved: float  # bytes, or those that could be moved meanwhile
    most_at: int  # the equation
    lives: dict[Var, tuple[int, int]]  # of arrays: which equation makes them, and before which they are gone


def _needs_of(graph: Graph, by_xla: Container[Equation] = ()) -> _Needs:
    """What a program needs if XLA makes what these calls of kernels make."""
    end = len(graph.equations)
    # Before which equation a variable's array is read last, and in which one its elements are, by loops.
    stored, by_loops = dict.fromkeys(graph.results, end), dict[Var, int]()
    change, moved = [0] * (end + 1), 0.0  # of the bytes in memory, by equation
    # A result has memory from the start. Before it is made, arrays with as many bytes use it: until which equations.
    free: dict[int, list[int]] = collections.defaultdict(list)
    lives = dict[Var, tuple[int, int]]()

    def read(a: Atom, read_until: dict[Var, int], k: int) -> None:
        if is_variable(a):
            read_until[a] = max(read_until.get(a, 0), k)

    for k, equation in reversed([*enumerate(graph.equations)]):
        outputs, is_barrier = equation.outputs, equation.name == "optimization_barrier"
        if _is_same_memory(equation):
            for a, v in zip(equation.inputs, outputs, strict=True):
                for read_until in (stored, by_loops):
                    if is_barrier or v in read_until:
                        read(a, stored if is_barrier else read_until, read_until.get(v, k))
            continue
        is_of_rows = equation.eqn.primitive is by_xla_p or equation in by_xla or kind_of(equation) == "operator"
        is_loop = is_of_rows or may_fold(equation)
        # What XLA reduces, as a row operator's results with fewer elements, it does not make again.
        least = about_size_of(equation.inputs[0]) if is_of_rows else 0
        is_loop_alone = is_loop and kind_of(equation) != "reduction"
        made_again = {v for v in outputs if is_loop_alone and about_size_of(v) >= least}
        made = [v for v in outputs if v in stored or v not in made_again]
        again = [by_loops[v] for v in made_again if by_loops.get(v, 0) > stored.get(v, 0)]
        for v in made:
            until, spaces = max(k, stored.get(v, 0), 0 if v in made_again else by_loops.get(v, 0)), free[bytes_of(v)]
            space = next((n for n, before in enumerate(spaces) if until <= before), None)
            if v in graph.results:
                spaces.append(k)
                change[0] += bytes_of(v)
            elif space is not None:
                spaces[space] = k
            else:
                lives[v] = k, until
                change[k] += bytes_of(v)
                change[until] -= bytes_of(v)
        for n, a in enumerate(equation.inputs):
            if is_loop or (n == 0 and equation.name == "gather"):
                read(a, by_loops, max([k + (is_of_rows and not _is_map_in_place(equation)), *again]))
            else:
                read(a, stored, k if n == _overwritten(equation) else k + 1)
        if made:
            of_arrays = sum(map(bytes_of, [*variables_of(equation.inputs), *made]))
            moved += max(of_arrays, _moved_during_product(equation))
        if equation.name in REGIONS:
            within = [_needs_of(graph_of(jaxpr, platform="cuda")) for jaxpr in jaxprs_of(equation.params)]
            inside = max((needs.memory for needs in within), default=0)
            change[k] += inside
            change[k + 1] -= inside
            moved += max([costs.CALL, *(needs.moved for needs in within)]) * about([equation.params.get("length", 1)])
    memory = list(itertools.accumulate(change))
    return _Needs(max(memory), moved, memory.index(max(memory)), lives)


def _stored(graph: Graph, v: Var) -> Var:
    """The variable whose memory a variable has."""
    maker = graph.maker.get(v)
    while maker is not None and _is_same_memory(maker):
        operand = maker.inputs[maker.outputs.index(v)]
        if not is_variable(operand):
            break
        v, maker = operand, graph.maker.get(operand)
    return v


def _is_same_memory(equation: Equation) -> bool:
    """Whether each result has its operand's memory."""
    return is_strided_view(equation) or equation.name == "optimization_barrier"


def _overwritten(equation: Equation) -> int | None:
    """Which operand's memory an equation's result has."""
    if equation.eqn.primitive is kernel_call_p:
        in_place: int | None = equation.params["call"].kernel.in_place
        return in_place
    return 0 if equation.name.startswith(("scatter", "dynamic_update_slice")) else None


def _is_map_in_place(equation: Equation) -> bool:
    """Whether XLA reduces a linear map's rows first, and then writes it over what it reads."""
    call = equation.params.get("call")
    of = equation.params if call is None else call.kernel._asdict()
    last = len(of.get("shape", equation.inputs[0].aval.shape)) - 1
    return of.get("op", equation.name) in LINEAR_MAPS and last in of["axes"]


def _moved_during_product(equation: Equation) -> float:
    if equation.name != "dot_general":
        return 0
    a, ((along, _), _) = equation.inputs[0], equation.params["dimension_numbers"]
    features = about_size_of(equation.outputs[0]) * about(a.aval.shape[d] for d in along)
    return features * costs.PRODUCT_OF_FEATURE * a.aval.dtype.itemsize / 2
