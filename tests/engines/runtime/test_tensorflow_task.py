"""When TensorFlow is told that it is a task; it is not started here."""

import socket
from types import SimpleNamespace

import pytest
import tensorflow as tf

from keras_towers import TowerError, compat
from keras_towers.engines.runtime import tensorflow_task
from keras_towers.rendezvous.tf_config import Cluster

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
def ports():
    """Two free ports."""
    with socket.socket() as one, socket.socket() as other:
        for held in (one, other):
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            held.bind(("127.0.0.1", 0))
        yield [held.getsockname()[1] for held in (one, other)]


def cluster(ports, role="worker", index=0, **more):
    addresses = [f"127.0.0.1:{port}" for port in ports]
    jobs = {"chief": (addresses[0],), "worker": (addresses[1],), **more}
    return Cluster(jobs, role, index)


def tell(monkeypatch, described):
    monkeypatch.setenv("TF_CONFIG", described.to_json())
    tensorflow_task.prepare()


def test_tasks_that_are_not_ours(context, ports, monkeypatch):
    servers = {"ps": ("127.0.0.1:1",), "evaluator": ("127.0.0.1:2",)}
    tell(monkeypatch, cluster(ports, **servers))
    tell(monkeypatch, cluster(ports, "evaluator", **servers))
    alone = {"worker": (f"127.0.0.1:{ports[0]}",)}
    tell(monkeypatch, Cluster(alone, "worker", 0))
    monkeypatch.setenv("TF_CONFIG", "{")
    tensorflow_task.prepare()
    monkeypatch.delenv("TF_CONFIG")
    tensorflow_task.prepare()
    monkeypatch.setattr(
        tensorflow_task.multiprocessing, "parent_process", lambda: 1
    )
    tell(monkeypatch, cluster(ports))
    assert context.task is None


def test_a_port_in_use(context, ports, monkeypatch):
    described = cluster(ports)
    context.ensure_initialized = lambda: None
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", ports[1]))
        other.listen()
        # A script that has nothing to do with the job is left alone.
        tell(monkeypatch, described)
        assert context.task is None
        with pytest.raises(TowerError, match="is in use by another process"):
            tensorflow_task.start(described)
    assert tensorflow_task.start(described) is context.task
    assert tensorflow_task.start(described) is context.task
    with pytest.raises(TowerError, match="started without knowing that"):
        tensorflow_task.start(cluster(ports, "chief"))
