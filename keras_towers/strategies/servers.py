"""What strategies over parameter servers are composed of."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

from keras_towers import devices as devices_lib
from keras_towers.errors import TowerError
from keras_towers.fit.contract import Batches
from keras_towers.meeting.environments import tf_config
from keras_towers.parameter_servers import Connection, take_role
from keras_towers.parameter_servers.peers import ServerPeers
from keras_towers.replicas.asynchronous.dropped import Dropped
from keras_towers.replicas.servers.calls import ServedCalls
from keras_towers.replicas.servers.session import Session
from keras_towers.replicas.servers.update import CachedOnce, CopiesOnTowers
from keras_towers.replicas.servers.workers import Workers
from keras_towers.strategies.processes import devices_of_rank, share_cores

_numbers = itertools.count()

MakeSession = Callable[..., Session]


class Servers:
    """Connects a strategy with the parameter servers of its job.

    In a task of the role ``ps`` creating one serves, and ends the process when
    training has ended.

    Args:
        strategy: the name of the strategy, for messages.
        towers: the devices of a worker, as for ``HorovodStrategy``.
        cluster: the job, None: the one that ``TF_CONFIG`` describes.
        stall_timeout: seconds to wait for other workers.

    Raises:
        SystemExit: this was a ps task.
        TowerError: a wrong timeout, no parameter servers, no such devices, or
            no connection.

    Attributes:
        connection: with the parameter servers.
        peers: the workers.
        devices: the towers of this worker.
    """

    def __init__(
        self,
        strategy: str,
        towers: devices_lib.Towers,
        cluster: tf_config.Cluster | None,
        stall_timeout: float,
    ):
        self._stall_timeout = checked_timeout(stall_timeout)
        cluster = cluster or tf_config.required()
        if cluster.trains:
            share_cores(cluster)
            towers = devices_of_rank(cluster, towers)
        self.connection: Connection = take_role(strategy, cluster)
        self.devices: list[str] = devices_lib.resolve(towers)
        self._name = f"{self.connection.prefix}strategy_{next(_numbers)}"
        self.peers: ServerPeers = ServerPeers(
            self.connection, self._name, stall_timeout
        )

    def calls(
        self,
        make: MakeSession,
        dropped: Dropped | None = None,
    ) -> Callable[[CopiesOnTowers | CachedOnce], ServedCalls]:
        """Return what creates the calls of a strategy.

        Args:
            make: creates a session, given the arguments of ``Session``.
            dropped: counts dropped gradients; None: none can be.
        """

        def session(number: int) -> Session:
            return make(
                connection=self.connection,
                name=f"{self._name}/model_{number}",
                peers=self.peers,
                stall_timeout_s=self._stall_timeout,
            )

        def workers(number: int) -> Workers:
            name = f"{self._name}/fit_{number}"
            return Workers(self.connection, name, self._stall_timeout)

        return lambda update: ServedCalls(
            update, session, workers, self.peers, dropped
        )

    def described(self, batches: Batches) -> list[str]:
        """Lines for ``describe()``.

        Args:
            batches: whether workers share a batch, or each draws one.
        """
        me = self.connection
        servers = len(me.devices)
        return [
            {
                "split": "every worker takes its part of each batch",
                "each": "every worker reads its own data",
            }[batches],
            f"worker {me.rank} of {me.size}, {servers} parameter "
            f"server{'s' * (servers > 1)}",
        ]


def checked_timeout(seconds: Any) -> float:
    """Check a time that a user gives.

    Raises:
        TowerError: it is no positive number.
    """
    valid = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
    if not valid or not 0 < seconds < math.inf:
        raise TowerError(
            f"stall_timeout={seconds!r} is not allowed: give the seconds after "
            "which waiting for other workers is an error."
        )
    return float(seconds)
