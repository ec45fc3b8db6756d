"""In which order operations are laid out, and when variables are read."""

import types

import pytest
import tensorflow as tf

from keras_towers.partition import partition_graph
from keras_towers.partition.layout_pass import sort_topologically
from keras_towers.partition.layouts import REPLICATED, InShards, Sharded
from tests.partition.kit import sharded, trace


def _operation(name, *sources):
    inputs = [types.SimpleNamespace(name=f"{o.name}:0", op=o) for o in sources]
    return types.SimpleNamespace(name=name, inputs=inputs)


def test_operations_come_after_those_that_they_need_each_once():
    """However they were created; some are needed twice."""
    first = _operation("first")
    left, right = _operation("left", first), _operation("right", first)
    both = _operation("both", left, right, first)
    last = _operation("last", left, both)
    given = [last, right, both, first, left]
    found = [o.name for o in sort_topologically(given, {})]
    assert sorted(found) == sorted(o.name for o in given)
    for operation in given:
        for tensor in operation.inputs:
            assert found.index(tensor.op.name) < found.index(operation.name)


def test_what_is_known_is_not_waited_for():
    outside = _operation("outside")
    inside = _operation("inside", outside)
    assert [*sort_topologically([inside], {"outside:0": 1})] == [inside]


@pytest.mark.parametrize(
    ("layout", "level"), [(REPLICATED, 2), (InShards(0, 3), 0)]
)
def test_whole_weights_are_read_once_all_gradients_are_there(layout, level):
    variable = tf.Variable(tf.ones([3]))

    def step(x):
        first = tf.reduce_sum(x, 0)
        second = tf.reduce_sum(tf.exp(x - first), 0)
        given = tf.raw_ops.IdentityN(input=[first, second], name="handed")
        with tf.name_scope("update"):
            variable.assign(variable * 0.5 + given[0])
        return given

    graph = trace(step, sharded(-1, 3))
    names = [operation.name for operation in graph.get_operations()]
    updates = {name: "" for name in names if name.startswith("update/")}
    handed = {"handed": [layout] * 2}
    layouts = [Sharded(0), REPLICATED]
    program = partition_graph(graph, layouts, graph.outputs, handed, updates)
    levels = {o.type: o.level for o in program.operations}
    assert levels["ReadVariableOp"] == level
