"""Rules by which a program's equations are replaced before it is cut into groups, so that fewer bytes move.

Before all rules equal operations of the same variables become one (`without_duplicates`), and what is written out
becomes operators (`written_out.py`). `after_rules` says in which order the rules go:

1. log_softmax(x) is made again of x and the rows' maxima and sums wherever it is read. So is softmax(x), if fewer bytes
   have to be kept for the backward pass then.
2. The sum of softmax's cotangent and log_softmax's of the same array: one cotangent of log_softmax.
3. softmax and log_softmax of the same array, if both are still to be written: exp of the latter is a second result.
4. The sum over a row of p (log_softmax(x) - log_softmax(y)), where p is softmax(x) or exp(log_softmax(x)): the
   divergence, by its own kernel.
5. Arrays that are one number in each row but at a label, as the gradient of a loss is (`at_labels.py`).
6. Results for each row that several operators make of the same array (`shared_rows.py`).
"""

import functools

import jax.numpy as jnp
import numpy as np

from jax_softmax.functions.entropies import kl_divergence
from jax_softmax.fusion import at_labels, expressions, shared_rows
from jax_softmax.fusion.graph import CycleError, Equation, Graph, bytes_of, each_once, is_variable, size_of
from jax_softmax.fusion.groups import Group, foldable, is_loop, is_materialized_unfolded, may_fold
from jax_softmax.fusion.splicing import is_unmasked, made_of_rows, row_variables, rows_of, spliced
from jax_softmax.primitives.operators import PRIMITIVES, bind

# A softmax is made again if that costs at most so large a part of writing and reading it. Its cost is what is read, and
# for an element's exponential as much time as moving so many bytes. Chosen, not measured apart: a float32 softmax of
# float32 is made again (4 + 1.8 bytes against 8), a bfloat16 one of bfloat16 is kept (2 + 1.8 against 4).
_WORTH_IT, _BYTES_OF_EXPONENTIAL = 0.8, 1.8

_LINEAR_MAPS = ("softmax_linear", "log_softmax_vjp", "log_softmax_jvp")


def after_rules(graph: Graph) -> Graph:
    """The graph after all rules."""
    for rule in (
        shared_rows.gradients_of_own_rows,
        _sums_of_cotangents,
        at_labels.loss_gradients,
        at_labels.sums_at_labels,
        at_labels.scattered,
        _divergences,
        _recomputed,
        _two_results,
    ):
        replacements: dict[Equation, list[Equation]] = {}
        for equation in graph.equations:
            replacements |= rule(graph, equation) or {}
        if replacements:
            graph = graph.with_replaced(replacements)
    while (shared := _with_shared_rows(graph)) is not None:
        graph = shared
    return graph


def _with_shared_rows(graph):
    """The graph with as many row results shared as can be at once; None if there are none to share."""
    found, taken = [], set()
    for equation in graph.equations:
        replacements, renamed = shared_rows.shared(graph, equation) or ({}, {})
        concerned = {*replacements, *(graph.maker[v] for v in renamed.values())}
        if replacements and taken.isdisjoint(concerned):
            found.append((replacements, renamed))
            taken |= concerned
    if not found:
        return None
    try:
        return graph.with_replaced(
            *({k: v for one in dictionaries for k, v in one.items()} for dictionaries in zip(*found, strict=True))
        )
    except CycleError:  # each may be shared, but not all of them
        return graph.with_replaced(*found[0])


def without_duplicates(graph: Graph) -> Graph:
    """The graph in which equal operations of the same variables are one."""
    known: dict = {}
    renamed: dict = {}
    for equation in graph.equations:
        if not may_fold(equation) or equation.eqn.effects:
            continue
        inputs = tuple(_atom_key(renamed.get(a, a) if is_variable(a) else a) for a in equation.inputs)
        params = tuple(sorted((name, str(value)) for name, value in equation.params.items()))
        key = equation.name, inputs, params, tuple(v.aval for v in equation.outputs)
        first = known.setdefault(key, equation)
        if first is not equation:
            renamed |= zip(equation.outputs, first.outputs, strict=True)
    duplicates = {equation: [] for equation in graph.equations if equation.outputs and equation.outputs[0] in renamed}
    return graph.with_replaced(duplicates, renamed) if duplicates else graph


def _atom_key(a):
    return a if is_variable(a) else (a.aval, np.asarray(a.val).tobytes())


# ---- 1


def _recomputed(graph, equation):
    """softmax or log_softmax made again where it is read."""
    if not is_unmasked(equation, "softmax", "log_softmax"):
        return None
    (x,), (y,) = equation.inputs, equation.outputs
    readers = graph.readers.get(y, ())
    if y in graph.results or not readers:
        return None
    maps = [r for r in readers if r.name in _LINEAR_MAPS and r.inputs[0] is y and y not in r.inputs[1:]]
    others = [r for r in readers if r not in maps]
    written = [r for r in others if not (is_loop(r) or r.name == "gather" or _folds(equation, r))]
    if any(map(expressions.is_expressible, others)):
        # With the one-hot array of an argmax XLA takes five times as long as it reads softmax (H200, JAX 0.11.2).
        written += [r for r in others if r.name in ("argmax", "argmin")]
    if equation.name == "softmax":
        is_materialized = functools.partial(is_materialized_unfolded, graph)
        again = Group(graph, equation).cost_of_reading(x, is_materialized) + _BYTES_OF_EXPONENTIAL * size_of(x)
        if written:  # in any case; but less may have to be kept for the backward pass
            return _softmax_for_maps(equation, maps) if maps and again <= bytes_of(y) else None
        if again > _WORTH_IT * 2 * bytes_of(y):  # y is written, and read by the backward pass
            return None
        if others and not _has_rows(graph, equation) and not any(_is_summed(graph, r) for r in others):
            return _softmax_for_maps(equation, maps) if maps else None
    elif written:
        return None
    rows = row_variables(equation)
    return {equation: [*rows_of(equation, rows), *made_of_rows(equation, rows)]}


def _folds(log_softmax, reader):
    """Whether a reader is an operator of log_softmax's result, which it can make of x and the rows' numbers."""
    is_operator = reader.name in PRIMITIVES and reader.inputs[0] is log_softmax.outputs[0] and foldable(reader)
    return log_softmax.name == "log_softmax" and is_operator


def _has_rows(graph, equation):
    """Whether a divergence of the same array makes its rows' maxima and sums in any case."""
    (x,), axes = equation.inputs, equation.params["axes"]
    return any(
        is_unmasked(r, "kl_divergence") and r.inputs[0] is x and r.params["axes"] == axes for r in graph.readers[x]
    )


def _is_summed(graph, reader):
    """Whether a reader, or a loop that reads what it makes, reduces it."""

    def following(equation):
        return [r for v in equation.outputs for r in graph.readers.get(v, ()) if is_loop(r)]

    return is_loop(reader) and not all(map(expressions.is_expressible, each_once([reader], following)))


def _softmax_for_maps(equation, maps):
    """softmax with its rows' maxima and sums, of which its linear maps make it again."""
    (x,), (y,), axes = equation.inputs, equation.outputs, equation.params["axes"]
    rows = row_variables(equation)

    def with_rows(x):
        return bind("softmax_and_normalizer", x, where=None, axes=axes, dtype=y.aval.dtype)

    replaced = {equation: spliced(with_rows, [x], [y, *rows], equation)}
    for reader in maps:
        again = type(y)(y.aval)
        replaced[reader] = [*made_of_rows(equation, rows, again), reader.with_inputs([again, *reader.inputs[1:]])]
    return replaced


# ---- 2


def _sums_of_cotangents(graph, equation):
    """p (t - sum(p t)) + (u - p sum(u)) is v - p sum(v), where v is p t + u."""
    if equation.name not in ("add", "add_any") or not all(map(is_variable, equation.inputs)):
        return None
    for one, other in (equation.inputs, equation.inputs[::-1]):
        of_p, of_y = graph.maker.get(one), graph.maker.get(other)
        if not is_unmasked(of_p, "softmax_linear") or not is_unmasked(of_y, "log_softmax_vjp"):
            continue
        (p, t), (y, u) = of_p.inputs, of_y.inputs
        forward, log_forward = graph.maker.get(p), graph.maker.get(y)
        if not is_unmasked(forward, "softmax") or not is_unmasked(log_forward, "log_softmax"):
            continue
        same = forward.inputs[0] is log_forward.inputs[0] and forward.params["axes"] == log_forward.params["axes"]
        same &= of_p.params["axes"] == of_y.params["axes"] == forward.params["axes"]
        same &= all(a.aval.dtype == jnp.float32 for a in (p, t, y, u, one, other))
        if not same or len(graph.readers[one]) + len(graph.readers[other]) > 2:
            continue

        def cotangent(p, t, y, u, params=of_y.params):
            return bind("log_softmax_vjp", y, p * t + u, where=None, axes=params["axes"], dtype=params["dtype"])

        return {equation: spliced(cotangent, [p, t, y, u], equation.outputs, equation)}
    return None


# ---- 3


def _two_results(graph, equation):
    if not is_unmasked(equation, "softmax"):
        return None
    alike = [r for r in graph.readers[equation.inputs[0]] if r.params.get("axes") == equation.params["axes"]]
    first = next(r for r in alike if is_unmasked(r, "softmax"))
    other = next((r for r in alike if is_unmasked(r, "log_softmax")), None)
    return _softmax_of_logarithms(equation, other) if first is equation and other is not None else None


def _softmax_of_logarithms(softmax, log_softmax):
    (p,), (y,), axes = softmax.outputs, log_softmax.outputs, softmax.params["axes"]
    wide = type(y)(y.aval.update(dtype=jnp.dtype("float32"), weak_type=False))

    def logs(x):
        return bind("log_softmax", x, where=None, axes=axes, dtype="float32")

    return {
        log_softmax: [
            *spliced(logs, log_softmax.inputs, [wide], log_softmax),
            *spliced(lambda wide: wide.astype(y.aval.dtype), [wide], [y], log_softmax),
        ],
        softmax: spliced(lambda wide: jnp.exp(wide).astype(p.aval.dtype), [wide], [p], softmax),
    }


# ---- 4


def _divergences(graph, equation):
    if equation.name != "reduce_sum" or equation.inputs[0].aval.dtype != jnp.float32:
        return None
    axes, product = tuple(equation.params["axes"]), graph.maker_of(equation.inputs[0])
    for p, difference in (product.inputs, product.inputs[::-1]) if _is_named(product, "mul") else ():
        of_p, difference = graph.maker_of(p), graph.maker_of(difference)
        if not _is_named(difference, "sub"):
            continue
        log_p, log_q = map(graph.maker_of, difference.inputs)
        if not all(is_unmasked(e, "log_softmax") and e.params["axes"] == axes for e in (log_p, log_q)):
            continue
        (x,), (y,) = log_p.inputs, log_q.inputs
        is_exp = _is_named(of_p, "exp") and of_p.inputs[0] is log_p.outputs[0]
        is_softmax = is_unmasked(of_p, "softmax") and of_p.inputs[0] is x and of_p.params["axes"] == axes
        if not (is_exp or is_softmax) or any(a.aval.dtype != jnp.float32 for a in (x, y)):
            continue
        return {equation: spliced(lambda x, y: kl_divergence(x, y, axes), [x, y], equation.outputs, equation)}
    return None


def _is_named(equation, name):
    return equation is not None and equation.name == name
