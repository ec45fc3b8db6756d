"""A worker's connection, and what workers exchange, in this process."""

import socket
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import tensorflow as tf

from keras_towers.foundation import compat, settings
from keras_towers.foundation.errors import TowerError
from keras_towers.jobs.rendezvous.tf_config import Cluster
from keras_towers.parameter_servers.server_connection import (
    Connection,
    DroppedResources,
    ServerPeers,
    take_role,
)
from tests.kit.leaving import Boom


@pytest.fixture
def addresses():
    """A bound port, and one with a listener."""
    with socket.socket() as dead, socket.socket() as lives:
        for server in (dead, lives):
            server.bind(("127.0.0.1", 0))
        lives.listen()
        yield {
            "dead": f"127.0.0.1:{dead.getsockname()[1]}",
            "taken": f"127.0.0.1:{lives.getsockname()[1]}",
        }


@pytest.fixture
def cluster(addresses):
    """Creates a cluster, for a task of the last role."""

    def make(**roles):
        jobs = {
            role: tuple(addresses.get(name, name) for name in names.split())
            for role, names in roles.items()
        }
        return Cluster(jobs, list(roles)[-1], 0)

    return make


EVALUATOR = {"worker": "a:1", "ps": "b:2", "evaluator": "c:3"}
SERVES = {"worker": "127.0.0.1:1", "ps": "taken"}
TRAINS = {"ps": "taken", "worker": "taken"}
WAITS = {"ps": "dead", "worker": "127.0.0.1:1"}
NO_SERVERS = 'MyStrategy .* names none: add "ps" .* `keras-towers run'


@pytest.mark.parametrize(
    ("roles", "started", "said"),
    [
        ({"worker": "a:1"}, False, NO_SERVERS),
        (EVALUATOR, False, "does not use the task evaluator"),
        (SERVES, True, "before this process became ps 0"),
        (SERVES, False, ", .* in use"),
        (TRAINS, False, ", .* in use"),
        (WAITS, False, "worker 0 has waited 1 s for ps 0 at .*RENDEZVOUS"),
    ],
)
def test_tasks_that_cannot_start(roles, started, said, cluster, monkeypatch):
    if not started:
        context = SimpleNamespace(_context_handle=None)
        monkeypatch.setattr(compat, "eager_context", lambda: context)
    monkeypatch.setenv(settings.ENV_RENDEZVOUS_TIMEOUT, "1")
    mine = cluster(**roles)
    named = f"{mine.address}{said}" if "in use" in said else said
    with pytest.raises(TowerError, match=named):
        take_role("MyStrategy", mine)


def test_a_missing_cluster_is_refused():
    with pytest.raises(TowerError, match="TF_CONFIG is not set"):
        take_role("MyStrategy")


@pytest.mark.parametrize(
    ("servers", "kind", "said"),
    [
        ("dead taken", "UnavailableError", "{} can no longer be reached"),
        ("dead taken", "CancelledError", "{} can no longer be reached"),
        ("taken", "UnavailableError", "the connection with a parameter server"),
        ("taken", "AbortedError", "a parameter server was started again"),
        ("taken", "InvalidArgumentError", ""),
    ],
)
def test_errors_of_lost_servers_name_them(cluster, servers, kind, said):
    mine = cluster(ps=servers, worker="127.0.0.1:1")
    error = getattr(tf.errors, kind)(None, None, "\nSocket closed\nmore")
    worker = SimpleNamespace(cluster=mine, _name="worker 0")
    raised = pytest.raises(TowerError if said else type(error))
    with raised as caught, Connection.naming_lost_servers(worker):
        raise error
    if said:
        named = said.format(f"ps 0 at {mine.ps[0]}")
        text = str(caught.value)
        assert text.startswith(f"worker 0 must end: {named}")
        assert f"from a backup. ({kind}: Socket closed)" in text


class Model:
    """An object in a reference cycle, as Keras models are."""

    def __init__(self):
        self.me = self


def test_names_are_dropped_with_their_owners():
    dropped, kept = DroppedResources(), Model()
    dropped.drop_with(Model(), "a")
    dropped.drop_with(kept, "b")
    assert dropped.take_names() == ["a"]
    del kept
    assert dropped.take_names() == []
    # Garbage is collected if another owner was added.
    dropped.drop_with(Model(), "c")
    assert sorted(dropped.take_names()) == ["b", "c"]


@pytest.fixture
def two(job):
    """A job of two workers."""
    return job(2)


def peers(job, rank, starts=1, timeout_s=60):
    connection = job.connect(rank, starts)
    return ServerPeers(connection, f"{connection.prefix}strategy", timeout_s)


def test_a_restarted_worker_gets_the_values_of_the_first_round(two):
    chief, worker = peers(two, 0), peers(two, 1)
    with ThreadPoolExecutor(1) as pool:
        told = pool.submit(chief.gather_objects, "a")
        assert worker.gather_objects("b") == ["a", "b"]
        assert told.result(60) == ["a", "b"]
    assert peers(two, 1, starts=2).gather_objects("c") == ["a", "c"]


def test_equal_values_are_sent_once(two):
    everyone = peers(two, 0), peers(two, 1)
    with ThreadPoolExecutor(2) as pool:
        told = pool.map(lambda one: one.gather_objects(["a" * 99]), everyone)
        assert list(told) == [[["a" * 99]] * 2] * 2
    store, prefix = everyone[0].connection.store, everyone[0].prefix
    texts, numbers = store.get(f"{prefix}/gathered/1")
    assert (len(texts), numbers) == (1, [0, 0])


def test_an_error_of_polling_ends_the_wait(two):
    def look():
        raise Boom("the chief has failed")

    worker = peers(two, 1)
    with pytest.raises(Boom), worker.polling(look):
        worker.gather_objects("b")


def test_a_wait_that_is_too_long_names_the_missing_task(two):
    with pytest.raises(TowerError, match="worker 1 has waited 0.5 s for work"):
        peers(two, 1, timeout_s=0.5).gather_objects("b")


def test_a_restarted_chief_is_refused_once_values_were_gathered(two):
    peers(two, 1, timeout_s=0.2)
    with pytest.raises(TowerError, match="has waited"):
        peers(two, 0, starts=2, timeout_s=0.2).gather_objects("a")
    with pytest.raises(TowerError, match="was restarted alone after"):
        peers(two, 0, starts=3).gather_objects("a")
