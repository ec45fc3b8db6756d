"""A job whose parameter server is killed goes on from its backup.

What it has freed is missed by no worker that has been there all along.
"""

import contextlib
import json
import time

import pytest

from keras_towers.launching.tf_cluster import local_cluster
from tests.kit.compare import close
from tests.kit.tasks import ROOT, Task
from tests.processes import lost_server

pytestmark = [pytest.mark.slow, pytest.mark.long]


@pytest.fixture
def job(tmp_path, ctrl_c):
    """Starts all tasks of a job; they have ended with the test."""
    tasks = []
    with contextlib.ExitStack() as held:
        clusters = held.enter_context(local_cluster({"ps": 1, "worker": 2}))

        def start(name, kind, pause_s, only=range(3)):
            given = ["", kind, str(tmp_path / "backup"), str(pause_s)]
            script = (
                f"import sys\nsys.argv = {given!r}\n"
                f"sys.path.insert(0, {str(ROOT)!r})\n"
                "from tests.processes import lost_server\nlost_server.main()\n"
            )
            started = [
                Task(tmp_path, cluster, script, f"{name}-{number}")
                for number, cluster in enumerate(clusters)
                if number in only
            ]
            tasks.extend(started)
            return started

        yield start
        for task in tasks:
            task.kill()


@pytest.mark.parametrize("kind", ["keras", "towers"])
def test_weights_are_those_of_an_uninterrupted_job(job, kind):
    server, *workers = job("first", kind, 0.1)
    for worker in workers:
        worker.wait_for("epoch 3", 90)
    killed = time.time()
    server.kill()
    for worker in workers:
        assert worker.end(30) == 1, worker.output
        (told,) = (
            line
            for line in worker.output.splitlines()
            if line.startswith("refused at")
        )
        assert float(told.split()[2].rstrip(":")) - killed < 10, told
        assert "cannot be reached any more. Start all tasks" in told
    server, *workers = job("again", kind, 0)
    for task in (*workers, server):
        assert task.end(90) == 0, task.output
    wanted = lost_server.trained([])
    for worker in workers:
        assert "epoch 1\n" not in worker.output
        *_, line = worker.output.split("weights ")
        found = json.loads(line.splitlines()[0])
        for a, b in zip(found, wanted, strict=True):
            close(a, b, 1e-6)


def test_worker_that_comes_back_to_a_model_that_was_freed(job):
    *_, dies = job("first", "none", 0.1)
    dies.wait_for("fit 3", 90)
    dies.kill()
    (again,) = job("again", "none", 0.1, only=[2])
    assert again.end(60) == 1, again.output
    assert "the parameter servers have freed its weights" in again.output
