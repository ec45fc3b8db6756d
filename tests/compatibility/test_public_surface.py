"""All that is not training does what stock MirroredStrategy does."""

import functools

import numpy as np
import pytest
import tensorflow as tf

import keras_towers as kt
from tests.compatibility.surface import OBSERVATIONS, plain
from tests.kit.long import some_of

# The observation, and the towers; a batch does not split evenly over three.
CASES = [
    *((name, 2) for name in OBSERVATIONS),
    *(
        pytest.param(name, 3, marks=pytest.mark.long)
        for name in ("all_gather", "gather", "reduce")
    ),
    *(pytest.param(name, 1, marks=pytest.mark.long) for name in OBSERVATIONS),
]
# What goes through a reduction, not only in the default mode for CPUs.
IN_OTHER_MODES = [
    ("all_reduce", "collective"),
    ("all_reduce_of_odd_values", "hierarchical"),
    ("reduce_in_a_function", "gpu"),
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


@pytest.mark.parametrize(("name", "towers"), some_of(CASES))
def test_like_stock(name, towers):
    strategy = kt.TowerStrategy(devices(towers))
    assert_same(plain(OBSERVATIONS[name](strategy)), wanted(name, towers), name)


@pytest.mark.parametrize(("name", "mode"), IN_OTHER_MODES)
def test_like_stock_in_every_mode(name, mode):
    strategy = kt.TowerStrategy(devices(2), mode=mode)
    assert strategy.mode == mode
    assert_same(plain(OBSERVATIONS[name](strategy)), wanted(name, 2), name)


@pytest.mark.parametrize("name", OBSERVATIONS)
def test_observations_are_of_values(name):
    # Two strategies that raise an error each time would agree, too.
    leaves = tf.nest.flatten(wanted(name, 2))
    raised = [leaf for leaf in leaves if str(leaf).startswith("raises")]
    assert len(raised) < len(leaves) / 2
    assert len(leaves) >= 2


def test_with_strategy_is_its_scope():
    strategy = kt.TowerStrategy(devices(2))
    with strategy as entered:
        assert entered is tf.distribute.get_strategy() is strategy
        variable = tf.Variable(1.0)
    assert len(strategy.experimental_local_results(variable)) == 2
    assert not tf.distribute.has_strategy()
