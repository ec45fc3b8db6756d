"""Eight logical CPUs for every test, set before TensorFlow starts."""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("KERAS_BACKEND", "tensorflow")

import pytest
import tensorflow as tf

from keras_towers import virtual_towers

TOWERS = 8

virtual_towers(TOWERS)
tf.config.threading.set_inter_op_parallelism_threads(TOWERS)


@pytest.fixture
def devices() -> list[str]:
    """The names of the logical CPUs."""
    return [f"/device:CPU:{index}" for index in range(TOWERS)]


@pytest.fixture(autouse=True)
def nothing_left_patched():
    """Every test leaves Keras, the strategy stack and policies as they were."""
    import keras

    before = {name: getattr(keras.Model, name) for name in ("fit", "evaluate")}
    policy = keras.config.dtype_policy()
    yield
    keras.config.set_dtype_policy(policy)
    assert not tf.distribute.has_strategy()
    for name, method in before.items():
        assert getattr(keras.Model, name) is method, f"{name} is still patched"
