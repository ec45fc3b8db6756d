"""Data that ask the model are read no further than its steps."""

import itertools
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_towers as kt
from keras_towers.fit.data import read_ahead_limit
from keras_towers.fit.data.read_ahead_limit import ReadAheadLimit
from keras_towers.foundation.errors import TowerError
from tests.kit.compare import assert_all_close
from tests.kit.training import linear

LIMIT_S = 20


class Reader:
    """A thread that reads batches, as far as it may."""

    def __init__(self, batches):
        self.read, self.error = [], None
        self._moved = threading.Condition()
        self.thread = threading.Thread(target=self._run, args=(batches,))
        self.thread.start()

    def _run(self, batches):
        try:
            for batch in batches:
                with self._moved:
                    self.read.append(batch)
                    self._moved.notify_all()
        except TowerError as error:
            self.error = error
        with self._moved:
            self._moved.notify_all()

    def reads(self, number):
        """Whether it reads so many, and no more for a moment."""
        with self._moved:
            enough = self._moved.wait_for(
                lambda: len(self.read) >= number, LIMIT_S
            )
            more = self._moved.wait_for(lambda: len(self.read) > number, 0.2)
        return enough and not more


@pytest.fixture
def variable():
    return keras.Variable(1.0)


def asking(variable, number=10, since=0):
    """A generator that asks for a variable."""
    for k in range(number):
        if k >= since:
            with read_ahead_limit.asking([variable]):
                pass
        yield k


def test_batches_are_read_as_far_as_steps_have_begun(variable):
    limit = ReadAheadLimit(lambda: [variable])
    limit.begin_iterator()
    reader = Reader(limit.wrap(lambda: asking(variable, since=3))())
    # It has yet to ask.
    assert reader.reads(3)
    limit.begin_steps()
    assert reader.reads(3)
    for _ in range(3):
        limit.begin_steps()
    assert reader.reads(4)
    limit.begin_steps()
    assert reader.reads(5)
    limit.end()
    reader.thread.join(LIMIT_S)
    assert "for a batch that nothing needs any more" in str(reader.error)


def test_steps_of_an_execution_are_waited_for_one_by_one(variable):
    done = [7]
    limit = ReadAheadLimit(lambda: [variable], 3, lambda: done[0])
    limit.per_step = 2
    limit.begin_iterator()
    # As of a fit that goes on in the middle of an epoch.
    limit.skip(4)
    reader = Reader(limit.wrap(lambda: asking(variable, 30))())
    assert reader.reads(4)
    limit.begin_steps(data=iter(()))
    assert reader.reads(6)
    done[0] += 1
    assert reader.reads(8)
    # The last step of an execution does not begin the next one.
    done[0] += 2
    assert reader.reads(10)
    limit.begin_steps(data=iter(()))
    assert reader.reads(12)
    limit.end()
    reader.thread.join(LIMIT_S)


def test_steps_that_nothing_counts_run_one_by_one(variable):
    limit = ReadAheadLimit(lambda: [variable], 3)
    limit.begin_iterator()
    reader = Reader(limit.wrap(lambda: asking(variable, since=1))())
    assert reader.reads(1)
    limit.begin_steps(data=iter(()))
    for done in range(3):
        limit.begin_step(done)
        assert limit.has_to_wait()
        assert reader.reads(done + 1)
    # What predict reads.
    limit.begin_steps()
    assert reader.reads(6)
    limit.end()
    reader.thread.join(LIMIT_S)


def test_other_variables_and_first_batches_wait_for_nothing(variable):
    limit = ReadAheadLimit(lambda: [variable])
    limit.begin_iterator()
    reader = Reader(limit.wrap(lambda: asking(keras.Variable(2.0), 3))())
    assert reader.reads(3)
    with limit.first_batches():
        assert [*asking(variable, 2)] == [0, 1]
    # Now it is known that these data ask.
    reader = Reader(limit.wrap(lambda: iter(range(2)))())
    assert reader.reads(0)
    limit.begin_steps()
    assert reader.reads(1)
    limit.end()
    reader.thread.join(LIMIT_S)


def test_a_call_ends_when_what_asks_has_ended(variable):
    limit = ReadAheadLimit(lambda: [variable])
    limit.begin_iterator()
    begun, goes_on = threading.Event(), threading.Event()

    def asks():
        with read_ahead_limit.asking([variable]):
            begun.set()
            goes_on.wait(LIMIT_S)
        yield 0

    limit.begin_steps()
    reader = Reader(limit.wrap(asks)())
    assert begun.wait(LIMIT_S)
    ends = threading.Thread(target=limit.end)
    ends.start()
    ends.join(0.2)
    assert ends.is_alive()
    goes_on.set()
    ends.join(LIMIT_S)
    assert not ends.is_alive()
    reader.thread.join(LIMIT_S)


def python_map(dataset):
    function = tf.autograph.experimental.do_not_convert(
        lambda x: tf.py_function(lambda y: y, [x], tf.int64)
    )
    return dataset.map(function)


@pytest.mark.parametrize(
    "make, runs, ahead",
    [
        (lambda d: d, False, False),
        (python_map, True, False),
        (lambda d: python_map(d).batch(2).repeat(), True, False),
        (lambda d: python_map(d).prefetch(1), True, True),
        # TensorFlow makes them parallel.
        (lambda d: python_map(d).map(lambda x: x + 1), True, True),
        (lambda d: d.map(lambda x: x, num_parallel_calls=2), False, True),
    ],
)
def test_what_a_dataset_runs_and_reads_ahead(make, runs, ahead):
    dataset = make(tf.data.Dataset.range(4))
    assert read_ahead_limit.runs_python(dataset) == runs
    assert read_ahead_limit.reads_ahead(dataset) == ahead


def halves(model, x, y):
    bias = model.trainable_variables[-1]
    bias.assign(bias * 0.5)


ASKS = (
    lambda model, x, y: model.predict(x, verbose=0),
    lambda model, x, y: model.evaluate(x, y, verbose=0),
    halves,
    lambda model, x, y: model.train_on_batch(x, y),
    lambda model, x, y: model.reset_metrics(),
    lambda model, x, y: model(x),
)


@pytest.mark.parametrize(
    "is_dataset, steps", [(False, 1), (False, 2), (True, 1), (True, 2)]
)
def test_towers_of_one_process_train_on_data_that_ask(is_dataset, steps):
    """A step does not read its variables before its batch is there."""
    number = len(ASKS) + 5

    def data(model):
        rows = np.random.default_rng(0)
        for k in range(number):
            x = rows.normal(size=(6, 6)).astype("float32")
            y = np.argmin(model(x).numpy(), 1)
            ASKS[k % len(ASKS)](model, x, y)
            yield x, y

    mine, alone = linear(steps_per_execution=steps), linear()
    batches = data(mine)
    if is_dataset:
        batches = tf.data.Dataset.from_generator(
            lambda: data(mine),
            output_signature=(
                tf.TensorSpec([None, 6]),
                tf.TensorSpec([None], tf.int64),
            ),
        )
    with kt.TowerStrategy(3):
        history = mine.fit(batches, verbose=0).history
    batches = data(alone)
    # Keras reads two of a generator before the first step.
    first = [] if is_dataset else [next(batches), next(batches)]
    alone.reset_metrics()
    alone.make_train_function()
    for batch in itertools.chain(first, batches):
        logs = alone.train_function(iter([batch]))
    assert_all_close(mine.get_weights(), alone.get_weights())
    assert_all_close(history["loss"], [logs["loss"]])
