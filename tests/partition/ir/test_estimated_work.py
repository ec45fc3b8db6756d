"""``work_of``: how much an operation computes."""

import pytest
import tensorflow as tf

from keras_towers.partition.ir.estimated_work import work_of

ROWS, SIDE, TAKEN, MADE, KERNEL = 8, 16, 4, 6, 3
PLACES = ROWS * SIDE * SIDE


def convolution(x):
    kernel = tf.ones([KERNEL, KERNEL, TAKEN, MADE])
    return tf.nn.conv2d(x, kernel, 1, "SAME"), kernel


def channels_first(x):
    kernel = tf.ones([KERNEL, KERNEL, TAKEN, MADE])
    x = tf.transpose(x, [0, 3, 1, 2])
    return tf.nn.conv2d(x, kernel, 1, "SAME", data_format="NCHW"), kernel


def transposed(x):
    kernel = tf.ones([KERNEL, KERNEL, MADE, TAKEN])
    sizes = [ROWS, SIDE, SIDE, MADE]
    return tf.nn.conv2d_transpose(x, kernel, sizes, 1, "SAME"), kernel


def depthwise(x):
    kernel = tf.ones([KERNEL, KERNEL, TAKEN, 2])
    return tf.nn.depthwise_conv2d(x, kernel, [1] * 4, "SAME"), kernel


def product(x):
    kernel = tf.ones([TAKEN, MADE])
    return tf.reshape(x, [-1, TAKEN]) @ kernel, kernel


def products(x):
    kernel = tf.ones([ROWS, SIDE, TAKEN, MADE])
    return x @ kernel, kernel


MULTIPLICATIONS = {
    convolution: PLACES * KERNEL**2 * TAKEN * MADE,
    channels_first: PLACES * KERNEL**2 * TAKEN * MADE,
    transposed: PLACES * KERNEL**2 * TAKEN * MADE,
    depthwise: PLACES * KERNEL**2 * TAKEN * 2,
    product: PLACES * TAKEN * MADE,
    products: PLACES * TAKEN * MADE,
}


def moving(operation):
    """The work of an operation that only moves tensors of these sizes."""
    with operation.graph.as_default():
        tensors = [*operation.inputs, *operation.outputs]
        flat = [tf.reshape(tf.cast(t, tf.float32), [-1]) for t in tensors]
        return work_of(tf.concat(flat, 0).op) / 2


@pytest.mark.parametrize("function", MULTIPLICATIONS, ids=lambda f: f.__name__)
def test_products_and_their_gradients_multiply_as_often(function):
    with tf.Graph().as_default():
        x = tf.compat.v1.placeholder(tf.float32, [ROWS, SIDE, SIDE, TAKEN])
        y, kernel = function(x)
        made = [y, *tf.gradients(y, [x, kernel])]
        for operation in {
            t.op.type: t.op for t in _ancestors(made) if _is_product(t.op)
        }.values():
            own = work_of(operation) - moving(operation)
            wanted = MULTIPLICATIONS[function]
            assert own == pytest.approx(wanted, rel=0.02), operation.type


def _is_product(operation):
    return "Conv" in operation.type or "MatMul" in operation.type


def _ancestors(tensors):
    seen, waiting = {}, [*tensors]
    while waiting:
        tensor = waiting.pop()
        if tensor.name not in seen:
            seen[tensor.name] = tensor
            waiting += tensor.op.inputs
    return seen.values()


def test_all_else_takes_the_time_of_its_bytes():
    with tf.Graph().as_default():
        x = tf.compat.v1.placeholder(tf.float32, [ROWS, SIDE])
        wide = tf.compat.v1.placeholder(tf.float32, [100 * ROWS, SIDE])
        one = work_of((x + x).op)
        assert work_of((wide + wide).op) == 100 * one
        assert work_of(tf.cast(x, tf.bfloat16).op) == one / 2
        # Of what is chosen, the rest is not read, nor of what has its memory.
        assert work_of(wide[:ROWS].op) < one
        assert work_of(tf.reshape(wide, [-1]).op) == 1
        drawn = tf.random.stateless_uniform([ROWS, SIDE], [1, 2])
        draws = [t.op for t in _ancestors([drawn]) if "Random" in t.op.type]
        assert max(map(work_of, draws)) > 5 * one
