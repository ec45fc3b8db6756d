"""Towers that share weights which exist once give what one device gives."""

import pytest

import keras_towers as kt
from tests.exactness.cases import CASES, HARDEST
from tests.exactness.compare import assert_same, on_towers


def on_shared(name, towers, ps_device):
    return on_towers(
        name,
        towers,
        strategy=kt.ParameterServerTowerStrategy,
        ps_device=ps_device,
    )


@pytest.mark.parametrize("name", CASES)
def test_case_on_two_towers(name):
    assert_same(name, on_shared(name, 2, "gpu"))


@pytest.mark.parametrize(
    "towers,ps_device", [(1, None), (2, "cpu"), (4, None), (8, "gpu")]
)
@pytest.mark.parametrize("name", [*HARDEST, "loss-scale-overflow", "uneven"])
def test_case_on_other_towers(name, towers, ps_device):
    assert_same(name, on_shared(name, towers, ps_device))
