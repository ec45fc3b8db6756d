"""A strategy under which ``fit`` runs its callbacks and no step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras

from keras_towers import devices as devices_lib
from keras_towers.errors import TowerError
from keras_towers.fit import nothing
from keras_towers.strategies.tower import TowerStrategy


class NoOpStrategy(TowerStrategy):
    """Runs the epochs, steps and callbacks of ``fit``, and computes nothing.

    To try out callbacks, schedules and scripts without waiting for a model.
    Weights, also moving averages, stay as they are; callbacks may change what
    they like. No data is needed (``fit(steps_per_epoch=100)``), and none is
    read but to find the end of data that does not tell its number of batches.
    A model that is not built gets the weights that its data call for; where
    data does not tell its shapes (a ``PyDataset``), two batches are read.

    Validation inside ``fit`` does nothing either, and calls its callbacks. What
    a callback, or anyone else, asks for by ``evaluate`` or ``predict`` is
    computed as ever, on one device. In a custom loop the strategy is one tower.

    It carries over tensorpack's ``NoOpTrainer``.

    Args:
        logs: what every step reports, for callbacks that need a number;
            validation reports it too, as ``val_...``. None: nothing was
            computed, so there is nothing to report.

    Attributes:
        logs: what every step reports.

    Raises:
        TowerError: ``logs`` that are no dictionary; in ``fit``, neither data
            nor a number of steps, empty data, or a negative number of steps or
            batch size.

    Example:
        >>> with keras_towers.NoOpStrategy():
        ...     model.fit(epochs=3, steps_per_epoch=100, callbacks=[mine])
    """

    epoch_iterator = nothing.Steps

    def __init__(self, logs: Mapping[str, float] | None = None):
        if logs is not None and not isinstance(logs, Mapping):
            raise TowerError(
                f"logs={logs!r} is not allowed: give a dictionary such as "
                '{"loss": 0.5}, or None.'
            )
        super().__init__(towers=devices_lib.resolve(None)[:1])
        self.logs = dict(logs or {})

    def describe(self) -> str:
        """Say that nothing is computed.

        Example:
            >>> print(NoOpStrategy().describe())
            NoOpStrategy: epochs, steps and callbacks run; nothing is computed
        """
        return (
            "NoOpStrategy: epochs, steps and callbacks run; nothing is computed"
        )

    def call(self, kind: str, original: Any, model: keras.Model, *given: Any):
        """Call a method of Keras without its steps."""
        return nothing.call(self, self.logs, kind, original, model, *given)
