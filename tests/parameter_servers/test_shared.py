"""Objects that processes share by name, here on this process's own device."""

import signal
import socket
import threading
import time

import pytest
import tensorflow as tf

from keras_towers.errors import TowerError
from keras_towers.parameter_servers import introduction
from keras_towers.parameter_servers.remote import reachable, run, traced
from keras_towers.parameter_servers.shared import Event, Mailbox, Table
from keras_towers.tf_config import Cluster

DEVICE = "/job:localhost/replica:0/task:0/device:CPU:0"
JOBS = {"ps": ("a:1",), "chief": ("c:2",), "worker": ("d:3", "e:4")}


@pytest.fixture
def name(request):
    """A name that no other test uses."""
    return request.node.name


def after(seconds, function):
    threading.Timer(seconds, function).start()


def test_event_releases_all_that_wait_and_all_that_come_later(name):
    event = Event(name, DEVICE)
    waiting = [threading.Thread(target=event.wait, args=(20,)) for _ in "ab"]
    for thread in waiting:
        thread.start()
    Event(name, DEVICE).set()
    for thread in waiting:
        thread.join(20)
        assert not thread.is_alive()
    event.wait(0.5)


def test_event_happens_once(name):
    event = Event(name, DEVICE)
    event.set()
    event.set()
    event.wait(1)


def test_waiting_ends_in_time(name):
    begun = time.monotonic()
    with pytest.raises(TimeoutError):
        Event(name, DEVICE).wait(0.3)
    assert time.monotonic() - begun < 3


def test_ctrl_c_ends_waiting_and_cancels_it(name, ctrl_c):
    mailbox = Mailbox(name, DEVICE)
    main = threading.main_thread().ident
    after(0.3, lambda: signal.pthread_kill(main, signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        mailbox.take()
    # What is no longer waited for is taken from nobody.
    assert mailbox.put(3) == 1


def test_cancelling_one_call_leaves_others_alone(name):
    other = Mailbox(f"{name}_other", DEVICE)
    taken = []
    thread = threading.Thread(target=lambda: taken.append(other.take()))
    with pytest.raises(TimeoutError):
        after(0.1, thread.start)
        Mailbox(name, DEVICE).take(0.5)
    other.put(7)
    thread.join(20)
    assert taken == [7]


def test_mailbox_keeps_the_order(name):
    mailbox = Mailbox(name, DEVICE)
    assert [mailbox.put(n) for n in (5, 3)] == [1, 2]
    assert [Mailbox(name, DEVICE).take(5) for _ in range(2)] == [5, 3]


def test_table_is_one_for_all_with_its_name(name):
    Table(name, DEVICE).insert(-1, "é")
    Table(name, DEVICE).insert(2, "b")
    Table(name, DEVICE).insert(2, "c")
    assert Table(name, DEVICE).items() == {-1: "é", 2: "c"}


def test_a_failed_call_raises_its_error():
    def body():
        return tf.debugging.Assert(False, ["no"])

    with pytest.raises(tf.errors.InvalidArgumentError):
        run(traced(lambda: (body(), None)[1], DEVICE))


@pytest.fixture
def here(monkeypatch, name):
    """Keep what a parameter server would keep on this process's device."""
    monkeypatch.setattr(introduction, "device_of", lambda server: DEVICE)
    monkeypatch.setattr(introduction, "_COMMON", name)


def worker(index, jobs=JOBS):
    return Cluster(jobs, "worker", index)


def test_tasks_of_one_job_accept_one_another(here):
    for cluster in (Cluster(JOBS, "ps", 0), worker(0), worker(1), worker(0)):
        introduction.introduce(cluster, 0)


def test_other_versions_are_named(here, monkeypatch):
    introduction.introduce(Cluster(JOBS, "ps", 0), 0)
    monkeypatch.setattr(tf, "__version__", "1.15.0")
    with pytest.raises(TowerError) as caught:
        introduction.introduce(worker(1), 0)
    said = str(caught.value)
    assert "worker 1 has TensorFlow 1.15.0, Keras " in said
    assert ", but ps 0 has TensorFlow 2." in said


def test_another_job_at_the_same_server_is_refused(here):
    introduction.introduce(Cluster(JOBS, "ps", 0), 0)
    other = {**JOBS, "worker": ("x:9", "y:8")}
    with pytest.raises(TowerError, match="told another .* than ps 0: .*x:9"):
        introduction.introduce(worker(1, other), 0)


def test_prefix_is_the_jobs():
    prefixes = {
        introduction.prefix(cluster)
        for cluster in (worker(0), worker(1), Cluster(JOBS, "ps", 0))
    }
    assert len(prefixes) == 1
    other = worker(0, {**JOBS, "ps": ("b:1",)})
    assert introduction.prefix(other) not in prefixes


def test_workers_are_named_by_their_tasks():
    names = [introduction.task_name(worker(0), rank) for rank in range(3)]
    assert names == ["chief 0", "worker 0", "worker 1"]


def test_nobody_is_reachable_at_a_port_that_is_only_held():
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{held.getsockname()[1]}"
        assert not reachable(address)
        held.listen()
        assert reachable(address)
