"""The primitive of a fused function's call, which is rewritten when the program around it is lowered.

Until then the call holds the function's jaxpr as it is, so that derivatives and batches of a fused function are those
of the function. They are calls of the same primitive: what is lowered has been differentiated.

A call's operands are those of its jaxpr, which has no constants. `unfused` is None, or a jaxpr of the same operands and
results without this package's operators: the program where no kernel would be faster.
"""

import jax
from jax.extend.core import Primitive, Var
from jax.interpreters import ad, batching, mlir

from jax_softmax import _private
from jax_softmax.fusion import calls, kernels, residuals
from jax_softmax.fusion.attention import kernels as attention
from jax_softmax.fusion.graph import edited, graph_of, is_variable, jaxprs_of, opened
from jax_softmax.fusion.rewriting import has_operators, rewritten
from jax_softmax.primitives import interpreters

fused_p = Primitive("fused")
fused_p.multiple_results = True


def bind_programs(programs, operands):
    """The results of a call: of a program's closed jaxpr and, if there is a second one, its unfused one."""
    programs = [_without_constants(closed) for closed in programs]
    constants = [c for _, own in programs for c in own]
    avals = [v.aval for jaxpr, own in programs for v in jaxpr.invars[: len(own)]]
    first, jaxprs = 0, []  # the first of a program's own constants among all
    for jaxpr, own in programs:
        n, variables = len(own), [Var(aval) for aval in avals]
        variables[first : first + n] = jaxpr.invars[:n]
        jaxprs.append(edited(jaxpr, invars=[*variables, *jaxpr.invars[n:]]) if constants else jaxpr)
        first += n
    return fused_p.bind(*constants, *operands, jaxpr=jaxprs[0], unfused=jaxprs[1] if len(jaxprs) > 1 else None)


def _traced_and_bound(f, *args):
    """The results of a function, made by a call of the primitive."""
    closed, shapes = jax.make_jaxpr(f, return_shape=True)(*args)
    return jax.tree.unflatten(jax.tree.structure(shapes), bind_programs([closed], jax.tree.leaves(args)))


def _without_constants(closed):
    """A jaxpr whose constants are its first operands, and their values."""
    jaxpr, constants = opened(closed)
    if not jaxpr.constvars:
        return jaxpr, []
    return edited(jaxpr, constvars=[], invars=[*jaxpr.constvars, *jaxpr.invars]), list(constants)


def _as_function(jaxpr):
    return lambda *args: jax.core.eval_jaxpr(jaxpr, [], *args)


def _of_some(f, operands, indices):
    """f as a function of the operands with these indices, the others being as they are."""
    return lambda *values: f(*_with(operands, indices, values))


def _with(values, indices, new):
    """The values, with new ones at some indices."""
    values = list(values)
    for k, value in zip(indices, new, strict=True):
        values[k] = value
    return values


# ---- Derivatives


def _jvp(primals, tangents, *, jaxpr, unfused):
    """Two calls: one of the results and residuals, and one of the results' tangents, linear in the operands' ones.

    If neither has a kernel that is faster, the derivative is the unfused program's.
    """
    varied = [k for k, tangent in enumerate(tangents) if type(tangent) is not ad.Zero]
    tangents = [tangents[k] for k in varied]
    dependent = _results_with_tangents(jaxpr, primals, varied, tangents)

    def results_and_linear(*primals):
        def dependent_and_all(*values):
            results = _of_some(_as_function(jaxpr), primals, varied)(*values)
            return [results[k] for k in dependent], results

        _, linear, results = jax.linearize(dependent_and_all, *(primals[k] for k in varied), has_aux=True)
        return results, linear

    closed, (shapes, linear) = jax.make_jaxpr(results_and_linear, return_shape=True)(*primals)
    with_needed, constants = _without_constants(closed)
    n, operands = len(shapes), [*constants, *primals]
    chosen = residuals.chosen(with_needed, n)

    def tangents_of(kept, tangents):
        needed = _as_function(chosen.again)(*kept)
        return jax.tree.unflatten(jax.tree.structure(linear), needed)(*tangents)

    if unfused is not None and not has_operators(rewritten(chosen.forward)):
        kept = [v.aval for v in (*(chosen.forward.invars[k] for k in chosen.operands), *chosen.forward.outvars[n:])]
        linear_call = jax.make_jaxpr(tangents_of)(kept, [jax.typeof(t) for t in tangents]).jaxpr
        if not has_operators(rewritten(linear_call)):
            return _jvp_of_unfused(unfused, primals, varied, tangents)
    results = fused_p.bind(*operands, jaxpr=chosen.forward, unfused=None)
    kept = [*(operands[k] for k in chosen.operands), *results[n:]]
    found, results = _traced_and_bound(tangents_of, kept, tangents), results[:n]
    return results, _with(_zero_tangents(results), dependent, found)


def _jvp_of_unfused(unfused, primals, varied, tangents):
    f = _of_some(jax.jit(_as_function(unfused)), primals, varied)
    results, tangents = jax.jvp(f, [primals[k] for k in varied], tangents)
    is_zero = [tangent.dtype == jax.dtypes.float0 for tangent in tangents]
    return results, [z if a else t for z, a, t in zip(_zero_tangents(results), is_zero, tangents, strict=True)]


def _zero_tangents(results):
    return [ad.Zero(jax.typeof(result).to_tangent_aval()) for result in results]


def _results_with_tangents(jaxpr, primals, varied, tangents):
    """Which results have tangents other than 0."""

    def tangents_of(tangents):
        return jax.jvp(_of_some(_as_function(jaxpr), primals, varied), [primals[k] for k in varied], tangents)[1]

    jaxpr = jax.make_jaxpr(tangents_of)(tangents).jaxpr
    return _results_made_of(graph_of(jaxpr), jaxpr.invars)


def _results_made_of(graph, variables):
    """Which results are made of these variables."""
    found = graph.descendants(variables)
    return [k for k, result in enumerate(graph.outputs) if is_variable(result) and result in found]


def _transpose(cotangents, *operands, jaxpr, unfused):  # a linear call has no unfused program
    linear = [k for k, a in enumerate(operands) if ad.is_undefined_primal(a)]
    others = [k for k in range(len(operands)) if k not in linear]
    nonzero = [k for k, cotangent in enumerate(cotangents) if type(cotangent) is not ad.Zero]
    if not nonzero:
        return [ad.Zero(a.aval) if ad.is_undefined_primal(a) else None for a in operands]

    def cotangents_of_linear(values_of_others, nonzero_cotangents):
        def nonzero_results(*values):
            results = _of_some(_as_function(jaxpr), _with(operands, others, values_of_others), linear)(*values)
            return [results[k] for k in nonzero]

        zeros = [ad.instantiate_zeros(ad.Zero(operands[k].aval)) for k in linear]
        return jax.linear_transpose(nonzero_results, *zeros)(nonzero_cotangents)

    found = _traced_and_bound(cotangents_of_linear, [operands[k] for k in others], [cotangents[k] for k in nonzero])
    return _with([None] * len(operands), linear, found)


# ---- Batches


def _batch(axis_data, operands, batch_axes, *, jaxpr, unfused):
    if all(axis is None for axis in batch_axes):
        results = fused_p.bind(*operands, jaxpr=jaxpr, unfused=unfused)
        return results, [None] * len(results)
    programs = [jaxpr] if unfused is None else [jaxpr, unfused]
    batched = {k for program in programs for k in _batched_results(program, batch_axes)}
    axes = [0 if k in batched else None for k in range(len(jaxpr.outvars))]

    def mapped(program):
        return jax.vmap(
            lambda *operands: tuple(_as_function(program)(*operands)),
            in_axes=tuple(batch_axes),
            out_axes=tuple(axes),
            axis_name=axis_data.name,
            axis_size=axis_data.size,
            spmd_axis_name=axis_data.spmd_name,
        )

    return bind_programs([jax.make_jaxpr(mapped(program))(*operands) for program in programs], operands), axes


def _batched_results(jaxpr, batch_axes):
    """Which results differ along the mapped axis."""
    graph = graph_of(jaxpr)
    batched = [v for v, axis in zip(jaxpr.invars, batch_axes, strict=True) if axis is not None]
    batched += [v for e in graph.equations if _knows_axes(e) for v in e.outputs]
    return _results_made_of(graph, batched)


def _knows_axes(equation):
    """Whether its results may differ along a mapped axis though its operands do not."""
    within = (e for inner in jaxprs_of(equation.params) for e in graph_of(inner).equations)
    return equation.name == "axis_index" or bool(equation.eqn.effects) or any(map(_knows_axes, within))


# ---- Lowering, and rules of other interpreters


def _lower(ctx, *operands, jaxpr, unfused):
    lowering = _private.FOUND["function"].core_call_lowering
    if lowering:
        return lowering(ctx, *operands, name="fused", call_jaxpr=jaxpr)
    return mlir.lower_fun(_as_function(jaxpr), multiple_results=True)(ctx, *operands)


def _lower_for_cuda(ctx, *operands, jaxpr, unfused):
    new = rewritten(jaxpr)
    if unfused is not None and not has_operators(new):
        new = unfused
    return _lower(ctx, *operands, jaxpr=new, unfused=None)


def register() -> None:
    fused_p.def_impl(interpreters.implementation(fused_p))
    fused_p.def_effectful_abstract_eval(lambda *_, jaxpr, unfused: ([v.aval for v in jaxpr.outvars], jaxpr.effects))
    ad.primitive_jvps[fused_p] = _jvp
    ad.primitive_transposes[fused_p] = _transpose
    batching.fancy_primitive_batchers[fused_p] = _batch
    mlir.register_lowering(fused_p, _lower)
    mlir.register_lowering(fused_p, _lower_for_cuda, platform="cuda")
    calls.register()
    kernels.register()
    attention.register()
    if interpreters.CHECKIFY.available:
        interpreters.CHECKIFY.error_checks[fused_p] = _checkify_rule
    if interpreters.JET.available:
        interpreters.JET.jet_rules[fused_p] = _jet_rule


def _jet_rule(primals, series, *, jaxpr, unfused):
    """That of the function. Between rules the terms have no factorials, by which they are scaled outside."""
    return interpreters.JET.jet(_as_function(jaxpr), primals, series, factorial_scaled=False)


def _checkify_rule(*errors_and_operands, jaxpr, unfused):
    """That of a call of a function under `jit`."""
    operands = errors_and_operands[len(errors_and_operands) - len(jaxpr.invars) :]
    (call,) = jax.make_jaxpr(jax.jit(_as_function(jaxpr)))(*operands).eqns
    return interpreters.CHECKIFY.error_checks[call.primitive](*errors_and_operands, **call.params)
