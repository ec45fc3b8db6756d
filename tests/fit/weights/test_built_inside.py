"""Models, optimizers and layers made or changed inside a block."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_towers as kt
from keras_towers.fit import components
from keras_towers.inspection.conformance import case_models as m
from keras_towers.inspection.conformance.outcomes import assert_ordinary
from tests.fit.one_device import trained, two_layers
from tests.kit import compare
from tests.kit.sampling import long_unless, sample_of
from tests.kit.training import X, Y, adam, fit, linear

pytestmark = pytest.mark.alternate


def _built():
    return linear()


def _built_and_trained():
    model = linear()
    fit(model)
    return model


@pytest.mark.parametrize("make", [_built, _built_and_trained])
def test_a_model_built_in_a_block_trains_on_its_towers_after_it(
    make, variables_on_towers, logged
):
    """As MirroredStrategy taught it; it is ordinary until then."""
    with kt.TowerStrategy(2) as strategy:
        model = make()
    assert not variables_on_towers()
    model.name = "mine"
    model.predict_on_batch(X)
    assert model._distribute_strategy is None
    said = len(logged("runs on the strategy"))
    fit(model)
    assert model._distribute_strategy is strategy
    assert [line for _, line in logged("runs on the strategy")[said:]] == [
        "fit of model 'mine' runs on the strategy under which it was created "
        f"or compiled: {strategy!r}"
    ]
    compare.assert_same_model(model, trained(1 if make is _built else 2))


def test_a_model_compiled_in_a_block_trains_on_its_towers_after_it():
    model = linear()
    with kt.TowerStrategy(2) as strategy:
        model.compile(m.momentum(), m.cross_entropy())
    fit(model)
    assert model._distribute_strategy is strategy
    compare.assert_same_model(model, trained(1))


def test_a_model_of_parts_that_were_made_in_a_block_is_ordinary():
    model = keras.Sequential([keras.Input((6,))])
    with kt.TowerStrategy(2):
        layer = keras.layers.Dense(3)
        layer.build((None, 6))
        optimizer = m.momentum()
    model.add(layer)
    model.compile(optimizer, m.cross_entropy())
    fit(model)
    assert_ordinary(model)


def test_another_block_may_train_what_was_built_inside():
    """Also a block that an error ends, and a call of kt.verify."""
    stop = keras.callbacks.LambdaCallback(on_epoch_end=_stop)
    with pytest.raises(KeyboardInterrupt), kt.TowerStrategy(2) as first:
        model = linear()
        fit(model, callbacks=[stop])
    fit(model)
    assert components.tower_strategy_of(model) is first
    with kt.TowerStrategy(3) as other:
        fit(model)
        assert components.tower_strategy_of(model) is other
    assert_ordinary(model, trains_on_towers=True)
    fit(model)
    assert components.tower_strategy_of(model) is first
    compare.assert_same_model(model, trained(4))
    assert kt.verify(model, X, Y).difference < 1e-4
    assert_ordinary(model, trains_on_towers=True)


def _stop(epoch: int, logs: object) -> None:
    raise KeyboardInterrupt


def test_built_inside_the_scope_stays_on_the_towers(tmp_path):
    """Trained, evaluated, predicted with and saved outside the scope."""

    def act(model):
        history = fit(model)
        return history["loss"], *(
            model.evaluate(X, Y, verbose=0),
            model.predict(X, verbose=0),
            model.train_on_batch(X[:7], Y[:7]),
        )

    reference = linear(run_eagerly=True)
    wanted = act(reference)
    strategy = kt.TowerStrategy(2)
    with strategy.scope():
        model = linear()
    assert not tf.distribute.has_strategy()
    tf.nest.map_structure(compare.assert_close, act(model), wanted)
    assert model.distribute_strategy is strategy
    compare.assert_same_model(model, reference)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    compare.assert_close(
        loaded.predict(X, verbose=0), reference.predict(X, verbose=0)
    )


def test_compiled_again_inside(variables_on_towers):
    """New optimizer, loss and metrics; the old ones are ordinary again."""
    olds = []

    def act(model):
        fit(model)
        olds.append(model.optimizer)
        model.compile(
            m.momentum(),
            "mse",
            metrics=["mae"],
            loss_weights=0.5,
            run_eagerly=model.run_eagerly,
        )
        fit(model, y=np.eye(3, dtype="float32")[Y])
        return model.evaluate(X, np.eye(3)[Y], verbose=0, return_dict=True)

    def make():
        return linear(optimizer=adam, metrics=["accuracy"])

    compare.assert_exact(make, act, kt.TowerStrategy(2))
    assert not variables_on_towers()
    compare.assert_all_close(olds[0].variables, olds[1].variables)


@pytest.mark.parametrize(
    "updates", long_unless("once".__eq__, ["once", "each"])
)
def test_layers_frozen_and_added_between_fits(updates):
    def compiled_again(model):
        model.compile(adam(), m.cross_entropy(), run_eagerly=model.run_eagerly)
        return fit(model)["loss"]

    def act(model):
        fit(model)
        model.layers[0].trainable = False
        kernel = model.layers[0].kernel.numpy()
        losses = [compiled_again(model)]
        np.testing.assert_array_equal(kernel, model.layers[0].kernel)
        model.layers[0].trainable = True
        model.pop()
        keras.utils.set_random_seed(4)
        model.add(keras.layers.Dense(3, "tanh"))
        model.layers[0].enable_lora(2)
        losses.append(compiled_again(model))
        assert np.abs(kernel - model.layers[0].kernel.numpy()).max() > 1e-4
        return losses

    strategy = kt.TowerStrategy(2, updates=updates)
    compare.assert_exact(two_layers, act, strategy)


@pytest.mark.parametrize(
    "updates", long_unless("sharded".__eq__, ["once", "each", "sharded"])
)
def test_values_written_inside_reach_every_tower(updates, tmp_path):
    """``set_weights``, ``load_weights``, ``assign``, learning rate, metrics."""

    def make():
        norm = keras.layers.BatchNormalization(synchronized=True)
        return linear(norm, optimizer=adam)

    other = make()
    other.set_weights([w + 0.1 for w in other.get_weights()])
    file = tmp_path / "other.weights.h5"
    other.save_weights(file)

    def act(model):
        fit(model)
        model.set_weights(other.get_weights())
        model.optimizer.learning_rate = 0.003
        logs = [fit(model)["loss"]]
        model.load_weights(file)
        model.layers[1].bias.assign_add(np.ones(3, "float32"))
        model.optimizer.iterations.assign(100)
        logs.append(fit(model)["loss"])
        model.reset_metrics()
        return logs

    strategy = kt.TowerStrategy(2, updates=updates)
    compare.assert_exact(make, act, strategy, tolerance=1e-5)


class Centered(keras.layers.Layer):
    """Has a variable of TensorFlow, which its calls write."""

    def __init__(self):
        super().__init__()
        self.mean = tf.Variable(tf.zeros([X.shape[1]]), trainable=False)

    def call(self, x):
        self.mean.assign(0.9 * self.mean + 0.1 * tf.reduce_mean(x, 0))
        return x - self.mean


def _fit_with_a_variable_of_tensorflow():
    """Steps, eager steps and callbacks write it in turn."""
    layer = Centered()
    model = linear(layer)
    writes = [
        lambda: layer.mean.assign(X[0]),
        lambda: layer.mean[1:3].assign([5.0, 6.0]),
        lambda: layer.mean.scatter_nd_update([[0]], [7.0]),
    ]

    def write(batch, logs=None):
        writes[batch % len(writes)]()

    callback = keras.callbacks.LambdaCallback(on_train_batch_end=write)
    for model.run_eagerly in (False, True, False):
        fit(model, callbacks=[callback])
        fit(model)
    return layer.mean.numpy(), model.predict(X, verbose=0), model.get_weights()


@pytest.mark.parametrize("updates", sample_of(["once", "each"]))
def test_a_variable_of_tensorflow_made_inside_has_one_value(updates):
    wanted = _fit_with_a_variable_of_tensorflow()
    with kt.TowerStrategy(3, updates=updates):
        found = _fit_with_a_variable_of_tensorflow()
    tf.nest.map_structure(compare.assert_close, found, wanted)
