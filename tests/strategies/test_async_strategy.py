"""Asynchronous towers learn, and are a strategy like others otherwise."""

import keras
import pytest
import tensorflow as tf

import keras_towers as kt
from tests.exactness import models as m
from tests.kit.compare import assert_all_close, assert_close
from tests.kit.ordinary import assert_ordinary
from tests.kit.training import BATCH, STEPS, X, Y, fit, linear
from tests.strategies.async_cases import dataset


def test_asynchronous_towers_learn():
    """With sparse gradients, scaled losses, and layers that keep a state."""
    keras.utils.set_random_seed(3)
    model = keras.Sequential(
        [
            *m.with_embedding().layers[:-1],
            keras.layers.Dropout(0.1),
            keras.layers.BatchNormalization(),
            keras.layers.Dense(3),
        ]
    )
    inner = keras.optimizers.AdamW(0.02, clipnorm=1.0)
    optimizer = keras.optimizers.LossScaleOptimizer(inner)
    model.compile(optimizer, m.cross_entropy())
    y = m.TOKENS[:, 0] % 3
    with kt.AsyncTowerStrategy(2):
        losses = fit(model, 15, m.TOKENS, y)["loss"]
        assert model.evaluate(m.TOKENS, y, verbose=0) < losses[0] / 2
    assert int(inner.iterations) == 15 * -(-len(y) // BATCH)


def test_other_methods_are_exact():
    model, reference = (
        linear(keras.layers.BatchNormalization()) for _ in range(2)
    )
    reference.run_eagerly = True
    wanted = [reference.train_on_batch(X[:9], Y[:9]) for _ in range(2)]
    with kt.AsyncTowerStrategy(2):
        assert_close(
            [model.train_on_batch(X[:9], Y[:9]) for _ in range(2)], wanted
        )
        assert_all_close(model.weights, reference.weights)
        fit(model)
        inside = model.evaluate(X, Y, batch_size=BATCH, verbose=0)
        outputs = model.predict(X, batch_size=BATCH, verbose=0)
    model.run_eagerly = True
    assert_close(model.evaluate(X, Y, batch_size=BATCH, verbose=0), inside)
    assert_close(model(X), outputs)
    assert int(model.optimizer.iterations) == 2 + STEPS


def test_a_model_built_inside_and_a_custom_loop():
    strategy = kt.strategy("async", towers=2)
    with strategy.scope():
        model = linear(optimizer=lambda: keras.optimizers.SGD(0.1))
    fit(model)
    reference = linear(optimizer=lambda: keras.optimizers.SGD(0.1))
    reference.set_weights(model.get_weights())

    def step(model, x, y):
        with tf.GradientTape() as tape:
            loss = model.loss(y, model(x))
        gradients = tape.gradient(loss, model.trainable_variables)
        model.optimizer.apply(gradients, model.trainable_variables)
        return loss

    @tf.function
    def on_replicas(x, y):
        return strategy.run(step, (model, x, y))

    with strategy.scope():
        losses = strategy.experimental_local_results(on_replicas(X, Y))
    assert_close(losses, [step(reference, X, Y) / 2] * 2)
    # Here the towers wait for each other.
    assert_all_close(model.weights, reference.weights)
    assert int(model.optimizer.iterations) == STEPS + 1


def test_empty_and_distributed_data_are_refused():
    model = linear()
    with kt.AsyncTowerStrategy(2) as strategy:
        with pytest.raises(kt.TowerError, match="distributed dataset"):
            model.fit(strategy.experimental_distribute_dataset(dataset()))
        for nothing in (dataset().take(0), dataset().filter(lambda *_: False)):
            with pytest.raises(kt.TowerError, match="empty"):
                model.fit(nothing, verbose=0)
        # Fewer examples than towers are enough.
        model.fit(X[:1], Y[:1], verbose=0)
    assert_ordinary(model)
