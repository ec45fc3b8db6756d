"""A job whose workers are objects of one process."""

import pytest

from keras_towers import settings
from tests.parameter_servers.in_process_job import Job


@pytest.fixture
def job(request, monkeypatch):
    """Creates a job whose workers soon notice a lost one."""
    for name, seconds in (
        ("BEAT_S", 0.1),
        ("LOST_S", 1.5),
        ("LIVENESS_CHECK_S", 0.1),
    ):
        monkeypatch.setattr(settings, name, seconds)
    jobs = []

    def make(size):
        jobs.append(Job(f"{request.node.name}_{len(jobs)}", size, monkeypatch))
        return jobs[-1]

    yield make
    for made in jobs:
        made.close()
