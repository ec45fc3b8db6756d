"""Calls of Keras inside other calls, and the state after a call."""

import contextlib
import threading
import time

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_towers as kt
from keras_towers.fit.calls import tower_call
from keras_towers.fit.data.epoch_iterator import RELEASES
from keras_towers.inspection.conformance import case_models as m
from keras_towers.inspection.conformance.outcomes import assert_ordinary
from tests.fit.one_device import trained
from tests.kit.compare import assert_exact, assert_same_model
from tests.kit.training import STEPS, X, Y, fit, linear

pytestmark = pytest.mark.alternate


class OwnLogs(keras.Sequential):
    """Steps that report something of their own."""

    def train_step(self, data):
        return {**super().train_step(data), "mine": tf.constant(1.0)}

    def test_step(self, data):
        return {**super().test_step(data), "mine": tf.constant(2.0)}


@pytest.mark.parametrize("strategy", [kt.TowerStrategy, kt.AsyncTowerStrategy])
def test_validation_ends_its_own_steps_alone(strategy):
    model = linear(cls=OwnLogs)
    with strategy(2) as running:
        history = fit(model, validation_data=(X, Y))
    assert history["mine"] == [1.0]
    assert history["val_mine"] == [2.0]
    if strategy is kt.AsyncTowerStrategy:
        assert running.staleness.steps == 4


def with_held(optimizer):
    """A model whose step calls an optimizer that it does not hold."""

    class Model(keras.Sequential):
        def train_step(self, data):
            x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x, y, self(x, training=True))
            weights = self.trainable_weights
            grads = tape.gradient(loss, weights)
            optimizer.apply_gradients(zip(grads, weights, strict=True))
            return {"loss": loss}

    return linear(cls=Model)


def test_an_optimizer_that_no_model_holds():
    assert_exact(
        # No sum of the towers' clipped gradients.
        lambda: with_held(m.momentum(global_clipnorm=0.1)),
        fit,
        kt.TowerStrategy(2),
    )
    optimizer = keras.optimizers.SGD(0.01)
    with kt.AsyncTowerStrategy(2):
        fit(with_held(optimizer))
    assert int(optimizer.iterations) == STEPS


def test_a_function_that_was_made_between_calls():
    """It was made for XLA, which cannot compile a step of many devices."""
    model = linear(jit_compile=True)
    with kt.TowerStrategy(2):
        fit(model)
        model.make_train_function(force=True)
        fit(model)
    assert_same_model(model, trained(2))
    assert_ordinary(model)


def test_marked_callbacks_run_where_there_is_one_process():
    for block in (None, kt.NoOpStrategy(), kt.TowerStrategy(2)):
        seen = []
        note = keras.callbacks.LambdaCallback(
            on_epoch_end=lambda epoch, logs, seen=seen: seen.append(epoch)
        )
        model = linear(run_eagerly=True)
        with block or contextlib.nullcontext():
            fit(model, 2, callbacks=[kt.ChiefOnly(note), kt.EveryRank(note)])
        assert seen == [0, 0, 1, 1]


class OwnFunction(keras.Sequential):
    """A model that makes its train function, perhaps a graph."""

    in_graph = False

    def train_step(self, data):
        x, y = data[:2]
        if tf.shape(x)[1] > 3:  # AutoGraph makes a branch of it.
            x = 2.0 * x
        return super().train_step((x, y))

    def make_train_function(self):
        def train(iterator):
            batch = next(iterator)
            return self.distribute_strategy.run(self.train_step, (batch,))

        self.train_function = tf.function(train) if self.in_graph else train


@pytest.mark.parametrize("in_graph", [False, True])
def test_a_train_function_of_ones_own(in_graph):
    def make():
        model = linear(cls=OwnFunction, run_eagerly=not in_graph)
        model.in_graph = in_graph
        model.optimizer.build(model.trainable_variables)
        return model

    assert_exact(
        make, lambda model: [fit(model), fit(model)], kt.TowerStrategy(2)
    )


def test_a_function_that_a_callback_runs_on_the_towers():
    """It is not a step of Keras: its data is not split."""
    model = linear()
    totals, sums = [], []
    x = np.arange(6.0)
    with kt.TowerStrategy(3) as strategy:
        total = tf.Variable(0.0, aggregation=tf.VariableAggregation.MEAN)

        @tf.function
        def add(value):
            total.assign_add(value)
            return total.read_value()

        def run(epoch, logs):
            # Keras runs its steps by the strategy that the model names.
            by = model.distribute_strategy
            found = by.run(tf.reduce_sum, args=(tf.constant(x),))
            sums.extend(strategy.experimental_local_results(found))
            add_up()

        def add_up():
            found = strategy.run(add, args=(tf.constant(1.0),))
            totals.extend(strategy.experimental_local_results(found))

        callback = keras.callbacks.LambdaCallback(on_epoch_end=run)
        for eager in (False, True):
            model.run_eagerly = eager
            fit(model, x=X[:16], y=Y[:16], callbacks=[callback])
        add_up()
    assert [float(v) for v in totals] == [1.0] * 3 + [2.0] * 3 + [3.0] * 3
    assert [float(v) for v in sums] == [15.0] * 6


@pytest.mark.parametrize("strategy", [kt.TowerStrategy, kt.AsyncTowerStrategy])
def test_no_data_is_read_after_fit(strategy):
    # A process that ends while TensorFlow runs Python code hangs.
    read = []

    class Slow(keras.utils.PyDataset):
        def __len__(self):
            return 100

        def __getitem__(self, index):
            read.append(index)
            time.sleep(0.2)
            return X[:8], Y[:8]

    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.model.stop_training = True

    with strategy(2):
        linear().fit(Slow(), verbose=0, callbacks=[Stop()])
    for thread in threading.enumerate():
        if thread.name == RELEASES:
            thread.join(60)
    until_here = len(read)
    time.sleep(1)
    assert len(read) == until_here < 100


@pytest.mark.parametrize(
    "end", [StopIteration(), tf.errors.OutOfRangeError(None, None, "over")]
)
@pytest.mark.filterwarnings("ignore:Your input ran out of data")
def test_in_one_process_a_callback_ends_an_epoch_as_keras_lets_it(end):
    """Over several ranks that is refused: ``tests/processes/failures.py``."""

    def stop(batch, logs):
        if batch == 1:
            raise end

    def train(model):
        stops = keras.callbacks.LambdaCallback(on_train_batch_end=stop)
        fit(model, batch_size=8, epochs=2, callbacks=[stops])
        return int(model.optimizer.iterations)

    alone, model = linear(), linear()
    with kt.TowerStrategy(2):
        assert train(model) == 4
    assert train(alone) == 4
    assert_same_model(model, alone)


def test_a_call_in_a_callback_leaves_the_batch_size_of_fit():
    """From it, the next trace of fit chooses what to gather."""
    seen = []

    class Predicts(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            self.model.predict(X, batch_size=len(X), verbose=0)
            settings = tower_call.current().settings
            seen.append((settings.kind, settings.examples))

    with kt.TowerStrategy(2):
        linear().fit(X, Y, batch_size=8, callbacks=[Predicts()], verbose=0)
    assert seen == [("fit", 8)]
