"""A softmax of scores and its linear map, with or without a sink.

A sink is a column beside the scores, behind them or in front, for which there are no values: softmax([s, c])[:-1] is
softmax(s) times a factor of each row, sigmoid(logsumexp(s) - c). So the kernels do not know of it.
"""

from jax_softmax.fusion.program.graph import Equation, Graph, is_variable
from jax_softmax.fusion.program.kinds import kind_of
from jax_softmax.fusion.program.places import new_place
from jax_softmax.fusion.program.walk import through
from jax_softmax.primitives.types import Atom, Var


class SoftmaxRows:
    """A softmax's operand and results as variables of the scores' shape, all at one place."""

    def __init__(self, graph: Graph, equation: Equation, axis: int) -> None:
        self.graph, self.axis = graph, axis
        x, y = equation.inputs[0], equation.outputs[0]
        # The sink is an array of a number of each row, or one number; `first` is the scores' first column.
        self.scores, self.sink, self.first = self._scores_and_sink(x)
        self.n = self.scores.aval.shape[axis]
        self.place = new_place(self.scores.aval.shape)
        self.place_of_rows = [[] if d == axis else dim for d, dim in enumerate(self.place)]
        self.weights = self.scores_of(y)

    def _scores_and_sink(self, x: Atom) -> tuple[Atom, Atom | None, int]:
        """The scores, the sink and the scores' first column, if x is these, concatenated or padded; or else x alone."""
        maker = self.graph.maker_of(x)
        if maker is not None and maker.name == "concatenate" and maker.params["dimension"] == self.axis:
            of_sink = [a for a in maker.inputs if a.aval.shape[self.axis] == 1]
            if len(maker.inputs) == 2 and len(of_sink) == 1 and all(map(is_variable, maker.inputs)):
                first = int(maker.inputs[0] is of_sink[0])
                return maker.inputs[first], of_sink[0], first
        if maker is not None and maker.name == "pad" and is_variable(maker.inputs[0]):
            for first in (0, 1):
                if self._is_padded(maker, first):
                    return maker.inputs[0], maker.inputs[1], first
        return x, None, 0

    def _is_padded(self, maker: Equation, first: int, by: int = 1) -> bool:
        """Whether `by` columns are added to the scores, whose first column is then `first`, or taken away."""
        config = [tuple(map(int, dim)) for dim in maker.params["padding_config"]]
        columns = (by * first, by * (1 - first), 0)
        return config == [columns if d == self.axis else (0, 0, 0) for d in range(len(config))]

    def scores_of(self, a: Var) -> list[Var]:
        """The slices of an array of the softmax's shape that are the scores' columns."""
        return [a] if self.sink is None else self._slices(a, self.first, self.n)

    def sinks_of(self, a: Var) -> list[Var]:
        return [] if self.sink is None else self._slices(a, 0 if self.first else self.n, 1)

    def _slices(self, a: Var, first: int, n: int) -> list[Var]:
        """The slices of an array that are n columns, from the first on."""
        found = []
        for reader in self.graph.readers.get(a, ()):
            if reader.name == "split" and reader.params["axis"] == self.axis:
                starts = [sum(reader.params["sizes"][:k]) for k in range(len(reader.outputs))]
                found += [v for v, start in zip(reader.outputs, starts, strict=True) if start == first]
            elif reader.name == "slice" and set(reader.params["strides"] or ()) <= {1}:
                starts = [first if d == self.axis else 0 for d in range(len(a.aval.shape))]
                found += reader.outputs if list(reader.params["start_indices"]) == starts else []
            elif reader.name == "pad" and n == self.n and self._is_padded(reader, first, -1):
                found += reader.outputs
        shape = [n if d == self.axis else extent for d, extent in enumerate(a.aval.shape)]
        return [v for v in found if list(v.aval.shape) == shape]

    def without_sink(self, a: Atom) -> Atom | None:
        """The scores' columns of an array of the softmax's shape that has zeros for the sink; None if it has others."""
        if self.sink is None:
            return a
        maker = self.graph.maker_of(a)
        if maker is None or maker.name != "pad":
            return None
        number = through(self.graph, maker.inputs[1], lambda e: kind_of(e) == "copy")
        if is_variable(number) or number.val != 0:
            return None
        return maker.inputs[0] if self._is_padded(maker, self.first) else None
