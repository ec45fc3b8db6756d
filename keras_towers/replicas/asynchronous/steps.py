"""Training steps of asynchronous towers, which queue batches for idle towers.

Keras cannot trace in several threads: steps are traced one by one in the thread
of ``fit``; the towers' threads call the traced functions only.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import keras
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
from keras_towers.replicas.asynchronous.schedule import UpdateSchedule

Step = Callable[[Any], Any]


class TowerSteps:
    """The training step of a model, traced for each of its towers."""

    def __init__(
        self,
        config: TowerConfig,
        adoption: Adoption,
        schedule: UpdateSchedule,
        model: keras.Model,
    ):
        self._config = config
        self._adoption = adoption
        self.schedule = schedule
        self._model = model
        self._traced: list[tuple[Any, list[Step]]] = []
        self.forget()

    def forget(self) -> None:
        """Drop all traces, because the model has changed."""
        self._traced.clear()
        self._here: dict[tuple[bool, int], Step] = {}
        self._merge: Callable[[], dict[int, Any]] | None = None
        self.schedule.forget()

    def for_batches(self, spec: Any, logs: Logs) -> list[Step]:
        """Return the towers' steps for batches of a spec, traced."""
        for known, traced in self._traced:
            if known is spec or known == spec:
                return traced
        self._traced.append((spec, self._trace(spec, logs)))
        return self._traced[-1][1]

    def _trace(self, spec: Any, logs: Logs) -> list[Step]:
        def trace(index: int) -> Step:
            ends = self.schedule.step_of
            function = tf.function(
                self._one_step(index, logs, lambda: ends(index)),
                autograph=False,
            )
            with self._alone(True, index):
                concrete = function.get_concrete_function(spec)
            return lambda batch: to_numpy(concrete(batch))

        first = trace(0)
        # The first trace of a step may create metrics.
        while self._adoption.bind(self._model):
            first = trace(0)
        return [first, *map(trace, range(1, self._config.num_towers))]

    def _one_step(
        self,
        index: int,
        logs: Logs,
        around: Callable[[], contextlib.AbstractContextManager[None]],
    ) -> Step:
        model = self._model
        train_step = model._autoconvert_optionals(model.train_step)
        device = self._config.devices[index]

        @tf.autograph.experimental.do_not_convert
        def one_step(batch: Any) -> Any:
            tower = tower_lib.current()
            assert tower is not None and tower.update is not None
            run = tf.distribute.get_strategy().run
            with tf.device(device), around():
                captured = capture(
                    lambda batch: run(train_step, (batch,)),
                    *(batch, tower, tower.update.apply),
                )
            logs.note(captured.output, captured.results)
            return captured.output

        return one_step

    @contextlib.contextmanager
    def _alone(self, fits: bool, index: int) -> Iterator[None]:
        """View the model as tower ``index`` does, on one device."""
        variables = state_lib.collect(self._model).everything()
        tower = tower_lib.Tower(
            index,
            total=self._config.num_towers if fits else 1,
            device=tower_lib.short_name(self._config.devices[index]),
            training=True,
            update=self.schedule.taker(fits),
        )
        with (
            compat.single_device_mode(),
            variables_lib.viewed(variables, lambda v: v.values[index]),
            replica_context.activate(tower),
        ):
            yield

    def run_here(self, fits: bool, index: int, batch: Any, logs: Logs) -> Any:
        """Run a step in this thread, for eager code and ``train_on_batch``."""
        # Eager steps cannot run in several threads, so their towers take turns.
        key = fits, index
        if key not in self._here:
            function = self._one_step(index, logs, contextlib.nullcontext)
            if not self._model.run_eagerly:
                function = tf.function(
                    function, autograph=False, reduce_retracing=True
                )
            self._here[key] = function
        with self._alone(fits, index):
            latest = self._here[key](batch)
        self._adoption.bind(self._model)
        return to_numpy(latest)

    def merged(self, latest: Any, logs: Logs) -> Any:
        """Compute the logs of all towers, given those of one step."""
        if self._merge is None:
            merge = logs.metric_results
            if not self._model.run_eagerly:
                function = tf.function(merge, autograph=False)
                merge = function.get_concrete_function()
            self._merge = merge
        merged = to_numpy(self._merge())
        return tf.nest.pack_sequence_as(
            latest,
            [
                merged.get(index, value)
                for index, value in enumerate(tf.nest.flatten(latest))
            ],
        )


def to_numpy(logs: Any) -> Any:
    """Wait for the results of a step and copy them to the host."""
    return tf.nest.map_structure(
        lambda leaf: leaf.numpy() if hasattr(leaf, "numpy") else leaf, logs
    )
