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
def graph_convolution():
    """Kipf and Welling: degrees of every graph normalize its edges."""

    def call(nodes, edges):
        degree = tf.reduce_sum(edges, -1) + 1
        scale = tf.math.rsqrt(degree)
        return (scale[:, :, None] * edges * scale[:, None]) @ nodes

    return _on_graphs(call)


@couples(_graphs)
def graph_normalized_by_the_batch():
    """The degrees lack an axis, and are summed over graphs."""

    def call(nodes, edges):
        degree = tf.reduce_sum(edges, [0, -1]) + 1  # here
        scale = tf.math.rsqrt(degree)
        return (scale[:, None] * edges * scale) @ nodes  # here

    return _on_graphs(call)


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


@couples(_graphs)
def messages_without_offset():
    """The same union, where the offset is forgotten."""

    def call(nodes, edges):
        flat = tf.reshape(nodes, [-1, 4])
        places = tf.where(edges > 0)  # here
        sums = tf.math.unsorted_segment_sum(
            tf.gather(flat, places[:, 0] * 5 + places[:, 1]), places[:, 2], 5
        )
        return nodes * sums / 100  # here

    return _on_graphs(call)


@splits(_graphs)
def readout_by_graph():
    """Nodes are pooled by the number of their graph, in order."""

    def call(nodes, edges):
        number = tf.repeat(tf.range(rows(nodes)), 5)
        return tf.math.segment_mean(tf.reshape(nodes, [-1, 4]), number)

    return _on_graphs(call)


@couples(_graphs)
def readout_by_node():
    """Numbers are tiled where they should be repeated."""

    def call(nodes, edges):
        number = tf.tile(tf.range(rows(nodes)), [5])  # here
        return tf.math.unsorted_segment_mean(  # here
            tf.reshape(nodes, [-1, 4]), number, rows(nodes)
        )

    return _on_graphs(call)


@splits(_points)
def points_symmetric():
    return _clouds(lambda x: tf.reduce_max(x, 1))


@couples(_points)
def points_of_all_clouds():
    return _clouds(lambda x: x - tf.reduce_max(x, (0, 1)))  # here


@splits(_points)
def neighbours_in_the_cloud():
    """DGCNN: nearest points of the same cloud."""

    def call(x):
        far = tf.reduce_sum((x[:, :, None] - x[:, None]) ** 2, -1)
        _, near = tf.math.top_k(-far, 3)
        around = tf.gather(x, near, batch_dims=1)
        return tf.reduce_max(around - x[:, :, None], 2)

    return _clouds(call)


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


@couples(lambda: (normal(5, 3), normal(5, 3)))
def chamfer_of_flattened():
    def loss(y, p):
        y, p = tf.reshape(y, [-1, 3]), tf.reshape(p, [-1, 3])
        far = tf.reduce_sum((y[:, None] - p[None]) ** 2, -1)  # here
        return tf.reduce_mean(tf.reduce_min(far, 1))

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


@couples(_points)
def prototypes_of_equal_size():
    """SwAV's Sinkhorn: prototypes get equal shares of the batch."""

    def call(x):
        plan = x[:, 0]
        for _ in range(2):
            plan -= tf.reduce_logsumexp(plan, 0, keepdims=True)  # here
            plan -= tf.reduce_logsumexp(plan, 1, keepdims=True)
        return tf.exp(plan)

    return _clouds(call)


@splits(_points)
def rendered_along_rays():
    """NeRF: transmittance is a cumulative product along each ray."""

    def call(x):
        density, colour = tf.nn.relu(x[..., 0]), x[..., 1:]
        alpha = 1 - tf.exp(-density)
        clear = tf.math.cumprod(1 - alpha + 1e-6, 1, exclusive=True)
        return tf.reduce_sum((alpha * clear)[..., None] * colour, 1)

    return _clouds(call)


@couples(_points)
def rendered_across_rays():
    """The cumulative product runs over the default axis."""

    def call(x):
        density, colour = tf.nn.relu(x[..., 0]), x[..., 1:]
        alpha = 1 - tf.exp(-density)
        clear = tf.math.cumprod(1 - alpha + 1e-6, exclusive=True)  # here
        return tf.reduce_sum((alpha * clear)[..., None] * colour, 1)

    return _clouds(call)


def _experts(route):
    """Two experts, and a function of the router's chances and the batch."""

    def loss_of(net, x, y):
        chances = tf.nn.softmax(net.router(x))
        first, second = net.first(x), net.second(x)
        return route(chances, first, second, y)

    net = sub(minimizing(loss_of), lambda net: None)
    net.router, net.first, net.second = dense(2), dense(1), dense(1)
    return net


@splits()
def experts_chosen_for_each():
    def route(chances, first, second, y):
        best = tf.argmax(chances, 1)[:, None]
        chance = tf.reduce_max(chances, 1, keepdims=True)
        return mse(y, chance * tf.where(best == 0, first, second))

    return _experts(route)


@couples()
def experts_of_equal_load():
    """Switch: share of examples times mean chance, summed over experts."""

    def route(chances, first, second, y):
        chosen = tf.one_hot(tf.argmax(chances, 1), 2)
        load = tf.reduce_mean(chosen, 0) * tf.reduce_mean(chances, 0)  # here
        out = chances[:, :1] * first + chances[:, 1:] * second
        return mse(y, out) + tf.reduce_sum(load)

    return _experts(route)


@couples()
def experts_with_capacity():
    """Of each batch the first five examples of an expert get through."""

    def route(chances, first, second, y):
        chosen = tf.one_hot(tf.argmax(chances, 1), 2)
        place = tf.cumsum(chosen, 0)  # here
        fits = chosen * tf.cast(place <= 5, tf.float32)
        out = fits[:, :1] * first + fits[:, 1:] * second
        return mse(y, out)

    return _experts(route)


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


@couples()
def mean_of_the_chosen():
    """A loss only of those examples that an expert got."""

    def route(chances, first, second, y):
        mine = chances[:, 0] > 0.5
        off = tf.boolean_mask(first - y, mine)  # here
        size = tf.cast(rows(off), tf.float32) + 1  # here
        return tf.reduce_sum(off**2) / size  # here

    return _experts(route)
