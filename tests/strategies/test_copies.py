"""Copying a strategy, and what holds one."""

import copy

import numpy as np
import pytest
import tensorflow as tf

import keras_towers as kt
from tests.kit.ordinary import assert_ordinary
from tests.kit.training import linear


def test_what_is_copied_shares_its_strategy():
    towers = kt.TowerStrategy(2)
    for options in ({"strategy": towers}, [towers]):
        (same,) = tf.nest.flatten(copy.deepcopy(options))
        assert same is towers
    with towers:
        assert copy.deepcopy(towers) is towers
        assert copy.copy(towers) is towers


# Each keeps weights in its own way.
@pytest.mark.parametrize(
    "strategy", [kt.ParameterServerTowerStrategy, kt.AsyncTowerStrategy]
)
def test_what_is_copied_inside_is_on_no_towers(strategy):
    model = linear()
    with strategy(2) as towers:
        towers.adopt(model)
        copies = copy.deepcopy(model.weights)
        other = copy.deepcopy(model)
        copy.deepcopy(model.optimizer)
    assert_ordinary(other, trains_on_towers=True)
    for variable in copies:
        assert isinstance(variable.value, tf.Variable)
        assert not isinstance(variable.value, tf.distribute.DistributedValues)
    for values in zip(
        copies, model.get_weights(), other.get_weights(), strict=True
    ):
        np.testing.assert_array_equal(values[1:], [values[0]] * 2)
