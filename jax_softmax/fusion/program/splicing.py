"""Calls of this package's operators as equations of a graph: tests of them, and new ones."""

from collections.abc import Callable, Container, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jax_softmax import _private
from jax_softmax.fusion.program.graph import Equation, barrier, graph_of, is_variable, opened, variables_of
from jax_softmax.fusion.program.kinds import foldable, kind_of
from jax_softmax.primitives import reference
from jax_softmax.primitives.interpreters import abstract_eval
from jax_softmax.primitives.operators import bind
from jax_softmax.primitives.types import Atom, Literal, Var


def is_unmasked(equation: Equation | None, *names: str) -> bool:
    """Whether it is one of these operators, of whole rows, without a mask, along one axis."""
    if equation is None or equation.name not in names or len(equation.params["axes"]) != 1:
        return False
    return foldable(equation) and all(a.aval.dtype != bool for a in equation.inputs)


def is_alike(equation: Equation) -> bool:
    """Whether its result's elements are its operand's, up to a rounding."""
    return kind_of(equation) in ("copy", "view", "cast")


def spliced(f: Callable[..., Any], inputs: Sequence[Atom], outputs: Sequence[Var], like: Equation) -> list[Equation]:
    """The equations of a function of these inputs, whose results are these outputs, at the line of `like`."""
    avals = [a.aval.update(weak_type=False) for a in inputs]

    def of_their_own(*a: jax.Array) -> list[jax.Array]:
        """The results, with copies of those that are operands, or each other."""
        results = jax.tree.leaves(f(*a))
        before = [*a, *results]
        return [jnp.copy(r) if any(r is b for b in before[: len(a) + k]) else r for k, r in enumerate(results)]

    with _private.context_of(like.eqn):
        jaxpr, constants = opened(jax.make_jaxpr(of_their_own)(*avals))
    inner = graph_of(jaxpr)
    renamed: dict[Var, Atom] = dict(zip(jaxpr.invars, inputs, strict=True))
    renamed |= {v: Literal(c, v.aval) for v, c in zip(jaxpr.constvars, constants, strict=True)}
    renamed |= zip(variables_of(inner.outputs), outputs, strict=True)

    def new(a: Atom) -> Atom:
        return renamed.setdefault(a, type(a)(a.aval)) if is_variable(a) else a

    found = []
    for e in inner.equations:
        eqn = _private.at_the_line_of(e.eqn, like.eqn)
        results = variables_of([new(v) for v in e.outputs])
        found.append(Equation(eqn, [new(a) for a in e.inputs], results, e.params))
    return found


def with_barrier(equation: Equation, variables: Container[Var]) -> list[Equation]:
    """An equation and, if it makes some of these variables, a barrier: what reads them reads what is in memory."""
    behind = [v for v in equation.outputs if v in variables]
    if not behind:
        return [equation]
    before = {v: type(v)(v.aval) for v in behind}
    made = Equation(equation.eqn, equation.inputs, [before.get(v, v) for v in equation.outputs], equation.params)
    eqn = _private.at_the_line_of(barrier(list(before.values()), behind), equation.eqn)
    return [made, Equation(eqn, list(before.values()), behind, dict(eqn.params))]


def mask_of(equation: Equation) -> Atom | None:
    last = equation.inputs[-1]
    return last if last.aval.dtype == bool else None


def row_variables(equation: Equation) -> tuple[Var, Var]:
    """New variables for the maxima and sums of the rows of softmax, log_softmax or reduce_max."""
    (x,), (y,) = equation.inputs, equation.outputs
    with _private.context_of(equation.eqn):
        avals: Any = abstract_eval("logsumexp", x.aval, axes=equation.params["axes"], axis_name=())
    largest, total = map(type(y), avals)
    return largest, total


def rows_of(equation: Equation, rows: Sequence[Var]) -> list[Equation]:
    """The equation that makes these variables."""
    axes = equation.params["axes"]
    return spliced(lambda x: bind("logsumexp", x, where=None, axes=axes), equation.inputs, rows, equation)


def made_of_rows(equation: Equation, rows: tuple[Var, Var], y: Var | None = None) -> list[Equation]:
    """The equations that make the result of softmax or log_softmax, or y instead of it, of its operand and rows."""
    y = equation.outputs[0] if y is None else y
    f = _function_of_rows(equation)
    return spliced(lambda *a: f(*a, y.aval.dtype), [*equation.inputs, *rows], [y], equation)


def _function_of_rows(equation: Equation) -> Callable[..., jax.Array]:
    """Elements of softmax or log_softmax of those of x, of rows' maxima and sums, and of the dtype."""
    return _log_probabilities if equation.name == "log_softmax" else _probabilities


def gathered_of_rows(gather: Equation, equation: Equation, rows: tuple[Var, Var]) -> list[Equation]:
    """The equations that gather an element of each row of a softmax or log_softmax, in the order of the rows: they are
    made of gathered elements of its operand, so that XLA may gather before it has the rows."""
    (y, indices), (result,) = gather.inputs, gather.outputs

    def elements(x: jax.Array, indices: jax.Array, *rows: jax.Array) -> jax.Array:
        gathered = gather.eqn.primitive.bind(x, indices, **gather.params)
        of_rows = (jnp.reshape(a, result.aval.shape) for a in rows)
        return _function_of_rows(equation)(gathered, *of_rows, y.aval.dtype)

    return spliced(elements, [*equation.inputs, indices, *rows], gather.outputs, gather)


def _probabilities(x: jax.Array, largest: jax.Array, total: jax.Array, dtype: jnp.dtype) -> jax.Array:
    rows = reference.Normalizer(largest, total).without_infinity()
    return (jnp.exp(reference.widened(x) - largest) * (1 / rows.sum_exp)).astype(dtype)


def _log_probabilities(x: jax.Array, largest: jax.Array, total: jax.Array, dtype: jnp.dtype) -> jax.Array:
    rows = reference.Normalizer(largest, total).without_infinity()
    return (reference.distances(x, rows) - jnp.log(rows.sum_exp)).astype(dtype)
