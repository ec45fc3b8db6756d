"""Several processes over Horovod give what one device gives."""

import pytest

from tests.exactness.cases import CASES

HARDEST = (
    "last-batch-of-one",
    "global-clipnorm",
    "loss-scale-overflow",
    "embedding-clipped",
    "sync-batch-norm",
    "mask",
    "steps-per-execution",
)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_two_ranks(run_checks, name):
    run_checks("exact", 2, name, "1", tuple(CASES), limit_s=480)


@pytest.mark.slow
@pytest.mark.parametrize("name", HARDEST)
def test_three_ranks(run_checks, name):
    run_checks("exact", 3, name, "1", HARDEST, limit_s=240)


@pytest.mark.slow
@pytest.mark.parametrize("name", HARDEST)
def test_two_ranks_of_two_towers(run_checks, name):
    run_checks("exact", 2, name, "2", HARDEST, limit_s=240)
