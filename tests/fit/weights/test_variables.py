"""One variable on every tower: sums, and states of random generators."""

from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_towers as kt
from keras_towers import compat
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


def test_a_sum_that_ranks_write_outside_of_a_step():
    """Each reads it as a whole, and only rank 0 counts it in a sum of all."""
    config = kt.TowerStrategy(2)._config
    variable = lib.spread(config, tf.Variable(0, dtype="int32"), lib.SUM)
    assert variable._elsewhere is None
    with mock.patch.object(config.transport, "rank", 1):
        variable = lib.spread(config, tf.Variable(5), lib.SUM)
    tf.function(lambda: variable.assign(variable + 2))()
    assert components(variable) == [0, 0]
    assert int(variable) == 7
    variable.values[1].assign_add(3)
    assert int(variable) == int(lib.unbind(variable)) == 10


MERGES = {
    lib.SUM: 3,
    lib.MEAN: 3.0,
    lib.FIRST: True,
    lib.WHOLE: 3.0,
    "made inside": 3.0,
    "of a metric made inside": 3,
}


@pytest.mark.parametrize("kind", MERGES)
def test_a_scalar_is_a_number(kind):
    value = MERGES[kind]
    strategy = kt.TowerStrategy(2)
    with strategy:
        if kind in lib._AGGREGATION:
            plain = lib._copy(tf.Variable(value), value, "CPU:0")
            variable = lib.spread(strategy._config, plain, kind)
        elif kind == "made inside":
            variable = tf.Variable(value)
        else:
            variable = keras.Variable(
                0, dtype="int32", aggregation="sum", synchronization="on_read"
            ).value
            # TensorFlow gives each tower half of it, rounded.
            variable.assign(value)
        for found in (
            np.asarray(variable),
            np.array(variable),
            keras.ops.convert_to_numpy(variable),
            variable.numpy(),
        ):
            assert found == value and np.shape(found) == ()
            assert found.dtype == variable.dtype.as_numpy_dtype
        assert int(variable) == float(variable) == complex(variable) == value
        assert variable == value
        variable.assign(type(value)(0))
        assert not np.asarray(variable)
    lacking = vars(compat.DistributedVariable)
    assert not [name for name in lib.CONVERSIONS if name in lacking]
