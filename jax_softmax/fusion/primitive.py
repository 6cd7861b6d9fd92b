"""The primitive of a fused function's call, which is rewritten when the program around it is lowered.

Until then the call holds the function's jaxpr as it is, so that derivatives and batches of a fused function are those
of the function. They are calls of the same primitive: what is lowered has been differentiated.

A call's operands are those of its jaxpr, which has no constants. `unfused` is None, or a jaxpr of the same operands and
results without this package's operators: the program where no kernel would be faster.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, Primitive
from jax.interpreters import ad, batching, mlir

from jax_softmax import _private
from jax_softmax.fusion import residuals
from jax_softmax.fusion.attention import kernels as attention
from jax_softmax.fusion.kernels import calls, fused_kernel
from jax_softmax.fusion.net import by_own_settings, fused_or_as_it_is
from jax_softmax.fusion.program.graph import (
    Equation,
    Graph,
    edited,
    graph_of,
    is_variable,
    jaxprs_of,
    opened,
    variables_of,
)
from jax_softmax.fusion.rewriting import has_operators, longest_row, rewritten, start_compiling
from jax_softmax.primitives import interpreters
from jax_softmax.primitives.types import Var
from jax_softmax.runtime import costs

fused_p = Primitive("fused")
fused_p.multiple_results = True


def bind_programs(programs: Sequence[ClosedJaxpr], operands: Sequence[Any]) -> list[Any]:
    """The results of a call: of a program's closed jaxpr and, if there is a second one, its unfused one."""
    parts = [_without_constants(closed) for closed in programs]
    constants = [c for _, own in parts for c in own]
    avals = [v.aval for jaxpr, own in parts for v in jaxpr.invars[: len(own)]]
    first, jaxprs = 0, []  # the first of a program's own constants among all
    for jaxpr, own in parts:
        n, variables = len(own), list[Any](map(Var, avals))
        variables[first : first + n] = jaxpr.invars[:n]
        jaxprs.append(edited(jaxpr, invars=[*variables, *jaxpr.invars[n:]]) if constants else jaxpr)
        first += n
    return fused_p.bind(*constants, *operands, jaxpr=jaxprs[0], unfused=jaxprs[1] if len(jaxprs) > 1 else None)


def _traced_and_bound(f: Callable[..., Any], *args: Any) -> Any:
    """The results of a function, made by a call of the primitive."""
    closed, shapes = jax.make_jaxpr(f, return_shape=True)(*args)
    return jax.tree.unflatten(jax.tree.structure(shapes), bind_programs([closed], jax.tree.leaves(args)))


def _without_constants(closed: ClosedJaxpr | Jaxpr) -> tuple[Jaxpr, list[Any]]:
    """A jaxpr whose constants are its first operands, and their values."""
    jaxpr, constants = opened(closed)
    if not jaxpr.constvars:
        return jaxpr, []
    return edited(jaxpr, constvars=[], invars=[*jaxpr.constvars, *jaxpr.invars]), list(constants)


def as_lowered(closed: ClosedJaxpr) -> Jaxpr:
    """The jaxpr that JAX lowers of a closed one: of low-level operations, without what nobody reads."""
    jaxpr, without_unread = low_level(closed).jaxpr, _private.FOUND["dead_code"].without_unread
    return without_unread(jaxpr, [True] * len(jaxpr.outvars), True)[0] if without_unread else jaxpr


def _as_function(jaxpr: Jaxpr) -> Callable[..., list[Any]]:
    return lambda *args: jax.core.eval_jaxpr(jaxpr, [], *args)


@by_own_settings
def _bound_in_low_level(*operands: Any, jaxpr: Jaxpr, unfused: Jaxpr | None) -> list[Any]:
    """The rule for a call that holds what JAX calls high-level operations, when it replaces them by others."""
    programs = [low_level(ClosedJaxpr(program, [])) for program in (jaxpr, unfused) if program is not None]
    if any(_private.is_high(program.jaxpr) for program in programs):
        return _as_function(jaxpr)(*operands)  # which replaces them one by one
    return bind_programs(programs, operands)


def low_level(closed: ClosedJaxpr) -> ClosedJaxpr:
    """A closed jaxpr without what JAX calls high-level operations; as it is, if this JAX does not say how."""
    lower, jaxpr = _private.FOUND["high"].lower_jaxpr, closed.jaxpr
    has_high_types = any(_private.is_high(a.aval) for a in (*jaxpr.invars, *jaxpr.outvars))
    return lower(closed) if lower and _private.is_high(jaxpr) and not has_high_types else closed


def _of_some(f: Callable[..., Any], operands: Sequence[Any], indices: Sequence[int]) -> Callable[..., Any]:
    """f as a function of the operands with these indices, the others being as they are."""
    return lambda *values: f(*_with(operands, indices, values))


def _with(values: Sequence[Any], indices: Sequence[int], new: Sequence[Any]) -> list[Any]:
    """The values, with new ones at some indices."""
    values = list(values)
    for k, value in zip(indices, new, strict=True):
        values[k] = value
    return values


def _implementation(*operands: Any, jaxpr: Jaxpr, unfused: Jaxpr | None) -> list[Any]:
    """The rule for a call outside of `jit`. Where JAX looks for NaNs, its error names the operation that makes one."""
    try:
        return list(_compiled_call(*operands, jaxpr=jaxpr, unfused=unfused))
    except FloatingPointError:
        program = jaxpr if unfused is None else unfused
        graph = graph_of(program)
        _as_function(edited(program, graph.equations, outvars=graph.outputs))(*operands)
        raise


_compiled_call = interpreters.implementation(fused_p)


# ---- Derivatives


def _jvp(
    primals: Sequence[Any], tangents: Sequence[Any], *, jaxpr: Jaxpr, unfused: Jaxpr | None
) -> tuple[list[Any], list[Any]]:
    """The results and tangents of the function."""
    varied = [k for k, tangent in enumerate(tangents) if type(tangent) is not ad.Zero]
    tangents = [tangents[k] for k in varied]
    return fused_or_as_it_is(
        lambda: _jvp_by_two_calls(jaxpr, unfused, primals, varied, tangents),
        lambda _: _jvp_as_it_is(jaxpr if unfused is None else unfused, primals, varied, tangents),
    )


@by_own_settings
def _jvp_by_two_calls(
    jaxpr: Jaxpr, unfused: Jaxpr | None, primals: Sequence[Any], varied: list[int], tangents: list[Any]
) -> tuple[list[Any], list[Any]]:
    """One call of the results and residuals, and one of the results' tangents, linear in the operands' ones.

    If neither has a kernel that is faster, the derivative is the unfused program's.
    """
    dependent = _results_with_tangents(jaxpr, primals, varied, tangents)

    def results_and_linear(*primals: Any) -> tuple[list[Any], Callable[..., Any]]:
        def dependent_and_all(*values: Any) -> tuple[list[Any], list[Any]]:
            results = _of_some(_as_function(jaxpr), primals, varied)(*values)
            return [results[k] for k in dependent], results

        _, linear, results = jax.linearize(dependent_and_all, *(primals[k] for k in varied), has_aux=True)
        return results, linear

    closed, (shapes, linear) = jax.make_jaxpr(results_and_linear, return_shape=True)(*primals)
    with_needed, constants = _without_constants(closed)
    n, operands = len(shapes), [*constants, *primals]
    chosen = residuals.chosen(with_needed, n)

    def tangents_of(kept: list[Any], tangents: list[Any]) -> list[Any]:
        needed = _as_function(chosen.again)(*kept)
        return jax.tree.unflatten(jax.tree.structure(linear), needed)(*tangents)

    if unfused is not None and not has_operators(rewritten(chosen.forward)):
        kept = [v.aval for v in (*(chosen.forward.invars[k] for k in chosen.operands), *chosen.forward.outvars[n:])]
        linear_call = jax.make_jaxpr(tangents_of)(kept, [jax.typeof(t) for t in tangents]).jaxpr
        if not has_operators(rewritten(linear_call)):
            return _jvp_as_it_is(unfused, primals, varied, tangents)
    results = fused_p.bind(*operands, jaxpr=chosen.forward, unfused=None)
    kept = [*(operands[k] for k in chosen.operands), *results[n:]]
    found, results = _traced_and_bound(tangents_of, kept, tangents), results[:n]
    return results, _with(_zero_tangents(results), dependent, found)


def _jvp_as_it_is(
    jaxpr: Jaxpr, primals: Sequence[Any], varied: list[int], tangents: list[Any]
) -> tuple[list[Any], list[Any]]:
    f = _of_some(jax.jit(_as_function(jaxpr)), primals, varied)
    results, tangents = jax.jvp(f, [primals[k] for k in varied], tangents)
    is_zero = [tangent.dtype == jax.dtypes.float0 for tangent in tangents]
    return results, [z if a else t for z, a, t in zip(_zero_tangents(results), is_zero, tangents, strict=True)]


def _zero_tangents(results: Sequence[Any]) -> list[ad.Zero]:
    return [ad.Zero(jax.typeof(result).to_tangent_aval()) for result in results]


def _results_with_tangents(jaxpr: Jaxpr, primals: Sequence[Any], varied: list[int], tangents: list[Any]) -> list[int]:
    """Which results have tangents other than 0."""

    def tangents_of(tangents: list[Any]) -> list[Any]:
        return jax.jvp(_of_some(_as_function(jaxpr), primals, varied), [primals[k] for k in varied], tangents)[1]

    jaxpr = jax.make_jaxpr(tangents_of)(tangents).jaxpr
    return _results_made_of(graph_of(jaxpr), jaxpr.invars)


def _results_made_of(graph: Graph, variables: Iterable[Any]) -> list[int]:
    """Which results are made of these variables."""
    found = graph.descendants(variables)
    return [k for k, result in enumerate(graph.outputs) if is_variable(result) and result in found]


@by_own_settings
def _transpose(cotangents: Sequence[Any], *operands: Any, jaxpr: Jaxpr, unfused: None) -> list[Any]:
    """The cotangents of a linear call, which has no unfused program."""
    linear = [k for k, a in enumerate(operands) if ad.is_undefined_primal(a)]
    others = [k for k in range(len(operands)) if k not in linear]
    nonzero = [k for k, cotangent in enumerate(cotangents) if type(cotangent) is not ad.Zero]
    if not nonzero:
        return [ad.Zero(a.aval) if ad.is_undefined_primal(a) else None for a in operands]

    def cotangents_of_linear(values_of_others: list[Any], nonzero_cotangents: list[Any]) -> list[Any]:
        def nonzero_results(*values: Any) -> list[Any]:
            results = _of_some(_as_function(jaxpr), _with(operands, others, values_of_others), linear)(*values)
            return [results[k] for k in nonzero]

        zeros = [ad.instantiate_zeros(ad.Zero(operands[k].aval)) for k in linear]
        return jax.linear_transpose(nonzero_results, *zeros)(nonzero_cotangents)

    given = [operands[k] for k in others], [cotangents[k] for k in nonzero]
    found = fused_or_as_it_is(
        lambda: _traced_and_bound(cotangents_of_linear, *given), lambda _: cotangents_of_linear(*given)
    )
    return _with([None] * len(operands), linear, found)


# ---- Batches


@by_own_settings
def _batch(
    axis_data: Any, operands: Sequence[Any], batch_axes: Sequence[int | None], *, jaxpr: Jaxpr, unfused: Jaxpr | None
) -> tuple[list[Any], list[int | None]]:
    programs = [jaxpr] if unfused is None else [jaxpr, unfused]
    batched = {k for program in programs for k in _batched_results(program, batch_axes, axis_data.name)}
    may_name_axis = any(map(_knows_axes, (e for program in programs for e in graph_of(program).equations)))
    if all(axis is None for axis in batch_axes) and not may_name_axis:
        results = fused_p.bind(*operands, jaxpr=jaxpr, unfused=unfused)
        return results, [None] * len(results)
    axes = [0 if k in batched else None for k in range(len(jaxpr.outvars))]

    def mapped(program: Jaxpr) -> Callable[..., Any]:
        return jax.vmap(
            lambda *operands: tuple(_as_function(program)(*operands)),
            in_axes=tuple(batch_axes),
            out_axes=tuple(axes),
            axis_name=axis_data.name,
            axis_size=axis_data.size,
            spmd_axis_name=axis_data.spmd_name,
        )

    def fused() -> list[Any]:
        return bind_programs([jax.make_jaxpr(mapped(program))(*operands) for program in programs], operands)

    return fused_or_as_it_is(fused, lambda _: mapped(programs[-1])(*operands)), axes


def _batched_results(jaxpr: Jaxpr, batch_axes: Sequence[int | None], axis_name: Any) -> list[int]:
    """Which results differ along the mapped axis, or may: those that are made by the axis' name."""
    graph = graph_of(jaxpr)
    batched = {v for v, axis in zip(jaxpr.invars, batch_axes, strict=True) if axis is not None}
    for equation in graph.equations:
        if not _is_alike_along(axis_name, equation) and (
            _knows_axes(equation) or not batched.isdisjoint(variables_of(equation.inputs))
        ):
            batched.update(equation.outputs)
    return [k for k, result in enumerate(graph.outputs) if is_variable(result) and result in batched]


def _is_alike_along(axis_name: Any, equation: Equation) -> bool:
    """Whether it makes one result of all that there is along a mapped axis."""
    axes = equation.params.get("axes", equation.params.get("axis_name"))
    makes_one = equation.name.startswith(("psum", "pmax", "pmin", "all_gather"))
    has_groups = bool(equation.params.get("axis_index_groups"))
    return makes_one and not has_groups and axis_name in (axes if isinstance(axes, tuple) else (axes,))


def _knows_axes(equation: Equation) -> bool:
    """Whether its results may differ along a mapped axis though its operands do not."""
    within = (e for inner in jaxprs_of(equation.params) for e in graph_of(inner).equations)
    return equation.name == "axis_index" or bool(equation.eqn.effects) or any(map(_knows_axes, within))


# ---- Lowering, and rules of other interpreters


def _lower(ctx: Any, *operands: Any, jaxpr: Jaxpr, unfused: Jaxpr | None) -> Any:
    lowering = _private.FOUND["function"].core_call_lowering
    if lowering:
        return lowering(ctx, *operands, name="fused", call_jaxpr=jaxpr)
    return mlir.lower_fun(_as_function(jaxpr), multiple_results=True)(ctx, *operands)


def _lower_for_cpu(ctx: Any, *operands: Any, jaxpr: Jaxpr, unfused: Jaxpr | None) -> Any:
    """Kernels on a CPU, into which nothing is folded, are faster than XLA's loops where rows are long."""
    if unfused is not None and longest_row(jaxpr) < costs.LONG_ROW_ON_CPU:
        jaxpr = unfused
    return _lower(ctx, *operands, jaxpr=jaxpr, unfused=None)


@by_own_settings
def _lower_for_cuda(ctx: Any, *operands: Any, jaxpr: Jaxpr, unfused: Jaxpr | None) -> Any:
    as_it_is, before = jaxpr if unfused is None else unfused, set(_private.functions_of_module(ctx))

    def lowered() -> Any:
        new = rewritten(jaxpr, unfused)
        if unfused is not None and not has_operators(new):
            return _lower(ctx, *operands, jaxpr=unfused, unfused=None)
        start_compiling(new)
        return _lower(ctx, *operands, jaxpr=new, unfused=None)

    def lowered_as_it_is(_: Exception) -> Any:
        _private.without_unfinished_functions(ctx, before)
        return _lower(ctx, *operands, jaxpr=as_it_is, unfused=None)

    return fused_or_as_it_is(lowered, lowered_as_it_is)


def _with_policy(saveable: Any, unknown: Any, instantiated: Any, eqn: Any) -> Any:
    """The rule for a call in `jax.checkpoint`: the policy says of each operation in it whether its result is saved."""

    def without_unfused(*of_calls: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        known, again = of_calls[-2:]
        return {**known, "unfused": None}, {**again, "unfused": None}

    rule = _private.FOUND["policies"].rule_of_calls
    return rule("jaxpr", without_unfused, saveable, unknown, instantiated, eqn)


def _without_unread(is_read: Sequence[bool], *live_operands_and_eqn: Any) -> tuple[list[bool], Any]:
    """The rule for dead code: which operands are needed for the results that are read, and a call that makes these."""
    eqn = live_operands_and_eqn[-1]  # a newer JAX says before it which operands are read afterwards
    if not any(is_read) and not eqn.effects:
        return [False] * len(eqn.invars), None
    without_unread = _private.FOUND["dead_code"].without_unread
    programs = {name: eqn.params[name] for name in ("jaxpr", "unfused") if eqn.params[name] is not None}
    of_each = [without_unread(program, is_read)[1] for program in programs.values()]
    is_needed = [any(of_programs) for of_programs in zip(*of_each, strict=True)]
    new = {name: without_unread(program, is_read, is_needed)[0] for name, program in programs.items()}
    return is_needed, eqn.replace(
        invars=[a for a, needed in zip(eqn.invars, is_needed, strict=True) if needed],
        outvars=[v for v, read in zip(eqn.outvars, is_read, strict=True) if read],
        params={**eqn.params, **new},
        effects=new["jaxpr"].effects,
    )


def register() -> None:
    fused_p.def_impl(_implementation)
    fused_p.def_effectful_abstract_eval(lambda *_, jaxpr, unfused: ([v.aval for v in jaxpr.outvars], jaxpr.effects))
    ad.primitive_jvps[fused_p] = _jvp
    ad.primitive_transposes[fused_p] = _transpose
    batching.fancy_primitive_batchers[fused_p] = _batch
    of_primitive: Any = fused_p  # which has these as methods
    of_primitive.is_high = lambda *_, jaxpr, **__: _private.is_high(jaxpr)
    of_primitive.to_lojax = _bound_in_low_level
    if _private.FOUND["policies"].available:
        _private.FOUND["policies"].rules[fused_p] = _with_policy
    if _private.FOUND["dead_code"].available:
        _private.FOUND["dead_code"].rules[fused_p] = _without_unread
    mlir.register_lowering(fused_p, _lower)
    mlir.register_lowering(fused_p, _lower_for_cpu, platform="cpu")
    mlir.register_lowering(fused_p, _lower_for_cuda, platform="cuda")
    calls.register()
    fused_kernel.register()
    attention.register()
    if interpreters.CHECKIFY.available:
        interpreters.CHECKIFY.error_checks[fused_p] = _checkify_rule
    if interpreters.JET.available:
        interpreters.JET.jet_rules[fused_p] = _jet_rule


def _jet_rule(primals: Sequence[Any], series: Sequence[Any], *, jaxpr: Jaxpr, unfused: Jaxpr | None) -> Any:
    """The jet of the function. Between rules the terms have no factorials, by which they are scaled outside."""
    return interpreters.JET.jet(_as_function(jaxpr), primals, series, factorial_scaled=False)


def _checkify_rule(*errors_and_operands: Any, jaxpr: Jaxpr, unfused: Jaxpr | None) -> Any:
    """The check of a call of a function under `jit`."""
    operands = errors_and_operands[len(errors_and_operands) - len(jaxpr.invars) :]
    (call,) = jax.make_jaxpr(jax.jit(_as_function(jaxpr)))(*operands).eqns
    return interpreters.CHECKIFY.error_checks[call.primitive](*errors_and_operands, **call.params)
