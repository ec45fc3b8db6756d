"""Which device holds a variable."""

import keras
import numpy as np
import pytest

from keras_towers.fit.weights import least_loaded as p

pytestmark = pytest.mark.core

GPUS = ["/device:GPU:0", "/device:GPU:1", "/device:GPU:2"]
CPU = "/device:CPU:0"
ON_CPU = {"small_device": CPU, "small_bytes": 100}
ON_FIRST = {"small_device": GPUS[0], "small_bytes": 100}


def variable(size):
    return keras.Variable(np.zeros(size, "int8"), dtype="int8")


@pytest.mark.parametrize(
    "small, sizes, places",
    [
        # The order matters.
        ({}, [4, 4, 8], [GPUS[0], GPUS[1], GPUS[0]]),
        ({}, [8, 4, 4], [GPUS[0], GPUS[1], GPUS[1]]),
        (ON_CPU, [99, 100, 200, 1], [CPU, GPUS[0], GPUS[1], CPU]),
        # One of the devices, where they count.
        (ON_FIRST, [99, 100], [GPUS[0], GPUS[1]]),
        ({**ON_CPU, "small_bytes": 0}, [1], [GPUS[0]]),
    ],
)
def test_a_variable_goes_where_the_fewest_bytes_are(small, sizes, places):
    # Any iterable of devices.
    place = p.LeastLoadedPlacement(iter(GPUS[:2]), **small)
    loads = dict.fromkeys([*GPUS[:2], *places], 0)
    for size, device in zip(sizes, places, strict=True):
        assert place(variable(size)) == device
        loads[device] += size
    assert place.devices == tuple(GPUS[:2])
    # The device of small ones is listed without any.
    assert {**dict.fromkeys(place.loads, 0), **loads} == place.loads


def test_sizes_in_bytes():
    words = keras.Variable(np.array(["a", "b"]), dtype="string")
    pair = keras.Variable(np.zeros((2, 3)), dtype="bfloat16")
    assert [p.byte_size(pair), p.byte_size(words)] == [12, 0]


def test_nothing_is_placed_after_clear():
    place = p.LeastLoadedPlacement(GPUS[:2], **ON_CPU)
    place(variable(200))
    assert place.loads[GPUS[0]] == 200
    place.clear()
    assert place.loads == {GPUS[0]: 0, GPUS[1]: 0, CPU: 0}
    assert place(variable(200)) == GPUS[0]
