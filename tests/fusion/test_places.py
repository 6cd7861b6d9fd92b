"""Places of arrays: what reshapes and transposes make of them, and which of them can be those of one kernel."""

import jax
import jax.numpy as jnp
import pytest

from jax_softmax.fusion.program.graph import graph_of
from jax_softmax.fusion.program.places import (
    Parts,
    factor_set,
    factors_of,
    input_places,
    new_place,
    overlap,
    place_key,
)


def before(f, shape, place=None):
    """The place of f's operand, and of f's result, which is at a new place if not at this one."""
    graph = graph_of(jax.make_jaxpr(f)(jnp.zeros(shape)).jaxpr)
    (result,) = graph.outputs
    place = after = new_place(result.aval.shape) if place is None else place
    for equation in reversed(graph.equations):
        (place,) = input_places(equation, place)
    return place, after


def test_questions_do_not_change_places():
    _, place = before(jnp.copy, (24, 5))
    key = place_key(place)
    for n in (2, 3, 4):
        split, _ = before(lambda x, n=n: x.reshape(24, 5), (n, 24 // n, 5), place)
        assert [[f.extent for f in dim] for dim in split] == [[n], [24 // n], [5]]
        assert factors_of(split) == factors_of(place) and factor_set(split[::-1]) == factor_set(place)
        assert overlap(split[:1], place[:1]) and not overlap(split[:1], split[1:])
    assert place_key(place) == key


def test_what_is_split_and_put_together_is_at_the_same_place():
    found, place = before(lambda x: x.reshape(4, 6, 5).transpose(2, 0, 1).reshape(5, 24).T, (24, 5))
    assert place_key(found) == place_key(place)


@pytest.mark.parametrize("n,extents", [(2, [2, 2, 6]), (4, [4, 6]), (8, [4, 2, 3]), (12, [4, 3, 2]), (3, None)])
def test_parts_are_common_to_all_places(n, extents):
    parts, (_, place) = Parts(), before(jnp.copy, (24,))
    splits = [before(lambda x: x.reshape(24), (k, 24 // k), place)[0] for k in (4, n)]
    assert parts.add(splits[0]) and parts.add(splits[1]) == (extents is not None)
    assert [f.extent for f in parts.factors_of(place)] == (extents or [4, 6])
