"""When events are possible, and timelines with other inputs."""

import pytest
import tensorflow as tf

from keras_towers.partition.ir.axes import BATCH, TOWERS
from keras_towers.partition.ir.builder import Builder
from keras_towers.partition.ir.layouts import REPLICATED
from keras_towers.partition.ir.program import Tensor
from keras_towers.partition.ir.tensor_sizes import TensorSizes
from keras_towers.partition.ir.values import Value
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


def test_what_is_repeated_is_used_once_all_that_it_needs_is_computed():
    builder, handle = Builder(), Tensor(tf.resource, SHAPE, TOWERS, handle=1)
    outputs = [(tf.float32, tf.TensorShape([None, None]))]
    (written,) = builder.add("ResourceGather", [handle], {}, outputs)
    size = builder.axis_size(written)
    builder.op("Fill", [builder.size_vector([size], tf.int64), 0.0], SHAPE)
    assert levels_of(builder) == {"ResourceGather": 0, "Fill": 1}


def test_an_exchange_needs_its_rows_too():
    builder, x = Builder(), rows()
    start = builder.exchange("sum", Tensor(tf.int64, tf.TensorShape([]), BATCH))
    builder.exchange("scatter", x, rows=(start, start))
    assert levels_of(builder) == {"sum": 0, "scatter": 1}


@pytest.fixture
def chain():
    """A timeline of operations and an exchange, one after another."""
    builder, x = Builder(), rows()
    first = builder.op("Exp", [x], [None, None])
    aside = builder.op("Cos", [x], SHAPE)
    size = builder.shape_vector(first)
    last = builder.op("Reshape", [first, size], SHAPE)
    total = builder.exchange("sum", last)
    end = builder.op("Square", [total], SHAPE)
    builder.add("Assert", [aside, end], {}, [], has_effect=True)
    exp, cos, shape, reshape, exchange, square, check = builder.events
    results, before = [end, aside], {check: [exp, cos], square: [exchange]}
    program = by_hand(builder, x, results=results, before=before)
    program.values.update(
        first=Value(REPLICATED, local=first, whole=total, shape=(5, 7)),
        aside=Value(REPLICATED, local=aside),
    )
    levels = dict.fromkeys(builder.events, 0) | {square: 1, check: 1}
    waits = {reshape: [exp, cos], cos: [exp]}
    return Timeline(program, levels, waits)


def test_what_follows_other_inputs_is_new(chain):
    program, x = chain.program, chain.program.inputs.of_graph[0]
    exp, cos, shape, reshape, exchange, square, check = program.events
    other, sizes = rows(), TensorSizes(program, 1, 4)
    found, new = chain.with_inputs({exp: [other]}, sizes)
    events = found.program.events
    assert [*map(_name, events)] == [*map(_name, program.events)]
    assert new == dict(zip(program.events, events, strict=True))
    # What uses nothing of it is as before.
    assert [e for e in program.events if new[e] is e] == [cos]
    assert (exp.inputs[0], new[exp].inputs) == (x, [other])
    (made,), (size,) = new[exp].outputs, new[shape].outputs
    assert new[shape].inputs == [made]
    assert new[reshape].inputs == [made, size]
    assert new[exchange].given is new[reshape].outputs[0]
    assert new[square].inputs == [new[exchange].result]
    end, aside = new[square].outputs[0], cos.outputs[0]
    assert new[check].inputs == [aside, end]
    assert found.program.results == [end, aside]
    for event in events:
        assert all(t.operation in (None, event) for t in event.made)
    assert found.levels == {new[e]: chain.levels[e] for e in program.events}
    assert found.waits == {new[reshape]: [new[exp], cos], cos: [new[exp]]}
    before = {new[check]: [new[exp], cos], new[square]: [new[exchange]]}
    assert found.program.before == before
    values = found.program.values
    assert values["first"].local is made
    assert values["first"].whole is new[exchange].result
    assert values["aside"] is program.values["aside"]
    # Their sizes are known, too.
    found = [sizes.bytes_of(new[e].made[0]) for e in (exp, exchange, square)]
    assert found == [4 * 5 * 7, 4 * 5 * 7, 4 * 4 * 4]


def test_what_is_repeated_for_other_inputs_stands_before_them(chain):
    program, builder = chain.program, Builder()
    exp, cos, shape, reshape, *_ = program.events
    builder.shape_vector(cos.outputs[0])
    events = [*program.events, *builder.events]
    timeline = chain.reordered(events, chain.levels)
    assert timeline.program.events[-1] is builder.last
    inputs = {reshape: [exp.outputs[0], builder.last.outputs[0]]}
    found, _ = timeline.with_inputs(inputs, TensorSizes(program, 1, 4))
    check_order(found)
    assert {shape, builder.last} <= {*found.program.events}
