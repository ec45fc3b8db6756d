"""Steps of a model on one device, and on towers that share this device."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_towers import devices as devices_lib
from keras_towers import reduction
from keras_towers.fit.calls.synchronous import TowerCalls, check_splits
from keras_towers.fit.contract import (
    Extent,
    NamedGradients,
    UpdateCall,
)
from keras_towers.fit.step.global_batch import GlobalStep
from keras_towers.fit.step.logs import Logs
from keras_towers.fit.verify import layers as layers_lib
from keras_towers.fit.verify import runs, snapshot
from keras_towers.fit.verify.draws import Draws
from keras_towers.fit.verify.moments import Moments
from keras_towers.fit.verify.runs import Run
from keras_towers.fit.verify.tapes import Tapes
from keras_towers.fit.weights import state as state_lib
from keras_towers.strategies import options as strategy_options
from keras_towers.strategies.base import BaseStrategy
from keras_towers.verification import compare


@dataclasses.dataclass(frozen=True)
class Options:
    """The strategy to verify for, and what of it is made equal for a run.

    Attributes:
        towers: number of towers.
        average: as for ``TowerStrategy``.
        exact: as for ``TowerStrategy``.
        batch_norm: as for ``TowerStrategy``.
        random: as for ``TowerStrategy``.
        equal_batch_norm: give BatchNormalization one device's statistics.
        equal_draws: give towers the rows of one device's random draws.
    """

    towers: int = 2
    average: bool = True
    exact: bool = False
    batch_norm: Extent = "tower"
    random: Extent = "tower"
    equal_batch_norm: bool = True
    equal_draws: bool = True

    def replace(self, **changes: Any) -> Options:
        """Return other options."""
        return dataclasses.replace(self, **changes)


class SharedDeviceStrategy(BaseStrategy):
    """Towers that share one device and apply the gradients of one device.

    Args:
        options: the strategy to be like.
        whole: the gradients of one device, for each call of an optimizer.
    """

    def __init__(self, options: Options, whole: Sequence[NamedGradients] = ()):
        super().__init__(
            devices_lib.resolve(None)[:1] * options.towers,
            strategy_options.Options(
                mode="cpu",
                packer=False,
                average=options.average,
                exact=options.exact,
                batch_norm=None if options.exact else options.batch_norm,
                random=None if options.exact else options.random,
            ),
        )
        reduce = reduction.sum_on_host
        self._compared = runs.ComparedUpdate(self._config, reduce, whole=whole)
        self._calls = TowerCalls(self._compared)
        self._compose(self._compared, self._calls)

    @property
    def updates_made(self) -> list[NamedGradients]:
        """The sums of the towers' gradients, for each call of an optimizer."""
        return self._compared.calls

    def step_of(self, model: keras.Model) -> Callable[[Any], Any]:
        """Place a model; return its step on all towers, which gives logs."""
        check_splits(model, self._config)
        adoption = self._calls.adoption
        adoption.claim(model)
        adoption.bind(model)
        adoption.mark_trained()
        sources = adoption.log_sources(model, True)
        logs = Logs(model, True, self._config.transport, sources)
        step = runs.step_of(model)
        steps = GlobalStep(self._compared)
        return lambda batch: steps.run(step, batch, logs)


class Rehearsal:
    """Runs steps of a model, each from a state that is given.

    Args:
        model: a compiled model that is built, and all its optimizers.
        state: the values of its variables, by id.
        batch: what its step takes.
        rows: number of examples of the batch.
        options: the strategy to verify for.
    """

    def __init__(
        self,
        model: keras.Model,
        state: dict[int, Any],
        batch: Any,
        rows: int,
        options: Options,
    ):
        self.model = model
        self._state = state
        self._batch = batch
        self.rows = rows
        self.options = options
        self.moments: Moments = Moments(layers_lib.batch_norms(model))
        self.draws: Draws = Draws(rows, options.towers)
        self.whole: Run = self._whole(
            self.moments.installed("record"), self.draws.recorded(), Tapes()
        )

    @property
    def plain_variables(self) -> dict[str, tf.Variable]:
        """The ``tf.Variable``s of the model, by name."""
        return snapshot.plain_variables_of(self.model)

    def state_differences(self, whole: Run, other: Run) -> dict[str, float]:
        """Compare what two runs left in variables, by name.

        The state of metrics and random draws is not compared: it differs, and
        what they result in is.
        """
        state = state_lib.collect(self.model)
        skipped = {id(v) for v in (*state.seeds, *state.metrics)}
        named = {
            **{v.path: v for v in state.everything() if id(v) not in skipped},
            **self.plain_variables,
        }
        return {
            name: compare.values(
                self._state[id(v)], whole.state[id(v)], other.state[id(v)]
            )
            for name, v in named.items()
            if all(id(v) in s for s in (self._state, whole.state, other.state))
        }

    def again(self, tapes: Sequence[NamedGradients] = ()) -> Run:
        """Run on one device again, with other results of its tapes."""
        return self._whole(
            self.moments.installed("repeat"),
            self.draws.repeated(),
            Tapes(tapes),
        )

    def with_batch_norm(self) -> Run:
        """Run on one device again, with BatchNormalization as it is."""
        return self._whole(
            contextlib.nullcontext(), self.draws.repeated(), Tapes()
        )

    def nearby(self) -> Run:
        """Run on one device with other last bits in the trained weights."""
        state = self._state
        weights = self.model.trainable_variables
        self._state = {**state, **snapshot.other_last_bits(weights, state)}
        try:
            return self.again()
        finally:
            self._state = state

    def _whole(self, moments: Any, draws: Any, tapes: Tapes) -> Run:
        run = Run()

        def step() -> Any:
            found = runs.on_one_device(self.model, self._batch, UpdateCall.run)
            run.updates = found.updates
            return found.output

        self._run(
            run,
            moments,
            draws,
            tapes.recorded(),
            step,
        )
        run.tapes = tapes.sums()
        return run

    def on_towers(
        self,
        options: Options,
        tapes: Sequence[NamedGradients] = (),
        whole: Run | None = None,
    ) -> Run:
        """Run on towers.

        Args:
            options: of the strategy.
            tapes: what tapes of every tower return.
            whole: a run on one device, whose gradients are applied.
        """
        run, recorded = Run(), Tapes(tapes)
        updates = (whole or self.whole).updates
        strategy = SharedDeviceStrategy(options, updates)
        draws = self.draws
        if options.towers != self.options.towers:
            draws = draws.for_towers(options.towers)
        self._run(
            run,
            self.moments.installed(
                "repeat" if options.equal_batch_norm else "watch"
            ),
            draws.repeated() if options.equal_draws else draws.watched(),
            recorded.recorded(),
            strategy,
            lambda: strategy.step_of(self.model)(self._batch),
        )
        run.updates, run.tapes = strategy.updates_made, recorded.sums()
        return run

    def _run(self, run: Run, *parts: Any) -> None:
        """Run a step in contexts, the last of ``parts``, from the state."""
        *contexts, step = parts
        self._load()
        try:
            with snapshot.same_randomness(), contextlib.ExitStack() as stack:
                for context in contexts:
                    stack.enter_context(context)
                logs = step()
        except Exception as error:
            run.error = error
            return
        run.logs = numbers(logs)
        run.state = snapshot.values_of(snapshot.all_of(self.model))

    def _load(self) -> None:
        snapshot.load(snapshot.all_of(self.model), self._state)


def numbers(logs: Any) -> dict[str, Any]:
    """Return the logs of a step as arrays by name."""
    named = logs if isinstance(logs, dict) else {"loss": logs}
    found = {}
    for name, value in named.items():
        for index, leaf in enumerate(tf.nest.flatten(value)):
            array = np.asarray(leaf)
            if array.dtype.kind in "fiub":
                found[f"{name}/{index}" if index else str(name)] = array
    return found
