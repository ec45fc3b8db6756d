"""Training steps whose losses and gradients need the whole batch."""

import functools

import keras
import tensorflow as tf

from tests.exactness import models as m

EXAMPLES, BATCH = 26, 8  # the last batch has 2: none for a third tower
X, Y = m.FEATURES[:EXAMPLES], m.LABELS[:EXAMPLES]
WIDTH, QUEUE = 4, 12


def _entropy(logits, labels):
    return tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)


def _similar(a, b):
    return tf.matmul(a, b, transpose_b=True) / 0.3


def _each_finds_the_other(views):
    count = tf.shape(views)[0]
    logits = _similar(views, views) - 1e9 * tf.eye(count)
    labels = tf.roll(tf.range(count), count // 2, 0)
    return tf.reduce_mean(_entropy(logits, labels))


def simclr(model, x, y):
    """NT-Xent of two views: each finds the other among all views."""
    views = model.unit(x * 1.1), model.unit(x + 0.2)
    return _each_finds_the_other(tf.concat(views, 0))


def clip(model, x, y):
    """Each finds its other view among all."""
    one, other = model.unit(x), model.unit(x + 0.2)
    labels = tf.range(tf.shape(x)[0])
    return tf.reduce_mean(_entropy(_similar(one, other), labels))


def supervised_contrastive(model, x, y):
    z = model.unit(x)
    own = tf.eye(tf.shape(z)[0])
    log = tf.nn.log_softmax(_similar(z, z) - 1e9 * own)
    same = tf.cast(y[:, None] == y[None], tf.float32) * (1 - own)
    losses = tf.math.divide_no_nan(
        tf.reduce_sum(same * log, 1), tf.reduce_sum(same, 1)
    )
    return -tf.reduce_mean(losses)


def nnclr(model, x, y):
    """Nearest neighbours from a queue."""
    one, other = model.unit(x * 1.1), model.unit(x + 0.2)
    queue = tf.convert_to_tensor(model.queue)
    nearest = tf.gather(queue, tf.argmax(_similar(one, queue), 1))
    labels = tf.range(tf.shape(one)[0])
    model.queue.assign(tf.concat([tf.stop_gradient(one), queue], 0)[:QUEUE])
    return tf.reduce_mean(_entropy(_similar(nearest, other), labels))


def centred_views(model, x, y):
    """Two views in one tensor, less their mean over the batch."""
    z = model.body(x)
    z -= tf.reduce_mean(z, 0)
    views = tf.concat([z, z + 0.2], 0)
    return _each_finds_the_other(tf.math.l2_normalize(views, 1))


def _losses(model, x, y):
    logits = model.body(x)
    return logits, _entropy(logits, y)


def _mean(values, weights):
    weights = tf.cast(weights, values.dtype)
    return tf.math.divide_no_nan(
        tf.reduce_sum(values * weights), tf.reduce_sum(weights)
    )


def masked_mean(model, x, y):
    _, losses = _losses(model, x, y)
    return _mean(losses, x[:, 0] > 0.3)


def weighted_mean(model, x, y):
    logits, losses = _losses(model, x, y)
    # The weights are learned, too.
    return _mean(losses, tf.sigmoid(logits[:, 0]))


def penalty_on_a_mean(model, x, y):
    logits, losses = _losses(model, x, y)
    usage = tf.reduce_mean(tf.nn.softmax(logits), 0)
    return tf.reduce_mean(losses) + tf.reduce_sum(usage * usage)


def gradient_penalty(model, x, y):
    """Second derivatives, through what couples the examples."""
    with tf.GradientTape() as tape:
        tape.watch(x)
        z = tf.tanh(model.body(x))
        score = tf.reduce_mean(tf.matmul(z, z, transpose_b=True) ** 2)
        score += tf.reduce_mean(model.body(x) ** 3)
    slopes = tape.gradient(score, x)
    return tf.reduce_mean(tf.reduce_sum(slopes**2, 1)) + score


def plain(model, x, y):
    return tf.reduce_mean(_losses(model, x, y)[1])


def as_they_are(model, gradients, loss_of):
    return gradients


def clipped(model, gradients, loss_of):
    gradients, model.norm = tf.clip_by_global_norm(gradients, 0.1)
    return gradients


def signs(model, gradients, loss_of):
    """Not linear in the gradients."""
    return [
        None if g is None else tf.tanh(3.0 * tf.convert_to_tensor(g))
        for g in gradients
    ]


def sharpness_aware(model, gradients, loss_of):
    """SAM: the gradient at the worst point nearby."""
    variables = model.trainable_variables
    radius = 0.05 / tf.linalg.global_norm(gradients)
    before = [tf.convert_to_tensor(v) for v in variables]
    for variable, gradient in zip(variables, gradients, strict=True):
        if gradient is not None:
            variable.assign(variable + gradient * radius)
    with tf.GradientTape() as tape:
        loss = loss_of()
    gradients = tape.gradient(loss, variables)
    for variable, value in zip(variables, before, strict=True):
        variable.assign(value)
    return gradients


class Coupled(keras.Model):
    """A step of the user's own."""

    def __init__(self, loss, by_hand=as_they_are, scale=False):
        super().__init__()
        dense = keras.layers.Dense
        self.body = keras.Sequential(
            [keras.Input((6,)), dense(7, "tanh"), dense(WIDTH)]
        )
        # Without a gradient.
        self.unused = self.add_weight(shape=(2,), name="unused")
        random = keras.initializers.RandomNormal(seed=3)
        self.queue = self.add_weight((QUEUE, WIDTH), random, trainable=False)
        self.norm = 0.0  # of the gradients of the last step
        self.loss_of, self.by_hand, self.scale = loss, by_hand, scale

    def call(self, x):
        return self.body(x)

    def unit(self, x):
        return tf.math.l2_normalize(self.body(x), 1)

    def train_step(self, data):
        x, y, *_ = data
        variables = self.trainable_variables
        with tf.GradientTape() as tape:
            loss = self.loss_of(self, x, y)
            scaled = self.optimizer.scale_loss(loss) if self.scale else loss
        gradients = tape.gradient(scaled, variables)
        again = functools.partial(self.loss_of, self, x, y)
        gradients = self.by_hand(self, gradients, again)
        self.optimizer.apply(gradients, variables)
        return {"loss": loss, "norm": self.norm}


def coupled(
    loss, by_hand=as_they_are, optimizer=m.momentum, scale=False, **options
):
    """A function that makes such a model, the same every time."""

    def make():
        keras.utils.set_random_seed(1)
        model = Coupled(loss, by_hand, scale)
        model.build((None, 6))
        model.compile(optimizer(), **options)
        if not scale:
            # Or TensorFlow traces the step twice, as it does where a loss
            # scale has to become a variable.
            model.optimizer.build(model.trainable_variables)
        return model

    return make


def training(count=EXAMPLES):
    """A function that trains on so many examples; returns the history."""
    x, y = X[:count], Y[:count]
    options = {"batch_size": BATCH, "shuffle": False, "verbose": 0}
    return lambda model: model.fit(x, y, **options).history
