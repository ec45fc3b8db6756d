"""A model that several workers train through parameter servers.

Every worker computes with weights of its own, which it reads from the servers.
A session is composed of parts that do one thing each:

``Workers``          who trains, and who has left, has failed or is lost
``ServerVariables``  the copies of the model's variables on the servers
``WorkerUpdates``    how the gradients of all become the next weights: each
                     worker updates the servers' weights by itself
                     (``DirectUpdates``), or the chief has averages applied
                     (``AveragedUpdates``)
``NextWeights``      reads them when they are ready

One ``fit`` is, for each worker:

1. ``begin``. The chief gives the servers all variables; the others take these,
   and the chief's epoch. A worker that died and comes back learns how many
   batches it had trained on, and passes over them.
2. ``start``. It enters the first step.
3. Steps. One ends with this worker's gradients at the servers. ``step`` waits
   until the updates that need them have been made, and reads the weights. If
   the chief has stopped the ``fit`` meanwhile, all stop after the same step.
4. ``end_epoch``. Where all end it together, the others wait until the chief's
   callbacks have run, and stop if these stop the training.
5. ``leave``. The others need not wait for this worker any more. The chief waits
   for theirs, ends the updates, and has the result.
6. ``end``. The chief says that it is final; the others wait for that, and read
   all variables. So all have the same model.

A ``fit`` that fails says so, and leaves nothing; the others end as ``Workers``
says.
"""

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
from keras_towers.parameter_servers.server_variables import ServerVariables
from keras_towers.parameter_servers.workers import FitEnded, Workers
from keras_towers.rendezvous import check
from keras_towers.replicas import resources
from keras_towers.replicas.resources import Functions

_HOST = "/device:CPU:0"

# The session whose fit runs in this thread.
current_session: Slot[Session] = Slot()


class WorkerUpdates:
    """How gradients become weights; methods in the order of a ``fit``.

    Attributes:
        reads_parts: whether a part of the weights can be read while another
            one is still updated.
        epochs_together: whether all workers end each epoch together.
        spare: how many lost workers a step can do without.
    """

    reads_parts: bool = True
    epochs_together: bool
    spare: int

    def check(self, optimizers: Sequence[keras.optimizers.Optimizer]) -> None:
        """Refuse optimizers with which workers cannot train."""

    def begin_trace(self) -> None:
        """Prepare for a new trace of the step."""

    def begin(self, fit: int) -> None:
        """Create the shared state of a ``fit``; on the chief only."""
        raise NotImplementedError

    def come_back(self) -> int:
        """How many batches this worker trained on before it died."""
        raise NotImplementedError

    def enter(self, is_back: bool) -> bool:
        """Begin the first step; return whether to wait for its weights."""
        raise NotImplementedError

    def trace_step(self) -> contextlib.AbstractContextManager[None]:
        """Trace a step in this block, and its counting."""
        raise NotImplementedError

    def take(self, call: UpdateCall) -> None:
        """Receive this worker's gradient sums, inside a traced step."""
        raise NotImplementedError

    def after_step(self) -> None:
        """Called after each step of this worker."""

    def wait_for_part(self, part: int) -> tf.Tensor:
        """Wait for a part of the next weights."""
        raise NotImplementedError

    def wait(self) -> tf.Tensor:
        """Wait for all of the next weights; negative if there are none."""
        raise NotImplementedError

    def have_read(self, values: Sequence[tf.Tensor]) -> None:
        """Allow others to update the weights once these values are read."""

    def leave(self) -> None:
        """Let the others continue without this worker."""
        raise NotImplementedError

    def is_over(self) -> bool:
        """Whether no remaining worker is waited for; on the chief."""
        return False

    def finish(self) -> None:
        """End the training, when all have left; on the chief only."""

    def end(self) -> None:
        """Clean up after a ``fit`` that has ended or failed."""


class NextWeights:
    """Reads the weights of the next step once they are ready."""

    def __init__(self, session: Session):
        self._session = session
        # What waits while a step runs. It opens the gate when nobody reads the
        # weights of the step any more.
        self._running: remote.Running | None = None
        self._gate = resources.Queue(f"{session.name}/gate", _HOST, [tf.int64])

    def ask(self) -> None:
        """Request parts of the weights during a step, before ``read``."""
        session = self._session
        if session.updates.reads_parts and self._running is None:
            parts = session.variables.parts
            ahead = session.calls.traced(
                "ahead", lambda: self._read(parts, self._gate.get)
            )
            self._running = remote.Running(ahead)

    def cancel(self) -> None:
        """Cancel the requests."""
        if self._running is not None:
            self._running.cancel()
            self._running = None
        self._gate.clear()

    def read(self) -> tuple[bool, int]:
        """Wait for the weights, and write them into the local variables.

        Returns:
            Whether there are any, and the last ``fit`` that has been stopped.
        """
        if self._running is None:
            turn, stopped = self._session.calls("next", self._read)
        else:
            running, self._running = self._running, None
            self._gate.put(0)
            turn, stopped = self._session.workers.wait(running, in_step=True)
        return int(turn) >= 0, value_of(stopped) or 0

    def _read(
        self,
        parts: Sequence[Sequence[keras.Variable]] = (),
        gate: Callable[[], list[tf.Tensor]] = list,
    ) -> tuple[tf.Tensor, tf.Tensor]:
        updates, variables = self._session.updates, self._session.variables
        values: list[tf.Tensor] = []
        trained: list[keras.Variable] = []
        for index, part in enumerate(parts):
            with tf.control_dependencies([updates.wait_for_part(index)]):
                values += variables.read(part)
                trained += part
        turn = updates.wait()
        with tf.control_dependencies([turn]):
            # All workers stop after the same step.
            stopped = self._session.read_stopped()
            if not parts:
                trained = variables.trained
                values = variables.read(trained)
        updates.have_read([stopped, *values])
        with tf.control_dependencies([turn, *gate()]):
            variables.write_here(trained, values)
        return turn, stopped


class Session:
    """The training of one model by all workers of a job.

    Attributes:
        variables: their copies on the servers.
        updates: how gradients become weights.
        workers: those of the ``fit`` that runs.
        calls: operations that end by ``FitEnded`` once the chief has ended
            the ``fit``.
        splits_batches: whether the workers share each batch.
        steps_done: how many steps this worker has made in the ``fit``.
        trains: whether a ``fit`` runs.
        has_left: whether this worker takes part in no more steps of it.
    """

    workers: Workers

    def __init__(
        self,
        peers: ServerPeers,
        number: int,
        splits_batches: bool,
        make_updates: Callable[[Session], WorkerUpdates],
    ):
        self.peers = peers
        self.connection: Connection = peers.connection
        self.rank: int = peers.rank
        self.name: str = f"{peers.prefix}/model_{number}"
        self.server: str = self.connection.devices[0]
        self.splits_batches = splits_batches
        self.variables: ServerVariables = ServerVariables(
            self.name,
            self.connection,
            lambda function: self.workers.run(function),
        )
        self.calls: Functions = Functions(self.run_in_step)
        self.updates: WorkerUpdates = make_updates(self)
        self.steps_done = 0
        self.trains = False
        self.has_left = False
        self._fits = 0
        self._is_back = False
        # With the number of the last fit that the chief has stopped.
        self._stopped = f"{self.name}/stopped"
        self._next_weights = NextWeights(self)
        self._is_chief = self.rank == 0
        # On the chief the optimizers' variables are the servers' for a fit.
        self._in_place = contextlib.ExitStack()
        self.connection.dropped.drop_with(self, self.name)

    def run_in_step(self, function: Any) -> list[Any]:
        """Run a concrete function, unless the chief ends the ``fit``."""
        return self.workers.run(function, in_step=True)

    def _stop(self, fit: int) -> None:
        """Stop a ``fit``, and all before it; on the chief only."""
        self.connection.store.put(self._stopped, fit)

    def read_stopped(self) -> tf.Tensor:
        """Read, inside a function, which ``fit`` was stopped last."""
        return self.connection.store.read(self._stopped)

    def begin(self, epoch: int) -> tuple[int, int | None]:
        """Begin a ``fit``; return its epoch, and the batches done, or None."""
        self._fits += 1
        self.steps_done = 0
        self.has_left = False
        self.trains = True
        # They are of local variables, which may have been replaced.
        self.variables.forget_traces()
        self.calls.forget()
        # One that was late in an earlier fit may still have written.
        check.gather(self.peers, None, f"begins fit {self._fits}")
        self._free_dropped()
        if self._is_chief:
            self.variables.put()
            self._stop(0)
            self.updates.begin(self._fits)
        elif self.connection.starts > 1:
            self._check_not_freed()
        where = f"takes over the weights of fit {self._fits}"
        epoch = check.gather(self.peers, epoch, where)[0]
        self._is_back = self.workers.begin()
        behind = self._batches_before() if self._is_back else None
        if self._is_chief:
            self._in_place.enter_context(self.variables.in_place())
        else:
            self.variables.get()
        return epoch, behind

    def _free_dropped(self) -> None:
        """Free what the chief no longer has: nobody trains it without."""
        for name in self.connection.dropped.take():
            if not self._is_chief:
                resources.forget(name)
                continue
            self.connection.store.put(f"{name}/freed", True)
            with self.connection.naming_lost_servers():
                resources.free(name)

    def _check_not_freed(self) -> None:
        if self.connection.store.get(f"{self.name}/freed") is not None:
            raise TowerError(
                f"worker {self.rank} of this job was restarted, and its script "
                "begins with a model that the chief had deleted: the parameter "
                "servers have freed its weights. Start all tasks of the job "
                "again, from a backup."
            )

    def _batches_before(self) -> int:
        """How many batches a returning worker has trained on."""
        workers = self.workers
        if workers.ended_after() is None:
            with contextlib.suppress(FitEnded):
                if not workers.has_left():
                    return self.updates.come_back()
                # It may have died before it could say so.
                self.updates.leave()
                workers.wait_for_end()
        self.has_left = True
        steps = workers.ended_after()
        assert steps is not None
        return steps

    def start(self) -> None:
        """Enter the first step, if there is one left."""
        try:
            if self.updates.enter(self._is_back):
                there_are, _ = self._next_weights.read()
                self.has_left = not there_are
        except FitEnded:
            self.has_left = True

    def ask(self) -> None:
        """Request the next step's weights, sent as they become ready."""
        self._next_weights.ask()

    def step(self) -> bool:
        """End a step, and read the new weights; return whether one follows."""
        self.workers.beat()
        self.steps_done += 1
        self.updates.after_step()
        try:
            there_are, stopped = self._next_weights.read()
        except FitEnded:
            self.has_left = True
            return False
        if not there_are:
            self.workers.check_failed()
        return there_are and stopped < self._fits

    def end_epoch(self, epoch: int, stops: bool) -> bool:
        """End an epoch, after all callbacks; return whether training stops."""
        workers = self.workers
        if self._is_chief:
            if stops:
                self._stop(self._fits)
            workers.end_epoch(epoch)
        elif self.updates.epochs_together and not stops:
            workers.wait_for_epoch(epoch)
            last = self.connection.store.get(self._stopped) or 0
            stops = last >= self._fits
        return stops

    def leave(self, stops: bool = False) -> None:
        """Leave the ``fit``; on the chief, wait for the others and finish."""
        # Afterwards the chief has the result of all.
        if self.has_left:
            return
        self.has_left = True
        workers = self.workers
        self._next_weights.cancel()
        if stops and self._is_chief:
            self._stop(self._fits)
        workers.leave()
        with contextlib.suppress(FitEnded):
            self.updates.leave()
        if self._is_chief:
            workers.wait_for_others(self.updates.is_over)
            # For one that is not waited for, and goes on later.
            self._stop(self._fits)
            self.updates.finish()
            self.put(self.variables.others)
            self._in_place.close()
            self.variables.get()

    def end(self, error: BaseException | None) -> None:
        """End a ``fit``; wait for the others, unless it has failed.

        A process that was broken off may be started again.
        """
        self.connection.finished = error is None
        self.trains = False
        try:
            self._next_weights.cancel()
            if error is None:
                self.leave()
                if self._is_chief:
                    self.workers.end(self.steps_done)
                else:
                    self.workers.wait_for_end()
        finally:
            self._in_place.close()
            self.updates.end()
        if error is None:
            self.variables.get()

    def put(self, variables: Sequence[keras.Variable]) -> None:
        """Write the chief's values of variables to the servers."""
        if self._is_chief and self._fits:
            self.variables.put(variables)
