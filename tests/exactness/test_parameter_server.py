"""Towers that share one copy of each weight give what one device gives."""

import pytest

import keras_towers as kt
from tests.exactness.cases import HARDEST, OF_ONE_UPDATE, OF_UPDATES
from tests.exactness.contract import assert_contract
from tests.kit.long import long_but

PLACES = ((1, None), (2, "cpu"), (3, None), (8, "gpu"))


# What towers update in one place is what Keras updates on one device: every
# third case shows it, and those whose state or gradients are of another kind.
KEPT = {
    *HARDEST,
    "loss-scale-overflow",
    *[name for name in OF_UPDATES if name not in OF_ONE_UPDATE][::3],
}


@pytest.mark.parametrize("name", long_but(KEPT.__contains__, OF_UPDATES))
def test_case_on_two_towers(name):
    strategy = kt.ParameterServerTowerStrategy(2, ps_device="gpu")
    assert_contract(name, strategy)


# Every hardest case on two of these, each of which is kept with one.
FIRST = [(name, *place) for name, place in zip(HARDEST, PLACES, strict=True)]
SECOND = [
    (name, *place)
    for name, place in zip(HARDEST, (*PLACES[1:], PLACES[0]), strict=True)
]


@pytest.mark.parametrize(
    "name, towers, ps_device", long_but(FIRST.__contains__, FIRST + SECOND)
)
def test_hardest_cases_on_other_towers(name, towers, ps_device):
    strategy = kt.ParameterServerTowerStrategy(towers, ps_device=ps_device)
    assert_contract(name, strategy)
