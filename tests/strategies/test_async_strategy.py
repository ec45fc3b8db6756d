"""Asynchronous towers are a strategy like the others outside training, too."""

import keras
import pytest
import tensorflow as tf

import keras_towers as kt
from keras_towers.strategies import registry
from tests.kit.compare import close
from tests.kit.ordinary import assert_ordinary
from tests.kit.training import BATCH, STEPS, X, Y, classifier, fit
from tests.strategies.async_cases import dataset

pytestmark = pytest.mark.core


def test_other_methods_are_exact(tmp_path):
    model = classifier(keras.layers.BatchNormalization())
    with kt.AsyncTowerStrategy(3) as strategy:
        fit(model, epochs=2)
        inside = model.evaluate(X, Y, batch_size=BATCH, verbose=0)
        outputs = model.predict(X, batch_size=BATCH, verbose=0)
        model.save(tmp_path / "inside.keras")
    close(model.evaluate(X, Y, batch_size=BATCH, verbose=0), inside)
    close(model.predict(X, batch_size=BATCH, verbose=0), outputs)
    model.save(tmp_path / "after.keras")
    for name in ("inside", "after"):
        loaded = keras.models.load_model(tmp_path / f"{name}.keras")
        close(loaded.predict(X, verbose=0), outputs)
        assert int(loaded.optimizer.iterations) == 2 * STEPS
    # And on one device, and on towers that wait.
    fit(model)
    with kt.TowerStrategy(2):
        fit(model)
    with strategy:
        fit(model)
    assert int(model.optimizer.iterations) == 5 * STEPS


def test_train_on_batch_is_that_of_one_device():
    reference, model = classifier(), classifier()
    wanted = [reference.train_on_batch(X[:9], Y[:9]) for _ in range(3)]
    with kt.AsyncTowerStrategy(3):
        close([model.train_on_batch(X[:9], Y[:9]) for _ in range(3)], wanted)
    for mine, other in zip(model.weights, reference.weights, strict=True):
        close(mine, other)


def test_a_model_built_inside_and_a_custom_loop():
    strategy = kt.strategy("async", towers=2)
    assert isinstance(strategy, tf.distribute.Strategy)
    with strategy.scope():
        model = classifier(optimizer=lambda: keras.optimizers.SGD(0.1))
    fit(model, epochs=2)
    assert int(model.optimizer.iterations) == 2 * STEPS

    @tf.function
    def step(x, y):
        def on_replica(x, y):
            with tf.GradientTape() as tape:
                loss = model.loss(y, model(x))
            gradients = tape.gradient(loss, model.trainable_variables)
            model.optimizer.apply(gradients, model.trainable_variables)
            return loss

        return strategy.run(on_replica, (x, y))

    with strategy.scope():
        losses = strategy.experimental_local_results(step(X, Y))
    assert len(losses) == 2
    assert int(model.optimizer.iterations) == 2 * STEPS + 1


def test_says_what_runs():
    assert "async" in registry.strategy_names()
    said = kt.strategy("async", towers=3, scale_gradient=False).describe()
    assert said.startswith("AsyncTowerStrategy: 3 towers (/device:CPU:0 to")
    assert "not scaled" in said
    assert kt.AsyncTowerStrategy(2).mode == "async"


def test_bad_input():
    with pytest.raises(kt.TowerError, match="0"):
        kt.AsyncTowerStrategy(0)
    with pytest.raises(kt.TowerError, match="GPU:7"):
        kt.AsyncTowerStrategy(["/device:GPU:7"])
    with pytest.raises(kt.TowerError, match="does not take .*mode"):
        kt.strategy("async", mode="nccl")
    model = classifier()
    with kt.AsyncTowerStrategy(2) as strategy:
        with pytest.raises(kt.TowerError, match="distributed dataset"):
            model.fit(strategy.experimental_distribute_dataset(dataset()))
        for nothing in (
            dataset().take(0),
            dataset().filter(lambda *_: False),
        ):
            with pytest.raises(kt.TowerError, match="empty"):
                model.fit(nothing, verbose=0)
        model.fit(X[:1], Y[:1], verbose=0)
    assert_ordinary(model)
