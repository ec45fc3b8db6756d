"""Losses and metrics: in custom steps, and outside of steps."""

import functools
import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_towers as kt
from keras_towers.fit import components
from keras_towers.inspection.conformance import case_models as m
from tests.fit.step.acts import Stepping
from tests.kit.compare import assert_close, assert_exact
from tests.kit.sampling import sample_of
from tests.kit.training import compiled, fit

pytestmark = pytest.mark.alternate

# Batches of 7 on 3 towers are 3, 2, 2; the last one is of a single example.
COUNT = 29
X, Y = m.FEATURES[:COUNT], m.LABELS[:COUNT]
trained = functools.partial(fit, x=X, y=Y, batch_size=7)


def a_function(y, p):
    return keras.losses.sparse_categorical_crossentropy(y, p, from_logits=True)


def divided(model, losses):
    """As in TensorFlow's guide for custom training with a strategy."""
    parts = tf.distribute.get_strategy().num_replicas_in_sync
    return tf.reduce_mean(losses) / parts


def summed(model, losses):
    return tf.reduce_sum(losses)


def scaled(model, losses):
    return model.optimizer.scale_loss(tf.reduce_mean(losses))


@pytest.mark.parametrize(
    "loss_of, average",
    sample_of(itertools.product([divided, scaled, summed], [True, False])),
)
def test_custom_steps_that_divide_scale_or_sum_losses(loss_of, average):
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


def test_metrics_count_all_examples():
    make = compiled(metrics=lambda: ["accuracy", Examples()])

    def act(model):
        history = trained(model, validation_data=(X, Y))
        total = [EACH * COUNT]
        assert history.pop("examples") == history.pop("val_examples") == total
        return history

    assert_exact(make, act, kt.TowerStrategy(3))


def by_hand():
    """Losses and metrics that Keras would divide by the number of replicas."""
    x = np.arange(6.0, dtype="float32")[:, np.newaxis]
    dense = keras.layers.Dense(
        1, activity_regularizer="l1", kernel_initializer="ones"
    )
    model = keras.Sequential([keras.Input((1,)), dense])
    model.compile("sgd", "mae", metrics=["mse"])
    loss, mapped = keras.losses.MeanSquaredError(), tf.data.Dataset
    mapped = mapped.from_tensors(x).map(lambda each: loss(each, 3 * each))
    count = keras.metrics.Sum(dtype="int32")
    count.update_state([3])
    count.update_state([4])
    return {
        "loss": float(loss(x, 3 * x)),
        "in a function": float(tf.function(loss)(x, 3 * x)),
        "in a map": float(next(iter(mapped))),
        "of a model": float(model.compute_loss(x, 2 * x, model(x))),
        "a step": {k: float(v) for k, v in model.test_step((x, 2 * x)).items()},
        "a count": int(count.result()),
    }


@pytest.mark.parametrize(
    "strategy",
    [
        *(kt.TowerStrategy, kt.ParameterServerTowerStrategy),
        *(kt.AsyncTowerStrategy, kt.SyncReplicasStrategy),
    ],
)
def test_outside_of_steps_losses_are_those_of_one_device(strategy):
    alone = by_hand()
    assert alone["a count"] == 7
    with strategy(towers=3) as towers:
        assert by_hand() == alone
        assert towers.num_replicas_in_sync == 3
        assert components.active_strategy() is towers
    with tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        # Keras's own; TensorFlow's strategies are none of ours.
        assert by_hand()["loss"] == alone["loss"] / 2


def test_losses_in_callbacks_and_in_a_loop_of_ones_own():
    model = compiled()()
    loss, found = m.cross_entropy(), []

    def note(*args, **logs):
        found.append(float(loss(Y, model(X))))

    with kt.TowerStrategy(2) as towers:
        note()
        noted = keras.callbacks.LambdaCallback(
            on_train_batch_end=note, on_epoch_end=note
        )
        history = fit(model, 1, X, Y, COUNT, callbacks=[noted])
        # There each replica divides by their number, to add up to a mean.
        parts = towers.run(lambda: loss(Y, model(X)))
        added = towers.reduce("SUM", parts, axis=None)
        each = towers.experimental_local_results(parts)
    assert_close(found[0], history["loss"][0])
    assert found[1] == found[2] == float(loss(Y, model(X)))
    assert_close(float(added), found[2])
    assert len(each) == 2 and float(each[0]) == found[2] / 2
