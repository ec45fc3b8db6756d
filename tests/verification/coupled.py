"""Miniatures of models that couple examples, or write variables."""

import keras
import tensorflow as tf
from keras import layers, ops

from tests.verification.models import MSE, Stepping, dense, features


class SimCLR(Stepping):
    def loss_of(self, data):
        x = features(data)
        a, b = (self.body(v, training=True) for v in (x, 0.9 * x + 0.1))
        a, b = ops.normalize(a, axis=1), ops.normalize(b, axis=1)
        logits = ops.matmul(a, ops.transpose(b)) / 0.1
        labels = ops.arange(ops.shape(a)[0])
        return ops.mean(
            keras.losses.sparse_categorical_crossentropy(
                labels, logits, from_logits=True
            )
        )


class Barlow(Stepping):
    def loss_of(self, data):
        x = features(data)
        views = []
        for view in (x, 0.9 * x + 0.1):
            z = self.body(view)
            views.append((z - ops.mean(z, axis=0)) / (ops.std(z, axis=0) + 0.1))
        n = ops.cast(ops.shape(x)[0], "float32")
        correlated = ops.matmul(ops.transpose(views[0]), views[1]) / n
        return ops.sum((correlated - ops.eye(4)) ** 2)


class SupervisedContrastive(Stepping):
    def loss_of(self, data):
        x, y = data[:2]
        z = ops.normalize(self.body(x), axis=1)
        logits = ops.matmul(z, ops.transpose(z)) / 0.5
        same = ops.cast(y[:, None] == y[None, :], "float32")
        same = same / ops.sum(same, axis=1, keepdims=True)
        return ops.mean(
            keras.losses.categorical_crossentropy(
                same, logits, from_logits=True
            )
        )


class NNCLR(SimCLR):
    """With a queue of earlier rows."""

    def __init__(self):
        super().__init__()
        self.queue = self.add_weight(
            shape=(16, 4), initializer="normal", trainable=False, name="queue"
        )

    def loss_of(self, data):
        loss = super().loss_of(data)
        z = ops.normalize(self.body(features(data)), axis=1)
        rows = ops.concatenate([ops.stop_gradient(z), self.queue], axis=0)
        self.queue.assign(rows[:16])
        return loss


class Switch(Stepping):
    """Experts with a loss that balances their load."""

    def __init__(self):
        super().__init__(3)
        self.router = dense(4)
        self.experts = [dense(3) for _ in range(4)]

    def loss_of(self, data):
        x, y = data[:2]
        gates = ops.softmax(self.router(x))
        chosen = ops.one_hot(ops.argmax(gates, axis=1), 4)
        outputs = ops.stack([expert(x) for expert in self.experts], axis=1)
        told = ops.sum(outputs * (chosen * gates)[:, :, None], axis=1)
        load = ops.mean(chosen, axis=0) * ops.mean(gates, axis=0)
        return ops.mean((told - y) ** 2) + 0.1 * 4 * ops.sum(load)


class MaskedMean(Stepping):
    def __init__(self):
        super().__init__(8, 3)

    def loss_of(self, data):
        x, y, mask = data
        errors = ops.mean((self.body(x) - y) ** 2, axis=1)
        return ops.sum(errors * mask) / ops.sum(mask)


class BatchMeanPenalty(Stepping):
    def __init__(self):
        super().__init__(8, 3)

    def loss_of(self, data):
        told = self.body(data[0])
        errors = ops.mean((told - data[1]) ** 2)
        return errors + ops.sum(ops.mean(told, axis=0) ** 2)


class SSE(Stepping):
    def __init__(self):
        super().__init__(8, 3)

    def loss_of(self, data):
        return ops.sum((self.body(data[0]) - data[1]) ** 2)


class Clipping(MSE):
    def changed(self, grads):
        return tf.clip_by_global_norm(grads, 0.05)[0]


class ClippingSimCLR(SimCLR):
    def changed(self, grads):
        return tf.clip_by_global_norm(grads, 0.05)[0]


class SAM(MSE):
    def gradients_of(self, tape, loss, weights):
        return tape.gradient(loss, weights)

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = self.loss_of(data)
        weights = self.trainable_weights
        grads = self.gradients_of(tape, loss, weights)
        norm = tf.linalg.global_norm(grads)
        steps = [0.3 * g / (norm + 1e-12) for g in grads]
        for weight, step in zip(weights, steps, strict=True):
            weight.assign_add(step)
        with tf.GradientTape() as tape:
            loss = self.loss_of(data)
        grads = self.gradients_of(tape, loss, weights)
        for weight, step in zip(weights, steps, strict=True):
            weight.assign_sub(step)
        self.optimizer.apply_gradients(zip(grads, weights, strict=True))
        return {"loss": loss}


class AddsSum(layers.Layer):
    def call(self, x):
        self.add_loss(0.01 * ops.sum(x**2))
        return x


class WritesPlainVariable(MSE):
    def __init__(self):
        super().__init__()
        self.seen = tf.Variable(0.0, trainable=False)

    def train_step(self, data):
        self.seen.assign_add(tf.reduce_sum(data[0]))
        return super().train_step(data)


class CountsExamples(MSE):
    def __init__(self):
        super().__init__()
        self.seen = self.add_weight(
            shape=(),
            dtype="int64",
            initializer="zeros",
            trainable=False,
            name="seen",
        )

    def train_step(self, data):
        self.seen.assign(self.seen + ops.cast(ops.shape(data[0])[0], "int64"))
        return super().train_step(data)


class LogsMaximum(MSE):
    def train_step(self, data):
        logs = super().train_step(data)
        return {**logs, "largest": ops.max(data[0])}


class UpdatesSometimes(MSE):
    """Updates weights twice for a large batch."""

    def train_step(self, data):
        if int(ops.shape(data[0])[0]) >= 8:
            super().train_step(data)
        return super().train_step(data)


class NeedsPairs(MSE):
    def loss_of(self, data):
        if int(ops.shape(data[0])[0]) < 8:
            raise ValueError("a batch needs 8 rows")
        return super().loss_of(data)


class Reads(MSE):
    """Raises on one device."""

    def loss_of(self, data):
        return data["nothing"]


class Averages(MSE):
    """A step that averages in variables of both kinds."""

    def __init__(self):
        super().__init__()
        self.plain = tf.Variable(0.0, trainable=False)
        self.own = self.add_weight(
            shape=(), initializer="zeros", trainable=False
        )

    def train_step(self, data):
        mean = 0.1 * tf.reduce_mean(data[0])
        self.plain.assign(0.9 * self.plain + mean)
        self.own.assign(0.9 * self.own + mean)
        return super().train_step(data)
