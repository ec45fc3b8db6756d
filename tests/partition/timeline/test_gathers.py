"""When rows of variables are gathered, and what lives at each level."""

import collections

import numpy as np
import pytest
import tensorflow as tf

from keras_towers.partition.ir.axes import BATCH, SHARDS, TOWERS
from keras_towers.partition.ir.builder import Builder
from keras_towers.partition.ir.layouts import InShards
from keras_towers.partition.ir.program import Tensor
from keras_towers.partition.ir.tensor_sizes import TensorSizes
from keras_towers.partition.timeline.gathers import (
    Gathers,
    gathered_bytes,
    place_earliest,
)
from tests.partition.kit import by_hand, earliest, laid_out, sharded
from tests.partition.order import check_order

SHAPE = tf.TensorShape([8, 8])
BYTES = 8 * 8 * 4


def _shard():
    return Tensor(tf.float32, tf.TensorShape([4, 8]), SHARDS)


def _value():
    """What gathers a variable."""
    builder = Builder()
    builder.exchange("gather", _shard(), to=TOWERS)
    return builder.exchanges[0]


def _gather(gathers, value, size, near):
    """Gather a value, or find it; return the level, or None if it was there."""
    if gathers.find(value, near) is not None:
        return None
    level = gathers.level_for(size, near, earliest=0)
    gathers.add(value, size, level, value.result)
    return level


def test_what_fits_is_gathered_once():
    gathers, values = Gathers(200), [_value() for _ in range(2)]
    assert [_gather(gathers, v, 25, near=1) for v in values] == [0, 0]
    assert [_gather(gathers, v, 25, near=9) for v in values] == [None, None]


def test_what_does_not_fit_is_gathered_late_and_again():
    gathers = Gathers(100)
    values = [_value() for _ in range(6)]
    # A quarter of the budget at each level.
    levels = [_gather(gathers, v, 25, near=1) for v in values[:2]]
    assert levels == [0, 1]
    # What has no room beside these waits for a later level.
    assert [_gather(gathers, v, 25, near=1) for v in values[2:]] == [2, 3, 4, 5]
    # On the way back the newest are there, and the others have no room.
    found = [_gather(gathers, v, 25, near=6) for v in reversed(values)]
    assert found[:2] == [None, None]
    assert None not in found[2:]


def test_a_larger_value_is_gathered_alone():
    gathers, values = Gathers(10), [_value() for _ in range(2)]
    assert [_gather(gathers, v, 1000, near=5) for v in values] == [4, 5]


def test_a_whole_for_all_and_one_on_each_tower_are_two():
    weight = tf.Variable(tf.ones([8, 8]))

    def function(x):
        return x @ weight, tf.sin(x) @ weight, tf.unique(weight[0])[0]

    program = laid_out(function, sharded(-1, 8), captured=InShards(0, 8))
    gathers = [e for e in program.exchanges if e.given.axes == SHARDS]
    assert sorted(gather.is_own for gather in gathers) == [False, True]


@pytest.mark.parametrize("largest", [25, 40, 90])
@pytest.mark.parametrize("seed", range(20))
def test_the_budget_holds_at_each_level(seed, largest):
    """Layers use some wholes side by side, and again in reverse order."""
    random, gathers = np.random.default_rng(seed), Gathers(100)
    layers = [
        [(_value(), random.integers(1, 25)) for _ in range(random.integers(5))]
        for _ in range(10)
    ]
    layers[random.integers(10)].append((_value(), largest))
    near = 1
    for layer in [*layers, *reversed(layers)]:
        levels = [near]
        for value, size in layer:
            whole = gathers.find(value, near)
            if whole is None:
                level = gathers.level_for(size, near, 0)
                gathers.add(value, size, level, value.result)
                levels.append(level + 1)
        near = max(levels) + int(random.integers(2))
    on_top = largest if largest > 25 else 0
    assert max(gathers._held.values()) <= 100 + on_top


@pytest.mark.parametrize(("budget", "most"), [(2**20, 3), (0, 2)])
def test_the_bytes_of_gathered_weights(budget, most):
    """One is used while the next is gathered; rows of examples do not count."""
    weights = [tf.Variable(tf.ones([8, 8])) for _ in range(3)]

    def function(x):
        x = x - tf.reduce_mean(x, 0)
        for weight in weights:
            x = tf.tanh(x @ weight)
        return x + tf.reverse(x, [0])

    program = laid_out(
        function,
        sharded(-1, 8),
        captured=InShards(0, 8),
    )
    timeline = earliest(program, gather_bytes=budget)
    assert max(gathered_bytes(timeline)) == most * BYTES


def _there_and_back(join=lambda builder, whole: whole):
    """Use three weights one level after another, and again in reverse order.

    Args:
        join: returns what is used of each.

    Returns:
        A builder, its inputs, and what is used of each weight.
    """
    builder, x = Builder(), Tensor(tf.float32, SHAPE, BATCH)
    shards = [_shard() for _ in range(3)]
    wholes = [
        join(builder, builder.exchange("gather", of, to=TOWERS, shape=SHAPE))
        for of in shards
    ]
    found = x
    for whole in [*wholes, *reversed(wholes)]:
        total = builder.exchange("sum", builder.op("MatMul", [x, found], SHAPE))
        found = builder.op("Mul", [total, whole], SHAPE)
    return builder, [x, *shards], wholes


def _placed(builder, inputs, budget, **options):
    """Return a timeline, after checks of what holds for each."""
    program = by_hand(builder, *inputs, **options)
    sizes = TensorSizes(program, 2, 8)
    timeline = place_earliest(program, sizes, budget)
    check_order(timeline)
    gathers = [e for e in timeline.program.exchanges if e.kind == "gather"]
    assert {sizes.bytes_of(e.result) for e in gathers} == {BYTES}
    return timeline, gathers


# What little fits is there until the way back.
BUDGETS = pytest.mark.parametrize(
    ("budget", "number"), [(100 * BYTES, 3), (BYTES, 5)]
)


@BUDGETS
def test_a_weight_is_gathered_again_if_there_is_no_room_to_keep_it(
    budget, number
):
    builder, inputs, _ = _there_and_back()
    timeline, gathers = _placed(builder, inputs, budget)
    assert len(gathers) == number
    levels = timeline.levels
    for operation in timeline.program.operations:
        if operation.type != "Mul":
            continue
        (used,) = [e for e in gathers if e.result is operation.inputs[1]]
        before = [
            levels[e]
            for e in gathers
            if e.given is used.given and levels[e] < levels[operation]
        ]
        # Later uses see what is gathered for them.
        assert levels[used] == max(before)
    assert max(gathered_bytes(timeline)) == min(3 * BYTES, budget)


def _turned(builder, whole):
    """Join a whole, and use its size, which each function computes again."""
    size = builder.cast(builder.shape_vector(whole), tf.int32)
    turned = builder.op("Transpose", [whole, [1, 0]], SHAPE)
    return builder.op("Reshape", [turned, size], SHAPE)


@BUDGETS
def test_what_joins_a_whole_is_computed_again_with_it(budget, number):
    builder, inputs, wholes = _there_and_back(_turned)
    timeline, gathers = _placed(builder, inputs, budget)
    inputs_of, made = (collections.defaultdict(list) for _ in range(2))
    for operation in timeline.program.operations:
        inputs_of[operation.type].append([*operation.inputs])
        made[operation.type] += operation.outputs
    results = [e.result for e in gathers]
    assert len(results) == number
    assert [given for given, _ in inputs_of["Transpose"]] == results
    assert inputs_of["Shape"] == [[result] for result in results]
    assert inputs_of["Cast"] == [[shape] for shape in made["Shape"]]
    ends = zip(made["Transpose"], made["Cast"], strict=True)
    assert inputs_of["Reshape"] == [*map(list, ends)]
    used = {whole for _, whole in inputs_of["Mul"]}
    assert used == {*made["Reshape"]} >= {*wholes}


@BUDGETS
def test_a_result_or_what_is_exchanged_may_be_a_whole(budget, number):
    builder, inputs, wholes = _there_and_back(_turned)
    unused = builder.exchange("gather", _shard(), to=TOWERS, shape=SHAPE)
    last = builder.exchange("gather", _shard(), to=TOWERS, shape=SHAPE)
    first = builder.exchange("first", _turned(builder, last))
    results = [*wholes, _turned(builder, unused), first]
    timeline, gathers = _placed(builder, inputs, budget, results=results)
    assert len(gathers) == number + 2
    assert timeline.program.results == results
    assert {*results} <= {t for e in timeline.events for t in e.made}
