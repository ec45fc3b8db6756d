"""A model that several workers train by way of parameter servers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_towers.errors import TowerError
from keras_towers.meeting import check
from keras_towers.parameter_servers.connection import Connection
from keras_towers.parameter_servers.store import value_of
from keras_towers.replicas import ReplicaCounts, resources
from keras_towers.replicas.servers.model import ServedModel
from keras_towers.replicas.servers.workers import FitEnded, Workers
from keras_towers.transport import Transport


class Session:
    """One model's training by all workers of a job.

    A worker that died and comes back goes on as if it had been stopped: behind
    the last batch that it had trained on.

    Args:
        connection: this worker's.
        name: prefix of the names of what the workers share; the same in all.
        peers: the workers.
        stall_shutdown_s: how long a worker waits for others.

    Attributes:
        workers: those of the ``fit`` that runs.
        model: the model on the servers.
        trains: whether it does so now.
        batches: how many this worker has trained on in it.
        has_left: whether there is nothing left to train for this worker.
        in_step: whether all workers make the same steps, each at the same time.
    """

    workers: Workers

    def __init__(
        self,
        connection: Connection,
        name: str,
        peers: Transport,
        stall_shutdown_s: float,
    ):
        self.connection = connection
        self.name = name
        self.stall_shutdown_s = stall_shutdown_s
        self._peers = peers
        self.rank: int = connection.rank
        self._fits = 0
        self.batches = 0
        self.trains = False
        self.has_left = False
        self.in_step: bool = False
        self.model: ServedModel = ServedModel(
            name, connection.devices, self.run, connection.dropped.drop_with
        )
        self._store = connection.store
        # The last fit that the chief has stopped before the end of its data.
        self._stopped = f"{name}/stopped"
        self._in_place = contextlib.ExitStack()
        # Written when what the workers share of this model has been freed.
        self._freed = f"{name}/freed"
        connection.dropped.drop_with(self, name)

    def run(self, function: Any) -> Any:
        """Call a concrete function; fail if it waits for too long."""
        return self.workers.run(function)

    def run_in_step(self, function: Any) -> Any:
        """The same; raise ``FitEnded`` once the chief has ended the fit."""
        return self.workers.run(function, in_step=True)

    def hold(self, model: keras.Model) -> None:
        """Give all variables that the workers share a copy on the servers."""
        self.model.hold(model)

    def begin(self, epoch: int) -> tuple[int, int | None]:
        """Begin a ``fit``: every worker takes over where the chief begins.

        Args:
            epoch: with which this worker would begin.

        Returns:
            With which epoch all begin; and how many batches of this ``fit``
            are behind a worker that comes back, None for one that does not.

        Raises:
            TowerError: a worker does not come, or comes back to a model that
                the others need no more.
        """
        self._fits += 1
        self.batches = 0
        self.has_left = False
        self.trains = True
        self.forget_traces()
        # One that was late in an earlier fit may still have written.
        news = check.gather(
            self._peers,
            self.connection.dropped.news(),
            f"begins fit {self._fits}",
        )
        self._free(self.connection.dropped.heard(news))
        if self.rank == 0:
            self.model.put()
            self._stop(0)
            self._initialise()
        elif self.connection.starts > 1:
            self._check_not_freed()
        where = f"takes over the weights of fit {self._fits}"
        epoch = check.gather(self._peers, epoch, where)[0]
        behind = self._behind() if self.workers.begin() else None
        if self.rank > 0:
            self.model.get()
        else:
            self._in_place.enter_context(self.model.in_place())
        return epoch, behind

    def _behind(self) -> int:
        """How many batches are behind a worker that comes back."""
        batches = self.workers.batches()
        if batches is None:
            try:
                return self.come_back()
            except FitEnded:
                batches = self.workers.batches()
        assert batches is not None
        self.has_left = True
        return batches

    def _free(self, names: Sequence[str]) -> None:
        """Free what no worker needs any more; the chief does it for all."""
        for name in names:
            if self.rank > 0:
                resources.forget(name)
                continue
            with self.connection.naming_lost_servers():
                self._store.put(f"{name}/freed", True)
                resources.free(name)

    def _check_not_freed(self) -> None:
        with self.connection.naming_lost_servers():
            freed = self._store.get(self._freed) is not None
        if freed:
            raise TowerError(
                f"worker {self.rank} of this job has come back, and its script "
                "begins with a model of which all workers were done: the "
                "parameter servers have freed its weights. Start all tasks of "
                "the job again, from a backup."
            )

    def forget_traces(self) -> None:
        """Drop functions of the variables that the model had before."""
        self.model.masters.forget_traces()

    def retrace(self) -> None:
        """The model's step is about to be traced anew."""

    def finalized(self) -> None:
        """Give the servers the final weights, which the chief has here."""
        if self.rank == 0:
            self.model.put_trained()

    def write_through(self, variable: keras.Variable) -> None:
        """Give the servers the value that the chief has assigned."""
        if self._fits:
            self.model.write_through(variable)

    def put_others(self) -> None:
        """Have the servers hold what no optimizer trains as the chief does."""
        if self.rank == 0 and self._fits:
            self.model.put_others()

    def end_epoch(self, epoch: int, stops: bool) -> bool:
        """End an epoch, behind all callbacks.

        Args:
            epoch: the epoch.
            stops: whether a callback has stopped the training.

        Returns:
            Whether it is stopped, by this worker or by the chief.
        """
        if self.rank == 0:
            if stops:
                self._stop(self._fits)
            self.workers.end_epoch(epoch)
        elif self.in_step and not stops:
            self.workers.wait_for_epoch(epoch)
            with self.connection.naming_lost_servers():
                stops = (self._store.get(self._stopped) or 0) >= self._fits
        return stops

    def _stop(self, fit: int) -> None:
        with self.connection.naming_lost_servers():
            self._store.put(self._stopped, fit)

    def stopped(self) -> tf.Tensor:
        """Read which fit the chief has stopped, as part of a function."""
        return self._store.read(self._stopped)

    def goes_on(self, stopped: Any) -> bool:
        """Whether this fit goes on, given what ``stopped`` has read."""
        return (value_of(stopped) or 0) < self._fits

    def start(self) -> None:
        """Get ready for the first step, unless there is none any more."""
        try:
            self.first()
        except FitEnded:
            self.has_left = True

    def step(self) -> bool:
        """End a step: wait as long as need be, and get the new weights.

        Returns:
            Whether there is another one: the training goes on.
        """
        self.workers.beat()
        self.batches += 1
        try:
            return self.stepped()
        except FitEnded:
            self.has_left = True
            return False

    def leave(self, stops: bool = False) -> None:
        """Have no more data; on the chief, wait for the others and finish.

        Afterwards the chief has the result of all.

        Args:
            stops: whether a callback has stopped the training. If the chief's
                has, the others stop behind their next step.
        """
        if self.has_left:
            return
        self.has_left = True
        if stops and self.rank == 0:
            self._stop(self._fits)
        self._leave()
        self.workers.leave()
        if self.rank == 0:
            self.workers.wait_for_others(self._is_over)
            # For one that is not waited for, and goes on later.
            self._stop(self._fits)
            self._finish()
            self.model.put_others()
            self._in_place.close()
            self.model.get()

    def end(self, error: BaseException | None) -> None:
        """End a ``fit``; wait for the others, unless it has failed.

        Afterwards all workers have the same model: that of the chief.

        Args:
            error: what has ended it, or None.
        """
        # A process that was broken off may be started again.
        self.connection.finished = error is None
        self.trains = False
        try:
            if error is None:
                self.leave()
                if self.rank == 0:
                    self.workers.end(self.batches)
                else:
                    self.workers.wait_for_end()
        finally:
            self._in_place.close()
        if error is None:
            self.model.get()

    # What differs between strategies.

    @property
    def counts(self) -> ReplicaCounts | None:
        """What has become of gradients that may be dropped; on the chief."""
        return None

    def take(
        self,
        optimizer: keras.optimizers.Optimizer,
        original: Callable[[list[Any], list[Any]], Any],
        variables: Sequence[Any],
        sums: Sequence[Any],
    ) -> None:
        """Take the gradients of this worker, as ``update.TakesSums``."""
        raise NotImplementedError

    def come_back(self) -> int:
        """Find out how many batches are behind a worker that comes back.

        Raises:
            FitEnded: there is no step left.
        """
        raise NotImplementedError

    def first(self) -> None:
        """Get ready for the first step, as ``start``."""
        raise NotImplementedError

    def stepped(self) -> bool:
        """End a step, as ``step``."""
        raise NotImplementedError

    def _initialise(self) -> None:
        """Create what the workers of one ``fit`` share; on the chief only."""

    def _is_over(self) -> bool:
        """Whether those who have not left are not waited for; on the chief."""
        return False

    def _leave(self) -> None:
        """Let the others go on without this worker."""

    def _finish(self) -> None:
        """End the training, when all have left; on the chief only."""
