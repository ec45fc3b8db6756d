"""State that steps keep: variables, metrics, tables and queues."""

import keras
import tensorflow as tf
from keras import layers, ops

from tests.partition.cases import table as t


@t.step(seen=keras.metrics.Mean)
def metric_read_in_the_step(m, x, y):
    p = m.net(x)
    m.seen.update_state(tf.abs(y - p))
    return t.mse(y, p) * m.seen.result()


@t.step(kept=t.state(5))
def table_of_the_examples(m, x, y):
    """An embedding of each example is kept under its number."""
    at = tf.cast(tf.abs(x[:, :1]) * 10, tf.int32) % 5
    new = tf.reduce_mean(x, 1)
    m.kept.assign(tf.tensor_scatter_nd_update(m.kept, at, new))
    return t.default_loss(m, x, y)


class Decorrelated(layers.Layer):
    """Has a loss, a metric and a moving average of its own."""

    def __init__(self):
        super().__init__()
        self.kept = keras.metrics.Mean("off")
        self.seen = self.add_weight(shape=(4, 4), trainable=False)

    def call(self, x, training=False):
        n = ops.cast(ops.shape(x)[0], x.dtype)
        c = ops.matmul(ops.transpose(x - ops.mean(x, 0)), x) / n
        if training:
            self.seen.assign(0.9 * self.seen + 0.1 * c)
            self.kept.update_state(c)
        self.add_loss(0.1 * ops.sum(ops.square(ops.triu(c, 1))))
        return x - ops.matmul(x, self.seen) * 0.1


@t.compiled_model()
def added_by_layers():
    hidden = layers.Dense(4, "tanh")
    return t.compiled(t.stack(hidden, Decorrelated(), layers.Dense(1)))


def _table():
    return tf.lookup.experimental.MutableHashTable(tf.int64, tf.float32, 0.0)


@t.step(table=_table)
def examples_in_a_table(m, x, y):
    m.table.insert(tf.cast(x[:, 0] > 0, tf.int64), x[:, 1])
    factor = tf.reshape(m.table.lookup(tf.ones([1], tf.int64)), [])
    return t.default_loss(m, x, y) * factor


def _table_of_pairs():
    table = tf.lookup.experimental.DenseHashTable(
        tf.int32, tf.float32, 0.5, empty_key=[-1, -1], deleted_key=[-2, -2]
    )
    table.insert(tf.constant([[1, 1], [0, 1]]), [3.0, 4.0])
    return table


@t.step(table=_table_of_pairs)
def pairs_in_a_table(m, x, y):
    found = m.table.lookup(tf.cast(x[:, :2] > 0, tf.int32))
    return t.default_loss(m, x, y * found[:, None])


def _unlabelled():
    data = tf.data.Dataset.from_tensor_slices(t.normal(t.WIDTH))
    return iter(data.repeat().batch(11))


@t.step(unlabelled=_unlabelled)
def unlabelled_rows_of_an_iterator(m, x, y):
    """The step draws its own batches from a second data set."""
    others = m.net(next(m.unlabelled))
    return t.default_loss(m, x, y) + 0.1 * tf.reduce_mean(others**2)


@t.step(queue=lambda: tf.queue.FIFOQueue(100, ["float32"], [[t.WIDTH]]))
def replayed_by_a_queue(m, x, y):
    with tf.control_dependencies([m.queue.enqueue_many([x])]):
        old = m.queue.dequeue_many(1)
    return t.default_loss(m, x, y) + 0.1 * tf.reduce_mean(m.net(old) ** 2)


def _bank():
    return tf.Variable(tf.zeros([1, 3]), trainable=False, shape=[None, 3])


@t.step(net=t.mlp(5, 3), bank=_bank)
def bank_whose_rows_grow(m, x, y):
    """Each batch is appended to a variable of unknown length."""
    z, old = m.net(x), m.bank.read_value()
    near = tf.matmul(z, old, transpose_b=True)
    m.bank.assign(tf.concat([old, tf.stop_gradient(z)], 0)[-30:])
    kept = tf.cast(t.rows(m.bank.read_value()), tf.float32)
    return t.mse(y, z[:, :1]) + tf.reduce_mean(tf.nn.softplus(near)) / kept


@t.step(seen=lambda: tf.Variable(tf.zeros([9, t.WIDTH]), trainable=False))
def parts_of_a_tensorflow_variable(m, x, y):
    """Assigned slices, and rows that are written by their numbers."""
    m.seen[3:5].assign(tf.concat([x, x], 0)[:2])
    m.seen.scatter_nd_add([[1], [2]], tf.ones([2, t.WIDTH]))
    m.seen.scatter_nd_update(tf.range(7, 9)[:, None], tf.ones([2, t.WIDTH]))
    first = m.seen.gather_nd([[1], [3]])
    return t.default_loss(m, x + m.seen[4], y) + tf.reduce_mean(m.net(first))


@t.step()
def gradient_of_a_python_function(m, x, y):
    ranked = tf.py_function(
        lambda z: tf.sort(z, 0) ** 2, [m.net(x)], tf.float32
    )
    return t.mse(y, tf.ensure_shape(ranked, [None, 1]))


@t.step()
def counted_by_numpy(m, x, y):
    """With a print and assertions beside it."""
    p = m.net(x)

    def rank(values):
        return values.argsort(0).argsort(0).astype("float32")

    ranks = tf.numpy_function(rank, [p], tf.float32)
    ranks = tf.stop_gradient(tf.reshape(ranks, tf.shape(p)))
    tf.debugging.assert_all_finite(p, "not finite")
    tf.debugging.assert_equal(t.rows(p), t.rows(y))
    lost = tf.reduce_mean((p - y) ** 2 * (1 + ranks))
    tf.print("", lost, end="", output_stream="file:///dev/null")
    return lost


@t.step()
def noise_for_every_example(m, x, y):
    return t.default_loss(m, x + 0.1 * tf.random.normal(tf.shape(x)), y)
