"""Traced functions that stay one operation, and what XLA is asked of them."""

import contextlib

import pytest
import tensorflow as tf

from keras_towers import compat
from keras_towers.fit.step import tower_functions
from keras_towers.fit.step.graph_function import GraphFunction, Uncompilable


def traced(function, *specs):
    trace = compat.func_graph_from_py_func
    specs = [tf.TensorSpec(*spec) for spec in specs]
    return trace("body", lambda *x: tf.nest.flatten(function(*x)), specs, {})


def run(function, *inputs):
    """The results of a graph, and what TensorFlow has made of the graph."""
    context = compat.eager_context()
    context.enable_run_metadata()
    results = tf.function(function)(*inputs)
    metadata = context.export_run_metadata()
    context.disable_run_metadata()
    return [result.numpy()[0] for result in results], metadata.function_graphs


@pytest.mark.optimized
def test_one_function_for_towers_that_differ_in_a_number():
    function = GraphFunction(traced(lambda x, n: tf.cos(x) * n, [[3]], [[]]))

    def caller(x):
        calls = [function([x, tf.constant(n)]) for n in (2.0, 3.0)]
        return [total for (total,) in calls]

    found, graphs = run(caller, tf.zeros([3]))
    assert found == [2, 3]
    called = [
        node.attr["f"].func.name
        for graph in graphs
        for node in graph.post_optimization_graph.node
        if "PartitionedCall" in node.op
    ]
    assert len(called) == 2 and len(set(called)) == 1, called


@pytest.mark.optimized
def test_inlined_an_output_is_ready_before_what_follows():
    """Other ranks get it while the rest is computed."""
    graph = traced(lambda x: (tf.cos(x), tf.sinh(tf.cos(x))), [[3]])
    function = GraphFunction(graph, "inlined")

    def caller(x):
        early, late = function([x])
        return tf.math.bessel_i0(early), late

    _, graphs = run(caller, tf.ones([3]))
    nodes = {
        node.name: node
        for function in graphs
        for graph in function.partition_graphs
        for node in graph.node
    }
    (use,) = (node for node in nodes.values() if node.op == "BesselI0")
    needed, waiting = set(), [*use.input]
    while waiting:
        node = nodes[waiting.pop().lstrip("^").partition(":")[0]]
        needed.add(node.op)
        waiting += node.input
    assert "Cos" in needed and "Sinh" not in needed
    assert not any("Call" in operation for operation in needed)


def test_shapes_follow_from_the_inputs_of_a_call():
    """TensorFlow takes a loss for one number if labels are broadcast."""

    def loss(x, y):
        return tf.raw_ops.SoftmaxCrossEntropyWithLogits(
            features=x, labels=y
        ).loss

    function = GraphFunction(traced(loss, [[None, 3]], [[1, 3]]))

    @tf.function
    def caller(x, y):
        (losses,) = function([x, y])
        return losses, tf.constant(losses.shape.as_list())

    found, shape = caller(tf.zeros([8, 3]), tf.ones([1, 3]))
    assert found.shape == [8] and shape.numpy().tolist() == [8]


@pytest.mark.parametrize(
    "function, spec, reason",
    [
        (tf.strings.length, ([], tf.string), "uses strings"),
        (tf.identity, (None,), "of an unknown rank"),
        (
            tf.linalg.logm,
            *(([4, 4], tf.complex64), "not have: MatrixLogarithm"),
        ),
        (
            lambda x: tf.reshape(x, [11, -1]),
            *(([None, 5],), "cannot be compiled"),
        ),
        # Sizes that are not known may be large: a kernel of 9 fits into none of
        # the smaller images, and there are three views of each example.
        (
            lambda x: tf.nn.conv1d(x, tf.ones([9, 3, 2]), 1, "VALID"),
            *(([None, None, 3],), None),
        ),
        (
            lambda x: tf.reduce_mean(tf.reshape(x, [-1, 3, 5]), 1),
            *(([None, 5],), None),
        ),
        # The rows of a tower out of a batch of three, as in train_on_batch.
        (
            lambda x: tf.slice(tf.ones([3, 2]), [0, 0], [tf.shape(x)[0], 2]),
            *(([None, 5],), None),
        ),
    ],
)
def test_graphs_that_xla_cannot_compile_say_why(function, spec, reason):
    with compat.xla_context():
        graph = traced(function, spec)
    function = GraphFunction(graph, "xla")
    device = tf.config.list_logical_devices("CPU")[0].name
    refused = pytest.raises(Uncompilable, match=reason)
    tried = [
        [
            tf.TensorSpec([size or rows for size in t.shape], t.dtype)
            for t in graph.inputs
        ]
        for rows in tower_functions._TRIED_ROWS
        if graph.inputs[0].shape.rank is not None
    ]
    with refused if reason else contextlib.nullcontext():
        function.check_xla(device, [lambda t=t: t for t in tried])
