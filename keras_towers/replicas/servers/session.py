"""A model that several workers train by way of parameter servers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_towers.errors import TowerError
from keras_towers.fit.context.blocks import Slot
from keras_towers.fit.contract import UpdateCall
from keras_towers.parameter_servers import remote
from keras_towers.parameter_servers.connection import Connection, ServerPeers
from keras_towers.parameter_servers.server_store import value_of
from keras_towers.rendezvous import check
from keras_towers.replicas import resources
from keras_towers.replicas.servers.barrier import Notes
from keras_towers.replicas.servers.server_variables import ServerVariables
from keras_towers.replicas.servers.workers import FitEnded, Workers

_HOST = "/device:CPU:0"

# The session whose fit runs in this thread.
current: Slot[Session] = Slot()


class Session:
    """The training of one model by all workers of a job."""

    workers: Workers
    # By which this worker learns of the weights that are ready.
    notes: Notes
    in_step: bool = False
    # Whether the next step's weights are asked for while a step runs.
    asks_ahead: bool = True
    # How many lost workers a step can do without.
    spare: int = 0

    def __init__(self, peers: ServerPeers, number: int, split: bool):
        self.connection: Connection = peers.connection
        self.name = name = f"{peers.prefix}/model_{number}"
        self.rank: int = self.connection.rank
        self.splits_batches = split
        self._peers = peers
        self._server = self.connection.devices[0]
        self._store = self.connection.store
        self._fits = 0
        self.steps_done = 0
        self.trains = False
        self.has_left = False
        self.variables: ServerVariables = ServerVariables(
            name, self.connection, lambda function: self.workers.run(function)
        )
        # Raise ``FitEnded`` once the chief has ended the fit.
        self._calls = resources.Functions(self._run_in_step)
        # The last fit that the chief has stopped before the end of its data.
        self._stopped = f"{name}/stopped"
        self._in_place = contextlib.ExitStack()
        # What is asked before a step, for what is there behind it; it opens
        # the gate when nobody reads the weights of the step any more.
        self._asked: remote.Running | None = None
        self._gate = resources.Queue(f"{name}/gate", _HOST, [tf.int64])
        # Written when what the workers share of this model has been freed.
        self._freed = f"{name}/freed"
        self.connection.dropped.drop_with(self, name)

    def _run_in_step(self, function: Any) -> list[Any]:
        return self.workers.run(function, in_step=True)

    def begin(self, epoch: int) -> tuple[int, int | None]:
        """Begin a ``fit``; return its epoch, and the batches done, or None."""
        # They are those of a worker that has died and comes back.
        self._fits += 1
        self.steps_done = 0
        self.has_left = False
        self.trains = True
        self.variables.forget_traces()
        self._calls.forget()
        # One that was late in an earlier fit may still have written.
        news = check.gather(
            self._peers,
            self.connection.dropped.news(),
            f"begins fit {self._fits}",
        )
        self._free(self.connection.dropped.heard(news))
        if self.rank == 0:
            self.variables.put()
            self._stop(0)
            self._initialise()
        elif self.connection.starts > 1:
            self._check_not_freed()
        where = f"takes over the weights of fit {self._fits}"
        epoch = check.gather(self._peers, epoch, where)[0]
        behind = self._behind() if self.workers.begin() else None
        if self.rank > 0:
            self.variables.get()
        else:
            self._in_place.enter_context(self.variables.in_place())
        return epoch, behind

    def _behind(self) -> int:
        """How many batches a worker that comes back has trained on."""
        steps = self.workers.ended_after()
        if steps is None:
            try:
                return self.come_back()
            except FitEnded:
                steps = self.workers.ended_after()
        assert steps is not None
        self.has_left = True
        return steps

    def _free(self, names: Sequence[str]) -> None:
        """Free what no worker needs any more; the chief does it for all."""
        for name in names:
            if self.rank > 0:
                resources.forget(name)
                continue
            self._store.put(f"{name}/freed", True)
            with self.connection.naming_lost_servers():
                resources.free(name)

    def _check_not_freed(self) -> None:
        if self._store.get(self._freed) is not None:
            raise TowerError(
                f"worker {self.rank} of this job has come back, and its script "
                "begins with a model that all workers had deleted: the "
                "parameter servers have freed its weights. Start all tasks of "
                "the job again, from a backup."
            )

    def finalized(self) -> None:
        """Give the servers the final weights, which the chief has here."""
        if self.rank == 0:
            self.variables.put(self.variables.trained)

    def write_through(self, variable: keras.Variable) -> None:
        """Give the servers the value that the chief has assigned."""
        if self._fits:
            self.variables.put([variable])

    def put_others(self) -> None:
        """Have the servers hold what no optimizer trains as the chief does."""
        if self.rank == 0 and self._fits:
            self.variables.put(self.variables.others)

    def end_epoch(self, epoch: int, stops: bool) -> bool:
        """End an epoch, after all callbacks; return whether training stops."""
        if self.rank == 0:
            if stops:
                self._stop(self._fits)
            self.workers.end_epoch(epoch)
        elif self.in_step and not stops:
            self.workers.wait_for_epoch(epoch)
            stops = not self._goes_on(self._store.get(self._stopped))
        return stops

    def _stop(self, fit: int) -> None:
        self._store.put(self._stopped, fit)

    def _goes_on(self, stopped: int | None) -> bool:
        """Whether this fit goes on, given the last one that was stopped."""
        return (stopped or 0) < self._fits

    def start(self) -> None:
        """Get ready for the first step, unless there is none any more."""
        try:
            self._first_step()
        except FitEnded:
            self.has_left = True

    def step(self) -> bool:
        """End a step, and get the new weights; return whether one follows."""
        self.workers.beat()
        self.steps_done += 1
        try:
            return self._finish_step()
        except FitEnded:
            self.has_left = True
            return False

    def ask(self) -> None:
        """Ask for the next step's weights, which are sent as they get ready."""
        if self.asks_ahead and self._asked is None:

            def ahead() -> tuple[tf.Tensor, tf.Tensor]:
                return self._next_step(self.variables.parts, self._gate.get)

            self._asked = remote.Running(self._calls.traced("ahead", ahead))

    def _ask_no_more(self) -> None:
        if self._asked is not None:
            self._asked.cancel()
            self._asked = None
        self._gate.clear()

    def _finish_step(self) -> bool:
        """End a step, as ``step``."""
        if self._asked is None:
            turn, stopped = self._calls("next", self._next_step)
        else:
            asked, self._asked = self._asked, None
            self._gate.put(0)
            turn, stopped = self.workers.wait(asked, in_step=True)
        return int(turn) >= 0 and self._goes_on(value_of(stopped))

    def _next_step(
        self,
        parts: Sequence[Sequence[keras.Variable]] = (),
        gate: Callable[[], list[tf.Tensor]] = list,
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Get the weights when all updates have been made."""
        number = self._due()
        values: list[tf.Tensor] = []
        variables: list[keras.Variable] = []
        for part, mine in enumerate(parts):
            with tf.control_dependencies([self.notes.wait(number, part)]):
                values += self.variables.read(mine)
                variables += mine
        turn = self._turn(number)
        with tf.control_dependencies([turn]):
            stopped = self._store.read(self._stopped)
            if not parts:
                variables = self.variables.trained
                values = self.variables.read(variables)
        # All workers stop after the same step.
        self._have_read([stopped, *values])
        with tf.control_dependencies([turn, *gate()]):
            self.variables.take(variables, values)
        return turn, stopped

    def leave(self, stops: bool = False) -> None:
        """Leave the fit; on the chief, wait for the others and finish it."""
        # Afterwards the chief has the result of all.
        if self.has_left:
            return
        self.has_left = True
        self._ask_no_more()
        if stops and self.rank == 0:
            self._stop(self._fits)
        self._leave()
        self.workers.leave()
        if self.rank == 0:
            self.workers.wait_for_others(self._is_over)
            # For one that is not waited for, and goes on later.
            self._stop(self._fits)
            self._finish()
            self.put_others()
            self._in_place.close()
            self.variables.get()

    def end(self, error: BaseException | None) -> None:
        """End a ``fit``; wait for the others, unless it has failed.

        Afterwards all workers have the same model: that of the chief. A process
        that was broken off may be started again.
        """
        self.connection.finished = error is None
        self.trains = False
        try:
            self._ask_no_more()
            if error is None:
                self.leave()
                if self.rank == 0:
                    self.workers.end(self.steps_done)
                else:
                    self.workers.wait_for_end()
        finally:
            self._in_place.close()
        if error is None:
            self.variables.get()

    # What differs between strategies.

    def check(self, optimizers: Sequence[keras.optimizers.Optimizer]) -> None:
        """Refuse optimizers with which the workers cannot train."""

    def retrace(self) -> None:
        """The model's step is about to be traced anew."""

    def take(self, call: UpdateCall) -> None:
        """Take this worker's sums of gradients, as part of a traced step."""
        raise NotImplementedError

    def in_trace(self) -> contextlib.AbstractContextManager[None]:
        """Trace a step in a block; it ends by telling that it was made."""
        raise NotImplementedError

    def come_back(self) -> int:
        """Find out how many batches this worker had trained on."""
        raise NotImplementedError

    def _first_step(self) -> None:
        """Get ready for the first step, as ``start``."""
        raise NotImplementedError

    def _due(self) -> tf.Tensor:
        """Return the number that notes have when the next weights are ready."""
        raise NotImplementedError

    def _turn(self, number: tf.Tensor) -> tf.Tensor:
        """Wait for all of the next weights; negative at the end."""
        raise NotImplementedError

    def _have_read(self, values: Sequence[tf.Tensor]) -> None:
        """Let others update the weights once these values have been read."""

    def _initialise(self) -> None:
        """Create what the workers of one ``fit`` share; on the chief only."""
        raise NotImplementedError

    def _leave(self) -> None:
        """Let the others go on without this worker."""
        raise NotImplementedError

    def _is_over(self) -> bool:
        """Whether those who have not left are not waited for; on the chief."""
        return False

    def _finish(self) -> None:
        """End the training, when all have left; on the chief only."""
