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
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_towers import compat
from keras_towers.fit import crew as crew_lib
from keras_towers.fit import session as session_lib
from keras_towers.fit import shared, staleness, step
from keras_towers.fit import state as state_lib
from keras_towers.fit import tower as tower_lib
from keras_towers.fit import variables as variables_lib

# Merging the metrics of all towers costs about as much as a small step.
SECONDS_BETWEEN_LOGS = 0.1


@dataclasses.dataclass
class _Steps:
    """What one call of ``fit`` or ``train_on_batch`` has under way.

    Attributes:
        crew: the towers' threads; None where steps run in this one.
        logs: those shown last.
        next_logs: when they are to be renewed.
        here: how many steps of the epoch ran in this thread.
    """

    crew: crew_lib.Crew | None = None
    logs: Any = None
    next_logs: float = 0.0
    here: int = 0

    def settle(self) -> None:
        """Wait for the steps that run."""
        if self.crew is not None:
            self.crew.drain()

    def close(self) -> None:
        """End the threads."""
        if self.crew is not None:
            self.crew.close()


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

    def begin(self, session: session_lib.Session) -> None:
        """Take part in a call of ``fit`` or of ``train_on_batch``."""
        session.steps = _Steps()
        if session.kind == "fit" and not self._model.run_eagerly:
            session.steps.crew = crew_lib.Crew(self._strategy.num_towers)

    def __call__(self, iterator: Iterable[Any]) -> Any:
        """Train on the next batches.

        Args:
            iterator: gives batches.

        Raises:
            StopIteration: there is none left, as Keras expects it.
            BaseException: what a step has raised on its tower.
        """
        session = session_lib.current()
        crew = session.steps.crew
        taken = 0
        batches = itertools.islice(iterator, self._model.steps_per_execution)
        for batch in batches:
            taken += 1
            if crew is None:
                self._run_here(session, batch)
            else:
                crew.hand_out(self._steps(iterator.element_spec), batch)
        if not taken:
            raise StopIteration
        if crew is not None:
            self._look(session)
        return session.steps.logs

    def end(self, session: session_lib.Session, logs: Any) -> Any:
        """End an epoch's steps; return its logs.

        Args:
            session: the call of ``fit``.
            logs: those of its last step.
        """
        steps = session.steps
        if steps.crew is None:
            seen = {0: steps.here} if steps.here else {}
            self._strategy.staleness = staleness.Staleness(seen)
            steps.here = 0
        else:
            steps.crew.drain()
            self._strategy.staleness = steps.crew.take_staleness()
            if steps.crew.latest is not None:
                self._refresh(session, steps.crew.latest)
            # In the next epoch metrics begin anew; until one of its steps has
            # ended, these logs are all that there is to show.
            steps.crew.latest = None
        return logs if steps.logs is None else steps.logs

    def _look(self, session: session_lib.Session) -> None:
        """Renew the logs, now and then."""
        crew = session.steps.crew
        if session.epoch_iterator.at_last_step:
            crew.drain()
            self._refresh(session, crew.latest)
            return
        if session.steps.logs is None:
            # Once: callbacks expect the names of all logs in the first step.
            crew.wait_for_a_step()
        if crew.latest is None:
            return
        due = time.monotonic() > session.steps.next_logs
        if due or not _is_finite(crew.latest):
            self._refresh(session, crew.latest)

    def _refresh(self, session: session_lib.Session, latest: Any) -> None:
        """Make logs of all towers from those that one step has returned."""
        session.steps.logs = latest
        if not isinstance(latest, Mapping):
            return
        if self._merge is None:
            names = dict.fromkeys(latest)

            def merge():
                return step.metric_results(self._strategy, session, names)

            self._merge = merge
            if not self._model.run_eagerly:
                function = tf.function(merge, autograph=False)
                self._merge = function.get_concrete_function()
        merged = _to_numpy(self._merge())
        session.steps.logs = {
            name: merged.get(name, value) for name, value in latest.items()
        }
        session.steps.next_logs = time.monotonic() + SECONDS_BETWEEN_LOGS

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
        fits = session_lib.current().kind == "fit"
        tower = shared.SharedTower(
            index,
            total=strategy.num_towers if fits else 1,
            device=tower_lib.short_name(
                strategy.extended.worker_devices[index]
            ),
            scale=strategy.gradient_scale if fits else 1.0,
            turns=self._turns,
            written=strategy.adoption.written(self._model, training=True),
        )
        with (
            compat.single_device_mode(),
            variables_lib.viewed(variables, lambda v: v.values[index]),
            shared.activate(tower),
        ):
            yield

    def _run_here(self, session: session_lib.Session, batch: Any) -> None:
        """Run a step in this thread: one of eager code, or a single one.

        Eager code cannot run in several threads; its towers take turns.
        """
        fits = session.kind == "fit"
        index = session.steps.here % self._strategy.num_towers if fits else 0
        key = session.kind, index
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
        session.steps.here += 1
        self._refresh(session, _to_numpy(latest))


def make_train_function(
    strategy: Any, session: session_lib.Session, force: bool
) -> None:
    """Give the session's model its train function for the towers."""
    model = session.model
    if not isinstance(model.train_function, AsyncTraining):
        model.train_function = AsyncTraining(strategy, model)
    elif force:
        model.train_function.forget()
        return
    model.train_function.begin(session)


def end_of_steps(session: session_lib.Session, logs: Any) -> Any:
    """End an epoch's steps; return its logs, exact where towers had steps."""
    function = session.model.train_function
    if session.kind == "fit" and isinstance(function, AsyncTraining):
        return function.end(session, logs)
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
