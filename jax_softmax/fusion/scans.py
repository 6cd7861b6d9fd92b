"""Attention in layers that are scanned.

JAX makes what all layers share, masks for one, before the loop and in full size. If it is made of few bytes, it is made
in the loop instead, where kernels fold it.

JAX's derivative of a scan is two scans: a forward one that stacks what the derivative needs of each layer, attention's
weights among it, and a backward one that reads that. Here the backward one makes it again of fewer bytes, as
`residuals.py` says. Then the body of each scan has all of its attention.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from jax_softmax import _private
from jax_softmax.fusion import residuals
from jax_softmax.fusion.program import expressions, splicing
from jax_softmax.fusion.program.graph import (
    Equation,
    Graph,
    bytes_of,
    edited,
    eqns_within,
    graph_of,
    is_variable,
    jaxprs_of,
    opened,
    topologically_sorted,
    variables_of,
)
from jax_softmax.fusion.residuals import Residuals
from jax_softmax.primitives.types import Atom, Var
from jax_softmax.runtime import costs


def with_attention_in_scans(graph: Graph) -> Graph:
    """The graph with masks made in loops, and with pairs of scans that stack no weights."""
    replacements = {e: new for e in _scans(graph) if (new := _with_masks_inside(graph, e))}
    graph = graph.with_replaced(replacements) if replacements else graph
    for equation in _scans(graph):
        pair = _pair(graph, equation) if equation in graph.position else None
        if pair is not None:
            graph = graph.with_replaced(pair)
    return graph


def _scans(graph: Graph) -> list[Equation]:
    return [e for e in graph.equations if e.name == "scan" and has_softmax(e) and not _names_axes(e)]


def _names_axes(equation: Equation) -> bool:
    """Whether an array varies over axes of a mesh: their names are not known where the scan's body is traced again."""
    return any(_private.varying_axes(v.aval) for v in (*variables_of(equation.inputs), *equation.outputs))


def has_softmax(equation: Equation) -> bool:
    return any(eqn.primitive.name in _SOFTMAX for eqn in eqns_within(jaxprs_of(equation.params)))


def _with_masks_inside(graph: Graph, scan: Equation) -> list[Equation] | None:
    """The scan that makes arrays which all layers share in the loop; None if there are none that are made of little."""
    parts = _private.scan_operands(scan.params, list(scan.inputs), list(scan.outputs))
    body = opened(scan.params["jaxpr"])[0]
    inner = graph_of(body)
    softmaxes = [e for e in inner.equations if e.name in _SOFTMAX or has_softmax(e)]
    made_by_them = {v for e in softmaxes for v in e.outputs}
    of_scores = set[Var]()  # or of their cotangents, which products read
    for e in (e for e in inner.equations if e in softmaxes or e.name == "dot_general"):
        made_of = expressions.elementwise_ancestors(inner, variables_of(e.inputs))
        of_scores.update(made_of if e in softmaxes or not made_by_them.isdisjoint(made_of) else ())
    consts = [a for a, v in zip(parts.consts, body.invars, strict=False) if is_variable(a) and v in of_scores]
    made = {a: _made_of_little(graph, a) for a in dict.fromkeys(consts)}
    made = {a: equations for a, equations in made.items() if equations}
    if not made or body.constvars:
        return None
    equations = topologically_sorted(dict.fromkeys(e for of_one in made.values() for e in of_one))
    inside = {v for e in equations for v in e.outputs}
    leaves = list(dict.fromkeys(a for e in equations for a in variables_of(e.inputs) if a not in inside))
    again = edited(body, equations, invars=leaves, outvars=list(made), effects=frozenset())
    rest = [a for a in parts.consts if not (is_variable(a) and a in made)]
    n, n_carry = len(rest), len(parts.init)

    def with_masks_inside(*operands: Any) -> list[Any]:
        of_leaves, operands = operands[: len(leaves)], operands[len(leaves) :]
        consts, init, xs = _consts_init_xs(operands, n, n_carry)

        def layer(carry: Any, x: Any) -> tuple[Any, Any]:
            values = dict(zip(made, jax.core.eval_jaxpr(again, [], *of_leaves), strict=True))
            others = iter(consts)
            all_consts = [values[a] if is_variable(a) and a in values else next(others) for a in parts.consts]
            found = jax.core.eval_jaxpr(body, [], *all_consts, *carry, *x)
            return found[:n_carry], found[n_carry:]

        carry, ys = _scanned(scan, layer, init, xs)
        return [*carry, *ys]

    return splicing.spliced(with_masks_inside, [*leaves, *rest, *parts.init, *parts.xs], scan.outputs, scan)


_SOFTMAX = ("softmax", "softmax_linear")


def _made_of_little(graph: Graph, a: Atom) -> list[Equation]:
    """The equations that make an array of much fewer bytes; none if there are none."""
    made = expressions.elementwise_ancestors(graph, variables_of([a]))
    leaves = sum(bytes_of(b) for b, maker in made.items() if maker is None)
    if leaves >= costs.MADE_OF_LITTLE * bytes_of(a):
        return []
    return [maker for maker in made.values() if maker is not None]


def _pair(graph: Graph, forward: Equation) -> dict[Equation, list[Equation]] | None:
    """The replacements of a scan and of the only one that reads some of what it stacks; None without attention."""
    for backward in graph.equations:
        if backward.name != "scan" or backward is forward or _names_axes(backward):
            continue
        scans = [_private.scan_operands(e.params, list(e.inputs), list(e.outputs)) for e in (forward, backward)]
        early, stacks = set(variables_of(scans[1].consts + scans[1].init)), set(variables_of(scans[1].xs))
        needed = [
            k
            for k, v in enumerate(scans[0].ys)
            if v in stacks - early - graph.results and graph.readers[v] == [backward]
        ]
        if needed:
            return _without_weights(forward, backward, scans[0], scans[1], needed)
    return None


def _without_weights(
    forward: Equation,
    backward: Equation,
    parts: _private.ScanOperands,
    parts_of_backward: _private.ScanOperands,
    needed: list[int],
) -> dict[Equation, list[Equation]] | None:
    """`needed`: the indices in `parts.ys` of the stacked arrays that nothing but the backward scan's loop reads."""
    body, of_backward = (opened(scan.params["jaxpr"])[0] for scan in (forward, backward))
    if body.constvars or of_backward.constvars:
        return None
    n_carry = len(parts.init)
    others = [k for k in range(len(parts.ys)) if k not in needed]
    outvars = [*body.outvars[:n_carry], *(body.outvars[n_carry + k] for k in (*others, *needed))]
    chosen = residuals.chosen(edited(body, outvars=outvars), n_carry + len(others))
    if not chosen.has_attention:
        return None
    results = [*forward.outputs[:n_carry], *(parts.ys[k] for k in others)]
    new_forward, kept = _forward_that_keeps(forward, parts, chosen, results)
    place_of = {parts.ys[k]: n for n, k in enumerate(needed)}
    return {
        forward: new_forward,
        backward: _backward_that_makes_again(backward, parts_of_backward, chosen, kept, place_of),
    }


def _forward_that_keeps(
    forward: Equation, parts: _private.ScanOperands, chosen: Residuals, results: list[Var]
) -> tuple[list[Equation], list[tuple[Atom, bool]]]:
    """The scan that makes `results` and stacks what it has to keep; and the operands of `chosen.again`, as pairs: an
    array of the graph, and whether all layers share it."""
    n_consts, n_carry = len(parts.consts), len(parts.init)
    carried = [k for k in chosen.operands if n_consts <= k < n_consts + n_carry]

    def forward_and_kept(*operands: Any) -> list[Any]:
        consts, init, xs = _consts_init_xs(operands, n_consts, n_carry)

        def layer(carry: Any, x: Any) -> tuple[Any, Any]:
            operands = [*consts, *carry, *x]
            found = jax.core.eval_jaxpr(chosen.forward, [], *operands)
            return found[:n_carry], (found[n_carry:], [operands[k] for k in carried])

        carry, (made, of_carried) = _scanned(forward, layer, init, xs)
        return [*carry, *made, *of_carried]

    made, of_carried = (
        [_stacked(v, forward.params["length"]) for v in of_layer]
        for of_layer in (chosen.forward.outvars[len(results) :], [chosen.forward.invars[k] for k in carried])
    )
    of_operand = dict(zip(carried, of_carried, strict=True))
    kept = [(of_operand.get(k, forward.inputs[k]), k < n_consts) for k in chosen.operands]
    new = splicing.spliced(forward_and_kept, forward.inputs, [*results, *made, *of_carried], forward)
    return new, kept + [(a, False) for a in made]


def _backward_that_makes_again(
    backward: Equation,
    parts: _private.ScanOperands,
    chosen: Residuals,
    kept: list[tuple[Atom, bool]],
    place_of: dict[Var, int],
) -> list[Equation]:
    """The scan that makes the arrays of `place_of` again instead of reading them: each has its place there among the
    results of `chosen.again`, whose operands are `kept`."""
    body = opened(backward.params["jaxpr"])[0]
    n_carry = len(parts.init)
    places = [place_of.get(a) if is_variable(a) else None for a in parts.xs]

    # By the variables that hold them before the loop: what both read is one array, also in the loop.
    stacks = {id(a): a for a, k in zip(parts.xs, places, strict=True) if k is None}
    stacks |= {id(a): a for a, is_of_all in kept if not is_of_all}
    consts = {id(a): a for a in (*parts.consts, *(a for a, is_of_all in kept if is_of_all))}

    def again_and_backward(*operands: Any) -> list[Any]:
        of_all, init, xs = _consts_init_xs(operands, len(consts), n_carry)
        const = dict(zip(consts, of_all, strict=True))

        def layer(carry: Any, xs: Any) -> tuple[Any, Any]:
            of_layer = dict(zip(stacks, xs, strict=True))
            values = ((const if is_of_all else of_layer)[id(a)] for a, is_of_all in kept)
            again = jax.core.eval_jaxpr(chosen.again, [], *values)
            read = [of_layer[id(a)] if k is None else again[k] for a, k in zip(parts.xs, places, strict=True)]
            found = jax.core.eval_jaxpr(body, [], *(const[id(a)] for a in parts.consts), *carry, *read)
            return found[:n_carry], found[n_carry:]

        carry, ys = _scanned(backward, layer, init, xs)
        return [*carry, *ys]

    inputs = [*consts.values(), *parts.init, *stacks.values()]
    return splicing.spliced(again_and_backward, inputs, backward.outputs, backward)


def _consts_init_xs(operands: Sequence[Any], n_consts: int, n_carry: int) -> tuple[list[Any], list[Any], list[Any]]:
    first = n_consts + n_carry
    return list(operands[:n_consts]), list(operands[n_consts:first]), list(operands[first:])


def _scanned(like: Equation, layer: Callable[..., Any], init: Any, xs: Any) -> Any:
    options = {name: like.params[name] for name in ("length", "reverse", "unroll")}
    return jax.lax.scan(layer, init, xs, **options)


def _stacked(variable: Var, length: int) -> Var:
    """A variable for the arrays of all layers."""
    aval = variable.aval
    sharding = aval.sharding.update(spec=(None, *aval.sharding.spec))
    return type(variable)(aval.update(shape=(length, *aval.shape), weak_type=False, sharding=sharding))
