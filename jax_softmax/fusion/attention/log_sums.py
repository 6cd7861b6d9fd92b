"""Log-sum-exps of attention's scores beside the softmax: in a z-loss, or to merge attention over parts of the keys.

The forward kernel makes two numbers of each row, and so does the operator logsumexp: M and S in the words of
`polynomials.py`. But the kernel's M is not the row's maximum, and its S goes with it. So a program is given the
kernel's numbers if all that it makes of them is made of M + log S, which any such pair gives.

The log-sum-exp's derivative is the softmax. So its cotangent c, a number of each row, is c softmax among the cotangents
of the scores, where the softmax's linear map is softmax (t - delta): the sum of both is softmax (t - (delta - c)).
"""

from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp

from jax_softmax.fusion.forms.polynomials import (
    LOG_S,
    ONE,
    Array,
    E,
    Form,
    Forms,
    M,
    S,
    added,
    form_of,
    is_followed,
    monomial_product,
)
from jax_softmax.fusion.forms.polynomials import multiplied as product_of_forms
from jax_softmax.fusion.program import places, splicing
from jax_softmax.fusion.program.graph import Equation, Graph, each_once, size_of
from jax_softmax.fusion.program.kinds import foldable, kind_of
from jax_softmax.fusion.program.walk import through
from jax_softmax.primitives.types import Atom, Var


def of_same_rows(graph: Graph, softmax: Equation) -> list["LogSum"]:
    """The log-sum-exps of a softmax's rows, with its mask: of the same array, or of one with the same numbers."""
    (x, *mask), axes = softmax.inputs, tuple(softmax.params["axes"])
    x = through(graph, x, _has_same_numbers)
    readers = graph.readers.get(x, ())
    copies = each_once(filter(_has_same_numbers, readers), lambda e: filter(_has_same_numbers, graph.readers_of(e)))
    found = dict.fromkeys([*readers, *(r for e in copies for r in graph.readers_of(e))])
    alike = [e for e in found if e.name == "logsumexp" and foldable(e) and tuple(e.params["axes"]) == axes]
    return [LogSum(graph, e) for e in alike if e.inputs[1:] == mask]


def _has_same_numbers(equation: Equation) -> bool:
    if equation.name != "convert_element_type":
        return kind_of(equation) == "copy"
    before, after = (a.aval.dtype for a in (*equation.inputs, *equation.outputs))
    return jnp.issubdtype(before, jnp.floating) and jnp.promote_types(before, after) == after


class LogSum:
    """A log-sum-exp: the `equation` of the operator, and what a program makes of its results M and S."""

    def __init__(self, graph: Graph, equation: Equation) -> None:
        self.equation = equation
        self.forms = _forms_of(graph, equation)

    def cotangent_of(self, a: Atom) -> dict[Any, float] | None:
        """The form of c, a number of each row, where an array is c softmax; None if it is not."""
        if a.aval.shape != self.forms.shape:
            return None
        form = self.forms.form(a, self.forms.place)
        form = {monomial_product(monomial, [(E, -1), (S, 1)]): times for monomial, times in form.items()}
        return None if any(self.forms.split(monomial)[1] for monomial in form) else form

    def equations_of(self, cotangent: dict[Any, float], v: Var) -> list[Equation]:
        """The equations that make a variable of M's shape from the form of c."""
        found = {symbol for monomial in cotangent for symbol, _ in monomial if isinstance(symbol, Array)}
        arrays = sorted(found, key=self.forms.order.__getitem__)

        def from_arrays(*given: jax.Array) -> jax.Array:
            values = [*given[:2], *map(self.forms.in_order, arrays, given[2:])]
            value = self.forms.value(cotangent, dict(zip([M, S, *arrays], values, strict=True)))
            return jnp.broadcast_to(value, v.aval.shape).astype(v.aval.dtype)

        inputs = [*self.equation.outputs, *(a.variable for a in arrays)]
        return splicing.spliced(from_arrays, inputs, [v], self.equation)

    def is_all_that_is_read(self, graph: Graph) -> bool:
        """Whether a graph makes nothing of M and S that another M with its own S would not make as well."""
        forms = _forms_of(graph, self.equation)
        place: places.Place = [[] if d in forms.axes else dim for d, dim in enumerate(forms.place)]
        read = dict.fromkeys(self.equation.outputs, place)
        for v in (pending := list(read)):
            if v in graph.results:
                return False
            for reader in graph.readers.get(v, ()):
                k = next(k for k, a in enumerate(reader.inputs) if a is v)
                out = places.output_place(reader, read[v], k) if is_followed(reader) else None
                if out is None:
                    return False
                (made,) = reader.outputs
                if made not in read and not _is_made_of_sum(forms.form(made, out), {*read, made}):
                    read[made] = out
                    pending.append(made)
        return True


def _forms_of(graph: Graph, equation: Equation) -> Forms:
    """Forms that look through all arrays which are made of an equation's results, but for sums over rows' numbers."""
    forms, (rows, *_) = Forms(graph, equation), equation.outputs

    def following(e: Equation) -> list[Equation]:
        return [r for r in graph.readers_of(e) if is_followed(r) and size_of(r.outputs[0]) >= size_of(rows)]

    forms.followed.update(v for e in each_once([equation], following) for v in e.outputs)
    return forms


def _is_made_of_sum(form: Form, made_of_parts: Collection[Var]) -> bool:
    """Whether a form stays the same if M grows by a number, and log S becomes less by it. `made_of_parts`: variables
    that may not."""
    moved: dict[Any, Any] = {}
    for monomial, times in form.items():
        term: dict[Any, Any] | None = {ONE: times}
        for symbol, power in monomial:
            if symbol in (M, LOG_S) and power > 0:
                factors = [added(form_of(symbol), form_of("moved by"), 1.0 if symbol == M else -1.0)] * power
            elif isinstance(symbol, Array) and symbol.variable not in made_of_parts:
                factors = [form_of(symbol, power)]
            else:
                return False
            for factor in factors:
                term = None if term is None else product_of_forms(term, factor)
        if term is None:
            return False
        moved = added(moved, term)
    return moved == form
