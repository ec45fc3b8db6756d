"""Two ranks give the weights of one process."""

import pytest

from tests.kit.ranks import Job, names

pytestmark = pytest.mark.slow
JOB = Job(
    "tests.engines.horovod.training",
    ranks=2,
    limit_s=240,
    HOROVOD_DYNAMIC_PROCESS_SETS="1",
)
CHECKS = [
    name
    for module in ("training", "callbacks", "tapes")
    for name in names(f"tests.engines.horovod.{module}")
]


@pytest.mark.parametrize("name", CHECKS)
def test_check(name):
    JOB.assert_passed(name)


def test_the_job_ends_well():
    JOB.assert_ended_well()
