"""A jaxpr as a graph: its equations with calls inlined, who makes each variable, and who reads it.

Functions under `jit`, and those with derivatives of their own, are inlined: a program is looked at after it has been
differentiated. Loops, branches, `checkpoint` and `shard_map` stay equations, whose jaxprs are rewritten one by one.
Jaxprs are edited, not traced again, which would lose the names of mesh axes.
"""

import dataclasses
import math
from typing import Any

import jax
import numpy as np
from jax.extend.core import Literal, Var

from jax_softmax import _private

_CALLS = ("jit", "pjit", "closed_call", "core_call", "fused")
_CHECKPOINTS = ("remat2", "checkpoint")
_ALL_CALLS = (*_CALLS, *_CHECKPOINTS, "custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr")


@dataclasses.dataclass(eq=False)
class Equation:
    """One of a graph: it can be told apart from an equal one."""

    eqn: Any  # of JAX
    inputs: list
    outputs: list
    params: dict

    @property
    def name(self) -> str:
        return self.eqn.primitive.name

    def with_inputs(self, inputs) -> "Equation":
        return Equation(self.eqn, inputs, self.outputs, self.params)

    def as_jax(self):
        return self.eqn.replace(invars=self.inputs, outvars=self.outputs, params=self.params)


class Graph:
    """The equations that the results of a jaxpr need, each after those that make what it reads."""

    def __init__(self, equations, outputs):
        self.outputs = outputs
        self.results = set(variables_of(outputs))
        self.equations = _needed(equations, outputs)
        self.maker = {v: equation for equation in self.equations for v in equation.outputs}
        self.readers: dict[Var, list[Equation]] = {}
        for equation in self.equations:
            for v in dict.fromkeys(variables_of(equation.inputs)):
                self.readers.setdefault(v, []).append(equation)
        self.standing: dict[Var, bool] = {}  # which are in memory where nothing is folded, as `groups.py` finds
        self.position = {equation: k for k, equation in enumerate(self.equations)}

    def made_of(self, variables) -> set[Var]:
        """These variables, and all that is made of them."""
        found = set(variables)
        for equation in self.equations:
            if not found.isdisjoint(variables_of(equation.inputs)):
                found.update(equation.outputs)
        return found

    def has_effects_after(self, maker: Equation, equation: Equation) -> bool:
        """Whether a maker has effects and comes after an equation, which may not be moved behind it then."""
        return bool(maker.eqn.effects) and self.position[maker] > self.position[equation]

    def with_replaced(self, replacements, renamed=()) -> "Graph":
        """Equations with others in their places, and variables under other names."""
        names = dict(renamed)

        def new(atoms):
            return [a if isinstance(a, Literal) else names.get(a, a) for a in atoms]

        equations = [e for old in self.equations for e in replacements.get(old, [old])]
        if names:
            equations = [
                e.with_inputs(new(e.inputs)) if names.keys() & set(variables_of(e.inputs)) else e for e in equations
            ]
        return Graph(sorted_by_need(equations), new(self.outputs))


def graph_of(jaxpr, differentiated=True, platform=None) -> Graph:
    """The graph of a jaxpr; one that will be differentiated keeps calls that JAX treats in their own way then. Where
    the platform is known, what depends on it is what it is there."""
    equations: list[Equation] = []
    variables = {v: v for v in (*jaxpr.constvars, *jaxpr.invars)}
    calls = _ALL_CALLS if differentiated else _CALLS
    outputs = _inline(jaxpr, variables, None, lambda eqn: _callee(eqn, calls, platform), equations)
    return Graph(equations, outputs)


def edited(jaxpr, equations=None, **changes):
    """The jaxpr with other equations, operands or results."""
    eqns = jaxpr.eqns if equations is None else [e.as_jax() for e in equations]
    return _private.without_names(jaxpr).replace(eqns=eqns, **changes)


def inlined(jaxpr, variables, equations) -> list:
    """The results of a jaxpr in terms of these variables for its own; its equations are appended to the others."""
    return _inline(jaxpr, dict(variables), None, lambda eqn: None, equations)


class InCirclesError(ValueError):
    """Equations need what is made of what they make."""


def sorted_by_need(equations):
    """Each after those that make what it reads; otherwise in their order.

    Raises:
      InCirclesError: there is no such order.
    """
    maker = {v: e for e in equations for v in e.outputs}
    done: dict[Equation, None] = {}
    begun = set()
    for equation in equations:
        pending = [(equation, False)]
        while pending:
            e, ready = pending.pop()
            if e in done:
                continue
            if ready:
                done[e] = None
                continue
            if e in begun:
                raise InCirclesError
            begun.add(e)
            pending.append((e, True))
            makers = (maker.get(v) for v in variables_of(e.inputs))
            pending += [(m, False) for m in makers if m is not None and m not in done]
    return list(done)


def result_of(walk):
    """What a walk over a program returns, as it would by recursion, of which Python's stack bounds the depth.

    A walk is a generator that yields each walk of which it needs the result.
    """
    pending, result = [walk], None
    while pending:
        try:
            pending.append(pending[-1].send(result))
            result = None
        except StopIteration as end:
            pending.pop()
            result = end.value
    return result


def variables_of(atoms):
    return [a for a in atoms if not isinstance(a, Literal)]


def has_refs(jaxpr) -> bool:
    """Whether it reads or writes references, as `jax.new_ref` makes them."""
    values = (*jaxpr.constvars, *jaxpr.invars)
    given = any(not isinstance(v.aval, jax.core.ShapedArray) for v in values)
    return given or _private.has_effects_on_references(jaxpr)


def size_of(atom) -> int:
    return math.prod(atom.aval.shape)


def bytes_of(atom) -> int:
    return 0 if isinstance(atom, Literal) else size_of(atom) * getattr(atom.aval.dtype, "itemsize", 4)


def opened(jaxpr):
    """A jaxpr, and the values of its constants, of a closed one or one that is not."""
    return (jaxpr.jaxpr, jaxpr.consts) if hasattr(jaxpr, "jaxpr") else (jaxpr, getattr(jaxpr, "consts", ()))


def is_jaxpr(value) -> bool:
    return hasattr(value, "eqns")


def jaxprs_of(params):
    """Every jaxpr among an equation's parameters."""
    found: list = []
    with_jaxprs(params, lambda inner: found.append(inner) or inner)
    return found


def with_jaxprs(params, function):
    """An equation's parameters, with every jaxpr among them replaced by what the function makes of it."""

    def replaced(value):
        if isinstance(value, tuple | list) and any(map(is_jaxpr, value)):
            return type(value)(replaced(item) for item in value)
        if not is_jaxpr(value):
            return value
        inner = opened(value)[0]
        new = function(inner)
        return value if new is inner else value.replace(jaxpr=new) if hasattr(value, "jaxpr") else new

    return {name: replaced(value) for name, value in params.items()}


def _inline(jaxpr, variables, caller, callee_of, equations):
    """Appends the equations of a jaxpr, in terms of these variables, and returns its results.

    `callee_of(eqn)`: the jaxpr that stands in an equation's place, or None.
    """

    def read(atom):
        if not isinstance(atom, Literal):
            return variables[atom]
        return _in_memory(atom, equations) if atom.aval.shape else atom

    for eqn in jaxpr.eqns:
        inputs = [read(a) for a in eqn.invars]
        if (known := _known(eqn, inputs)) is not None:
            variables[eqn.outvars[0]] = known
            continue
        callee = callee_of(eqn)
        if callee is not None:
            inner, values = opened(callee)
            known = {v: Literal(value, v.aval) for v, value in zip(inner.constvars, values, strict=True)}
            known |= zip(inner.invars, inputs[len(inputs) - len(inner.invars) :], strict=True)  # a branch has no index
            outputs = _inline(inner, known, _private.in_the_scope_of(eqn, caller), callee_of, equations)
            variables.update(zip(eqn.outvars, outputs, strict=True))
            continue
        outputs = eqn.outvars if caller is None else [type(v)(v.aval) for v in eqn.outvars]
        variables.update(zip(eqn.outvars, outputs, strict=True))
        equations.append(Equation(_private.in_the_scope_of(eqn, caller), inputs, list(outputs), dict(eqn.params)))
    return [read(a) for a in jaxpr.outvars]


def _known(eqn, inputs):
    """The number that a conversion of a number is, or the operand that a slice is all of, or None."""
    if eqn.primitive.name == "slice" and not isinstance(inputs[0], Literal) and inputs[0].aval == eqn.outvars[0].aval:
        return inputs[0]
    if eqn.primitive.name != "convert_element_type" or not isinstance(inputs[0], Literal) or eqn.effects:
        return None
    aval = eqn.outvars[0].aval
    if aval.shape or not isinstance(aval.dtype, np.dtype):  # keys have others
        return None
    with np.errstate(all="ignore"):
        return Literal(np.asarray(inputs[0].val).astype(aval.dtype)[()], aval)


def _in_memory(literal, equations):
    """A variable that is an array which stands in the jaxpr, as JAX writes constants with a setting of its own."""
    variable = Var(literal.aval)
    eqn = barrier([literal], [variable])
    equations.append(Equation(eqn, [literal], [variable], dict(eqn.params)))
    return variable


def barrier(inputs, outputs):
    """An equation behind which these arrays are in memory."""
    (eqn,) = jax.make_jaxpr(lambda *a: jax.lax.optimization_barrier(a))(*(a.aval for a in inputs)).eqns
    return eqn.replace(invars=inputs, outvars=outputs)


def _callee(eqn, calls, platform):
    """The jaxpr of a call that says nothing else: no sharding, no layout, no arrays that are constants. Or the branch
    of `jax.lax.platform_dependent` for the platform."""
    if platform is not None and eqn.primitive.name == "cond" and eqn.params.get("branches_platforms"):
        of_branches = eqn.params["branches_platforms"]
        branch = next((k for k, names in enumerate(of_branches) if names is None or platform in names), None)
        if branch is None or any(map(np.ndim, opened(eqn.params["branches"][branch])[1])):
            return None
        return eqn.params["branches"][branch]
    if eqn.primitive.name not in calls or eqn.effects:
        return None
    if eqn.primitive.name in _CHECKPOINTS and eqn.params["prevent_cse"] is not False:  # XLA would not undo it
        return None
    placed = [*eqn.params.get("in_shardings", ()), *eqn.params.get("out_shardings", ())]
    if not all(map(_private.is_unspecified, placed)):
        return None
    callee = next((eqn.params[k] for k in ("jaxpr", "call_jaxpr", "fun_jaxpr") if k in eqn.params), None)
    if callee is None or any(map(np.ndim, opened(callee)[1])):
        return None
    return callee if len(opened(callee)[0].invars) == len(eqn.invars) else None


def _needed(equations, outputs):
    needed, kept = set(variables_of(outputs)), []
    for equation in reversed(equations):
        if equation.eqn.effects or not needed.isdisjoint(equation.outputs):
            kept.append(equation)
            needed.update(variables_of(equation.inputs))
    return kept[::-1]


def new_equation(inputs, outputs, primitive, params, like):
    """An equation of this package's, which stands for one of the program."""
    return like.replace(invars=inputs, outvars=outputs, primitive=primitive, params=params, effects=frozenset())
