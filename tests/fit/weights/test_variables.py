"""Variables that are made in a block, before a model of theirs is used."""

import keras
import numpy as np
import pytest

import keras_towers as kt

pytestmark = pytest.mark.core


@pytest.mark.parametrize(
    "make",
    [
        lambda: keras.optimizers.Adam(3.0).learning_rate,
        lambda: keras.metrics.Sum(dtype="int32").total,
    ],
)
def test_a_scalar_is_a_number(make):
    with kt.TowerStrategy(2):
        variable = make().value
        # Of a metric, TensorFlow would give each tower half of it, rounded.
        variable.assign(3)
        for found in (
            np.asarray(variable),
            np.array(variable),
            keras.ops.convert_to_numpy(variable),
            variable.numpy(),
        ):
            assert found == 3 and np.shape(found) == ()
            assert found.dtype == variable.dtype.as_numpy_dtype
        assert int(variable) == float(variable) == complex(variable) == 3
        variable.assign(0)
        assert not np.asarray(variable)
