"""All that is not training does what stock MirroredStrategy does."""

import functools
import itertools

import numpy as np
import pytest
import tensorflow as tf

import keras_towers as kt
from tests.compatibility import (  # noqa: F401
    surface_datasets,
    surface_replicas,
    surface_strategy,
    surface_variables,
)
from tests.compatibility.observing import (
    OBSERVATIONS,
    plain,
)
from tests.kit.long import long_but

# A batch does not split evenly over three.
CASES = [
    *itertools.product(OBSERVATIONS, (1, 2)),
    *itertools.product(
        ("all_gather", "distribute_dataset", "gather", "reduce"), (3,)
    ),
]
MODES = ("collective", "hierarchical", "gpu")  # "cpu" is the default here.

# What goes through a reduction.
REDUCING = (
    "all_gather",
    "all_reduce",
    "all_reduce_of_odd_values",
    "extended_update",
    "gradient_through_all_reduce",
    "merge_call",
    "reduce",
    "reduce_in_a_function",
)


def devices(towers: int) -> list[str]:
    return [f"/device:CPU:{index}" for index in range(towers)]


@functools.cache
def wanted(name: str, towers: int):
    """What stock MirroredStrategy gives."""
    # Not its default for CPUs: once a collective of that has failed, it fails
    # in the whole process.
    strategy = tf.distribute.MirroredStrategy(
        devices(towers), tf.distribute.ReductionToOneDevice()
    )
    return plain(OBSERVATIONS[name](strategy))


def assert_same(found, wanted, path: str = "") -> None:
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
    elif isinstance(wanted, np.ndarray):
        assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape), path
        if wanted.dtype.kind in "fc":
            np.testing.assert_allclose(found, wanted, rtol=1e-5, err_msg=path)
        else:
            np.testing.assert_array_equal(found, wanted, err_msg=path)
    elif isinstance(wanted, (float, np.floating)):
        assert found == pytest.approx(wanted, rel=1e-5), path
    else:
        assert found == wanted, path


@pytest.mark.parametrize(
    ("name", "towers"), long_but(lambda case: case[1] == 2, CASES)
)
def test_like_stock(name, towers):
    strategy = kt.TowerStrategy(devices(towers))
    assert_same(plain(OBSERVATIONS[name](strategy)), wanted(name, towers), name)


@pytest.mark.parametrize(
    ("name", "mode"),
    # Each in one of the modes, in turn.
    long_but(
        lambda case: (
            (REDUCING.index(case[0]) + MODES.index(case[1])) % len(MODES) == 0
        ),
        itertools.product(REDUCING, MODES),
    ),
)
def test_like_stock_in_every_mode(name, mode):
    strategy = kt.TowerStrategy(devices(2), mode=mode)
    assert strategy.mode == mode
    assert_same(plain(OBSERVATIONS[name](strategy)), wanted(name, 2), name)


def _leaves(value):
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return [leaf for item in value for leaf in _leaves(item)]
    return [value]


@pytest.mark.parametrize("name", OBSERVATIONS)
def test_observations_are_of_values(name):
    # Two strategies that raise an error each time would agree, too.
    leaves = _leaves(wanted(name, 2))
    raised = [leaf for leaf in leaves if str(leaf).startswith("raises")]
    if name != "run_nested_in_run":
        assert len(raised) < len(leaves) / 2
        assert len(leaves) >= 2


@pytest.mark.parametrize("towers", (1, 2, 4))
def test_with_strategy_is_its_scope(towers):
    strategy = kt.TowerStrategy(devices(towers))
    with strategy as entered:
        assert entered is tf.distribute.get_strategy() is strategy
        variable = tf.Variable(1.0)
    assert len(strategy.experimental_local_results(variable)) == towers
    assert not tf.distribute.has_strategy()
    total = strategy.reduce(
        "SUM", strategy.run(lambda: variable + 1.0), axis=None
    )
    assert float(total) == 2.0 * towers
