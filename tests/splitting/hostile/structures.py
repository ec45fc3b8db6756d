"""Graphs, sets, point clouds, rays and experts."""

import keras
import tensorflow as tf

from tests.splitting.cases.table import minimizing, mse
from tests.splitting.hostile.table import (
    EXAMPLES,
    couples,
    dense,
    functional,
    generator,
    normal,
    own,
    rows,
    splits,
    sub,
)

layers = keras.layers


def _points():
    return normal(5, 3), normal(1)


def _clouds(call, **options):
    def body(x):
        x = dense(4, "tanh")(x)
        return dense(1)(layers.Flatten()(own(call)(x)))

    return functional(body, (5, 3), **options)


def _graphs():
    make = generator()
    adjacent = make.integers(0, 2, (EXAMPLES, 5, 5)).astype("float32")
    return {"x": {"nodes": normal(5, 3), "edges": adjacent}, "y": normal(1)}


def _on_graphs(call):
    nodes = keras.Input((5, 3), name="nodes")
    edges = keras.Input((5, 5), name="edges")

    class Convolution(layers.Layer):
        def __init__(self):
            super().__init__()
            self.inner = dense(4, "tanh")

        def call(self, nodes, edges):
            return call(self.inner(nodes), edges)

    out = dense(1)(layers.Flatten()(Convolution()(nodes, edges)))
    model = keras.Model({"nodes": nodes, "edges": edges}, out)
    model.compile(keras.optimizers.SGD(0.05), "mse")
    return model


@splits(_graphs)
def messages_by_segments():
    """One disjoint union of all graphs: numbers of nodes are offset."""

    def call(nodes, edges):
        flat = tf.reshape(nodes, [-1, 4])
        places = tf.where(edges > 0)
        source = places[:, 0] * 5 + places[:, 1]
        target = places[:, 0] * 5 + places[:, 2]
        count = tf.shape(flat, tf.int64)[0]
        sums = tf.math.unsorted_segment_sum(
            tf.gather(flat, source), target, count
        )
        return tf.reshape(sums, [-1, 5, 4])

    return _on_graphs(call)


@splits(_graphs)
def readout_by_graph():
    """Nodes are pooled by the number of their graph, in order."""

    def call(nodes, edges):
        number = tf.repeat(tf.range(rows(nodes)), 5)
        return tf.math.segment_mean(tf.reshape(nodes, [-1, 4]), number)

    return _on_graphs(call)


@couples(_points)
def neighbours_in_any_cloud():
    """The gather lacks its batch_dims, and takes the first clouds' points."""

    def call(x):
        far = tf.reduce_sum((x[:, :, None] - x[:, None]) ** 2, -1)
        _, near = tf.math.top_k(-far, 3)
        around = tf.gather(tf.reshape(x, [-1, 4]), near)  # here
        return tf.reduce_max(around - x[:, :, None], 2)

    return _clouds(call)


@splits(lambda: (normal(5, 3), normal(5, 3)))
def chamfer_distance():
    def loss(y, p):
        far = tf.norm(y[:, :, None] - p[:, None] + 1e-3, axis=-1)
        there = tf.reduce_mean(tf.reduce_min(far, 1), 1)
        return there + tf.reduce_mean(tf.reduce_min(far, 2), 1)

    return functional(
        lambda x: dense(3)(dense(4, "tanh")(x)), (5, 3), loss=loss
    )


@splits(_points)
def sinkhorn_of_each():
    """Optimal transport between two sets, by a loop of normalizations."""

    def call(x):
        plan = x @ tf.transpose(x, [0, 2, 1])
        for _ in tf.range(3):
            plan -= tf.reduce_logsumexp(plan, 1, keepdims=True)
            plan -= tf.reduce_logsumexp(plan, 2, keepdims=True)
        return tf.exp(plan) @ x

    return _clouds(tf.function(call))


@splits()
def experts_by_stitching():
    """Examples are dispatched by dynamic_partition, and stitched back."""

    def loss_of(net, x, y):
        choice = tf.cast(x[:, 0] > 0, tf.int32)
        parts = tf.dynamic_partition(x, choice, 2)
        places = tf.dynamic_partition(tf.range(rows(x)), choice, 2)
        outs = [net.first(parts[0]), net.second(parts[1])]
        out = tf.dynamic_stitch(places, outs)
        return mse(y, out)

    net = sub(minimizing(loss_of), lambda net: None)
    net.first, net.second = dense(1), dense(1)
    return net
