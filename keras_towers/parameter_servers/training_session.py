"""A session: the training of one model by all workers of a job.

Each worker computes gradients with a local copy of the weights, and pushes them
to the servers. The subclasses of ``Session`` update the weights there:
``AsyncSession`` (``async_updates.py``) applies each worker's gradients, and
``AveragedSession`` (``averaged_updates.py``) the average of all workers'.
``worker_fit.py`` calls a session during a ``fit``, in the order of its methods.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import keras
import numpy as np
import tensorflow as tf

from keras_towers.fit.components import ApplyCall
from keras_towers.fit.data.same_data import is_far
from keras_towers.fit.ranks.compared_step import ComparedStep
from keras_towers.fit.weights.copies import copy_on_tower
from keras_towers.foundation import compat
from keras_towers.foundation.errors import TowerError
from keras_towers.foundation.object_types import ConcreteFunction, Structure
from keras_towers.jobs.rendezvous import rank_checks
from keras_towers.parameter_servers.remote_runtime import RunningFunction
from keras_towers.parameter_servers.server_connection import (
    Connection,
    ServerPeers,
)
from keras_towers.parameter_servers.server_variables import ServerVariables
from keras_towers.parameter_servers.workers import Workers
from keras_towers.replicas import named_resources
from keras_towers.replicas.named_resources import TracedFunctions


class Session:
    """The training of one model by all workers of a job.

    Attributes:
        number: the rank of this worker, for what its steps compute.
        variables: their copies on the servers.
        workers: the workers of the ``fit`` that runs, or ran last.
        calls: runs operations; ``FitEnded`` once the chief has ended ``fit``.
        splits_batches: whether the workers share each batch.
        fits: the number of the ``fit`` that runs, or ran last.
        trains: whether a ``fit`` runs.
        needs_all: whether no update is made without a gradient of each worker.
        epochs_together: whether all workers end each epoch together.
        spare: how many lost workers a step can do without.
    """

    workers: Workers
    needs_all: bool = False
    epochs_together: bool = False
    spare: int = 0

    def __init__(self, peers: ServerPeers, number: int, splits_batches: bool):
        self.peers = peers
        self.connection: Connection = peers.connection
        self.rank: int = peers.rank
        # As a constant, it would make the steps of workers differ.
        with tf.init_scope(), tf.device(compat.HOST):
            rank = tf.constant(self.rank)
            self.number = tf.Variable(rank, trainable=False)
        self.name: str = f"{peers.prefix}/model_{number}"
        self.server: str = self.connection.devices[0]
        self.splits_batches = splits_batches
        self.variables: ServerVariables = ServerVariables(
            self.name,
            self.connection,
            lambda function: self.workers.wait_for(RunningFunction(function)),
        )
        self.calls: TracedFunctions = TracedFunctions(self._run_in_step)
        self.fits = 0
        self.trains = False
        # The key of the number of the last fit that the chief has stopped.
        self._stopped = f"{self.name}/stopped"
        self._freed = f"{self.name}/freed"
        # The random states after an even number of steps, and after an odd one.
        self._seeds = [f"{self.name}/seeds_{self.rank}_{i}" for i in range(2)]
        self.connection.dropped.drop_with(self, self.name)

    def _run_in_step(self, function: ConcreteFunction) -> list[tf.Tensor]:
        """Run a concrete function, unless the chief ends the ``fit``."""
        return self.workers.wait_for(RunningFunction(function), in_step=True)

    def stop(self, fit: int) -> None:
        """Stop all fits up to this number; on the chief only."""
        self.connection.store.put(self._stopped, fit)

    def last_stopped(self) -> int:
        """Return the number of the last ``fit`` that the chief has stopped."""
        return int(self.connection.store.get(self._stopped) or 0)

    def restore_seeds(self, steps: int) -> None:
        """Take over the random states of this worker after so many steps."""
        states = np.reshape(
            self.connection.store.get(self._seeds[steps % 2]), [-1, 2]
        )
        # Keras may not have made the generator of all layers again yet.
        for seed, state in zip(self.variables.seeds, states, strict=False):
            seed.assign(state)

    def upload(self, variables: Sequence[keras.Variable]) -> None:
        """Upload variables; does nothing on other workers than the chief."""
        if self.rank == 0 and self.fits:
            self.variables.upload(variables)

    # In the order of a ``fit``:

    def check_optimizers(
        self, optimizers: Sequence[keras.optimizers.Optimizer]
    ) -> None:
        """Refuse optimizers that the session does not support."""

    def begin_trace(self) -> None:
        """Prepare for a new trace of the step."""

    def compare(self, step: ComparedStep) -> None:
        """Compare a traced step with those of workers that have traced theirs.

        No worker waits for another, and the last one compares with all.

        Raises:
            TowerError: another worker has another step.
        """
        text = step.text
        store, key = self.connection.store, f"{self.name}/traced"
        values, slack = text.reals_and_slack()
        own = *step.numbers, [*text.checksums], values.tolist()
        with tf.init_scope():
            store.put(f"{key}-{self.rank}", own)
            others = store.by_rank(key, range(self.peers.size))
            for rank, (*numbers, checksums, reals) in others.items():
                if numbers == [*step.numbers] or (
                    numbers[0] == step.numbers[0]
                    and not is_far(
                        *map(tf.convert_to_tensor, (values, reals, slack))
                    )
                ):
                    continue
                pairs = itertools.zip_longest(text.checksums, checksums)
                index = next(k for k, (a, b) in enumerate(pairs) if a != b)
                raise TowerError(
                    f"worker {self.rank} has another step than worker {rank}. "
                    f"{rank_checks.OPERATIONS}: {text.line(index) or 'none'}. "
                    f"{rank_checks.SAME_STEP}"
                )

    def begin_fit(self) -> None:
        """Begin a ``fit``: the chief uploads all variables."""
        # Local variables may have been replaced.
        self.variables.forget_traced()
        self.calls.forget()
        self._free_dropped()
        if self.rank == 0:
            self.variables.upload()
            self.stop(0)
            self._reset()
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

    def _reset(self) -> None:
        """Reset the state that workers share in a ``fit``; on the chief."""
        raise NotImplementedError

    def come_back(self) -> int:
        """Go on after this worker was restarted; ``read_weights`` follows.

        Returns:
            The number of batches that it had trained on.
        """
        raise NotImplementedError

    def prefetch_weights(self) -> None:
        """Begin to read the next weights while a step runs."""

    def read_weights(self) -> tuple[bool, int]:
        """Wait for the weights of the next step, and make them the local ones.

        Returns:
            Whether there are any, and ``last_stopped``.
        """
        raise NotImplementedError

    def trace_step(self, step: Callable[[], Structure]) -> Structure:
        """Trace a step, and the operations that count it."""
        result = step()
        with tf.control_dependencies([self._save_seeds()]):
            self._end_step()
        self.variables.refuse_writes(compat.get_default_graph())
        return result

    def push(self, call: ApplyCall) -> None:
        """Push the sums of this worker's gradients, inside a traced step."""
        raise NotImplementedError

    def _save_seeds(self) -> tf.Operation:
        """Save the random states that a step leaves, inside this step.

        If the worker dies before the step is counted, it needs the states that
        the step before had left: they are saved at the other key.
        """
        states = [
            copy_on_tower(seed._value).read_value()
            for seed in self.variables.seeds
        ]
        steps = self._steps_before()
        chosen = tf.math.floormod(steps + 1, tf.constant(2, steps.dtype))
        return self.connection.store.write(
            self._seeds, chosen, tf.reshape(states, [-1])
        )

    def _steps_before(self) -> tf.Tensor:
        """Return the number of steps before this one, inside a traced step."""
        raise NotImplementedError

    def _end_step(self) -> None:
        """Count a step, after everything else in it."""
        raise NotImplementedError

    def after_step(self) -> None:
        """Handle the end of a step of this worker."""

    def leave(self, stops: bool = False) -> None:
        """Let the other workers continue without this one, or stop them."""

    def is_over(self) -> bool:
        """Whether no update needs more gradients; on the chief."""
        return False

    def finish(self) -> None:
        """Make the last update, when all have left; on the chief only."""

    def clean_up(self) -> None:
        """Clean up after a ``fit`` that has ended or failed."""
