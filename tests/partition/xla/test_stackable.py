"""Which lists go from one function to another as a stack."""

import types as python_types

import pytest
import tensorflow as tf

from keras_towers.partition.ir.axes import BATCH
from keras_towers.partition.ir.builder import Builder
from keras_towers.partition.ir.called_functions import CalledFunctions
from keras_towers.partition.ir.program import Function, Tensor
from keras_towers.partition.xla.stackable import Stackable

_LIST = {"element_dtype": tf.float32}


def _dtype_of(builder, tensor, graphs=()):
    program = python_types.SimpleNamespace(
        operations=builder.operations, exchanges=[]
    )
    return Stackable(program, CalledFunctions(graphs)).dtype_of(tensor)


def _rows(builder):
    return builder.op("TensorListFromTensor", [[1.0, 2.0], 0], (), **_LIST)


def _push(builder, given):
    return builder.op("TensorListPushBack", [given, 1.0], (), **_LIST)


def _pop(builder, given):
    made, _ = builder.add(
        "TensorListPopBack",
        [given, builder.constant([], tf.int32)],
        _LIST,
        [(tf.variant, tf.TensorShape([])), (tf.float32, tf.TensorShape([]))],
    )
    return made


def _loop(builder, given, body):
    """A loop of two lists, which the body gets and returns."""
    inside = Builder()
    inputs = [Tensor(tf.variant, tf.TensorShape([]), BATCH) for _ in given]
    outputs = body(inside, inputs)
    true = Function(inputs, [inside.constant(True, tf.bool)], [])
    return builder.add(
        "While",
        given,
        {"T": [tf.variant] * 2},
        [(tf.variant, tf.TensorShape([]))] * 2,
        functions={
            "body": Function(inputs, outputs, inside.operations),
            "cond": true,
        },
    )


def test_lists_of_numbers_that_do_not_grow():
    builder = Builder()
    one, other = _rows(builder), _rows(builder)
    made, _ = _loop(
        builder, [one, other], lambda b, given: [_pop(b, given[0]), given[1]]
    )
    for tensor in (one, other, made):
        assert _dtype_of(builder, tensor) == tf.float32


@pytest.mark.parametrize("moves", (False, True))
def test_a_list_that_a_round_appends_to_or_a_later_one(moves):
    builder = Builder()
    one, other = _rows(builder), _rows(builder)

    def body(inside, given):
        before, after = given[::-1] if moves else given
        return [_push(inside, _pop(inside, before)), after]

    _loop(builder, [one, other], body)
    assert _dtype_of(builder, one) is None
    assert _dtype_of(builder, other) == (None if moves else tf.float32)


def test_a_list_that_a_function_of_the_trace_appends_to():
    @tf.function(input_signature=[tf.TensorSpec([], tf.variant)] * 2)
    def body(one, other):
        push = tf.raw_ops.TensorListPushBack
        return one, push(input_handle=other, tensor=1.0)

    graph, concrete = tf.Graph(), body.get_concrete_function()
    with graph.as_default():
        concrete.add_to_graph(graph)
    builder = Builder()
    one, other = _rows(builder), _rows(builder)
    called = tf.compat.v1.AttrValue(func={"name": concrete.name})
    builder.add(
        "While",
        [one, other],
        {"body": called},
        [(tf.variant, tf.TensorShape([]))] * 2,
    )
    assert _dtype_of(builder, one, [graph]) == tf.float32
    assert _dtype_of(builder, other, [graph]) is None


def test_a_list_of_lists_stays():
    builder = Builder()
    outer = builder.op(
        "TensorListReserve", [[], 2], (), element_dtype=tf.variant
    )
    assert _dtype_of(builder, outer) is None
