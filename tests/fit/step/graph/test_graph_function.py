"""Traced functions that stay one operation, or that XLA compiles."""

import pytest
import tensorflow as tf

from keras_towers.fit.step.graph.graph_function import GraphFunction
from keras_towers.foundation import compat


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


def test_a_call_of_constants_is_not_computed_before_the_step():
    """TensorFlow would do so without XLA, which draws other numbers."""

    def draw():
        return tf.random.stateless_truncated_normal([3], (1, 2))

    with compat.trace_context(xla=True):
        function = GraphFunction(traced(draw), "xla")
    (found,) = tf.function(lambda: function([]))()
    wanted = tf.function(draw, jit_compile=True)()
    assert found.numpy().tolist() == wanted.numpy().tolist()
    assert found.numpy().tolist() != draw().numpy().tolist()
