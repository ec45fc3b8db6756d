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
# What they have in common with the others takes BytePS too long.
OVER_BYTEPS = ("training_goes_on_in_shares", "batches_by_hand_in_shares")
OTHERS = {
    "three ranks": (Job(WORKER, 3, 220, CHECKS), CHECKS),
    "over TensorFlow": (
        Job(
            *(WORKER, 2, 220, CHECKS),
            number="--workers",
            TESTED_STRATEGY="MultiWorkerTowerStrategy",
        ),
        CHECKS,
    ),
    "over BytePS": (
        Job(
            *(WORKER, 2, 220, OVER_BYTEPS),
            options=("--servers", "1"),
            TESTED_STRATEGY="BytePSStrategy",
        ),
        OVER_BYTEPS,
    ),
}


@pytest.mark.parametrize("name", CHECKS)
def test_two_ranks(name):
    JOB.assert_passed(name)


@pytest.mark.parametrize("case", long_but(KEPT.__contains__, CASES))
def test_exactness(case):
    (JOB if case in KEPT else REST).assert_passed(f"{case} in shares")


@pytest.mark.long
@pytest.mark.parametrize(
    "job, name", [(job, name) for job, (_, ns) in OTHERS.items() for name in ns]
)
def test_other_jobs(job, name):
    OTHERS[job][0].assert_passed(name)


def test_the_job_ends_well():
    JOB.assert_ended_well()
