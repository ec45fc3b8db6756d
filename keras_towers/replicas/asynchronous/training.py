"""Training steps of asynchronous towers.

Keras's own loop draws batches, runs callbacks and records the history; only its
train function is replaced, by one that queues every batch for the next idle
tower and returns before the step is done. Steps are traced one by one in the
thread of ``fit``, because Keras cannot trace in several threads; the towers'
threads call the traced functions and never touch Keras objects.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_towers import compat
from keras_towers.fit.capture.capture import capture
from keras_towers.fit.context import replica_context
from keras_towers.fit.context import tower as tower_lib
from keras_towers.fit.contract import TowerConfig
from keras_towers.fit.step.logs import Logs
from keras_towers.fit.weights import state as state_lib
from keras_towers.fit.weights import variables as variables_lib
from keras_towers.fit.weights.adoption import Adoption
from keras_towers.replicas.asynchronous.pace import Pace
from keras_towers.replicas.asynchronous.staleness import Staleness
from keras_towers.replicas.asynchronous.threads import TowerThreads

# Limits the overhead of merging the metrics of all towers.
SECONDS_BETWEEN_LOGS = 0.1


@dataclasses.dataclass
class Steps:
    """The state of one call of ``fit`` or ``train_on_batch``.

    Attributes:
        logs_of: computes the logs of all towers.
        threads: the towers' threads; None if steps run in the calling thread.
        fits: whether it is a call of ``fit``.
        logs: the latest logs.
        next_logs: when to refresh them, in seconds of ``time.monotonic()``.
        here: number of steps of the epoch run in the calling thread.
    """

    logs_of: Logs
    threads: TowerThreads | None = None
    fits: bool = True
    logs: Any = None
    next_logs: float = 0.0
    here: int = 0


class AsyncTraining:
    """Traces and runs the training steps of a model on asynchronous towers.

    Args:
        config: the towers.
        adoption: the models placed on the towers.
        pace: when towers may go on.
        model: the model.
    """

    def __init__(
        self,
        config: TowerConfig,
        adoption: Adoption,
        pace: Pace,
        model: keras.Model,
    ):
        self._config = config
        self._adoption = adoption
        self.pace = pace
        self._model = model
        self._traced: list[tuple[Any, list[Callable[[Any], Any]]]] = []
        self.forget()

    def forget(self) -> None:
        """Drop all traces, because the model has changed."""
        self._traced.clear()
        self._here: dict[tuple[bool, int], Callable[[Any], Any]] = {}
        self._merge: Callable[[], dict[int, Any]] | None = None
        self.pace.forget()

    def train(self, steps: Steps, iterator: Any, at_last_step: bool) -> Any:
        """Train on the next ``steps_per_execution`` batches.

        Args:
            steps: the state of the running call.
            iterator: yields batches.
            at_last_step: whether the epoch ends with these batches.

        Returns:
            Logs up to ``SECONDS_BETWEEN_LOGS`` old; exact after the last step
            of an epoch.

        Raises:
            StopIteration: there is no batch left, as Keras expects.
            BaseException: any error of an earlier step.
        """
        taken = 0
        batches = itertools.islice(iterator, self._model.steps_per_execution)
        for batch in batches:
            taken += 1
            if steps.threads is None:
                self._run_here(steps, batch)
            else:
                steps.threads.submit(
                    self._steps(steps, iterator.element_spec), batch
                )
        if not taken:
            raise StopIteration
        if steps.threads is not None:
            self._look(steps, steps.threads, at_last_step)
        return steps.logs

    def end(self, steps: Steps, logs: Any) -> tuple[Any, Staleness]:
        """End an epoch's steps.

        Args:
            steps: the state of the call of ``fit``.
            logs: the logs of the last step.

        Returns:
            The logs of the epoch, and the staleness of its steps.
        """
        threads = steps.threads
        if threads is None:
            seen = Staleness({0: steps.here} if steps.here else {})
            steps.here = 0
        else:
            threads.drain()
            seen = threads.take_staleness()
            if threads.latest is not None:
                self._refresh(steps, threads.latest)
            # Metrics are reset for the next epoch; until one of its steps has
            # ended, the logs of this epoch are shown.
            threads.latest = None
        return (logs if steps.logs is None else steps.logs), seen

    def _look(
        self, steps: Steps, threads: TowerThreads, at_last_step: bool
    ) -> None:
        """Refresh the logs if they are due."""
        if at_last_step:
            threads.drain()
            self._refresh(steps, threads.latest)
            return
        if steps.logs is None:
            # Callbacks expect all log names after the first step.
            threads.wait_for_a_step()
        if threads.latest is None:
            return
        due = time.monotonic() > steps.next_logs
        if due or not _is_finite(threads.latest):
            self._refresh(steps, threads.latest)

    def _refresh(self, steps: Steps, latest: Any) -> None:
        """Compute the logs of all towers, given those of one step."""
        steps.logs = latest
        if self._merge is None:
            merge = steps.logs_of.metric_results
            if not self._model.run_eagerly:
                function = tf.function(merge, autograph=False)
                merge = function.get_concrete_function()
            self._merge = merge
        merged = _to_numpy(self._merge())
        steps.logs = tf.nest.pack_sequence_as(
            latest,
            [
                merged.get(index, value)
                for index, value in enumerate(tf.nest.flatten(latest))
            ],
        )
        steps.next_logs = time.monotonic() + SECONDS_BETWEEN_LOGS

    def _steps(self, steps: Steps, spec: Any) -> list[Callable[[Any], Any]]:
        """Return the towers' traced steps for batches of a spec."""
        for known, traced in self._traced:
            if known is spec or known == spec:
                return traced
        self._traced.append((spec, self._trace(steps, spec)))
        return self._traced[-1][1]

    def _trace(self, steps: Steps, spec: Any) -> list[Callable[[Any], Any]]:
        def trace(index: int) -> Callable[[Any], Any]:
            function = tf.function(
                self._one_step(index, steps.logs_of), autograph=False
            )
            with self._alone(steps, index):
                concrete = function.get_concrete_function(spec)
            return lambda batch: _to_numpy(concrete(batch))

        first = trace(0)
        # The first trace of a step may create metrics.
        while self._adoption.bind(self._model):
            first = trace(0)
        others = range(1, self._config.num_towers)
        traced = [first, *(trace(index) for index in others)]
        self.pace.traced()
        return traced

    def _one_step(self, index: int, logs_of: Logs) -> Callable[[Any], Any]:
        model = self._model
        train_step = model._autoconvert_optionals(model.train_step)
        device = self._config.devices[index]

        @tf.autograph.experimental.do_not_convert
        def one_step(batch: Any) -> Any:
            tower = tower_lib.current()
            assert tower is not None and tower.update is not None
            run = tf.distribute.get_strategy().run
            with tf.device(device):
                captured = capture(
                    lambda batch: run(train_step, (batch,)),
                    *(batch, tower, tower.update.apply),
                )
            logs_of.note(captured.output, captured.results)
            return captured.output

        return one_step

    @contextlib.contextmanager
    def _alone(self, steps: Steps, index: int) -> Iterator[tower_lib.Tower]:
        """View the model as tower ``index`` does, on one device."""
        variables = state_lib.collect(self._model).everything()
        tower = tower_lib.Tower(
            index,
            total=self._config.num_towers if steps.fits else 1,
            device=tower_lib.short_name(self._config.devices[index]),
            training=True,
            update=self.pace.taker(steps.fits),
        )
        with (
            compat.single_device_mode(),
            variables_lib.viewed(variables, lambda v: v.values[index]),
            replica_context.activate(tower),
        ):
            yield tower

    def _run_here(self, steps: Steps, batch: Any) -> None:
        """Run a step in this thread, for eager code and ``train_on_batch``.

        Eager steps cannot run in several threads, so their towers take turns.
        """
        index = steps.here % self._config.num_towers if steps.fits else 0
        key = steps.fits, index
        if key not in self._here:
            function = self._one_step(index, steps.logs_of)
            if not self._model.run_eagerly:
                function = tf.function(
                    function, autograph=False, reduce_retracing=True
                )
            self._here[key] = function
        with self._alone(steps, index):
            latest = self._here[key](batch)
        self._adoption.bind(self._model)
        steps.here += 1
        self._refresh(steps, _to_numpy(latest))


def _to_numpy(logs: Any) -> Any:
    """Wait for the results of a step and copy them to the host."""
    return tf.nest.map_structure(
        lambda leaf: leaf.numpy() if hasattr(leaf, "numpy") else leaf, logs
    )


def _is_finite(logs: Any) -> bool:
    numbers: Sequence[Any] = [
        leaf
        for leaf in tf.nest.flatten(logs)
        if np.issubdtype(np.asarray(leaf).dtype, np.floating)
    ]
    return all(np.all(np.isfinite(number)) for number in numbers)
