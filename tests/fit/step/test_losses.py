"""Losses, custom steps and a metric, on towers of different size."""

import functools

import keras
import pytest
import tensorflow as tf

import keras_towers as kt
from tests.exactness import models as m
from tests.fit.step.acts import Stepping
from tests.kit.compare import assert_exact
from tests.kit.training import compiled, fit

# Batches of 7 on 3 towers are 3, 2, 2; the last one is of a single example.
COUNT = 29
X, Y = m.FEATURES[:COUNT], m.LABELS[:COUNT]
trained = functools.partial(fit, x=X, y=Y, batch_size=7)


def a_function(y, p):
    return keras.losses.sparse_categorical_crossentropy(y, p, from_logits=True)


def test_a_vector_of_losses():
    make = compiled(
        loss=lambda: m.cross_entropy(reduction="none"),
        optimizer=lambda: keras.optimizers.SGD(0.001),
    )
    # Sums over the batch make large steps, which amplify what is rounded.
    assert_exact(make, trained, kt.TowerStrategy(3), tolerance=5e-5)


def divided(model, losses):
    """As in TensorFlow's guide for custom training with a strategy."""
    parts = tf.distribute.get_strategy().num_replicas_in_sync
    return tf.reduce_mean(losses) / parts


def summed(model, losses):
    return tf.reduce_sum(losses)


def scaled(model, losses):
    return model.optimizer.scale_loss(tf.reduce_mean(losses))


@pytest.mark.parametrize("loss_of", [divided, scaled, summed])
@pytest.mark.parametrize("average", [True, False])
def test_custom_steps(loss_of, average):
    class Custom(Stepping):
        def train_step(self, data):
            x, y = data
            variables = self.trainable_variables
            halves = variables[:2], variables[2:]
            with tf.GradientTape(persistent=True) as tape:
                values = a_function(y, self(x, training=True))
                # Both before either is applied.
                losses = [loss_of(self, values) for _ in halves]
            for loss, some in zip(losses, halves, strict=True):
                self.update(tape.gradient(loss, some), some)
            # It is given one number a batch, without sample weights: the mean
            # over batches, each of which counts once, as on one device.
            self.tracker.update_state(tf.reduce_mean(values))
            return {"mean": self.tracker.result()}

    def make():
        inner = m.mlp()
        model = Custom(*inner.inputs, *inner.outputs)
        model.tracker = keras.metrics.Mean(name="mean")
        model.compile(keras.optimizers.SGD(0.003, 0.9))
        model.optimizer.build(model.trainable_variables)
        return model

    def thrice(model):
        """Gradients count once for each tower where they are not averaged."""
        model.optimizer.learning_rate = 0.009
        history = trained(model)
        model.optimizer.learning_rate = 0.003
        return history

    towers = kt.TowerStrategy(3, average=average)
    assert_exact(make, trained, towers, reference=None if average else thrice)


# Of which float32 would keep no sum.
EACH = 2**25 + 1


class Examples(keras.metrics.Metric):
    """Counts examples in whole numbers, each as many."""

    def __init__(self):
        super().__init__(name="examples", dtype="int32")
        self.count = self.add_variable((), "zeros", dtype="int32")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.count.assign(self.count + EACH * tf.shape(y_true)[0])

    def result(self):
        return self.count


def test_metrics():
    make = compiled(metrics=lambda: ["accuracy", Examples()])

    def act(model):
        history = trained(model, validation_data=(X, Y))
        total = [EACH * COUNT]
        assert history.pop("examples") == history.pop("val_examples") == total
        return history

    assert_exact(make, act, kt.TowerStrategy(3))
