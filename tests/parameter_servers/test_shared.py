"""Objects that processes share by name, here on this process's own device."""

import signal
import socket
import threading
import time

import pytest
import tensorflow as tf

from keras_towers.errors import TowerError
from keras_towers.parameter_servers import introduction, remote
from keras_towers.parameter_servers.remote import reachable, run, traced
from keras_towers.parameter_servers.shared import Event, Note, Table, text_of
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
    assert 0.3 <= time.monotonic() - begun < 3


def queue(name):
    """Functions that put a number into a queue and take one out."""

    def handle():
        return tf.raw_ops.FIFOQueueV2(
            component_types=[tf.int64], shapes=[[]], shared_name=name
        )

    def put(number):
        there = handle()
        tf.raw_ops.QueueEnqueueV2(handle=there, components=[number])
        return tf.raw_ops.QueueSizeV2(handle=there)

    def take():
        return tf.raw_ops.QueueDequeueV2(
            handle=handle(), component_types=[tf.int64]
        )[0]

    puts = traced(put, DEVICE, tf.TensorSpec((), tf.int64))
    return (
        lambda number: run(puts, arguments=[tf.constant(number, tf.int64)])[0],
        traced(take, DEVICE),
    )


def test_ctrl_c_ends_waiting_and_cancels_it(name, ctrl_c):
    put, take = queue(name)
    main = threading.main_thread().ident
    after(0.3, lambda: signal.pthread_kill(main, signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        run(take)
    # What is no longer waited for is taken from nobody.
    assert put(3) == 1


def test_cancelling_one_call_leaves_others_alone(name):
    put, take_other = queue(f"{name}_other")
    _, take = queue(name)
    taken = []
    thread = threading.Thread(target=lambda: taken.extend(run(take_other)))
    with pytest.raises(TimeoutError):
        after(0.1, thread.start)
        run(take, 0.5)
    put(7)
    thread.join(20)
    assert taken == [7]


def test_ctrl_c_ends_waiting_for_an_event(name, ctrl_c):
    main = threading.main_thread().ident
    after(0.3, lambda: signal.pthread_kill(main, signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        Event(name, DEVICE).wait()


def test_note_is_one_for_all_with_its_name(name):
    assert Note(name, DEVICE).get() is None
    Note(name, DEVICE).set("é")
    Note(f"{name}2", DEVICE).set()
    assert Note(name, DEVICE).wait() == "é"
    assert Note(f"{name}2", DEVICE).get() == ""
    Note(name, DEVICE).set("b")
    assert text_of(tf.function(Note(name, DEVICE).read)()) == "b"


def test_table_is_one_for_all_with_its_name(name):
    Table(name, DEVICE, 3).insert(-1, "é")
    Table(name, DEVICE, 3).insert(2, "b")
    Table(name, DEVICE, 3).insert(2, "c")
    assert Table(name, DEVICE, 3).items() == {-1: "é", 2: "c"}


def test_asking_again_and_again_traces_nothing(name, monkeypatch):
    def refuse(*args):
        raise AssertionError("it is traced anew")

    Note(name, DEVICE).set()
    Note(name, DEVICE).get()
    monkeypatch.setattr(remote.tf, "function", refuse)
    for number in range(20):
        event = Event(f"{name}/{number}", DEVICE)
        with pytest.raises(TimeoutError):
            event.wait(0)
        event.set()
        event.wait()
        table = Table(f"{name}/{number}", DEVICE, 2)
        table.insert(0, "x")
        assert table.items() == {0: "x"}


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
