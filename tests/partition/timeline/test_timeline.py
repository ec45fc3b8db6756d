"""When events are possible, and in which order they come."""

import tensorflow as tf

from keras_towers.partition.ir.axes import BATCH, TOWERS
from keras_towers.partition.ir.builder import Builder
from keras_towers.partition.ir.program import Tensor
from keras_towers.partition.timeline.timeline import Levels, Timeline, in_order
from tests.partition.kit import by_hand
from tests.partition.order import check_order

SHAPE = tf.TensorShape([4, 4])


def rows():
    return Tensor(tf.float32, SHAPE, BATCH)


def act(builder, type_, *inputs):
    """Add an operation without results; return it."""
    builder.add(type_, inputs, {}, [], has_effect=True)
    return builder.last


def levels_of(builder, before=()):
    """Return the levels of all events, by their types or kinds."""
    levels = Levels(dict(before))
    for event in builder.events:
        assert levels.earliest(event) == levels.place(event)
    return {_name(e): level for e, level in levels.of_events.items()}


def _name(event):
    return getattr(event, "type", None) or event.kind


def test_an_exchange_ends_a_level():
    builder, x = Builder(), rows()
    first = builder.op("Exp", [x], SHAPE)
    total = builder.exchange("sum", first)
    second = builder.op("Sub", [first, total], SHAPE)
    builder.exchange("first", builder.op("Sin", [second], SHAPE))
    builder.op("Cos", [x], SHAPE)
    wanted = {"Exp": 0, "sum": 0, "Sub": 1, "Sin": 1, "first": 1, "Cos": 0}
    assert levels_of(builder) == wanted


def test_phases_of_a_level_follow_one_another():
    builder, x = Builder(), rows()
    handle = Tensor(tf.resource, SHAPE, TOWERS, handle=1)
    written = act(builder, "AssignVariableOp", handle, x)
    builder.add("ReadVariableOp", [handle], {}, [(tf.float32, SHAPE)])
    read = builder.last
    builder.op("Exp", read.outputs, SHAPE)
    again = act(builder, "AssignAddVariableOp", handle, x)
    before = {read: [written], again: [written]}
    assert list(levels_of(builder, before).values()) == [0, 1, 1, 0]


def test_events_are_in_the_order_of_levels_and_phases():
    builder, x, whole = Builder(), rows(), Tensor(tf.float32, SHAPE)
    size = builder.axis_size(x)
    total = builder.exchange("sum", x)
    later = builder.op("Neg", [total], SHAPE)
    builder.op("Sub", [x, later], SHAPE)
    builder.exchange("first", builder.op("Sin", [x], SHAPE))
    builder.op("Fill", [builder.size_vector([size], tf.int64), whole], SHAPE)
    builder.op("Cos", [whole], SHAPE)
    levels = Levels({})
    for event in builder.events:
        levels.place(event)
    found = in_order(reversed(builder.events), levels.of_events)
    program = by_hand(builder, x, whole)
    timeline = Timeline(program, {}).reordered(found, levels.of_events)
    # Of a phase they keep their order; what is repeated is on no level.
    wanted = [["Cos", "Fill", "Sin"], ["first", "sum"]], [["Neg", "Sub"], []]
    by_level = [[[*map(_name, e)] for e in both] for both in timeline.by_level]
    assert by_level == [*wanted]
    names = [_name(event) for event in timeline.events]
    assert names == [name for both in wanted for e in both for name in e]
    check_order(timeline)
    assert {*timeline.program.events} == {*builder.events}
    assert timeline.number_of_levels == 2
    assert timeline.level_of(total) == timeline.level_of(later) == 1
    assert timeline.level_of(x) == 0


def test_an_exchange_needs_its_rows_too():
    builder, x = Builder(), rows()
    start = builder.exchange("sum", Tensor(tf.int64, tf.TensorShape([]), BATCH))
    builder.exchange("scatter", x, rows=(start, start))
    assert levels_of(builder) == {"sum": 0, "scatter": 1}
