"""Training steps of towers that wait for nobody.

Keras's loop draws batches, calls callbacks and keeps the history as always;
only its train function is ours. That hands every batch to the next free tower
and returns before the step is done. Steps are traced here, in the thread of
``fit`` and one after the other, because Keras cannot trace in several threads;
the towers' threads call what was traced and never touch a Keras object.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_towers import compat
from keras_towers.fit import crew as crew_lib
from keras_towers.fit import shared, staleness, step
from keras_towers.fit import state as state_lib
from keras_towers.fit import tower as tower_lib
from keras_towers.fit import variables as variables_lib

# Merging the metrics of all towers costs about as much as a small step.
SECONDS_BETWEEN_LOGS = 0.1


class AsyncTraining:
    """The train function of a model on asynchronous towers.

    One call takes ``steps_per_execution`` batches, as Keras's own, and returns
    logs that may be a tenth of a second old; those of an epoch's last step and
    of the epoch itself are exact.

    Args:
        strategy: the strategy.
        model: the model.
    """

    def __init__(self, strategy: Any, model: keras.Model):
        self._strategy = strategy
        self._model = model
        self._traced: list[tuple[Any, list[Callable]]] = []
        self._turns: dict[int, tf.CriticalSection] = {}
        self.forget()

    def forget(self) -> None:
        """Trace anew: the model has changed."""
        self._traced.clear()
        self._here: dict[tuple[str, int], Callable] = {}
        self._merge: Callable | None = None

    def begin(self, session: step.Session) -> None:
        """Take part in a call of ``fit`` or of ``train_on_batch``."""
        self._session = session
        self._logs: Any = None
        self._next_logs = 0.0
        self._steps_here = 0
        if session.kind == "fit" and not self._model.run_eagerly:
            session.crew = crew_lib.Crew(self._strategy.num_towers)

    def __call__(self, iterator: Iterable[Any]) -> Any:
        """Train on the next batches.

        Args:
            iterator: gives batches.

        Raises:
            StopIteration: there is none left, as Keras expects it.
            BaseException: what a step has raised on its tower.
        """
        taken = 0
        batches = itertools.islice(iterator, self._model.steps_per_execution)
        for batch in batches:
            taken += 1
            if self._session.crew is None:
                self._run_here(batch)
            else:
                steps = self._steps(iterator.element_spec)
                self._session.crew.hand_out(steps, batch)
        if not taken:
            raise StopIteration
        if self._session.crew is not None:
            self._look(self._session.crew)
        return self._logs

    def end(self, logs: Any) -> Any:
        """End an epoch's steps; return its logs.

        Args:
            logs: those of its last step.
        """
        crew = self._session.crew
        if crew is None:
            seen = {0: self._steps_here} if self._steps_here else {}
            self._strategy.staleness = staleness.Staleness(seen)
            self._steps_here = 0
        else:
            crew.drain()
            self._strategy.staleness = crew.take_staleness()
            if crew.latest is not None:
                self._refresh(crew.latest)
            # In the next epoch metrics begin anew; until one of its steps has
            # ended, these logs are all that there is to show.
            crew.latest = None
        return logs if self._logs is None else self._logs

    def _look(self, crew: crew_lib.Crew) -> None:
        """Renew the logs, now and then."""
        if self._session.epoch_iterator.at_last_step:
            crew.drain()
            self._refresh(crew.latest)
            return
        if self._logs is None:
            # Once: callbacks expect the names of all logs in the first step.
            crew.wait_for_a_step()
        if crew.latest is None:
            return
        if time.monotonic() > self._next_logs or not _is_finite(crew.latest):
            self._refresh(crew.latest)

    def _refresh(self, latest: Any) -> None:
        """Make logs of all towers from those that one step has returned."""
        self._logs = latest
        if not isinstance(latest, Mapping):
            return
        if self._merge is None:
            names = dict.fromkeys(latest)

            def merge():
                return step.metric_results(self._strategy, self._model, names)

            self._merge = merge
            if not self._model.run_eagerly:
                function = tf.function(merge, autograph=False)
                self._merge = function.get_concrete_function()
        merged = _to_numpy(self._merge())
        self._logs = {
            name: merged.get(name, value) for name, value in latest.items()
        }
        self._next_logs = time.monotonic() + SECONDS_BETWEEN_LOGS

    def _steps(self, spec: Any) -> list[Callable]:
        """The towers' steps for such batches."""
        for known, steps in self._traced:
            if known is spec or known == spec:
                return steps
        self._traced.append((spec, self._trace(spec)))
        return self._traced[-1][1]

    def _trace(self, spec: Any) -> list[Callable]:
        def trace(index: int) -> Callable:
            function = tf.function(self._one_step(index), autograph=False)
            with self._alone(index):
                concrete = function.get_concrete_function(spec)
            return lambda batch: _to_numpy(concrete(batch))

        first = trace(0)
        # A step may make metrics of its own when it is first traced.
        while self._strategy.adoption.bind(self._model):
            first = trace(0)
        others = range(1, self._strategy.num_towers)
        return [first, *(trace(index) for index in others)]

    def _one_step(self, index: int) -> Callable[[Any], Any]:
        model = self._model
        train_step = model._autoconvert_optionals(model.train_step)
        device = self._strategy.extended.worker_devices[index]

        @tf.autograph.experimental.do_not_convert
        def one_step(batch):
            with tf.device(device):
                return tf.distribute.get_strategy().run(train_step, (batch,))

        return one_step

    @contextlib.contextmanager
    def _alone(self, index: int) -> Iterator[None]:
        """Let the model be that of one tower, on one device."""
        variables = state_lib.collect(self._model).everything()
        strategy = self._strategy
        fits = self._session.kind == "fit"
        tower = shared.SharedTower(
            index,
            total=strategy.num_towers if fits else 1,
            device=tower_lib.short_name(
                strategy.extended.worker_devices[index]
            ),
            scale=strategy.gradient_scale if fits else 1.0,
            turns=self._turns,
        )
        with (
            compat.single_device_mode(),
            variables_lib.viewed(variables, lambda v: v.values[index]),
            shared.activate(tower),
        ):
            yield

    def _run_here(self, batch: Any) -> None:
        """Run a step in this thread: one of eager code, or a single one.

        Eager code cannot run in several threads; its towers take turns.
        """
        fits = self._session.kind == "fit"
        index = self._steps_here % self._strategy.num_towers if fits else 0
        key = self._session.kind, index
        if key not in self._here:
            function = self._one_step(index)
            if not self._model.run_eagerly:
                function = tf.function(
                    function, autograph=False, reduce_retracing=True
                )
            self._here[key] = function
        with self._alone(index):
            latest = self._here[key](batch)
        self._strategy.adoption.bind(self._model)
        self._steps_here += 1
        self._refresh(_to_numpy(latest))


def make_train_function(
    strategy: Any, session: step.Session, force: bool
) -> None:
    """Give the session's model its train function for the towers."""
    model = session.model
    if not isinstance(model.train_function, AsyncTraining):
        model.train_function = AsyncTraining(strategy, model)
    elif force:
        model.train_function.forget()
        return
    model.train_function.begin(session)


def end_of_steps(session: step.Session, logs: Any) -> Any:
    """End an epoch's steps; return its logs, exact where towers had steps."""
    function = session.model.train_function
    if session.kind == "fit" and isinstance(function, AsyncTraining):
        return function.end(logs)
    return logs


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
