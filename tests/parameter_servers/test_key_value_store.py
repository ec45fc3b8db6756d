"""The store and running functions, on this process's device."""

import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import tensorflow as tf

from keras_towers.foundation import settings
from keras_towers.foundation.errors import TowerError
from keras_towers.jobs.rendezvous import rank_checks
from keras_towers.jobs.rendezvous.tf_config import Cluster
from keras_towers.parameter_servers import (
    key_value_store as lib,
    remote_runtime,
    server_process,
)
from keras_towers.parameter_servers.key_value_store import (
    KeyValueStore,
    value_of,
)
from keras_towers.parameter_servers.remote_runtime import RunningFunction
from keras_towers.replicas.named_resources import Queue, trace

DEVICE = "/job:localhost/replica:0/task:0/device:CPU:0"
NAN = float("nan")
JOBS = {"ps": ("a:1",), "chief": ("c:2",), "worker": ("d:3", "e:4")}


@pytest.fixture
def name(request):
    """A name that no other test uses."""
    return request.node.name


def test_ctrl_c_ends_only_the_wait_of_the_main_thread(name, ctrl_c):
    mine, others = (Queue(f"{name}/{n}", DEVICE) for n in "ab")
    take = trace(mine.get)
    main = threading.main_thread().ident

    def interrupt():
        time.sleep(0.3)
        signal.pthread_kill(main, signal.SIGINT)

    with ThreadPoolExecutor(2) as pool:
        theirs = pool.submit(RunningFunction(trace(others.get)).wait, 60)
        with pytest.raises(KeyboardInterrupt):
            pool.submit(interrupt)
            RunningFunction(take).wait(60)
        # The canceled function takes no element.
        mine.put(3)
        assert RunningFunction(take).wait(60) == [3]
        with pytest.raises(TimeoutError):
            RunningFunction(take).wait(0.1)
        others.put(7)
        assert theirs.result(60) == [7]


def test_stores_share_values_by_key(name):
    store = KeyValueStore(DEVICE)
    assert store.get(name) is None
    store.put(name, "\u00e9")
    assert KeyValueStore(DEVICE).get(name) == "\u00e9"
    store.put(name, "")
    assert store.get(name) == ""
    store.put(name, {"b": 1})
    read = tf.function(lambda: store.read(name))
    assert value_of(read()) == {"b": 1}
    assert value_of(tf.function(lambda: store.read(f"{name}2"))()) is None
    for given in [], [3, -(1 << 60)]:
        numbers = tf.constant(given, tf.int64)
        trace(lambda n=numbers: store.write(["", name], tf.constant(1), n))()
        assert store.get(name) == given
    for rank in (-1, 2):
        store.put(f"{name}-{rank}", rank)
    assert store.by_rank(name, range(-1, 3)) == {-1: -1, 2: 2}


def test_later_requests_trace_nothing(name, monkeypatch):
    def refuse(*args):
        raise AssertionError("it is traced anew")

    KeyValueStore(DEVICE).put(name, 1)
    KeyValueStore(DEVICE).get(name)
    monkeypatch.setattr(remote_runtime.tf, "function", refuse)
    for number in range(20):
        store, key = KeyValueStore(DEVICE), f"{name}/{number}"
        assert store.get(key) is None
        store.put(key, number)
        assert store.get(key) == number


def test_a_failed_call_raises_its_error():
    fails = trace(lambda: tf.debugging.check_numerics(NAN, ""))
    with pytest.raises(tf.errors.InvalidArgumentError):
        RunningFunction(fails).wait()


@pytest.fixture
def here(monkeypatch, name):
    """Make this process the parameter server."""
    monkeypatch.setattr(lib, "device_of", lambda server: DEVICE)
    monkeypatch.setattr(lib, "_COMMON", name)


def worker(index, jobs=JOBS):
    return Cluster(jobs, "worker", index)


SERVER = Cluster(JOBS, "ps", 0)


def test_tasks_accept_only_tasks_of_their_job(here):
    for cluster in (SERVER, worker(0), worker(1), worker(0)):
        lib.introduce(cluster, 0)
    other = {**JOBS, "worker": ("x:9", "y:8")}
    with pytest.raises(TowerError, match="worker 1 has a different .*x:9"):
        lib.introduce(worker(1, other), 0)


def test_waits_for_tasks_that_never_start_have_limits(here, monkeypatch):
    monkeypatch.setattr(settings, "ANSWER_S", 0.5)
    with pytest.raises(TowerError, match="ps 0 at .* has not introduced"):
        lib.introduce(worker(0), 0)
    monkeypatch.setenv(settings.ENV_RENDEZVOUS_TIMEOUT, "1")
    monkeypatch.setattr(settings, "BEAT_S", 0.1)
    closed = {**JOBS, "worker": ("127.0.0.1:1", "127.0.0.1:1")}
    with pytest.raises(TowerError, match="the chief has not started at"):
        server_process._wait_for_goodbyes(Cluster(closed, "ps", 0))


def test_other_versions_are_named(here, monkeypatch):
    lib.introduce(SERVER, 0)
    other = {**rank_checks.process_facts(), "TensorFlow": "1.15.0"}
    monkeypatch.setattr(rank_checks, "process_facts", lambda: other)
    said = "worker 1 has TensorFlow 1.15.0, but ps 0 has TensorFlow 2"
    with pytest.raises(TowerError, match=said):
        lib.introduce(worker(1), 0)


def test_names_of_jobs_and_tasks():
    prefixes = {lib.prefix(c) for c in (worker(0), worker(1), SERVER)}
    assert len(prefixes) == 1
    other = worker(0, {**JOBS, "ps": ("b:1",)})
    assert lib.prefix(other) not in prefixes
    names = [lib.task_name(worker(0), rank) for rank in range(3)]
    assert names == ["chief 0", "worker 0", "worker 1"]
