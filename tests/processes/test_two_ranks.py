"""What users do with ``HorovodStrategy``, in two real processes."""

import pytest

from tests.kit.ranks import Job, names

pytestmark = pytest.mark.slow
JOB = Job("tests.processes.two_ranks", ranks=2, limit_s=480)


@pytest.mark.parametrize("name", names("tests.processes.training"))
def test_training(name):
    JOB.assert_passed(name)


@pytest.mark.parametrize("name", names("tests.processes.compression"))
def test_compression(name):
    JOB.assert_passed(name)


@pytest.mark.parametrize("name", names("tests.processes.distribution"))
def test_distribution(name):
    JOB.assert_passed(name)


@pytest.mark.parametrize("name", names("tests.processes.leaving"))
def test_leaving(name):
    JOB.assert_passed(name)


@pytest.mark.parametrize("name", names("tests.processes.steps"))
def test_steps(name):
    JOB.assert_passed(name)


@pytest.mark.parametrize("name", names("tests.processes.timeline"))
def test_timeline(name):
    JOB.assert_passed(name)


def test_the_job_ends_well():
    JOB.assert_ended_well()
