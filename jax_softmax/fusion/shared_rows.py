"""Rules for results for each row, as maxima and sums are: of several operators of an array only one makes them.

An operator's row results are taken from another operator that reads the same array, if that one needs nothing that
depends on them. The other one makes them already, or is replaced by one that makes them as well.
"""

from jax_softmax.fusion import expressions
from jax_softmax.fusion.graph import each_once
from jax_softmax.fusion.groups import foldable
from jax_softmax.fusion.splicing import mask_of, spliced
from jax_softmax.primitives import reference
from jax_softmax.primitives.operators import OPERATORS, bind, split
from jax_softmax.primitives.reference import AND_DISTANCES

# Operators that make maxima and sums of rows: the number of the result that is the maximum. The sum follows, and with
# AND_DISTANCES the distance and the count. An operator takes them from another one that is earlier in this list.
_FIRST_OF_ROWS = {
    "cross_entropy_gradient_and_distances": 1,
    "cross_entropy_gradient": 1,
    "softmax_and_normalizer": 1,
    "logsumexp_and_distances": 0,
    "cross_entropy": 1,
    "kl_divergence": 1,
    "logsumexp": 0,
}
_ORDER = list(_FIRST_OF_ROWS)

# By operator: another one, and the one that replaces that to make the first one's results as well.
_EXTENDED = {
    "logsumexp": ("softmax", "softmax_and_normalizer"),
    "logsumexp_and_distances": ("cross_entropy_gradient", "cross_entropy_gradient_and_distances"),
}


def gradients_of_own_rows(graph, equation):
    """A loss's gradient is not given its rows' maxima and sums: a kernel that makes these, too, is faster than XLA."""
    if equation.name != "cross_entropy_gradient" or not foldable(equation):
        return None
    n_known = OPERATORS[equation.name].n_known(equation.inputs, mask_of(equation) is not None)
    if not n_known:
        return None
    inputs = [equation.inputs[0], *equation.inputs[1 + n_known :]]

    def gradient(*operands):
        return equation.eqn.primitive.bind(*operands, **equation.params)

    return {equation: spliced(gradient, inputs, equation.outputs, equation)}


def shared(graph, equation):
    """Replacements for an operator whose row results another one can make, and what is renamed; None if none can."""
    if equation.name not in ("logsumexp_and_distances", "logsumexp", "cross_entropy") or not foldable(equation):
        return None
    return _from_another(graph, equation) or _from_extended(graph, equation)


def _from_another(graph, equation):
    """By an operator that makes these results already."""
    for other in graph.readers[equation.inputs[0]]:
        if not _gives_before(graph, other, equation) or not _can_give(graph, other, equation):
            continue
        of_rows = other.outputs[_FIRST_OF_ROWS[other.name] :]
        if equation.name != "cross_entropy":
            return {equation: []}, dict(zip(equation.outputs, of_rows, strict=False))
        axes = equation.params["axes"]

        def loss(x, label, largest, total, axes=axes):
            return reference.cross_entropy_given_normalizer(reference.Normalizer(largest, total), x, label, axes)

        losses = spliced(loss, [*equation.inputs[:2], *of_rows[:2]], equation.outputs[:1], equation)
        return {equation: losses}, dict(zip(equation.outputs[1:], of_rows, strict=False))
    return None


def _gives_before(graph, other, equation):
    """Whether another operator makes these row results, and is earlier in the list above, or in the program."""
    if other.name not in _ORDER or (equation.name.endswith(AND_DISTANCES) and not other.name.endswith(AND_DISTANCES)):
        return False
    ranks = [(_ORDER.index(e.name), graph.position[e]) for e in (other, equation)]
    return ranks[0] < ranks[1]


def _from_extended(graph, equation):
    """By an operator that does not make these results yet: it is replaced by one that does."""
    name, extended = _EXTENDED.get(equation.name, (None, None))
    for other in graph.readers[equation.inputs[0]]:
        if other.name != name or not _can_give(graph, other, equation):
            continue
        element, *of_rows = other.outputs
        if element.aval.dtype.name not in expressions.WRITABLE:
            continue

        def extended_results(*operands, params=other.params):
            operands, where = split(operands)
            return bind(extended, *operands, where=where, **params)

        outputs = [element, *of_rows, *equation.outputs[len(of_rows) :]]
        renamed = dict(zip(equation.outputs, of_rows, strict=False))
        return {equation: [], other: spliced(extended_results, other.inputs, outputs, other)}, renamed
    return None


def _can_give(graph, other, equation):
    """Whether another operator reads the same rows, and nothing that depends on the equation's results."""
    if not foldable(other) or other.inputs[0] is not equation.inputs[0] or mask_of(other) is not mask_of(equation):
        return False
    if any(other.params[name] != equation.params[name] for name in ("axes", "axis_name")):
        return False

    def makers(atoms):
        return [e for e in map(graph.maker_of, atoms) if e is not None]

    ancestors = each_once(makers(other.inputs), lambda e: makers(e.inputs))
    return not any(e is equation or graph.has_effects_after(e, equation) for e in ancestors)
