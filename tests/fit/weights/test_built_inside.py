"""Models, optimizers and layers made or changed inside a block."""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_towers as kt
from tests.exactness import models as m
from tests.kit.compare import assert_exact, close, same_model
from tests.kit.long import long_but
from tests.kit.ordinary import Originals, all_variables, assert_ordinary
from tests.kit.training import X, Y, adam, classifier, fit


def _compile(model, **kwargs):
    model.compile(adam(), m.cross_entropy(), metrics=["accuracy"], **kwargs)


def test_built_inside_the_block_is_ordinary_after_it(variables_on_towers):
    reference = classifier()
    fit(reference)
    with kt.TowerStrategy(3):
        model = classifier()
        fit(model)
        spare = classifier()  # never used inside
    for mine in (model, spare):
        assert_ordinary(mine)
    assert not variables_on_towers()
    same_model(model, reference)
    fit(spare)
    same_model(spare, reference)
    fit(model)
    fit(reference)
    same_model(model, reference)


def test_built_inside_the_scope_stays_on_the_towers(tmp_path):
    """Trained, evaluated, predicted with and saved outside the scope."""

    def act(model):
        history = fit(model)
        return history["loss"], *(
            model.evaluate(X, Y, verbose=0),
            model.predict(X, verbose=0),
            model.train_on_batch(X[:7], Y[:7]),
        )

    reference = classifier()
    wanted = act(reference)
    strategy = kt.TowerStrategy(3)
    with strategy.scope():
        model = classifier()
    assert not tf.distribute.has_strategy()
    tf.nest.map_structure(close, act(model), wanted)
    assert model.distribute_strategy is strategy
    kernel = model.layers[0].kernel._value
    assert len(strategy.experimental_local_results(kernel)) == 3
    same_model(model, reference)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    close(loaded.predict(X, verbose=0), reference.predict(X, verbose=0))


def test_scope_of_a_model_from_outside():
    """It stays on the towers and trains correctly outside as well."""
    reference, model = classifier(), classifier()
    fit(reference, epochs=2)
    strategy = kt.TowerStrategy(3)
    with strategy.scope():
        fit(model)
    assert model.distribute_strategy is strategy
    fit(model)
    close(model.evaluate(X, Y, verbose=0), reference.evaluate(X, Y, verbose=0))
    same_model(model, reference)


def test_model_of_a_scope_outlives_a_block_of_the_same_strategy():
    reference = classifier()
    strategy = kt.TowerStrategy(3)
    with strategy.scope():
        model = classifier()
    fit(reference)
    fit(model)
    with strategy:
        fit(classifier())
    fit(reference)
    fit(model)
    same_model(model, reference)


def test_adopted_by_hand(variables_on_towers):
    reference, model = classifier(), classifier()
    originals = Originals(model)
    fit(reference, epochs=2)
    strategy = kt.TowerStrategy(3)
    strategy.adopt(model)
    assert variables_on_towers()
    fit(model)
    with strategy:
        fit(model)
    assert_ordinary(model)
    originals.assert_back()
    same_model(model, reference)


@pytest.mark.parametrize("part", ["compile", "optimizer", "layers"])
def test_parts_made_inside_and_first_used_after(part, variables_on_towers):
    """What is left of the block is nothing but what plain Keras makes."""
    reference = classifier()
    fit(reference)
    with kt.TowerStrategy(3):
        if part == "layers":
            layer = keras.layers.Dense(3)
            layer.build((None, 6))
        optimizer = adam()
        if part == "compile":
            model = m.mlp()
            _compile(model)
    assert not variables_on_towers()
    if part != "compile":
        model = m.mlp()
        model.compile(optimizer, m.cross_entropy(), metrics=["accuracy"])
    if part == "layers":
        keras.Sequential([keras.Input((6,)), layer]).predict(X, verbose=0)
    assert_ordinary(model)
    fit(model)
    same_model(model, reference)


def test_compiled_again_inside(variables_on_towers):
    """New optimizer, loss and metrics; the old ones are ordinary again."""
    olds = []

    def act(model):
        fit(model)
        olds.append(model.optimizer)
        model.compile(m.momentum(), "mse", metrics=["mae"], loss_weights=0.5)
        fit(model, y=np.eye(3, dtype="float32")[Y])
        return model.evaluate(X, np.eye(3)[Y], verbose=0, return_dict=True)

    assert_exact(classifier, act, kt.TowerStrategy(3))
    assert not variables_on_towers()
    for mine, other in zip(olds[0].variables, olds[1].variables, strict=True):
        close(mine.numpy(), other.numpy())


def test_frozen_and_thawed_between_fits():
    def act(model):
        fit(model)
        model.layers[0].trainable = False
        _compile(model)
        kernel = model.layers[0].kernel.numpy()
        fit(model)
        np.testing.assert_array_equal(kernel, model.layers[0].kernel)
        model.layers[0].trainable = True
        _compile(model)
        fit(model)
        assert np.abs(kernel - model.layers[0].kernel.numpy()).max() > 1e-4

    assert_exact(classifier, act, kt.TowerStrategy(3, updates="each"))


def test_layers_added_between_fits():
    def act(model):
        fit(model)
        model.pop()
        keras.utils.set_random_seed(4)
        model.add(keras.layers.Dense(3, "tanh"))
        model.layers[0].enable_lora(2)
        _compile(model)
        return fit(model)["loss"]

    assert_exact(classifier, act, kt.TowerStrategy(3))


@pytest.mark.parametrize(
    "updates", long_but("each".__ne__, ["once", "each", "sharded"])
)
def test_values_written_inside_reach_every_tower(updates, tmp_path):
    """``set_weights``, ``load_weights``, ``assign``, learning rate, metrics."""
    other = m.mlp(keras.layers.BatchNormalization(synchronized=True))
    other.set_weights([w + 0.1 for w in other.get_weights()])
    file = tmp_path / "other.weights.h5"
    other.save_weights(file)

    def act(model):
        fit(model)
        model.set_weights(other.get_weights())
        model.optimizer.learning_rate = 0.003
        logs = [fit(model)["loss"]]
        model.load_weights(file)
        model.layers[0].bias.assign_add(np.ones(7, "float32"))
        model.optimizer.iterations.assign(100)
        logs.append(fit(model)["loss"])
        model.reset_metrics()
        return logs

    assert_exact(
        lambda: classifier(keras.layers.BatchNormalization(synchronized=True)),
        act,
        kt.TowerStrategy(3, updates=updates),
        tolerance=1e-5,
    )


def test_own_metric_in_a_callback(variables_on_towers):
    """A script's own evaluation works on the towers as outside."""
    results = []

    class Own(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            metric = keras.metrics.SparseCategoricalAccuracy()
            metric.update_state(Y, self.model(X))
            metric.update_state(Y[:3], self.model.predict(X[:3], verbose=0))
            results.append(float(metric.result()))

    for strategy in (contextlib.nullcontext(), kt.TowerStrategy(3)):
        model = classifier()
        with strategy:
            fit(model, callbacks=[Own()])
    close(*results)
    assert not variables_on_towers()


@pytest.mark.parametrize("name", ["batch", "whole"])
def test_predicts_first(name):
    """Compiled, never trained: neither metrics nor optimizer exist yet."""
    reference = classifier()
    model = classifier()
    with kt.TowerStrategy(3):
        if name == "batch":
            found = model.predict_on_batch(X)
        else:
            found = model.predict(X, batch_size=9, verbose=0)
        assert not model.optimizer.built
        # What came first is no obstacle to the rest.
        fit(model)
    close(found, reference.predict(X, verbose=0))
    fit(reference)
    same_model(model, reference)


class Autoencoder(keras.Model):
    """Trained on inputs alone, which its compiled loss compares with."""

    def __init__(self):
        super().__init__()
        keras.utils.set_random_seed(7)
        self.dense = keras.layers.Dense(6)

    def call(self, inputs):
        return self.dense(inputs)

    def train_step(self, data):
        x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        return super().train_step((x, x))


def test_lazy_model_without_targets():
    """Nothing can be built from a target that is not there."""

    def make():
        model = Autoencoder()
        model.compile(adam(), "mse", metrics=["mae"])
        return model

    reference, model = make(), make()
    wanted = fit(reference, y=None)["loss"]
    with kt.TowerStrategy(3):
        found = fit(model, y=None)["loss"]
    close(found, wanted)
    assert_ordinary(model)
    assert len(all_variables(model)) == len(all_variables(reference))
    for mine, other in zip(model.weights, reference.weights, strict=True):
        close(mine.numpy(), other.numpy())
