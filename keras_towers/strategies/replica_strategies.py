"""Strategies whose towers or workers each take the next whole batch."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import keras
import tensorflow as tf

from keras_towers.fit.given_values import check_arguments
from keras_towers.fit.options import Batches, StrategyOptions, Tokens
from keras_towers.fit.weights.copies import native
from keras_towers.foundation import compat, settings
from keras_towers.foundation.errors import TowerError
from keras_towers.foundation.object_types import Variable
from keras_towers.jobs.rendezvous import tf_config
from keras_towers.parameter_servers.averaged_updates import AveragedSession
from keras_towers.parameter_servers.server_connection import ServerPeers
from keras_towers.parameter_servers.worker_runner import (
    ServerUpdate,
    WorkerRunner,
)
from keras_towers.replicas.hogwild import HogwildUpdate
from keras_towers.replicas.replica_calls import (
    AsyncRunner,
    ReplicaRunner,
    RunsReplicas,
)
from keras_towers.replicas.replica_counts import Quorum, ReplicaCounts
from keras_towers.replicas.staleness import Staleness
from keras_towers.strategies.base import BaseStrategy
from keras_towers.strategies.parameter_server_strategies import (
    connect,
    describe_workers,
)
from keras_towers.transport import devices as devices_lib


class AsyncTowerStrategy(BaseStrategy):
    """Trains a model on towers without synchronizing them.

    There is one copy of the model's weights, its metrics and its optimizer's
    state. Each tower takes the next whole batch, computes gradients with the
    current weights, and applies them immediately, even if other towers have
    updated the weights in the meantime. So a slow tower never blocks a fast
    one. But the weights depend on timing: they differ from those of one device,
    and you cannot reproduce a run exactly.

    Otherwise ``fit`` behaves as usual. Each batch is one step and one update,
    no update is lost, and ``optimizer.iterations`` counts them. Metrics are
    exact, since no addition to a variable is lost. Batch callbacks run when a
    tower takes a batch, up to two batches per tower ahead of its step. They get
    the logs of the last batch whose step has ended, perhaps of the previous
    epoch. Epoch-end callbacks run after all steps of the epoch. If the length
    of the data is known, the callbacks of the last batch do, too. ``fit``
    raises errors that occur on a tower.

    With a single tower, this is plain training. ``train_on_batch``,
    ``evaluate``, ``predict`` and custom training loops run as with
    ``TowerStrategy``. Eager steps run as on one device. If an update depends on
    the number of earlier updates, or reads variables that it writes (gradient
    accumulation, moving averages, loss scaling, constraints), only one tower
    updates at a time.

    Ports tensorpack's ``AsyncMultiGPUTrainer``; the algorithm is
    Hogwild! (Recht, Re, Wright and Niu, "Hogwild!: A Lock-Free Approach to
    Parallelizing Stochastic Gradient Descent", 2011).

    Args:
        towers: as for ``TowerStrategy``.
        scale_gradient: divide the gradients of each asynchronous step by the
            number of towers.

    Attributes:
        staleness: a ``Staleness`` with ``mean``, ``max`` and ``histogram``: how
            many updates of other towers the asynchronous steps of the last
            epoch missed. A ``TensorBoard`` callback writes it, too.

    Raises:
        TowerError: devices that do not exist.

    Example:
        >>> with keras_towers.AsyncTowerStrategy(4) as strategy:
        ...     model.fit(x, y, epochs=5)
        >>> print(strategy.staleness)
        mean 2.91, max 7 over 94 steps
    """

    _mode_name = "async"

    def __init__(
        self,
        towers: devices_lib.Towers | None = None,
        *,
        scale_gradient: bool = True,
    ):
        devices = devices_lib.devices_of(towers)
        options = StrategyOptions(batches="each", scale_gradient=scale_gradient)
        super().__init__(devices, options)
        self.scale_gradient = scale_gradient
        scale = 1 / len(devices) if scale_gradient else 1.0
        update = HogwildUpdate(self._config, self._mode.collectives, scale)
        self._runner: AsyncRunner
        self._compose(update, AsyncRunner(update))

    @property
    def staleness(self) -> Staleness:
        """The updates by other towers that the last epoch's steps missed."""
        return self._runner.staleness

    def _description_lines(self) -> list[str]:
        scaled = "not scaled"
        if self.scale_gradient:
            scaled = f"scaled by 1/{self.num_towers}"
        return [
            f'mode "async": {self._update.description}',
            "every tower takes the next whole batch as soon as it is free, and "
            f"gradients are {scaled}",
            "train_on_batch runs as with TowerStrategy, eager steps as on one "
            "device",
        ]


class SyncReplicasStrategy(BaseStrategy):
    """Trains a model without waiting for its slowest replicas.

    Each of T replicas takes the next whole batch and computes its gradients.
    When R gradients have arrived, the strategy applies their average once, as
    one device would apply the gradient of these R batches together. Every
    replica then continues with the new weights. The strategy drops gradients
    that are older than the weights, and counts them.

    With T > R, there are T - R backup replicas: a slow or stopped replica does
    not delay the others. With T = R, no gradient is dropped: up to float
    rounding, the weights equal those of one device that trains on R batches at
    a time. With T < R, replicas compute several gradients for each update, for
    batches that do not fit into the devices' memory.

    All gradients count equally in an average, whatever the size of their
    batches: each is the gradient of the mean loss of one batch.
    BatchNormalization uses the statistics of one replica's batch. If the number
    of batches is not a multiple of R, the last update of an epoch averages
    fewer gradients. ``optimizer.iterations`` counts updates.

    If gradients can be dropped, the logs of an epoch contain their number as
    ``"dropped_gradients"``. A ``TensorBoard`` callback also writes the number
    for each replica of this process.

    Batch callbacks, ``train_on_batch``, ``evaluate``, ``predict`` and custom
    training loops work as with ``AsyncTowerStrategy``. A callback of ``fit``
    cannot call ``fit`` of the same model.

    With parameter servers in ``TF_CONFIG``, every worker is a replica. The
    servers hold the weights, the gradients and the optimizer, and the chief
    starts the updates. Only ``fit`` can train then. It ends on all workers
    together, with the same model and ``counts``. Until then, only the chief
    knows ``counts``.

    Ports TensorFlow 1's ``SyncReplicasOptimizer``; the algorithm is from Chen,
    Pan, Monga, Bengio and Jozefowicz, "Revisiting Distributed Synchronous SGD",
    2016.

    Args:
        replicas_to_aggregate: how many gradients an update averages, R. None:
            the number of replicas.
        total_num_replicas: number of replicas, T. None: the number of devices.
        variable_averages: a ``tf.train.ExponentialMovingAverage`` of the
            trained weights, updated with them; see ``average_of``. A custom
            training loop has to call its ``apply``.
        tokens: ``"per_replica"``: each replica computes its share of every
            update. ``"shared"``: as in TensorFlow 1, any replica may compute
            any gradient, so a fast replica may contribute several to one
            update. The weights then differ from those of one device, and
            gradients can be dropped for any T and R.
        towers: the devices, as for ``TowerStrategy``; one for each replica. In
            a job with parameter servers, the devices of this worker; default:
            1.
        stall_timeout_s: seconds to wait for workers that are slow or gone; in
            one process, seconds to wait until a replica finishes a step.
        cluster: the job; None: the job that ``TF_CONFIG`` describes, if any.
        batches: across processes only. ``"split"``, the default: all workers
            get the same data, and each takes its part of every batch.
            ``"each"``: every worker reads its own data.

    Raises:
        SystemExit: this is a parameter server, and training has ended.
        TowerError: impossible numbers of replicas, or unknown devices; when
            training, a model that is set to ``run_eagerly``, or a step that
            does not apply one gradient of each optimizer.

    Example:
        >>> import keras_towers as kt
        >>> with kt.SyncReplicasStrategy(replicas_to_aggregate=3) as strategy:
        ...     model.fit(x, y, epochs=5)
        >>> print(strategy.counts)
        94 updates; used by replica: 94 94 93 12; dropped: 0 0 1 8
    """

    _mode_name = "sync-replicas"

    def __init__(
        self,
        *,
        replicas_to_aggregate: int | None = None,
        total_num_replicas: int | None = None,
        variable_averages: tf.train.ExponentialMovingAverage | None = None,
        tokens: Tokens = "per_replica",
        towers: devices_lib.Towers | None = None,
        stall_timeout_s: float = settings.STALL_TIMEOUT_S,
        cluster: tf_config.Cluster | None = None,
        batches: Batches | None = None,
    ):
        check_arguments(
            SyncReplicasStrategy,
            replicas_to_aggregate=replicas_to_aggregate,
            total_num_replicas=total_num_replicas,
            variable_averages=variable_averages,
            tokens=tokens,
            cluster=cluster,
            batches=batches,
        )
        cluster = cluster or tf_config.from_environment()
        served = cluster is not None and bool(cluster.ps or cluster.size > 1)
        options = StrategyOptions(
            batches=(batches or "split") if served else "each",
            stall_timeout_s=stall_timeout_s,
        )
        self._peers: ServerPeers | None = None
        if served:
            own = 1 if towers is None else towers
            name = type(self).__name__
            devices, self._peers = connect(name, own, options, cluster)
        elif batches is not None:
            raise TowerError(
                f"batches={batches!r} says which data the workers of a job "
                "read, but TF_CONFIG describes no job: leave it out. In "
                "one process every replica takes the next whole batch."
            )
        else:
            wanted = total_num_replicas if towers is None else towers
            devices = devices_lib.devices_of(wanted)
        replicas = self._peers.size if self._peers else len(devices)
        if total_num_replicas not in (None, replicas):
            kind = "workers in TF_CONFIG" if served else "towers"
            raise TowerError(
                f"total_num_replicas={total_num_replicas} is not allowed: "
                f"there are {replicas} {kind}, each of which is a replica. "
                "Leave it out."
            )
        if replicas_to_aggregate is None:
            replicas_to_aggregate = replicas
        self.replicas_to_aggregate: int = replicas_to_aggregate
        self.tokens: Tokens = tokens
        self._averages = variable_averages
        quorum = Quorum(replicas, replicas_to_aggregate, tokens == "shared")
        super().__init__(devices, options, job=self._peers)
        config, collectives = self._config, self._mode.collectives
        self._runner: RunsReplicas
        if self._peers is None:
            shared = HogwildUpdate(config, collectives, 1.0, self._average)
            self._compose(shared, ReplicaRunner(shared, quorum))
        else:
            copies = ServerUpdate(config, collectives=collectives)
            make_session = functools.partial(
                AveragedSession, quorum=quorum, after_update=self._average
            )
            workers = WorkerRunner(copies, self._peers, make_session)
            self._compose(copies, workers)

    @property
    def total_num_replicas(self) -> int:
        """The number of replicas, T."""
        return self.num_replicas if self._peers is None else self.size

    @property
    def counts(self) -> ReplicaCounts:
        """How many gradients the last ``fit`` used and dropped, by replica."""
        return self._runner.counts

    def average_of(self, variable: keras.Variable) -> tf.Tensor:
        """Return the moving average of a trained weight.

        Across processes only the chief has it.

        Args:
            variable: a trainable variable of the model trained last.

        Raises:
            TowerError: the variable has no moving average.
        """
        average = None
        if self._averages is not None:
            average = self._averages.average(self._runner.updated(variable))
        if average is None:
            raise TowerError(
                f"there is no moving average of {variable.path}: create the "
                "strategy with variable_averages=tf.train."
                "ExponentialMovingAverage(0.999), train the variable, and ask "
                "for it on the chief."
            )
        return tf.convert_to_tensor(average)

    def _average(self, variables: Sequence[Variable]) -> None:
        if self._averages is not None:
            with compat.single_device_mode():
                self._averages.apply(list(map(native, variables)))

    def _description_lines(self) -> list[str]:
        wanted, total = self.replicas_to_aggregate, self.total_num_replicas
        spare = total - wanted
        extra = "each computes one"
        if spare > 0:
            extra = f"{spare} backup replica{'s' if spare > 1 else ''}"
        elif spare < 0:
            most = -(-wanted // total)
            extra = f"each of {total} replicas computes up to {most} of them"
        data = ["every replica takes the next whole batch"]
        if self._peers is not None:
            data = describe_workers(self._peers, self.batches)
        return [
            f'mode "sync-replicas": every update averages {wanted} gradients '
            f"({extra})",
            f"tokens are {self.tokens.replace('_', ' ')}",
            *data,
        ]
