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
# One job for both, since most of a short job is its start.
ON_TWO_RANKS = (*CASES, *(f"{name} on two towers" for name in HARDEST))


@pytest.mark.slow
@pytest.mark.parametrize("name", ON_TWO_RANKS)
def test_two_ranks(run_checks, name):
    run_checks("exact", 2, name, ON_TWO_RANKS, limit_s=600)


@pytest.mark.slow
@pytest.mark.parametrize("name", HARDEST)
def test_three_ranks(run_checks, name):
    run_checks("exact", 3, name, HARDEST, limit_s=240)
