"""The tasks of a job introduce themselves, and compare jobs and versions."""

from __future__ import annotations

import hashlib

from keras_towers.errors import TowerError
from keras_towers.meeting import check
from keras_towers.meeting.environments.tf_config import Cluster
from keras_towers.parameter_servers.remote import device_of
from keras_towers.parameter_servers.store import ServerStore

# Found by tasks of whatever job, so that those of two jobs notice each other.
_COMMON = "keras_towers"
# The number of the server among the ranks of workers.
_SERVER = -1


def prefix(cluster: Cluster) -> str:
    """The beginning of all names that a job shares; one for each job."""
    digest = hashlib.sha256(cluster.identity().encode()).hexdigest()
    return f"{_COMMON}/{digest[:12]}/"


def task_name(cluster: Cluster, rank: int) -> str:
    """The name of a worker in messages, such as ``"worker 1"``."""
    role, index = cluster.tasks[rank]
    return f"{role} {index}"


def store_on(server: int) -> ServerStore:
    """The store on a parameter server."""
    return ServerStore(device_of(server))


def opened() -> str:
    """The key that a server sets once it has introduced itself."""
    return f"{_COMMON}/open"


def goodbyes(cluster: Cluster) -> str:
    """The key where a worker that ends says why: empty if it has ended well."""
    return f"{prefix(cluster)}goodbyes"


def introduce(cluster: Cluster, server: int) -> None:
    """Tell a parameter server what this process is, and compare."""
    me = f"{cluster.role} {cluster.index}"
    facts = check.facts()
    mine = {"name": me, "facts": facts, "jobs": cluster.identity()}
    own = cluster.rank if cluster.trains else _SERVER
    store = store_on(server)
    store.put(f"{_introductions()}-{own}", mine)
    # The server was the first to come: whoever is like it is like all others.
    its = store.get(f"{_introductions()}-{_SERVER}")
    other = its["name"]
    check.compare(me, facts, other, its["facts"])
    if its["jobs"] != mine["jobs"]:
        raise TowerError(
            f'{me} was told another "cluster" by TF_CONFIG than {other}: '
            f"{mine['jobs']} instead of {its['jobs']}. Give all tasks of a "
            "job the same one, and each job parameter servers of its own"
        )


def has_come(store: ServerStore, rank: int) -> bool:
    """Whether a worker has introduced itself at the server of a store."""
    return store.get(f"{_introductions()}-{rank}") is not None


def _introductions() -> str:
    return f"{_COMMON}/introductions"
