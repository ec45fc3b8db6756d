"""Which gradients towers exchange together, and when."""

import collections

import pytest
import tensorflow as tf

from keras_towers.partition.ir.axes import BATCH, ONCE, TOWERS
from keras_towers.partition.ir.builder import Builder
from keras_towers.partition.ir.program import Tensor
from keras_towers.partition.ir.tensor_sizes import TensorSizes
from keras_towers.partition.timeline import gradient_buckets
from keras_towers.partition.timeline.gradient_buckets import (
    bucket_gradients,
    divide_levels,
)
from keras_towers.partition.timeline.timeline import Timeline
from tests.partition.deep_network import LAYERS, WIDTH, deep
from tests.partition.kit import by_hand, earliest
from tests.partition.order import check_order

SHAPE = tf.TensorShape([4, 4])
BYTES = 4 * 4 * 4
TYPES = "Exp", "Sin", "Cos", "Tan", "Neg", "Square"


def rows():
    return Tensor(tf.float32, SHAPE, BATCH)


@pytest.mark.parametrize("check", [False, True])
@pytest.mark.parametrize(
    ("number", "bucket", "most", "begins"),
    [
        (6, 2 * BYTES, 24, ["Cos", "Neg"]),
        (6, BYTES, 2, ["Tan"]),
        (4, 2 * BYTES, 24, ["Cos"]),
        (3, 2 * BYTES, 24, []),
    ],
)
def test_a_level_begins_where_a_bucket_is_full(
    number, bucket, most, begins, check, monkeypatch
):
    monkeypatch.setattr(gradient_buckets, "_BUCKET_BYTES", bucket)
    monkeypatch.setattr(gradient_buckets, "_MOST_BUCKETS", most)
    builder, x = Builder(), rows()
    # What is no gradient fills none.
    builder.exchange("sum", builder.op("Log", [x], SHAPE))
    for type_ in TYPES[:number]:
        builder.gradient = type_
        builder.exchange("sum", builder.op(type_, [x], SHAPE))
    if check:
        # A step that fails then updates nothing.
        builder.add("CheckNumerics", [x], {}, [], has_effect=True)
    program = by_hand(builder, x)
    found = bucket_gradients(earliest(program), TensorSizes(program, 1, 4))
    assert [o.type for o in found] == ([] if check else begins)


# Those of several micro-batches are added up first.
@pytest.mark.parametrize(("parts", "levels"), [(1, 4), (2, 1)])
def test_gradients_are_exchanged_in_buckets(parts, levels, monkeypatch):
    bucket = LAYERS // 4 * WIDTH * WIDTH * 4
    monkeypatch.setattr(gradient_buckets, "_BUCKET_BYTES", bucket)
    timeline = deep.__wrapped__(parts=parts)
    check_order(timeline)
    exchanges = timeline.program.exchanges
    found = collections.Counter(map(timeline.levels.get, exchanges))
    assert found == dict.fromkeys(range(levels), LAYERS // levels)


def levels(builder, begins, *inputs, **options):
    """Return the levels of operations, and those of exchanges."""
    program = by_hand(builder, *inputs, **options)
    begins = [tensor.operation for tensor in begins]
    # They follow from the order of events, whatever they were.
    found = divide_levels(Timeline(program, {}), begins).levels
    exchanges = [found[e] for e in program.exchanges]
    return {o.type: found[o] for o in program.operations}, exchanges


def test_what_is_computed_from_rows_follows_on_the_level_that_begins():
    builder, x = Builder(), rows()
    copy, whole = Tensor(tf.float32, SHAPE, TOWERS), Tensor(tf.float32, SHAPE)
    first = builder.op("Exp", [x], SHAPE)
    second = builder.op("Sin", [first], SHAPE)
    builder.op("Cos", [x], SHAPE)
    builder.op("Square", [copy], SHAPE)
    builder.op("Neg", [whole], SHAPE)
    total = builder.exchange("sum", second)
    builder.op("Sqrt", [total], SHAPE)
    found, _ = levels(builder, [second], x, copy, whole)
    wanted = {"Exp": 0, "Sin": 1, "Cos": 1, "Square": 0, "Neg": 0, "Sqrt": 2}
    assert found == wanted


def test_inputs_of_towers_are_gathered_as_late_as_before():
    builder, x = Builder(), rows()
    shard = Tensor(tf.float32, SHAPE, TOWERS)
    builder.exchange("gather", shard, to=TOWERS)
    late = builder.op("Sin", [x], SHAPE)
    builder.exchange("sum", late)
    for to in (TOWERS, ONCE):
        builder.exchange("gather", shard, to=to)
    _, exchanges = levels(builder, [late], x, shard)
    assert exchanges == [0, 1, 1, 0]


def test_effects_keep_their_order():
    builder, x = Builder(), rows()
    late = builder.op("Sin", [x], SHAPE)
    builder.add("CheckNumerics", [late], {}, [], has_effect=True)
    first = builder.last
    builder.add("Assert", [x], {}, [], has_effect=True)
    before = {builder.last: [first]}
    found, _ = levels(builder, [late], x, before=before)
    assert found == {"Sin": 1, "CheckNumerics": 1, "Assert": 1}
