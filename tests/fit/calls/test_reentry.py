"""Leaving and entering again, with other towers, and other strategies."""

import gc
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_towers as kt
from tests.exactness import models as m
from tests.kit.compare import close, same_history, same_model
from tests.kit.ordinary import Originals, assert_ordinary
from tests.kit.training import X, Y, adam, classifier, fit


def _accumulating():
    return adam(
        gradient_accumulation_steps=3,
        use_ema=True,
        ema_momentum=0.8,
        ema_overwrite_frequency=5,
    )


def test_other_numbers_of_towers_go_on():
    """On 2, 8, no and 3 towers in turn: always as on one device."""

    def build():
        return classifier(
            keras.layers.BatchNormalization(synchronized=True),
            optimizer=_accumulating,
        )

    reference, model = build(), build()
    originals = Originals(model)
    for towers in (2, 8, None, 3):
        wanted = fit(reference)
        if towers is None:
            found = fit(model)
        else:
            with kt.TowerStrategy(towers):
                found = fit(model)
        originals.assert_back()
        assert_ordinary(model)
        same_history(found, wanted)
    same_model(model, reference, 1e-5)


def test_other_kinds_of_updates_go_on():
    """Optimizer state moves between tower 0 and every tower."""
    reference, model = classifier(), classifier()
    fit(reference, epochs=3)
    for updates in ("each", "once", "each"):
        with kt.TowerStrategy(3, updates=updates):
            fit(model)
        assert_ordinary(model)
    same_model(model, reference, 4e-6)


@pytest.mark.parametrize("mode", ["collective", "hierarchical"])
def test_strategies_of_different_size_after_one_another(mode):
    reference, model = classifier(), classifier()
    fit(reference, epochs=2)
    for towers in (2, 4):
        with kt.TowerStrategy(towers, mode=mode) as strategy:
            assert strategy.mode == mode
            fit(model)
    same_model(model, reference)


def test_two_strategies_that_live_at_the_same_time():
    """Each has a model of its own; they train in turn."""
    reference = classifier()
    models = []
    for towers in (2, 3):
        with kt.TowerStrategy(towers).scope():
            models.append(classifier())
    for _ in range(2):
        fit(reference)
        for model in models:
            fit(model)
    for model in models:
        same_model(model, reference)


def test_one_strategy_again_and_again():
    reference, model = classifier(), classifier()
    strategy = kt.TowerStrategy(3)
    for _ in range(3):
        fit(reference)
        with strategy:
            fit(model)
    assert_ordinary(model)
    same_model(model, reference, 4e-6)


def test_entering_twice_is_refused_and_harmless():
    model = classifier()
    strategy = kt.TowerStrategy(3)
    with strategy:
        fit(model)
        with pytest.raises(kt.TowerError, match="entered already"):
            strategy.__enter__()
        other = kt.TowerStrategy(2)
        with pytest.raises(kt.TowerError, match="inside the scope of"):
            other.__enter__()
        fit(model)
    assert_ordinary(model)
    with other:
        fit(model)
    assert_ordinary(model)


@pytest.mark.parametrize("towers", [1, 4])
def test_model_of_another_strategy_is_refused_and_unharmed(towers):
    def make():
        with tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
            return classifier()

    model, reference = make(), make()
    fit(model, x=X[:32], y=Y[:32])
    fit(reference, x=X[:32], y=Y[:32], epochs=2)
    owner = model.distribute_strategy
    with (
        pytest.raises(kt.TowerError, match="MirroredStrategy"),
        kt.TowerStrategy(towers),
    ):
        fit(model)
    assert model.distribute_strategy is owner
    fit(model, x=X[:32], y=Y[:32])
    for mine, other in zip(model.weights, reference.weights, strict=True):
        close(mine.numpy(), other.numpy())


def _live_variables():
    gc.collect()
    kind = type(tf.Variable(0.0))
    return sum(type(item) is kind for item in gc.get_objects())


def test_many_blocks_leave_nothing_behind():
    """No threads and no variables more than after the first ones."""
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3)])
    model.compile(m.momentum(), m.cross_entropy())

    def block():
        with kt.TowerStrategy(2):
            model.train_on_batch(X[:8], Y[:8])

    for _ in range(3):
        block()
    threads, variables = threading.active_count(), _live_variables()
    for _ in range(12):
        block()
    assert threading.active_count() <= threads
    assert _live_variables() <= variables
    assert_ordinary(model)
    assert int(model.optimizer.iterations) == 15


def test_a_model_on_towers_dies_with_its_last_reference():
    import weakref

    with kt.TowerStrategy(3):
        model = classifier()
        fit(model)
    dead = weakref.ref(model)
    del model
    keras.backend.clear_session()
    gc.collect()
    assert dead() is None
    assert np.isfinite(fit(classifier())["loss"][-1])
