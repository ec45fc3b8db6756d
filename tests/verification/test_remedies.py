"""What verify advises makes a model safe."""

import keras
import pytest
import tensorflow as tf
from keras import layers, ops

import keras_towers as kt
from keras_towers.verification import Kind
from tests.verification import coupled as c
from tests.verification import models as m

X, Y = m.FEATURES, m.TARGETS


class GatheredSimCLR(m.Stepping):
    def loss_of(self, data):
        x = m.features(data)
        a, b = kt.gather((self.body(x), self.body(0.9 * x + 0.1)))
        a, b = ops.normalize(a, axis=1), ops.normalize(b, axis=1)
        logits = ops.matmul(a, ops.transpose(b)) / 0.1
        return ops.mean(
            keras.losses.sparse_categorical_crossentropy(
                ops.arange(ops.shape(a)[0]), logits, from_logits=True
            )
        )


class MaskedMean(c.MaskedMean):
    def loss_of(self, data):
        x, y, mask = data
        return kt.mean(ops.mean((self.body(x) - y) ** 2, axis=1), mask)


class Clipping(m.MSE):
    def changed(self, grads):
        return kt.clip_by_global_norm(grads, 0.05)[0]


class SAM(c.SAM):
    def gradients_of(self, tape, loss, weights):
        return kt.reduce_gradients(tape.gradient(loss, weights))


class Queue(m.MSE):
    def __init__(self):
        super().__init__()
        self.queue = self.add_weight(
            shape=(16, 6), initializer="zeros", trainable=False, name="queue"
        )

    def train_step(self, data):
        rows = ops.concatenate([kt.gather(data[0]), self.queue], axis=0)
        self.queue.assign(rows[:16])
        return super().train_step(data)


@pytest.mark.parametrize("cls", [GatheredSimCLR, MaskedMean, Clipping, SAM])
def test_values_of_the_global_batch(cls):
    data = {MaskedMean: (X, Y, m.MASK), GatheredSimCLR: (X,)}.get(cls, (X, Y))
    report = kt.verify(m.compiled(cls(), None), *data, batch_size=8)
    assert report.safe, str(report)
    assert report.batches == (8, 8, 8, 7)


def test_a_queue_of_gathered_rows():
    report = kt.verify(m.compiled(Queue(), None), X, Y, batch_size=8)
    assert report.safe, str(report)


def test_exact_batch_norm():
    model = m.compiled(m.classifier(layers.BatchNormalization()))
    assert not kt.verify(model, X, Y, batch_size=8).safe
    report = kt.verify(model, X, Y, batch_size=8, batch_norm="global")
    assert report.safe, str(report)


@pytest.mark.parametrize(
    "make",
    [
        lambda: m.compiled(m.VAE(), None),
        lambda: m.compiled(m.DDIM(), None),
        lambda: m.compiled(m.classifier(layers.Dropout(0.3))),
    ],
    ids=["vae", "ddim", "dropout"],
)
def test_draws_of_one_device(make):
    report = kt.verify(make(), X, Y, batch_size=8, random="global")
    assert report.safe, str(report)


def test_a_random_model_stays_random_by_functions_of_tensorflow():
    class Noisy(m.MSE):
        def loss_of(self, data):
            x = data[0] + tf.random.normal(tf.shape(data[0]))
            return ops.mean((self.body(x) - data[1]) ** 2)

    model = m.compiled(Noisy(), None)
    report = kt.verify(model, X, Y, batch_size=8, random="global")
    assert [f.kind for f in report.findings] == [Kind.RANDOM]
    assert "keras.random" in report.remedies[0]
