"""Clusters of TensorFlow's runtime that the launcher starts."""

import os
import signal

import pytest

from tests.launching.jobs import Launched, all_gone

TRAINS = """
import os, sys, time
import tensorflow as tf
from keras_towers.parameter_servers import take_role
from keras_towers.parameter_servers.shared import Event
job = take_role("MyStrategy")
if job.is_chief:
    Event("model", job.devices[0]).set()
Event("model", job.devices[0]).wait()
never = Event("never", job.devices[0])
print("trains as", job.rank, "of", job.size, "at", job.cluster.address)
"""


@pytest.fixture
def launched(tmp_path):
    """Starts a launcher on a script; it has ended with the test."""
    started = []

    def launch(options, script, **variables):
        path = tmp_path / f"script_{len(started)}.py"
        path.write_text(script)
        arguments = (*options.split(), str(path))
        started.append(Launched(tmp_path, arguments, **variables))
        return started[-1]

    yield launch
    for launcher in started:
        if launcher.process.poll() is None:
            launcher.finish(0)


def test_two_jobs_at_once(launched, tmp_path):
    jobs = [
        launched(f"--ps 1 --workers {n} --output logs{n} --verbose", TRAINS)
        for n in (1, 2)
    ]
    for n, job in enumerate(jobs, 1):
        done = job.finish(120)
        assert done.code == 0, done.out + done.err
        for rank in range(n):
            assert f"[worker {rank}] trains as {rank} of {n} at" in done.out
        assert "[ps 0] ps 0 ends: all workers have ended" in done.err
        logs = {path.name for path in (tmp_path / f"logs{n}").iterdir()}
        assert "rank.ps.0.txt" in logs
        assert len(logs) == n + 1


def test_failing_worker_ends_the_job_with_its_code(launched):
    job = launched(
        "--ps 1 --workers 2",
        f"{TRAINS}\nif job.rank == 1:\n    sys.exit(7)\nnever.wait()",
    )
    done = job.finish(120)
    assert done.code == 7, done.out + done.err
    assert "task worker 1 ended with exit code 7" in done.last


def test_request_to_end_is_for_the_workers(launched, tmp_path):
    """They make backups, for which they need the server."""
    ready = tmp_path / "ready"
    job = launched(
        "--ps 1 --workers 2",
        f"""{TRAINS}
import signal
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
with open({str(ready)!r}, "a") as file:
    print("ready", file=file)
never.wait()
""",
    )
    job.wait_for(ready, 2)
    job.send(signal.SIGTERM)
    done = job.finish(60)
    assert done.code == 75, done.out + done.err
    assert "the script goes on (exit code 75)" in done.last
    assert "[ps 0] ps 0 ends: all workers have ended" in done.err


def test_server_is_ended_where_workers_say_no_goodbye(launched):
    job = launched(
        "--ps 1 --workers 1", f"{TRAINS}\nsys.stdout.flush()\nos._exit(0)"
    )
    done = job.finish(120)
    assert done.code == 0, done.out + done.err
    assert "ends: all workers" not in done.err


def test_tasks_that_never_connect_are_told_how_to(launched):
    done = launched("--workers 3", "print('alone')").finish(60)
    assert done.code == 0
    assert done.out.count("alone") == 3
    assert "the 3 processes never connected" in done.last
    assert "--strategy multi-worker" in done.last


def test_task_that_ends_before_it_connects_is_not_waited_for(launched):
    waits = """
import os, time
from keras_towers.launching.tf_cluster import tell_of_joining
if '"index": 0' in os.environ["TF_CONFIG"]:
    tell_of_joining()
    time.sleep(100)
"""
    done = launched("--workers 2", waits).finish(60)
    assert done.code == 1, done.out + done.err
    assert (
        "task worker 1 ended with exit code 0 before it connected, and task "
        "worker 0 waits for it" in done.last
    )


FITS = """
import os
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
import keras
import numpy as np
import keras_towers as kt

class Ready(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 3:
            with open(READY, "a") as file:
                print("ready", file=file)

model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(2)])
model.compile("sgd", "mse")
x = np.ones((80, 4), "float32")
try:
    kt.virtual_towers(3)
except kt.TowerError as error:
    print("refused:", error)
with kt.SyncReplicasStrategy(towers=2):
    model.fit(x, x[:, :2], 8, 100_000, verbose=0, callbacks=[Ready()])
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "to", ["group", pytest.param("launcher", marks=pytest.mark.long)]
)
def test_ctrl_c_ends_all_tasks(launched, tmp_path, to):
    ready = tmp_path / "ready"
    job = launched(
        "--ps 1 --workers 2 --towers 2", f"READY = {str(ready)!r}\n{FITS}"
    )
    job.wait_for(ready, 2)
    family = job.family()
    assert len(family) >= 3
    if to == "group":
        # What a terminal does.
        os.killpg(job.process.pid, signal.SIGINT)
    else:
        job.send(signal.SIGINT)
    done = job.finish(30)
    assert done.code == 130, done.out + done.err
    assert "stopped by SIGINT" in done.last
    assert all_gone(family, 1)
    # It has trained on two towers, which were made before the task connected.
    assert "give it --towers 3 instead" in done.out
