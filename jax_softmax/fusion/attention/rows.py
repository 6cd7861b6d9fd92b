"""A softmax of scores and its linear map, with or without a sink.

A sink is a column beside the scores for which there are no values: softmax([s, c])[:-1] is softmax(s) times a factor
of each row, sigmoid(logsumexp(s) - c). So the kernels do not know of it.
"""

from jax_softmax.fusion.graph import is_variable
from jax_softmax.fusion.places import new_place


class SoftmaxRows:
    """A softmax's operand and results as variables of the scores' shape, all at one place."""

    def __init__(self, graph, equation, axis):
        self.graph, self.axis = graph, axis
        x, y = equation.inputs[0], equation.outputs[0]
        self.scores, self.sink = _scores_and_sink(graph.maker.get(x), axis) or (x, None)
        self.n = self.scores.aval.shape[axis]
        self.place = new_place(self.scores.aval.shape)
        self.weights = self.scores_of(y)

    def scores_of(self, a) -> list:
        """The slices of an array of the softmax's shape that are the scores' columns."""
        return [a] if self.sink is None else [v for v, is_sink in self._slices(a) if not is_sink]

    def sinks_of(self, a) -> list:
        return [] if self.sink is None else [v for v, is_sink in self._slices(a) if is_sink]

    def _slices(self, a):
        """The slices of an array that are the scores' columns, and those that are the sink's."""
        for reader in self.graph.readers.get(a, ()):
            if reader.name == "split" and reader.params["axis"] == self.axis:
                starts = [sum(reader.params["sizes"][:k]) for k in range(len(reader.outputs))]
                ends = [start + n for start, n in zip(starts, reader.params["sizes"], strict=True)]
                slices = zip(reader.outputs, starts, ends, strict=True)
            elif reader.name == "slice" and set(reader.params["strides"] or ()) <= {1}:
                ends = reader.params["limit_indices"]
                is_along = all(
                    (start, end) == (0, n)
                    for d, (start, end, n) in enumerate(
                        zip(reader.params["start_indices"], ends, a.aval.shape, strict=True)
                    )
                    if d != self.axis
                )
                slices = [(reader.outputs[0], reader.params["start_indices"][self.axis], ends[self.axis])] * is_along
            else:
                continue
            for piece, start, end in slices:
                if (start, end) in ((0, self.n), (self.n, self.n + 1)):
                    yield piece, start == self.n

    def without_sink(self, a):
        """The scores' columns of an array of the softmax's shape that has zeros for the sink; None if it has others."""
        if self.sink is None:
            return a
        maker = self.graph.maker_of(a)
        if maker is None or maker.name != "pad" or is_variable(maker.inputs[1]) or maker.inputs[1].val != 0:
            return None
        config = [tuple(map(int, dim)) for dim in maker.params["padding_config"]]
        expected = [(0, int(d == self.axis), 0) for d in range(len(config))]
        return maker.inputs[0] if config == expected else None


def _scores_and_sink(maker, axis):
    """The operands of a concatenation of scores and one column; None if it is none."""
    if maker is None or maker.name != "concatenate" or maker.params["dimension"] != axis or len(maker.inputs) != 2:
        return None
    scores, sink = maker.inputs
    if sink.aval.shape[axis] != 1 or not is_variable(scores) or not is_variable(sink):
        return None
    return scores, sink
