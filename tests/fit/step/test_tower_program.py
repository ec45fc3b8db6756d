"""Levels of a program, functions that all towers call, and exchanges."""

import numpy as np
import pytest
import tensorflow as tf

from keras_towers import TowerError, compat
from keras_towers.fit.data import batches
from keras_towers.fit.step.divided_batch import DividedBatch
from keras_towers.fit.step.exchanges import exchange_tensors
from keras_towers.fit.step.step_order import StepOrder
from keras_towers.fit.step.tower_program import TowerProgram
from keras_towers.partition import partition_graph
from keras_towers.partition.layouts import Sharded
from keras_towers.partition.program import Exchange, Tensor
from keras_towers.transport import SingleProcess
from tests.reduction.ranks import on_ranks

SPEC = tf.TensorSpec([None, 3])
SPECS = batches.Batch.of(SPEC)
TOWERS = 3


def centred(x):
    """Each row less the mean, which all need first."""
    z = tf.tanh(x)
    return [z - tf.reduce_mean(z, 0)]


def laid_out():
    graph = compat.func_graph_from_py_func("step", centred, [SPEC], {})
    return partition_graph(graph, [Sharded(0)], graph.outputs, {})


def traced(program, devices):
    """The graph of a program that all towers run."""

    @tf.function
    def run(x):
        batch = batches.Batch.of(x).split(TOWERS, 0, TOWERS)
        divided = DividedBatch(batch, SPECS, batch)
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


def exchange_of(kind, dtype, rank, axis=0, on_towers=False):
    dtype, shape = tf.as_dtype(dtype), tf.TensorShape([None] * rank)
    each_has_its_own = on_towers or kind in ("before", "scatter")
    given = Tensor(dtype, shape, on_towers=True)
    return Exchange(kind, given, Tensor(dtype, shape, each_has_its_own), axis)


EXCHANGES = [
    exchange_of("sum", "float32", 1),
    exchange_of("gather", "float32", 2),
    exchange_of("gather", "int32", 2, axis=1),
    exchange_of("sum", "float32", 2),
    exchange_of("before", "int64", 0),
    exchange_of("first", "float32", 0),
    exchange_of("scatter", "float32", 2, axis=1),
    exchange_of("gather", "float32", 2, on_towers=True),
]


def tensors_of_tower(k):
    """The tensors of tower k, which has k rows."""
    return [
        tf.constant([1.0, k]),
        tf.fill([k, 2], float(k)),
        tf.fill([2, k], k),
        tf.eye(2) * k,
        tf.constant(k, tf.int64),
        tf.constant(5.0),
        tf.fill([2, 36], float(k)) * tf.range(36.0),
        tf.fill([k, 2], float(k)),
    ]


@pytest.mark.parametrize("towers", [1, 2, 3])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_exchanges_over_towers_and_ranks(towers, ranks):
    total = towers * ranks

    def run(transport):
        first = transport.rank * towers
        own = [tensors_of_tower(k) for k in range(first, first + towers)]
        every = [list(column) for column in zip(*own, strict=True)]
        # Tower k gets k rows, after those of all earlier towers.
        shares = [(sum(range(k)), k) for k in range(first, first + towers)]
        rows = [shares for _ in EXCHANGES]
        devices = ["/device:CPU:0"] * towers
        return exchange_tensors(EXCHANGES, every, rows, devices, transport)

    results, _ = on_ranks(ranks, run)
    numbers = np.arange(total)
    rows = np.repeat(numbers, numbers)
    for rank, found in enumerate(results):
        pair, gathered, columns, matrix, before, first, parts, wholes = found
        np.testing.assert_array_equal(pair, [total, numbers.sum()])
        np.testing.assert_array_equal(gathered, np.stack([rows, rows], 1))
        np.testing.assert_array_equal(columns, np.stack([rows, rows]))
        np.testing.assert_array_equal(matrix, np.eye(2) * numbers.sum())
        wanted = [
            sum(range(k)) for k in range(rank * towers, (rank + 1) * towers)
        ]
        assert [int(b) for b in before] == wanted
        assert float(first) == 5
        for k, part in enumerate(parts, rank * towers):
            begin = sum(range(k))
            row = numbers.sum() * np.arange(36)[begin : begin + k]
            np.testing.assert_array_equal(part, np.stack([row, row]))
        for whole in wholes:
            np.testing.assert_array_equal(whole, gathered)
