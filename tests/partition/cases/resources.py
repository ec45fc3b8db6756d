"""Steps with what is no weight: queues, iterators; updates within branches."""

import keras
import tensorflow as tf

from tests.partition.cases.table import (
    WIDTH,
    by_default,
    case,
    default_loss,
    gradients_of,
    minimized,
    mse,
    normal,
    rows,
    stepped,
    with_variable,
)


@case()
def unlabelled_rows_of_an_iterator():
    """The step draws its own batches from a second data set."""

    def loss_of(net, x, y):
        others = net(next(net.unlabelled))
        return default_loss(net, x, y) + 0.1 * tf.reduce_mean(others**2)

    net = minimized(loss_of)
    data = tf.data.Dataset.from_tensor_slices(normal(WIDTH))
    net.unlabelled = iter(data.repeat().batch(11))
    return net


@case()
def replayed_by_a_queue():
    def loss_of(net, x, y):
        with tf.control_dependencies([net.queue.enqueue_many([x])]):
            old = net.queue.dequeue_many(3)
        return default_loss(net, x, y) + 0.1 * tf.reduce_mean(net(old) ** 2)

    net = minimized(loss_of)
    net.queue = tf.queue.FIFOQueue(100, ["float32"], [[WIDTH]])
    return net


@case()
def bank_whose_rows_grow():
    """Each batch is appended to a variable of unknown length."""

    def loss_of(net, x, y):
        z, old = net(x, training=True), net.bank.read_value()
        near = tf.matmul(z, old, transpose_b=True)
        net.bank.assign(tf.concat([old, tf.stop_gradient(z)], 0)[-30:])
        kept = tf.cast(rows(net.bank.read_value()), tf.float32)
        return mse(y, z[:, :1]) + tf.reduce_mean(tf.nn.softplus(near)) / kept

    net = minimized(loss_of, 3)
    net.bank = tf.Variable(tf.zeros([1, 3]), trainable=False, shape=[None, 3])
    return net


@case(with_variable)
def scaled_by_the_first_batch(net, x, y):
    """As activation normalization starts."""

    def start():
        net.kept.assign(tf.math.reduce_std(x))
        return tf.constant(0)

    tf.cond(net.kept > 0, lambda: tf.constant(0), start)
    return by_default(net, x / net.kept, y)


@case()
def updated_in_a_branch_before_it_is_built():
    def step(net, x, y):
        loss, grads = gradients_of(net, x, y)
        good = tf.reduce_all([tf.reduce_all(g < 1e9) for g in grads])

        def update():
            net.optimizer.apply(grads, net.trainable_variables)
            return tf.constant(1.0)

        done = tf.cond(good, update, lambda: tf.constant(0.0))
        return {"loss": loss, "done": done}

    return stepped(step, optimizer=keras.optimizers.Adam(0.01))


@case()
def steps_until_the_loss_is_small():
    def step(net, x, y):
        def once(i, _):
            loss, grads = gradients_of(net, x, y)
            net.others[0].apply(grads, net.trainable_variables)
            return i + 1, loss

        i, loss = tf.while_loop(
            lambda i, loss: (i < 5) & (loss > 0.5),
            once,
            (0, tf.constant(9.0)),
        )
        return {"loss": loss, "steps": i}

    net = stepped(step)
    net.others = [keras.optimizers.Adam(0.05)]
    net.others[0].build(net.trainable_variables)
    return net


@case(minimized)
def gradient_of_a_python_function(net, x, y):
    ranked = tf.py_function(
        lambda z: tf.sort(z, 0) ** 2, [net(x, training=True)], tf.float32
    )
    return mse(y, tf.ensure_shape(ranked, [None, 1]))
