"""Along what a value varies, and what an exchange of it crosses."""

import pytest
import tensorflow as tf

from keras_towers.partition.ir.axes import BATCH, COLUMNS, ONCE, SHARDS, TOWERS
from keras_towers.partition.ir.builder import Builder
from keras_towers.partition.ir.program import Tensor


def given(axes):
    return Tensor(tf.float32, tf.TensorShape([4]), axes)


@pytest.mark.parametrize("columns", [ONCE, COLUMNS])
@pytest.mark.parametrize("axes", [SHARDS, BATCH])
@pytest.mark.parametrize("kind", ["sum", "gather", "first"])
def test_what_is_exchanged_varies_from_column_to_column_only(
    kind, axes, columns
):
    builder, tensor = Builder(), given(axes | columns)
    assert builder.exchange(kind, tensor).axes == columns
    assert builder.exchange(kind, tensor, to=TOWERS).axes == TOWERS | columns
    among_columns = builder.exchange("sum", given(axes | COLUMNS), over=COLUMNS)
    assert among_columns.axes == axes
    over = [exchange.over for exchange in builder.exchanges]
    assert over == [axes, axes, COLUMNS]
    owns = [exchange.is_own for exchange in builder.exchanges]
    assert owns == [False, True, False]


def test_each_knows_the_sum_before_it():
    builder = Builder()
    assert builder.exchange("before", given(BATCH)).axes == BATCH
