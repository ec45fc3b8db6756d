"""Reading the cluster from TF_CONFIG."""

import json
import os

import pytest

from keras_towers.foundation.errors import TowerError
from keras_towers.jobs.rendezvous import tf_config
from keras_towers.jobs.rendezvous.hosts import place_ranks

TASK = {"type": "worker", "index": 0}
TWO = {"worker": ["a:1", "b:2"]}


def read(text):
    return tf_config.from_environment({"TF_CONFIG": text})


def described(cluster, task=TASK):
    return read(json.dumps({"cluster": cluster, "task": task}))


def test_what_is_read():
    given = {**TWO, "chief": ["c:3"], "ps": ["d:4", "e:5"]}
    cluster = described(given, {"type": "worker", "index": "1"})
    # The chief is the first of the workers.
    assert cluster.workers == ("c:3", "a:1", "b:2")
    assert (cluster.rank, cluster.size) == (2, 3)
    assert (cluster.local_rank, cluster.local_size) == (0, 1)
    assert str(cluster) == "worker 1 at b:2"
    server = described(given, {"type": "ps", "index": 1})
    assert server.ps == ("d:4", "e:5")
    assert not server.trains
    assert server.address == "e:5"
    given = {"worker": ["x:1", "y:1", "x:2"]}
    cluster = described(given, {"type": "worker", "index": 2})
    assert (cluster.local_rank, cluster.local_size) == (1, 2)


@pytest.mark.parametrize("text", ["", "  ", "{}", '{"task": {}}'])
def test_without_a_cluster(text):
    assert read(text) is None
    with pytest.raises(TowerError, match="is not set, or names no cluster"):
        tf_config.required({"TF_CONFIG": text})


@pytest.mark.parametrize(
    ("config", "what"),
    [
        ("{", "is not valid JSON"),
        ("[1]", r"is \[1\] instead of an object"),
        # The cluster.
        ((["a:1"],), 'has .* as "cluster"'),
        (({"ps": ["a:1"]},), "no task that trains"),
        (({"master": ["a:1"]},), "role 'master'"),
        (({"chief": ["a:1", "b:1"]},), 'more than one "chief"'),
        (({**TWO, "ps": ["a:1"]},), "more than one task the address a:1"),
        (({"worker": "a:1"},), 'has "a:1" as "worker" instead of a list'),
        (({"worker": {"0": "a:1"}},), "instead of a list"),
        (({"worker": ["a"]},), "a list of host:port"),
        (({"worker": [":1"]},), "a list of host:port"),
        (({"worker": ["a:0"]},), "a list of host:port"),
        (({"worker": [7]},), "a list of host:port"),
        # The task.
        ((TWO, None), 'it has null as "task"'),
        ((TWO, "worker"), 'it has "worker" as "task"'),
        ((TWO, {"type": "ps", "index": 0}), "names 'worker'"),
        ((TWO, {"type": ["x"]}), 'as the "type"'),
        ((TWO, {"type": "evaluator", "index": 0}), "on its own, without a"),
        ((TWO, {"type": "worker", "index": 2}), "give a number from 0 to 1"),
        ((TWO, {"type": "worker"}), "give a number"),
        ((TWO, {"type": "worker", "index": True}), "give a number"),
    ],
)
def test_errors_say_which_entry_is_wrong(config, what):
    with pytest.raises(TowerError, match=f"^TF_CONFIG .*{what}"):
        read(config) if isinstance(config, str) else described(*config)


def test_ranks_of_a_job_become_tasks(job_store, monkeypatch):
    job_store.give("tasks", 0, 2, "10.0.0.1:9")
    monkeypatch.setenv(tf_config.VARIABLE, "")
    with pytest.raises(TowerError, match="TF_CONFIG is not set: set it, or"):
        tf_config.make_task()
    for name, value in place_ranks(["a", "b"])[1].environment.items():
        monkeypatch.setenv(name, value)
    tf_config.make_task()
    cluster = tf_config.from_environment()
    first, second = cluster.workers
    assert first == "10.0.0.1:9" and second.startswith("127.0.0.1:")
    assert cluster.rank == 1
    # It is no rank of Horovod any more.
    assert not any(name.startswith("HOROVOD_") for name in os.environ)
