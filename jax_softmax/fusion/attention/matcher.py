"""Where a program has attention: a softmax of a product, a product with the weights that are made of it, and gradients.

What is looked for follows from what the equations compute, not from how a library writes them. From the softmax
backwards there is a product of queries and keys, or a sum of several, whose elements become scores one by one; other
products there are arrays that scores read. From the softmax onwards there are products with values, or with the
output's cotangent, and the softmax's linear map, with one product before it and those with queries and keys after it.
Places (`places.py`) say which dimensions of all these are the same.

The products' results are then made by the kernels. If nothing needs the softmax any more, that was all of it; if
something does, the program stays as it was. Where something else needs the scores, their product is made as well, if
kernels are faster even so.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp

from jax_softmax import _kernels
from jax_softmax.fusion import backend
from jax_softmax.fusion.attention import casts, kernels, learned, log_sums, logarithms, mapped, several, tangents
from jax_softmax.fusion.attention.call import Attention
from jax_softmax.fusion.attention.formulas import Formulas
from jax_softmax.fusion.attention.letters import Letters
from jax_softmax.fusion.attention.pairs import Gradient, Pairs
from jax_softmax.fusion.attention.replacement import Result, equations_by_kernels
from jax_softmax.fusion.attention.rows import SoftmaxRows
from jax_softmax.fusion.attention.values import Values
from jax_softmax.fusion.attention.walks import NoAttention, Walks
from jax_softmax.fusion.forms.polynomials import Form
from jax_softmax.fusion.program import expressions, splicing
from jax_softmax.fusion.program.expressions import NotFolded
from jax_softmax.fusion.program.graph import CycleError, Equation, Graph
from jax_softmax.fusion.program.kinds import foldable
from jax_softmax.fusion.program.places import Factor, count_of
from jax_softmax.fusion.program.products import Operand, Product
from jax_softmax.primitives.types import Atom, Var


class FoundAttention(NamedTuple):
    """The attention of a softmax."""

    softmax: Equation
    products: list[Equation]  # of queries and keys
    log_sums: list[Equation]  # of the scores: the operator logsumexp
    attention: Attention
    extents: dict[str, int]
    bytes_per_score: float  # which the program moves to write and read arrays of queries x keys
    n_products: float  # of which such an array is an operand or the result
    bytes_of_number: int  # of q, k and v as kernels read them
    bytes_of_query: int  # in the program
    in_memory: Sequence[Equation] = ()  # those of the products that something else reads


def with_attention(graph: Graph) -> tuple[Graph, list[FoundAttention], dict[Var, str]]:
    """The graph with attention as calls of kernels where these are faster; what was found; and, by their results, why
    other softmaxes are left whose weights are multiplied."""
    staying: list[set[Equation]] = [set() for _ in _CHANGES]  # equations that each change leaves alone
    reasons: dict[Var, str] = {}
    while True:
        changed, old = graph, dict[Equation, Equation]()  # the program's own equation, by the new one instead of it
        made = []
        for change, stay in zip(_CHANGES, staying, strict=True):
            changed, new = change(changed, {e for e in changed.equations if old.get(e, e) in stay})
            made.append(new)
            old |= {e: old.get(before, before) for e, before in new.items()}
        with_kernels, found, refused = _with_attention(changed)
        reasons = {v: reasons.get(v, why) for v, why in refused.items()}
        left = [{old[e] for e in new if e in with_kernels.position} for new in made]
        if not any(left):
            own = (one._replace(softmax=old.get(one.softmax, one.softmax)) for one in found)
            found = [one._replace(products=[old.get(p, p) for p in one.products]) for one in own]
            return with_kernels, found, reasons
        staying = [stay | more for stay, more in zip(staying, left, strict=True)]


# What is done to a graph, if kernels make all that is new then.
_CHANGES = [logarithms.as_softmax, casts.without_widened, casts.with_common_factors, several.of_one_softmax]
_CHANGES += [mapped.of_broadcast_scores]


def _with_attention(graph: Graph) -> tuple[Graph, list[FoundAttention], dict[Var, str]]:
    """The same without such changes."""
    softmaxes = [e for e in graph.equations if e.name == "softmax" and foldable(e) and len(e.params["axes"]) == 1]
    matches, refused = [], {}
    for equation in softmaxes if kernels.can_run() else ():
        found = _match_of(graph, equation)
        if isinstance(found, Match):
            matches.append(found)
        elif found:
            refused[equation.outputs[0]] = found
    while matches:
        new = _with_kernels(graph, matches)
        if new is None:
            why_not = "what its kernels read is made of what they make"
            staying = [match for match in matches if _with_kernels(graph, [match]) is None] or matches
        else:
            why_not = "something else reads the scores or the weights"
            staying = [match for match in matches if not match.is_complete_in(new)]
            if not staying:
                return new, [match.found for match in matches], refused
        refused |= dict.fromkeys((match.softmax.outputs[0] for match in staying), why_not)
        matches = [match for match in matches if match not in staying]
    return graph, [], refused


def _match_of(graph: Graph, softmax: Equation) -> "Match | str":
    """The attention of a softmax, or why it has none; "" if its weights are not multiplied. Of several products in the
    scores one, or a sum, has queries and keys, and the others are arrays to it, as a product for each pair of tokens
    is."""
    why, n = "", 0
    while True:
        match = Match(graph, softmax, n)
        try:
            match.find()
        except (NoAttention, NotFolded) as error:
            why, n = why or (str(error) if match.weights_are_multiplied else ""), n + 1
            if n >= match.n_products:
                return why
        else:
            return match


def _with_kernels(graph: Graph, matches: list["Match"]) -> Graph | None:
    """The graph with calls of kernels; None if what they read is made of what they make."""
    try:
        return graph.with_replaced({old: new for match in matches for old, new in equations_by_kernels(match).items()})
    except CycleError:
        return None


class Match:
    """A softmax, with all that is attention around it, where the n-th product in its scores, or sum of products, is
    that of queries and keys."""

    def __init__(self, graph: Graph, softmax: Equation, n: int) -> None:
        self.graph, self.softmax, self.walks, self.n = graph, softmax, Walks(graph), n
        self.weights_are_multiplied, self.n_products = False, 0

    def find(self) -> None:
        """Raises NoAttention, with the reason, or NotFolded."""
        softmax = self.softmax
        (axis,) = softmax.params["axes"]
        self.rows = SoftmaxRows(self.graph, softmax, axis)
        self.reached = self.walks.reached(self.rows.weights, self.rows.place)
        self.weights_are_multiplied = bool(self.walks.products_with(self.reached))
        self.masks = softmax.inputs[1:]
        if self.masks and self.rows.sink is not None:
            raise NoAttention("where= beside a column of its own")
        if not self.rows.place[axis]:
            raise NoAttention("not one operand of the scores' product has the keys")
        (self.j,) = self.rows.place[axis]
        # Kernels have one index of keys, and one for each of q's own dimensions. An array that has several instead of
        # one, as a mask of a map has, is read as what it is reshaped to.
        whole = self.walks.parts.whole = [self.j]
        products = self.walks.products_of(self.rows.scores, self.rows.place, self.j)
        self.n_products = len(products)
        if not products:
            raise NoAttention("the scores are not made of a product, element by element")
        self.pairs = Pairs(self.walks, self.j, *products[self.n])
        in_k = self.pairs.factors_of_keys
        whole += [f for of in self.pairs.each for f in self.walks.parts.factors_of(of.q.place) if f not in in_k]
        self.log_sums = [] if self.rows.sink is not None else log_sums.of_same_rows(self.graph, softmax)
        self._find_products_of_weights()
        self.tangents = tangents.found(self)
        self._find_gradients()
        self._choose_letters()
        self.formulas = Formulas(self)
        self.found = self.found_at_first = FoundAttention(
            softmax,
            self.pairs.equations,
            [one.equation for one in self.log_sums],
            self.formulas.attention,
            self.extents,
            *self._work_per_score(),
            jnp.dtype(self.dtype).itemsize,
            self.pairs.each[0].q.variable.aval.dtype.itemsize,
        )
        self.results = self._results()
        if why := backend.in_use().reason_against_attention(self.found):
            raise NoAttention(why)

    def is_complete_in(self, graph: Graph) -> bool:
        """Whether a graph, in which kernels make the products' results, does not need the weights; nor the scores,
        unless kernels are faster even so. `found` then says that they stay."""
        if self.softmax in graph.position or not all(one.is_all_that_is_read(graph) for one in self.log_sums):
            return False
        self.found = self.found_at_first
        if in_memory := [e for e in self.pairs.equations if e in graph.position]:
            n_bytes, n_products = self._work_of(in_memory)
            self.found = self.found_at_first._replace(
                bytes_per_score=self.found_at_first.bytes_per_score - n_bytes,
                n_products=self.found_at_first.n_products - n_products,
                in_memory=in_memory,
            )
            return not backend.in_use().reason_against_attention(self.found)
        return True

    # ---- Products

    def _find_products_of_weights(self) -> None:
        """The products of weights with values and with the output's cotangent."""
        self.outputs: list[tuple[Product, Var]] = []
        self.dvs: list[tuple[Product, Var]] = []
        for product, weights in self.walks.products_with(self.reached):
            if product.contracted == {self.j}:  # a sum of outputs would be one of rounded numbers
                self.outputs.append((product, weights))
            elif self.j not in product.contracted:
                self.dvs.append((product, weights))
            else:
                raise NoAttention("products read the weights in other ways")
        self.with_weights = [*self.outputs, *self.dvs]

    @property
    def maps(self) -> list[Equation]:
        """The softmax's linear maps."""
        (y,) = self.softmax.outputs
        return [e for e in self.graph.readers.get(y, ()) if e.name == "softmax_linear" and e.inputs[0] is y]

    def _find_gradients(self) -> None:
        """The softmax's linear map, the product before it, and those after it."""
        maps = [e for e in self.maps if not self.tangents or e is not self.tangents.linear]
        if len(maps) > 1:
            raise NoAttention("it has several gradients")
        self.linear: Equation | None = None
        self.of_cotangents: Sequence[Product] = []  # those of the output's cotangent with values
        self.gradients: list[Gradient] = []
        self.of_sides: list[learned.OfSide] = []
        self.values = Values(self.walks)
        self.of_log_sums: list[tuple[log_sums.LogSum, Form]] = []  # log-sum-exps and their cotangents
        if not maps:
            outputs = [p for p, _ in self.outputs]
            outputs += [self.tangents.output] if self.tangents else []
            if self.dvs or not outputs:
                raise NoAttention("products read the weights in other ways")
            for product in outputs:
                self.values.add_of_output(product)
            return
        self.linear, place = maps[0], self.rows.place
        if (cotangent := self.rows.without_sink(self.linear.inputs[1])) is None:
            raise NoAttention("something else reads the column beside the scores")
        self.cotangent = cotangent
        self.sum_of_products, self.of_cotangents = self.walks.sum_of_products(self.cotangent, place, self.j)
        for product in self.of_cotangents:
            self.values.add_of_cotangent(product, self.pairs.operand_with_keys(product, "the weights' gradient"))
        self.of_scores = [self._with_log_sums(a) for a in self.rows.scores_of(self.linear.outputs[0])]
        self.reached_after = self.walks.reached(self.of_scores, place)
        self.gradients = self.pairs.gradients(self.walks.products_with(self.reached_after))
        if not self.gradients:
            raise NoAttention("no product reads the scores' gradient")
        self.of_sides = learned.found(self)

    def _with_log_sums(self, a: Var) -> Var:
        """The linear map's result with what log-sum-exps add to it, if they do."""
        found = a
        while len(readers := self.graph.readers.get(a, [])) == 1 and a not in self.graph.results:
            (reader,) = readers
            if reader.name in ("add", "add_any"):
                (other,) = [b for b in reader.inputs if b is not a] or [a]
                cotangents = [(one, c) for one in self.log_sums if (c := one.cotangent_of(other)) is not None]
                if not cotangents:
                    break
                self.of_log_sums.append(cotangents[0])
                found = reader.outputs[0]
            elif not splicing.is_alike(reader) or expressions.is_view(reader):
                break
            (a,) = reader.outputs
        return found

    # ---- Letters

    def _choose_letters(self) -> None:
        """A letter for each factor, as `letters.py` has them."""
        j, parts, pair = self.j, self.walks.parts, self.pairs.each[0]
        of_d, of_e = ([one.features for one in of.each] for of in (self.pairs, self.values))
        in_k, of_q = self.pairs.factors_of_keys, parts.factors_of(pair.q.place)
        own = [f for f in of_q if f not in of_d and f not in in_k]
        if not own or any(parts.factors_of([[f]]) != [f] for f in (j, *of_d, *of_e)):
            raise NoAttention("keys have all dimensions of the queries, or part of a dimension")
        if not (own := list(filter(self._may_be_queries, own))):
            raise NoAttention("products read the weights in other ways")
        self.i = i = max(own, key=lambda f: f.extent)
        batch = [f for f in (*of_q, *parts.factors_of(self.rows.place)) if f not in of_d]
        self.names = {i: "i", j: "j"} | dict.fromkeys(of_d, "d") | dict.fromkeys(of_e, "e")
        self.names |= self.tangents.names if self.tangents else {}
        free = iter("bhgacfklmnopqrstuvwxyz")
        for f in dict.fromkeys(batch):
            if f not in self.names:
                self.names[f] = next(free)
        values = [value.v for value in self.values.each]
        scores, *of_operands = (
            of.letters(self.names)
            for of in (Operand(None, self.rows.place), *(pair.k for pair in self.pairs.each), *values)
        )
        own_gradients = [self._letters_of(p) for p, _ in self.dvs]
        own_gradients += [self._letters_of(one.product) for one in self.gradients if one.name == "dk"]
        moving = self.tangents.operands.items() if self.tangents else ()
        own_tangents = [a.letters(self.names) for name, of in moving if name != "q" for a in of]
        of_keys = set("".join([*of_operands, *own_gradients, *own_tangents]))
        # An operand that lacks letters is broadcast along them. Where features are not last, XLA transposes the array.
        self.letters = Letters(
            self._letters_of_operand(pair.q, set(scores) - {"j"}, "d"),
            self._letters_of_operand(pair.k, of_keys, "d"),
            self._letters_of_operand(values[0], of_keys, "e"),
        )
        self.extents = {self.names[f]: f.extent for f in (*batch, j)}
        self.extents |= {c: kernels.padded(sum(f.extent for f in of)) for c, of in (("d", of_d), ("e", of_e))}
        self.dtype = self._dtype_of([*self.pairs.operands, *values, *self.values.o_cotangents])
        if why := _kernels.why_no_attention(",".join(self.letters), self.extents, self.dtype):
            raise NoAttention(why)
        if self.dtype == "float32" and not all(map(casts.is_of_default_precision, self._products())):
            raise NoAttention("products of float32 are asked to be more precise than TF32")

    def _dtype_of(self, operands: list[Operand]) -> str:
        """The dtype of the kernels' operands and results: 16 bits if all operands are of those, and results are rounded
        to them; otherwise the one to which the operands are widened."""
        dtype, *others = {of.variable.aval.dtype for of in operands}
        names = sorted(one.name for one in (dtype, *others))
        if not set(names) <= set(expressions.WRITABLE):  # products of integers wrap round
            raise NoAttention(f"queries, keys and values are of {' and '.join(names)}")
        made = [p.equation.outputs[0] for p in self._products_after()]
        made += [self.tangents.result.variable] if self.tangents else []
        if others or not all(casts.is_rounded(self.graph, a, dtype.name) for a in made):
            dtype = jnp.result_type(dtype, *others, jnp.float32)
        return dtype.name

    def _may_be_queries(self, f: Factor) -> bool:
        """Whether a factor is summed up in the products that leave the keys, and left in all others."""
        parts, after = self.walks.parts, self._products_after()
        after += [self.tangents.output] if self.tangents else []
        contracted = [parts.factors_of([[c] for c in p.contracted]) for p in after]
        in_products = self.linear is None or f in parts.factors_of(self.sum_of_products[1])
        return in_products and all((f in of) != (self.j in of) for of in contracted)

    def _letters_of(self, product: Product) -> str:
        return Operand(None, product.result).letters(self._names_of(product))

    def _letters_of_operand(self, operand: Operand, letters: set[str], features: str) -> str:
        """An operand's own letters, behind those of `letters` that it lacks; features last."""
        own = operand.letters(self.names).replace(features, "")
        return "".join(sorted(letters - {*own, "d", "e"})) + own + features

    def _products_after(self) -> list[Product]:
        """Those of weights, and of the scores' cotangents."""
        return [p for p, _ in self.with_weights] + [gradient.product for gradient in self.gradients]

    def _products(self) -> list[Equation]:
        of_tangents = [*self.tangents.terms, self.tangents.output] if self.tangents else []
        found = (*self.pairs.products, *self.of_cotangents, *self._products_after(), *of_tangents)
        return [product.equation for product in found]

    # ---- Results

    def _results(self) -> list[Result]:
        """What kernels make."""
        letters = self.letters
        made: list[tuple[Product, str, str, tuple[int, int]]]
        made = [(p, "o", letters.o, self.values.part_of(p, "v")) for p, _ in self.outputs]
        made += [(p, "dv", letters.v, self.values.part_of(p, "o_cotangent")) for p, _ in self.dvs]
        made += [(p, name, letters.q if name == "dq" else letters.k, part) for p, _, name, part in self.gradients]
        results = [
            Result(p.equation.outputs[0], p.result, self._names_of(p), name, of, part) for p, name, of, part in made
        ]
        if self.tangents:
            output = self.tangents.output
            part = self.values.part_of(output, "v")  # which refuses a tangent of other values than the gradient's
            names = self.names | {output.features: "e"}
            results.append(Result(*self.tangents.result, names, "o_tangent", letters.o, part))
        of_rows = [(v, name) for one in self.log_sums for v, name in zip(one.equation.outputs, "MS", strict=True)]
        if self.linear is not None:
            of_rows += [(v, "sink") for v in self.rows.sinks_of(self.linear.outputs[0])]
        results += [Result(v, self.rows.place_of_rows, self.names, name, letters.rows) for v, name in of_rows]
        of_sides = zip(self.of_sides, self.formulas.attention.side_cotangents, strict=True)
        results += [
            Result(of.variable, of.place, self.names, k, one.letters.removeprefix("p"))
            for k, (of, one) in enumerate(of_sides)
        ]
        return results

    def _work_per_score(self) -> tuple[float, float]:
        """How many bytes the program moves without these kernels, and in how many products."""

        def size(a: Atom) -> int:
            return a.aval.dtype.itemsize

        n, products = self._work_of(self.pairs.equations)
        n += sum(map(size, {a for _, a in self.outputs})) + sum(size(a) for _, a in self.with_weights)
        products += len(self.with_weights)
        if self.tangents:
            n += 2 * len(self.tangents.terms) * size(self.tangents.product[0]) + 2 * size(self.tangents.weights)
            products += len(self.tangents.terms) + 1
        if self.linear is not None:
            n += 2 * len(self.values.each) * size(self.sum_of_products[0])
            n += size(self.gradients[0].cotangent) * (1 + len(self.gradients))
            products += len(self.values.each) + len(self.gradients)
            n -= sum(size(one.variable) for one in self.of_sides if not one.is_sum)  # which the kernels write as well
        return n, products

    def _work_of(self, products: Sequence[Equation]) -> tuple[float, float]:
        """The bytes for a score, and how many products, that these products of queries and keys are."""
        share = count_of(self.pairs.place) / count_of(self.rows.place)  # of products that scores may share
        return share * 2 * sum(e.outputs[0].aval.dtype.itemsize for e in products), share * len(products)

    def _names_of(self, product: Product) -> dict[Factor, str]:
        """Letters, with one for a product's own features: e if it reads weights, d otherwise."""
        is_of_e = any(product is p for p, _ in self.with_weights)
        return self.names | {product.features: "e" if is_of_e else "d"}
