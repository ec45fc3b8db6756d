"""Workers and parameter servers that stop, die and come back."""

import bisect
import contextlib
import itertools
import json
import signal
import time
from pathlib import Path

import keras
import numpy as np
import pytest

from keras_towers.launching.tf_cluster import local_cluster
from tests.kit.tasks import Task

pytestmark = pytest.mark.slow
SCRIPT = Path(__file__).with_name("lost_replicas.py").read_text()


@pytest.fixture
def job(tmp_path, ctrl_c):
    """Starts a job of one server; all of its tasks end with the test."""
    tasks = []
    with contextlib.ExitStack() as held:

        def start(strategy, workers, *epochs, **options):
            given = ["", strategy, json.dumps(options), json.dumps(epochs)]
            script = f"import sys\nsys.argv = {given!r}\n{SCRIPT}"
            clusters = held.enter_context(
                local_cluster({"ps": 1, "worker": workers})
            )

            def again(index, name=None):
                task = Task(tmp_path, clusters[index], script, name)
                tasks.append(task)
                return task

            server, *others = (again(i) for i in range(workers + 1))
            for task in others:
                task.wait_for("step", 90)
            return server, *others, again

        yield start
        for task in tasks:
            if task.process.poll() is None:
                task.process.send_signal(signal.SIGCONT)
            task.kill()


def lines(task, word):
    return [
        line.split()
        for line in task.output.splitlines()
        if line.split()[:1] == [word]
    ]


def longest_gaps(task, *moments):
    """The longest time between two steps until each moment, and behind all."""
    times = [float(line[1]) for line in lines(task, "step")]
    longest = [0.0] * (len(moments) + 1)
    for begun, ended in itertools.pairwise(times):
        place = bisect.bisect(moments, ended)
        longest[place] = max(longest[place], ended - begun)
    return longest


def test_one_backup_replica_makes_up_for_one_that_stops_and_one_that_dies(job):
    server, chief, stops, dies, _ = job(
        "SyncReplicasStrategy", 3, 10, replicas_to_aggregate=2, stall_timeout=30
    )
    time.sleep(0.5)
    stopped = time.time()
    stops.process.send_signal(signal.SIGSTOP)
    time.sleep(4)
    stops.process.send_signal(signal.SIGCONT)
    time.sleep(0.5)
    killed = time.time()
    dies.kill()
    assert chief.end(60) == stops.end(30) == 0, chief.output + stops.output
    assert server.end(30) == 0, server.output
    # It would have been 4 s, or as long as the death is not noticed.
    before, *gaps = longest_gaps(chief, stopped, killed)
    assert max(gaps) < max(3, 4 * before), (before, gaps)
    assert len(lines(chief, "epoch")) == 10
    (steps,) = (line[1] for line in lines(chief, "counts"))
    assert int(steps) >= 110, chief.output
    assert lines(chief, "weights") == lines(stops, "weights")


def as_on_one_device(*fits):
    """The weights of one process, with the script's own model and data."""
    keras.utils.set_random_seed(3)
    layers = [keras.layers.Input((8,)), keras.layers.Dense(1)]
    model = keras.Sequential(layers)
    model.compile(keras.optimizers.SGD(0.01), "mse")
    x = np.random.default_rng(0).normal(size=(96, 8)).astype("float32")
    for epochs in fits:
        model.fit(x, x[:, :1], 8, epochs=epochs, verbose=0)
    return model.get_weights()


@pytest.mark.parametrize(
    "strategy",
    [
        "SyncReplicasStrategy",
        pytest.param("DistributedReplicatedStrategy", marks=pytest.mark.long),
    ],
)
def test_worker_that_comes_back_goes_on_where_it_was(job, strategy):
    """Within the second fit of the script, in the middle of an epoch."""
    server, chief, dies, start = job(strategy, 2, 2, 4, stall_timeout=60)
    dies.wait_for("fit of 4")
    until = time.monotonic() + 30
    while len(lines(dies, "step")) < 24 + 18 and time.monotonic() < until:
        time.sleep(0.05)
    dies.kill()
    again = start(2, "again")
    assert chief.end(60) == again.end(30) == 0, chief.output + again.output
    assert server.end(30) == 0
    assert lines(again, "epoch")[0] == lines(dies, "epoch")[-1]
    steps = [len(lines(task, "step")) for task in (chief, dies, again)]
    # It may have died between the end of a step and what tells of it here.
    assert steps[0] == 6 * 12 and 0 <= steps[0] - sum(steps[1:]) <= 1, steps
    (values,) = (line[1:] for line in lines(chief, "values"))
    found = json.loads("".join(values))
    if strategy == "SyncReplicasStrategy":
        assert "used by replica: 48 48; dropped: 0 0" in chief.output
        for mine, other in zip(found, as_on_one_device(2, 4), strict=True):
            np.testing.assert_allclose(mine, other, rtol=2e-5)
    assert lines(chief, "weights") == lines(again, "weights")


def test_worker_that_does_not_come_back(job):
    server, chief, dies, _ = job("SyncReplicasStrategy", 2, 40, stall_timeout=5)
    dies.kill()
    assert chief.end(50) == 1, chief.output
    assert (
        "worker 0 has waited 5 s for the other workers: worker 1 cannot be "
        "reached any more" in chief.output
    )
    assert server.end(30) == 1


@pytest.mark.parametrize(
    "strategy",
    [
        "SyncReplicasStrategy",
        pytest.param("DistributedReplicatedStrategy", marks=pytest.mark.long),
    ],
)
def test_dead_chief_ends_all(job, strategy):
    server, chief, worker, _ = job(strategy, 2, 100)
    killed = time.time()
    chief.kill()
    assert worker.end(20) == 1, worker.output
    assert "the chief cannot be reached any more" in worker.output
    (told,) = lines(worker, "refused")
    assert float(told[2].rstrip(":")) - killed < 10
    assert server.end(30) == 1
    assert "the chief cannot be reached any more" in server.output


@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param("SyncReplicasStrategy", marks=pytest.mark.long),
        "DistributedParameterServerStrategy",
    ],
)
def test_dead_server_ends_all(job, strategy):
    server, *workers, _ = job(strategy, 2, 100, towers=2)
    killed = time.time()
    server.kill()
    for worker in workers:
        assert worker.end(20) == 1, worker.output
        (told,) = lines(worker, "refused")
        assert float(told[2].rstrip(":")) - killed < 10
        assert "cannot be reached any more. Start all tasks" in worker.output
