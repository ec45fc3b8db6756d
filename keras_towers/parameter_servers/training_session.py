"""The training of one model by all workers of a job.

Every worker computes with a local copy of the weights:

``ServerVariables``  the copies of the model's variables on the servers
``WorkerUpdates``    turns gradients into the next weights: their average is
                     applied once (``AveragedUpdates``), or every worker applies
                     its gradients (``AsyncUpdates``)
``NextWeights``      reads the next weights when they are ready

``worker_fit.py`` describes what a worker does during a ``fit``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
import tensorflow as tf

from keras_towers.errors import TowerError
from keras_towers.fit.weights.tower_variables import copy_on_tower
from keras_towers.parameter_servers.connection import Connection, ServerPeers
from keras_towers.parameter_servers.key_value_store import value_of
from keras_towers.parameter_servers.remote_runtime import RunningFunction
from keras_towers.parameter_servers.server_variables import ServerVariables
from keras_towers.parameter_servers.workers import Workers
from keras_towers.replicas import named_resources
from keras_towers.replicas.named_resources import TracedCalls
from keras_towers.replicas.replica_group import END

if TYPE_CHECKING:
    from keras_towers.parameter_servers.worker_updates import WorkerUpdates


_HOST = "/device:CPU:0"


class Session:
    """The training of one model by all workers of a job.

    Attributes:
        variables: their copies on the servers.
        updates: how gradients become weights.
        next_weights: reads them.
        workers: the workers of the ``fit`` that runs, or ran last.
        calls: runs operations; ``FitEnded`` once the chief has ended ``fit``.
        splits_batches: whether the workers share each batch.
        fits: the number of the ``fit`` that runs, or ran last.
        trains: whether a ``fit`` runs.
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
            lambda function: self.workers.wait_for(RunningFunction(function)),
        )
        self.calls: TracedCalls = TracedCalls(self.run_in_step)
        self.updates: WorkerUpdates = make_updates(self)
        self.next_weights: NextWeights = NextWeights(self)
        self.fits = 0
        self.trains = False
        # The key of the number of the last fit that the chief has stopped.
        self._stopped = f"{self.name}/stopped"
        self._freed = f"{self.name}/freed"
        # The random states after an even number of steps, and after an odd one.
        self._seeds = [f"{self.name}/seeds_{self.rank}_{i}" for i in range(2)]
        self.connection.dropped.drop_with(self, self.name)

    def run_in_step(self, function: Any) -> list[Any]:
        """Run a concrete function, unless the chief ends the ``fit``."""
        return self.workers.wait_for(RunningFunction(function), in_step=True)

    def stop(self, fit: int) -> None:
        """Stop all fits up to this number; on the chief only."""
        self.connection.store.put(self._stopped, fit)

    def stopped(self) -> bool:
        """Whether the chief has stopped the ``fit`` that runs."""
        return (self.connection.store.get(self._stopped) or 0) >= self.fits

    def read_stopped(self) -> tf.Tensor:
        """Read, inside a function, the number of the last stopped ``fit``."""
        return self.connection.store.read(self._stopped)

    def save_seeds(self, steps: tf.Tensor) -> tf.Operation:
        """Save the random states that a step leaves, inside this step.

        If the worker dies before the step is counted, it needs the states that
        the step before had left: they are saved at the other key.

        Args:
            steps: the number of this worker's steps before it.
        """
        states = [
            copy_on_tower(seed._value).read_value()
            for seed in self.variables.seeds
        ]
        chosen = tf.math.floormod(steps + 1, tf.constant(2, steps.dtype))
        return self.connection.store.write(
            self._seeds, chosen, tf.reshape(states, [-1])
        )

    def restore_seeds(self, steps: int) -> None:
        """Take over the random states of this worker after so many steps."""
        states = np.reshape(
            self.connection.store.get(self._seeds[steps % 2]), [-1, 2]
        )
        # Keras may not have made the generator of all layers again yet.
        for seed, state in zip(self.variables.seeds, states, strict=False):
            seed.assign(state)

    def begin_fit(self) -> None:
        """Begin a ``fit``: the chief uploads all variables."""
        # Local variables may have been replaced.
        self.variables.forget_traced()
        self.calls.forget()
        self._free_dropped()
        if self.rank == 0:
            self.variables.upload()
            self.stop(0)
            self.updates.begin_fit()
        elif (
            self.connection.starts > 1
            and self.connection.store.get(self._freed) is not None
        ):
            raise TowerError(
                f"worker {self.rank} of this job was restarted, and its script "
                "begins with a model that the chief had deleted: the parameter "
                "servers have freed its weights. Start all tasks of the job "
                "again, from a backup."
            )

    def _free_dropped(self) -> None:
        """Free the resources of models that the chief has deleted."""
        for name in self.connection.dropped.take_names():
            if self.rank > 0:
                named_resources.forget(name)
                continue
            self.connection.store.put(f"{name}/freed", True)
            with self.connection.naming_lost_servers():
                named_resources.free(name)

    def upload(self, variables: Sequence[keras.Variable]) -> None:
        """Upload variables; does nothing on other workers than the chief."""
        if self.rank == 0 and self.fits:
            self.variables.upload(variables)


class NextWeights:
    """Reads the weights of the next step once they are ready."""

    def __init__(self, session: Session):
        self._session = session
        # Reads the next weights while a step runs. Opening the gate makes it
        # write them, when the step no longer reads the local variables.
        self._running: RunningFunction | None = None
        self._gate = named_resources.Queue(
            f"{session.name}/gate", _HOST, [tf.int64]
        )

    def prefetch(self) -> None:
        """Begin to read the next weights while a step runs."""
        session = self._session
        if session.updates.reads_parts and self._running is None:
            parts = session.variables.parts
            ahead = session.calls.traced(
                "ahead", lambda: self._read(parts, self._gate.get)
            )
            self._running = RunningFunction(ahead)

    def cancel(self) -> None:
        """Cancel a ``prefetch``."""
        if self._running is not None:
            self._running.cancel()
            self._running = None
        self._gate.clear()

    def read(self) -> tuple[bool, int]:
        """Wait for the weights, and write them into the local variables.

        Returns:
            Whether there are any, and the number of the last ``fit`` that the
            chief has stopped.
        """
        if self._running is None:
            turn, stopped = self._session.calls("next", self._read)
        else:
            running, self._running = self._running, None
            self._gate.put(0)
            turn, stopped = self._session.workers.wait_for(
                running, in_step=True
            )
        return int(turn) < END, value_of(stopped) or 0

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
        turn = updates.wait_for_weights()
        with tf.control_dependencies([turn]):
            # Read with the weights, so that all workers stop after one step.
            stopped = self._session.read_stopped()
            if not parts:
                trained = variables.trained
                values = variables.read(trained)
        with tf.control_dependencies([turn, *gate()]):
            variables.assign_local(trained, values)
        return turn, stopped
