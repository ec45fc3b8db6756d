"""Levels of a program, functions that all towers call, and exchanges."""

import types

import numpy as np
import pytest
import tensorflow as tf

from keras_towers import TowerError
from keras_towers.fit.data import batches
from keras_towers.fit.places import Places, Ranks
from keras_towers.fit.ranks.step_order import StepOrder
from keras_towers.fit.step.graph.exchange_kinds import Members, exchange_tensors
from keras_towers.fit.step.graph.graph_function import CallMode
from keras_towers.fit.step.graph.step_inputs import DividedBatch
from keras_towers.fit.step.graph.tower_program import Pace, TowerProgram
from keras_towers.foundation import compat
from keras_towers.partition import partition_graph
from keras_towers.partition.ir import axes
from keras_towers.partition.ir.layouts import Sharded
from keras_towers.partition.ir.program import Exchange, Tensor
from keras_towers.reduction.collectives import OnTowers
from keras_towers.transport import SingleProcess
from tests.partition.kit import earliest
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
    return earliest(partition_graph(graph, [Sharded(0)], graph.outputs, {}))


def traced(timeline, devices, mode: CallMode = "called"):
    """The graph of a step that all towers run."""

    @tf.function
    def run(x):
        places = Places(Ranks(), [[tower] for tower in devices[:TOWERS]])
        batch = batches.Batch.of(x).split(TOWERS, 0, TOWERS)
        divided = DividedBatch(batch, SPECS, batch)
        inputs = divided.inputs_of(timeline.program, [], {}, places)
        order = StepOrder(SingleProcess())
        ready = TowerProgram(timeline, mode, places, order)
        return ready.add_to_graph(inputs)

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
    timeline = laid_out()
    exchange = timeline.program.exchanges[-1]
    wrong = exchange.given if where == "a level" else exchange.result
    object.__setattr__(wrong, "shape", tf.TensorShape([5]))
    words = r"has the shape \(None, 3\) where the layout has \(5,\)"
    with pytest.raises(TowerError, match=words):
        traced(timeline, devices)


def exchange_of(kind, dtype, shape, axis=0, to=axes.ONCE, **known):
    """An exchange of a tensor of a shape, or a number of unknown dimensions."""
    if isinstance(shape, int):
        shape = [None] * shape
    dtype, shape = tf.as_dtype(dtype), tf.TensorShape(shape)
    if kind in ("before", "scatter"):
        to = axes.BATCH
    given, result = Tensor(dtype, shape, axes.BATCH), Tensor(dtype, shape, to)
    return Exchange(kind, given, result, axis, **known)


EXCHANGES = [
    exchange_of("sum", "float32", 1),
    exchange_of("gather", "float32", 2),
    exchange_of("gather", "int32", 2, axis=1),
    exchange_of("sum", "float32", 2),
    exchange_of("before", "int64", 0),
    exchange_of("first", "float32", 0),
    exchange_of("scatter", "float32", 2, axis=1),
    exchange_of("gather", "float32", 2, to=axes.TOWERS),
]


def tensors_of_tower(k, width):
    """The tensors of tower k, which has k of so many rows."""
    return [
        tf.constant([1.0, k]),
        tf.fill([k, 2], float(k)),
        tf.fill([2, k], k),
        tf.eye(2) * k,
        tf.constant(k, tf.int64),
        tf.constant(5.0),
        tf.fill([2, width], float(k)) * tf.range(float(width)),
        tf.fill([k, 2], float(k)),
    ]


def exchanged(members, transport):
    """The results of some exchanges."""
    return exchange_tensors(
        members,
        OnTowers(),
        transport,
        lambda tensors, exchange: exchange(tensors),
    )


def over(towers, ranks, exchanges, tensors_of, rows_of):
    """The results of each rank, and the keys of what it has sent.

    Args:
        towers: how many towers each of so many ranks has.
        ranks: how many.
        exchanges: N exchanges.
        tensors_of: returns the N tensors of a tower.
        rows_of: returns the rows that a tower gets.
    """

    def run(transport):
        first = transport.rank * towers
        mine = range(first, first + towers)
        every = [*map(list, zip(*map(tensors_of, mine), strict=True))]
        rows = [rows_of(k) for k in mine]
        devices = ["/device:CPU:0"] * towers
        members = [
            Members(exchange, devices, values, rows)
            for exchange, values in zip(exchanges, every, strict=True)
        ]
        return exchanged(members, transport)

    return on_ranks(ranks, run)


@pytest.mark.parametrize("towers", [1, 2, 3])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_exchanges_over_towers_and_ranks(towers, ranks):
    total = towers * ranks
    # Tower k gets k rows, after those of all earlier towers.
    results, _ = over(
        *(towers, ranks, EXCHANGES),
        lambda k: tensors_of_tower(k, sum(range(total))),
        lambda k: (sum(range(k)), k),
    )
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


# Of a variable's axis in shards: some towers have less of it, or nothing. A row
# of it may be two of the tensor.
UNITS, SIZES = 5, ([5, 2], [3, 10], [5])
DTYPES = ("float32", "float32", "int32")
OF_VARIABLES = [
    exchange_of(kind, dtype, len(sizes), axis, sizes=sizes, units=UNITS, **more)
    for kind, more in (("scatter", {}), ("gather", {"to": axes.TOWERS}))
    for sizes, dtype, axis in zip(SIZES, DTYPES, (0, 1, 0), strict=True)
]


@pytest.mark.parametrize("towers, ranks", [(1, 2), (2, 3)])
def test_rows_of_variables_share_a_message_for_each_dtype(towers, ranks):
    total = towers * ranks
    ends = [UNITS * k // total for k in range(total + 1)]
    wholes = [
        np.arange(np.prod(sizes)).reshape(sizes).astype(dtype)
        for sizes, dtype in zip(SIZES, DTYPES, strict=True)
    ]

    def own(k):
        first, second, third = wholes
        rows = slice(ends[k], ends[k + 1])
        pairs = slice(2 * ends[k], 2 * ends[k + 1])
        return [first[rows], second[:, pairs], third[rows]]

    def tensors_of(k):
        return [tf.constant(a) for a in (*(w * k for w in wholes), *own(k))]

    results, keys = over(
        *(towers, ranks, OF_VARIABLES, tensors_of), lambda k: None
    )
    assert keys == 2 * ["kt.scatter.eager"] + 2 * ["kt.rows.eager"]
    for rank, found in enumerate(results):
        for scattered, gathered, whole in zip(
            found[:3], found[3:], wholes, strict=True
        ):
            assert len(scattered) == len(gathered) == towers
            for of_tower in gathered:
                np.testing.assert_array_equal(of_tower, whole)
        for k in range(towers):
            for part, rows in zip(
                found[:3], own(rank * towers + k), strict=True
            ):
                wanted = rows * sum(range(total))
                np.testing.assert_array_equal(part[k], wanted)


@pytest.mark.parametrize("parts", [1, 2])
def test_rows_of_equal_shapes_share_a_message(parts):
    """Statistics of a layer, of which each micro-batch has as many."""
    shapes, towers, ranks = [[1, 3], [2, 1]], 2, 3
    exchanges = [
        exchange_of("gather", "float32", shape, axis)
        for axis, shape in enumerate(shapes)
    ]

    def run(transport):
        first = towers * parts * transport.rank
        mine = range(first, first + towers * parts)
        devices = ["/device:CPU:0"] * towers
        members = [
            Members(exchange, devices, [tf.fill(shape, float(k)) for k in mine])
            for exchange, shape in zip(exchanges, shapes, strict=True)
        ]
        return exchanged(members, transport)

    results, keys = on_ranks(ranks, run)
    assert keys == ["kt.rows.eager"]
    numbers = np.arange(towers * parts * ranks)
    for rows, columns in results:
        np.testing.assert_array_equal(rows, np.stack([numbers] * 3, 1))
        np.testing.assert_array_equal(columns, np.stack([numbers] * 2))


def test_columns_share_a_message_to_other_ranks():
    """A column adds up its towers' terms; columns alone send nothing."""
    over_towers = exchange_of("sum", "float32", 1)
    over_columns = exchange_of("sum", "float32", 1, over=axes.COLUMNS)

    def run(transport):
        devices = ["/device:CPU:0"] * 2
        terms = tf.constant([[1.0], [10.0]]) * (1 + transport.rank)
        columns = [
            Members(over_towers, devices, [*(factor * terms)])
            for factor in (1, 100)
        ]
        tower = Members(over_columns, devices, [*terms])
        return exchanged([*columns, tower], transport)

    results, keys = on_ranks(2, run)
    assert len(keys) == 1
    for rank, (first, second, of_tower) in enumerate(results):
        assert [first.numpy(), second.numpy()] == [33, 3300]
        assert of_tower.numpy() == 11 * (1 + rank)


def test_levels_wait_for_the_results_of_calls_that_tensorflow_inlines(devices):
    """Waiting for such a call is waiting for nothing."""
    operations = traced(laid_out(), devices, "inlined").get_operations()
    waited = {
        before.type
        for operation in operations
        if operation.type == "NoOp"
        for before in operation.control_inputs
    }
    assert waited == {"Identity", "NoOp"}


def exchange(kind, along=axes.SHARDS):
    given = Tensor(tf.float32, tf.TensorShape([]), along)
    return Exchange(kind, given, given)


GATHER, SCATTER = exchange("gather"), exchange("scatter")
OF_BATCH = exchange("gather", axes.BATCH)


def waits_of(levels):
    """What each level's exchanges wait for, and what its functions wait for."""
    everything = [e for exchanges in levels for e in exchanges]
    program = types.SimpleNamespace(exchanges=everything)
    pace = Pace(types.SimpleNamespace(program=program, is_paced=False))
    waits, of_functions = [], []
    with tf.Graph().as_default():
        for level, exchanges in enumerate(levels):
            with tf.control_dependencies(pace.before_level()):
                computed = tf.constant(0.0, name=f"computed{level}")
            pace.note_computed([computed])
            with pace.before_exchanges(exchanges):
                result = tf.constant(0.0, name=f"exchanged{level}")
            pace.note_exchanged([result] if exchanges else [])
            pace.end_level()
            waits.append(before(result.op))
            of_functions.append(before(computed.op))
    return waits, of_functions


def before(operation):
    """The names of all that has run when an operation runs."""
    found, left = set(), [*operation.control_inputs]
    while left:
        one = left.pop()
        if one.type != "NoOp":
            found.add(one.name)
        left += one.control_inputs
    return found


def test_a_gather_waits_for_the_level_before():
    waits = waits_of([[GATHER], [GATHER, SCATTER], [GATHER], [GATHER]])
    for levels_between, of_levels in enumerate(waits):
        for level, waited in enumerate(of_levels):
            assert waited == {
                f"{what}{earlier}"
                for earlier in range(level - levels_between)
                for what in ("computed", "exchanged")
            }


def test_only_gathers_of_weights_wait():
    waits, of_functions = waits_of([[SCATTER], [OF_BATCH], [SCATTER]])
    assert waits == [set()] * 3
    # Otherwise a level would compute what only the backward pass uses.
    assert of_functions == [set(), set(), {"computed0"}]
    waits, _ = waits_of([[GATHER], [SCATTER], [OF_BATCH]])
    assert waits == [set()] * 3
