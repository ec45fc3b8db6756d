"""One variable on every tower: sums, and states of random generators."""

import numpy as np
import pytest
import tensorflow as tf

import keras_towers as kt
from keras_towers.fit.weights import variables as lib

pytestmark = pytest.mark.core


def components(variable):
    return [component.numpy().tolist() for component in variable.values]


def test_random_states_differ_between_all_towers_and_come_back():
    config = kt.TowerStrategy(3, random="tower")._config
    # The offsets go over the end of the range.
    state = np.array([2**32 - 2, 7], "uint32")
    variable = lib.spread(config, tf.Variable(state), lib.STREAM)
    found = components(variable)
    assert found[0] == state.tolist()
    variable._first_tower = 4  # those of another process
    variable.assign(state)
    found += components(variable)
    assert len({first for first, _ in found}) == 6
    assert {second for _, second in found} == {7}
    assert variable.numpy().tolist() == state.tolist()
    assert lib.unbind(variable).numpy().tolist() == state.tolist()


def test_a_sum_is_written_outside_of_a_step():
    config = kt.TowerStrategy(3)._config
    variable = lib.spread(config, tf.Variable(5.0), lib.SUM)
    variable.assign(9.0)
    variable.assign_sub(3.0)
    assert components(variable) == [6.0, 0.0, 0.0]
