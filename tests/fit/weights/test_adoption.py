"""A model built outside trains on towers and is ordinary afterwards."""

import gc

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_towers as kt
from tests.exactness import models as m
from tests.exactness.cases import CASES, Case
from tests.exactness.cases import fit as fitting
from tests.kit.compare import assert_exact, close, same_history, same_model
from tests.kit.long import long_but
from tests.kit.ordinary import (
    Originals,
    all_variables,
    assert_ordinary,
    optimizers,
)
from tests.kit.training import (
    EXAMPLES,
    X,
    Y,
    adam,
    classifier,
    compiled,
    fit,
)


class Shared(keras.Model):
    """A subclassed model that uses a nested model and a layer twice."""

    def __init__(self):
        super().__init__()
        keras.utils.set_random_seed(8)
        self.body = keras.Sequential(
            [keras.Input((6,)), keras.layers.Dense(6, "tanh")]
        )
        self.head = keras.layers.Dense(3)

    def call(self, inputs):
        return self.head(self.body(self.body(inputs)))

    def test_step(self, data):
        # Its own: one more log than Keras's.
        return {**super().test_step(data), "twice": 2.0}


def _nested_functional():
    keras.utils.set_random_seed(9)
    inside = m.mlp(keras.layers.Dense(4))
    inputs = keras.Input((6,))
    return keras.Model(inputs, inside(keras.layers.Dense(6)(inputs)))


def _multi():
    # Two optimizers behind one, each with state of its own.
    return keras.optimizers.MultiOptimizer(
        keras.optimizers.OptimizerMap(adam(), {".*/kernel": m.momentum()})
    )


_PLAIN = fitting(m.FEATURES, m.LABELS, EXAMPLES, epochs=1)
CARRIED = {
    name: CASES[name]
    for name in (
        "ema-overwrite",
        "loss-scale",
        "gan",
        "lazy",
    )
} | {
    "shared-subclassed": Case(compiled(Shared, adam), _PLAIN),
    "nested-functional": Case(compiled(_nested_functional, adam), _PLAIN),
    "multi-optimizer": Case(compiled(m.mlp, _multi), _PLAIN),
}


@pytest.mark.parametrize(
    "name",
    long_but(
        (
            "ema-overwrite",
            "shared-subclassed",
            "multi-optimizer",
        ).__contains__,
        CARRIED,
    ),
)
def test_state_is_carried_over_both_ways(name, variables_on_towers):
    """Outside, on three towers, outside: as if nothing had happened."""
    case = CARRIED[name]
    reference, model = case.build(), case.build()
    wanted = [case.fit(reference).history for _ in range(3)]
    found = [case.fit(model).history]
    # By now everything is built: slots, metrics, lazy layers.
    originals = Originals(model)
    with kt.TowerStrategy(3):
        found.append(case.fit(model).history)
        on_towers = len(variables_on_towers())
    assert on_towers >= len(model.trainable_variables)
    assert_ordinary(model)
    originals.assert_back()
    found.append(case.fit(model).history)
    same_model(model, reference, 3 * case.tolerance)
    for mine, one_device in zip(found, wanted, strict=True):
        same_history(mine, one_device)


def test_dropout_seeds_go_on():
    """Tower 0's stream is the model's own: it goes on where it stopped."""
    draws = []
    for strategy in (None, kt.TowerStrategy(3)):
        model = classifier(keras.layers.Dropout(0.4, seed=5))
        originals = Originals(model)
        if strategy is None:
            fit(model)
        else:
            with strategy:
                fit(model)
        originals.assert_back()
        assert_ordinary(model)
        (seed,) = model.layers[1]._seed_generators
        draws.append(seed.state.numpy())
    np.testing.assert_array_equal(*draws)


def test_references_that_the_user_held_stay_alive():
    model = classifier()
    held = model.layers[0].kernel.value
    rate = model.optimizer.learning_rate.value

    @tf.function
    def through_reference():
        return tf.reduce_sum(held)

    before = float(through_reference())
    with kt.TowerStrategy(3):
        fit(model)
        inside = float(through_reference())
        model.optimizer.learning_rate = 0.003
    assert before != inside
    fit(model)
    assert float(through_reference()) != inside
    kernel = model.layers[0].kernel.numpy()
    close(float(through_reference()), kernel.sum(), 1e-5)
    close(float(rate), 0.003)


def _methods(model):
    """Every method once, with uneven batches."""
    return {
        "train": model.train_on_batch(X[:7], Y[:7]),
        "weighted": model.train_on_batch(
            X[:3], Y[:3], class_weight={0: 1.0, 1: 0.5, 2: 2.0}
        ),
        "train dict": model.train_on_batch(X[:9], Y[:9], return_dict=True),
        "test": model.test_on_batch(X[:9], Y[:9]),
        "evaluate": model.evaluate(X, Y, batch_size=9, verbose=0),
        "predict": model.predict(X, batch_size=9, verbose=0),
        "predict batch": model.predict_on_batch(X[:2]),
    }


@pytest.mark.parametrize("towers", [1, 3])
def test_every_method_gives_what_one_device_gives(towers):
    assert_exact(classifier, _methods, kt.TowerStrategy(towers))


@pytest.mark.parametrize(
    "method",
    [
        lambda model: model.evaluate(X, Y, verbose=0),
        lambda model: model.predict(X, verbose=0),
        lambda model: model.predict_on_batch(X[:5]),
        lambda model: model.test_on_batch(X[:5], Y[:5]),
    ],
    ids=["evaluate", "predict", "predict_on_batch", "test_on_batch"],
)
def test_methods_that_do_not_train_adopt_too(method):
    """Each method alone, as the first that is called on the model."""

    def act(model):
        result = method(model)
        placed = model._distribute_strategy is not None
        assert placed == tf.distribute.has_strategy()
        return result

    model = assert_exact(classifier, act, kt.TowerStrategy(3)).model
    # What was traced on towers is not used outside.
    close(method(model), method(classifier()))


def test_evaluate_of_moving_statistics_is_that_of_the_model_saved_after():
    """Inside, it sees the statistics that the model leaves with."""
    model = classifier(keras.layers.BatchNormalization())
    with kt.TowerStrategy(3):
        fit(model)
        inside = model.evaluate(X, Y, verbose=0)
        predicted = model.predict(X, verbose=0)
    close(model.evaluate(X, Y, verbose=0), inside)
    close(model.predict(X, verbose=0), predicted)


def test_frozen_model_evaluates_and_predicts():
    def make():
        model = classifier(keras.layers.BatchNormalization())
        model.trainable = False
        model.compile(adam(), m.cross_entropy(), metrics=["accuracy"])
        return model

    def act(model):
        return (
            model.evaluate(X, Y, verbose=0),
            model.predict(X, verbose=0),
            # Keras lets it: nothing is trained.
            fit(model),
        )

    assert_exact(make, act, kt.TowerStrategy(3))


def test_two_outputs():
    def act(model):
        inputs = {"features": X, "tokens": m.TOKENS[:EXAMPLES]}
        return (
            model.predict(inputs, verbose=0),
            model.train_on_batch(
                inputs, {"label": Y, "target": m.TARGETS[:EXAMPLES]}
            ),
        )

    make = CASES["several-losses"].build
    predicted, _ = assert_exact(make, act, kt.TowerStrategy(3)).returned
    assert set(predicted) == {"label", "target"}


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
        for _ in range(3):
            critic.trainable = True
            fake = generator.predict_on_batch(X[:9])
            logs.append(critic.train_on_batch(fake, np.zeros((9, 1))))
            critic.trainable = False
            logs.append(both.train_on_batch(X[:9], np.ones((9, 1))))
        return logs

    both = assert_exact(make, act, kt.TowerStrategy(3)).model
    for part in both.parts:
        assert_ordinary(part)


def test_user_sees_one_value_of_every_variable_inside():
    model = classifier(keras.layers.BatchNormalization())
    with kt.TowerStrategy(3):
        fit(model)
        inside = [v.numpy() for v in all_variables(model)]
        assert int(model.optimizer.iterations) == 4
    for variable, value in zip(all_variables(model), inside, strict=True):
        close(variable.numpy(), value, message=variable.path)
    assert optimizers(model) == [model.optimizer]


@pytest.mark.parametrize("kind", ["fit", "train_on_batch"])
def test_a_model_of_another_strategy_is_left_to_it(kind):
    mirrored = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    with mirrored.scope():
        model = keras.Sequential(
            [keras.Input((X.shape[1],)), keras.layers.Dense(3, "softmax")]
        )
        model.compile("adam", keras.losses.SparseCategoricalCrossentropy())
    with (
        pytest.raises(kt.TowerError, match="lives on another"),
        kt.TowerStrategy(2),
    ):
        getattr(model, kind)(X[:8], Y[:8])
    assert model._distribute_strategy is mirrored
    model.fit(X[:8], Y[:8], verbose=0)


def test_a_nested_model_outlives_the_outer_one():
    inner = keras.Sequential(
        [keras.Input((X.shape[1],)), keras.layers.Dense(3)]
    )
    kernel = inner.layers[0].kernel.value
    with kt.TowerStrategy(2):
        outer = keras.Sequential([inner, keras.layers.Softmax()])
        outer.compile("sgd", keras.losses.SparseCategoricalCrossentropy())
        outer.fit(X, Y, verbose=0)
        del outer
        gc.collect()
    assert inner._distribute_strategy is None
    assert inner.layers[0].kernel.value is kernel
    inner.compile("sgd", "mse")
    inner.fit(X, np.zeros((len(X), 3)), verbose=0)
