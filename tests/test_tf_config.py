"""Reading the cluster from TF_CONFIG."""

import json

import pytest

from keras_towers import tf_config
from keras_towers.errors import TowerError

TASK = {"type": "worker", "index": 0}
TWO = {"worker": ["a:1", "b:2"]}


def read(config):
    text = config if isinstance(config, str) else json.dumps(config)
    return tf_config.from_environment({"TF_CONFIG": text})


def test_chief_is_first_of_the_workers():
    cluster = read(
        {
            "cluster": {
                **TWO,
                "chief": ["c:3"],
                "ps": {"0": "d:4", "1": "e:5"},
            },
            "task": {"type": "worker", "index": "1"},
        }
    )
    assert cluster.workers == ("c:3", "a:1", "b:2")
    assert (cluster.rank, cluster.size) == (2, 3)
    assert cluster.ps == ("d:4", "e:5")
    assert (cluster.local_rank, cluster.local_size) == (0, 1)
    assert not cluster.one_host
    assert str(cluster) == "worker 1 at b:2"


def test_a_ps_is_no_worker():
    cluster = read(
        {
            "cluster": {**TWO, "ps": ["p:1"]},
            "task": {"type": "ps", "index": 0},
        }
    )
    assert not cluster.trains
    assert cluster.address == "p:1"


def test_ranks_of_one_host_are_counted():
    cluster = read(
        {
            "cluster": {"worker": ["x:1", "y:1", "x:2"]},
            "task": {"type": "worker", "index": 2},
        }
    )
    assert (cluster.local_rank, cluster.local_size) == (1, 2)


@pytest.mark.parametrize("text", ["", "  ", "{}", '{"task": {}}'])
def test_without_a_cluster_a_process_is_alone(text):
    assert read(text) is None
    with pytest.raises(TowerError, match="is not set, or names no cluster"):
        tf_config.required({"TF_CONFIG": text})


def test_what_is_written_is_read():
    cluster = read({"cluster": {**TWO, "ps": ["p:1"]}, "task": TASK})
    assert read(tf_config.written(cluster)) == cluster


@pytest.mark.parametrize(
    ("config", "what"),
    [
        ("{", "is not valid JSON"),
        ("[1]", r"is \[1\] instead of an object"),
        ({"cluster": ["a:1"], "task": TASK}, 'has .* as "cluster"'),
        ({"cluster": {"ps": ["a:1"]}, "task": TASK}, "no task that trains"),
        ({"cluster": {"master": ["a:1"]}, "task": TASK}, "role 'master'"),
        (
            {"cluster": {"chief": ["a:1", "b:1"]}, "task": TASK},
            'more than one "chief"',
        ),
        (
            {"cluster": {**TWO, "ps": ["a:1"]}, "task": TASK},
            "gives worker 0 and ps 0 the same address, a:1",
        ),
        (
            {"cluster": {"worker": "a:1"}, "task": TASK},
            'has "a:1" as "worker" instead of a list',
        ),
        (
            {"cluster": {"worker": {"1": "a:1"}}, "task": TASK},
            "the indices have to be",
        ),
        ({"cluster": {"worker": ["a"]}, "task": TASK}, "each is host:port"),
        ({"cluster": {"worker": [":1"]}, "task": TASK}, "each is host:port"),
        ({"cluster": {"worker": ["a:0"]}, "task": TASK}, "each is host:port"),
        ({"cluster": {"worker": [7]}, "task": TASK}, "each is host:port"),
        ({"cluster": TWO}, '"task" is missing'),
        ({"cluster": TWO, "task": "worker"}, '"task" is "worker"'),
        (
            {"cluster": TWO, "task": {"type": "ps", "index": 0}},
            "names 'worker'",
        ),
        ({"cluster": TWO, "task": {"type": ["x"]}}, 'as the "type"'),
        (
            {"cluster": TWO, "task": {"type": "worker", "index": 2}},
            "names 2 'worker': 0 to 1",
        ),
        ({"cluster": TWO, "task": {"type": "worker"}}, "give a number"),
        (
            {"cluster": TWO, "task": {"type": "worker", "index": True}},
            "give a number",
        ),
    ],
)
def test_what_is_wrong_is_said_where(config, what):
    with pytest.raises(TowerError, match=what) as error:
        read(config)
    assert str(error.value).startswith("TF_CONFIG ")
