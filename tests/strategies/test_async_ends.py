"""However training ends that does not wait, nothing is left behind."""

import threading

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_towers as kt
from tests.kit.compare import assert_finite
from tests.kit.leaving import Boom, interrupt
from tests.kit.ordinary import Originals
from tests.kit.training import STEPS, X, Y, fit, linear
from tests.strategies import async_cases as cases


@pytest.mark.parametrize("epochs, examples", [(1, 53), (50, 32)])
def test_nan_ends_training_after_its_epoch(epochs, examples):
    """Also where an epoch is over before its first log can be looked at."""
    model = linear()
    with kt.AsyncTowerStrategy(2):
        x, stop = cases.some_bad(0)[:examples], keras.callbacks.TerminateOnNaN()
        history = fit(model, epochs, x, Y[:examples], callbacks=[stop])
    assert model.stop_training
    assert len(history["loss"]) == 1
    assert np.isnan(history["loss"][-1])


def test_steps_that_were_handed_out_are_done_when_training_stops():
    """What was handed out is done and counted; training goes on."""

    def stop(batch, logs):
        model.stop_training = batch == 1

    def broken():
        yield X[:8], Y[:8]
        yield X[8:16], Y[8:16]
        raise Boom("no more data")

    model = linear()
    originals = Originals(model)
    with kt.AsyncTowerStrategy(2) as strategy:
        watch = cases.callback(on_train_batch_end=stop)
        fit(model, epochs=5, callbacks=[watch])
        assert strategy.staleness.steps == 2
        assert int(model.optimizer.iterations) == 2
        with pytest.raises(tf.errors.OpError, match="no more data"):
            model.fit(broken(), verbose=0)
        assert int(model.optimizer.iterations) == 2 + 2
        fit(model)
    assert int(model.optimizer.iterations) == 2 + 2 + STEPS
    originals.assert_back()


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_at_any_moment():
    model = linear()
    originals = Originals(model)
    timer = threading.Timer(0.03, interrupt)

    def start(batch, logs):
        if batch == 2 and timer.ident is None:
            timer.start()

    stop = cases.callback(on_train_batch_end=start)
    with kt.AsyncTowerStrategy(2):
        with pytest.raises(KeyboardInterrupt):
            fit(model, epochs=1000, callbacks=[stop])
        before = int(model.optimizer.iterations)
        assert before >= 3
        fit(model)
    assert int(model.optimizer.iterations) == before + STEPS
    originals.assert_back()
    assert_finite(model)


@pytest.mark.parametrize(
    "strategy, updates",
    [
        (kt.AsyncTowerStrategy, STEPS),
        # What others had pushed is not averaged later.
        (kt.SyncReplicasStrategy, STEPS // 2),
    ],
)
def test_an_error_on_a_tower_is_raised_by_fit(strategy, updates):
    def fail(tower):
        traced.append(tower)
        if traced == [0, 1]:
            raise Boom("only on tower 1")

    traced = []
    model = linear(cases.Traced(fail), cases.Runs(cases.refuse))
    originals = Originals(model)

    with strategy(towers=2):
        with pytest.raises(Boom, match="only on tower 1"):
            fit(model)
        # Behind the last step of all, nobody hands out a batch and looks.
        for at, epochs in ((2, 3), (STEPS - 1, 1)):
            begin = int(model.optimizer.iterations)
            with pytest.raises(tf.errors.OpError, match="not a number"):
                fit(model, x=cases.some_bad(at), epochs=epochs)
            before = int(model.optimizer.iterations)
            assert before <= begin + STEPS
            fit(model)
            assert int(model.optimizer.iterations) == before + updates
    originals.assert_back()
    assert_finite(model)
