"""Fixtures: what is left on towers, log messages, and steps that are added."""

import gc
import logging
from collections.abc import Callable

import keras
import pytest
import tensorflow as tf

from keras_towers.fit.step.graph.tower_program import TowerProgram
from keras_towers.foundation import notices
from keras_towers.foundation.settings import ENV_DEVICE_MEMORY
from keras_towers.partition.timeline.timeline import Timeline


@pytest.fixture
def variables_on_towers() -> Callable[[], list[str]]:
    """Paths of this test's Keras variables, of any owner, on towers."""
    # Some tests leave variables on towers for good.
    before = {id(variable): variable for variable in _all_on_towers()}
    return lambda: [v.path for v in _all_on_towers() if id(v) not in before]


def _all_on_towers() -> list[keras.Variable]:
    gc.collect()
    return [
        item
        for item in gc.get_objects()
        if issubclass(type(item), keras.Variable)
        and isinstance(item._value, tf.distribute.DistributedValues)
    ]


@pytest.fixture
def logged(monkeypatch, caplog) -> Callable[[str], list[tuple[str, str]]]:
    """The messages of a test with some text, and their levels."""
    # Notices are shown once in a process.
    monkeypatch.setattr(notices, "_said", {})
    caplog.set_level(logging.INFO, "keras_towers")
    return lambda text: [
        (record.levelname, record.getMessage())
        for record in caplog.records
        if text in record.getMessage()
    ]


@pytest.fixture
def timelines(monkeypatch) -> list[Timeline]:
    """The timelines of steps that are added to graphs."""
    found, add_to_graph = [], TowerProgram.add_to_graph

    def add(program, *args):
        found.append(program._timeline)
        return add_to_graph(program, *args)

    monkeypatch.setattr(TowerProgram, "add_to_graph", add)
    return found


@pytest.fixture
def limit(monkeypatch) -> Callable[[str], None]:
    """Gives devices some memory."""

    def give(text):
        monkeypatch.setenv(ENV_DEVICE_MEMORY, text)

    return give
