"""Losses, metrics and custom steps, on towers of different size."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_towers as kt
from tests.exactness import models as m
from tests.kit.compare import assert_exact
from tests.kit.training import compiled

# Batches of 7 on 3 towers are 3, 2, 2; of 4 in the end 2, 1, 1; then of 1.
COUNT, BATCH = 29, 7
X, Y, W = m.FEATURES[:COUNT], m.LABELS[:COUNT], m.WEIGHTS[:COUNT]


def towers(number=3, **options):
    return kt.TowerStrategy(number, **options)


def fitting(y=Y, weights=None, x=X, **kwargs):
    arguments = {"batch_size": BATCH, "epochs": 2, "shuffle": False, **kwargs}
    return lambda model: model.fit(
        x, y, sample_weight=weights, verbose=0, **arguments
    )


@pytest.mark.parametrize("weights", [None, W], ids=["plain", "weighted"])
@pytest.mark.parametrize(
    "reduction", ["sum", "sum_over_batch_size", "mean_with_sample_weight"]
)
def test_reductions(reduction, weights):
    make = compiled(
        loss=lambda: m.cross_entropy(reduction=reduction),
        optimizer=lambda: keras.optimizers.SGD(0.01),
    )
    assert_exact(make, fitting(weights=weights), towers())


@pytest.mark.parametrize("zero", [slice(0, 3), slice(3, 7), slice(0, 7)])
def test_weights_that_are_zero_on_some_towers(zero):
    weights = W.copy()
    weights[zero] = 0
    make = compiled(
        loss=lambda: m.cross_entropy(reduction="mean_with_sample_weight"),
        weighted_metrics=["accuracy"],
    )
    assert_exact(make, fitting(weights=weights), towers())


@pytest.mark.parametrize(
    "reduction", ["sum", "sum_over_batch_size", "mean_with_sample_weight"]
)
def test_masks(reduction):
    make = compiled(
        m.with_mask, loss=lambda: m.cross_entropy(reduction=reduction)
    )
    act = fitting(m.SENTENCE_LABELS[:COUNT], x=m.SENTENCES[:COUNT])
    assert_exact(make, act, towers(), tolerance=1e-5)


def test_mask_that_hides_all_of_one_towers_part():
    sentences = m.SENTENCES[:COUNT].copy()
    sentences[0:3] = 0
    act = fitting(m.SENTENCE_LABELS[:COUNT], x=sentences)
    assert_exact(compiled(m.with_mask), act, towers())


def test_loss_that_is_a_function():
    def loss():
        return lambda y, p: keras.losses.sparse_categorical_crossentropy(
            y, p, from_logits=True
        )

    assert_exact(compiled(loss=loss), fitting(), towers())


class AddsLoss(keras.layers.Layer):
    def call(self, inputs):
        self.add_loss(0.1 * tf.reduce_mean(inputs**2))
        return inputs


def test_add_loss():
    make = compiled(lambda: m.mlp(AddsLoss()))
    assert_exact(make, fitting(), towers())


class Custom(keras.Sequential):
    """A step of the user's own; subclasses say what its loss is."""

    def __init__(self, layers):
        super().__init__(layers)
        self.tracker = keras.metrics.Mean(name="mean")

    @property
    def metrics(self):
        return [self.tracker]

    def loss_of(self, losses):
        return tf.reduce_mean(losses)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.loss_of(
                keras.losses.sparse_categorical_crossentropy(
                    y, self(x, training=True), from_logits=True
                )
            )
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        self.tracker.update_state(loss)
        return {"mean": self.tracker.result(), "loss": loss}


class Summed(Custom):
    def loss_of(self, losses):
        return tf.reduce_sum(losses)


class Divided(Custom):
    """As in TensorFlow's guide for custom training with a strategy."""

    def loss_of(self, losses):
        strategy = tf.distribute.get_strategy()
        return tf.reduce_mean(losses) / strategy.num_replicas_in_sync


class ScaledByOptimizer(Custom):
    def loss_of(self, losses):
        return self.optimizer.scale_loss(tf.reduce_mean(losses))


def custom(cls, optimizer=lambda: keras.optimizers.SGD(0.01, 0.9)):
    def make():
        keras.utils.set_random_seed(1)
        dense = keras.layers.Dense
        model = cls([keras.Input((6,)), dense(5, "tanh"), dense(3)])
        model.compile(optimizer())
        return model

    return make


@pytest.mark.parametrize("cls", [Custom, Divided])
@pytest.mark.parametrize("batch", [BATCH, 2])
def test_custom_steps_that_average(cls, batch):
    # The metric is given one number a batch, without sample weights: the mean
    # over batches, each of which counts once, as on one device.
    assert_exact(custom(cls), fitting(batch_size=batch), towers())


def test_custom_step_that_scales_by_the_optimizer():
    # Logs of a scaled loss are the tower's own business; weights are exact.
    def act(model):
        fitting()(model)
        model.reset_metrics()

    assert_exact(custom(ScaledByOptimizer), act, towers())


def test_sum_of_a_custom_step():
    def act(model):
        return {"mean": fitting()(model).history["mean"]}

    assert_exact(custom(Summed), act, towers(average=False))


def test_not_to_average_is_not_to_average():
    # With a loss that is a mean, towers of equal size then sum three means.
    def act(model):
        fitting(batch_size=9, epochs=1, x=X[:27], y=Y[:27])(model)
        return ()

    class Thrice(Custom):
        def loss_of(self, losses):
            return 3 * tf.reduce_mean(losses)

    make = custom(Custom)
    assert_exact(
        make,
        act,
        towers(average=False),
        # The same weights to begin with.
        reference=lambda model: act(_becomes(model, Thrice)),
    )


def _becomes(model, cls):
    model.__class__ = cls
    return model


METRICS = {
    "auc": lambda name: keras.metrics.AUC(num_thresholds=20, name=name),
    "precision": keras.metrics.Precision,
    "recall": keras.metrics.Recall,
    "f1": lambda name: keras.metrics.F1Score(average="macro", name=name),
    "iou": lambda name: keras.metrics.OneHotMeanIoU(num_classes=3, name=name),
    "true positives": keras.metrics.TruePositives,
    "r2": keras.metrics.R2Score,
}


def test_metrics():
    targets = np.eye(3, dtype="float32")[Y]

    def make():
        keras.utils.set_random_seed(1)
        dense = keras.layers.Dense
        model = keras.Sequential(
            [keras.Input((6,)), dense(5, "tanh"), dense(3, "softmax")]
        )
        metrics = [metric(name=name) for name, metric in METRICS.items()]
        model.compile(m.momentum(), "categorical_crossentropy", metrics=metrics)
        return model

    def act(model):
        trained = fitting(targets, validation_data=(X, targets))(model).history
        evaluated = model.evaluate(X, targets, batch_size=7, verbose=0)
        return trained, evaluated

    assert_exact(make, act, towers(), tolerance=1e-5)


def test_mean_iou():
    labels = (Y > 0).astype("int32")[:, None]

    def make():
        keras.utils.set_random_seed(1)
        dense = keras.layers.Dense(1, "sigmoid")
        model = keras.Sequential([keras.Input((6,)), dense])
        model.compile(
            m.momentum(),
            "binary_crossentropy",
            metrics=[keras.metrics.MeanIoU(num_classes=2, name="metric")],
        )
        return model

    assert_exact(make, fitting(labels), towers())


class Examples(keras.metrics.Metric):
    """Counts examples in whole numbers."""

    def __init__(self, name="examples"):
        super().__init__(name=name, dtype="int32")
        self.count = self.add_weight(
            shape=(), initializer="zeros", dtype="int32", name="count"
        )

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.count.assign(self.count + tf.shape(y_true)[0])

    def result(self):
        return self.count


@pytest.mark.parametrize("number", [3, 8])
def test_whole_numbers_are_counted_exactly(number):
    def make():
        model = m.mlp()
        model.compile(m.momentum(), m.cross_entropy(), metrics=[Examples()])
        return model

    counts = []

    def act(model):
        history = fitting()(model).history
        counts.append(int(history["examples"][-1]))
        return history

    assert_exact(make, act, towers(number))
    assert counts == [COUNT, COUNT]


def test_two_losses_scaled_before_either_is_applied():
    class TwoLosses(keras.Model):
        def __init__(self):
            super().__init__()
            self.one = keras.layers.Dense(3)
            self.other = keras.layers.Dense(3)

        def call(self, inputs):
            return self.one(inputs) + self.other(inputs)

        def train_step(self, data):
            x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
            with tf.GradientTape(persistent=True) as tape:
                losses = [
                    self.optimizer.scale_loss(
                        self.compute_loss(y=y, y_pred=part(x))
                    )
                    for part in (self.one, self.other)
                ]
            for loss, part in zip(losses, (self.one, self.other), strict=True):
                weights = part.trainable_variables
                self.optimizer.apply(tape.gradient(loss, weights), weights)
            return {"loss": losses[0]}

    def make():
        keras.utils.set_random_seed(1)
        model = TwoLosses()
        model(X[:2])
        model.compile("sgd", m.cross_entropy())
        model.optimizer.build(model.trainable_variables)
        return model

    trained = []
    for towers in (1, 3):
        model = make()
        with kt.TowerStrategy(towers):
            model.fit(X[:14], Y[:14], batch_size=7, shuffle=False, verbose=0)
        trained.append(model.get_weights())
    for ours, reference in zip(*trained, strict=True):
        np.testing.assert_allclose(ours, reference, atol=1e-6)


@pytest.mark.parametrize("eagerly", [False, True])
def test_log_under_the_name_of_a_metric_that_counts_nothing(eagerly):
    def make():
        keras.utils.set_random_seed(1)
        model = m.OwnLog()
        model.compile("sgd", run_eagerly=eagerly)
        return model

    assert_exact(make, fitting(), towers())
