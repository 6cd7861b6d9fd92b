"""A program's jaxpr with groups as calls of kernels."""

from jax_softmax import _private
from jax_softmax.fusion import expressions, made_twice, rules, scans, written_out
from jax_softmax.fusion.attention import matcher
from jax_softmax.fusion.attention.kernels import attention_p
from jax_softmax.fusion.calls import NotFolded, by_xla_p, call_of, kernel_call_p
from jax_softmax.fusion.expressions import is_variable
from jax_softmax.fusion.graph import (
    barrier,
    bytes_of,
    graph_of,
    jaxprs_of,
    new_equation,
    opened,
    variables_of,
    with_jaxprs,
)
from jax_softmax.fusion.groups import Groups, is_loop
from jax_softmax.fusion.report import Line
from jax_softmax.fusion.traffic import traffic_of
from jax_softmax.primitives.as_stored import as_stored_p
from jax_softmax.primitives.operators import PRIMITIVES

# Equations whose jaxprs are rewritten in their place.
_REGIONS = (
    *("scan", "while", "cond", "remat2", "checkpoint", "shard_map", "jit", "pjit", "closed_call", "core_call"),
    *("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr", "fused"),
)


# What puts its result into memory in any case.
_IN_MEMORY = (*_REGIONS, *PRIMITIVES, "dot_general", "ragged_dot", "linear_product", "conv_general_dilated")
_IN_MEMORY += ("gather", "sort", "top_k", "optimization_barrier")


def rewritten(jaxpr, report=None, where=""):
    """The jaxpr with its groups as calls of kernels. Appends a line for each call of an operator to `report`."""
    report = [] if report is None else report
    graph = scans.applied(graph_of(jaxpr, platform="cuda"))
    changed = False
    for equation in graph.equations:
        if equation.name in _REGIONS:
            within = report, f"{where}/{equation.name}"
            params = with_jaxprs(equation.params, lambda inner, within=within: rewritten(inner, *within))
            changed |= any(params[k] is not equation.params[k] for k in params)
            equation.params = params
    changed |= any(e.name in PRIMITIVES or e.eqn.primitive is as_stored_p for e in graph.equations)
    if not changed and not any(e.name == "reduce_max" for e in graph.equations):
        return jaxpr
    own, left = rules.without_duplicates(graph), set()
    while True:
        graph, written = written_out.applied(own, left)
        if not changed and not written:
            return jaxpr
        graph, found, refused = matcher.applied(rules.without_duplicates(graph))
        graph = _without_copies(rules.applied(graph))
        groups, calls, by_xla, lines = _decided(graph, where)
        again = {e.inputs[0] for e in by_xla}.intersection(written)  # what XLA is to make is the program's own
        for equation, line in lines.items():
            if not again or equation.inputs[0] in again:
                report.append(line._replace(no_attention=refused.get(equation.outputs[0], "")))
        if not again:
            break
        left |= again
    report += [_line_of_attention(attention, where) for attention in found]
    equations, outputs = _in_order(groups, calls, by_xla)
    return jaxpr.replace(eqns=equations, outvars=outputs)


def _without_copies(graph):
    """Without `as_stored`: `made_twice` says what is in memory."""
    copies = [e for e in graph.equations if e.eqn.primitive is as_stored_p]
    renamed: dict = {}
    for equation in copies:
        (a,) = equation.inputs
        renamed[equation.outputs[0]] = renamed.get(a, a) if is_variable(a) else a
    return graph.with_replaced({e: [] for e in copies}, renamed) if copies else graph


def has_operators(jaxpr) -> bool:
    """Whether a program calls an operator of this package, or a kernel."""
    pending = [jaxpr]
    while pending:
        for eqn in opened(pending.pop())[0].eqns:
            if eqn.primitive.name in PRIMITIVES or eqn.primitive in (kernel_call_p, attention_p):
                return True
            pending += jaxprs_of(eqn.params)
    return False


def _decided(graph, where):
    """The groups, those that are calls of kernels, with these, the operators that XLA's fusions make, and a line for
    each operator."""
    left, kept, by_xla, lines = set(), set(), set(), {}
    while True:
        groups, calls, again = Groups(graph, left, kept), {}, False
        for group in groups.groups:
            written = group.written(groups.read_outside)
            line = _line(group, groups, where)
            try:
                call, reads, made = call_of(group, written, groups.read_outside)
            except NotFolded as error:
                call, why_not = None, str(error)
                traffic = traffic_of(group, groups.reads(group), written, groups, alone=True)
            else:
                why_not = ""
                moved = call.moved(reads, made)
                traffic = traffic_of(group, list(dict.fromkeys(variables_of(reads))), written, groups, moved)
            as_fast = call is not None and call.kernel.scratch_bytes() is None
            line = line._replace(traffic=traffic, why_not=why_not, xla_is_as_fast=as_fast)
            if not traffic.kernel_wins or as_fast:
                by_xla.add(group.equation)
            elif call is not None:
                calls[group] = call, reads, made
            lines[group.equation] = line
            if group not in calls:
                left.add(group.equation)
                again = True
        if not again:
            more = made_twice.to_keep(groups, calls) - kept
            kept |= more
            again = bool(more)
        if not again:
            break
    return groups, calls, by_xla, {e: lines[e] for e in graph.equations if e in lines}


def _line_of_attention(found, where):
    x = found.softmax.inputs[0].aval
    axes = tuple(found.softmax.params["axes"])
    return Line("attention", x.dtype.name, x.shape, axes, where, (), (), (), None, "", False)


def _line(group, groups, where):
    x = group.x.aval
    before = {equation: None for folded in group.before for equation in folded.values()}
    outside: dict = {}
    for a in groups.reads(group):
        maker = groups.graph.maker.get(a)
        if maker is not None and maker.name not in _IN_MEMORY and bytes_of(a) * 4 > bytes_of(group.x):
            outside[maker.name] = None
    for variable in group.written(groups.read_outside):
        for reader in groups.read_outside(variable, group):
            if reader is not None and is_loop(reader):
                outside[reader.name] = None
    names = tuple(e.name for e in before if not expressions.is_view(e))
    after = tuple(e.name for e in group.after.values() if not expressions.is_view(e))
    return Line(group.op, x.dtype.name, x.shape, group.axes, where, names, after, tuple(outside), None, "", False)


def _in_order(groups, calls, by_xla):
    """The equations of JAX, each after those that make what it reads."""
    graph = groups.graph
    twice, in_memory = made_twice.equations(groups, calls), made_twice.in_memory(groups, calls)
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
            equations.append(new_equation(reads, made, kernel_call_p, {"call": call}, node.equation.eqn))
            return
        if node in by_xla:
            params = {"op": node.name, **node.params}
            new = [new_equation(node.inputs, node.outputs, by_xla_p, params, node.eqn)]
        else:
            new = [e.as_jax() for e in (made_twice.with_roundings(node) if node in twice else [node])]
        for eqn in new:
            equations.extend(_with_barriers(eqn, in_memory))

    for equation in graph.equations:
        if equation.eqn.effects:
            make(variables_of(equation.inputs))
            if equation not in done:
                done.add(equation)
                emit(equation)
    make(variables_of(graph.outputs))
    return equations, graph.outputs


def _with_barriers(eqn, in_memory):
    """An equation, and a barrier for those of its results that are to be in memory, where all read them."""
    makes = [v for v in eqn.outvars if v in in_memory]
    if not makes:
        return [eqn]
    first = {v: type(v)(v.aval) for v in makes}
    behind = _private.at_the_line_of(barrier(list(first.values()), makes), eqn)
    return [eqn.replace(outvars=[first.get(v, v) for v in eqn.outvars]), behind]
