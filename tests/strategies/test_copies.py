"""Copying and pickling a strategy, and what holds one."""

import copy
import pickle

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_towers as kt
from tests.kit.training import classifier, fit

STRATEGIES = [
    kt.TowerStrategy,
    kt.ParameterServerTowerStrategy,
    kt.AsyncTowerStrategy,
]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_is_copied_shares_its_strategy(strategy):
    towers = strategy(2)
    for options in ({"strategy": towers}, [towers]):
        (same,) = tf.nest.flatten(copy.deepcopy(options))
        assert same is towers
    with towers:
        assert copy.deepcopy(towers) is towers
        assert copy.copy(towers) is towers


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("protocol", [0, pickle.HIGHEST_PROTOCOL])
def test_a_strategy_is_not_pickled(strategy, protocol):
    towers = strategy(2)
    for value in (towers, {"strategy": towers}):
        with pytest.raises(
            kt.TowerError, match="create it in the process that uses it"
        ):
            pickle.dumps(value, protocol)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_is_copied_inside_is_on_no_towers(strategy):
    model = classifier(keras.layers.BatchNormalization())
    with strategy(2):
        fit(model)
        wanted = model.get_weights()
        copies = copy.deepcopy(model.weights)
        assert fit(copy.deepcopy(model))["loss"]
        copy.deepcopy(model.optimizer)
    for variable, value in zip(copies, wanted, strict=True):
        assert isinstance(variable.value, tf.Variable)
        assert not isinstance(variable.value, tf.distribute.DistributedValues)
        np.testing.assert_allclose(variable.numpy(), value, rtol=1e-6)


def test_another_strategy_of_the_same_class_is_called_so():
    model = classifier()
    with kt.TowerStrategy(2) as towers:
        towers.adopt(model)
        other = kt.TowerStrategy(2)
        with pytest.raises(kt.TowerError, match="of another TowerStrategy:"):
            other.__enter__()
        with pytest.raises(kt.TowerError, match="on another TowerStrategy. A"):
            other.adopt(model)
        with (
            pytest.raises(kt.TowerError, match=r"strategy \(TowerStrategy\):"),
            kt.ParameterServerTowerStrategy(2),
        ):
            pass
