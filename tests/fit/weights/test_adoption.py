"""A model built outside trains on towers and is ordinary afterwards."""

import functools
import gc

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_towers as kt
from keras_towers.inspection.conformance import case_models as m
from keras_towers.inspection.conformance.outcomes import (
    Originals,
    assert_ordinary,
)
from tests.kit import compare
from tests.kit.meshes import layout_map, mesh_of
from tests.kit.sampling import sample_of
from tests.kit.training import X, Y, adam, fit, linear, stacked

pytestmark = pytest.mark.alternate


def _scaled():
    inner = m.momentum(
        gradient_accumulation_steps=3,
        use_ema=True,
        ema_momentum=0.8,
        ema_overwrite_frequency=5,
    )
    return keras.optimizers.LossScaleOptimizer(
        inner, initial_scale=1024.0, dynamic_growth_steps=3
    )


def _with_norm():
    norm = keras.layers.BatchNormalization(synchronized=True)
    return linear(norm, optimizer=_scaled)


def test_state_is_carried_over_both_ways(variables_on_towers):
    """Outside, on towers, outside: as if nothing had happened."""
    reference, model = _with_norm(), _with_norm()
    reference.run_eagerly = True
    # Optimizer state moves between tower 0 and every tower, and strategies of
    # different size follow on one another.
    inside = [
        {"towers": 2, "mode": "collective"},
        {"towers": 3, "updates": "each"},
    ]
    for options in (None, *inside, None):
        wanted = fit(reference)
        if options is None:
            found = fit(model)
            # By now everything is built: slots, metrics, lazy layers.
            originals = Originals(model)
        else:
            with kt.TowerStrategy(**options) as strategy:
                assert strategy.mode == options.get("mode", strategy.mode)
                found = fit(model)
                on_towers = len(variables_on_towers())
            # Each weight once, or with copies where towers update their own.
            has_copies = options.get("updates") == "each"
            assert bool(on_towers) == has_copies
            originals.assert_back()
        assert_ordinary(model)
        compare.assert_same_history(found, wanted, 1e-5)
    compare.assert_same_model(model, reference, 2e-5)


class Scales(keras.layers.Layer):
    """Reads a weight in a function, whose traces TensorFlow keeps."""

    def build(self, shape):
        self.scale = self.add_weight(shape[1:], name="scale")

    @tf.function
    def scaled(self, x):
        return x * self.scale

    def call(self, x):
        return self.scaled(x)


def on_a_mesh():
    layouts = layout_map(mesh_of(2, 2), {".*scale": ("model",)})
    return kt.ModelParallelStrategy(layouts)


@pytest.mark.parametrize(
    ("strategy", "xla"),
    # XLA gets values of weights, which no trace keeps.
    [(on_a_mesh, False), (functools.partial(kt.TowerStrategy, 2), True)],
)
def test_functions_read_weights_where_they_are(strategy, xla):
    """Also those that were traced before a block, or in one."""

    def act(model):
        return fit(model), model.evaluate(X, Y, verbose=0)

    make = stacked(lambda: [Scales(), keras.layers.Dense(3)], jit_compile=xla)
    found = compare.assert_exact(make, act, strategy(), in_graph=True)
    logs, wanted = found.model.evaluate(X, Y, verbose=0), found.returned[1]
    compare.assert_close(logs, wanted, 1e-5)


METHODS = {
    "evaluate": lambda model: model.evaluate(X, Y, verbose=0),
    "predict": lambda model: model.predict(X, batch_size=9, verbose=0),
    "predict_on_batch": lambda model: model.predict_on_batch(X[:5]),
    "test_on_batch": lambda model: model.test_on_batch(X[:5], Y[:5]),
}


@pytest.mark.parametrize("name", sample_of(METHODS, part=4))
def test_each_method_may_be_the_first(name):
    """It adopts the model, and is no obstacle to the rest."""
    method = METHODS[name]

    def act(model):
        result = method(model)
        placed = model._distribute_strategy is not None
        assert placed == tf.distribute.has_strategy()
        if name.startswith("predict"):
            assert not model.optimizer.built
        return result, fit(model)

    wanted = compare.use_model(lambda: linear(run_eagerly=True), act)
    found = compare.use_model(linear, act, kt.TowerStrategy(2))
    compare.assert_same(found, wanted)
    # Functions that were traced on towers are not used outside.
    compare.assert_close(method(found.model), method(wanted.model), 1e-5)


def test_frozen_model_evaluates_and_trains_nothing():
    def make():
        model = linear(keras.layers.BatchNormalization())
        model.trainable = False
        model.compile(m.momentum(), m.cross_entropy(), metrics=["accuracy"])
        return model

    def act(model):
        # Keras lets it fit.
        return model.evaluate(X, Y, verbose=0), fit(model)

    compare.assert_exact(make, act, kt.TowerStrategy(2))


def test_models_that_share_layers_in_turn():
    """The classic GAN: two compiled models with layers in common."""

    def make():
        keras.utils.set_random_seed(3)
        inputs = keras.Input((6,))
        generator = keras.Sequential([keras.Input((6,)), keras.layers.Dense(6)])
        critic = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1)])
        critic.compile(adam(), "mse")
        critic.trainable = False
        both = keras.Model(inputs, critic(generator(inputs)))
        both.compile(m.momentum(), "mse")
        both.parts = [generator, critic]
        return both

    def act(both):
        generator, critic = both.parts
        logs = []
        for _ in range(2):
            critic.trainable = True
            fake = generator.predict_on_batch(X[:9])
            logs.append(critic.train_on_batch(fake, np.zeros((9, 1))))
            critic.trainable = False
            logs.append(both.train_on_batch(X[:9], np.ones((9, 1))))
        return logs

    both = compare.assert_exact(make, act, kt.TowerStrategy(2)).model
    for part in both.parts:
        assert_ordinary(part)


def test_a_model_of_another_strategy_is_refused_and_unharmed():
    mirrored = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    with mirrored.scope():
        model = linear()
    before = model.get_weights()
    for towers, kind in ((1, "fit"), (4, "fit"), (4, "train_on_batch")):
        with (
            pytest.raises(
                kt.TowerError, match="lives on another.*MirroredStrategy"
            ),
            kt.TowerStrategy(towers),
        ):
            getattr(model, kind)(X[:8], Y[:8])
        assert model.distribute_strategy is mirrored
    np.testing.assert_equal(model.get_weights(), before)


def test_a_nested_model_outlives_the_outer_one():
    inner = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3)])
    kernel = inner.layers[0].kernel.value
    with kt.TowerStrategy(2):
        outer = keras.Sequential([inner, keras.layers.Softmax()])
        outer.compile("sgd", keras.losses.SparseCategoricalCrossentropy())
        fit(outer)
        del outer
        gc.collect()
    assert inner._distribute_strategy is None
    assert inner.layers[0].kernel.value is kernel
    inner.compile("sgd", "mse")
    fit(inner, y=np.zeros((len(X), 3)))
