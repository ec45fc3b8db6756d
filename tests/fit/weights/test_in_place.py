"""What a step adds to variables is added in their memory.

TensorFlow's allocator would keep a hole for each variable that moves.
"""

import functools

import keras
import numpy as np
import pytest

import keras_towers as kt
from keras_towers.fit.weights.copies import parts_of
from tests.kit.training import X, Y, linear


def places_of(variables):
    """Return where the numbers of variables are in memory."""
    return {
        variable.path: [
            np.asarray(memoryview(copy.read_value())).ctypes.data
            for part in parts_of(variable)
            for copy in part.copies
        ]
        for variable in variables
    }


WAYS = {
    "once": functools.partial(kt.TowerStrategy, 2),
    "each": functools.partial(kt.TowerStrategy, 2, updates="each"),
    "slots in shards": functools.partial(
        kt.TowerStrategy, 2, updates="sharded"
    ),
    "shards": functools.partial(kt.TowerStrategy, 2, weights="sharded"),
    "server": functools.partial(
        kt.ParameterServerTowerStrategy, 2, ps_device="host"
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_slots_stay_where_they_are(way):
    model = linear(
        keras.layers.BatchNormalization(),
        optimizer=functools.partial(keras.optimizers.Adam, 0.01),
    )
    with WAYS[way]():
        model.train_on_batch(X[:8], Y[:8])
        # Weights may still be in use by the forward pass, and are then copied.
        slots = [v for v in model.optimizer.variables if len(v.shape) > 0]
        before = places_of(slots)
        model.train_on_batch(X[:8], Y[:8])
        assert places_of(slots) == before
