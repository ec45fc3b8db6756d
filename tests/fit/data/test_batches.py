"""A global batch is split into parts, some maybe without rows."""

import numpy as np
import pytest
import tensorflow as tf

import keras_towers as kt
from keras_towers.fit.data import batches
from keras_towers.fit.data.batches import RowCheck

SPARSE = tf.sparse.from_dense([[0, 1], [0, 0], [2, 3], [4, 0], [0, 5]])


def structure():
    """A batch of five examples, with a table beside them."""
    return {
        "dense": tf.range(5)[:, None],
        "ragged": tf.RaggedTensor.from_row_lengths(
            tf.range(7), [2, 0, 1, 1, 3]
        ),
        "nothing": None,
        "scalar": tf.constant(3.0),
        "table": tf.zeros([6, 2]),
    }


def listed(tensor):
    is_ragged = isinstance(tensor, tf.RaggedTensor)
    return tensor.to_list() if is_ragged else tensor.numpy().tolist()


@pytest.mark.parametrize("towers", [1, 2, 3, 7])
@pytest.mark.parametrize("traced", [False, True])
def test_parts_are_the_rows_of_the_batch_in_order(towers, traced):
    batch = structure()

    def parts():
        return list(batches.split(batch, towers).pieces)

    pieces = tf.function(parts)() if traced else parts()
    sizes = [len(p) for p in np.array_split(np.arange(5), towers)]
    assert [p["dense"].shape[0] for p in pieces] == sizes
    for name in "dense", "ragged":
        joined = tf.concat([p[name] for p in pieces], 0)
        assert listed(joined) == listed(batch[name])
    for piece in pieces:
        assert piece["nothing"] is None
        assert float(piece["scalar"]) == 3
        assert piece["table"].shape == (6, 2)


def test_parts_of_a_sparse_tensor_have_its_columns():
    pieces = batches.split((SPARSE,), 7).pieces
    assert [p.shape[0] for (p,) in pieces] == [1, 1, 1, 1, 1, 0, 0]
    assert {p.dense_shape.numpy()[1] for (p,) in pieces} == {2}
    rows = tf.sparse.concat(0, [p for (p,) in pieces])
    np.testing.assert_array_equal(
        tf.sparse.to_dense(rows), tf.sparse.to_dense(SPARSE)
    )


def test_a_process_gets_its_towers_parts():
    batch = np.arange(11)
    found = batches.split(batch, 4, first=2, towers=2)
    assert (found.total, found.start) == (11, 6)
    assert [p.numpy().tolist() for p in found.pieces] == [[6, 7, 8], [9, 10]]
    assert batches.counts_of(found) == [3, 2]


def test_sizes_that_are_not_known_before():
    rows = RowCheck()

    @tf.function(input_signature=[tf.TensorSpec([None]), tf.TensorSpec([None])])
    def parts(x, y):
        found = batches.split((x, y), 3, rows=rows)
        return found.total, batches.counts_of(found)

    total, counts = parts(tf.zeros(7), tf.zeros(7))
    assert int(total) == 7 and [int(c) for c in counts] == [3, 2, 2]
    with pytest.raises(tf.errors.OpError, match="different numbers of rows"):
        parts(tf.zeros(7), tf.zeros(6))


def test_parts_that_have_been_seen_to_have_other_rows():
    rows = RowCheck()
    assert rows.divided_leaves((tf.zeros(7), tf.zeros(7))) == [True, True]
    assert rows.see((tf.zeros(7), tf.zeros(6))) == {"y"}
    assert rows.divided_leaves((tf.zeros(7), tf.zeros(7))) == [True, False]
    # Batches with other parts are others.
    assert rows.divided_leaves({"x": tf.zeros(7), "y": tf.zeros(7)}) == [
        True,
        True,
    ]


def test_a_towers_own_batch_needs_as_many_rows_in_all_parts():
    config = kt.TowerStrategy(1, batches="each")._config
    batch = batches.TowerBatch(((tf.zeros(7), tf.zeros(6)),))
    with pytest.raises(kt.TowerError, match="x has 7, y has 6"):
        batches.as_tower_batch(config, batch, RowCheck())


def test_a_batch_without_rows_counts_as_one_example():
    found = batches.split((tf.constant(3.0),), 2)
    assert found.total == 1
    assert [float(piece[0]) for piece in found.pieces] == [3.0, 3.0]


@pytest.mark.parametrize("count", [6, 5, 1])
def test_batches_of_towers_own(count):
    """The last group has fewer batches than there are towers."""
    data = tf.data.Dataset.range(4 * count).batch(4)
    groups = list(batches.group(data, 3))
    rows = [p.numpy().tolist() for g in groups for p in g.pieces]
    assert sum(rows, []) == list(range(4 * count))
    assert len(groups) == -(-count // 3)
    assert [len(r) for r in rows] == [4] * count + [0] * (-count % 3)


def test_the_spec_of_the_batch_that_parts_are_of():
    batch = {"x": tf.zeros([2, 3]), "n": tf.constant(1), "none": None}
    spec = batches.spec_of(batch, any_size=True)
    assert spec["x"] == tf.TensorSpec([None, 3])
    assert spec["n"] == tf.TensorSpec([], tf.int32)
    assert spec["none"] is None


@pytest.mark.parametrize("towers", [1, 3])
def test_one_device_gets_what_towers_have_together(towers):
    config = kt.TowerStrategy(towers)._config
    batch = (tf.range(8), SPARSE, tf.constant(2.0))
    assert batches.as_one_batch(config, batch) is batch
    batch = (tf.range(5), SPARSE, tf.constant(2.0))
    pieces = batches.split(batch, towers)
    x, sparse, scalar = batches.as_one_batch(config, pieces)
    np.testing.assert_array_equal(x, batch[0])
    np.testing.assert_array_equal(
        tf.sparse.to_dense(sparse), tf.sparse.to_dense(SPARSE)
    )
    assert float(scalar) == 2
