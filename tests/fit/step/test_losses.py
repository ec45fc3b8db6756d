"""Losses, metrics and custom steps, on towers of different size."""

import functools

import keras
import pytest
import tensorflow as tf

import keras_towers as kt
from tests.exactness import models as m
from tests.kit.compare import assert_exact
from tests.kit.training import compiled

# Batches of 7 on 3 towers are 3, 2, 2; the last one is of a single example.
COUNT, BATCH = 29, 7
X, Y = m.FEATURES[:COUNT], m.LABELS[:COUNT]
SENTENCES = m.SENTENCES[:COUNT].copy()
SENTENCES[0:3] = 0  # of one tower's part nothing is left

Dense = keras.layers.Dense


def _weights():
    """Of one tower, of two others, and of a whole batch they are zero."""
    weights = m.WEIGHTS[:COUNT].copy()
    weights[0:3] = weights[10:14] = weights[14:21] = 0
    return weights


def fitting(y=Y, weights=None, x=X, **kwargs):
    arguments = {"batch_size": BATCH, "shuffle": False, **kwargs}
    return lambda model: model.fit(
        x, y, sample_weight=weights, verbose=0, **arguments
    )


def towers(number=3, **options):
    return kt.TowerStrategy(number, **options)


class AddsLoss(keras.layers.Layer):
    def call(self, inputs):
        self.add_loss(0.1 * tf.reduce_mean(inputs**2))
        return inputs


def a_function(y, p):
    return keras.losses.sparse_categorical_crossentropy(y, p, from_logits=True)


REDUCTIONS = ("sum", "sum_over_batch_size", "mean_with_sample_weight")


def many_headed(inputs, *body):
    """A head for each way to reduce a loss, and for one that is a function."""
    # Initializers take a seed when they are made.
    keras.utils.set_random_seed(1)
    x = inputs
    for layer in body:
        x = layer()(x)
    losses = {name: m.cross_entropy(reduction=name) for name in REDUCTIONS}
    losses["function"] = a_function
    heads = {name: Dense(3, name=name)(x) for name in losses}
    model = keras.Model(inputs, heads)
    model.compile(
        keras.optimizers.SGD(0.01),
        losses,
        weighted_metrics={"sum_over_batch_size": ["accuracy"]},
    )
    return model


def for_each_head(values):
    return dict.fromkeys((*REDUCTIONS, "function"), values)


@pytest.mark.core
def test_reductions():
    def act(model):
        labels, weights = for_each_head(Y), for_each_head(_weights())
        weighted = fitting(labels, weights)(model)
        return weighted.history, fitting(labels)(model).history

    def make():
        dense = functools.partial(Dense, 7, "tanh")
        return many_headed(keras.Input((6,)), dense, AddsLoss)

    # Keras logs a metric of each loss in a graph only.
    assert_exact(make, act, towers(), in_graph=True)


def test_masks():
    labels = for_each_head(m.SENTENCE_LABELS[:COUNT])

    def make():
        embedding = functools.partial(
            keras.layers.Embedding, 14, 5, mask_zero=True
        )
        return many_headed(keras.Input((4,), dtype="int32"), embedding)

    act = fitting(labels, x=SENTENCES)
    assert_exact(make, act, towers(), tolerance=1e-5, in_graph=True)


def test_a_vector_of_losses():
    make = compiled(
        loss=lambda: m.cross_entropy(reduction="none"),
        optimizer=lambda: keras.optimizers.SGD(0.001),
    )
    # Sums over the batch make large steps, which amplify what is rounded.
    assert_exact(make, fitting(), towers(), tolerance=5e-5)


class Custom(keras.Sequential):
    """A step of the user's own; subclasses say what its loss is."""

    def train_step(self, data):
        x, y = data
        variables = self.trainable_variables
        halves = variables[:2], variables[2:]
        with tf.GradientTape(persistent=True) as tape:
            values = a_function(y, self(x, training=True))
            # Both before either is applied.
            losses = [self.loss_of(values) for _ in halves]
        for loss, some in zip(losses, halves, strict=True):
            self.optimizer.apply(tape.gradient(loss, some), some)
        # It is given one number a batch, without sample weights: the mean over
        # batches, each of which counts once, as on one device.
        self.tracker.update_state(self.logged(values))
        return {"mean": self.tracker.result()}


class Divided(Custom):
    """As in TensorFlow's guide for custom training with a strategy."""

    def loss_of(self, losses):
        strategy = tf.distribute.get_strategy()
        return tf.reduce_mean(losses) / strategy.num_replicas_in_sync

    logged = loss_of


class Summed(Custom):
    def loss_of(self, losses):
        return tf.reduce_sum(losses)

    logged = loss_of


class Scaled(Custom):
    def loss_of(self, losses):
        return self.optimizer.scale_loss(tf.reduce_mean(losses))

    def logged(self, losses):
        # A scaled loss is the tower's own.
        return tf.reduce_mean(losses)


@pytest.mark.parametrize(
    "cls, average", [(Divided, True), (Scaled, True), (Summed, False)]
)
def test_custom_steps(cls, average):
    def make():
        keras.utils.set_random_seed(1)
        model = cls([keras.Input((6,)), Dense(5, "tanh"), Dense(3)])
        model.tracker = keras.metrics.Mean(name="mean")
        model.compile(keras.optimizers.SGD(0.01, 0.9))
        model.optimizer.build(model.trainable_variables)
        return model

    assert_exact(make, fitting(), towers(average=average))


# Of which float32 would keep no sum.
EACH = 2**25 + 1


class Examples(keras.metrics.Metric):
    """Counts examples in whole numbers, each as many."""

    def __init__(self, name="examples"):
        super().__init__(name=name, dtype="int32")
        self.count = self.add_weight(
            shape=(), initializer="zeros", dtype="int32", name="count"
        )

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.count.assign(self.count + EACH * tf.shape(y_true)[0])

    def result(self):
        return self.count


def test_metrics():
    make = compiled(metrics=lambda: ["accuracy", Examples()])

    def act(model):
        history = fitting(validation_data=(X, Y))(model).history
        total = [EACH * COUNT]
        assert history.pop("examples") == history.pop("val_examples") == total
        return history

    assert_exact(make, act, towers())
