"""Two ranks give the weights of one process; both run each check."""

import pytest

from tests.kit.ranks import Job, names

pytestmark = pytest.mark.slow
JOB = Job(
    "tests.horovod.two_ranks",
    ranks=2,
    limit_s=240,
    HOROVOD_DYNAMIC_PROCESS_SETS="1",
)


@pytest.mark.parametrize("name", names("tests.horovod.training"))
def test_weights(name):
    JOB.assert_passed(name)


@pytest.mark.parametrize("name", names("tests.horovod.other"))
def test_other(name):
    JOB.assert_passed(name)


@pytest.mark.parametrize("name", names("tests.horovod.tensorflow_names"))
def test_tensorflow_names(name):
    JOB.assert_passed(name)


def test_the_job_ends_well():
    JOB.assert_ended_well()
