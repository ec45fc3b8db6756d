"""Parameter servers and workers as processes, and what becomes of them."""

import contextlib
import signal
import time

import pytest

from keras_towers.launching.tf_cluster import local_cluster
from tests.kit.tasks import Task

BEGIN = """
import os, sys, time
import tensorflow as tf
from keras_towers.parameter_servers import connection, server, take_role
connection._FIRST_NOTICE_S = 0.3
server._GONE_S = 1.0
from keras_towers.parameter_servers.shared import Event
job = take_role("MyStrategy")
print("started", job.starts)
def event(what):
    return Event(f"{job.prefix}{what}", job.devices[0])
"""

SPEAKS = f"""{BEGIN}
if job.is_chief:
    event("model").set()
event("model").wait()
print("the model is there")
"""

WAITS = f"""{SPEAKS}
with job.naming_lost_servers():
    event("what never comes").wait()
"""

TAKES = f"""{SPEAKS}
from keras_towers.parameter_servers.remote import run, traced
def letters():
    return tf.raw_ops.FIFOQueueV2(
        component_types=[tf.int64], shapes=[[]], shared_name="letters"
    )
def put():
    seven = tf.constant(7, tf.int64)
    there = letters()
    tf.raw_ops.QueueEnqueueV2(handle=there, components=[seven])
    return tf.raw_ops.QueueSizeV2(handle=there)
def take():
    return tf.raw_ops.QueueDequeueV2(
        handle=letters(), component_types=[tf.int64]
    )[0]
"""

SPREADS = f"""{SPEAKS}
own = tf.Variable([1.0, 2.0])
@tf.function
def spread(x):
    with tf.device(job.devices[0]):
        x = x + own
    x = x * own
    with tf.device(job.devices[1]):
        return x + own
print(spread(own).numpy(), own.device)
"""


@pytest.fixture
def start(tmp_path, ctrl_c):
    """Starts tasks; all of them have ended with the test."""
    tasks = []

    def start(cluster, script, name=None):
        task = Task(tmp_path, cluster, script, name)
        tasks.append(task)
        return task

    yield start
    for task in tasks:
        task.kill()


@pytest.fixture
def cluster():
    """Makes clusters whose ports are held until the test's end."""
    with contextlib.ExitStack() as held:
        yield lambda **tasks: held.enter_context(local_cluster(tasks))


def test_worker_waits_for_a_late_server_which_ends_by_itself(start, cluster):
    ps_0, ps_1, worker = cluster(ps=2, worker=1)
    trains = start(worker, SPREADS)
    serves = [start(ps_0, BEGIN)]
    trains.wait_for("worker 0 waits for ")
    serves.append(start(ps_1, BEGIN))
    assert trains.end(60) == 0, trains.output
    # Own variables are beside those of the servers.
    assert "[ 3. 10.] /job:localhost/replica:0/task:0" in trains.output
    for task, one in zip(serves, (ps_0, ps_1), strict=True):
        assert task.end() == 0, task.output
        assert f"{one} serves 1 worker\n" in task.output
        assert "ends: all workers have ended" in task.output
        assert "started" not in task.output


def test_interrupted_and_killed_tasks(start, cluster):
    ps_0, ps_1, *workers = cluster(ps=2, worker=2)
    serves = [start(one, BEGIN) for one in (ps_0, ps_1)]
    waits = [start(one, WAITS) for one in workers]
    for task in waits:
        task.wait_for("the model is there")
    for task in (waits[1], serves[1]):
        task.process.send_signal(signal.SIGINT)
        assert task.end(10), task.output
        assert "KeyboardInterrupt" in task.output
        assert "FATAL" not in task.output
    assert waits[0].process.poll() is None
    serves[0].kill()
    assert waits[0].end(10) == 1, waits[0].output
    assert (
        f"TowerError: worker 0 has to end: {ps_0} and {ps_1} cannot be reached"
        in waits[0].output
    )


def test_worker_that_failed_or_was_killed_comes_back(start, cluster):
    ps, chief, worker = cluster(ps=1, worker=2)
    serves, leads = start(ps, BEGIN), start(chief, WAITS)
    fails = start(worker, f"{SPEAKS}\nraise RuntimeError", "fails")
    assert fails.end(60) == 1
    killed = start(
        worker,
        f"{TAKES}\nprint('takes')\nrun(traced(take, job.devices[0]))",
        "killed",
    )
    killed.wait_for("takes")
    time.sleep(1)
    killed.kill()
    comes_back = start(
        worker,
        f"{TAKES}\nprint(int(run(traced(put, job.devices[0]))[0]), 'letters')",
        "comes_back",
    )
    assert comes_back.end(60) == 0, comes_back.output
    # The dead one takes nothing away.
    assert "1 letters" in comes_back.output
    assert [
        [line for line in task.output.splitlines() if "started" in line]
        for task in (fails, killed, comes_back)
    ] == [["started 1"], ["started 2"], ["started 3"]]
    # It serves the chief, which has not ended.
    assert serves.process.poll() is None
    assert leads.process.poll() is None


def test_server_waits_for_no_worker_that_died_before_the_chief_ended(
    start, cluster
):
    ps, chief, *workers = cluster(ps=1, worker=3)
    serves = start(ps, BEGIN)
    killed, slow = (
        start(workers[0], WAITS),
        start(workers[1], f"{SPEAKS}\ntime.sleep(4)\nprint('still there')"),
    )
    leads = start(chief, SPEAKS)
    killed.wait_for("the model is there")
    killed.kill()
    assert leads.end(60) == 0, leads.output
    assert slow.end() == 0, slow.output
    assert "still there" in slow.output
    assert serves.end() == 0, serves.output
    assert "ended, and worker 1 cannot be reached" in serves.output
