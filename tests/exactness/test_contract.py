"""N towers give the weights and the ``History`` that one device gives."""

import numpy as np
import pytest

from tests.exactness.cases import CASES, HARDEST
from tests.exactness.compare import assert_same, on_towers

NUMBERS = (1, 2, 3, 8)
MODES = ("nccl", "collective", "hierarchical", "gpu", "cpu")


@pytest.mark.parametrize("towers", NUMBERS)
@pytest.mark.parametrize("name", CASES)
def test_case_on_towers(name, towers):
    assert_same(name, on_towers(name, towers))


def _pairs():
    """Every mode on every number of towers, the hardest cases in turn."""
    pairs = [(mode, towers) for mode in MODES for towers in (2, 3, 4, 8)]
    for index, (mode, towers) in enumerate(pairs):
        yield HARDEST[index % len(HARDEST)], mode, towers
        yield HARDEST[(index // len(HARDEST)) % len(HARDEST)], mode, towers


@pytest.mark.parametrize("name,mode,towers", sorted(set(_pairs())))
def test_mode_on_towers(name, mode, towers):
    assert_same(name, on_towers(name, towers, mode=mode))


@pytest.mark.parametrize("name", [*HARDEST, "loss-scale-overflow", "uneven"])
@pytest.mark.parametrize("towers", (2, 3))
def test_every_tower_updates_its_own(name, towers):
    assert_same(name, on_towers(name, towers, updates="each"))


def test_a_wrong_weight_is_caught():
    def spoil(model):
        weights = model.get_weights()
        weights[0][0, 0] += 1e-4
        model.set_weights(weights)

    with pytest.raises(AssertionError, match="kernel"):
        assert_same("sgd", on_towers("sgd", 2, spoil))


def test_towers_that_differ_are_caught():
    def spoil(model):
        component = model.trainable_variables[0]._value.values[1]
        component.assign(component + np.float32(1e-7))

    with pytest.raises(AssertionError, match="tower 1"):
        on_towers("sgd", 2, spoil)
