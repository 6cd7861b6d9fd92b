"""What XLA's products do beside multiplying: they write their result as a narrower dtype, and widen what they read.

So where a product of float32 is divided by a number and rounded to 16 bits, 16 bits are in memory; and where a gradient
of 16 bits is widened for products, products read 16 bits.
"""

from jax_softmax.fusion.program import expressions
from jax_softmax.fusion.program.graph import Equation, Graph, each_once, variables_of
from jax_softmax.fusion.program.kinds import is_loop, kind_of
from jax_softmax.primitives.types import Atom, Var


def is_written_by_product(graph: Graph, a: Atom) -> bool:
    """Whether a product writes this narrower array in the place of its own result."""
    maker = graph.maker_of(a)
    if maker is None or _casts(maker) != "narrow":
        return False
    while (source := _array_of(maker)) is not None:
        maker = graph.maker.get(source)
        if maker is None or source in graph.results or len(graph.readers[source]) > 1:
            return False
        if kind_of(maker) == "product":
            return True
    return False


def is_for_products(graph: Graph, equation: Equation) -> bool:
    """Whether an equation widens an array that products alone read so."""
    if _casts(equation) != "wide":
        return False

    def following(e: Equation) -> list[Equation]:
        return [] if kind_of(e) == "product" else graph.readers_of(e)

    readers = [*each_once(graph.readers_of(equation), following)]
    others = [e for e in readers if kind_of(e) != "product"]
    is_result = not graph.results.isdisjoint(v for e in (equation, *others) for v in e.outputs)
    return len(others) < len(readers) and not is_result and all(_array_of(e) is not None for e in others)


def is_read_by_loop(graph: Graph, reader: Equation) -> bool:
    """Whether XLA reads an equation's operands in a loop over elements, and not in a product."""
    return is_loop(reader) and not is_for_products(graph, reader)


def _casts(equation: Equation) -> str:
    """`narrow` for a cast of float32 to 16 bits, `wide` for one of 16 bits to float32, else an empty string."""
    if equation.name != "convert_element_type":
        return ""
    of, to = equation.inputs[0].aval.dtype.name, equation.outputs[0].aval.dtype.name
    if of == "float32" and to in expressions.ROUNDED:
        return "narrow"
    return "wide" if of in expressions.ROUNDED and to == "float32" else ""


def _array_of(equation: Equation) -> Var | None:
    """The one operand of an elementwise equation that is an array of the result's shape; None if there is not one."""
    if not expressions.is_expressible(equation):
        return None
    size = equation.outputs[0].aval.size
    found = [a for a in variables_of(equation.inputs) if a.aval.size == size]
    return found[0] if len(found) == 1 else None
