"""N towers give the weights and the ``History`` that one device gives."""

import numpy as np
import pytest

import keras_towers as kt
from tests.exactness.cases import HARDEST, OF_ONE_UPDATE
from tests.exactness.contract import NAMES, assert_contract
from tests.kit.long import long_but

MODES = ("nccl", "collective", "hierarchical", "gpu", "cpu")
# Every hardest case in every mode, and every mode on every number of towers.
TURNS = [
    (name, mode, (2, 3, 4, 8)[(row + column) % 4])
    for row, mode in enumerate(MODES)
    for column, name in enumerate(HARDEST)
]
# Every hardest case, every mode and every number of towers at least once.
KEPT = (
    ("sync-batch-norm", "nccl", 4),
    ("embedding-clipped", "collective", 3),
    ("accumulation", "hierarchical", 8),
    ("gan", "gpu", 4),
    ("embedding-clipped", "cpu", 2),
)


@pytest.mark.parametrize(
    "name", long_but(lambda name: name not in OF_ONE_UPDATE[1:], NAMES)
)
def test_case_on_three_towers(name):
    assert_contract(name, kt.TowerStrategy(3))


@pytest.mark.parametrize("towers", long_but(lambda n: n == 8, [1, 2, 8]))
@pytest.mark.parametrize("name", HARDEST)
def test_hardest_cases_on_other_towers(name, towers):
    assert_contract(name, kt.TowerStrategy(towers))


@pytest.mark.parametrize(
    "name, mode, towers",
    long_but(KEPT.__contains__, TURNS),
)
def test_mode_on_towers(name, mode, towers):
    assert_contract(name, kt.TowerStrategy(towers, mode=mode))


@pytest.mark.parametrize(
    "name",
    long_but(
        ("embedding-clipped", "gan", "loss-scale-overflow").__contains__,
        [*HARDEST, "loss-scale-overflow", "uneven"],
    ),
)
def test_every_tower_updates_its_own(name):
    assert_contract(name, kt.TowerStrategy(3, updates="each"))


def test_a_wrong_weight_is_caught():
    def spoil(model):
        weights = model.get_weights()
        weights[0][0, 0] += 1e-4
        model.set_weights(weights)

    with pytest.raises(AssertionError, match="kernel"):
        assert_contract("sgd", kt.TowerStrategy(2), spoil)


def test_towers_that_differ_are_caught():
    def spoil(model):
        component = model.trainable_variables[0]._value.values[1]
        component.assign(component + np.float32(1e-7))

    with pytest.raises(AssertionError, match="tower 1"):
        assert_contract("sgd", kt.TowerStrategy(2), spoil)
