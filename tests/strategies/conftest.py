"""Whatever a test does, no thread of asynchronous towers outlives it."""

import threading

import pytest

from keras_towers.fit.asynchronous import threads


@pytest.fixture(autouse=True)
def no_thread_left():
    yield
    left = [t for t in threading.enumerate() if t.name.startswith(threads.NAME)]
    assert not left
