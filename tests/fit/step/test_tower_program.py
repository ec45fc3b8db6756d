"""Each level of a program is one function, which all towers call."""

import pytest
import tensorflow as tf

from keras_towers import TowerError, compat
from keras_towers.fit.data import batches
from keras_towers.fit.step.step_order import StepOrder
from keras_towers.fit.step.tower_program import (
    DividedBatch,
    TowerProgram,
    layouts_of,
)
from keras_towers.partition import partition_graph
from keras_towers.transport import SingleProcess

SPEC = tf.TensorSpec([None, 3])
LAYOUTS = layouts_of(SPEC, [True])
TOWERS = 3


def centred(x):
    """Each row less the mean, which all need first."""
    z = tf.tanh(x)
    return [z - tf.reduce_mean(z, 0)]


def laid_out():
    graph = compat.func_graph_from_py_func("step", centred, [SPEC], {})
    return partition_graph(graph, LAYOUTS, graph.outputs, {})


def traced(program, devices):
    """The graph of a program that all towers run."""

    @tf.function
    def run(x):
        batch = batches.split(x, TOWERS)
        divided = DividedBatch(batch, SPEC, LAYOUTS, batch)
        common, parts = divided.values_of(program.inputs, True)
        alone, towers = SingleProcess(), devices[:TOWERS]
        order = StepOrder(alone)
        ready = TowerProgram(program, "called", towers, alone, order)
        return ready.add_to_graph(common, parts, None)

    return run.get_concrete_function(SPEC).graph


def test_each_level_is_one_function_that_all_towers_call(devices):
    calls = [
        (operation.get_attr("f").name, operation.device)
        for operation in traced(laid_out(), devices).get_operations()
        if "PartitionedCall" in operation.type
    ]
    functions = {name for name, _ in calls}
    assert functions and len(calls) == TOWERS * len(functions)
    places = {
        tf.DeviceSpec.from_string(place).device_index for _, place in calls
    }
    assert places == {*range(TOWERS)}


@pytest.mark.parametrize("where", ["a level", "an exchange"])
def test_a_layout_that_contradicts_tensorflow_is_refused(devices, where):
    program = laid_out()
    exchange = program.exchanges[-1]
    wrong = exchange.given if where == "a level" else exchange.result
    wrong.shape = tf.TensorShape([5])
    words = r"has the shape \(None, 3\) where the layout has \(5,\)"
    with pytest.raises(TowerError, match=words):
        traced(program, devices)
