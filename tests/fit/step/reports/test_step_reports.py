"""The planned memory of a process."""

import gc

import keras
import numpy as np
import pytest

import keras_towers as kt
from keras_towers.fit.step.reports.step_reports import planned_memory

GRAPHS = "the graphs of steps"


def trained(layers, **options):
    """A strategy that has trained a model of so many layers."""
    model = keras.Sequential([keras.layers.Dense(4) for _ in range(layers)])
    model.compile("sgd", "mse")
    data = np.ones((8, 4), "float32")
    with kt.TowerStrategy(2, **options) as strategy:
        model.fit(data, data, batch_size=8, verbose=0)
        before = planned_memory(strategy)
        model.evaluate(data, data, batch_size=8, verbose=0)
        assert planned_memory(strategy)[GRAPHS] > before[GRAPHS]
    return before[GRAPHS]


def test_graphs_count_as_they_are_built(devices):
    one, two, three = (trained(layers) for layers in (2, 6, 10))
    assert one > 0
    assert three - two == pytest.approx(two - one, rel=0.1)
    # Another way to exchange takes other operations.
    assert trained(2, mode="collective") != one


def test_graphs_of_models_that_are_gone_take_no_memory(devices):
    """As in a search for parameters, which makes model after model."""
    data, planned = np.ones((8, 4), "float32"), []
    with kt.TowerStrategy(2) as strategy:
        for _ in range(3):
            model = keras.Sequential([keras.layers.Dense(4)])
            model.compile("sgd", "mse")
            model.fit(data, data, batch_size=8, verbose=0)
            planned.append(planned_memory(strategy)[GRAPHS])
            del model
            gc.collect()
    assert planned[2] == pytest.approx(planned[0], rel=0.2), planned
    assert "planned memory" not in strategy.describe()
