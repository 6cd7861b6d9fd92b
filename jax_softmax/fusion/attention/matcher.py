"""Where a program has attention: a softmax of a product, a product with the weights that are made of it, and gradients.

What is looked for follows from what the equations compute, not from how a library writes them. From the softmax
backwards there is one product of queries and keys, whose elements become scores one by one. From the softmax onwards
there are products with values, or with the output's cotangent, and the softmax's linear map, with one product before it
and those with queries and keys after it. Places (`places.py`) say which dimensions of all these are the same.

The products' results are then made by the kernels. If nothing needs the softmax and the scores' product any more, that
was all of it; if something does, the program stays as it was.
"""

from typing import NamedTuple

from jax_softmax.fusion import expressions, splicing
from jax_softmax.fusion.attention import kernels
from jax_softmax.fusion.attention.call import Attention, LetteredSide
from jax_softmax.fusion.attention.linear import is_linear, multipliers
from jax_softmax.fusion.attention.products import NoAttention, Operand, Product
from jax_softmax.fusion.attention.rows import SoftmaxRows
from jax_softmax.fusion.attention.source import Letters, has_attention_kernels
from jax_softmax.fusion.attention.walks import STRIDED_VIEWS, Walks
from jax_softmax.fusion.expressions import Expression, Expressions, NotFolded, Number, Operation
from jax_softmax.fusion.graph import CycleError, Equation, Graph, is_variable
from jax_softmax.fusion.groups import foldable
from jax_softmax.fusion.places import place_key
from jax_softmax.runtime import judge


class FoundAttention(NamedTuple):
    """The attention of a softmax. `judge.attention_wins` takes the last four."""

    softmax: Equation
    product: Equation  # of queries and keys
    attention: Attention
    extents: dict[str, int]
    has_gradients: bool
    bytes_per_score: int  # which the program moves to write and read arrays of queries x keys


def with_attention(graph: Graph) -> tuple[Graph, list[FoundAttention], dict]:
    """The graph with attention as calls of kernels where these are faster; what was found; and, by their results, why
    other softmaxes are left whose weights are multiplied."""
    softmaxes = [e for e in graph.equations if e.name == "softmax" and foldable(e) and len(e.params["axes"]) == 1]
    matches, refused = [], {}
    for equation in softmaxes if kernels.can_run() else ():
        match = _Match(graph, equation)
        try:
            match.find()
        except (NoAttention, NotFolded) as error:
            if match.weights_are_multiplied:
                refused[equation.outputs[0]] = str(error)
        else:
            matches.append(match)
    while matches:
        try:
            new = graph.with_replaced({old: new for match in matches for old, new in match.replacements().items()})
        except CycleError:
            break
        complete = [m for m in matches if m.softmax not in new.position and m.product not in new.position]
        if len(complete) == len(matches):
            return new, [match.found for match in matches], refused
        left = (match.softmax.outputs[0] for match in matches if match not in complete)
        refused |= dict.fromkeys(left, "something else reads the scores or the weights")
        matches = complete
    return graph, [], refused


class _Match:
    """A softmax, with all that is attention around it."""

    def __init__(self, graph, softmax):
        self.graph, self.softmax, self.walks = graph, softmax, Walks(graph)
        self.weights_are_multiplied = False

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
        self.product, place = self.walks.product_of(self.rows.scores, self.rows.place)
        scores = Product(self.product, place)
        self.place_of_product = place
        self.d = scores.features
        (self.j,) = self.rows.place[axis] or [None]
        at_k = self._operand_with_keys(scores, "the scores' product")
        self.q, self.k = (self.walks.stored(scores.operand(k), self.d) for k in (1 - at_k, at_k))
        self._find_products_of_weights()
        self._find_gradients()
        self._choose_letters()
        self._make_expressions()
        self.results = self._results()
        if not judge.attention_wins(*self.found[2:]):
            raise NoAttention("its kernels would take longer")

    # ---- Products

    def _operand_with_keys(self, product, name) -> int:
        """The number of the operand. Raises NoAttention if there is none, or two."""
        has_keys = [any(f is self.j for f in product.operand(k).factors) for k in (0, 1)]
        if sum(has_keys) != 1:
            raise NoAttention(f"not one operand of {name} has the keys")
        return has_keys.index(True)

    def _find_products_of_weights(self):
        """The products of weights with values and with the output's cotangent."""
        self.outputs, self.dv = [], None
        for product, weights in self.walks.products_with(self.reached):
            if product.contracted == {id(self.j)}:
                self.outputs.append((product, weights))
            elif self.dv is None and id(self.j) not in product.contracted:
                self.dv = product, weights
            else:
                raise NoAttention("products read the weights in other ways")
        self.with_weights = [*self.outputs, *([self.dv] if self.dv else [])]

    def _find_gradients(self):
        """The softmax's linear map, the product before it, and those after it."""
        readers = self.graph.readers.get(self.softmax.outputs[0], ())
        maps = [e for e in readers if e.name == "softmax_linear" and e.inputs[0] is self.softmax.outputs[0]]
        if len(maps) > 1:
            raise NoAttention("it has several gradients")
        self.linear = self.dq = self.dk = self.o_cotangent = None
        if not maps:
            if self.dv is not None or len(self.outputs) != 1:
                raise NoAttention("several products read the weights")
            self._set_values(self.outputs[0][0])
            return
        self.linear, place = maps[0], self.rows.place
        self.cotangent = self.rows.without_sink(self.linear.inputs[1])
        if self.cotangent is None:
            raise NoAttention("something else reads the column beside the scores")
        self.product_of_cotangent, self.place_of_cotangent = self.walks.product_of(self.cotangent, place)
        before = Product(self.product_of_cotangent, self.place_of_cotangent)
        at_v = self._operand_with_keys(before, "the weights' gradient")
        self.e = before.features
        self.v = self.walks.stored(before.operand(at_v), self.e)
        self.o_cotangent = self.walks.stored(before.operand(1 - at_v), self.e)
        for product, _ in self.outputs:
            self._check_same(product, self.v)
        if self.dv is not None:
            self._check_same(self.dv[0], self.o_cotangent)
        self.of_scores = self.rows.scores_of(self.linear.outputs[0])
        self.reached_after = self.walks.reached(self.of_scores, place)
        for product, cotangent in self.walks.products_with(self.reached_after):
            if product.contracted == {id(self.j)} and self.dq is None:
                self._check_same(product, self.k)
                self.dq = product, cotangent
            elif id(self.j) not in product.contracted and self.dk is None:
                self._check_same(product, self.q)
                self.dk = product, cotangent
            else:
                raise NoAttention("products read the scores' gradient in other ways")
        if self.dq is None and self.dk is None:
            raise NoAttention("no product reads the scores' gradient")
        self.written = self._found_written()

    def _found_written(self):
        """What the program reads of the scores' cotangents other than by products: one array made of them, or None."""
        found = []
        for a in self.reached_after:
            readers = self.graph.readers.get(a, ())
            inside = (r.name == "dot_general" or any(v in self.reached_after for v in r.outputs) for r in readers)
            if not all(inside) or a in self.graph.results:
                found.append(a)
        if len(found) > 1 or any(a.aval.dtype.name not in expressions.WRITABLE for a in found):
            raise NoAttention("several results are made of the scores' gradient")
        return found[0] if found else None

    def _set_values(self, product):
        self.e = product.features
        self.v = self.walks.stored(product.other, self.e)

    def _check_same(self, product, operand):
        """Raises NoAttention unless a product's other operand is this one."""
        other = self.walks.stored(product.other, product.features)
        features = operand.factors[-1] if operand.factors else None

        def order(of, last):
            return [None if f is last else id(f) for f in of.factors]

        if other.variable is not operand.variable or order(other, product.features) != order(operand, features):
            raise NoAttention("its products are of different arrays")

    # ---- Letters

    def _choose_letters(self):
        """A letter for each factor, as `call.py` has them."""
        j, d, e = self.j, self.d, self.e
        in_k = {id(f) for f in self.k.factors}
        batch = [f for f in self.q.factors if f is not d]
        own = [f for f in batch if id(f) not in in_k]
        if not own or any(f.extent > 1 and f.halves for f in (j, d, e)):
            raise NoAttention("keys have all dimensions of the queries, or part of a dimension")
        i = max(own, key=lambda f: f.extent)
        self.i = id(i)
        self.names = {id(i): "i", id(j): "j", id(d): "d", id(e): "e"}
        free = iter("bhgacfklmnopqrstuvwxyz")
        for f in batch:
            if f is not i:
                self.names[id(f)] = next(free)
        letters = [operand.letters(self.names) for operand in (self.q, self.k, self.v)]
        # Where features are not last, XLA transposes the array.
        self.letters = Letters(*(of.replace(last, "") + last for of, last in zip(letters, "dde", strict=True)))
        try:
            self.letters.check([], "")
        except ValueError as error:
            raise NoAttention(str(error)) from None
        self.extents = {self.names[id(f)]: f.extent for f in (*batch, j, d, e)}
        dtypes = {of.variable.aval.dtype.name for of in (self.q, self.k, self.v)}
        dtypes |= {self.o_cotangent.variable.aval.dtype.name} if self.o_cotangent else set()
        if len(dtypes) != 1:
            raise NoAttention(f"queries, keys and values are of {' and '.join(sorted(dtypes))}")
        (self.dtype,) = dtypes
        if not has_attention_kernels(self.extents, self.dtype):
            features = f"{self.extents['d']} and {self.extents['e']}"
            raise NoAttention(f"there are no kernels of {self.dtype} with {features} features")
        for product, _ in (*self.with_weights, *(p for p in (self.dq, self.dk) if p)):
            if not self._is_rounded(product.equation.outputs[0]):
                raise NoAttention(f"a product's result is not rounded to {self.dtype}")

    def _is_rounded(self, a):
        """Whether all that reads a product's result rounds it to the dtype in which a kernel writes it."""
        if a.aval.dtype.name == self.dtype:
            return True
        readers = self.graph.readers.get(a, ())
        if a in self.graph.results or not readers:
            return False
        return all(
            self._is_rounded(r.outputs[0])
            if r.name in STRIDED_VIEWS
            else r.name == "convert_element_type" and r.outputs[0].aval.dtype.name == self.dtype
            for r in readers
        )

    # ---- Expressions

    def _make_expressions(self):
        rows = self.rows
        self.own = {(self.product.outputs[0], place_key(self.place_of_product)): "x0"}
        shared = self.shared = Expressions(self.own)
        score = shared.make(rows.scores, rows.place, self._equations_before(rows.scores, rows.place, self.own))
        for mask in self.masks:
            score = self._masked(score, mask)
        weights = {self._weight_of(a) for _, a in self.with_weights} or {Expression((), "y")}
        if len(weights) != 1:
            raise NoAttention("products read different weights")
        (weight,) = weights
        n_forward = len(shared.sides)
        transposed, written = (None, None), (None, None)
        if self.linear is not None:
            transposed = self._transposed(weight)
            if self.written is not None:
                written = self._linear_expression("g", self.of_scores, self.written, self.reached_after)
                written = written, self.written.aval.dtype.name
        attention = Attention(
            self.letters,
            tuple(self._side(side) for side in shared.sides),
            n_forward,
            score,
            weight,
            *transposed,
            *written,
            empty_rows_are_zero=bool(self.masks) or rows.sink is not None,
        )
        self.found = FoundAttention(
            self.softmax, self.product, attention, self.extents, self.linear is not None, self._bytes_per_score()
        )

    def _bytes_per_score(self) -> int:
        """How many the program moves without these kernels."""

        def size(a):
            return a.aval.dtype.itemsize

        n = 2 * size(self.product.outputs[0]) + sum(2 * size(a) for _, a in self.outputs)
        if self.linear is not None:
            n += 2 * size(self.product_of_cotangent.outputs[0]) + (size(self.dv[1]) if self.dv else 0)
            cotangents = [product[1] for product in (self.dq, self.dk) if product]
            n += size(cotangents[0]) * (1 + len(cotangents))
            n -= 0 if self.written is None else size(self.written)  # which the kernels write as well
        return n

    def _equations_before(self, a, place, products) -> dict:
        return self.walks.equations_before(a, place, products, {self.i, id(self.j)})

    def _inside(self, a, reached):
        """The equations that make a value which was reached, and those that make other operands of these."""
        inside, pending = {}, [a]
        while pending:
            b = pending.pop()
            if b in inside or b not in reached or b not in self.graph.maker or reached[b] is None:
                continue
            maker = self.graph.maker[b]
            if not expressions.is_expressible(maker):
                continue
            inside[b] = maker
            input_places = expressions.required_input_places(maker, reached[b])
            for operand, its_place in zip(maker.inputs, input_places, strict=True):
                if is_variable(operand) and operand not in reached:
                    inside |= self._equations_before(operand, its_place, self.own)
                elif is_variable(operand):
                    pending.append(operand)
        return inside

    def _weight_of(self, a) -> Expression:
        return self._linear_expression("y", self.rows.weights, a, self.reached)

    def _linear_expression(self, name, sources, a, reached) -> Expression:
        """What was reached from the sources, as an expression of these, which have a name."""
        inside = self._inside(a, {b: p for b, p in reached.items() if b not in sources})
        names = self.own | {(source, place_key(self.rows.place)): name for source in sources}
        found = Expressions(names, self.shared.sides).make(a, reached[a], inside)
        if not is_linear(found, name):  # skipped tiles would leave out what is added to weights of 0
            raise NoAttention("weights or gradients go through what is not linear")
        return found

    def _transposed(self, weight):
        """Two transposed maps: of the scores' cotangent g to the product's, and of the product t of values with the
        output's cotangent to the weights' cotangent."""
        cotangents = [product[1] for product in (self.dq, self.dk) if product]
        found = {self._linear_expression("g", self.of_scores, a, self.reached_after) for a in cotangents}
        if len(found) != 1:
            raise NoAttention("products read different gradients of the scores")
        (of_score,) = found
        own = {(self.product_of_cotangent.outputs[0], place_key(self.place_of_cotangent)): "t"}
        before = self._equations_before(self.cotangent, self.rows.place, own)
        of_weight = Expressions(own, self.shared.sides).make(self.cotangent, self.rows.place, before)
        if not is_linear(of_weight, "t") or multipliers(weight, "y") != multipliers(of_weight, "t"):
            raise NoAttention("the weights' gradient is not that of the weights")
        return of_score, of_weight

    def _masked(self, score, mask) -> Expression:
        """The score where a mask is true, and -inf elsewhere."""
        shape, x = mask.aval.shape, self.rows.scores.aval.shape
        place = [self.rows.place[d] if n > 1 else [] for d, n in enumerate(shape, len(x) - len(shape))]
        of_mask = self.shared.make(mask, place, self._equations_before(mask, place, {}))
        n = len(score.operations)
        renamed = {f"v{k}": f"v{k + n}" for k in range(len(of_mask.operations))}
        operations = [op._replace(operands=tuple(renamed.get(a, a) for a in op.operands)) for op in of_mask.operations]
        dtype = self.rows.scores.aval.dtype.name
        choice = renamed.get(of_mask.result, of_mask.result), Number(-float("inf"), dtype), score.result
        select = Operation("select_n", choice, ("bool", dtype, dtype), dtype)
        return Expression((*score.operations, *operations, select), f"v{n + len(operations)}")

    def _side(self, side) -> LetteredSide:
        try:
            if side.factor is not None:
                return LetteredSide(self.names[id(side.factor)], "index")
            dtype = side.variable.aval.dtype.name
            if dtype not in expressions.READABLE:
                raise NoAttention(f"scores read an array of {dtype}")
            return LetteredSide(Operand(side.variable, side.place).letters(self.names), dtype)
        except KeyError:
            raise NoAttention("scores read an array with a dimension of its own") from None

    # ---- Calls

    def _results(self):
        """The products whose results kernels make, and the letters in which they do."""
        letters = self.letters
        made = [(product, letters.o) for product, _ in self.outputs]
        made += [(p[0], of) for p, of in ((self.dq, letters.q), (self.dk, letters.k), (self.dv, letters.v)) if p]
        have = [(Operand(None, product.result).letters(self._names_of(product)), of) for product, of in made]
        have += [] if self.linear is None else [(self.o_cotangent.letters(self.names), letters.o)]
        if any(sorted(own) != sorted(of) for own, of in have):
            raise NoAttention("a product's result has other dimensions")
        return made

    def replacements(self) -> dict:
        """The products, as calls of the kernels."""
        names, letters, attention = self.names, self.letters, self.found.attention
        arrays = [Operand(side.variable, side.place) for side in self.shared.sides if side.factor is None]
        reads = [(self.q, letters.q), (self.k, letters.k), (self.v, letters.v)]
        reads += [(a, a.letters(names)) for a in arrays]
        reads += [] if self.linear is None else [(self.o_cotangent, letters.o)]
        place_of_sink = [[] if d == self.rows.axis else dim for d, dim in enumerate(self.rows.place)]
        reads += [] if self.rows.sink is None else [(Operand(self.rows.sink, place_of_sink), letters.rows)]
        results = [(p.equation.outputs[0], p.result, self._names_of(p), of) for p, of in self.results]
        if self.linear is not None:
            place = self.reached_after.get(self.written)
            results += [] if self.written is None else [(self.written, place, names, letters.rows + "j")]
            sinks = self.rows.sinks_of(self.linear.outputs[0])
            results += [(v, place_of_sink, names, letters.rows) for v in sinks]

        def by_kernels(*operands):
            operands = [of.to_letters(a, names, c) for (of, c), a in zip(reads, operands, strict=True)]
            q, k, v, *rest = operands
            sides = rest[: len(arrays)]
            o, rows = kernels.forward(attention, q, k, v, *sides)
            weight_of_sink = None
            if self.rows.sink is not None:
                o, rows, weight_of_sink = kernels.with_sink(attention, o, rows, rest[-1])
            found = [o] * len(self.outputs)
            if self.linear is not None:
                o_cotangent = rest[len(arrays)]
                delta = kernels.delta(attention, o, o_cotangent)
                dq, dk, dv, *written = kernels.backward(attention, q, k, v, o_cotangent, rows, delta, *sides)
                found += [a for a, p in ((dq, self.dq), (dk, self.dk), (dv, self.dv)) if p] + written
                found += [-weight_of_sink * delta for _ in sinks]
            return [
                Operand(None, place).from_letters(a, own, of, result.aval)
                for (result, place, own, of), a in zip(results, found, strict=True)
            ]

        variables = [of.variable for of, _ in reads]
        makers = list(dict.fromkeys(self.graph.maker[result] for result, *_ in results))
        last = max(makers, key=self.graph.position.get)
        new = splicing.spliced(by_kernels, variables, [result for result, *_ in results], self.softmax)
        return {maker: [] for maker in makers} | {last: new}

    def _names_of(self, product):
        """Letters, with one for a product's own features: e if it reads weights, d otherwise."""
        is_of_e = any(product is p for p, _ in self.with_weights)
        return self.names | {id(product.features): "e" if is_of_e else "d"}
