"""Rules by which a program's equations are replaced before it is cut into groups, so that fewer bytes move.

Before all rules equal operations of the same variables become one and products with one-hot arrays are made by elements
(`normalized`), and what is written out becomes operators (`written_out.py`). The rules here make softmax and
log_softmax again of x and rows' maxima and sums; those of `patterns.py` and `one_hot.py` find losses, their gradients
and divergences. After them all, results for each row that several operators make of the same array are shared
(`shared_normalizers.py`), and of gradients of two directions, as CLIP's loss has, one is made of them.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_softmax.fusion.forms import cut_rows, few_places, one_hot, own_maxima, patterns
from jax_softmax.fusion.forms.patterns import Rule
from jax_softmax.fusion.forms.shared_normalizers import Replacements, gradients_of_own_rows, with_shared_normalizers
from jax_softmax.fusion.kernels.candidates import Group, is_materialized_unfolded
from jax_softmax.fusion.program import expressions
from jax_softmax.fusion.program.graph import Equation, Graph, about_size_of, bytes_of, each_once, is_variable
from jax_softmax.fusion.program.kinds import foldable, is_loop, may_fold
from jax_softmax.fusion.program.splicing import (
    gathered_of_rows,
    is_unmasked,
    made_of_rows,
    mask_of,
    row_variables,
    rows_of,
    spliced,
)
from jax_softmax.primitives.operators import PRIMITIVES, bind, split
from jax_softmax.primitives.records import GRADIENTS, LINEAR_MAPS, RECORDS, VJP
from jax_softmax.primitives.types import Var
from jax_softmax.runtime import costs

_OF_ROWS = tuple(op for op, record in RECORDS.items() if record.row_rank)  # that give rows' maxima and sums


def after_rules(graph: Graph) -> Graph:
    """The graph after all rules."""
    for rule in _RULES:
        graph = _after(rule, graph)
    return _after(patterns.gradients_of_two_directions, with_shared_normalizers(graph))


def _after(rule: Rule, graph: Graph) -> Graph:
    replacements: dict[Equation, list[Equation]] = {}
    for equation in graph.equations:
        replacements |= rule(graph, equation) or {}
    return graph.with_replaced(replacements) if replacements else graph


def normalized(graph: Graph) -> Graph:
    """The graph in which equal operations are one, products with one-hot arrays are made by elements, no maxima are
    subtracted before softmax, and no rows are cut off before it."""
    graph = _after(one_hot.multiplied, without_duplicates(graph))
    return cut_rows.with_all_rows(own_maxima.without_sums_of_gradients(_after(own_maxima.not_subtracted, graph)))


def without_duplicates(graph: Graph) -> Graph:
    """The graph in which equal operations of the same variables are one."""
    first_of: dict[tuple[Any, ...], Equation] = {}
    renamed: dict[Var, Var] = {}
    for equation in graph.equations:
        if not may_fold(equation) or equation.eqn.effects:
            continue
        inputs = tuple(_atom_key(renamed.get(a, a) if is_variable(a) else a) for a in equation.inputs)
        params = tuple(sorted((name, str(value)) for name, value in equation.params.items()))
        key = equation.name, inputs, params, tuple(v.aval for v in equation.outputs)
        first = first_of.setdefault(key, equation)
        if first is not equation:
            renamed |= zip(equation.outputs, first.outputs, strict=True)
    duplicates: Replacements = {e: [] for e in graph.equations if e.outputs and e.outputs[0] in renamed}
    return graph.with_replaced(duplicates, renamed) if duplicates else graph


def _atom_key(a: Any) -> Any:
    return a if is_variable(a) else (a.aval, np.asarray(a.val).tobytes())


# ---- softmax or log_softmax again


def _in_one_pass(graph: Graph, equation: Equation) -> Replacements | None:
    """The linear map of a softmax or log_softmax that nothing else reads, made of x."""
    if equation.name not in GRADIENTS or not foldable(equation):
        return None
    y, *others = equation.inputs
    value = graph.maker_of(y)
    if value is None or VJP.get(value.name) != equation.name or not foldable(value):
        return None
    is_kept = y in graph.results or graph.readers[y] != [equation] or y in others
    if (
        is_kept
        or _has_rows(graph, value, *_OF_ROWS)
        or mask_of(value) is not mask_of(equation)
        or value.params["axes"] != equation.params["axes"]
    ):
        return None
    params = {name: equation.params[name] for name in ("axes", "dtype")}

    def gradient(*operands: jax.Array) -> jax.Array:
        (x, t), where = split(operands)
        return bind(GRADIENTS[equation.name], x, t, where=where, **params)

    return {value: [], equation: spliced(gradient, [value.inputs[0], *others], equation.outputs, equation)}


def _recomputed(graph: Graph, equation: Equation) -> Replacements | None:
    """softmax or log_softmax made again of x and its rows' maxima and sums where it is read: log_softmax wherever all
    that is, and softmax if fewer bytes have to be kept for the backward pass then."""
    if not is_unmasked(equation, "softmax", "log_softmax"):
        return None
    (x,), (y,) = equation.inputs, equation.outputs
    readers = graph.readers.get(y, ())
    if y in graph.results or not readers:
        return None
    maps = [r for r in readers if r.name in LINEAR_MAPS and r.inputs[0] is y and y not in r.inputs[1:]]
    others = [r for r in readers if r not in maps]
    written = [r for r in others if not (is_loop(r) or r.name == "gather" or _folds(equation, r))]
    if any(map(expressions.is_expressible, others)):
        # With the one-hot array of an argmax XLA takes five times as long as it reads softmax (H200, JAX 0.11.2).
        written += [r for r in others if r.name in ("argmax", "argmin")]
    if equation.name == "softmax":
        is_materialized = functools.partial(is_materialized_unfolded, graph)
        again = Group(graph, equation).cost_of_reading(x, is_materialized) + costs.REMADE_SOFTMAX * about_size_of(x)
        if written:  # in any case; but less may have to be kept for the backward pass
            return _softmax_for_maps(equation, maps) if maps and again <= bytes_of(y) else None
        if again > costs.WORTH_REMAKING * 2 * bytes_of(y):  # y is written, and read by the backward pass
            return None
        if others and not _has_rows(graph, equation, "kl_divergence") and not any(_is_summed(graph, r) for r in others):
            return _softmax_for_maps(equation, maps) if maps else None
    elif written or not (maps or _has_rows(graph, equation, *_OF_ROWS) or any(_is_reduced(graph, r) for r in readers)):
        return None  # nothing else needs the rows' numbers, of which XLA would make it in a second pass
    rows = row_variables(equation)
    gathers = {r: gathered_of_rows(r, equation, rows) for r in readers if _gathers_at_labels(graph, r, equation)}
    return {equation: [*rows_of(equation, rows), *made_of_rows(equation, rows)], **gathers}


def _gathers_at_labels(graph: Graph, reader: Equation, equation: Equation) -> bool:
    """Whether it gathers an element of each row of a result, in their order, and has NaN where there is none."""
    if reader.name != "gather" or reader.inputs[0] is not equation.outputs[0]:
        return False
    fill = reader.params.get("fill_value")
    has_nan = fill is None or bool(np.isnan(fill))
    return has_nan and one_hot.labels_of(graph, reader, *equation.params["axes"]) is not None


def _folds(log_softmax: Equation, reader: Equation) -> bool:
    """Whether a reader is an operator of log_softmax's result, which it can make of x and the rows' numbers."""
    is_operator = reader.name in PRIMITIVES and reader.inputs[0] is log_softmax.outputs[0] and foldable(reader)
    return log_softmax.name == "log_softmax" and is_operator


def _has_rows(graph: Graph, equation: Equation, *names: str) -> bool:
    """Whether one of these operators of the same array makes its rows' maxima and sums in any case."""
    x, axes = equation.inputs[0], equation.params["axes"]
    return any(is_unmasked(r, *names) and r.inputs[0] is x and r.params["axes"] == axes for r in graph.readers[x])


def _is_reduced(graph: Graph, reader: Equation) -> bool:
    """Whether a reader, or what reads what it makes of each element, needs no elements in memory: it reduces or gathers
    them, or is an operator."""

    def following(equation: Equation) -> list[Equation]:
        return graph.readers_of(equation) if expressions.is_expressible(equation) else []

    ends = (e for e in each_once([reader], following) if not expressions.is_expressible(e))
    return any(is_loop(e) or e.name == "gather" or e.name in PRIMITIVES for e in ends)


def _is_summed(graph: Graph, reader: Equation) -> bool:
    """Whether a reader, or a loop that reads what it makes, reduces it."""

    def following(equation: Equation) -> list[Equation]:
        return [r for v in equation.outputs for r in graph.readers.get(v, ()) if is_loop(r)]

    return is_loop(reader) and not all(map(expressions.is_expressible, each_once([reader], following)))


def _softmax_for_maps(equation: Equation, maps: list[Equation]) -> Replacements:
    """softmax with its rows' maxima and sums, of which its linear maps make it again."""
    (x,), (y,), axes = equation.inputs, equation.outputs, equation.params["axes"]
    rows = row_variables(equation)

    def with_rows(x: jax.Array) -> list[jax.Array]:
        return bind("softmax_and_normalizer", x, where=None, axes=axes, dtype=y.aval.dtype)

    replacements = {equation: spliced(with_rows, [x], [y, *rows], equation)}
    for reader in maps:
        again = type(y)(y.aval)
        replacements[reader] = [*made_of_rows(equation, rows, again), reader.with_inputs([again, *reader.inputs[1:]])]
    return replacements


# ---- softmax and log_softmax of the same array


def _two_results(graph: Graph, equation: Equation) -> Replacements | None:
    """exp of log_softmax instead of softmax of the same array, if both are still to be written."""
    if not is_unmasked(equation, "softmax"):
        return None
    alike = [r for r in graph.readers[equation.inputs[0]] if r.params.get("axes") == equation.params["axes"]]
    first = next(r for r in alike if is_unmasked(r, "softmax"))
    other = next((r for r in alike if is_unmasked(r, "log_softmax")), None)
    return _softmax_of_logarithms(equation, other) if first is equation and other is not None else None


def _softmax_of_logarithms(softmax: Equation, log_softmax: Equation) -> Replacements:
    (p,), (y,), axes = softmax.outputs, log_softmax.outputs, softmax.params["axes"]
    wide = type(y)(y.aval.update(dtype=jnp.dtype("float32"), weak_type=False))

    def logs(x: jax.Array) -> jax.Array:
        return bind("log_softmax", x, where=None, axes=axes, dtype="float32")

    return {
        log_softmax: [
            *spliced(logs, log_softmax.inputs, [wide], log_softmax),
            *spliced(lambda wide: wide.astype(y.aval.dtype), [wide], [y], log_softmax),
        ],
        softmax: spliced(lambda wide: jnp.exp(wide).astype(p.aval.dtype), [wide], [p], softmax),
    }


# In this order: each is for all equations of the graph, as the rules before it left that.
_RULES: tuple[Rule, ...] = (
    gradients_of_own_rows,
    patterns.sums_of_cotangents,
    patterns.cotangents_at_labels,
    patterns.sums_at_labels,
    patterns.wide_sums_at_labels,
    one_hot.scattered,
    few_places.in_float32,
    few_places.in_several_tables,
    patterns.divergences,
    _in_one_pass,
    _recomputed,
    _two_results,
)
