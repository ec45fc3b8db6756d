"""Which parts of a batch towers divide, and what a program is given of it."""

import tensorflow as tf

from keras_towers.fit.data import batches
from keras_towers.fit.data.batches import RowCheck
from keras_towers.fit.step.inputs import layouts_of
from keras_towers.partition.layouts import (
    REPLICATED,
    RowSplits,
    Sharded,
    SparseIndices,
    SparseShape,
)


def batch_of(rows):
    return {
        "dense": tf.reshape(tf.range(3 * rows), [rows, 3]),
        "none": None,
        "ragged": tf.RaggedTensor.from_row_lengths(
            tf.range(2 * rows), [2] * rows
        ),
        "scalar": tf.constant(7),
        "sparse": tf.sparse.from_dense(tf.eye(rows, 4)),
        "table": tf.zeros([rows + 2, 2]),
        "twice": tf.RaggedTensor.from_nested_row_lengths(
            tf.range(rows), [[1] * rows, [1] * rows]
        ),
    }


def found(specs):
    """The layouts of a batch, given its specs."""
    return layouts_of(specs, RowCheck().divided_leaves(specs))


def test_layouts():
    assert found(batches.spec_of(batch_of(5))) == [
        Sharded(0),
        *(Sharded(0, "leaf2"), RowSplits("leaf2")),
        REPLICATED,
        *(SparseIndices("leaf4"), Sharded(0, "leaf4"), SparseShape((4,))),
        REPLICATED,
        # Ragged rows of ragged rows are not divided.
        *(REPLICATED, REPLICATED, REPLICATED),
    ]


def test_of_unknown_sizes_all_that_has_rows_is_divided():
    specs = tf.TensorSpec([None, 3]), tf.TensorSpec([None]), tf.TensorSpec([4])
    assert found(specs) == [Sharded(0), Sharded(0), REPLICATED]
    assert found(tf.TensorSpec([])) == [REPLICATED]
