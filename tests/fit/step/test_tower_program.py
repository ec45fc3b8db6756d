"""Levels of a program: once for all, on each tower, exchanges, updates."""

import numpy as np
import tensorflow as tf

from keras_towers import compat
from keras_towers.fit.data import batches
from keras_towers.fit.step.inputs import DividedBatch, layouts_of
from keras_towers.fit.step.tower_program import TowerProgram
from keras_towers.fit.update.step_order import StepOrder
from keras_towers.partition import UpdateInfo, partition_graph
from keras_towers.transport import SingleProcess
from tests.kit.compare import all_close

X = np.random.default_rng(0).normal(size=(7, 3)).astype("float32")
SPEC = tf.TensorSpec([None, 3])


def on_towers(step, towers, devices, updates=(), update=None):
    """The results of a step, and of its functions the number of calls."""
    graph = compat.func_graph_from_py_func("step", step, [SPEC], {})
    layouts = layouts_of(SPEC, [True])
    updating = dict.fromkeys(updates, UpdateInfo([], None))
    wanted = list(graph.outputs)
    program = partition_graph(graph, layouts, wanted, updating)

    @tf.function
    def run(x):
        batch = batches.split(x, towers)
        divided = DividedBatch(batch, SPEC, layouts, batch)
        common, parts = divided.values_of(program.inputs, True)
        ready = TowerProgram(program, "called", devices[0])
        alone = SingleProcess()
        return ready.run(
            common,
            parts,
            devices[:towers],
            alone,
            StepOrder(alone),
            update,
        )

    concrete = run.get_concrete_function(SPEC)
    return concrete(X), concrete.graph


def centred(x):
    """Each row less the mean, which all need first; and a number of them."""
    z = tf.tanh(x) - tf.reduce_mean(tf.tanh(x), 0)
    return z, tf.reduce_max(tf.matmul(z, z, transpose_b=True)), tf.constant(5)


def test_each_level_is_one_function_that_all_towers_call(devices):
    found, graph = on_towers(centred, 3, devices)
    all_close(found, centred(tf.constant(X)), 1e-5)
    calls = [
        (op.get_attr("f").name, op.device)
        for op in graph.get_operations()
        if "PartitionedCall" in op.type
    ]
    functions = {name for name, _ in calls}
    assert functions and len(calls) == 3 * len(functions)
    assert {tf.DeviceSpec.from_string(d).device_index for _, d in calls} == {
        *range(3)
    }


def test_updates_get_parts_or_what_all_have(devices):
    seen = []

    def step(x):
        parts = tf.reduce_sum(x**2, 0)
        largest = tf.reduce_max(x, 0)
        both = tf.raw_ops.IdentityN(input=[parts, largest], name="update")
        with tf.control_dependencies(both):
            return tf.reduce_sum(x)

    def update(change, rows, wholes):
        seen.append(change.name)
        for parts, largest in rows:
            assert parts.shape == [3] and largest is None
        assert wholes[0] is None
        total = tf.add_n([parts for parts, _ in rows])
        tf.debugging.assert_near(total, tf.reduce_sum(X**2, 0))
        tf.debugging.assert_equal(wholes[1], tf.reduce_max(X, 0))

    (found,), _ = on_towers(step, 3, devices, updates=["update"], update=update)
    np.testing.assert_allclose(found, X.sum(), rtol=1e-5)
    assert seen == ["update"]
