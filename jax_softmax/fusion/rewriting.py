"""A program's jaxpr with groups as calls of kernels."""

from typing import NamedTuple

from jax_softmax import _private
from jax_softmax.fusion import expressions, made_twice, rules, scans, written_out
from jax_softmax.fusion.attention import matcher
from jax_softmax.fusion.attention.kernels import attention_p
from jax_softmax.fusion.calls import NotFolded, by_xla_p, kernel_call_of, kernel_call_p
from jax_softmax.fusion.graph import (
    Equation,
    barrier,
    bytes_of,
    eqns_within,
    graph_of,
    is_variable,
    new_eqn,
    variables_of,
    with_jaxprs,
)
from jax_softmax.fusion.groups import Groups, foldable, is_loop, why_not_foldable
from jax_softmax.fusion.report import Line
from jax_softmax.fusion.traffic import group_traffic
from jax_softmax.primitives.as_stored import as_stored_p
from jax_softmax.primitives.operators import PRIMITIVES
from jax_softmax.runtime import judge
from jax_softmax.runtime.lowering import why_no_custom_call

# Equations whose jaxprs are rewritten.
_REGIONS = (
    *("scan", "while", "cond", "remat2", "checkpoint", "shard_map", "jit", "pjit", "closed_call", "core_call"),
    *("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr", "fused"),
)

# Equations whose results are in memory in any case.
_MATERIALIZING = (*_REGIONS, *PRIMITIVES, "dot_general", "ragged_dot", "linear_product", "conv_general_dilated")
_MATERIALIZING += ("gather", "sort", "top_k", "optimization_barrier")


class _Decision(NamedTuple):
    groups: Groups
    calls: dict  # of kernels, by the groups that are one; each with what it reads and makes
    by_xla: set  # operators
    lines: dict  # of the report, by the operators


def rewritten(jaxpr, report=None, path=""):
    """The jaxpr with its groups as calls of kernels, or itself if nothing changes. A line for each call of an operator
    is appended to `report`; `path` are the names of the equations around it."""
    report = [] if report is None else report
    graph = scans.with_attention_in_scans(graph_of(jaxpr, platform="cuda"))
    changed = False
    for equation in graph.equations:
        if equation.name in _REGIONS:
            within = report, f"{path}/{equation.name}"
            params = with_jaxprs(equation.params, lambda inner, within=within: rewritten(inner, *within))
            changed |= any(params[k] is not equation.params[k] for k in params)
            equation.params = params
    changed |= has_operators(jaxpr) or any(e.eqn.primitive is as_stored_p for e in graph.equations)
    if not changed and not any(e.name == "reduce_max" for e in graph.equations):
        return jaxpr
    decision, lines = _decided(rules.without_duplicates(graph), path, changed)
    report += lines
    if decision is None:
        return jaxpr
    return jaxpr.replace(eqns=_in_order(decision), outvars=decision.groups.graph.outputs)


def _decided(program, path, changed, stay=frozenset()) -> tuple[_Decision | None, list[Line]]:
    """The decision for a program, and its lines; None if nothing of it was `changed` or is written out.

    What is written out of an array becomes operators, but not of the arrays that `stay`. If XLA would make one of an
    array's operators, all that is written out of it is better as it was: it stays in a second decision.
    """
    graph, arrays = written_out.with_operators(program, stay)
    if not changed and not arrays:
        return None, []
    before_rules, attentions, refused = matcher.with_attention(rules.without_duplicates(graph))
    decision = _decide(_without_as_stored(rules.after_rules(before_rules)), path)
    lines = {e: line._replace(no_attention=refused.get(e.outputs[0], "")) for e, line in decision.lines.items()}
    of_rows = _made_of_rows(before_rules, decision.groups)
    lines |= {e: _line(e.name, e, path, why_xla=judge.MADE_OF_ROWS) for e in of_rows}
    to_stay = {_array_of(e) for e in decision.by_xla}.intersection(arrays)
    if not to_stay:
        return decision, [*lines.values(), *(_line("attention", found.softmax, path) for found in attentions)]
    decision, lines_of_second = _decided(program, path, changed, stay | to_stay)
    called = set() if decision is None else {_call_of(e) for e in decision.lines}
    written = {e: line for e, line in lines.items() if _array_of(e) in to_stay and e not in program.position}
    staying = (line for e, line in written.items() if _call_of(e) not in called)
    staying = (line if line.why_xla else line._replace(why_xla=judge.WITH_ANOTHER) for line in staying)
    return decision, [*staying, *lines_of_second]


def _made_of_rows(before_rules, groups):
    """The softmaxes that rules replaced, and that XLA makes of rows' maxima and sums: of all elements, as a gather does
    not read them."""
    graph = groups.graph
    names = ("softmax", "log_softmax")
    replaced = [e for e in before_rules.equations if e.name in names and e not in graph.position]
    replaced = [e for e in replaced if is_loop(graph.maker.get(e.outputs[0], e))]
    return [e for e in replaced if any(r.name != "gather" for r in groups.readers_in_xla(e.outputs[0]))]


def _array_of(equation):
    """The array of whose rows an operator is; None for a constant."""
    (x, *_) = variables_of(equation.inputs[:1]) or [None]
    return x


def _call_of(equation):
    return equation.name, _array_of(equation), tuple(equation.params["axes"])


def unfused_lines(jaxpr, why_not):
    """A line for each operator in a program into which nothing is folded."""
    equations = (Equation(eqn, eqn.invars, eqn.outvars, eqn.params) for eqn in eqns_within([jaxpr]))
    operators = (e for e in equations if e.name in PRIMITIVES and not e.params["axis_name"])
    return [_line(e.name, e, "", why_not, _why_xla_unfolded(e)) for e in operators]


def _without_as_stored(graph):
    """The graph without `as_stored_p`: `made_twice.py` says what is in memory."""
    copies = [e for e in graph.equations if e.eqn.primitive is as_stored_p]
    renamed: dict = {}
    for equation in copies:
        (a,) = equation.inputs
        renamed[equation.outputs[0]] = renamed.get(a, a) if is_variable(a) else a
    return graph.with_replaced({e: [] for e in copies}, renamed) if copies else graph


def has_operators(jaxpr) -> bool:
    """Whether a program calls an operator of this package, or a kernel."""
    own = (kernel_call_p, attention_p)
    return any(e.primitive.name in PRIMITIVES or e.primitive in own for e in eqns_within([jaxpr]))


def _decide(graph, path) -> _Decision:
    left, read, by_xla, lines = set(), set(), set(), {}
    while True:
        groups, calls, n_left = Groups(graph, left, read), {}, len(left)
        for group in groups.groups:
            written, call, why_not = group.written(groups.read_outside), None, ""
            try:
                call, reads, made = kernel_call_of(group, written, groups.read_outside)
            except NotFolded as error:
                why_not = str(error)
                traffic = group_traffic(group, groups.reads[group], written, groups)
                traffic = traffic._replace(ours=traffic.unfolded)
            else:
                moved = call.moved(reads, made)
                traffic = group_traffic(group, list(dict.fromkeys(variables_of(reads))), written, groups, moved)
            why_xla = _why_xla_unfolded(group.equation) if call is None else call.kernel.why_xla()
            why_xla = judge.why_xla_under_fuse(traffic, why_xla)
            lines[group.equation] = _line_of_group(group, groups, path, traffic, why_not, why_xla)
            if why_xla:
                by_xla.add(group.equation)
            elif call is not None:
                calls[group] = call, reads, made
                call.kernel.start_compiling()
            if group not in calls:
                left.add(group.equation)
        if len(left) > n_left:
            continue
        more = made_twice.to_keep(groups, calls) - read
        if not more:
            break
        read |= more
    for equation in graph.equations:
        if equation.name in PRIMITIVES and not equation.params["axis_name"] and not foldable(equation):
            why_xla = _why_xla_unfolded(equation)
            lines[equation] = _line(equation.name, equation, path, why_not_foldable(equation), why_xla)
            if why_xla:
                by_xla.add(equation)
    return _Decision(groups, calls, by_xla, {e: lines[e] for e in graph.equations if e in lines})


def _why_xla_unfolded(equation) -> str:
    """Why XLA makes an operator into which nothing is folded; "" if its kernel does."""
    avals_in, avals_out = ([a.aval for a in atoms] for atoms in (equation.inputs, equation.outputs))
    return why_no_custom_call(equation.name, avals_in, avals_out, equation.params["axes"])


def _line(op, equation, path, why_not="", why_xla="") -> Line:
    """That of an operator into which nothing is folded, or of attention, of which `equation` is the softmax."""
    x, axes = equation.inputs[0].aval, tuple(equation.params["axes"])
    return Line(op, x.dtype.name, x.shape, axes, path, (), (), (), None, why_not, why_xla)


def _line_of_group(group, groups, path, traffic, why_not, why_xla) -> Line:
    x = group.x.aval
    before = {equation: None for folded in group.before for equation in folded.values()}
    outside: dict = {}
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


def _in_order(decision):
    """JAX's equations of the rewritten program, each after those that make what it reads."""
    groups, calls, by_xla, _ = decision
    graph = groups.graph
    twice, read_twice = made_twice.equations(groups, calls), made_twice.read_twice(groups, calls)
    owner = {variable: group for group, (_, _, made) in calls.items() for variable in made}
    done, equations = set(), []

    def make(variables):
        pending = [(v, False) for v in reversed(variables)]
        while pending:
            variable, ready = pending.pop()
            node = owner.get(variable) or graph.maker.get(variable)
            if node is None or node in done:
                continue
            reads = calls[node][1] if node in calls else node.inputs
            if ready:
                done.add(node)
                emit(node)
            else:
                pending.append((variable, True))
                pending += [(v, False) for v in reversed(variables_of(reads))]

    def emit(node):
        if node in calls:
            call, reads, made = calls[node]
            equations.append(new_eqn(reads, made, kernel_call_p, {"call": call}, node.equation.eqn))
            return
        if node in by_xla:
            params = {"op": node.name, **node.params}
            new = [new_eqn(node.inputs, node.outputs, by_xla_p, params, node.eqn)]
        else:
            new = [e.as_jax() for e in (made_twice.with_roundings(node) if node in twice else [node])]
        for eqn in new:
            equations.extend(_with_barrier(eqn, read_twice))

    for equation in graph.equations:
        if equation.eqn.effects:
            make(variables_of(equation.inputs))
            if equation not in done:
                done.add(equation)
                emit(equation)
    make(variables_of(graph.outputs))
    return equations


def _with_barrier(eqn, read_twice):
    """An equation, and a barrier behind which those of its results are that kernels and XLA read."""
    makes = [v for v in eqn.outvars if v in read_twice]
    if not makes:
        return [eqn]
    before = {v: type(v)(v.aval) for v in makes}
    behind = _private.at_the_line_of(barrier(list(before.values()), makes), eqn)
    return [eqn.replace(outvars=[before.get(v, v) for v in eqn.outvars]), behind]
