"""Parameter servers and workers as processes that start, end and die."""

import signal
import time

import pytest

pytestmark = pytest.mark.slow

BEGIN = """
import os, sys, time
import tensorflow as tf
from keras_towers.foundation import settings
from keras_towers.jobs.rendezvous import store
from keras_towers.parameter_servers.server_connection import take_role
settings.NOTICE_S = 0.3
settings.LOST_S = 6.0
job = take_role("MyStrategy")
print("started", job.starts)
def happens(what):
    job.store.put(f"{job.prefix}{what}", True)
def wait_for(what):
    store.wait_for(lambda _: job.store.get(f"{job.prefix}{what}"))
"""

SPEAKS = f"""{BEGIN}
if job.rank == 0:
    happens("model")
wait_for("model")
print("the model is there")
"""

WAITS = f"""{SPEAKS}
with job.naming_lost_servers():
    wait_for("go on")
"""

TAKES = f"""{SPEAKS}
from keras_towers.parameter_servers.remote_runtime import RunningFunction
from keras_towers.replicas.named_resources import Queue, trace
letters = Queue("letters", job.devices[0])
def take():
    return int(RunningFunction(trace(letters.get)).wait(60)[0])
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


@pytest.mark.alternate(turn=4)
def test_worker_waits_for_a_late_server_which_ends_by_itself(tasks):
    ps_0, ps_1, worker = tasks.cluster(ps=2, worker=1)
    trains = tasks.start(worker, SPREADS)
    serves = [tasks.start(ps_0, BEGIN)]
    trains.wait_for("worker 0 waits for ")
    serves.append(tasks.start(ps_1, BEGIN))
    assert trains.finish().code == 0, trains.output
    # Local variables can be used with the servers' variables.
    assert "[ 3. 10.] /job:localhost/replica:0/task:0" in trains.output
    for task, one in zip(serves, (ps_0, ps_1), strict=True):
        assert task.finish().code == 0, task.output
        assert f"{one} serves 1 worker\n" in task.output
        assert "ends: all workers have ended" in task.output
        assert "started" not in task.output


@pytest.mark.alternate(turn=1)
def test_a_server_waits_for_workers_that_die_and_come_back(tasks):
    """It does not wait for workers that are not restarted."""
    ps, chief, worker, another = tasks.cluster(ps=1, worker=3)
    serves, leads = tasks.start(ps, BEGIN), tasks.start(chief, WAITS)
    waits = tasks.start(another, WAITS)
    fails = tasks.start(worker, f"{SPEAKS}\nraise RuntimeError")
    assert fails.finish().code == 1
    killed = tasks.start(worker, f"{TAKES}\nprint('takes')\ntake()")
    killed.wait_for("takes")
    time.sleep(1)
    killed.kill()
    waits.wait_for("the model is there")
    waits.process.send_signal(signal.SIGINT)
    assert waits.finish().code, waits.output
    assert "KeyboardInterrupt" in waits.output
    comes_back = tasks.start(
        worker,
        f"""{TAKES}
letters.put(7)
print("letter", take())
happens("go on")
time.sleep(4)
""",
    )
    for task in (leads, comes_back, serves):
        assert task.finish().code == 0, task.output
    # The dead worker has not taken it.
    assert "letter 7" in comes_back.output
    assert [
        [line for line in task.output.splitlines() if "started" in line]
        for task in (fails, killed, comes_back)
    ] == [["started 1"], ["started 2"], ["started 3"]]
    assert "ended, and worker 2 cannot be reached" in serves.output
