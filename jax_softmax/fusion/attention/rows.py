"""A softmax of a program and its linear map, with or without a sink: a column beside the scores, that no value has.

With a column c, softmax([s, c])[:-1] is softmax(s) times a factor of the row, sigmoid(logsumexp(s) - c). So the kernels
do not know of it.
"""

from jax_softmax.fusion.graph import is_variable
from jax_softmax.fusion.places import new_place


class Rows:
    """What a softmax is of and what it makes, as variables of the scores' shape, in one place."""

    def __init__(self, graph, equation, axis):
        self.graph, self.axis = graph, axis
        x, y = equation.inputs[0], equation.outputs[0]
        self.scores, self.column = _parts(graph.maker.get(x), axis) or (x, None)
        self.n = self.scores.aval.shape[axis]
        self.place = new_place(self.scores.aval.shape)
        self.weights = self.of_scores(y)

    def of_scores(self, a) -> list:
        """The parts of an array of the softmax's shape that are the scores' columns."""
        return [a] if self.column is None else [v for v, is_column in self._cut(a) if not is_column]

    def of_column(self, a) -> list:
        return [] if self.column is None else [v for v, is_column in self._cut(a) if is_column]

    def _cut(self, a):
        for reader in self.graph.readers.get(a, ()):
            if reader.name == "split" and reader.params["axis"] == self.axis:
                starts = [sum(reader.params["sizes"][:k]) for k in range(len(reader.outputs))]
                ends = [start + n for start, n in zip(starts, reader.params["sizes"], strict=True)]
                parts = zip(reader.outputs, starts, ends, strict=True)
            elif reader.name == "slice" and set(reader.params["strides"] or ()) <= {1}:
                ends = reader.params["limit_indices"]
                is_along = all(
                    (start, end) == (0, n)
                    for d, (start, end, n) in enumerate(
                        zip(reader.params["start_indices"], ends, a.aval.shape, strict=True)
                    )
                    if d != self.axis
                )
                parts = [(reader.outputs[0], reader.params["start_indices"][self.axis], ends[self.axis])] * is_along
            else:
                continue
            for part, start, end in parts:
                if (start, end) in ((0, self.n), (self.n, self.n + 1)):
                    yield part, start == self.n

    def padded(self, a):
        """What an array of the softmax's shape is but for a column of zeros, or itself where there is no column; None
        if it is something else."""
        if self.column is None:
            return a
        maker = self.graph.maker.get(a) if is_variable(a) else None
        if maker is None or maker.name != "pad" or is_variable(maker.inputs[1]) or maker.inputs[1].val != 0:
            return None
        config = [tuple(map(int, dim)) for dim in maker.params["padding_config"]]
        expected = [(0, int(d == self.axis), 0) for d in range(len(config))]
        return maker.inputs[0] if config == expected else None


def _parts(maker, axis):
    """Of a concatenation of scores and one column, these."""
    if maker is None or maker.name != "concatenate" or maker.params["dimension"] != axis or len(maker.inputs) != 2:
        return None
    scores, column = maker.inputs
    if column.aval.shape[axis] != 1 or not is_variable(scores) or not is_variable(column):
        return None
    return scores, column
