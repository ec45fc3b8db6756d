"""All that is not training does what stock MirroredStrategy does."""

import functools

import numpy as np
import pytest
import tensorflow as tf

import keras_towers as kt
from tests.compatibility.surface import OBSERVATIONS, plain
from tests.kit.long import some_of

# The observation, the towers, and the mode, if not the default for CPUs.
CASES = [
    *some_of((name, 2, None) for name in OBSERVATIONS),
    # What goes through a reduction.
    ("all_reduce", 2, "collective"),
    ("all_reduce_of_odd_values", 2, "hierarchical"),
    ("reduce_in_a_function", 2, "gpu"),
    *(
        pytest.param(name, towers, None, marks=pytest.mark.long)
        for name in OBSERVATIONS
        for towers in (1, 3)
    ),
]


def devices(towers):
    return [f"/device:CPU:{index}" for index in range(towers)]


@functools.cache
def wanted(name, towers):
    """What stock MirroredStrategy gives."""
    # Not its default for CPUs: once a collective of that has failed, it fails
    # in the whole process.
    strategy = tf.distribute.MirroredStrategy(
        devices(towers), tf.distribute.ReductionToOneDevice()
    )
    return plain(OBSERVATIONS[name](strategy))


def assert_same(found, wanted, path=""):
    """Structures, types and values are the same."""
    assert type(found) is type(wanted), (path, found, wanted)
    if isinstance(wanted, dict):
        assert list(found) == list(wanted), path
        for key, value in wanted.items():
            assert_same(found[key], value, f"{path}/{key}")
    elif isinstance(wanted, list):
        assert len(found) == len(wanted), (path, found, wanted)
        for index, value in enumerate(wanted):
            assert_same(found[index], value, f"{path}[{index}]")
    elif isinstance(wanted, (float, np.floating, np.ndarray)):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, err_msg=path)
        assert np.result_type(found) == np.result_type(wanted), path
        assert np.shape(found) == np.shape(wanted), path
    else:
        assert found == wanted, path


@pytest.mark.parametrize(("name", "towers", "mode"), CASES)
def test_all_but_training_is_as_with_mirrored_strategy(name, towers, mode):
    strategy = kt.TowerStrategy(devices(towers), mode=mode)
    assert mode in (None, strategy.mode)
    assert_same(plain(OBSERVATIONS[name](strategy)), wanted(name, towers), name)
