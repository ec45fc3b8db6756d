"""A model that several workers train by way of parameter servers."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_towers.errors import TowerError
from keras_towers.fit.served.masters import Masters
from keras_towers.fit.served.workers import Workers
from keras_towers.fit.update.one_device import as_one_device
from keras_towers.fit.weights import state as state_lib
from keras_towers.fit.weights.held_once import slots_of
from keras_towers.parameter_servers import remote
from keras_towers.parameter_servers.connection import Connection
from keras_towers.parameter_servers.shared import Note, text_of
from keras_towers.sync_replicas import resources
from keras_towers.transport import Transport, objects


class Session:
    """One model's training by all workers of a job.

    Args:
        connection: this worker's.
        name: prefix of the names of what the workers share; the same in all.
        peers: the workers.
        stall_timeout_s: how long a worker waits for others.
    """

    def __init__(
        self,
        connection: Connection,
        name: str,
        peers: Transport,
        stall_timeout_s: float,
    ):
        self.connection = connection
        self.name = name
        self.stall_timeout_s = stall_timeout_s
        self._peers = peers
        self.rank: int = connection.rank
        self._fits = 0
        self.workers: Workers = Workers(connection, f"{name}/0")
        self._has_left = False
        # Whether all workers make the same steps, each at the same time.
        self.in_step: bool = False
        self.masters: Masters = Masters(
            name, connection.devices, self.run, connection.dropped.drop_with
        )
        self._server = connection.devices[0]
        self._epoch = Note(f"{name}/epoch", self._server)
        # The last fit that the chief has stopped before the end of its data.
        self._stopped = Note(f"{name}/stopped", self._server)
        self._trained: list[keras.Variable] = []
        self._others: list[keras.Variable] = []
        self._of_optimizers: list[keras.Variable] = []
        self._in_place = contextlib.ExitStack()
        # Written when what the workers share of this model has been freed.
        self._freed = Note(f"{name}/freed", self._server)
        connection.dropped.drop_with(self, name)

    def run(self, function: Any) -> Any:
        """Call a concrete function; fail if it waits for too long."""
        with self.connection.naming_lost_servers():
            try:
                look = self.workers.watch_chief()
                return remote.run(
                    function, timeout_s=self.stall_timeout_s, look=look
                )
            except TimeoutError:
                raise self.workers.stalled(self.stall_timeout_s) from None

    def run_for_ever(self, function: Any) -> Any:
        """Call a concrete function that may wait for a long time."""
        with self.connection.naming_lost_servers():
            return remote.run(function)

    def hold(self, model: keras.Model) -> None:
        """Give all variables that the workers share a copy on the servers."""
        state = state_lib.collect(model)
        for optimizer in state.optimizers:
            self._build(optimizer, model)
        self._trained = [v for v in state.weights if v.trainable]
        self._others = [v for v in state.weights if not v.trainable]
        self._of_optimizers = state.optimizer_variables
        self.masters.add(self._trained)
        slots = {
            id(slot): weight
            for optimizer in state.optimizers
            for slot, weight in slots_of(optimizer)
        }
        self.masters.add(self._others)
        self.masters.add(self._of_optimizers, lambda v: slots.get(id(v)))

    def _build(
        self, optimizer: keras.optimizers.Optimizer, model: keras.Model
    ) -> None:
        if optimizer.built:
            return
        if optimizer is not model.optimizer:
            raise TowerError(
                f"the optimizer {optimizer.name!r} of model {model.name!r} is "
                "not built yet, and all workers have to know its variables "
                "before they train: call optimizer.build(variables) before fit."
            )
        with as_one_device(optimizer, model.trainable_variables):
            optimizer.build(model.trainable_variables)

    def in_place(self) -> contextlib.AbstractContextManager[None]:
        """Let the optimizers' variables be those on the servers."""
        return self.masters.in_place(self._of_optimizers)

    @contextlib.contextmanager
    def at_servers(
        self, optimizer: Any, variables: Sequence[Any]
    ) -> Iterator[None]:
        """Let weights and optimizers be those on the servers.

        Raises:
            TowerError: one is not there.
        """
        unknown = [v for v in variables if v not in self.masters]
        if unknown:
            names = ", ".join(getattr(v, "path", str(v)) for v in unknown)
            raise TowerError(
                f"the step trains {names}, which the parameter servers do not "
                "hold: they hold the trainable weights that the model had "
                "when fit began."
            )
        with (
            self.masters.in_place([*self._trained, *self._of_optimizers]),
            as_one_device(optimizer, variables),
        ):
            yield

    def begin(self, model: keras.Model) -> bool:
        """Begin a ``fit``: every worker takes over where the chief begins.

        Returns:
            Whether there is something left to train.

        Raises:
            TowerError: the chief has been started again by itself, or a worker
                does not come.
        """
        self._fits += 1
        self.workers = Workers(self.connection, f"{self.name}/{self._fits}")
        self._has_left = False
        self.forget_traces()
        if self.rank == 0:
            if self.connection.starts > 1:
                raise TowerError(
                    "the chief of this job has been started again by itself, "
                    "but what it knew of the training is lost: start all tasks "
                    "of the job again, from a backup."
                )
            self.masters.put(
                [*self._trained, *self._others, *self._of_optimizers]
            )
            self._assign(self._epoch, model._initial_epoch or 0)
            self._assign(self._stopped, 0)
            self._initialise()
        news = objects.gather(
            self._peers,
            self.connection.dropped.news(),
            f"begins fit {self._fits}",
        )
        self._free(self.connection.dropped.heard(news))
        if self.rank > 0:
            if self.connection.starts > 1 and self._freed.get() is not None:
                raise TowerError(
                    f"worker {self.rank} of this job has come back, and its "
                    f"script begins with model {model.name!r}, of which all "
                    "workers were done: the parameter servers have freed its "
                    "weights. Start all tasks of the job again, from a backup."
                )
            model._initial_epoch = self._number(self._epoch) or None
            if self.connection.starts > 1 and self.workers.ended:
                # It has come back too late: there is no epoch left.
                model._initial_epoch = sys.maxsize
                self._has_left = True
            self.workers.fail("")
            self.get_all()
        else:
            self._in_place.enter_context(self.in_place())
        return not self._has_left

    def _free(self, names: Sequence[str]) -> None:
        """Free what no worker needs any more; the chief does it for all."""
        for name in names:
            if self.rank > 0:
                resources.forget(name)
                continue
            with self.connection.naming_lost_servers():
                Note(f"{name}/freed", self._server).set()
                resources.free(name)

    def forget_traces(self) -> None:
        """Drop functions of the variables that the model had before."""
        self.masters.forget_traces()

    def retrace(self) -> None:
        """The model's step is about to be traced anew."""

    def get_all(self) -> None:
        """Take over all that the servers hold."""
        self.masters.get([*self._trained, *self._others, *self._of_optimizers])

    def finalized(self) -> None:
        """Give the servers the final weights, which the chief has here."""
        if self.rank == 0:
            self.masters.put(self._trained)

    def write_through(self, variable: keras.Variable) -> None:
        """Give the servers the value that the chief has assigned."""
        if not self._fits or variable not in self.masters:
            return
        if variable._value is not self.masters.of(variable):
            self.masters.put([variable])

    def begin_epoch(self, epoch: int) -> None:
        """Note how far the chief has come, for a worker that comes back."""
        if self.rank == 0:
            self._assign(self._epoch, epoch)

    def end_steps(self) -> None:
        """Have the servers hold what no optimizer trains as the chief does."""
        if self.rank == 0:
            self.masters.put(self._others)

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
                self._assign(self._stopped, self._fits)
            self.workers.end_epoch(epoch)
        elif self.in_step and not stops:
            self.workers.wait_for_epoch(epoch)
            stops = self._number(self._stopped) >= self._fits
        return stops

    def _assign(self, note: Note, value: int) -> None:
        with self.connection.naming_lost_servers():
            note.set(str(value))

    def _number(self, note: Note) -> int:
        with self.connection.naming_lost_servers():
            return int(note.get() or 0)

    def stopped(self) -> tf.Tensor:
        """Read which fit the chief has stopped, as part of a function."""
        return self._stopped.read()

    def goes_on(self, stopped: Any) -> bool:
        """Whether this fit goes on, given what ``stopped`` has read."""
        return int(text_of(stopped) or 0) < self._fits

    def leave(self, stops: bool = False) -> None:
        """Have no more data; on the chief, wait for the others and finish.

        Afterwards the chief has the result of all.

        Args:
            stops: whether a callback has stopped the training. If the chief's
                has, the others stop behind their next step.
        """
        if self._has_left:
            return
        self._has_left = True
        if stops and self.rank == 0:
            self._assign(self._stopped, self._fits)
        self._leave()
        self.workers.left()
        if self.rank == 0:
            self.workers.wait_for_others(self._is_over)
            self._finish()
            self.masters.put(self._others)
            self._in_place.close()
            self.get_all()

    def end(self, error: BaseException | None) -> None:
        """End a ``fit``; wait for the others, unless it has failed.

        Afterwards all workers have the same model: that of the chief. One that
        has failed counts as one that has died: it may come back.

        Args:
            error: what has ended it, or None.
        """
        # A process that was broken off may be started again.
        self.connection.finished = error is None
        try:
            if error is None:
                self.leave()
            else:
                self.workers.fail(f"{type(error).__name__}: {error}")
            if self.rank == 0:
                self.workers.end()
            elif error is None:
                self.workers.wait_for_end()
        except (tf.errors.OpError, TimeoutError, TowerError):
            if error is None:
                raise
        finally:
            self._in_place.close()
        if error is None:
            self.get_all()

    # What differs between strategies.

    def take(
        self,
        optimizer: keras.optimizers.Optimizer,
        original: Callable[[list[Any], list[Any]], Any],
        variables: Sequence[Any],
        sums: Sequence[Any],
        weight: float,
    ) -> None:
        """Take the gradients of this worker, as ``update.TakesSums``."""
        raise NotImplementedError

    def first(self) -> None:
        """Get ready for the first step."""
        raise NotImplementedError

    def stepped(self) -> bool:
        """End a step: wait as long as need be, and get the new weights.

        Returns:
            Whether there is another one: the training goes on.
        """
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
