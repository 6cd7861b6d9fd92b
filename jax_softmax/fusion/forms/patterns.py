"""Rules that are rows of a table: a pattern of a few equations, and what replaces the equation of its first line.

`p=[("softmax", "x"), ("exp", "y")]` says that p is made by either of two equations. Each line is of a variable that a
line before it names. What has no line may be anything. A name stands for one variable or literal. The operands of sums
and products may be exchanged. Operators are unmasked, and all reductions are along one axis.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jax_softmax.functions.entropies import kl_divergence
from jax_softmax.fusion.forms.gradients import loss_gradient
from jax_softmax.fusion.forms.one_hot import one_hot_of
from jax_softmax.fusion.program import expressions, walk
from jax_softmax.fusion.program.graph import Equation, Graph, is_variable, variables_of
from jax_softmax.fusion.program.kinds import foldable, may_fold
from jax_softmax.fusion.program.splicing import is_unmasked, spliced
from jax_softmax.primitives import labels, reference
from jax_softmax.primitives.operators import OPERATORS, PRIMITIVES, Coefficients, bind
from jax_softmax.primitives.types import Var

Rule = Callable[[Graph, Equation], dict[Equation, list[Equation]] | None]  # what is instead of an equation, and others
Equations = list[tuple[str, ...]]  # that may make a variable: for each the primitive's name, and those of its operands
_COMMUTATIVE = ("add", "add_any", "mul")
_GRADIENT = "cross_entropy_gradient"


def by_pattern(**lines: Equations) -> Callable[[Callable[..., list[Equation] | None]], Rule]:
    """A decorator: the rule by which the equations that a function returns replace the equation of a pattern. The
    function is given the graph, and variables and `axes` by their names. It returns None where the pattern stays."""
    result = next(iter(lines))

    def decorated(replacement: Callable[..., list[Equation] | None]) -> Rule:
        def rule(graph: Graph, equation: Equation) -> dict[Equation, list[Equation]] | None:
            names = _matched(graph, [*lines.items()], dict(zip([result], equation.outputs, strict=False)))
            new = None if names is None else replacement(graph, **names)
            return None if new is None else {equation: new}

        return rule

    return decorated


def _matched(graph: Graph, lines: list[tuple[str, Equations]], names: dict[str, Any]) -> dict[str, Any] | None:
    """All variables and literals of lines, and `axes`, given those that have names; None if these have other makers."""
    if not lines:
        return names
    (result, makers), *rest = lines
    maker = graph.maker_of(names[result]) if result in names else None
    if maker is None:
        return None
    for name, *operands in makers:
        is_operator = name in PRIMITIVES
        if maker.name != name or len(maker.inputs) != len(operands) or (is_operator and not is_unmasked(maker, name)):
            continue
        axes = {"axes": tuple(maker.params["axes"])} if is_operator or name == "reduce_sum" else {}
        for atoms in [maker.inputs, maker.inputs[::-1]] if name in _COMMUTATIVE else [maker.inputs]:
            new = dict(zip(operands, atoms, strict=True)) | axes
            found = None
            if all(names.get(key, value) == value for key, value in new.items()):
                found = _matched(graph, rest, names | new)
            if found is not None:
                return found
    return None


# ---- The table


@by_pattern(
    v=[("add", "g", "h"), ("add_any", "g", "h")],
    g=[("softmax_linear", "p", "t")],
    h=[("log_softmax_vjp", "y", "u")],
    p=[("softmax", "x")],
    y=[("log_softmax", "x")],
)
def sums_of_cotangents(
    graph: Graph, v: Var, g: Var, h: Var, p: Var, t: Var, y: Var, u: Var, x: Var, axes: tuple[int]
) -> list[Equation] | None:
    """p (t - sum(p t)) + (u - p sum(u)) is w - p sum(w), where w is p t + u."""
    is_read_elsewhere = len(graph.readers[g]) + len(graph.readers[h]) > 2
    if is_read_elsewhere or any(a.aval.dtype != jnp.float32 for a in (p, t, y, u, g, h)):
        return None

    def cotangent(p: jax.Array, t: jax.Array, y: jax.Array, u: jax.Array) -> jax.Array:
        return bind("log_softmax_vjp", y, p * t + u, where=None, axes=axes, dtype="float32")

    return spliced(cotangent, [p, t, y, u], [v], graph.maker[v])


@by_pattern(
    g=[("log_softmax_vjp", "y", "t")],
    y=[("log_softmax", "x")],
)
def cotangents_at_labels(graph: Graph, g: Var, y: Var, t: Var, x: Var, axes: tuple[int]) -> list[Equation] | None:
    """The gradient of a cross entropy, by its own kernel."""
    return loss_gradient(graph, graph.maker[y], t, graph.maker[g]) if is_variable(t) else None


def _sum_at_labels(
    graph: Graph, v: Var, product: Var, t: Var, y: Var, x: Var, axes: tuple[int], narrow: Var | None = None
) -> list[Equation] | None:
    """The sum over a row of t y, of the element at the label and, if t is not 0 elsewhere, of the sum of y. y is a
    softmax or log_softmax of x, or widened from it, which is `narrow` then."""
    one_hot = one_hot_of(graph, t, *axes) if len(graph.readers[product]) == 1 else None
    if one_hot is None:
        return None
    made = y if narrow is None else narrow
    # A log_softmax that is written anyway is read itself.
    from_x = graph.maker[made].name == "log_softmax" and not any(_is_written(graph, a) for a in (y, made))

    def weighted_sum(x: jax.Array, y: jax.Array, *variables: jax.Array) -> jax.Array:
        label, weight, offset = one_hot.make(*variables)
        counts = labels.has_label(label, y.shape, axes)
        if offset is not None:
            weight -= offset
            counts &= weight != 0  # the element at the label may be -inf
        at_label = _logarithms_at_labels(x, label, axes) if from_x else labels.label_elements(y, axes, label)
        result = jnp.where(counts, at_label * weight, 0)
        if offset is not None:
            result += offset * (_sum_of_logarithms(x, axes) if from_x else jnp.sum(y, axes, keepdims=True))
        return jnp.squeeze(result, axes).astype(y.dtype)

    return spliced(weighted_sum, [x, y, *one_hot.variables], [v], graph.maker[v])


_OF_TARGETS: dict[str, Equations] = {"v": [("reduce_sum", "product")], "product": [("mul", "t", "y")]}
_SOFTMAXES: Equations = [("log_softmax", "x"), ("softmax", "x")]
sums_at_labels = by_pattern(**_OF_TARGETS, y=_SOFTMAXES)(_sum_at_labels)
wide_sums_at_labels = by_pattern(**_OF_TARGETS, y=[("convert_element_type", "narrow")], narrow=_SOFTMAXES)(
    _sum_at_labels
)


def _is_written(graph: Graph, a: Var) -> bool:
    """Whether something reads all elements in memory: neither a loop nor an operator, nor a gather of some."""
    readers = graph.readers.get(a, ())
    return a in graph.results or any(not (may_fold(r) or r.name == "gather") for r in readers)


def _logarithms_at_labels(x: jax.Array, label: jax.Array, axes: tuple[int]) -> jax.Array:
    """The element of log_softmax(x) at each row's label: of x's element there, which needs nothing else to be read."""
    loss, largest, *_ = bind("cross_entropy", x, label, where=None, axes=axes)
    return jnp.where(largest == jnp.inf, jnp.nan, -loss)


def _sum_of_logarithms(x: jax.Array, axes: tuple[int]) -> jax.Array:
    """The sum of log_softmax(x) over each row."""
    (n,) = (x.shape[axis] for axis in axes)
    if n > reference.MOST_COUNTED:
        return jnp.sum(bind("log_softmax", x, where=None, axes=axes, dtype="float32"), axes, keepdims=True)
    largest, total, distance, count = bind("logsumexp_and_distances", x, where=None, axes=axes)
    rows = reference.Normalizer(largest, total).without_infinity()
    return reference.distance_sum_of_all(distance, count, n) - n * jnp.log(rows.sum_exp)


@by_pattern(
    v=[("reduce_sum", "product")],
    product=[("mul", "p", "difference")],
    difference=[("sub", "log_p", "log_q")],
    log_p=[("log_softmax", "x")],
    log_q=[("log_softmax", "y")],
    p=[("softmax", "x"), ("exp", "log_p")],
)
def divergences(
    graph: Graph, v: Var, product: Var, x: Var, y: Var, axes: tuple[int], **_: Var
) -> list[Equation] | None:
    """The sum over a row of p (log p - log q)."""
    if any(a.aval.dtype != jnp.float32 for a in (product, x, y)):
        return None
    return spliced(lambda x, y: kl_divergence(x, y, axes), [x, y], [v], graph.maker[v])


# ---- A rule of sums, however many equations are between


def gradients_of_two_directions(graph: Graph, equation: Equation) -> dict[Equation, list[Equation]] | None:
    """A cross entropy's gradient by rows, to which one by other rows of the same array is added, as in CLIP's loss.

    The first one is made of rows' numbers where it is added, which is in the kernel of the last one.
    """
    if equation.name != _GRADIENT or not foldable(equation) or OPERATORS[_GRADIENT].operands < len(equation.inputs):
        return None
    others = [other for other in _added_to(graph, equation) if _is_by_other_rows(graph, equation, other)]
    position = graph.position
    if all(position[other] < position[equation] and equation in _added_to(graph, other) for other in others):
        return None
    axes, dtype = equation.params["axes"], equation.params["dtype"]

    def of_rows(x: jax.Array, *operands: jax.Array) -> list[jax.Array]:
        rows, (*numbers, label) = reference.Normalizer(*bind("logsumexp", x, where=None, axes=axes)), operands
        coefficients = Coefficients(*numbers)
        return [reference.gradient_given_normalizer(rows, x, coefficients, label, None, axes, dtype=dtype), *rows]

    return {equation: spliced(of_rows, equation.inputs, equation.outputs, equation)}


def _added_to(graph: Graph, equation: Equation) -> list[Equation]:
    """The gradients of cross entropies that are added to one, element by element."""
    sums, made = [], equation.outputs[0]
    while len(readers := graph.readers.get(made, [])) == 1 and expressions.is_expressible(readers[0]):
        (made,) = readers[0].outputs
        sums += readers if readers[0].name in ("add", "add_any") else []
    found = []
    for equation_of_sum in sums:
        for v in expressions.elementwise_ancestors(graph, variables_of(equation_of_sum.inputs)):
            maker = graph.maker.get(v)
            found += [maker] if maker is not None and maker.name == _GRADIENT and maker is not equation else []
    return found


def _is_by_other_rows(graph: Graph, one: Equation, other: Equation) -> bool:
    """Whether both are of the same array, but along other dimensions of it."""
    arrays = [walk.through(graph, e.inputs[0], expressions.is_view) for e in (one, other)]
    return arrays[0] is arrays[1] and (
        one.inputs[0] is not other.inputs[0] or one.params["axes"] != other.params["axes"]
    )
