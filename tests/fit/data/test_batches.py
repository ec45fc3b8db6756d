"""Splitting and grouping of batches, piece by piece."""

import itertools

import numpy as np
import pytest
import tensorflow as tf

from keras_towers.fit.data import batches as data

pytestmark = pytest.mark.core


def rows(count):
    return np.arange(count * 2).reshape(count, 2).astype("float32")


def counts_of(batch, towers):
    if isinstance(batch.counts, tuple):
        return [data.batch_size_of(piece) for piece in batch.pieces]
    assert batch.counts.dtype == tf.int64
    assert batch.counts.shape == (towers,)
    return batch.counts.numpy().tolist()


@pytest.mark.parametrize("towers", [1, 3])
@pytest.mark.parametrize("known", [True, False])
def test_split_gives_each_example_once(towers, known):
    shapes = []

    def split(x):
        batch = data.split({"x": x, "n": x[:, 0]}, towers)
        shapes.append([piece["x"].shape[0] for piece in batch.pieces])
        return batch

    unknown = tf.TensorSpec([None, 2])
    split = tf.function(split, None if known else [unknown])
    for count in (1, 2, 7, 8):
        batch = split(tf.constant(rows(count)))
        counts = counts_of(batch, towers)
        assert sum(counts) == count
        # Nearly equal, the larger ones first.
        assert counts == sorted(counts, reverse=True)
        assert max(counts) - min(counts) <= 1
        if known and count >= towers:
            assert batch.counts == ()
            assert shapes[-1] == counts
        kept = []
        for piece, size in zip(batch.pieces, counts, strict=True):
            np.testing.assert_array_equal(piece["x"][:, 0], piece["n"])
            kept.append(piece["x"][:size])
            # One is borrowed: a tower has to have something to compute on.
            np.testing.assert_array_equal(
                piece["x"], kept[-1] if size else rows(1)
            )
        np.testing.assert_array_equal(np.concatenate(kept), rows(count))


def test_split_of_nothing_but_scalars():
    batch = data.split((tf.constant(3.0),), 2)
    assert [float(piece[0]) for piece in batch.pieces] == [3.0, 3.0]
    assert counts_of(batch, 2) == [1, 0]


def test_concatenate_and_cut():
    for shape in ((), (2, 3)):
        pieces = [np.full(shape, value) for value in (1.0, 2.0)]
        joined = data.concatenate([tf.constant(piece) for piece in pieces])
        wanted = np.concatenate if shape else np.stack
        np.testing.assert_array_equal(joined, wanted(pieces))
    piece = tf.sparse.from_dense([[1.0, 0.0], [0.0, 2.0]])
    joined = data.concatenate([piece, data.first_rows(piece, tf.constant(1))])
    np.testing.assert_array_equal(
        tf.sparse.to_dense(joined), [[1, 0], [0, 2], [1, 0]]
    )


@pytest.mark.parametrize("towers", [1, 4])
def test_group_loses_and_doubles_nothing(towers):
    for count, batch in itertools.product((1, 7), (1, 3)):
        drawn = []

        def numbers(count=count, drawn=drawn):
            for number in range(count):
                drawn.append(number)
                yield number

        dataset = tf.data.Dataset.from_generator(
            numbers, output_signature=tf.TensorSpec([], tf.int64)
        ).batch(batch)
        dataset = dataset.map(
            lambda x: (
                {"a": x, "b": {"c": (x, tf.strings.as_string(x))}},
                2 * x,
            )
        )
        wanted = list(dataset)
        drawn.clear()
        groups = list(data.group(dataset, towers))
        # Every one is drawn once.
        assert drawn == list(range(count))
        assert len(groups) == -(-len(wanted) // towers)
        pieces = [piece for group in groups for piece in group.pieces]
        counts = np.concatenate([group.counts for group in groups])
        assert len(pieces) == len(groups) * towers
        assert not counts[len(wanted) :].any()
        for piece, other in zip(pieces, wanted, strict=False):
            tf.nest.map_structure(np.testing.assert_array_equal, piece, other)
        for piece in pieces:
            # A tower without examples has some to compute on, too.
            assert len(tf.nest.flatten(piece)[0]) > 0
    endless = tf.data.Dataset.range(4).batch(2).repeat()
    assert len(list(data.group(endless, towers).take(5))) == 5
