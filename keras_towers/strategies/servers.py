"""Workers that share parameter servers: their connection, steps and words."""

from __future__ import annotations

import itertools
from collections.abc import Callable

from keras_towers import devices as devices_lib
from keras_towers.meeting.environments import tf_config
from keras_towers.parameter_servers import Connection, take_role
from keras_towers.parameter_servers.peers import ServerPeers
from keras_towers.replicas.counts import Rounds
from keras_towers.replicas.servers.calls import ServedCalls
from keras_towers.replicas.servers.session import Session
from keras_towers.replicas.servers.update import CachedOnce, CopiesOnTowers
from keras_towers.replicas.servers.workers import Workers
from keras_towers.strategies.options import Options
from keras_towers.strategies.ranks import devices_of_rank, share_cores

_numbers = itertools.count()


class Servers:
    """Connects a strategy with the parameter servers of its job.

    In a task of the role ``ps`` creating one serves, and ends the process when
    training has ended.
    """

    def __init__(
        self, strategy: str, towers: devices_lib.Towers, options: Options
    ):
        self.options = options
        cluster = options.cluster or tf_config.required()
        if cluster.trains:
            share_cores(cluster)
            towers = devices_of_rank(cluster, towers)
        self.connection: Connection = take_role(strategy, cluster)
        self.devices: list[str] = devices_lib.resolve(towers)
        self._name = f"{self.connection.prefix}strategy_{next(_numbers)}"
        self.peers: ServerPeers = ServerPeers(
            self.connection, self._name, options.stall_shutdown_s
        )

    @property
    def gradient_factor(self) -> float:
        """What a worker multiplies its gradients by: its part is like all."""
        size = self.connection.size
        factor = size if self.options.batches == "split" else 1
        return factor / size if self.options.scale_gradient else float(factor)

    def calls(
        self,
        update: CopiesOnTowers | CachedOnce,
        session: Callable[..., Session],
        rounds: Rounds | None = None,
    ) -> ServedCalls:
        """Create the calls of a strategy, with the sessions of its kind."""
        stall_s = self.options.stall_shutdown_s

        def session_of(number: int) -> Session:
            return session(
                connection=self.connection,
                name=f"{self._name}/model_{number}",
                peers=self.peers,
                stall_shutdown_s=stall_s,
            )

        def workers_of(number: int) -> Workers:
            name = f"{self._name}/fit_{number}"
            return Workers(self.connection, name, stall_s)

        return ServedCalls(update, session_of, workers_of, self.peers, rounds)

    def described(self) -> list[str]:
        """Lines for ``describe()``."""
        me = self.connection
        servers = len(me.devices)
        return [
            {
                "split": "every worker takes its part of each batch",
                "each": "every worker reads its own data",
            }[self.options.batches],
            f"worker {me.rank} of {me.size}, {servers} parameter "
            f"server{'s' * (servers > 1)}",
        ]
