"""How the gradients of several workers become their next weights."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_towers.fit.contract import UpdateCall
from keras_towers.parameter_servers.connection import ServerPeers
from keras_towers.replicas.resources import Functions
from keras_towers.replicas.servers.barrier import Notes
from keras_towers.replicas.servers.server_variables import ServerVariables
from keras_towers.replicas.servers.workers import Workers


class ServedModel:
    """What the parts of a session share: the model's place among the workers.

    Attributes:
        variables: its copies on the servers.
        workers: those of the ``fit`` that runs.
        calls: operations that end by ``FitEnded`` once the chief has ended
            the ``fit``.
        splits_batches: whether the workers share each batch.
    """

    workers: Workers

    def __init__(self, peers: ServerPeers, number: int, splits_batches: bool):
        self.peers = peers
        self.connection = peers.connection
        self.rank: int = peers.rank
        self.name = f"{peers.prefix}/model_{number}"
        self.server: str = self.connection.devices[0]
        self.splits_batches = splits_batches
        self.variables: ServerVariables = ServerVariables(
            self.name,
            self.connection,
            lambda function: self.workers.run(function),
        )
        self.calls: Functions = Functions(self.run_in_step)
        self.connection.dropped.drop_with(self, self.name)

    def run_in_step(self, function: Any) -> list[Any]:
        """Run a concrete function, unless the chief ends the ``fit``."""
        return self.workers.run(function, in_step=True)


class WorkerUpdates:
    """How gradients become weights; methods in the order of a ``fit``.

    Attributes:
        notes: tell this worker which weights are ready.
        reads_parts: whether a part of the weights can be read while another
            one is still updated.
        epochs_together: whether all workers end each epoch together.
        spare: how many lost workers a step can do without.
    """

    notes: Notes
    reads_parts: bool = True
    epochs_together: bool
    spare: int

    def check(self, optimizers: Sequence[keras.optimizers.Optimizer]) -> None:
        """Refuse optimizers with which the workers cannot train."""

    def begin(self, fit: int) -> None:
        """Create what the workers of a ``fit`` share; on the chief only."""
        raise NotImplementedError

    def come_back(self) -> int | None:
        """How many batches a worker that died has trained on.

        None: the others have ended the ``fit``, or do so without it.
        """
        raise NotImplementedError

    def enter(self) -> bool:
        """Begin the first step; return whether to wait for its weights."""
        raise NotImplementedError

    def retrace(self) -> None:
        """The model's step is about to be traced anew."""

    def trace_step(self) -> contextlib.AbstractContextManager[None]:
        """Trace a step in a block; it ends by telling that it was made."""
        raise NotImplementedError

    def take(self, call: UpdateCall) -> None:
        """Take this worker's sums of gradients, as part of a traced step."""
        raise NotImplementedError

    def after_step(self) -> None:
        """The worker has made a step."""

    def due(self) -> tf.Tensor:
        """The number that notes have when the next weights are ready."""
        raise NotImplementedError

    def wait(self, number: tf.Tensor) -> tf.Tensor:
        """Wait for all of the next weights; negative if there are none."""
        raise NotImplementedError

    def have_read(self, values: Sequence[tf.Tensor]) -> None:
        """Let others update the weights once these values have been read."""

    def leave(self) -> None:
        """Let the others go on without this worker."""
        raise NotImplementedError

    def is_over(self) -> bool:
        """Whether nobody waits for those who have not left; on the chief."""
        return False

    def finish(self) -> None:
        """End the training, when all have left; on the chief only."""

    def end(self) -> None:
        """End what still runs: the ``fit`` has ended, or failed."""
