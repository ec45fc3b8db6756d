"""Replicas in one job: many trainings, slow ones, more and fewer than R."""

import pytest

from tests.kit.ranks import Job, names

pytestmark = pytest.mark.slow
ALL = names("tests.processes.replicas")
EXACT, FREED, *_ = ALL


def job(workers, *wanted, repetitions):
    return Job(
        "tests.processes.replicas",
        ranks=workers,
        limit_s=400,
        wanted=wanted,
        number="--workers",
        options=("--ps", "1"),
        REPETITIONS=str(repetitions),
        TESTED_STRATEGY="SyncReplicasStrategy",
    )


REST = ALL[2:]
TWO = job(2, EXACT, *REST, repetitions=4)
LONG = {
    2: job(2, EXACT, FREED, repetitions=20),
    3: job(3, EXACT, *REST, repetitions=20),
}


@pytest.mark.parametrize("name", (EXACT, *REST))
def test_two_workers(name):
    TWO.assert_passed(name)


@pytest.mark.long
@pytest.mark.parametrize("name", (EXACT, FREED))
def test_two_workers_at_length(name):
    LONG[2].assert_passed(name)


@pytest.mark.long
@pytest.mark.parametrize("name", (EXACT, *REST))
def test_three_workers(name):
    LONG[3].assert_passed(name)
