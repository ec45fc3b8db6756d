"""What a process does by its role, as far as it needs no other process."""

import json
import socket
from types import SimpleNamespace

import pytest

from keras_towers import compat
from keras_towers.errors import TowerError
from keras_towers.parameter_servers import take_role
from keras_towers.parameter_servers.connection import Connection
from keras_towers.tf_config import Cluster


def test_without_a_cluster(monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    with pytest.raises(TowerError, match="TF_CONFIG is not set"):
        take_role("MyStrategy")


def test_without_parameter_servers(monkeypatch):
    config = {
        "cluster": {"worker": ["a:1"]},
        "task": {"type": "worker", "index": 0},
    }
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    with pytest.raises(TowerError, match='MyStrategy .* names none: add "ps"'):
        take_role("MyStrategy")


def test_evaluator():
    jobs = {"worker": ("a:1",), "ps": ("b:2",), "evaluator": ("c:3",)}
    with pytest.raises(TowerError, match="nothing to do in the task evaluator"):
        take_role("MyStrategy", Cluster(jobs, "evaluator", 0))


@pytest.fixture
def taken():
    """An address at which somebody listens."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield f"127.0.0.1:{listener.getsockname()[1]}"


@pytest.fixture
def not_started(monkeypatch):
    """Let it seem as if TensorFlow had not started in this process."""
    context = SimpleNamespace(_context_handle=None)
    monkeypatch.setattr(compat, "eager_context", lambda: context)


def test_too_late(taken):
    jobs = {"worker": ("127.0.0.1:1",), "ps": (taken,)}
    with pytest.raises(TowerError, match="before the process was made ps 0"):
        take_role("MyStrategy", Cluster(jobs, "ps", 0))


def test_port_of_a_server_in_use(taken, not_started):
    jobs = {"worker": ("127.0.0.1:1",), "ps": (taken,)}
    with pytest.raises(TowerError, match=f"{taken} .* in use"):
        take_role("MyStrategy", Cluster(jobs, "ps", 0))


def test_port_of_a_worker_in_use(taken, not_started):
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        ps = f"127.0.0.1:{server.getsockname()[1]}"
        jobs = {"worker": (taken,), "ps": (ps,)}
        with pytest.raises(TowerError, match=f"{taken} .* in use"):
            take_role("MyStrategy", Cluster(jobs, "worker", 0))


def test_servers_are_waited_for_no_longer_than_asked():
    jobs = {"worker": ("127.0.0.1:1",), "ps": ("127.0.0.1:2", "127.0.0.1:3")}
    with pytest.raises(TowerError, match=r"waited 0\.2 s for ps 0 at .*ps 1"):
        Connection(Cluster(jobs, "worker", 0), timeout_s=0.2)
