"""Where a strategy of several processes cannot be."""

import json
import socket
from types import SimpleNamespace

import pytest
import tensorflow as tf

import keras_towers as kt
from keras_towers import TowerError
from keras_towers.engines.byteps import byteps_process
from keras_towers.engines.horovod import horovod_transport
from keras_towers.jobs.rendezvous import separate_training, tf_config
from keras_towers.strategies import base
from tests.kit.clusters import local_cluster

pytestmark = pytest.mark.core


@pytest.fixture
def place(monkeypatch):
    """Make this process a task of a cluster."""

    def be(role, index, **jobs):
        config = {"cluster": jobs, "task": {"type": role, "index": index}}
        monkeypatch.setenv("TF_CONFIG", json.dumps(config))

    return be


def test_tasks_that_do_not_train(place, monkeypatch):
    with pytest.raises(TowerError, match="TF_CONFIG is not set"):
        kt.MultiWorkerTowerStrategy()
    with monkeypatch.context() as patch:
        patch.setenv("HOROVOD_RANK", "1")
        patch.setenv("HOROVOD_SIZE", "3")
        words = "rank 1 of 3 that keras-towers run .* --workers 3`, without -np"
        with pytest.raises(TowerError, match=words):
            kt.MultiWorkerTowerStrategy()
    place("evaluator", 0, worker=["a:1", "b:1"], evaluator=["c:1"])
    with pytest.raises(TowerError, match="this process is evaluator 0 at c:1"):
        kt.strategy("multi-worker")
    place("ps", 0, worker=["a:1", "b:1"], ps=["c:1"])
    with pytest.raises(TowerError, match='leave "ps" out of TF_CONFIG'):
        kt.strategy("multi-worker")


def test_times_that_cannot_be(place):
    place("worker", 0, worker=["a:1", "b:1"])
    for name in ("heartbeat_timeout_s", "start_timeout_s"):
        with pytest.raises(TowerError, match=f"{name}=-1"):
            kt.MultiWorkerTowerStrategy(**{name: -1})


def test_after_the_first_tensor(monkeypatch):
    tf.zeros(1)
    with local_cluster({"worker": 2}) as tasks:
        monkeypatch.setenv(tf_config.VARIABLE, tasks[0].to_json())
        with pytest.raises(TowerError, match="before you create a tensor"):
            kt.MultiWorkerTowerStrategy()


def test_a_cluster_of_one_trains_alone(place, caplog):
    place("chief", 0, chief=["localhost:1"])
    strategy = kt.MultiWorkerTowerStrategy()
    assert (strategy.rank, strategy.size, strategy.is_chief) == (0, 1, True)
    assert "trains in a single process" in caplog.text


@pytest.mark.parametrize("index", [0, None])
def test_towers_of_one_process_in_a_cluster_are_warned_of(place, caplog, index):
    place("worker", index, worker=["a:1", "b:1"])
    for entered in (lambda s: s, lambda s: s.scope()):
        base._warn_if_in_job.cache_clear()
        caplog.clear()
        with entered(kt.TowerStrategy(1)):
            pass
    base._warn_if_in_job.cache_clear()
    told = "MultiWorkerTowerStrategy trains one model in all" in caplog.text
    assert told == (index is not None)


@pytest.mark.parametrize(
    "role, jobs, words",
    [
        ("worker", {"chief": ["a:1"], "worker": ["b:1"]}, "MultiWorkerTower"),
        ("ps", {"worker": ["a:1"], "ps": ["b:1"]}, "DistributedReplicated"),
        ("evaluator", {"chief": ["a:1"], "evaluator": ["b:1"]}, "checkpoints"),
    ],
)
def test_engines_that_would_train_separately_are_refused(
    place, monkeypatch, role, jobs, words
):
    """Strategies and drop-ins connect by these functions."""
    # Other tests may have connected this process before.
    monkeypatch.setattr(byteps_process, "_connected", False)
    place(role, 0, **jobs)
    alone = SimpleNamespace(is_initialized=lambda: True, size=lambda: 1)
    tasks = ", ".join(f"{name} 0" for name in jobs)
    said = f"{role} 0 at b:1, .* names the tasks {tasks}\\. .*{words}"
    with pytest.raises(TowerError, match=said):
        horovod_transport.connect(alone)
    with pytest.raises(TowerError, match=said):
        byteps_process.connect(alone)


@pytest.mark.parametrize(
    ("name", "hosts", "words"),
    [
        ("no-such-host.invalid", 1, "to no address of this machine"),
        ("localhost", 2, "to .*, where other machines cannot reach it"),
    ],
)
def test_horovod_needs_the_address_of_the_machine_s_name(
    monkeypatch, name, hosts, words
):
    """Its C++ code would end the process."""
    monkeypatch.setattr(horovod_transport, "_connected", True)
    monkeypatch.setattr(socket, "gethostname", lambda: name)
    monkeypatch.setenv("HOROVOD_CROSS_SIZE", str(hosts))
    engine = SimpleNamespace(
        is_initialized=lambda: False, mpi_built=lambda: False
    )
    with pytest.raises(TowerError, match=f"{name}, resolves {words}.*hosts"):
        horovod_transport.connect(engine)


def test_an_engine_of_a_single_task_is_not_refused(place):
    place("chief", 0, chief=["a:1"], evaluator=["b:1"])
    separate_training.refuse("Horovod", "", "")
