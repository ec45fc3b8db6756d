"""Towers that share one copy of each weight give what one device gives."""

import pytest

import keras_towers as kt
from tests.exactness.cases import HARDEST, OF_ONE_UPDATE, OF_UPDATES
from tests.exactness.contract import assert_contract
from tests.kit.long import long_but

PLACES = ((1, None), (2, "cpu"), (3, None), (8, "gpu"))


@pytest.mark.parametrize(
    "name", long_but(lambda name: name not in OF_ONE_UPDATE[1:], OF_UPDATES)
)
def test_case_on_two_towers(name):
    strategy = kt.ParameterServerTowerStrategy(2, ps_device="gpu")
    assert_contract(name, strategy)


# Every hardest case on two of these.
@pytest.mark.parametrize(
    "name, towers, ps_device",
    [
        (name, *PLACES[(turn + more) % len(PLACES)])
        for turn, name in enumerate(HARDEST)
        for more in (0, 1)
    ],
)
def test_hardest_cases_on_other_towers(name, towers, ps_device):
    strategy = kt.ParameterServerTowerStrategy(towers, ps_device=ps_device)
    assert_contract(name, strategy)
