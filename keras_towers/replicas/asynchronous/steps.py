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
from keras_towers.fit.context import traced
from keras_towers.fit.contract import TowerConfig
from keras_towers.replicas.asynchronous.schedule import UpdateSchedule

Step = Callable[[Any], Any]


class TowerSteps:
    """The training step of a model, traced for each of its towers."""

    def __init__(
        self,
        config: TowerConfig,
        schedule: UpdateSchedule,
        model: keras.Model,
    ):
        self._config = config
        self.schedule = schedule
        self._model = model
        self._traced: list[tuple[Any, list[Step]]] = []
        self.forget()

    def forget(self) -> None:
        """Drop all traces, because the model has changed."""
        self._traced.clear()
        self._here: dict[tuple[bool, int], Step] = {}
        self.schedule.forget()

    def for_batches(self, spec: Any) -> list[Step]:
        """Return the towers' steps for batches of a spec, traced."""
        for known, steps in self._traced:
            if known is spec or known == spec:
                return steps
        towers = range(self._config.num_towers)
        steps = [self._trace(index, spec) for index in towers]
        self._traced.append((spec, steps))
        return steps

    def _trace(self, index: int, spec: Any) -> Step:
        step = self._step(index, lambda: self.schedule.step_of(index))
        function = tf.function(step, autograph=False)
        with self._on_tower(True, index):
            concrete = function.get_concrete_function(spec)
        return lambda batch: to_numpy(concrete(batch))

    def _step(
        self,
        index: int,
        around: Callable[[], contextlib.AbstractContextManager[None]],
    ) -> Step:
        """Return the step of a tower, without what ``_on_tower`` does."""
        model = self._model
        train_step = model._autoconvert_optionals(model.train_step)

        @tf.autograph.experimental.do_not_convert
        def step(batch: Any) -> Any:
            with tf.device(self._config.devices[index]), around():
                return tf.distribute.get_strategy().run(train_step, (batch,))

        return step

    @contextlib.contextmanager
    def _on_tower(self, fits: bool, index: int) -> Iterator[None]:
        """Run or trace a step of a tower in the block, as on one device."""
        update = self.schedule.taker(fits)
        tower = traced.Tracing(
            training=True,
            update=update,
            apply=update.apply,
            index=index,
            total=self._config.num_towers if fits else 1,
            device=traced.short_name(self._config.devices[index]),
        )
        with compat.single_device_mode(), traced.tracing(tower):
            yield

    def run_here(self, fits: bool, index: int, batch: Any) -> Any:
        """Run a step in this thread, for eager code and ``train_on_batch``."""
        # Eager steps cannot run in several threads, so their towers take turns.
        key = fits, index
        if key not in self._here:
            step = self._step(index, contextlib.nullcontext)
            if not self._model.run_eagerly:
                step = tf.function(step, autograph=False, reduce_retracing=True)
            self._here[key] = step
        with self._on_tower(fits, index):
            return to_numpy(self._here[key](batch))


def to_numpy(logs: Any) -> Any:
    """Wait for the results of a step and copy them to the host."""
    return tf.nest.map_structure(
        lambda leaf: leaf.numpy() if hasattr(leaf, "numpy") else leaf, logs
    )
