"""A worker's connection with the parameter servers of its job."""

from __future__ import annotations

import atexit
import contextlib
import sys

import tensorflow as tf

from keras_towers import settings
from keras_towers._notices import announce as tell
from keras_towers.errors import TowerError
from keras_towers.meeting import store
from keras_towers.meeting.addresses import is_reachable
from keras_towers.meeting.environments import tf_config
from keras_towers.meeting.environments.tf_config import Cluster
from keras_towers.meeting.watch import waiting
from keras_towers.parameter_servers import introduction
from keras_towers.parameter_servers.dropped import Dropped
from keras_towers.parameter_servers.lost import naming_lost_servers
from keras_towers.parameter_servers.remote import device_of, join

_connection: Connection | None = None


def connect(
    cluster: Cluster | None = None, timeout_s: float | None = None
) -> Connection:
    """Connect this worker with all parameter servers; once per process.

    It waits until all of them are there, and says which ones are not. It has to
    be done before TensorFlow starts: before the first model is made.

    Args:
        cluster: the job; None: the one that ``TF_CONFIG`` describes.
        timeout_s: seconds to wait for the servers; None: for ever.

    Returns:
        The connection; a second call returns the same one.

    Raises:
        TowerError: a server has not come in time, has other versions or
            belongs to another job; this worker's address is in use; or the
            process is connected with another job.

    Example:
        >>> connection = connect()
        >>> with tf.device(connection.devices[0]):
        ...     tf.ones([2]) + 1  # on ps 0
    """
    global _connection
    cluster = cluster or tf_config.required()
    if _connection is None:
        _connection = Connection(cluster, timeout_s)
        atexit.register(_connection.end)
    elif _connection.cluster != cluster:
        raise TowerError(
            f"this process is {_connection.cluster} of a job already, and "
            f"cannot also be {cluster} of another one: start a process for each"
        )
    return _connection


class Connection:
    """A worker's connection with the parameter servers of its job.

    Attributes:
        cluster: the job.
        rank: this worker, 0 to size - 1.
        size: the number of workers.
        is_chief: whether this is rank 0.
        devices: one device of each parameter server.
        prefix: what the names of shared resources begin with; the same on all
            workers, also on one that comes back.
        starts: how many times a worker of this rank has connected with the
            servers: 1, or more if it has come back.
        dropped: what the workers share and need no more.
        finished: whether the process may end as far as training is concerned;
            set to False by who knows that training was broken off.
    """

    def __init__(self, cluster: Cluster, timeout_s: float | None = None):
        self.cluster = cluster
        self.rank: int = cluster.rank
        self.size: int = cluster.size
        self.is_chief: bool = self.rank == 0
        self.devices: tuple[str, ...] = tuple(
            device_of(server) for server in range(len(cluster.ps))
        )
        self.prefix: str = introduction.prefix(cluster)
        self.dropped: Dropped = Dropped(self.size)
        self.finished: bool = True
        self._left = False
        self._name = introduction.task_name(cluster, self.rank)
        _wait_for_servers(cluster, self._name, timeout_s)
        with self.naming_lost_servers():
            join(
                {
                    "ps": dict(enumerate(cluster.ps)),
                    "localhost": {0: cluster.address},
                },
                job="localhost",
                index=0,
            )
            store.tell_connected(cluster.number)
            for server in range(len(cluster.ps)):
                introduction.opened(server).wait(timeout_s)
                introduction.introduce(cluster, server)
            starts = introduction.starts(cluster, self.rank)
            self.starts: int = int(starts.get() or 0) + 1
            starts.set(str(self.starts))

    def leave(self) -> None:
        """Say goodbye to the parameter servers, which end when all have."""
        if self._left:
            return
        self._left = True
        for server in range(len(self.devices)):
            # One that has died needs no goodbye.
            with contextlib.suppress(tf.errors.OpError, TowerError):
                introduction.goodbye(self.cluster, server, self.rank).set()

    def end(self) -> None:
        """Say goodbye if the process ends as it should.

        One that ends with an error may be started again, and then needs the
        servers.
        """
        # Python sets it for an error that nothing has caught.
        if self.finished and getattr(sys, "last_value", None) is None:
            self.leave()

    def naming_lost_servers(self) -> contextlib.AbstractContextManager[None]:
        """Where a lost server is the cause, an error says so, and what to do.

        Example:
            >>> with connection.naming_lost_servers():
            ...     step()
        """
        return naming_lost_servers(self.cluster, self._name)


def _wait_for_servers(
    cluster: Cluster, name: str, timeout_s: float | None
) -> None:
    missing = dict(enumerate(cluster.ps))
    for waited_s in waiting(timeout_s, settings.NETWORK_POLL_S):
        missing = {i: a for i, a in missing.items() if not is_reachable(a)}
        if not missing:
            return
        named = ", ".join(f"ps {i} at {a}" for i, a in missing.items())
        if waited_s:
            tell(f"{name} waits for {named}")
    raise TowerError(
        f"{name} has waited {timeout_s:g} s for {named}: start the parameter "
        "servers, or give them more time"
    )
