"""A strategy is entered before a script can tell that it was not there."""

import contextlib
import threading

import keras
import pytest
import tensorflow as tf

from keras_towers.foundation import compat
from keras_towers.jobs.launching.late_entry import entered_late

NEEDS = {
    "a tensor": lambda: tf.constant(1.0),
    "devices": lambda: tf.config.list_logical_devices(),
    "a variable": lambda: keras.Variable(1.0),
    "a weight": lambda: keras.layers.Dense(1).build((1, 1)),
    "a model": lambda: keras.Sequential([keras.layers.Dense(1)]),
    "a strategy": lambda: tf.distribute.get_strategy(),
    "a function": tf.function(lambda: tf.constant(1.0)),
    "nothing": lambda: None,
}


@pytest.fixture
def strategy(monkeypatch):
    """A strategy, and what has happened to it, before TensorFlow starts."""
    monkeypatch.setattr(compat, "has_started", lambda: False)
    seen = []

    @contextlib.contextmanager
    def make():
        tf.constant(1.0)
        seen.append("enter")
        try:
            yield
        finally:
            seen.append("leave")

    return make, seen


@pytest.mark.parametrize("name", NEEDS)
def test_the_first_need_enters_it(name, strategy):
    make, seen = strategy
    with entered_late(make):
        tf.config.threading.get_intra_op_parallelism_threads()
        tf.config.list_physical_devices()
        other = threading.Thread(target=NEEDS[name])
        other.start()
        other.join()
        assert not seen
        for _ in range(2):
            NEEDS[name]()
        assert seen == ["enter"] * (name != "nothing")
    assert seen == ["enter", "leave"]


def test_an_error_before_that_does_not(strategy):
    make, seen = strategy
    with pytest.raises(ValueError, match="bad"), entered_late(make):
        raise ValueError("bad")
    tf.constant(1.0)
    assert not seen


@pytest.mark.usefixtures("strategy")
def test_an_error_of_its_own_is_raised_once():
    def make():
        raise SystemExit("no such device")

    with pytest.raises(SystemExit), entered_late(make):
        try:
            tf.constant(1.0)
            pytest.fail("no error")
        finally:
            tf.constant(2.0)
