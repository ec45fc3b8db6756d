"""Workers that update weights on parameter servers by themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import keras

from keras_towers import devices as devices_lib
from keras_towers import reduction as reduction_lib
from keras_towers.fit.context import tower as tower_lib
from keras_towers.fit.contract import Batches, TowerConfig
from keras_towers.meeting.environments import tf_config
from keras_towers.placement import LeastLoadedPlacement
from keras_towers.reduction import Reduction
from keras_towers.replicas.servers.direct import DirectSession
from keras_towers.replicas.servers.update import CachedOnce, CopiesOnTowers
from keras_towers.strategies import modes
from keras_towers.strategies.base import BaseStrategy, one_of
from keras_towers.strategies.processes import AmongProcesses
from keras_towers.strategies.servers import Servers

_SMALL_BYTES = 1 << 20


class _DirectStrategy(AmongProcesses, BaseStrategy):
    """Workers whose gradients are applied on the servers, each by itself.

    Args:
        update: creates the component that keeps a worker's copies, given the
            towers of the strategy and the reduction over towers.
        towers: the towers of this worker.
        sync: whether all finish a step before any begins the next.
        scale_gradient: whether gradients are divided by the number of workers.
        batches: ``"split"`` or ``"each"``.
        sync_every_epoch: as for ``TowerStrategy``.
        stall_timeout: seconds to wait for other workers.
        cluster: the job.
    """

    def __init__(
        self,
        update: Callable[
            [TowerConfig, list[str], Reduction], CopiesOnTowers | CachedOnce
        ],
        towers: devices_lib.Towers,
        sync: bool,
        scale_gradient: bool,
        batches: Batches,
        sync_every_epoch: bool,
        stall_timeout: float,
        cluster: tf_config.Cluster | None,
    ):
        one_of("sync", sync, (True, False))
        one_of("scale_gradient", scale_gradient, (True, False))
        one_of("batches", batches, ("split", "each"))
        self.sync: bool = bool(sync)
        self.scale_gradient: bool = bool(scale_gradient)
        self._servers = Servers(
            type(self).__name__, towers, cluster, stall_timeout
        )
        devices = self._servers.devices
        reduce = modes.choose(devices, None).reduce
        workers = self._servers.connection.size
        # Of a split batch, each worker has a part of the gradient.
        factor = workers if batches == "split" else 1.0
        if scale_gradient:
            factor /= workers

        def session(**given: Any) -> DirectSession:
            return DirectSession(self.sync, batches == "split", **given)

        super().__init__(
            devices,
            lambda config: update(config, devices, reduce),
            reduce,
            self._servers.calls(session),
            batches=batches,
            sync_every_epoch=sync_every_epoch,
            others=self._servers.peers,
            gradient_factor=factor,
        )

    def _described(self) -> list[str]:
        how = {
            True: "all workers finish a step before any begins the next",
            False: "no worker waits for another one",
        }[self.sync]
        scaled = "not scaled"
        if self.scale_gradient:
            scaled = f"scaled by 1/{self._servers.connection.size}"
        return [
            f"{self._components.update.description}; {how}",
            f"every worker applies its own gradients, which are {scaled}",
            *self._servers.described(self.batches),
        ]


class DistributedParameterServerStrategy(_DirectStrategy):
    """Trains an existing Keras model on parameter servers.

    Each trained weight is held by one of the servers, the one with the fewest
    bytes, together with the optimizer's state for it. A worker averages the
    gradients of its towers and applies them there itself; then it reads all
    weights into one copy of its own, which its towers share.

    All processes run the same script with ``TF_CONFIG``, started by
    ``keras-towers run --ps 1 --workers 3 script.py`` or by hand; parameter
    servers end when training has. ``fit`` reports a worker's own metrics.
    Afterwards all workers have the same model, with the moving statistics of
    the chief. Only the chief writes files.

    An update is made by each worker, with its part of the gradient: for plain
    SGD all of them together are one update of one device. With momentum, weight
    decay, clipping, schedules and optimizers such as Adam the weights are
    others, of which a warning tells; ``SyncReplicasStrategy`` averages first.

    Ports tensorpack's ``DistributedTrainerParameterServer``.

    Args:
        sync: True: all workers finish a step before any begins the next, so
            that all gradients of a step are of the same weights. False: no
            worker waits for another one.
        caching_device: where a worker keeps its copy: ``"cpu"``, on the host;
            ``"gpu"``: small weights on the first tower, large ones spread over
            all. None: ``"gpu"`` for one or two towers, else ``"cpu"``.
        scale_gradient: divide gradients by the number of workers, so that with
            SGD a step moves the weights as far as that of one device.
        batches: ``"split"``: all workers get the same data, and each takes its
            part of every batch. ``"each"``: every worker reads its own data.
        towers: devices of this worker, as for ``TowerStrategy``.
        sync_every_epoch: as for ``TowerStrategy``, for the towers of a worker.
        stall_timeout: seconds that a worker waits for others before it fails.
        cluster: the job. None: the one that ``TF_CONFIG`` describes.

    Attributes:
        sync: as given.
        caching_device: where a worker keeps its copy: ``"cpu"`` or ``"gpu"``.

    Raises:
        SystemExit: this is a parameter server, and training has ended.
        TowerError: wrong arguments, no parameter servers, or no connection.

    Example:
        >>> with kt.DistributedParameterServerStrategy():
        ...     model.fit(x, y, epochs=5)
    """

    def __init__(
        self,
        sync: bool = True,
        caching_device: Literal["cpu", "gpu"] | None = None,
        scale_gradient: bool = True,
        batches: Batches = "split",
        towers: devices_lib.Towers = 1,
        sync_every_epoch: bool = True,
        stall_timeout: float = 600,
        cluster: tf_config.Cluster | None = None,
    ):
        one_of("caching_device", caching_device, ("cpu", "gpu", None))
        self.caching_device: Literal["cpu", "gpu"] | None = caching_device

        def update(
            config: TowerConfig, devices: list[str], _: Reduction
        ) -> CachedOnce:
            if self.caching_device is None:
                self.caching_device = "gpu" if len(devices) <= 2 else "cpu"
            return CachedOnce(config, self._placement(devices))

        super().__init__(
            update,
            towers,
            sync,
            scale_gradient,
            batches,
            sync_every_epoch,
            stall_timeout,
            cluster,
        )

    def _placement(self, devices: list[str]) -> Callable[[keras.Variable], str]:
        """Place the copies: large ones are balanced."""
        homes = [tower_lib.short_name(device) for device in devices]
        if self.caching_device == "cpu":
            homes = [reduction_lib.host_of(homes[0])]
        place = LeastLoadedPlacement(homes, homes[0], _SMALL_BYTES)
        return lambda v: place(v.path, v.shape, v.dtype)

    @property
    def mode(self) -> Literal["distributed-parameter-server"]:
        """How workers work together: ``"distributed-parameter-server"``."""
        return "distributed-parameter-server"


class DistributedReplicatedStrategy(_DirectStrategy):
    """Trains an existing Keras model on parameter servers and local copies.

    Every tower of every worker has a copy of all weights. A worker averages the
    gradients of its towers and applies them to the copy on the servers itself;
    then it copies the new weights to its towers. All workers finish a step
    before any begins the next.

    What no optimizer trains, such as moving statistics, each worker keeps for
    itself; at the end of each epoch the servers get the chief's. Otherwise it
    is as with ``DistributedParameterServerStrategy``.

    Ports tensorpack's ``DistributedTrainerReplicated``.

    Args:
        scale_gradient: as for ``DistributedParameterServerStrategy``.
        batches: likewise.
        towers: likewise.
        sync_every_epoch: likewise.
        stall_timeout: likewise.
        cluster: likewise.

    Raises:
        SystemExit: this is a parameter server, and training has ended.
        TowerError: wrong arguments, no parameter servers, or no connection.

    Example:
        >>> with kt.DistributedReplicatedStrategy(towers=2):
        ...     model.fit(x, y, epochs=5)
    """

    def __init__(
        self,
        scale_gradient: bool = True,
        batches: Batches = "split",
        towers: devices_lib.Towers = 1,
        sync_every_epoch: bool = True,
        stall_timeout: float = 600,
        cluster: tf_config.Cluster | None = None,
    ):
        super().__init__(
            lambda config, devices, reduce: CopiesOnTowers(config, reduce),
            towers,
            True,
            scale_gradient,
            batches,
            sync_every_epoch,
            stall_timeout,
            cluster,
        )

    @property
    def mode(self) -> Literal["distributed-replicated"]:
        """How workers work together: ``"distributed-replicated"``."""
        return "distributed-replicated"
