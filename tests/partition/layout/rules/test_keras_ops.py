"""All public operations of Keras: which of them are computed once, and why."""

import pytest

from keras_towers.partition import partition_graph
from tests.partition.layout.rules import keras_ops

pytestmark = pytest.mark.alternate


def test_what_is_computed_once_has_a_reason():
    once, untraced = set(), set()
    for name in keras_ops.public():
        if name in keras_ops.WITHOUT_ROWS:
            continue
        try:
            graph, given = keras_ops.traced(name)
        except Exception:
            untraced.add(name)
            continue
        layouts = [value.layout for value in given]
        program = partition_graph(graph, layouts, graph.outputs)
        if program.computed_once:
            once.add(name)
    # An older Keras has fewer of them.
    there = {*keras_ops.public()}
    assert untraced == there & keras_ops.UNTRACED
    assert once == there & keras_ops.ONCE.keys()
