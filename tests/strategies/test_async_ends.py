"""However asynchronous training ends: errors surface, no thread is left."""

import gc
import threading
import time

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_towers as kt
from keras_towers.fit import crew as crew_lib
from tests.exactness import models as m
from tests.fit.leaving import WAYS, Boom, interrupt
from tests.fit.ordinary import (
    BATCH,
    STEPS,
    Originals,
    X,
    Y,
    assert_ordinary,
    classifier,
    fit,
)

BAD = 1000.0


@pytest.fixture(autouse=True)
def no_thread_left():
    yield
    left = [
        t for t in threading.enumerate() if t.name.startswith(crew_lib.NAME)
    ]
    assert not left


class Refuses(keras.layers.Layer):
    """Fails on a tower that is given a certain value."""

    def call(self, inputs):
        check = tf.debugging.assert_less(inputs, BAD, message="too large")
        with tf.control_dependencies([check]):
            return tf.identity(inputs)


class Breaks(keras.layers.Layer):
    """Raises an error of Python on a tower that is given a certain value."""

    def compute_output_spec(self, inputs):
        return keras.KerasTensor(inputs.shape, inputs.dtype)

    def call(self, inputs):
        def check(values):
            if np.any(values.numpy() >= BAD):
                raise Boom("too large")
            return values

        outputs = tf.py_function(check, [inputs], inputs.dtype)
        return tf.ensure_shape(outputs, inputs.shape)


def checked(layer):
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((6,)), layer, keras.layers.Dense(3)])
    model.compile("adam", m.cross_entropy(), metrics=["accuracy"])
    return model


def some_bad(at):
    x = X.copy()
    x[at * BATCH] = BAD
    return x


@pytest.mark.parametrize("at", [0, STEPS - 1])
@pytest.mark.parametrize("layer", [Refuses, Breaks])
def test_an_error_on_a_tower_is_raised_by_fit(layer, at):
    model = checked(layer())
    originals = Originals(model)
    with kt.AsyncTowerStrategy(3):
        with pytest.raises(tf.errors.OpError, match="too large"):
            fit(model, x=some_bad(at), epochs=3)
        before = int(model.optimizer.iterations)
        assert before <= STEPS
        fit(model)
        assert int(model.optimizer.iterations) == before + STEPS
    originals.assert_back()
    assert_ordinary(model)
    assert all(np.isfinite(w).all() for w in model.get_weights())
    fit(model)


def test_an_error_while_tracing():
    class Fails(keras.layers.Layer):
        def call(self, inputs):
            if "CPU:1" in tf.identity(inputs).device:
                raise Boom("only on tower 1")
            return inputs

        def compute_output_spec(self, inputs):
            return keras.KerasTensor(inputs.shape, inputs.dtype)

    model = checked(Fails())
    originals = Originals(model)
    with pytest.raises(Boom), kt.AsyncTowerStrategy(3):
        fit(model)
    originals.assert_back()
    assert_ordinary(model)
    fit(model)


def test_an_error_in_the_data():
    def broken():
        yield X[:8], Y[:8]
        yield X[8:16], Y[8:16]
        raise Boom("no more data")

    model = classifier()
    with (
        kt.AsyncTowerStrategy(3),
        pytest.raises(tf.errors.OpError, match="no more data"),
    ):
        model.fit(broken(), verbose=0)
    assert_ordinary(model)
    assert int(model.optimizer.iterations) == 2


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


@pytest.mark.parametrize("delay", [0.01, 0.03, 0.1])
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
            with kt.AsyncTowerStrategy(3):
                fit(model)
        gc.collect()
        graphs = [
            item
            for item in gc.get_objects()
            if issubclass(type(item), tf.Graph)
        ]
        return threading.active_count(), len(graphs)

    threads, graphs = cycles(2)
    after = cycles(10)
    assert after[0] <= threads
    assert after[1] <= graphs


def test_fits_in_one_block_trace_once():
    traces = []

    class Traced(keras.layers.Layer):
        def call(self, inputs):
            traces.extend("CPU" in tf.identity(inputs).device and [1] or [])
            return inputs

        def compute_output_spec(self, inputs):
            return keras.KerasTensor(inputs.shape, inputs.dtype)

    model = checked(Traced())
    with kt.AsyncTowerStrategy(3):
        fit(model)
        # Once for each tower, also for the smaller last batch.
        assert len(traces) == 3
        for _ in range(20):
            fit(model)
        assert len(traces) == 3
        model.compile("sgd", m.cross_entropy())
        fit(model)
        assert len(traces) == 6
    assert int(model.optimizer.iterations) == STEPS


def test_a_crew_waits_only_when_all_are_busy():
    crew = crew_lib.Crew(2)
    free = threading.Event()
    steps = [lambda batch: free.wait(5)] * 2
    for _ in range(4):
        crew.hand_out(steps, None)
    late = threading.Timer(0.1, free.set)
    late.start()
    begin = time.monotonic()
    crew.hand_out(steps, None)
    assert time.monotonic() - begin > 0.05
    crew.drain()
    assert crew.take_staleness().steps == 5
    crew.close()
