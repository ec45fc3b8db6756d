"""Functions that XLA compiles take and return lists as stacks."""

import tensorflow as tf

from keras_towers.fit.step.graph.graph_function import GraphFunction
from keras_towers.fit.step.graph.stacked_lists import StackedLists
from keras_towers.partition.emission import graph_of_inputs
from keras_towers.partition.ir.axes import BATCH
from keras_towers.partition.ir.program import Function, Tensor

_NUMBER = tf.TensorShape([])


def _function(inputs, outputs, add):
    graph = graph_of_inputs(inputs, lambda known: add(*known.values()))
    lists = [t for t in (*inputs, *outputs) if t.dtype == tf.variant]
    body = Function(inputs, outputs, [])
    function = GraphFunction(graph, "xla")
    return StackedLists(function, body, dict.fromkeys(lists, tf.float32))


def _pushed(rounds):
    """A list of at most 4 pairs: a loop of this many rounds."""
    empty = tf.raw_ops.EmptyTensorList(
        element_shape=[2], max_num_elements=4, element_dtype=tf.float32
    )

    def push(k, made):
        pair = tf.cast([k + 1, -k], tf.float32)
        push_back = tf.raw_ops.TensorListPushBack
        return k + 1, push_back(input_handle=made, tensor=pair)

    loop = tf.while_loop(lambda k, _: k < rounds, push, (0, empty))
    return [loop[1]]


def _last(given):
    pop = tf.raw_ops.TensorListPopBack
    return [
        pop(input_handle=given, element_shape=[2], element_dtype=tf.float32)[1]
    ]


def test_a_list_ends_where_a_loop_has_ended():
    number = Tensor(tf.int32, _NUMBER, BATCH)
    made = Tensor(tf.variant, _NUMBER, BATCH)
    last = Tensor(tf.float32, tf.TensorShape([2]), BATCH)

    @tf.function
    def run(rounds):
        push = _function([number], [made], _pushed)
        pop = _function([made], [last], _last)
        (found,) = push([rounds])
        length = tf.raw_ops.TensorListLength(input_handle=found)
        return length, pop([found])[0]

    for rounds in (1, 2, 4):
        length, pair = run(tf.constant(rounds))
        assert (length, [*pair]) == (rounds, [rounds, 1 - rounds])
