"""Which gradients towers exchange together, and when."""

import collections

import pytest
import tensorflow as tf

from keras_towers.partition.ir.axes import BATCH
from keras_towers.partition.ir.builder import Builder
from keras_towers.partition.ir.program import Tensor
from keras_towers.partition.ir.tensor_sizes import TensorSizes
from keras_towers.partition.timeline import gradient_buckets
from keras_towers.partition.timeline.gradient_buckets import (
    bucket_gradients,
)
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
