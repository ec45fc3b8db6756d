"""Sparse rows of examples, against one device."""

import dataclasses

import numpy as np
import pytest
import tensorflow as tf

from keras_towers.partition.ir.layouts import (
    Sharded,
    SparseIndices,
    SparseShape,
)
from tests.partition import kit
from tests.partition.layout_list import as_listed

pytestmark = pytest.mark.alternate

# Towers without entries, and without examples.
TOWERS = ((5, 2), (2, 0, 3), (1, 1, 4), (0, 1, 0))
_Y = kit.sharded(-1, 4)
_TABLE = kit.replicated(6, 4)
_WIDTH = 6


@dataclasses.dataclass(frozen=True)
class _Piece(kit.Input):
    """One of the three tensors of sparse rows; all draw the same rows."""

    which: int = 0

    def draw(self, count, generator):
        dense = np.random.default_rng([count, 7]).uniform(
            -1, 1, (count, _WIDTH)
        )
        dense = np.where(np.abs(dense) > 0.7, dense, 0).astype("float32")
        return dense

    def split(self, whole, counts):
        ends = np.cumsum(counts)[:-1]
        return [self.for_one_device(own) for own in np.split(whole, ends)]

    def for_one_device(self, dense):
        at = np.argwhere(dense).astype("int64")
        return (at, dense[tuple(at.T)], np.array(dense.shape, "int64"))[
            self.which
        ]


def _sparse(name="s"):
    return (
        _Piece(SparseIndices(name), (-1, 2), "int64", which=0),
        _Piece(Sharded(0, name), (-1,), "float32", which=1),
        _Piece(SparseShape((_WIDTH,)), (2,), "int64", which=2),
    )


_STEPS = {
    "product": lambda x, y, w: tf.sparse.sparse_dense_matmul(x, w),
    "over examples": lambda x, y, w: tf.sparse.sparse_dense_matmul(
        x, y, adjoint_a=True
    ),
    "dense": lambda x, y, w: tf.sparse.to_dense(x),
    "scaled": lambda x, y, w: (
        tf.sparse.sparse_dense_matmul(x, w)
        / tf.cast(tf.size(x.values) + 1, tf.float32)
    ),
    "from dense": lambda x, y, w: tf.sparse.sparse_dense_matmul(
        tf.sparse.from_dense(tf.where(y > 0, y, 0.0)), w[:4]
    ),
    "by rows": lambda x, y, w: tf.math.unsorted_segment_sum(
        x.values, x.indices[:, 0], tf.shape(y, tf.int64)[0]
    ),
}


def _of_rows(step):
    """The gradients, too, of a step of sparse rows, and their shape."""

    def function(at, entries, shape, y, w):
        return step(tf.SparseTensor(at, entries, shape), y, w), shape

    return kit.with_gradients(function)


def _filled(x, y, w):
    """As in a product of a dense layer of Keras, and as in look-ups."""
    x, is_empty = tf.sparse.fill_empty_rows(x, 0.5 + w[0, 0])
    numbers = tf.cast(tf.abs(x.values) * 5, tf.int64)
    found = tf.nn.embedding_lookup_sparse(w, x.with_values(numbers), x)
    alike = tf.raw_ops.SparseSegmentMean(
        data=w, indices=numbers, segment_ids=x.indices[:, 0]
    )
    product = tf.sparse.sparse_dense_matmul(x, w)
    return found, alike, product, is_empty, x.indices


def _put_in_order(at, entries, shape):
    """Sums over rows have no rule, and are computed once."""
    found = tf.sparse.reorder(tf.SparseTensor(at, entries, shape))
    loss = tf.reduce_sum(tf.tanh(tf.sparse.to_dense(found)))
    grads = tf.gradients(loss, entries)
    return found.indices, grads, tf.sparse.reduce_sum(found, 1)


def _of_other_entries(at, entries, shape, other_at, others, other_shape):
    """Products by entries of both would be of other rows."""
    one = tf.SparseTensor(at, entries, shape)
    two = tf.SparseTensor(other_at, others[::-1], other_shape)
    table = tf.ones([_WIDTH, 2])
    return (
        tf.sparse.sparse_dense_matmul(one, table)
        + tf.sparse.sparse_dense_matmul(two, table),
        tf.gather(others, tf.where(entries > 0)[:, 0]),
        entries * others,
    )


def _of_other_rows(at, entries, shape, y):
    """The dense shape has more rows, or other axes, than the indices."""
    more = tf.SparseTensor(at, entries, shape + [3, 0])
    turned = [tf.reverse(t, [k]) for t, k in ((at, 1), (shape, 0))]
    turned = tf.SparseTensor(turned[0], entries, turned[1])
    return (
        tf.sparse.to_dense(more),
        tf.sparse.sparse_dense_matmul(more, tf.ones([_WIDTH, 2])),
        tf.sparse.sparse_dense_matmul(turned, y),
        tf.sparse.to_dense(tf.sparse.transpose(more)),
    )


def _of_one_value(at, entries, shape):
    return tf.raw_ops.SparseToDense(
        sparse_indices=at,
        output_shape=shape,
        sparse_values=2.0,
        default_value=1.0,
    )


SPARSE = {
    **{
        name: (_of_rows(step), *_sparse(), _Y, _TABLE)
        for name, step in {**_STEPS, "rows that are filled": _filled}.items()
    },
    "put in order": (_put_in_order, *_sparse()),
    "two with other entries": (_of_other_entries, *_sparse("a"), *_sparse("b")),
    "another number of rows": (_of_other_rows, *_sparse(), _Y),
    "the same value for all": (_of_one_value, *_sparse()),
}
test_sparse_rows = as_listed("sparse", SPARSE, towers=TOWERS)
