"""What the tasks of a job have to have in common, and tell one another."""

from __future__ import annotations

import functools
import hashlib
import json

import tensorflow as tf

import keras_towers
from keras_towers._imports import packages
from keras_towers.errors import TowerError
from keras_towers.meeting.environments.tf_config import Cluster
from keras_towers.parameter_servers.remote import device_of
from keras_towers.parameter_servers.shared import Event, Note, Table

# Found by tasks of whatever job, so that those of two jobs notice each other.
_COMMON = "keras_towers"


def prefix(cluster: Cluster) -> str:
    """What the names of shared objects begin with: one for each job."""
    digest = hashlib.sha256(cluster.identity().encode()).hexdigest()
    return f"{_COMMON}/{digest[:12]}/"


def task_name(cluster: Cluster, rank: int) -> str:
    """What a worker is called, such as ``"worker 1"``."""
    role, index = cluster.tasks[rank]
    return f"{role} {index}"


def opened(server: int) -> Event:
    """Set when a parameter server has introduced itself."""
    return Event(f"{_COMMON}/open", device_of(server))


def goodbye(cluster: Cluster, server: int, rank: int) -> Event:
    """Set when a worker has ended well."""
    return Event(f"{prefix(cluster)}goodbyes/{rank}", device_of(server))


def starts(cluster: Cluster, rank: int) -> Note:
    """How many times a worker has connected with the servers."""
    return Note(f"{prefix(cluster)}starts/{rank}", device_of(0))


def introduce(cluster: Cluster, server: int) -> None:
    """Tell a parameter server what this process is, and compare.

    Raises:
        TowerError: a task has other versions, or belongs to another job.
    """
    table = _introductions(cluster, server)
    me = f"{cluster.role} {cluster.index}"
    mine = {
        "name": me,
        "versions": _versions(),
        "jobs": cluster.identity(),
    }
    # Each has a number: the ranks of workers, and one below for the server.
    table.insert(cluster.rank if cluster.trains else -1, json.dumps(mine))
    for _, text in sorted(table.items().items()):
        its = json.loads(text)
        other = its["name"]
        if its["versions"] != mine["versions"]:
            raise TowerError(
                f"{me} has {mine['versions']}, but {other} has "
                f"{its['versions']}: install the same versions for all tasks"
            )
        if its["jobs"] != mine["jobs"]:
            raise TowerError(
                f'{me} was told another "cluster" by TF_CONFIG than {other}: '
                f"{mine['jobs']} instead of {its['jobs']}. Give all tasks of a "
                "job the same one, and each job parameter servers of its own"
            )


def has_come(cluster: Cluster, rank: int) -> bool:
    """Whether a worker has introduced itself at the first server."""
    return _introductions(cluster, 0).get(rank) is not None


def _introductions(cluster: Cluster, server: int) -> Table:
    name = f"{_COMMON}/introductions"
    return Table(name, device_of(server), cluster.size)


def _versions() -> str:
    return (
        f"TensorFlow {tf.__version__}, Keras {_version_of_keras()} and "
        f"keras_towers {keras_towers.__version__}"
    )


@functools.cache
def _version_of_keras() -> str:
    return ", ".join(packages("keras").values())
