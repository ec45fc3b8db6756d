"""One variable on every tower: sums, and states of random generators."""

import numpy as np
import pytest
import tensorflow as tf

import keras_towers as kt
from keras_towers.fit.weights import variables as lib

pytestmark = pytest.mark.core

TOWERS = 3


def components(variable):
    return [component.numpy().tolist() for component in variable.values]


def test_random_states_differ_between_towers_and_come_back():
    strategy = kt.TowerStrategy(TOWERS, random="tower")
    last = 2**32 - 2  # The offsets go over the end of the range.
    state = np.array([last, 7], "uint32")
    primary = tf.Variable(state)
    variable = lib.spread(strategy._config, primary, lib.STREAM)
    first, second, third = components(variable)
    assert first == state.tolist()
    assert len({first[0], second[0], third[0]}) == TOWERS
    assert {first[1], second[1], third[1]} == {7}
    variable.assign([1, 8])
    assert components(variable)[0] == [1, 8]
    assert components(variable)[1][0] == 1 + lib._SEED_STRIDE
    variable._first_tower = 4
    variable.assign(state)
    assert components(variable)[0][0] == (last + 4 * lib._SEED_STRIDE) % 2**32
    assert variable.numpy().tolist() == state.tolist()
    assert lib.unbind(variable).numpy().tolist() == state.tolist()


def test_a_sum_is_written_outside_of_a_step():
    config = kt.TowerStrategy(TOWERS)._config
    variable = lib.spread(config, tf.Variable(5.0), lib.SUM)
    variable.assign(9.0)
    variable.assign_add(1.0)
    variable.assign_sub(4.0)
    assert variable.numpy() == 6.0
    assert components(variable) == [6.0, 0.0, 0.0]
