"""Training steps of towers that wait for nobody.

Keras's loop draws batches, calls callbacks and keeps the history as always;
only its train function is ours. That hands every batch to the next free tower
and returns before the step is done. Steps are traced here, in the thread of
``fit`` and one after the other, because Keras cannot trace in several threads;
the towers' threads call what was traced and never touch a Keras object.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_towers import compat
from keras_towers.fit.asynchronous import update as update_lib
from keras_towers.fit.asynchronous.staleness import Staleness
from keras_towers.fit.asynchronous.threads import TowerThreads
from keras_towers.fit.context import patches
from keras_towers.fit.context import tower as tower_lib
from keras_towers.fit.contract import TowerConfig
from keras_towers.fit.step.logs import Logs
from keras_towers.fit.weights import state as state_lib
from keras_towers.fit.weights import variables as variables_lib
from keras_towers.fit.weights.adoption import Adoption

# Merging the metrics of all towers costs about as much as a small step.
SECONDS_BETWEEN_LOGS = 0.1


@dataclasses.dataclass
class Steps:
    """What one call of ``fit`` or ``train_on_batch`` has under way.

    Attributes:
        logs_of: makes the logs of all towers.
        threads: the towers'; None where steps run in this one.
        fits: whether it is a call of ``fit``.
        logs: those shown last.
        next_logs: when they are to be renewed, by ``time.monotonic()``.
        here: how many steps of the epoch ran in this thread.
    """

    logs_of: Logs
    threads: TowerThreads | None = None
    fits: bool = True
    logs: Any = None
    next_logs: float = 0.0
    here: int = 0


class AsyncTraining:
    """The steps of a model on asynchronous towers, as they were traced.

    Args:
        config: the towers.
        adoption: the models that live on them.
        update: what becomes of the towers' gradients.
        model: the model.
    """

    def __init__(
        self,
        config: TowerConfig,
        adoption: Adoption,
        update: update_lib.UpdateAlone,
        model: keras.Model,
    ):
        self._config = config
        self._adoption = adoption
        self._update = update
        self._model = model
        self._traced: list[tuple[Any, list[Callable[[Any], Any]]]] = []
        self.forget()

    def forget(self) -> None:
        """Trace anew: the model has changed."""
        self._traced.clear()
        self._here: dict[tuple[bool, int], Callable[[Any], Any]] = {}
        self._merge: Callable[[], dict[str, Any]] | None = None

    def train(self, steps: Steps, iterator: Any, at_last_step: bool) -> Any:
        """Train on the next ``steps_per_execution`` batches.

        Args:
            steps: those of the call that is running.
            iterator: gives batches.
            at_last_step: whether the epoch ends with these batches.

        Returns:
            Logs that may be a tenth of a second old; those of an epoch's last
            step are exact.

        Raises:
            StopIteration: there is no batch left, as Keras expects it.
            BaseException: what a step has raised on its tower.
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
            steps: those of the call of ``fit``.
            logs: those of its last step.

        Returns:
            The logs of the epoch, and how much the steps have missed.
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
            # In the next epoch metrics begin anew; until one of its steps has
            # ended, these logs are all that there is to show.
            threads.latest = None
        return (logs if steps.logs is None else steps.logs), seen

    def _look(
        self, steps: Steps, threads: TowerThreads, at_last_step: bool
    ) -> None:
        """Renew the logs, now and then."""
        if at_last_step:
            threads.drain()
            self._refresh(steps, threads.latest)
            return
        if steps.logs is None:
            # Once: callbacks expect the names of all logs in the first step.
            threads.wait_for_a_step()
        if threads.latest is None:
            return
        due = time.monotonic() > steps.next_logs
        if due or not _is_finite(threads.latest):
            self._refresh(steps, threads.latest)

    def _refresh(self, steps: Steps, latest: Any) -> None:
        """Make logs of all towers from those that one step has returned."""
        steps.logs = latest
        if not isinstance(latest, Mapping):
            return
        if self._merge is None:
            self._merge = functools.partial(
                steps.logs_of.metric_results, tuple(latest)
            )
            if not self._model.run_eagerly:
                function = tf.function(self._merge, autograph=False)
                self._merge = function.get_concrete_function()
        merged = _to_numpy(self._merge())
        steps.logs = {
            name: merged.get(name, value) for name, value in latest.items()
        }
        steps.next_logs = time.monotonic() + SECONDS_BETWEEN_LOGS

    def _steps(self, steps: Steps, spec: Any) -> list[Callable[[Any], Any]]:
        """The towers' steps for such batches."""
        for known, traced in self._traced:
            if known is spec or known == spec:
                return traced
        self._traced.append((spec, self._trace(steps, spec)))
        return self._traced[-1][1]

    def _trace(self, steps: Steps, spec: Any) -> list[Callable[[Any], Any]]:
        def trace(index: int) -> Callable[[Any], Any]:
            function = tf.function(self._one_step(index), autograph=False)
            with self._alone(steps, index):
                concrete = function.get_concrete_function(spec)
            return lambda batch: _to_numpy(concrete(batch))

        first = trace(0)
        # A step may make metrics of its own when it is first traced.
        while self._adoption.bind(self._model):
            first = trace(0)
        others = range(1, self._config.num_towers)
        return [first, *(trace(index) for index in others)]

    def _one_step(self, index: int) -> Callable[[Any], Any]:
        model = self._model
        train_step = model._autoconvert_optionals(model.train_step)
        device = self._config.devices[index]

        @tf.autograph.experimental.do_not_convert
        def one_step(batch: Any) -> Any:
            with tf.device(device):
                return tf.distribute.get_strategy().run(train_step, (batch,))

        return one_step

    @contextlib.contextmanager
    def _alone(self, steps: Steps, index: int) -> Iterator[None]:
        """Let the model be that of one tower, on one device."""
        variables = state_lib.collect(self._model).everything()
        tower = tower_lib.Tower(
            index,
            total=self._config.num_towers if steps.fits else 1,
            device=tower_lib.short_name(self._config.devices[index]),
            training=True,
            update=self._update if steps.fits else self._update.unscaled(),
            written=steps.logs_of.written,
        )
        with (
            compat.single_device_mode(),
            variables_lib.viewed(variables, lambda v: v.values[index]),
            patches.shadowing(variables, update_lib.WRITES),
            tower_lib.activate(tower),
        ):
            yield

    def _run_here(self, steps: Steps, batch: Any) -> None:
        """Run a step in this thread: one of eager code, or a single one.

        Eager code cannot run in several threads; its towers take turns.
        """
        index = steps.here % self._config.num_towers if steps.fits else 0
        key = steps.fits, index
        if key not in self._here:
            function = self._one_step(index)
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
    """Wait for what a step has computed, and keep it on the host."""
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
