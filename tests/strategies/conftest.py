"""Whatever a test does, no thread of towers or replicas outlives it."""

import threading

import pytest

from keras_towers.replicas import coordinator, tower_threads

NAMES = (tower_threads.THREAD_NAME_PREFIX, coordinator.THREAD_NAME)


@pytest.fixture(autouse=True)
def no_thread_left():
    yield
    left = [t for t in threading.enumerate() if t.name.startswith(NAMES)]
    assert not left
