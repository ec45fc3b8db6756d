"""Which gradients towers exchange together, and when."""

import collections

import pytest
import tensorflow as tf

from keras_towers.partition import gradient_buckets
from keras_towers.partition.axes import BATCH, TOWERS
from keras_towers.partition.builder import Builder
from keras_towers.partition.gradient_buckets import (
    bucket_gradients,
    divide_levels,
)
from keras_towers.partition.program import Tensor
from keras_towers.partition.tensor_sizes import TensorSizes
from tests.partition.deep_network import LAYERS, WIDTH, check_order, deep
from tests.partition.kit import by_hand

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
    found = bucket_gradients(program, TensorSizes(program, 1, 4))
    assert [o.type for o in found] == ([] if check else begins)


# Those of several micro-batches are added up first.
@pytest.mark.parametrize(("parts", "levels"), [(1, 4), (2, 1)])
def test_gradients_are_exchanged_in_buckets(parts, levels, monkeypatch):
    bucket = LAYERS // 4 * WIDTH * WIDTH * 4
    monkeypatch.setattr(gradient_buckets, "_BUCKET_BYTES", bucket)
    program = deep.__wrapped__(parts=parts)
    check_order(program)
    found = collections.Counter(e.level for e in program.exchanges)
    assert found == dict.fromkeys(range(levels), LAYERS // levels)


def levels(builder, begins, *inputs, **options):
    """Return the levels of operations, and the exchanges."""
    program = by_hand(builder, *inputs, **options)
    divided = divide_levels(program, [t.operation for t in begins])
    return {o.type: o.level for o in divided.operations}, divided.exchanges


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
    late = builder.op("Sin", [x], SHAPE)
    builder.exchange("sum", late)
    for least, to in ((0, TOWERS), (1, TOWERS), (1, frozenset())):
        builder.exchange("gather", shard, to=to, least=least)
    _, exchanges = levels(builder, [late], x, shard)
    assert [e.level for e in exchanges] == [1, 0, 1, 0]


def test_effects_keep_their_order():
    builder, x = Builder(), rows()
    late = builder.op("Sin", [x], SHAPE)
    builder.add("CheckNumerics", [late], {}, [], has_effect=True)
    builder.add("Assert", [x], {}, [], has_effect=True)
    found, _ = levels(builder, [late], x)
    assert found == {"Sin": 1, "CheckNumerics": 1, "Assert": 1}


def test_a_variable_and_its_copies_are_used_in_order():
    builder, x = Builder(), rows()
    handle, other = (Tensor(tf.resource, SHAPE, handle=1) for _ in range(2))
    copy = Tensor(tf.resource, SHAPE, TOWERS, handle=1)
    late = builder.op("Sin", [x], SHAPE)
    builder.add("AssignVariableOp", [copy, late], {}, [], has_effect=True)
    # What runs once comes before the updates of its level.
    for type_, read in (("ReadVariableOp", handle), ("VariableShape", other)):
        builder.add(type_, [read], {}, [(tf.float32, SHAPE)], least=1)
    builder.add("AssignAddVariableOp", [copy, x], {}, [], has_effect=True)
    given, copies = (handle, other, x), {0: copy}
    found, _ = levels(builder, [late], *given, copies=copies)
    assert found == {
        "Sin": 1,
        "AssignVariableOp": 1,
        "AssignAddVariableOp": 1,
        "ReadVariableOp": 2,
        "VariableShape": 0,
    }
