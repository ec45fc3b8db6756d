"""What XLA compiles, as TensorFlow's kernels say."""

import pytest
import tensorflow as tf

from keras_towers.partition.ir.axes import ONCE
from keras_towers.partition.ir.called_functions import CalledFunctions
from keras_towers.partition.ir.program import Operation
from keras_towers.partition.xla.kernels import Kernels


def looped(body):
    return tf.while_loop(lambda k, _: k < 2, body, (0, tf.ones([2])))[1]


@pytest.mark.parametrize(
    "function, compiles",
    [
        (lambda x: tf.matmul(x, x), True),
        (lambda x: tf.strings.as_string(x), False),
        (lambda x: tf.linalg.logm(tf.cast(x, tf.complex64)), False),
        (lambda x: looped(lambda k, y: (k + 1, y * 2)), True),
        (
            lambda x: looped(
                lambda k, y: (k + 1, y + tf.cast(tf.size(_text(y)), y.dtype))
            ),
            False,
        ),
    ],
)
def test_an_operation_compiles_with_all_functions_that_it_calls(
    function, compiles
):
    spec = tf.TensorSpec([2, 2])
    graph = tf.function(function).get_concrete_function(spec).graph
    kernels = Kernels("/device:CPU:0", CalledFunctions([graph]))
    operations = [
        Operation(o.type, (), o.node_def.attr, [], ONCE)
        for o in graph.get_operations()[1:]
    ]
    assert all(map(kernels.has, operations)) == compiles


def _text(y):
    return tf.strings.as_string(y)


def test_a_kernel_has_only_some_dtypes():
    kernels = Kernels("/device:CPU:0", CalledFunctions())
    attributes = {
        dtype: {"T": tf.compat.v1.AttrValue(type=dtype.as_datatype_enum)}
        for dtype in (tf.float32, tf.string)
    }
    assert kernels.has_kernel("Identity", attributes[tf.float32])
    assert not kernels.has_kernel("MatMul", attributes[tf.string])


def test_an_unknown_function_does_not_compile():
    call = Operation("no_such_function", (), {}, [], ONCE)
    assert not Kernels("/device:CPU:0", CalledFunctions()).has(call)
