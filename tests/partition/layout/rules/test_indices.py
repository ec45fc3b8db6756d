"""Indices that an array does not have, however it is divided.

What one device refuses is refused on towers, in shards and on a mesh, by the
same number; what it passes over is passed over.
"""

import contextlib
import functools
import itertools
import re

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_towers as kt
from tests.kit.meshes import layout_map, mesh_of
from tests.kit.sampling import sample_of

pytestmark = [pytest.mark.alternate, pytest.mark.usefixtures("small_shards")]

# More rows than a batch may have ids, so that they are looked up in shards.
SIZE, WIDTH, EXAMPLES = 96, 4, 7
# Keras takes -96 to -1 for the 96 rows.
BELOW = -SIZE - 1


def _scatter(name):
    def write(layer, x, ids):
        rows = tf.IndexedSlices(x, ids)
        getattr(layer.table.value, f"scatter_{name}")(rows)
        return x

    return write


def _column(ids):
    return ids[:, None]


def _numbered(x, ids):
    return tf.stack([tf.range(tf.shape(x)[0]), ids], 1)


READS = {
    "take": lambda layer, x, ids: keras.ops.take(layer.table, ids, axis=0),
    "sparse_read": lambda layer, x, ids: layer.table.value.sparse_read(ids),
    "gather": lambda layer, x, ids: tf.gather(layer.table, ids),
    "gather of columns": lambda layer, x, ids: (
        x @ tf.gather(tf.transpose(layer.table), ids, axis=1)
    ),
    "gather_nd": lambda layer, x, ids: tf.gather_nd(layer.table, _column(ids)),
    "gather of each row": lambda layer, x, ids: tf.gather(
        x @ tf.transpose(layer.table), ids, batch_dims=1
    ),
    "gather_nd of each row": lambda layer, x, ids: tf.gather_nd(
        x @ tf.transpose(layer.table), _numbered(x, ids)
    ),
    "take_along_axis": lambda layer, x, ids: keras.ops.take_along_axis(
        x @ tf.transpose(layer.table), _column(ids), axis=1
    ),
    "map_fn": lambda layer, x, ids: tf.map_fn(
        lambda k: tf.gather(layer.table, k), ids, fn_output_signature=tf.float32
    ),
    "labels": lambda layer, x, ids: (
        tf.nn.sparse_softmax_cross_entropy_with_logits(
            ids, x @ tf.transpose(layer.table)
        )
    ),
    "scatter_nd": lambda layer, x, ids: tf.scatter_nd(
        _column(ids), x, [SIZE, WIDTH]
    ),
    "add": lambda layer, x, ids: tf.tensor_scatter_nd_add(
        layer.table, _column(ids), x
    ),
    "update": lambda layer, x, ids: tf.tensor_scatter_nd_update(
        layer.table, _column(ids), x
    ),
    "in columns": lambda layer, x, ids: tf.tensor_scatter_nd_add(
        tf.zeros([WIDTH, SIZE]),
        tf.stack([tf.zeros_like(ids), ids], 1),
        tf.reduce_sum(x, 1),
    ),
    "dynamic_partition": lambda layer, x, ids: tf.concat(
        tf.dynamic_partition(x, ids, SIZE), 0
    ),
}
WRITES = {
    f"scatter_{name}": _scatter(name)
    for name in ("add", "sub", "max", "min", "update")
}
# Negative numbers are no segments, and are passed over.
SEGMENTS = {
    "segment_sum": lambda layer, x, ids: tf.math.unsorted_segment_sum(
        x, ids, SIZE
    ),
    "segment_max": lambda layer, x, ids: tf.math.unsorted_segment_max(
        x, ids, SIZE
    ),
}
OPERATIONS = {**READS, **WRITES, **SEGMENTS}


class Indexing(keras.Model):
    """A model that uses a table by the ids that it gets with its features."""

    def __init__(self, operation):
        super().__init__(name="indexing")
        self._operation = operation
        self.scale = self.add_weight(shape=(), initializer="ones", name="scale")
        self.table = self.add_weight(
            shape=(SIZE, WIDTH), initializer="ones", name="table"
        )

    def call(self, inputs):
        x, ids = inputs
        found = self._operation(self, x * self.scale, ids)
        # The gradient waits for what is found, and so for its error.
        return keras.ops.sum(keras.ops.square(found))


def _train(operation, ids, scope, **options):
    """Train on a batch; return the loss and the table."""
    model = Indexing(operation)
    model.compile("sgd", lambda y, found: keras.ops.mean(found), **options)
    x = np.linspace(0, 1, EXAMPLES * WIDTH, dtype="float32")
    batch = x.reshape(EXAMPLES, WIDTH), np.array(ids, "int32")
    with scope:
        loss = model.train_on_batch(batch, np.zeros((EXAMPLES, 1)))
    return np.append(np.ravel(model.table), [loss, model.scale])


def _mesh(*axes):
    mesh = mesh_of(2, 2, ("a", "b"))
    return kt.ModelParallelStrategy(layout_map(mesh, {".*table": axes}))


WAYS = {
    "towers": lambda: kt.TowerStrategy(3),
    "shards": lambda: kt.TowerStrategy(3, weights="sharded"),
    "columns": lambda: _mesh("b", None),
    "columns of the table": lambda: _mesh(None, "b"),
    "both": lambda: _mesh("b", "a"),
}


def _ids_with(bad):
    return [0, 5, 95, 50, bad, 31, 64]


@functools.cache
def _error_of(name, bad, make_scope):
    """Return the error of a step with an index that the table does not have."""
    while True:
        with pytest.raises(tf.errors.OpError) as caught:
            _train(OPERATIONS[name], _ids_with(bad), make_scope())
        if not isinstance(caught.value, tf.errors.CancelledError):
            break
        # Of two calls TensorFlow may report the one that the other has ended.
        assert "tower or rank failed first" in str(caught.value.__notes__)
    assert isinstance(caught.value, tf.errors.InvalidArgumentError)
    return str(caught.value)


# An operation looks both ways, and is divided in each way.
_REFUSED = [
    (name, bad, way)
    for name, (way, bad) in itertools.product(
        OPERATIONS,
        [
            *(("shards", SIZE), ("columns of the table", SIZE), ("both", SIZE)),
            *(("towers", BELOW), ("columns", BELOW)),
        ],
    )
    if bad > 0 or name not in SEGMENTS
]


@pytest.mark.parametrize(("name", "bad", "way"), sample_of(_REFUSED, 8))
def test_what_one_device_refuses_is_refused(name, bad, way):
    one = _error_of(name, bad, contextlib.nullcontext)
    many = _error_of(name, bad, WAYS[way])
    for number in (bad, SIZE):
        named = re.compile(rf"(?<!\d){number}(?!\d)")
        assert bool(named.search(one)) <= bool(named.search(many)), many


@pytest.mark.parametrize("name", SEGMENTS)
@pytest.mark.parametrize("way", WAYS)
def test_what_one_device_passes_over_is_passed_over(name, way):
    ids = _ids_with(-1)
    one = _train(SEGMENTS[name], ids, contextlib.nullcontext())
    many = _train(SEGMENTS[name], ids, WAYS[way]())
    np.testing.assert_allclose(many, one, rtol=1e-5)


@pytest.mark.parametrize("bad", [SIZE, SIZE + 9, BELOW])
@pytest.mark.parametrize("way", [way for way in WAYS if way != "towers"])
def test_with_xla_the_nearest_row_is_looked_up(bad, way):
    numbers = np.arange(SIZE * WIDTH, dtype="float32").reshape(SIZE, WIDTH)

    def train(scope):
        model = Indexing(READS["take"])
        model.table.assign(numbers)
        model.compile(loss="mse", jit_compile=True)
        x = np.ones((EXAMPLES, WIDTH), "float32")
        ids = np.array(_ids_with(bad), "int32")
        with scope:
            return model.test_on_batch((x, ids), np.zeros((EXAMPLES, 1)))

    one = train(contextlib.nullcontext())
    np.testing.assert_allclose(train(WAYS[way]()), one, rtol=1e-5)
