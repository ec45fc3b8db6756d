import pytest
import tensorflow as tf

from keras_towers.errors import TowerError
from keras_towers.reduction import hierarchical_all_reduce
from tests.reduction.cases import cpus, ops_of


@pytest.mark.parametrize("towers", [3, 5, 7])
def test_odd_numbers_are_refused(towers):
    grads = [[tf.ones([2])]] * towers
    with pytest.raises(TowerError, match=f"even number.*there are {towers}"):
        hierarchical_all_reduce(grads, cpus(towers))


def test_main_devices_rotate_and_groups_do_not_mix():
    row = [tf.ones([i + 1]) for i in range(6)]
    ops = ops_of(hierarchical_all_reduce, [row] * 8, cpus(8))
    for index in range(6):
        adds = [
            op
            for op in ops
            if op.type == "AddN" and op.outputs[0].shape == [index + 1]
        ]
        inside = [op for op in adds if len(op.inputs) == 4]
        across = [op for op in adds if len(op.inputs) == 2]
        mains = [index % 4, 4 + index % 4]
        for pair in (inside, across):
            places = [
                tf.DeviceSpec.from_string(op.device).device_index for op in pair
            ]
            assert places == mains
        sources = [{tensor.op for tensor in op.inputs} for op in across]
        assert sources == [set(inside)] * 2


def test_all_towers_have_the_same_bits():
    grads = [[tf.random.stateless_normal([999], [k, 1])] for k in range(8)]
    results = hierarchical_all_reduce(grads, cpus(8))
    first = results[0][0].numpy().tobytes()
    assert all(row[0].numpy().tobytes() == first for row in results)
