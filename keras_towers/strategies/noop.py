"""A strategy under which ``fit`` runs callbacks but no steps."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import tensorflow as tf

from keras_towers.fit.calls import keras_loop, model_building, tower_call
from keras_towers.fit.calls.tower_runner import TowerRunner, run_on_one_device
from keras_towers.fit.components import KerasCall
from keras_towers.fit.context import patches
from keras_towers.fit.data.epoch_iterator import Undistributed
from keras_towers.fit.update.weight_update import WeightUpdate
from keras_towers.foundation import compat
from keras_towers.foundation.errors import TowerError
from keras_towers.foundation.object_types import EpochIterator, Structure
from keras_towers.foundation.tf_strategy import Strategy
from keras_towers.strategies.base import BaseStrategy
from keras_towers.transport import devices as devices_lib

# Makes Keras's iterator over data that no towers divide.
_UNDIVIDED = functools.partial(compat.TFEpochIterator, Undistributed)


class NoOpStrategy(BaseStrategy):
    """Runs the epochs, steps and callbacks of ``fit`` without computing.

    Use it to test callbacks, schedules and scripts without waiting for a model.
    Only callbacks change weights and moving averages. ``fit`` needs no data
    (``fit(steps_per_epoch=100)``). If the length of the data is unknown,
    ``fit`` reads the data to find its end. A ``PyDataset`` does not declare its
    shapes, so Keras reads a batch or two of it. If the model is not built,
    ``fit`` builds it from its data.

    Validation inside ``fit`` also computes nothing, and runs its callbacks. If
    you call ``evaluate`` or ``predict``, for example from a callback, they
    compute as usual, on one device. In a custom training loop, the strategy has
    one tower.

    Ports tensorpack's ``NoOpTrainer``.

    Args:
        logs: the logs of every step, for callbacks that need a number.
            Validation reports them, too, as ``val_...``. None: empty logs.

    Attributes:
        logs: the logs of every step.

    Raises:
        TowerError: ``logs`` is not a dictionary; in ``fit``: neither data nor a
            number of steps is given, the data is empty, or the number of steps
            or the batch size is negative.

    Example:
        >>> with keras_towers.NoOpStrategy():
        ...     model.fit(epochs=3, steps_per_epoch=100, callbacks=[mine])
    """

    _mode_name = "noop"

    def __init__(self, *, logs: Mapping[str, float] | None = None):
        if logs is not None and not isinstance(logs, Mapping):
            raise TowerError(
                f"logs={logs!r} is not allowed: give a dictionary such as "
                '{"loss": 0.5}, or None.'
            )
        self.logs: dict[str, float] = dict(logs or {})
        super().__init__(devices_lib.devices_of(None)[:1])
        update = WeightUpdate(self._config)
        self._compose(update, NoOpRunner(update, self.logs))

    def __repr__(self) -> str:
        logs = ""
        if not self.logs:
            logs = ', and logs are empty: give logs={"loss": 0.5} for some'
        return (
            "NoOpStrategy: epochs, steps and callbacks run; training computes "
            f"nothing{logs}"
        )

    def _description_lines(self) -> list[str]:
        return []


class NoOpRunner(TowerRunner):
    """Runs Keras's methods, with empty steps for training and validation.

    Keras's own method runs epochs, counts steps and calls callbacks; only
    the step function is replaced, and the data unless it has to be read.
    """

    def __init__(self, update: WeightUpdate, logs: Mapping[str, float]):
        # The user may train the same model for real after this block.
        super().__init__(update, keeps=False)
        self._logs = logs

    @property
    def runs_plain_keras(self) -> bool:
        """False: its steps are not those of plain Keras."""
        return False

    def run_call(self, keras_call: KerasCall) -> Structure:
        """Run a call of a method of Keras."""
        model, arguments = keras_call.model, keras_call.arguments
        if "_maybe_symbolic_build" not in vars(model):
            # It is shadowed only during a fit, whose callbacks may call this.
            self.adoption.refuse_others(model)
            self.adoption.release_model(model)
        # Keras passes this argument where fit itself calls evaluate.
        in_fit = arguments.get("_use_cached_eval_dataset")
        if not keras_call.trains and not in_fit:
            # A callback may call it during fit: undo the shadows of that fit.
            names = ("_maybe_symbolic_build", "_get_metrics_result_or_logs")
            own = {n: getattr(type(model), n).__get__(model) for n in names}
            with patches.shadowed(model, {"_distribute_strategy": None, **own}):
                return run_on_one_device(keras_call)
        has_data = arguments.get("x") is not None
        strategy = self._config.strategy
        call = _NoOpCall(strategy, keras_call, self._logs, has_data)
        if keras_call.kind == "fit":
            call.check_steps()
        optimizer = getattr(model, "optimizer", None)
        ends = {"finalize_variable_values": lambda variables: None}
        if optimizer is None or not keras_call.trains:
            ends = {}
        with (
            keras_loop.iterators.holding(_UNDIVIDED),
            patches.shadowed(model, call.shadows()),
            patches.shadowed(optimizer, ends),
        ):
            return run_on_one_device(keras_call)


@dataclasses.dataclass(frozen=True, eq=False)
class _NoOpCall:
    """Replaces Keras's steps during one call."""

    strategy: Strategy
    keras_call: KerasCall
    logs: Mapping[str, float]
    has_data: bool

    def check_steps(self) -> None:
        """Check the number of steps of ``fit``; without data, add some."""
        arguments = self.keras_call.arguments
        for name in ("steps_per_epoch", "batch_size"):
            # Keras treats a negative number of steps as None.
            if (arguments.get(name) or 0) < 0:
                raise TowerError(
                    f"{name}={arguments[name]!r} is not allowed: give a whole "
                    "number, 1 or more, or None."
                )
        if not self.has_data:
            if not arguments.get("steps_per_epoch"):
                raise TowerError(
                    "fit got neither data nor a number of steps: give "
                    "steps_per_epoch, or data whose steps can be counted."
                )
            arguments["x"] = tf.data.Dataset.from_tensors(0).repeat()
            arguments["shuffle"] = False

    def shadows(self) -> dict[str, object]:
        """Return the model attributes to shadow, by name."""
        name = "train_function" if self.keras_call.trains else "test_function"
        return {
            # Makes fit's own call of evaluate use these steps, too.
            "_distribute_strategy": self.strategy,
            "_maybe_symbolic_build": self._begin,
            "_get_metrics_result_or_logs": self._report,
            name: self._steps,
            f"make_{name}": lambda *args, **kwargs: None,
        }

    def _begin(
        self,
        iterator: EpochIterator | None = None,
        data_batch: Structure = None,
    ) -> None:
        kind, model = self.keras_call.kind, self.keras_call.model
        if iterator is not None:
            data_batch = iterator._distributed_dataset.element_spec
            batches = iterator.data_adapter.num_batches
            if batches == 0 and self.keras_call.trains:
                tower_call.refuse_empty(kind, model)
            # Keras treats a negative number of steps as None.
            if batches is not None or (iterator.steps_per_epoch or 0) > 0:
                _count_only(iterator, batches)
        # Callbacks may read the weights and slots.
        trains = self.keras_call.trains and self.has_data
        if trains:
            model_building.make_variables(model, kind, data_batch)

    def _report(self, _: object = None) -> dict[str, float]:
        return dict(self.logs)

    def _steps(self, iterator: Iterator[Structure]) -> dict[str, float]:
        number = self.keras_call.model.steps_per_execution
        if not sum(1 for _ in itertools.islice(iterator, number)):
            raise StopIteration
        return self._report()


def _count_only(iterator: EpochIterator, batches: int | None) -> None:
    """Let an epoch iterator of Keras count steps without reading data."""
    repeats = () if batches is None else (batches,)
    iterator._get_iterator = lambda: itertools.repeat(None, *repeats)
    # The original adapter would start to prefetch when an epoch begins.
    adapter: Any = SimpleNamespace(
        num_batches=batches,
        on_epoch_begin=lambda: None,
        on_epoch_end=lambda: None,
    )
    iterator.data_adapter = adapter
