"""Splitting and grouping of batches, piece by piece."""

import numpy as np
import pytest
import tensorflow as tf

from keras_towers.fit.data import batches as data

pytestmark = pytest.mark.core


def rows(count, dtype="float32"):
    return np.arange(count * 2).reshape(count, 2).astype(dtype)


def counts_of(batch, towers):
    if isinstance(batch.counts, tuple):
        return [data.batch_size_of(piece) for piece in batch.pieces]
    assert batch.counts.dtype == tf.int64
    assert batch.counts.shape == (towers,)
    return batch.counts.numpy().tolist()


@pytest.mark.parametrize("count", [1, 2, 3, 7, 8, 9, 64])
@pytest.mark.parametrize("towers", [1, 2, 3, 8])
@pytest.mark.parametrize("known", [True, False])
def test_split_gives_each_example_once(count, towers, known):
    split = tf.function(
        lambda x: data.split({"x": x, "n": x[:, 0]}, towers),
        input_signature=[tf.TensorSpec([count if known else None, 2])],
    )
    batch = split(rows(count))
    counts = counts_of(batch, towers)
    assert sum(counts) == count
    # Nearly equal, the larger ones first.
    assert counts == sorted(counts, reverse=True)
    assert max(counts) - min(counts) <= 1
    kept = [
        piece["x"][:size]
        for piece, size in zip(batch.pieces, counts, strict=True)
    ]
    np.testing.assert_array_equal(np.concatenate(kept), rows(count))
    for piece, size in zip(batch.pieces, counts, strict=True):
        np.testing.assert_array_equal(piece["x"][:, 0], piece["n"])
        if size == 0:
            # Borrowed: a tower has to have something to compute on.
            np.testing.assert_array_equal(piece["x"], rows(1))
        else:
            assert len(piece["x"]) == size


def test_split_keeps_known_sizes():
    shapes = []

    @tf.function
    def traced(x):
        batch = data.split(x, 3)
        shapes.extend(piece.shape.as_list() for piece in batch.pieces)
        assert batch.counts == ()
        return batch.pieces

    traced(tf.zeros([8, 2]))
    assert shapes == [[3, 2], [3, 2], [2, 2]]


@pytest.mark.parametrize("count", [2, 5])
def test_split_ragged(count):
    ragged = tf.RaggedTensor.from_row_lengths(
        tf.range(6), [1, 0, 3, 2, 0][:count] if count == 5 else [4, 2]
    )
    batch = data.split((ragged, rows(count)), 3)
    counts = counts_of(batch, 3)
    joined = tf.concat(
        [
            piece[0][:size]
            for piece, size in zip(batch.pieces, counts, strict=True)
        ],
        0,
    )
    assert sum(counts) == count
    assert joined.to_list() == ragged.to_list()


@pytest.mark.parametrize("count", [2, 5])
def test_split_sparse(count):
    dense = rows(count) * (rows(count) % 3 > 0)
    sparse = tf.sparse.from_dense(dense)
    batch = data.split(sparse, 3)
    counts = counts_of(batch, 3)
    assert sum(counts) == count
    parts = []
    for piece, size in zip(batch.pieces, counts, strict=True):
        assert isinstance(piece, tf.SparseTensor)
        assert piece.dense_shape.numpy().tolist() == [max(size, 1), 2]
        parts.append(tf.sparse.to_dense(piece)[:size])
    np.testing.assert_array_equal(np.concatenate(parts), dense)


def test_split_strings_and_nested_structures():
    words = tf.constant(["a", "b", "c", "d", "e"])
    batch = data.split(({"w": words, "l": [words, words]}, None), 2)
    for piece, wanted in zip(batch.pieces, (b"abc", b"de"), strict=True):
        found = piece[0]
        assert b"".join(found["w"].numpy()) == wanted
        assert b"".join(found["l"][1].numpy()) == wanted
        assert piece[1] is None


def test_split_gives_scalars_to_every_tower():
    batch = data.split((tf.constant(3.0), tf.zeros([4, 1])), 2)
    assert [float(piece[0]) for piece in batch.pieces] == [3.0, 3.0]
    assert [len(piece[1]) for piece in batch.pieces] == [2, 2]


def test_split_of_nothing_but_scalars():
    batch = data.split((tf.constant(3.0),), 2)
    assert [float(piece[0]) for piece in batch.pieces] == [3.0, 3.0]
    assert counts_of(batch, 2) == [1, 0]


@pytest.mark.parametrize(
    "structure,size",
    [
        (tf.zeros([3, 2]), 3),
        ({"b": tf.zeros([4]), "a": tf.zeros([])}, 4),
        ((None, tf.zeros([2, 1])), 2),
        (tf.zeros([]), None),
        ((), None),
    ],
)
def test_batch_size(structure, size):
    assert data.batch_size_of(structure) == size
    assert data.static_size(structure) == size


def test_static_size_is_none_where_it_is_not_known():
    @tf.function(input_signature=[tf.TensorSpec([None, 2])])
    def traced(x):
        assert data.static_size(x) is None
        return data.batch_size_of(x)

    assert traced(tf.zeros([5, 2])) == 5


@pytest.mark.parametrize("shape", [(), (2,), (2, 3)])
def test_concatenate(shape):
    pieces = [tf.fill(shape, 1.0), tf.fill(shape, 2.0)]
    joined = data.concatenate(pieces)
    wanted = np.concatenate if shape else np.stack
    np.testing.assert_array_equal(joined, wanted([p.numpy() for p in pieces]))


def test_concatenate_and_cut_sparse():
    piece = tf.sparse.from_dense([[1.0, 0.0], [0.0, 2.0]])
    joined = data.concatenate([piece, data.first_rows(piece, tf.constant(1))])
    np.testing.assert_array_equal(
        tf.sparse.to_dense(joined), [[1, 0], [0, 2], [1, 0]]
    )


def grouped(dataset, towers):
    """The groups, each as the list of its towers' own examples."""
    result = []
    for batch in data.group(dataset, towers):
        assert len(batch.pieces) == towers
        counts = batch.counts.numpy()
        pieces = [
            tf.nest.map_structure(lambda t, n=n: t[:n].numpy().tolist(), piece)
            for piece, n in zip(batch.pieces, counts, strict=True)
        ]
        for piece in batch.pieces:
            # A tower without examples has some to compute on, too.
            assert len(tf.nest.flatten(piece)[0]) > 0
        result.append(pieces)
    return result


@pytest.mark.parametrize("count", [1, 5, 7, 12])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("towers", [1, 2, 4])
@pytest.mark.parametrize("known", [True, False])
def test_group_loses_and_doubles_nothing(count, batch, towers, known):
    dataset = tf.data.Dataset.range(count).batch(batch)
    if not known:
        dataset = dataset.filter(lambda _: True)
    wanted = [b.numpy().tolist() for b in dataset]
    groups = grouped(dataset, towers)
    assert len(groups) == -(-len(wanted) // towers)
    flat = [piece for pieces in groups for piece in pieces]
    assert flat[: len(wanted)] == wanted
    assert not any(flat[len(wanted) :])


@pytest.mark.parametrize(
    "pack",
    [
        lambda x: x,
        lambda x: (x,),
        lambda x: (x, x * 2),
        lambda x: {"a": x, "b": {"c": x}},
        lambda x: ({"a": x}, (x, x)),
    ],
)
def test_group_keeps_structures(pack):
    dataset = tf.data.Dataset.range(5).batch(2).map(pack)
    towers = 2
    batches = list(dataset)
    for number, batch in enumerate(data.group(dataset, towers)):
        tf.nest.assert_same_structure(batch.pieces[0], batches[0])
        for k, count in enumerate(batch.counts):
            if count:
                tf.nest.map_structure(
                    np.testing.assert_array_equal,
                    batch.pieces[k],
                    batches[number * towers + k],
                )


def test_group_draws_every_batch_once():
    drawn = []

    def numbers():
        for number in range(5):
            drawn.append(number)
            yield [number]

    dataset = tf.data.Dataset.from_generator(
        numbers, output_signature=tf.TensorSpec([1], tf.int64)
    )
    assert len(list(data.group(dataset, 2))) == 3
    assert drawn == list(range(5))


def test_group_of_infinitely_many():
    dataset = tf.data.Dataset.range(4).batch(2).repeat()
    assert len(list(data.group(dataset, 3).take(5))) == 5
