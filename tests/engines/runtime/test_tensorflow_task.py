"""When TensorFlow is told that it is a task; it is not started here."""

import socket
from types import SimpleNamespace

import pytest
import tensorflow as tf

from keras_towers import TowerError
from keras_towers.engines.runtime import tensorflow_task
from keras_towers.foundation import compat
from keras_towers.jobs.rendezvous.tf_config import Cluster
from tests.kit.clusters import local_cluster

pytestmark = pytest.mark.core


@pytest.fixture
def context(monkeypatch):
    """TensorFlow, before it has started."""
    made = SimpleNamespace(_context_handle=None, task=None)
    made._collective_leader = ""
    made.config = tf.compat.v1.ConfigProto(device_count={"CPU": 3})

    def configure(collective_leader, **options):
        made._collective_leader = collective_leader

    made.configure_collective_ops = configure
    made.enable_collective_ops = lambda task: setattr(made, "task", task)
    monkeypatch.setattr(compat, "eager_context", lambda: made)
    monkeypatch.setattr(tensorflow_task, "_task", None)
    return made


@pytest.fixture
def tasks():
    """The chief and the worker of a cluster, whose ports are held."""
    with local_cluster({"chief": 1, "worker": 1}) as made:
        yield made


def tell(monkeypatch, described):
    monkeypatch.setenv("TF_CONFIG", described.to_json())
    tensorflow_task.prepare()


def test_tasks_that_are_not_ours(context, tasks, monkeypatch):
    others = {"ps": ("127.0.0.1:1",), "evaluator": ("127.0.0.1:2",)}
    jobs = {**tasks[0].jobs, **others}
    for not_ours in (
        Cluster(jobs, "worker", 0),
        Cluster(jobs, "evaluator", 0),
        Cluster({"worker": jobs["worker"]}, "worker", 0),
    ):
        tell(monkeypatch, not_ours)
    monkeypatch.setenv("TF_CONFIG", "{")
    tensorflow_task.prepare()
    monkeypatch.delenv("TF_CONFIG")
    tensorflow_task.prepare()
    monkeypatch.setattr(
        tensorflow_task.multiprocessing, "parent_process", lambda: 1
    )
    tell(monkeypatch, tasks[1])
    assert context.task is None


def test_a_port_in_use(context, tasks, monkeypatch):
    chief, mine = tasks
    context.ensure_initialized = lambda: None
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        host, port = mine.address.split(":")
        other.bind((host, int(port)))
        other.listen()
        # A script that has nothing to do with the job is left alone.
        tell(monkeypatch, mine)
        assert context.task is None
        with pytest.raises(TowerError, match="is in use by another process"):
            tensorflow_task.start_task(mine)
    assert tensorflow_task.start_task(mine) is context.task
    assert tensorflow_task.start_task(mine) is context.task
    with pytest.raises(TowerError, match="started before it knew that"):
        tensorflow_task.start_task(chief)


def test_each_rank_that_does_not_answer_is_described(context):
    def check_collective_ops_peer_health(name, limit_ms):
        raise tf.errors.UnavailableError(None, None, "no route")

    context.check_collective_ops_peer_health = check_collective_ops_peer_health
    with local_cluster({"worker": 3}) as (first, *others):
        said = tensorflow_task.unreachable(tensorflow_task.Task(first))
    assert said == "; ".join(
        f"rank {rank} ({task.address}) does not answer"
        for rank, task in enumerate(others, 1)
    )


def test_a_task_polls_some_of_many_and_is_polled_by_as_many():
    """Those next to it in TensorFlow's rings, which sort names as texts."""
    addresses = tuple(f"host:{port}" for port in range(1, 101))
    polled = {
        rank: tensorflow_task._polled(
            tensorflow_task.Task(Cluster({"worker": addresses}, "worker", rank))
        )
        for rank in range(100)
    }
    asked = [rank for ranks in polled.values() for rank in ranks]
    assert {asked.count(rank) for rank in range(100)} == {16}
    assert {0, 1, 11, 99} < {*polled[10]}
    assert not {3, 8}.intersection(polled[10])
    few = Cluster({"worker": addresses[:3]}, "worker", 1)
    assert tensorflow_task._polled(tensorflow_task.Task(few)) == [0, 2]
