"""``schedule``: when a program computes what, without running it."""

import math

import pytest
import tensorflow as tf

from keras_towers.partition.ir.axes import BATCH
from keras_towers.partition.ir.builder import Builder
from keras_towers.partition.ir.program import Tensor
from keras_towers.partition.ir.tensor_sizes import TensorSizes
from keras_towers.partition.timeline import schedule as partition_schedule
from keras_towers.partition.timeline.kept_results import RematLimits
from keras_towers.partition.timeline.schedule import (
    compute_late,
    keep_order,
    schedule,
)
from tests.partition.deep_network import (
    LAYERS,
    SPLIT,
    WIDTH,
    deep,
    peak_bytes,
)
from tests.partition.kit import by_hand, earliest, laid_out, replicated, sharded
from tests.partition.order import check_order


def test_gradients_of_weights_are_computed_before_the_next_layer():
    """Where a tower has no more memory than that takes."""
    enough = RematLimits(10 * peak_bytes(deep()))
    assert _number_of_waits(deep(remat=enough)) == _number_of_waits(deep())
    timeline = deep(remat=RematLimits(peak_bytes(deep())))
    assert timeline.plan.recomputed == 0
    assert _number_of_waits(timeline) > _number_of_waits(deep())
    check_order(timeline)
    waits = timeline.waits.values()
    waited_for = {other.name for others in waits for other in others}
    # Those of weights, which nothing else waits for; not the last one's.
    products = [
        o
        for o in timeline.program.operations
        if o.type == "MatMul" and o.outputs[0].shape == [WIDTH, WIDTH]
    ]
    assert len(products) == LAYERS
    missing = [o.name for o in products[:-1] if o.name not in waited_for]
    # As much as may be in flight.
    assert len(missing) <= 1


def test_what_takes_memory_is_computed_when_it_is_used():
    width, layers = 512, 8

    def step(x, *weights):
        products = [
            tf.matmul(x + index, x, transpose_a=True) for index in range(layers)
        ]
        pairs = zip(weights, products, strict=True)
        return [tf.norm(weight - 0.1 * product) for weight, product in pairs]

    given = [replicated(8, width), *[replicated(width, width)] * layers]
    program = laid_out(step, *given)
    one = width * width * 4
    weights = layers * one
    before = peak_bytes(earliest(program)) - weights
    timeline = schedule(program, SPLIT)
    check_order(timeline)
    assert before >= layers * one
    assert peak_bytes(timeline) - weights < 3 * one


def levels_of(step, *types):
    """Return the levels of operations in the timeline of a step."""
    timeline = schedule(laid_out(step, sharded(-1, WIDTH)), SPLIT)
    check_order(timeline)
    found = {o.type: o for o in timeline.program.operations}
    return [timeline.levels[found[type_]] for type_ in types]


def test_what_is_used_later_is_computed_later():
    def step(x):
        mean = tf.reduce_mean(tf.sin(x), 0)
        variance = tf.reduce_mean(tf.square(x - mean), 0)
        # It takes as much memory as what is kept for it, but for the mean.
        centered = tf.negative(tf.cos(x) - mean)
        return tf.reduce_sum(centered * tf.exp(x - variance))

    assert levels_of(step, "Sin", "Square", "Exp") == [0, 1, 2]
    assert levels_of(step, "Cos", "Neg") == [2, 2]


def test_what_is_received_is_not_kept_for_later():
    def step(x):
        product = tf.matmul(x, x, transpose_a=True)
        total = tf.reduce_sum(tf.sin(x), 0)
        later = tf.reduce_sum(tf.exp(x - total), 0)
        return later + tf.reduce_max(product, 0)

    assert levels_of(step, "MatMul", "Exp", "Max") == [0, 1, 1]


def _number_of_waits(timeline):
    return sum(map(len, timeline.waits.values()))


def test_what_is_repeated_for_an_operation_is_computed_before_it():
    """A size of rows, for example, which are otherwise used later."""
    builder, x = Builder(), Tensor(tf.float32, tf.TensorShape([64, 64]), BATCH)
    late = builder.op("Exp", [x], [None, None])
    zeros = builder.op("Fill", [builder.shape_vector(late), 0.0], (64, 64))
    total = builder.exchange("sum", zeros)
    builder.op("Sub", [late, total], (64, 64))
    program = by_hand(builder, x)
    timeline = compute_late(earliest(program), TensorSizes(program, 2, 8))
    check_order(timeline)
    found = [
        timeline.levels[o]
        for o in timeline.program.operations
        if not o.is_repeated
    ]
    assert found == [0, 0, 1]


def waits(add, limit=0.0):
    """Return what operations wait for, by their names, in a program by hand."""
    builder, x = Builder(), Tensor(tf.float32, tf.TensorShape([64, 64]), BATCH)

    def product(name, other):
        builder.name = name
        return builder.op("MatMul", [x, other], (64, 64))

    add(builder, product, x)
    program = by_hand(builder, x)
    sizes, timeline = TensorSizes(program, 1, 1), earliest(program, 1, 1)
    found = keep_order(timeline, sizes, 1, limit).waits
    return {
        operation.name: [other.name for other in others]
        for operation, others in found.items()
    }


def test_what_takes_memory_waits_for_all_that_has_freed_it(monkeypatch):
    def add(builder, product, x):
        # They wait for nothing: nothing is free yet.
        first = product("first", x)
        product("frees first", first)
        second = product("second", x)
        product("frees second", second)
        product("third", x)

    # Not for the second one, which only takes memory, too.
    both = ["frees first", "frees second"]
    found = waits(add)
    assert (found["second"], found["third"]) == (both[:1], both)
    monkeypatch.setattr(partition_schedule, "_AT_A_TIME", 1)
    found = waits(add)
    assert (found["second"], found["third"]) == (both[:1], ["second", both[1]])


@pytest.mark.parametrize("limit", [2**20, math.inf])
def test_what_may_be_in_flight_is_not_waited_for(limit):
    def add(builder, product, x):
        product("frees", product("first", x))
        product("second", x)

    assert waits(add) == {"second": ["frees"]}
    assert waits(add, limit) == {}


def test_memory_is_taken_over_once_nobody_else_uses_it():
    def add(builder, product, x):
        first = product("first", x)
        product("uses it", first)
        builder.name = "takes it over"
        builder.op("Exp", [first], (64, 64))

    assert waits(add) == {"takes it over": ["uses it"]}
