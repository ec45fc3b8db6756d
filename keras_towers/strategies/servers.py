"""Workers that share parameter servers: their connection, steps and words."""

from __future__ import annotations

import itertools

from keras_towers import devices as devices_lib
from keras_towers.meeting.environments import tf_config
from keras_towers.parameter_servers import Connection, take_role
from keras_towers.parameter_servers.peers import ServerPeers
from keras_towers.strategies.options import Options, check
from keras_towers.strategies.ranks import share_machine

_numbers = itertools.count()


class Servers:
    """Connects a strategy with the parameter servers of its job.

    In a task of the role ``ps`` creating one serves, and ends the process when
    training has ended.
    """

    def __init__(
        self,
        strategy: str,
        towers: devices_lib.Towers,
        options: Options,
        cluster: tf_config.Cluster | None,
    ):
        check("cluster", cluster, tf_config.Cluster | None)
        self.options = options
        cluster = cluster or tf_config.required()
        if cluster.trains:
            towers = share_machine(cluster, towers)
        self.connection: Connection = take_role(strategy, cluster)
        self.devices: list[str] = devices_lib.resolve(towers)
        name = f"{self.connection.prefix}strategy_{next(_numbers)}"
        self.peers: ServerPeers = ServerPeers(
            self.connection, name, options.stall_shutdown_s
        )

    @property
    def gradient_factor(self) -> float:
        """The factor of a worker's gradients: its part stands for all."""
        size = self.connection.size
        factor = size if self.options.batches == "split" else 1
        return factor / size if self.options.scale_gradient else float(factor)

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
