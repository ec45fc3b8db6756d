"""What models, layers, metrics and optimizers keep from step to step."""

import keras
import tensorflow as tf

from tests.partition.cases.table import (
    WIDTH,
    apply,
    by_default,
    case,
    count,
    default_loss,
    gradients_of,
    minimized,
    minimizing,
    mse,
    of_parts,
    plain,
    stepped,
    weighing,
    with_variable,
)


@case()
def metric_read_in_the_step():
    def loss_of(model, x, y):
        p = model(x, training=True)
        model.seen.update_state(tf.abs(y - p))
        return mse(y, p) * model.seen.result()

    model = minimized(loss_of)
    model.seen = keras.metrics.Mean()
    return model


@case(with_variable, aggregation="sum")
def counted_examples(model, x, y):
    model.kept.assign_add(count(x))
    return by_default(model, x, y)


@case()
def accumulated_by_hand():
    def step(model, x, y):
        loss, grads = gradients_of(model, x, y)
        for kept, g in zip(model.sums, grads, strict=True):
            kept.assign_add(g)
        scale = tf.cast(model.optimizer.iterations % 2, tf.float32)
        scaled = [scale * kept for kept in model.sums]
        model.optimizer.apply(scaled, model.trainable_variables)
        for kept in model.sums:
            kept.assign(kept * (1 - scale))
        return {"loss": loss}

    model = stepped(step)
    model.sums = [
        model.add_weight(shape=w.shape, initializer="zeros", trainable=False)
        for w in model.trainable_variables
    ]
    return model


@case()
def generator_and_critic():
    cross = tf.nn.sigmoid_cross_entropy_with_logits

    def step(net, x, y):
        real = tf.concat([y, y * 2, y * 3], 1)
        zeros = tf.zeros_like(y)
        with tf.GradientTape() as tape:
            both = net.second(tf.concat([real, net.first(x)], 0))
            labels = tf.concat([zeros + 1, zeros], 0)
            d = tf.reduce_mean(cross(labels, both))
        w = net.second.trainable_variables
        net.others[0].apply(tape.gradient(d, w), w)
        with tf.GradientTape() as tape:
            g = tf.reduce_mean(cross(zeros + 1, net.second(net.first(x))))
        w = net.first.trainable_variables
        net.others[1].apply(tape.gradient(g, w), w)
        return {"d": d, "g": g}

    net = of_parts(step, first=3, second=1)
    net.others = [keras.optimizers.SGD(0.05), keras.optimizers.SGD(0.01)]
    return net


@case(with_variable, shape=(WIDTH,))
def last_example_is_kept(net, x, y):
    net.kept.assign(x[-1])
    return by_default(net, x - net.kept, y)


@case(with_variable, shape=(5,))
def table_of_the_examples(net, x, y):
    """An embedding of each example is kept under its number."""
    at = tf.cast(tf.abs(x[:, :1]) * 10, tf.int32) % 5
    new = tf.reduce_mean(x, 1)
    net.kept.assign(tf.tensor_scatter_nd_update(net.kept, at, new))
    return by_default(net, x, y)


@case(with_variable, initial=100.0)
@minimizing
def loss_against_the_last_one(net, x, y):
    """Stops learning once the loss has grown."""
    loss = default_loss(net, x, y)
    scaled = loss * tf.cast(loss < net.kept, tf.float32)
    net.kept.assign(loss)
    return scaled


class _Smooth(keras.metrics.Metric):
    """A moving average of the batches' losses."""

    def __init__(self, **options):
        super().__init__(**options)
        self.value = self.add_variable((), "zeros")

    def update_state(self, y, p, sample_weight=None):
        self.value.assign(0.7 * self.value + 0.3 * mse(y, p))

    def result(self):
        return self.value


@case()
def moving_average_of_the_loss():
    return plain(outputs=1, metrics=[_Smooth(name="smooth")])


@case()
def worst_of_a_batch():
    def worst(y, p):
        return tf.reduce_max(tf.abs(y - p))

    return plain(outputs=1, metrics=[worst])


@case(stepped)
def logged_means(net, x, y):
    with tf.GradientTape() as tape:
        p = net(x, training=True)
        loss = mse(y, p)
    return apply(net, tape, loss) | {
        "absolute": tf.reduce_mean(tf.abs(y - p)),
        "share": count(tf.boolean_mask(p, p[:, 0] > 0)) / count(p),
        "weights": tf.linalg.global_norm(net.trainable_variables),
    }


@case()
def logged_through_trackers():
    """A Mean that is given rows, and one that is given means and counts."""

    def step(net, x, y):
        logs = by_default(net, x, y)
        net.one.update_state(x)
        net.two.update_state(logs["loss"], sample_weight=count(y))
        return {"one": net.one.result(), "two": net.two.result()}

    net = stepped(step)
    net.one, net.two = keras.metrics.Mean("one"), keras.metrics.Mean("two")
    return net


@case(weighing)
def moving_mean_read_at_once(layer, x):
    layer.kept.assign(0.9 * layer.kept + 0.1 * tf.reduce_mean(x))
    return tf.nn.tanh(x - layer.kept)


@case(weighing, shape=(WIDTH,), trainable=True)
def trainable_scale(layer, x):
    return x * layer.kept + 0.1 * tf.reduce_sum(layer.kept**2)
