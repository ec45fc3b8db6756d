"""Exchanges, operations that are computed once, and their order."""

import dataclasses
import functools

import numpy as np
import pytest
import tensorflow as tf

from keras_towers.foundation.errors import TowerError
from keras_towers.partition.emission import emit
from keras_towers.partition.ir.effects import LOOPS
from keras_towers.partition.ir.layouts import Sharded
from tests.partition.kit import (
    check_divided,
    check_on_towers,
    computed_once,
    earliest,
    exchange_counts,
    laid_out,
    on_towers,
    replicated,
    sharded,
    with_gradients,
)
from tests.partition.layout_list import as_listed


def _pairs(x):
    scores = tf.matmul(x, x, transpose_b=True)
    return tf.reduce_sum(tf.nn.log_softmax(scores))


def _two_views(x, interleaved=False):
    """As in SimCLR: rows of two tensors, in blocks or by turns."""
    views = tf.stack([x, tf.sin(x)], 1 if interleaved else 0)
    views = tf.reshape(views, [-1, 4])
    scores = tf.matmul(views, views, transpose_b=True)
    first, second = tf.split(scores, 2)
    return tf.reduce_sum(scores**2), first - second, tf.gradients(scores, x)


def _pairs_of_views(x):
    views = tf.concat([x, 2 * x], 0)
    number = tf.concat([tf.range(tf.shape(x)[0])] * 2, 0)
    same = tf.cast(number[:, None] == number[None], x.dtype)
    return views @ tf.transpose(views) * same


def _losses(x, labels):
    return tf.nn.sparse_softmax_cross_entropy_with_logits(labels, x)


def _boxes(x, kernel):
    """As a detector does; its gradients are reshaped back."""
    found = tf.nn.conv2d(x, kernel, 2, "SAME")
    return tf.nn.softmax(tf.reshape(found, [tf.shape(x)[0], -1, 5]), 1)


def _pooled(x, w):
    """OneDNN ends the process without images, or returns another shape."""
    return tf.nn.max_pool2d(tf.nn.conv2d(x, w, 1, "VALID"), 2, 1, "SAME")


def _without_words(x):
    time = tf.maximum(tf.shape(x)[1], 1)
    ones = tf.ones([tf.shape(x)[0], time])
    return tf.reduce_mean(ones), tf.reduce_mean(tf.shape(x[:, :1])[1:])


def _rest_of_a_split(x):
    *_, sizes = tf.split(tf.shape(x), [-1, 2])
    return tf.reshape(x, [tf.shape(x)[0], -1, tf.reduce_prod(sizes)])


def _padded(x, y):
    both = x + y
    flat = tf.reshape(both, [tf.shape(both)[0] * tf.shape(both)[1], 3])
    loss = tf.reduce_sum(flat**2 * tf.cast(tf.shape(both)[1], tf.float32))
    return loss, tf.gradients(loss, [x, y])


def _diagonal(x):
    """TensorFlow makes no matrix of a diagonal of unknown size."""
    matrix = tf.einsum("bi,bj->bij", x, x)
    return tf.concat([tf.linalg.diag_part(matrix), x], 1)


X, KERNEL = sharded(-1, 4), replicated(3, 3, 2, 5)
LABELS = sharded(-1, 4, dtype="int32", low=0, high=2)


def _texts(*times):
    return [sharded(-1, time, 3, hidden=(1,)) for time in times]


STEPS = {
    "all pairs gather one side": (_pairs, X),
    "two views in blocks": (_two_views, X),
    "two views by turns": (functools.partial(_two_views, interleaved=True), X),
    "pairs of two views": (_pairs_of_views, sharded(-1, 3)),
    "words of an unknown number of classes": (
        with_gradients(_losses),
        sharded(-1, 4, 3, hidden=(2,)),
        LABELS,
    ),
    **{
        f"positions of images of {len(hidden)} unknown sizes": (
            with_gradients(_boxes),
            sharded(-1, 6, 4, 2, hidden=hidden),
            KERNEL,
        )
        for hidden in ((), (1,), (1, 2))
    },
    **{
        f"pooled images of {len(hidden)} unknown sizes": (
            with_gradients(_pooled),
            sharded(-1, 4, 4, 2, hidden=hidden),
            KERNEL,
        )
        for hidden in ((), (1, 2))
    },
    "an axis that may be empty": (_without_words, sharded(-1, 0, hidden=(1,))),
    "the rest of a split": (_rest_of_a_split, sharded(-1, 5, 4, 3)),
    # Of padded texts, a length is not known while it is traced.
    "texts of one word and of others": (_padded, *_texts(1, 4)),
    "texts and those of one word": (_padded, *_texts(4, 1)),
    "texts that are equally long": (_padded, *_texts(4, 4)),
    "the gradient of a diagonal": (with_gradients(_diagonal), X),
}
test_steps = as_listed("partitioned: steps", STEPS, exchanges=True)
FAR_FROM_0 = {
    # The mean of squares is no help there.
    "moments far from 0": (
        lambda x: tf.nn.moments(x + 1000, [0, 1]),
        sharded(-1, 3, 2),
    ),
    "a variance far from 0": (
        lambda x: tf.math.reduce_variance(x + 1000, [0, 1]),
        sharded(-1, 3, 2),
    ),
}
test_moments = as_listed(
    "partitioned: far from 0", FAR_FROM_0, exchanges=True, tolerance=1e-4
)


def test_a_mean_of_halves_may_have_a_large_sum():
    given = sharded(-1, 4000, dtype="float16", low=20, high=30)
    check_on_towers(tf.reduce_mean, given, tolerance=2e-3)


def test_a_batch_may_be_empty():
    def function(x):
        size = tf.shape(x)[0]
        return [
            tf.cond(condition, lambda: tf.reduce_mean(x), lambda: 7.0)
            for condition in (size > 0, tf.cast(size, tf.bool))
        ]

    check_on_towers(function, sharded(-1, 3), towers=[(2, 1), (0, 0)])


def test_operations_have_the_names_of_the_trace():
    def function(x, w):
        with tf.name_scope("layer"):
            return tf.reduce_sum(x @ w)

    program = check_on_towers(function, sharded(-1, 4), replicated(4, 3))
    names = {o.type: o.name for o in program.operations}
    assert names["MatMul"] == "layer/matmul"


@pytest.mark.parametrize("limited", [False, True])
def test_a_count_of_nothing_makes_a_weight_infinite(limited):
    """As of classes by how many examples they have, of which one has none."""

    def function(x):
        wrong = tf.reduce_sum(tf.cast(x > -9, tf.float32))
        right = tf.reduce_sum(tf.cast(x > 9, tf.float32))
        some = tf.sqrt(right)  # So that the count is there already.
        weight = wrong / right
        return some, tf.minimum(weight, 10.0) if limited else weight

    program = check_on_towers(
        function, sharded(-1, 3), towers=((2, 0, 3), (1, 1))
    )
    assert exchange_counts(program) == {"sum": 2}
    assert earliest(program).number_of_levels == 2


def _imported_loop(x):
    """Double x as long as the sum is below 100, by a loop of TensorFlow 1."""
    is_v2 = tf.compat.v1.control_flow_v2_enabled()
    tf.compat.v1.disable_control_flow_v2()
    try:
        with tf.Graph().as_default() as graph:
            start = tf.compat.v1.placeholder(x.dtype, x.shape, "start")
            tf.while_loop(
                lambda y: tf.reduce_sum(y) < 100, lambda y: (2 * y,), [start]
            )
    finally:
        if is_v2:
            tf.compat.v1.enable_control_flow_v2()
    (end,) = (o for o in graph.get_operations() if o.type == "Exit")
    (result,) = tf.graph_util.import_graph_def(
        graph.as_graph_def(), {"start:0": x}, [end.outputs[0].name]
    )
    return result


_POSITIVE = sharded(-1, 3, low=0.5)


def test_a_function_with_a_loop_of_tensorflow_1_is_computed_once():
    spec = tf.TensorSpec([None, 3])
    imported = tf.compat.v1.wrap_function(_imported_loop, [spec])
    program = check_on_towers(lambda x: imported(x) * 2, _POSITIVE)
    assert set(computed_once(program)) == {"PartitionedCall"}


def test_a_loop_of_tensorflow_1_outside_of_functions_is_an_error():
    with pytest.raises(TowerError, match="wrap_function"):
        check_on_towers(_imported_loop, _POSITIVE)


def test_an_order_of_axes_that_is_known_is_a_constant():
    """XLA compiles a transpose only by a constant order."""

    def function(x):
        rank = tf.raw_ops.Rank(input=x)
        return tf.reduce_sum(tf.transpose(x, tf.range(rank)[::-1]), 0)

    program = check_divided(function, sharded(-1, 3))
    (transpose,) = (o for o in program.operations if o.type == "Transpose")
    assert transpose.inputs[1].operation.type == "Const"


def test_channels_may_be_a_multiple_of_examples():
    def function(x):
        y = tf.reshape(x, [5, 10])
        mean = tf.reduce_mean(y, 0, keepdims=True)
        return tf.reduce_sum(tf.tile(mean, [5, 1]) * y)

    rows = dataclasses.replace(replicated(5, 10), layout=Sharded(0))
    program = laid_out(function, rows)
    sizes = [e.given.shape.num_elements() for e in program.exchanges]
    assert max(sizes) == 10


def test_the_gradient_of_a_bias_of_images_is_a_sum():
    """OneDNN would fuse it with the kernel's gradient, which needs an image."""

    def function(x):
        return tf.raw_ops.BiasAddGrad(out_backprop=x)

    program = check_divided(function, sharded(-1, 2, 2, 3))
    assert "BiasAddGrad" not in {o.type for o in program.operations}


def _of_ones(x):
    """Whole ones, of which towers need only their rows."""
    ones = tf.ones([tf.shape(x)[0], 3])
    return x + tf.tanh(tf.ensure_shape(ones, [5, None]))


@pytest.mark.parametrize(
    "function", [lambda x: tf.ensure_shape(x, [5, None]) * 2, _of_ones]
)
def test_a_number_of_examples_is_checked(function):
    given, counts = sharded(-1, 3), ((3, 0, 2), (1, 4))
    program = check_divided(function, given, towers=counts)
    x = np.ones((4, 3), "float32")

    @tf.function(autograph=False)
    def run():
        return on_towers(program, [[x[:3], x[3:]]], (3, 1))

    with pytest.raises(tf.errors.InvalidArgumentError, match="5 rows"):
        run()


def test_what_may_fail_and_writes_nothing_is_told_when_it_is_added():
    variable = tf.Variable(0.0)

    def step(x):
        variable.assign(x[0])
        tf.raw_ops.Assert(condition=x[0] < 9, data=[x])
        return x * 2

    program, checks = laid_out(step, replicated(3)), []
    with tf.Graph().as_default():
        handle = tf.compat.v1.placeholder(tf.resource, [])
        values = tf.compat.v1.placeholder(tf.float32, [3]), handle
        given = dict(zip(program.inputs.of_graph, values, strict=True))
        wanted = program.results
        emit(program.operations, given, wanted, program.graphs, checks=checks)
    assert [check.type for check in checks] == ["Assert"]


@pytest.mark.parametrize(
    ("outer", "inner", "found"), [(32, 2, [4, 2]), (3, 10, [3, 4])]
)
def test_few_rounds_of_a_loop_run_at_a_time(outer, inner, found):
    def step(x):
        def twice(k, h):
            _, h = tf.while_loop(
                lambda j, h: j < k,
                lambda j, h: (j + 1, tf.tanh(h)),
                [0, h],
                parallel_iterations=inner,
            )
            return k + 1, h

        limit = tf.shape(x)[1]
        loop = tf.while_loop(
            lambda k, h: k < limit, twice, [0, x], parallel_iterations=outer
        )
        return loop[1]

    program = laid_out(step, sharded(-1, 3))
    with tf.Graph().as_default() as graph:
        x, *_ = program.inputs.of_graph
        given = {x: tf.compat.v1.placeholder(x.dtype, x.shape)}
        loops = [o for o in program.operations if o.type in LOOPS]
        emit(program.operations, given, loops[0].outputs, program.graphs)
    definition = graph.as_graph_def()
    functions = {f.signature.name: f for f in definition.library.function}
    (loop,) = [n for n in definition.node if n.op in LOOPS]
    body = functions[loop.attr["body"].func.name]
    (inside,) = [n for n in body.node_def if n.op in LOOPS]
    rounds = [n.attr["parallel_iterations"].i for n in (loop, inside)]
    assert rounds == found
