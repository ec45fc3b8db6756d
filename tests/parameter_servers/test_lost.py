"""Which of TensorFlow's errors mean that a parameter server is lost."""

import socket

import pytest
import tensorflow as tf

from keras_towers.errors import TowerError
from keras_towers.parameter_servers.lost import naming_lost_servers
from keras_towers.tf_config import Cluster


@pytest.fixture
def cluster():
    """A cluster in which ps 1 listens, and the held port of ps 0 is dead."""
    with socket.socket() as dead, socket.socket() as lives:
        for server in (dead, lives):
            server.bind(("127.0.0.1", 0))
        lives.listen()
        ps = tuple(
            f"127.0.0.1:{server.getsockname()[1]}" for server in (dead, lives)
        )
        yield Cluster({"ps": ps, "worker": ("127.0.0.1:1",)}, "worker", 0)


@pytest.fixture
def alive(cluster):
    """The same without ps 0."""
    return Cluster({**cluster.jobs, "ps": cluster.ps[1:]}, "worker", 0)


def fail_in(cluster, kind):
    with naming_lost_servers(cluster, "worker 0"):
        raise kind(None, None, "\nSocket closed\nmore")


@pytest.mark.parametrize(
    "kind", [tf.errors.UnavailableError, tf.errors.CancelledError]
)
def test_what_cannot_be_reached_is_named(cluster, kind):
    with pytest.raises(TowerError) as caught:
        fail_in(cluster, kind)
    assert str(caught.value) == (
        f"worker 0 has to end: ps 0 at {cluster.ps[0]} cannot be reached any "
        "more. Start all tasks of the job again, from a backup. "
        f"({kind.__name__}: Socket closed)"
    )


def test_a_server_that_was_started_again(alive):
    with pytest.raises(TowerError, match="was started again, without what it"):
        fail_in(alive, tf.errors.AbortedError)


def test_other_errors_stay(alive):
    with pytest.raises(tf.errors.InvalidArgumentError):
        fail_in(alive, tf.errors.InvalidArgumentError)
    with pytest.raises(KeyError), naming_lost_servers(alive, "worker 0"):
        raise KeyError
