"""What stands in a program instead of attention: calls of the kernels."""

from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jax_softmax.fusion.attention import kernels
from jax_softmax.fusion.attention.call import Attention
from jax_softmax.fusion.attention.letters import Letters
from jax_softmax.fusion.forms.polynomials import added
from jax_softmax.fusion.program import splicing
from jax_softmax.fusion.program.graph import Equation, is_variable, variables_of
from jax_softmax.fusion.program.places import Factor, Place
from jax_softmax.fusion.program.products import Operand
from jax_softmax.primitives.types import Var, sharded_as_well, types_tell_shardings

if TYPE_CHECKING:
    from jax_softmax.fusion.attention.matcher import Match


class Result(NamedTuple):
    """A variable of the program that is made of what the kernels make."""

    variable: Var
    place: Place
    names: dict[Factor, str]  # letters of its factors
    name: (
        str | int
    )  # of what the kernels make: o, o_tangent, dq, dk, dv; M and S of rows; sink, a sink's cotangent; or which side's
    letters: str  # of that
    part: tuple[int, int] | None = None  # which of its features


def equations_by_kernels(match: "Match") -> dict[Equation, list[Equation]]:
    """The equations that make a match's results, by calls of the kernels, instead of those that do."""
    names, letters, attention = match.names, match.letters, match.found.attention
    graph, place, sink = match.graph, match.rows.place_of_rows, match.rows.sink
    sinks = [] if sink is None else variables_of([sink])
    tangents = match.tangents.operands if match.tangents else {}
    letters_of_arrays = [side.letters for side in attention.sides if side.dtype != "index"]
    of_log_sums, cotangents = [], []
    for one, form in match.of_log_sums:
        (v, _) = one.equation.outputs
        cotangents.append(type(v)(v.aval))
        of_log_sums += one.equations_of(added({}, form, -1.0), cotangents[-1])
    reads = {
        "q": [(pair.q, letters.q) for pair in match.pairs.each],
        "k": [(pair.k, letters.k) for pair in match.pairs.each],
        "v": [(value.v, letters.v) for value in match.values.each],
        "o_cotangent": [(of, letters.o) for of in match.values.o_cotangents],
        **{f"{name}_tangent": [(a, getattr(letters, name)) for a in of] for name, of in tangents.items()},
        "sides": list(zip(match.formulas.arrays, letters_of_arrays, strict=True)),
        "sink": [(Operand(a, place), letters.rows) if a.aval.shape else (Operand(a, []), "") for a in sinks],
        "cotangents": [(Operand(v, place), letters.rows) for v in cotangents],
    }
    in_order = [read for group in reads.values() for read in group]

    def by_kernels(*operands: Array) -> list[Array]:
        rest = iter([of.to_letters(a, names, c) for (of, c), a in zip(in_order, operands, strict=True)])
        given = {name: [next(rest) for _ in group] for name, group in reads.items()}
        for name in given.keys() - {"sides", "sink", "cotangents"}:
            given[name] = [a.astype(match.dtype) for a in given[name]]
        if sink is not None and not is_variable(sink):
            given["sink"] = [jnp.float32(sink.val)]
        made = _made(attention, {r.name for r in match.results}, **given)
        return [
            Operand(None, r.place).from_letters(_part(made[r.name], r.part), r.names, r.letters, r.variable.aval)
            for r in match.results
        ]

    makers = list(dict.fromkeys(graph.maker[r.variable] for r in match.results))
    last = max(makers, key=graph.position.__getitem__)
    variables = [of.variable for of, _ in in_order]
    new = splicing.spliced(by_kernels, variables, [r.variable for r in match.results], match.softmax)
    return {maker: [] for maker in makers} | {last: [*new, *of_log_sums]}


def _part(a: Array, part: tuple[int, int] | None) -> Array:
    """Some of an array's features, or all."""
    return a if part in (None, (0, a.shape[-1])) else jax.lax.slice_in_dim(a, *part, axis=a.ndim - 1)


def _of_kernels(*arrays: Array) -> Array:
    """Arrays one behind the other along features, and zeros behind them: as many features as kernels have. In explicit
    mode they are sharded alike first."""
    if types_tell_shardings(map(jax.typeof, arrays)):
        arrays = tuple(sharded_as_well(a, *(b[..., :1] for b in arrays)) for a in arrays)
    a = jnp.concatenate(arrays, -1) if len(arrays) > 1 else arrays[0]
    more = kernels.padded(a.shape[-1]) - a.shape[-1]
    return jax.lax.pad(a, a.dtype.type(0), [*[(0, 0, 0)] * (a.ndim - 1), (0, more, 0)]) if more else a


def _made(
    attention: Attention,
    wanted: set[str | int],
    q: list[Array],
    k: list[Array],
    v: list[Array],
    o_cotangent: list[Array],
    sides: list[Array],
    sink: list[Array],
    cotangents: list[Array],
    **tangents: list[Array],
) -> dict[str | int, Array]:
    """What the kernels make, by the names that results have; at least those wanted. `o_cotangent`: nothing, if there is
    no backward pass. `cotangents`: of the rows' log-sum-exps, times -1. `tangents`: q_tangent and so on, of what has
    one."""
    operands = [_of_kernels(*of) for of in (q, k, v, o_cotangent) if of]
    moving: list[Array] = []
    if attention.score_tangent:
        own = (tangents.get(f"{name}_tangent") for name in Letters._fields)
        moving = [_of_kernels(*of) if of else jnp.zeros_like(a) for of, a in zip(own, operands, strict=False)]
    o, rows, *lost = kernels.forward(attention, *operands[:3], *moving, *sides)
    o_tangent = lost.pop() if moving else None
    weight_of_sink = None
    if sink:
        (o, rows, *lost), weight_of_sink = kernels.with_sink(attention, *sink, o, rows, *lost)
    made: dict[str | int, Array] = {"o": o, **dict(zip("MS", kernels.normalizer(rows), strict=True))}
    if o_tangent is not None:
        made["o_tangent"] = o_tangent
    if o_cotangent:
        delta = kernels.delta(attention, o, lost, operands[3])
        made |= kernels.backward(attention, wanted, *operands, rows, sum(cotangents, delta), *sides, delta=delta)
        if weight_of_sink is not None:
            made["sink"] = -weight_of_sink * made["delta"]
    return made
