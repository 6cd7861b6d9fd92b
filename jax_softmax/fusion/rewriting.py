"""A program's jaxpr with groups as calls of kernels."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

from jax.extend.core import Jaxpr, JaxprEqn

from jax_softmax import _private
from jax_softmax.fusion import backend, scans
from jax_softmax.fusion.attention import written_sinks
from jax_softmax.fusion.attention.kernels import attention_p
from jax_softmax.fusion.attention.matcher import FoundAttention
from jax_softmax.fusion.forms import rules, written_out
from jax_softmax.fusion.kernels import recomputed
from jax_softmax.fusion.kernels.calls import KernelCall, by_xla_p, kernel_call_of, kernel_call_p
from jax_softmax.fusion.kernels.candidates import Group, Groups
from jax_softmax.fusion.kernels.chains import chain_of
from jax_softmax.fusion.kernels.in_place import in_place_if_possible
from jax_softmax.fusion.kernels.memory import balance_of, costly, memory_of
from jax_softmax.fusion.kernels.traffic import Traffic, byte_text, group_traffic, has_short_rows, reason_by_traffic
from jax_softmax.fusion.net import by_own_settings, fused_or_as_it_is
from jax_softmax.fusion.program import expressions
from jax_softmax.fusion.program.graph import (
    Equation,
    Graph,
    about,
    barrier,
    bytes_of,
    eqns_within,
    graph_of,
    is_variable,
    new_eqn,
    variables_of,
    with_jaxprs,
)
from jax_softmax.fusion.program.kinds import REGIONS, foldable, is_loop, why_not_foldable
from jax_softmax.fusion.program.splicing import with_barrier
from jax_softmax.fusion.report import InMemory, Line
from jax_softmax.primitives.as_stored import as_stored_p
from jax_softmax.primitives.operators import OPERATORS, PRIMITIVES
from jax_softmax.primitives.types import Atom, Var
from jax_softmax.runtime import costs, judge
from jax_softmax.runtime.lowering import reason_for_operator

# Equations whose results are in memory in any case.
_MATERIALIZING = (*REGIONS, *PRIMITIVES, "dot_general", "ragged_dot", "linear_product", "conv_general_dilated")
_MATERIALIZING += ("gather", "sort", "top_k", "optimization_barrier")


class KernelChoice(NamedTuple):
    """What becomes of an operator: a call of a kernel with what is folded into it; or the operator alone, by its kernel
    or by XLA."""

    call: KernelCall | None  # None if nothing can be folded into the operator
    reads: Sequence[Atom]  # operands of the call
    results: Sequence[Var]  # of the call
    line: Line  # of the report; it says why XLA makes the operator, if it does, and the traffic

    @property
    def is_call(self) -> bool:
        """Whether a kernel makes it with what is folded into it."""
        return self.call is not None and not self.line.why_xla


class _Decision(NamedTuple):
    groups: Groups
    choices: dict[Equation, KernelChoice]  # of all operators of the graph
    eqns: Sequence[Any] = ()  # JAX's, of the rewritten program

    @property
    def calls(self) -> dict[Group, KernelChoice]:
        """The calls of kernels, by the groups that they make."""
        choices = {group: self.choices[group.equation] for group in self.groups.groups}
        return {group: choice for group, choice in choices.items() if choice.is_call}

    @property
    def by_xla(self) -> set[Equation]:
        """The operators that XLA makes."""
        return {equation for equation, choice in self.choices.items() if choice.line.why_xla}


def rewritten(jaxpr: Jaxpr, unfused: Jaxpr | None = None) -> Jaxpr:
    """The jaxpr with its groups as calls of kernels, or itself if nothing changes. Nothing is compiled.

    `unfused`: the program that runs where nothing changes, if there is one.
    """
    return _rewritten(jaxpr, "", unfused)[0]


def _rewritten(jaxpr: Jaxpr, path: str, unfused: Jaxpr | None = None) -> tuple[Jaxpr, list[Line]]:
    """As `rewritten`, and a line for each call of an operator. `path`: the names of the equations around the jaxpr."""
    graph = scans.with_attention_in_scans(graph_of(jaxpr, platform="cuda"))
    changed, lines = False, list[Line]()

    def rewritten_within(path: str, jaxpr: Jaxpr) -> Jaxpr:
        new, lines_within = _rewritten(jaxpr, path)
        lines.extend(lines_within)
        return new

    for equation in graph.equations:
        if equation.name in REGIONS:
            rewrite = functools.partial(rewritten_within, f"{path}/{equation.name}")
            params = with_jaxprs(equation.params, rewrite)
            changed |= any(params[k] is not equation.params[k] for k in params)
            equation.params = params
    changed |= has_operators(jaxpr) or any(e.eqn.primitive is as_stored_p for e in graph.equations)
    if not changed and not any(e.name == "reduce_max" for e in graph.equations):
        return jaxpr, lines
    alone = 0 if unfused is None else memory_of(graph_of(unfused, platform="cuda"))
    decision, own_lines = _decided(rules.normalized(graph), alone, path, changed)
    if decision is not None:
        jaxpr = jaxpr.replace(eqns=decision.eqns, outvars=decision.groups.graph.outputs)
    return jaxpr, lines + own_lines


def start_compiling(jaxpr: Jaxpr) -> None:
    """Starts to compile the kernels that a rewritten program calls."""
    for eqn in eqns_within([jaxpr]):
        if eqn.primitive is kernel_call_p:
            backend.in_use().start_compiling(eqn.params["call"].kernel)


# ---- Decisions


def _decided(program: Graph, alone: int, path: str, changed: bool) -> tuple[_Decision | None, list[Line]]:
    """The decision for a program, and its lines; None if nothing of it was `changed` or is written out. `alone`: the
    bytes that the program needs at once without this package's operators, or 0 if there is no such program.

    What is written out of an array becomes operators. If XLA would make one of an array's operators, all that is
    written out of it is better as it was: it stays, and the rest is decided again.
    """
    stay: frozenset[Var] = frozenset()  # the arrays of which all stays that is written out
    lines_of_staying: list[tuple[Equation, Line]] = []
    while True:
        graph, arrays = written_out.with_operators(program, stay)
        before_rules, attentions, refused = written_sinks.with_attention(rules.without_duplicates(graph))
        if not changed and not arrays and not attentions:
            return None, _lines_of_staying(lines_of_staying, set())
        decision = _stable_decision(_without_as_stored(rules.after_rules(before_rules)), alone, path)
        lines = {e: choice.line for e, choice in decision.choices.items()}
        lines = {e: line._replace(no_attention=refused.get(e.outputs[0], "")) for e, line in lines.items()}
        of_rows = _made_of_rows(before_rules, decision.groups)
        lines |= {e: _line(e.name, e, path, why_xla=judge.MADE_OF_ROWS) for e in of_rows}
        more = set(arrays).intersection(map(_array_of, decision.by_xla))
        if not more:
            break
        stay |= more
        lines_of_staying += [(e, x) for e, x in lines.items() if _array_of(e) in more and e not in program.position]
    staying = _lines_of_staying(lines_of_staying, {_call_of(e) for e in decision.choices})
    return decision, [*staying, *lines.values(), *(_line_of_attention(found, path) for found in attentions)]


def _lines_of_staying(lines: list[tuple[Equation, Line]], called: set[tuple[Any, ...]]) -> list[Line]:
    """The lines of operators that stay written out, without those that the program also calls."""
    staying = [line for equation, line in lines if _call_of(equation) not in called]
    return [line if line.why_xla else line._replace(why_xla=judge.WITH_ANOTHER) for line in staying]


def _stable_decision(graph: Graph, alone: int, path: str) -> _Decision:
    """The decision for a graph after as many rounds as change it.

    A round chooses for all operators into which something is folded, because what one of them reads depends on what
    others make. The next round leaves alone those that are no call, and has in memory what `recomputed.py` asks for.
    """
    choices = {e: _choice_unfolded(e, path) for e in graph.equations if _is_operator(e) and not foldable(e)}
    in_memory: frozenset[Var] = frozenset()
    while True:
        left = {equation for equation, choice in choices.items() if not choice.is_call}
        groups = Groups(graph, left, in_memory)
        choices = choices | {group.equation: _choice_of(group, groups, path) for group in groups.groups}
        calls = _Decision(groups, choices).calls
        if len(calls) < len(groups.groups):
            continue
        more = recomputed.to_keep(groups, calls) - in_memory
        in_chains = {} if more else _left_in_chains(calls, groups, choices)
        in_memory |= more
        choices |= in_chains
        if not more and not in_chains:
            eqns = _in_order(_Decision(groups, choices))
            judged = _judged_by_memory(_Decision(groups, choices, eqns), alone) if calls else {}
            choices |= judged
            if all(choice.is_call for choice in judged.values()):
                return _Decision(groups, {e: choices[e] for e in graph.equations if e in choices}, eqns)


def _left_in_chains(
    calls: dict[Group, KernelChoice], groups: Groups, choices: dict[Equation, KernelChoice]
) -> dict[Equation, KernelChoice]:
    """The choices that change because XLA makes several operators by one kernel."""
    moved = {
        e: choice.line.traffic.ours if choice.is_call else choice.line.traffic.xla
        for e, choice in choices.items()
        if choice.line.traffic is not None and not OPERATORS[e.name].labelled and has_short_rows(e)
    }
    left = {}
    for group in calls:
        written = group.written(groups.read_outside)
        chain = chain_of(group, written[0], moved) if len(written) == 1 and group.equation in moved else None
        if chain is not None and not backend.in_use().kernel_wins(chain.traffic):
            _, ours, xla = map(byte_text, chain.traffic)
            for equation in chain.operators:
                if choices[equation].is_call:
                    line = choices[equation].line
                    line = line._replace(why_xla=f"{judge.IN_A_CHAIN}, which moves {xla}, the kernels {ours}")
                    left[equation] = choices[equation]._replace(line=line)
    return left


def _judged_by_memory(decision: _Decision, alone: int) -> dict[Equation, KernelChoice]:
    """The choices that change where kernels need more memory than XLA: if they save too little time for it, those of
    the kernels that need it, which are left; else all of them, which say it."""
    choices = decision.choices
    equations = [Equation(eqn, eqn.invars, eqn.outvars, eqn.params) for eqn in decision.eqns]
    graph, saved = Graph(equations, decision.groups.graph.outputs), dict[Equation, float]()
    operators = {choice.results[0]: group.equation for group, choice in decision.calls.items()}
    calls = {e: operators[e.outputs[0]] for e in graph.equations if e.eqn.primitive is kernel_call_p}
    for call, operator in calls.items():
        traffic = choices[operator].line.traffic
        saved[call] = traffic.xla - traffic.ours - costs.CALL if traffic else 0
    balance = balance_of(graph, saved, alone)
    if not balance.needs_more:
        return {}
    if backend.in_use().kernel_wins(balance):
        lines = {e: choices[e].line._replace(balance=balance) for e in calls.values()}
    else:
        why, left = f"{judge.MORE_MEMORY} {balance}", [calls[call] for call in costly(graph, saved)]
        lines = {e: choices[e].line._replace(why_xla=why) for e in left}
    return {e: choices[e]._replace(line=line) for e, line in lines.items()}


def _choice_of(group: Group, groups: Groups, path: str) -> KernelChoice:
    """What becomes of a group beside the other ones."""
    written = group.written(groups.read_outside)
    call: KernelCall | None
    try:
        call, reads, results = kernel_call_of(group, written)
        call = in_place_if_possible(call, reads, group, groups)
    except expressions.NotFolded as error:
        traffic = group_traffic(group, groups.reads[group], written, groups)
        traffic = traffic._replace(ours=traffic.unfolded)
        call, reads, results, why_not, reason = None, [], [], str(error), _reason_unfolded(group.equation)
    else:
        moved = call.moved(reads, results)
        traffic = group_traffic(group, list(dict.fromkeys(variables_of(reads))), written, groups, moved)
        why_not, reason = "", backend.in_use().reason_for_xla(call.kernel)
    reason = reason_by_traffic(traffic, backend.in_use().kernel_wins(traffic), reason)
    return KernelChoice(call, reads, results, _line_of_group(group, groups, path, traffic, why_not, reason))


def _choice_unfolded(equation: Equation, path: str) -> KernelChoice:
    """What becomes of an operator into which nothing can be folded."""
    line = _line(equation.name, equation, path, why_not_foldable(equation), _reason_unfolded(equation))
    return KernelChoice(None, [], [], line)


def _reason_unfolded(equation: Equation) -> str:
    """Why XLA makes an operator into which nothing is folded; "" if its kernel does."""
    avals_in, avals_out = ([a.aval for a in atoms] for atoms in (equation.inputs, equation.outputs))
    return reason_for_operator(equation.name, avals_in, avals_out, equation.params["axes"])


def _is_operator(equation: Equation) -> bool:
    """Whether an equation is an operator whose rows are on one device."""
    return equation.name in PRIMITIVES and not equation.params["axis_name"]


def _made_of_rows(before_rules: Graph, groups: Groups) -> list[Equation]:
    """The softmaxes that rules replaced, and that XLA makes of rows' maxima and sums: of all elements, as a gather does
    not read them."""
    graph = groups.graph
    names = ("softmax", "log_softmax")
    replaced = [e for e in before_rules.equations if e.name in names and e not in graph.position]
    replaced = [e for e in replaced if is_loop(graph.maker.get(e.outputs[0], e))]
    return [e for e in replaced if any(r.name != "gather" for r in groups.readers_in_xla(e.outputs[0]))]


def _array_of(equation: Equation) -> Var | None:
    """The array of whose rows an operator is; None for a constant."""
    return next(iter(variables_of(equation.inputs[:1])), None)


def _call_of(equation: Equation) -> tuple[str, Var | None, tuple[int, ...]]:
    """What two operators that make the same have in common."""
    return equation.name, _array_of(equation), tuple(equation.params["axes"])


def lines_of(jaxpr: Jaxpr, unfused: Jaxpr | None) -> list[Line]:
    """A line for each call of an operator in a program, and of attention. `unfused`: as of `rewritten`."""

    def as_it_is(error: Exception) -> list[Line]:
        return unfused_lines(jaxpr, f"jax_softmax fails on this program, by {type(error).__name__}: {error}")

    return fused_or_as_it_is(by_own_settings(lambda: _rewritten(jaxpr, "", unfused)[1]), as_it_is)


def unfused_lines(jaxpr: Jaxpr, why_not: str) -> list[Line]:
    """A line for each operator in a program into which nothing is folded."""
    equations = (Equation(eqn, eqn.invars, eqn.outvars, eqn.params) for eqn in eqns_within([jaxpr]))
    return [_line(e.name, e, "", why_not, _reason_unfolded(e)) for e in equations if _is_operator(e)]


def _without_as_stored(graph: Graph) -> Graph:
    """The graph without `as_stored_p`: `recomputed.py` says what is in memory."""
    copies = [e for e in graph.equations if e.eqn.primitive is as_stored_p]
    renamed: dict[Any, Any] = {}
    for equation in copies:
        (a,) = equation.inputs
        renamed[equation.outputs[0]] = renamed.get(a, a) if is_variable(a) else a
    return graph.with_replaced({e: [] for e in copies}, renamed) if copies else graph


def has_operators(jaxpr: Jaxpr) -> bool:
    """Whether a program calls an operator of this package, or a kernel."""
    own = (kernel_call_p, attention_p)
    return any(e.primitive.name in PRIMITIVES or e.primitive in own for e in eqns_within([jaxpr]))


def longest_row(jaxpr: Jaxpr) -> int:
    """The most elements that an operator of this package reduces together in a program; 0 if it calls none."""
    calls = (e for e in eqns_within([jaxpr]) if e.primitive.name in PRIMITIVES)
    return max((about(e.invars[0].aval.shape[d] for d in e.params["axes"]) for e in calls), default=0)


# ---- Lines of the report


def _line(op: str, equation: Equation, path: str, why_not: str = "", why_xla: str = "") -> Line:
    """The line of an operator into which nothing is folded, or of attention, of which `equation` is the softmax."""
    x, axes = equation.inputs[0].aval, tuple(equation.params["axes"])
    return Line(op, x.dtype.name, x.shape, axes, path, (), (), (), None, why_not, why_xla)


def _line_of_attention(found: FoundAttention, path: str) -> Line:
    attention = found.attention
    arrays = [
        ("a mask" if side.dtype == "bool" else "an operand", side.dtype, side.letters)
        for side in attention.sides
        if side.is_array_of_scores
    ]
    dtypes = (product.outputs[0].aval.dtype.name for product in found.in_memory)
    arrays += [("the scores' product", dtype, attention.letters.rows + "j") for dtype in dtypes]
    extents = {**found.extents, "p": 1}
    arrays += [
        ("an operand's gradient", one.dtype, one.letters)
        for one in attention.side_cotangents
        if {"i", "j"} <= set(one.letters)
    ]
    in_memory = tuple(InMemory(what, dtype, tuple(extents[c] for c in of)) for what, dtype, of in arrays)
    return _line("attention", found.softmax, path)._replace(in_memory=in_memory)


def _line_of_group(group: Group, groups: Groups, path: str, traffic: Traffic, why_not: str, why_xla: str) -> Line:
    x = group.x.aval
    before = {equation: None for folded in group.before for equation in folded.values()}
    outside: dict[Any, Any] = {}
    for a in groups.reads[group]:
        maker = groups.graph.maker.get(a)
        if maker is not None and maker.name not in _MATERIALIZING and bytes_of(a) * 4 > bytes_of(group.x):
            outside[maker.name] = None
    for variable in group.written(groups.read_outside):
        for reader in groups.read_outside(variable, group):
            if reader is not None and is_loop(reader):
                outside[reader.name] = None
    names = tuple(e.name for e in before if not expressions.is_view(e))
    after = tuple(e.name for e in group.after.values() if not expressions.is_view(e))
    return Line(
        group.op, x.dtype.name, x.shape, group.axes, path, names, after, tuple(outside), traffic, why_not, why_xla
    )


# ---- The program


def _in_order(decision: _Decision) -> list[JaxprEqn]:
    """JAX's equations of the rewritten program, each after those that make what it reads."""
    groups, calls, by_xla = decision.groups, decision.calls, decision.by_xla
    graph = groups.graph
    made_first = {group: groups.made_first.get(group, []) for group in calls}
    twice = recomputed.equations(groups, calls)
    # What reads these, reads them in memory: XLA does not merge loops that make and read what is made first.
    in_memory = recomputed.read_twice(groups, calls).union(*made_first.values())
    owner = {variable: group for group, choice in calls.items() for variable in choice.results}
    done: set[Equation | Group] = set()
    equations: list[JaxprEqn] = []

    def make(variables: list[Var]) -> None:
        pending = [(v, False) for v in reversed(variables)]
        while pending:
            variable, ready = pending.pop()
            node = owner.get(variable) or graph.maker.get(variable)
            if node is None or node in done:
                continue
            reads = [*calls[node].reads, *made_first[node]] if isinstance(node, Group) else node.inputs
            if ready:
                done.add(node)
                emit(node)
            else:
                pending.append((variable, True))
                pending += [(v, False) for v in reversed(variables_of(reads))]

    def emit(node: Equation | Group) -> None:
        if isinstance(node, Group):
            call, reads, results, _ = calls[node]
            in_place = None if call is None else call.kernel.in_place
            if in_place is not None and made_first[node]:  # the kernel waits for it
                overwritten = reads[in_place]
                waiting = variables_of([overwritten, *made_first[node]])
                behind = [type(v)(v.aval) for v in waiting]
                equations.append(_private.at_the_line_of(barrier(waiting, behind), node.equation.eqn))
                reads = [behind[0] if a is overwritten else a for a in reads]
            equations.append(new_eqn(reads, results, kernel_call_p, {"call": call}, node.equation.eqn))
            return
        if node in by_xla:
            params = {"op": node.name, **node.params}
            eqn = new_eqn(node.inputs, node.outputs, by_xla_p, params, node.eqn)
            new = [Equation(eqn, node.inputs, node.outputs, params)]
        else:
            new = recomputed.with_roundings(node) if node in twice else [node]
        equations.extend(e.as_jax() for equation in new for e in with_barrier(equation, in_memory))

    for equation in graph.equations:
        if equation.eqn.effects:
            make(variables_of(equation.inputs))
            if equation not in done:
                done.add(equation)
                emit(equation)
    make(variables_of(graph.outputs))
    return equations
