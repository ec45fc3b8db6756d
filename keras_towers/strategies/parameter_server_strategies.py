"""Strategies whose weights are on parameter servers.

The servers are the towers' devices or their host, or other processes.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Self, Unpack

from keras_towers.fit.given_values import check_arguments
from keras_towers.fit.options import (
    Batches,
    ServerKeywords,
    StepKeywords,
    StrategyOptions,
    Where,
    current_name,
    options_of,
)
from keras_towers.fit.update.sharding_policy import OnDevices
from keras_towers.fit.update.weight_update import WeightUpdate
from keras_towers.fit.weights.least_loaded import LeastLoadedPlacement
from keras_towers.jobs.rendezvous import tf_config
from keras_towers.parameter_servers.async_updates import AsyncSession
from keras_towers.parameter_servers.averaged_updates import AveragedSession
from keras_towers.parameter_servers.server_connection import (
    ServerPeers,
    take_role,
)
from keras_towers.parameter_servers.training_session import Session
from keras_towers.parameter_servers.worker_runner import (
    ServerUpdate,
    WorkerRunner,
)
from keras_towers.replicas.replica_counts import Quorum
from keras_towers.strategies.base import BaseStrategy
from keras_towers.transport import devices as devices_lib

# Smaller copies of a worker are all on its first tower, to avoid many small
# reads from all of its towers.
_SMALL_BYTES = 1 << 20
# Numbers the strategies of a job, which all its processes create in one order.
_numbers = itertools.count()


def choose_places(
    devices: Sequence[str], where: Where | None
) -> tuple[Where, list[str]]:
    """Choose the devices that hold weights: the towers, or their host."""
    if where is None:
        # As tensorpack chooses.
        where = "towers" if len(devices) <= 2 else "host"
    places = devices if where == "towers" else [devices_lib.host_of(devices[0])]
    return where, [devices_lib.short_name(place) for place in places]


class ParameterServerTowerStrategy(BaseStrategy):
    """Trains on several devices that share one copy of every weight.

    Each tower reads the weights from the devices that hold them, and computes
    gradients on its share of the batch. The device of a variable sums its
    gradients and applies them once. Results are as exact as with
    ``TowerStrategy``, but the weights need memory for only one copy.

    This applies to trained weights and the optimizer's slots. All other
    variables (moving statistics, metrics, random states, frozen weights) stay
    where they are. In a custom loop in ``strategy.scope()``, each tower has a
    replica, as with ``TowerStrategy``.

    If you took a ``tf.Variable`` from the model before the block, it may be out
    of date inside the block, because the weight is on another device. After the
    block, it is up to date again. Keras variables and ``model.get_weights()``
    are always up to date.

    Ports tensorpack's ``SyncMultiGPUTrainerParameterServer``.

    Args:
        towers: as for ``TowerStrategy``.
        ps_device: ``"host"``: all weights are in CPU memory. ``"towers"``: each
            goes to the tower that holds the fewest bytes. None: ``"towers"``
            for one or two towers, else ``"host"``.
        average: True: gradients are the same as on one device. False: they are
            multiplied by the number of replicas, as in tensorpack.
        batches: ``"split"``: the towers share every batch. ``"each"``: every
            tower takes a whole batch.
        sync_every_epoch: synchronize all variables at the end of each epoch.
        batch_norm: ``"global"``: BatchNormalization uses the statistics of the
            global batch. ``"tower"``: those of each tower's examples.
        micro_batches: the number of parts into which each tower divides its
            examples, to save memory; None: one; ``"auto"``: more, if memory
            runs out.
        remat: True: towers compute activations again in the backward pass
            instead of keeping them, to save memory; a number: at most this part
            of the step's work; None: as little as a device needs to fit.
        **options: ``StrategyOptions`` describes these options in more detail.

    Attributes:
        ps_device: where the weights are: ``"host"`` or ``"towers"``.
        placement: which device holds which weight.

    Raises:
        TowerError: unknown devices or invalid arguments.

    Example:
        >>> with keras_towers.ParameterServerTowerStrategy(4):
        ...     model.fit(x, y, epochs=5)
    """

    _mode_name = "parameter-server"

    def __init__(
        self,
        towers: devices_lib.Towers | None = None,
        *,
        ps_device: Where | None = None,
        **options: Unpack[StepKeywords],
    ):
        ps_device = current_name(ps_device)
        check_arguments(ParameterServerTowerStrategy, ps_device=ps_device)
        checked = options_of(self, StepKeywords, options)
        devices = devices_lib.devices_of(towers)
        where, places = choose_places(devices, ps_device)
        self.ps_device: Where = where
        self.placement: LeastLoadedPlacement = LeastLoadedPlacement(places)
        super().__init__(devices, checked)
        sharding = OnDevices(self._config, self.placement)
        self._compose(WeightUpdate(self._config, sharding))

    def __enter__(self) -> Self:
        super().__enter__()
        self.placement.clear()
        return self

    def _description_lines(self) -> list[str]:
        where = {
            "host": "in CPU memory",
            "towers": "spread over the towers",
        }[self.ps_device]
        lines = super()._description_lines()[1:]
        return [f"trained weights are {where}", *lines]


def connect(
    strategy: str,
    towers: devices_lib.Towers,
    options: StrategyOptions,
    cluster: tf_config.Cluster | None,
) -> tuple[list[str], ServerPeers]:
    """Connect to the parameter servers of a job, or run as one of them.

    Returns:
        The devices of this worker, and the workers.
    """
    cluster = cluster or tf_config.required(options="--ps 1 --workers {}")
    if cluster.trains:
        towers = devices_lib.share_machine(cluster, towers)
    connection = take_role(strategy, cluster)
    name = f"{connection.prefix}strategy_{next(_numbers)}"
    peers = ServerPeers(connection, name, options.stall_timeout_s)
    return devices_lib.devices_of(towers), peers


def describe_workers(peers: ServerPeers, batches: Batches) -> list[str]:
    """Describe the workers and their servers, line by line."""
    servers = len(peers.connection.devices)
    return [
        {
            "split": "every worker takes its part of each batch",
            "each": "every worker reads its own data",
        }[batches],
        f"worker {peers.rank} of {peers.size}, {servers} parameter "
        f"server{'s' if servers > 1 else ''}",
    ]


class _WorkerStrategy(BaseStrategy):
    """Workers whose gradients are applied on parameter servers."""

    def __init__(
        self,
        towers: devices_lib.Towers,
        cluster: tf_config.Cluster | None,
        options: ServerKeywords,
        sync: bool = True,
    ):
        own_options = options_of(self, ServerKeywords, options)
        name = type(self).__name__
        devices, self._peers = connect(name, towers, own_options, cluster)
        size = self._peers.size
        factor = 1.0 if own_options.scale_gradient else float(size)
        if not sync:
            # Nobody averages the gradients of the workers.
            factor /= size
        super().__init__(
            devices, own_options, job=self._peers, gradient_factor=factor
        )
        self.sync = sync

    def _compose_workers(self, update: ServerUpdate) -> None:
        make_session: Callable[..., Session] = AsyncSession
        if self.sync:
            size = self._peers.size
            quorum = Quorum(size, size, shared=False)
            make_session = functools.partial(AveragedSession, quorum=quorum)
        runner = WorkerRunner(update, self._peers, make_session)
        self._compose(update, runner)

    def _description_lines(self) -> list[str]:
        scaled = self._config.options.scale_gradient
        if self.sync:
            reduced = "averaged" if scaled else "summed"
            how = f"the gradients of all workers are {reduced} and applied once"
        else:
            factor = f"scaled by 1/{self.size}" if scaled else "not scaled"
            how = (
                f"every worker applies its own gradients, which are {factor}, "
                "and waits for no other worker"
            )
        return [
            self._update.description,
            how,
            *describe_workers(self._peers, self.batches),
        ]


class DistributedParameterServerStrategy(_WorkerStrategy):
    """Trains a model on parameter servers.

    Each trained weight, with its optimizer state, is on one server: the one
    that held the fewest bytes so far. A worker sums the gradients of its towers
    and sends the sums to the servers. Then it reads all weights into one local
    copy, which its towers share.

    All processes run the same script with ``TF_CONFIG``. Start them with
    ``keras-towers run --ps 1 --workers 3 script.py``, or yourself. Parameter
    servers end when training ends. On each worker, ``fit`` reports the metrics
    of the worker's own examples. Afterwards, all workers have the same model,
    with the chief's moving statistics. Only the chief writes files.

    The servers average the gradients of all workers and apply them once, as one
    device applies the gradient of the whole batch.

    Ports tensorpack's ``DistributedTrainerParameterServer``.

    Args:
        towers: devices of this worker, as for ``HorovodStrategy``.
        sync: True: all workers train synchronously. False: each worker applies
            its own gradients without waiting. The weights then differ from one
            device. If a step updates a weight and then reads it, it gets the
            old value.
        caching_device: where a worker keeps its copy: ``"host"``;
            ``"towers"``: small weights on the first tower, large ones spread
            over all. None: ``"towers"`` for one or two towers, else ``"host"``.
        cluster: the job; None: the job that ``TF_CONFIG`` describes.
        scale_gradient: divide gradients by the number of workers.
        batches: ``"split"``: the workers share every batch. ``"each"``: every
            worker reads its own data.
        sync_every_epoch: synchronize all variables at the end of each epoch.
        stall_timeout_s: seconds to wait for workers that are slow or gone.
        **options: ``StrategyOptions`` describes these options in more detail.

    Attributes:
        sync: as given.
        caching_device: where a worker keeps its copy.

    Raises:
        SystemExit: this is a parameter server, and training has ended.
        TowerError: wrong arguments, no parameter servers, or no connection.

    Example:
        >>> with keras_towers.DistributedParameterServerStrategy():
        ...     model.fit(x, y, epochs=5)
    """

    _mode_name = "distributed-parameter-server"

    def __init__(
        self,
        towers: devices_lib.Towers = 1,
        *,
        sync: bool = True,
        caching_device: Where | None = None,
        cluster: tf_config.Cluster | None = None,
        **options: Unpack[ServerKeywords],
    ):
        caching_device = current_name(caching_device)
        check_arguments(
            DistributedParameterServerStrategy,
            sync=sync,
            caching_device=caching_device,
            cluster=cluster,
        )
        super().__init__(towers, cluster, options, sync)
        where, places = choose_places(self._config.devices, caching_device)
        self.caching_device: Where = where
        place = LeastLoadedPlacement(places, places[0], _SMALL_BYTES)
        sharding = OnDevices(self._config, place)
        self._compose_workers(ServerUpdate(self._config, sharding=sharding))


class DistributedReplicatedStrategy(_WorkerStrategy):
    """Trains a model on parameter servers and local copies.

    Every tower of every worker has a copy of all weights. The servers average
    all gradients and apply them once, as one device applies the gradient of the
    whole batch. Then each worker copies the new weights to its towers.

    Variables that no optimizer trains, such as moving statistics, stay local to
    each worker. At the end of each epoch, the servers get the chief's values.
    Everything else is as with ``DistributedParameterServerStrategy``.

    Ports tensorpack's ``DistributedTrainerReplicated``.

    Args:
        towers: devices of this worker, as for ``HorovodStrategy``.
        cluster: the job; None: the job that ``TF_CONFIG`` describes.
        scale_gradient: divide gradients by the number of workers.
        batches: ``"split"``: the workers share every batch. ``"each"``: every
            worker reads its own data.
        sync_every_epoch: synchronize all variables at the end of each epoch.
        stall_timeout_s: seconds to wait for workers that are slow or gone.
        **options: ``StrategyOptions`` describes these options in more detail.

    Raises:
        SystemExit: this is a parameter server, and training has ended.
        TowerError: wrong arguments, no parameter servers, or no connection.

    Example:
        >>> with keras_towers.DistributedReplicatedStrategy(towers=2):
        ...     model.fit(x, y, epochs=5)
    """

    _mode_name = "distributed-replicated"

    def __init__(
        self,
        towers: devices_lib.Towers = 1,
        *,
        cluster: tf_config.Cluster | None = None,
        **options: Unpack[ServerKeywords],
    ):
        check_arguments(DistributedReplicatedStrategy, cluster=cluster)
        super().__init__(towers, cluster, options)
        self._compose_workers(
            ServerUpdate(
                self._config,
                collectives=self._mode.collectives,
                gradients=self._mode.gradients,
            )
        )
