"""However the block is left, the model is ordinary and holds its weights."""

import contextlib
import signal
import threading

import keras
import pytest
import tensorflow as tf

import keras_towers as kt
from keras_towers.fit.weights.tower_variables import TowerVariables
from keras_towers.inspection.conformance.outcomes import Originals
from tests.fit.one_device import trained
from tests.kit.compare import assert_all_close, assert_same_model
from tests.kit.leaving import Boom, interrupt
from tests.kit.training import BATCH, STEPS, X, Y, fit, linear

pytestmark = [pytest.mark.usefixtures("ctrl_c"), pytest.mark.alternate]


def after_batch(number, act):
    """A callback that acts after a batch of the first epoch."""

    def behind(batch, logs):
        if batch == number:
            act()

    return [keras.callbacks.LambdaCallback(on_train_batch_end=behind)]


@contextlib.contextmanager
def left_by(error, model, towers=2, **words):
    """A block that is left by an error, and an ordinary model after it."""
    originals = Originals(model)
    with pytest.raises(error, **words), kt.TowerStrategy(towers) as strategy:
        yield strategy
    originals.assert_back()


def test_ctrl_c_at_any_moment():
    """A signal from outside, while steps run: whole steps are kept."""
    model, reference = linear(), linear()
    timer = threading.Timer(0.05, interrupt)

    def start():
        if timer.ident is None:
            timer.start()

    with left_by(KeyboardInterrupt, model):
        fit(model, epochs=3000, callbacks=after_batch(2, start))
    steps = int(model.optimizer.iterations)
    assert steps >= 3
    batches = tf.data.Dataset.from_tensor_slices((X, Y)).batch(BATCH).repeat()
    reference.fit(batches, steps_per_epoch=steps, verbose=0)
    # Momentum lets rounding grow over the steps.
    assert_all_close(model.weights, reference.weights, 1e-4 + 1e-5 * steps)


def test_ctrl_c_while_the_block_is_left(monkeypatch):
    """The interrupt waits until the model is ordinary again."""
    original = TowerVariables.restore_all

    def impatient(*args):
        interrupt()
        return original(*args)

    model = linear(keras.layers.BatchNormalization())
    before = signal.getsignal(signal.SIGINT)
    with left_by(KeyboardInterrupt, model):
        fit(model)
        monkeypatch.setattr(TowerVariables, "restore_all", impatient)
    assert signal.getsignal(signal.SIGINT) is before
    monkeypatch.undo()
    with kt.TowerStrategy(3):
        model.predict_on_batch(X[:8])


def test_ctrl_c_while_the_step_is_traced():
    """No thread is left, and the model is traced again."""
    traced = []

    class Slow(keras.layers.Layer):
        def call(self, inputs):
            if kt.current_tower().training:
                traced.append(1)
                if len(traced) == 1:
                    interrupt()
            return inputs

    model = linear(Slow())
    before = threading.active_count()
    with left_by(KeyboardInterrupt, model, towers=3):
        fit(model)
        raise AssertionError("never traced")
    assert threading.active_count() <= before
    assert traced
    fit(model)
    assert_same_model(model, trained(1))


def test_errors_caught_inside_and_in_the_block_itself():
    """An error ends the call; only leaving the block ends the adoption."""

    def fail():
        raise Boom

    model = linear()
    with left_by(Boom, model, match="the block") as strategy:
        with pytest.raises(Boom):
            fit(model, callbacks=after_batch(STEPS - 1, fail))
        assert model.distribute_strategy == strategy
        fit(model)
        raise Boom("the block")
    # The same strategy can be entered again.
    with strategy:
        fit(model)
    assert_same_model(model, trained(3))
