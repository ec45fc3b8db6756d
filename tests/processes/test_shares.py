"""Two processes that share the update train as one device does."""

import pytest

from tests.exactness.cases import CASES
from tests.kit.long import long_but
from tests.kit.ranks import Job, names

pytestmark = pytest.mark.slow

CHECKS = names("tests.processes.shares")
# Those that share by themselves; the rest is in `make test-all`.
KEPT_CHECKS = (
    "a_rank_holds_its_share_while_steps_run",
    "state_is_whole_at_the_end_of_an_epoch",
    "batches_by_hand_in_shares",
    "state_that_rank_0_has_loaded_in_shares",
    "a_fit_within_an_epoch_of_another",
    "an_error_between_steps_of_shares",
    "what_cannot_be_shared_is_refused",
    "a_commit_within_an_epoch_has_all_shares",
)
KEPT = ("embedding-clipped", "loss-scale-overflow", "lazy")
WORKER = "tests.processes.sharing"


def named(cases):
    return tuple(f"{case} in shares" for case in cases)


JOB = Job(WORKER, 2, 300, (*KEPT_CHECKS, *named(KEPT)))
REST = Job(
    *(WORKER, 2, 580),
    (
        *(check for check in CHECKS if check not in KEPT_CHECKS),
        *named(case for case in CASES if case not in KEPT),
    ),
)
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


@pytest.mark.parametrize("name", long_but(KEPT_CHECKS.__contains__, CHECKS))
def test_two_ranks(name):
    (JOB if name in KEPT_CHECKS else REST).assert_passed(name)


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
