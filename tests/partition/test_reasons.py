"""Why operations are computed once, and what a mistake in a rule does."""

import pytest
import tensorflow as tf

from keras_towers.partition import folding, partition_graph, registry
from keras_towers.partition.layouts import Sharded, Value
from keras_towers.partition.nodes import Node
from tests.partition.kit import sharded, trace

# What is computed once in these, and why.
_REASONS = {
    "Unique": (lambda x: tf.unique(x[:, 0])[0], "no rule for Unique"),
    "TopKV2": (lambda x: tf.sort(x[:, 0]), "TopKV2 needs all rows"),
    "Sum": (
        lambda x: tf.reduce_sum(x, tf.cast(tf.reduce_max(x) > 9, tf.int32)),
        "Sum needs numbers that are known only when the step runs",
    ),
    "StatelessWhile": (
        lambda x: tf.while_loop(
            lambda y: tf.reduce_sum(y) < 100,
            lambda y: (y + tf.cast(tf.size(tf.unique(y[:, 0])[0]), y.dtype),),
            (x,),
        )[0],
        "no rule for Unique",
    ),
}


def lay_out(function):
    """The program of a function of rows."""
    graph = trace(function, sharded(-1, 3))
    return partition_graph(graph, [Sharded(0)], graph.outputs)


@pytest.mark.parametrize("type_", _REASONS)
def test_what_is_computed_once_has_a_reason(type_):
    function, reason = _REASONS[type_]
    found = {o.type: why for o, why in lay_out(function).computed_once.items()}
    assert found[type_] == reason


def test_rows_that_are_missing_are_a_mistake():
    """Not a reason to compute an operation once."""
    unit = object()

    def without_rows(node: Node, value: Value):
        return Value(Sharded(0, unit)).as_rows()

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(registry.RULES, "Sin", [without_rows])
        with pytest.raises(AssertionError):
            lay_out(tf.sin)


def test_a_mistake_in_a_fold_is_none_of_the_step():
    def with_mistake(node, *arrays):
        return {}["missing"]

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(folding._FOLDS, "Neg", with_mistake)
        with pytest.raises(KeyError):
            lay_out(lambda x: x * tf.cast(-tf.shape(x)[0], x.dtype))
