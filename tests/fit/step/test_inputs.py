"""Which parts of a batch towers divide, and what a program is given of it."""

import pytest
import tensorflow as tf

from keras_towers import compat
from keras_towers.fit.data import batches
from keras_towers.fit.step.inputs import DividedBatch, layouts_of
from keras_towers.partition import partitioned
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


def test_layouts():
    found = layouts_of(batches.spec_of(batch_of(5)))
    assert found == [
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
    assert layouts_of(specs) == [Sharded(0), Sharded(0), REPLICATED]
    assert layouts_of(tf.TensorSpec([])) == [REPLICATED]


@pytest.mark.parametrize("first", [True, False])
def test_what_a_program_is_given(first):
    # Of the second one, the trace does not know the width.
    batch = tf.range(5)[:, None], tf.ones([5, 2]), tf.constant(3.0)
    specs = [
        tf.TensorSpec([None, 1], tf.int32),
        tf.TensorSpec([None, None]),
        tf.TensorSpec([]),
    ]
    pieces = batches.split(batch, 6, first=0 if first else 3, towers=3)
    divided = DividedBatch(
        pieces, tuple(specs), layouts_of(tuple(specs)), pieces
    )
    graph = compat.func_graph_from_py_func(
        "step", lambda x, y, z: tf.reduce_sum(y, 0) * z, specs, {}
    )
    program = partitioned(graph, divided.layouts, graph.outputs)
    inputs = program.inputs
    common, towers = divided.values_of(inputs, first)
    x, y, z = inputs.of_graph
    assert common[z] is batch[2] and x not in common
    assert int(common[inputs.total]) == 5
    assert {name: int(common[t]) for name, t in inputs.sizes.items()} == {
        "1.1": 2
    }
    rows = [own[x].numpy().ravel().tolist() for own in towers]
    assert rows == ([[0], [1], [2]] if first else [[3], [4], []])
    assert [own[y].shape[0] for own in towers] == [len(r) for r in rows]
    starts = [int(own[inputs.start]) for own in towers]
    assert starts == ([0, 1, 2] if first else [3, 4, 5])
    firsts = [bool(own[inputs.is_first]) for own in towers]
    assert firsts == [first, False, False]
