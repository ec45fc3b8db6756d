"""Data that use the model are read in turn with its steps."""

import itertools
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_towers as kt
from keras_towers.fit.data import model_use
from keras_towers.foundation import compat
from tests.kit.compare import assert_all_close
from tests.kit.training import linear

LIMIT_S = 20


def test_uses_are_noted_in_their_thread_and_block():
    one, other = keras.Variable(1.0), keras.Variable(2.0)
    with model_use.noting() as used:
        one.assign(one + 1)
        thread = threading.Thread(target=lambda: other + 1)
        thread.start()
        thread.join()
    _ = other + 1
    assert {*map(id, used)} == {id(one)}


def python_map(dataset):
    function = tf.autograph.experimental.do_not_convert(
        lambda x: tf.py_function(lambda y: y, [x], tf.int64)
    )
    return dataset.map(function)


@pytest.mark.parametrize(
    "make, runs",
    [
        (lambda d: d, False),
        (python_map, True),
        (lambda d: d.map(lambda x: x).batch(2), False),
        (lambda d: python_map(d).batch(2).repeat().prefetch(1), True),
        (
            lambda d: d.interleave(
                lambda x: python_map(tf.data.Dataset.range(x))
            ),
            True,
        ),
    ],
)
def test_which_datasets_run_python(make, runs):
    adapter = compat.TFDatasetAdapter(make(tf.data.Dataset.range(4)))
    assert bool(model_use.why_not_use(adapter)) == runs


def halves(model, x, y):
    bias = model.trainable_variables[-1]
    bias.assign(bias * 0.5)


USES = (
    lambda model, x, y: model.predict(x, verbose=0),
    lambda model, x, y: model.evaluate(x, y, verbose=0),
    halves,
    lambda model, x, y: model.train_on_batch(x, y),
    lambda model, x, y: model.reset_metrics(),
    lambda model, x, y: model(x),
)


def batches_of(model, since=0):
    rows = np.random.default_rng(0)
    for k in range(since, len(USES) + 5):
        x = rows.normal(size=(6, 6)).astype("float32")
        y = np.argmin(model(x).numpy(), 1)
        USES[k % len(USES)](model, x, y)
        yield x, y


class Using(keras.utils.PyDataset):
    """The same batches, numbered."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def __len__(self):
        return 5

    def __getitem__(self, number):
        x, _ = next(batches_of(self.model, since=5))
        return x + number, np.argmin(self.model(x + number).numpy(), 1)


def trained_in_turn(data, peeked):
    """A model, trained on each batch before the next one is read."""
    alone = linear()
    batches = data(alone)
    first = [next(batches) for _ in range(peeked)]
    alone.reset_metrics()
    alone.make_train_function()
    for batch in itertools.chain(first, batches):
        logs = alone.train_function(iter([batch]))
    return alone, logs["loss"]


@pytest.mark.parametrize("steps", [1, 2])
def test_towers_of_one_process_train_on_data_that_use_them(steps):
    """A step does not read its variables before its batch is there."""
    mine = linear(steps_per_execution=steps)
    with kt.TowerStrategy(3):
        history = mine.fit(batches_of(mine), verbose=0).history
    # Keras reads two of a generator before the first step.
    alone, loss = trained_in_turn(batches_of, peeked=2)
    assert_all_close(mine.get_weights(), alone.get_weights())
    assert_all_close(history["loss"], [loss])


@pytest.mark.parametrize("steps", [1, 2])
def test_a_py_dataset_that_uses_them_is_read_in_turn(steps):
    mine = linear(steps_per_execution=steps)
    with kt.TowerStrategy(3):
        mine.fit(Using(mine), shuffle=False, verbose=0)

    def numbered(model):
        data = Using(model)
        return (data[k] for k in range(len(data)))

    alone, _ = trained_in_turn(numbered, peeked=0)
    assert_all_close(mine.get_weights(), alone.get_weights())


def test_a_call_ends_after_the_calls_of_what_reads_its_data():
    """Both change the model, and would leave what the other one has."""
    model = linear()
    x, y = np.ones((6, 6), "float32"), np.zeros(6, int)
    begun, goes_on = threading.Event(), threading.Event()

    class Pauses(keras.callbacks.Callback):
        def on_predict_begin(self, logs=None):
            begun.set()
            goes_on.wait(LIMIT_S)

    def batches():
        for _ in range(3):
            yield x, y
        model.predict(x, verbose=0, callbacks=[Pauses()])
        yield x, y

    class Stops(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 2:
                assert begun.wait(LIMIT_S)
                threading.Timer(0.2, goes_on.set).start()
                self.model.stop_training = True

    with kt.TowerStrategy(2):
        model.fit(batches(), callbacks=[Stops()], verbose=0)
    assert not any(name.startswith("make_") for name in vars(model))
    assert goes_on.is_set()
