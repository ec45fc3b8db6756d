"""Two processes that share the update train as one device does."""

import pytest

from tests.exactness.cases import CASES
from tests.kit.long import long_but
from tests.kit.ranks import Job, names

pytestmark = pytest.mark.slow

CHECKS = names("tests.processes.shares")
KEPT = ("embedding-clipped", "loss-scale-overflow", "eager", "lazy", "gan")
WORKER = "tests.processes.sharing"


def named(cases):
    return tuple(f"{case} in shares" for case in cases)


JOB = Job(WORKER, 2, 300, (*CHECKS, *named(KEPT)))
REST = Job(WORKER, 2, 600, named(case for case in CASES if case not in KEPT))
THREE_RANKS = Job(WORKER, 3, 300, CHECKS)


@pytest.mark.parametrize("name", CHECKS)
def test_two_ranks(name):
    JOB.assert_passed(name)


@pytest.mark.parametrize("case", long_but(KEPT.__contains__, CASES))
def test_exactness(case):
    (JOB if case in KEPT else REST).assert_passed(f"{case} in shares")


@pytest.mark.long
@pytest.mark.parametrize("name", CHECKS)
def test_three_ranks(name):
    THREE_RANKS.assert_passed(name)


def test_the_job_ends_well():
    JOB.assert_ended_well()
