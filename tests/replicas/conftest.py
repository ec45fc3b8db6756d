"""A job whose workers are objects of one process."""

import pytest

from keras_towers.parameter_servers import pulse
from keras_towers.replicas.servers import workers
from tests.kit.served import Job


@pytest.fixture
def job(request, monkeypatch):
    """Creates a job of some workers, which notice soon who is lost."""
    for module, name, seconds in (
        (pulse, "_BEAT_S", 0.1),
        (pulse, "_GONE_S", 0.5),
        (workers, "_LOOK_S", 0.1),
        (workers, "_QUIET_S", 0.5),
    ):
        monkeypatch.setattr(module, name, seconds)
    jobs = []

    def make(size):
        jobs.append(Job(f"{request.node.name}_{len(jobs)}", size, monkeypatch))
        return jobs[-1]

    yield make
    for made in jobs:
        made.close()
