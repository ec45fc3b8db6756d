"""Replicas over parameter servers give what one device gives."""

import pytest

from tests.kit.ranks import Job, names

pytestmark = pytest.mark.slow
KEPT = ("last-batch-of-one", "embedding-clipped", "loss-scale-overflow")
EXACT = (*KEPT, "accumulation-clipped", "ema-overwrite")
LONG = (
    *("accumulation-clipped", "ema-overwrite"),
    *("mixed-float16", "steps-per-execution"),
    *("sgd", "adam", "class-weight", "sample-weight", "global-clipnorm"),
    *("weight-decay", "ema", "mixed-bfloat16", "embedding", "lazy"),
    *("several-losses", "sum-loss", "own-train-step", "validation"),
)
USAGE = names("tests.processes.served")


def job(*wanted, workers=2, limit_s=300, strategy="SyncReplicasStrategy"):
    return Job(
        "tests.processes.served",
        ranks=workers,
        limit_s=limit_s,
        wanted=wanted,
        number="--workers",
        options=("--ps", "2"),
        TESTED_STRATEGY=strategy,
    )


# Whatever the update: SGD's of each worker are one device's together.
ANY_UPDATE = tuple(
    name
    for name in USAGE
    if name
    not in (
        "callbacks_reach_the_optimizer_once",
        "masks_are_of_the_own_part_and_warned_of",
    )
)
JOB = job(*KEPT, *USAGE)
LONG_JOBS = {
    2: job(*LONG),
    3: job(*EXACT, workers=3),
    4: job("adam", workers=4),
}


@pytest.mark.parametrize("name", (*KEPT, *USAGE))
def test_two_workers(name):
    JOB.assert_passed(name)


def test_the_job_ends_well():
    JOB.assert_ended_well()


@pytest.mark.long
@pytest.mark.parametrize("name", LONG)
def test_two_workers_at_length(name):
    LONG_JOBS[2].assert_passed(name)


@pytest.mark.long
@pytest.mark.parametrize("name", EXACT)
def test_three_workers(name):
    LONG_JOBS[3].assert_passed(name)


@pytest.mark.long
def test_four_workers():
    LONG_JOBS[4].assert_passed("adam")


REPLICATED = job(*ANY_UPDATE, strategy="DistributedReplicatedStrategy")


@pytest.mark.long
@pytest.mark.parametrize("name", ANY_UPDATE)
def test_workers_that_update_by_themselves(name):
    REPLICATED.assert_passed(name)
