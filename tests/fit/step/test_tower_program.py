"""Each level of a program is one function, which all towers call."""

import tensorflow as tf

from keras_towers import compat
from keras_towers.fit.data import batches
from keras_towers.fit.step.global_batch import DividedBatch, layouts_of
from keras_towers.fit.step.tower_program import TowerProgram
from keras_towers.fit.update.step_order import StepOrder
from keras_towers.partition import partition_graph
from keras_towers.transport import SingleProcess

SPEC = tf.TensorSpec([None, 3])
TOWERS = 3


def centred(x):
    """Each row less the mean, which all need first."""
    z = tf.tanh(x)
    return [z - tf.reduce_mean(z, 0)]


def test_each_level_is_one_function_that_all_towers_call(devices):
    graph = compat.func_graph_from_py_func("step", centred, [SPEC], {})
    layouts = layouts_of(SPEC, [True])
    program = partition_graph(graph, layouts, graph.outputs, {})

    @tf.function
    def run(x):
        batch = batches.split(x, TOWERS)
        divided = DividedBatch(batch, SPEC, layouts, batch)
        common, parts = divided.values_of(program.inputs, True)
        ready, alone = (
            TowerProgram(program, "called", devices[0]),
            SingleProcess(),
        )
        return ready.add_to_graph(
            common, parts, devices[:TOWERS], alone, StepOrder(alone), None
        )

    calls = [
        (operation.get_attr("f").name, operation.device)
        for operation in run.get_concrete_function(SPEC).graph.get_operations()
        if "PartitionedCall" in operation.type
    ]
    functions = {name for name, _ in calls}
    assert functions and len(calls) == TOWERS * len(functions)
    places = {
        tf.DeviceSpec.from_string(place).device_index for _, place in calls
    }
    assert places == {*range(TOWERS)}
