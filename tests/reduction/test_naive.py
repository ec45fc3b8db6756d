import pytest
import tensorflow as tf

from keras_towers.reduction import sum_on_host, sum_on_towers
from tests.reduction.cases import cpus, ops_of

pytestmark = pytest.mark.core


def places_of_sums(reduce, towers, number):
    row = [tf.ones([i + 1]) for i in range(number)]
    ops = ops_of(reduce, [row] * towers, cpus(towers))
    sums = [op for op in ops if op.type == "AddN"]
    sums.sort(key=lambda op: op.outputs[0].shape[0])
    return [tf.DeviceSpec.from_string(op.device).device_index for op in sums]


def test_all_on_the_host():
    assert places_of_sums(sum_on_host, 3, 4) == [0, 0, 0, 0]


def test_towers_take_turns():
    assert places_of_sums(sum_on_towers, 3, 5) == [0, 1, 2, 0, 1]
