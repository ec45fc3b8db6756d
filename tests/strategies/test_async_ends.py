"""However asynchronous training ends, nothing is cut off or left behind."""

import gc
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_towers as kt
from tests.kit.leaving import WAYS, interrupt
from tests.kit.long import long_but
from tests.kit.ordinary import Originals, assert_ordinary
from tests.kit.training import STEPS, X, Y, classifier, fit

pytestmark = pytest.mark.usefixtures("ctrl_c")


@pytest.mark.parametrize("epochs, examples", [(1, 53), (50, 32)])
def test_terminate_on_nan(epochs, examples):
    """Also where an epoch is over before its first log can be looked at."""
    x = X[:examples].copy()
    x[0] = np.nan
    model = classifier()
    with kt.AsyncTowerStrategy(3):
        history = fit(
            model,
            x=x,
            y=Y[:examples],
            epochs=epochs,
            callbacks=[keras.callbacks.TerminateOnNaN()],
        )
    assert model.stop_training
    assert len(history["loss"]) == 1
    assert np.isnan(history["loss"][-1])


def test_early_stopping_in_mid_epoch():
    def stop(batch, logs):
        model.stop_training = batch == 1

    model = classifier()
    with kt.AsyncTowerStrategy(3) as strategy:
        watch = keras.callbacks.LambdaCallback(on_train_batch_end=stop)
        fit(model, epochs=5, callbacks=[watch])
        assert strategy.staleness.steps == 2
    assert int(model.optimizer.iterations) == 2


@pytest.mark.parametrize("way", WAYS)
def test_leaving_in_a_callback(way):
    """What was handed out is done and counted; training goes on."""
    error, leave = WAYS[way]

    def after_two(batch, logs):
        if batch == 1:
            leave()

    model = classifier()
    originals = Originals(model)
    stop = keras.callbacks.LambdaCallback(on_train_batch_end=after_two)
    with pytest.raises(error), kt.AsyncTowerStrategy(3):
        fit(model, callbacks=[stop])
    originals.assert_back()
    assert_ordinary(model)
    assert int(model.optimizer.iterations) == 2
    fit(model)
    assert int(model.optimizer.iterations) == 2 + STEPS


@pytest.mark.parametrize("delay", long_but((0.03).__ne__, [0.01, 0.03, 0.1]))
def test_ctrl_c_at_any_moment(delay):
    model = classifier()
    originals = Originals(model)
    timer = threading.Timer(delay, interrupt)

    def start(batch, logs):
        if batch == 2 and timer.ident is None:
            timer.start()

    stop = keras.callbacks.LambdaCallback(on_train_batch_end=start)
    with pytest.raises(KeyboardInterrupt), kt.AsyncTowerStrategy(3):
        fit(model, epochs=500, callbacks=[stop])
    originals.assert_back()
    assert_ordinary(model)
    assert int(model.optimizer.iterations) >= 3
    assert all(np.isfinite(w).all() for w in model.get_weights())
    fit(model)


def test_cycles_leave_nothing_behind():
    """Neither threads nor graphs; each graph would be a megabyte."""
    model = classifier()

    def cycles(number):
        for _ in range(number):
            with kt.AsyncTowerStrategy(2):
                fit(model)
        gc.collect()
        graphs = [
            item
            for item in gc.get_objects()
            if issubclass(type(item), tf.Graph)
        ]
        return threading.active_count(), len(graphs)

    threads, graphs = cycles(2)
    after = cycles(5)
    assert after[0] <= threads
    assert after[1] <= graphs
